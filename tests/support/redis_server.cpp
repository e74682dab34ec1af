#include "support/redis_server.hpp"

#include <fcntl.h>
#include <hiredis/hiredis.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <stdexcept>

extern char** environ;

namespace semel::support {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

namespace {

// A Cluster's bus listens 10,000 above; both stay below the range that outgoing connections take
// their ports from.
constexpr int kFirstPort = 10'000;
constexpr int kLastPort = 19'999;
constexpr int kBusDistance = 10'000;
constexpr int kPortTries = 50;
constexpr seconds kStartWithin{20};
constexpr seconds kCommandWithin{10};
constexpr int kSlots = 16'384;
constexpr const char* kMasterName = "main";

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

bool free_now(int port) {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int on = 1;
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const bool yes = ::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
                     ::listen(fd, 1) == 0;
    ::close(fd);
    return yes;
}

// Free when asked; whoever starts a server on it tries another one if somebody was faster.
std::uint16_t free_port() {
    static std::mutex mutex;
    static std::mt19937 random{std::random_device{}()};
    const std::lock_guard lock(mutex);
    std::uniform_int_distribution<int> any(kFirstPort, kLastPort);
    for (int tries = 0; tries < 1000; ++tries) {
        const int port = any(random);
        if (free_now(port) && free_now(port + kBusDistance))
            return static_cast<std::uint16_t>(port);
    }
    fail("no free port between 10000 and 19999 on 127.0.0.1");
}

// A process that kills the servers when the test program ends in whatever way: it holds the reading
// end of a pipe whose writing end dies with the program.
class Guardian {
  public:
    static Guardian& instance() {
        static Guardian one;
        return one;
    }
    void watch(pid_t pid) { tell(pid); }
    void forget(pid_t pid) { tell(-pid); }

