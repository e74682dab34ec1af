// What the server's own settings mean for records that must not be lost.
#pragma once

#include <string>
#include <vector>

#include "base/result.hpp"
#include "core/store.hpp"
#include "stores/postgres/connection.hpp"
#include "stores/postgres/statements.hpp"

namespace semel::stores::postgres {

/// server_version_num of the oldest that has everything the statements use.
inline constexpr int server_version_min = 130000;

struct Findings {
    std::string version;               ///< As the server says it, e.g. "15.18".
    core::Durability durability;       ///< As the settings found promise it.
    std::vector<std::string> notices;  ///< One sentence each: what is worth knowing, and the cure.
    std::vector<std::string>
        wrong;  ///< The same, graver: what would lose records, or keeps writes from working now.
};

/// What the server said of itself.
struct Facts {
    std::string version;
    bool fsync = true;
    bool full_page_writes = true;
    std::string synchronous_commit;  ///< Of this user's sessions.
    std::string synchronous_standby_names;
    std::int64_t standbys = 0;              ///< That stream now.
    std::int64_t synchronous_standbys = 0;  ///< Of them, waited for.
    bool standbys_told_apart = true;        ///< False: this user may not see which are synchronous.
    std::int64_t clock_ahead_us = 0;        ///< Of this machine's.
};

/// The sentences about them. `name`: host:port.
Findings judge(const Facts& facts, const std::string& name);

/// Error store_version: the server is too old.
base::Result<void> check_version(const Connection& connection);

/// Asks the server and tries every statement as this user (rolled back). A full disk is no error:
/// recorded answers can still be read. Error: the store must not be opened; invalid_argument (a
/// missing permission, a read-only default, tables of another shape), store_unavailable.
base::Result<Findings> check_server(Connection& connection, const Statements& statements,
                                    std::chrono::milliseconds timeout);

}  // namespace semel::stores::postgres
