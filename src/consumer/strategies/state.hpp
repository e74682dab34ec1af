// The strategy `state`: the business table is the record: a declared transition, guarded by its
// status and version.
#pragma once

#include <memory>

#include "config/consumers.hpp"
#include "consumer/consumer.hpp"
#include "consumer/records.hpp"
#include "consumer/retry.hpp"
#include "consumer/strategy.hpp"
#include "inbox/inbox.hpp"

namespace semel::consumer {

struct StateOptions {
    config::StateConfig config;
    unsigned connections = 4;
    std::size_t batch_max = 64;
    RetryRules retry;
    milliseconds retention_dead{std::chrono::hours{24 * 30}};
    std::string name;  ///< Label of the failures' records.
    core::Owner owner;
};

/// Only failures (and what is dead) are kept in `records`; what succeeds is told by the table
/// alone.
base::Result<std::unique_ptr<Strategy>> make_state(runtime::Loop& loop, StateOptions options,
                                                   inbox::Connect connect, Records& records,
                                                   ConsumerCounters& counters);

}  // namespace semel::consumer
