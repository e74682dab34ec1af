// What others count, told to the metrics; every name is in docs/reference/metrics.md.
#pragma once

#include "engine/engine.hpp"
#include "http/server.hpp"
#include "telemetry/metrics.hpp"

namespace semel::cli {

/// All must outlive the metrics' use.
struct Readable {
    const engine::EngineCounters& engine;
    const http::ServerCounters& api;
    const http::ServerCounters& admin;
    const engine::HotRecords& hot;
    const engine::Spool& spool;
};
void add_readers(telemetry::Metrics& metrics, const Readable& readable);

}  // namespace semel::cli
