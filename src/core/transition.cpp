// The transition table. One function per operation; each says what it does with the record that was
// found.
#include "core/transition.hpp"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "base/assert.hpp"

namespace semel::core {
namespace {

using Write = Transition::Write;

/// JSON numbers, Lua and SQL ports hold integers exactly only below this.
constexpr std::uint64_t token_limit = std::uint64_t{1} << 53;

/// Slugs of failures that no owner reported.
constexpr const char* lease_lost = "lease-lost";
constexpr const char* released = "released";
constexpr const char* cancelled = "cancelled";
constexpr const char* resolved = "resolved";
constexpr const char* reopened = "reopened";

bool expired(const Record& record, StoreTime now) {
    return record.expires.us != 0 && record.expires <= now;
}

/// The nonce of a record that a person decided about: nobody owns it, also not who says so.
constexpr Nonce nobody{};

/// Rounded up: who waits that long is not too early.
milliseconds remaining(StoreTime until, StoreTime now) {
    return std::chrono::ceil<milliseconds>(until - now);
}

/// Whether the current attempt is one of uncharged_attempts. Needs no field of its own: an attempt
/// that ended in FAILED or DEAD is charged exactly if its call may have been processed, and that is
/// what call_started says there.
bool uncharged(const Record& record) {
    return (record.status == Status::failed || record.status == Status::dead) &&
           !record.call_started;
}

/// Says of the current attempt, which ends with `status`, whether its call may have been processed.
/// Saying the same again changes nothing, saying the opposite (a late truth) takes the former
/// charge back.
void settle_attempt(Record& record, Status status, bool may_be_processed) {
    if (uncharged(record)) --record.uncharged_attempts;
    record.status = status;
    record.call_started = may_be_processed;
    if (uncharged(record)) ++record.uncharged_attempts;
}

bool budget_used_up(const Record& record, const Policy& policy) {
    const std::uint32_t charged = record.attempt - record.uncharged_attempts;
    return (policy.max_attempts != 0 && charged >= policy.max_attempts) ||
           (policy.max_crashes != 0 && record.crashes_charged >= policy.max_crashes);
}

/// The moment from which a record in this state counts as absent; 0 for the undecided.
StoreTime expiry(const Record& record, StoreTime now) {
    if (undecided(record)) return {};
    switch (record.status) {
        case Status::completed:
            return now + record.policy.retention_completed;
        case Status::failed:
            return now + (record.final ? record.policy.retention_completed
                                       : record.policy.retention_failed);
        case Status::dead:
            return now + record.policy.retention_dead;
        case Status::processing:
        case Status::unknown:
            break;
    }
    SEMEL_ASSERT(false, "PROCESSING and UNKNOWN are undecided");
}

/// Decides on one record. Holds the found state, and the copy that replaces it once a step is
/// taken.
class Decision {
  public:
    Decision(const RecordPtr& found, StoreTime now)
        : now_(now), found_(found), live_(found && !expired(*found, now) ? found : nullptr) {}

    Transition operator()(Acquire&& op) {
        // Before everything else: whoever asked this late has already given up on the answer.
        if (now_ > op.not_after) return unchanged(Late{});
        if (!live_) return grant_fresh(std::move(op));
        if (!live_->fingerprint.matches(op.fingerprint)) {
            return unchanged(
                Mismatch{differing_fields(live_->fingerprint, op.fingerprint), live_->status});
        }
        switch (live_->status) {
            case Status::processing:
                if (live_->nonce == op.nonce) return repeat_grant(op);
                if (now_ < live_->lease_end) {
                    return unchanged(InFlight{live_->owner, live_->token,
                                              remaining(live_->lease_end, now_), live_->created});
                }
                return take_over(std::move(op));
            case Status::failed:
                if (live_->final) return unchanged(Replay{live_});
                if (live_->policy.kind == IntentKind::message && now_ < live_->due) {
                    return unchanged(NotDue{remaining(live_->due, now_), live_->scheduled_copy});
                }
                if (budget_used_up(*live_, op.policy)) return exhaust(*live_, op.policy);
                return grant_again(std::move(op), *live_, Granted::Kind::retry);
            case Status::completed:
                return unchanged(Replay{live_});
            case Status::unknown:
                return unchanged(UnknownOutcome{live_});
            case Status::dead:
                return unchanged(Exhausted{live_});
        }
        SEMEL_ASSERT(false, "a record has one of the five statuses");
    }

    Transition operator()(Start&& op) {
        if (!owned(op.token, op.nonce) || live_->status != Status::processing) return fenced();
        if (live_->call_started) return unchanged(Applied{live_});
        Record next = *live_;
        next.call_started = true;
        return applied(std::move(next));
    }

