#include "consumer/strategies/transaction.hpp"

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "consumer/strategies/db_jobs.hpp"
#include "consumer/strategies/transaction_work.hpp"

namespace semel::consumer {
namespace {

constexpr milliseconds log_within{10'000};

std::string taken_over(std::int64_t offset) {
    return ", took over position " + std::to_string(offset);
}

class TransactionStrategy final : public Strategy {
  public:
    TransactionStrategy(runtime::Loop& loop, std::unique_ptr<TransactionWork> work,
                        inbox::Connect connect, bool in_transaction_callback)
        : loop_(loop),
          work_(std::move(work)),
          connect_(std::move(connect)),
          callback_(in_transaction_callback),
          jobs_(
              loop, connect_, work_->options().connections, work_->options().batch_max,
              [this](Link& link, const std::shared_ptr<DbJob>& job) -> std::function<void()> {
                  auto verdicts = work_->run(link, job->partition.get(), job->messages, job->alone);
                  return [job, verdicts = std::move(verdicts)]() mutable {
                      for (std::size_t i = 0; i < job->messages.size(); ++i)
                          job->answer(*job->messages[i], std::move(verdicts[i]));
                  };
              },
              [this] {
                  if (on_capacity && capacity() > 0) on_capacity();
              }) {}

    [[nodiscard]] std::size_t capacity() const override { return jobs_.capacity(); }

    void run(std::vector<Message*> messages, bool alone, const Answer& answer) override {
        std::vector<std::pair<brokers::Assignment*, std::vector<Message*>>> groups;
        for (Message* one : messages) {
            brokers::Assignment* of =
                work_->options().partitions ? one->delivery.receipt.assignment.get() : nullptr;
            auto found = std::find_if(groups.begin(), groups.end(),
                                      [&](const auto& group) { return group.first == of; });
            if (found == groups.end()) found = groups.insert(found, {of, {}});
            found->second.push_back(one);
        }
        for (auto& [assignment, of_it] : groups) {
            TakenPartitionPtr partition;
            if (assignment != nullptr) {
                partition = held(assignment);
                if (partition == nullptr || partition->leaving) {
                    for (Message* one : of_it) answer(*one, Fenced{});
                    continue;
                }
            }
            if (work_->options().in_order) {
                jobs_.push({std::move(of_it), answer, partition, alone});
                continue;
            }
            for (auto& part : split_by_lanes(std::move(of_it), work_->options().batch_max))
                jobs_.push({std::move(part), answer, partition, alone});
        }
    }

    AssignAnswer assigned(const brokers::AssignmentPtr& assignment) override {
        const TransactionOptions& options = work_->options();
        if (!options.partitions) return BeginAt{};
        const inbox::Partition partition{.topic = assignment->topic(),
                                         .number = assignment->partition().number};
        auto connected = connect_safely(connect_);
        if (auto* problem = std::get_if<sql::Problem>(&connected))
            return NotYetOurs{problem->error.detail};
        sql::Executor& executor = *std::get<0>(connected);

        std::string topic_id;
        if (auto answer = look_at_log(executor, assignment->partition(), topic_id))
            return std::move(*answer);
        const std::optional<std::int64_t> committed = assignment->committed();
        const bool ours = assignment->committed_metadata().starts_with(commit_mark);
        const bool foreign = committed && !ours;
        bool seen = false;
        if (foreign) {
            auto former = former_owner(executor, partition);
            if (auto* problem = std::get_if<sql::Problem>(&former)) return not_ours(*problem);
            seen = std::get<std::string>(former).ends_with(taken_over(*committed));
        }
        const std::string owner = options.owner.substr(0, owner_max);
        auto answer =
            work_->inbox().assign(executor, partition, owner + (seen ? taken_over(*committed) : ""),
                                  committed, options.assign_wait);
        if (auto* problem = std::get_if<sql::Problem>(&answer)) return not_ours(*problem);
        const auto& outcome = std::get<inbox::AssignOutcome>(answer);
        if (std::holds_alternative<inbox::StillBusy>(outcome)) {
            return NotYetOurs{"a transaction of the former owner of " + name(partition) +
                              " is still open: it ends by itself"};
        }
        const auto& taken = std::get<inbox::Assigned>(outcome);
        if (foreign && !seen) {
            if (taken.next_offset && *taken.next_offset != *committed) {
                return Refused{"the group's committed position of " + name(partition) + " is " +
                               std::to_string(*committed) +
                               ", set by somebody else, and the effects stand at " +
                               std::to_string(*taken.next_offset) +
                               ": `semel consumer reset` sets both and says whether done ids run "
                               "again; until then nothing of it is taken"};
            }
            // It stands in the group until the first commit of our own, and falls behind the
            // effects meanwhile: the next owner is to know that it is no reset.
            auto noted =
                set_owner(executor, partition, taken.epoch, owner + taken_over(*committed));
            if (auto* problem = std::get_if<sql::Problem>(&noted)) return not_ours(*problem);
        }
        if (auto problem = note_topic_id(executor, partition, topic_id)) return not_ours(*problem);
        auto held = std::make_shared<TakenPartition>();
        held->fence = {partition, taken.epoch};
        held->position = taken.next_offset;
        if (auto problem = work_->count_deaths(executor, *held)) return not_ours(*problem);
        const std::lock_guard lock(mutex_);
        std::erase_if(partitions_, [](const auto& one) { return one.second.first.expired(); });
        partitions_[assignment.get()] = {assignment, std::move(held)};
        return BeginAt{taken.next_offset};
    }

    void leaving(const brokers::AssignmentPtr& assignment) override {
        const TakenPartitionPtr partition = held(assignment.get());
        if (partition == nullptr) return;
        partition->leaving = true;
        jobs_.drop(assignment);
    }

    void hold_back() override { jobs_.hold_back(); }

    void watermark(const brokers::AssignmentPtr& assignment, std::int64_t next) override {
        if (work_->options().in_order) return;  // it moves with the effects
        const TakenPartitionPtr partition = held(assignment.get());
        if (partition == nullptr) return;
        partition->watermark = std::max(partition->watermark.value_or(next), next);
        advance(partition);
    }

    void letter_published(const Message& message, const Dead& dead,
                          std::function<void(base::Result<void>)> done) override {
        if (dead.token.value == 0) {
            loop_.post([done = std::move(done)] { done({}); });
            return;
        }
        jobs_.start([this, source = message.source, id = message.id, token = dead.token,
                     done = std::move(done)](Link& link) mutable -> std::function<void()> {
            auto result = work_->letter_published(link, source, id, token);
            return [done = std::move(done), result = std::move(result)]() mutable {
                done(std::move(result));
            };
        });
    }

    void stop(milliseconds within, std::function<void()> done) override {
        jobs_.stop(within, [this, done = std::move(done)]() mutable {
            jobs_.start([this, done = std::move(done)](Link& link) -> std::function<void()> {
                work_->leave(link);
                return done;
            });
        });
    }

    [[nodiscard]] std::string promise() const override {
        std::string words =
            "Effects exactly once, also under kill -9 and when a partition moves, as long as they "
            "are rows of this database: the row of message_dedup that says done is committed with "
            "them.";
        if (!work_->options().partitions)
            words += " A message is acknowledged after that.";
        else if (work_->options().in_order)
            words += " The position moves in the same transaction.";
        if (callback_)
            words += " What the callback does outside of its transaction is at least once.";
        return words;
    }

  private:
    /// semel_assignments.owner, less what taken_over() adds.
    static constexpr std::size_t owner_max = inbox::name_max_bytes - 48;

    static std::string name(const inbox::Partition& partition) {
        return partition.topic + "-" + std::to_string(partition.number);
    }
    static AssignAnswer not_ours(const sql::Problem& problem) {
        return NotYetOurs{problem.error.detail};
    }

    inbox::StatementBuilder& of_partition(inbox::StatementBuilder& sql, sql::Dialect dialect,
                                          const inbox::Partition& partition) const {
        sql.text(" WHERE scope = ").label(work_->options().inbox.scope);
        sql.text(" AND topic = ").label(partition.topic);
        return sql.text(std::string(" AND ") + inbox::partition_column(dialect) + " = ")
            .number(partition.number);
    }
    sql::Tried<std::string> former_owner(sql::Executor& executor,
                                         const inbox::Partition& partition) const {
        const inbox::Tables tables(executor.dialect(), work_->options().inbox.place);
        inbox::StatementBuilder sql(executor.dialect());
        sql.text("SELECT owner FROM " + tables.assignments);
        of_partition(sql, executor.dialect(), partition);
        auto answer = executor.run(sql.finish());
        if (auto* problem = std::get_if<sql::Problem>(&answer)) return std::move(*problem);
        const auto& rows = std::get<sql::ResultRows>(answer).rows;
        return rows.empty() ? std::string() : rows[0][0].value_or("");
    }
    sql::Tried<sql::Done> set_owner(sql::Executor& executor, const inbox::Partition& partition,
                                    std::int64_t epoch, const std::string& owner) const {
        const inbox::Tables tables(executor.dialect(), work_->options().inbox.place);
        inbox::StatementBuilder sql(executor.dialect());
        sql.text("UPDATE " + tables.assignments + " SET owner = ").label(owner);
        of_partition(sql, executor.dialect(), partition).text(" AND epoch = ").number(epoch);
        auto answer = executor.run(sql.finish());
        if (auto* problem = std::get_if<sql::Problem>(&answer)) return std::move(*problem);
        return sql::Done{};
    }

    /// Whether the log is still the one that the position of the effects is in; empty: it is, as
    /// far as can be known. `topic_id`: as the broker says.
    std::optional<AssignAnswer> look_at_log(sql::Executor& executor, const brokers::Partition& of,
                                            std::string& topic_id) {
        const TransactionOptions& options = work_->options();
        if (!options.log) return {};
        auto said = options.log(of);
        if (!said) return NotYetOurs{said.error().detail};
        topic_id = said->topic_id;
        const inbox::Partition partition{.topic = of.topic, .number = of.number};
        const inbox::Tables tables(executor.dialect(), options.inbox.place);
        inbox::StatementBuilder sql(executor.dialect());
        sql.text("SELECT next_offset, topic_id FROM " + tables.offsets);
        of_partition(sql, executor.dialect(), partition);
        auto answer = executor.run(sql.finish());
        if (auto* problem = std::get_if<sql::Problem>(&answer)) return not_ours(*problem);
        const auto& rows = std::get<sql::ResultRows>(answer).rows;
        if (rows.empty()) return {};
        const std::string cure =
            "nothing of it is taken until `semel consumer reset` says where to go on, and whether "
            "ids that are done run again";
        const std::string known = rows[0][1].value_or("");
        if (!known.empty() && !topic_id.empty() && known != topic_id)
            return Refused{"the topic " + of.topic +
                           " is another one than its effects are of: it was deleted and made again "
                           "under the same name; " +
                           cure};
        const std::lock_guard lock(mutex_);
        if (!rows[0][0] || !said->end || *said->end >= inbox::number_of(rows[0][0])) {
            short_since_.erase(of);
            return {};
        }
        const std::string words = "the log of " + name(partition) + " ends at " +
                                  std::to_string(*said->end) + ", and the effects stand at " +
                                  *rows[0][0];
        const auto now = std::chrono::steady_clock::now();
        if (now - short_since_.try_emplace(of, now).first->second < options.log_patience)
            return NotYetOurs{words};
        return Refused{words + ": the topic was deleted and made again, or has lost its end; " +
                       cure};
    }
    /// A position whose topic's id is not known is of the topic that there is.
    std::optional<sql::Problem> note_topic_id(sql::Executor& executor,
                                              const inbox::Partition& partition,
                                              const std::string& topic_id) const {
        if (topic_id.empty()) return {};
        const inbox::Tables tables(executor.dialect(), work_->options().inbox.place);
        inbox::StatementBuilder sql(executor.dialect());
        sql.text("UPDATE " + tables.offsets + " SET topic_id = ").label(topic_id);
        of_partition(sql, executor.dialect(), partition).text(" AND topic_id IS NULL");
        auto answer = executor.run(sql.finish());
        if (auto* problem = std::get_if<sql::Problem>(&answer)) return std::move(*problem);
        return {};
    }

    TakenPartitionPtr held(const brokers::Assignment* assignment) const {
        const std::lock_guard lock(mutex_);
        const auto found = partitions_.find(assignment);
        return found == partitions_.end() ? nullptr : found->second.second;
    }

    void advance(const TakenPartitionPtr& partition) {
        if (partition->advancing || !partition->watermark) return;
        const std::int64_t next = *partition->watermark;
        partition->watermark.reset();
        partition->advancing = true;
        jobs_.start([this, partition, next](Link& link) -> std::function<void()> {
            work_->advance(link, *partition, next);
            return [this, partition] {
                partition->advancing = false;
                advance(partition);
            };
        });
    }

    runtime::Loop& loop_;
    std::unique_ptr<TransactionWork> work_;
    const inbox::Connect connect_;
    const bool callback_;
    mutable std::mutex mutex_;  ///< Of what follows: assigned() runs on threads of its own.
    std::map<brokers::Partition, std::chrono::steady_clock::time_point> short_since_;
    std::unordered_map<const brokers::Assignment*,
                       std::pair<std::weak_ptr<brokers::Assignment>, TakenPartitionPtr>>
        partitions_;
    DbJobs jobs_;  // last: its threads end first
};

}  // namespace

std::function<base::Result<LogFacts>(const brokers::Partition&)> log_of(brokers::Source& source) {
    return [&source](const brokers::Partition& of) -> base::Result<LogFacts> {
        auto id = source.topic_id(of.topic, log_within);
        if (!id) return id.error();
        auto lags = source.lag(log_within);
        if (!lags) return lags.error();
        LogFacts facts{.topic_id = std::move(*id), .end = {}};
        for (const brokers::PartitionLag& one : *lags)
            if (one.partition == of) facts.end = one.end;
        return facts;
    };
}

base::Result<std::unique_ptr<Strategy>> make_transaction(
    runtime::Loop& loop, TransactionOptions options, inbox::Connect connect,
    std::variant<SqlEffects, TransactionCallback> effect, ConsumerCounters& counters) {
    const bool callback = std::holds_alternative<TransactionCallback>(effect);
    auto work = TransactionWork::make(std::move(options), std::move(effect), counters);
    if (!work) return work.error();
    return std::unique_ptr<Strategy>(std::make_unique<TransactionStrategy>(
        loop, std::move(*work), std::move(connect), callback));
}

}  // namespace semel::consumer
