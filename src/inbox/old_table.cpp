#include "inbox/old_table.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "inbox/schema.hpp"
#include "inbox/steps.hpp"

namespace semel::inbox {
namespace {

using sql::Dialect;
using sql::Executor;
using sql::ResultRows;
using sql::Statement;

/// Longest wait for those who have the old table in use when it is renamed.
constexpr int rename_wait_s = 10;
constexpr std::size_t step_max = 100'000;

base::Error wrong(std::string detail) {
    return {.code = base::ErrorCode::invalid_argument, .detail = "inbox: " + std::move(detail)};
}

/// The statement with its parameters as literals, for people.
std::string shown(Dialect dialect, Statement statement) {
    std::string& text = statement.text;
    for (std::size_t n = statement.parameters.size(); n-- > 0;) {
        const sql::Parameter& parameter = statement.parameters[n];
        std::string literal = "NULL";
        if (const auto* number = std::get_if<std::int64_t>(&parameter))
            literal = std::to_string(*number);
        if (const auto* bytes = std::get_if<sql::Bytes>(&parameter))
            literal =
                (dialect == Dialect::postgres ? "'\\x" : "X'") + base::hex(bytes->value) + "'";
        const std::string mark =
            dialect == Dialect::postgres ? "$" + std::to_string(n + 1) + "::" : "?";
        // From behind: the last mark of MySQL's is the last parameter's.
        const std::size_t at = text.rfind(mark);
        const std::size_t size = dialect == Dialect::postgres ? mark.size() - 2 : mark.size();
        if (at != std::string::npos) text.replace(at, size, literal);
    }
    return std::move(text);
}

struct Marks {
    std::vector<std::optional<std::string>> values;
    friend bool operator==(const Marks&, const Marks&) = default;
};

class Migration {
  public:
    Migration(Executor& executor, const Place& place, const OldTable& old)
        : executor_(executor),
          place_(place),
          old_(old),
          tables_(executor.dialect(), place),
          postgres_(executor.dialect() == Dialect::postgres),
          build_{.schema = place.schema, .dedup_table = place.dedup_table + "_semel_new"},
          building_(executor.dialect(), build_),
          old_name_(tables_.named(old.table)),
          saved_name_(tables_.named(old.table + "_before_semel")) {}

    base::Result<OldTablePlan> plan() {
        if (auto looked = look(); !looked) return looked.error();
        OldTablePlan plan;
        if (!resumes_) {
            if (auto counted = count(plan); !counted) return counted.error();
            plan.statements.push_back(dropping());
            for (std::string& text : creation(building_, build_))
                plan.statements.push_back(std::move(text));
            plan.statements.push_back(
                shown(tables_.dialect, copying(0, static_cast<std::int64_t>(old_.step))));
        }
        for (Statement& one : switching())
            plan.statements.push_back(shown(tables_.dialect, std::move(one)));
        if (resumes_)
            plan.notices.push_back(
                "an earlier migration was interrupted while it renamed: this finishes it");
        return plan;
    }

    base::Result<std::int64_t> run(const Progress& progress) {
        if (auto looked = look(); !looked) return looked.error();
        std::int64_t copied = 0;
        Marks before;
        if (!resumes_) {
            OldTablePlan counts;
            if (auto counted = count(counts); !counted) return counted.error();
            auto marks = watch();
            if (!marks) return marks.error();
            before = std::move(*marks);
            if (auto made = make(); !made) return made.error();
            auto all = copy(counts.rows, progress);
            if (!all) return all.error();
            copied = *all;
        }
        if (auto done = postgres_ ? switch_in_transaction(before) : switch_by_renaming(before);
            !done)
            return done.error();
        return copied;
    }

  private:
    base::Result<std::vector<ResultRows>> ask(std::span<const Statement> statements) {
        auto answer = executor_.run(statements);
        if (auto* problem = std::get_if<sql::Problem>(&answer)) return std::move(problem->error);
        return std::move(std::get<0>(answer));
    }
    base::Result<ResultRows> ask(Statement statement) {
        auto answer = ask(std::span<const Statement>(&statement, 1));
        if (!answer) return answer.error();
        return std::move(answer->front());
    }
    base::Result<ResultRows> ask(std::string text) {
        return ask(Statement{.text = std::move(text), .parameters = {}});
    }

