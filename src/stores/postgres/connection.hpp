// One libpq connection of the store: every step before a deadline, all statements of an operation
// in one transaction and one round trip, with or without a pooler in the path.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/result.hpp"
#include "base/time.hpp"
#include "sql/session.hpp"
#include "stores/postgres/wire.hpp"

namespace semel::stores::postgres {

/// One server to connect to.
struct Target {
    std::vector<std::pair<std::string, std::string>>
        settings;      ///< libpq's keywords; the password is among them.
    std::string name;  ///< host:port (or the socket's folder), for messages.
};

/// The servers that the URL names, in its order. target_session_attrs is not taken over: a server
/// that may be written to is always looked for. Error invalid_argument, without quoting the URL.
base::Result<std::vector<Target>> targets_of(const std::string& url);

/// A statement that is sent often. Kept by its address: it outlives the connections.
struct Text {
    std::size_t index = 0;  ///< Small and its own among those of a connection.
    std::string name;       ///< Of its prepared form. Empty: it is never prepared.
    std::string sql;
};
struct Step {
    const Text* text = nullptr;
    std::vector<Parameter> parameters;
};

/// Not thread-safe.
class Connection {
  public:
    /// Connects before `deadline`. Trouble::refused: credentials, database, permission;
    /// not_writable: a standby; else lost. The detail is a sentence about the server with cause and
    /// cure, and holds no password.
    static std::variant<std::unique_ptr<Connection>, Failed> open(const Target& target,
                                                                  base::SteadyTime deadline);
    ~Connection();
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    /// Runs the steps in one transaction at READ COMMITTED, in one round trip. After Trouble::lost
    /// the connection is of no use. Where a step was prepared and the server does not know it, a
    /// pooler is in the path: asked again without.
    std::variant<std::vector<Rows>, Failed> run(std::span<const Step> steps, const sql::Ask& ask);

    /// Runs statements as they are, with their own BEGIN and COMMIT, in one round trip. Without a
    /// BEGIN they are one transaction.
    std::variant<std::vector<Rows>, Failed> plain(std::span<const std::string> statements,
                                                  base::SteadyTime deadline);
    /// As run(), and rolls back: whether the steps could be done.
    std::optional<Failed> try_out(std::span<const Step> steps, const sql::Ask& ask);

    /// Each transaction may be on another of the server's connections: nothing is prepared or set
    /// for longer than one.
    [[nodiscard]] bool pooled() const { return pooled_; }
    [[nodiscard]] const std::string& name() const { return name_; }
    [[nodiscard]] std::string user() const;
    [[nodiscard]] std::string database() const;
    [[nodiscard]] int version() const { return version_; }  ///< server_version_num, e.g. 150018.

  private:
    Connection(pg_conn* connection, std::string name);
    std::optional<Failed> greet(base::SteadyTime deadline);
    std::optional<Failed> set_up(base::SteadyTime deadline);
    std::variant<std::vector<Rows>, Failed> run_direct(std::span<const Step> steps,
                                                       const sql::Ask& ask,
                                                       base::SteadyTime deadline);
    /// In a transaction of its own, nothing prepared; `end` is COMMIT or ROLLBACK.
    std::variant<std::vector<Rows>, Failed> run_whole(std::span<const Step> steps,
                                                      const sql::Ask& ask,
                                                      base::SteadyTime deadline, const char* end);

    pg_conn* connection_;
    std::string name_;
    bool pooled_ = false;
    int version_ = 0;
    std::vector<bool> prepared_;  ///< By Text::index.
};

}  // namespace semel::stores::postgres
