-- The row that kept insert_one.sql from inserting: nothing if it did insert. $1 the time in us or NULL, $2 key.
SELECT @now@, r.version, r.status, r.token, r.nonce, r.created, r.lease_end, r.completed, r.expires, r.keep_ms,
    r.head, r.done, r.body
FROM @schema@.semel_records AS r
WHERE r.k = $2::bytea AND r.xmin IS DISTINCT FROM pg_current_xact_id_if_assigned()::xid