    // ---- what is there

    base::Result<void> look() {
        if (auto checked = check(place_); !checked) return checked.error();
        if (auto checked = check(Place{place_.schema, old_.table}); !checked)
            return checked.error();
        if (auto checked = check_label(old_.scope, "scope"); !checked) return checked.error();
        if (old_.source.size() > name_max_bytes)
            return wrong("the source is longer than " + std::to_string(name_max_bytes) + " bytes");
        if (old_.step == 0 || old_.step > step_max || old_.retention.count() <= 0)
            return wrong("a step must have 1 to " + std::to_string(step_max) +
                         " rows, and the retention be above 0");
        if (executor_.in_transaction())
            return wrong(
                "a table is migrated outside of a transaction, and the connection is inside one");
        auto old = columns_of(executor_, place_, old_.table);
        if (!old) return old.error();
        auto saved = columns_of(executor_, place_, old_.table + "_before_semel");
        if (!saved) return saved.error();
        auto build = columns_of(executor_, place_, build_.dedup_table);
        if (!build) return build.error();
        if (old->empty()) {
            resumes_ = !saved->empty() && !build->empty();
            if (!resumes_) return wrong("there is no table " + old_.table);
            columns_ = std::move(*saved);
            return {};
        }
        if (old->contains("key_hash"))
            return wrong("the table " + old_.table + " has the new shape already");
        if (!saved->empty()) {
            return wrong(
                "the table " + old_.table +
                "_before_semel is there already: drop it, or rename it, if it is of no more use");
        }
        for (const char* name : {"id", "message_id", "business_key", "status", "retry_count",
                                 "error_message", "created_at", "updated_at", "expire_at"}) {
            if (!old->contains(name))
                return wrong("the table " + old_.table + " has no column " + name +
                             ": it is not of the older shape");
        }
        if (old_.table != place_.dedup_table) {
            auto target = columns_of(executor_, place_, place_.dedup_table);
            if (!target) return target.error();
            if (!target->empty())
                return wrong("the table " + place_.dedup_table + " is there already");
        }
        columns_ = std::move(*old);
        return {};
    }

    base::Result<void> count(OldTablePlan& plan) {
        auto statuses = ask("SELECT status, COUNT(*) FROM " + old_name_ + " GROUP BY status");
        if (!statuses) return statuses.error();
        for (const sql::Values& row : statuses->rows) {
            const std::int64_t rows = number_of(row[1]);
            const std::string status = row[0].value_or("NULL");
            if (status != "0" && status != "1" && status != "2") {
                return wrong(
                    "the table " + old_.table + " has " + std::to_string(rows) +
                    " rows of status " + status +
                    ", which the older shape has not: set them to 0, 1 or 2, or delete them");
            }
            plan.rows += rows;
            (status == "0" ? plan.undecided : status == "1" ? plan.done : plan.failed) = rows;
        }
        StatementBuilder width(tables_.dialect);
        width
            .text(
                "SELECT MAX(character_maximum_length) FROM information_schema.columns WHERE "
                "table_name = ")
            .utf8(old_.table);
        width.text(" AND column_name = 'message_id' AND table_schema = ");
        if (place_.schema.empty())
            width.text(postgres_ ? "current_schema()" : "DATABASE()");
        else
            width.utf8(place_.schema);
        auto found = ask(width.finish());
        if (!found) return found.error();
        if (const std::int64_t most = number_of(found->rows.at(0)[0]); most > 0) {
            auto full = ask("SELECT COUNT(*) FROM " + old_name_ +
                            " WHERE CHAR_LENGTH(message_id) >= " + std::to_string(most));
            if (!full) return full.error();
            if (const std::int64_t rows = number_of(full->rows.at(0)[0]); rows > 0) {
                plan.notices.push_back(std::to_string(rows) + " ids fill the column of " +
                                       std::to_string(most) +
                                       " characters: where longer ones were cut, their messages "
                                       "will not be recognised");
            }
        }
        if (plan.undecided > 0) {
            plan.notices.push_back(std::to_string(plan.undecided) +
                                   " rows of status 0 become messages of unknown outcome (status "
                                   "4): they are held until somebody decides");
        }
        return {};
    }

