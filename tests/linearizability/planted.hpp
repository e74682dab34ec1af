// Stores that get one rule wrong, so that the checker can show that it notices.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/store.hpp"

namespace semel::linearizability {

/// The names of all planted faults.
std::vector<std::string> planted_faults();

/// A store in memory with the named fault; `none` has none. Null: there is no such fault.
/// Thread-safe. `clock` must outlive it.
std::unique_ptr<core::Store> make_planted_store(const std::string& fault, base::Clock& clock);

}  // namespace semel::linearizability
