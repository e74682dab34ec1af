-- $1 key, $2 token, $3 number.
SELECT bytes FROM @schema@.semel_chunks WHERE k = $1::bytea AND token = $2::bigint AND n = $3::bigint
