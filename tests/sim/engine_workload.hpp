// The engine's own workload: clients submit intents, owners make paid calls, an operator decides
// what is held; and the checks of what must hold after every run, whatever went wrong on the way.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "sim/fake_upstream.hpp"
#include "sim/world.hpp"

namespace semel::sim {

/// What a run is made of. Drawn from the seed by `draw`, or set by a test.
struct Scenario {
    int processes = 2;
    int intents = 5;
    int clients_per_intent = 3;
    StoreFaults store_faults;
    unsigned crashes = 0;
    unsigned pauses = 0;
    unsigned outages = 0;
    unsigned upstream_trouble =
        0;              ///< Per cent of the calls whose outcome is unknown, or that are refused.
    unsigned hold = 0;  ///< Per cent of the intents under on_unknown: hold.
    milliseconds call_max{20000};    ///< Longest upstream call; above the lease on purpose.
    milliseconds faults_for{60000};  ///< Then everything heals and must come to an end.

    static Scenario draw(Rng& rng);
};

/// Defects of the workload's own, planted to see that the checks notice them.
struct OwnerDefects {
    bool fenced_answer_is_final = false;
    bool pending_answer_is_final = false;
};

struct RunOptions {
    std::uint64_t seed = 0;
    bool trace = false;
    OwnerDefects defects;
    std::function<std::unique_ptr<core::Store>(core::Store&)> wrap_store;
    std::function<std::unique_ptr<engine::Spool>()> make_spool;
    /// Changes the drawn scenario.
    std::function<void(Scenario&)> adjust;
};

struct RunReport {
    std::string violation;  ///< Empty: everything held.
    // What happened, so that a test can see that the faults it asks for are met.
    unsigned paid = 0, grants = 0, takeovers = 0, pending = 0, ghosts = 0, ghosts_settled = 0,
             crashes = 0, pauses = 0;
    unsigned decisions = 0, spool_delivered = 0, spool_overtaken = 0, leases_lost = 0,
             second_payments_counted = 0;
};

RunReport run_engine_workload(const RunOptions& options);

}  // namespace semel::sim
