-- Keys, nonces and ids are bytes: no character set, so that nothing folds case, accents or trailing spaces.
-- Times are microseconds since 1970 by this server's clock. Layout: docs/internals/sql-layout.md.
-- A statement that fails half-way is repeated: DDL commits by itself.

CREATE TABLE IF NOT EXISTS semel_records (
    k         BINARY(32)       NOT NULL,
    version   BIGINT           NOT NULL,
    status    TINYINT UNSIGNED NOT NULL,
    token     BIGINT           NOT NULL,
    nonce     BINARY(16)       NOT NULL,
    created   BIGINT           NOT NULL,
    lease_end BIGINT           NOT NULL,
    completed BIGINT           NOT NULL,
    expires   BIGINT           NOT NULL,
    keep_ms   BIGINT           NOT NULL,
    head      LONGBLOB         NOT NULL,
    done      LONGBLOB         NULL,
    body      LONGBLOB         NULL,
    PRIMARY KEY (k),
    KEY by_end (expires, lease_end)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARSET=ascii COLLATE=ascii_bin;

CREATE TABLE IF NOT EXISTS semel_chunks (
    k     BINARY(32)   NOT NULL,
    token BIGINT       NOT NULL,
    n     INT UNSIGNED NOT NULL,
    bytes LONGBLOB     NOT NULL,
    at    BIGINT       NOT NULL,
    PRIMARY KEY (k, token, n)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARSET=ascii COLLATE=ascii_bin;

CREATE TABLE IF NOT EXISTS semel_conversations (
    k         BINARY(32) NOT NULL,
    created   BIGINT     NOT NULL,
    last_used BIGINT     NOT NULL,
    turns     BIGINT     NOT NULL,
    PRIMARY KEY (k),
    KEY by_use (last_used)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARSET=ascii COLLATE=ascii_bin;

CREATE TABLE IF NOT EXISTS semel_turns (
    k              BINARY(32)      NOT NULL,
    number         BIGINT          NOT NULL,
    request_id     VARBINARY(1024) NOT NULL,
    user_content   LONGBLOB        NOT NULL,
    answer_content LONGBLOB        NOT NULL,
    at             BIGINT          NOT NULL,
    late           TINYINT         NOT NULL,
    PRIMARY KEY (k, number),
    UNIQUE KEY by_request (k, request_id)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARSET=ascii COLLATE=ascii_bin;

CREATE TABLE IF NOT EXISTS semel_values (
    name  VARBINARY(255) NOT NULL,
    value LONGBLOB       NOT NULL,
    PRIMARY KEY (name)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARSET=ascii COLLATE=ascii_bin;
