// Signal: coroutines on any loop wait until something changed, or until a deadline.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/loop.hpp"

namespace semel::runtime {

/// Use: read version(), look at the state, wait(loop, version, deadline), look again. A change
/// between the look and the wait is not lost, because its notify raised the version. Thread-safe.
class Signal {
  public:
    Signal() = default;
    Signal(const Signal&) = delete;
    Signal& operator=(const Signal&) = delete;

    [[nodiscard]] std::uint64_t version() const { return version_.load(std::memory_order_acquire); }
    /// Wakes everyone who waits, each on its own loop.
    void notify();
    /// Suspends on `loop` (the caller's own) until the version is no longer `seen`: true; or until
    /// `deadline`: false. The Signal must outlive the wait.
    Task<bool> wait(Loop& loop, std::uint64_t seen, SteadyTime deadline);

    struct Waiter;

  private:
    std::atomic<std::uint64_t> version_{0};
    std::mutex mutex_;
    std::vector<std::shared_ptr<Waiter>> waiters_;  // guarded by mutex_
};

}  // namespace semel::runtime
