// A real RabbitMQ node for tests. In its own processes and temporary folder, on free ports of
// 127.0.0.1, gone with the object (also when the test program dies). As root it runs as the user
// rabbitmq. What fails throws.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "support/server_process.hpp"

namespace semel::support {

struct RabbitServerOptions {
    std::vector<std::string> settings;  ///< Lines of rabbitmq.conf, after the fixture's own.
    bool tls = false;                   ///< A second listener, amqps.
};

class RabbitServer {
  public:
    explicit RabbitServer(RabbitServerOptions options = {});
    ~RabbitServer();

    [[nodiscard]] std::uint16_t port() const { return port_; }
    [[nodiscard]] std::string url() const;      ///< amqp://guest:guest@127.0.0.1:port/
    [[nodiscard]] std::string tls_url() const;  ///< amqps://, with TLS.
    [[nodiscard]] std::string ca_file() const;
    [[nodiscard]] std::string log() const { return process_->log(); }

    void kill();     ///< SIGKILL to the node.
    void restart();  ///< kill(), and again on the same ports and folder.
    void freeze() { process_->freeze(); }
    void thaw() { process_->thaw(); }
    /// A new durable classic queue that nobody else uses; its name.
    std::string new_queue() const;
    void create_queue(const std::string& name) const;
    void delete_queue(const std::string& name) const;
    /// Queues declared so far survive kill(). The node's database (Mnesia) logs that a declaration
    /// is decided only after its client has the answer, and may hold that back for two seconds: a
    /// node killed by then forgets a durable queue with all messages that it confirmed in it.
    /// Takes rabbitmqctl.
    void sync_queues() const;
    /// Messages ready in it, and those out to consumers; nullopt if there is no such queue. The
    /// second takes rabbitmqctl.
    [[nodiscard]] std::optional<std::size_t> ready(const std::string& name) const;
    [[nodiscard]] std::size_t unacknowledged(const std::string& name) const;
    /// rabbitmqctl with these words; what it printed. Throws if it fails. Takes a second or two.
    std::string control(const std::vector<std::string>& words) const;
    void close_connections() const;  ///< All of them, as an operator does.
    /// The memory alarm: publishers' connections are blocked.
    void block_publishers() const;
    void unblock_publishers() const;

  private:
    bool launch();
    [[nodiscard]] ServerProcess::Words environment() const;

    RabbitServerOptions options_;
    std::uint16_t port_ = 0, tls_port_ = 0, epmd_port_ = 0, distribution_port_ = 0;
    std::unique_ptr<ServerProcess> process_;
    std::unique_ptr<ServerProcess> epmd_;  ///< Of our own: the node's would outlive it.
    std::unique_ptr<ServerCertificate> certificate_;
    std::string programs_;
};

}  // namespace semel::support
