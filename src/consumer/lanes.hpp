// Lanes: which of the messages in hand may run now. No I/O, no clock of its own.
#pragma once

#include <boost/unordered/unordered_flat_map.hpp>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/time.hpp"
#include "consumer/message.hpp"

namespace semel::consumer {

/// The messages of one number, first to last.
struct Lane {
    std::uint64_t number = 0;
    const brokers::Assignment* of = nullptr;  ///< Whose messages made it.
    Message* first = nullptr;
    Message* last = nullptr;
    std::size_t size = 0, running = 0, aside = 0, waiting = 0;
    std::size_t parked = 0;  ///< As it is counted in Lanes::parked().
};

/// Holds plain pointers; the messages belong to the Consumer. A message is in one of: ready (it may
/// be taken when all before it in its lane may), running (taken), aside (taken, runs no more, not
/// finished), waiting (not before a time). Messages of lane 0 are lanes of their own. A value, used
/// by one thread. add, take (a message) and finished cost the same however many are in hand; only a
/// lane that was taken from costs the logarithm of how many such lanes are ready.
class Lanes {
  public:
    Lanes() = default;
    Lanes(const Lanes&) = delete;
    Lanes& operator=(const Lanes&) = delete;

    /// A new message, behind all of its lane.
    void add(Message& message);
    /// Up to `max` messages that may run now. Lanes are served in the order in which their first
    /// messages arrived, one message each; what room is left is shared out evenly. Several of one
    /// lane come together and in their order, and then no other of that lane is given until all of
    /// them were told back.
    std::vector<Message*> take(std::size_t max, base::SteadyTime now);
    /// A taken message is finished (settled, or void) and forgotten.
    void finished(Message& message);
    /// A taken message must run again, not before `when`: it and all behind it in its lane stay, in
    /// their order. A `when` that the last take() has passed already: as soon as its lane allows.
    void again(Message& message, base::SteadyTime when);
    /// A running message runs no more but is not finished (its letter is on its way, it is to run
    /// alone): its lane waits for it. Ends by finished(), again() or recall().
    void set_aside(Message& message);
    /// One that was set aside runs again.
    void recall(Message& message);
    /// Whether nothing is before it in its lane.
    [[nodiscard]] static bool is_first(const Message& message);
    /// Forgets all of a lost or released partition that are not taken; gives them back. Taken ones
    /// end by finished().
    std::vector<Message*> drop(const brokers::Assignment& assignment);
    /// When the first waiting message is due; SteadyTime::max(): none waits.
    [[nodiscard]] base::SteadyTime next_due() const;
    /// The message that came first of all in hand; null: there is none. Its `in_hand.newer` is the
    /// next.
    [[nodiscard]] Message* oldest() const { return oldest_; }

    [[nodiscard]] std::size_t size() const { return size_; }  ///< All in hand.
    [[nodiscard]] std::size_t running() const { return running_; }
    /// Failed or busy and not due, or set aside.
    [[nodiscard]] std::size_t waiting() const { return timers_.size() + aside_; }
    /// Messages behind waiting ones of their lanes (bounded by park_limit). `of`: of one partition.
    [[nodiscard]] std::size_t parked() const { return parked_; }
    [[nodiscard]] std::size_t parked(const brokers::Assignment& of) const;

  private:
    struct Picked {
        Message* first;
        Message* last;
        std::size_t count;
    };
    void push_ready(Message& message);
    Message* pop_ready();
    void wake(base::SteadyTime now);
    void taken_back(Message& message);
    void forget(Message& message);
    void offer(Lane& lane);
    void recount(Lane& lane);
    Lane& lane_of(std::uint64_t number);

    /// With keys that are as good as unique, lanes come and go with every message.
    boost::unordered_flat_map<std::uint64_t, Lane*> lanes_;
    std::deque<Lane> all_lanes_;
    std::vector<Lane*> free_lanes_;
    // First messages of lanes that may be taken from: those that arrive go to the end of `fresh_`;
    // what comes back is older and goes to the heap. Both have the oldest in front.
    std::deque<Message*> fresh_;
    std::vector<Message*> returned_;
    std::map<std::pair<base::SteadyTime, std::uint64_t>, Message*> timers_;
    std::unordered_map<const brokers::Assignment*, std::size_t> parked_of_;
    std::vector<Picked> picked_;  ///< Kept for its memory.
    std::vector<std::size_t> deepening_;
    Message* oldest_ = nullptr;
    Message* newest_ = nullptr;
    base::SteadyTime now_ = base::SteadyTime::min();
    std::uint64_t arrivals_ = 0;
    std::size_t size_ = 0, running_ = 0, aside_ = 0, parked_ = 0;
};

}  // namespace semel::consumer
