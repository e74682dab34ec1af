-- Holds a conversation until this transaction's end, if this transaction has written the record $3: the next statement then
-- sees every turn of it. $1 the time in us or NULL, $2 the conversation.
INSERT INTO @schema@.semel_conversations AS c (k, created, last_used, turns)
SELECT $2::bytea, clock.us, clock.us, 0
FROM (SELECT @now@ AS us) AS clock
WHERE EXISTS (SELECT FROM @schema@.semel_records AS r
              WHERE r.k = $3::bytea AND r.xmin = pg_current_xact_id_if_assigned()::xid)
ON CONFLICT (k) DO UPDATE SET turns = c.turns
