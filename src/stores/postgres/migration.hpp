// The tables: what is there, what is missing, and making it.
#pragma once

#include <string>
#include <vector>

#include "base/result.hpp"
#include "stores/postgres/connection.hpp"
#include "stores/postgres/statements.hpp"

namespace semel::stores::postgres {

/// What would lead from the tables there to those that this binary knows, in order; empty: nothing.
/// Error store_version: they are newer; invalid_argument: tables of these names that this program
/// did not make, or no permission to look; else store_unavailable.
base::Result<std::vector<std::string>> plan_migration(Connection& connection,
                                                      const Statements& statements,
                                                      base::SteadyTime deadline);

/// Does it, in one transaction; several processes may at once. Same errors.
base::Result<void> migrate(Connection& connection, const Statements& statements,
                           base::SteadyTime deadline);

/// Empty: the tables have the version that this binary knows. Trouble::refused: they have not, or
/// are missing.
std::optional<sql::Problem> wrong_version(Connection& connection, const Statements& statements,
                                          const sql::Ask& ask);

}  // namespace semel::stores::postgres
