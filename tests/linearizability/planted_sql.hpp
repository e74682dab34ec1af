// The stores on SQL databases as they are, and with one statement that does something else, so that
// the checker can show that it notices.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/store.hpp"

namespace semel::linearizability {

struct SqlTarget {
    std::string store;  ///< "postgres" or "mysql".
    std::string url;
};

/// The names of the faults that a session can have.
std::vector<std::string> planted_sql_faults();

/// The store as a gateway opens it; with a `fault` the same on sessions that have it (`none`: that
/// have none). Errors as opening has them, and invalid_argument if there is no such fault.
base::Result<std::unique_ptr<core::Store>> open_sql_store(const SqlTarget& target,
                                                          const std::string& fault);

}  // namespace semel::linearizability
