// The shared store on PostgreSQL 13 or newer. Several processes may use one database.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "core/store.hpp"

namespace semel::stores {

struct PostgresOptions {
    std::string url;     ///< postgresql://user:password@host:port/database?sslmode=...: what libpq
                         ///< takes (several hosts, TLS, socket).
    std::string schema;  ///< Where the tables are; empty: `semel`. 1 to 63 of a-z, 0-9, _.
    unsigned connections = 4;
    std::size_t batch_max = 64;
    std::chrono::milliseconds connect_timeout{2000};
    bool migrate = true;  ///< Make or update the tables when opening; false: refuse where they are
                          ///< missing or old.
    /// Told to the statements instead of the server's clock: for tests that must move time. Empty:
    /// the server's clock.
    std::function<core::StoreTime()> time;
};

/// What opening found; for the log and `doctor`.
struct PostgresReport {
    std::string version;  ///< Of the server, e.g. "15.20".
    bool pooled = false;  ///< A pooler that hands connections out per transaction is in the path.
    std::vector<std::string> notices;  ///< What somebody should read.
    std::vector<std::string> wrong;    ///< The same, graver: what would lose or repeat intents, or
                                       ///< keeps writes from working.
};

/// Connects, checks, migrates. `report` (may be null) is filled if it succeeds. Errors, each a
/// sentence with cause and cure: store_unavailable (unreachable, starting up, no primary among the
/// hosts), store_version (server older than 13, or tables newer than this binary), invalid_argument
/// (URL, credentials, database, permissions, tables of another shape).
base::Result<std::unique_ptr<core::Store>> open_postgres_store(const PostgresOptions& options,
                                                               PostgresReport* report = nullptr);

/// What opening would change, one SQL statement each, in order; empty: nothing. Changes nothing.
/// Same errors.
base::Result<std::vector<std::string>> plan_postgres_migration(const PostgresOptions& options);

}  // namespace semel::stores
