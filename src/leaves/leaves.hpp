// The stores, brokers and databases that a process is linked with: the only module that knows every
// leaf.
#pragma once

#include "cli/cli.hpp"

namespace semel {

/// All of them; no mock upstream.
cli::Leaves leaves();

}  // namespace semel
