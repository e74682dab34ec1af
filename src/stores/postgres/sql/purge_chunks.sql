-- Chunks that can never be part of an answer (no record has their token) among the next ones behind ($1 key, $2 token, $3
-- number), at most $4. Answers how many are gone, how many were looked at, and the last of them.
WITH page AS MATERIALIZED (
    SELECT k, token, n FROM @schema@.semel_chunks
    WHERE (k, token, n) > ($1::bytea, $2::bigint, $3::bigint)
    ORDER BY k, token, n
    LIMIT $4::bigint
), gone AS (
    DELETE FROM @schema@.semel_chunks AS c USING page
    WHERE c.k = page.k AND c.token = page.token AND c.n = page.n
        AND NOT EXISTS (SELECT FROM @schema@.semel_records AS r WHERE r.k = page.k AND r.token = page.token)
    RETURNING 1
)
SELECT (SELECT count(*) FROM gone), (SELECT count(*) FROM page), last.k, last.token, last.n
FROM (SELECT 1) AS always
LEFT JOIN (SELECT k, token, n FROM page ORDER BY k DESC, token DESC, n DESC LIMIT 1) AS last ON true
