#include "inbox/schema.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <sstream>
#include <utility>

#include "inbox/migrations.hpp"

namespace semel::inbox {
namespace {

using sql::Dialect;
using sql::Executor;
using sql::Statement;

/// Held while tables are made, so that two processes that start at once do not collide in
/// PostgreSQL's catalogue. Any number that nobody else uses: "semel/in".
constexpr const char* creation_lock = "8315178084274547310";

base::Error wrong(std::string detail) {
    return {.code = base::ErrorCode::invalid_argument, .detail = "inbox: " + std::move(detail)};
}

base::Result<sql::ResultRows> ask(Executor& executor, Statement statement) {
    auto answer = executor.run(std::move(statement));
    if (auto* problem = std::get_if<sql::Problem>(&answer)) return std::move(problem->error);
    return std::move(std::get<sql::ResultRows>(answer));
}

std::string replaced(std::string text, std::string_view what, std::string_view by) {
    for (std::size_t at = text.find(what); at != std::string::npos;
         at = text.find(what, at + by.size()))
        text.replace(at, what.size(), by);
    return text;
}

/// Without comments, cut where a semicolon ends a line.
std::vector<std::string> statements_of(const std::string& script) {
    std::vector<std::string> statements;
    std::string one;
    std::istringstream lines(script);
    for (std::string line; std::getline(lines, line);) {
        if (line.starts_with("--")) continue;
        const bool last = line.ends_with(';');
        if (last) line.pop_back();
        one += one.empty() ? line : "\n" + line;
        if (!last) continue;
        statements.push_back(std::exchange(one, {}));
    }
    return statements;
}

std::string version_row(const Tables& tables) {
    const std::string values = " (version, applied_at) VALUES (" + std::to_string(schema_version) +
                               ", " + clock_of(tables.dialect) + ")";
    return "INSERT INTO " + tables.schema + values +
           (tables.dialect == Dialect::postgres ? " ON CONFLICT (version) DO NOTHING"
                                                : " ON DUPLICATE KEY UPDATE version = version");
}

/// What the table of version 1 lacks. MySQL, unlike MariaDB, cannot be asked to add it if it is not
/// there.
std::string adding_topic_id(const Tables& tables) {
    return "ALTER TABLE " + tables.offsets +
           (tables.dialect == Dialect::postgres ? " ADD COLUMN IF NOT EXISTS topic_id text"
                                                : " ADD COLUMN topic_id VARBINARY(255)");
}

}  // namespace

std::vector<std::string> creation(const Tables& tables, const Place& place) {
    std::string script = tables.dialect == Dialect::postgres ? postgres_1 : mysql_1;
    script = replaced(std::move(script), "@schema@", tables.schema);
    script = replaced(std::move(script), "@assignments@", tables.assignments);
    script = replaced(std::move(script), "@offsets@", tables.offsets);
    script = replaced(std::move(script), "@flights@", tables.flights);
    script = replaced(std::move(script), "@crashes@", tables.crashes);
    script = replaced(std::move(script), "@dedup_expire@", place.dedup_table + "_expire");
    script = replaced(std::move(script), "@dedup@", tables.dedup);
    std::vector<std::string> statements = statements_of(script);
    statements.push_back(version_row(tables));
    return statements;
}

base::Result<std::map<std::string, std::string>> columns_of(Executor& executor, const Place& place,
                                                            const std::string& table) {
    const Tables tables(executor.dialect(), place);
    StatementBuilder sql(tables.dialect);
    if (tables.dialect == Dialect::postgres) {
        sql.text(
            "SELECT attname::text, format_type(atttypid, NULL) FROM pg_attribute WHERE attrelid = "
            "to_regclass(");
        sql.utf8(tables.named(table)).text(") AND attnum > 0 AND NOT attisdropped");
    } else {
        sql.text(
            "SELECT column_name, column_type FROM information_schema.columns WHERE table_schema "
            "= ");
        if (place.schema.empty())
            sql.text("DATABASE()");
        else
            sql.utf8(place.schema);
        sql.text(" AND table_name = ").utf8(table);
    }
    auto answer = ask(executor, sql.finish());
    if (!answer) return answer.error();
    std::map<std::string, std::string> columns;
    for (const sql::Values& row : answer->rows)
        columns.emplace(row[0].value_or(""), row[1].value_or(""));
    return columns;
}

std::vector<std::string> missing_columns(const std::map<std::string, std::string>& columns) {
    constexpr std::array<const char*, 18> wanted{
        "key_hash",    "id",          "scope",         "source",      "message_id", "business_key",
        "status",      "retry_count", "error_message", "created_at",  "updated_at", "expire_at",
        "lease_until", "token",       "nonce",         "fingerprint", "version",    "record"};
    std::vector<std::string> missing;
    for (const char* name : wanted) {
        if (!columns.contains(name)) missing.emplace_back(name);
    }
    return missing;
}

base::Result<std::vector<std::string>> plan_schema(Executor& executor, const Place& place) {
    if (auto checked = check(place); !checked) return checked.error();
    if (executor.in_transaction())
        return wrong("tables are made outside of a transaction, and the connection is inside one");
    const Tables tables(executor.dialect(), place);
    if (tables.dialect == Dialect::postgres) {
        auto encoding = ask(executor, {.text = "SHOW server_encoding", .parameters = {}});
        if (!encoding) return encoding.error();
        const std::string found = encoding->rows.at(0)[0].value_or("");
        if (found != "UTF8") {
            return wrong("the database's encoding is " + found +
                         ": message ids would not fit. Create the database with ENCODING 'UTF8'");
        }
    }
    bool complete = true;
    bool without_topic_id = false;
    for (const char* table : {"semel_inbox_schema", "semel_assignments", "semel_offsets",
                              "semel_flights", "semel_crashes"}) {
        auto columns = columns_of(executor, place, table);
        if (!columns) return columns.error();
        complete = complete && !columns->empty();
        if (std::string_view(table) == "semel_offsets")
            without_topic_id = !columns->empty() && !columns->contains("topic_id");
        if (std::string_view(table) != "semel_inbox_schema" || columns->empty()) continue;
        auto version =
            ask(executor, {.text = "SELECT max(version) FROM " + tables.schema, .parameters = {}});
        if (!version) return version.error();
        const std::int64_t found = number_of(version->rows.at(0)[0]);
        complete = complete && found == schema_version;
        if (found > schema_version) {
            return base::Error{.code = base::ErrorCode::store_version,
                               .detail = "inbox: the tables have version " + std::to_string(found) +
                                         ", this program knows " + std::to_string(schema_version) +
                                         ": run a newer one"};
        }
    }
    auto dedup = columns_of(executor, place, place.dedup_table);
    if (!dedup) return dedup.error();
    if (!dedup->empty()) {
        const std::vector<std::string> missing = missing_columns(*dedup);
        if (!missing.empty() && !dedup->contains("key_hash") && dedup->contains("message_id")) {
            return wrong(
                "the table " + place.dedup_table +
                " is one of the older shape, keyed by message_id alone: migrate it (`semel "
                "store migrate --old-dedup-table`, docs/guides/inbox.md), or name "
                "another table");
        }
        if (!missing.empty())
            return wrong("the table " + place.dedup_table + " has no column " + missing[0] +
                         ": it is another table; name one of our own");
        // In any other type two messages could be one: text is folded, trimmed or cut.
        const std::string wanted = tables.dialect == Dialect::postgres ? "bytea" : "binary(32)";
        if (const std::string& type = dedup->at("key_hash"); type != wanted)
            return wrong("the column key_hash of " + place.dedup_table + " is " + type +
                         " and not " + wanted +
                         ": ids would not be compared as bytes. Change it back");
    }
    if (complete && !without_topic_id && !dedup->empty()) return std::vector<std::string>{};
    std::vector<std::string> statements = creation(tables, place);
    if (without_topic_id) statements.insert(statements.begin(), adding_topic_id(tables));
    return statements;
}

namespace {

base::Result<void> apply_plan(Executor& executor, const Place& place) {
    auto plan = plan_schema(executor, place);
    if (!plan) return plan.error();
    if (plan->empty()) return {};
    std::vector<Statement> statements;
    const bool postgres = executor.dialect() == Dialect::postgres;
    // MySQL commits each of them by itself; all can be repeated.
    if (postgres) {
        statements.push_back(
            {.text = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE", .parameters = {}});
        statements.push_back(
            {.text = std::string("SELECT pg_advisory_xact_lock(") + creation_lock + ")",
             .parameters = {}});
    }
    for (std::string& text : *plan)
        statements.push_back({.text = std::move(text), .parameters = {}});
    if (postgres) statements.push_back({.text = "COMMIT", .parameters = {}});
    auto answer = executor.run(statements);
    auto* problem = std::get_if<sql::Problem>(&answer);
    if (problem == nullptr) return {};
    if (postgres && problem->trouble != sql::Trouble::lost)
        static_cast<void>(executor.run(Statement{.text = "ROLLBACK", .parameters = {}}));
    return std::move(problem->error);
}

}  // namespace

base::Result<void> apply_schema(Executor& executor, const Place& place) {
    auto applied = apply_plan(executor, place);
    // Another process may have done a part of it in between: what is left can be done.
    return applied ? applied : apply_plan(executor, place);
}

}  // namespace semel::inbox
