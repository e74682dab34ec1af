// Delivery: one arrival of a message from a broker, and the partition or queue it came from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace semel::brokers {

/// A partition of a topic (Kafka) or a queue (RabbitMQ: number 0).
struct Partition {
    std::string topic;
    std::int32_t number = 0;
    friend bool operator==(const Partition&, const Partition&) = default;
    friend auto operator<=>(const Partition&, const Partition&) = default;
};

/// A partition or queue held by this member, from its assign until it is released or lost. The same
/// partition assigned again, or a queue subscribed again after a lost connection, is another
/// assignment. Immutable to its user; the source that made it keeps its own state in a derived
/// class. May outlive the source. Thread-safe.
class Assignment {
  public:
    Assignment(Partition partition, std::uint64_t epoch)
        : partition_(std::move(partition)), epoch_(epoch) {}
    Assignment(const Assignment&) = delete;
    Assignment& operator=(const Assignment&) = delete;
    virtual ~Assignment() = default;

    [[nodiscard]] const Partition& partition() const { return partition_; }
    [[nodiscard]] const std::string& topic() const { return partition_.topic; }
    /// Counts the assignments of this source, from 1; also the generation of a queue's tags.
    [[nodiscard]] std::uint64_t epoch() const { return epoch_; }
    /// What the group had committed when it was assigned; nullopt if nothing, and on RabbitMQ.
    [[nodiscard]] std::optional<std::int64_t> committed() const { return committed_; }
    /// The text that was committed beside it.
    [[nodiscard]] const std::string& committed_metadata() const { return committed_metadata_; }

  protected:
    std::optional<std::int64_t> committed_;
    std::string committed_metadata_;

  private:
    Partition partition_;
    std::uint64_t epoch_;
};
using AssignmentPtr = std::shared_ptr<Assignment>;

/// What settles a delivery. Small, copyable, outlives the delivery's bytes.
struct Receipt {
    AssignmentPtr assignment;
    std::int64_t position = 0;  ///< Offset (Kafka) or delivery tag (RabbitMQ).
    std::size_t size = 0;       ///< Bytes that it counts against the window.
};

/// Names may repeat, in the order of the wire. A null value (Kafka) is not an empty one. Values are
/// bytes; what AMQP carries typed is given as text (numbers in decimal, true/false, tables and
/// arrays as JSON).
struct Header {
    std::string_view name;
    std::optional<std::string_view> value;
};

/// The properties of AMQP; empty where the publisher set none.
struct AmqpProperties {
    std::string message_id;
    std::string content_type;
    std::string content_encoding;
    std::string correlation_id;
    std::string reply_to;
    std::string type;
    std::string app_id;
    std::string user_id;
    std::string expiration;
    std::optional<std::uint8_t> priority;
    std::string exchange;     ///< Where it was published.
    std::string routing_key;  ///< How it was published.
};

/// One arrival. Owns its bytes; views stay valid while it (or what it was moved to) lives.
struct Delivery {
    Receipt receipt;
    std::optional<std::string_view> key;    ///< nullopt: none (always on RabbitMQ).
    std::optional<std::string_view> value;  ///< nullopt: a tombstone. Not the same as empty.
    std::vector<Header> headers;
    std::optional<std::int64_t> timestamp_ms;    ///< Unix time; the producer's or the log's.
    bool redelivered = false;                    ///< RabbitMQ: it was delivered to somebody before.
    std::unique_ptr<AmqpProperties> properties;  ///< RabbitMQ only.
    std::unique_ptr<char[]> bytes;               ///< What the views point into.

    [[nodiscard]] const Partition& partition() const { return receipt.assignment->partition(); }
    [[nodiscard]] std::int64_t position() const { return receipt.position; }
};

/// Copies everything into one block of a new delivery. `receipt.size` is set to the bytes held.
Delivery make_delivery(Receipt receipt, std::optional<std::string_view> key,
                       std::optional<std::string_view> value, std::span<const Header> headers);

}  // namespace semel::brokers