    Transition operator()(Renew&& op) {
        // Also after the lease's end, as long as nobody took over: the owner has proved that it
        // lives.
        if (!owned(op.token, op.nonce) || live_->status != Status::processing) return fenced();
        Record next = *live_;
        next.lease_end = now_ + op.lease;
        RecordPtr record = store(std::move(next));
        return {Write::volatile_, record, Applied{record}};
    }

    Transition operator()(Release&& op) {
        const bool mine = live_ && live_->nonce == op.nonce && op.nonce != nobody &&
                          (op.token.value == 0 || live_->token == op.token);
        if (!mine) return fenced();
        if (live_->status == Status::failed && !live_->final) return unchanged(Applied{live_});
        if (live_->status != Status::processing) return fenced();
        Record next = *live_;
        settle_attempt(next, Status::failed, false);
        next.failure = {released, "the grant was given back unused", 0};
        return applied(due_now(std::move(next)));
    }

    Transition operator()(Complete&& op) {
        if (!owned(op.token, op.nonce)) return fenced();
        if (live_->status == Status::completed) return unchanged(Applied{live_});
        if (live_->final) return fenced();
        Record next = *live_;
        next.answer = std::move(op.answer);
        next.usage = std::move(op.usage);
        settle_attempt(next, Status::completed, true);
        Transition done = applied(completed(std::move(next)));
        done.append = std::move(op.append);
        return done;
    }

    Transition operator()(Fail&& op) {
        if (!owned(op.token, op.nonce) || live_->status == Status::completed) return fenced();
        if (live_->final) {
            const bool repeated = !live_->cancelled && op.certainty == Certainty::refused_for_good;
            return repeated ? unchanged(Applied{live_}) : fenced();
        }
        Record next = *live_;
        if (op.certainty == Certainty::refused_for_good) {
            settle_attempt(next, Status::failed, true);
            next.final = true;
            next.answer = std::move(op.answer);
            next.completed = now_;
            next.turn = nullptr;
        } else {
            const bool may_be_processed = op.certainty == Certainty::unknown;
            Status status = Status::failed;
            // Somebody may be acting on DEAD (publishing its letter) and nothing would run the
            // intent again: what the owner says is kept, but it takes an answer or a person to
            // leave DEAD.
            if (live_->status == Status::dead) {
                status = Status::dead;
            } else if (may_be_processed && live_->policy.on_unknown != OnUnknown::rerun) {
                status = Status::unknown;
            }
            settle_attempt(next, status, may_be_processed);
            const bool repeated = live_->status == next.status && live_->failure == op.failure &&
                                  live_->call_started == next.call_started;
            if (repeated) return unchanged(Applied{live_});
        }
        const bool waits =
            next.status == Status::failed && !next.final && next.policy.kind == IntentKind::message;
        next.due = waits ? now_ + op.delay : StoreTime{};
        next.scheduled_copy = waits && op.scheduled_copy;
        next.failure = std::move(op.failure);
        next.usage = std::move(op.usage);
        next.lease_end = {};
        next.expires = next.status == Status::dead ? live_->expires : expiry(next, now_);
        return applied(std::move(next));
    }

    Transition operator()(Cancel&& op) {
        if (!owned(op.token, op.nonce)) return fenced();
        if (live_->cancelled) return unchanged(Applied{live_});
        if (live_->status != Status::processing && live_->status != Status::unknown)
            return fenced();
        Record next = *live_;
        next.status = Status::failed;
        next.final = true;
        next.cancelled = true;
        next.failure = {cancelled, "cancelled on request", 0};
        next.usage = std::move(op.usage);
        next.completed = now_;
        next.turn = nullptr;
        next.lease_end = {};
        next.expires = expiry(next, now_);
        return applied(std::move(next));
    }

    Transition operator()(Resolve&& op) {
        if (!live_ || live_->token != op.token_seen || !held()) return fenced();
        Record next = orphan(*live_);
        switch (op.decision) {
            case Resolve::Decision::completed: {
                next.answer = std::move(op.answer);
                // Decided without an answer at hand: duplicates are told that it is not kept.
                if (!next.answer) next.answer = Answer{.body_kind = BodyKind::not_kept};
                Transition done = applied(completed(std::move(next)));
                if (live_->turn && op.answer_content) {
                    done.append = *live_->turn;
                    done.append->answer_content = std::move(*op.answer_content);
                    done.append->late = true;
                }
                return done;
            }
            case Resolve::Decision::failed:
                // A failure like any other, open to another try. Whether the call was paid is not
                // this decision's to say: it stays charged, and the next attempt is counted as a
                // possible second payment.
                settle_attempt(next, Status::failed, live_->call_started);
                next.letter_published = false;
                next.failure = {resolved, std::move(op.reason), 0};
                return applied(due_now(std::move(next)));
            case Resolve::Decision::rerun:
                next.failure = {resolved, std::move(op.reason), 0};
                return applied(begin_anew(std::move(next)));
        }
        SEMEL_ASSERT(false, "a decision is one of three");
    }

