-- $1 the time in us or NULL.
SELECT @now@
