#include "model/small_worlds.hpp"

#include <algorithm>
#include <utility>

namespace semel::model {
namespace {

using namespace core;
using namespace std::chrono_literals;
using Kind = Step::Kind;

constexpr milliseconds lease = 10s;
constexpr milliseconds message_delay = 10s;
constexpr milliseconds retention = 24h;

Nonce nonce_of(std::uint8_t number) {
    Nonce out;
    out.bytes.fill(number);
    return out;
}

bool is_owners(Kind kind) { return kind <= Kind::cancel; }
bool is_forged(Kind kind) { return kind >= Kind::forged_renew && kind <= Kind::forged_cancel; }
bool is_acquire(Kind kind) {
    return kind == Kind::acquire || kind == Kind::acquire_again ||
           kind == Kind::acquire_other_body || kind == Kind::acquire_late;
}
bool is_stale(Kind kind) {
    return kind == Kind::settle_stale || kind == Kind::resolve_stale || kind == Kind::reopen_stale;
}
bool is_decision(Kind kind) {
    return kind == Kind::resolve_completed || kind == Kind::resolve_failed ||
           kind == Kind::resolve_rerun || kind == Kind::reopen;
}

template <class T>
bool holds(const Outcome& outcome) {
    return std::holds_alternative<T>(outcome);
}

Fingerprint fingerprint_of(const char* body) {
    Fingerprint out;
    out.raw = base::sha256(body);
    return out;
}

}  // namespace

bool same_record(const RecordPtr& a, const RecordPtr& b) {
    if (!a || !b) return !a && !b;
    if (a == b) return true;
    const bool same_answer = a->answer.has_value() == b->answer.has_value() &&
                             (!a->answer || (a->answer->http_status == b->answer->http_status &&
                                             a->answer->body_kind == b->answer->body_kind &&
                                             a->answer->body_bytes == b->answer->body_bytes));
    return a->status == b->status && a->final == b->final && a->cancelled == b->cancelled &&
           a->attempt == b->attempt && a->uncharged_attempts == b->uncharged_attempts &&
           a->crashes_charged == b->crashes_charged && a->generation == b->generation &&
           a->possible_second_payments == b->possible_second_payments && a->due == b->due &&
           a->token == b->token && a->nonce == b->nonce && a->owner == b->owner &&
           a->lease_end == b->lease_end && a->call_started == b->call_started &&
           a->completed == b->completed && a->expires == b->expires &&
           a->letter_published == b->letter_published && a->failure == b->failure && same_answer;
}

std::string name_of(const Step& step) {
    static const char* const names[] = {"acquire",
                                        "acquire_again",
                                        "start",
                                        "renew",
                                        "release",
                                        "release_lost",
                                        "complete",
                                        "fail_free",
                                        "fail_unknown",
                                        "refuse",
                                        "cancel",
                                        "forged_renew",
                                        "forged_release",
                                        "forged_complete",
                                        "forged_fail",
                                        "forged_cancel",
                                        "acquire_other_body",
                                        "acquire_late",
                                        "settle",
                                        "settle_stale",
                                        "letter_published",
                                        "resolve_completed",
                                        "resolve_failed",
                                        "resolve_rerun",
                                        "resolve_stale",
                                        "reopen",
                                        "reopen_stale",
                                        "lease_passes",
                                        "retention_passes"};
    std::string name = names[static_cast<std::size_t>(step.kind)];
    if (is_owners(step.kind)) name += step.owner == 0 ? "(A)" : "(B)";
    return name;
}

std::string path_name(const std::vector<Step>& path) {
    std::string out;
    for (const Step& step : path) out += (out.empty() ? "" : " > ") + name_of(step);
    return out;
}

bool passes_time(const Step& step) {
    return step.kind == Kind::lease_passes || step.kind == Kind::retention_passes;
}

std::chrono::microseconds time_of(const Step& step) {
    if (step.kind == Kind::lease_passes) return lease;
    return step.kind == Kind::retention_passes ? retention : 0s;
}

const std::vector<Step>& all_steps() {
    static const std::vector<Step> steps = [] {
        std::vector<Step> out;
        for (int kind = 0; kind <= static_cast<int>(Kind::retention_passes); ++kind) {
            out.push_back({static_cast<Kind>(kind), 0});
            if (is_owners(static_cast<Kind>(kind))) out.push_back({static_cast<Kind>(kind), 1});
        }
        return out;
    }();
    return steps;
}

const std::vector<Rules>& all_rules() {
    static const std::vector<Rules> rules = [] {
        const auto policy = [](IntentKind kind, OnUnknown on_unknown, std::uint32_t attempts) {
            Policy out;
            out.kind = kind;
            out.on_unknown = on_unknown;
            out.max_attempts = attempts;
            return out;
        };
        return std::vector<Rules>{
            {"http_rerun", policy(IntentKind::http, OnUnknown::rerun, 0)},
            {"http_hold", policy(IntentKind::http, OnUnknown::hold, 0)},
            {"message_rerun_1", policy(IntentKind::message, OnUnknown::rerun, 1)},
            {"message_hold_2", policy(IntentKind::message, OnUnknown::hold, 2)},
        };
    }();
    return rules;
}

bool World::enabled(const Step& step) const {
    const OwnerView& owner = owners_[step.owner];
    switch (step.kind) {
        case Kind::acquire:
            // B is A's twin until A has acted.
            return step.owner == 0 || owners_[0].asked;
        case Kind::acquire_again:
        case Kind::release_lost:
            return owner.asked;
        case Kind::start:
            return owner.granted && rules_->policy.on_unknown != OnUnknown::rerun;
        case Kind::renew:
        case Kind::release:
        case Kind::complete:
        case Kind::fail_free:
        case Kind::fail_unknown:
        case Kind::refuse:
        case Kind::cancel:
            return owner.granted;
        case Kind::acquire_other_body:
            return seen_ != nullptr;
        case Kind::settle_stale:
        case Kind::resolve_stale:
            return previous_.value != 0;
        default:
            return true;
    }
}

Operation World::operation(const Step& step) const {
    const OwnerView& me = owners_[step.owner];
    const FencingToken current = seen_ ? seen_->token : highest_;
    const std::uint32_t generation = seen_ ? seen_->generation : 1;
    const Nonce strange = nonce_of(0xee);
    static const Fingerprint body = fingerprint_of("body");
    static const Fingerprint other_body = fingerprint_of("another body");
    const auto acquire = [&](const Nonce& nonce, const Fingerprint& fingerprint,
                             StoreTime not_after) {
        Acquire op;
        op.fingerprint = fingerprint;
        op.owner.id = step.owner == 0 ? "A" : "B";
        op.nonce = nonce;
        op.lease = lease;
        op.not_after = not_after;
        op.policy = rules_->policy;
        op.starts_call = rules_->policy.on_unknown == OnUnknown::rerun;
        return Operation{op};
    };
    // Every answer is another one, so that it shows whose is kept. Its length is its name.
    const auto answer = [&](std::uint64_t number) {
        Answer out;
        out.http_status = 200;
        out.body_kind = BodyKind::not_kept;
        out.body_bytes = number;
        return out;
    };
    const auto fail = [&](FencingToken token, const Nonce& nonce, Certainty certainty) {
        Fail op{.token = token, .nonce = nonce, .certainty = certainty};
        op.failure.code = certainty == Certainty::unknown ? "unknown" : "free";
        op.delay = message_delay;
        if (certainty == Certainty::refused_for_good) op.answer = answer(7);
        return Operation{op};
    };
    const auto resolve = [&](FencingToken token, Resolve::Decision decision) {
        Resolve op{.token_seen = token, .decision = decision, .reason = "model"};
        if (decision == Resolve::Decision::completed) op.answer = answer(9);
        return Operation{op};
    };
    switch (step.kind) {
        case Kind::acquire:
            return acquire(nonce_of(static_cast<std::uint8_t>(nonces_ + 1)), body, now_ + 1s);
        case Kind::acquire_again:
            return acquire(me.nonce, body, now_ + 1s);
        case Kind::acquire_other_body:
            return acquire(nonce_of(0xdd), other_body, now_ + 1s);
        case Kind::acquire_late:
            return acquire(nonce_of(0xcc), body, now_ - 1us);
        case Kind::start:
            return Start{me.token, me.nonce};
        case Kind::renew:
            return Renew{me.token, me.nonce, lease};
        case Kind::release:
            return Release{me.token, me.nonce};
        case Kind::release_lost:
            return Release{{}, me.nonce};
        case Kind::complete: {
            const bool repeated = seen_ && seen_->status == Status::completed;
            return Complete{me.token,
                            me.nonce,
                            answer(100 + me.token.value % 1000 + (repeated ? 5000 : 0)),
                            {},
                            {}};
        }
        case Kind::fail_free:
            return fail(me.token, me.nonce, Certainty::not_processed);
        case Kind::fail_unknown:
            return fail(me.token, me.nonce, Certainty::unknown);
        case Kind::refuse:
            return fail(me.token, me.nonce, Certainty::refused_for_good);
        case Kind::cancel:
            return Cancel{me.token, me.nonce, {}};
        case Kind::forged_renew:
            return Renew{current, strange, lease};
        case Kind::forged_release:
            return Release{{}, strange};
        case Kind::forged_complete:
            return Complete{current, strange, answer(6666), {}, {}};
        case Kind::forged_fail:
            return fail(current, strange, Certainty::not_processed);
        case Kind::forged_cancel:
            return Cancel{current, strange, {}};
        case Kind::settle:
            return Settle{current};
        case Kind::settle_stale:
            return Settle{previous_};
        case Kind::letter_published:
            return LetterPublished{current};
        case Kind::resolve_completed:
            return resolve(current, Resolve::Decision::completed);
        case Kind::resolve_failed:
            return resolve(current, Resolve::Decision::failed);
        case Kind::resolve_rerun:
            return resolve(current, Resolve::Decision::rerun);
        case Kind::resolve_stale:
            return resolve(previous_, Resolve::Decision::rerun);
        case Kind::reopen:
            return Reopen{generation, seen_ ? seen_->fingerprint : Fingerprint{}};
        case Kind::reopen_stale:
            return Reopen{generation + 7, {}};
        case Kind::lease_passes:
        case Kind::retention_passes:
            break;
    }
    return Get{};
}

std::string World::broken(const Step& step, const Operation& asked, const Outcome& outcome,
                          const RecordPtr& after) const {
    const RecordPtr& before = seen_;
    const bool changed = !same_record(before, after);
    const Granted* granted = std::get_if<Granted>(&outcome);
    const bool new_grant = granted != nullptr && granted->kind != Granted::Kind::repeated;
    const bool lease_live =
        before && before->status == Status::processing && now_ < before->lease_end;

    // ---- about any record
    if (after && (after->expires.us == 0) != undecided(*after))
        return "exactly the undecided never expire (S13)";
    if (after && after->final && after->status != Status::failed) return "only FAILED is final";
    if (after && after->uncharged_attempts > after->attempt)
        return "more uncharged attempts than attempts (S15)";
    if (before && !after) return "a step made a record disappear (S13)";
    if (before && before->status == Status::completed && changed)
        return "a completed record is immutable (S3)";
    if (before && before->final && changed) return "a final failure is immutable (S3)";
    if (before && after->token < before->token) return "a token fell";
    if (before && after->attempt != before->attempt + (new_grant ? 1 : 0))
        return "attempts count grants, nothing else (S15)";
    if (before && after->possible_second_payments < before->possible_second_payments)
        return "a counter fell (S15)";
    const bool may_name_anew = new_grant || is_decision(step.kind);
    if (before && after->token != before->token && !may_name_anew)
        return "only a grant or a decision issues a token (S1)";
    if (!before && after && !new_grant) return "a record out of nothing";

    // ---- who may write
    if (is_owners(step.kind) && !is_acquire(step.kind)) {
        const OwnerView& me = owners_[step.owner];
        const bool by_nonce = step.kind == Kind::release_lost;
        const bool current =
            before && before->nonce == me.nonce && (by_nonce || before->token == me.token);
        if (!current && (changed || !holds<Fenced>(outcome)))
            return "only the current owner writes (S2)";
        const bool open = current && before->status != Status::completed && !before->final;
        if (open && step.kind == Kind::complete) {
            if (!holds<Applied>(outcome) || after->status != Status::completed)
                return "the owner's answer is taken (truth kept)";
            if (after->answer->body_bytes != std::get<Complete>(asked).answer.body_bytes)
                return "another answer than the owner's is kept (S4)";
        }
        if (open && (step.kind == Kind::fail_free || step.kind == Kind::fail_unknown ||
                     step.kind == Kind::refuse)) {
            if (!holds<Applied>(outcome)) return "the owner's failure is taken (truth kept)";
            if (before->status != Status::dead && after->status == Status::processing)
                return "a failed attempt goes on";
        }
        if (current && before->status == Status::completed && step.kind == Kind::complete &&
            !holds<Applied>(outcome))
            return "a repeated complete succeeds";
        if (before && before->cancelled && step.kind != Kind::cancel && !holds<Fenced>(outcome))
            return "a cancelled intent takes nothing more";
        if ((step.kind == Kind::release || by_nonce) && current &&
            before->status == Status::processing &&
            (after->status != Status::failed || after->token != before->token ||
             after->uncharged_attempts != before->uncharged_attempts + 1)) {
            return "release leaves FAILED, uncharged, with its token";
        }
        if (step.kind == Kind::renew && current && before->status == Status::processing &&
            (!holds<Applied>(outcome) || after->lease_end != now_ + lease)) {
            return "the owner's lease is renewed";
        }
    }
    if (is_forged(step.kind) && (changed || !holds<Fenced>(outcome)))
        return "the token alone does not make an owner (S2)";
    if (is_stale(step.kind) && changed)
        return "a decision upon what is no longer so (compare-and-set)";

    // ---- who is granted
    if (step.kind == Kind::acquire_late)
        return changed || !holds<Late>(outcome) ? "a late acquire is refused (S14)" : "";
    if (step.kind == Kind::acquire_other_body && before)
        return changed || !holds<Mismatch>(outcome)
                   ? "another body is a mismatch, first of all (S9)"
                   : "";
    if (is_acquire(step.kind)) {
        const Acquire& op = std::get<Acquire>(asked);
        if (holds<Mismatch>(outcome) || holds<Late>(outcome)) return "refused without reason";
        const bool mine =
            before && before->status == Status::processing && before->nonce == op.nonce;
        if (mine) {
            if (granted == nullptr || granted->kind != Granted::Kind::repeated)
                return "a lost reply is given again";
            if (granted->token != before->token || granted->attempt != before->attempt ||
                after->lease_end != now_ + lease)
                return "the repeated grant is the same one, with a new lease";
            return "";
        }
        if (granted != nullptr && !new_grant) return "a repeated grant to somebody else (S1)";
        if (new_grant) {
            if (granted->token <= highest_) return "a token came again (S1)";
            if (after->token != granted->token || after->nonce != op.nonce ||
                after->status != Status::processing)
                return "the grant is not what is recorded (S1)";
            if (lease_live) return "two owners at once (S1)";
            if (before &&
                (before->status != Status::failed && before->status != Status::processing))
                return "a grant over a decided or held intent";
            if (before && before->final) return "a grant over a final failure";
            if (before && before->status == Status::failed && before->due.us > now_.us)
                return "a grant before it is due";
            const bool again = before && maybe_processed_;
            if (again && before->status == Status::processing &&
                rules_->policy.on_unknown == OnUnknown::hold)
                return "a second call under hold without a decision (C1)";
            if (granted->possible_second_payment != again)
                return "a possible second payment is told as one (C1)";
            if (before && after->possible_second_payments !=
                              before->possible_second_payments + (again ? 1 : 0))
                return "possible second payments are counted (C1)";
            if (granted->attempt != (before ? before->attempt + 1 : 1))
                return "the attempt's number (S15)";
            if (rules_->policy.max_attempts != 0 && before &&
                before->attempt - before->uncharged_attempts -
                        (before->status == Status::processing && !maybe_processed_ ? 1 : 0) >=
                    rules_->policy.max_attempts)
                return "more attempts than the budget";
            return "";
        }
        if (!before) return "an absent intent is granted";
        if (holds<InFlight>(outcome) != lease_live)
            return "in flight exactly while the lease lives";
        const bool decided = before->status == Status::completed || before->final;
        if (holds<Replay>(outcome) != decided) return "replayed exactly if decided (S4)";
        if (holds<NotDue>(outcome) && (before->status != Status::failed || before->due <= now_))
            return "it is due";
        if (holds<UnknownOutcome>(outcome) && !maybe_processed_)
            return "held although nothing can have been paid";
        if (before->status == Status::unknown && !holds<UnknownOutcome>(outcome))
            return "what is held stays held";
        if (holds<UnknownOutcome>(outcome) && before->status == Status::failed)
            return "a failed attempt is not held";
        if (holds<UnknownOutcome>(outcome) && after->status != Status::unknown)
            return "held, but not recorded so";
        if (holds<Exhausted>(outcome) &&
            (rules_->policy.max_attempts == 0 || after->status != Status::dead))
            return "exhausted without a budget used up";
        if (holds<Applied>(outcome) || holds<Fenced>(outcome) || holds<Found>(outcome))
            return "no answer to an acquire";
        return "";
    }

    // ---- sweeper and people
    if (step.kind == Kind::settle || step.kind == Kind::settle_stale) {
        const bool abandoned = before && before->status == Status::processing && !lease_live;
        if (changed && !abandoned) return "the sweeper touches dead leases only";
        if (step.kind == Kind::settle && abandoned) {
            const bool held = maybe_processed_ && rules_->policy.on_unknown == OnUnknown::hold;
            if (after->status != (held ? Status::unknown : Status::failed))
                return "a settled lease ends as its policy says";
            if (after->uncharged_attempts !=
                before->uncharged_attempts + (maybe_processed_ ? 0 : 1))
                return "charged exactly if it may have been paid";
        }
    }
    if (is_decision(step.kind)) {
        const bool waits =
            before && (before->status == Status::unknown || before->status == Status::dead);
        if (waits != holds<Applied>(outcome)) return "a person decides about UNKNOWN and DEAD only";
        if (!waits && changed) return "a person decides about UNKNOWN and DEAD only";
        // The zero nonce is nobody's: an earlier decision may have left it.
        const bool names_owner = waits && after->nonce == before->nonce && after->nonce != Nonce{};
        if (waits && (after->token <= highest_ || names_owner))
            return "a decision fences the former owner (S1)";
    }
    if (step.kind == Kind::letter_published && changed && before->status != Status::dead)
        return "only DEAD has a letter";
    return "";
}

std::string World::observe(const Step& step, const Operation& asked, const Outcome& outcome,
                           const RecordPtr& record, StoreTime at) {
    now_ = at;
    std::string problem = broken(step, asked, outcome, record);
    idle_ = same_record(seen_, record);

    OwnerView& me = owners_[step.owner];
    if (step.kind == Kind::acquire) {
        ++nonces_;
        me = {std::get<Acquire>(asked).nonce, {}, true, false};
        // To have asked matters only to a refused owner's later repetition, which an acquire of its
        // own says as well.
    }
    if (const Granted* granted = std::get_if<Granted>(&outcome)) {
        if (is_owners(step.kind)) {
            idle_ = idle_ && me.granted && me.token == granted->token;
            me.token = granted->token;
            me.granted = true;
        }
        if (granted->kind != Granted::Kind::repeated)
            maybe_processed_ = std::get<Acquire>(asked).starts_call;
    }
    if (record && std::holds_alternative<Applied>(outcome) && !record->final) {
        if (step.kind == Kind::start || step.kind == Kind::fail_unknown) maybe_processed_ = true;
        const bool was_open = seen_ && seen_->status == Status::processing;
        if (step.kind == Kind::fail_free ||
            (was_open && (step.kind == Kind::release || step.kind == Kind::release_lost))) {
            maybe_processed_ = false;
        }
    }
    if (record && record->token != highest_) {
        previous_ = highest_;
        highest_ = std::max(highest_, record->token);
    }
    seen_ = record;
    return problem;
}

std::string World::observe_time(const RecordPtr& record, StoreTime at) {
    const RecordPtr before = std::exchange(seen_, record);
    now_ = at;
    idle_ = false;
    if (!before) return record ? "a record out of nothing" : "";
    const bool expired = before->expires.us != 0 && before->expires <= at;
    if (undecided(*before) && !record) return "an undecided record disappeared (S13)";
    if (expired != (record == nullptr)) return "absent exactly from its expiry on";
    if (record && !same_record(before, record)) return "a record changed by itself";
    return "";
}

namespace {

RecordPtr live(const RecordPtr& record, StoreTime now) {
    return record && record->expires.us != 0 && record->expires <= now ? nullptr : record;
}

/// Walks the tree. `visit` may be null.
class Explorer {
  public:
    Explorer(const Decide& decide, Explored& out, std::vector<std::vector<Step>>* leaves)
        : decide_(decide), out_(out), leaves_(leaves) {}

