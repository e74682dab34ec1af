#include "stores/postgres/connection.hpp"

#include <libpq-fe.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstring>

namespace semel::stores::postgres {

using sql::Problem;
using sql::Trouble;

namespace {

/// A session waits that long for locks unless it is asked for something else.
constexpr std::chrono::milliseconds session_lock_wait = sql::Ask{}.lock_wait;

// Plans are made for the tables as they grow, not as they were when a statement was first prepared:
// the index, always.
constexpr const char* session_settings =
    "SELECT set_config('lock_timeout', $1, false), "
    "set_config('default_transaction_isolation', 'read committed', false), "
    "set_config('default_transaction_deferrable', 'off', false), "
    "set_config('idle_in_transaction_session_timeout', '10s', false), "
    "set_config('plan_cache_mode', 'force_generic_plan', false), "
    "set_config('enable_seqscan', 'off', false), set_config('enable_hashjoin', 'off', false), "
    "set_config('enable_mergejoin', 'off', false), set_config('enable_bitmapscan', 'off', false), "
    "set_config('jit', 'off', false)";
constexpr const char* transaction_settings =
    "SELECT set_config('lock_timeout', $1, true), set_config('enable_seqscan', 'off', true), "
    "set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true), "
    "set_config('enable_bitmapscan', 'off', true), set_config('jit', 'off', true)";
constexpr const char* lock_setting = "SELECT set_config('lock_timeout', $1, true)";

std::string in_ms(std::chrono::milliseconds duration) {
    // 0 would be: for ever.
    return std::to_string(std::max<std::int64_t>(duration.count(), 1)) + "ms";
}

std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> out;
    std::size_t from = 0;
    while (true) {
        const std::size_t comma = text.find(',', from);
        out.push_back(text.substr(from, comma - from));
        if (comma == std::string::npos) return out;
        from = comma + 1;
    }
}

base::Error bad_url(const std::string& why) {
    return {.code = base::ErrorCode::invalid_argument,
            .detail = "the PostgreSQL URL " + why +
                      "; it is written postgresql://USER:PASSWORD@HOST:PORT/DATABASE, with what is "
                      "special in a password "
                      "percent-encoded"};
}

struct FreeOptions {
    void operator()(PQconninfoOption* options) const { PQconninfoFree(options); }
};
using Options = std::unique_ptr<PQconninfoOption, FreeOptions>;

/// The SQLSTATE in a message at PQERRORS_VERBOSE ("FATAL:  28P01: words"): libpq gives a failed
/// connection no other way to it.
std::string sqlstate_in(std::string_view message, std::string& words) {
    constexpr std::size_t state_bytes = 5;
    std::size_t at = 0;
    while ((at = message.find(":  ", at)) != std::string_view::npos) {
        at += 3;
        const std::string_view state = message.substr(at, state_bytes);
        const bool is_state = state.size() == state_bytes &&
                              std::all_of(state.begin(), state.end(), [](unsigned char c) {
                                  return std::isdigit(c) != 0 || (c >= 'A' && c <= 'Z');
                              });
        if (!is_state || message.substr(at + state_bytes, 2) != ": ") continue;
        words = message.substr(at + state_bytes + 2);
        words.resize(std::min(words.find('\n'), words.size()));
        return std::string(state);
    }
    return {};
}

Failed failed(Trouble trouble, std::string detail, std::string sqlstate = {}) {
    const auto code = trouble == Trouble::refused ? base::ErrorCode::invalid_argument
                                                  : base::ErrorCode::store_unavailable;
    return {{trouble,
             {.code = code,
              .applied = base::Applied::no,
              .retry_after = std::chrono::seconds{trouble == Trouble::refused ? 0 : 1},
              .detail = std::move(detail)}},
            std::move(sqlstate),
            0,
            false};
}

/// Why the connection could not be made, with cause and cure.
Failed connect_failure(PGconn* connection, const std::string& name) {
    const std::string server = "PostgreSQL at " + name + " ";
    const std::string message = PQerrorMessage(connection);
    std::string words;
    const std::string state = sqlstate_in(message, words);
    const std::string user = PQuser(connection) == nullptr ? "" : PQuser(connection);
    const std::string database = PQdb(connection) == nullptr ? "" : PQdb(connection);
    const std::string said = words.empty() ? "" : " (" + words + ")";
    if (PQconnectionNeedsPassword(connection) != 0)
        return failed(Trouble::refused,
                      server + "wants a password of the user " + user + ": put it into the URL",
                      state);
    if (state == "28P01") {
        return failed(Trouble::refused,
                      server + "does not take the password of the user " + user +
                          ": correct it in the URL, or set it with ALTER ROLE",
                      state);
    }
    if (state.starts_with("28")) {
        return failed(Trouble::refused,
                      server + "does not let the user " + user + " in" + said +
                          ": create the role, or allow it this database, address and encryption in "
                          "pg_hba.conf",
                      state);
    }
    if (state == "3D000") {
        return failed(Trouble::refused,
                      server + "has no database " + database +
                          ": create it (CREATE DATABASE), or correct the URL",
                      state);
    }
    if (state == "42501") {
        return failed(Trouble::refused,
                      server + "does not let the user " + user + " connect to the database " +
                          database + ": GRANT CONNECT ON DATABASE " + database + " TO " + user,
                      state);
    }
    if (state == "53300") {
        return failed(Trouble::lost,
                      server + "has no connection to spare" + said +
                          ": raise max_connections, lower `connections` of the gateways, or put a "
                          "pooler in front of it",
                      state);
    }
    if (state == "57P03")
        return failed(Trouble::lost,
                      server + "is starting up or shutting down" + said + ": it is tried again",
                      state);
    if (!state.empty())
        return failed(Trouble::lost,
                      server + "refuses the connection" + said + ": look into its log", state);
    return failed(Trouble::lost, server + "cannot be reached (" + message_of(connection) +
                                     "): start it, or correct host, port and sslmode in the URL");
}

}  // namespace

