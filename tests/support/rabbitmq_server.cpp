#include "support/rabbitmq_server.hpp"

#include <amqp.h>
#include <amqp_tcp_socket.h>

#include <atomic>
#include <fstream>
#include <random>
#include <sstream>
#include <stdexcept>

namespace semel::support {

namespace fs = std::filesystem;

namespace {

constexpr int kPortTries = 20;
constexpr std::chrono::seconds kStartWithin{90};
constexpr const char* kUser = "rabbitmq";

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error("rabbitmq: " + what); }

// Debian's wrapper in /usr/sbin changes the user by itself and reads /etc.
std::string programs() {
    for (const fs::directory_entry& entry : fs::directory_iterator("/usr/lib/rabbitmq/lib")) {
        if (entry.path().filename().string().starts_with("rabbitmq_server-"))
            return (entry.path() / "sbin").string();
    }
    fail("no server in /usr/lib/rabbitmq/lib; install the package rabbitmq-server");
}

std::string cookie() {
    std::random_device random;
    std::string out;
    for (int i = 0; i < 20; ++i) out += static_cast<char>('a' + random() % 26);
    return out;
}

// A connection of its own for one question.
class Client {
  public:
    explicit Client(std::uint16_t port) : state_(amqp_new_connection()) {
        amqp_socket_t* const socket = amqp_tcp_socket_new(state_);
        if (socket == nullptr || amqp_socket_open(socket, "127.0.0.1", port) != AMQP_STATUS_OK)
            fail("no connection");
        if (amqp_login(state_, "/", 0, 131072, 0, AMQP_SASL_METHOD_PLAIN, "guest", "guest")
                .reply_type != AMQP_RESPONSE_NORMAL)
            fail("no login");
        amqp_channel_open(state_, 1);
    }
    ~Client() {
        amqp_connection_close(state_, AMQP_REPLY_SUCCESS);
        amqp_destroy_connection(state_);
    }
    Client(const Client&) = delete;
    Client& operator=(const Client&) = delete;
    std::optional<std::size_t> declare(const std::string& name, bool passive) {
        const auto* said = amqp_queue_declare(state_, 1, amqp_cstring_bytes(name.c_str()),
                                              passive ? 1 : 0, 1, 0, 0, amqp_empty_table);
        if (said == nullptr) return std::nullopt;
        return said->message_count;
    }
    void remove(const std::string& name) {
        if (amqp_queue_delete(state_, 1, amqp_cstring_bytes(name.c_str()), 0, 0) == nullptr)
            fail("deleting " + name);
    }

  private:
    amqp_connection_state_t state_;
};

}  // namespace

RabbitServer::RabbitServer(RabbitServerOptions options)
    : options_(std::move(options)),
      process_(std::make_unique<ServerProcess>("rabbit", kUser)),
      epmd_(std::make_unique<ServerProcess>("epmd", kUser)),
      programs_(programs()) {
    const fs::path& folder = process_->folder();
    if (options_.tls) certificate_ = std::make_unique<ServerCertificate>(folder);
    for (const char* name : {"home", "mnesia", "logs"}) {
        fs::create_directory(folder / name);
        process_->give(folder / name);
    }
    const fs::path secret = folder / "home" / ".erlang.cookie";
    std::ofstream(secret) << cookie();
    fs::permissions(secret, fs::perms::owner_read);
    process_->give(secret);
    std::ofstream(folder / "enabled_plugins") << "[].\n";
    for (int tries = 0; tries < kPortTries; ++tries) {
        port_ = ServerProcess::free_port();
        tls_port_ = ServerProcess::free_port();
        distribution_port_ = ServerProcess::free_port();
        if (!epmd_->running()) epmd_port_ = ServerProcess::free_port();
        if (launch()) return;
        if (process_->log().find("eaddrinuse") == std::string::npos) break;
    }
    fail("the node does not start: " + process_->log());
}

RabbitServer::~RabbitServer() {
    process_.reset();
    epmd_.reset();
}

std::string RabbitServer::url() const {
    return "amqp://guest:guest@127.0.0.1:" + std::to_string(port_) + "/";
}
std::string RabbitServer::tls_url() const {
    return "amqps://guest:guest@127.0.0.1:" + std::to_string(tls_port_) + "/";
}
std::string RabbitServer::ca_file() const { return certificate_->ca; }

