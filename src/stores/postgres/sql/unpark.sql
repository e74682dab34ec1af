-- Arrays: $1 lists, $2 places.
DELETE FROM @schema@.semel_parked AS p
USING unnest($1::bytea[], $2::bigint[]) AS given (k, place)
WHERE p.k = given.k AND p.place = given.place
