// ChatDoor: a turn of /api/chat asked from within the process: the same key, limits, records and
// conversation as over HTTP, and no authentication, because the configuration names the tenant.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.hpp"
#include "gateway/gateway.hpp"
#include "http/client.hpp"

namespace semel::gateway {

struct InnerTurn {
    std::string
        tenant;        ///< Name of a client in `clients:`: its intents over HTTP are the same ones.
    std::string user;  ///< As X-User-Id; may be empty.
    std::string session;     ///< As `sessionId`.
    std::string request_id;  ///< As Idempotency-Key.
    std::string prompt;      ///< As `content`.
    std::string model;       ///< As `model`; empty: not given, the route's default is taken.
    /// The outcome of a call that may have been processed is held, also where the route says rerun.
    bool hold_unknown = false;
};

struct InnerAnswer {
    /// As over HTTP. 200: `body` is the answer's object as it is recorded, byte for byte the same
    /// each time (`fromCache` is false). 0: it was not asked, the door is closed.
    int status = 0;
    std::string body;
    std::string problem;  ///< Where status is no success: the end of the problem's `type`, e.g.
                          ///< "in-flight".
    std::chrono::milliseconds retry_after{0};
    bool replayed = false;    ///< Joined or replayed: another request caused the call.
    int upstream_status = 0;  ///< What the upstream answered to a call that failed, as it is
                              ///< recorded; 0: it is not known.
    bool final = false;  ///< The failure is recorded for good: the upstream is not called again
                         ///< under this id.
};

/// `process` and what a Place names outlive it; it outlives every coroutine of their loops.
class ChatDoor {
  public:
    /// An API loop: its engine and client, as its Gateway has them.
    struct Place {
        engine::Engine& engine;
        http::Client& client;
    };
    /// Waits of a turn for a running call of the same id, or for another turn of its session,
    /// before it is answered `in-flight`.
    static constexpr std::chrono::milliseconds patience_default{5000};

    /// Turns are spread over `places` (at least one).
    ChatDoor(Process& process, std::vector<Place> places,
             std::chrono::milliseconds patience = patience_default);
    ~ChatDoor();
    ChatDoor(const ChatDoor&) = delete;
    ChatDoor& operator=(const ChatDoor&) = delete;

    /// Asks. A call that runs already is joined (never 202). `done` is called once: on the thread
    /// of the loop that asked, or before ask returns where the door is closed. It must not block.
    /// The turn's own call is waited for as long as it takes. Thread-safe.
    void ask(InnerTurn turn, std::function<void(InnerAnswer)> done);
    /// From now on nothing is asked. What runs goes on to its end. Thread-safe.
    void close() { closed_ = true; }

  private:
    class Desk;
    std::vector<std::unique_ptr<Desk>> desks_;
    std::atomic<std::size_t> next_{0};
    std::atomic<bool> closed_{false};
};

}  // namespace semel::gateway
