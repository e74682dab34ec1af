-- Lists of messages that consumers have parked. What the columns mean: docs/internals/sql-layout.md.
CREATE TABLE @schema@.semel_parking (
    k bytea PRIMARY KEY,
    fence bytea NOT NULL
);

-- Filled and emptied again all the time.
CREATE TABLE @schema@.semel_parked (
    k bytea NOT NULL,
    place bigint NOT NULL,
    bytes bytea NOT NULL,
    PRIMARY KEY (k, place)
) WITH (autovacuum_vacuum_scale_factor = 0.05);
