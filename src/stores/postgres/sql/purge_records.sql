-- $1 the time in us or NULL, $2 limit. What others hold is left for the next time.
WITH gone AS (
    DELETE FROM @schema@.semel_records
    WHERE k = ANY (ARRAY(SELECT k FROM @schema@.semel_records
                         WHERE expires > 0 AND expires <= @now@
                         ORDER BY expires
                         LIMIT $2::bigint
                         FOR UPDATE SKIP LOCKED))
    RETURNING k
), parts AS (
    DELETE FROM @schema@.semel_chunks AS c USING gone WHERE c.k = gone.k RETURNING 1
)
SELECT (SELECT count(*) FROM gone), (SELECT count(*) FROM parts)
