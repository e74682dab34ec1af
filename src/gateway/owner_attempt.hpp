// One grant while it is worked on: the inside of an Owner, in three files: admission.cpp (how it
// comes to a grant), owner.cpp (the call and what comes back), outcome.cpp (what becomes of it).
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "gateway/owner.hpp"

namespace semel::gateway {

/// How often an owner looks whether anybody still follows.
inline constexpr std::chrono::milliseconds followers_look{250};

/// What clients are told of a call that failed, and the code under which the failure is recorded.
Problem call_problem(const http::CallError& error);
std::string_view failure_code(http::CallError::Kind kind);

/// One grant while it is worked on. Lives in run()'s frame; timers and callbacks that point to it
/// end before it does.
struct Owner::Attempt {
    Attempt(Owner& owner_, FlightPtr flight_, Call& call_,
            std::unique_ptr<engine::LeaseGuard> lease_)
        : owner(owner_),
          loop(owner_.engine_.loop()),
          flight(std::move(flight_)),
          call(call_),
          lease(std::move(lease_)) {
        lease->on_overtaken = [this] { stop("overtaken"); };
        look();
    }
    ~Attempt() {
        lease->on_overtaken = nullptr;
        loop.cancel(timer);
    }
    Attempt(const Attempt&) = delete;
    Attempt& operator=(const Attempt&) = delete;

    void stop(std::string why) {
        if (!stopped.empty() || answered_upstream) return;
        stopped = std::move(why);
        if (!lease->overtaken()) owner.state_.metrics.abandoned_calls.add();
        cancel.cancel();
        if (response != nullptr) response->cancel();
    }

    void look() {
        timer = loop.at(loop.now() + followers_look, [this] {
            if (flight->followers() == 0) {
                if (call.route->on_disconnect == config::OnDisconnect::cancel) {
                    stop("client-disconnected");
                } else if (loop.now() - flight->left_at() >= call.route->finish_limit) {
                    stop("finish-limit");
                }
            }
            look();
        });
    }

    Owner& owner;
    Loop& loop;  // by itself: a destroyed loop's coroutines may outlive the engine
    FlightPtr flight;
    Call& call;
    std::unique_ptr<engine::LeaseGuard> lease;
    http::Client::CancelToken cancel;
    http::Response* response = nullptr;
    std::string
        held_back;  ///< Of a stream that failed: leaves after the record, as a terminal event does.
    std::string stopped;             ///< Why the call was given up by us.
    bool answered_upstream = false;  ///< All of the answer is here.
    runtime::TimerId timer = 0;

    std::vector<std::pair<std::string, std::string>> kept;
    std::vector<std::string> upstream_ids;
    int status = 200;
    bool stream = false;
    bool not_kept = false;
    std::uint32_t chunks_written = 0;
    bool chunks_waiting = false;  ///< A chunk could not be written; tried again at the end.
    base::Sha256 chunk_digest;
    bool told = false;  ///< The followers know how it ended.

    void tell(Journal::End end, std::string_view last, bool pending = false,
              core::StoreTime expires = {}) {
        if (told) return;
        told = true;
        owner.state_.flights.leave(call.key, flight);
        flight->journal().finish(end, last, pending, expires);
        flight->done();
    }
    void tell_moved_on() {
        if (told) return;
        told = true;
        owner.state_.flights.leave(call.key, flight);
        flight->journal().finish(Journal::End::cut, {});
        flight->move_on();
    }
    [[nodiscard]] core::Usage usage() const {
        core::Usage usage = call.shape->usage();
        usage.upstream_ids = upstream_ids;
        return usage;
    }
};

}  // namespace semel::gateway
