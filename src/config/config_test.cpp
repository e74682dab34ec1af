#include "config/config.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>

#include "config/testing.hpp"

namespace semel::config {
namespace {

using namespace std::chrono_literals;

TEST(Config, an_empty_file_gives_the_documented_defaults) {
    const Config config = accepted("");
    EXPECT_EQ(config.listen.host, "127.0.0.1");
    EXPECT_EQ(config.listen.port, 8787);
    EXPECT_EQ(config.admin.port, 8788);
    EXPECT_EQ(config.threads, 0u);
    EXPECT_EQ(config.store.kind, StoreKind::rocksdb);
    EXPECT_EQ(config.store.path, "./semel-data");
    EXPECT_EQ(config.store.durability, StoreDurability::sync);
    EXPECT_EQ(config.engine.lease, 10s);
    EXPECT_EQ(config.engine.retention_completed, 24h);
    EXPECT_EQ(config.engine.retention_failed, 1h);
    EXPECT_EQ(config.engine.secret, "");
    EXPECT_EQ(config.memory_bodies, 512ull << 20);
    EXPECT_EQ(config.memory_hot_records, 64ull << 20);
    EXPECT_EQ(config.record_max_bytes, 32ull << 20);
    EXPECT_EQ(config.spool_path, "");
    EXPECT_EQ(config.drain_timeout, 30s);
    EXPECT_FALSE(config.allow_anonymous);
    ASSERT_EQ(config.routes.size(), 2u);
    const RouteConfig& completions = config.routes.at("/v1/chat/completions");
    EXPECT_EQ(completions.mode, Mode::on);
    EXPECT_EQ(completions.key, KeyRule::optional);
    EXPECT_EQ(completions.on_running, OnRunning::join);
    EXPECT_EQ(completions.on_failed, OnFailed::rerun);
    EXPECT_EQ(completions.on_unknown, OnUnknown::rerun);
    EXPECT_EQ(completions.on_disconnect, OnDisconnect::finish);
    EXPECT_EQ(completions.max_paid_attempts, 0u);
    EXPECT_EQ(completions.join_timeout, 590s);
    EXPECT_EQ(completions.finish_limit, 10min);
    EXPECT_EQ(completions.heartbeat, 15s);
    EXPECT_EQ(config.routes.at("/api/chat").key, KeyRule::required);
    EXPECT_EQ(config.routes.at("/api/chat").on_running, OnRunning::accept);
    ASSERT_EQ(config.warnings.size(), 1u);
    EXPECT_NE(config.warnings[0].find("upstreams"), std::string::npos);
}

TEST(Config, reads_every_key) {
    const Config config = accepted(R"(
listen: "[::1]:0"
admin: localhost:${PORT}
threads: 3
store:
  rocksdb: { path: "/var/${WEB_TOKEN}/x", durability: async }
engine: { lease: 500ms, retention: { completed: 7d, failed: 2m }, secret_env: SECRET }
clients:
  - { name: web, token_env: [WEB_TOKEN, WEB_TOKEN_OLD], may_name_users: true }
  - { name: app, token_env: APP_TOKEN }
upstreams:
  - { name: openai, dialect: openai, base_url: "https://api.openai.com/", api_key_env: API_KEY, models: ["gpt-*", "o*"] }
  - name: local
    base_url: http://[::1]:8080/v1beta
    models: "x*y"
    stream_usage: inject
    auth: api-key
    idempotency_key: forward
    connect_timeout: 1s
    first_byte_timeout: 2m
    idle_timeout: 3s
    ca_file: /etc/ca.pem
routes:
  /v1/chat/completions: { mode: observe, key: required, on_running: reject, on_failed: replay, on_unknown: hold, on_disconnect: cancel, max_paid_attempts: 3, heartbeat: 0 }
  /api/chat: { mode: off, key: required, on_running: join, model: gpt-4o-mini, join_timeout: 5s }
spool: { path: ./spool }
memory: { bodies: 1GiB, hot_records: 10MB }
record: { max_bytes: 64KiB }
allow_anonymous: true
gateway: { join_timeout: 20s, finish_limit: 1h, heartbeat: 3s }
drain_timeout: 0s
)");
    EXPECT_EQ(config.listen.host, "::1");
    EXPECT_EQ(config.listen.port, 0);
    EXPECT_EQ(config.admin.host, "localhost");
    EXPECT_EQ(config.admin.port, 9999);
    EXPECT_EQ(config.threads, 3u);
    EXPECT_EQ(config.store.path, "/var/web-token/x");
    EXPECT_EQ(config.store.durability, StoreDurability::async);
    EXPECT_EQ(config.engine.lease, 500ms);
    EXPECT_EQ(config.engine.retention_completed, 24h * 7);
    EXPECT_EQ(config.engine.retention_failed, 2min);
    EXPECT_EQ(config.engine.secret, "0123456789abcdef");
    ASSERT_EQ(config.clients.size(), 2u);
    EXPECT_EQ(config.clients[0].tokens, (std::vector<std::string>{"web-token", "web-token-old"}));
    EXPECT_TRUE(config.clients[0].may_name_users);
    EXPECT_FALSE(config.clients[1].may_name_users);
    ASSERT_EQ(config.upstreams.size(), 2u);
    const UpstreamConfig& openai = config.upstreams[0];
    EXPECT_EQ(openai.base_url, "https://api.openai.com");
    EXPECT_EQ(openai.api_key, "sk-hidden");
    EXPECT_TRUE(openai.has_api_key);
    EXPECT_EQ(openai.models, (std::vector<std::string>{"gpt-*", "o*"}));
    EXPECT_EQ(openai.stream_usage, StreamUsage::inject);
    EXPECT_EQ(openai.auth, UpstreamAuth::bearer);
    EXPECT_EQ(openai.idempotency_key, UpstreamKey::drop);
    EXPECT_EQ(openai.connect_timeout, 10s);
    EXPECT_EQ(openai.first_byte_timeout, 600s);
    EXPECT_EQ(openai.idle_timeout, 300s);
    const UpstreamConfig& local = config.upstreams[1];
    EXPECT_FALSE(local.has_api_key);
    EXPECT_EQ(local.base_url, "http://[::1]:8080/v1beta");
    EXPECT_EQ(local.stream_usage, StreamUsage::inject);
    EXPECT_EQ(local.auth, UpstreamAuth::api_key);
    EXPECT_EQ(local.idempotency_key, UpstreamKey::forward);
    EXPECT_EQ(local.first_byte_timeout, 2min);
    EXPECT_EQ(local.ca_file, "/etc/ca.pem");
    const RouteConfig& completions = config.routes.at("/v1/chat/completions");
    EXPECT_EQ(completions.mode, Mode::observe);
    EXPECT_EQ(completions.key, KeyRule::required);
    EXPECT_EQ(completions.on_running, OnRunning::reject);
    EXPECT_EQ(completions.on_failed, OnFailed::replay);
    EXPECT_EQ(completions.on_unknown, OnUnknown::hold);
    EXPECT_EQ(completions.on_disconnect, OnDisconnect::cancel);
    EXPECT_EQ(completions.max_paid_attempts, 3u);
    EXPECT_EQ(completions.join_timeout, 20s);  // of gateway
    EXPECT_EQ(completions.finish_limit, 1h);
    EXPECT_EQ(completions.heartbeat, 0s);  // the route stands over gateway
    const RouteConfig& chat = config.routes.at("/api/chat");
    EXPECT_EQ(chat.mode, Mode::off);
    EXPECT_EQ(chat.on_running, OnRunning::join);
    EXPECT_EQ(chat.model, "gpt-4o-mini");
    EXPECT_EQ(chat.join_timeout, 5s);
    EXPECT_EQ(chat.heartbeat, 3s);
    EXPECT_EQ(config.spool_path, "./spool");
    EXPECT_EQ(config.memory_bodies, 1ull << 30);
    EXPECT_EQ(config.memory_hot_records, 10'000'000u);
    EXPECT_EQ(config.record_max_bytes, 64u << 10);
    EXPECT_TRUE(config.allow_anonymous);
    EXPECT_EQ(config.drain_timeout, 0s);
    EXPECT_TRUE(config.warnings.empty());
}

TEST(Config, an_upstream_without_patterns_takes_every_model_and_usage_is_passive) {
    const Config config = accepted("upstreams: [ { name: a, base_url: 'http://127.0.0.1:1' } ]");
    ASSERT_EQ(config.upstreams.size(), 1u);
    EXPECT_EQ(config.upstreams[0].models, std::vector<std::string>{"*"});
    EXPECT_EQ(config.upstreams[0].stream_usage, StreamUsage::passive);
    EXPECT_TRUE(config.warnings.empty());
}

struct Refusal {
    const char* yaml;
    const char* message;
};

TEST(Config, says_what_is_wrong_where_and_what_to_do) {
    const std::vector<Refusal> refusals{
        {"peer: { listen: 7 }", "peer.listen: '7' is no address"},
        {"peer: { advertise: 'a b' }", "peer.advertise: 'a b' is neither auto nor HOST"},
        {"peer: { advertise: '' }", "is neither auto nor HOST"},
        {"peer: { advertise: '::1' }", "is neither auto nor HOST"},
        {"peer: { advertise: 10.0.0.7:0 }", "is neither auto nor HOST"},
        {"peer: { advertise: 10.0.0.7:65536 }", "is neither auto nor HOST"},
        {"peer: { advertise: '0.0.0.0:1' }", "no address that another gateway could connect to"},
        {"peer: { advertise: '[::]' }", "no address that another gateway could connect to"},
        {"peer: { port: 1 }", "unknown key 'port' in peer"},
        {"peer: { listen: 127.0.0.1:8787 }", "peer.listen: the same address as listen"},
        {"peer: { listen: 127.0.0.1:8788 }", "peer.listen: the same address as admin"},
        // spelling
        {"lsten: 127.0.0.1:1", "semel.yaml:1: unknown key 'lsten'; did you mean 'listen'?"},
        {"\nroutes:\n  /api/chat:\n    on_runing: accept\n",
         "semel.yaml:4: unknown key 'on_runing' in routes./api/chat; did you mean 'on_running'?"},
        {"engine: { leas: 10s }",
         "semel.yaml:1: unknown key 'leas' in engine; did you mean 'lease'?"},
        {"spool: { entirely_else: 1 }",
         "semel.yaml:1: unknown key 'entirely_else' in spool; known here: path"},
        {"routes: { /v1/chat/completion: {} }",
         "unknown key '/v1/chat/completion' in routes; did you mean '/v1/chat/completions'?"},
        {"upstreams:\n  - name: a\n    base_ulr: x\n",
         "semel.yaml:3: unknown key 'base_ulr' in upstreams[0]; did you mean 'base_url'?"},
        {"admin: 127.0.0.1:1\nlisten: 127.0.0.1:2\nadmin: 127.0.0.1:3",
         "semel.yaml:3: key 'admin' is given twice; remove one"},
        {"store:\n  rocksdb: { path: a, path: b }",
         "semel.yaml:2: key 'path' in store.rocksdb is given twice; remove one"},
        // of later versions
        {"prices: []", "'prices' is not supported by this version"},
        {"cors: {}", "'cors' is not supported by this version"},
        {"admin_tokens: []", "'admin_tokens' is not supported by this version"},
        {"record: { body: none }", "'body' in record is not supported by this version"},
        {"gateway: { orphan_window: 12s }",
         "'orphan_window' in gateway is not supported by this version"},
        {"routes: { /v1/messages: {} }",
         "'/v1/messages' in routes is not supported by this version"},
        {"routes: { /api/chat: { record: { body: none } } }",
         "'record' in routes./api/chat is not supported by this version"},
        {"routes: { /api/chat: { on_unknown: probe } }",
         "semel.yaml:1: routes./api/chat.on_unknown: 'probe' is not supported by this version; use "
         "one of rerun, hold"},
        {"routes: { /api/chat: { on_disconnect: grace } }",
         "on_disconnect: 'grace' is not supported by this version; use one of finish, cancel"},
        {"upstreams: [ { name: a, base_url: 'http://a', dialect: anthropic } ]",
         "upstreams[0].dialect: 'anthropic' is not supported by this version; use one of openai"},
        // types, units, ranges
        {"listen: 127.0.0.1", "semel.yaml:1: listen: '127.0.0.1' is no address: write HOST:PORT"},
        {"listen: ::1:80", "listen: '::1:80' is no address"},
        {"listen: 127.0.0.1:65536", "is no address"},
        {"listen: ':80'", "is no address"},
        {"listen: [ 1 ]", "semel.yaml:1: listen must be a single value, not a list or map"},
        {"listen:", "semel.yaml:1: listen must be given a value"},
        {"- a", "semel.yaml:1: the file must be a map of keys"},
        {"engine: 10s", "engine must be a map of keys: lease, retention, secret_env"},
        {"engine: { lease: 10 }",
         "engine.lease: '10' is no duration: write a whole number and a unit (ms, s, m, h, d), "
         "such as 10s"},
        {"engine: { lease: 1.5s }", "is no duration"},
        {"engine: { lease: -1s }", "is no duration"},
        {"engine: { lease: 10 s }", "is no duration"},
        {"engine: { lease: 99999999999999999999s }", "is no duration"},
        {"engine: { lease: 9999999999999999d }", "is no duration"},
        {"engine: { lease: 1ms }", "engine.lease: '1ms' is out of range: from 100ms to 3600000ms"},
        {"engine: { retention: { completed: 10s } }",
         "engine.retention.completed must be longer than engine.lease"},
        {"engine: { lease: 1h, retention: { failed: 30m } }",
         "engine.retention.failed must be longer than engine.lease"},
        {"memory: { bodies: 10 }", "memory.bodies: '10' is no size"},
        {"memory: { bodies: 10mib }", "memory.bodies: '10mib' is no size"},
        {"memory: { bodies: 99999999GiB }",
         "memory.bodies: '99999999GiB' is no size up to 1024GiB"},
        {"allow_anonymous: yes", "allow_anonymous: 'yes' is neither true nor false"},
        {"threads: -1", "threads: '-1' is not a whole number from 0 to 1024"},
        {"threads: 4000", "threads: '4000' is not a whole number from 0 to 1024"},
        {"routes: { /api/chat: { mode: maybe } }",
         "routes./api/chat.mode: 'maybe' is not one of off, observe, on"},
        {"routes: { /api/chat: { join_timeout: 0s } }", "is out of range"},
        {"routes: { /api/chat: { key: optional } }",
         "routes./api/chat.key: /api/chat always needs an id; use required"},
        {"routes: { /v1/chat/completions: { on_running: accept } }",
         "'accept' answers 202, which SDKs take for an empty success"},
        {"routes: { /v1/chat/completions: { model: a } }", "model is for /api/chat only"},
        // store
        {"store: {}", "store must name exactly one of memory, rocksdb, redis, postgres, mysql"},
        {"store: { postgre: {} }", "unknown key 'postgre' in store; did you mean 'postgres'?"},
        {"store: { memory: {}, rocksdb: {} }", "store must name exactly one of memory, rocksdb"},
        {"store: { redis: { url: 'redis://a' }, rocksdb: {} }", "store must name exactly one of"},
        {"store: { memory: { path: a } }", "unknown key 'path' in store.memory"},
        {"store: { rocksdb: { path: '' } }", "store.rocksdb.path must name a directory"},
        {"store: { rocksdb: { durability: none } }",
         "store.rocksdb.durability: 'none' is not one of sync, async"},
        {"store: { redis: {} }",
         "semel.yaml:1: store.redis.url must be a URL that begins with redis://"},
        {"store: { redis: }", "store.redis.url must be a URL that begins with redis://"},
        {"store: { redis: { url: 'http://a' } }", "such as redis://127.0.0.1:6379/0"},
        {"store: { redis: { url: '127.0.0.1:6379' } }", "store.redis.url must be a URL"},
        {"store: { redis: { url: '${REDIS_PASSWORD}@a' } }", "store.redis.url must be a URL"},
        {"store: { redis: { url: 'redis://:${REDIS_PASSWORD}@a', wait_replica: 1 } }",
         "unknown key 'wait_replica' in store.redis; did you mean 'wait_replicas'?"},
        {"store: { redis: { url: 'redis-sentinel://a#m', cluster: true } }",
         "store.redis.cluster: a Cluster is reached by redis:// or rediss://"},
        {"store: { redis: { url: 'unix:///r.sock', cluster: true } }", "store.redis.cluster: "},
        {"store: { redis: { url: 'redis://a', cluster: maybe } }",
         "store.redis.cluster: 'maybe' is neither true nor false"},
        {"store: { redis: { url: 'redis://a', wait_replicas: 17 } }",
         "store.redis.wait_replicas: '17' is not a whole number from 0 to 16"},
        {"store: { redis: { url: 'redis://a', wait_timeout: 3s } }",
         "store.redis.wait_timeout: '3s' is out of range: from 1ms to 2000ms"},
        {"store: { redis: { url: 'redis://a', ca_file: ca.pem } }",
         "store.redis.ca_file is for TLS: begin the url with rediss://"},
        {"store: { redis: { url: 'redis://a', sentinel_user: u } }",
         "store.redis.sentinel_user is for the sentinels of a redis-sentinel:// url"},
        {"store: { redis: { url: 'redis://a', sentinel_password: '${REDIS_PASSWORD}' } }",
         "store.redis.sentinel_password is for the sentinels of a redis-sentinel:// url"},
        {"store: { redis: { url: 'redis://a', prefix: '' } }",
         "store.redis.prefix must be 1 to 64 letters"},
        {"store: { redis: { url: 'redis://a', prefix: 'a{b}' } }", "store.redis.prefix must be"},
        {"store: { redis: { url: 'redis://a', prefix: 'a*' } }", "store.redis.prefix must be"},
        {"store: { postgres: {} }",
         "semel.yaml:1: store.postgres.url must be a URL that begins with postgresql://, such as"},
        {"store: { postgres: { url: 'host=h password=pw-hidden' } }",
         "store.postgres.url must be a URL"},
        {"store: { postgres: { url: 'mysql://a/b' } }", "store.postgres.url must be a URL"},
        {"store: { postgres: { url: 'postgresql://u:${LINE}@h/d' } }",
         "store.postgres.url holds a blank, a line end or a control character"},
        {"store: { postgres: { url: 'postgresql://h/d', schema: '' } }",
         "store.postgres.schema must be 1 to 63 of a-z, 0-9 and '_'"},
        {"store: { postgres: { url: 'postgresql://h/d', schema: Shop } }",
         "store.postgres.schema must"},
        {"store: { postgres: { url: 'postgresql://h/d', schema: 'a;drop' } }",
         "store.postgres.schema must"},
        {"store: { postgres: { url: 'postgresql://h/d', schema: 1a } }",
         "store.postgres.schema must"},
        {"store: { postgres: { url: 'postgresql://h/d', schema: pg_semel } }",
         "store.postgres.schema must"},
        {"store: { postgres: { url: 'postgresql://h/d', connections: 0 } }",
         "store.postgres.connections: at least 1 is needed"},
        {"store: { postgres: { url: 'postgresql://h/d', connections: 65 } }",
         "store.postgres.connections: '65' is not a whole number from 0 to 64"},
        {"store: { postgres: { url: 'postgresql://h/d', migrate: no } }",
         "store.postgres.migrate: 'no' is neither true nor false"},
        {"store: { mysql: { url: 'mysql://h/d', schema: s } }",
         "unknown key 'schema' in store.mysql"},
        {"store: { mysql: }", "store.mysql.url must be a URL that begins with mysql://, such as"},
        {"store: { mysql: { url: 'mariadb://h/d' } }", "store.mysql.url must be a URL"},
        {"store: { mysql: { url: 'mysql://u:p w@h/d' } }", "store.mysql.url holds a blank"},
        // clean-up
        {"engine: { cleanup: 1h }", "engine.cleanup must be a map of keys: every, at, for, step"},
        {"engine: { cleanup: { every: 10ms } }", "engine.cleanup.every: '10ms' is out of range"},
        {"engine: { cleanup: { every: 2d } }", "engine.cleanup.every: '2d' is out of range"},
        {"engine: { cleanup: { at: 3 } }",
         "engine.cleanup.at: '3' is no time of day: write HH:MM (UTC), such as 03:00"},
        {"engine: { cleanup: { at: '24:00' } }", "'24:00' is no time of day"},
        {"engine: { cleanup: { at: '03:60' } }", "'03:60' is no time of day"},
        {"engine: { cleanup: { at: '3:000' } }", "'3:000' is no time of day"},
        {"engine: { cleanup: { for: 1h } }", "engine.cleanup.for is how long clean-up may run"},
        {"engine: { cleanup: { at: '03:00', for: 25h } }",
         "engine.cleanup.for: '25h' is out of range"},
        {"engine: { cleanup: { step: 0 } }", "engine.cleanup.step: '0' would remove nothing"},
        {"engine: { cleanup: { step: 10001 } }",
         "engine.cleanup.step: '10001' is not a whole number from 0 to 10000"},
        {"store: { redis: { url: 'redis://a' } }\nengine: { retention: { failed: 30s } }",
         "engine.retention.failed must be longer than engine.lease"},
        // environment
        {"listen: 127.0.0.1:${NOT_SET}",
         "listen: environment variable NOT_SET is not set: export it"},
        {"spool: { path: 'a${b' }",
         "spool.path: '${' begins no ${NAME} of an environment variable"},
        {"upstreams: [ { name: a, base_url: 'http://a', api_key_env: NOT_SET } ]",
         "upstreams[0].api_key_env: environment variable NOT_SET is not set"},
        {"upstreams: [ { name: a, base_url: 'http://a', api_key_env: EMPTY } ]",
         "environment variable EMPTY is empty"},
        {"upstreams: [ { name: a, base_url: 'http://a', api_key_env: LINE } ]",
         "environment variable LINE holds a blank, a line end"},
        {"upstreams: [ { name: a, base_url: 'http://a', api_key_env: sk-secret } ]",
         "upstreams[0].api_key_env must be the name of an environment variable, not a value"},
        {"engine: { secret_env: NOT_SET }",
         "engine.secret_env: environment variable NOT_SET is not set"},
        // clients and upstreams
        {"clients: []", "clients is empty, so nobody could call"},
        {"clients: [ { token_env: WEB_TOKEN } ]",
         "clients[0].name must be a name of 1 to 255 visible ASCII characters"},
        {"clients: [ { name: a b, token_env: WEB_TOKEN } ]", "clients[0].name must be a name"},
        {"clients: [ { name: web } ]", "clients[0].token_env must name the environment variable"},
        {"clients: [ { name: web, token_env: [] } ]",
         "clients[0].token_env must name the environment variable"},
        {"clients: [ { name: anonymous, token_env: WEB_TOKEN } ]",
         "'anonymous' is the tenant of callers without a credential"},
        {"clients: [ { name: a, token_env: WEB_TOKEN }, { name: a, token_env: APP_TOKEN } ]",
         "clients[1].name: two clients are called 'a'"},
        {"clients: [ { name: a, token_env: WEB_TOKEN }, { name: b, token_env: SAME_TOKEN } ]",
         "clients 'a' and 'b' have the same token"},
        {"clients: { name: a }", "clients must be a list"},
        {"upstreams: [ { base_url: 'http://a' } ]", "upstreams[0].name must be a name"},
        {"upstreams: [ { name: a } ]", "upstreams[0].base_url must be http(s)"},
        {"upstreams: [ { name: a, base_url: 'ftp://a' } ]",
         "upstreams[0].base_url must be http(s)://HOST[:PORT][/PATH]"},
        {"upstreams: [ { name: a, base_url: 'http://u:p@a' } ]", "base_url must be http(s)"},
        {"upstreams: [ { name: a, base_url: 'http://a?x=1' } ]", "base_url must be http(s)"},
        {"upstreams: [ { name: a, base_url: 'http://a:0' } ]", "base_url must be http(s)"},
        {"upstreams: [ { name: a, base_url: 'http://' } ]", "base_url must be http(s)"},
        {"upstreams: [ { name: a, base_url: 'http://a', models: [] } ]",
         "upstreams[0].models is empty"},
        {"upstreams: [ { name: a, base_url: 'http://a', models: {} } ]",
         "upstreams[0].models must be a list"},
        {"upstreams: [ { name: a, base_url: 'http://a' }, { name: a, base_url: 'http://b' } ]",
         "two upstreams are called 'a'"},
        // addresses
        {"admin: 0.0.0.0:8788", "admin: '0.0.0.0' is not a loopback address"},
        {"admin: 127.0.0.1:8787", "listen and admin are the same address"},
        {"listen: 0.0.0.0:80\nupstreams: [ { name: a, base_url: 'http://a', api_key_env: API_KEY } "
         "]",
         "semel.yaml:1: listen: '0.0.0.0' is not a loopback address, upstream 'a' has an API key "
         "of its own and there are no clients"},
        // YAML itself
        {"a: [", "not valid YAML"},
        {"listen: 127.0.0.1:1\n---\nadmin: x",
         "text follows after the end of the first YAML document"},
        {",a: b", "semel.yaml:1: "},  // yaml-cpp's LoadAll never returns on this
    };
    for (const Refusal& refusal : refusals) {
        const auto result = read(refusal.yaml);
        if (result) {
            ADD_FAILURE() << "accepted: " << refusal.yaml;
            continue;
        }
        EXPECT_EQ(result.error().code, base::ErrorCode::invalid_argument);
        EXPECT_TRUE(result.error().detail.starts_with("semel.yaml:")) << result.error().detail;
        EXPECT_NE(result.error().detail.find(refusal.message), std::string::npos)
            << refusal.yaml << "\n  says  " << result.error().detail << "\n  not   "
            << refusal.message;
        EXPECT_EQ(result.error().detail.find("sk-hidden"), std::string::npos);
        EXPECT_EQ(result.error().detail.find("web-token"), std::string::npos);
        EXPECT_EQ(result.error().detail.find("pw-hidden"), std::string::npos);
    }
}

TEST(Config, a_peer_address_is_any_free_port_of_the_machine_itself_unless_told_otherwise) {
    const std::string redis = "store: { redis: { url: 'redis://a' } }\n";
    const auto peer = [&](const std::string& keys) { return accepted(redis + keys).peer; };
    EXPECT_EQ(peer("").listen.host, "127.0.0.1");
    EXPECT_EQ(peer("").listen.port, 0);
    EXPECT_EQ(peer("peer: { advertise: auto }").advertise_host, "");
    EXPECT_EQ(peer("peer: { listen: '0.0.0.0:8789' }").listen.port, 8789);
    EXPECT_TRUE(peer("peer: { listen: '[::]:0' }").listen.wildcard());
    EXPECT_FALSE(peer("").listen.wildcard());
    const PeerConfig named = peer("peer: { advertise: 'gateway-1.internal:90' }");
    EXPECT_EQ(named.advertise_host, "gateway-1.internal");
    EXPECT_EQ(named.advertise_port, 90);
    EXPECT_EQ(peer("peer: { advertise: 10.0.0.7 }").advertise_host, "10.0.0.7");
    EXPECT_EQ(peer("peer: { advertise: 10.0.0.7 }").advertise_port, 0);
    EXPECT_EQ(peer("peer: { advertise: '[fd00::7]' }").advertise_host, "fd00::7");
    EXPECT_EQ(peer("peer: { advertise: '[fd00::7]:1' }").advertise_port, 1);
    EXPECT_EQ(accepted("peer: {}").warnings.size(), 2u) << "no effect on an embedded store";
}

TEST(Config, clean_up_runs_all_day_unless_told_when) {
    const CleanupConfig all_day = accepted("engine: { cleanup: { step: 64 } }").engine.cleanup;
    EXPECT_FALSE(all_day.every);
    EXPECT_FALSE(all_day.at);
    EXPECT_EQ(all_day.step, 64u);
    EXPECT_EQ(accepted("").engine.cleanup.step, 512u);
    const CleanupConfig night =
        accepted("engine: { cleanup: { every: 1s, at: 23:30, for: 90m } }").engine.cleanup;
    EXPECT_EQ(night.every, milliseconds(1s));
    EXPECT_EQ(night.at, 23h + 30min);
    EXPECT_EQ(night.window, 90min);
    EXPECT_EQ(accepted("engine: { cleanup: { at: '00:00' } }").engine.cleanup.at, 0min);
    EXPECT_EQ(accepted("engine: { cleanup: { at: '00:00' } }").engine.cleanup.window, 2h);
}

TEST(Config, a_control_character_that_would_hide_the_rest_of_the_file_is_refused) {
    for (const char hidden : {'\0', '\x04'}) {
        const std::string yaml =
            std::string("threads: 1\n") + hidden + "\nallow_anonymous: maybe\n";
        const auto result = read(yaml);
        ASSERT_FALSE(result);
        EXPECT_NE(result.error().detail.find("semel.yaml:2: the file holds a control character"),
                  std::string::npos);
    }
    EXPECT_FALSE(read(std::string((1 << 20) + 1, ' ')));
}

TEST(Config, listening_beyond_loopback_with_an_upstream_key_needs_clients) {
    const std::string upstream =
        "upstreams: [ { name: a, base_url: 'https://a', api_key_env: API_KEY } ]\n";
    EXPECT_FALSE(read("listen: 10.0.0.1:80\n" + upstream));
    EXPECT_FALSE(read("listen: 10.0.0.1:80\nallow_anonymous: true\n" + upstream));
    EXPECT_TRUE(read("listen: 127.0.0.2:80\n" + upstream));
    EXPECT_TRUE(
        read("listen: 10.0.0.1:80\nclients: [ { name: web, token_env: WEB_TOKEN } ]\n" + upstream));
    EXPECT_TRUE(read("listen: 10.0.0.1:80\nupstreams: [ { name: a, base_url: 'https://a' } ]"));
}

TEST(Config, warns_of_what_is_legal_and_probably_not_meant) {
    const std::vector<Refusal> warnings{
        {"store: { memory: }", "records end with the process"},
        {"engine: { secret_env: SHORT }", "fewer than 16 characters"},
        {"store: { redis: { url: 'redis://:pw@a' } }",
         "store.redis.url: a password stands in the file"},
        {"store: { redis: { url: 'redis-sentinel://a#m', sentinel_password: pw } }",
         "store.redis.sentinel_password: a password stands in the file"},
        {"store: { postgres: { url: 'postgresql://u:pw@h/d' } }",
         "store.postgres.url: a password stands in the file"},
        {"store: { postgres: { url: 'postgresql://h/d?user=u&password=pw' } }",
         "store.postgres.url: a password stands in the file"},
        {"store: { mysql: { url: 'mysql://u:pw@h/d' } }",
         "store.mysql.url: a password stands in the file"},
        {"upstreams: [ { name: a, base_url: 'http://example.com', api_key_env: API_KEY } ]",
         "travels unencrypted"},
        {"upstreams: [ { name: a, base_url: 'https://example.com/v1' } ]", "/v1/v1/"},
        {"upstreams: [ { name: a, base_url: 'https://a' }, { name: b, base_url: 'https://b' } ]",
         "b is never used, because a before it"},
    };
    for (const auto& [yaml, message] : warnings) {
        std::string all;
        for (const std::string& warning : accepted(yaml).warnings) all += warning + "\n";
        EXPECT_NE(all.find(message), std::string::npos) << yaml << "\n" << all;
    }
}

TEST(Config, knows_loopback_addresses) {
    for (const char* host : {"127.0.0.1", "127.255.0.3", "::1", "localhost"})
        EXPECT_TRUE((Address{host, 1}.loopback())) << host;
    for (const char* host : {"0.0.0.0", "::", "10.0.0.1", "127.example.com",
                             "127.0.0.1.example.com", "127.1", "", "128.0.0.1"}) {
        EXPECT_FALSE((Address{host, 1}.loopback())) << host;
    }
}

TEST(Config, patterns_match_whole_model_names) {
    EXPECT_TRUE(glob_matches("*", ""));
    EXPECT_TRUE(glob_matches("*", "anything"));
    EXPECT_TRUE(glob_matches("gpt-*", "gpt-4o-mini"));
    EXPECT_TRUE(glob_matches("gpt-*", "gpt-"));
    EXPECT_FALSE(glob_matches("gpt-*", "my-gpt-4"));
    EXPECT_FALSE(glob_matches("gpt-*", "GPT-4"));
    EXPECT_TRUE(glob_matches("*mini*", "gpt-4o-mini-2024"));
    EXPECT_TRUE(glob_matches("a*b*c", "aXbYbZc"));
    EXPECT_FALSE(glob_matches("a*b*c", "aXbYbZ"));
    EXPECT_TRUE(glob_matches("o1", "o1"));
    EXPECT_FALSE(glob_matches("o1", "o1x"));
    EXPECT_FALSE(glob_matches("", "x"));
    EXPECT_FALSE(glob_matches(std::string(20, '*') + "b", std::string(5000, 'a')));
}

TEST(Config, random_bytes_never_crash_it) {
    std::mt19937_64 random(11);
    static const char* pieces[] = {
        "listen: ", "store: ", "{",          "}",       "[",           "]",      ": ",     "\n",
        "  ",       "- ",      "&a ",        "*a",      "${",          "}",      "|",      ">",
        "'",        "\"",      "#",          "routes:", "/api/chat: ", "mode: ", "!!int ", "<<: ",
        "? ",       "---",     "upstreams:", "name: ",  "\t",          "é",      "\xFF"};
    std::size_t refused = 0;
    for (int round = 0; round < 20000; ++round) {
        std::string yaml;
        for (std::size_t n = random() % 24; n > 0; --n) {
            if (random() % 8 == 0) {
                yaml += static_cast<char>(random());
            } else {
                yaml += pieces[random() % std::size(pieces)];
            }
        }
        const auto result = read(yaml);
        if (result) continue;
        ++refused;
        ASSERT_TRUE(result.error().detail.starts_with("semel.yaml:")) << result.error().detail;
    }
    EXPECT_GT(refused, 1000u);
    EXPECT_FALSE(read(std::string(100000, '[')));
    EXPECT_FALSE(read(std::string(100000, '{')));
}

TEST(Config, the_reference_page_names_every_key) {
    const std::string in = "{ " + std::string(stray_key) + " }";
    EXPECT_GT(
        keys_on_the_reference_page(
            {std::string(stray_key), "store: { rocksdb: " + in + " }",
             "store: { redis: " + in + " }", "store: { postgres: " + in + " }",
             "store: { mysql: " + in + " }", "store: " + in, "engine: { cleanup: " + in + " }",
             "engine: " + in, "engine: { retention: " + in + " }", "clients: [ " + in + " ]",
             "upstreams: [ " + in + " ]", "routes: " + in, "routes: { /api/chat: " + in + " }",
             "gateway: " + in, "memory: " + in, "record: " + in, "spool: " + in}),
        50u);
}

TEST(Config, load_reads_a_file_and_the_environment_of_the_process) {
    const std::filesystem::path path = std::filesystem::temp_directory_path() /
                                       ("semel-config-test-" + std::to_string(::getpid()));
    ASSERT_EQ(::setenv("SEMEL_CONFIG_TEST_PORT", "4321", 1), 0);
    std::ofstream(path) << "listen: 127.0.0.1:${SEMEL_CONFIG_TEST_PORT}\n";
    const auto config = load(path.string());
    ASSERT_TRUE(config) << config.error().detail;
    EXPECT_EQ(config->listen.port, 4321);
    std::ofstream(path) << "";
    EXPECT_TRUE(load(path.string()));
    std::ofstream(path) << "thread: 1\n";
    const auto refused = load(path.string());
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().detail,
              path.string() + ":1: unknown key 'thread'; did you mean 'threads'?");
    std::filesystem::remove(path);
    const auto missing = load(path.string());
    ASSERT_FALSE(missing);
    EXPECT_EQ(missing.error().code, base::ErrorCode::io);
    EXPECT_NE(missing.error().detail.find(path.string()), std::string::npos);
    EXPECT_FALSE(load(std::filesystem::temp_directory_path().string()));
}

}  // namespace
}  // namespace semel::config
