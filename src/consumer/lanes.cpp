#include "consumer/lanes.hpp"

#include <algorithm>

#include "base/assert.hpp"

namespace semel::consumer {

namespace {

using State = InHand::State;

// For the heap functions: the oldest in front.
bool younger(const Message* a, const Message* b) { return a->in_hand.arrival > b->in_hand.arrival; }

bool is_free(const Lane& lane) { return lane.running == 0 && lane.aside == 0; }

}  // namespace

void Lanes::push_ready(Message& message) {
    if (fresh_.empty() || younger(&message, fresh_.back())) {
        fresh_.push_back(&message);
        return;
    }
    returned_.push_back(&message);
    std::push_heap(returned_.begin(), returned_.end(), younger);
}

Message* Lanes::pop_ready() {
    const bool from_heap =
        !returned_.empty() && (fresh_.empty() || younger(fresh_.front(), returned_.front()));
    if (from_heap) {
        std::pop_heap(returned_.begin(), returned_.end(), younger);
        Message* const out = returned_.back();
        returned_.pop_back();
        return out;
    }
    if (fresh_.empty()) return nullptr;
    Message* const out = fresh_.front();
    fresh_.pop_front();
    return out;
}

void Lanes::offer(Lane& lane) {
    if (is_free(lane) && lane.first->in_hand.state == State::ready) push_ready(*lane.first);
}

void Lanes::recount(Lane& lane) {
    const std::size_t stays = lane.waiting + lane.aside;
    const std::size_t now = stays == 0 ? 0 : lane.size - lane.running - stays;
    if (now == lane.parked) return;
    parked_ = parked_ - lane.parked + now;
    std::size_t& of = parked_of_[lane.of];
    of = of - lane.parked + now;
    if (of == 0) parked_of_.erase(lane.of);
    lane.parked = now;
}

Lane& Lanes::lane_of(std::uint64_t number) {
    const auto [at, is_new] = lanes_.try_emplace(number, nullptr);
    if (is_new && free_lanes_.empty()) {
        at->second = &all_lanes_.emplace_back();
    } else if (is_new) {
        at->second = free_lanes_.back();
        free_lanes_.pop_back();
        *at->second = {};
    }
    return *at->second;
}

void Lanes::add(Message& message) {
    InHand& in = message.in_hand;
    SEMEL_ASSERT(in.state == State::none, "a message is added once");
    in.arrival = ++arrivals_;
    in.state = State::ready;
    in.older = newest_;
    (newest_ != nullptr ? newest_->in_hand.newer : oldest_) = &message;
    newest_ = &message;
    ++size_;
    if (message.lane == 0) {
        push_ready(message);
        return;
    }
    Lane& lane = lane_of(message.lane);
    in.lane = &lane;
    in.before = lane.last;
    if (lane.size++ == 0) {
        lane.number = message.lane;
        lane.of = message.delivery.receipt.assignment.get();
        lane.first = lane.last = &message;
        push_ready(message);
        return;
    }
    lane.last->in_hand.after = &message;
    lane.last = &message;
    recount(lane);
}

void Lanes::wake(base::SteadyTime now) {
    now_ = std::max(now_, now);
    while (!timers_.empty() && timers_.begin()->first.first <= now_) {
        Message& message = *timers_.begin()->second;
        timers_.erase(timers_.begin());
        message.in_hand.state = State::ready;
        Lane* const lane = message.in_hand.lane;
        if (lane == nullptr) {
            push_ready(message);
            continue;
        }
        --lane->waiting;
        if (lane->first == &message) offer(*lane);
        recount(*lane);
    }
}

std::vector<Message*> Lanes::take(std::size_t max, base::SteadyTime now) {
    wake(now);
    picked_.clear();
    deepening_.clear();
    std::size_t room = max;
    for (; room > 0; --room) {
        Message* const first = pop_ready();
        if (first == nullptr) break;
        if (first->in_hand.after != nullptr) deepening_.push_back(picked_.size());
        picked_.push_back({.first = first, .last = first, .count = 1});
    }
    while (room > 0 && !deepening_.empty()) {
        std::size_t kept = 0;
        for (const std::size_t which : deepening_) {
            Picked& one = picked_[which];
            Message* const next = one.last->in_hand.after;
            if (room == 0 || next == nullptr || next->in_hand.state != State::ready) continue;
            one.last = next;
            ++one.count;
            --room;
            deepening_[kept++] = which;
        }
        deepening_.resize(kept);
    }
    std::vector<Message*> out;
    out.reserve(max - room);
    for (const Picked& one : picked_) {
        Message* message = one.first;
        for (std::size_t i = 0; i < one.count; ++i, message = message->in_hand.after) {
            message->in_hand.state = State::running;
            out.push_back(message);
        }
        if (Lane* const lane = one.first->in_hand.lane; lane != nullptr) {
            lane->running += one.count;
            recount(*lane);
        }
    }
    running_ += out.size();
    return out;
}

// The message is neither running nor aside any more; what it is instead is its caller's to say.
void Lanes::taken_back(Message& message) {
    InHand& in = message.in_hand;
    const bool ran = in.state == State::running;
    SEMEL_ASSERT(ran || in.state == State::aside, "only a taken message is told back");
    --(ran ? running_ : aside_);
    if (in.lane != nullptr) --(ran ? in.lane->running : in.lane->aside);
}

void Lanes::forget(Message& message) {
    InHand& in = message.in_hand;
    (in.older != nullptr ? in.older->in_hand.newer : oldest_) = in.newer;
    (in.newer != nullptr ? in.newer->in_hand.older : newest_) = in.older;
    --size_;
    Lane* const lane = std::exchange(in.lane, nullptr);
    if (lane != nullptr) {
        (in.before != nullptr ? in.before->in_hand.after : lane->first) = in.after;
        (in.after != nullptr ? in.after->in_hand.before : lane->last) = in.before;
        --lane->size;
        recount(*lane);
        if (lane->size == 0) {
            lanes_.erase(lane->number);
            free_lanes_.push_back(lane);
        }
    }
    in.state = State::none;
    in.older = in.newer = in.before = in.after = nullptr;
}

void Lanes::finished(Message& message) {
    taken_back(message);
    Lane* const lane = message.in_hand.lane;
    const bool others = lane != nullptr && lane->size > 1;
    forget(message);
    if (others) offer(*lane);
}

void Lanes::again(Message& message, base::SteadyTime when) {
    taken_back(message);
    InHand& in = message.in_hand;
    const bool waits = when > now_;
    in.state = waits ? State::waiting : State::ready;
    if (waits) {
        in.due = when;
        timers_.emplace(std::pair{when, in.arrival}, &message);
    }
    if (in.lane == nullptr) {
        if (!waits) push_ready(message);
        return;
    }
    if (waits) ++in.lane->waiting;
    offer(*in.lane);
    recount(*in.lane);
}

void Lanes::set_aside(Message& message) {
    SEMEL_ASSERT(message.in_hand.state == State::running, "only what runs is set aside");
    message.in_hand.state = State::aside;
    --running_;
    ++aside_;
    if (Lane* const lane = message.in_hand.lane; lane != nullptr) {
        --lane->running;
        ++lane->aside;
        recount(*lane);
    }
}

void Lanes::recall(Message& message) {
    SEMEL_ASSERT(message.in_hand.state == State::aside, "only what was set aside is recalled");
    message.in_hand.state = State::running;
    --aside_;
    ++running_;
    if (Lane* const lane = message.in_hand.lane; lane != nullptr) {
        --lane->aside;
        ++lane->running;
        recount(*lane);
    }
}

bool Lanes::is_first(const Message& message) { return message.in_hand.before == nullptr; }

std::vector<Message*> Lanes::drop(const brokers::Assignment& assignment) {
    std::vector<Message*> out;
    for (Message* message = oldest_; message != nullptr; message = message->in_hand.newer) {
        const State state = message->in_hand.state;
        if (message->delivery.receipt.assignment.get() == &assignment &&
            (state == State::ready || state == State::waiting))
            out.push_back(message);
    }
    if (out.empty()) return out;
    for (Message* const message : out) {
        InHand& in = message->in_hand;
        if (in.state == State::waiting) {
            timers_.erase({in.due, in.arrival});
            if (in.lane != nullptr) --in.lane->waiting;
        }
        forget(*message);
    }
    // Which of them were offered is not known: what may be taken is looked up anew.
    fresh_.clear();
    returned_.clear();
    for (Message* message = oldest_; message != nullptr; message = message->in_hand.newer) {
        const InHand& in = message->in_hand;
        if (in.state != State::ready) continue;
        if (in.lane == nullptr || (in.lane->first == message && is_free(*in.lane)))
            push_ready(*message);
    }
    return out;
}

base::SteadyTime Lanes::next_due() const {
    return timers_.empty() ? base::SteadyTime::max() : timers_.begin()->first.first;
}

std::size_t Lanes::parked(const brokers::Assignment& of) const {
    const auto at = parked_of_.find(&of);
    return at == parked_of_.end() ? 0 : at->second;
}

}  // namespace semel::consumer
