// One line of JSON per operation: who asked what and when, what the store answered, and at which of
// its times.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "core/store.hpp"

namespace semel::linearizability {

struct Asked {
    unsigned client = 0;
    unsigned slot =
        0;  ///< 0 or 1: a client has at most two batches that are not answered, in different slots.
    /// Position among this client's operations: the store applies what one thread submits in order.
    std::uint64_t sequence = 0;
    std::string key;  ///< The name that `key_of` made the stored key from.
    base::SteadyTime call;
    core::Operation operation;
};

/// All keys of a run by their names.
core::StoredKey key_of(const std::string& name);

/// The fingerprint of a key's n-th request.
core::Fingerprint fingerprint_of(unsigned n);

/// The line, with its end. README.md says what its members are.
std::string line_of(const Asked& asked, const base::Result<core::Decided>& answer,
                    base::SteadyTime returned);

}  // namespace semel::linearizability
