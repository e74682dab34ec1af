// Consumers: what an operator asks of the consumers of a process and tells them, from a request to
// a reply.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "admin/records.hpp"
#include "base/result.hpp"

namespace semel::admin {

/// A partition of a consumer, or its queue.
struct ConsumerPartition {
    std::string topic;
    std::int32_t number = 0;
    std::int64_t position = 0;     ///< The next offset to be delivered.
    std::int64_t committable = 0;  ///< The lowest unfinished one.
    std::int64_t committed = -1;   ///< -1: nothing yet.
    std::size_t in_flight = 0;
    bool paused = false;
    bool held = false;
};

/// A consumer as it stands.
struct ConsumerView {
    std::string name, group, source, strategy, promise;
    std::string condition;  ///< "starting", "waiting", or one of the consumer's own.
    std::string reason;     ///< Of a condition that is not "running".
    std::size_t in_hand = 0, running = 0, waiting = 0, parked = 0;
    std::vector<ConsumerPartition> partitions;
    std::vector<std::string> alarms;
    std::vector<std::pair<std::string, std::uint64_t>> counts;
};

struct ConsumerLag {
    std::string topic;
    std::int32_t number = 0;
    std::int64_t begin = 0, end = 0;
    std::int64_t committed = -1;
    std::int64_t lag = 0;
};
struct ConsumerLags {
    std::vector<ConsumerLag> partitions;  ///< Of this process.
    std::int64_t behind_ms =
        0;  ///< Since the oldest unfinished message in hand was written; 0: none.
};

enum class ConsumerCommand : std::uint8_t { pause, resume, drain };

/// How the admin API reaches them; all are called on the admin loop. May be empty: there are none.
struct ConsumerControls {
    std::function<std::vector<ConsumerView>()> list;
    /// Asks the broker; may block some seconds. Nullopt: there is no such consumer.
    std::function<std::optional<base::Result<ConsumerLags>>(const std::string& name)> lag;
    /// Error: it cannot be told (any more), with the reason. Nullopt: there is no such consumer.
    std::function<std::optional<base::Result<void>>(
        const std::string& name, ConsumerCommand command, const std::string& reason)>
        tell;
};

/// `path` is one of
///   GET  /admin/consumers
///   GET  /admin/consumers/{name}
///   GET  /admin/consumers/{name}/lag
///   POST /admin/consumers/{name}/{pause|resume|drain}    body: {"reason": "..."}, or none
/// with the members of docs/reference/admin-api.md. Everything else is 404, another method 405.
Reply answer_about_consumers(const ConsumerControls& controls, std::string_view method,
                             std::string_view path, std::string_view body);

}  // namespace semel::admin
