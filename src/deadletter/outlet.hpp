// Outlet: where a consumer's dead letters go.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/result.hpp"
#include "brokers/publisher.hpp"
#include "deadletter/letter.hpp"

namespace semel::deadletter {

struct Target {
    std::string topic;     ///< Kafka: the topic. RabbitMQ: the routing key (a queue's name where
                           ///< `exchange` is empty).
    std::string exchange;  ///< RabbitMQ.
    [[nodiscard]] std::string name() const {
        return exchange.empty() ? topic : exchange + "/" + topic;
    }
};

/// Publishes letters to one target and says when each is confirmed. Thread-safe.
class Outlet {
  public:
    /// `publisher` is shared with others and outlives the outlet.
    Outlet(brokers::Publisher& publisher, Target target, Form form, Redaction redaction = {});
    /// `done` on any thread, once. Error: it may be there or not (Error::applied); publish it
    /// again, it carries the same id.
    void publish(const brokers::Delivery& delivery, const Circumstances& about,
                 std::function<void(base::Result<void>)> done);
    [[nodiscard]] const Target& target() const { return target_; }

  private:
    brokers::Publisher& publisher_;
    Target target_;
    Form form_;
    Redaction redaction_;
};

}  // namespace semel::deadletter
