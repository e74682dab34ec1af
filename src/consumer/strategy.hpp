// Strategy: how one effect is made of many deliveries. The consumer decides what may run when; a
// strategy runs it and says what became of it.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/result.hpp"
#include "consumer/message.hpp"
#include "consumer/verdict.hpp"

namespace semel::consumer {

/// Whether and where a partition may begin, after its former owner was fenced off.
struct BeginAt {
    std::optional<std::int64_t>
        offset;  ///< Empty: at the committed position, or where `start` says.
};
/// Not now: ask again after a moment (the former owner's transaction is still open; the database is
/// away).
struct NotYetOurs {
    std::string reason;
};
/// It must not begin: an operator has to decide. The partition stays silent, with an alarm.
struct Refused {
    std::string reason;  ///< What is wrong, and which command or setting cures it.
};
using AssignAnswer = std::variant<BeginAt, NotYetOurs, Refused>;

/// Created for one consumer. Functions without a word on threads are for the consumer's loop, and
/// every answer is given there.
class Strategy {
  public:
    using Answer = std::function<void(Message&, Verdict)>;

    Strategy() = default;
    Strategy(const Strategy&) = delete;
    Strategy& operator=(const Strategy&) = delete;
    virtual ~Strategy() = default;

    /// How many messages it would take now. Never more are given to run(). 0: it says by
    /// on_capacity when that changes.
    [[nodiscard]] virtual std::size_t capacity() const = 0;
    /// Set by the consumer before the first run.
    std::function<void()> on_capacity;
    /// Set by the consumer before the first run. Called while how runs ended cannot be recorded for
    /// longer, with words for an alarm, and with none when that is over.
    std::function<void(std::string)> on_trouble;

    /// Runs the messages. Those of one lane come together, in their order, and no other run holds
    /// any of that lane; they are run one after the other, and behind one that does not end Applied
    /// or Duplicate the rest of its lane ends Held. `answer` is called exactly once for each
    /// message, sooner or later, in any order, also before run returns. `alone`: one message, a
    /// suspect, and nothing else is in hand.
    virtual void run(std::vector<Message*> messages, bool alone, const Answer& answer) = 0;

    /// A partition came to this member: fences the former owner off. Blocks; on a thread of its
    /// own, several partitions side by side. Nothing of it runs before.
    virtual AssignAnswer assigned(const brokers::AssignmentPtr& assignment) = 0;
    /// It is leaving or gone: runs of its messages that have not started are to end Held or Fenced
    /// at once.
    virtual void leaving(const brokers::AssignmentPtr& assignment) = 0;
    /// The breaker has opened: runs that have not started are to end Held at once, so that they do
    /// not meet what is ill. For a strategy that keeps no more than what runs this is nothing.
    virtual void hold_back() {}
    /// All messages of the partition below `next` are finished. Told now and then, and before it is
    /// released.
    virtual void watermark(const brokers::AssignmentPtr& assignment, std::int64_t next) = 0;

    /// The letter of a message that ended Dead is confirmed: `done` (an Error: not recorded, ask
    /// again) is called on the loop; afterwards the message may be settled.
    virtual void letter_published(const Message& message, const Dead& dead,
                                  std::function<void(base::Result<void>)> done) = 0;

    /// Started handlers end within `within` or are abandoned: their messages end as if this process
    /// had died. `done` once nothing of the strategy runs any more; until then the loop must run.
    virtual void stop(milliseconds within, std::function<void()> done) = 0;

    /// What it promises, in one or two sentences for people: for the log at the start and for
    /// `semel doctor`.
    [[nodiscard]] virtual std::string promise() const = 0;
};

}  // namespace semel::consumer
