#include "stores/postgres/migration.hpp"

#include <algorithm>

namespace semel::stores::postgres {

namespace {

/// What migrations/*.sql make, and what remembers their version.
constexpr const char* tables_known =
    "'semel_schema', 'semel_records', 'semel_chunks', 'semel_conversations', 'semel_turns', "
    "'semel_values', 'semel_parking', 'semel_parked'";

struct Tables {
    bool schema = false;
    int version = 0;  ///< 0: there are none.
};

std::string place(const Connection& connection, const Statements& statements) {
    return "PostgreSQL at " + connection.name() + ", database " + connection.database() +
           ", schema " + statements.schema() + ": ";
}

base::Error error_of(const Connection& connection, const Statements& statements,
                     const Failed& failed) {
    base::Error error = failed.problem.error;
    const std::string where = place(connection, statements);
    if (failed.sqlstate == "42501") {
        error.code = base::ErrorCode::invalid_argument;
        error.detail = where + "the user " + connection.user() +
                       " may not make or read the tables: CREATE SCHEMA " + statements.schema() +
                       " AUTHORIZATION " + connection.user() +
                       " lets it make them; or make them yourself as the PostgreSQL guide says, "
                       "and grant their use";
        return error;
    }
    if (failed.sqlstate == "42P07" || failed.sqlstate == "42P06") {
        error.code = base::ErrorCode::invalid_argument;
        error.detail =
            where + "somebody makes tables of the same names at this moment: start again";
        return error;
    }
    error.code = base::ErrorCode::store_unavailable;
    error.detail = where + error.detail;
    return error;
}

base::Error newer(const std::string& where, int version) {
    return {.code = base::ErrorCode::store_version,
            .detail = where + "the tables have version " + std::to_string(version) +
                      ", and this program knows up to " + std::to_string(schema_version) +
                      ": start the version that made them, or a newer one"};
}

base::Result<Tables> look(Connection& connection, const Statements& statements,
                          base::SteadyTime deadline) {
    const std::string& schema = statements.schema();
    const std::vector<std::string> questions{
        "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = '" + schema + "')",
        "SELECT c.relname::text FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON "
        "n.oid = c.relnamespace "
        "WHERE n.nspname = '" +
            schema + "' AND c.relname IN (" + tables_known +
            ") ORDER BY c.relname <> 'semel_schema'"};
    auto answer = connection.plain(questions, deadline);
    if (const auto* failed = std::get_if<Failed>(&answer))
        return error_of(connection, statements, *failed);
    const auto& rows = std::get<0>(answer);
    Tables found{.schema = rows[0].flag(0, 0)};
    if (rows[1].size() == 0) return found;
    const std::string where = place(connection, statements);
    const std::string cure =
        "; name another schema in store.postgres.schema, or move the table away";
    if (rows[1].bytes(0, 0) != "semel_schema") {
        return base::Error{.code = base::ErrorCode::invalid_argument,
                           .detail = where + "there is a table " +
                                     std::string(rows[1].bytes(0, 0)) +
                                     " that this program did not make" + cure};
    }
    auto version = connection.plain(std::span(&statements.version().sql, 1), deadline);
    if (const auto* failed = std::get_if<Failed>(&version)) {
        if (failed->sqlstate == "42703") {
            return base::Error{
                .code = base::ErrorCode::invalid_argument,
                .detail =
                    where + "the table semel_schema is not one that this program made" + cure};
        }
        return error_of(connection, statements, *failed);
    }
    const Rows& told = std::get<0>(version).front();
    if (told.size() != 1) {
        return base::Error{
            .code = base::ErrorCode::invalid_argument,
            .detail = where + "the table semel_schema has " + std::to_string(told.size()) +
                      " rows instead of one, so the tables' version is not known: restore it"};
    }
    found.version = static_cast<int>(told.number(0, 0));
    if (found.version > schema_version) return newer(where, found.version);
    return found;
}

std::vector<std::string> steps_from(const Tables& tables, const Statements& statements) {
    std::vector<std::string> out;
    if (!tables.schema) out.push_back("CREATE SCHEMA \"" + statements.schema() + '"');
    for (int version = tables.version + 1; version <= schema_version; ++version) {
        for (std::string& one : statements.migration(version)) out.push_back(std::move(one));
    }
    return out;
}

}  // namespace

base::Result<std::vector<std::string>> plan_migration(Connection& connection,
                                                      const Statements& statements,
                                                      base::SteadyTime deadline) {
    const auto tables = look(connection, statements, deadline);
    if (!tables) return tables.error();
    if (tables->version == schema_version) return std::vector<std::string>();
    return steps_from(*tables, statements);
}

base::Result<void> migrate(Connection& connection, const Statements& statements,
                           base::SteadyTime deadline) {
    const auto before = look(connection, statements, deadline);
    if (!before) return before.error();
    if (before->version == schema_version) return {};
    // One at a time; the others look again once the first is done.
    const std::vector<std::string> begin{
        "BEGIN ISOLATION LEVEL READ COMMITTED", "SET LOCAL lock_timeout = '60s'",
        "SELECT pg_advisory_xact_lock(hashtextextended('semel migration " + statements.schema() +
            "', 0))"};
    auto begun = connection.plain(begin, deadline);
    if (const auto* failed = std::get_if<Failed>(&begun))
        return error_of(connection, statements, *failed);
    const std::string undo = "ROLLBACK";
    const auto tables = look(connection, statements, deadline);
    if (!tables) {
        (void)connection.plain(std::span(&undo, 1), deadline);
        return tables.error();
    }
    std::vector<std::string> steps;
    if (tables->version != schema_version) steps = steps_from(*tables, statements);
    steps.emplace_back("COMMIT");
    auto done = connection.plain(steps, deadline);
    if (const auto* failed = std::get_if<Failed>(&done)) {
        (void)connection.plain(std::span(&undo, 1), deadline);
        return error_of(connection, statements, *failed);
    }
    return {};
}

std::optional<sql::Problem> wrong_version(Connection& connection, const Statements& statements,
                                          const sql::Ask& ask) {
    const Step step{&statements.version(), {}};
    auto answer = connection.run(std::span(&step, 1), ask);
    if (auto* failed = std::get_if<Failed>(&answer)) return std::move(failed->problem);
    const Rows& rows = std::get<0>(answer).front();
    const std::string where = place(connection, statements);
    const int version = rows.size() == 1 ? static_cast<int>(rows.number(0, 0)) : 0;
    if (version == schema_version) return {};
    if (version > schema_version) return sql::Problem{sql::Trouble::refused, newer(where, version)};
    return sql::Problem{
        sql::Trouble::refused,
        {.code = base::ErrorCode::invalid_argument,
         .detail = where + "the tables have version " + std::to_string(version) + ", and version " +
                   std::to_string(schema_version) + " is needed: run `semel store migrate`"}};
}

}  // namespace semel::stores::postgres
