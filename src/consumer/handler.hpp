// Handler: the user's code behind the strategies `store` and `table`: a C++ callback, an HTTP
// service.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "consumer/message.hpp"
#include "core/record.hpp"

namespace semel::consumer {

using std::chrono::milliseconds;

/// What a handler answers to a message. It is published where the consumer's results go, once it is
/// recorded; without such a place it is dropped.
struct HandlerAnswer {
    std::string body;
    std::string content_type;  ///< Empty: application/octet-stream.
    /// Go along beside message-id and content-type, which are Semel's.
    std::vector<std::pair<std::string, std::string>> headers;
};
/// An answer lies in its message's record; of a larger body the message becomes a dead letter.
inline constexpr std::size_t answer_max_bytes = core::inline_body_max_bytes;
using HandlerAnswerPtr = std::shared_ptr<const HandlerAnswer>;

/// Its effect happened.
struct Handled {
    HandlerAnswerPtr answer{};  ///< Null: it has nothing to say.
};
/// What it needs is not there yet: again later, charged as a failure so that it ends some day.
/// `after` 0: the usual back-off.
struct HandledNotYet {
    std::string reason;
    milliseconds after{0};
};
/// It failed and may end otherwise next time. `after` 0: the usual back-off.
struct HandledFailed {
    std::string reason;
    milliseconds after{0};
};
/// Another try cannot end otherwise.
struct HandledFatal {
    std::string reason;
};
/// It was asked and did not say: the effect may have happened.
struct HandledUnknown {
    std::string reason;
};
/// The handler itself is ill (refused, 401, 404): nobody's fault, nothing is charged, nothing
/// happened.
struct HandlerIll {
    std::string reason;
};
using HandlerOutcome =
    std::variant<Handled, HandledNotYet, HandledFailed, HandledFatal, HandledUnknown, HandlerIll>;

/// What a handler is told beside the message.
struct Attempt {
    std::uint32_t number =
        1;  ///< Attempts of this message so far, this one included, by whichever process.
    core::FencingToken token;  ///< Grows with each attempt: for a service that fences by itself.
};

class Handler {
  public:
    using Done = std::function<void(HandlerOutcome)>;

    Handler() = default;
    Handler(const Handler&) = delete;
    Handler& operator=(const Handler&) = delete;
    virtual ~Handler() = default;

    /// Handles one message; `done` is called exactly once, on any thread, also before handle
    /// returns. On the consumer's loop: must not block. `message` stays as it is until then. As
    /// many run side by side as `concurrency` says.
    virtual void handle(const Message& message, const Attempt& attempt, Done done) = 0;
    /// Running calls may end as HandledUnknown. Idempotent. On the loop.
    virtual void cancel_all() = 0;
    /// For messages to people: "http://127.0.0.1:8080/orders", "the callback".
    [[nodiscard]] virtual std::string name() const = 0;
};

}  // namespace semel::consumer
