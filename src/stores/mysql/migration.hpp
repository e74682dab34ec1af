// The tables: what is there, what is missing, and making it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "stores/mysql/connection.hpp"

namespace semel::stores::mysql {

/// What would lead from the tables there to those that this binary knows, one statement each, in
/// order; empty: nothing. Changes nothing. Error store_version: they are newer; invalid_argument:
/// tables of these names that this program did not make; else store_unavailable.
base::Result<std::vector<std::string>> plan_migration(Connection& connection, SteadyTime deadline);

/// Does it. Several processes may at once: one does the work, the others wait. MySQL and MariaDB
/// commit each statement that makes a table by itself, so what broke off half-way is taken up again
/// where it was. Same errors, and invalid_argument for a missing permission.
base::Result<void> migrate(Connection& connection, SteadyTime deadline);

/// Empty: the tables have the version that this binary knows. Trouble::refused: they have not, or
/// are missing.
std::optional<sql::Problem> wrong_version(Connection& connection, SteadyTime deadline);

}  // namespace semel::stores::mysql
