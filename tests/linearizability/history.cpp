#include "linearizability/history.hpp"

#include <type_traits>
#include <utility>

namespace semel::linearizability {
namespace {

using namespace core;

/// Texts here are made by this program: letters, digits, dots, colons, dashes and spaces.
class Json {
  public:
    Json& number(const char* name, std::int64_t value) { return raw(name, std::to_string(value)); }
    Json& text(const char* name, std::string_view value) {
        return raw(name, '"' + std::string(value) + '"');
    }
    Json& flag(const char* name, bool value) { return value ? raw(name, "true") : *this; }
    Json& raw(const char* name, const std::string& value) {
        text_ += text_.empty() ? '{' : ',';
        text_ += '"';
        text_ += name;
        text_ += "\":";
        text_ += value;
        return *this;
    }
    [[nodiscard]] std::string done() const { return text_.empty() ? "{}" : text_ + '}'; }

  private:
    std::string text_;
};

std::int64_t signed_of(std::uint64_t value) { return static_cast<std::int64_t>(value); }

std::string hex(const Nonce& nonce) {
    return base::hex({reinterpret_cast<const char*>(nonce.bytes.data()), nonce.bytes.size()});
}

const char* name_of(Status status) {
    switch (status) {
        case Status::processing:
            return "processing";
        case Status::completed:
            return "completed";
        case Status::failed:
            return "failed";
        case Status::unknown:
            return "unknown";
        case Status::dead:
            return "dead";
    }
    return "none";
}

/// The number that `fingerprint_of` was given.
int number_of(const Fingerprint& fingerprint) { return fingerprint.raw.bytes[0]; }

std::string answer_text(const std::optional<Answer>& answer) {
    if (!answer) return {};
    return answer->body ? *answer->body : "not kept";
}

std::string policy_of(const Policy& policy) {
    constexpr const char* on_unknown[] = {"", "rerun", "probe", "hold"};
    const auto us = [](milliseconds time) { return std::chrono::microseconds(time).count(); };
    return Json{}
        .flag("message", policy.kind == IntentKind::message)
        .text("on_unknown", on_unknown[static_cast<std::size_t>(policy.on_unknown)])
        .flag("replay_failed", policy.on_failed == OnFailed::replay)
        .number("max_attempts", policy.max_attempts)
        .number("max_crashes", policy.max_crashes)
        .number("retention_completed_us", us(policy.retention_completed))
        .number("retention_failed_us", us(policy.retention_failed))
        .number("retention_dead_us", us(policy.retention_dead))
        .done();
}

std::string record_of(const RecordPtr& record) {
    if (!record) return "null";
    return Json{}
        .text("status", name_of(record->status))
        .flag("final", record->final)
        .flag("cancelled", record->cancelled)
        .number("fingerprint", number_of(record->fingerprint))
        .number("attempt", record->attempt)
        .number("uncharged", record->uncharged_attempts)
        .number("crashes", record->crashes_charged)
        .number("second_payments", record->possible_second_payments)
        .flag("follows_unknown", record->follows_unknown)
        .number("generation", record->generation)
        .number("due", record->due.us)
        .flag("scheduled_copy", record->scheduled_copy)
        .number("token", signed_of(record->token.value))
        .text("nonce", hex(record->nonce))
        .text("owner", record->owner.id)
        .text("peer", record->owner.peer)
        .number("lease_end", record->lease_end.us)
        .flag("started", record->call_started)
        .number("created", record->created.us)
        .number("completed", record->completed.us)
        .number("expires", record->expires.us)
        .raw("policy", policy_of(record->policy))
        .text("answer", answer_text(record->answer))
        .text("failure", record->failure.code)
        .text("failure_message", record->failure.message)
        .number("input_tokens", record->usage.input_tokens)
        .flag("letter_published", record->letter_published)
        .done();
}

struct Arguments {
    Json& json;

    template <class Op>
    Json& owned(const char* name, const Op& op) const {
        return json.text("op", name)
            .number("token", signed_of(op.token.value))
            .text("nonce", hex(op.nonce));
    }
    static std::int64_t us(milliseconds time) { return std::chrono::microseconds(time).count(); }

