// Client: sends commands to the Redis server that holds their key, and brings back each reply or why there is none.
// One server, a Sentinel-watched master or a Cluster; TCP, TLS or a unix socket.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/result.hpp"
#include "base/time.hpp"

namespace semel::stores::redis {

using base::SteadyTime;
using std::chrono::milliseconds;

// ---------------------------------------------------------------- replies

/// A RESP2 reply.
struct Reply {
    enum class Kind : std::uint8_t { nil, integer, string, status, array, error };
    Kind kind = Kind::nil;
    std::int64_t integer = 0;
    std::string text;  ///< Of string, status and error ("OOM command not allowed ...").
    std::vector<Reply> elements;
};

/// A Lua script of ours. Lives as long as the process.
struct Script {
    std::string_view name;    ///< Of its file, for messages.
    std::string_view source;
    std::string sha1;         ///< Lower-case hex.
};

/// Why a command has no reply.
struct NoReply {
    /// no: provably not executed. unknown: it was sent and may have been, or may still be, executed (a broken connection, no
    /// answer within the patience, or executed but not confirmed by `wait_replicas`).
    base::Applied applied = base::Applied::no;
    bool full = false;    ///< The server refused it for lack of memory (OOM): nothing was executed.
    std::string detail;   ///< What happened, at which server, and what to do.
    std::shared_ptr<const Reply> unconfirmed = nullptr;  ///< It was executed with this reply, and `wait_replicas` did not confirm it.
};

/// A reply other than an error, or why there is none. Errors that the client cures itself (NOSCRIPT, MOVED, ASK, TRYAGAIN,
/// LOADING, CLUSTERDOWN, MASTERDOWN, READONLY after a failover) never come back as long as the patience lasts; any other error
/// reply of the server is a NoReply with applied = no, except a script's own run-time error, which is unknown.
using Answer = std::variant<Reply, NoReply>;

// ---------------------------------------------------------------- commands

/// Appends one argument in RESP ("$3\r\nabc\r\n").
void append_argument(std::string& wire, std::string_view argument);

/// One command. Its arguments are kept encoded, so that it can be sent again elsewhere without being encoded again.
struct Command {
    const Script* script = nullptr;  ///< Sent as EVALSHA, and as EVAL where the server does not know it. Null: a plain command.
    std::uint32_t arguments = 0;     ///< How many `wire` holds. Of a script: from the number of keys on.
    std::string wire;                ///< append_argument() of each.
    std::uint16_t slot = 0;          ///< Cluster slot of its keys; ignored without a Cluster.
    bool writes = true;              ///< Waited for by `wait_replicas`.
    /// May be sent again when its reply was lost: executing it twice, the first time arbitrarily late, does no harm.
    bool repeatable = false;
};

/// Slot of a key's hash tag (CRC16 of what stands between the first braces, modulo 16384).
std::uint16_t slot_of(std::string_view tag);

// ---------------------------------------------------------------- where

struct Address {
    std::string host;
    std::uint16_t port = 6379;
};

/// What a URL says.
///   redis://[user[:password]@]host[:port][/db]        rediss:// the same over TLS
///   unix://[user[:password]@]/path/to/socket[?db=N]
///   redis-sentinel://[user[:password]@]host[:port][,host[:port]]...[/db]#master-name      rediss-sentinel://
/// User and password may be percent-encoded; they are the data servers' (see ClientOptions for the sentinels').
struct Target {
    enum class Kind : std::uint8_t { server, unix_socket, sentinel };
    Kind kind = Kind::server;
    std::vector<Address> addresses;  ///< One; several for Sentinel.
    std::string path;                ///< Of a unix socket.
    std::string master_name;         ///< Sentinel.
    std::string user;
    std::string password;
    int database = 0;
    bool tls = false;
};
/// Error invalid_argument: a sentence that says what is wrong with it, without the password.
base::Result<Target> parse_url(std::string_view url);
/// The URL without user and password, for messages and logs.
std::string describe(const Target& target);

struct ClientOptions {
    Target target;
    bool cluster = false;            ///< target's server is one of a Cluster: discover the others. Database 0 only.
    std::string ca_file;             ///< TLS: trusted besides the system's authorities (PEM); empty: those alone.
    std::string sentinel_user;       ///< Of the sentinels themselves.
    std::string sentinel_password;
    std::vector<const Script*> scripts;   ///< Loaded on each new connection, so that NOSCRIPT stays the exception.
    unsigned wait_replicas = 0;           ///< > 0: a write is answered only once so many replicas have it (WAIT).
    milliseconds wait_timeout{500};       ///< How long WAIT may take; then the write is NoReply{unknown}.
    milliseconds connect_timeout{2000};
    milliseconds patience{5000};          ///< A command that has no reply after that is given up.
    /// Each (re)connection to a data server begins with AUTH/SELECT/SCRIPT LOAD; back-off between tries doubles between these.
    milliseconds backoff_first{20};
    milliseconds backoff_max{1000};
};

/// A data server as it is reached now.
struct Node {
    std::string name;  ///< host:port or path.
    bool master = true;
};

/// Thread-safe. All of its I/O is on one thread of its own; callbacks are called there (or on the caller's thread, before
/// submit returns, if nothing can be sent any more) and must neither block nor throw.
class Client {
  public:
    /// Called with the answers in the commands' order, once.
    using Done = std::function<void(std::vector<Answer>)>;

    /// Connects, and discovers a Cluster's or Sentinel's servers. Blocks, at most about connect_timeout per address. Error
    /// store_unavailable or invalid_argument: a sentence that names server, cause and cure (unreachable, wrong password, TLS
    /// not spoken, no such master, not a cluster, a cluster but `cluster: true` is missing).
    static base::Result<std::unique_ptr<Client>> connect(ClientOptions options);
    virtual ~Client() = default;
    Client() = default;
    Client(const Client&) = delete;
    Client& operator=(const Client&) = delete;

    /// Sends the commands pipelined. Those with the same slot are executed in order, unless one of them must be sent again
    /// (NOSCRIPT, a moved slot, a lost connection): who needs an order waits for the answer. Never blocks.
    virtual void submit(std::vector<Command> commands, Done done) = 0;

    /// The masters now, in a stable order. One without a Cluster.
    [[nodiscard]] virtual std::vector<Node> masters() const = 0;
    /// Sends one plain command to that master (by its name) and waits for its answer: SCAN, INFO, CONFIG. Not on a callback.
    virtual Answer ask(const std::string& master, const std::vector<std::string>& arguments) = 0;

    /// Since when every server has been answering: a steady time, moved forward whenever a connection was lost and is back,
    /// or a server was silent for longer than a second and answers again (each is asked for its TIME every half second).
    [[nodiscard]] virtual SteadyTime answering_since() const = 0;
    /// The servers' clock minus the steady clock in us, by the last TIME that was answered, whoever asked for it.
    [[nodiscard]] virtual std::int64_t clock_offset_us() const = 0;
    /// OK, or which server is not reachable and why.
    [[nodiscard]] virtual base::Result<void> health() const = 0;
    /// Connections opened, scripts sent anew, redirections followed: for metrics and tests.
    struct Counters {
        std::uint64_t connections = 0;
        std::uint64_t scripts_resent = 0;
        std::uint64_t redirections = 0;
        std::uint64_t lost_replies = 0;
        std::uint64_t not_replicated = 0;
    };
    [[nodiscard]] virtual Counters counters() const = 0;

    /// Answers everything that is open (what was sent: unknown) and closes. Blocks. Idempotent. Not on a callback.
    virtual void stop() = 0;
};

}  // namespace semel::stores::redis