    base::Result<Marks> marks_of(const std::string& table) {
        auto answer =
            ask("SELECT COUNT(*), MAX(id), SUM(status), SUM(retry_count), MAX(updated_at) FROM " +
                table);
        if (!answer) return answer.error();
        return Marks{answer->rows.at(0)};
    }
    [[nodiscard]] base::Error somebody_writes() const {
        return wrong("somebody writes to " + old_.table +
                     ", which is what it was: stop the old consumers first. (accept_writer, on the "
                     "command line --accept-writer, copies all the same; what they have in hand at "
                     "the end becomes unknown, and their next writes fail)");
    }
    base::Result<Marks> watch() {
        auto before = marks_of(old_name_);
        if (!before || old_.accept_writer) return before;
        std::this_thread::sleep_for(old_.watch);
        auto after = marks_of(old_name_);
        if (!after) return after;
        if (!(*before == *after)) return somebody_writes();
        return after;
    }

    // ---- the copy

    [[nodiscard]] std::string dropping() const { return "DROP TABLE IF EXISTS " + building_.dedup; }
    base::Result<void> make() {
        if (auto dropped = ask(dropping()); !dropped) return dropped.error();
        for (std::string& text : creation(building_, build_))
            if (auto made = ask(std::move(text)); !made) return made.error();
        return {};
    }
    base::Result<std::int64_t> copy(std::int64_t total, const Progress& progress) {
        std::int64_t last = 0, copied = 0;
        bool first = true;
        while (true) {
            const std::string from = first ? "" : " WHERE id > " + std::to_string(last);
            auto edge = ask("SELECT MIN(id), MAX(id) FROM (SELECT id FROM " + old_name_ + from +
                            " ORDER BY id LIMIT " + std::to_string(old_.step) + ") step");
            if (!edge) return edge.error();
            if (!edge->rows.at(0)[0]) return copied;
            last = number_of(edge->rows[0][1]);
            auto rows = ask(copying(number_of(edge->rows[0][0]), last));
            if (!rows) return rows.error();
            copied += rows->affected;
            first = false;
            if (progress && !progress(copied, std::max(total, copied))) {
                if (auto dropped = ask(dropping()); !dropped) return dropped.error();
                return wrong("the migration was stopped; the table " + old_.table +
                             " is what it was");
            }
        }
    }

    [[nodiscard]] Statement copying(std::int64_t first, std::int64_t last) const {
        StatementBuilder sql = copying_from(old_name_);
        sql.text(" WHERE o.id >= ").number(first).text(" AND o.id <= ").number(last);
        sql.text(on_conflict());
        return sql.finish();
    }
    [[nodiscard]] const char* on_conflict() const {
        return postgres_ ? " ON CONFLICT (key_hash) DO NOTHING"
                         : " ON DUPLICATE KEY UPDATE key_hash = VALUES(key_hash)";
    }

    /// A time column of the old table in UTC.
    [[nodiscard]] std::string utc(const char* column) const {
        const std::string name = std::string("o.") + column;
        const std::string& type = columns_.at(column);
        const std::string offset = std::to_string(old_.utc_offset.count());
        if (postgres_) {
            if (type == "timestamp with time zone") return name;
            return "((" + name + " - interval '" + offset + " minutes') AT TIME ZONE 'UTC')";
        }
        if (type.starts_with("timestamp"))
            return "CONVERT_TZ(" + name + ", @@SESSION.time_zone, '+00:00')";
        return "DATE_SUB(" + name + ", INTERVAL " + offset + " MINUTE)";
    }

