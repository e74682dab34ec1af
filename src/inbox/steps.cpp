#include "inbox/steps.hpp"

#include <algorithm>
#include <utility>

namespace semel::inbox {
namespace {

using sql::Dialect;
using sql::Statement;

/// WHERE of one partition.
void add_partition(StatementBuilder& sql, Dialect dialect, const std::string& scope,
                   const Partition& partition) {
    sql.text(" WHERE scope = ").label(scope).text(" AND topic = ").label(partition.topic);
    sql.text(" AND ").text(partition_column(dialect)).text(" = ").number(partition.number);
}

std::int64_t ceil_seconds(milliseconds time) {
    return std::chrono::ceil<std::chrono::seconds>(time).count();
}

}  // namespace

Problem refused(std::string detail) {
    return {.trouble = sql::Trouble::refused,
            .error = {.code = base::ErrorCode::invalid_argument, .detail = std::move(detail)}};
}

Statement fencing(const Tables& tables, const std::string& scope, const Partition& partition) {
    StatementBuilder sql(tables.dialect);
    sql.text("SELECT epoch FROM " + tables.assignments);
    add_partition(sql, tables.dialect, scope, partition);
    sql.text(tables.dialect == Dialect::postgres ? " FOR SHARE" : " LOCK IN SHARE MODE");
    return sql.finish();
}

std::int64_t epoch_of(const sql::ResultRows& result) {
    return result.rows.empty() ? 0 : number_of(result.rows[0][0]);
}

std::vector<Statement> advancing(const Tables& tables, const std::string& scope, const Fence& fence,
                                 std::int64_t next_offset, std::optional<std::int64_t> expected) {
    StatementBuilder step(tables.dialect);
    step.text("UPDATE " + tables.offsets + " SET next_offset = ").number(next_offset);
    step.text(", updated_at = ").text(clock_of(tables.dialect));
    add_partition(step, tables.dialect, scope, fence.partition);
    step.text(" AND (next_offset IS NULL OR next_offset < ").number(next_offset).text(")");
    if (expected)
        step.text(" AND (next_offset IS NULL OR next_offset = ").number(*expected).text(")");
    step.text(" AND EXISTS (SELECT 1 FROM " + tables.assignments);
    add_partition(step, tables.dialect, scope, fence.partition);
    step.text(" AND epoch = ").number(fence.epoch).text(")");

    StatementBuilder position(tables.dialect);
    position.text("SELECT next_offset FROM " + tables.offsets);
    add_partition(position, tables.dialect, scope, fence.partition);
    // Under REPEATABLE READ a plain read would show an older one.
    position.text(tables.dialect == Dialect::mysql ? " LOCK IN SHARE MODE" : "");
    std::vector<Statement> statements;
    statements.push_back(step.finish());
    statements.push_back(position.finish());
    return statements;
}

AdvanceOutcome advance_outcome(std::span<const sql::ResultRows> results, const Fence& fence,
                               std::int64_t epoch, std::int64_t next_offset,
                               std::optional<std::int64_t> expected) {
    if (epoch != fence.epoch) return FencedOff{epoch};
    const sql::ResultRows& position = results[1];
    std::optional<std::int64_t> now;
    if (!position.rows.empty() && position.rows[0][0]) now = number_of(position.rows[0][0]);
    const bool moved = results[0].affected == 1;
    if (!now || *now < next_offset || (expected && !moved)) return Unexpected{now};
    return Advanced{*now};
}

std::vector<Statement> beginning(Dialect dialect, milliseconds lock_wait, milliseconds idle_limit) {
    // 0 is "for ever" to one server and "not at all" to another.
    lock_wait = std::max(lock_wait, milliseconds{1});
    if (dialect == Dialect::postgres) {
        // For this transaction only: a pooler gives the connection to somebody else afterwards.
        return {{.text = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE", .parameters = {}},
                {.text = "SELECT set_config('lock_timeout', '" + std::to_string(lock_wait.count()) +
                         "ms', true), set_config('idle_in_transaction_session_timeout', '" +
                         std::to_string(idle_limit.count()) + "ms', true)",
                 .parameters = {}}};
    }
    // MariaDB alone reads what stands in M!.
    const std::string wait = std::to_string(ceil_seconds(lock_wait));
    const std::string idle = std::to_string(ceil_seconds(idle_limit));
    return {{.text = "SET @semel_lock_wait = @@SESSION.innodb_lock_wait_timeout,"
                     " SESSION innodb_lock_wait_timeout = " +
                     wait +
                     " /*M!100300 , @semel_idle = @@SESSION.idle_transaction_timeout,"
                     " SESSION idle_transaction_timeout = " +
                     idle + " */",
             .parameters = {}},
            {.text = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED", .parameters = {}},
            {.text = "START TRANSACTION READ WRITE", .parameters = {}}};
}

namespace {

/// What beginning() changed of the session, put back.
std::vector<Statement> restoring(Dialect dialect) {
    if (dialect == Dialect::postgres) return {};
    return {{.text = "SET SESSION innodb_lock_wait_timeout = @semel_lock_wait"
                     " /*M!100300 , SESSION idle_transaction_timeout = @semel_idle */",
             .parameters = {}}};
}

}  // namespace

std::vector<Statement> committing(Dialect dialect) {
    std::vector<Statement> statements = restoring(dialect);
    statements.push_back({.text = "COMMIT", .parameters = {}});
    return statements;
}

std::vector<Statement> rolling_back(Dialect dialect) {
    std::vector<Statement> statements = restoring(dialect);
    statements.insert(statements.begin(), {.text = "ROLLBACK", .parameters = {}});
    return statements;
}

void roll_back(Executor& executor) {
    const bool over = !executor.in_transaction();
    if (over && executor.dialect() == Dialect::postgres) return;
    // On MySQL also where a deadlock has ended the transaction: the session is to be as it was.
    // What fails here is a connection that is lost, and the next statement on it will say so.
    static_cast<void>(executor.run(rolling_back(executor.dialect())));
}

}  // namespace semel::inbox