base::Result<std::vector<Target>> targets_of(const std::string& url) {
    if (url.empty()) return bad_url("is empty");
    char* ignored = nullptr;  // quotes the URL
    const Options options(PQconninfoParse(url.c_str(), &ignored));
    PQfreemem(ignored);
    if (options == nullptr) return bad_url("cannot be read");
    std::vector<std::pair<std::string, std::string>> settings;
    std::string host, address, port;
    for (const PQconninfoOption* one = options.get(); one->keyword != nullptr; ++one) {
        if (one->val == nullptr) continue;
        const std::string_view keyword = one->keyword;
        if (keyword == "host")
            host = one->val;
        else if (keyword == "hostaddr")
            address = one->val;
        else if (keyword == "port")
            port = one->val;
        else if (keyword != "target_session_attrs" && keyword != "connect_timeout" &&
                 keyword != "client_encoding" && keyword != "replication")
            settings.emplace_back(keyword, one->val);
    }
    settings.emplace_back("client_encoding", "UTF8");
    settings.emplace_back("fallback_application_name", "semel");
    const std::vector<std::string> hosts = split(host);
    const std::vector<std::string> addresses = split(address);
    const std::vector<std::string> ports = split(port);
    const std::size_t count = std::max(hosts.size(), addresses.size());
    const auto fits = [count](std::size_t size) { return size == 1 || size == count; };
    if ((!host.empty() && hosts.size() != count) ||
        (!address.empty() && addresses.size() != count) || !fits(ports.size()))
        return bad_url("names another number of hosts than of ports or addresses");
    std::vector<Target> out;
    for (std::size_t i = 0; i < count; ++i) {
        Target target{.settings = settings, .name = {}};
        const auto take = [&](const char* keyword, const std::vector<std::string>& all) {
            const std::string& value = all.size() == 1 ? all[0] : all[i];
            if (!value.empty()) target.settings.emplace_back(keyword, value);
            return value;
        };
        const std::string one_host = take("host", hosts);
        const std::string one_address = take("hostaddr", addresses);
        const std::string one_port = take("port", ports);
        target.name = !one_host.empty()      ? one_host
                      : !one_address.empty() ? one_address
                                             : "its default socket";
        target.name += ":" + (one_port.empty() ? std::string("5432") : one_port);
        out.push_back(std::move(target));
    }
    return out;
}

Connection::Connection(pg_conn* connection, std::string name)
    : connection_(connection), name_(std::move(name)) {}
Connection::~Connection() { PQfinish(connection_); }

