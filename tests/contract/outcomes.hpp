// What the files of the contract suite share: keys, nonces, and what an outcome is expected to be.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "core/store.hpp"

namespace semel::contract {

/// Anywhere.
inline core::StoredKey spread_key(const std::string& name) { return base::sha256("key " + name); }
/// All in one bucket, as the keys of a session are: what one step touches together.
inline core::StoredKey key(const std::string& name) {
    core::StoredKey out = spread_key(name);
    core::join_bucket(out, spread_key("session"));
    return out;
}

inline core::Nonce nonce(std::uint8_t number) {
    core::Nonce out;
    out.bytes.fill(number);
    return out;
}

/// Name of the alternative that an outcome holds, for messages.
inline std::string name_of(const core::StoreOutcome& outcome) {
    static const char* const names[] = {"Granted",
                                        "InFlight",
                                        "NotDue",
                                        "Replay",
                                        "Mismatch",
                                        "Unknown",
                                        "Exhausted",
                                        "Late",
                                        "Applied",
                                        "Fenced",
                                        "Found",
                                        "ChunkStored",
                                        "ChunkFound",
                                        "ChunkMissing",
                                        "ConversationFound",
                                        "ConversationMissing",
                                        "TurnsFound",
                                        "ConversationDeleted",
                                        "Value",
                                        "ParkingOpened",
                                        "Parked",
                                        "ParkingLost",
                                        "ParkedFound",
                                        "Unparked"};
    return names[outcome.index()];
}

/// The alternative that the test expects; a failure of the test and an empty one if it is another.
template <class T>
T as(const base::Result<core::Decided>& result) {
    if (!result) {
        ADD_FAILURE() << "error instead of an outcome: " << result.error().detail;
        return T{};
    }
    if (const T* outcome = std::get_if<T>(&result->outcome)) return *outcome;
    ADD_FAILURE() << "the outcome is " << name_of(result->outcome);
    return T{};
}

}  // namespace semel::contract
