// ControlThreads: what blocks on behalf of a consumer: fencing former owners off, looking at the
// group, leaving it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace semel::consumer {

/// Threads are made when there is work and no idle one, up to `most`. Thread-safe.
class ControlThreads {
  public:
    explicit ControlThreads(std::size_t most) : most_(most) {}
    ControlThreads(const ControlThreads&) = delete;
    ControlThreads& operator=(const ControlThreads&) = delete;
    ~ControlThreads() { stop(); }

    /// Runs `job` on some thread, side by side with others. After stop(): forgets it.
    void submit(std::function<void()> job);
    /// Forgets what has not begun, waits for what has. Idempotent; not on one of these threads.
    void stop();

  private:
    void work();

    const std::size_t most_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> jobs_;
    std::vector<std::thread> threads_;
    std::size_t idle_ = 0;
    bool stopping_ = false;
};

}  // namespace semel::consumer