    void operator()(const Acquire& op) const {
        json.text("op", "acquire")
            .number("fingerprint", number_of(op.fingerprint))
            .text("owner", op.owner.id)
            .text("peer", op.owner.peer)
            .text("nonce", hex(op.nonce))
            .number("lease_us", us(op.lease))
            .number("not_after", op.not_after.us)
            .raw("policy", policy_of(op.policy))
            .flag("starts_call", op.starts_call)
            .flag("charge_crash", op.charge_crash);
    }
    void operator()(const Start& op) const { owned("start", op); }
    void operator()(const Renew& op) const { owned("renew", op).number("lease_us", us(op.lease)); }
    void operator()(const Release& op) const { owned("release", op); }
    void operator()(const Complete& op) const {
        owned("complete", op)
            .text("answer", answer_text(op.answer))
            .number("input_tokens", op.usage.input_tokens);
    }
    void operator()(const Fail& op) const {
        constexpr const char* certainty[] = {"", "not_processed", "unknown", "refused_for_good"};
        owned("fail", op)
            .text("certainty", certainty[static_cast<std::size_t>(op.certainty)])
            .text("answer", answer_text(op.answer))
            .text("failure", op.failure.code)
            .text("failure_message", op.failure.message)
            .number("input_tokens", op.usage.input_tokens)
            .number("delay_us", us(op.delay))
            .flag("scheduled_copy", op.scheduled_copy);
    }
    void operator()(const Cancel& op) const {
        owned("cancel", op).number("input_tokens", op.usage.input_tokens);
    }
    void operator()(const Resolve& op) const {
        constexpr const char* decision[] = {"", "completed", "failed", "rerun"};
        json.text("op", "resolve")
            .number("token", signed_of(op.token_seen.value))
            .text("decision", decision[static_cast<std::size_t>(op.decision)])
            .text("answer", answer_text(op.answer))
            .text("reason", op.reason);
    }
    void operator()(const Reopen& op) const {
        json.text("op", "reopen")
            .number("generation", op.generation_seen)
            .number("fingerprint", number_of(op.fingerprint));
    }
    void operator()(const Settle& op) const {
        json.text("op", "settle").number("token", signed_of(op.token.value));
    }
    void operator()(const LetterPublished& op) const {
        json.text("op", "letter_published").number("token", signed_of(op.token.value));
    }
    void operator()(const Get&) const { json.text("op", "get"); }
};

struct Answered {
    Json& json;

    void operator()(const Granted& granted) const {
        constexpr const char* kind[] = {"", "fresh", "repeated", "retry", "takeover"};
        json.text("outcome", "granted")
            .text("kind", kind[static_cast<std::size_t>(granted.kind)])
            .number("granted_token", signed_of(granted.token.value))
            .number("attempt", granted.attempt)
            .number("generation_granted", granted.generation)
            .number("lease_end", granted.lease_end.us)
            .flag("second_payment", granted.possible_second_payment)
            .number("created", granted.created.us);
    }
    void operator()(const InFlight& flight) const {
        json.text("outcome", "in flight")
            .text("owner_seen", flight.owner.id)
            .text("peer_seen", flight.owner.peer)
            .number("granted_token", signed_of(flight.token.value))
            .number("remaining_ms", flight.remaining.count())
            .number("created", flight.created.us);
    }
    void operator()(const NotDue& later) const {
        json.text("outcome", "not due")
            .number("remaining_ms", later.remaining.count())
            .flag("copy_seen", later.scheduled_copy);
    }
    void operator()(const Mismatch& other) const {
        json.text("outcome", "mismatch").text("status_seen", name_of(other.status));
    }
    void operator()(const Late&) const { json.text("outcome", "late"); }
    void operator()(const Replay& it) const { with_record("replay", it.record); }
    void operator()(const UnknownOutcome& it) const { with_record("unknown outcome", it.record); }
    void operator()(const Exhausted& it) const { with_record("exhausted", it.record); }
    void operator()(const Applied& it) const { with_record("applied", it.record); }
    void operator()(const Fenced& it) const { with_record("fenced", it.record); }
    void operator()(const Found& it) const { with_record("found", it.record); }
    /// What answers no operation on a record: the checker knows no such outcome.
    template <class Other>
    void operator()(const Other&) const {
        json.text("outcome", "of another kind");
    }
    void with_record(const char* name, const RecordPtr& record) const {
        json.text("outcome", name).raw("record", record_of(record));
    }
};

std::int64_t ns(base::SteadyTime time) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

}  // namespace

StoredKey key_of(const std::string& name) { return base::sha256(name); }

Fingerprint fingerprint_of(unsigned n) {
    Fingerprint fingerprint;
    fingerprint.raw = base::sha256("request " + std::to_string(n));
    fingerprint.raw.bytes[0] = static_cast<std::uint8_t>(n);
    return fingerprint;
}

std::string line_of(const Asked& asked, const base::Result<Decided>& answer,
                    base::SteadyTime returned) {
    Json json;
    json.number("client", asked.client)
        .number("slot", asked.slot)
        .number("sequence", signed_of(asked.sequence))
        .text("key", asked.key)
        .number("call", ns(asked.call))
        .number("return", ns(returned));
    std::visit(Arguments{json}, asked.operation);
    if (answer) {
        json.number("at", answer->at.us);
        std::visit(Answered{json}, answer->outcome);
    } else {
        constexpr const char* applied[] = {"no", "yes", "unknown"};
        json.text("outcome", "error")
            .text("applied", applied[static_cast<std::size_t>(answer.error().applied)]);
    }
    return json.done() + '\n';
}

}  // namespace semel::linearizability
