// A handler, and what is written of how it ended.
#include "consumer/strategies/recorded_impl.hpp"

#include <algorithm>

#include "base/fault_point.hpp"

namespace semel::consumer {

namespace {

/// A claim must have this part of its lease left when its handler starts.
constexpr int margin_part = 5;
/// Of what a handler says about its failure, this much is kept.
constexpr std::size_t reason_max_bytes = 1024;
/// One long call makes the estimate longer faster than short ones make it shorter.
constexpr int longer_part = 2;
constexpr int shorter_part = 16;

template <class... F>
struct Overloaded : F... {
    using F::operator()...;
};

}  // namespace

// ---------------------------------------------------------------- handlers

void Recorded::pump() {
    if (ready_.empty()) return;
    const SteadyTime now = loop_.now();
    while (has_slot() && !ready_.empty() && !stopping_) {
        const RunAt next = ready_.front();
        ready_.pop_front();
        if (!next.valid() || next.run->state != State::ready) continue;
        Run& run = *next.run;
        if (now > run.asked_at + (options_.lease - options_.lease / margin_part)) {
            give_back(run, Held{});
            continue;
        }
        ++running_;
        if (!options_.hold_unknown) {
            call(run, now);
            continue;
        }
        enter(run, State::starting);
        send(run);
    }
}

void Recorded::start_answered(Run& run, const Answered& result) {
    --running_;
    if (!result) return give_back(run, ill(result.error()));
    if (!std::holds_alternative<core::Applied>(result->outcome)) return decide(run, Held{});
    const SteadyTime now = loop_.now();
    if (stopping_ || ill_ > 0 ||
        now > run.asked_at + (options_.lease - options_.lease / margin_part))
        return give_back(run, Held{});
    ++running_;
    call(run, now);
}

void Recorded::call(Run& run, SteadyTime now) {
    enter(run, State::running);
    run.ran = true;
    if (run.may_double) ++counters_.unknown_outcomes;
    run.started = now;
    run.keeper.emplace(run.asked_at, options_.lease, run.token, run.nonce);
    Attempt attempt{.number = run.failed_runs + 1, .token = run.token};
    if (run.record && !options_.hold_unknown)
        attempt.number = run.record->attempt - run.record->uncharged_attempts;
    base::fault_point("consumer.effect.before");
    handler_.handle(*run.message, attempt, [gate = gate_, at = &run](HandlerOutcome outcome) {
        const std::lock_guard lock(gate->mutex);
        if (gate->owner == nullptr) return;
        gate->ended.emplace_back(at, std::move(outcome));
        if (gate->ended.size() > 1) return;
        gate->owner->loop_.post([gate] {
            if (gate->owner != nullptr) gate->owner->handlers_ended();
        });
    });
}

void Recorded::handlers_ended() {
    std::vector<std::pair<Run*, HandlerOutcome>> ended;
    {
        const std::lock_guard lock(gate_->mutex);
        ended.swap(gate_->ended);
    }
    const SteadyTime now = loop_.now();
    for (auto& [run, outcome] : ended) {
        --running_;
        if (run->state == State::abandoned) {
            decide(*run, Held{});
            continue;
        }
        learn_duration(now - run->started);
        handler_ended(*run, std::move(outcome));
    }
    after();
}

void Recorded::learn_duration(std::chrono::nanoseconds took) {
    took = std::max(took, std::chrono::nanoseconds{1000});
    if (usual_.count() == 0) {
        usual_ = took;
    } else {
        usual_ += (took - usual_) / (took > usual_ ? longer_part : shorter_part);
    }
}

void Recorded::handler_ended(Run& run, HandlerOutcome outcome) {
    if (!std::holds_alternative<Handled>(outcome)) hold_rest(run);
    std::visit(
        Overloaded{
            [&](Handled& end) {
                base::fault_point("consumer.effect.after");
                if (results_ != nullptr) run.result = std::move(end.answer);
                if (run.result && run.result->body.size() > answer_max_bytes) {
                    hold_rest(run);
                    ++run.failed_runs;
                    return give_up(run, DeadClass::fatal,
                                   "it was handled, and its answer of " +
                                       std::to_string(run.result->body.size()) +
                                       " bytes is not published: more than " +
                                       std::to_string(answer_max_bytes) +
                                       " are not kept; answer with where the rest lies");
                }
                enter(run, State::completing);
                send(run);
            },
            [&](HandledNotYet& end) {
                ++counters_.not_yet;
                failed(run, code_not_yet, std::move(end.reason), end.after);
            },
            [&](HandledFailed& end) { failed(run, code_failed, std::move(end.reason), end.after); },
            [&](HandledFatal& end) {
                ++run.failed_runs;
                give_up(run, DeadClass::fatal, std::move(end.reason));
            },
            [&](HandledUnknown& end) {
                ++counters_.unknown_outcomes;
                if (!options_.hold_unknown)
                    return failed(run, code_unknown, std::move(end.reason), {});
                ++run.failed_runs;
                fail(run, core::Certainty::unknown, code_of(code_unknown, run.failed_runs, true),
                     std::move(end.reason));
            },
            [&](HandlerIll& end) {
                ++ill_;
                give_back(run, Ill{std::move(end.reason)});
                hold_unstarted();
            },
        },
        outcome);
}

// ---------------------------------------------------------------- failures

void Recorded::failed(Run& run, std::string_view code, std::string reason, milliseconds asked_for) {
    ++run.failed_runs;
    const double random = std::uniform_real_distribution<double>(0.0, 1.0)(random_);
    const auto wait = options_.retry.wait_after(run.failed_runs, asked_for, random);
    if (!wait) return give_up(run, DeadClass::attempts, std::move(reason));
    run.delay = *wait;
    run.verdict = Retry{.delay = *wait,
                        .reason = reason,
                        .charged = true,
                        .step = options_.retry.delay_after(run.failed_runs)};
    fail(run, options_.hold_unknown ? core::Certainty::not_processed : core::Certainty::unknown,
         code_of(code, run.failed_runs, options_.hold_unknown), std::move(reason));
}

void Recorded::give_up(Run& run, DeadClass why, std::string reason) {
    run.giving_up = why;
    run.delay = milliseconds{0};
    // What did not run now (a crash, an interrupted giving up) is not charged as another failed
    // run.
    fail(run, run.ran ? core::Certainty::unknown : core::Certainty::not_processed,
         code_of(name_of(why), run.failed_runs, options_.hold_unknown), std::move(reason));
}

void Recorded::fail(Run& run, core::Certainty certainty, std::string code, std::string reason) {
    if (reason.size() > reason_max_bytes) reason.resize(reason_max_bytes);
    run.certainty = certainty;
    run.failure = {.code = std::move(code), .message = std::move(reason), .http_status = 0};
    enter(run, State::failing);
    send(run);
}

void Recorded::fail_written(Run& run, const Answered& result) {
    if (!result) return again(run);
    if (const auto* fenced = std::get_if<core::Fenced>(&result->outcome))
        return decide(run, elsewhere(after_fenced(fenced->record)));
    const core::Record& record = *std::get<core::Applied>(result->outcome).record;
    run.token = record.token;
    run.again = milliseconds{0};
    if (record.status == core::Status::dead)
        return decide(run, dead_of(record, options_.hold_unknown, DeadClass::attempts));
    if (!run.giving_up) {
        if (record.status == core::Status::unknown)
            return decide(run, dead_of(record, options_.hold_unknown, DeadClass::unknown));
        return decide(run, std::move(run.verdict));
    }
    enter(run, record.status == core::Status::unknown ? State::resolving : State::exhausting);
    if (run.state == State::exhausting) run.nonce = fresh_nonce();
    send(run);
}

void Recorded::exhausted(Run& run, const Answered& result) {
    if (!result || std::holds_alternative<core::Late>(result->outcome)) return again(run);
    if (const auto* granted = std::get_if<core::Granted>(&result->outcome)) {
        // The store has forgotten the message, or a person has decided otherwise.
        run.token = granted->token;
        run.record = nullptr;
        return give_back(run, Held{});
    }
    decide(run, elsewhere(refused(run, result->outcome)));
}

// ---------------------------------------------------------------- successes

void Recorded::completed(Run& run, const Answered& result) {
    if (!result) return again(run);
    run.again = milliseconds{0};
    if (std::holds_alternative<core::Applied>(result->outcome)) {
        if (run.result) return publish(run);
        base::fault_point("consumer.record.after");
        return decide(run, Applied{});
    }
    const core::RecordPtr& record = std::get<core::Fenced>(result->outcome).record;
    if (!record) {
        // The store lost the claim (a failover): made anew, so that what is done is known to
        // be.
        run.nonce = fresh_nonce();
        run.keeper.reset();
        enter(run, State::reclaiming);
        return send(run);
    }
    overtaken(run, after_fenced(record));
}

void Recorded::reclaimed(Run& run, const Answered& result) {
    if (!result || std::holds_alternative<core::Late>(result->outcome)) return again(run);
    if (const auto* granted = std::get_if<core::Granted>(&result->outcome)) {
        run.token = granted->token;
        enter(run, State::completing);
        return send(run);
    }
    const bool done = std::holds_alternative<core::Replay>(result->outcome);
    overtaken(run, done ? refused(run, result->outcome) : Verdict(Held{}));
}

void Recorded::overtaken(Run& run, Verdict verdict) {
    if (!std::holds_alternative<Duplicate>(verdict)) ++counters_.unknown_outcomes;
    decide(run, elsewhere(std::move(verdict)));
}

void Recorded::publish(Run& run) {
    run.verdict = Applied{};
    const Results::Group group = std::exchange(run.result_group, 0);
    HandlerAnswerPtr answer = std::move(run.result);
    results_->publish_recorded(*run.message, std::move(answer), group, when_published(run));
}

void Recorded::publish_found(Run& run, const core::Record& record, core::StoreTime at) {
    run.verdict = Duplicate{};
    HandlerAnswerPtr answer = std::move(run.result);
    results_->publish_found(*run.message, std::move(answer), record, at, when_published(run));
}

Results::Done Recorded::when_published(Run& run) {
    run.keeper.reset();
    enter(run, State::publishing);
    return [gate = gate_, at = RunAt(&run)](std::optional<Verdict> ended) {
        if (gate->owner == nullptr) return;
        if (!at.valid() || at.run->state != State::publishing) return;
        if (!ended) base::fault_point("consumer.record.after");
        gate->owner->decide(*at.run, ended ? std::move(*ended) : std::move(at.run->verdict));
    };
}

}  // namespace semel::consumer
