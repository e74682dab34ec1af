// sql::Executor on a libpq connection of the caller.
#pragma once

#include <chrono>
#include <memory>

#include "sql/executor.hpp"

struct pg_conn;

namespace semel::stores::postgres {

/// Longest wait for the answers to one run() before the connection counts as lost.
inline constexpr std::chrono::milliseconds executor_deadline{60'000};

/// Runs on `connection`, which stays the caller's, must outlive the executor and be idle (no answer
/// outstanding, no COPY) whenever run() is called; between two calls the caller may use it.
/// Statements take the wire's unnamed form: nothing is left prepared on the server, and a
/// transaction-mode pooler may be in the path as long as the caller's transaction is open. Values
/// for text columns must not hold NUL bytes (Trouble::refused).
std::unique_ptr<sql::Executor> executor_on(pg_conn* connection,
                                           std::chrono::milliseconds deadline = executor_deadline);

}  // namespace semel::stores::postgres
