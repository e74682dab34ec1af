// The two databases that the inbox works on, as one thing: a real server of this test program, and
// connections of the test's own.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "inbox/inbox.hpp"
#include "sql/executor.hpp"

struct pg_conn;
struct st_mysql;

namespace semel::support {

using inbox::Executor;
using sql::Dialect;

/// Where a database listens.
struct Address {
    Dialect dialect = Dialect::postgres;
    std::uint16_t port = 0;
    std::string database;
    bool pooled = false;  ///< Nothing may be left prepared.
};

/// A connection of a user of the inbox, with the executor on it. Throws if it cannot be made.
std::shared_ptr<Executor> connect(const Address& address);
/// The same, and the connection's native handle (only that of the dialect is set), for what the
/// executor would not do.
struct Native {
    pg_conn* postgres = nullptr;
    st_mysql* mysql = nullptr;
};
std::shared_ptr<Executor> connect(const Address& address, Native& native);

/// A database of its own on the server of this program, which is started once.
class InboxDatabase {
  public:
    explicit InboxDatabase(Dialect dialect);

    [[nodiscard]] const Address& address() const { return address_; }
    [[nodiscard]] Dialect dialect() const { return address_.dialect; }
    [[nodiscard]] bool postgres() const { return address_.dialect == Dialect::postgres; }
    [[nodiscard]] std::shared_ptr<Executor> connect() const { return support::connect(address_); }
    /// PostgreSQL: where PgBouncer listens that gives the server's connections out for a
    /// transaction each.
    [[nodiscard]] Address pooled() const;

    /// Runs one statement on a connection of this object. Throws if it fails.
    std::vector<sql::Values> query(const std::string& text);
    /// The first value of the first row; empty if there is none.
    std::string one(const std::string& text);
    std::int64_t number(const std::string& text) { return std::stoll(one(text)); }

    /// Transactions of this database that wait for another one.
    [[nodiscard]] std::int64_t waiting_for_locks();

    /// What a database administrator has set for all new sessions. MySQL's are the whole server's:
    /// put them back.
    void set_default_isolation(const std::string& level);
    void set_sql_mode(const std::string& mode);  ///< MySQL only.

  private:
    Address address_;
    std::shared_ptr<Executor> connection_;
};

inline void PrintTo(Dialect dialect, std::ostream* out) {
    *out << (dialect == Dialect::postgres ? "postgres" : "mysql");
}

/// Stands between a client and a server and forwards everything, until it is told to lose
/// something.
class DroppingProxy {
  public:
    enum class Lose {
        nothing,
        the_answer,  ///< The server has answered a packet that holds the word: its answer is
                     ///< dropped, both sides are closed.
        the_packet,  ///< A packet that holds the word does not reach the server: both sides are
                     ///< closed.
    };
    explicit DroppingProxy(std::uint16_t server_port);
    ~DroppingProxy();
    DroppingProxy(const DroppingProxy&) = delete;
    DroppingProxy& operator=(const DroppingProxy&) = delete;
    [[nodiscard]] std::uint16_t port() const;
    /// For the next `times` packets of clients that hold `word`.
    void lose(Lose what, std::string word, int times = 1);
    [[nodiscard]] int lost() const;

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace semel::support