    [[nodiscard]] StatementBuilder copying_from(const std::string& table) const {
        const std::string clock = clock_of(tables_.dialect);
        const std::string changed =
            "COALESCE(" + utc("updated_at") + ", " + utc("created_at") + ", " + clock + ")";
        const std::string created = "COALESCE(" + utc("created_at") + ", " + clock + ")";
        const std::int64_t keep = std::chrono::microseconds(old_.retention).count();
        const std::string words =
            postgres_ ? "o.message_id::text" : "CONVERT(o.message_id USING utf8mb4)";
        const std::string bytes =
            postgres_ ? "convert_to(" + words + ", 'UTF8')" : "CAST(" + words + " AS BINARY)";
        // What key_hash() puts before the id.
        std::string before;
        for (const std::string* part : {&old_.scope, &old_.source}) {
            const auto size = static_cast<std::uint32_t>(part->size());
            for (const int shift : {24, 16, 8, 0}) before += static_cast<char>(size >> shift);
            before += *part;
        }
        StatementBuilder sql(tables_.dialect);
        sql.text("INSERT INTO " + building_.dedup +
                 " (key_hash, id, scope, source, message_id, business_key, status, retry_count, "
                 "error_message, created_at, updated_at,"
                 " expire_at, token, nonce, version) SELECT ");
        if (postgres_) {
            sql.text("sha256(").bytes(before);
            sql.text(" || int4send(octet_length(" + bytes + ")) || " + bytes + ")");
        } else {
            sql.text("UNHEX(SHA2(CONCAT(").bytes(before);
            sql.text(", UNHEX(LPAD(HEX(LENGTH(" + bytes + ")), 8, '0')), " + bytes + "), 256))");
        }
        sql.text(", o.id, ").utf8(readable(old_.scope)).text(", ").utf8(readable(old_.source));
        if (postgres_) {
            sql.text(", replace(" + words +
                     ", chr(92), chr(92) || chr(92)), left(o.business_key::text, 255)");
        } else {
            sql.text(", REPLACE(" + words +
                     ", CHAR(92 USING utf8mb4), CHAR(92, 92 USING utf8mb4)), "
                     "LEFT(CONVERT(o.business_key USING utf8mb4), 255)");
        }
        sql.text(
            ", CASE o.status WHEN 1 THEN 1 WHEN 2 THEN 2 ELSE 4 END, COALESCE(o.retry_count, 0), ");
        sql.text(postgres_ ? "left(o.error_message::text, 1000)"
                           : "LEFT(CONVERT(o.error_message USING utf8mb4), 1000)");
        sql.text(", " + created + ", " + changed +
                 ", CASE WHEN o.status = 1 THEN GREATEST(COALESCE(" + utc("expire_at") + ", " +
                 clock + "), ");
        if (postgres_)
            sql.text(clock + " + ").number(keep).text(" * interval '1 microsecond'");
        else
            sql.text("DATE_ADD(" + clock + ", INTERVAL ").number(keep).text(" MICROSECOND)");
        sql.text(") END, GREATEST(1, " + microseconds_of(tables_.dialect, created) + "), ")
            .bytes(std::string(16, '\0'));
        sql.text(", 1 FROM " + table + " o");
        return sql;
    }

    // ---- the end