std::string Connection::user() const { return PQuser(connection_); }
std::string Connection::database() const { return PQdb(connection_); }

std::variant<std::unique_ptr<Connection>, Failed> Connection::open(const Target& target,
                                                                   base::SteadyTime deadline) {
    std::vector<const char*> keywords;
    std::vector<const char*> values;
    for (const auto& [keyword, value] : target.settings) {
        keywords.push_back(keyword.c_str());
        values.push_back(value.c_str());
    }
    keywords.push_back(nullptr);
    values.push_back(nullptr);
    PGconn* raw = PQconnectStartParams(keywords.data(), values.data(), 0);
    if (raw == nullptr) return failed(Trouble::lost, "no memory for a connection to PostgreSQL");
    std::unique_ptr<Connection> made(new Connection(raw, target.name));
    PQsetErrorVerbosity(raw, PQERRORS_VERBOSE);
    PQsetNoticeProcessor(raw, [](void*, const char*) {}, nullptr);
    PostgresPollingStatusType wanted = PGRES_POLLING_WRITING;
    if (PQstatus(raw) == CONNECTION_BAD) return connect_failure(raw, target.name);
    while (wanted != PGRES_POLLING_OK) {
        if (wanted == PGRES_POLLING_FAILED) return connect_failure(raw, target.name);
        if (!wait_until_ready(PQsocket(raw), wanted == PGRES_POLLING_READING,
                              wanted == PGRES_POLLING_WRITING, deadline)) {
            return failed(
                Trouble::lost,
                "PostgreSQL at " + target.name +
                    " did not answer in time: it hangs, or a firewall is in the way; it is tried "
                    "again");
        }
        wanted = PQconnectPoll(raw);
    }
    PQsetnonblocking(raw, 1);
    PQenterPipelineMode(raw);
    if (auto problem = made->greet(deadline)) return std::move(*problem);
    return made;
}

std::optional<Failed> Connection::greet(base::SteadyTime deadline) {
    const Command who{.sql =
                          "SELECT pg_backend_pid(), pg_is_in_recovery(), "
                          "current_setting('server_version_num')::integer, "
                          "current_setting('default_transaction_read_only') = 'on'",
                      .parameters = {}};
    auto answer = exchange(connection_, std::span(&who, 1), Commits::at_the_end, deadline);
    if (auto* problem = std::get_if<Failed>(&answer)) {
        problem->problem.error.detail =
            "PostgreSQL at " + name_ + ": " + problem->problem.error.detail;
        return std::move(*problem);
    }
    const Rows& rows = std::get<0>(answer).front();
    pooled_ = rows.number(0, 0) != PQbackendPID(connection_);
    version_ = static_cast<int>(rows.number(0, 2));
    if (rows.flag(0, 1)) {
        return failed(Trouble::not_writable,
                      "PostgreSQL at " + name_ +
                          " is a read-only standby: name its primary in the URL, or all servers "
                          "(HOST1:PORT,HOST2:PORT), of which the primary is found");
    }
    // As a primary is made that hands over to another.
    if (rows.flag(0, 3)) {
        return failed(Trouble::not_writable,
                      "PostgreSQL at " + name_ + " is set read-only for the user " + user() +
                          " (default_transaction_read_only = on): ALTER ROLE " + user() +
                          " SET default_transaction_read_only = off, or name another server");
    }
    return pooled_ ? std::nullopt : set_up(deadline);
}

std::optional<Failed> Connection::set_up(base::SteadyTime deadline) {
    const Parameter lock_wait = text(in_ms(session_lock_wait));
    const Command settings{.sql = session_settings, .parameters = std::span(&lock_wait, 1)};
    auto answer = exchange(connection_, std::span(&settings, 1), Commits::at_the_end, deadline);
    if (auto* problem = std::get_if<Failed>(&answer)) return std::move(*problem);
    return {};
}

std::variant<std::vector<Rows>, Failed> Connection::run(std::span<const Step> steps,
                                                        const sql::Ask& ask) {
    const base::SteadyTime deadline = std::chrono::steady_clock::now() + ask.deadline;
    if (pooled_) return run_whole(steps, ask, deadline, "COMMIT");
    auto answer = run_direct(steps, ask, deadline);
    if (const auto* problem = std::get_if<Failed>(&answer)) {
        // A statement of ours that is not there, or one that is there already: another server
        // connection than before.
        if (problem->sqlstate == "26000" || problem->sqlstate == "42P05") {
            pooled_ = true;
            return run_whole(steps, ask, deadline, "COMMIT");
        }
    }
    return answer;
}

