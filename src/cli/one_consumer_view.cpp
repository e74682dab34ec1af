// What is shown of one consumer: to the admin API, and as metrics.
#include "cli/consumer_outlook.hpp"
#include "cli/one_consumer.hpp"

namespace semel::cli {

namespace {

constexpr std::chrono::milliseconds ask_within{5000};

using Counts = std::vector<std::pair<std::string, std::uint64_t>>;

Counts counts_of(const consumer::ConsumerCounters& counters) {
    Counts out;
    const auto count = [&out](const char* name, const std::atomic<std::uint64_t>& value) {
        out.emplace_back(name, value.load());
    };
    count("received", counters.received);
    count("applied", counters.applied);
    count("duplicates", counters.duplicates);
    count("skipped", counters.skipped);
    count("mismatches", counters.mismatches);
    count("retries", counters.retries);
    count("unknown_outcomes", counters.unknown_outcomes);
    count("takeovers", counters.takeovers);
    std::uint64_t dead = 0;
    for (const auto& of_class : counters.dead) dead += of_class.load();
    out.emplace_back("dead_letters", dead);
    return out;
}

Counts counts_of(const consumer::ObserverCounters& counters) {
    Counts out;
    std::uint64_t sum = 0;
    for (const auto& messages : counters.messages) sum += messages.load();
    out.emplace_back("observed", sum);
    for (std::size_t i = 0; i < counters.messages.size(); ++i)
        out.emplace_back(consumer::name_of(static_cast<consumer::Observed>(i)),
                         counters.messages[i].load());
    for (std::size_t i = 0; i < counters.ids.size(); ++i)
        out.emplace_back(
            std::string("id_from_") + consumer::name_of(static_cast<consumer::IdFrom>(i)),
            counters.ids[i].load());
    out.emplace_back("forgotten", counters.forgotten.load());
    return out;
}

}  // namespace

admin::ConsumerView OneConsumer::view() const {
    admin::ConsumerView out;
    out.name = config_.name;
    out.group = config_.group();
    out.source = source_in_words(config_);
    out.strategy = strategy_in_words(config_);
    out.promise = promise_in_words(config_, around_.config);
    out.counts = config_.observe ? counts_of(counters_.observer) : counts_of(counters_.consumer);
    consumer::Runner* const consumer = running();
    if (consumer == nullptr) {
        const std::lock_guard lock(mutex_);
        out.condition = condition_;
        out.reason = reason_;
        return out;
    }
    consumer::ConsumerState state = consumer->state();
    out.promise = std::move(state.promise);
    out.condition = std::move(state.condition);
    out.reason = std::move(state.reason);
    out.in_hand = state.in_hand;
    out.running = state.running;
    out.waiting = state.waiting;
    out.parked = state.parked;
    out.alarms = std::move(state.alarms);
    for (const brokers::AssignmentState& one : state.partitions) {
        out.partitions.push_back({.topic = one.assignment->topic(),
                                  .number = one.assignment->partition().number,
                                  .position = one.position,
                                  .committable = one.committable,
                                  .committed = one.committed,
                                  .in_flight = one.in_flight,
                                  .paused = one.paused,
                                  .held = one.held});
    }
    return out;
}

base::Result<admin::ConsumerLags> OneConsumer::lag() {
    if (running() == nullptr)
        return base::Error{.detail = "consumer " + config_.name +
                                     " does not run; GET "
                                     "/admin/consumers/" +
                                     config_.name + " says why"};
    const auto lags = parts_->source->lag(ask_within);
    if (!lags) return lags.error();
    admin::ConsumerLags out;
    for (const brokers::PartitionLag& one : *lags) {
        out.partitions.push_back({.topic = one.partition.topic,
                                  .number = one.partition.number,
                                  .begin = one.begin,
                                  .end = one.end,
                                  .committed = one.committed,
                                  .lag = one.lag});
    }
    out.behind_ms = counters_.consumer.watermark_age_ms.load();
    return out;
}

void OneConsumer::watch_observer() {
    telemetry::Metrics& metrics = around_.metrics;
    const auto watch = [&](std::string_view name, const std::atomic<std::uint64_t>& value,
                           std::string_view kind = {}) {
        metrics.watch_consumer(
            name, config_.name,
            [&value] { return static_cast<double>(value.load(std::memory_order_relaxed)); }, kind);
    };
    const consumer::ObserverCounters& seen = counters_.observer;
    for (std::size_t i = 0; i < seen.messages.size(); ++i)
        watch("semel_observed_messages_total", seen.messages[i],
              consumer::name_of(static_cast<consumer::Observed>(i)));
    for (std::size_t i = 0; i < seen.ids.size(); ++i)
        watch("semel_observed_ids_total", seen.ids[i],
              consumer::name_of(static_cast<consumer::IdFrom>(i)));
    watch("semel_observed_forgotten_total", seen.forgotten);
    watch("semel_consumer_lag", lag_);
}

void OneConsumer::watch() {
    if (config_.observe) return watch_observer();
    telemetry::Metrics& metrics = around_.metrics;
    const auto watch = [&](std::string_view name, const std::atomic<std::uint64_t>& value) {
        metrics.watch_consumer(name, config_.name, [&value] {
            return static_cast<double>(value.load(std::memory_order_relaxed));
        });
    };
    consumer::ConsumerCounters& c = counters_.consumer;
    watch("semel_messages_received_total", c.received);
    watch("semel_effects_applied_total", c.applied);
    watch("semel_duplicates_suppressed_total", c.duplicates);
    watch("semel_messages_skipped_total", c.skipped);
    watch("semel_payload_mismatch_total", c.mismatches);
    watch("semel_message_retries_total", c.retries);
    watch("semel_message_not_yet_total", c.not_yet);
    watch("semel_message_busy_total", c.busy);
    watch("semel_message_fenced_total", c.fenced);
    watch("semel_message_unknown_outcomes_total", c.unknown_outcomes);
    watch("semel_message_takeovers_total", c.takeovers);
    watch("semel_message_suspects_total", c.suspects);
    watch("semel_results_total", c.results_published);
    watch("semel_results_again_total", c.results_again);
    watch("semel_results_failed_total", c.results_failed);
    watch("semel_results_gone_total", c.answers_gone);
    watch("semel_dead_letters_failed_total", c.letters_failed);
    watch("semel_retry_copies_total", c.copies);
    watch("semel_retry_copies_failed_total", c.copies_failed);
    watch("semel_retry_copies_waiting", copies_waiting_);
    watch("semel_retry_stored_total", c.stored);
    watch("semel_retry_stored_failed_total", c.stores_failed);
    watch("semel_retry_in_store", c.in_store);
    watch("semel_breaker_opened_total", c.breaker_opened);
    watch("semel_partitions_assigned_total", c.assigned);
    watch("semel_partitions_revoked_total", c.revoked);
    watch("semel_partitions_lost_total", c.lost);
    watch("semel_cleanup_deleted_total", purged_);
    watch("semel_incomplete_offsets", c.in_hand);
    watch("semel_inflight", c.running);
    watch("semel_messages_waiting", c.waiting);
    watch("semel_messages_parked", c.parked);
    watch("semel_partitions", c.partitions);
    watch("semel_partitions_paused", c.paused_partitions);
    watch("semel_consumer_paused", c.paused);
    watch("semel_consumer_lag", lag_);
    for (std::size_t i = 0; i < c.dead.size(); ++i) {
        metrics.watch_consumer(
            "semel_dead_letters_total", config_.name,
            [&value = c.dead[i]] { return static_cast<double>(value.load()); },
            consumer::name_of(static_cast<consumer::DeadClass>(i)));
    }
    metrics.watch_consumer("semel_commit_watermark_age_seconds", config_.name,
                           [&c] { return static_cast<double>(c.watermark_age_ms.load()) / 1000; });
    metrics.watch_consumer("semel_dedup_horizon_seconds", config_.name,
                           [this] { return static_cast<double>(retention_ms_.load()) / 1000; });
}

}  // namespace semel::cli
