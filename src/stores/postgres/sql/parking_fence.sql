-- $1 list.
SELECT fence FROM @schema@.semel_parking WHERE k = $1::bytea
