// TransactionalInbox: a message's dedup row and its effect in one transaction of the user's
// database, so that the effect happens exactly once, whatever dies when. How to use it:
// docs/guides/inbox.md.
//
// Two ways in. `run` does everything for a batch of messages. The steps (fence, claim, advance) are
// for who has a transaction of his own already: BEGIN; fence; claim; the effects of those that are
// fresh; COMMIT. Once it committed they are done, and if it did not, nothing has happened.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "core/record.hpp"
#include "inbox/names.hpp"
#include "sql/executor.hpp"

namespace semel::inbox {

using sql::Executor;
using sql::Problem;
using sql::Tried;
using std::chrono::milliseconds;

/// Most messages of one claim or run; each is one row of one statement.
inline constexpr std::size_t messages_max = 1024;

struct InboxOptions {
    std::string scope;  ///< Who consumes; see MessageName and check_label(). Renaming it forgets
                        ///< what was done.
    Place place;        ///< Where the tables are; made by apply_schema().
    /// How long a done id is known. Longer than any redelivery may come late: topic retention,
    /// retries and redrives together.
    milliseconds retention{std::chrono::hours{24 * 7}};
    /// run() and assign(): longest wait for a lock of another transaction. MySQL counts in whole
    /// seconds, rounded up.
    milliseconds lock_wait{1000};
    /// run(): the server ends the transaction of an owner that is silent in its middle (frozen, cut
    /// off), so that assign() need not wait for it for ever. 0: it does not. PostgreSQL and
    /// MariaDB; MySQL has no such limit (its wait_timeout ends the connection).
    milliseconds idle_limit{60000};
    /// run(): how long a transaction is tried again after lock time-outs, deadlocks and
    /// serialization failures.
    milliseconds patience{10000};
};

struct Partition {
    std::string topic;
    std::int32_t number = 0;
};
/// "I own this partition since the assign that gave this epoch."
struct Fence {
    Partition partition;
    std::int64_t epoch = 0;
};

/// One delivery. (scope, source, id) say which message it is.
struct Message {
    std::string source;
    std::string id;
    std::string business_key;  ///< For people, in the table; may be empty.
    /// Digest of what makes the message the same; empty: it is not compared. See claim().
    std::optional<base::Digest> fingerprint;
    /// run(): messages of one lane keep their order: behind one that was not applied the others of
    /// its lane are held. Empty: no order.
    std::string lane;
    /// run() with Batch::expected_offset: the partition's position once this message is done.
    std::int64_t next_offset = 0;
};

// ---------------------------------------------------------------- assign

struct Assigned {
    std::int64_t epoch = 0;                   ///< For Fence, until the partition is taken away.
    std::optional<std::int64_t> next_offset;  ///< Where to start; empty: nobody has said yet.
};
/// A transaction of the former owner is still open after the whole wait: nothing was changed. Ask
/// again; it ends by itself, at the latest when the server notices that its client is gone or
/// silent (idle_limit).
struct StillBusy {};
using AssignOutcome = std::variant<Assigned, StillBusy>;

// ---------------------------------------------------------------- steps

/// Names the claims of one transaction, in their rows, so that a COMMIT whose answer was lost can
/// be found out about. Never 0.
struct ClaimId {
    std::uint64_t value = 0;
    friend bool operator==(ClaimId, ClaimId) = default;
};
/// A random one.
ClaimId new_claim_id();

struct Held {};
/// Another owner has the partition (epoch: its; 0: nobody was ever assigned). Roll back: nothing of
/// this transaction may stay.
struct FencedOff {
    std::int64_t epoch = 0;
};
using FenceOutcome = std::variant<Held, FencedOff>;

struct Advanced {
    std::int64_t next_offset = 0;  ///< As it is now: never behind what was asked for.
};
/// The position is not the one expected: somebody moved it. Roll back.
struct Unexpected {
    std::optional<std::int64_t> next_offset;
};
using AdvanceOutcome = std::variant<Advanced, FencedOff, Unexpected>;

struct Claim {
    enum class Kind : std::uint8_t {
        fresh,  ///< Claimed now: run its effect in this transaction. Done as soon as that commits.
        done,   ///< Its effect is committed (or part of this very transaction): acknowledge, do
                ///< nothing.
        ours,   ///< Done under the same ClaimId, before: a COMMIT whose answer was lost did commit.
        mismatch,   ///< The id was used for something else: another fingerprint. Nothing was
                    ///< claimed.
        undecided,  ///< Somebody else works on it, or its outcome is unknown, or it has failed for
                    ///< good or is not due: see status.
    };
    Kind kind = Kind::undecided;
    bool retry = false;     ///< Fresh, although it was tried before (and failed).
    core::Status status{};  ///< Of the row that was found, for mismatch and undecided.
};

// ---------------------------------------------------------------- run

/// What a statement must have done.
enum class Rows : std::uint8_t {
    one,           ///< Exactly one row. None: not yet. More: fatal.
    any,           ///< Any number.
    at_least_one,  ///< None: not yet.
};
/// A statement of an effect. Rows of an UPDATE count if its WHERE matched them. It must not end or
/// begin a transaction; on MySQL also no DDL, which commits.
struct Effect {
    sql::Statement statement;
    Rows rows = Rows::one;
};

struct Did {};
/// What it needs is not there yet (a parent row): deliver it again later.
struct NotYet {
    std::string reason;
};
struct Failed {
    std::string reason;
    bool fatal = false;  ///< Another try cannot end otherwise.
};
/// What a callback did. A Problem it met is handed on as it is: a lock or a deadlock repeats the
/// whole transaction.
using EffectOutcome = std::variant<Did, NotYet, Failed, Problem>;
/// Does the effect of one message by `executor`, inside the transaction. Must not end it. May be
/// called again for the same message, whenever the transaction was rolled back. An exception counts
/// as Failed.
using Callback = std::function<EffectOutcome(Executor& executor, const Message& message)>;

enum class Outcome : std::uint8_t {
    applied,    ///< Its effect is committed, by this run, once.
    duplicate,  ///< Its effect was committed before; also the second of two equal ids in one batch.
    mismatch,   ///< Claim::Kind::mismatch: nothing was done.
    not_yet,    ///< Its effect found nothing to change: rolled back; deliver it again later.
    failed,  ///< It failed alone, in a transaction of its own: rolled back. The only outcome that
             ///< is the message's own fault.
    undecided,  ///< Nothing was done, and nothing is known against it: locks, the database, another
                ///< owner. Deliver it again.
    held,       ///< Not run, because one before it in its lane was not applied.
    fenced,     ///< The partition has another owner: nothing was done. Drop the delivery, do not
                ///< acknowledge.
    unknown,    ///< The answer to COMMIT was lost and could not be found out: it is applied or not,
                ///< once. Deliver it again.
};
[[nodiscard]] const char* name_of(Outcome outcome);

struct MessageResult {
    Outcome outcome = Outcome::undecided;
    bool fatal = false;  ///< Of failed: Failed::fatal, or more rows than allowed.
    std::string reason;  ///< For people; empty for applied and duplicate.
};

struct Batch {
    /// Empty: no partition (a queue): the dedup rows alone keep effects single.
    std::optional<Fence> fence;
    std::vector<Message> messages;  ///< In the partition's order. At most messages_max.
    /// Ordering by partition: all messages are one lane, and the position moves with the effects,
    /// in their transaction, if it is still this one. Needs a fence. Empty: the position is left
    /// alone (move it by advance_now when all before it is done).
    std::optional<std::int64_t> expected_offset;
};

struct RunReport {
    std::vector<MessageResult> results;  ///< One per message, in their order.
    std::optional<Problem> problem;  ///< What kept the rest from being tried (the database is down,
                                     ///< full, lacks a table).
    std::optional<std::int64_t>
        next_offset;            ///< With expected_offset: the position now, as far as known.
    unsigned transactions = 0;  ///< Begun. 1 where nothing went wrong.
    unsigned reconnects = 0;
};

/// Gives a new connection in place of one that was lost. What it gives may own its connection.
using Connect = std::function<Tried<std::shared_ptr<Executor>>()>;

/// Thread-safe: holds nothing but its options. An Executor is used by one call at a time.
class TransactionalInbox {
  public:
    /// The options are checked: see problem().
    explicit TransactionalInbox(InboxOptions options);

