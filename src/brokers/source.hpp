// Source: a member of a consumer group (Kafka) or a subscriber of a queue (RabbitMQ). What happens
// to it is told to a Listener; what is done with its messages is told back with receipts.
//
// Threads. A source has one thread of its own, the poll thread; it alone speaks with the broker's
// library. Every call of the Listener is made on it, one after the other: it must return at once,
// and may call any function of the source that does not say "blocks". Handlers run elsewhere and
// hold nothing of the library; they give receipts back from whichever thread they end on.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "base/time.hpp"
#include "brokers/delivery.hpp"

namespace semel::brokers {

/// What an operator should know. Told on change, not on every repetition.
enum class ProblemKind : std::uint8_t {
    notice,       ///< The library's own words, for the log.
    unreachable,  ///< No broker answers; it goes on trying.
    reachable,    ///< It is over.
    topic,        ///< A topic does not exist or may not be read; others go on.
    no_offset,    ///< `start: fail` and nothing committed: the partition is held until begin(from).
    out_of_range,  ///< The position is no longer (or not yet) in the log: held until seek().
    commit,        ///< A commit was refused for a reason that will not pass by itself.
    cancelled,     ///< RabbitMQ: the queue was deleted, or another subscriber is exclusive.
    blocked,       ///< RabbitMQ: the broker takes no messages (its memory or disk alarm).
    unblocked,     ///< It is over.
    fatal,         ///< This source is dead and holds nothing any more; only stop() is left.
};

struct Problem {
    ProblemKind kind = ProblemKind::notice;
    std::optional<Partition> partition;  ///< Whom it concerns; nullopt: the whole source.
    std::string text;                    ///< What happened, to what, and what to do.
};

/// Whoever runs the messages. On the poll thread; see above.
class Listener {
  public:
    Listener() = default;
    Listener(const Listener&) = delete;
    Listener& operator=(const Listener&) = delete;
    virtual ~Listener() = default;

    /// These came to this member. They stay silent until Source::begin() is called for each.
    virtual void assigned(const std::vector<AssignmentPtr>& which) = 0;
    /// Messages of begun assignments, in order within a partition. Never an empty vector.
    virtual void delivered(std::vector<Delivery> messages) = 0;
    /// These are to leave. Nothing of them is delivered any more. Until `deadline` what runs may
    /// finish and settle; what has not started is to be dropped. The source waits until all are
    /// settled or Source::drained() was called for each, or for the deadline; then it commits what
    /// is finished and tells `released`.
    virtual void revoked(const std::vector<AssignmentPtr>& which, base::SteadyTime deadline) = 0;
    /// These have left after `revoked`: what was finished is committed, receipts are void.
    virtual void released(const std::vector<AssignmentPtr>& which) = 0;
    /// These were taken away: another member may be working on them already. Nothing of them will
    /// be committed, receipts are void; their unsettled messages come again, to whoever has them
    /// next. Also told in place of `released` when they are lost while they drain.
    virtual void lost(const std::vector<AssignmentPtr>& which) = 0;
    virtual void problem(const Problem& what) = 0;
};

/// One assignment, as it stands.
struct AssignmentState {
    AssignmentPtr assignment;
    std::int64_t position = 0;     ///< The next offset to be delivered (RabbitMQ: the last tag).
    std::int64_t committable = 0;  ///< The lowest unfinished one. RabbitMQ: 0.
    std::int64_t committed = -1;   ///< What the broker has confirmed; -1: nothing yet.
    std::size_t in_flight = 0;     ///< Delivered and not settled.
    bool begun = false;
    bool paused = false;
    bool held = false;  ///< no_offset or out_of_range.
};

/// A partition's end, and how far behind the group is. RabbitMQ: `lag` alone: messages that are
/// ready in the queue, or with this subscriber and unsettled.
struct PartitionLag {
    Partition partition;
    std::int64_t begin = 0;       ///< The first offset that is kept.
    std::int64_t end = 0;         ///< The last stable offset: open transactions lie behind it.
    std::int64_t committed = -1;  ///< -1: nothing.
    std::int64_t lag = 0;         ///< end - committed; from `begin` where nothing is committed.
};

struct GroupMember {
    std::string id;  ///< The broker's name of it.
    std::string client_id;
    std::string instance_id;  ///< Static membership; empty where the broker was not asked for it.
    std::string host;
    bool self = false;
    std::vector<Partition> partitions;
};

/// A group as its coordinator sees it. RabbitMQ: the queue's consumers, as a number only.
struct GroupDescription {
    std::string state;  ///< "Stable", "PreparingRebalance", ...
    std::vector<GroupMember> members;
    std::size_t member_count = 0;
};

struct CommittedPosition {
    Partition partition;
    std::int64_t offset = -1;
    std::string metadata;
};

/// What follows from the configuration or declaration, for whoever promises order or plans a
/// handler's time.
struct SourceTraits {
    std::string name;                ///< "kafka orders (group shop)": for messages to people.
    bool commits_positions = false;  ///< A prefix is acknowledged (Kafka), not single messages.
    bool keyed = false;              ///< Messages have keys, and equal keys one partition.
    bool one_consumer = false;  ///< At most one consumer at a time gets a partition's messages.
    bool exclusive = false;     ///< Nobody else can subscribe while this one does.
    /// The broker closes the channel over a message unsettled for longer (consumer_timeout); 0:
    /// none.
    std::chrono::milliseconds settle_within{0};
    std::string library;  ///< "librdkafka 2.0.2"
};

class Source {
  public:
    Source() = default;
    Source(const Source&) = delete;
    Source& operator=(const Source&) = delete;
    /// As stop(0).
    virtual ~Source() = default;

