// The consumers of a process: made from the configuration, each on a loop and a thread of its own.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "admin/consumers.hpp"
#include "cli/callbacks.hpp"
#include "cli/cli.hpp"
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
    std::string owner;     ///< Id of this process, as in the gateway's leases.
    std::string store_id;  ///< Of a store that is not shared.
    telemetry::Metrics& metrics;
    consumer::AskChat ask;  ///< A turn of /api/chat.
    Callbacks callbacks{};  ///< One for each consumer that has `handler: callback`.
};

class Consumers {
  public:
    explicit Consumers(ConsumersAround around);
    /// After stop(); waits for functions of the program that still run.
    ~Consumers();
    Consumers(const Consumers&) = delete;
    Consumers& operator=(const Consumers&) = delete;

    /// Looks at each one's broker and database and makes it. Blocks until each has been looked at
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
    [[nodiscard]] admin::ConsumerControls controls();
    [[nodiscard]] std::size_t size() const { return all_.size(); }

  private:
    class One;
    One* find(const std::string& name);

    ConsumersAround around_;
    std::vector<std::unique_ptr<One>> all_;
};

}  // namespace semel::cli
