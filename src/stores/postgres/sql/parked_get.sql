-- $1 list, $2 the first place, $3 limit.
SELECT place, bytes
FROM @schema@.semel_parked
WHERE k = $1::bytea AND place >= $2::bigint
ORDER BY place
LIMIT $3::bigint