    /// Starts the poll thread and joins the group. Once. `listener` must outlive the source's
    /// stop(). Only what is wrong in itself fails here; a broker that is away is a Problem.
    virtual base::Result<void> start(Listener& listener) = 0;

    /// Lets the messages of an assignment come: from `from`, or else from the committed position,
    /// or else from where `start` says. Without `from` a held assignment stays held. RabbitMQ:
    /// `from` is ignored. Once an assignment; void ones are ignored.
    virtual void begin(const AssignmentPtr& assignment, std::optional<std::int64_t> from = {}) = 0;

    /// These messages are finished and durable. Thread-safe and cheap; nothing is sent at once. How
    /// many of them were still unsettled in a valid assignment: others (lost, released, settled
    /// before) are void, which is normal.
    virtual std::size_t settle(std::span<const Receipt> receipts) = 0;
    std::size_t settle(const Receipt& receipt) { return settle(std::span(&receipt, 1)); }

    /// After `revoked`: nothing of it runs any more, what is unsettled stays so. Thread-safe.
    virtual void drained(const AssignmentPtr& assignment) = 0;

    /// Stops and continues the delivery of one assignment, exactly: nothing is skipped or given
    /// twice. Messages that were on their way may still arrive after pause() returned. Both may be
    /// repeated. Membership does not suffer, however long it lasts. Thread-safe.
    virtual void pause(const AssignmentPtr& assignment) = 0;
    virtual void resume(const AssignmentPtr& assignment) = 0;

    /// At most so many unsettled messages over all assignments, from now on; 0 delivers none, 1
    /// probes. What is out already stays out. Thread-safe.
    virtual void window(std::size_t unsettled_max) = 0;

    /// Moves a paused or held assignment without unsettled messages to `position` and ends its
    /// hold. Blocks up to `within`. invalid_argument if it is neither or has some. Not on RabbitMQ.
    virtual base::Result<void> seek(const AssignmentPtr& assignment, std::int64_t position,
                                    std::chrono::milliseconds within) = 0;
    /// Commits what is committable now. Blocks up to `within`. `applied` says what is known.
    virtual base::Result<void> commit(std::chrono::milliseconds within) = 0;

    /// Valid assignments. Thread-safe, cheap.
    [[nodiscard]] virtual std::vector<AssignmentState> state() const = 0;
    /// Asks the broker for the ends of all assignments. Blocks up to `within`.
    virtual base::Result<std::vector<PartitionLag>> lag(std::chrono::milliseconds within) = 0;
    /// Asks who is in the group. Blocks up to `within`.
    virtual base::Result<GroupDescription> describe(std::chrono::milliseconds within) = 0;
    /// Everything that the group has committed, with the texts beside it. Empty on RabbitMQ. Blocks
    /// up to `within`.
    virtual base::Result<std::vector<CommittedPosition>> committed(
        std::chrono::milliseconds within) = 0;
    /// The id that the broker gave this topic when it was made: another one under the same name is
    /// another topic, whose offsets mean something else. Empty where the library cannot ask for it
    /// (librdkafka before 2.3) or the source has no such thing (RabbitMQ): that is an answer, not
    /// an error. An error: the broker cannot be asked, or has no such topic. Blocks up to `within`;
    /// on any thread but the poll thread.
    virtual base::Result<std::string> topic_id(const std::string& topic,
                                               std::chrono::milliseconds within) {
        static_cast<void>(topic);
        static_cast<void>(within);
        return std::string{};
    }
    [[nodiscard]] virtual SourceTraits traits() const = 0;
    /// When the poll thread last went round (health: a poll loop that stands still).
    [[nodiscard]] virtual base::SteadyTime last_poll() const = 0;

    /// Leaves: `revoked` for all with `drain` as the deadline, a last commit, `released`, and out
    /// of the group. No call of the listener follows. Blocks; not on the poll thread. Idempotent.
    virtual void stop(std::chrono::milliseconds drain) = 0;
};

}  // namespace semel::brokers
