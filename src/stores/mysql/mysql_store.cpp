#include "stores/mysql/mysql_store.hpp"

#include <utility>

#include "sql/sql_store.hpp"
#include "stores/mysql/checks.hpp"
#include "stores/mysql/migration.hpp"
#include "stores/mysql/session.hpp"

namespace semel::stores {
namespace {

using mysql::Connection;
using mysql::Target;
using sql::Problem;
using sql::Tried;
using std::chrono::steady_clock;

/// Making tables, and waiting for another process that makes them.
constexpr std::chrono::seconds migration_timeout{60};

struct Opened {
    Target target;
    std::unique_ptr<Connection> connection;
};

base::Result<Opened> begin(const MysqlOptions& options) {
    auto target = mysql::parse_url(options.url);
    if (!target) return target.error();
    const std::string name = mysql::describe(*target);
    auto made = Connection::open(*target, options.connect_timeout);
    if (auto* problem = std::get_if<Problem>(&made)) return std::move(problem->error);
    Opened out{.target = std::move(*target), .connection = std::move(std::get<0>(made))};
    if (auto checked = mysql::check_version(out.connection->server(), name); !checked)
        return checked.error();
    const auto deadline = steady_clock::now() + options.connect_timeout;
    if (auto problem = mysql::check_writable(*out.connection, name, deadline)) {
        if (problem->trouble == sql::Trouble::not_writable)
            problem->error.code = base::ErrorCode::invalid_argument;
        return std::move(problem->error);
    }
    return out;
}

Tried<std::unique_ptr<sql::Session>> connect_session(const Target& target,
                                                     std::chrono::milliseconds timeout) {
    auto made = Connection::open(target, timeout);
    if (auto* problem = std::get_if<Problem>(&made)) return std::move(*problem);
    auto& connection = std::get<0>(made);
    const auto deadline = steady_clock::now() + timeout;
    if (auto problem = mysql::check_writable(*connection, mysql::describe(target), deadline))
        return std::move(*problem);
    if (auto problem = mysql::wrong_version(*connection, deadline)) return std::move(*problem);
    return mysql::make_session(std::move(connection));
}

}  // namespace

base::Result<std::unique_ptr<core::Store>> open_mysql_store(const MysqlOptions& options,
                                                            MysqlReport* report) {
    auto begun = begin(options);
    if (!begun) return begun.error();
    std::unique_ptr<Connection>& connection = begun->connection;
    const std::string name = mysql::describe(begun->target);
    const auto deadline = steady_clock::now() + migration_timeout;
    const auto named = [&](base::Error error) {
        error.detail =
            "the database '" + begun->target.database + "' at " + name + ": " + error.detail;
        return error;
    };
    if (options.migrate) {
        if (auto migrated = mysql::migrate(*connection, deadline); !migrated)
            return named(migrated.error());
    } else {
        const auto missing = mysql::plan_migration(*connection, deadline);
        if (!missing) return named(missing.error());
        if (!missing->empty())
            return named({.code = base::ErrorCode::invalid_argument,
                          .detail = "its tables are missing or of an older version: run the "
                                    "migration, or let the store migrate by "
                                    "itself (`migrate: true`)"});
    }
    auto found = mysql::check_server(*connection, name, options.connect_timeout);
    if (!found) return found.error();
    if (report != nullptr)
        *report = {.version = found->version,
                   .notices = std::move(found->notices),
                   .wrong = std::move(found->wrong)};

    sql::Connect connect = [target = begun->target, timeout = options.connect_timeout] {
        return connect_session(target, timeout);
    };
    sql::SqlStoreOptions store{.name = "mysql",
                               .connections = options.connections,
                               .batch_max = options.batch_max,
                               .time = options.time,
                               .durability = std::move(found->durability)};
    return sql::make_sql_store(std::move(store), std::move(connect),
                               mysql::make_session(std::move(connection)));
}

base::Result<std::vector<std::string>> plan_mysql_migration(const MysqlOptions& options) {
    auto begun = begin(options);
    if (!begun) return begun.error();
    auto plan = mysql::plan_migration(*begun->connection, steady_clock::now() + migration_timeout);
    if (plan) return plan;
    base::Error error = plan.error();
    error.detail = "the database '" + begun->target.database + "' at " +
                   mysql::describe(begun->target) + ": " + error.detail;
    return error;
}

}  // namespace semel::stores
