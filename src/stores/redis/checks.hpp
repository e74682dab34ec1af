// What the servers' own settings mean for records that must not be lost.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "core/store.hpp"
#include "stores/redis/client.hpp"

namespace semel::stores::redis {

struct Findings {
    std::string version;               ///< Of the first master, as INFO says it.
    core::Durability durability;       ///< As the settings found promise it.
    std::vector<std::string> notices;  ///< One sentence each: what is worth knowing, and the cure.
    std::vector<std::string>
        wrong;  ///< The same, graver: what would lose records, or keeps writes from working now.
    /// The longest argument that every master takes: a server ends the connection of who sends a
    /// longer one. Redis' default where it could not be asked.
    std::uint64_t argument_max_bytes = std::uint64_t{512} << 20;
};

/// Asks every master for version, eviction policy, persistence, replicas, memory and clock, and
/// tries as this user what the store will do (on keys of its own under `prefix`, removed again).
/// What the user may not ask (INFO, CONFIG) becomes a notice. Blocks. Error: the store must not be
/// opened; store_version (< 7.0), invalid_argument (an evicting policy not accepted, a missing
/// permission, a read-only replica, a sentinel), store_unavailable. A server that refuses writes
/// for want of memory, disk or replicas is no error: it still replays, and may heal by itself.
base::Result<Findings> check_servers(Client& client, const std::string& prefix,
                                     bool accept_eviction, unsigned wait_replicas);

}  // namespace semel::stores::redis
