// Two clocks that must not be mixed up: the store's (leases, retention, tokens) and this process's
// steady one.
#pragma once

#include <chrono>
#include <compare>
#include <cstdint>

namespace semel::base {

/// A moment by the store's clock, in microseconds since the Unix epoch. Each store has one clock;
/// two stores' do not compare.
struct StoreTime {
    std::int64_t us = 0;

    friend constexpr auto operator<=>(StoreTime, StoreTime) = default;
    friend constexpr StoreTime operator+(StoreTime t, std::chrono::microseconds d) {
        return {t.us + d.count()};
    }
    friend constexpr StoreTime operator-(StoreTime t, std::chrono::microseconds d) {
        return {t.us - d.count()};
    }
    friend constexpr std::chrono::microseconds operator-(StoreTime a, StoreTime b) {
        return std::chrono::microseconds{a.us - b.us};
    }
};

/// Monotonic time of this process. In a simulation the same type carries virtual time.
using SteadyTime = std::chrono::steady_clock::time_point;

/// Reads the clocks. The real one is `system_clocks()`; tests and the simulation bring their own.
/// Thread-safe: every function may be called from any thread.
class Clock {
  public:
    Clock() = default;
    Clock(const Clock&) = delete;
    Clock& operator=(const Clock&) = delete;
    virtual ~Clock() = default;
    [[nodiscard]] virtual SteadyTime steady() const = 0;
    /// The wall clock, microseconds since the Unix epoch. May jump in either direction.
    [[nodiscard]] virtual std::int64_t wall_us() const = 0;
};

/// The machine's clocks. CLOCK_BOOTTIME is not used: a suspended machine's leases stand still with
/// it.
Clock& system_clocks();

}  // namespace semel::base
