#include "stores/postgres/wire.hpp"

#include <libpq-fe.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "base/assert.hpp"

namespace semel::stores::postgres {

using sql::Problem;
using sql::Trouble;

namespace {

// Fixed for ever in PostgreSQL's catalog (pg_type.dat).
constexpr unsigned oid_bool = 16;
constexpr unsigned oid_bytea = 17;
constexpr unsigned oid_int8 = 20;
constexpr unsigned oid_int8_array = 1016;
constexpr unsigned oid_bytea_array = 1001;

template <class Integer>
void append_network(std::string& out, Integer value) {
    for (int shift = static_cast<int>(sizeof value) * 8 - 8; shift >= 0; shift -= 8)
        out.push_back(static_cast<char>(static_cast<std::uint64_t>(value) >> shift));
}

std::string array_head(unsigned element, std::size_t size) {
    std::string out;
    append_network(out, std::int32_t{size == 0 ? 0 : 1});  // dimensions
    append_network(out, std::int32_t{1});                  // some may be NULL
    append_network(out, static_cast<std::int32_t>(element));
    if (size != 0) {
        append_network(out, static_cast<std::int32_t>(size));
        append_network(out, std::int32_t{1});  // lower bound
    }
    return out;
}

std::string one_line(const char* words) {
    std::string out(words == nullptr ? "" : words);
    while (!out.empty() && (out.back() == '\n' || out.back() == ' ')) out.pop_back();
    std::replace(out.begin(), out.end(), '\n', ' ');
    return out;
}

std::string field(const PGresult* result, int which) {
    const char* value = PQresultErrorField(result, which);
    return value == nullptr ? std::string() : value;
}

}  // namespace

// ---------------------------------------------------------------- parameters

Parameter number(std::int64_t value) {
    Parameter out{.bytes = {}, .type = oid_int8};
    append_network(out.bytes, value);
    return out;
}
Parameter number(std::optional<std::int64_t> value) {
    if (value) return number(*value);
    return {.bytes = {}, .null = true, .type = oid_int8};
}
Parameter bytes(std::string_view value) { return {.bytes = std::string(value), .type = oid_bytea}; }
Parameter text(std::string_view value) { return {.bytes = std::string(value), .binary = false}; }
Parameter flag(bool value) {
    return {.bytes = std::string(1, value ? '\1' : '\0'), .type = oid_bool};
}

Numbers::Numbers(std::size_t size) : out_(array_head(oid_int8, size)) {
    out_.reserve(out_.size() + 12 * size);
}
void Numbers::add(std::int64_t value) {
    append_network(out_, std::int32_t{8});
    append_network(out_, value);
}
Parameter Numbers::done() && { return {.bytes = std::move(out_), .type = oid_int8_array}; }

ByteStrings::ByteStrings(std::size_t size) : out_(array_head(oid_bytea, size)) {}
void ByteStrings::add(std::string_view value) {
    append_network(out_, static_cast<std::int32_t>(value.size()));
    out_.append(value);
}
void ByteStrings::add(const std::optional<std::string>& value) {
    if (value)
        add(std::string_view(*value));
    else
        append_network(out_, std::int32_t{-1});
}
Parameter ByteStrings::done() && { return {.bytes = std::move(out_), .type = oid_bytea_array}; }

// ---------------------------------------------------------------- rows

Rows::Rows(pg_result* result) : result_(result) {}
void Rows::Clear::operator()(pg_result* result) const { PQclear(result); }

std::size_t Rows::size() const { return static_cast<std::size_t>(PQntuples(result_.get())); }
std::size_t Rows::columns() const { return static_cast<std::size_t>(PQnfields(result_.get())); }
bool Rows::null(std::size_t row, std::size_t column) const {
    return PQgetisnull(result_.get(), static_cast<int>(row), static_cast<int>(column)) != 0;
}
std::string_view Rows::bytes(std::size_t row, std::size_t column) const {
    const int r = static_cast<int>(row);
    const int c = static_cast<int>(column);
    return {PQgetvalue(result_.get(), r, c),
            static_cast<std::size_t>(PQgetlength(result_.get(), r, c))};
}
std::int64_t Rows::number(std::size_t row, std::size_t column) const {
    const std::string_view value = bytes(row, column);
    if (value.empty()) return 0;
    std::uint64_t out = (static_cast<unsigned char>(value[0]) & 0x80) != 0 ? ~std::uint64_t{0} : 0;
    for (const char byte : value) out = out << 8 | static_cast<unsigned char>(byte);
    return static_cast<std::int64_t>(out);
}
bool Rows::flag(std::size_t row, std::size_t column) const {
    return bytes(row, column) == std::string_view("\1", 1);
}
unsigned Rows::type(std::size_t column) const {
    return PQftype(result_.get(), static_cast<int>(column));
}
std::int64_t Rows::affected() const {
    const std::string_view digits = PQcmdTuples(result_.get());
    std::int64_t value = 0;
    std::from_chars(digits.data(), digits.data() + digits.size(), value);
    return value;
}

// ---------------------------------------------------------------- errors

Problem lost(std::string why, base::Applied applied) {
    return {.trouble = Trouble::lost,
            .error = {.code = base::ErrorCode::store_unavailable,
                      .applied = applied,
                      .retry_after = std::chrono::seconds{1},
                      .detail = std::move(why)}};
}

Problem problem_of(std::string_view sqlstate, std::string_view words) {
    const auto is = [&](std::string_view state) { return sqlstate == state; };
    const auto in = [&](std::string_view start) { return sqlstate.starts_with(start); };
    const auto make = [&](Trouble trouble, base::ErrorCode code, std::string_view what) {
        std::string detail(what);
        detail += " (SQLSTATE " + std::string(sqlstate);
        // What is wrong with data may quote it.
        if (!in("22") && !in("23") && !words.empty()) detail += ": " + std::string(words);
        return Problem{
            trouble,
            {.code = code, .retry_after = std::chrono::seconds{1}, .detail = detail + ")"}};
    };
    using base::ErrorCode;
    if (is("40001") || is("40P01") || is("55P03") || is("57014"))
        return make(Trouble::contended, ErrorCode::store_unavailable,
                    "another transaction held the row; nothing was done");
    if (is("53100"))
        return make(
            Trouble::full, ErrorCode::store_full,
            "the server's disk is full: make room on it; recorded answers can still be read");
    if (is("25006"))
        return make(
            Trouble::not_writable, ErrorCode::store_unavailable,
            "the server is read-only: it is a standby, or default_transaction_read_only is set");
    if (in("08") || is("57P01") || is("57P02") || is("57P03") || is("57P04") || is("57P05") ||
        is("25P03") || is("53300") || is("40003"))
        return make(Trouble::lost, ErrorCode::store_unavailable,
                    "the server ended the connection or takes none");
    // The table was altered under a prepared statement: a new connection prepares it anew.
    if (is("0A000"))
        return make(Trouble::lost, ErrorCode::store_unavailable,
                    "the server cannot run the statement as it was prepared");
    if (is("42501"))
        return make(
            Trouble::refused, ErrorCode::store_unavailable,
            "the server refuses for want of a permission: grant what the PostgreSQL guide lists");
    if (in("42") || in("3F"))
        return make(
            Trouble::refused, ErrorCode::store_unavailable,
            "the tables are not those that this program made: run the migration, or restore them");
    if (in("22") || in("54"))
        return make(Trouble::refused, ErrorCode::invalid_argument,
                    "the server does not take a value of this size or form");
    return make(Trouble::refused, ErrorCode::store_unavailable, "the server refused the statement");
}

std::string message_of(pg_conn* connection) { return one_line(PQerrorMessage(connection)); }

// ---------------------------------------------------------------- the exchange

bool wait_until_ready(int socket, bool read, bool write, base::SteadyTime deadline) {
    pollfd wanted{.fd = socket, .events = 0, .revents = 0};
    if (read) wanted.events = static_cast<short>(wanted.events | POLLIN);
    if (write) wanted.events = static_cast<short>(wanted.events | POLLOUT);
    while (true) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(
            deadline - std::chrono::steady_clock::now());
        if (left.count() <= 0) return false;
        constexpr long poll_longest_ms = 1'000'000;
        const int found =
            ::poll(&wanted, 1, static_cast<int>(std::min<long>(left.count(), poll_longest_ms)));
        if (found > 0) return true;
        if (found < 0 && errno != EINTR) return true;  // the next read says what is wrong
    }
}

