// What the consumer calls, and what time does.
#include "consumer/strategies/recorded_impl.hpp"

#include <algorithm>

#include "base/hash.hpp"

namespace semel::consumer {

namespace {

/// Messages whose end is being written, beyond those in hand; then nothing more is taken.
constexpr std::size_t writing_max = 4096;
/// After cancel_all, before what still runs is abandoned.
constexpr milliseconds cancel_patience{1000};

}  // namespace

Recorded::Recorded(runtime::Loop& loop, RecordedOptions options, Records& records, Handler& handler,
                   ConsumerCounters& counters, Results* results)
    : loop_(loop),
      options_(std::move(options)),
      records_(records),
      handler_(handler),
      counters_(counters),
      results_(results),
      gate_(std::make_shared<Gate>()),
      queue_(
          loop, records,
          [this](const RecordQueue::Tag& tag, Answered result) {
              answered(tag, std::move(result));
          },
          [this] { after(); }) {
    gate_->owner = this;
    const std::string seed = base::random_bytes(2 * sizeof nonce_base_);
    std::memcpy(&nonce_base_, seed.data(), sizeof nonce_base_);
    std::uint64_t random_seed = 0;
    std::memcpy(&random_seed, seed.data() + sizeof nonce_base_, sizeof random_seed);
    random_.seed(random_seed);
    if (results_ == nullptr) return;
    results_->over = [gate = gate_] {
        if (gate->owner != nullptr) gate->owner->after();
    };
}

Recorded::~Recorded() {
    {
        const std::lock_guard lock(gate_->mutex);
        gate_->owner = nullptr;
    }
    for (const runtime::TimerId timer : {tick_timer_, stop_timer_}) loop_.cancel(timer);
    for (const Run& run : pool_.all()) loop_.cancel(run.timer);
    for (const auto& back : backs_) loop_.cancel(back->timer);
}

// ---------------------------------------------------------------- Strategy

std::size_t Recorded::capacity() const {
    const std::size_t limit = options_.concurrency + ahead();
    const bool full = stopping_ || ill_ > 0 || in_hand_ >= limit ||
                      pool_.used() >= limit + writing_max ||
                      // In large portions, unless a handler would stand idle.
                      (in_hand_ >= options_.concurrency && limit - in_hand_ < limit / 2);
    if (full) capacity_wanted_ = true;
    return full ? 0 : limit - in_hand_;
}

void Recorded::run(std::vector<Message*> messages, bool alone, const Answer& answer) {
    capacity_wanted_ = true;
    const auto shared = std::make_shared<const Answer>(answer);
    std::vector<RunAt> firsts;
    firsts.reserve(messages.size());
    last_of_lane_.clear();
    for (Message* message : messages) {
        Run& run = pool_.take();
        run.message = message;
        run.answer = shared;
        run.alone = alone;
        enter(run, State::waiting);
        if (message->lane != 0) {
            const auto [last, is_first] = last_of_lane_.try_emplace(message->lane, &run);
            if (!is_first) {
                last->second->next = &run;
                last->second = &run;
                continue;
            }
        }
        run.first = true;
        firsts.emplace_back(&run);
    }
    arm_tick();
    for (const RunAt& first : firsts) {
        if (!first.valid()) continue;
        if (!stopping_) {
            claim(*first.run);
            continue;
        }
        hold_rest(*first.run);
        if (first.valid()) decide(*first.run, Held{});
    }
}

void Recorded::leaving(const brokers::AssignmentPtr& assignment) {
    const auto of_it = [&](const Run* run) {
        return run->message->delivery.receipt.assignment == assignment;
    };
    std::vector<RunAt> held;
    for (Run& run : pool_.all()) {
        if (!live(run)) continue;
        if (run.next != nullptr && of_it(run.next)) detach(run, held);
        if (run.first && unstarted(run) && of_it(&run)) {
            detach(run, held);
            held.emplace_back(&run);
        }
    }
    for (const RunAt& one : held)
        if (one.valid()) hold(*one.run);
    after();
}

void Recorded::letter_published(const Message& message, const Dead& dead,
                                std::function<void(base::Result<void>)> done) {
    auto& letter = *letters_.emplace_back(std::make_unique<Letter>(std::move(done)));
    const bool marked =
        dead.token.value != 0 && (dead.why == DeadClass::attempts ||
                                  dead.why == DeadClass::crashes || dead.why == DeadClass::fatal);
    if (!marked) {
        loop_.post([gate = gate_, at = &letter] {
            if (gate->owner != nullptr) gate->owner->letter_marked(*at, {});
        });
        return;
    }
    queue_.push(step_on(message, core::LetterPublished{dead.token}), {&letter, Kind::letter});
}

void Recorded::stop(milliseconds within, std::function<void()> done) {
    stopping_ = true;
    stopped_ = std::move(done);
    const SteadyTime until = loop_.now() + within;
    stop_timer_ = loop_.at(until, [this] {
        handler_.cancel_all();
        stop_timer_ = loop_.at(loop_.now() + cancel_patience, [this] {
            stop_timer_ = 0;
            abandon();
        });
    });
    hold_unstarted();
    loop_.post([gate = gate_] {
        if (gate->owner != nullptr) gate->owner->after();
    });
}

std::string Recorded::promise() const {
    std::string out = "Never lost: a message is settled only once its end is recorded in " +
                      records_.name() + ", or its dead letter is confirmed.";
    out += options_.hold_unknown
               ? " Never run again where a process died in its handler: it becomes a dead "
                 "letter of class unknown."
               : " Its effect is doubled only where a process died, or was cut off from the "
                 "store for longer than the lease, while its handler ran; that is counted.";
    if (results_ != nullptr) out += " " + results_->promise();
    if (!options_.store_promise.empty()) out += " " + options_.store_promise;
    return out;
}

// ---------------------------------------------------------------- time

void Recorded::arm_tick() {
    if (tick_timer_ != 0) return;
    const milliseconds every =
        std::min(options_.lease / core::LeaseKeeper::ticks_per_lease, options_.patience / 2);
    tick_timer_ = loop_.at(loop_.now() + every, [this] {
        tick_timer_ = 0;
        tick();
    });
}

void Recorded::tick() {
    const SteadyTime now = loop_.now();
    std::vector<RunAt> late;
    std::size_t unrecorded = 0;
    for (Run& run : pool_.all()) {
        if (!live(run)) continue;
        if (!is_being_written(run.state))
            run.writing_since = {};
        else if (run.writing_since == SteadyTime{})
            run.writing_since = now;
        else if (now - run.writing_since >= trouble_after)
            ++unrecorded;
        if (run.keeper) renew(run, now);
        if (run.state == State::asking && now >= run.asked_first + options_.patience)
            late.emplace_back(&run);
    }
    for (const RunAt& one : late)
        if (one.valid() && one.run->state == State::asking)
            unanswered(*one.run,
                       "no answer within " + std::to_string(options_.patience.count()) + " ms");
    tell_trouble(unrecorded);
    if (pool_.used() != 0) arm_tick();
    after();
}

void Recorded::tell_trouble(std::size_t unrecorded) {
    if ((unrecorded != 0) == troubled_) return;
    troubled_ = unrecorded != 0;
    if (!on_trouble) return;
    on_trouble(troubled_ ? records_.name() + " does not take how " + std::to_string(unrecorded) +
                               " message(s) ended; they stay unsettled, and it is tried again"
                         : std::string());
}

void Recorded::renew(Run& run, SteadyTime now) {
    if (run.keeper->asking() && now >= run.renewal_sent + options_.lease / 3)
        run.keeper->step(now, core::LeaseUnanswered{});
    if (run.keeper->step(now, core::LeaseTick{}) != core::LeaseAction::renew) return;
    run.renewal_sent = now;
    ++run.out;
    queue_.push(step_on(*run.message, core::Renew{run.token, run.nonce, options_.lease}),
                {&run, Kind::renewal});
}

void Recorded::renewed(Run& run, const Answered& result) {
    if (!run.keeper || !run.keeper->asking()) return;
    core::LeaseEvent event = core::LeaseRenewed{};
    if (!result) {
        event = core::LeaseUnanswered{};
    } else if (const auto* fenced = std::get_if<core::Fenced>(&result->outcome)) {
        event = core::LeaseRefused{fenced->record};
    }
    // Overtaken: not renewed any more; what its handler says will be refused.
    run.keeper->step(loop_.now(), event);
}

// ---------------------------------------------------------------- the rest

void Recorded::after() {
    pump();
    if (capacity_wanted_ && on_capacity && capacity() > 0) {
        capacity_wanted_ = false;
        on_capacity();
    }
    if (stopping_ && pool_.used() == 0 && backs_.empty()) stopped();
}

void Recorded::abandon() {
    std::vector<RunAt> rest;
    for (Run& run : pool_.all()) {
        if (!live(run)) continue;
        run.keeper.reset();
        if (run.state == State::running) {
            enter(run, State::abandoned);
        } else {
            rest.emplace_back(&run);
        }
    }
    for (const RunAt& one : rest)
        if (one.valid()) decide(*one.run, Held{});
    stopped();
}

void Recorded::stopped() {
    if (!stopped_) return;
    loop_.cancel(std::exchange(stop_timer_, 0));
    std::exchange(stopped_, {})();
}

std::unique_ptr<Strategy> make_recorded(runtime::Loop& loop, RecordedOptions options,
                                        Records& records, Handler& handler,
                                        ConsumerCounters& counters, Results* results) {
    return std::make_unique<Recorded>(loop, std::move(options), records, handler, counters,
                                      results);
}

}  // namespace semel::consumer