    /// What was changed in `table` after it was copied. Nothing, unless somebody writes.
    [[nodiscard]] std::vector<Statement> catching_up(const std::string& table) const {
        const std::string other =
            " (b.status <> CASE o.status WHEN 1 THEN 1 WHEN 2 THEN 2 ELSE 4 END OR b.retry_count "
            "<> COALESCE(o.retry_count, 0))";
        std::vector<Statement> statements;
        statements.push_back({.text = postgres_ ? "DELETE FROM " + building_.dedup + " b USING " +
                                                      table + " o WHERE o.id = b.id AND" + other
                                                : "DELETE b FROM " + building_.dedup + " b JOIN " +
                                                      table + " o ON o.id = b.id WHERE" + other,
                              .parameters = {}});
        StatementBuilder rest = copying_from(table);
        rest.text(" WHERE NOT EXISTS (SELECT 1 FROM " + building_.dedup + " b WHERE b.id = o.id)")
            .text(on_conflict());
        statements.push_back(rest.finish());
        return statements;
    }
    [[nodiscard]] std::vector<Statement> switching() const {
        std::vector<Statement> all;
        const auto add = [&](std::string text) {
            all.push_back({.text = std::move(text), .parameters = {}});
        };
        if (postgres_) {
            add("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE");
            add("SET LOCAL lock_timeout = '" + std::to_string(rename_wait_s) + "s'");
            add("LOCK TABLE " + (resumes_ ? saved_name_ : old_name_) + " IN ACCESS EXCLUSIVE MODE");
        } else {
            add("SET @semel_wait = @@SESSION.lock_wait_timeout, SESSION lock_wait_timeout = " +
                std::to_string(rename_wait_s));
            if (!resumes_) add("RENAME TABLE " + old_name_ + " TO " + saved_name_);
            add("SET SESSION lock_wait_timeout = @semel_wait");
        }
        for (Statement& one : catching_up(postgres_ && !resumes_ ? old_name_ : saved_name_))
            all.push_back(std::move(one));
        if (postgres_) {
            if (!resumes_)
                add("ALTER TABLE " + old_name_ + " RENAME TO \"" + old_.table + "_before_semel\"");
            add("SELECT setval(pg_get_serial_sequence('" + building_.dedup +
                "', 'id'), (SELECT COALESCE(MAX(id), 0) + 1 FROM " + building_.dedup + "))");
            add("ALTER TABLE " + building_.dedup + " RENAME TO \"" + place_.dedup_table + "\"");
            add("COMMIT");
        } else {
            add("RENAME TABLE " + building_.dedup + " TO " + tables_.dedup);
        }
        return all;
    }

    base::Result<void> switch_in_transaction(const Marks& before) {
        const std::vector<Statement> all = switching();
        const std::span<const Statement> statements = all;
        constexpr std::size_t locked = 3;
        auto answer = ask(statements.first(locked));
        if (answer && !resumes_ && !old_.accept_writer) {
            auto now = marks_of(old_name_);
            if (!now)
                answer = now.error();
            else if (!(*now == before))
                answer = somebody_writes();
        }
        if (answer) answer = ask(statements.subspan(locked));
        if (answer) return {};
        base::Error error = answer.error();
        if (error.applied != base::Applied::unknown) static_cast<void>(ask("ROLLBACK"));
        return error;
    }

    /// MySQL renames by itself: first the old table away, which stops its writers, then what they
    /// had changed, then the new one into its place. What is interrupted in between is taken up by
    /// the next migration.
    base::Result<void> switch_by_renaming(const Marks& before) {
        const std::vector<Statement> all = switching();
        const std::span<const Statement> statements = all;
        const std::size_t away = resumes_ ? 2 : 3;
        if (auto renamed = ask(statements.first(away)); !renamed) {
            static_cast<void>(ask("SET SESSION lock_wait_timeout = @semel_wait"));
            return renamed.error();
        }
        if (!resumes_ && !old_.accept_writer) {
            auto now = marks_of(saved_name_);
            if (!now) return now.error();
            if (!(*now == before)) {
                if (auto back = ask("RENAME TABLE " + saved_name_ + " TO " + old_name_); !back)
                    return back.error();
                return somebody_writes();
            }
        }
        if (auto rest = ask(statements.subspan(away)); !rest) return rest.error();
        return {};
    }

    Executor& executor_;
    const Place& place_;
    const OldTable& old_;
    const Tables tables_;
    const bool postgres_;
    const Place build_;
    const Tables building_;
    const std::string old_name_, saved_name_;
    std::map<std::string, std::string> columns_;  ///< Of the old table, and their types.
    bool resumes_ = false;
};

}  // namespace

base::Result<OldTablePlan> plan_old_table(Executor& executor, const Place& place,
                                          const OldTable& old) {
    return Migration(executor, place, old).plan();
}

base::Result<std::int64_t> migrate_old_table(Executor& executor, const Place& place,
                                             const OldTable& old, const Progress& progress) {
    return Migration(executor, place, old).run(progress);
}

}  // namespace semel::inbox
