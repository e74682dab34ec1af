-- $1 key.
DELETE FROM @schema@.semel_turns WHERE k = $1::bytea
