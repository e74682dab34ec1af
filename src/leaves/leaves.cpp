#include "leaves/leaves.hpp"

#include <memory>
#include <utility>

#include "base/time.hpp"
#include "inbox/old_table.hpp"
#include "inbox/schema.hpp"
#include "leaves/consumer_leaves.hpp"
#include "stores/memory/memory_store.hpp"
#include "stores/mysql/mysql_store.hpp"
#include "stores/postgres/postgres_store.hpp"
#include "stores/redis/redis_store.hpp"
#include "stores/rocksdb/rocksdb_store.hpp"

namespace semel {

namespace {

stores::PostgresOptions postgres_options(const config::PostgresConfig& postgres) {
    stores::PostgresOptions options;
    options.url = postgres.url;
    options.schema = postgres.schema;
    options.connections = postgres.connections;
    options.migrate = postgres.migrate;
    return options;
}

stores::MysqlOptions mysql_options(const config::MysqlConfig& mysql) {
    stores::MysqlOptions options;
    options.url = mysql.url;
    options.connections = mysql.connections;
    options.migrate = mysql.migrate;
    return options;
}

/// "10.11.6-MariaDB-…" or "8.0.36": MariaDB says its name with its version.
std::string server_in_words(const std::string& version) {
    const bool mariadb = version.find("MariaDB") != std::string::npos;
    return (mariadb ? "MariaDB " : "MySQL ") + version.substr(0, version.find('-'));
}

base::Result<cli::OpenedStore> open_store(const config::Config& config, bool accept_clock) {
    cli::OpenedStore opened;
    switch (config.store.kind) {
        case config::StoreKind::memory:
            opened.store = stores::make_memory_store(base::system_clocks());
            return opened;
        case config::StoreKind::rocksdb: {
            stores::RocksDbReport report;
            auto store = stores::open_rocksdb_store(
                {.path = config.store.path,
                 .sync = config.store.durability == config::StoreDurability::sync,
                 // memory.hot_records keeps them already, in front of the engine
                 .hot_bytes = 0,
                 .accept_clock = accept_clock},
                &report);
            if (!store) return store.error();
            opened.store = std::move(*store);
            opened.notices = std::move(report.notices);
            opened.wall_ahead_us = report.wall_ahead_us;
            opened.clock_kept = report.clock_kept;
            return opened;
        }
        case config::StoreKind::redis: {
            const config::RedisConfig& redis = config.store.redis;
            stores::RedisReport report;
            auto store = stores::open_redis_store({.url = redis.url,
                                                   .cluster = redis.cluster,
                                                   .wait_replicas = redis.wait_replicas,
                                                   .wait_timeout = redis.wait_timeout,
                                                   .ca_file = redis.ca_file,
                                                   .sentinel_user = redis.sentinel_user,
                                                   .sentinel_password = redis.sentinel_password,
                                                   .accept_eviction = redis.accept_eviction,
                                                   .prefix = redis.prefix,
                                                   .time = {}},
                                                  &report);
            if (!store) return store.error();
            opened.store = std::move(*store);
            opened.notices = std::move(report.notices);
            opened.wrong = std::move(report.wrong);
            opened.server = "Redis " + report.version;
            return opened;
        }
        case config::StoreKind::postgres: {
            stores::PostgresReport report;
            auto store =
                stores::open_postgres_store(postgres_options(config.store.postgres), &report);
            if (!store) return store.error();
            opened.store = std::move(*store);
            opened.notices = std::move(report.notices);
            opened.wrong = std::move(report.wrong);
            opened.server = "PostgreSQL " + report.version;
            opened.pooled = report.pooled;
            return opened;
        }
        case config::StoreKind::mysql: {
            stores::MysqlReport report;
            auto store = stores::open_mysql_store(mysql_options(config.store.mysql), &report);
            if (!store) return store.error();
            opened.store = std::move(*store);
            opened.notices = std::move(report.notices);
            opened.wrong = std::move(report.wrong);
            opened.server = server_in_words(report.version);
            return opened;
        }
    }
    SEMEL_ASSERT(false, "every kind of store has its leaf");
    return opened;
}

base::Result<std::vector<std::string>> plan_store(const config::Config& config) {
    if (config.store.kind == config::StoreKind::postgres)
        return stores::plan_postgres_migration(postgres_options(config.store.postgres));
    SEMEL_ASSERT(config.store.kind == config::StoreKind::mysql, "only databases have tables");
    return stores::plan_mysql_migration(mysql_options(config.store.mysql));
}

/// Of one statement on a table of somebody else's, which may be long.
constexpr std::chrono::hours statement_deadline{12};

/// What `ask` answers on a connection of its own to the database of the configured store.
template <typename Ask>
std::invoke_result_t<Ask, sql::Executor&> on_database(const config::Config& config,
                                                      const Ask& ask) {
    const bool postgres = config.store.kind == config::StoreKind::postgres;
    SEMEL_ASSERT(postgres || config.store.kind == config::StoreKind::mysql,
                 "only databases have tables");
    config::DatabaseConfig database;
    database.kind = postgres ? config::DatabaseKind::postgres : config::DatabaseKind::mysql;
    database.url = postgres ? config.store.postgres.url : config.store.mysql.url;
    auto connected = connect_to(database, statement_deadline);
    if (auto* problem = std::get_if<sql::Problem>(&connected)) return std::move(problem->error);
    return ask(*std::get<0>(connected));
}

cli::InboxLeaves inbox_leaves() {
    using config::Config;
    using inbox::OldTable;
    using inbox::Place;
    return {.plan =
                [](const Config& config, const Place& place) {
                    return on_database(config, [&](sql::Executor& database) {
                        return inbox::plan_schema(database, place);
                    });
                },
            .apply =
                [](const Config& config, const Place& place) {
                    return on_database(config, [&](sql::Executor& database) {
                        return inbox::apply_schema(database, place);
                    });
                },
            .plan_old_table =
                [](const Config& config, const Place& place, const OldTable& old) {
                    return on_database(config, [&](sql::Executor& database) {
                        return inbox::plan_old_table(database, place, old);
                    });
                },
            .migrate_old_table =
                [](const Config& config, const Place& place, const OldTable& old,
                   const inbox::Progress& progress) {
                    return on_database(config, [&](sql::Executor& database) {
                        return inbox::migrate_old_table(database, place, old, progress);
                    });
                }};
}

}  // namespace

cli::Leaves leaves() {
    cli::Leaves out;
    out.open_store = open_store;
    out.plan_store = plan_store;
    out.inbox = inbox_leaves();
    out.consumers = consumer_leaves();
    return out;
}

}  // namespace semel
