-- The inbox's tables, version 2; what tables of version 1 lack is added by schema.cpp. A statement ends with a semicolon at the end of a line; what stands between two @ is a name.
CREATE TABLE IF NOT EXISTS @schema@ (
    version INT NOT NULL PRIMARY KEY,
    applied_at DATETIME(6) NOT NULL
) ENGINE=InnoDB;
CREATE TABLE IF NOT EXISTS @assignments@ (
    scope VARBINARY(255) NOT NULL,
    topic VARBINARY(255) NOT NULL,
    `partition` INT NOT NULL,
    epoch BIGINT NOT NULL,
    owner VARBINARY(255) NOT NULL,
    assigned_at DATETIME(6) NOT NULL,
    PRIMARY KEY (scope, topic, `partition`)
) ENGINE=InnoDB;
CREATE TABLE IF NOT EXISTS @offsets@ (
    scope VARBINARY(255) NOT NULL,
    topic VARBINARY(255) NOT NULL,
    `partition` INT NOT NULL,
    next_offset BIGINT,
    topic_id VARBINARY(255),
    updated_at DATETIME(6) NOT NULL,
    PRIMARY KEY (scope, topic, `partition`)
) ENGINE=InnoDB;
-- What a connection of a process runs in the process's own code at the moment: the key_hashes, one behind the other.
CREATE TABLE IF NOT EXISTS @flights@ (
    scope VARBINARY(255) NOT NULL,
    process BINARY(8) NOT NULL,
    connection INT NOT NULL,
    topic VARBINARY(255) NOT NULL,
    `partition` INT NOT NULL,
    epoch BIGINT NOT NULL,
    alone TINYINT NOT NULL,
    members MEDIUMBLOB NOT NULL,
    updated_at DATETIME(6) NOT NULL,
    PRIMARY KEY (scope, process, connection)
) ENGINE=InnoDB;
-- Messages that a dead process left in flight, and which have not ended since.
CREATE TABLE IF NOT EXISTS @crashes@ (
    scope VARBINARY(255) NOT NULL,
    key_hash BINARY(32) NOT NULL,
    topic VARBINARY(255) NOT NULL,
    `partition` INT NOT NULL,
    deaths INT NOT NULL,
    lone_deaths INT NOT NULL,
    updated_at DATETIME(6) NOT NULL,
    PRIMARY KEY (scope, key_hash)
) ENGINE=InnoDB;
-- key_hash is what makes a message one: its columns beside are for people. It is the primary key because a duplicate in a unique
-- secondary index locks the gap before it.
CREATE TABLE IF NOT EXISTS @dedup@ (
    key_hash BINARY(32) NOT NULL PRIMARY KEY,
    id BIGINT NOT NULL AUTO_INCREMENT UNIQUE,
    scope VARCHAR(1020) NOT NULL,
    source VARCHAR(1020) NOT NULL,
    message_id VARCHAR(4096) NOT NULL,
    business_key VARCHAR(255),
    status TINYINT NOT NULL,
    retry_count INT NOT NULL,
    error_message VARCHAR(1000),
    created_at DATETIME(6) NOT NULL,
    updated_at DATETIME(6) NOT NULL,
    expire_at DATETIME(6),
    lease_until DATETIME(6),
    token BIGINT NOT NULL,
    nonce BINARY(16) NOT NULL,
    fingerprint BINARY(32),
    version BIGINT NOT NULL,
    record MEDIUMBLOB,
    KEY expire_at (expire_at)
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
