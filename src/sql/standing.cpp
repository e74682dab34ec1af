#include "sql/standing.hpp"

#include <algorithm>
#include <utility>

namespace semel::sql {
namespace {

using std::chrono::duration_cast;
using std::chrono::microseconds;
using std::chrono::steady_clock;

/// Two clocks drift apart by less than one second in so many.
constexpr std::int64_t drift_one_in = 5000;

std::int64_t us_of(SteadyTime time) {
    return duration_cast<microseconds>(time.time_since_epoch()).count();
}

}  // namespace

Standing::Standing() {
    const SteadyTime now = steady_clock::now();
    since_ = last_answer_ = last_probe_ = now;
    offset_low_ = offset_high_ = base::system_clocks().wall_us() - us_of(now);
}

void Standing::answered(SteadyTime sent, SteadyTime received) {
    const std::lock_guard lock(mutex_);
    // Others waited as long for theirs.
    if (!answering_ || received - sent > silence_limit) since_ = received;
    answering_ = true;
    last_answer_ = std::max(last_answer_, received);
}

void Standing::told(StoreTime at, SteadyTime sent, SteadyTime received) {
    std::int64_t low = at.us - us_of(received);
    std::int64_t high = at.us - us_of(sent);
    const std::lock_guard lock(mutex_);
    if (clock_at_ != SteadyTime::min()) {
        const std::int64_t passed = us_of(received) - us_of(clock_at_);
        const std::int64_t drift = std::max<std::int64_t>(passed, 0) / drift_one_in + 1;
        // What both say; if they contradict each other the clock was set, and the later is right.
        const std::int64_t both_low = std::max(low, offset_low_ - drift);
        const std::int64_t both_high = std::min(high, offset_high_ + drift);
        if (both_low <= both_high) {
            low = both_low;
            high = both_high;
        }
    }
    offset_low_ = low;
    offset_high_ = high;
    clock_at_ = received;
}

void Standing::connected() {
    const std::lock_guard lock(mutex_);
    ++connections_;
}

void Standing::broke(std::string words) {
    const std::lock_guard lock(mutex_);
    --connections_;
    answering_ = false;
    problem_ = std::move(words);
}

void Standing::unreachable(std::string words) {
    const std::lock_guard lock(mutex_);
    if (connections_ != 0) return;
    answering_ = false;
    problem_ = std::move(words);
}

void Standing::full() {
    const std::lock_guard lock(mutex_);
    full_at_ = steady_clock::now();
}

void Standing::look(SteadyTime now) {
    const std::lock_guard lock(mutex_);
    if (!answering_ || now - last_answer_ < silence_limit) return;
    answering_ = false;
    problem_ = "the database has not answered for " +
               std::to_string(duration_cast<std::chrono::milliseconds>(silence_limit).count()) +
               " ms: look whether its server hangs";
}

bool Standing::probe_due(SteadyTime now) {
    const std::lock_guard lock(mutex_);
    if (now - std::max(last_answer_, last_probe_) < probe_every) return false;
    last_probe_ = now;
    return true;
}

StoreTime Standing::now() const {
    const std::lock_guard lock(mutex_);
    return {us_of(steady_clock::now()) + offset_low_ + (offset_high_ - offset_low_) / 2};
}

SteadyTime Standing::answering_since() const {
    const std::lock_guard lock(mutex_);
    if (!answering_) return steady_clock::now();
    return std::max(since_, full_at_);
}

std::string Standing::problem() const {
    const std::lock_guard lock(mutex_);
    return answering_ ? std::string{} : problem_;
}

}  // namespace semel::sql
