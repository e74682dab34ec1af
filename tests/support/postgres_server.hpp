// Real PostgreSQL servers for tests: one, a primary with standbys, a pooler in front of one. Each
// in its own processes and temporary folder, on free ports of 127.0.0.1, gone with the object (also
// when the test program dies). As root they run as the user postgres. A start that fails throws.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

struct pg_conn;

namespace semel::support {

/// What a statement answered: rows as text, or the error's SQLSTATE and words.
struct QueryAnswer {
    bool ok = false;
    std::string sqlstate;  ///< Empty: no answer at all (the connection failed).
    std::string message;
    std::vector<std::vector<std::optional<std::string>>> rows;
    /// The first column of the first row; empty if there is none or it is NULL.
    [[nodiscard]] std::string one() const;
};

/// A plain connection, as another client has it: holds transactions and locks open. Not
/// thread-safe.
class PostgresClient {
  public:
    explicit PostgresClient(const std::string& url);
    ~PostgresClient();  ///< Closes; an open transaction is rolled back.
    PostgresClient(const PostgresClient&) = delete;
    PostgresClient& operator=(const PostgresClient&) = delete;
    /// One or several statements without parameters; the last one's answer. Blocks.
    QueryAnswer query(const std::string& sql);
    /// The connection itself, e.g. for executor_on(). Owned by this object.
    [[nodiscard]] pg_conn* connection() { return connection_; }

  private:
    pg_conn* connection_ = nullptr;
};

struct PostgresServerOptions {
    /// Lines of postgresql.conf, as {"synchronous_commit = off"}. They come after the fixture's
    /// own.
    std::vector<std::string> settings;
    std::vector<std::string> environment;  ///< "NAME=value" besides the test's own.
    /// Lines of pg_hba.conf in place of "trust everybody on 127.0.0.1". Its unix socket trusts
    /// always.
    std::vector<std::string> host_rules;
    bool tls =
        false;  ///< Over TCP nothing but TLS, by a certificate for 127.0.0.1 of a CA of its own.
};

/// One server with the database `semel` and the superuser `semel`. Its settings are the server's
/// own (fsync on) but for sizes and logging. Takes connections when the constructor returns.
class PostgresServer {
  public:
    explicit PostgresServer(PostgresServerOptions options = {});
    /// A streaming standby of `primary`, which must let it (wal_level is replica by default).
    /// `name` is its application_name, for synchronous_standby_names. Streams when it returns.
    PostgresServer(const PostgresServer& primary, const std::string& name,
                   PostgresServerOptions options = {});
    ~PostgresServer();  ///< SIGKILL to all of its processes.
    PostgresServer(const PostgresServer&) = delete;
    PostgresServer& operator=(const PostgresServer&) = delete;

    [[nodiscard]] std::uint16_t port() const { return port_; }
    [[nodiscard]] std::string name() const;  ///< 127.0.0.1:port
    /// postgresql://USER@127.0.0.1:port/DATABASE; with TLS: sslmode=verify-full and the CA's file.
    [[nodiscard]] std::string url(const std::string& user = "semel",
                                  const std::string& database = "semel") const;
    /// The same through the unix socket in folder(), as superuser.
    [[nodiscard]] std::string socket_url(const std::string& database = "semel") const;
    [[nodiscard]] std::filesystem::path folder() const { return folder_; }
    [[nodiscard]] std::string ca_file() const;  ///< With TLS.
    [[nodiscard]] pid_t pid() const { return pid_; }

    /// Runs SQL on a connection of its own (the unix socket, superuser), without parameters.
    QueryAnswer query(const std::string& sql, const std::string& database = "semel") const;
    /// query(...).one(), and throws if it failed.
    std::string ask(const std::string& sql, const std::string& database = "semel") const;
    /// A new empty database; its name.
    std::string new_database() const;

    void kill();    ///< SIGKILL to postmaster and backends, and waits until they are gone: a crash.
    void freeze();  ///< SIGSTOP to postmaster and backends, and waits until they have stopped.
    void thaw();    ///< SIGCONT.
    /// Starts it again (kills it first if it runs) on the same port and folder, and waits until it
    /// takes connections.
    void restart();
    void restart(PostgresServerOptions options);
    /// A standby gets nothing any more from its primary (which may go on), but serves reads.
    void cut_from_primary() const;
    void promote() const;  ///< Makes a standby a primary, and waits until it is one.
    /// The end of its log, for a failed test's message.
    [[nodiscard]] std::string log() const;
    [[nodiscard]] std::string whole_log() const;

    /// Asks `condition` every few milliseconds until it holds; false after `within`.
    static bool eventually(const std::function<bool()>& condition,
                           std::chrono::milliseconds within = std::chrono::seconds{10});

  private:
    void make_folder();
    void start();
    bool launch();
    void write_configuration() const;

    PostgresServerOptions options_;
    std::filesystem::path folder_;
    std::uint16_t port_ = 0;
    pid_t pid_ = -1;
    std::vector<pid_t> frozen_;
};

/// PgBouncer in transaction mode in front of a server. Answers when the constructor returns.
class PgBouncer {
  public:
    /// `settings`: lines of its [pgbouncer] section after the fixture's own.
    explicit PgBouncer(const PostgresServer& server, const std::vector<std::string>& settings = {});
    ~PgBouncer();
    PgBouncer(const PgBouncer&) = delete;
    PgBouncer& operator=(const PgBouncer&) = delete;
    [[nodiscard]] std::string url(const std::string& database = "semel") const;
    [[nodiscard]] std::string log() const;

  private:
    std::filesystem::path folder_;
    std::uint16_t port_ = 0;
    pid_t pid_ = -1;
};

}  // namespace semel::support
