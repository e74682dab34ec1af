#include "stores/postgres/executor.hpp"

#include <libpq-fe.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

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

/// The texts that a connection has seen, and which of them the server knows by a name.
class Prepared {
  public:
    /// Names the command if its statement came before. `values`: its parameters.
    void name(Command& command, std::span<const Parameter> values) {
        if (resets_ > resets_max) return;
        // The types that are said are part of a prepared statement.
        key_ = command.sql;
        // The way out of a transaction is to work whatever has become of the others.
        if (key_.size() > text_max || key_ == "COMMIT" || key_ == "ROLLBACK") return;
        key_.push_back('\0');
        for (const Parameter& one : values) key_ += one.type == oid_bytea ? 'b' : '-';
        auto found = known_.find(key_);
        if (found == known_.end()) {
            if (known_.size() >= seen_max)
                std::erase_if(known_, [](const auto& one) { return one.second.name.empty(); });
            known_.emplace(key_, Known{});
            return;
        }
        Known& known = found->second;
        if (known.name.empty()) {
            if (names_ >= statements_prepared_max) return;
            known.name = "semel_" + std::to_string(resets_) + "_" + std::to_string(names_++);
        }
        command.name = known.name;
        command.prepare = !known.there;
        if (!command.prepare) return;
        known.there = true;
        under_way_.push_back(&known);
    }
    /// How an exchange of commands that were named here has ended.
    void ended(std::span<const Command> commands, const Failed* failed) {
        if (failed != nullptr) {
            std::size_t n = 0;
            for (std::size_t i = 0; i < commands.size(); ++i) {
                if (!commands[i].prepare) continue;
                under_way_[n++]->there =
                    i < failed->index || (i == failed->index && failed->prepared);
            }
        }
        under_way_.clear();
    }
    /// Nothing is known of what the server has.
    void reset() {
        known_.clear();
        under_way_.clear();
        names_ = 0;
        ++resets_;
    }

  private:
    struct Known {
        std::string name;    ///< Empty: seen once.
        bool there = false;  ///< Prepared, or about to be by what is sent before.
    };
    static constexpr std::size_t seen_max = 4 * statements_prepared_max;
    static constexpr std::size_t text_max = 4096;  ///< Longer ones are not remembered.
    /// Somebody takes them away all the time: then nothing is prepared any more.
    static constexpr unsigned resets_max = 3;

    std::unordered_map<std::string, Known> known_;
    std::vector<Known*> under_way_;
    std::size_t names_ = 0;
    unsigned resets_ = 0;
    std::string key_;
};

/// The server's word that a prepared statement is of no use: it is not there, another has its name,
/// its tables were altered.
bool must_prepare_anew(std::string_view sqlstate) {
    return sqlstate == "26000" || sqlstate == "42P05" || sqlstate == "0A000";
}

class PostgresExecutor final : public sql::Executor {
  public:
    PostgresExecutor(PGconn* connection, std::chrono::milliseconds deadline, Prepare prepare)
        : connection_(connection), deadline_(deadline) {
        if (prepare == Prepare::repeated) prepared_.emplace();
    }

    [[nodiscard]] sql::Dialect dialect() const override { return sql::Dialect::postgres; }
    [[nodiscard]] bool in_transaction() const override {
        const PGTransactionStatusType status = PQtransactionStatus(connection_);
        return status == PQTRANS_INTRANS || status == PQTRANS_INERROR;
    }
    [[nodiscard]] bool aborted() const override {
        return PQtransactionStatus(connection_) == PQTRANS_INERROR;
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
            // Up to the end of a transaction in one round trip, and on where another begins
            // directly behind it. Outside of one each is its own: together they would be an
            // implicit transaction, and a failure would undo those before it.
            std::size_t last = first;
            bool commits = false, over = false;
            do {
                const std::string_view text = statements[last].text;
                over = open && ends(text);
                if (!open)
                    open = begins(text);
                else if (over)
                    open = false, commits = true;
                ++last;
            } while (last < statements.size() && (open || (over && begins(statements[last].text))));
            const auto group = std::span(commands).subspan(first, last - first);
            if (prepared_) {
                for (Command& one : group) prepared_->name(one, one.parameters);
            }
            auto answer = exchange(connection_, group,
                                   commits ? Commits::earlier : Commits::at_the_end, deadline);
            auto* problem = std::get_if<Failed>(&answer);
            if (prepared_) prepared_->ended(group, problem);
            if (problem != nullptr) {
                const bool named = problem->index < group.size() &&
                                   !group[problem->index].name.empty() &&
                                   must_prepare_anew(problem->sqlstate);
                if (named) {
                    prepared_->reset();
                    problem->problem.trouble = Trouble::contended;
                }
                return fail(first + problem->index, std::move(problem->problem));
            }
            for (const Rows& rows : std::get<0>(answer)) out.push_back(converted(rows));
            first = last;
        }
        return out;
    }

  private:
    PGconn* connection_;
    const std::chrono::milliseconds deadline_;
    std::optional<Prepared> prepared_;
};

}  // namespace

std::unique_ptr<sql::Executor> executor_on(pg_conn* connection, std::chrono::milliseconds deadline,
                                           Prepare prepare) {
    return std::make_unique<PostgresExecutor>(connection, deadline, prepare);
}

}  // namespace semel::stores::postgres
