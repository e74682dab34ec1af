// What runs in a consumer, and what became of it: dispatch, verdicts, dead letters.
#include <algorithm>

#include "base/assert.hpp"
#include "base/fault_point.hpp"
#include "consumer/consumer_impl.hpp"
#include "telemetry/log.hpp"

namespace semel::consumer {

using Phase = HeldPartition::Phase;
using Stage = LetterOnItsWay::Stage;

// ---------------------------------------------------------------- turns of the loop

void Consumer::Impl::wake() {
    if (std::exchange(turn_posted_, true)) return;
    on_loop([](Impl& impl) {
        impl.turn_posted_ = false;
        impl.turn();
    });
}

void Consumer::Impl::turn() {
    const base::SteadyTime at = now();
    flush();
    letters_due(at);
    copies_due(at);
    store_parked(at);
    take_out_finished(at);
    dispatch(at);
    gauges();
    arm(at);
}

// Receipts are given back together, once a turn.
void Consumer::Impl::flush() {
    if (settled_.empty()) return;
    source_.settle(settled_);
    settled_.clear();
    base::fault_point("consumer.settle.after");
}

// Only for what time alone changes: what is due already waits for something else (an answer, room
// in the strategy, a person), which wakes by itself.
void Consumer::Impl::arm(base::SteadyTime at) {
    base::SteadyTime next = base::SteadyTime::max();
    const auto consider = [&](base::SteadyTime when) {
        if (when > at) next = std::min(next, when);
    };
    if (may_start()) {
        consider(lanes_.next_due());
        consider(breaker_.next_probe());
        if (!suspects_.empty()) consider(suspects_at_);
    }
    if (!letters_due_.empty()) consider(letters_due_.front().first);
    if (!copies_due_.empty()) consider(copies_due_.front().first);
    if (next >= timer_at_) return;
    loop_.cancel(timer_);
    timer_at_ = next;
    timer_ = loop_.at(next, [self = shared_from_this()] {
        self->timer_at_ = base::SteadyTime::max();
        self->turn();
    });
}

void Consumer::Impl::tick() {
    tick_ = loop_.at(now() + tick_every, [self = shared_from_this()] { self->tick(); });
    if (strategy_stopping_) return;
    check_parked();
    store_parked(now());
    take_out_finished(now());
    tell_watermarks();
    for (const auto& [which, partition] : partitions_) {
        if (partition->phase == Phase::claiming && !stopping_ && now() >= partition->claim_at)
            claim(*partition);
    }
    gauges();
}

void Consumer::Impl::gauges() {
    constexpr auto relaxed = std::memory_order_relaxed;
    counters_.in_hand.store(lanes_.size(), relaxed);
    counters_.running.store(lanes_.running(), relaxed);
    counters_.waiting.store(lanes_.waiting(), relaxed);
    counters_.parked.store(lanes_.parked(), relaxed);
    counters_.in_store.store(in_store_, relaxed);
    const Message* const oldest = lanes_.oldest();
    const auto age =
        oldest == nullptr ? base::SteadyTime::duration::zero() : now() - oldest->received;
    counters_.watermark_age_ms.store(
        std::chrono::duration_cast<std::chrono::milliseconds>(age).count(), relaxed);
}

// ---------------------------------------------------------------- dispatch

bool Consumer::Impl::may_start() const {
    return !stopping_ && !paused_ && !draining_ && refused_.empty() && fatal_.empty();
}

void Consumer::Impl::dispatch(base::SteadyTime at) {
    if (!may_start() || alone_ != nullptr) return;
    const std::size_t allowed = breaker_.allowed(at, lanes_.running());
    if (allowed == 0) return;
    if (!suspects_.empty() && at >= suspects_at_) {
        // What runs ends first; meanwhile nothing starts.
        if (lanes_.running() > 0 || strategy_.capacity() == 0) return;
        if (run_suspect()) return;
    }
    const std::size_t room = std::min(allowed, strategy_.capacity());
    if (room == 0) return;
    std::vector<Message*> batch = breaker_.open() ? take_probe(at) : lanes_.take(room, at);
    if (!unreadable_.empty()) batch = without_unreadable(std::move(batch));
    if (batch.empty()) {
        // Nobody else wants the others' turn.
        if (!suspects_.empty() && lanes_.running() == 0) static_cast<void>(run_suspect());
        return;
    }
    if (breaker_.open()) probe_ = batch.front();
    run(std::move(batch), false);
}

// False: there is none whose lane lets it run; those that are not first come again with the others.
bool Consumer::Impl::run_suspect() {
    while (!suspects_.empty()) {
        Message& suspect = *suspects_.front();
        suspects_.pop_front();
        if (!Lanes::is_first(suspect)) {
            lanes_.again(suspect, base::SteadyTime::min());
            continue;
        }
        if (++suspects_run_ >= suspects_in_a_row) {
            suspects_run_ = 0;
            suspects_at_ = now() + others_turn;
        }
        lanes_.recall(suspect);
        alone_ = &suspect;
        if (breaker_.open()) probe_ = &suspect;
        run({&suspect}, true);
        return true;
    }
    suspects_run_ = 0;
    return false;
}

std::vector<Message*> Consumer::Impl::take_probe(base::SteadyTime at) {
    std::vector<Message*> out = lanes_.take(1, at);
    for (std::size_t left = spared_.size(); out.empty() && left > 0; --left) {
        lanes_.again(*spared_.front(), base::SteadyTime::min());
        spared_.pop_front();
        out = lanes_.take(1, at);
    }
    return out;
}

// Of one lane nothing runs behind one that cannot be read until that has its letter.
std::vector<Message*> Consumer::Impl::without_unreadable(std::vector<Message*> batch) {
    std::vector<Message*> out, dead;
    out.reserve(batch.size());
    std::uint64_t closed = 0;
    for (Message* const message : batch) {
        if (message->in_hand.unreadable) {
            dead.push_back(message);
            closed = message->lane;
        } else if (message->lane != 0 && message->lane == closed) {
            lanes_.again(*message, base::SteadyTime::min());
        } else {
            out.push_back(message);
        }
    }
    for (Message* const message : dead) {
        ++message->runs;
        const Unreadable& why = unreadable_.at(message->in_hand.arrival);
        became(*message, Dead{.why = why.why, .reason = why.reason, .token = {}}, false);
    }
    // The breaker may just have opened because of them.
    if (!dead.empty() && breaker_.open() && !out.empty()) {
        for (Message* const message : out) lanes_.again(*message, base::SteadyTime::min());
        out.clear();
    }
    if (!dead.empty()) wake();
    return out;
}

void Consumer::Impl::run(std::vector<Message*> batch, bool alone) {
    for (Message* const message : batch) {
        ++message->runs;
        ++message->in_hand.partition->running;
    }
    strategy_.run(std::move(batch), alone, answer_);
}

// ---------------------------------------------------------------- verdicts

void Consumer::Impl::answered(Message& message, Verdict verdict) {
    SEMEL_ASSERT(message.in_hand.state == InHand::State::running, "a run is answered once");
    HeldPartition& partition = *message.in_hand.partition;
    --partition.running;
    const bool probe = &message == probe_;
    if (probe) probe_ = nullptr;
    if (&message == alone_) alone_ = nullptr;
    if (!std::holds_alternative<Held>(verdict)) message.in_hand.held = 0;
    std::visit([&](const auto& what) { became(message, what, probe); }, verdict);
    if (partition.phase != Phase::begun) check_left(partition);
    if (stopping_ || draining_) check_quiet();
    wake();
}

void Consumer::Impl::probed(bool probe, Breaker::Probe how) {
    if (!probe || !breaker_.probed(how, now())) return;
    log::info("breaker.closed", {{"consumer", options_.name}});
    breaker_closed();
}

void Consumer::Impl::breaker_closed() {
    no_alarm("breaker");
    for (Message* const message : spared_) lanes_.again(*message, base::SteadyTime::min());
    spared_.clear();
    show();
}

void Consumer::Impl::breaker_opened() {
    counters_.breaker_opened++;
    log::warn("breaker.opened", {{"consumer", options_.name}, {"reason", breaker_.reason()}});
    alarm("breaker", "nothing runs but a probe now and then: " + breaker_.reason());
    show();
    // Not from within an answer of the strategy's.
    on_loop([](Impl& impl) {
        if (impl.breaker_.open() && !impl.strategy_stopping_) impl.strategy_.hold_back();
    });
}

void Consumer::Impl::became(Message& message, Applied, bool probe) {
    counters_.applied.fetch_add(1, std::memory_order_relaxed);
    probed(probe, Breaker::Probe::applied);
    static_cast<void>(breaker_.decided(false, {}));
    settle(message);
}

void Consumer::Impl::became(Message& message, Duplicate, bool probe) {
    counters_.duplicates.fetch_add(1, std::memory_order_relaxed);
    probed(probe, Breaker::Probe::duplicate);
    static_cast<void>(breaker_.decided(false, {}));
    settle(message);
}

void Consumer::Impl::became(Message& message, const Retry& retry, bool probe) {
    // One that is only asked for too early (a restart finds it not due) says nothing.
    if (retry.charged) {
        counters_.retries++;
        probed(probe, Breaker::Probe::failed);
    }
    log::debug(
        "message.retry",
        {{"consumer", options_.name}, {"delay_ms", retry.delay.count()}, {"reason", retry.reason}});
    if (options_.copies != nullptr && message.in_hand.partition->phase == Phase::begun) {
        if (const auto delay = waits_at_broker(options_.copies->rules(), retry))
            return copy(message, retry, *delay);
    }
    const bool stays = message.in_hand.partition->phase == Phase::begun;
    again(message, now() + retry.delay);
    if (!stays || options_.parking == nullptr || retry.delay < options_.park_from) return;
    for (Message* one = &message; one != nullptr; one = one->in_hand.after) park(*one);
}

void Consumer::Impl::became(Message& message, const Busy& busy, bool) {
    counters_.busy++;
    again(message, now() + std::max(busy.remaining, busy_wait_min));
}

void Consumer::Impl::became(Message& message, Held, bool) {
    const std::uint32_t held = ++message.in_hand.held;
    const bool stays = message.in_hand.partition->phase == Phase::begun;
    again(message, held <= held_free
                       ? base::SteadyTime::min()
                       : now() + std::min(held_wait * (held - held_free), held_wait_max));
    if (stays && options_.parking != nullptr) park_behind_first(message);
}

void Consumer::Impl::became(Message& message, Suspect suspect, bool) {
    counters_.suspects++;
    if (message.in_hand.partition->phase != Phase::begun) return release(message);
    lanes_.set_aside(message);
    // Those that died alone least often come first: kills from outside then hit one after the other
    // and charge none of them much.
    message.in_hand.lone_deaths = suspect.lone_deaths;
    const auto behind = std::find_if(suspects_.begin(), suspects_.end(), [&](const Message* other) {
        return other->in_hand.lone_deaths > suspect.lone_deaths;
    });
    suspects_.insert(behind, &message);
}

void Consumer::Impl::became(Message& message, const Ill& ill, bool) {
    if (breaker_.ill(ill.reason, now()))
        breaker_opened();
    else
        show();
    again(message, base::SteadyTime::min());
}

void Consumer::Impl::became(Message& message, Fenced, bool) {
    // What is given back because its partition leaves is no sign of another owner.
    if (message.in_hand.partition->phase != Phase::leaving && !stopping_) counters_.fenced++;
    again(message, now() + fenced_wait);
}

void Consumer::Impl::became(Message& message, const Dead& dead, bool probe) {
    const HeldPartition& partition = *message.in_hand.partition;
    if (partition.phase == Phase::gone) return release(message);
    if (dead.letter_known) return settle(message);
    const bool was_open = breaker_.open();
    if (breaker_.decided(true, now())) {
        if (!was_open) breaker_opened();
        if (partition.phase != Phase::begun) return release(message);
        lanes_.set_aside(message);
        spared_.push_back(&message);
        return;
    }
    // What opened for another reason learns from a decided message that this is over.
    probed(probe, Breaker::Probe::failed);
    die(message, dead);
}

// To run again, where its partition is still to be served.
void Consumer::Impl::again(Message& message, base::SteadyTime when) {
    if (message.in_hand.partition->phase != Phase::begun) return release(message);
    lanes_.again(message, when);
}

void Consumer::Impl::settle(Message& message) {
    if (message.in_hand.parked == InHand::Parked::stored)
        take_out(message.delivery.partition(), message.delivery.position());
    else
        settled_.push_back(std::move(message.delivery.receipt));
    release(message);
}

// Finished, or void.
void Consumer::Impl::release(Message& message) {
    lanes_.finished(message);
    forget(message);
}

void Consumer::Impl::forget(Message& message) {
    const std::unique_ptr<Message> own(&message);
    if (message.in_hand.unreadable) unreadable_.erase(message.in_hand.arrival);
    if (!letters_.empty()) letters_.erase(message.in_hand.arrival);
    if (!copies_.empty()) copies_.erase(message.in_hand.arrival);
    if (message.in_hand.parked != InHand::Parked::no) not_parked(message);
}

// ---------------------------------------------------------------- dead letters

// The message runs no more; its lane waits until its letter is confirmed.
void Consumer::Impl::die(Message& message, const Dead& dead) {
    lanes_.set_aside(message);
    LetterOnItsWay& letter = letters_[message.in_hand.arrival];
    letter.message = &message;
    letter.dead = dead;
    letter.died_ms = loop_.clock().wall_us() / 1000;
    log::warn("message.dead", {{"consumer", options_.name},
                               {"class", name_of(dead.why)},
                               {"partition", message.in_hand.partition->name()},
                               {"position", message.delivery.position()},
                               {"failed_runs", dead.failed_runs},
                               {"reason", dead.reason}});
    if (!options_.letters_stop) return publish(letter);
    letter.stage = Stage::stopped;
    alarm("letters", "partition " + message.in_hand.partition->name() + ", position " +
                         std::to_string(message.delivery.position()) + ": given up (" +
                         name_of(dead.why) + ": " + dead.reason +
                         "), and dead_letter: stop keeps what is behind it waiting; "
                         "resume the consumer to run it again");
}

void Consumer::Impl::publish(LetterOnItsWay& letter) {
    letter.stage = Stage::publishing;
    const Message& message = *letter.message;
    ++message.in_hand.partition->letters;
    ++letters_out_;
    const Dead& dead = letter.dead;
    deadletter::Circumstances about{.consumer = options_.name,
                                    .group = options_.group,
                                    .message_id = message.id,
                                    .key = message.key,
                                    .generation = dead.generation,
                                    .error_class = name_of(dead.why),
                                    .error_message = dead.reason,
                                    .stack_trace = {},
                                    .failed_runs = dead.failed_runs,
                                    .died_ms = letter.died_ms,
                                    .first_failure_ms = dead.first_failure_ms};
    outlet_->publish(
        message.delivery, about,
        [self = shared_from_this(), which = message.in_hand.arrival](base::Result<void> result) {
            self->on_loop(
                [which, result = std::move(result)](Impl& impl) { impl.published(which, result); });
        });
}

// Nobody holds the letter any more. Null: nobody wants it any more either.
LetterOnItsWay* Consumer::Impl::letter_back(std::uint64_t which) {
    --letters_out_;
    LetterOnItsWay& letter = letters_.at(which);
    HeldPartition& partition = *letter.message->in_hand.partition;
    --partition.letters;
    if (partition.phase != Phase::gone) return &letter;
    release(*letter.message);
    check_left(partition);
    return nullptr;
}

// Again after letter_retry; of a partition that leaves it is the next owner's.
void Consumer::Impl::letter_later(std::uint64_t which, LetterOnItsWay& letter, Stage stage) {
    HeldPartition& partition = *letter.message->in_hand.partition;
    if (partition.phase != Phase::begun) {
        release(*letter.message);
        return check_left(partition);
    }
    letter.stage = stage;
    letters_due_.emplace_back(now() + options_.letter_retry, which);
}

void Consumer::Impl::letters_due(base::SteadyTime at) {
    while (!letters_due_.empty() && letters_due_.front().first <= at) {
        const auto found = letters_.find(letters_due_.front().second);
        letters_due_.pop_front();
        if (found == letters_.end() || strategy_stopping_) continue;
        if (found->second.stage == Stage::due)
            publish(found->second);
        else if (found->second.stage == Stage::mark_due)
            mark(found->second);
    }
}

void Consumer::Impl::published(std::uint64_t which, const base::Result<void>& result) {
    if (LetterOnItsWay* const letter = letter_back(which); letter != nullptr) {
        if (!result) {
            counters_.letters_failed++;
            alarm("letters", "dead letters cannot be written to " + outlet_->target().name() +
                                 ": " + result.error().detail +
                                 "; their messages and what is behind them wait until they can");
            letter_later(which, *letter, Stage::due);
        } else {
            base::fault_point("consumer.letter.after");
            no_alarm("letters");
            counters_.dead.at(static_cast<std::size_t>(letter->dead.why))++;
            Message& message = *letter->message;
            HeldPartition& partition = *message.in_hand.partition;
            // What could not be read has no record.
            if (message.in_hand.unreadable) {
                settle(message);
                check_left(partition);
            } else {
                mark(*letter);
            }
        }
    }
    check_quiet();
    wake();
}

void Consumer::Impl::mark(LetterOnItsWay& letter) {
    letter.stage = Stage::marking;
    ++letter.message->in_hand.partition->letters;
    ++letters_out_;
    strategy_.letter_published(*letter.message, letter.dead,
                               [weak = weak_from_this(), which = letter.message->in_hand.arrival](
                                   const base::Result<void>& result) {
                                   if (const auto self = weak.lock(); self && !self->over_)
                                       self->marked(which, result);
                               });
}

void Consumer::Impl::marked(std::uint64_t which, const base::Result<void>& result) {
    if (LetterOnItsWay* const letter = letter_back(which); letter != nullptr) {
        if (!result) {
            alarm("letters", "a dead letter is written, but that cannot be recorded: " +
                                 result.error().detail + "; it is tried again");
            letter_later(which, *letter, Stage::mark_due);
        } else {
            HeldPartition& partition = *letter->message->in_hand.partition;
            settle(*letter->message);
            check_left(partition);
        }
    }
    check_quiet();
    wake();
}

}  // namespace semel::consumer
