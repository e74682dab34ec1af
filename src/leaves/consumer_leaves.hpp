// The brokers and databases that consumers are linked with.
#pragma once

#include "cli/cli.hpp"

namespace semel {

cli::ConsumerLeaves consumer_leaves();

/// Connects to a database for plain SQL; the connection ends with the executor. `deadline`: of one
/// statement (PostgreSQL).
sql::Tried<std::shared_ptr<sql::Executor>> connect_to(const config::DatabaseConfig& database,
                                                      std::chrono::milliseconds deadline);

}  // namespace semel
