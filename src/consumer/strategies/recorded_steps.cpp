// Verdicts and lanes, and the steps that are sent to the records.
#include "consumer/strategies/recorded_impl.hpp"

#include <algorithm>

#include "base/fault_point.hpp"

namespace semel::consumer {

// ---------------------------------------------------------------- verdicts and lanes

void Recorded::decide(Run& run, Verdict verdict) {
    run.verdict = std::move(verdict);
    enter(run, State::decided);
    if (run.first) advance(run);
}

void Recorded::advance(Run& first) {
    for (Run* run = &first;;) {
        if (run->state == State::waiting) return claim(*run);
        if (run->state == State::ready) return make_ready(*run);
        if (run->state != State::decided) return;
        const bool goes_on = std::holds_alternative<Applied>(run->verdict) ||
                             std::holds_alternative<Duplicate>(run->verdict);
        std::vector<RunAt> rest;
        if (!goes_on) detach(*run, rest);
        const RunAt next(run->next);
        if (next.run != nullptr) next.run->first = true;
        tell(*run);
        for (const RunAt& one : rest)
            if (one.valid()) hold(*one.run);
        if (!next.valid()) return;
        run = next.run;
    }
}

void Recorded::tell(Run& run) {
    Message& message = *run.message;
    const auto answer = std::move(run.answer);
    const Verdict verdict = std::move(run.verdict);
    if (run.timer != 0) loop_.cancel(run.timer);
    if (run.result_group != 0) results_->leave(message, run.result_group);
    enter(run, State::gone);
    pool_.told(run);
    (*answer)(message, verdict);
}

void Recorded::detach(Run& run, std::vector<RunAt>& into) {
    for (Run* one = std::exchange(run.next, nullptr); one != nullptr;) {
        into.emplace_back(one);
        one->first = true;
        one = std::exchange(one->next, nullptr);
    }
}

void Recorded::hold_unstarted() {
    std::vector<RunAt> held;
    for (Run& run : pool_.all()) {
        if (!live(run)) continue;
        run.next = nullptr;
        run.first = true;
        if (unstarted(run)) held.emplace_back(&run);
    }
    for (const RunAt& one : held)
        if (one.valid()) hold(*one.run);
}

void Recorded::hold_rest(Run& run) {
    if (run.next == nullptr) return;
    std::vector<RunAt> rest;
    detach(run, rest);
    for (const RunAt& one : rest)
        if (one.valid()) hold(*one.run);
}

void Recorded::hold(Run& run) {
    switch (run.state) {
        case State::waiting:
        case State::decided:
            return decide(run, Held{});
        case State::ready:
            return give_back(run, Held{});
        case State::looking:
        case State::asking:
        case State::comparing:
        case State::reading:
            run.doomed = true;
            return;
        default:
            return;  // ends by itself
    }
}

// ---------------------------------------------------------------- steps

void Recorded::send(Run& run) {
    const Message& message = *run.message;
    RecordStep& out = queue_.push({&run, Kind::step});
    out.key = message.key;
    if (records_.by_name()) {
        out.source = message.source;
        out.id = message.id;
        out.business_key = message.business_key;
    }
    out.operation = operation_of(run);
    ++run.out;
}

core::Operation Recorded::operation_of(Run& run) {
    switch (run.state) {
        case State::looking:
        case State::comparing:
        case State::reading:
            return core::Get{};
        case State::asking:
            base::fault_point("consumer.claim.before");
            return acquire(run);
        case State::reclaiming:
            return acquire(run);
        case State::exhausting: {
            core::Acquire bound = acquire(run);
            bound.policy.max_attempts = 1;
            bound.policy.max_crashes = 1;
            return bound;
        }
        case State::starting:
            return core::Start{run.token, run.nonce};
        case State::completing:
            return core::Complete{run.token, run.nonce, answer_to_record(run), {}, {}};
        case State::failing:
            return core::Fail{.token = run.token,
                              .nonce = run.nonce,
                              .certainty = run.certainty,
                              .failure = run.failure,
                              .answer = {},
                              .usage = {},
                              .delay = run.delay};
        case State::resolving:
            return core::Resolve{.token_seen = run.token,
                                 .decision = core::Resolve::Decision::failed,
                                 .answer = {},
                                 .answer_content = {},
                                 .reason = resolve_reason(run.failure)};
        case State::releasing:
            // Release would overwrite what the number of failed runs stands in.
            if (options_.hold_unknown && run.failed_runs > 0 && run.record)
                return core::Fail{.token = run.token,
                                  .nonce = run.nonce,
                                  .certainty = core::Certainty::not_processed,
                                  .failure = run.record->failure,
                                  .answer = {},
                                  .usage = {}};
            return core::Release{run.token, run.nonce};
        default:
            SEMEL_ASSERT(false, "in no other state is a step sent");
    }
}

core::Answer Recorded::answer_to_record(Run& run) {
    if (!run.result) return recorded_answer(nullptr);
    if (run.result_group == 0) run.result_group = results_->join(*run.message);
    return recorded_answer(run.result, results_->name_of(run.result_group));
}

core::Acquire Recorded::acquire(Run& run) {
    run.asked_at = loop_.now();
    run.not_after = *queue_.latest_now() + options_.patience;
    core::Acquire out;
    out.fingerprint = run.fingerprint ? *run.fingerprint : run.message->fingerprint;
    out.owner = options_.owner;
    out.nonce = run.nonce;
    out.lease = options_.lease;
    out.not_after = run.not_after;
    out.policy.kind = core::IntentKind::message;
    out.policy.on_unknown = options_.hold_unknown ? core::OnUnknown::hold : core::OnUnknown::rerun;
    out.policy.retention_completed = options_.retention;
    out.policy.retention_failed = options_.retention;
    out.policy.retention_dead = options_.retention_dead;
    out.starts_call = !options_.hold_unknown;
    out.charge_crash = !options_.hold_unknown;
    if (run.lone) out.label = lone_label(*run.lone);
    return out;
}

void Recorded::again(Run& run) {
    run.again = run.again.count() == 0 ? again_first : std::min(run.again * 2, again_max);
    run.timer = loop_.at(loop_.now() + run.again, [this, at = RunAt(&run)] {
        if (!at.valid()) return;
        at.run->timer = 0;
        send(*at.run);
    });
}

void Recorded::answered(const RecordQueue::Tag& tag, Answered result) {
    switch (static_cast<Kind>(tag.kind)) {
        case Kind::probe:
            return learned_time(result);
        case Kind::giving_back:
            return gave_back(*static_cast<GiveBack*>(tag.of), result);
        case Kind::letter: {
            base::Result<void> marked;
            if (!result) marked = result.error();
            return letter_marked(*static_cast<Letter*>(tag.of), std::move(marked));
        }
        case Kind::step:
        case Kind::renewal:
            break;
    }
    Run& run = *static_cast<Run*>(tag.of);
    --run.out;
    if (run.state == State::gone) return pool_.answered_gone(run);
    if (tag.kind == Kind::renewal) return renewed(run, result);
    switch (run.state) {
        case State::looking:
            return looked(run, result);
        case State::asking:
            return asked(run, std::move(result));
        case State::comparing:
            return compared(run, result);
        case State::reading:
            return was_read(run, result);
        case State::starting:
            return start_answered(run, result);
        case State::completing:
            return completed(run, result);
        case State::reclaiming:
            return reclaimed(run, result);
        case State::failing:
        case State::resolving:
            return fail_written(run, result);
        case State::exhausting:
            return exhausted(run, result);
        case State::releasing:
            return given_back(run, result);
        default:
            SEMEL_ASSERT(false, "in no other state is a step's answer awaited");
    }
}

void Recorded::letter_marked(Letter& letter, base::Result<void> result) {
    const auto done = std::move(letter.done);
    letters_.remove_if([&](const auto& one) { return one.get() == &letter; });
    done(std::move(result));
}

}  // namespace semel::consumer
