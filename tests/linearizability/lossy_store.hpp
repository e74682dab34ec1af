// A store behind a bad network: some batches are lost, some of their replies, and some are done
// long after they were given up.
#pragma once

#include <cstdint>
#include <memory>

#include "core/store.hpp"

namespace semel::linearizability {

/// One batch in twelve is answered with `applied = unknown`: it was done, will be done during a
/// later submit, or never. Thread-safe.
std::unique_ptr<core::Store> make_lossy_store(std::unique_ptr<core::Store> inner,
                                              std::uint64_t seed);

}  // namespace semel::linearizability
