-- complete.sql for one row. $1 the time in us or NULL, $2 key, $3 token, $4 nonce, $5 done, $6 body.
UPDATE @schema@.semel_records AS r
SET version = r.version + 1, status = 2, completed = @now@, expires = @now@ + r.keep_ms * 1000,
    done = $5::bytea, body = $6::bytea
WHERE r.k = $2::bytea AND r.token = $3::bigint AND r.nonce = $4::bytea AND r.status = 1
RETURNING r.k, r.version, r.created, r.lease_end, r.completed, r.expires, r.keep_ms, r.head
