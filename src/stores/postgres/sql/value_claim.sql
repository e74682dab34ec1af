-- $1 name, $2 the value if there is none.
INSERT INTO @schema@.semel_values (name, value) VALUES ($1::bytea, $2::bytea) ON CONFLICT (name) DO NOTHING
