// Statements and their answers on a PGconn: sent in one pipeline, read before a deadline, errors
// told apart by SQLSTATE.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/time.hpp"
#include "sql/session.hpp"

struct pg_conn;
struct pg_result;

namespace semel::stores::postgres {

/// One parameter as it is sent.
struct Parameter {
    std::string bytes;
    bool null = false;
    bool binary = true;
    unsigned type = 0;  ///< The type's OID; 0: what the statement says.
};

Parameter number(std::int64_t value);
Parameter number(std::optional<std::int64_t> value);
Parameter bytes(std::string_view value);
Parameter text(std::string_view value);  ///< Without NUL bytes.
Parameter flag(bool value);

/// Arrays of one dimension, in PostgreSQL's binary form.
class Numbers {
  public:
    explicit Numbers(std::size_t size);
    void add(std::int64_t value);
    Parameter done() &&;

  private:
    std::string out_;
};
class ByteStrings {
  public:
    explicit ByteStrings(std::size_t size);
    void add(std::string_view value);
    void add(const std::optional<std::string>& value);  ///< Empty: NULL.
    Parameter done() &&;

  private:
    std::string out_;
};

/// The rows of one statement. Columns are read in binary form: the caller knows their types.
class Rows {
  public:
    Rows() = default;
    explicit Rows(pg_result* result);

    [[nodiscard]] std::size_t size() const;
    [[nodiscard]] std::size_t columns() const;
    [[nodiscard]] bool null(std::size_t row, std::size_t column) const;
    [[nodiscard]] std::int64_t number(std::size_t row,
                                      std::size_t column) const;  ///< smallint, integer or bigint.
    [[nodiscard]] bool flag(std::size_t row, std::size_t column) const;
    [[nodiscard]] std::string_view bytes(std::size_t row,
                                         std::size_t column) const;  ///< As long as this lives.
    [[nodiscard]] unsigned type(std::size_t column) const;           ///< OID.
    [[nodiscard]] std::int64_t affected() const;

  private:
    struct Clear {
        void operator()(pg_result* result) const;
    };
    std::unique_ptr<pg_result, Clear> result_;
};

/// One statement to send. The strings outlive the exchange.
struct Command {
    std::string_view name;  ///< Of a prepared statement; empty: unnamed.
    const char* sql = nullptr;
    bool prepare = false;  ///< Prepares it under its name first, in the same round trip.
    bool binary_rows = true;
    std::span<const Parameter> parameters;  ///< Outlive the exchange, too.
};

struct Failed {
    sql::Problem problem;
    std::string sqlstate;  ///< Empty: no answer of the server.
    std::size_t index =
        0;  ///< Of the command that failed: those before it are prepared, those behind it are not.
    bool prepared = false;  ///< It was prepared as well, and failed afterwards.
};

/// How far an exchange came before its connection was lost; what then may have been done.
enum class Commits : std::uint8_t {
    at_the_end,  ///< Nothing commits before the last byte has been sent: an implicit transaction.
    earlier,     ///< A COMMIT or several transactions are among the commands.
};

/// Sends the commands in one pipeline with one synchronization at its end, and reads all answers.
/// The connection must be in pipeline mode, non-blocking and idle; it is idle afterwards too unless
/// Trouble::lost is the answer: then it is of no use.
std::variant<std::vector<Rows>, Failed> exchange(pg_conn* connection,
                                                 std::span<const Command> commands, Commits commits,
                                                 base::SteadyTime deadline);

/// What an SQLSTATE means for a store; `words`: the server's message.
sql::Problem problem_of(std::string_view sqlstate, std::string_view words);
/// The connection broke or an answer did not come in time.
sql::Problem lost(std::string why, base::Applied applied);

/// Waits until the socket can be read (or written); false: the deadline came first.
bool wait_until_ready(int socket, bool read, bool write, base::SteadyTime deadline);

/// libpq's message on a connection as one line, without the server's own prefix.
std::string message_of(pg_conn* connection);

}  // namespace semel::stores::postgres
