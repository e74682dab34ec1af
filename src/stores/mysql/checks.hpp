// What the server's own settings mean for records that must not be lost.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "core/store.hpp"
#include "stores/mysql/connection.hpp"

namespace semel::stores::mysql {

/// Oldest that have what the statements use.
inline constexpr unsigned mariadb_version_min = 100600;
inline constexpr unsigned mysql_version_min = 80000;

/// A server that takes no longer statements than this is refused: an answer of 256 KiB, escaped,
/// and the turn that holds it again.
inline constexpr std::uint64_t packet_bytes_min = std::uint64_t{4} << 20;
/// Below this a batch of 64 large answers does not fit into one statement and is written one by
/// one.
inline constexpr std::uint64_t packet_bytes_wanted = std::uint64_t{16} << 20;

struct Findings {
    std::string version;               ///< As the server says it, e.g. "10.11.19-MariaDB".
    core::Durability durability;       ///< As the settings found promise it.
    std::vector<std::string> notices;  ///< One sentence each: what is worth knowing, and the cure.
    std::vector<std::string>
        wrong;  ///< The same, graver: what would lose records, or keeps writes from working now.
};

/// What the server said of itself.
struct Facts {
    Server server;
    std::map<std::string, std::string, std::less<>>
        variables;                    ///< Of SHOW GLOBAL VARIABLES and STATUS, names in lower case.
    std::int64_t clock_ahead_us = 0;  ///< Of this machine's.
};

/// The sentences about them. `name`: host:port. Error invalid_argument: settings that the store
/// cannot work with.
base::Result<Findings> judge(const Facts& facts, const std::string& name);

/// Error store_version: the server is too old.
base::Result<void> check_version(const Server& server, const std::string& name);
/// Empty: the server may be written to. Trouble::not_writable: it is read-only, a replica as a
/// rule.
std::optional<sql::Problem> check_writable(Connection& connection, const std::string& name,
                                           SteadyTime deadline);

/// Asks the server, and tries every kind of statement as this user (rolled back). A full disk is no
/// error: recorded answers can still be read. Error: the store must not be opened;
/// invalid_argument, or store_unavailable.
base::Result<Findings> check_server(Connection& connection, const std::string& name,
                                    std::chrono::milliseconds timeout);

}  // namespace semel::stores::mysql
