// What an error reply of the server means: a pure decision.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "stores/redis/client.hpp"

namespace semel::stores::redis {

/// What to do about an error reply.
enum class Cure {
    send_source,  ///< NOSCRIPT: the same as EVAL.
    follow,       ///< MOVED: the slot's keys are at another node from now on.
    ask,          ///< ASK: this once at another node.
    later,        ///< The server can't do it now (loading, no quorum, busy, no disk): nothing was
                  ///< executed.
    ask_others,   ///< CLUSTERDOWN: as later; but it may be the node that is cut off, and the others
                  ///< know more.
    find_master,  ///< READONLY: it is a replica.
    full,         ///< OOM: nothing was executed.
    none,         ///< Refused: nothing was executed.
    uncertain,    ///< A script failed on its way: what it wrote before stays.
};

struct Refusal {
    Cure cure = Cure::none;
    std::string sentence;  ///< "the server 127.0.0.1:6379 ...": cause and cure, without arguments
                           ///< of the command.
};

/// `server` and `command` are the names used in the sentence.
Refusal judge(std::string_view error, const std::string& server, const std::string& command);

/// The slot and address of "MOVED 3999 127.0.0.1:6381" or "ASK ...". An empty host means the one
/// that sent it (`sender`). Nothing if it is malformed.
struct Redirection {
    std::uint16_t slot = 0;
    Address to;
};
std::optional<Redirection> redirection(std::string_view error, const std::string& sender);

}  // namespace semel::stores::redis
