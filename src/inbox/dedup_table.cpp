#include "inbox/dedup_table.hpp"

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <random>
#include <thread>
#include <utility>

#include "core/transition.hpp"
#include "inbox/inbox.hpp"
#include "inbox/row.hpp"
#include "inbox/steps.hpp"

namespace semel::inbox {
namespace {

using core::Decided;
using core::StoreTime;
using sql::Dialect;
using sql::Executor;
using sql::Problem;
using sql::ResultRows;
using sql::Statement;
using sql::Trouble;
using Results = std::vector<base::Result<Decided>>;

/// A decision must not take effect long after the time it was made for.
constexpr std::chrono::seconds decision_age_max{5};
constexpr milliseconds idle_limit{10000};
constexpr milliseconds pause_max{20};
/// In a batch, and alone.
constexpr unsigned tries_min = 2;

/// All items of one message.
struct Group {
    base::Digest key;
    std::vector<std::size_t> items;  ///< In their order.
    bool alone = false;              ///< A batch with it failed: it goes by itself.
    unsigned tries = 0;
    // ---- of one look
    std::optional<DedupRow> found;
    core::RecordPtr next;  ///< What is to be written.
    StoreTime not_after;
    std::vector<core::StoreOutcome> outcomes;
};

bool begun_late(const core::Operation& operation, StoreTime& not_after) {
    const auto* acquire = std::get_if<core::Acquire>(&operation);
    if (acquire != nullptr) not_after = std::min(not_after, acquire->not_after);
    return acquire != nullptr;
}

class Applier {
  public:
    Applier(const DedupOptions& options, Executor& executor, std::vector<DedupItem>& items)
        : options_(options),
          executor_(executor),
          items_(items),
          tables_(executor.dialect(), options.place) {}

    Results run() {
        results_.assign(items_.size(), base::Error{.code = base::ErrorCode::store_unavailable});
        std::map<base::Digest, Group> groups;
        for (std::size_t i = 0; i < items_.size(); ++i) {
            const DedupItem& item = items_[i];
            const MessageName name{options_.scope, item.source, item.id};
            if (auto checked = check(name); !checked) {
                results_[i] = checked.error();
                continue;
            }
            Group& group = groups[key_hash(name)];
            group.items.push_back(i);
        }
        for (auto& [key, group] : groups) {
            group.key = key;
            pending_.push_back(std::move(group));
        }
        const auto give_up = std::chrono::steady_clock::now() + options_.patience;
        for (unsigned round = 0; !pending_.empty(); ++round) {
            if (round > 0) {
                if (std::chrono::steady_clock::now() >= give_up) drop_what_was_tried();
                pause();
            }
            std::vector<Group> todo, singles;
            for (Group& group : pending_)
                (group.alone ? singles : todo).push_back(std::move(group));
            pending_.clear();
            if (!todo.empty()) step(std::move(todo));
            for (Group& group : singles) {
                std::vector<Group> single;
                single.push_back(std::move(group));
                step(std::move(single));
            }
        }
        return std::move(results_);
    }

  private:
    /// Each message has its own fair try, also if others made its first one wait.
    void drop_what_was_tried() {
        std::erase_if(pending_, [&](const Group& group) {
            if (group.tries < tries_min) return false;
            fail(group, {.code = base::ErrorCode::store_unavailable,
                         .retry_after = options_.lock_wait,
                         .detail = "message_dedup: the row stayed locked or kept changing; nothing "
                                   "was done, ask again"});
            return true;
        });
    }
    void step(std::vector<Group> groups) {
        if (over_) return fail_all(groups, *over_);
        for (Group& group : groups) ++group.tries;
        auto time = read(groups);
        if (auto* problem = std::get_if<Problem>(&time))
            return troubled(std::move(groups), std::move(*problem), false);
        const StoreTime at = std::get<StoreTime>(time);
        std::vector<Group> writes;
        for (Group& group : groups) {
            if (!decide(group, at)) continue;  // answered
            if (group.next == nullptr)
                answer(group, at);
            else
                writes.push_back(std::move(group));
        }
        if (!writes.empty()) write(std::move(writes), at);
    }

    // ---- read

