-- $1 the time in us or NULL, $2 limit, $3 how long an idle one is kept, in us.
WITH gone AS (
    DELETE FROM @schema@.semel_conversations
    WHERE k = ANY (ARRAY(SELECT k FROM @schema@.semel_conversations
                         WHERE last_used <= @now@ - $3::bigint
                         ORDER BY last_used
                         LIMIT $2::bigint
                         FOR UPDATE SKIP LOCKED))
    RETURNING k
), turns AS (
    DELETE FROM @schema@.semel_turns AS t USING gone WHERE t.k = gone.k
)
SELECT count(*) FROM gone
