// The protected route POST /v1/chat/completions: from the head of a request to the follower of its
// intent.
#pragma once

#include "gateway/follower.hpp"
#include "gateway/owner.hpp"
#include "gateway/passthrough.hpp"

namespace semel::gateway {

class ProtectedRoute {
  public:
    ProtectedRoute(Process::State& state, engine::Engine& engine, http::Client& client)
        : state_(state),
          owner_(state, engine, client),
          follower_(state, engine),
          passthrough_(state, engine.loop(), client) {}

    /// `caller` was identified.
    Task<> handle(http::Exchange& exchange, const Caller& caller);

  private:
    Task<> unprotected(http::Exchange& exchange, telemetry::Unprotected why);
    /// Reads the body under the limits. Null: answered already.
    Task<std::shared_ptr<Body>> read(http::Exchange& exchange);

    Process::State& state_;
    Owner owner_;
    Follower follower_;
    Passthrough passthrough_;
};

/// Reads a body of at most `limit` under the process's budget; answers 413 or 503 in `shape`
/// itself. Null: answered, or the client is gone.
Task<std::shared_ptr<Body>> read_budgeted_body(Process::State& state, http::Exchange& exchange,
                                               std::uint64_t limit, telemetry::Route route);

/// By when a joiner must have its answer or be told to come again: shortly before its own read
/// time-out, which the SDKs announce.
SteadyTime join_deadline(const http::RequestHead& head, const config::RouteConfig& route,
                         SteadyTime now);

/// An answer of ours outside any intent.
Task<> respond_problem(http::Exchange& exchange, const Problem& problem, Shape shape);

}  // namespace semel::gateway
