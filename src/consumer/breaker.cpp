#include "consumer/breaker.hpp"

#include <algorithm>
#include <utility>

namespace semel::consumer {

// Of the last `of`; one more opens.
std::size_t Breaker::dead_at_most() const {
    return static_cast<std::size_t>(rules_.dead_share * static_cast<double>(of));
}

// True: more than the share are dead.
bool Breaker::note(bool dead) {
    dead_[at_] = dead;
    at_ = (at_ + 1) % of;
    decided_ = std::min(decided_ + 1, of);
    return rules_.dead_share > 0 && dead_.count() > dead_at_most();
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
    if (clear) {
        dead_.reset();
        decided_ = 0;
    }
    return true;
}

std::size_t Breaker::allowed(base::SteadyTime now, std::size_t running) const {
    if (open_) return now >= next_probe_ && running == 0 ? 1 : 0;
    const std::size_t most = dead_at_most(), dead = dead_.count();
    if (rules_.dead_share <= 0 || most >= of || (decided_ == of && dead <= most / 2)) return npos;
    const std::size_t lived = decided_ == of ? 0 : decided_ - std::min(decided_, dead);
    const std::size_t at_once = std::max(most + 1 - std::min(most, dead) + lived, running_least);
    return at_once - std::min(at_once, running);
}

base::SteadyTime Breaker::next_probe() const {
    return open_ ? next_probe_ : base::SteadyTime::max();
}

void Breaker::reset() {
    open_ = over_letters_ = false;
    reason_.clear();
    dead_.reset();
    at_ = decided_ = 0;
}

}  // namespace semel::consumer
