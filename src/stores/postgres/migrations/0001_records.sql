-- Times are microseconds since 1970 by the server's clock. What the columns mean: docs/internals/sql-layout.md.
CREATE TABLE @schema@.semel_records (
    k bytea PRIMARY KEY,
    version bigint NOT NULL,
    status smallint NOT NULL,
    token bigint NOT NULL,
    nonce bytea NOT NULL,
    created bigint NOT NULL,
    lease_end bigint NOT NULL,
    completed bigint NOT NULL,
    expires bigint NOT NULL,
    keep_ms bigint NOT NULL,
    head bytea NOT NULL,
    done bytea,
    body bytea
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05);

-- Answers are often sealed or compressed already, and are read whole.
ALTER TABLE @schema@.semel_records
    ALTER COLUMN head SET STORAGE EXTERNAL, ALTER COLUMN done SET STORAGE EXTERNAL, ALTER COLUMN body SET STORAGE EXTERNAL;

-- Undecided records, dead leases first; expires is 0 exactly while a record is undecided.
CREATE INDEX semel_records_undecided ON @schema@.semel_records (lease_end) WHERE expires = 0;

CREATE INDEX semel_records_expires ON @schema@.semel_records (expires) WHERE expires > 0;

CREATE TABLE @schema@.semel_chunks (
    k bytea NOT NULL,
    token bigint NOT NULL,
    n bigint NOT NULL,
    bytes bytea NOT NULL,
    at bigint NOT NULL,
    PRIMARY KEY (k, token, n)
);

ALTER TABLE @schema@.semel_chunks ALTER COLUMN bytes SET STORAGE EXTERNAL;

CREATE TABLE @schema@.semel_conversations (
    k bytea PRIMARY KEY,
    created bigint NOT NULL,
    last_used bigint NOT NULL,
    turns bigint NOT NULL
);

CREATE INDEX semel_conversations_last_used ON @schema@.semel_conversations (last_used);

CREATE TABLE @schema@.semel_turns (
    k bytea NOT NULL,
    number bigint NOT NULL,
    request_id bytea NOT NULL,
    user_content bytea NOT NULL,
    answer_content bytea NOT NULL,
    at bigint NOT NULL,
    late boolean NOT NULL,
    PRIMARY KEY (k, number),
    UNIQUE (k, request_id)
);

CREATE TABLE @schema@.semel_values (
    name bytea PRIMARY KEY,
    value bytea NOT NULL
);
