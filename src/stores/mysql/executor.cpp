#include "stores/mysql/executor.hpp"

#include <mysql.h>

#include <optional>

#include "base/hash.hpp"
#include "stores/mysql/failure.hpp"
#include "stores/mysql/results.hpp"

namespace semel::stores::mysql {
namespace {

using sql::Parameter;
using sql::Problem;
using sql::ResultRows;
using sql::Statement;
using sql::Tried;

Problem wrong(std::string detail) {
    return {sql::Trouble::refused,
            {.code = base::ErrorCode::invalid_argument, .detail = std::move(detail)}};
}

void append(std::string& sql, const Parameter& parameter) {
    struct Visitor {
        std::string& sql;
        void operator()(std::monostate) const { sql += "NULL"; }
        // In parentheses: `?-1` and `--1` (a comment) must not come out of `-?`.
        void operator()(std::int64_t number) const {
            sql += number < 0 ? "(" + std::to_string(number) + ")" : std::to_string(number);
        }
        void operator()(const sql::Bytes& bytes) const { literal("_binary", bytes.value); }
        void operator()(const std::string& text) const { literal("_utf8mb4", text); }
        void literal(const char* introducer, const std::string& value) const {
            sql += introducer;
            sql += " X'";
            sql += base::hex(value);
            sql += '\'';
        }
    };
    std::visit(Visitor{sql}, parameter);
}

// The end of what begins at `at` and is no place for a parameter: a string, a quoted name, a
// comment. Or `at` itself.
std::size_t end_of_quoted(std::string_view text, std::size_t at) {
    const auto behind = [&](std::size_t found, std::size_t size) {
        return found == std::string_view::npos ? text.size() : found + size;
    };
    const std::string_view rest = text.substr(at);
    const char c = rest[0];
    if (c == '\'' || c == '"' || c == '`') {
        // A doubled quote ends one string and begins the next: the same to us.
        for (std::size_t i = at + 1; i < text.size(); ++i) {
            if (text[i] == '\\' && c != '`') {
                ++i;
            } else if (text[i] == c) {
                return i + 1;
            }
        }
        return text.size();
    }
    if (c == '#') return behind(text.find('\n', at), 1);
    const bool spaced = rest.size() > 2 && static_cast<unsigned char>(rest[2]) <= ' ';
    if (rest.starts_with("--") && (rest.size() == 2 || spaced))
        return behind(text.find('\n', at), 1);
    if (rest.starts_with("/*")) return behind(text.find("*/", at + 2), 2);
    return at;
}

// Empty: the number of question marks is not that of the parameters.
std::optional<std::string> filled_in(const Statement& statement) {
    const std::string_view text = statement.text;
    std::string sql;
    sql.reserve(text.size() + 64);
    std::size_t next = 0;
    for (std::size_t i = 0; i < text.size();) {
        if (const std::size_t end = end_of_quoted(text, i); end != i) {
            sql.append(text.substr(i, end - i));
            i = end;
        } else if (text[i] == '?') {
            if (next == statement.parameters.size()) return {};
            append(sql, statement.parameters[next++]);
            ++i;
        } else {
            sql += text[i++];
        }
    }
    if (next != statement.parameters.size()) return {};
    return sql;
}

class MysqlExecutor final : public sql::Executor {
  public:
    explicit MysqlExecutor(MYSQL* mysql) : mysql_(mysql) {}

    [[nodiscard]] sql::Dialect dialect() const override { return sql::Dialect::mysql; }
    [[nodiscard]] bool in_transaction() const override {
        return (mysql_->server_status & SERVER_STATUS_IN_TRANS) != 0;
    }
    [[nodiscard]] bool aborted() const override { return false; }

    Tried<std::vector<ResultRows>> run(std::span<const Statement> statements,
                                       std::size_t* failed) override {
        std::size_t ignored = 0;
        std::size_t& at = failed != nullptr ? *failed : ignored;
        at = 0;
        std::vector<std::string> texts;
        texts.reserve(statements.size());
        for (const Statement& statement : statements) {
            auto text = filled_in(statement);
            if (!text) {
                at = texts.size();
                return wrong("statement " + std::to_string(at + 1) +
                             " has another number of ? than of parameters");
            }
            texts.push_back(std::move(*text));
        }
        std::vector<ResultRows> results;
        const bool together = (mysql_->client_flag & CLIENT_MULTI_STATEMENTS) != 0;
        for (std::size_t first = 0; first < texts.size();) {
            std::string packet = std::move(texts[first]);
            std::size_t end = first + 1;
            // A line end first: a statement may end in a comment.
            for (; together && end < texts.size(); ++end) packet.append("\n;").append(texts[end]);
            at = first;
            if (auto problem = send(packet, results, at)) return std::move(*problem);
            if (results.size() != end)
                return wrong("statement " + std::to_string(first + 1) +
                             " is not one statement: write each as one of its own");
            first = end;
        }
        return results;
    }

  private:
    // Adds the results of a packet; `at` counts the statements that are done.
    std::optional<Problem> send(const std::string& packet, std::vector<ResultRows>& results,
                                std::size_t& at) {
        if (mysql_send_query(mysql_, packet.data(), packet.size()) != 0)
            return problem_of(mysql_errno(mysql_), false);
        if (mysql_read_query_result(mysql_) != 0) return problem_of(mysql_errno(mysql_), true);
        while (true) {
            MYSQL_RES* rows = nullptr;
            if (mysql_field_count(mysql_) != 0 && (rows = mysql_store_result(mysql_)) == nullptr)
                return problem_of(mysql_errno(mysql_), true);
            results.push_back(take_result(mysql_, rows));
            ++at;
            const int more = mysql_next_result(mysql_);
            if (more > 0) return problem_of(mysql_errno(mysql_), true);
            if (more < 0) return {};
        }
    }

    MYSQL* mysql_;
};

}  // namespace

std::unique_ptr<sql::Executor> executor_on(st_mysql* connection) {
    return std::make_unique<MysqlExecutor>(connection);
}

}  // namespace semel::stores::mysql
