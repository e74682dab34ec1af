-- Writes decisions back where the row is still the one that was decided about, and it is not too late for them.
-- $1 the time in us or NULL; arrays: $2 keys, $3 versions seen, $4 not_after, then the row: $5 status, $6 token, $7 nonce,
-- $8 created, $9 lease_end, $10 completed, $11 expires, $12 keep_ms, $13 head, $14 done, $15 body.
UPDATE @schema@.semel_records AS r
SET version = given.seen + 1, status = given.status, token = given.token, nonce = given.nonce, created = given.created,
    lease_end = given.lease_end, completed = given.completed, expires = given.expires, keep_ms = given.keep_ms,
    head = given.head, done = given.done, body = given.body
FROM unnest($2::bytea[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bytea[], $8::bigint[], $9::bigint[],
        $10::bigint[], $11::bigint[], $12::bigint[], $13::bytea[], $14::bytea[], $15::bytea[])
    AS given (k, seen, not_after, status, token, nonce, created, lease_end, completed, expires, keep_ms, head, done, body)
WHERE r.k = given.k AND r.version = given.seen
    -- Not now(): the row may have been waited for.
    AND coalesce($1::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) <= given.not_after
RETURNING r.k
