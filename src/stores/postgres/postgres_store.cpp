#include "stores/postgres/postgres_store.hpp"

#include <algorithm>
#include <atomic>
#include <utility>

#include "sql/sql_store.hpp"
#include "stores/postgres/checks.hpp"
#include "stores/postgres/migration.hpp"
#include "stores/postgres/session.hpp"

namespace semel::stores {
namespace {

using postgres::Connection;
using postgres::Failed;
using postgres::Statements;
using postgres::Target;
using sql::Problem;
using sql::Tried;
using sql::Trouble;

constexpr const char* schema_default = "semel";
constexpr std::size_t schema_max_bytes = 63;  // PostgreSQL's for a name
/// Making tables, and waiting for another process that makes them.
constexpr std::chrono::seconds migration_timeout{60};

/// Finds the server that may be written to. Thread-safe.
class Connector {
  public:
    Connector(std::vector<Target> targets, std::chrono::milliseconds timeout)
        : targets_(std::move(targets)), timeout_(timeout) {}

    Tried<std::unique_ptr<Connection>> connect() {
        std::vector<Failed> failures;
        const std::size_t first = last_good_.load();
        for (std::size_t i = 0; i < targets_.size(); ++i) {
            const std::size_t at = (first + i) % targets_.size();
            auto made = Connection::open(targets_[at], std::chrono::steady_clock::now() + timeout_);
            if (auto* connection = std::get_if<std::unique_ptr<Connection>>(&made)) {
                last_good_.store(at);
                return std::move(*connection);
            }
            failures.push_back(std::move(std::get<Failed>(made)));
        }
        Problem problem = std::move(failures.front().problem);
        for (std::size_t i = 1; i < failures.size(); ++i) {
            const Problem& other = failures[i].problem;
            problem.error.detail += "; " + other.error.detail;
            // What a person must mend is the most telling; a standby alone is none.
            if (other.trouble == Trouble::refused || problem.trouble == Trouble::not_writable) {
                problem.trouble = other.trouble;
                problem.error.code = other.error.code;
            }
        }
        return problem;
    }

  private:
    const std::vector<Target> targets_;
    const std::chrono::milliseconds timeout_;
    std::atomic<std::size_t> last_good_{0};
};

/// What opening and planning begin with.
struct Opened {
    std::shared_ptr<const Statements> statements;
    std::shared_ptr<Connector> connector;
    std::unique_ptr<Connection> connection;
};

base::Result<Opened> begin(const PostgresOptions& options) {
    const std::string schema = options.schema.empty() ? schema_default : options.schema;
    const bool plain = std::all_of(schema.begin(), schema.end(), [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
    });
    if (!plain || schema.size() > schema_max_bytes) {
        return base::Error{.code = base::ErrorCode::invalid_argument,
                           .detail = "the PostgreSQL schema must be 1 to 63 of a-z, 0-9 and _"};
    }
    auto targets = postgres::targets_of(options.url);
    if (!targets) return targets.error();
    Opened out{
        .statements = std::make_shared<const Statements>(schema),
        .connector = std::make_shared<Connector>(std::move(*targets), options.connect_timeout),
        .connection = nullptr};
    auto made = out.connector->connect();
    if (auto* problem = std::get_if<Problem>(&made)) return std::move(problem->error);
    out.connection = std::move(std::get<0>(made));
    if (auto checked = postgres::check_version(*out.connection); !checked) return checked.error();
    return out;
}

}  // namespace

base::Result<std::unique_ptr<core::Store>> open_postgres_store(const PostgresOptions& options,
                                                               PostgresReport* report) {
    auto begun = begin(options);
    if (!begun) return begun.error();
    const std::shared_ptr<const Statements> statements = begun->statements;
    const std::shared_ptr<Connector> connector = begun->connector;
    std::unique_ptr<Connection>& connection = begun->connection;
    const auto deadline = std::chrono::steady_clock::now() + migration_timeout;
    if (options.migrate) {
        if (auto migrated = postgres::migrate(*connection, *statements, deadline); !migrated)
            return migrated.error();
    } else {
        const auto missing = postgres::plan_migration(*connection, *statements, deadline);
        if (!missing) return missing.error();
        if (!missing->empty()) {
            return base::Error{
                .code = base::ErrorCode::invalid_argument,
                .detail = "PostgreSQL at " + connection->name() + ": the tables in the schema " +
                          statements->schema() +
                          " are missing or of an older version: run `semel store migrate`, "
                          "or leave `migrate` at true"};
        }
    }
    auto found = postgres::check_server(*connection, *statements, options.connect_timeout);
    if (!found) return found.error();
    if (report != nullptr) {
        *report = {.version = found->version,
                   .pooled = connection->pooled(),
                   .notices = std::move(found->notices),
                   .wrong = std::move(found->wrong)};
    }
    sql::Connect connect = [connector, statements,
                            timeout =
                                options.connect_timeout]() -> Tried<std::unique_ptr<sql::Session>> {
        auto made = connector->connect();
        if (auto* problem = std::get_if<Problem>(&made)) return std::move(*problem);
        auto& fresh = std::get<0>(made);
        if (auto problem =
                postgres::wrong_version(*fresh, *statements, sql::Ask{.deadline = timeout})) {
            return std::move(*problem);
        }
        return postgres::make_session(std::move(fresh), statements);
    };
    sql::SqlStoreOptions store{.name = "postgres",
                               .connections = options.connections,
                               .batch_max = options.batch_max,
                               .time = options.time,
                               .durability = std::move(found->durability)};
    return sql::make_sql_store(std::move(store), std::move(connect),
                               postgres::make_session(std::move(connection), statements));
}

base::Result<std::vector<std::string>> plan_postgres_migration(const PostgresOptions& options) {
    auto begun = begin(options);
    if (!begun) return begun.error();
    return postgres::plan_migration(*begun->connection, *begun->statements,
                                    std::chrono::steady_clock::now() + migration_timeout);
}

}  // namespace semel::stores
