// Real Redis servers for tests: one, a Cluster, a Sentinel-watched master. Each in its own process
// and temporary folder, on free ports of 127.0.0.1, gone with the object (also when the test
// program dies). A start that fails throws.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "stores/redis/client.hpp"

namespace semel::support {

using stores::redis::Reply;
using Words = std::vector<std::string>;

/// Asks `condition` every few milliseconds until it holds; false after `within`.
bool eventually(const std::function<bool()>& condition,
                std::chrono::milliseconds within = std::chrono::seconds{10});

/// A certificate authority of its own and a server certificate by it for 127.0.0.1 and localhost.
struct TlsFiles {
    /// Written into `folder` by openssl.
    explicit TlsFiles(const std::filesystem::path& folder);
    std::string ca, certificate, key;
};

/// A folder under the temporary one, removed with the object.
class TemporaryFolder {
  public:
    TemporaryFolder();
    ~TemporaryFolder();
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;
    [[nodiscard]] const std::filesystem::path& path() const { return path_; }

  private:
    std::filesystem::path path_;
};

struct RedisServerOptions {
    /// As on the command line: {"--maxmemory", "10mb"}. They come after the fixture's own (no
    /// persistence).
    Words arguments;
    Words environment;  ///< "NAME=value" besides the test's own (LD_PRELOAD and FAKETIME for
                        ///< another clock).
    bool tls = false;   ///< port() speaks TLS with tls()'s certificate, and nothing else.
    bool cluster = false;
    std::string password;         ///< Of the user default: requirepass and masterauth.
    std::string sentinel_config;  ///< Not empty: a sentinel with these lines (its port is added).
};

/// One redis-server (or sentinel). Answers PING when the constructor returns.
class RedisServer {
  public:
    explicit RedisServer(RedisServerOptions options = {});
    ~RedisServer();  ///< SIGKILL.
    RedisServer(const RedisServer&) = delete;
    RedisServer& operator=(const RedisServer&) = delete;

    [[nodiscard]] std::uint16_t port() const { return port_; }
    [[nodiscard]] std::string name() const;  ///< 127.0.0.1:port, as the client calls it.
    [[nodiscard]] std::string url()
        const;  ///< redis:// or rediss://, with the password if there is one.
    [[nodiscard]] std::string socket_path() const;  ///< A unix socket of it (a sentinel has none).
    [[nodiscard]] std::filesystem::path folder() const { return folder_.path(); }
    [[nodiscard]] const TlsFiles& tls() const { return *tls_; }
    [[nodiscard]] pid_t pid() const { return pid_; }

    /// Sends one command on a connection of its own and waits up to 10 s. An error reply is a Reply
    /// of kind error; a connection that fails is one as well, with a text that begins with
    /// "NOCONNECTION". Thread-safe. Speaks even if port() is TLS.
    Reply command(const Words& words) const;
    /// The value of a field of INFO ("connected_slaves"), empty if there is none.
    [[nodiscard]] std::string info(const std::string& field) const;

    /// Waits until so many replicas are fed by this master (a replica says "up" up to a second
    /// before WAIT counts it).
    [[nodiscard]] bool wait_online(std::size_t replicas) const;

    void kill();    ///< SIGKILL, and waits until it is gone.
    void freeze();  ///< SIGSTOP, and waits until it has stopped.
    void thaw();    ///< SIGCONT.
    /// Starts it again (after kill(), or kills it first) on the same port and folder, and waits for
    /// PING.
    void restart();
    /// As restart(), with other arguments and environment.
    void restart(RedisServerOptions options);
    /// The end of its log, for a failed test's message.
    [[nodiscard]] std::string log() const;

  private:
    bool launch();
    [[nodiscard]] Words command_line() const;

    RedisServerOptions options_;
    TemporaryFolder folder_;
    std::unique_ptr<TlsFiles> tls_;
    std::uint16_t port_ = 0;
    pid_t pid_ = -1;
};

/// A Redis Cluster whose slots are divided evenly. In state ok, seen from each node, when the
/// constructor returns.
class RedisCluster {
  public:
    /// Nodes 0 .. masters-1 are masters; then the replicas of node 0, 1, ...
    explicit RedisCluster(std::size_t masters = 3, std::size_t replicas_each = 0,
                          RedisServerOptions options = {});
    [[nodiscard]] RedisServer& node(std::size_t i) { return *nodes_.at(i); }
    [[nodiscard]] std::size_t size() const { return nodes_.size(); }
    /// Which node serves the slot, as any node that answers sees it (size() if none does).
    [[nodiscard]] std::size_t owner_of(std::uint16_t slot) const;
    /// Moves a slot with its keys while clients work, in the documented steps (IMPORTING,
    /// MIGRATING, MIGRATE, NODE). `between` is called after each of the steps. False if a step was
    /// refused.
    bool migrate(std::uint16_t slot, std::size_t from, std::size_t to,
                 const std::function<void()>& between = {});
    /// Waits until each running node says cluster_state:ok.
    bool wait_ok(std::chrono::milliseconds within = std::chrono::seconds{20}) const;

  private:
    [[nodiscard]] std::string id_of(std::size_t i) const;
    [[nodiscard]] std::size_t owner_seen_by(const RedisServer& node, std::uint16_t slot) const;
    /// All nodes see the same owner and the same epochs.
    [[nodiscard]] bool owners_agreed(std::uint16_t slot) const;
    std::vector<std::unique_ptr<RedisServer>> nodes_;
};

/// A master with replicas, and sentinels that watch it (name: "main", quorum: the majority).
class RedisSentinels {
  public:
    /// `down_after`: when the sentinels call a silent server down.
    explicit RedisSentinels(std::size_t replicas = 1, std::size_t sentinels = 3,
                            RedisServerOptions options = {},
                            std::chrono::milliseconds down_after = std::chrono::milliseconds{600});
    /// Data server 0 begins as the master.
    [[nodiscard]] RedisServer& server(std::size_t i) { return *servers_.at(i); }
    [[nodiscard]] std::size_t servers() const { return servers_.size(); }
    [[nodiscard]] RedisServer& sentinel(std::size_t i) { return *sentinels_.at(i); }
    /// Which server the sentinels call the master now (servers() if they do not agree or answer).
    [[nodiscard]] std::size_t master() const;
    /// Asks for a failover, and waits until another server is the master for all sentinels.
    bool failover();
    /// redis-sentinel:// with all sentinels and the data servers' password.
    [[nodiscard]] std::string url() const;

  private:
    std::string password_;
    std::vector<std::unique_ptr<RedisServer>> servers_;
    std::vector<std::unique_ptr<RedisServer>> sentinels_;
};

}  // namespace semel::support
