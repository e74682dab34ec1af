// The consumers of a process: made from the configuration, each on a loop and a thread of its own.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "admin/consumers.hpp"
#include "cli/callbacks.hpp"
#include "cli/cli.hpp"
#include "cli/own_stores.hpp"
#include "consumer/strategies/ai.hpp"
#include "core/store.hpp"
#include "telemetry/metrics.hpp"

namespace semel::cli {

/// What they share with the rest of the process; all of it outlives them.
struct ConsumersAround {
    const config::Config& config;
    std::string config_file;  ///< For messages.
    const Leaves& leaves;
    core::Store& store;
    const base::Hmac& secret;
    engine::Vault& vault;  ///< Of `store`.
    std::string owner;     ///< Id of this process, as in the gateway's leases.
    std::string store_id;  ///< Of a store that is not shared.
    telemetry::Metrics& metrics;
    consumer::AskChat ask;                  ///< A turn of /api/chat.
    Callbacks callbacks{};                  ///< One for each consumer that has `handler: callback`.
    bool accept_clock = false;              ///< For stores of consumers, as `serve --accept-clock`.
    const OwnStores* own_stores = nullptr;  ///< Set by Consumers.
};

class OneConsumer;

class Consumers {
  public:
    explicit Consumers(ConsumersAround around);
    /// After stop(); waits for functions of the program that still run.
    ~Consumers();
    Consumers(const Consumers&) = delete;
    Consumers& operator=(const Consumers&) = delete;

    /// Opens the stores that they have for themselves, looks at each one's broker and database and
    /// makes it. Blocks until each has been looked at
    /// once, some seconds. An Error: one of them can never run as it is configured, and is named.
    /// One whose broker or database is away is looked at again in the background.
    base::Result<void> prepare();
    /// They may begin: from now on each joins its group as soon as it is ready.
    void start();
    /// All at the same time: what runs ends (20 s), what is finished is settled, groups are left.
    /// Blocks.
    void stop();

    /// Why the process should be restarted; empty: no reason.
    [[nodiscard]] std::vector<std::string> not_alive() const;
    /// Which of their stores do not answer, in sentences.
    [[nodiscard]] std::vector<std::string> not_ready() const { return own_stores_->not_ready(); }
    [[nodiscard]] admin::ConsumerControls controls();
    [[nodiscard]] std::size_t size() const { return all_.size(); }

  private:
    OneConsumer* find(const std::string& name);

    ConsumersAround around_;
    std::unique_ptr<OwnStores> own_stores_;
    std::vector<std::unique_ptr<OneConsumer>> all_;
};

}  // namespace semel::cli
