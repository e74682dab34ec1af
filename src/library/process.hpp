// Process: the consumers of a configuration inside somebody else's program, with what they need
// beside them: the store, its clean-up, the admin address. `serve` without the gateway, and it can
// be ended.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "cli/admin_address.hpp"
#include "cli/cli.hpp"
#include "cli/consumers.hpp"
#include "config/config.hpp"
#include "engine/engine.hpp"
#include "http/server.hpp"
#include "telemetry/metrics.hpp"

namespace semel::library {

/// What cannot be in a program without a gateway, and which callbacks are missing or too many.
/// Error invalid_argument: a sentence.
base::Result<void> check(const config::Config& config, const std::string& file,
                         const cli::Leaves& leaves, const cli::Callbacks& callbacks);

/// For one thread. open, start, stop, once each; stop also after an open that failed.
class Process {
  public:
    /// `config` and `leaves` must outlive it; `config` was checked.
    Process(const config::Config& config, std::string config_file, const cli::Leaves& leaves);
    Process(const Process&) = delete;
    Process& operator=(const Process&) = delete;
    /// Waits for callbacks that still run.
    ~Process() = default;

    /// Blocks until each consumer's broker and database was looked at once. Errors: the store or
    /// the admin address cannot be opened, or a consumer can never run as it is configured.
    base::Result<void> open(cli::Callbacks callbacks);
    void start();
    /// What runs ends (20 s), what is finished is settled, groups are left. Blocks.
    void stop();
    /// "admin http://127.0.0.1:9464, ./semel-data, 2 consumer(s)"
    [[nodiscard]] std::string describe() const;

  private:
    base::Result<void> open_store();
    base::Result<void> open_consumers(cli::Callbacks callbacks);
    base::Result<void> listen();
    admin::Probes probes();

    const config::Config& config_;
    const std::string config_file_;
    const cli::Leaves& leaves_;
    const std::string owner_ =
        base::hex(base::random_bytes(8));  ///< Of this process, in its leases.
    telemetry::Metrics metrics_;
    engine::EngineCounters engine_counters_;
    http::ServerCounters api_counters_;  ///< There is no API: they stay 0.
    http::ServerCounters admin_counters_;
    std::unique_ptr<core::Store> store_;
    std::unique_ptr<engine::HotRecords> hot_;
    std::unique_ptr<engine::Vault> vault_;
    std::unique_ptr<engine::Spool> spool_;
    std::string secret_;
    std::unique_ptr<base::Hmac> message_keys_;
    cli::AdminAddress admin_;
    std::unique_ptr<cli::Consumers> consumers_;
    bool started_ = false;
    std::atomic<bool> ready_{false};
};

}  // namespace semel::library
