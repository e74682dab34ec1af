// The configuration as values, read from one YAML file. Every key has a default; an unknown key is an error.
#pragma once

#include <chrono>
#include <functional>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "config/consumers.hpp"
#include "config/store_config.hpp"

namespace semel::config {

using std::chrono::milliseconds;

struct Address {
    std::string host = "127.0.0.1";
    std::uint16_t port = 0;
    [[nodiscard]] bool loopback() const;  ///< 127.0.0.0/8, ::1, localhost.
    [[nodiscard]] bool wildcard() const;  ///< 0.0.0.0, ::: every address of the machine.
};

/// Where other gateways of a shared store follow the calls of this process.
struct PeerConfig {
    Address listen{.host = "127.0.0.1", .port = 0};
    std::string advertise_host;        ///< Empty (auto): the listen address, or the machine's.
    std::uint16_t advertise_port = 0;  ///< 0: the one that is listened on.
};

/// When and in which steps expired records are removed.
struct CleanupConfig {
    std::optional<milliseconds> every;       ///< Between two passes; empty: a third of the lease.
    std::optional<std::chrono::minutes> at;  ///< Only from this time of day (UTC) on; empty: all day.
    milliseconds window{std::chrono::hours{2}};  ///< Only so long from `at` on.
    std::size_t step = 512;                      ///< Records of one statement, script or batch.
};

struct EngineConfig {
    milliseconds lease{10000};  ///< Default 30 s where the store is shared.
    CleanupConfig cleanup;
    milliseconds retention_completed{std::chrono::hours{24}};
    milliseconds retention_failed{std::chrono::hours{1}};
    std::string secret;  ///< From the environment variable named by secret_env; empty: made once and kept in the store.
};

struct ClientConfig {
    std::string name;                 ///< Also its tenant.
    std::vector<std::string> tokens;  ///< From token_env (one name or a list of names: rotation). Never logged.
    bool may_name_users = false;
};

enum class StreamUsage { inject, passive };
enum class UpstreamAuth { bearer, api_key };  ///< `Authorization: Bearer …` or `api-key: …`.
enum class UpstreamKey { drop, forward };     ///< Whether the upstream gets our per-intent key as Idempotency-Key.
struct UpstreamConfig {
    std::string name;
    std::string dialect = "openai";
    std::string base_url;
    std::string api_key;  ///< From api_key_env; empty: the caller's credential goes upstream.
    bool has_api_key = false;
    std::vector<std::string> models;  ///< Patterns with '*'; the first upstream that matches is taken.
    StreamUsage stream_usage = StreamUsage::passive;  ///< Default inject for api.openai.com.
    UpstreamAuth auth = UpstreamAuth::bearer;
    UpstreamKey idempotency_key = UpstreamKey::drop;
    milliseconds connect_timeout{10000};
    milliseconds first_byte_timeout{600000};
    milliseconds idle_timeout{300000};
    std::string ca_file;  ///< Trusted besides the system's; for private upstreams.
};

enum class Mode { off, observe, on };
enum class KeyRule { optional, required };
enum class OnRunning { join, accept, reject };
enum class OnFailed { rerun, replay };
enum class OnUnknown { rerun, hold };
enum class OnDisconnect { finish, cancel };
struct RouteConfig {
    Mode mode = Mode::on;
    KeyRule key = KeyRule::optional;
    OnRunning on_running = OnRunning::join;
    OnFailed on_failed = OnFailed::rerun;
    OnUnknown on_unknown = OnUnknown::rerun;
    OnDisconnect on_disconnect = OnDisconnect::finish;
    std::string model;  ///< /api/chat: where the request names none.
    std::uint32_t max_paid_attempts = 0;  ///< 0: no limit.
    milliseconds join_timeout{590000};
    milliseconds finish_limit{600000};
    milliseconds heartbeat{15000};  ///< 0: off.
};

struct Config {
    Address listen{.host = "127.0.0.1", .port = 8787};
    Address admin{.host = "127.0.0.1", .port = 8788};
    unsigned threads = 0;  ///< Event loops; 0: one per core this process may run on.
    StoreConfig store;
    PeerConfig peer;
    EngineConfig engine;
    std::vector<ClientConfig> clients;
    std::vector<UpstreamConfig> upstreams;
    std::map<std::string, RouteConfig> routes;  ///< Always holds /v1/chat/completions and /api/chat.
    std::string spool_path;  ///< Empty: in memory. Default: that, and ./semel-spool where the store is shared.
    std::uint64_t memory_bodies = 512ull << 20;
    std::uint64_t memory_hot_records = 64ull << 20;
    std::uint64_t record_max_bytes = 32ull << 20;
    bool allow_anonymous = false;
    milliseconds drain_timeout{30000};  ///< After SIGTERM: how long running calls may take to end.
    std::vector<ConsumerConfig> consumers;
    std::vector<std::string> warnings;  ///< What is legal and probably not meant; logged at start.
};

/// Where the records of a consumer with `strategy: store` lie: in its own store, or the process's.
inline const StoreConfig& store_of(const ConsumerConfig& consumer, const Config& config) {
    return consumer.store ? *consumer.store : config.store;
}

/// Looks up an environment variable; a seam for tests.
using Environment = std::function<std::optional<std::string>(const std::string&)>;

/// Reads and checks a configuration. `file` is used in messages only. Error invalid_argument: "FILE:LINE: ..." naming the key,
/// and for an unknown key the closest known one. Checks what can be checked without opening anything: units, ranges, duplicate
/// keys and names, references, and that a non-loopback `listen` with an upstream key has `clients:`.
base::Result<Config> parse(std::string_view yaml, const std::string& file, const Environment& environment);
/// The same from a file and the process's environment.
base::Result<Config> load(const std::string& path);

/// True if `pattern` ('*' matches any run of characters) matches all of `model`, case-sensitively.
bool glob_matches(std::string_view pattern, std::string_view model);

}  // namespace semel::config
