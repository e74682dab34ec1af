-- $1 the time in us or NULL, $2 key, $3 token, $4 number, $5 bytes. A chunk that is there stays.
INSERT INTO @schema@.semel_chunks (k, token, n, bytes, at)
VALUES ($2::bytea, $3::bigint, $4::bigint, $5::bytea, @now@)
ON CONFLICT (k, token, n) DO NOTHING
