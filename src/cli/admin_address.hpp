// AdminAddress: the admin address of a process, and beside it the sweeper: on a loop of their own,
// because they wait for the store, and a scan may wait for a disk.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "admin/admin.hpp"
#include "cli/loop_thread.hpp"
#include "config/config.hpp"
#include "engine/engine.hpp"
#include "engine/sweeper.hpp"
#include "engine/vault.hpp"
#include "http/server.hpp"
#include "telemetry/metrics.hpp"

namespace semel::cli {

/// What it shares with the rest of the process; all of it outlives the address.
struct AdminAround {
    const config::Config& config;
    const std::string& secret;
    core::Store& store;
    engine::HotRecords& hot;
    engine::Spool& spool;
    engine::Vault& vault;
    engine::EngineCounters& engine_counters;
    http::ServerCounters& server_counters;
    telemetry::Metrics& metrics;
};

/// When and how a store is swept, as `engine` says. The metrics outlive the sweeper.
engine::SweeperOptions sweeping(const config::EngineConfig& engine, telemetry::Metrics& metrics);

/// For one thread.
class AdminAddress {
  public:
    AdminAddress() = default;
    AdminAddress(const AdminAddress&) = delete;
    AdminAddress& operator=(const AdminAddress&) = delete;

    /// Listens; nothing runs before start(). Once.
    base::Result<void> open(const AdminAround& around, engine::EngineOptions options,
                            admin::Probes probes);
    void start();
    /// After start(): closes the address, ends sweeper and engine. Returns at once; `done` is
    /// called on the loop.
    void stop(std::function<void()> done);
    /// Ends the loop's thread. Blocks.
    void join() { thread_.stop(); }

    /// That it listens on. After open().
    [[nodiscard]] std::uint16_t port() const { return server_->port(); }

  private:
    LoopThread thread_;
    std::unique_ptr<engine::Engine> engine_;  ///< Of the sweeper.
    std::unique_ptr<engine::Sweeper> sweeper_;
    std::unique_ptr<admin::Admin> admin_;
    std::unique_ptr<http::Server> server_;
};

}  // namespace semel::cli
