// What is done for the store beside the calls, as the configuration says it.
#pragma once

#include "config/config.hpp"
#include "engine/sweeper.hpp"
#include "telemetry/metrics.hpp"

namespace semel::cli {

/// `metrics` must outlive the sweeper.
inline engine::SweeperOptions sweeping(const config::EngineConfig& engine,
                                       telemetry::Metrics& metrics) {
    const auto third = engine.lease / 3;
    engine::SweeperOptions options{.every = third, .takeover_grace = third};
    options.purge_every = engine.cleanup.every.value_or(third);
    options.purge_step = engine.cleanup.step;
    options.purge_at = engine.cleanup.at;
    options.purge_window = engine.cleanup.window;
    options.on_purge_step = [&metrics](auto took) { metrics.purge_seconds.observe(took); };
    return options;
}

}  // namespace semel::cli
