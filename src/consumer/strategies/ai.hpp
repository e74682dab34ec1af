// The handler `ai` with its strategy `store`: a message is a turn of /api/chat, under the same key
// as over HTTP.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "config/consumers.hpp"
#include "consumer/consumer.hpp"
#include "consumer/results.hpp"
#include "consumer/retry.hpp"
#include "consumer/strategy.hpp"

namespace semel::consumer {

/// A turn as /api/chat takes it.
struct ChatTurn {
    std::string tenant, user, session, request_id, prompt, model;
    bool hold_unknown = false;  ///< The outcome of a call that may have been processed is held.
};
/// What became of it: the status and body that /api/chat would have answered.
struct ChatAnswer {
    int status = 0;  ///< 200: `body` is the answer's object, as recorded. 0: it could not be asked
                     ///< (the process stops).
    std::string body;
    std::string problem;  ///< Slug of an answer that is none, e.g. in-flight, key-reused,
                          ///< store-unavailable.
    milliseconds retry_after{0};
    bool replayed = false;  ///< This turn did not pay for it.
    int upstream_status =
        0;               ///< What the AI service answered to the call that failed; 0: not known.
    bool final = false;  ///< The failure is recorded for good.
};
/// Asks; `done` on any thread, once. Thread-safe.
using AskChat = std::function<void(ChatTurn turn, std::function<void(ChatAnswer)> done)>;
/// Of the messages that failed this many are remembered; of a forgotten one failed turns are
/// counted anew.
inline constexpr std::size_t ai_known_max = 16 * 1024;

struct AiOptions {
    config::AiHandlerConfig config;
    unsigned concurrency = 16;
    RetryRules retry;
    bool hold_unknown = false;
    bool mismatch_is_duplicate = false;
};

/// The request id is Message::id; without `session` in the configuration each message is a
/// conversation of its own, named by its id. `results` may be null: none are published. The records
/// are the gateway's own; failed turns are counted in this process, letters are at least once. All
/// arguments outlive every `done`.
std::unique_ptr<Strategy> make_ai(runtime::Loop& loop, AiOptions options, AskChat ask,
                                  Results* results, ConsumerCounters& counters);

}  // namespace semel::consumer
