#include "consumer/strategies/transaction.hpp"

#include <algorithm>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "consumer/strategies/transaction_work.hpp"

namespace semel::consumer {
namespace {

/// A part of one run() call that goes to one connection.
struct Job {
    HeldPartitionPtr partition;  ///< Null: no partition is kept, or it is not ours any more.
    std::vector<Message*> messages;
    Strategy::Answer answer;
};

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
          workers_(loop, connect_, work_->options().connections) {
        workers_.on_end = [this] {
            pump();
            told_capacity();
            end_if_idle();
        };
    }

    [[nodiscard]] std::size_t capacity() const override {
        if (stopping_) return 0;
        const std::size_t out = workers_.running() + waiting_.size();
        return out >= workers_.size() ? 0 : (workers_.size() - out) * work_->options().batch_max;
    }

    void run(std::vector<Message*> messages, bool /*alone*/, const Answer& answer) override {
        if (stopping_) {
            for (Message* one : messages) answer(*one, Held{});
            return;
        }
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
            HeldPartitionPtr partition;
            if (assignment != nullptr) {
                partition = held(assignment);
                if (partition == nullptr || partition->leaving) {
                    for (Message* one : of_it) answer(*one, Fenced{});
                    continue;
                }
            }
            if (work_->options().in_order) {
                waiting_.push_back({partition, std::move(of_it), answer});
                continue;
            }
            for (auto& part : split_by_lanes(std::move(of_it), work_->options().batch_max))
                waiting_.push_back({partition, std::move(part), answer});
        }
        pump();
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
        auto held = std::make_shared<HeldPartition>();
        held->fence = {partition, taken.epoch};
        held->position = taken.next_offset;
        const std::lock_guard lock(mutex_);
        std::erase_if(partitions_, [](const auto& one) { return one.second.first.expired(); });
        partitions_[assignment.get()] = {assignment, std::move(held)};
        return BeginAt{taken.next_offset};
    }

    void leaving(const brokers::AssignmentPtr& assignment) override {
        const HeldPartitionPtr partition = held(assignment.get());
        if (partition == nullptr) return;
        partition->leaving = true;
        std::vector<Job> dropped;
        for (Job& job : waiting_)
            if (job.partition == partition) dropped.push_back(std::move(job));
        std::erase_if(waiting_, [](const Job& job) { return job.messages.empty(); });
        for (const Job& job : dropped)
            for (Message* one : job.messages) job.answer(*one, Fenced{});
        if (!dropped.empty()) told_capacity();
    }

    void watermark(const brokers::AssignmentPtr& assignment, std::int64_t next) override {
        if (work_->options().in_order) return;  // it moves with the effects
        const HeldPartitionPtr partition = held(assignment.get());
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
        workers_.start([this, source = message.source, id = message.id, token = dead.token,
                        done = std::move(done)](Link& link) mutable -> std::function<void()> {
            auto result = work_->letter_published(link, source, id, token);
            return [done = std::move(done), result = std::move(result)]() mutable {
                done(std::move(result));
            };
        });
    }

    void stop(milliseconds within, std::function<void()> done) override {
        stopping_ = true;
        stopped_ = std::move(done);
        std::deque<Job> dropped = std::move(waiting_);
        waiting_.clear();
        for (const Job& job : dropped)
            for (Message* one : job.messages) job.answer(*one, Held{});
        stop_timer_ = loop_.at(loop_.now() + within, [this] { workers_.abandon(); });
        end_if_idle();
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

    HeldPartitionPtr held(const brokers::Assignment* assignment) const {
        const std::lock_guard lock(mutex_);
        const auto found = partitions_.find(assignment);
        return found == partitions_.end() ? nullptr : found->second.second;
    }

    void pump() {
        while (workers_.running() < workers_.size() && !waiting_.empty()) {
            Job job = std::move(waiting_.front());
            waiting_.pop_front();
            workers_.start(
                [this, job = std::move(job)](Link& link) mutable -> std::function<void()> {
                    auto verdicts = work_->run(link, job.partition.get(), job.messages);
                    return [job = std::move(job), verdicts = std::move(verdicts)]() mutable {
                        for (std::size_t i = 0; i < job.messages.size(); ++i)
                            job.answer(*job.messages[i], std::move(verdicts[i]));
                    };
                });
        }
    }

    void advance(const HeldPartitionPtr& partition) {
        if (partition->advancing || !partition->watermark) return;
        const std::int64_t next = *partition->watermark;
        partition->watermark.reset();
        partition->advancing = true;
        workers_.start([this, partition, next](Link& link) -> std::function<void()> {
            work_->advance(link, *partition, next);
            return [this, partition] {
                partition->advancing = false;
                advance(partition);
            };
        });
    }

    void told_capacity() {
        if (on_capacity && capacity() > 0) on_capacity();
    }
    void end_if_idle() {
        if (!stopped_ || workers_.running() > 0) return;
        loop_.cancel(stop_timer_);
        loop_.post(std::exchange(stopped_, nullptr));
    }

    runtime::Loop& loop_;
    std::unique_ptr<TransactionWork> work_;
    const inbox::Connect connect_;
    const bool callback_;
    mutable std::mutex mutex_;  ///< Of partitions_: assigned() runs on threads of its own.
    std::unordered_map<const brokers::Assignment*,
                       std::pair<std::weak_ptr<brokers::Assignment>, HeldPartitionPtr>>
        partitions_;
    std::deque<Job> waiting_;
    bool stopping_ = false;
    std::function<void()> stopped_;
    runtime::TimerId stop_timer_ = 0;
    LoopWorkers workers_;  // last: its threads end first
};

}  // namespace

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
