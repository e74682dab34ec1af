// The embedded store's clock: a persisted base plus steady time, led slowly by the wall clock. Never goes back.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

#include "base/time.hpp"

namespace semel::stores {

/// How far ahead the wall clock may be at open to be believed: a machine that stood still for a week is normal, more is
/// more likely a wrong clock, and would expire every record at once.
inline constexpr std::chrono::hours wall_ahead_believed{24 * 7};
/// A wall clock behind by less is what a crash leaves (the persisted time runs ahead): not worth a word.
inline constexpr std::chrono::minutes wall_behind_unremarkable{2};
/// While running, the store follows the wall clock by at most a second in this time.
inline constexpr std::chrono::minutes follow_one_second_per{1};

struct ClockStart {
    base::StoreTime start;
    std::int64_t wall_ahead_us = 0;
    bool kept = false;   ///< The wall clock was not believed.
    bool moved = false;  ///< `accept` moved the clock beyond what would have been believed.
};

/// Where the clock starts, given the persisted time (absent: a new store) and the wall clock.
ClockStart choose_start(std::optional<base::StoreTime> persisted, std::int64_t wall_us, bool accept);

/// now() may be called on any thread; follow_wall() on one.
class StoreClock {
  public:
    StoreClock(base::Clock& clock, base::StoreTime start);
    [[nodiscard]] base::StoreTime now() const;
    /// Moves towards a wall clock that is ahead, by what the elapsed time allows. A wall clock behind is ignored.
    void follow_wall();

  private:
    [[nodiscard]] std::int64_t steady_us() const;

    base::Clock& clock_;
    std::atomic<std::int64_t> offset_us_;
    std::int64_t followed_at_us_;
};

}  // namespace semel::stores
