-- $1 name, $2 value.
INSERT INTO @schema@.semel_values (name, value) VALUES ($1::bytea, $2::bytea)
ON CONFLICT (name) DO UPDATE SET value = excluded.value
