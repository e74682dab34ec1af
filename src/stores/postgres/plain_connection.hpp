// A connection of its own for plain SQL, for whoever has no libpq: the command line.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "base/result.hpp"
#include "sql/executor.hpp"

namespace semel::stores::postgres {

/// Connects to the server of the URL that may be written to, of several the first. None of the
/// settings that the store makes for its own statements, and no statement_timeout of the role's.
/// `timeout`: of each attempt to connect; `deadline`: of each run(). The connection ends with the
/// executor. Errors are those of opening a store, a sentence with cause and cure.
base::Result<std::shared_ptr<sql::Executor>> connect_plain(const std::string& url,
                                                           std::chrono::milliseconds timeout,
                                                           std::chrono::milliseconds deadline);

}  // namespace semel::stores::postgres
