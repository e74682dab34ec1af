// The Lua scripts, as they are built into the program from scripts/*.lua.
#pragma once

#include <vector>

#include "stores/redis/client.hpp"

namespace semel::stores::redis {

struct Scripts {
    Script batch;         ///< Decides on records.
    Script turns;         ///< Reads turns of a conversation.
    Script purge;         ///< Removes what is over.
    Script parking_open;  ///< Gives a list of parked messages another owner.
    Script park;          ///< Puts messages into one.
    Script unpark;        ///< Takes them out.
    Script parked;        ///< Reads them.
    [[nodiscard]] std::vector<const Script*> all() const;
};
const Scripts& scripts();

}  // namespace semel::stores::redis
