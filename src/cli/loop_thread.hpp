// LoopThread: a loop on a thread of its own, which shows that it runs.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>

#include "runtime/loop.hpp"

namespace semel::cli {

/// How often a loop shows that it runs, and how long it may be silent before /healthz says so.
inline constexpr std::chrono::seconds beat_every{1};
inline constexpr std::chrono::seconds silence_max{15};

/// Where coroutines may be left whose frames name objects that go before the loop, it lives until
/// the process ends.
class LoopThread {
  public:
    LoopThread() : loop(base::system_clocks()) {}
    ~LoopThread() { stop(); }
    LoopThread(const LoopThread&) = delete;
    LoopThread& operator=(const LoopThread&) = delete;

    void start() {
        beat();
        thread_ = std::thread([this] {
            const auto keep_running = loop.executor();
            const runtime::asio::executor_work_guard<runtime::Executor> guard(keep_running);
            loop.io().run();
        });
    }
    /// Ends after what runs on it just now; what waits there is dropped with the loop.
    void stop() {
        loop.io().stop();
        if (thread_.joinable()) thread_.join();
    }
    [[nodiscard]] bool silent() const {
        return steady_ms() - last_beat_.load() > std::chrono::milliseconds(silence_max).count();
    }

    runtime::Loop loop;
    std::function<void()> on_beat;  ///< On the loop, once a second. Set before start().

  private:
    static std::int64_t steady_ms() {
        return std::chrono::duration_cast<std::chrono::milliseconds>(
                   base::system_clocks().steady().time_since_epoch())
            .count();
    }
    void beat() {
        last_beat_ = steady_ms();
        if (on_beat) on_beat();
        loop.at(loop.now() + beat_every, [this] { beat(); });
    }
    std::atomic<std::int64_t> last_beat_{0};
    std::thread thread_;
};

}  // namespace semel::cli
