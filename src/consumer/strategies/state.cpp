#include "consumer/strategies/state.hpp"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "consumer/strategies/db_jobs.hpp"
#include "consumer/strategies/failures.hpp"
#include "consumer/strategies/state_work.hpp"

namespace semel::consumer {
namespace {

using Kind = StateResult::Kind;

/// Messages of a new assignment whose record is looked for although they succeed at once: a former
/// process may have written down that they failed. More than a consumer has in hand.
constexpr std::size_t looked_for_max = 10'000;

/// Failed runs on their way to the records.
struct Notes {
    std::vector<std::pair<Message*, FailureNote>> all;
    Strategy::Answer answer;
    std::vector<std::pair<std::size_t, std::size_t>> second;  ///< Index in `all`, number of steps.
};

bool redriven(const Message& message) {
    return std::any_of(message.delivery.headers.begin(), message.delivery.headers.end(),
                       [](const auto& one) { return one.name == original_source_header; });
}

class StateStrategy final : public Strategy {
  public:
    StateStrategy(runtime::Loop& loop, std::unique_ptr<StateWork> work,
                  const inbox::Connect& connect, Records& records, ConsumerCounters& counters)
        : loop_(loop),
          work_(std::move(work)),
          records_(records),
          counters_(counters),
          rules_({.retry = work_->options().retry,
                  .owner = work_->options().owner,
                  .label = work_->options().name,
                  .retention_dead = work_->options().retention_dead}),
          jobs_(
              loop, connect, work_->options().connections, work_->options().batch_max,
              [this](Link& link, const std::shared_ptr<DbJob>& job) -> std::function<void()> {
                  auto results = work_->run(link, job->messages);
                  return [this, job, results = std::move(results)] { take(*job, results); };
              },
              [this] {
                  if (on_capacity && capacity() > 0) on_capacity();
              }) {}

    [[nodiscard]] std::size_t capacity() const override { return jobs_.capacity(); }

    void run(std::vector<Message*> messages, bool /*alone*/, const Answer& answer) override {
        for (auto& part : split_by_lanes(std::move(messages), jobs_.batch_max()))
            jobs_.push({.messages = std::move(part), .answer = answer, .partition = nullptr});
    }

    AssignAnswer assigned(const brokers::AssignmentPtr& assignment) override {
        // On a thread of its own; the loop learns of it before the first message.
        loop_.post([this, alive = std::weak_ptr<bool>(alive_), assignment] {
            if (alive.expired()) return;
            std::erase_if(looks_left_, [](const auto& one) { return one.second.first.expired(); });
            looks_left_[assignment.get()] = {assignment, looked_for_max};
        });
        return BeginAt{};
    }

    void leaving(const brokers::AssignmentPtr& assignment) override {
        looks_left_.erase(assignment.get());
        jobs_.drop(assignment);
    }
    void hold_back() override { jobs_.hold_back(); }

    void watermark(const brokers::AssignmentPtr&, std::int64_t) override {}

    void letter_published(const Message& message, const Dead& dead,
                          std::function<void(base::Result<void>)> done) override {
        if (dead.token.value == 0) {
            loop_.post([done = std::move(done)] { done({}); });
            return;
        }
        RecordSteps steps;
        steps.push_back(step_on(message, core::LetterPublished{dead.token}));
        submit(std::move(steps), [done = std::move(done)](auto answers) {
            // A record that has moved on (begun anew, decided by a person) needs no mark.
            if (!answers[0])
                done(answers[0].error());
            else
                done({});
        });
    }

    void stop(milliseconds within, std::function<void()> done) override {
        jobs_.stop(within, std::move(done), [this] { return submitted_ > 0; });
    }

    [[nodiscard]] std::string promise() const override {
        const config::StateConfig& config = work_->options().config;
        std::string words = "Each row of " + config.table + " makes the transition to " +
                            config.to +
                            " once, also under kill -9: the row itself says whether "
                            "it was made. Failures and dead letters are kept in " +
                            records_.name() + '.';
        if (config.message_id_column.empty()) {
            words +=
                " If a later transition can lead back to where this one starts, name a "
                "message_id_column or use the strategy transaction.";
        }
        return words;
    }

  private:
    void submit(RecordSteps steps, RecordsDone done) {
        ++submitted_;
        records_.submit(std::move(steps), [this, alive = std::weak_ptr<bool>(alive_),
                                           done = std::move(done)](auto answers) {
            if (alive.expired()) return;
            --submitted_;
            done(std::move(answers));
            jobs_.ended();
        });
    }

    void take(const DbJob& job, const std::vector<StateResult>& results) {
        auto notes = std::make_shared<Notes>();
        notes->answer = job.answer;
        std::vector<Message*> done;
        std::vector<std::pair<Message*, Verdict>> verdicts;
        for (std::size_t i = 0; i < results.size(); ++i) {
            Message& message = *job.messages[i];
            const StateResult& result = results[i];
            const auto note = [&](FailedRun failed) {
                failed.reason = result.reason;
                notes->all.emplace_back(&message, FailureNote(rules_, message, std::move(failed)));
            };
            const auto tell = [&](Verdict verdict) {
                verdicts.emplace_back(&message, std::move(verdict));
            };
            switch (result.kind) {
                case Kind::applied:
                    done.push_back(&message);
                    tell(Applied{});
                    break;
                case Kind::superseded:
                    ++counters_.skipped;
                    [[fallthrough]];
                case Kind::duplicate:
                    done.push_back(&message);
                    tell(Duplicate{});
                    break;
                case Kind::not_yet:
                    ++counters_.not_yet;
                    note({.code = "not-yet", .reason = {}});
                    break;
                case Kind::failed:
                    note({.code = "failed", .reason = {}});
                    break;
                case Kind::fatal:
                    note({.dead = DeadClass::fatal, .for_good = true, .code = {}, .reason = {}});
                    break;
                case Kind::conflict:
                    note({.dead = DeadClass::conflict, .for_good = true, .code = {}, .reason = {}});
                    break;
                case Kind::unreadable:
                    tell(Dead{.why = DeadClass::decode, .reason = result.reason, .token = {}});
                    break;
                case Kind::busy:
                    tell(Busy{busy_again});
                    break;
                case Kind::ill:
                    tell(Ill{result.reason});
                    break;
                case Kind::held:
                    tell(Held{});
                    break;
            }
        }
        close_records(done);
        if (!notes->all.empty()) claim(notes);
        for (auto& [message, verdict] : verdicts) job.answer(*message, std::move(verdict));
    }

