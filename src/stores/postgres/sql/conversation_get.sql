-- $1 key, $2 a request id or ''.
SELECT c.created, c.last_used, c.turns,
    EXISTS (SELECT FROM @schema@.semel_turns AS t WHERE t.k = c.k AND t.request_id = $2::bytea AND $2::bytea <> ''::bytea)
FROM @schema@.semel_conversations AS c
WHERE c.k = $1::bytea
