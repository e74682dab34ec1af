#include "stores/postgres/executor.hpp"

#include <libpq-fe.h>

#include <cctype>
#include <string_view>

#include "stores/postgres/wire.hpp"

namespace semel::stores::postgres {
namespace {

using sql::Problem;
using sql::ResultRows;
using sql::Statement;
using sql::Tried;
using sql::Trouble;

constexpr unsigned oid_bytea = 17;

Problem refused(std::string why) {
    return {.trouble = Trouble::refused,
            .error = {.code = base::ErrorCode::invalid_argument, .detail = std::move(why)}};
}

/// The first words of a statement in capitals, behind blanks and comments.
std::string begin_of(std::string_view text) {
    constexpr std::size_t enough = 24;
    std::string out;
    for (std::size_t i = 0; i < text.size() && out.size() < enough; ++i) {
        if (text.substr(i, 2) == "--") {
            i = text.find('\n', i);
            if (i == std::string_view::npos) break;
            continue;
        }
        if (text.substr(i, 2) == "/*") {
            i = text.find("*/", i);
            if (i == std::string_view::npos) break;
            ++i;
            continue;
        }
        const auto byte = static_cast<unsigned char>(text[i]);
        const bool word = std::isalnum(byte) != 0 || byte == '_';
        if (word)
            out.push_back(static_cast<char>(std::toupper(byte)));
        else if (!out.empty() && out.back() != ' ')
            out.push_back(' ');
    }
    return out + ' ';
}

bool begins(std::string_view text) {
    const std::string words = begin_of(text);
    return words.starts_with("BEGIN ") || words.starts_with("START TRANSACTION ");
}
bool ends(std::string_view text) {
    const std::string words = begin_of(text);
    if (words.starts_with("ROLLBACK ")) return !words.starts_with("ROLLBACK TO ");
    return words.starts_with("COMMIT ") || words.starts_with("END ") || words.starts_with("ABORT ");
}

/// Puts the caller's connection into the manner that exchange() wants, and back.
class Borrowed {
  public:
    explicit Borrowed(PGconn* connection)
        : connection_(connection),
          was_nonblocking_(PQisnonblocking(connection) != 0),
          was_pipeline_(PQpipelineStatus(connection) != PQ_PIPELINE_OFF) {
        PQsetnonblocking(connection_, 1);
        if (!was_pipeline_) PQenterPipelineMode(connection_);
    }
    ~Borrowed() {
        if (!was_pipeline_) PQexitPipelineMode(connection_);
        if (!was_nonblocking_) PQsetnonblocking(connection_, 0);
    }
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;

  private:
    PGconn* connection_;
    bool was_nonblocking_;
    bool was_pipeline_;
};

struct FreeMemory {
    void operator()(unsigned char* memory) const { PQfreemem(memory); }
};

std::string unescaped(std::string_view value) {
    std::size_t size = 0;
    const std::unique_ptr<unsigned char, FreeMemory> plain(
        PQunescapeBytea(reinterpret_cast<const unsigned char*>(value.data()), &size));
    return plain == nullptr ? std::string()
                            : std::string(reinterpret_cast<const char*>(plain.get()), size);
}

ResultRows converted(const Rows& from) {
    ResultRows to;
    to.affected = from.affected();
    to.rows.reserve(from.size());
    for (std::size_t row = 0; row < from.size(); ++row) {
        sql::Values& values = to.rows.emplace_back();
        values.reserve(from.columns());
        for (std::size_t column = 0; column < from.columns(); ++column) {
            if (from.null(row, column))
                values.emplace_back();
            else if (from.type(column) == oid_bytea)
                values.emplace_back(unescaped(from.bytes(row, column)));
            else
                values.emplace_back(from.bytes(row, column));
        }
    }
    return to;
}

/// Empty: it can be sent.
std::optional<Problem> convert(const Statement& statement, std::vector<Parameter>& parameters) {
    parameters.reserve(statement.parameters.size());
    for (const sql::Parameter& one : statement.parameters) {
        Parameter& out = parameters.emplace_back();
        if (std::holds_alternative<std::monostate>(one)) {
            out.null = true;
            out.binary = false;
        } else if (const auto* whole = std::get_if<std::int64_t>(&one)) {
            // As text and without a type: whatever number type the statement wants.
            out = text(std::to_string(*whole));
        } else if (const auto* raw = std::get_if<sql::Bytes>(&one)) {
            out = bytes(raw->value);
        } else {
            const std::string& words = std::get<std::string>(one);
            if (words.find('\0') != std::string::npos)
                return refused(
                    "a text value holds a NUL byte, which PostgreSQL's text cannot: pass it as "
                    "bytes");
            out = text(words);
        }
    }
    return {};
}

class PostgresExecutor final : public sql::Executor {
  public:
    PostgresExecutor(PGconn* connection, std::chrono::milliseconds deadline)
        : connection_(connection), deadline_(deadline) {}

    [[nodiscard]] sql::Dialect dialect() const override { return sql::Dialect::postgres; }
    [[nodiscard]] bool in_transaction() const override {
        const PGTransactionStatusType status = PQtransactionStatus(connection_);
        return status == PQTRANS_INTRANS || status == PQTRANS_INERROR;
    }

    Tried<std::vector<ResultRows>> run(std::span<const Statement> statements,
                                       std::size_t* failed) override {
        const auto fail = [&](std::size_t index, Problem problem) {
            if (failed != nullptr) *failed = index;
            return problem;
        };
        const PGTransactionStatusType status = PQtransactionStatus(connection_);
        if (status == PQTRANS_UNKNOWN)
            return fail(0, lost("the connection is broken", base::Applied::no));
        if (status == PQTRANS_ACTIVE)
            return fail(0, refused("the connection is busy: read the outstanding answer first"));
        std::vector<Command> commands(statements.size());
        std::vector<std::vector<Parameter>> parameters(statements.size());
        for (std::size_t i = 0; i < statements.size(); ++i) {
            if (auto problem = convert(statements[i], parameters[i]))
                return fail(i, std::move(*problem));
            commands[i].sql = statements[i].text.c_str();
            commands[i].binary_rows = false;
            commands[i].parameters = parameters[i];
        }
        const Borrowed borrowed(connection_);
        const base::SteadyTime deadline = std::chrono::steady_clock::now() + deadline_;
        std::vector<ResultRows> out;
        out.reserve(statements.size());
        bool open = in_transaction();
        for (std::size_t first = 0; first < statements.size();) {
            // Up to the end of a transaction in one round trip. Outside of one each is its own:
            // together they would be an implicit transaction, and a failure would undo those before
            // it.
            std::size_t last = first;
            bool commits = false;
            do {
                const std::string_view text = statements[last].text;
                if (!open)
                    open = begins(text);
                else if (ends(text))
                    open = false, commits = true;
                ++last;
            } while (open && last < statements.size());
            const auto group = std::span<const Command>(commands).subspan(first, last - first);
            auto answer = exchange(connection_, group,
                                   commits ? Commits::earlier : Commits::at_the_end, deadline);
            if (auto* problem = std::get_if<Failed>(&answer))
                return fail(first + problem->index, std::move(problem->problem));
            for (const Rows& rows : std::get<0>(answer)) out.push_back(converted(rows));
            first = last;
        }
        return out;
    }

  private:
    PGconn* connection_;
    const std::chrono::milliseconds deadline_;
};

}  // namespace

std::unique_ptr<sql::Executor> executor_on(pg_conn* connection,
                                           std::chrono::milliseconds deadline) {
    return std::make_unique<PostgresExecutor>(connection, deadline);
}

}  // namespace semel::stores::postgres
