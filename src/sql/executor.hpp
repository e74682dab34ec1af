// Executor: plain SQL on a connection that somebody owns, also one inside the caller's own transaction. What the inbox, the
// dedup table and SQL handlers are built on. The dialects make one of a PGconn* or a MYSQL* (stores/postgres/executor.hpp,
// stores/mysql/executor.hpp).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "sql/session.hpp"

namespace semel::sql {

enum class Dialect : std::uint8_t { postgres, mysql };

/// NULL, a number, bytes or text (UTF-8).
struct Bytes { std::string value; };
using Parameter = std::variant<std::monostate, std::int64_t, Bytes, std::string>;

struct Statement {
    std::string text;  ///< In the dialect's own words: $1, $2 on PostgreSQL, ? on MySQL and MariaDB. One statement.
    std::vector<Parameter> parameters;
};

/// A row's values; empty: NULL. Text as the server prints it, bytes as they are.
using Values = std::vector<std::optional<std::string>>;
struct ResultRows {
    std::vector<Values> rows;
    std::int64_t affected = 0;  ///< Rows matched by the WHERE of an UPDATE or DELETE, inserted by an INSERT.
};

/// Not thread-safe. Does not own the connection; after Trouble::lost it is of no use.
class Executor {
  public:
    Executor() = default;
    Executor(const Executor&) = delete;
    Executor& operator=(const Executor&) = delete;
    virtual ~Executor() = default;

    [[nodiscard]] virtual Dialect dialect() const = 0;

    /// Runs the statements in order, in one round trip. Stops at the first that fails: its Problem is the answer, those before it
    /// have run, those after it have not. Outside a transaction each is its own. On PostgreSQL a failure inside a transaction
    /// aborts it, up to a savepoint; on MySQL a deadlock (Trouble::contended) has rolled all of it back, a lock time-out only the
    /// statement. `failed` (may be null): the index of the one that failed.
    virtual Tried<std::vector<ResultRows>> run(std::span<const Statement> statements, std::size_t* failed = nullptr) = 0;

    Tried<ResultRows> run(Statement statement) {
        auto answer = run(std::span<const Statement>(&statement, 1));
        if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
        return std::move(std::get<0>(answer).front());
    }
    /// Whether the connection is inside a transaction (also a failed one).
    [[nodiscard]] virtual bool in_transaction() const = 0;
    /// Whether it is inside one that a failure has aborted (PostgreSQL): all but ROLLBACK fails there, and COMMIT rolls back.
    [[nodiscard]] virtual bool aborted() const = 0;
};

}  // namespace semel::sql
