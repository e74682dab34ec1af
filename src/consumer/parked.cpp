// Messages that wait beside the records: from the decision to the receipt, and back from there.
//
// A message is put there, then settled at the broker, and taken out when it is finished; all the
// while it keeps its place among the lanes, as one that waits in hand does. What a crash leaves:
// - there and unsettled: the broker delivers it again; the copy only says that it may be settled;
// - finished and still there: it comes back with its partition, and its record says so.
// The next owner of a partition takes its list over before anything else: what a former one would
// still put there is refused, so that nothing is left there that nobody knows of.
#include <algorithm>
#include <cstring>
#include <span>

#include "base/fault_point.hpp"
#include "consumer/consumer_impl.hpp"
#include "telemetry/log.hpp"

namespace semel::consumer {

using Phase = HeldPartition::Phase;
using Parked = InHand::Parked;

namespace {

/// Put with one call at most.
constexpr std::size_t put_max = 256;

}  // namespace

// ---------------------------------------------------------------- back with its partition

void Consumer::Impl::open_list(HeldPartition& partition, std::optional<std::int64_t> from) {
    const std::string random = base::random_bytes(partition.fence.bytes.size());
    std::memcpy(partition.fence.bytes.data(), random.data(), random.size());
    options_.parking->open(
        partition.assignment->partition(), partition.fence,
        [self = shared_from_this(), assignment = partition.assignment,
         from](base::Result<std::vector<core::ParkedMessage>> found) {
            self->on_loop([assignment, from, found = std::move(found)](Impl& impl) mutable {
                HeldPartition* const still = impl.find(assignment);
                if (still == nullptr || still->phase != Phase::claiming || impl.stopping_ ||
                    !impl.refused_.empty())
                    return;
                impl.list_opened(*still, from, std::move(found));
            });
        });
}

// What the group has passed comes first, in its order. What it has not is delivered once more,
// among what lies between: a message there may be of the same lane and not have been stored.
void Consumer::Impl::list_opened(HeldPartition& partition, std::optional<std::int64_t> from,
                                 base::Result<std::vector<core::ParkedMessage>> found) {
    if (!found)
        return claim_later(partition, "the messages that wait beside the records cannot be read: " +
                                          found.error().detail);
    const auto begins = from ? from : partition.assignment->committed();
    for (core::ParkedMessage& one : found.value()) {
        const auto place = static_cast<std::int64_t>(one.place);
        if (begins && place < *begins)
            take_stored(partition, one);
        else
            partition.unread.emplace(place, std::move(one));
    }
    begin(partition, from);
    wake();
}

void Consumer::Impl::take_stored(HeldPartition& partition, const core::ParkedMessage& message) {
    const auto place = static_cast<std::int64_t>(message.place);
    auto delivery = decode_parked(partition.assignment, place, message.bytes);
    if (delivery) return take_in(partition, std::move(*delivery), now(), true);
    alarm("parked " + partition.name(),
          "the message of partition " + partition.name() + ", position " + std::to_string(place) +
              ", that waits beside the records cannot be read: it was written by a newer version "
              "or under another engine.secret_env, or the store is damaged; it is left there");
    partition.occupied.insert(place);
}

// Delivered once more. If it is another one than lies at its place, the topic was made again: both
// are to be handled.
bool Consumer::Impl::lies_there(HeldPartition& partition, const brokers::Delivery& delivery) {
    const auto found = partition.unread.extract(delivery.position());
    if (found.empty()) return false;
    if (found.mapped().bytes == encode_parked(delivery)) return true;
    take_stored(partition, found.mapped());
    return false;
}

// `position`: all before it was delivered a while ago. What of it is still here, the broker has let
// go of (retention, compaction).
void Consumer::Impl::take_passed(HeldPartition& partition, std::int64_t position) {
    auto& unread = partition.unread;
    while (!unread.empty() && unread.begin()->first < position) {
        const core::ParkedMessage message = std::move(unread.begin()->second);
        unread.erase(unread.begin());
        take_stored(partition, message);
    }
    wake();
}

// ---------------------------------------------------------------- there

void Consumer::Impl::park(Message& message) {
    HeldPartition& partition = *message.in_hand.partition;
    if (message.in_hand.parked != Parked::no || partition.list_lost) return;
    message.in_hand.parked = Parked::wanted;
    partition.to_store.push_back(&message);
}

// Where the first of its lane waits there, those behind it do as well.
void Consumer::Impl::park_behind_first(Message& message) {
    const Lane* const lane = message.in_hand.lane;
    if (lane == nullptr || lane->first == &message) return;
    const InHand& first = lane->first->in_hand;
    if (first.parked != Parked::no && first.state == InHand::State::waiting) park(message);
}

// It leaves the hand.
void Consumer::Impl::not_parked(Message& message) {
    HeldPartition& partition = *message.in_hand.partition;
    switch (message.in_hand.parked) {
        case Parked::no:
            break;
        case Parked::wanted:
            std::erase(partition.to_store, &message);
            break;
        case Parked::writing:
            std::ranges::replace(partition.storing, &message, nullptr);
            break;
        case Parked::stored:
            --partition.in_store;
            --in_store_;
            break;
    }
    message.in_hand.parked = Parked::no;
}

// One call at a time for each partition: what comes first is there first.
void Consumer::Impl::store_parked(base::SteadyTime at) {
    if (options_.parking == nullptr || strategy_stopping_) return;
    for (const auto& [which, partition] : partitions_) {
        auto& wanted = partition->to_store;
        if (wanted.empty() || !partition->storing.empty() || at < partition->store_at ||
            partition->phase != Phase::begun)
            continue;
        const auto end =
            wanted.begin() + static_cast<std::ptrdiff_t>(std::min(wanted.size(), put_max));
        std::vector<const brokers::Delivery*> deliveries;
        std::vector<std::int64_t> places;
        for (Message* const one : std::span(wanted.begin(), end)) {
            const std::int64_t place = one->delivery.position();
            const bool is_free = partition->occupied.insert(place).second;
            one->in_hand.parked = is_free ? Parked::writing : Parked::no;
            if (!is_free) continue;
            partition->storing.push_back(one);
            deliveries.push_back(&one->delivery);
            places.push_back(place);
        }
        wanted.erase(wanted.begin(), end);
        if (deliveries.empty()) continue;
        ++partition->letters;
        ++letters_out_;
        base::fault_point("consumer.park.before");
        options_.parking->put(
            partition->assignment->partition(), partition->fence, deliveries,
            [self = shared_from_this(), assignment = partition->assignment,
             places = std::move(places)](std::vector<base::Result<Parking::Put>> results) {
                self->on_loop([assignment, places, results = std::move(results)](Impl& impl) {
                    impl.parked(assignment, places, results);
                });
            });
    }
}

void Consumer::Impl::parked(const brokers::AssignmentPtr& assignment,
                            const std::vector<std::int64_t>& places,
                            const std::vector<base::Result<Parking::Put>>& results) {
    HeldPartition& partition = *find(assignment);
    --partition.letters;
    --letters_out_;
    const std::vector<Message*> storing = std::exchange(partition.storing, {});
    std::vector<Message*> failed;
    const base::Error* error = nullptr;
    for (std::size_t i = 0; i < storing.size(); ++i) {
        Message* const message = storing[i];
        const base::Result<Parking::Put>& result = results.at(i);
        const bool lost = result && *result == Parking::Put::lost;
        if (lost) partition.list_lost = true;
        if (!result) error = &result.error();
        if (!result || lost) partition.occupied.erase(places[i]);
        if (message == nullptr) {
            // Finished, or dropped unsettled: nobody needs it there.
            if (!lost) take_out(assignment->partition(), places[i]);
        } else if (lost) {
            message->in_hand.parked = Parked::no;
        } else if (!result) {
            message->in_hand.parked = Parked::wanted;
            failed.push_back(message);
        } else {
            base::fault_point("consumer.park.after");
            message->in_hand.parked = Parked::stored;
            ++partition.in_store;
            ++in_store_;
            counters_.stored.fetch_add(1, std::memory_order_relaxed);
            settled_.push_back(message->delivery.receipt);
        }
    }
    if (partition.list_lost) {
        for (Message* const message : partition.to_store) message->in_hand.parked = Parked::no;
        partition.to_store.clear();
        for (Message* const message : failed) message->in_hand.parked = Parked::no;
    } else if (!failed.empty()) {
        partition.to_store.insert(partition.to_store.begin(), failed.begin(), failed.end());
        partition.store_at = now() + options_.letter_retry;
    }
    if (error != nullptr) {
        counters_.stores_failed++;
        alarm("parking",
              "failed messages, and those behind them, cannot be put beside the records: " +
                  error->detail + "; they wait in hand, unsettled, until they can");
    } else {
        no_alarm("parking");
    }
    check_left(partition);
    check_quiet();
    wake();
}

// ---------------------------------------------------------------- finished

void Consumer::Impl::take_out(const brokers::Partition& partition, std::int64_t place) {
    finished_[partition].places.push_back(place);
}

void Consumer::Impl::take_out_finished(base::SteadyTime at) {
    for (auto& [partition, finished] : finished_) {
        if (finished.places.empty() || !finished.out.empty() || at < finished.again) continue;
        base::fault_point("consumer.unpark.before");
        finished.out = std::exchange(finished.places, {});
        options_.parking->take_out(
            partition, finished.out,
            [self = shared_from_this(), which = partition](base::Result<void> result) {
                self->on_loop([which, result = std::move(result)](Impl& impl) {
                    impl.taken_out(which, result);
                });
            });
    }
}

// What could not be taken out comes back when its partition is assigned again, and is known by its
// record then.
void Consumer::Impl::taken_out(const brokers::Partition& partition,
                               const base::Result<void>& result) {
    TakeOut& finished = finished_.at(partition);
    if (result) {
        for (const auto& [assignment, held] : partitions_) {
            if (held->assignment->partition() != partition) continue;
            for (const std::int64_t place : finished.out) held->occupied.erase(place);
        }
        finished.out.clear();
        no_alarm("take out");
        if (finished.places.empty()) finished_.erase(partition);
        return wake();
    }
    finished.places.insert(finished.places.end(), finished.out.begin(), finished.out.end());
    finished.out.clear();
    finished.again = now() + options_.letter_retry;
    counters_.stores_failed++;
    alarm("take out", "finished messages cannot be taken out from beside the records: " +
                          result.error().detail + "; it is tried again");
}

}  // namespace semel::consumer
