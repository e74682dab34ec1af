// sql::Executor on a libpq connection of the caller.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "sql/executor.hpp"

struct pg_conn;

namespace semel::stores::postgres {

/// Longest wait for the answers to one run() before the connection counts as lost.
inline constexpr std::chrono::milliseconds executor_deadline{60'000};

enum class Prepare : std::uint8_t {
    never,     ///< Nothing is left on the server: a transaction-mode pooler may be in the path.
    repeated,  ///< Texts that come again are prepared, up to statements_prepared_max.
};
/// Of one connection. What comes behind them is parsed each time.
inline constexpr std::size_t statements_prepared_max = 128;

/// Runs on `connection`, which stays the caller's, must outlive the executor and be idle (no answer
/// outstanding, no COPY) whenever run() is called; between two calls the caller may use it. Values
/// for text columns must not hold NUL bytes (Trouble::refused). A prepared statement that is gone
/// or no longer fits its tables is Trouble::contended: done again it passes.
std::unique_ptr<sql::Executor> executor_on(pg_conn* connection,
                                           std::chrono::milliseconds deadline = executor_deadline,
                                           Prepare prepare = Prepare::never);

}  // namespace semel::stores::postgres
