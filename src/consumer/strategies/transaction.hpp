// The strategy `transaction`: dedup row and effect in one transaction of the effect's own database.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "brokers/source.hpp"
#include "config/consumers.hpp"
#include "consumer/consumer.hpp"
#include "consumer/retry.hpp"
#include "consumer/strategy.hpp"
#include "inbox/inbox.hpp"

namespace semel::consumer {

/// The effect of a message: statements from the configuration, or the user's callback inside the
/// transaction.
struct SqlEffects {
    config::SqlHandlerConfig config;
};
/// A message whose callback takes the process along is found by what inbox::Flights keeps, and ends
/// Suspect, and at last Dead (crashes).
struct TransactionCallback {
    /// As inbox::Callback, with the consumer's message. On a thread of the strategy's; several at
    /// once.
    std::function<inbox::EffectOutcome(sql::Executor& executor, const Message& message)> effect;
    bool batchable =
        false;  ///< Several messages may share a transaction (each inside a savepoint).
};

/// What the broker says of a partition's log.
struct LogFacts {
    std::string topic_id;             ///< brokers::Source::topic_id(); empty: it cannot be asked.
    std::optional<std::int64_t> end;  ///< Of what may be read; empty: not known.
};

struct TransactionOptions {
    std::string owner;  ///< For people, in semel_assignments.
    inbox::InboxOptions inbox;
    bool partitions =
        true;  ///< Kafka: epoch and position are kept; false (RabbitMQ): dedup rows alone.
    bool in_order = false;  ///< ordering: partition: the position moves with the effects.
    unsigned connections = 4;
    std::size_t batch_max = 256;
    RetryRules retry;
    bool mismatch_is_duplicate = false;
    milliseconds retention_dead{std::chrono::hours{24 * 30}};
    milliseconds assign_wait{10'000};  ///< For the former owner's open transactions.
    /// Asked by assigned(), on its thread; may block. Empty: nothing is known of the log, and a
    /// topic that was made again is not noticed.
    std::function<base::Result<LogFacts>(const brokers::Partition&)> log;
    /// So long a log may end before the position of the effects, as one does whose leader has just
    /// changed, before it counts as another one.
    milliseconds log_patience{5'000};
    /// What the statements are written for. Empty: what the first connection says; then a wrong
    /// statement is found at the start only if it is wrong in every dialect.
    std::optional<sql::Dialect> dialect;
};

/// TransactionOptions::log, by a source that outlives the strategy's last assigned().
std::function<base::Result<LogFacts>(const brokers::Partition&)> log_of(brokers::Source& source);

/// What a position that this strategy's consumer has committed carries beside it (the begin of
/// Assignment::committed_metadata): one without it was set by somebody else.
inline constexpr std::string_view commit_mark = "semel";

/// Failures are written after the rollback, in a step of their own on message_dedup
/// (inbox::DedupTable). Error invalid_argument: a statement or parameter that cannot be (unknown
/// :name, one that is never used, several statements).
base::Result<std::unique_ptr<Strategy>> make_transaction(
    runtime::Loop& loop, TransactionOptions options, inbox::Connect connect,
    std::variant<SqlEffects, TransactionCallback> effect, ConsumerCounters& counters);

}  // namespace semel::consumer