    std::variant<StoreTime, Problem> read(std::vector<Group>& groups) {
        std::vector<Statement> trip;
        const bool mysql = tables_.dialect == Dialect::mysql;
        if (mysql) {
            // Also where autocommit is off, and whatever the default isolation is: locks nothing,
            // leaves nothing open.
            trip.push_back(
                {.text = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED", .parameters = {}});
            trip.push_back({.text = "START TRANSACTION READ ONLY", .parameters = {}});
        }
        const std::size_t first = trip.size();
        trip.push_back(
            {.text = "SELECT " + microseconds_of(tables_.dialect, clock_of(tables_.dialect)),
             .parameters = {}});
        StatementBuilder sql(tables_.dialect);
        sql.text("SELECT " + row_columns(tables_.dialect) + " FROM " + tables_.dedup +
                 (mysql ? " FORCE INDEX (PRIMARY)" : ""));
        for (std::size_t i = 0; i < groups.size(); ++i)
            sql.text(i == 0 ? " WHERE key_hash IN (" : ", ").bytes(groups[i].key.view());
        trip.push_back(sql.text(")").finish());
        if (mysql) trip.push_back({.text = "COMMIT", .parameters = {}});
        auto answer = executor_.run(trip);
        if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
        const auto& results = std::get<0>(answer);
        for (Group& group : groups) group.found.reset();
        for (const sql::Values& values : results[first + 1].rows) {
            DedupRow row = row_of_values(values);
            const auto group = std::lower_bound(
                groups.begin(), groups.end(), row.key,
                [](const Group& one, const base::Digest& key) { return one.key < key; });
            if (group != groups.end() && group->key == row.key) group->found = std::move(row);
        }
        return options_.time ? options_.time() : StoreTime{number_of(results[first].rows.at(0)[0])};
    }

    // ---- decide

    /// False: the row cannot be read, which is the answer.
    bool decide(Group& group, StoreTime at) {
        core::RecordPtr record;
        if (group.found) {
            auto read = record_of(*group.found);
            if (!read) {
                for (const std::size_t i : group.items) results_[i] = read.error();
                return false;
            }
            record = std::move(*read);
        }
        group.next = nullptr;
        group.outcomes.clear();
        group.not_after = at + decision_age_max;
        for (const std::size_t i : group.items) {
            core::Operation operation =
                items_[i].operation;  // once more if the row changes meanwhile
            if (auto* acquire = std::get_if<core::Acquire>(&operation))
                match_what_is_absent(record, *acquire);
            StoreTime not_after = group.not_after;
            const bool bound = begun_late(operation, not_after);
            core::Transition transition = core::decide(record, std::move(operation), at);
            if (transition.write != core::Transition::Write::none) {
                group.next = transition.record;
                if (bound) group.not_after = not_after;
            }
            if (transition.record != nullptr) record = transition.record;
            group.outcomes.push_back(std::visit(
                [](auto&& one) -> core::StoreOutcome { return std::forward<decltype(one)>(one); },
                std::move(transition.outcome)));
        }
        return true;
    }

    static void match_what_is_absent(core::RecordPtr& record, core::Acquire& acquire) {
        if (record == nullptr) return;
        if (absent(acquire.fingerprint)) {
            acquire.fingerprint = record->fingerprint;
        } else if (absent(record->fingerprint)) {
            auto known = std::make_shared<core::Record>(*record);
            known->fingerprint = acquire.fingerprint;
            record = std::move(known);
        }
    }

    void answer(Group& group, StoreTime at) {
        for (std::size_t n = 0; n < group.items.size(); ++n)
            results_[group.items[n]] = Decided{std::move(group.outcomes[n]), at};
    }

    // ---- write

    void write(std::vector<Group> groups, StoreTime at) {
        std::vector<Statement> trip = beginning(tables_.dialect, options_.lock_wait, idle_limit);
        const std::size_t first = trip.size();
        for (const Group& group : groups)
            trip.push_back(group.found ? update(group, at) : insert(group, at));
        const std::size_t check = trip.size();
        const bool mysql = tables_.dialect == Dialect::mysql;
        // On MySQL the number of rows does not say whether a row was inserted or was there.
        if (mysql) trip.push_back(reading_back(groups));
        if (mysql) trip.push_back(failing_if_late(groups));
        std::vector<Statement> end = committing(tables_.dialect);
        std::move(end.begin(), end.end(), std::back_inserter(trip));
        std::size_t at_fault = 0;
        auto answered = executor_.run(trip, &at_fault);
        if (auto* problem = std::get_if<Problem>(&answered)) {
            if (problem->trouble != Trouble::lost) roll_back(executor_);
            if (problem->trouble == Trouble::refused && mysql && at_fault == check + 1) {
                std::move(groups.begin(), groups.end(), std::back_inserter(pending_));
                return;
            }
            return troubled(std::move(groups), std::move(*problem), true);
        }
        const auto& results = std::get<0>(answered);
        for (std::size_t i = 0; i < groups.size(); ++i) {
            Group& group = groups[i];
            bool done = results[first + i].affected == 1;
            if (mysql && !group.found) done = inserted(results[check], group);
            if (done)
                answer(group, at);
            else
                pending_.push_back(std::move(group));
        }
    }

    /// The columns of `group.next`, in the order of insert().
    void add_values(StatementBuilder& sql, const DedupRow& row, bool named) const {
        const auto time = [&](std::optional<StoreTime> value) {
            if (value)
                sql.time(value->us);
            else
                sql.null();
        };
        const auto optional = [&](const std::optional<std::string>& value, bool words) {
            if (!value)
                sql.null();
            else if (words)
                sql.utf8(*value);
            else
                sql.bytes(*value);
        };
        const auto next = [&](const char* column) {
            sql.text(named ? std::string(", ") + column + " = " : std::string(", "));
        };
        sql.text(named ? "status = " : "").number(row.status);
        next("retry_count");
        sql.number(row.retry_count);
        next("error_message");
        optional(row.error_message, true);
        next("created_at");
        time(row.created);
        next("updated_at");
        time(row.updated);
        next("expire_at");
        time(row.expire);
        next("lease_until");
        time(row.lease_until);
        next("token");
        sql.number(static_cast<std::int64_t>(row.token));
        next("nonce");
        sql.bytes(row.nonce);
        next("fingerprint");
        optional(row.fingerprint, false);
        next("record");
        optional(row.record, false);
    }
    void add_guard_of_time(StatementBuilder& sql, StoreTime not_after) const {
        if (options_.time)
            sql.number(options_.time().us);
        else
            sql.text(microseconds_of(tables_.dialect, clock_of(tables_.dialect)));
        sql.text(" <= ").number(not_after.us);
    }

    [[nodiscard]] Statement insert(const Group& group, StoreTime at) const {
        const bool mysql = tables_.dialect == Dialect::mysql;
        const DedupItem& item = items_[group.items.front()];
        StatementBuilder sql(tables_.dialect);
        sql.text("INSERT INTO " + tables_.dedup +
                 " (key_hash, version, scope, source, message_id, business_key, status, "
                 "retry_count, error_message, created_at, updated_at,"
                 " expire_at, lease_until, token, nonce, fingerprint, record) ");
        // MySQL locks its counter until the end of an INSERT ... SELECT, also while that waits for
        // a row.
        sql.text(mysql ? "VALUES (" : "SELECT ");
        sql.bytes(group.key.view())
            .text(", 1, ")
            .utf8(readable(options_.scope))
            .text(", ")
            .utf8(readable(item.source))
            .text(", ");
        sql.utf8(readable(item.id)).text(", ");
        if (item.business_key.empty())
            sql.null();
        else
            sql.utf8(readable(item.business_key, business_key_max));
        sql.text(", ");
        add_values(sql, row_of(*group.next, at), false);
        if (mysql) return sql.text(") ON DUPLICATE KEY UPDATE key_hash = key_hash").finish();
        sql.text(" WHERE ");
        add_guard_of_time(sql, group.not_after);
        return sql.text(" ON CONFLICT (key_hash) DO NOTHING").finish();
    }
    /// MySQL's INSERT has no WHERE for the time: this fails, and all is rolled back, if any row was
    /// inserted too late.
    [[nodiscard]] Statement failing_if_late(const std::vector<Group>& groups) const {
        StoreTime earliest{std::numeric_limits<std::int64_t>::max()};
        for (const Group& group : groups) earliest = std::min(earliest, group.not_after);
        StatementBuilder sql(tables_.dialect);
        sql.text("SELECT IF(");
        add_guard_of_time(sql, earliest);
        return sql.text(", 1, (SELECT 1 UNION SELECT 2))").finish();
    }
    [[nodiscard]] Statement update(const Group& group, StoreTime at) const {
        StatementBuilder sql(tables_.dialect);
        sql.text("UPDATE " + tables_.dedup + " SET version = version + 1, ");
        add_values(sql, row_of(*group.next, at), true);
        sql.text(" WHERE key_hash = ")
            .bytes(group.key.view())
            .text(" AND version = ")
            .number(group.found->version);
        // By hand people change the status, and not the version.
        sql.text(" AND status = ").number(group.found->status).text(" AND ");
        add_guard_of_time(sql, group.not_after);
        return sql.finish();
    }
    [[nodiscard]] Statement reading_back(const std::vector<Group>& groups) const {
        StatementBuilder sql(tables_.dialect);
        sql.text("SELECT key_hash, version, nonce, token FROM " + tables_.dedup +
                 " FORCE INDEX (PRIMARY)");
        for (std::size_t i = 0; i < groups.size(); ++i)
            sql.text(i == 0 ? " WHERE key_hash IN (" : ", ").bytes(groups[i].key.view());
        return sql.text(")").finish();
    }
    static bool inserted(const ResultRows& back, const Group& group) {
        const core::Record& record = *group.next;
        const std::string_view nonce{reinterpret_cast<const char*>(record.nonce.bytes.data()),
                                     record.nonce.bytes.size()};
        return std::any_of(back.rows.begin(), back.rows.end(), [&](const sql::Values& row) {
            return row[0].value_or("") == group.key.view() && number_of(row[1]) == 1 &&
                   row[2].value_or("") == nonce &&
                   number_of(row[3]) == static_cast<std::int64_t>(record.token.value);
        });
    }

    // ---- what went wrong

    void troubled(std::vector<Group> groups, Problem problem, bool writing) {
        switch (problem.trouble) {
            case Trouble::refused:
                // Too large a value, perhaps: whose, they say alone. Reading names nobody.
                if (!writing || groups.size() == 1)
                    return fail_all(groups, std::move(problem.error));
                [[fallthrough]];
            case Trouble::contended:
                for (Group& group : groups) {
                    group.alone = group.alone || groups.size() > 1;
                    pending_.push_back(std::move(group));
                }
                return;
            case Trouble::full:
            case Trouble::not_writable:
                return fail_all(groups, std::move(problem.error));
            case Trouble::lost:
                if (!writing) problem.error.applied = base::Applied::no;
                fail_all(groups, problem.error);
                problem.error.applied = base::Applied::no;
                over_ = std::move(problem.error);
                return;
        }
    }
    void fail(const Group& group, const base::Error& error) {
        for (const std::size_t i : group.items) results_[i] = error;
    }
    void fail_all(const std::vector<Group>& groups, const base::Error& error) {
        for (const Group& group : groups) fail(group, error);
    }
    static void pause() {
        thread_local std::minstd_rand random{std::random_device{}()};
        std::this_thread::sleep_for(milliseconds{
            std::uniform_int_distribution<std::int64_t>(0, pause_max.count())(random)});
    }

    const DedupOptions& options_;
    Executor& executor_;
    std::vector<DedupItem>& items_;
    const Tables tables_;
    Results results_;
    std::vector<Group> pending_;  ///< Sorted by key within a step: everybody locks in one order.
    std::optional<base::Error> over_;  ///< The connection is gone.
};

std::optional<base::Error> wrong_use(const DedupOptions& options, const Executor& executor) {
    if (auto checked = check_label(options.scope, "scope"); !checked) return checked.error();
    if (auto checked = check(options.place); !checked) return checked.error();
    if (executor.in_transaction()) {
        return base::Error{.code = base::ErrorCode::invalid_argument,
                           .detail =
                               "message_dedup: its steps are transactions of their own, and the "
                               "connection is inside one"};
    }
    return {};
}

}  // namespace

std::vector<base::Result<Decided>> DedupTable::apply(Executor& executor,
                                                     std::vector<DedupItem> items) const {
    if (auto error = wrong_use(options_, executor)) return Results(items.size(), *error);
    return Applier(options_, executor, items).run();
}

base::Result<std::size_t> DedupTable::purge(Executor& executor, std::size_t limit) const {
    if (auto error = wrong_use(options_, executor)) return std::move(*error);
    const Tables tables(executor.dialect(), options_.place);
    const bool postgres = tables.dialect == Dialect::postgres;
    StatementBuilder sql(tables.dialect);
    // MySQL: in this order and by these indexes, or it would lock rows only to look at them.
    sql.text(postgres ? "DELETE FROM " + tables.dedup +
                            " WHERE key_hash IN (SELECT key_hash FROM " + tables.dedup
                      : "DELETE d FROM (SELECT key_hash FROM " + tables.dedup +
                            " FORCE INDEX (expire_at)");
    sql.text(" WHERE expire_at < ");
    if (options_.time)
        sql.time(options_.time().us);
    else
        // Not clock_timestamp(), which changes while an index is read: PostgreSQL would read all of
        // it.
        sql.text(postgres ? "now()" : clock_of(tables.dialect));
    sql.text(" AND status NOT IN (0, 4) ORDER BY expire_at LIMIT ")
        .number(static_cast<std::int64_t>(limit));
    sql.text(" FOR UPDATE SKIP LOCKED)");
    if (!postgres)
        sql.text(" old STRAIGHT_JOIN " + tables.dedup +
                 " d FORCE INDEX (PRIMARY) ON old.key_hash = d.key_hash");
    std::vector<Statement> trip = beginning(tables.dialect, options_.lock_wait, idle_limit);
    const std::size_t at = trip.size();
    trip.push_back(sql.finish());
    std::vector<Statement> end = committing(tables.dialect);
    std::move(end.begin(), end.end(), std::back_inserter(trip));
    auto answer = executor.run(trip);
    if (auto* problem = std::get_if<Problem>(&answer)) {
        if (problem->trouble != Trouble::lost) roll_back(executor);
        return std::move(problem->error);
    }
    return static_cast<std::size_t>(std::get<0>(answer)[at].affected);
}

}  // namespace semel::inbox
