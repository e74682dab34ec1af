-- $1 the time in us or NULL, $2 the cursor, $3 a status or 0, $4 limit, $5 whether only dead leases are wanted.
-- The undecided are few: found by their own index first, whatever the planner thinks of the keys' order.
WITH undecided AS MATERIALIZED (
    SELECT k FROM @schema@.semel_records
    WHERE expires = 0 AND lease_end <= CASE WHEN $5::boolean THEN @now@ ELSE 9223372036854775807 END
        AND (status = 1 OR NOT $5::boolean) AND ($3::bigint = 0 OR status = $3::bigint)
)
SELECT r.k, r.version, r.status, r.token, r.nonce, r.created, r.lease_end, r.completed, r.expires, r.keep_ms, r.head, r.done
FROM (SELECT k FROM undecided WHERE k > $2::bytea ORDER BY k LIMIT $4::bigint) AS page
JOIN @schema@.semel_records AS r ON r.k = page.k
ORDER BY r.k
