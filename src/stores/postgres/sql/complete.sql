-- Completes records under their own token and nonce: a port of core::decide for Complete, first time.
-- $1 the time in us or NULL; arrays: $2 keys, $3 tokens, $4 nonces, $5 done, $6 bodies.
UPDATE @schema@.semel_records AS r
SET version = r.version + 1, status = 2, completed = clock.us, expires = clock.us + r.keep_ms * 1000,
    done = given.done, body = given.body
FROM (SELECT @now@ AS us) AS clock,
    unnest($2::bytea[], $3::bigint[], $4::bytea[], $5::bytea[], $6::bytea[]) AS given (k, token, nonce, done, body)
WHERE r.k = given.k AND r.token = given.token AND r.nonce = given.nonce AND r.status = 1
RETURNING r.k, r.version, r.created, r.lease_end, r.completed, r.expires, r.keep_ms, r.head
