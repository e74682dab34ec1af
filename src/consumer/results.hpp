// Results: what handlers answered, published once it is recorded. The one way for the handler `ai`
// and for the strategies `store` and `table`.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/hash.hpp"
#include "consumer/consumer.hpp"
#include "consumer/handler.hpp"
#include "consumer/records.hpp"
#include "consumer/strategies/record_queue.hpp"
#include "consumer/verdict.hpp"

namespace semel::consumer {

/// Publishes an answer under the id of its message and says when it is confirmed, on any thread.
/// Error invalid_argument: it can never be taken (too large, an id that cannot be a property).
using PublishResult = std::function<void(std::string id, HandlerAnswerPtr answer,
                                         std::function<void(base::Result<void>)> done)>;

struct ResultsOptions {
    /// A duplicate's result is published again, the same bytes under the same id. Else what is
    /// published is marked, and a duplicate's is published only without a mark.
    bool republish = false;
    core::Owner owner;
    /// Who publishes has so long to mark it; who died meanwhile is replaced after it.
    milliseconds lease{10'000};
    /// Of a mark, from when it says "published": at least that of the record, which is older.
    milliseconds retention{std::chrono::hours{24 * 7}};
};

/// For one loop, which outlives it as the records do.
///
/// Answers that are recorded at about the same time are a group: each record names it, and once the
/// broker has confirmed them all one record marks the group as published. An answer whose group
/// will not be marked (another of it was refused, its process died) has a mark of its own: a record
/// of the name (id of the message, bytes of the answer), claimed, and completed when the broker has
/// confirmed. So of a message that is run anew after its record was forgotten another answer is not
/// taken for the published one.
class Results {
  public:
    /// Nullopt: the result is with the broker, by this call or since before. Else how the message's
    /// run ends: Busy (another publishes it), Ill (broker or store), Dead (it can never be taken).
    using Done = std::function<void(std::optional<Verdict>)>;
    /// 0: none.
    using Group = std::uint64_t;

    /// `records` hold the marks; null where options.republish is set. `counters` outlive it.
    Results(runtime::Loop& loop, ResultsOptions options, Records* records,
            ConsumerCounters& counters, PublishResult publish);
    ~Results();
    Results(const Results&) = delete;
    Results& operator=(const Results&) = delete;

    /// The group of an answer that is about to be recorded; 0 where nothing is marked. It ends with
    /// publish_recorded or leave.
    Group join(const Message& message);
    /// It is not known to be recorded, or not published by this process.
    void leave(const Message& message, Group group);
    /// As records name it; empty for 0.
    [[nodiscard]] std::string name_of(Group group) const;

    // `done` on the loop, once, never before these return. Of `message` nothing is held.

    /// This process has just recorded `answer` under the message for good, in `group`.
    void publish_recorded(const Message& message, HandlerAnswerPtr answer, Group group, Done done);
    /// A duplicate found `answer` in `record` at the store's time `at`.
    void publish_found(const Message& message, HandlerAnswerPtr answer, const core::Record& record,
                       core::StoreTime at, Done done);
    /// `answer` is recorded; by whom, when and in what group is not known. `again`: for a
    /// duplicate.
    void publish(const Message& message, HandlerAnswerPtr answer, bool again, Done done);
    /// On the loop, after the calls of `done` that one event brought.
    std::function<void()> over;
    /// For promise().
    [[nodiscard]] std::string promise() const;

  private:
    struct Work;
    struct Gate;
    struct Members;
    struct Mark;
    using Answered = base::Result<core::Decided>;

    Work& begin(const Message& message, HandlerAnswerPtr answer, Done done);
    void looked(Work& work, const Answered& result);
    void claim(Work& work);
    void claim_later(Work& work);
    void claimed(Work& work, const Answered& result);
    void send(Work& work);
    void confirmed(Work& work, base::Result<void> result);
    void mark(Work& work);
    void marked(Work& work, const Answered& result);
    void give_back(const Work& work);
    void finish(Work& work, std::optional<Verdict> verdict);
    void heard();

    void gather(Work& work);
    void break_up(Group group);
    void mark_alone(Work& work);
    void mark_group(Group group);
    void send(Mark& mark);
    void marked(Mark& mark, const Answered& result);
    void forget(const base::Digest& message);
    [[nodiscard]] core::Acquire acquire(const base::Digest& key, core::Nonce nonce) const;

    static RecordStep step_on_mark(const Work& work, core::Operation operation);
    static RecordStep step_on_group(const std::string& name, core::Operation operation);
    core::Nonce fresh_nonce();

    runtime::Loop& loop_;
    const ResultsOptions options_;
    Records* const records_;
    ConsumerCounters& counters_;
    const PublishResult publish_;
    const std::shared_ptr<Gate> gate_;
    std::list<Work> works_;
    std::list<Mark> marks_;  ///< On their way.
    /// Those of which more is to come. One that is not here will not be marked.
    std::unordered_map<Group, Members> groups_;
    Group open_ = 0;  ///< Takes answers until the first of it is published.
    Group last_group_ = 0;
    /// Messages whose answers this process records or publishes, and how often.
    std::unordered_map<base::Digest, std::uint32_t, base::DigestHash> working_;
    std::uint64_t nonce_base_ = 0;
    std::uint64_t last_nonce_ = 0;
    std::string names_begin_;
    std::optional<RecordQueue> queue_;
};

/// The answer as a record holds it (`group`: the name of its group; empty: none), and back; null:
/// the record holds none.
core::Answer recorded_answer(const HandlerAnswerPtr& answer, std::string group = {});
HandlerAnswerPtr answer_of(const core::Record& record);

}  // namespace semel::consumer
