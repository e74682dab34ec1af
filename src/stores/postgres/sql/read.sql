-- $1 the time in us or NULL, $2 keys, $3 whether bodies are wanted. One row for each key, absent or not.
-- now() is the time of the statement's begin: not after its snapshot.
SELECT given.n, @now@, r.version, r.status, r.token, r.nonce, r.created, r.lease_end, r.completed, r.expires, r.keep_ms,
    r.head, r.done, CASE WHEN $3::boolean THEN r.body END
FROM unnest($2::bytea[]) WITH ORDINALITY AS given (k, n)
LEFT JOIN @schema@.semel_records AS r ON r.k = given.k
