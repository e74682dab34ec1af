// A real Kafka broker for tests (one node, KRaft), from the jars that scripts/fetch-kafka brings.
// In its own process and temporary folder, on free ports of 127.0.0.1, gone with the object (also
// when the test program dies). What fails throws.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/server_process.hpp"

namespace semel::support {

struct KafkaServerOptions {
    /// Lines of server.properties; they come after the fixture's own (small, one replica, groups
    /// begin without delay, sessions from 1 s).
    std::vector<std::string> settings;
    /// A second listener with TLS and SASL/PLAIN for these users (name, password).
    std::vector<std::pair<std::string, std::string>> users;
};

/// One message of a transactional producer.
struct KafkaRecord {
    std::string topic;
    std::int32_t partition = 0;
    std::optional<std::string> key;
    std::optional<std::string> value;
};

class KafkaServer {
  public:
    explicit KafkaServer(KafkaServerOptions options = {});

    [[nodiscard]] std::string address() const;         ///< 127.0.0.1:port
    [[nodiscard]] std::string secure_address() const;  ///< Of the listener for users.
    [[nodiscard]] std::string ca_file() const;
    [[nodiscard]] std::string log() const { return process_.log(); }

    void kill() { process_.kill(); }
    void freeze() { process_.freeze(); }
    void thaw() { process_.thaw(); }
    void terminate() { process_.terminate(); }
    /// Starts it again (kills it first if it runs) on the same ports and folder.
    void restart();

    /// A new topic that nobody else uses; its name. `settings`: "cleanup.policy" -> "compact".
    std::string new_topic(std::int32_t partitions = 1,
                          const std::map<std::string, std::string>& settings = {}) const;
    void create_topic(const std::string& name, std::int32_t partitions,
                      const std::map<std::string, std::string>& settings = {}) const;
    void delete_topic(const std::string& name) const;
    /// Removes what lies before `offset`, as retention does.
    void delete_records(const std::string& topic, std::int32_t partition,
                        std::int64_t offset) const;
    /// One transaction of a producer of its own.
    void transaction(const std::vector<KafkaRecord>& records, bool commit) const;
    /// What `group` has committed; -1 if nothing.
    [[nodiscard]] std::int64_t committed(const std::string& group, const std::string& topic,
                                         std::int32_t partition = 0) const;
    /// Sets it, as another tool does. The group must be empty.
    void set_committed(const std::string& group, const std::string& topic, std::int32_t partition,
                       std::int64_t offset) const;

  private:
    bool launch();

    KafkaServerOptions options_;
    std::uint16_t port_ = 0, controller_port_ = 0, secure_port_ = 0;
    ServerProcess process_{"kafka"};
    std::filesystem::path jars_;
    std::unique_ptr<ServerCertificate> certificate_;
};

}  // namespace semel::support
