// From a message that may run to one whose handler may start, or to a verdict without one.
#include "consumer/strategies/recorded_impl.hpp"

#include <algorithm>

#include "base/fault_point.hpp"

namespace semel::consumer {

namespace {

constexpr milliseconds busy_min{50};
/// An acquire that the store's clock overtook is asked again so often.
constexpr std::uint32_t late_max = 3;

}  // namespace

// ---------------------------------------------------------------- claims

void Recorded::claim(Run& first) {
    if (!queue_.latest_now()) return learn_time(first);
    std::size_t more = usual_.count() == 0 ? 2 : 1 + claims_within_lease_part();
    for (Run* run = &first; run != nullptr && more > 0; run = run->next, --more) {
        if (run->state != State::waiting) continue;
        run->nonce = fresh_nonce();
        run->asked_first = loop_.now();
        enter(*run, run->alone && !run->lone ? State::looking : State::asking);
        send(*run);
    }
}

void Recorded::learn_time(Run& first) {
    unclocked_.emplace_back(&first);
    if (std::exchange(probing_, true)) return;
    queue_.push(step_on(*first.message, core::Get{}), {nullptr, Kind::probe});
}

void Recorded::learned_time(const Answered& result) {
    probing_ = false;
    for (const RunAt& one : std::exchange(unclocked_, {})) {
        if (!one.valid() || one.run->state != State::waiting) continue;
        if (result) {
            claim(*one.run);
        } else {
            decide(*one.run, ill(result.error()));
        }
    }
}

void Recorded::looked(Run& run, const Answered& result) {
    if (run.doomed) return decide(run, Held{});
    if (!result) return decide(run, ill(result.error()));
    const core::RecordPtr& record = found(*result);
    Past past;
    if (record) past = past_of(*record, options_.hold_unknown, false);
    // Else it is claimed to be given up.
    if (past.lone_deaths < options_.retry.crashes) run.lone = past.lone_deaths + 1;
    enter(run, State::asking);
    send(run);
}

void Recorded::asked(Run& run, Answered result) {
    if (!result) {
        const bool nothing = result.error().applied == base::Applied::no && !run.unsure;
        if (nothing)
            return decide(run, run.doomed ? Verdict(Held{}) : Verdict(ill(result.error())));
        run.unsure = true;
        if (loop_.now() >= run.asked_first + options_.patience)
            return unanswered(run, result.error().detail);
        return again(run);
    }
    base::fault_point("consumer.claim.after");
    core::StoreOutcome& outcome = result->outcome;
    if (const auto* granted = std::get_if<core::Granted>(&outcome))
        return granted_to(run, *granted);
    if (std::holds_alternative<core::Late>(outcome)) {
        if (++run.late <= late_max && !run.doomed) return send(run);
        return unanswered(run, "its clock was past the time limit of each claim: check its clock");
    }
    if (run.doomed) return decide(run, Held{});
    if (std::holds_alternative<core::InFlight>(outcome) && !run.first) {
        // By the time it is the first of its lane this says nothing any more: the other may be
        // the one before it.
        enter(run, State::waiting);
        return;
    }
    if (std::holds_alternative<core::Mismatch>(outcome)) {
        enter(run, State::comparing);
        return send(run);
    }
    if (const auto* replay = std::get_if<core::Replay>(&outcome);
        results_ != nullptr && replay != nullptr &&
        replay->record->status == core::Status::completed) {
        if (!run.first) {
            enter(run, State::waiting);
            return;
        }
        run.result = answer_of(*replay->record);
        if (run.result) return publish_found(run, *replay->record, result->at);
        if (answer_is_gone(*replay->record)) ++counters_.answers_gone;
    }
    decide(run, refused(run, outcome));
}

Verdict Recorded::refused(const Run& run, const core::StoreOutcome& outcome) const {
    const bool hold = options_.hold_unknown;
    if (const auto* flight = std::get_if<core::InFlight>(&outcome)) {
        // Most owners end long before their lease: asked soon at first, then less and less
        // often.
        const auto patient = busy_min * (std::int64_t{1} << std::min(run.message->runs, 10U));
        return Busy{std::clamp(std::min(flight->remaining, patient), busy_min,
                               std::max(options_.lease, busy_min))};
    }
    if (const auto* due = std::get_if<core::NotDue>(&outcome))
        return Retry{.delay = due->remaining, .reason = "it is not due yet", .charged = false};
    if (const auto* replay = std::get_if<core::Replay>(&outcome)) {
        if (replay->record->status == core::Status::completed) return Duplicate{};
        return dead_of(*replay->record, hold, DeadClass::fatal);
    }
    if (const auto* unknown = std::get_if<core::UnknownOutcome>(&outcome))
        return dead_of(*unknown->record, hold, DeadClass::unknown);
    if (const auto* exhausted = std::get_if<core::Exhausted>(&outcome))
        return dead_of(*exhausted->record, hold, DeadClass::attempts);
    return Held{};  // it changed hands meanwhile: looked at again
}

void Recorded::compared(Run& run, const Answered& result) {
    if (run.doomed) return decide(run, Held{});
    if (!result) return decide(run, ill(result.error()));
    const core::RecordPtr& record = found(*result);
    if (!record) return decide(run, Held{});
    const bool comparable =
        !not_compared(run.message->fingerprint) && !not_compared(record->fingerprint);
    if (!comparable && !run.fingerprint) {
        run.fingerprint = record->fingerprint;
        enter(run, State::asking);
        return send(run);
    }
    ++counters_.mismatches;
    if (options_.mismatch_is_duplicate) return decide(run, Duplicate{});
    decide(run, Dead{.why = DeadClass::mismatch,
                     .reason = "its id was used for another message",
                     .first_failure_ms = record->created.us / 1000,
                     .generation = record->generation});
}

void Recorded::granted_to(Run& run, const core::Granted& granted) {
    run.token = granted.token;
    run.attempt = granted.attempt;
    run.again = milliseconds{0};
    if (granted.kind == core::Granted::Kind::takeover) ++counters_.takeovers;
    if (granted.attempt > 1 && (!run.doomed || options_.hold_unknown)) {
        enter(run, State::reading);
        return send(run);
    }
    if (run.doomed) return give_back(run, Held{});
    make_ready(run);
}

void Recorded::was_read(Run& run, const Answered& result) {
    if (!result) return give_back(run, ill(result.error()));
    const core::RecordPtr& record = found(*result);
    if (!record || record->token != run.token || record->nonce != run.nonce)
        return decide(run, Held{});  // taken over already
    run.record = record;
    const Past past = past_of(*record, options_.hold_unknown, true);
    run.failed_runs = past.failed_runs;
    run.may_double = past.may_double;
    if (run.doomed) return give_back(run, Held{});
    if (past.given_up) return give_up(run, *past.given_up, past.reason);
    if (past.suspect && !run.lone) {
        if (past.lone_deaths < options_.retry.crashes)
            return give_back(run, Suspect{past.lone_deaths});
        return give_up(
            run, DeadClass::crashes,
            "the process died " + std::to_string(past.lone_deaths) + " times while it ran alone");
    }
    make_ready(run);
}

void Recorded::unanswered(Run& run, const std::string& why) {
    give_back_later(run, run.not_after);
    Verdict verdict = Ill{records_.name() + ": " + why};
    if (run.doomed) verdict = Held{};
    decide(run, std::move(verdict));
}

void Recorded::give_back(Run& run, Verdict verdict) {
    hold_rest(run);
    run.verdict = std::move(verdict);
    enter(run, State::releasing);
    send(run);
}

void Recorded::given_back(Run& run, const Answered& result) {
    if (!result) give_back_later(run, {});
    if (run.ran && std::holds_alternative<Ill>(run.verdict)) --ill_;
    decide(run, std::move(run.verdict));
}

void Recorded::give_back_later(const Run& run, core::StoreTime not_after) {
    auto& back = *backs_.emplace_back(std::make_unique<GiveBack>());
    back.key = run.message->key;
    back.source = run.message->source;
    back.id = run.message->id;
    back.nonce = run.nonce;
    back.not_after = not_after;
    send(back);
}

void Recorded::send(GiveBack& back) {
    RecordStep step{.key = back.key,
                    .source = back.source,
                    .id = back.id,
                    .business_key = {},
                    .operation = core::Release{core::FencingToken{}, back.nonce}};
    queue_.push(std::move(step), {&back, Kind::giving_back});
}

void Recorded::gave_back(GiveBack& back, const Answered& result) {
    if (result && result->at > back.not_after) {
        backs_.remove_if([&](const auto& one) { return one.get() == &back; });
        return;
    }
    back.timer = loop_.at(loop_.now() + back.again, [this, at = &back] {
        at->timer = 0;
        send(*at);
    });
    back.again = std::min(back.again * 2, again_max);
}

}  // namespace semel::consumer
