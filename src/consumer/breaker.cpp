#include "consumer/breaker.hpp"

#include <algorithm>
#include <utility>

namespace semel::consumer {

// True: more than the share are dead.
bool Breaker::note(bool dead) {
    dead_[at_] = dead;
    at_ = (at_ + 1) % of;
    return rules_.dead_share > 0 &&
           static_cast<double>(dead_.count()) > rules_.dead_share * static_cast<double>(of);
}

void Breaker::open_now(std::string reason, base::SteadyTime now) {
    reason_ = std::move(reason);
    if (std::exchange(open_, true)) return;
    wait_ = rules_.probe_first;
    next_probe_ = now + wait_;
}

void Breaker::back_off(base::SteadyTime now) {
    // What still ran when it opened says nothing new.
    if (now < next_probe_) return;
    wait_ = std::min(wait_ * 2, rules_.probe_max);
    next_probe_ = now + wait_;
}

bool Breaker::decided(bool dead, base::SteadyTime now) {
    if (dead && over_letters_) {
        back_off(now);
        return true;
    }
    if (!note(dead) || !dead) return false;
    over_letters_ = true;
    open_now("more than " + std::to_string(static_cast<int>(rules_.dead_share * 100)) +
                 "% of the last " + std::to_string(of) +
                 " messages would be dead letters; look at why they fail, then resume the consumer",
             now);
    return true;
}

bool Breaker::ill(std::string reason, base::SteadyTime now) {
    if (open_) {
        if (!over_letters_) reason_ = std::move(reason);
        back_off(now);
        return false;
    }
    open_now(std::move(reason), now);
    return true;
}

bool Breaker::probed(Probe how, base::SteadyTime now) {
    if (!open_) return false;
    if (over_letters_ && how != Probe::applied) {
        if (how == Probe::failed) back_off(now);
        return false;
    }
    const bool clear = over_letters_;
    open_ = over_letters_ = false;
    reason_.clear();
    if (clear) dead_.reset();
    return true;
}

std::size_t Breaker::allowed(base::SteadyTime now, std::size_t running) const {
    if (!open_) return npos;
    return now >= next_probe_ && running == 0 ? 1 : 0;
}

base::SteadyTime Breaker::next_probe() const {
    return open_ ? next_probe_ : base::SteadyTime::max();
}

void Breaker::reset() {
    open_ = over_letters_ = false;
    reason_.clear();
    dead_.reset();
    at_ = 0;
}

}  // namespace semel::consumer
