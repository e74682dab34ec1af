-- $1 name.
SELECT value FROM @schema@.semel_values WHERE name = $1::bytea
