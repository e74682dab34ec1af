// The shared store: records in Redis, decided by Lua scripts in the server. Several processes may
// use one.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "core/store.hpp"

namespace semel::stores {

struct RedisOptions {
    std::string
        url;  ///< redis://, rediss://, unix:// or redis-sentinel://; see docs/reference/config.md.
    bool cluster = false;  ///< The server is one of a Redis Cluster.
    /// > 0: a grant or an answer counts as stored only once so many replicas have it (WAIT); else
    /// it is refused or retried.
    unsigned wait_replicas = 0;
    std::chrono::milliseconds wait_timeout{500};
    std::string ca_file;        ///< TLS: trusted besides the system's authorities.
    std::string sentinel_user;  ///< Of the sentinels themselves; the URL's user and password are
                                ///< the data servers'.
    std::string sentinel_password;
    /// Opens also where the server evicts keys when its memory is full: an evicted record is an
    /// intent that runs again.
    bool accept_eviction = false;
    std::string prefix =
        "semel";  ///< Begins every key, so that one server can serve several deployments.
    /// Told to the scripts instead of the server's clock: for tests that must move time. Empty: the
    /// server's TIME.
    std::function<core::StoreTime()> time;
};

/// What opening found; for the log and `doctor`.
struct RedisReport {
    std::string version;               ///< Of the (first) server.
    std::vector<std::string> notices;  ///< What somebody should read.
    std::vector<std::string> wrong;    ///< The same, graver: what would lose or repeat intents, or
                                       ///< keeps writes from working.
};

/// Connects and checks the servers. `report` (may be null) is filled if it succeeds. Errors, each a
/// sentence with cause and cure: store_unavailable (unreachable, loading, no master), store_version
/// (older than 7.0), invalid_argument (URL, user or password, permissions, a read-only replica, a
/// Cluster without `cluster: true` or the other way round, an evicting server).
base::Result<std::unique_ptr<core::Store>> open_redis_store(const RedisOptions& options,
                                                            RedisReport* report = nullptr);

}  // namespace semel::stores
