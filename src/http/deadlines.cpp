#include "http/deadlines.hpp"

#include <algorithm>

namespace semel::http {

Deadline::Deadline(std::shared_ptr<Deadlines> list) : list_(std::move(list)) {
    next_ = list_->first_;
    if (next_ != nullptr) next_->previous_ = this;
    list_->first_ = this;
}

// Touches the list only, never the loop: a connection may be destroyed together with its loop.
Deadline::~Deadline() {
    if (list_->cursor_ == this) list_->cursor_ = next_;
    if (next_ != nullptr) next_->previous_ = previous_;
    (previous_ != nullptr ? previous_->next_ : list_->first_) = next_;
}

void Deadline::set(std::chrono::milliseconds from_now) {
    at_ = list_->loop_.now() + from_now;
    list_->note(at_);
}

void Deadlines::note(base::SteadyTime at) {
    if (at >= armed_for_) return;
    loop_.cancel(timer_);
    armed_for_ = at;
    timer_ = loop_.at(at, [weak = weak_from_this()] {
        if (const auto self = weak.lock()) self->fire();
    });
}

void Deadlines::fire() {
    timer_ = 0;
    const base::SteadyTime now = loop_.now();
    // Deadlines that are set by an expiry are found by the second walk.
    for (cursor_ = first_; cursor_ != nullptr;) {
        Deadline& d = *cursor_;
        cursor_ = d.next_;
        if (d.at_ > now) continue;
        d.clear();
        d.expired();
    }
    base::SteadyTime earliest = base::SteadyTime::max();
    for (const Deadline* d = first_; d != nullptr; d = d->next_) {
        earliest = std::min(earliest, d->at_);
    }
    loop_.cancel(timer_);
    timer_ = 0;
    armed_for_ = base::SteadyTime::max();
    if (earliest != base::SteadyTime::max()) note(std::max(earliest, now + kGranularity));
}

}  // namespace semel::http