ServerProcess::Words RabbitServer::environment() const {
    const std::string folder = process_->folder().string();
    return {"HOME=" + folder + "/home",
            "ERL_EPMD_PORT=" + std::to_string(epmd_port_),
            "ERL_EPMD_ADDRESS=127.0.0.1",
            "RABBITMQ_NODENAME=semel" + std::to_string(port_) + "@localhost",
            "RABBITMQ_NODE_IP_ADDRESS=127.0.0.1",
            "RABBITMQ_NODE_PORT=" + std::to_string(port_),
            "RABBITMQ_DIST_PORT=" + std::to_string(distribution_port_),
            "RABBITMQ_CONFIG_FILE=" + folder + "/rabbitmq.conf",
            "RABBITMQ_ADVANCED_CONFIG_FILE=" + folder + "/advanced.config",
            "RABBITMQ_ENABLED_PLUGINS_FILE=" + folder + "/enabled_plugins",
            "RABBITMQ_MNESIA_BASE=" + folder + "/mnesia",
            "RABBITMQ_LOG_BASE=" + folder + "/logs",
            "RABBITMQ_PID_FILE=" + folder + "/rabbitmq.pid",
            "RABBITMQ_CONF_ENV_FILE=/dev/null",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=-kernel inet_dist_use_interface {127,0,0,1}"};
}

bool RabbitServer::launch() {
    std::ofstream out(process_->folder() / "rabbitmq.conf");
    out << "listeners.tcp.1 = 127.0.0.1:" << port_ << "\n"
        << "vm_memory_high_watermark.absolute = 1GiB\ndisk_free_limit.absolute = 50MB\n"
        << "log.file.level = warning\nlog.console = false\n";
    if (options_.tls) {
        out << "listeners.ssl.1 = 127.0.0.1:" << tls_port_ << "\n"
            << "ssl_options.certfile = " << certificate_->certificate << "\n"
            << "ssl_options.keyfile = " << certificate_->key << "\n";
    }
    for (const std::string& line : options_.settings) out << line << "\n";
    out.close();
    // What has no line in the file above. The broker looks for slow consumers once a minute
    // otherwise.
    std::ofstream(process_->folder() / "advanced.config")
        << "[{rabbit, [{channel_tick_interval, 200}]}].\n";
    if (!epmd_->running() &&
        !epmd_->start_until(
            {"epmd", "-port", std::to_string(epmd_port_), "-address", "127.0.0.1"}, {},
            [this] { return ServerProcess::answers(epmd_port_); }, kStartWithin))
        return false;
    return process_->start_until(
        {programs_ + "/rabbitmq-server"}, environment(),
        [this] {
            return ServerProcess::answers(port_) &&
                   (!options_.tls || ServerProcess::answers(tls_port_));
        },
        kStartWithin);
}

void RabbitServer::kill() { process_->kill(); }

void RabbitServer::restart() {
    process_->kill();
    if (!ServerProcess::eventually([this] { return launch(); }, kStartWithin))
        fail("the node does not come back: " + process_->log());
}

std::string RabbitServer::control(const std::vector<std::string>& words) const {
    ServerProcess::Words command{programs_ + "/rabbitmqctl"};
    command.insert(command.end(), words.begin(), words.end());
    std::string output;
    if (process_->run(command, environment(), &output) != 0)
        fail("rabbitmqctl " + words[0] + ": " + output);
    return output;
}

std::string RabbitServer::new_queue() const {
    static std::atomic<int> count{0};
    std::string name = "queue-" + std::to_string(++count);
    create_queue(name);
    return name;
}

void RabbitServer::create_queue(const std::string& name) const {
    if (!Client(port_).declare(name, false)) fail("declaring " + name);
}

void RabbitServer::delete_queue(const std::string& name) const { Client(port_).remove(name); }

void RabbitServer::sync_queues() const {
    const std::string said = control({"eval", "mnesia:sync_log()."});
    if (!said.starts_with("ok")) fail("syncing the queues: " + said);
}

std::optional<std::size_t> RabbitServer::ready(const std::string& name) const {
    return Client(port_).declare(name, true);
}

std::size_t RabbitServer::unacknowledged(const std::string& name) const {
    std::istringstream lines(
        control({"--silent", "list_queues", "name", "messages_unacknowledged"}));
    std::string queue;
    for (std::size_t count = 0; lines >> queue >> count;) {
        if (queue == name) return count;
    }
    fail("no queue " + name);
}

void RabbitServer::close_connections() const {
    control({"close_all_connections", "closed by the test"});
}
void RabbitServer::block_publishers() const { control({"set_vm_memory_high_watermark", "0"}); }
void RabbitServer::unblock_publishers() const {
    control({"set_vm_memory_high_watermark", "absolute", "1GiB"});
}

}  // namespace semel::support
