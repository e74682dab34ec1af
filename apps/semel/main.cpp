// The program: the only file that knows every leaf.
#include <cstdio>

#include "base/time.hpp"
#include "cli/cli.hpp"
#include "mock/mock.hpp"
#include "stores/memory/memory_store.hpp"
#include "stores/redis/redis_store.hpp"
#include "stores/rocksdb/rocksdb_store.hpp"

namespace {

namespace cli = semel::cli;
namespace config = semel::config;
namespace stores = semel::stores;

semel::base::Result<cli::OpenedStore> open_store(const config::Config& config, bool accept_clock) {
    cli::OpenedStore opened;
    switch (config.store.kind) {
        case config::StoreKind::memory:
            opened.store = stores::make_memory_store(semel::base::system_clocks());
            return opened;
        case config::StoreKind::rocksdb: {
            stores::RocksDbReport report;
            auto store = stores::open_rocksdb_store({.path = config.store.path,
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
            return opened;
        }
    }
    SEMEL_ASSERT(false, "every kind of store has its leaf");
    return opened;
}

}  // namespace

int main(int argc, char** argv) {
    return cli::run(argc, argv,
                    {.open_store = open_store, .mock_upstream = semel::mock::run, .mock_upstream_help = semel::mock::help()});
}
