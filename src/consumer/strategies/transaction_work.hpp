// The part of the strategy `transaction` that runs on the threads with connections: messages into
// inbox::TransactionalInbox, its outcomes into verdicts, failures into message_dedup.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <variant>
#include <vector>

#include "consumer/strategies/db_workers.hpp"
#include "consumer/strategies/failures.hpp"
#include "consumer/strategies/sql_template.hpp"
#include "consumer/strategies/transaction.hpp"
#include "inbox/dedup_table.hpp"
#include "inbox/flights.hpp"

namespace semel::consumer {

/// A partition that was taken over.
struct TakenPartition {
    inbox::Fence fence;
    /// ordering: partition. Of the one run that there is at a time: where the position stands;
    /// empty: nobody has said yet, or (if not `position_known`) it has to be read.
    std::optional<std::int64_t> position;
    bool position_known = true;
    std::atomic<bool> leaving{false};
    std::mutex deaths_mutex;
    inbox::DeathsOf deaths;  ///< Guarded by deaths_mutex. Of processes, in callbacks.
    // ---- of the loop
    std::optional<std::int64_t> watermark;  ///< Wanted, not yet on its way.
    bool advancing = false;
};
using TakenPartitionPtr = std::shared_ptr<TakenPartition>;

/// The effects as statements of one dialect.
class SqlEffectSet {
  public:
    /// Error invalid_argument: a statement or parameter that cannot be.
    static base::Result<SqlEffectSet> parse(sql::Dialect dialect,
                                            const config::SqlHandlerConfig& config);

    /// The message's statements; or why its parameters cannot be read.
    [[nodiscard]] std::variant<std::vector<inbox::Effect>, ExtractError> of(
        const Message& message) const;

  private:
    std::vector<config::ValueSpec> specs_;
    std::vector<std::string> names_;
    std::vector<std::pair<SqlTemplate, inbox::Rows>> statements_;
};

/// Thread-safe but for what it is given.
class TransactionWork {
  public:
    static base::Result<std::unique_ptr<TransactionWork>> make(
        TransactionOptions options, std::variant<SqlEffects, TransactionCallback> effect,
        ConsumerCounters& counters);

    [[nodiscard]] const inbox::TransactionalInbox& inbox() const { return inbox_; }
    [[nodiscard]] const TransactionOptions& options() const { return options_; }

    /// One verdict per message. The messages are of one partition (`partition` null: of none).
    /// `alone`: as in Strategy::run.
    std::vector<Verdict> run(Link& link, TakenPartition* partition,
                             std::span<Message* const> messages, bool alone) const;
    /// Moves the position of the partition, if it is still ours.
    void advance(Link& link, const TakenPartition& partition, std::int64_t next) const;
    /// After an assign: what former owners of the partition have left in flight died with them.
    std::optional<sql::Problem> count_deaths(sql::Executor& executor,
                                             TakenPartition& partition) const;
    /// Nothing runs any more.
    void leave(Link& link) const;
    base::Result<void> letter_published(Link& link, const std::string& source,
                                        const std::string& id, core::FencingToken token) const;

  private:
    class Slice;
    TransactionWork(TransactionOptions options,
                    std::variant<SqlEffects, TransactionCallback> effect,
                    ConsumerCounters& counters);

    TransactionOptions options_;
    std::variant<SqlEffects, TransactionCallback> effect_;
    /// By dialect: which one it is is known from the first connection.
    std::map<sql::Dialect, base::Result<SqlEffectSet>> statements_;
    ConsumerCounters& counters_;
    inbox::TransactionalInbox inbox_;
    inbox::DedupTable table_;
    /// Where the effect is code of this process. A statement runs in the database, which takes no
    /// process of ours with it.
    std::optional<inbox::Flights> flights_;
    FailureRules rules_;
};

}  // namespace semel::consumer
