// RabbitMQ, on librabbitmq: a subscriber of one queue, and a publisher with confirms. Each has its
// own connection and its own I/O thread; a publisher that the broker blocks never stops a consumer.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/result.hpp"
#include "brokers/publisher.hpp"
#include "brokers/source.hpp"

namespace semel::brokers::rabbitmq {

/// What the queue is. With it the source declares the queue, and the broker refuses another one of
/// that name: so its properties are known, which a client cannot ask for.
struct QueueDeclaration {
    bool quorum = true;  ///< Else a classic one. Both durable.
    bool single_active_consumer = false;
    std::string dead_letter_exchange;             ///< Empty: none.
    std::optional<std::uint32_t> delivery_limit;  ///< Quorum queues.
};

struct SourceConfig {
    std::string url;  ///< amqp[s]://user:password@host:port/vhost, percent-encoded
    std::string queue;
    std::uint16_t prefetch = 100;
    bool exclusive = false;  ///< Refused while anybody else subscribes, and refuses everybody else.
    std::optional<QueueDeclaration> declare;  ///< nullopt: it must exist.
    /// The broker's, after which it takes an unsettled message back and closes the channel; 0:
    /// never.
    std::chrono::milliseconds consumer_timeout{30 * 60 * 1000};
    std::string name = "semel";  ///< Of the connection, in the broker's lists.
    std::string ca_file;         ///< amqps; empty: the system's.
    std::chrono::seconds heartbeat{10};
};

struct PublisherConfig {
    std::string url;
    std::string name = "semel";
    std::string ca_file;
    std::chrono::seconds heartbeat{10};
    std::chrono::milliseconds timeout{30'000};  ///< Until an unconfirmed message is given up.
    std::size_t queued = 100'000;               ///< Messages not yet confirmed, at most.
    /// unreachable, reachable, blocked, unblocked. On the I/O thread; must return at once. May be
    /// empty.
    std::function<void(const Problem&)> problem;
};

/// Bytes of a published message's headers: a broker drops the connection over a frame that is
/// larger than its limit (128 KiB), and headers are never split.
inline constexpr std::size_t amqp_headers_max_bytes = 64 * 1024;
/// Published and not yet confirmed, at once.
inline constexpr std::size_t unconfirmed_max = 2000;

/// Checks the configuration. A broker that is away is no error.
base::Result<std::unique_ptr<Source>> make_source(SourceConfig config);
base::Result<std::unique_ptr<Publisher>> make_publisher(PublisherConfig config);

/// How a broker is reached for a question, without subscribing to anything.
struct Access {
    std::string url;
    std::string ca_file;
};
/// Whether there is such a queue or, where `exchange` is not empty, such an exchange. Blocks, some
/// seconds at most. An error: the broker cannot be asked.
base::Result<bool> target_exists(const Access& access, const std::string& queue,
                                 const std::string& exchange);
/// Makes the queue, durable and of type quorum, unless there is one of that name. Blocks.
base::Result<void> ensure_queue(const Access& access, const std::string& queue);

/// A queue in which messages wait, and from which they then go to another one: durable, quorum,
/// with a time to live, dead lettering at least once and no bound but to refuse. So a message stays
/// in it until the target has taken it.
struct DelayQueue {
    std::string name;
    std::string target;
    std::chrono::milliseconds delay{0};
};
/// Whether there is one. `make`: it is made if it is missing. Blocks. invalid_argument: there is a
/// queue of that name that is none such; else the broker cannot be asked.
base::Result<bool> delay_queue(const Access& access, const DelayQueue& queue, bool make);

struct Endpoint {
    bool tls = false;
    std::string host = "localhost";
    std::uint16_t port = 5672;
    std::string user = "guest";
    std::string password = "guest";
    std::string vhost = "/";
};
/// invalid_argument says what is wrong, without the password.
base::Result<Endpoint> parse_url(const std::string& url);

}  // namespace semel::brokers::rabbitmq