    Transition operator()(Reopen&& op) {
        if (!live_) return fenced();
        const bool repeated = live_->generation == op.generation_seen + 1 &&
                              live_->fingerprint.matches(op.fingerprint);
        if (repeated) return unchanged(Applied{live_});
        if (live_->generation != op.generation_seen || !held()) return fenced();
        Record next = orphan(*live_);
        ++next.generation;
        next.fingerprint = std::move(op.fingerprint);
        next.turn = nullptr;  // another request: its grant brings its own
        next.failure = {reopened, "begun anew by decision", 0};
        return applied(begin_anew(std::move(next)));
    }

    Transition operator()(Settle&& op) {
        const bool abandoned = live_ && live_->status == Status::processing &&
                               live_->token == op.token && live_->lease_end <= now_;
        if (!abandoned) return unchanged(Found{live_});
        if (held_by_policy()) {
            Transition held = hold_unknown();
            held.outcome = Applied{held.record};
            return held;
        }
        Record next = *live_;
        settle_attempt(next, Status::failed, live_->call_started);
        next.failure = lost_lease();
        return applied(due_now(std::move(next)));
    }

    Transition operator()(LetterPublished&& op) {
        if (!live_ || live_->status != Status::dead || live_->token != op.token) return fenced();
        if (live_->letter_published) return unchanged(Applied{live_});
        Record next = *live_;
        next.letter_published = true;
        next.expires = expiry(next, now_);
        return applied(std::move(next));
    }

    Transition operator()(Get&&) { return unchanged(Found{live_}); }

  private:
    [[nodiscard]] bool owned(FencingToken token, const Nonce& nonce) const {
        return live_ && live_->token == token && live_->nonce == nonce && nonce != nobody;
    }
    /// UNKNOWN or DEAD: waits for a person.
    [[nodiscard]] bool held() const {
        return live_->status == Status::unknown || live_->status == Status::dead;
    }
    /// A dead lease's call may have been processed and the policy forbids another without a
    /// decision. The policy is the one the attempt was granted under, so that it does not matter
    /// who notices.
    [[nodiscard]] bool held_by_policy() const {
        return live_->call_started && live_->policy.on_unknown != OnUnknown::rerun;
    }
    static Failure lost_lease() { return {lease_lost, "the owner's lease ran out", 0}; }

    Transition unchanged(Outcome outcome) { return {Write::none, live_, std::move(outcome)}; }
    Transition fenced() { return unchanged(Fenced{live_}); }
    Transition applied(Record next) {
        RecordPtr record = store(std::move(next));
        return {Write::durable, record, Applied{record}};
    }

    /// What every written record must satisfy, whatever led to it.
    RecordPtr store(Record next) const {
        SEMEL_ASSERT(next.token.value != 0 && next.token.value < token_limit,
                     "a token is above 0 and exact in a double");
        SEMEL_ASSERT(!found_ || next.token >= found_->token, "a key's token never falls");
        SEMEL_ASSERT(!live_ || live_->status != Status::completed,
                     "a completed record is immutable");
        SEMEL_ASSERT(!live_ || next.attempt >= live_->attempt, "the count of attempts never falls");
        SEMEL_ASSERT(next.uncharged_attempts <= next.attempt, "only attempts can be uncharged");
        SEMEL_ASSERT(undecided(next) == (next.expires.us == 0),
                     "exactly the undecided never expire");
        SEMEL_ASSERT(!next.final || next.status == Status::failed, "only FAILED is final");
        SEMEL_ASSERT(!next.turn || !(next.final || next.status == Status::completed),
                     "what the user said is not kept in a decided record");
        return std::make_shared<const Record>(std::move(next));
    }

    /// FAILED, to be granted again from now on.
    Record due_now(Record next) const {
        next.due = next.policy.kind == IntentKind::message ? now_ : StoreTime{};
        next.scheduled_copy = false;
        next.lease_end = {};
        next.expires = expiry(next, now_);
        return next;
    }

    Record completed(Record next) const {
        next.status = Status::completed;
        next.turn = nullptr;
        next.failure = {};
        next.due = {};
        next.scheduled_copy = false;
        next.lease_end = {};
        next.completed = now_;
        next.expires = expiry(next, now_);
        return next;
    }

