// Publisher: messages to a broker, each confirmed or said to be in doubt.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/result.hpp"
#include "brokers/delivery.hpp"

namespace semel::brokers {

struct Problem;

struct OutgoingHeader {
    std::string name;
    std::optional<std::string> value;  ///< nullopt: null.
};

struct Outgoing {
    /// Kafka: the topic. RabbitMQ: the routing key; with `properties.exchange` empty (the default
    /// exchange) this is the queue's name.
    std::string topic;
    std::optional<std::int32_t>
        partition;  ///< Kafka only; nullopt: by the key (murmur2), as Java's clients do.
    std::optional<std::string> key;    ///< Kafka only.
    std::optional<std::string> value;  ///< nullopt: a tombstone; on RabbitMQ an empty body.
    std::vector<OutgoingHeader> headers;
    std::optional<std::int64_t> timestamp_ms;  ///< nullopt: now.
    AmqpProperties properties;                 ///< RabbitMQ only; `routing_key` is ignored.
};

/// Where a confirmed message lies. RabbitMQ: partition 0, position -1.
struct PublishedAt {
    std::int32_t partition = 0;
    std::int64_t position = -1;
};

/// Exactly one per message. Confirmed: it is in all replicas that the broker waits for (Kafka:
/// acks=all; RabbitMQ: it was routed to at least one queue and written). Otherwise `applied` is
/// `no` if it was provably not taken (unroutable, too large, never sent) and `unknown` if it may be
/// there.
using PublishDone = std::function<void(base::Result<PublishedAt>)>;

class Publisher {
  public:
    Publisher() = default;
    Publisher(const Publisher&) = delete;
    Publisher& operator=(const Publisher&) = delete;
    /// As stop(0).
    virtual ~Publisher() = default;

    /// Queues the message; `done` is called once, on the publisher's own thread or, when the
    /// message is refused at once (queue full, stopped), before publish returns. It must not block
    /// or throw. Messages of one thread to one partition or queue are written in order while none
    /// fails. Thread-safe.
    virtual void publish(Outgoing message, PublishDone done) = 0;
    /// Waits until everything that was queued before is decided, or for `within`; false then.
    /// Blocks.
    virtual bool flush(std::chrono::milliseconds within) = 0;
    /// As flush(); what is then undecided ends with `stopping`. Blocks. Idempotent.
    virtual void stop(std::chrono::milliseconds within) = 0;
    /// Who is told what an operator should know, on the publisher's own thread; it must return at
    /// once, and outlive stop(). Kafka's tells nothing: what cannot be written ends in time.
    virtual void on_problem(std::function<void(const Problem&)>) {}
};

}  // namespace semel::brokers