  private:
    Guardian() {
        int ends[2];
        if (::pipe2(ends, O_CLOEXEC) != 0) fail("no pipe for the guardian process");
        const pid_t child = ::fork();
        if (child == 0) run(ends[0]);
        ::close(ends[0]);
        pipe_ = ends[1];
    }
    void tell(pid_t pid) const {
        if (::write(pipe_, &pid, sizeof pid) != sizeof pid) fail("the guardian process is gone");
    }
    // Between fork and _exit: nothing but system calls.
    [[noreturn]] static void run(int in) {
        ::setsid();
        for (int fd = 0; fd < 1024; ++fd) {
            if (fd != in) ::close(fd);
        }
        std::array<pid_t, 256> pids{};
        pid_t told = 0;
        while (::read(in, &told, sizeof told) == sizeof told) {
            const pid_t wanted = told > 0 ? 0 : -told;
            for (pid_t& pid : pids) {
                if (pid != wanted) continue;
                pid = told > 0 ? told : 0;
                break;
            }
        }
        for (const pid_t pid : pids) {
            if (pid > 0) ::kill(pid, SIGKILL);
        }
        ::_exit(0);
    }
    int pipe_ = -1;
};

pid_t spawn(const Words& words, const Words& more_environment, const std::string& output) {
    std::vector<char*> arguments;
    for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    std::vector<char*> environment;
    for (const std::string& one : more_environment)
        environment.push_back(const_cast<char*>(one.c_str()));
    for (char** one = environ; *one != nullptr; ++one) environment.push_back(*one);
    environment.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, output.c_str(), O_WRONLY | O_CREAT | O_APPEND,
                                     0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    pid_t pid = -1;
    const int code =
        posix_spawnp(&pid, arguments[0], &actions, nullptr, arguments.data(), environment.data());
    posix_spawn_file_actions_destroy(&actions);
    if (code != 0) fail("cannot start " + words[0] + ": " + std::generic_category().message(code));
    return pid;
}

Reply converted(const redisReply& from) {
    Reply to;
    switch (from.type) {
        case REDIS_REPLY_STRING:
            to.kind = Reply::Kind::string;
            break;
        case REDIS_REPLY_STATUS:
            to.kind = Reply::Kind::status;
            break;
        case REDIS_REPLY_ERROR:
            to.kind = Reply::Kind::error;
            break;
        case REDIS_REPLY_INTEGER:
            to.kind = Reply::Kind::integer;
            to.integer = from.integer;
            return to;
        case REDIS_REPLY_ARRAY:
            to.kind = Reply::Kind::array;
            for (std::size_t i = 0; i < from.elements; ++i)
                to.elements.push_back(converted(*from.element[i]));
            return to;
        default:
            return to;
    }
    to.text.assign(from.str, static_cast<std::size_t>(from.len));
    return to;
}

Reply no_connection(const std::string& why) {
    return {.kind = Reply::Kind::error, .text = "NOCONNECTION " + why};
}

bool says(const Reply& reply, std::string_view text) { return reply.text == text; }

std::string field_of(const std::string& info, const std::string& field) {
    const std::string wanted = "\n" + field + ":";
    const std::size_t at = ("\n" + info).find(wanted);
    if (at == std::string::npos) return {};
    const std::size_t begin = at + wanted.size() - 1;
    return info.substr(begin, info.find_first_of("\r\n", begin) - begin);
}

}  // namespace

bool eventually(const std::function<bool()>& condition, milliseconds within) {
    const auto deadline = steady_clock::now() + within;
    while (!condition()) {
        if (steady_clock::now() > deadline) return false;
        ::poll(nullptr, 0, 5);
    }
    return true;
}

TemporaryFolder::TemporaryFolder() {
    // Short: a unix socket's path has 107 bytes.
    std::string pattern = (std::filesystem::temp_directory_path() / "semel-redis-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) fail("cannot make a temporary folder " + pattern);
    path_ = pattern;
}
TemporaryFolder::~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
}

TlsFiles::TlsFiles(const std::filesystem::path& folder)
    : ca((folder / "ca.pem").string()),
      certificate((folder / "server.pem").string()),
      key((folder / "server.key").string()) {
    const std::string script = "cd '" + folder.string() +
                               "' && exec >/dev/null 2>&1 && "
                               "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 "
                               "-nodes -days 2 -subj '/CN=semel test CA' "
                               "-keyout ca.key -out ca.pem && "
                               "openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 "
                               "-nodes -subj '/CN=semel test server' "
                               "-keyout server.key -out server.csr && "
                               "printf 'subjectAltName=IP:127.0.0.1,DNS:localhost' > san && "
                               "openssl x509 -req -days 2 -in server.csr -CA ca.pem -CAkey ca.key "
                               "-CAcreateserial -extfile san "
                               "-out server.pem";
    if (std::system(script.c_str()) != 0) fail("openssl did not make the test certificates");
}

// ---------------------------------------------------------------- one server

RedisServer::RedisServer(RedisServerOptions options) : options_(std::move(options)) {
    if (options_.tls) tls_ = std::make_unique<TlsFiles>(folder_.path());
    for (int tries = 0; tries < kPortTries; ++tries) {
        port_ = free_port();
        if (launch()) return;
    }
    fail("redis-server does not start in " + folder_.path().string() + ": " + log());
}

RedisServer::~RedisServer() { kill(); }

std::string RedisServer::name() const { return "127.0.0.1:" + std::to_string(port_); }
std::string RedisServer::url() const {
    return (options_.tls ? "rediss://" : "redis://") +
           (options_.password.empty() ? "" : ":" + options_.password + "@") + name();
}
std::string RedisServer::socket_path() const { return (folder_.path() / "redis.sock").string(); }

Words RedisServer::command_line() const {
    const std::string port = std::to_string(port_);
    const std::string folder = folder_.path().string();
    if (!options_.sentinel_config.empty()) {
        // A sentinel rewrites its file: what it learnt survives a restart.
        const std::filesystem::path file = folder_.path() / "sentinel.conf";
        if (!std::filesystem::exists(file)) {
            std::ofstream(file) << "port " << port << "\nbind 127.0.0.1\nprotected-mode no\ndir "
                                << folder << "\n"
                                << options_.sentinel_config;
        }
        return {"redis-server", file.string(), "--sentinel"};
    }
    Words words{"redis-server",
                "--port",
                options_.tls ? "0" : port,
                "--bind",
                "127.0.0.1",
                "--dir",
                folder,
                "--unixsocket",
                socket_path(),
                "--save",
                "",
                "--appendonly",
                "no",
                "--daemonize",
                "no",
                "--repl-diskless-sync-delay",
                "0",
                "--repl-ping-replica-period",
                "1"};
    const auto add = [&words](std::initializer_list<std::string> more) {
        words.insert(words.end(), more);
    };
    if (options_.tls) {
        add({"--tls-port", port, "--tls-cert-file", tls_->certificate, "--tls-key-file", tls_->key,
             "--tls-ca-cert-file", tls_->ca, "--tls-auth-clients", "no"});
    }
    if (options_.cluster)
        add({"--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf",
             "--cluster-node-timeout", "1500"});
    if (!options_.password.empty())
        add({"--requirepass", options_.password, "--masterauth", options_.password});
    words.insert(words.end(), options_.arguments.begin(), options_.arguments.end());
    return words;
}

// False: the process ended by itself (a port in use). Throws if it neither ends nor answers.
bool RedisServer::launch() {
    std::error_code ignored;
    std::filesystem::remove(socket_path(), ignored);
    pid_ = spawn(command_line(), options_.environment, (folder_.path() / "log").string());
    Guardian::instance().watch(pid_);
    bool ended = false;
    const bool decided = eventually(
        [&] {
            int status = 0;
            if (::waitpid(pid_, &status, WNOHANG) == pid_) {
                Guardian::instance().forget(pid_);
                pid_ = -1;
                return ended = true;
            }
            return says(command({"PING"}), "PONG");
        },
        kStartWithin);
    if (!decided) fail("redis-server does not answer within 20 s: " + log());
    if (ended && log().find("in use") == std::string::npos)
        fail("redis-server ended at once: " + log());
    return !ended;
}

Reply RedisServer::command(const Words& words) const {
    const timeval limit{kCommandWithin.count(), 0};
    const bool sentinel = !options_.sentinel_config.empty();
    const std::unique_ptr<redisContext, void (*)(redisContext*)> context(
        sentinel ? redisConnectWithTimeout("127.0.0.1", port_, limit)
                 : redisConnectUnixWithTimeout(socket_path().c_str(), limit),
        redisFree);
    if (context == nullptr) return no_connection("out of memory");
    if (context->err != 0) return no_connection(context->errstr);
    redisSetTimeout(context.get(), limit);
    const auto send = [&](const Words& what) {
        std::vector<const char*> texts;
        std::vector<std::size_t> sizes;
        for (const std::string& word : what) {
            texts.push_back(word.data());
            sizes.push_back(word.size());
        }
        const std::unique_ptr<void, void (*)(void*)> reply(
            redisCommandArgv(context.get(), static_cast<int>(what.size()), texts.data(),
                             sizes.data()),
            freeReplyObject);
        if (reply == nullptr) return no_connection(context->errstr);
        return converted(*static_cast<const redisReply*>(reply.get()));
    };
    if (!options_.password.empty() && !sentinel) {
        Reply said = send({"AUTH", options_.password});
        if (said.kind == Reply::Kind::error) return said;
    }
    return send(words);
}

std::string RedisServer::info(const std::string& field) const {
    return field_of(command({"INFO", "everything"}).text, field);
}

bool RedisServer::wait_online(std::size_t replicas) const {
    return eventually(
        [&] {
            std::size_t online = 0;
            for (std::size_t i = 0; i < replicas; ++i) {
                const std::string replica = info("slave" + std::to_string(i));
                // The stream of commands begins only with its first acknowledgement.
                online += replica.find("state=online") != std::string::npos &&
                          replica.find("offset=0,") == std::string::npos;
            }
            return online == replicas;
        },
        kStartWithin);
}

void RedisServer::kill() {
    if (pid_ < 0) return;
    ::kill(pid_, SIGKILL);
    int status = 0;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    Guardian::instance().forget(pid_);
    pid_ = -1;
}

void RedisServer::freeze() {
    ::kill(pid_, SIGSTOP);
    int status = 0;
    while (::waitpid(pid_, &status, WUNTRACED) < 0 && errno == EINTR) {
    }
}

void RedisServer::thaw() { ::kill(pid_, SIGCONT); }

void RedisServer::restart() {
    kill();
    // Its port may be an outgoing connection's in the meantime, or still be closing.
    if (!eventually([this] { return launch(); }, kStartWithin))
        fail("redis-server does not come back on port " + std::to_string(port_) + ": " + log());
}

void RedisServer::restart(RedisServerOptions options) {
    kill();
    options_ = std::move(options);
    if (options_.tls && tls_ == nullptr) tls_ = std::make_unique<TlsFiles>(folder_.path());
    restart();
}

std::string RedisServer::log() const {
    constexpr std::size_t kEnd = 2000;
    std::ifstream file(folder_.path() / "log");
    std::string all{std::istreambuf_iterator<char>(file), {}};
    if (all.size() > kEnd) all.erase(0, all.size() - kEnd);
    return all;
}

// ---------------------------------------------------------------- Cluster

RedisCluster::RedisCluster(std::size_t masters, std::size_t replicas_each,
                           RedisServerOptions options) {
    options.cluster = true;
    for (std::size_t i = 0; i < masters * (1 + replicas_each); ++i)
        nodes_.push_back(std::make_unique<RedisServer>(options));
    for (std::size_t i = 0; i < masters; ++i) {
        const auto first = i * kSlots / masters;
        const auto last = (i + 1) * kSlots / masters - 1;
        // Different epochs from the start: otherwise the nodes first have to settle who counts.
        node(i).command({"CLUSTER", "SET-CONFIG-EPOCH", std::to_string(i + 1)});
        if (!says(node(i).command(
                      {"CLUSTER", "ADDSLOTSRANGE", std::to_string(first), std::to_string(last)}),
                  "OK"))
            fail("CLUSTER ADDSLOTSRANGE was refused by " + node(i).name());
    }
    for (std::size_t i = 1; i < nodes_.size(); ++i)
        node(0).command({"CLUSTER", "MEET", "127.0.0.1", std::to_string(node(i).port())});
    const auto all_known = [this] {
        return std::all_of(nodes_.begin(), nodes_.end(), [this](const auto& one) {
            return field_of(one->command({"CLUSTER", "INFO"}).text, "cluster_known_nodes") ==
                   std::to_string(nodes_.size());
        });
    };
    if (!eventually(all_known, kStartWithin))
        fail("the Cluster's nodes do not all know each other");
    for (std::size_t i = masters; i < nodes_.size(); ++i) {
        const std::string master = id_of((i - masters) / replicas_each);
        if (!eventually(
                [&] { return says(node(i).command({"CLUSTER", "REPLICATE", master}), "OK"); },
                kStartWithin))
            fail("CLUSTER REPLICATE was refused by " + node(i).name());
    }
    if (!wait_ok())
        fail("the Cluster does not become ok: " + node(0).command({"CLUSTER", "INFO"}).text);
    for (std::size_t i = masters; i < nodes_.size(); ++i) {
        if (!eventually([&] { return node(i).info("master_link_status") == "up"; }, kStartWithin))
            fail("the replica " + node(i).name() + " does not reach its master");
    }
}

std::string RedisCluster::id_of(std::size_t i) const {
    return nodes_[i]->command({"CLUSTER", "MYID"}).text;
}

bool RedisCluster::wait_ok(milliseconds within) const {
    return eventually(
        [this] {
            return std::all_of(nodes_.begin(), nodes_.end(), [](const auto& one) {
                if (one->pid() < 0) return true;
                const std::string info = one->command({"CLUSTER", "INFO"}).text;
                return field_of(info, "cluster_state") == "ok" &&
                       field_of(info, "cluster_slots_ok") == std::to_string(kSlots);
            });
        },
        within);
}

std::size_t RedisCluster::owner_of(std::uint16_t slot) const {
    for (const auto& one : nodes_) {
        if (one->pid() < 0) continue;
        if (const std::size_t owner = owner_seen_by(*one, slot); owner < nodes_.size())
            return owner;
    }
    return nodes_.size();
}

std::size_t RedisCluster::owner_seen_by(const RedisServer& node, std::uint16_t slot) const {
    const Reply map = node.command({"CLUSTER", "SLOTS"});
    for (const Reply& range : map.elements) {
        if (slot < range.elements[0].integer || slot > range.elements[1].integer) continue;
        const std::int64_t port = range.elements[2].elements[1].integer;
        for (std::size_t i = 0; i < nodes_.size(); ++i) {
            if (nodes_[i]->port() == port) return i;
        }
    }
    return nodes_.size();
}

bool RedisCluster::migrate(std::uint16_t slot, std::size_t from, std::size_t to,
                           const std::function<void()>& between) {
    const std::string number = std::to_string(slot);
    const auto step = [&](std::size_t at, const Words& words) {
        const bool done = says(node(at).command(words), "OK");
        if (done && between) between();
        return done;
    };
    if (!step(to, {"CLUSTER", "SETSLOT", number, "IMPORTING", id_of(from)})) return false;
    if (!step(from, {"CLUSTER", "SETSLOT", number, "MIGRATING", id_of(to)})) return false;
    while (true) {
        const Reply keys = node(from).command({"CLUSTER", "GETKEYSINSLOT", number, "100"});
        if (keys.kind != Reply::Kind::array) return false;
        if (keys.elements.empty()) break;
        // All in one step: who needs a key on each side is told to try again until both are over
        // there.
        Words move{"MIGRATE", "127.0.0.1", std::to_string(node(to).port()), "", "0",
                   "5000",    "KEYS"};
        for (const Reply& key : keys.elements) move.push_back(key.text);
        const Reply said = node(from).command(move);
        // NOKEY: clients deleted them meanwhile.
        if (!says(said, "OK") && !says(said, "NOKEY")) return false;
        if (between) between();
    }
    // The new owner first: between the two, the old one still sends on with ASK.
    if (!step(to, {"CLUSTER", "SETSLOT", number, "NODE", id_of(to)})) return false;
    if (!step(from, {"CLUSTER", "SETSLOT", number, "NODE", id_of(to)})) return false;
    // A next move before all have heard of this one could be undone by an old claim that is still
    // under way.
    return eventually([&] { return owners_agreed(slot); });
}

bool RedisCluster::owners_agreed(std::uint16_t slot) const {
    std::set<std::string> views;
    for (const auto& one : nodes_) {
        if (one->pid() < 0) continue;
        std::istringstream lines(one->command({"CLUSTER", "NODES"}).text);
        std::map<std::string, std::string> epochs;
        // id address flags master ping pong epoch state slots...
        for (std::string line; std::getline(lines, line);) {
            std::istringstream words(line);
            std::string id, skipped, epoch;
            words >> id >> skipped >> skipped >> skipped >> skipped >> skipped >> epoch;
            epochs[id] = epoch;
        }
        std::string view = std::to_string(owner_seen_by(*one, slot));
        for (const auto& [id, epoch] : epochs) view += " " + id + "=" + epoch;
        views.insert(view);
    }
    return views.size() == 1;
}

// ---------------------------------------------------------------- Sentinel

RedisSentinels::RedisSentinels(std::size_t replicas, std::size_t sentinels,
                               RedisServerOptions options, milliseconds down_after)
    : password_(options.password) {
    servers_.push_back(std::make_unique<RedisServer>(options));
    const std::string port = std::to_string(server(0).port());
    RedisServerOptions replica = options;
    replica.arguments.insert(replica.arguments.end(), {"--replicaof", "127.0.0.1 " + port});
    for (std::size_t i = 0; i < replicas; ++i)
        servers_.push_back(std::make_unique<RedisServer>(replica));
    for (std::size_t i = 1; i < servers_.size(); ++i) {
        if (!eventually([&] { return server(i).info("master_link_status") == "up"; }, kStartWithin))
            fail("the replica " + server(i).name() +
                 " does not reach its master: " + server(i).log());
    }
    std::ostringstream config;
    const std::string name = kMasterName;
    config << "sentinel monitor " << name << " 127.0.0.1 " << port << " " << sentinels / 2 + 1
           << "\n"
           << "sentinel down-after-milliseconds " << name << " " << down_after.count() << "\n"
           << "sentinel failover-timeout " << name << " 3000\n";
    if (!password_.empty()) config << "sentinel auth-pass " << name << " " << password_ << "\n";
    for (std::size_t i = 0; i < sentinels; ++i) {
        RedisServerOptions one;
        one.sentinel_config = config.str();
        one.environment = options.environment;
        sentinels_.push_back(std::make_unique<RedisServer>(one));
    }
    const auto all_known = [&] {
        return std::all_of(sentinels_.begin(), sentinels_.end(), [&](const auto& one) {
            const Reply said = one->command({"SENTINEL", "MASTER", name});
            std::size_t found = 0;
            for (std::size_t i = 0; i + 1 < said.elements.size(); i += 2) {
                const std::string& field = said.elements[i].text;
                const std::string& value = said.elements[i + 1].text;
                found += field == "num-slaves" && value == std::to_string(replicas);
                found += field == "num-other-sentinels" && value == std::to_string(sentinels - 1);
            }
            return found == 2;
        });
    };
    if (!eventually(all_known, seconds{30}))
        fail("the sentinels do not all know each other and the replicas");
}

std::size_t RedisSentinels::master() const {
    std::size_t agreed = servers_.size();
    for (const auto& one : sentinels_) {
        if (one->pid() < 0) continue;
        const Reply said = one->command({"SENTINEL", "get-master-addr-by-name", kMasterName});
        if (said.elements.size() != 2) return servers_.size();
        std::size_t named = 0;
        while (named < servers_.size() &&
               std::to_string(servers_[named]->port()) != said.elements[1].text)
            ++named;
        if (agreed != servers_.size() && agreed != named) return servers_.size();
        agreed = named;
    }
    return agreed;
}

bool RedisSentinels::failover() {
    const std::size_t before = master();
    if (!eventually(
            [&] { return says(sentinel(0).command({"SENTINEL", "FAILOVER", kMasterName}), "OK"); },
            kStartWithin))
        return false;
    return eventually(
        [&] {
            const std::size_t now = master();
            return now != before && now < servers_.size() && server(now).info("role") == "master";
        },
        kStartWithin);
}

std::string RedisSentinels::url() const {
    std::string url = "redis-sentinel://" + (password_.empty() ? "" : ":" + password_ + "@");
    for (std::size_t i = 0; i < sentinels_.size(); ++i)
        url += (i == 0 ? "" : ",") + sentinels_[i]->name();
    return url + "#" + kMasterName;
}

}  // namespace semel::support