    [[nodiscard]] const InboxOptions& options() const { return options_; }
    /// What is wrong with the options; every call answers it. Empty: nothing.
    [[nodiscard]] const std::optional<Problem>& problem() const { return problem_; }

    /// Takes the partition over, in a transaction of its own: raises the epoch, which fences the
    /// former owner off and waits, at most `wait`, for its open transactions; then reads the
    /// position. `first_offset` becomes the position if none was ever known (the broker's committed
    /// offset at the first start). `owner` is for people. One round trip. A Problem with applied
    /// unknown: ask again.
    Tried<AssignOutcome> assign(Executor& executor, const Partition& partition,
                                const std::string& owner, std::optional<std::int64_t> first_offset,
                                milliseconds wait) const;

    // The steps run inside the caller's transaction (READ COMMITTED; under a stricter level they
    // work, with more serialization failures) and neither begin nor end one. A Problem says what
    // became of the transaction as Executor::run does: roll back, and after `contended` do it all
    // again.

    /// Whether the fence's epoch is still the partition's, and keeps it so until the transaction
    /// ends. Transactions of one epoch do not wait for each other.
    Tried<FenceOutcome> fence(Executor& executor, const Fence& fence) const;

    /// Claims what is not yet done: one per message, in their order. The ids may be duplicates of
    /// anything: the transaction stays usable. Of equal ids in one call the first is fresh, the
    /// others are done. A message that failed before and is due is fresh again. Two fingerprints
    /// that are both there must be equal. `id`: a new one for each transaction; the same one again
    /// to find out about a lost COMMIT. Waits for other transactions that claim the same ids (by
    /// the session's lock time-out); locks in the order of the keys. A claim counts only if its
    /// effect commits with it: to leave a message out after all, take it back by unclaim().
    Tried<std::vector<Claim>> claim(Executor& executor, std::span<const Message> messages,
                                    ClaimId id) const;

