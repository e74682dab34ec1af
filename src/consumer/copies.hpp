// Copies: a failed message that waits for one of retry.delays at the broker, not in this process:
// what its copy looks like and where it goes. The original is settled once the copy is confirmed.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "brokers/delivery.hpp"
#include "brokers/publisher.hpp"
#include "consumer/verdict.hpp"

namespace semel::consumer {

struct CopyRules {
    bool kafka = true;                 ///< Else RabbitMQ.
    std::vector<milliseconds> delays;  ///< As in retry.delays; at least one.
    /// Where copies go, by the topic or queue that a message was delivered from (also by that of a
    /// copy): one topic or queue for each of `delays`.
    std::map<std::string, std::vector<std::string>> targets;
    /// What is left of an earlier wait is waited for in hand up to so long.
    milliseconds in_hand_max{60'000};
};

/// Which of `delays` a message waits at the broker for; nullopt: it waits in hand. What is left of
/// an earlier wait (Retry without a step) waits at the broker where it is longer than in_hand_max:
/// in the shortest delay that is not shorter, or else in the longest.
std::optional<std::size_t> waits_at_broker(const CopyRules& rules, const Retry& retry);

/// The copy: key, value and headers as they are, in their order, with where the message lay first
/// and when it is due behind them. `delay`: index into rules.delays. `due_ms`: Unix time. On
/// RabbitMQ headers are text, as they were delivered; those of the broker's own bookkeeping are
/// renamed (semel-original-...), or left out where a copy brings them back.
brokers::Outgoing make_copy(const brokers::Delivery& delivery, const CopyRules& rules,
                            std::size_t delay, std::int64_t due_ms);

/// Publishes copies. Thread-safe.
class CopyOutlet {
  public:
    /// `publisher` is shared with others and outlives the outlet.
    CopyOutlet(brokers::Publisher& publisher, CopyRules rules);

    [[nodiscard]] const CopyRules& rules() const { return rules_; }
    /// Where a copy of this message would go.
    [[nodiscard]] const std::string& target(const brokers::Delivery& delivery,
                                            std::size_t delay) const;
    /// `done` on any thread, once. Error: it may be there or not (Error::applied).
    void publish(const brokers::Delivery& delivery, std::size_t delay, std::int64_t due_ms,
                 std::function<void(base::Result<void>)> done);

  private:
    brokers::Publisher& publisher_;
    const CopyRules rules_;
};

}  // namespace semel::consumer