    void walk(const World& world, const RecordPtr& record, std::size_t left) {
        for (const Step& step : all_steps()) {
            if (path_.empty() && step.kind != Kind::acquire) continue;
            if (!world.enabled(step)) continue;
            // Time that passes twice in a row is one longer time.
            if (passes_time(step) && passes_time(path_.back())) continue;
            World next = world;
            RecordPtr after = record;
            path_.push_back(step);
            std::string broken;
            if (passes_time(step)) {
                const StoreTime at = world.now() + time_of(step);
                broken = next.observe_time(live(record, at), at);
            } else {
                const Operation operation = world.operation(step);
                Transition transition = decide_(record, operation, world.now());
                if (transition.write != Transition::Write::none)
                    after = std::move(transition.record);
                broken = next.observe(step, operation, transition.outcome, live(after, world.now()),
                                      world.now());
            }
            ++out_.steps;
            if (!broken.empty()) {
                out_.broken = std::move(broken);
                out_.path = path_;
                return;
            }
            if (!next.idle()) ++out_.worlds;
            if (left == 1 || next.idle()) {
                if (leaves_ != nullptr) leaves_->push_back(path_);
            } else {
                walk(next, after, left - 1);
                if (!out_.broken.empty()) return;
            }
            path_.pop_back();
        }
    }

  private:
    const Decide& decide_;
    Explored& out_;
    std::vector<std::vector<Step>>* leaves_;
    std::vector<Step> path_;
};

constexpr StoreTime beginning{1'800'000'000'000'000};

}  // namespace

Explored explore(const Rules& rules, std::size_t length, const Decide& decide) {
    Explored out;
    Explorer(decide, out, nullptr).walk(World(rules, beginning), nullptr, length);
    return out;
}

std::vector<std::vector<Step>> sequences(const Rules& rules, std::size_t length) {
    Explored out;
    std::vector<std::vector<Step>> leaves;
    const Decide decide = [](const RecordPtr& found, Operation operation, StoreTime now) {
        return core::decide(found, std::move(operation), now);
    };
    Explorer(decide, out, &leaves).walk(World(rules, beginning), nullptr, length);
    return leaves;
}

}  // namespace semel::model