    // ---- failures

    void claim(const std::shared_ptr<Notes>& notes) {
        RecordSteps steps;
        for (auto& [message, note] : notes->all) {
            failed_.insert(message->key);
            for (core::Operation& one : note.claim())
                steps.push_back(step_on(*message, std::move(one)));
        }
        submit(std::move(steps), [this, notes](auto answers) { claimed(notes, answers); });
    }
    void claimed(const std::shared_ptr<Notes>& notes,
                 const std::vector<base::Result<core::Decided>>& answers) {
        RecordSteps steps;
        std::vector<std::pair<Message*, Verdict>> verdicts;
        for (std::size_t n = 0; n < notes->all.size(); ++n) {
            auto& [message, note] = notes->all[n];
            auto next = note.after_claim(FailureNote::Results(answers).subspan(2 * n, 2));
            if (auto* verdict = std::get_if<Verdict>(&next)) {
                verdicts.emplace_back(message, std::move(*verdict));
                continue;
            }
            auto& operations = std::get<0>(next);
            notes->second.emplace_back(n, operations.size());
            for (core::Operation& one : operations)
                steps.push_back(step_on(*message, std::move(one)));
        }
        if (!steps.empty())
            submit(std::move(steps), [this, notes](auto second) { recorded(notes, second); });
        for (auto& [message, verdict] : verdicts)
            tell_failed(notes->answer, *message, std::move(verdict));
    }
    void recorded(const std::shared_ptr<Notes>& notes,
                  const std::vector<base::Result<core::Decided>>& answers) {
        std::size_t at = 0;
        for (const auto& [n, steps] : notes->second) {
            auto& [message, note] = notes->all[n];
            Verdict verdict = note.after_record(FailureNote::Results(answers).subspan(at, steps));
            at += steps;
            tell_failed(notes->answer, *message, std::move(verdict));
        }
    }
    void tell_failed(const Answer& answer, Message& message, Verdict verdict) {
        // What is dead leaves no record to be closed.
        if (std::holds_alternative<Dead>(verdict)) failed_.erase(message.key);
        answer(message, std::move(verdict));
    }

    /// Of messages that have failed before, and are done now: an undecided record is kept for ever.
    /// A record that is left open by a crash here costs its room and nothing else.
    void close_records(const std::vector<Message*>& done) {
        RecordSteps steps;
        for (const Message* one : done)
            if (may_have_record(*one)) steps.push_back(step_on(*one, core::Get{}));
        if (steps.empty()) return;
        RecordSteps named = steps;  // the messages may be gone when the answers come
        submit(std::move(steps), [this, named = std::move(named)](auto answers) mutable {
            RecordSteps closing;
            for (std::size_t i = 0; i < named.size(); ++i) {
                if (!answers[i]) continue;
                const auto* found = std::get_if<core::Found>(&answers[i]->outcome);
                if (found == nullptr || found->record == nullptr ||
                    found->record->status != core::Status::failed)
                    continue;
                named[i].operation =
                    core::Complete{.token = found->record->token,
                                   .nonce = found->record->nonce,
                                   .answer = {.body_kind = core::BodyKind::not_kept},
                                   .usage = {},
                                   .append = {}};
                closing.push_back(std::move(named[i]));
            }
            if (!closing.empty()) submit(std::move(closing), [](const auto&) {});
        });
    }
    bool may_have_record(const Message& message) {
        const auto left = looks_left_.find(message.delivery.receipt.assignment.get());
        const bool early = left != looks_left_.end() && left->second.second > 0;
        if (early) --left->second.second;
        return failed_.erase(message.key) > 0 || early || message.delivery.redelivered ||
               redriven(message);
    }

    runtime::Loop& loop_;
    std::unique_ptr<StateWork> work_;
    Records& records_;
    ConsumerCounters& counters_;
    const FailureRules rules_;
    std::unordered_set<base::Digest, base::DigestHash> failed_;  ///< In hand, with a record.
    std::unordered_map<const brokers::Assignment*,
                       std::pair<std::weak_ptr<brokers::Assignment>, std::size_t>>
        looks_left_;
    std::size_t submitted_ = 0;
    std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
    DbJobs jobs_;  // last: its threads end first
};

}  // namespace

base::Result<std::unique_ptr<Strategy>> make_state(runtime::Loop& loop, StateOptions options,
                                                   inbox::Connect connect, Records& records,
                                                   ConsumerCounters& counters) {
    auto work = StateWork::make(std::move(options));
    if (!work) return work.error();
    return std::unique_ptr<Strategy>(
        std::make_unique<StateStrategy>(loop, std::move(*work), connect, records, counters));
}

}  // namespace semel::consumer
