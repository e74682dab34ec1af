-- A first grant where the key is free, else the row that is there: a port of what core::decide does with an absent record.
-- $1 the time in us or NULL; arrays: $2 keys, $3 nonces, $4 leases in us, $5 keep_ms, $6 not_after, $7 heads.
-- A row that another inserted after this statement's snapshot is in neither half: neither inserted nor seen.
-- The version begins with the time: a row that is removed and made anew never has one that somebody saw before.
WITH inserted AS (
    INSERT INTO @schema@.semel_records
        (k, version, status, token, nonce, created, lease_end, completed, expires, keep_ms, head)
    SELECT given.k, clock.us, 1, clock.us, given.nonce, clock.us, clock.us + given.lease, 0, 0, given.keep_ms, given.head
    FROM (SELECT @now@ AS us) AS clock,
        unnest($2::bytea[], $3::bytea[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bytea[])
            AS given (k, nonce, lease, keep_ms, not_after, head)
    WHERE clock.us <= given.not_after
    ON CONFLICT (k) DO NOTHING
    RETURNING k, created
)
SELECT k, @now@, true, NULL::bigint, NULL::smallint, NULL::bigint, NULL::bytea, created, NULL::bigint, NULL::bigint,
    NULL::bigint, NULL::bigint, NULL::bytea, NULL::bytea, NULL::bytea
FROM inserted
UNION ALL
SELECT there.k, @now@, false, there.version, there.status, there.token, there.nonce, there.created, there.lease_end,
    there.completed, there.expires, there.keep_ms, there.head, there.done, there.body
FROM unnest($2::bytea[]) AS given (k)
JOIN @schema@.semel_records AS there ON there.k = given.k
