// A clock that stands still until a test moves it. Steady and wall time move together or apart.
#pragma once

#include <atomic>
#include <chrono>

#include "base/time.hpp"

namespace semel::support {

/// Thread-safe.
class ManualClock final : public base::Clock {
  public:
    /// 2027-01-15, a moment without meaning.
    static constexpr std::int64_t start_wall_us = 1'800'000'000'000'000;

    [[nodiscard]] base::SteadyTime steady() const override {
        return base::SteadyTime{std::chrono::microseconds{steady_us_.load()}};
    }
    [[nodiscard]] std::int64_t wall_us() const override { return wall_us_.load(); }

    /// Time passes.
    void advance(std::chrono::microseconds by) {
        steady_us_ += by.count();
        wall_us_ += by.count();
    }
    /// Only the steady clock moves: the wall clock is set back by as much.
    void advance_steady(std::chrono::microseconds by) { steady_us_ += by.count(); }
    /// Somebody sets the wall clock, in either direction.
    void jump_wall(std::chrono::microseconds by) { wall_us_ += by.count(); }

  private:
    std::atomic<std::int64_t> steady_us_{1'000'000'000};
    std::atomic<std::int64_t> wall_us_{start_wall_us};
};

}  // namespace semel::support
