// Brings an existing table of the older shape (id, message_id, business_key, status, retry_count,
// error_message, created_at, updated_at, expire_at; unique over message_id) to the shape of
// message_dedup, without a moment in which done ids are forgotten.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "inbox/names.hpp"

namespace semel::inbox {

struct OldTable {
    std::string table =
        "message_dedup";  ///< As it is called now. Afterwards it is called <table>_before_semel.
    /// Whose rows these are: the older shape has no such column. Only this scope and source will
    /// know them.
    std::string scope;
    std::string source;
    /// Done ids are kept that long from the migration on, or as long as the old table would,
    /// whichever is longer: also those past their expire_at that nobody has removed, because the
    /// old consumers still knew them.
    std::chrono::milliseconds retention{std::chrono::hours{24 * 7}};
    /// What the old times are ahead of UTC. Columns that carry their zone (PostgreSQL's
    /// timestamptz, MySQL's TIMESTAMP) need none.
    std::chrono::minutes utc_offset{0};
    /// How long the table is watched for somebody who writes to it, before anything is done.
    std::chrono::milliseconds watch{2000};
    /// Copy although somebody writes: what they changed meanwhile is taken over at the end, under
    /// the table's lock. A message that an old consumer has in hand at that moment becomes one of
    /// unknown outcome, and its next writes fail loudly.
    bool accept_writer = false;
    std::size_t step = 5000;  ///< Rows of one copying statement.
};

struct OldTablePlan {
    std::vector<std::string>
        statements;  ///< All that would be run, in order; the copying one is shown once.
    std::int64_t rows = 0;
    std::int64_t done = 0;       ///< Old status 1: done in the scope.
    std::int64_t failed = 0;     ///< Old status 2: failed, and due.
    std::int64_t undecided = 0;  ///< Old status 0: of unknown outcome, held until somebody decides.
    std::vector<std::string> notices;
};

/// What migrate_old_table() would do. Changes nothing. Errors, a sentence with cause and cure:
/// invalid_argument (no such table, a column or a status that the older shape has not, a name), or
/// what the database says.
base::Result<OldTablePlan> plan_old_table(sql::Executor& executor, const Place& place,
                                          const OldTable& old);

/// Told after each step. False: stop; the old table stays what it was.
using Progress = std::function<bool(std::int64_t copied, std::int64_t total)>;

/// Builds the new table beside the old one, copies in steps, and renames last. Refuses
/// (invalid_argument) while somebody writes to the old table: it is watched before, and compared
/// under its lock at the end. May be repeated after any error or crash: an unfinished copy is
/// dropped and made anew, an unfinished renaming is finished. Answers how many rows were copied.
base::Result<std::int64_t> migrate_old_table(sql::Executor& executor, const Place& place,
                                             const OldTable& old, const Progress& progress);

}  // namespace semel::inbox
