-- Arrays: $1 lists, $2 fences, $3 places, $4 bytes. Answers those that were parked. Who takes a list over waits until this is
-- committed; whoever waited for a take-over sees its fence.
WITH held AS MATERIALIZED (
    SELECT k, fence FROM @schema@.semel_parking WHERE k = ANY ($1::bytea[]) ORDER BY k FOR SHARE
)
INSERT INTO @schema@.semel_parked (k, place, bytes)
SELECT given.k, given.place, given.bytes
FROM unnest($1::bytea[], $2::bytea[], $3::bigint[], $4::bytea[]) AS given (k, fence, place, bytes)
JOIN held ON held.k = given.k AND held.fence = given.fence
ON CONFLICT (k, place) DO UPDATE SET bytes = excluded.bytes
RETURNING k, place
