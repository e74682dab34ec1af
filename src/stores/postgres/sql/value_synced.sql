-- What follows reaches the disk before it is told, whatever the server's default is.
SELECT set_config('synchronous_commit', CASE current_setting('synchronous_commit') WHEN 'off' THEN 'local'
    ELSE current_setting('synchronous_commit') END, true)
