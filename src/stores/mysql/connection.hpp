// One connection to a MySQL or MariaDB server, in the state that the store's statements count on,
// with a deadline on every step.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/time.hpp"
#include "sql/executor.hpp"
#include "sql/session.hpp"
#include "stores/mysql/failure.hpp"
#include "stores/mysql/url.hpp"

struct st_mysql;  // MYSQL of MariaDB Connector/C.

namespace semel::stores::mysql {

using base::SteadyTime;
using std::chrono::milliseconds;

/// What a connection has found out about its server.
struct Server {
    bool mariadb = true;
    unsigned version = 0;          ///< 101119: 10.11.19.
    std::string text;              ///< As the server says it: "10.11.19-MariaDB-log".
    std::uint64_t max_packet = 0;  ///< Longest statement in bytes: its max_allowed_packet.
    bool galera = false;           ///< A node of a Galera cluster.
};

/// Not thread-safe: one thread at a time.
class Connection {
  public:
    /// Connects, and sets what the store needs whatever the server's own settings are: UTC, strict
    /// mode, READ COMMITTED, autocommit, lock waits of a second, bytes as they are (no character
    /// set), no chained transactions. CLIENT_FOUND_ROWS and CLIENT_MULTI_STATEMENTS are on. Only
    /// the look-up of the host's name is not held to `timeout`. A Problem is `lost` (nothing
    /// answers, too many connections) or `refused` (credentials, database, TLS).
    static sql::Tried<std::unique_ptr<Connection>> open(const Target& target, milliseconds timeout);
    ~Connection();
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    /// Sends the statements (separated by semicolons) in one packet and waits for all their
    /// results. The server stops at the first that fails: its Problem is the answer, and `failure`
    /// (may be null) says which it was; a transaction that was open then may still be. Past
    /// `deadline` the Problem is `lost`, and the connection of no more use. A text that the server
    /// would not take for its length is refused unsent.
    sql::Tried<std::vector<sql::ResultRows>> run(std::string_view statements, SteadyTime deadline,
                                                 Failure* failure = nullptr);

    /// False once an answer was lost.
    [[nodiscard]] bool usable() const { return usable_; }
    [[nodiscard]] bool in_transaction() const;
    [[nodiscard]] const Server& server() const { return server_; }
    /// For executor_on() and tests. Still owned by this.
    [[nodiscard]] st_mysql* native() const { return mysql_; }

  private:
    Connection() = default;
    sql::Problem lost(unsigned number, bool sent);
    /// Waits for what the client library asks for; false: the deadline is over.
    [[nodiscard]] bool wait(int& events, SteadyTime deadline) const;
    [[nodiscard]] bool closed_by_server() const;
    sql::Tried<sql::Done> connect(const Target& target, milliseconds timeout);
    sql::Tried<sql::Done> prepare(SteadyTime deadline);

    st_mysql* mysql_ = nullptr;
    bool usable_ = true;
    Server server_;
};

/// Appends a binary string literal of these bytes, for statements on a Connection (a byte string,
/// backslash escapes).
void append_bytes(std::string& sql, std::string_view bytes);

}  // namespace semel::stores::mysql