    /// A decision over the owner's head: a new token, and a nonce that nobody has, so that neither
    /// of its two names lets the former owner write.
    [[nodiscard]] Record orphan(const Record& from) const {
        Record next = from;
        next.token = next_token(from.token, now_);
        next.nonce = nobody;
        next.owner = {};
        next.lease_end = {};
        return next;
    }

    /// FAILED and due with fresh budgets. call_started stays: if the outcome was unknown, the next
    /// attempt may pay again.
    Record begin_anew(Record next) const {
        next.status = Status::failed;
        next.uncharged_attempts = next.attempt;
        next.crashes_charged = 0;
        next.letter_published = false;
        return due_now(std::move(next));
    }

    Transition granted(Record next, Granted::Kind kind, Write write) const {
        Granted answer{.kind = kind,
                       .token = next.token,
                       .attempt = next.attempt,
                       .generation = next.generation,
                       .lease_end = next.lease_end,
                       .possible_second_payment = next.follows_unknown,
                       .created = next.created};
        return {write, store(std::move(next)), answer};
    }

    /// What every grant sets.
    void take(Record& next, Acquire&& op) const {
        next.status = Status::processing;
        next.token = next_token(found_ ? found_->token : FencingToken{}, now_);
        next.nonce = op.nonce;
        next.owner = std::move(op.owner);
        next.lease_end = now_ + op.lease;
        next.call_started = op.starts_call;
        next.policy = op.policy;
        next.turn = std::move(op.turn);
        ++next.attempt;
        if (!op.label.empty()) next.label = std::move(op.label);
    }

    Transition grant_fresh(Acquire&& op) const {
        Record next;
        next.created = now_;
        next.fingerprint = std::move(op.fingerprint);
        next.tenant = op.tenant;
        take(next, std::move(op));
        return granted(std::move(next), Granted::Kind::fresh, Write::durable);
    }

    /// The reply to a grant was lost and is asked for again.
    Transition repeat_grant(const Acquire& op) const {
        Record next = *live_;
        next.lease_end = now_ + op.lease;
        return granted(std::move(next), Granted::Kind::repeated, Write::volatile_);
    }

    /// `former` is the state after the attempt before this one was settled. Its failure stays, to
    /// say why there is a retry.
    Transition grant_again(Acquire&& op, Record former, Granted::Kind kind) const {
        former.follows_unknown = former.call_started;
        if (former.follows_unknown) ++former.possible_second_payments;
        former.due = {};
        former.scheduled_copy = false;
        former.expires = {};
        former.letter_published = false;
        former.usage = {};
        take(former, std::move(op));
        return granted(std::move(former), kind, Write::durable);
    }

    Transition take_over(Acquire&& op) const {
        if (held_by_policy()) return hold_unknown();
        Record former = *live_;
        // As the sweeper would have done, had it come first.
        settle_attempt(former, Status::failed, live_->call_started);
        former.failure = lost_lease();
        if (op.charge_crash) ++former.crashes_charged;
        if (budget_used_up(former, op.policy)) return exhaust(std::move(former), op.policy);
        return grant_again(std::move(op), std::move(former), Granted::Kind::takeover);
    }

    [[nodiscard]] Transition hold_unknown() const {
        Record next = *live_;
        settle_attempt(next, Status::unknown, true);
        next.failure = lost_lease();
        next.lease_end = {};
        RecordPtr record = store(std::move(next));
        return {Write::durable, record, UnknownOutcome{record}};
    }

    /// `former` is FAILED. Token and nonce stay: its owner may still bring the truth.
    Transition exhaust(Record former, const Policy& policy) const {
        former.policy = policy;
        former.due = {};
        former.scheduled_copy = false;
        former.lease_end = {};
        former.status = Status::dead;
        former.expires = expiry(former, now_);
        RecordPtr record = store(std::move(former));
        return {Write::durable, record, Exhausted{record}};
    }

    StoreTime now_;
    const RecordPtr& found_;  ///< Also if expired: its token is the next one's lower bound.
    RecordPtr live_;          ///< Null if absent or expired.
};

}  // namespace

FencingToken next_token(FencingToken previous, StoreTime now) {
    const auto time = static_cast<std::uint64_t>(std::max<std::int64_t>(now.us, 0));
    return {std::max(previous.value + 1, time)};
}

Transition decide(const RecordPtr& found, Acquire&& operation, StoreTime now) {
    return Decision(found, now)(std::move(operation));
}

Transition decide(const RecordPtr& found, Complete&& operation, StoreTime now) {
    return Decision(found, now)(std::move(operation));
}

Transition decide(const RecordPtr& found, Operation operation, StoreTime now) {
    Decision decision(found, now);
    return std::visit([&](auto& op) { return decision(std::move(op)); }, operation);
}

}  // namespace semel::core
