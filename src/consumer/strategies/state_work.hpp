// The part of the strategy `state` that runs on the threads with connections: transitions of rows,
// several in one transaction.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <variant>
#include <vector>

#include "consumer/strategies/db_workers.hpp"
#include "consumer/strategies/sql_template.hpp"
#include "consumer/strategies/state.hpp"

namespace semel::consumer {

/// What became of one message.
struct StateResult {
    enum class Kind : std::uint8_t {
        applied,
        duplicate,   ///< The row says that it was done before.
        superseded,  ///< Another end was reached, and the configuration says: settle.
        conflict,    ///< The target was reached with other values, or another end.
        not_yet,     ///< No row, or one that does not stand in `from`.
        failed,      ///< The database refused the change of this row.
        fatal,       ///< More than one row has the key.
        unreadable,  ///< No key, or a value that cannot be read.
        busy,        ///< Locks, or the row changed meanwhile.
        ill,         ///< The database, or the statement itself.
        held,
    };
    Kind kind = Kind::held;
    std::string reason;
};

/// How a column of `set` is compared with a value of a message, so that what was written equals
/// what is read again: in the column's own type, with its precision.
struct SetComparison {
    std::string column;         ///< Left of the sign.
    std::string before, after;  ///< Around the value's place.
};
using SetComparisons = std::vector<SetComparison>;  ///< One for each of `set`, in its order.

/// The statements of one dialect.
class StateStatements {
  public:
    /// Error invalid_argument: a name that cannot be one.
    static base::Result<StateStatements> make(sql::Dialect dialect,
                                              const config::StateConfig& config);

    /// The message's values, in the order that update() and look() take.
    [[nodiscard]] std::variant<std::vector<Extracted>, ExtractError> values(
        const Message& message) const;
    [[nodiscard]] sql::Statement update(std::span<const Extracted> values,
                                        const Message& message) const;
    /// Rows (at most two) of: status, whether it is the target, in `from`, in `terminal`; whether
    /// all of `set` is as the message says; whether the message's id stands there.
    [[nodiscard]] sql::Statement look(std::span<const Extracted> values, const Message& message,
                                      const SetComparisons& comparisons) const;
    /// Rows of what comparisons() takes: the table's columns and their types.
    [[nodiscard]] sql::Statement columns() const;
    [[nodiscard]] SetComparisons comparisons(const sql::ResultRows& columns) const;

  private:
    /// The column as its comparison tells every two ids apart, also by case.
    [[nodiscard]] std::string exact_id() const;

    sql::Dialect dialect_ = sql::Dialect::postgres;
    config::StateConfig config_;
    std::string table_, key_, status_, version_, message_id_;
    std::vector<std::pair<std::string, config::ValueSpec>> set_;  ///< Quoted names.
};

/// Thread-safe but for what it is given.
class StateWork {
  public:
    static base::Result<std::unique_ptr<StateWork>> make(StateOptions options);
    [[nodiscard]] const StateOptions& options() const { return options_; }

    /// One result per message.
    std::vector<StateResult> run(Link& link, std::span<Message* const> messages) const;

  private:
    class Slice;
    using ComparisonsPtr = std::shared_ptr<const SetComparisons>;
    /// `again`: the types are read anew; else those that are known will do.
    sql::Tried<ComparisonsPtr> comparisons(sql::Executor& executor,
                                           const StateStatements& statements, bool again) const;

    explicit StateWork(StateOptions options) : options_(std::move(options)) {}

    StateOptions options_;
    std::map<sql::Dialect, base::Result<StateStatements>> statements_;
    mutable std::mutex mutex_;
    mutable std::map<sql::Dialect, ComparisonsPtr> comparisons_;  ///< Guarded by mutex_.
};

}  // namespace semel::consumer
