-- Lists of messages that consumers have parked. Layout: docs/internals/sql-layout.md.

CREATE TABLE IF NOT EXISTS semel_parking (
    k     BINARY(32) NOT NULL,
    fence BINARY(16) NOT NULL,
    PRIMARY KEY (k)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARSET=ascii COLLATE=ascii_bin;

CREATE TABLE IF NOT EXISTS semel_parked (
    k     BINARY(32) NOT NULL,
    place BIGINT     NOT NULL,
    bytes LONGBLOB   NOT NULL,
    PRIMARY KEY (k, place)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARSET=ascii COLLATE=ascii_bin;
