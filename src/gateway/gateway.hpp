// Gateway: the HTTP API. One user operation, named by its client's id, is paid for once; everything
// else passes through.
#pragma once

#include <memory>
#include <string>

#include "config/config.hpp"
#include "engine/engine.hpp"
#include "http/client.hpp"
#include "http/exchange.hpp"
#include "telemetry/metrics.hpp"

namespace semel::gateway {

using runtime::Loop;
using runtime::Task;

/// What the gateways of all loops of one process share: the configuration, who may call, which
/// intents run. Thread-safe.
class Process {
  public:
    /// `secret` keys every hash that is stored or shown (config's, else the one kept in the store).
    /// `config`, `hot` and `metrics` must outlive it. `spill_path`: folder for the files of
    /// journals that outgrow memory (unlinked at once). `peer_secret`: of all gateways of one shared
    /// store, by which they prove themselves when they follow each other's calls; empty: they do
    /// not.
    Process(const config::Config& config, const std::string& secret, engine::HotRecords& hot,
            telemetry::Metrics& metrics, std::string spill_path,
            const std::string& peer_secret = {});
    ~Process();
    Process(const Process&) = delete;
    Process& operator=(const Process&) = delete;

    /// From now on nothing new is claimed (503 with Retry-After); what runs goes on to its end.
    void drain();
    /// Intents whose call runs in this process now, on all loops.
    [[nodiscard]] std::size_t running() const;

    class State;
    [[nodiscard]] State& state() { return *state_; }

  private:
    std::unique_ptr<State> state_;
};

/// One per loop. `process`, `engine` and `client` must outlive it, and every coroutine of its loop.
class Gateway final : public http::Handler {
  public:
    Gateway(Process& process, engine::Engine& engine, http::Client& client);
    ~Gateway() override;

    Task<> handle(http::Exchange& exchange) override;

    class Impl;

  private:
    std::unique_ptr<Impl> impl_;
};

}  // namespace semel::gateway