namespace {

/// One exchange under way.
class Exchange {
  public:
    Exchange(PGconn* connection, Commits commits, base::SteadyTime deadline)
        : connection_(connection), commits_(commits), deadline_(deadline) {}

    std::variant<std::vector<Rows>, Failed> run(std::span<const Command> commands) {
        if (!still_there()) return gone("the server closed the connection");
        sent_some_ = true;
        for (const Command& command : commands) {
            if (!send(command)) return gone("the connection broke");
        }
        if (PQpipelineSync(connection_) != 1) return gone("the connection broke");
        std::vector<Rows> out;
        out.reserve(commands.size());
        std::optional<Failed> failed;
        for (std::size_t i = 0; i < commands.size(); ++i) {
            if (commands[i].prepare) {
                if (auto over = take(i, nullptr, failed)) return std::move(*over);
            }
            if (auto over = take(i, &out, failed)) return std::move(*over);
        }
        if (auto over = take(commands.size(), nullptr, failed)) return std::move(*over);
        if (failed) return std::move(*failed);
        return out;
    }

  private:
    /// Reads what the server said while nothing was asked: a setting that changed, or its farewell,
    /// behind which the connection ends.
    bool still_there() {
        pollfd said{.fd = PQsocket(connection_), .events = POLLIN, .revents = 0};
        do {
            if (PQconsumeInput(connection_) == 0 || PQstatus(connection_) != CONNECTION_OK)
                return false;
            PQisBusy(connection_);  // takes in what was read
        } while (::poll(&said, 1, 0) > 0);
        return true;
    }

