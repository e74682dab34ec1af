#include <gtest/gtest.h>

#include "config/testing.hpp"

namespace semel::config {
namespace {

using namespace std::chrono_literals;

TEST(Config, a_redis_store_has_defaults_of_its_own_because_others_share_it) {
    const Config config = accepted("store: { redis: { url: 'redis://127.0.0.1:6379/0' } }");
    EXPECT_EQ(config.store.kind, StoreKind::redis);
    EXPECT_TRUE(config.store.shared());
    EXPECT_EQ(config.store.redis.url, "redis://127.0.0.1:6379/0");
    EXPECT_FALSE(config.store.redis.cluster);
    EXPECT_EQ(config.store.redis.wait_replicas, 0u);
    EXPECT_EQ(config.store.redis.wait_timeout, 500ms);
    EXPECT_FALSE(config.store.redis.accept_eviction);
    EXPECT_EQ(config.store.redis.prefix, "semel");
    EXPECT_EQ(config.engine.lease, 30s);
    EXPECT_EQ(config.spool_path, "./semel-spool");
    EXPECT_EQ(config.warnings.size(), 1u);  // no upstreams

    const Config chosen = accepted(
        "store: { redis: { url: 'redis://a' } }\nengine: { lease: 5s }\nspool: { path: '' }");
    EXPECT_EQ(chosen.engine.lease, 5s);
    EXPECT_EQ(chosen.spool_path, "");
    EXPECT_FALSE(accepted("").store.shared());
    EXPECT_FALSE(accepted("store: { memory: {} }").store.shared());
}

TEST(Config, reads_every_key_of_a_redis_store_and_shows_no_password) {
    const Config config = accepted(R"(
store:
  redis:
    url: "rediss-sentinel://semel:${REDIS_PASSWORD}@s1:26379,s2:26379/3#main"
    cluster: false
    wait_replicas: 2
    wait_timeout: 250ms
    ca_file: /etc/redis-ca.pem
    sentinel_user: watcher
    sentinel_password: "${REDIS_PASSWORD}"
    accept_eviction: true
    prefix: shop:prod-1
)");
    const RedisConfig& redis = config.store.redis;
    EXPECT_EQ(redis.url, "rediss-sentinel://semel:pw-hidden@s1:26379,s2:26379/3#main");
    EXPECT_EQ(redis.shown_url, "rediss-sentinel://s1:26379,s2:26379/3#main");
    EXPECT_EQ(redis.wait_replicas, 2u);
    EXPECT_EQ(redis.wait_timeout, 250ms);
    EXPECT_EQ(redis.ca_file, "/etc/redis-ca.pem");
    EXPECT_EQ(redis.sentinel_user, "watcher");
    EXPECT_EQ(redis.sentinel_password, "pw-hidden");
    EXPECT_TRUE(redis.accept_eviction);
    EXPECT_EQ(redis.prefix, "shop:prod-1");
    EXPECT_EQ(config.warnings.size(),
              1u);  // no upstreams: a password from the environment is right

    const auto shown = [](const std::string& url) {
        return accepted("store: { redis: { url: '" + url + "' } }").store.redis.shown_url;
    };
    EXPECT_EQ(shown("redis://:pw@h:1/2"), "redis://h:1/2");
    EXPECT_EQ(shown("redis://u:p/w@x@h:1/2"), "redis://h:1/2");  // a password badly written
    EXPECT_EQ(shown("unix://u:pw@/run/redis.sock?db=1"), "unix:///run/redis.sock?db=1");
    EXPECT_EQ(shown("unix:///run/a@b.sock"), "unix:///run/a@b.sock");
}

TEST(Config, a_database_as_store_has_the_defaults_of_a_shared_one) {
    const Config postgres =
        accepted("store: { postgres: { url: 'postgresql://semel@127.0.0.1:5432/semel' } }");
    EXPECT_EQ(postgres.store.kind, StoreKind::postgres);
    EXPECT_EQ(postgres.store.postgres.url, "postgresql://semel@127.0.0.1:5432/semel");
    EXPECT_EQ(postgres.store.postgres.schema, "");
    EXPECT_EQ(postgres.store.postgres.connections, 4u);
    EXPECT_TRUE(postgres.store.postgres.migrate);
    const Config mysql =
        accepted("store: { mysql: { url: 'mysql://semel:${REDIS_PASSWORD}@127.0.0.1/semel' } }");
    EXPECT_EQ(mysql.store.kind, StoreKind::mysql);
    EXPECT_EQ(mysql.store.mysql.url, "mysql://semel:pw-hidden@127.0.0.1/semel");
    EXPECT_EQ(mysql.store.mysql.connections, 4u);
    EXPECT_TRUE(mysql.store.mysql.migrate);
    for (const Config* config : {&postgres, &mysql}) {
        EXPECT_TRUE(config->store.shared());
        EXPECT_TRUE(config->store.has_tables());
        EXPECT_EQ(config->engine.lease, 30s);
        EXPECT_EQ(config->spool_path, "./semel-spool");
        EXPECT_EQ(config->warnings.size(), 1u) << config->warnings.back();  // no upstreams
    }
    EXPECT_FALSE(accepted("store: { redis: { url: 'redis://a' } }").store.has_tables());
    EXPECT_FALSE(accepted("").store.has_tables());

    const Config chosen = accepted(
        "store: { postgres: { url: 'postgres://h/d', schema: shop_1, connections: 9, migrate: "
        "false } }");
    EXPECT_EQ(chosen.store.postgres.schema, "shop_1");
    EXPECT_EQ(chosen.store.postgres.connections, 9u);
    EXPECT_FALSE(chosen.store.postgres.migrate);
    const Config other =
        accepted("store: { mysql: { url: 'mysql://h/d', connections: 1, migrate: false } }");
    EXPECT_EQ(other.store.mysql.connections, 1u);
    EXPECT_FALSE(other.store.mysql.migrate);
}

TEST(Config, what_is_shown_of_a_databases_url_holds_no_password_however_badly_it_is_written) {
    const std::vector<std::pair<std::string, std::string>> postgres{
        {"postgresql://semel@h:1/d", "postgresql://h:1/d"},
        {"postgresql://u:pw@h1:1,h2:2/d?target_session_attrs=primary",
         "postgresql://h1:1,h2:2/d?target_session_attrs=primary"},
        {"postgresql://u:p/w@x@h/d?sslmode=require", "postgresql://h/d?sslmode=require"},
        {"postgresql:///d?host=/run/pg&user=u&password=pw&sslmode=disable",
         "postgresql:///d?host=/run/pg&sslmode=disable"},
        {"postgresql://h/d?passw%6frd=pw", "postgresql://h/d"},
        {"postgresql://h/d?sslpassword=pw&sslkey=k", "postgresql://h/d"},
        {"postgresql://h/d?password=p@w", "postgresql://…"},
        {"postgresql://u:p?w@h/d", "postgresql://…"},
        {"postgresql://u:p@w?x@h/d", "postgresql://…"},
        {"postgresql://u:pw@[::1]:1/d?", "postgresql://[::1]:1/d"},
        {"postgresql://", "postgresql://"}};
    for (const auto& [url, text] : postgres) {
        const Config config = accepted("store: { postgres: { url: '" + url + "' } }");
        EXPECT_EQ(config.store.postgres.shown_url, text);
        EXPECT_EQ(config.store.postgres.url, url);
    }
    const std::vector<std::pair<std::string, std::string>> mysql{
        {"mysql://u:pw@h:1/d", "mysql://h:1/d"},
        {"mysql://u:pw@/d?socket=/run/m.sock&tls=verify&ca_file=/ca.pem&x=pw",
         "mysql:///d?socket=/run/m.sock&tls=verify&ca_file=/ca.pem"},
        {"mysql://u:p?w@h/d", "mysql://…"}};
    for (const auto& [url, text] : mysql) {
        EXPECT_EQ(accepted("store: { mysql: { url: '" + url + "' } }").store.mysql.shown_url, text);
    }
}

constexpr const char* from_kafka =
    "source: { kafka: { brokers: 'h:1', topics: [orders], group: shop } }, handler: { http: { url: "
    "'http://127.0.0.1:1' } }";

std::string consumers(const std::string& first, const std::string& second = "") {
    std::string out = "consumers:\n  - { name: one, " + std::string(from_kafka) + first + " }\n";
    if (!second.empty())
        out +=
            "  - { name: two, source: { kafka: { brokers: 'h:1', topics: [carts], group: carts } "
            "}, handler: { http: { url: 'http://127.0.0.1:1' } }" +
            second + " }\n";
    return out;
}

TEST(ConsumerStore, is_read_as_the_process_own_one_is) {
    const Config config = accepted(
        consumers(", store: { redis: { url: 'redis://:${REDIS_PASSWORD}@h:1/2', prefix: shop } }",
                  ", store: { postgres: { url: 'postgresql://u@h/d', schema: carts } }"));
    ASSERT_TRUE(config.consumers[0].store);
    EXPECT_EQ(config.consumers[0].store->kind, StoreKind::redis);
    EXPECT_EQ(config.consumers[0].store->redis.url, "redis://:pw-hidden@h:1/2");
    EXPECT_EQ(config.consumers[0].store->redis.shown_url, "redis://h:1/2");
    EXPECT_EQ(config.consumers[0].store->redis.prefix, "shop");
    EXPECT_EQ(store_of(config.consumers[0], config).kind, StoreKind::redis);
    EXPECT_EQ(config.consumers[1].store->postgres.schema, "carts");
    EXPECT_EQ(config.store.kind, StoreKind::rocksdb);

    const Config shared = accepted(consumers("", ", store: { memory: {} }"));
    EXPECT_FALSE(shared.consumers[0].store);
    EXPECT_EQ(store_of(shared.consumers[0], shared), shared.store);
    EXPECT_EQ(accepted(consumers(", strategy: redis, store: { redis: { url: 'redis://h' } }"))
                  .consumers[0]
                  .strategy,
              ConsumerStrategy::store)
        << "redis is another word for store where the consumer's own one is Redis";
}

TEST(ConsumerStore, two_are_equal_where_all_their_settings_are) {
    const auto both = [](const std::string& one, const std::string& two) {
        const Config config =
            accepted(consumers(", store: { " + one + " }", ", store: { " + two + " }"));
        return *config.consumers[0].store == *config.consumers[1].store;
    };
    EXPECT_TRUE(both("redis: { url: 'redis://h' }", "redis: { url: 'redis://h', prefix: semel }"));
    EXPECT_FALSE(both("redis: { url: 'redis://h' }", "redis: { url: 'redis://h', prefix: x }"));
    EXPECT_FALSE(both("mysql: { url: 'mysql://h/d' }", "postgres: { url: 'postgres://h/d' }"));
    EXPECT_TRUE(both("rocksdb: { path: a }", "rocksdb: { path: a, durability: sync }"));
}

TEST(ConsumerStore, is_refused_where_it_would_have_no_effect_or_two_meanings) {
    const std::vector<std::pair<std::string, std::string>> refusals{
        {consumers(", store: { redis: {} }"), "consumers[0].store.redis.url must be a URL"},
        {consumers(", store: { redis: { url: 'redis://h', prefx: a } }"),
         "unknown key 'prefx' in consumers[0].store.redis"},
        {consumers(", store: {}"), "consumers[0].store must name exactly one of memory, rocksdb"},
        {consumers(", strategy: table, database: { mysql: { url: 'mysql://h/d' } }, store: { "
                   "memory: {} }"),
         "consumers[0].store is for strategy: store"},
        {"store: { rocksdb: { path: a } }\n" +
             consumers(", store: { rocksdb: { path: a, durability: async } }"),
         "its directory is also that of another store of this file"},
        {consumers(", store: { rocksdb: { path: a } }",
                   ", store: { rocksdb: { path: a, durability: async } }"),
         "consumers[1].store.rocksdb: its directory is also that of another store"},
        {"upstreams: [ { name: u, base_url: 'https://u' } ]\nconsumers:\n  - { name: ai, source: { "
         "kafka: { brokers: 'h:1', topics: [t], group: g } }, handler: { ai: { tenant: t, model: "
         "m, "
         "prompt: { key: true } } }, store: { memory: {} } }",
         "store: handler ai keeps its records where /api/chat does"}};
    for (const auto& [yaml, message] : refusals) {
        const auto result = read(yaml);
        ASSERT_FALSE(result) << yaml;
        EXPECT_NE(result.error().detail.find(message), std::string::npos)
            << result.error().detail << "\n"
            << yaml;
    }
}

TEST(ConsumerMode, who_observes_needs_no_handler_and_is_in_nobodys_way) {
    const std::string kafka = "source: { kafka: { brokers: 'h:1', topics: [a, b], group: shop } }";
    const Config config =
        accepted("consumers:\n  - { name: live, " + kafka +
                 ", handler: { http: { url: 'http://h' } }, dead_letter: { topic: "
                 "dlq } }\n  - { name: watcher, mode: observe, scope: shop/live, " +
                 kafka + " }\n");
    EXPECT_FALSE(config.consumers[0].observe);
    EXPECT_TRUE(config.consumers[1].observe);
    EXPECT_FALSE(accepted("consumers:\n  - { name: live, mode: run, " + kafka +
                          ", handler: { http: { url: 'http://h' } }, dead_letter: stop }")
                     .consumers[0]
                     .observe);
    const auto refused = [](const std::string& yaml) {
        const auto result = read("consumers:\n  - { name: watcher, mode: observe, " + yaml + " }");
        return result ? std::string("accepted") : result.error().detail;
    };
    EXPECT_NE(refused("source: { rabbitmq: { url: 'amqp://h', queue: q } }")
                  .find("mode: observe needs Kafka: a queue of RabbitMQ cannot be read without"),
              std::string::npos);
    EXPECT_NE(refused(kafka + ", strategy: state, database: { mysql: { url: 'mysql://h/d' } }")
                  .find("state must say table"),
              std::string::npos)
        << "what is written must be right as it is for mode: run";
    EXPECT_NE(read("consumers: [ { name: a, mode: watch } ]").error().detail.find("run, observe"),
              std::string::npos);
}

}  // namespace
}  // namespace semel::config
