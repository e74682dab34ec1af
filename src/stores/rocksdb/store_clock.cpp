#include "stores/rocksdb/store_clock.hpp"

#include <algorithm>

namespace semel::stores {

using std::chrono::duration_cast;
using std::chrono::microseconds;
using std::chrono::seconds;

ClockStart choose_start(std::optional<base::StoreTime> persisted, std::int64_t wall_us, bool accept) {
    if (!persisted) return {.start = {wall_us}};
    ClockStart answer{.start = *persisted, .wall_ahead_us = wall_us - persisted->us};
    const bool far_ahead = answer.wall_ahead_us > microseconds{wall_ahead_believed}.count();
    const bool far_behind = -answer.wall_ahead_us > microseconds{wall_behind_unremarkable}.count();
    if (far_ahead || far_behind) {
        (accept ? answer.moved : answer.kept) = true;
        if (accept) answer.start = {wall_us};
    } else if (answer.wall_ahead_us > 0) {
        answer.start = {wall_us};
    }
    return answer;
}

StoreClock::StoreClock(base::Clock& clock, base::StoreTime start)
    : clock_(clock), offset_us_(0), followed_at_us_(0) {
    followed_at_us_ = steady_us();
    offset_us_ = start.us - followed_at_us_;
}

std::int64_t StoreClock::steady_us() const {
    return duration_cast<microseconds>(clock_.steady().time_since_epoch()).count();
}

base::StoreTime StoreClock::now() const {
    return {steady_us() + offset_us_.load(std::memory_order_relaxed)};
}

void StoreClock::follow_wall() {
    const std::int64_t steady = steady_us();
    constexpr std::int64_t share =
        microseconds{follow_one_second_per}.count() / microseconds{seconds{1}}.count();
    const std::int64_t allowed = (steady - followed_at_us_) / share;
    // Too little has passed for a whole microsecond: the remainder must not be lost.
    if (allowed <= 0) return;
    followed_at_us_ = steady;
    const std::int64_t ahead =
        clock_.wall_us() - (steady + offset_us_.load(std::memory_order_relaxed));
    if (ahead > 0) offset_us_.fetch_add(std::min(ahead, allowed), std::memory_order_relaxed);
}

}  // namespace semel::stores