std::variant<std::vector<Rows>, Failed> Connection::run_direct(std::span<const Step> steps,
                                                               const sql::Ask& ask,
                                                               base::SteadyTime deadline) {
    std::vector<Command> commands;
    commands.reserve(steps.size() + 1);
    const Parameter lock_wait = text(in_ms(ask.lock_wait));
    if (ask.lock_wait != session_lock_wait)
        commands.push_back({.sql = lock_setting, .parameters = std::span(&lock_wait, 1)});
    const std::size_t before = commands.size();
    std::vector<bool> here = prepared_;
    for (const Step& step : steps) {
        Command& command = commands.emplace_back();
        command.sql = step.text->sql.c_str();
        command.name = step.text->name;
        command.parameters = step.parameters;
        if (command.name.empty()) continue;
        if (here.size() <= step.text->index) here.resize(step.text->index + 1);
        command.prepare = !here[step.text->index];
        here[step.text->index] = true;
    }
    auto answer = exchange(connection_, commands, Commits::at_the_end, deadline);
    auto* problem = std::get_if<Failed>(&answer);
    // What is prepared stays so, also where the transaction was rolled back.
    const std::size_t prepared =
        problem == nullptr ? commands.size() : problem->index + (problem->prepared ? 1 : 0);
    prepared_.resize(here.size());
    for (std::size_t i = before; i < prepared; ++i) {
        if (!commands[i].name.empty()) prepared_[steps[i - before].text->index] = true;
    }
    if (problem != nullptr) return std::move(*problem);
    auto& rows = std::get<0>(answer);
    if (before != 0) rows.erase(rows.begin());
    return std::move(rows);
}

std::variant<std::vector<Rows>, Failed> Connection::plain(std::span<const std::string> statements,
                                                          base::SteadyTime deadline) {
    std::vector<Command> commands;
    commands.reserve(statements.size());
    for (const std::string& one : statements)
        commands.push_back({.sql = one.c_str(), .parameters = {}});
    return exchange(connection_, commands, Commits::earlier, deadline);
}

std::optional<Failed> Connection::try_out(std::span<const Step> steps, const sql::Ask& ask) {
    auto answer =
        run_whole(steps, ask, std::chrono::steady_clock::now() + ask.deadline, "ROLLBACK");
    if (auto* problem = std::get_if<Failed>(&answer)) return std::move(*problem);
    return {};
}

std::variant<std::vector<Rows>, Failed> Connection::run_whole(std::span<const Step> steps,
                                                              const sql::Ask& ask,
                                                              base::SteadyTime deadline,
                                                              const char* end) {
    std::vector<Command> commands;
    commands.reserve(steps.size() + 3);
    commands.push_back({.sql = "BEGIN ISOLATION LEVEL READ COMMITTED", .parameters = {}});
    const Parameter lock_wait = text(in_ms(ask.lock_wait));
    commands.push_back({.sql = transaction_settings, .parameters = std::span(&lock_wait, 1)});
    for (const Step& step : steps)
        commands.push_back({.sql = step.text->sql.c_str(), .parameters = step.parameters});
    commands.push_back({.sql = end, .parameters = {}});
    auto answer = exchange(connection_, commands, Commits::earlier, deadline);
    if (auto* problem = std::get_if<Failed>(&answer)) {
        if (problem->problem.trouble == Trouble::lost) return std::move(*problem);
        // The COMMIT was skipped with the rest: the transaction is open and failed.
        const Command undo{.sql = "ROLLBACK", .parameters = {}};
        const auto undone = exchange(connection_, std::span(&undo, 1), Commits::earlier, deadline);
        if (const auto* broken = std::get_if<Failed>(&undone)) {
            problem->problem.trouble = Trouble::lost;
            problem->problem.error.detail += "; then " + broken->problem.error.detail;
        }
        return std::move(*problem);
    }
    auto& rows = std::get<0>(answer);
    rows.pop_back();
    rows.erase(rows.begin(), rows.begin() + 2);
    return std::move(rows);
}

}  // namespace semel::stores::postgres
