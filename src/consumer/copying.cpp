// Failed messages that wait at the broker: their copies, from the verdict to the receipt. Their
// records say FAILED, and when they are due, before the first of these functions is called: a crash
// in between leaves the original, or the original and a copy, of which one runs.
#include "base/fault_point.hpp"
#include "consumer/consumer_impl.hpp"
#include "telemetry/log.hpp"

namespace semel::consumer {

using Phase = HeldPartition::Phase;

void Consumer::Impl::copy(Message& message, const Retry& retry, std::size_t delay) {
    lanes_.set_aside(message);
    CopyOnItsWay& one = copies_[message.in_hand.arrival];
    one.message = &message;
    one.delay = delay;
    one.due = now() + retry.delay;
    // What a handler asked for beyond the delay is waited for in hand when the copy is back, so
    // that copies of one delay are due in their order.
    one.due_ms = loop_.clock().wall_us() / 1000 + options_.copies->rules().delays.at(delay).count();
    publish(one);
}

void Consumer::Impl::publish(CopyOnItsWay& copy) {
    base::fault_point("consumer.copy.before");
    copy.publishing = true;
    const Message& message = *copy.message;
    ++message.in_hand.partition->letters;
    ++letters_out_;
    options_.copies->publish(
        message.delivery, copy.delay, copy.due_ms,
        [self = shared_from_this(), which = message.in_hand.arrival](base::Result<void> result) {
            self->on_loop(
                [which, result = std::move(result)](Impl& impl) { impl.copied(which, result); });
        });
}

void Consumer::Impl::copied(std::uint64_t which, const base::Result<void>& result) {
    --letters_out_;
    CopyOnItsWay& copy = copies_.at(which);
    copy.publishing = false;
    Message& message = *copy.message;
    HeldPartition& partition = *message.in_hand.partition;
    --partition.letters;
    if (result) {
        base::fault_point("consumer.copy.after");
        no_alarm("copies");
        counters_.copies.fetch_add(1, std::memory_order_relaxed);
    }
    if (partition.phase == Phase::gone) {
        release(message);
        check_left(partition);
    } else if (result) {
        settle(message);
        check_left(partition);
    } else {
        not_copied(which, result.error());
    }
    check_quiet();
    wake();
}

// Nothing is lost by it: the message is still in hand. It is published again until it is due, and
// then it runs without having been away.
void Consumer::Impl::not_copied(std::uint64_t which, const base::Error& why) {
    CopyOnItsWay& copy = copies_.at(which);
    Message& message = *copy.message;
    HeldPartition& partition = *message.in_hand.partition;
    counters_.copies_failed++;
    alarm("copies", "failed messages cannot be written to " +
                        options_.copies->target(message.delivery, copy.delay) + ": " + why.detail +
                        "; they wait here, unsettled, until they can or are due");
    if (partition.phase != Phase::begun) {
        release(message);
        return check_left(partition);
    }
    // One that can never be written (too large) waits here for the whole of its delay.
    const bool for_good = why.code == base::ErrorCode::invalid_argument;
    if (!for_good && now() + options_.letter_retry < copy.due) {
        copies_due_.emplace_back(now() + options_.letter_retry, which);
        return;
    }
    const base::SteadyTime due = copy.due;
    copies_.erase(which);
    lanes_.again(message, due);
}

void Consumer::Impl::copies_due(base::SteadyTime at) {
    while (!copies_due_.empty() && copies_due_.front().first <= at) {
        const auto found = copies_.find(copies_due_.front().second);
        copies_due_.pop_front();
        if (found != copies_.end() && !found->second.publishing && !strategy_stopping_)
            publish(found->second);
    }
}

}  // namespace semel::consumer
