-- $1 list, $2 the fence that was seen in it or NULL, $3 the new owner's. No row: it is another's by now.
INSERT INTO @schema@.semel_parking AS p (k, fence) VALUES ($1::bytea, $3::bytea)
ON CONFLICT (k) DO UPDATE SET fence = excluded.fence WHERE p.fence = $2::bytea
RETURNING true
