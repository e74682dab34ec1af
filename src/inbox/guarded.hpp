// The connection of a transaction as a callback gets it.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "inbox/inbox.hpp"

namespace semel::inbox {

/// Hands a message's statements on, except those that would end or nest the transaction. Before the
/// first of them goes a savepoint, in the same round trip.
class Guarded final : public Executor {
  public:
    /// `savepoints`: false where the transaction is one message's.
    Guarded(Executor& inner, bool savepoints) : inner_(inner), savepoints_(savepoints) {}

    /// The effect of another message begins.
    void next();
    /// What undoes the message, if it has done anything.
    std::vector<sql::Statement> undo();
    /// What kept a statement of this message from being done, if one was kept.
    [[nodiscard]] const std::optional<Problem>& problem() const { return problem_; }

    [[nodiscard]] sql::Dialect dialect() const override { return inner_.dialect(); }
    [[nodiscard]] bool in_transaction() const override { return inner_.in_transaction(); }
    [[nodiscard]] bool aborted() const override { return inner_.aborted(); }
    using Executor::run;
    Tried<std::vector<sql::ResultRows>> run(std::span<const sql::Statement> statements,
                                            std::size_t* failed) override;

  private:
    Tried<std::vector<sql::ResultRows>> noted(Tried<std::vector<sql::ResultRows>> answer);

    Executor& inner_;
    const bool savepoints_;
    bool wanted_ = false;  ///< Before the next statement.
    bool set_ = false;     ///< There is one: this message's, or that of one before it.
    std::optional<Problem> problem_;
};

}  // namespace semel::inbox
