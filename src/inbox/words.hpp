// Reads just enough of a statement to see what it would do to the transaction around it.
#pragma once

#include <string>
#include <string_view>

#include "sql/executor.hpp"

namespace semel::inbox {

/// The savepoint that run() uses around a callback.
inline constexpr std::string_view savepoint_name = "semel";

/// Its first word in capitals, behind blanks and comments: UPDATE.
std::string first_word(std::string_view statement);

/// Whether the statement begins, ends or prepares a transaction, touches savepoint_name, is several
/// statements, or (on MySQL) commits without saying so, as DDL does. Errs on the side of true for
/// what it cannot read.
bool controls_transaction(std::string_view statement, sql::Dialect dialect);

}  // namespace semel::inbox