    /// Takes back claims of this transaction that were fresh and no retry.
    Tried<sql::Done> unclaim(Executor& executor, std::span<const Message> messages,
                             ClaimId id) const;

    /// Moves the position forward to `next_offset`, if the fence holds; never back. `expected`:
    /// only if the position is that.
    Tried<AdvanceOutcome> advance(Executor& executor, const Fence& fence, std::int64_t next_offset,
                                  std::optional<std::int64_t> expected = {}) const;

    /// Which of the messages are done under `id`. For a lost answer to COMMIT: ask on another
    /// connection, after fence() or a repeated claim() has made sure that the old transaction is
    /// over.
    Tried<std::vector<bool>> committed(Executor& executor, std::span<const Message> messages,
                                       ClaimId id) const;

    // Whole transactions. The connection must not be inside one.

    /// advance() in a small transaction of its own, one round trip: for a watermark over messages
    /// that lanes finish side by side.
    Tried<AdvanceOutcome> advance_now(Executor& executor, const Fence& fence,
                                      std::int64_t next_offset) const;

    /// Applies each message's effect at most once. `effects[i]` are the statements of messages[i].
    /// Where nothing goes wrong: one transaction, three round trips (begin, fence and claim;
    /// effects; COMMIT), two if every statement is Rows::any. What goes wrong rolls the batch back
    /// and is narrowed down, until the message that fails alone is the only one not applied.
    /// `connection` is replaced by one from `connect` (may be empty) if it is lost; then a COMMIT
    /// whose answer is missing is found out.
    RunReport run(std::shared_ptr<Executor>& connection, const Batch& batch,
                  std::span<const std::vector<Effect>> effects, const Connect& connect = {}) const;
    /// The same with a callback for each message, each inside a savepoint of its own, which goes
    /// with its first statement. `batchable` false: each in its own transaction; its COMMIT takes
    /// the next one's begin, fence and claim along.
    RunReport run(std::shared_ptr<Executor>& connection, const Batch& batch, const Callback& effect,
                  const Connect& connect = {}, bool batchable = true) const;

  private:
    /// Why nothing can be asked for these; empty: nothing is wrong.
    [[nodiscard]] std::optional<Problem> refusal(const Partition& partition) const;
    [[nodiscard]] std::optional<Problem> refusal(std::span<const Message> messages) const;
    [[nodiscard]] std::optional<Problem> refusal(const Batch& batch) const;

    InboxOptions options_;
    std::optional<Problem> problem_;
};

}  // namespace semel::inbox
