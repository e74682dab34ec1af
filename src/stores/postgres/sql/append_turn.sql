-- Appends a turn to the conversation that append_lock holds, under the same condition, unless it has one of this id.
-- $1 the time in us or NULL, $2 the conversation, $3 the record, $4 request id, $5 user's content, $6 answer, $7 late.
WITH added AS (
    INSERT INTO @schema@.semel_turns (k, number, request_id, user_content, answer_content, at, late)
    SELECT c.k, c.turns + 1, $4::bytea, $5::bytea, $6::bytea, @now@, $7::boolean
    FROM @schema@.semel_conversations AS c
    WHERE c.k = $2::bytea AND EXISTS (SELECT FROM @schema@.semel_records AS r
                                      WHERE r.k = $3::bytea AND r.xmin = pg_current_xact_id_if_assigned()::xid)
    ON CONFLICT (k, request_id) DO NOTHING
    RETURNING k, at
)
UPDATE @schema@.semel_conversations AS c
SET turns = c.turns + 1, last_used = added.at
FROM added
WHERE c.k = added.k
