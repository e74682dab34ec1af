// Real MariaDB servers for tests: one, or a primary with replicas. Each in its own process and
// temporary folder, on a free port of 127.0.0.1, gone with the object (also when the test program
// dies). A start that fails throws.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

struct st_mysql;  // MYSQL of MariaDB Connector/C.

namespace semel::support {

/// What one statement of a test said. `number` != 0: it failed, `text` says how.
struct MysqlAnswer {
    unsigned number = 0;
    std::string text;
    std::vector<std::vector<std::optional<std::string>>> rows;
    std::int64_t affected = 0;

    [[nodiscard]] bool ok() const { return number == 0; }
    /// The first value of the first row; empty if there is none or it is NULL.
    [[nodiscard]] std::string value() const {
        return rows.empty() || rows[0].empty() ? std::string{} : rows[0][0].value_or("");
    }
};

struct MysqlConnectionClose {
    void operator()(st_mysql* connection) const;
};
using MysqlConnection = std::unique_ptr<st_mysql, MysqlConnectionClose>;

struct MysqlServerOptions {
    /// As on the command line: {"--sql-mode=", "--log-bin"}. They come after the fixture's own.
    std::vector<std::string> arguments{};
    /// "NAME=value" besides the test's own (LD_PRELOAD and FAKETIME for another clock).
    std::vector<std::string> environment{};
    bool tls = false;  ///< TCP speaks TLS by ca_file(), and nothing else. The unix socket is open.
    bool binlog = false;  ///< Writes a synced binary log by rows: what a replica needs.
    /// Not 0: follows the server on this port of 127.0.0.1 (made with `binlog`) and is read-only.
    std::uint16_t replica_of = 0;
};

/// One mariadbd, durable at each commit, with the empty database `semel` and the user `semel`, who
/// may do all in that database. Answers when the constructor returns.
class MysqlServer {
  public:
    static constexpr const char* database = "semel";
    static constexpr const char* user = "semel";
    static constexpr const char* password = "s3/cr%t@:ü";  ///< Needs percent-encoding.
    static constexpr const char* password_encoded = "s3%2Fcr%25t%40%3A%C3%BC";

    explicit MysqlServer(MysqlServerOptions options = {});
    ~MysqlServer();  ///< SIGKILL.
    MysqlServer(const MysqlServer&) = delete;
    MysqlServer& operator=(const MysqlServer&) = delete;

    [[nodiscard]] std::uint16_t port() const { return port_; }
    [[nodiscard]] pid_t pid() const { return pid_; }
    [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }
    [[nodiscard]] std::string socket_path() const { return (folder_ / "s").string(); }
    [[nodiscard]] std::string ca_file() const { return (folder_ / "ca.pem").string(); }

    /// mysql://semel:...@127.0.0.1:port/database, with `query` behind the question mark
    /// ("tls=verify&..."). A server with `tls` adds tls=verify and its ca_file itself if `query` is
    /// empty.
    [[nodiscard]] std::string url(const std::string& in_database = database,
                                  const std::string& query = {}) const;
    /// The same over its unix socket.
    [[nodiscard]] std::string socket_url(const std::string& in_database = database) const;

    /// One statement as root over the unix socket, on a connection of its own that waits up to
    /// 10 s. A connection that fails is an answer with number 2002 to 2013. Thread-safe.
    MysqlAnswer query(const std::string& statement,
                      const std::string& in_database = database) const;
    /// A connection as `semel` over TCP, in utf8mb4, with CLIENT_MULTI_STATEMENTS and, if asked,
    /// CLIENT_FOUND_ROWS; waits up to 10 s for an answer. Throws if it fails. Thread-safe.
    [[nodiscard]] MysqlConnection connect(bool found_rows = true,
                                          const std::string& in_database = database) const;
    /// A fresh, empty database that `semel` may use: its name. Thread-safe.
    std::string make_database() const;
    /// Runs one statement on a connection of the test.
    static MysqlAnswer run(st_mysql* connection, const std::string& statement);

    void kill();    ///< SIGKILL, and waits until it is gone.
    void freeze();  ///< SIGSTOP, and waits until it has stopped.
    void thaw();    ///< SIGCONT.
    /// Starts it again (after kill(), or kills it first) on the same port and data.
    void restart();
    /// As restart(), with other arguments and environment.
    void restart(MysqlServerOptions options);
    /// Waits until this replica has applied all that `primary` has written so far; false after 20
    /// s.
    [[nodiscard]] bool caught_up(const MysqlServer& primary) const;
    /// The end of its log, for a failed test's message.
    [[nodiscard]] std::string log() const;

  private:
    bool launch();
    void follow() const;
    [[nodiscard]] std::vector<std::string> command_line() const;

    MysqlServerOptions options_;
    std::filesystem::path folder_;
    std::uint16_t port_ = 0;
    pid_t pid_ = -1;
};

}  // namespace semel::support
