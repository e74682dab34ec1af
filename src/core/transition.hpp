// decide(): the transition table as one pure function. Memory and RocksDB call it; other stores are ports of it.
#pragma once

#include <optional>

#include "core/operation.hpp"

namespace semel::core {

/// What a store must do after a decision.
struct Transition {
    enum class Write : std::uint8_t {
        none,      ///< The record stays as it is.
        volatile_, ///< Only lease_end changed (renewal): a store whose leases live in memory need not write it to disk.
        durable,   ///< `record` replaces what was there, atomically, before the outcome is told.
    };
    Write write = Write::none;
    RecordPtr record;  ///< The state after the step; null if absent.
    Outcome outcome;
    /// Written in the same atomic step, unless the conversation holds a turn of this request_id already.
    std::optional<Append> append = std::nullopt;
};

/// Decides one operation on the record found (null: absent) at the store's time `now`. Pure: no clock, no I/O, never throws.
/// A record that expired by `now` counts as absent, except that its token stays the lower bound of the next one: pass the
/// expired record itself. `operation` is consumed (its answer's body moves into the record).
Transition decide(const RecordPtr& found, Operation operation, StoreTime now);
/// The same for the two that come most, without a variant around them.
Transition decide(const RecordPtr& found, Acquire&& operation, StoreTime now);
Transition decide(const RecordPtr& found, Complete&& operation, StoreTime now);

/// The token of the next grant: above the previous one, and not below the store's time.
FencingToken next_token(FencingToken previous, StoreTime now);

}  // namespace semel::core
