// The check of a group whose members' records lie in a store that is not shared: such a group can
// have one process only.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "brokers/source.hpp"

namespace semel::consumer {

/// What a member of such a group commits beside every position, and ends its client.id with:
/// "semel-store=<id>".
std::string store_mark(const std::string& store_id);

/// For ConsumerOptions::check_group. Kafka: another member in the group, or a commit that names
/// another store's id, is a reason to leave: a sentence that names the member or store and the cure
/// (use redis, postgres or mysql, or accept: unshared_store). Where the commits name this store,
/// this member stays and the sentence is an alarm only: see `stays`. RabbitMQ: subscribes
/// exclusively instead, nothing is checked. A broker that cannot be asked is a reason to wait, not
/// to leave: it is asked again, at most `patience` long, then the reason says so.
struct GroupFinding {
    bool stays = true;     ///< False: this member must not take anything.
    std::string sentence;  ///< Empty: nothing was found.
};
GroupFinding check_unshared_group(brokers::Source& source, const std::string& store_id,
                                  const std::string& group, std::chrono::milliseconds patience);

/// How the check waits; tests bring their own.
struct GroupWaiting {
    std::function<base::SteadyTime()> now;
    std::function<void(std::chrono::milliseconds)> wait;
};
GroupFinding check_unshared_group(brokers::Source& source, const std::string& store_id,
                                  const std::string& group, std::chrono::milliseconds patience,
                                  const GroupWaiting& waiting);

}  // namespace semel::consumer