    bool send(const Command& command) {
        values_.clear();
        lengths_.clear();
        formats_.clear();
        types_.clear();
        for (const Parameter& one : command.parameters) {
            values_.push_back(one.null ? nullptr : one.bytes.c_str());
            lengths_.push_back(static_cast<int>(one.bytes.size()));
            formats_.push_back(one.binary ? 1 : 0);
            types_.push_back(one.type);
        }
        const int count = static_cast<int>(values_.size());
        const int rows = command.binary_rows ? 1 : 0;
        if (command.name.empty()) {
            return PQsendQueryParams(connection_, command.sql, count, types_.data(), values_.data(),
                                     lengths_.data(), formats_.data(), rows) == 1;
        }
        const std::string name(command.name);
        if (command.prepare &&
            PQsendPrepare(connection_, name.c_str(), command.sql, count, types_.data()) != 1)
            return false;
        return PQsendQueryPrepared(connection_, name.c_str(), count, values_.data(),
                                   lengths_.data(), formats_.data(), rows) == 1;
    }

    /// Sends what is left and reads until the next result is complete. False: lost; `why_` says
    /// how.
    bool wait() {
        while (true) {
            if (!all_sent_) {
                const int left = PQflush(connection_);
                if (left < 0) return why_ = "the connection broke", false;
                all_sent_ = left == 0;
            }
            if (PQisBusy(connection_) == 0) return true;
            if (!wait_until_ready(PQsocket(connection_), true, !all_sent_, deadline_))
                return why_ = "the server did not answer in time", false;
            if (PQconsumeInput(connection_) == 0) return why_ = "the connection broke", false;
        }
    }

    /// Reads the answer to one message. A value: the exchange is over by that.
    std::optional<Failed> take(std::size_t index, std::vector<Rows>* into,
                               std::optional<Failed>& failed) {
        if (!wait()) return failed_on(index);
        PGresult* result = PQgetResult(connection_);
        const ExecStatusType status = PQresultStatus(result);
        Rows rows(result);
        if (result == nullptr || PQstatus(connection_) != CONNECTION_OK)
            return ended(index, result);
        if (status == PGRES_PIPELINE_SYNC) return {};
        if (status == PGRES_TUPLES_OK || status == PGRES_COMMAND_OK) {
            if (into != nullptr) into->push_back(std::move(rows));
        } else if (status != PGRES_PIPELINE_ABORTED && !failed) {
            const std::string state = field(result, PG_DIAG_SQLSTATE);
            const std::string severity = field(result, PG_DIAG_SEVERITY_NONLOCALIZED);
            if (severity == "FATAL" || severity == "PANIC" || state.empty())
                return ended(index, result);
            failed =
                Failed{problem_of(state, one_line(field(result, PG_DIAG_MESSAGE_PRIMARY).c_str())),
                       state, index, into != nullptr};
        }
        // Ends the results of this message.
        if (!wait()) return failed_on(index);
        const Rows rest(PQgetResult(connection_));
        return {};
    }

    /// The server said that it ends the connection, or it is over already.
    Failed ended(std::size_t index, const PGresult* result) {
        const std::string state = field(result, PG_DIAG_SQLSTATE);
        if (state.empty()) {
            why_ = "the server closed the connection";
            return failed_on(index);
        }
        Problem problem =
            problem_of(state, one_line(field(result, PG_DIAG_MESSAGE_PRIMARY).c_str()));
        problem.trouble = Trouble::lost;
        problem.error.applied = applied();
        return {std::move(problem), state, index, false};
    }
    Failed failed_on(std::size_t index) { return {lost(why_, applied()), {}, index, false}; }
    Failed gone(const char* why) { return {lost(why, applied()), {}, 0, false}; }

    [[nodiscard]] base::Applied applied() const {
        if (!sent_some_) return base::Applied::no;
        if (!all_sent_ && commits_ == Commits::at_the_end) return base::Applied::no;
        return base::Applied::unknown;
    }

    PGconn* connection_;
    const Commits commits_;
    const base::SteadyTime deadline_;
    std::vector<const char*> values_;
    std::vector<int> lengths_;
    std::vector<int> formats_;
    std::vector<Oid> types_;
    bool sent_some_ = false;
    bool all_sent_ = false;
    std::string why_;
};

}  // namespace

std::variant<std::vector<Rows>, Failed> exchange(pg_conn* connection,
                                                 std::span<const Command> commands, Commits commits,
                                                 base::SteadyTime deadline) {
    return Exchange(connection, commits, deadline).run(commands);
}

}  // namespace semel::stores::postgres
