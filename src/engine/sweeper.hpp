// Sweeper: settles the leases of owners that died and removes expired records, in bounded steps.
// The two do not wait for each other: when and how slowly the store is cleaned delays no takeover.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include "engine/engine.hpp"

namespace semel::engine {

struct SweeperOptions {
    milliseconds every{3300};  ///< Between two looks for dead leases: a third of the lease.
    milliseconds takeover_grace{3300};  ///< After a store outage, before anything is settled: time
                                        ///< for the owners' renewals.
    std::size_t scan_page = 256;        ///< Records of one scan, and settles of one step.

    milliseconds purge_every{0};       ///< Between two passes of clean-up; 0: `every`.
    std::size_t purge_step = 512;      ///< Records that one purge may remove.
    std::size_t purge_steps_max = 64;  ///< Of one pass; the rest waits for the next.
    /// Clean-up only from this time of day (UTC, by the wall clock) on, and so long. Empty: always.
    std::optional<std::chrono::minutes> purge_at;
    milliseconds purge_window{std::chrono::hours{2}};
    /// Told how long each step took. On the loop. May be empty.
    std::function<void(std::chrono::nanoseconds)> on_purge_step;
};

/// Runs blocking work elsewhere; may also run it at once (simulation).
using BlockingRunner = std::function<void(std::function<void()> work)>;

/// One per process, on one engine's loop. The store sees one scan or purge of it at a time. It only
/// settles: it has no request to run anything with. Leases of messages are left to their next
/// delivery, which charges the crash.
class Sweeper {
  public:
    /// Without a `runner` the store's scans and purges run on a thread of the sweeper's own.
    Sweeper(Engine& engine, SweeperOptions options, BlockingRunner runner = {});
    /// Waits for a running scan or purge. The loop must still exist; it need not run.
    ~Sweeper();
    Sweeper(const Sweeper&) = delete;
    Sweeper& operator=(const Sweeper&) = delete;

    /// Starts both. Once, on the loop.
    void start();
    /// Ends after the running step; the sweeper may be destroyed then.
    Task<> stop();

  private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace semel::engine
