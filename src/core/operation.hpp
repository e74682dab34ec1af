// What a store can be asked to do to one key, and what it can answer. One atomic step each.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "core/record.hpp"

namespace semel::core {

// ---------------------------------------------------------------- operations

struct Acquire {
    Fingerprint fingerprint;
    Owner owner;
    Nonce nonce;                 ///< Not the empty one: it names nobody, and nobody could complete the grant.
    milliseconds lease{10000};
    StoreTime not_after;         ///< Refused (Late) when the store's clock is past it.
    Policy policy;
    bool starts_call = false;    ///< Under on_unknown: rerun, `start` rides on acquire.
    bool charge_crash = false;   ///< Consumers: a takeover is charged as a crash.
    std::string label;
    TenantTag tenant;
    std::shared_ptr<const Append> turn;  ///< Of a conversation: kept in the record until it is decided. answer_content empty.
};
/// The paid call is about to leave.
struct Start { FencingToken token; Nonce nonce; };
struct Renew { FencingToken token; Nonce nonce; milliseconds lease{10000}; };
/// Gives the lease back unused: FAILED, due now, uncharged, its token kept. By (token, nonce), or by nonce alone (token 0)
/// where the reply to acquire was lost.
struct Release { FencingToken token; Nonce nonce; };
struct Complete {
    FencingToken token;
    Nonce nonce;
    Answer answer;
    Usage usage;
    std::optional<Append> append;
};
/// `not_processed`: provably free (refused connection, 4xx, 429, 503, 529). `unknown`: it may have been processed.
/// `refused_for_good`: a deterministic verdict under on_failed: replay; kept, final, given again.
enum class Certainty : std::uint8_t { not_processed = 1, unknown = 2, refused_for_good = 3 };
struct Fail {
    FencingToken token;
    Nonce nonce;
    Certainty certainty = Certainty::unknown;
    Failure failure;
    std::optional<Answer> answer;  ///< Only with refused_for_good.
    Usage usage;                   ///< What the events of a cut stream prove.
    milliseconds delay{0};         ///< Messages: when it is due again.
    bool scheduled_copy = false;
};
/// Final: afterwards complete and fail are refused although the token is the same.
struct Cancel { FencingToken token; Nonce nonce; Usage usage; };
/// A person's decision about UNKNOWN or DEAD. Compare-and-set on the token seen; issues a new one.
/// `completed`: there is an answer, give it to duplicates. `failed`: there is none; the next request runs
/// again, as after any failure. `rerun`: the same with fresh budgets. A call that had started stays counted as possibly paid.
struct Resolve {
    enum class Decision : std::uint8_t { completed = 1, failed = 2, rerun = 3 };
    FencingToken token_seen;
    Decision decision = Decision::failed;
    std::optional<Answer> answer;  ///< With `completed`.
    /// With `completed`, what the answer says: appended, marked late, to the conversation of the record's turn, if it has one.
    std::optional<std::string> answer_content;
    std::string reason;
};
/// DEAD (or UNKNOWN, by decision) begins anew: next generation and token, new fingerprint, budgets reset, history kept.
struct Reopen { std::uint32_t generation_seen = 1; Fingerprint fingerprint; };
/// The sweeper: settles a PROCESSING whose lease is dead. Never runs anything.
struct Settle { FencingToken token; };
/// Marks a DEAD message's letter as published: from now on the record is kept for a time only.
struct LetterPublished { FencingToken token; };
struct Get {};

using Operation = std::variant<Acquire, Start, Renew, Release, Complete, Fail, Cancel, Resolve, Reopen, Settle,
                               LetterPublished, Get>;

// ---------------------------------------------------------------- answers

struct Granted {
    enum class Kind : std::uint8_t { fresh = 1, repeated = 2, retry = 3, takeover = 4 };
    Kind kind = Kind::fresh;
    FencingToken token;
    std::uint32_t attempt = 1;
    std::uint32_t generation = 1;
    StoreTime lease_end;
    bool possible_second_payment = false;  ///< The former owner's call had started.
    StoreTime created;
};
struct InFlight { Owner owner; FencingToken token; milliseconds remaining{0}; StoreTime created; };
struct NotDue { milliseconds remaining{0}; bool scheduled_copy = false; };
struct Replay { RecordPtr record; };
struct Mismatch { std::vector<std::uint64_t> fields; Status status = Status::processing; };
struct UnknownOutcome { RecordPtr record; };
struct Exhausted { RecordPtr record; };
/// The acquire came after its not_after: nothing was changed.
struct Late {};
/// Done, or was already done by the same token: `record` is the state after the step.
struct Applied { RecordPtr record; };
/// Nothing was changed: the token is not current, or the status does not allow the step. Null record: absent.
struct Fenced { RecordPtr record; };
/// Answer to Get (and to Settle that found nothing to settle). Null record: absent or expired.
struct Found { RecordPtr record; };

using Outcome = std::variant<Granted, InFlight, NotDue, Replay, Mismatch, UnknownOutcome, Exhausted, Late, Applied,
                             Fenced, Found>;

}  // namespace semel::core
