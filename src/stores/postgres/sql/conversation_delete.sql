-- $1 key. Its turns follow in the same transaction: who appends holds this row.
DELETE FROM @schema@.semel_conversations WHERE k = $1::bytea
