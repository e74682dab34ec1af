// What comes to a consumer and leaves it: partitions, messages, problems.
#include <algorithm>
#include <functional>

#include "consumer/consumer_impl.hpp"
#include "telemetry/log.hpp"

namespace semel::consumer {

using Phase = HeldPartition::Phase;

namespace {

// Numbers that differ a little give numbers that differ in all their bits (splitmix64).
std::uint64_t mixed(std::uint64_t x) {
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

// 0 is no lane.
std::uint64_t lane_number(std::uint64_t hash) { return hash == 0 ? 1 : hash; }

}  // namespace

HeldPartition* Consumer::Impl::find(const brokers::AssignmentPtr& assignment) {
    const auto at = partitions_.find(assignment.get());
    return at == partitions_.end() ? nullptr : at->second.get();
}

// ---------------------------------------------------------------- coming

void Consumer::Impl::assigned(std::vector<brokers::AssignmentPtr> which) {
    for (const brokers::AssignmentPtr& assignment : which) {
        auto& partition = partitions_[assignment.get()];
        partition = std::make_unique<HeldPartition>();
        partition->assignment = assignment;
        partition->lane = lane_number(mixed(++partitions_ever_));
        partition->claimed_since = now();
        counters_.assigned++;
    }
    count_partitions();
    if (stopping_) return;
    if (!options_.check_group) {
        for (const brokers::AssignmentPtr& assignment : which) claim(*find(assignment));
        return;
    }
    control_.submit([self = shared_from_this(), which = std::move(which)] {
        GroupFinding finding = self->options_.check_group(self->source_);
        self->on_loop([which, finding = std::move(finding)](Impl& impl) mutable {
            impl.group_checked(which, std::move(finding));
        });
    });
}

void Consumer::Impl::group_checked(const std::vector<brokers::AssignmentPtr>& which,
                                   GroupFinding finding) {
    if (!finding.stays) {
        if (!refused_.empty()) return;
        refused_ = finding.sentence;
        log::error("consumer.refused", {{"consumer", options_.name}, {"reason", refused_}});
        alarm("group", refused_);
        leave(refused_);
        show();
        return;
    }
    if (finding.sentence.empty())
        no_alarm("group");
    else
        alarm("group", finding.sentence);
    for (const brokers::AssignmentPtr& assignment : which) {
        HeldPartition* const partition = find(assignment);
        if (partition != nullptr && partition->phase == Phase::claiming) claim(*partition);
    }
}

void Consumer::Impl::claim(HeldPartition& partition) {
    partition.claim_at = base::SteadyTime::max();
    control_.submit([self = shared_from_this(), assignment = partition.assignment] {
        AssignAnswer answer = self->strategy_.assigned(assignment);
        self->on_loop([assignment, answer = std::move(answer)](Impl& impl) mutable {
            impl.claimed(assignment, std::move(answer));
        });
    });
}

void Consumer::Impl::claimed(const brokers::AssignmentPtr& assignment, AssignAnswer answer) {
    HeldPartition* const partition = find(assignment);
    // Revoked or lost meanwhile, or nobody wants it any more.
    if (partition == nullptr || partition->phase != Phase::claiming || stopping_ ||
        !refused_.empty())
        return;
    const std::string about = "claim " + partition->name();
    if (const auto* begins = std::get_if<BeginAt>(&answer)) {
        if (options_.parking != nullptr) return open_list(*partition, begins->offset);
        return begin(*partition, begins->offset);
    }
    if (const auto* later = std::get_if<NotYetOurs>(&answer))
        return claim_later(*partition, later->reason);
    partition->phase = Phase::refused;
    const std::string& why = std::get<Refused>(answer).reason;
    log::error("consumer.partition_refused",
               {{"consumer", options_.name}, {"partition", partition->name()}, {"reason", why}});
    alarm(about, "partition " + partition->name() + " stays silent: " + why);
}

void Consumer::Impl::begin(HeldPartition& partition, std::optional<std::int64_t> from) {
    no_alarm("claim " + partition.name());
    partition.phase = Phase::begun;
    source_.begin(partition.assignment, from);
}

void Consumer::Impl::claim_later(HeldPartition& partition, const std::string& why) {
    partition.claim_at = now() + partition.claim_wait;
    partition.claim_wait = std::min(partition.claim_wait * 2, claim_again_max);
    if (now() - partition.claimed_since < claim_alarm_after) return;
    alarm("claim " + partition.name(),
          "partition " + partition.name() + " cannot begin yet and is asked for again: " + why);
}

std::uint64_t Consumer::Impl::lane_of(const HeldPartition& partition,
                                      const brokers::Delivery& delivery) const {
    switch (options_.identity.ordering) {
        case config::Ordering::partition:
            return partition.lane;
        case config::Ordering::key:
            // Two keys of one number share a lane: slower, not wrong.
            return delivery.key ? lane_number(mixed(partition.lane +
                                                    std::hash<std::string_view>{}(*delivery.key)))
                                : 0;
        case config::Ordering::none:
            break;
    }
    return 0;
}

void Consumer::Impl::delivered(std::vector<brokers::Delivery> messages) {
    const base::SteadyTime at = now();
    std::uint64_t received = 0;
    const brokers::Assignment* last = nullptr;
    HeldPartition* partition = nullptr;
    for (brokers::Delivery& delivery : messages) {
        const brokers::AssignmentPtr& assignment = delivery.receipt.assignment;
        if (assignment.get() != last) {
            partition = find(assignment);
            last = assignment.get();
        }
        // What was on its way when its partition left is void.
        if (partition == nullptr || partition->phase != Phase::begun) continue;
        const bool stored = !partition->unread.empty() && lies_there(*partition, delivery);
        if (stored) settled_.push_back(delivery.receipt);
        take_in(*partition, std::move(delivery), at, stored);
        ++received;
    }
    counters_.received += received;
    if (std::max(lanes_.parked(), in_store_) > options_.park_limit) check_parked();
    wake();
}

void Consumer::Impl::take_in(HeldPartition& partition, brokers::Delivery&& delivery,
                             base::SteadyTime at, bool stored) {
    brokers::Delivery rest;
    Identified what = identity_.identify(std::move(delivery), rest);
    if (std::holds_alternative<Skipped>(what)) {
        counters_.skipped++;
        if (stored) return take_out(partition.assignment->partition(), rest.position());
        settled_.push_back(std::move(rest.receipt));
        return;
    }
    std::unique_ptr<Message> message;
    if (auto* known = std::get_if<std::unique_ptr<Message>>(&what)) {
        message = std::move(*known);
    } else {
        // It takes its place among the others, so that order and breaker hold for it as well.
        message = std::make_unique<Message>();
        message->delivery = std::move(rest);
        message->key = Identity::key_of_position(message->delivery);
        message->in_hand.unreadable = true;
    }
    message->lane = lane_of(partition, message->delivery);
    message->received = at;
    message->in_hand.partition = &partition;
    if (stored) {
        message->in_hand.parked = InHand::Parked::stored;
        partition.occupied.insert(message->delivery.position());
        ++partition.in_store;
        ++in_store_;
    }
    lanes_.add(*message);
    if (options_.parking != nullptr && !stored) park_behind_first(*message);
    if (auto* unreadable = std::get_if<Unreadable>(&what))
        unreadable_.emplace(message->in_hand.arrival, std::move(*unreadable));
    // From now on it is known by its place among the lanes, until forget().
    static_cast<void>(message.release());
}

// ---------------------------------------------------------------- going

void Consumer::Impl::revoked(const std::vector<brokers::AssignmentPtr>& which) {
    for (const brokers::AssignmentPtr& assignment : which) {
        HeldPartition* const partition = find(assignment);
        if (partition == nullptr) continue;
        counters_.revoked++;
        partition->phase = Phase::leaving;
        if (!strategy_stopping_) strategy_.leaving(assignment);
        drop_untaken(*partition);
        check_left(*partition);
    }
    count_partitions();
    wake();
}

void Consumer::Impl::gone(const std::vector<brokers::AssignmentPtr>& which, bool lost) {
    for (const brokers::AssignmentPtr& assignment : which) {
        HeldPartition* const partition = find(assignment);
        if (partition == nullptr) continue;
        const bool told = partition->phase == Phase::leaving;
        partition->phase = Phase::gone;
        if (lost) {
            counters_.lost++;
            log::warn("consumer.lost",
                      {{"consumer", options_.name}, {"partition", partition->name()}});
        }
        no_alarm("claim " + partition->name());
        no_alarm("park " + partition->name());
        drop_untaken(*partition);
        if (!told && !strategy_stopping_) strategy_.leaving(assignment);
        // The strategy may have given its last message back at once: then the partition has left.
        if (HeldPartition* const still = find(assignment); still != nullptr) check_left(*still);
    }
    count_partitions();
    wake();
}

// What does not run and whose letter nobody holds.
void Consumer::Impl::drop_untaken(HeldPartition& partition) {
    for (Message* const message : lanes_.drop(*partition.assignment)) forget(*message);
    std::vector<Message*> aside;
    const auto is_its = [&](Message* message) {
        const bool its = message->in_hand.partition == &partition;
        if (its) aside.push_back(message);
        return its;
    };
    std::erase_if(suspects_, is_its);
    std::erase_if(spared_, is_its);
    for (const auto& [which, letter] : letters_) {
        const bool held = letter.stage == LetterOnItsWay::Stage::publishing ||
                          letter.stage == LetterOnItsWay::Stage::marking;
        if (letter.message->in_hand.partition == &partition && !held)
            aside.push_back(letter.message);
    }
    for (const auto& [which, copy] : copies_) {
        if (copy.message->in_hand.partition == &partition && !copy.publishing)
            aside.push_back(copy.message);
    }
    for (Message* const message : aside) release(*message);
}

// The last step of one that leaves: nothing of it runs any more.
void Consumer::Impl::check_left(HeldPartition& partition) {
    const bool quiet = partition.running == 0 && partition.letters == 0;
    if (partition.phase == Phase::leaving && !partition.drained && (quiet || quiet_)) {
        partition.drained = true;
        flush();
        if (!strategy_stopping_) tell_watermarks();
        source_.drained(partition.assignment);
    } else if (partition.phase == Phase::gone && quiet) {
        partitions_.erase(partition.assignment.get());
    }
}

// ---------------------------------------------------------------- now and then

void Consumer::Impl::tell_watermarks() {
    if (!commits_positions_) return;
    for (const brokers::AssignmentState& state : source_.state()) {
        HeldPartition* const partition = find(state.assignment);
        if (partition == nullptr || !state.begun) continue;
        if (!partition->unread.empty() && partition->phase == Phase::begun)
            take_passed(*partition, std::exchange(partition->delivered_to, state.position));
        if (state.committable == partition->told) continue;
        if (partition->phase != Phase::begun && partition->phase != Phase::leaving) continue;
        partition->told = state.committable;
        strategy_.watermark(state.assignment, state.committable);
    }
}

// One more pauses each time, those with most first: what is in hand already may arrive late.
void Consumer::Impl::check_parked() {
    const std::size_t parked = std::max(lanes_.parked(), in_store_);
    if (parked > options_.park_limit) {
        HeldPartition* most = nullptr;
        std::size_t most_parked = 0;
        for (const auto& [which, partition] : partitions_) {
            const std::size_t its = std::max(lanes_.parked(*which), partition->in_store);
            if (partition->phase != Phase::begun || partition->paused || its <= most_parked)
                continue;
            most = partition.get();
            most_parked = its;
        }
        if (most == nullptr) return;
        most->paused = true;
        source_.pause(most->assignment);
        alarm("park " + most->name(),
              "partition " + most->name() + " is paused: " + std::to_string(parked) +
                  " messages have failed or wait behind such (park_limit " +
                  std::to_string(options_.park_limit) + "); it goes on when half of them are done");
        count_partitions();
    } else if (parked <= options_.park_limit / 2 && counters_.paused_partitions > 0) {
        for (const auto& [which, partition] : partitions_) {
            if (!std::exchange(partition->paused, false)) continue;
            if (partition->phase == Phase::begun) source_.resume(partition->assignment);
            no_alarm("park " + partition->name());
        }
        count_partitions();
    }
}

void Consumer::Impl::count_partitions() {
    std::uint64_t held = 0, paused = 0;
    for (const auto& [which, partition] : partitions_) {
        if (partition->phase == Phase::gone) continue;
        ++held;
        paused += partition->paused ? 1 : 0;
    }
    counters_.partitions = held;
    counters_.paused_partitions = paused;
}

void Consumer::Impl::problem(const brokers::Problem& what) {
    const std::string where =
        what.partition ? what.partition->topic + "-" + std::to_string(what.partition->number) : "";
    using Kind = brokers::ProblemKind;
    switch (what.kind) {
        case Kind::notice:
            log::info("consumer.broker", {{"consumer", options_.name}, {"text", what.text}});
            return;
        case Kind::unreachable:
        case Kind::blocked:
            return alarm(what.kind == Kind::blocked ? "blocked" : "broker", what.text);
        case Kind::reachable:
        case Kind::unblocked:
            no_alarm(what.kind == Kind::unblocked ? "blocked" : "broker");
            log::info("consumer.broker", {{"consumer", options_.name}, {"text", what.text}});
            return;
        case Kind::topic:
        case Kind::no_offset:
        case Kind::out_of_range:
        case Kind::commit:
        case Kind::cancelled:
            return alarm("problem " + std::to_string(static_cast<int>(what.kind)) + " " + where,
                         what.text);
        case Kind::fatal:
            fatal_ = what.text;
            log::error("consumer.fatal", {{"consumer", options_.name}, {"text", what.text}});
            alarm("fatal", what.text);
            return show();
    }
}

}  // namespace semel::consumer
