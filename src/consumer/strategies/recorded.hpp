// The strategies `store` and `table`: claim, handle, complete, on the records of a store or of
// message_dedup. The effect may be anywhere; it is doubled only where an owner died in it, and that
// is marked.
#pragma once

#include <memory>

#include "consumer/consumer.hpp"
#include "consumer/handler.hpp"
#include "consumer/records.hpp"
#include "consumer/results.hpp"
#include "consumer/retry.hpp"
#include "consumer/strategy.hpp"

namespace semel::consumer {

struct RecordedOptions {
    std::string name;  ///< Of the consumer: label of its records.
    core::Owner owner;
    milliseconds lease{10'000};
    milliseconds patience{
        5000};  ///< A claim that the store has not answered by then is given up (and given back).
    unsigned concurrency = 16;
    /// A handled message keeps its place among the `concurrency` until it is recorded: then no more
    /// than that many effects can be doubled by a death. Else handlers go on meanwhile, and what is
    /// being written comes on top.
    bool slot_until_recorded = false;
    std::size_t ahead_max =
        1024;  ///< Claimed and not started, at most; fewer where handlers are slow.
    RetryRules retry;
    bool hold_unknown = false;
    bool mismatch_is_duplicate = false;
    milliseconds retention{std::chrono::hours{24 * 7}};
    milliseconds retention_dead{std::chrono::hours{24 * 30}};
    std::string store_promise;  ///< What the store promises (Durability::summary), for promise().
};

/// All arguments outlive it; `records`, `handler` and `results` are for the same loop. `results`
/// null: what handlers answer is dropped.
std::unique_ptr<Strategy> make_recorded(runtime::Loop& loop, RecordedOptions options,
                                        Records& records, Handler& handler,
                                        ConsumerCounters& counters, Results* results = nullptr);

}  // namespace semel::consumer
