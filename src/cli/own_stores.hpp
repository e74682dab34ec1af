// The stores that consumers have for themselves (`store:` of a consumer): each is opened once,
// however many consumers name it, and cleaned as the process's own is.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/hash.hpp"
#include "cli/cli.hpp"
#include "config/config.hpp"
#include "core/store.hpp"
#include "engine/vault.hpp"
#include "telemetry/metrics.hpp"

namespace semel::cli {

/// A store that keeps records of messages, with what goes with it.
struct RecordStore {
    core::Store* store = nullptr;
    const base::Hmac* secret = nullptr;  ///< Of its keys.
    engine::Vault* vault = nullptr;      ///< Of what is sealed in it.
    std::string id;                      ///< Of one that is not shared; else empty.
};

/// `config` as it is for each store that some consumer has for itself and uses (who observes uses
/// none) and that is not the process's: that store stands in the place of the process's own.
std::vector<config::Config> configs_of_own_stores(const config::Config& config);

/// For one thread, but for not_ready().
class OwnStores {
  public:
    /// All of it outlives them. `owner`: id of this process.
    OwnStores(const config::Config& config, const Leaves& leaves, std::string owner,
              telemetry::Metrics& metrics);
    /// As stop().
    ~OwnStores();
    OwnStores(const OwnStores&) = delete;
    OwnStores& operator=(const OwnStores&) = delete;

    /// Opens them and begins to clean them. Blocks. Once. An Error names the store.
    base::Result<void> open(bool accept_clock);
    /// That of this consumer; null: it uses the process's. After open().
    [[nodiscard]] const RecordStore* of(const config::ConsumerConfig& consumer) const;
    /// Which of them do not answer, in sentences.
    [[nodiscard]] std::vector<std::string> not_ready() const;
    /// Nothing uses them any more. Blocks. Idempotent.
    void stop();

  private:
    class One;
    const config::Config& config_;
    const Leaves& leaves_;
    const std::string owner_;
    telemetry::Metrics& metrics_;
    std::vector<std::unique_ptr<One>> all_;
};

}  // namespace semel::cli
