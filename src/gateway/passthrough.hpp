// Passthrough: everything that is not protected goes to the upstream and back as it is, streamed
// both ways.
#pragma once

#include "gateway/state.hpp"
#include "http/client.hpp"
#include "http/exchange.hpp"
#include "runtime/loop.hpp"

namespace semel::gateway {

class Passthrough {
  public:
    Passthrough(Process::State& state, runtime::Loop& loop, http::Client& client)
        : state_(state), loop_(loop), client_(client) {}
    /// The caller was identified. Counting is the caller's.
    Task<> handle(http::Exchange& exchange);

  private:
    Process::State& state_;
    runtime::Loop& loop_;
    http::Client& client_;
};

}  // namespace semel::gateway
