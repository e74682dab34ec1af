-- insert.sql for one row, which without arrays costs less. It does not give the row that was there.
-- $1 the time in us or NULL, $2 key, $3 nonce, $4 lease in us, $5 keep_ms, $6 not_after, $7 head.
INSERT INTO @schema@.semel_records
    (k, version, status, token, nonce, created, lease_end, completed, expires, keep_ms, head)
SELECT $2::bytea, @now@, 1, @now@, $3::bytea, @now@, @now@ + $4::bigint, 0, 0, $5::bigint, $7::bytea
WHERE @now@ <= $6::bigint
ON CONFLICT (k) DO NOTHING
RETURNING created
