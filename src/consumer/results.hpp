// Results: what handlers answered, published once it is recorded. The one way for the handler `ai`
// and for the strategies `store` and `table`.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>

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
    /// A duplicate's result is published again, the same bytes under the same id. Else each result
    /// has a mark that says it is published, and a duplicate's is published only without it.
    bool republish = false;
    core::Owner owner;
    /// Who publishes holds the mark for so long; who died meanwhile is replaced after it.
    milliseconds lease{10'000};
    /// Of a mark, from when it says "published": at least that of the record, which is older.
    milliseconds retention{std::chrono::hours{24 * 7}};
};

/// For one loop, which outlives it as the records do. A mark is a record of its own, of the name
/// (id of the message, bytes of the answer): claimed, and completed when the broker has confirmed.
/// So one process at a time publishes a result, and of a message that is run anew after its record
/// was forgotten another answer is not taken for the published one.
class Results {
  public:
    /// Nullopt: the result is with the broker, by this call or since before. Else how the message's
    /// run ends: Busy (another publishes it), Ill (broker or store), Dead (it can never be taken).
    using Done = std::function<void(std::optional<Verdict>)>;

    /// `records` hold the marks; null where options.republish is set.
    Results(runtime::Loop& loop, ResultsOptions options, Records* records, PublishResult publish);
    ~Results();
    Results(const Results&) = delete;
    Results& operator=(const Results&) = delete;

    /// `answer` is recorded under the message for good. `done` on the loop, once, never before
    /// publish returns. Of `message` nothing is held.
    void publish(const Message& message, HandlerAnswerPtr answer, Done done);
    /// For promise().
    [[nodiscard]] std::string promise() const;

  private:
    struct Work;
    struct Gate;
    using Answered = base::Result<core::Decided>;

    void claim(Work& work);
    void claimed(Work& work, const Answered& result);
    void send(Work& work);
    void confirmed(Work& work, base::Result<void> result);
    void mark(Work& work);
    void marked(Work& work, const Answered& result);
    void give_back(const Work& work);
    void finish(Work& work, std::optional<Verdict> verdict);
    void heard();
    static RecordStep step_on_mark(const Work& work, core::Operation operation);
    core::Nonce fresh_nonce();

    runtime::Loop& loop_;
    const ResultsOptions options_;
    Records* const records_;
    const PublishResult publish_;
    const std::shared_ptr<Gate> gate_;
    std::list<Work> works_;
    std::uint64_t nonce_base_ = 0;
    std::uint64_t last_nonce_ = 0;
    std::optional<RecordQueue> queue_;
};

/// The answer as a record holds it, and back; null: the record holds none.
core::Answer recorded_answer(const HandlerAnswerPtr& answer);
HandlerAnswerPtr answer_of(const core::Record& record);

}  // namespace semel::consumer
