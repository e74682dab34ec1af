#include "stores/postgres/plain_connection.hpp"

#include <libpq-fe.h>

#include <optional>
#include <vector>

#include "stores/postgres/checks.hpp"
#include "stores/postgres/connection.hpp"
#include "stores/postgres/executor.hpp"

namespace semel::stores::postgres {
namespace {

struct Own {
    PGconn* connection = nullptr;
    std::unique_ptr<sql::Executor> executor;

    Own() = default;
    Own(const Own&) = delete;
    Own& operator=(const Own&) = delete;
    ~Own() {
        executor.reset();
        PQfinish(connection);
    }
};

/// To a server that has just answered.
base::Result<std::shared_ptr<sql::Executor>> open(const Target& target, bool pooled,
                                                  std::chrono::milliseconds timeout,
                                                  std::chrono::milliseconds deadline) {
    const std::string seconds =
        std::to_string(std::chrono::ceil<std::chrono::seconds>(timeout).count());
    std::vector<const char*> keywords{"connect_timeout"};
    std::vector<const char*> values{seconds.c_str()};
    for (const auto& [keyword, value] : target.settings) {
        keywords.push_back(keyword.c_str());
        values.push_back(value.c_str());
    }
    keywords.push_back(nullptr);
    values.push_back(nullptr);
    auto own = std::make_shared<Own>();
    own->connection = PQconnectdbParams(keywords.data(), values.data(), 0);
    if (PQstatus(own->connection) != CONNECTION_OK) {
        return base::Error{.code = base::ErrorCode::store_unavailable,
                           .detail = "PostgreSQL at " + target.name + " cannot be reached (" +
                                     message_of(own->connection) + "): try again"};
    }
    PQsetNoticeProcessor(own->connection, [](void*, const char*) {}, nullptr);
    own->executor =
        executor_on(own->connection, deadline, pooled ? Prepare::never : Prepare::repeated);
    // A pooler would hand the setting on to somebody else.
    if (!pooled) {
        auto set = own->executor->run(
            sql::Statement{.text = "SET statement_timeout = 0", .parameters = {}});
        if (auto* problem = std::get_if<sql::Problem>(&set)) return std::move(problem->error);
    }
    return std::shared_ptr<sql::Executor>(own, own->executor.get());
}

}  // namespace

base::Result<std::shared_ptr<sql::Executor>> connect_plain(const std::string& url,
                                                           std::chrono::milliseconds timeout,
                                                           std::chrono::milliseconds deadline) {
    const auto targets = targets_of(url);
    if (!targets) return targets.error();
    std::optional<base::Error> problem;
    for (const Target& target : *targets) {
        // The store's own way in finds out whether this is the server, and says it best if not.
        auto tried = Connection::open(target, std::chrono::steady_clock::now() + timeout);
        if (auto* failed = std::get_if<Failed>(&tried)) {
            if (problem)
                problem->detail += "; " + failed->problem.error.detail;
            else
                problem = std::move(failed->problem.error);
            continue;
        }
        const Connection& connection = *std::get<0>(tried);
        if (auto checked = check_version(connection); !checked) return checked.error();
        return open(target, connection.pooled(), timeout, deadline);
    }
    return std::move(*problem);
}

}  // namespace semel::stores::postgres
