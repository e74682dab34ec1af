// The gateway's workload: clients of all kinds ask several gateway processes on one store, which
// crash, stall and lose their store; the upstream breaks in every way; and the checks of what no
// client may ever see.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "sim/world.hpp"

namespace semel::sim {

struct GatewayRunOptions {
    std::uint64_t seed = 0;
    bool trace = false;
    /// A planted defect of the store.
    std::function<std::unique_ptr<core::Store>(core::Store&)> wrap_store;
};

struct GatewayRunReport {
    std::string violation;  ///< Empty: everything held.
    // What happened, so that a test can see that nothing was vacuous.
    unsigned answers = 0, joined = 0, replayed = 0, taken_over = 0, cut = 0, mismatches = 0,
             held = 0, decisions = 0;
    unsigned crashes = 0, pauses = 0, vanished = 0, paid = 0, turns = 0, pending = 0, peer_connections = 0;
};

GatewayRunReport run_gateway_workload(const GatewayRunOptions& options);

}  // namespace semel::sim
