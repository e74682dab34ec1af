// Owner: runs one intent to its end for everyone who follows its flight: admission, the paid call,
// the record.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "engine/engine.hpp"
#include "gateway/flight.hpp"
#include "gateway/peer_follower.hpp"
#include "gateway/shape.hpp"
#include "gateway/state.hpp"
#include "http/client.hpp"

namespace semel::gateway {

using runtime::Loop;
using runtime::Task;

/// What the owner needs of the request. Self-contained: the client that brought it may be gone.
struct Call {
    core::StoredKey key;
    core::Fingerprint fingerprint;
    const config::RouteConfig* route = nullptr;
    const Upstream* upstream = nullptr;
    std::string method = "POST";
    std::string target;
    std::string headers;   ///< Ready lines for the upstream.
    BodyPtr body;          ///< As the client sent it; null where `own_body` is sent instead.
    std::string own_body;  ///< Spliced or made by us.
    bool has_own_body = false;
    std::unique_ptr<AnswerShape> shape;
    /// Set: no call can be made for this request. What is recorded or running is still answered; a
    /// grant is given back.
    std::optional<Problem> refused;
    /// What is decided is wanted and nothing else: a grant is given back and the follower looks
    /// again.
    bool look_only = false;
    /// The record said that another process runs it: it is followed there, and no grant is asked
    /// for. Once it no longer runs, the followers look again.
    bool runs_elsewhere = false;
    std::string label;                         ///< The operation, readable.
    std::shared_ptr<const core::Append> turn;  ///< Of a conversation, its answer not yet known.
    core::TenantTag tenant;                    ///< Whose data key it is kept under.

    [[nodiscard]] std::string_view sent_body() const {
        return has_own_body ? std::string_view(own_body) : std::string_view(body->text);
    }
};

core::Policy policy_of(const config::RouteConfig& route, const config::EngineConfig& engine);

/// The problem that says why the store was not asked, or what an operating failure means for the
/// client.
Problem store_problem(const base::Error& error);

class Owner {
  public:
    Owner(Process::State& state, engine::Engine& engine, http::Client& client)
        : state_(state), engine_(engine), client_(client), peers_(state, engine, client) {}

    /// From the admission to the end of the journal; leaves the flight table itself. `flight` was
    /// entered by the caller.
    Task<> run(FlightPtr flight, Call& call);

    [[nodiscard]] engine::Engine& engine() { return engine_; }

  private:
    struct Attempt;
    /// Null: the flight has ended otherwise and left the table.
    Task<std::unique_ptr<engine::LeaseGuard>> admit(FlightPtr flight, Call& call);
    Task<> follow_elsewhere(FlightPtr flight, Call& call);
    struct Elsewhere;
    Task<bool> wait_elsewhere(FlightPtr flight, const Call& call, core::InFlight in_flight,
                              Elsewhere& known);
    Task<> call_upstream(Attempt& attempt);
    Task<> pump_stream(Attempt& attempt, http::Response& response, AnswerHead head);
    Task<> pump_plain(Attempt& attempt, http::Response& response, AnswerHead head);
    Task<> take_failure(Attempt& attempt, http::Response& response, AnswerHead head);
    Task<> call_failed(Attempt& attempt, const http::CallError& error);
    Task<> not_complete(Attempt& attempt, core::Fail failure, AnswerShape::Rendered rendered,
                        const Problem& problem);
    Task<> record(Attempt& attempt, std::string last);
    static bool read_answer(Attempt& attempt, std::string_view last, std::uint64_t offset,
                            std::size_t size, std::string& out);
    Task<bool> write_chunks(Attempt& attempt, std::string_view last,
                            std::optional<SteadyTime> until);
    static std::vector<std::string> unwritten_chunks(Attempt& attempt, std::string_view last,
                                                     std::uint64_t total, base::Digest& digest);

    Process::State& state_;
    engine::Engine& engine_;
    http::Client& client_;
    PeerFollower peers_;
};

}  // namespace semel::gateway
