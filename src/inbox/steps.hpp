// The statements of the inbox's steps and what their results say; shared by the steps and by run().
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "inbox/inbox.hpp"

namespace semel::inbox {

/// Reads the epoch and keeps it until the transaction ends. Transactions that do the same do not
/// wait for each other.
sql::Statement fencing(const Tables& tables, const std::string& scope, const Partition& partition);
/// The epoch that fencing() has read; 0: there is no row.
std::int64_t epoch_of(const sql::ResultRows& result);

/// Two statements, after fencing() in the same transaction: the guarded step, then the position.
std::vector<sql::Statement> advancing(const Tables& tables, const std::string& scope,
                                      const Fence& fence, std::int64_t next_offset,
                                      std::optional<std::int64_t> expected);
/// What they did, by their two results and the epoch that was read before.
AdvanceOutcome advance_outcome(std::span<const sql::ResultRows> results, const Fence& fence,
                               std::int64_t epoch, std::int64_t next_offset,
                               std::optional<std::int64_t> expected);

/// How a transaction of our own begins: READ COMMITTED whatever the default is, `lock_wait` and
/// `idle_limit` (0: none) for it alone.
std::vector<sql::Statement> beginning(sql::Dialect dialect, milliseconds lock_wait,
                                      milliseconds idle_limit);
/// How it ends; what beginning() changed of the session is put back. COMMIT is the
/// last statement: nothing can fail behind it.
std::vector<sql::Statement> committing(sql::Dialect dialect);
std::vector<sql::Statement> rolling_back(sql::Dialect dialect);

/// Rolls back what beginning() began, as far as it is not over, and puts the session back.
void roll_back(Executor& executor);

Problem refused(std::string detail);

}  // namespace semel::inbox
