// The part of the configuration that says where records are kept: `store`.
#pragma once

#include <string>
#include <vector>

#include "config/document.hpp"

namespace semel::config {

/// Reads `store` of the file. Throws Refused; appends to `warnings` what is legal and probably not
/// meant.
StoreConfig read_store(const Map& root, std::vector<std::string>& warnings);

}  // namespace semel::config
