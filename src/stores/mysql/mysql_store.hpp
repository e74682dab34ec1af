// The shared store on MariaDB 10.6 or newer, or MySQL 8. Several processes may use one database.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "core/store.hpp"

namespace semel::stores {

struct MysqlOptions {
    /// mysql://user:password@host:port/database[?socket=/path][&tls=required|verify][&ca_file=/path]
    std::string url;
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
struct MysqlReport {
    std::string version;               ///< Of the server, e.g. "10.11.19-MariaDB".
    std::vector<std::string> notices;  ///< What somebody should read.
    std::vector<std::string> wrong;    ///< The same, graver: what would lose or repeat intents, or
                                       ///< keeps writes from working.
};

/// Connects, checks, migrates. `report` (may be null) is filled if it succeeds. Errors, each a
/// sentence with cause and cure: store_unavailable (unreachable, starting up), store_version
/// (server too old, or tables newer than this binary), invalid_argument (URL, credentials,
/// database, permissions, read-only server, a setting the store cannot work with, tables of another
/// shape).
base::Result<std::unique_ptr<core::Store>> open_mysql_store(const MysqlOptions& options,
                                                            MysqlReport* report = nullptr);

/// What opening would change, one SQL statement each, in order; empty: nothing. Changes nothing.
/// Same errors.
base::Result<std::vector<std::string>> plan_mysql_migration(const MysqlOptions& options);

}  // namespace semel::stores
