-- $1 key, $2 after, $3 limit.
SELECT number, request_id, user_content, answer_content, at, late
FROM @schema@.semel_turns
WHERE k = $1::bytea AND number > $2::bigint
ORDER BY number
LIMIT $3::bigint
