-- The next values reach the disk before they are told, whatever the server's default is.
SELECT set_config('synchronous_commit', CASE current_setting('synchronous_commit') WHEN 'off' THEN 'local'
    ELSE current_setting('synchronous_commit') END, true)
