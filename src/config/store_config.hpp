// Where records are kept, as values: `store` of the configuration, or of one consumer.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace semel::config {

using std::chrono::milliseconds;

enum class StoreKind { memory, rocksdb, redis, postgres, mysql };
enum class StoreDurability { sync, async };
/// Of store.redis; its user, passwords and URL enter no message.
struct RedisConfig {
    std::string url;
    std::string shown_url;  ///< Without user and password, for messages and logs.
    bool cluster = false;
    unsigned wait_replicas = 0;
    milliseconds wait_timeout{500};
    std::string ca_file;
    std::string sentinel_user;
    std::string sentinel_password;
    bool accept_eviction = false;
    std::string prefix = "semel";
    friend bool operator==(const RedisConfig&, const RedisConfig&) = default;
};
/// Of store.postgres; its user, password and URL enter no message.
struct PostgresConfig {
    std::string url;
    std::string
        shown_url;  ///< Hosts, database and what is harmless of the rest; for messages and logs.
    std::string schema;  ///< Empty: the store's default.
    unsigned connections = 4;
    bool migrate = true;  ///< Make or update the tables at the start.
    friend bool operator==(const PostgresConfig&, const PostgresConfig&) = default;
};
/// Of store.mysql; the same.
struct MysqlConfig {
    std::string url;
    std::string shown_url;
    unsigned connections = 4;
    bool migrate = true;
    friend bool operator==(const MysqlConfig&, const MysqlConfig&) = default;
};
struct StoreConfig {
    StoreKind kind = StoreKind::rocksdb;
    std::string path = "./semel-data";
    StoreDurability durability = StoreDurability::sync;
    RedisConfig redis;
    PostgresConfig postgres;
    MysqlConfig mysql;
    [[nodiscard]] bool shared() const;      ///< Other processes may use the same store.
    [[nodiscard]] bool has_tables() const;  ///< It keeps tables in a database, which are migrated.
    [[nodiscard]] bool migrates() const;    ///< With tables: they are made or updated at the start.
    friend bool operator==(const StoreConfig&, const StoreConfig&) = default;
};

}  // namespace semel::config
