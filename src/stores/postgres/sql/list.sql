-- $1 the time in us or NULL, $2 the cursor, $3 a status or 0, $4 limit. By key; what has expired is absent.
SELECT k, version, status, token, nonce, created, lease_end, completed, expires, keep_ms, head, done
FROM @schema@.semel_records
WHERE k > $2::bytea AND (expires = 0 OR expires > @now@) AND ($3::bigint = 0 OR status = $3::bigint)
ORDER BY k
LIMIT $4::bigint
