// One consumer of a process, from the first look at its broker to its end.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "admin/consumers.hpp"
#include "cli/consumer_parts.hpp"

namespace semel::cli {

/// One consumer with everything that is its own. Its thread looks until broker and database are
/// there, makes it, starts it, and then keeps up what is beside its messages.
class OneConsumer {
  public:
    OneConsumer(const ConsumersAround& around, const config::ConsumerConfig& config)
        : around_(around), config_(config) {
        watch();
    }
    ~OneConsumer();
    OneConsumer(const OneConsumer&) = delete;
    OneConsumer& operator=(const OneConsumer&) = delete;

    /// Begins to look.
    void prepare() {
        thread_ = std::thread([this] { run(); });
    }
    /// Blocks until it was looked at once. An Error: it can never run.
    base::Result<void> looked_at() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return looked_; });
        if (condition_ == "refused")
            return base::Error{.code = base::ErrorCode::invalid_argument,
                               .detail = "consumer " + config_.name + ": " + reason_};
        return {};
    }
    void start() {
        const std::lock_guard lock(mutex_);
        may_start_ = true;
        changed_.notify_all();
    }
    /// Blocks.
    void stop();

    [[nodiscard]] std::optional<std::string> not_alive() const;
    [[nodiscard]] admin::ConsumerView view() const;
    base::Result<admin::ConsumerLags> lag();
    base::Result<void> tell(admin::ConsumerCommand command, const std::string& reason);
    [[nodiscard]] const std::string& name() const { return config_.name; }

  private:
    void run();
    /// Until it is ready; false: it never will be, or the process ends.
    bool look();
    void upkeep(std::shared_ptr<sql::Executor>& connection);
    void purge(std::shared_ptr<sql::Executor>& connection);
    void watch();
    void watch_observer();
    void stand(std::string condition, std::string reason);
    /// False: the process ends.
    bool wait_for(std::chrono::milliseconds time);
    [[nodiscard]] consumer::Runner* running() const {
        const std::lock_guard lock(mutex_);
        return started_ ? parts_->consumer.get() : nullptr;
    }

    const ConsumersAround& around_;
    const config::ConsumerConfig& config_;
    CountersOfOne counters_;
    std::atomic<std::uint64_t> lag_{0};
    std::atomic<std::uint64_t> copies_waiting_{0};
    std::atomic<std::uint64_t> purged_{0};
    std::atomic<std::int64_t> retention_ms_{0};
    std::chrono::milliseconds retention_{0};
    std::unique_ptr<ConsumerParts> parts_;  ///< Made by the thread before started_ is set.
    std::thread thread_;

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    // Guarded by mutex_.
    bool looked_ = false;
    bool may_start_ = false;
    bool started_ = false;
    bool stopping_ = false;
    std::string condition_ = "starting";
    std::string reason_;
};

}  // namespace semel::cli
