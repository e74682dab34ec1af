// FakeUpstream: the paid API of a simulation: scripted answers in virtual time, paid calls counted
// per request body.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "http/client.hpp"
#include "runtime/loop.hpp"

namespace semel::sim {

using base::SteadyTime;
using std::chrono::milliseconds;

/// How one call goes.
struct UpstreamPlan {
    enum class Start {
        answered,         ///< A head comes after `head_after`.
        refused,          ///< No connection.
        connect_timeout,  ///< None within the time-out.
        reset,            ///< The connection breaks after `head_after`, before a head.
        silent,           ///< No head, ever.
    };
    enum class End {
        complete,  ///< The body ends as its framing says.
        cut,       ///< The connection closes before.
        reset,
        stall,  ///< Nothing more comes.
    };
    struct Piece {
        milliseconds after{0};  ///< After the one before it.
        std::string bytes;
    };
    Start start = Start::answered;
    bool paid =
        true;  ///< The upstream counts (and bills) it. Never true for refused and connect_timeout.
    milliseconds head_after{50};
    int status = 200;
    std::vector<std::pair<std::string, std::string>> headers{{"Content-Type", "application/json"}};
    bool with_length = true;  ///< Announces the body's length (of all pieces).
    std::vector<Piece> body;
    milliseconds end_after{0};
    End end = End::complete;
};

/// Shared by the clients of all processes; outlives them.
class FakeUpstream {
  public:
    struct Call {
        std::string target;
        std::string headers;
        std::string body;
        unsigned number = 0;  ///< Of the calls with this body, from 1.
    };
    /// Decides how a call goes. Asked when the request has arrived whole.
    std::function<UpstreamPlan(const Call&)> plan;
    /// Told of each paid call.
    std::function<void(const Call&)> on_paid;

    [[nodiscard]] unsigned paid(const std::string& body) const {
        const auto found = paid_.find(body);
        return found == paid_.end() ? 0 : found->second;
    }
    [[nodiscard]] unsigned paid_in_all() const {
        unsigned sum = 0;
        for (const auto& [body, n] : paid_) sum += n;
        return sum;
    }
    [[nodiscard]] unsigned calls(const std::string& body) const {
        const auto found = calls_.find(body);
        return found == calls_.end() ? 0 : found->second;
    }

    UpstreamPlan arrive(Call call) {
        call.number = ++calls_[call.body];
        UpstreamPlan chosen = plan ? plan(call) : UpstreamPlan{};
        const bool connected = chosen.start != UpstreamPlan::Start::refused &&
                               chosen.start != UpstreamPlan::Start::connect_timeout;
        if (chosen.paid && connected) {
            ++paid_[call.body];
            if (on_paid) on_paid(call);
        }
        return chosen;
    }

  private:
    std::map<std::string, unsigned> calls_;
    std::map<std::string, unsigned> paid_;
};

/// Of one process, on its loop.
std::unique_ptr<http::Client> make_fake_client(runtime::Loop& loop, FakeUpstream& upstream);

}  // namespace semel::sim
