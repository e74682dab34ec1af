#include "telemetry/metrics.hpp"

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <sstream>

#include "base/assert.hpp"

namespace semel::telemetry {

namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

constexpr std::array<std::string_view, Metrics::routes> route_names{
    "/v1/chat/completions", "/api/chat", "/api/chat/*", "/v1/*", "other"};
static_assert(static_cast<std::size_t>(Route::other) + 1 == Metrics::routes);
constexpr std::array<std::string_view, Metrics::outcomes> outcome_names{
    "executed",  "joined",          "replayed",    "taken_over",  "passed",
    "accepted",  "in_flight",       "mismatch",    "unknown",     "attempts_used_up",
    "not_kept",  "upstream_failed", "client_gone", "bad_request", "unauthorized",
    "not_found", "unavailable",     "served"};
static_assert(static_cast<std::size_t>(RequestOutcome::served) + 1 == Metrics::outcomes);
constexpr std::array<std::string_view, Metrics::reasons> reason_names{"no_key", "route", "mode",
                                                                      "encoding"};
static_assert(static_cast<std::size_t>(Unprotected::encoding) + 1 == Metrics::reasons);
constexpr std::array<std::string_view, Metrics::token_kinds> token_names{"input", "output",
                                                                         "cached", "reasoning"};
static_assert(static_cast<std::size_t>(Tokens::reasoning) + 1 == Metrics::token_kinds);

struct Description {
    std::string_view name;
    std::string_view help;
    MetricType type = MetricType::Counter;
};

constexpr Description requests_family{"semel_requests_total",
                                      "Requests by route and by how they ended."};
constexpr Description unprotected_family{
    "semel_unprotected_total", "Calls passed to an upstream without a record, by reason."};
constexpr Description tokens_family{"semel_tokens_total",
                                    "Tokens that upstreams stated in answers paid for, by kind."};
constexpr Description upstream_family{"semel_upstream_seconds",
                                      "Upstream calls from start to last byte or failure.",
                                      MetricType::Histogram};
constexpr Description first_byte_family{"semel_first_byte_seconds",
                                        "Upstream calls from start to the head of the answer.",
                                        MetricType::Histogram};
constexpr Description purge_family{"semel_purge_seconds",
                                   "Steps of clean-up, each one purge of the store.",
                                   MetricType::Histogram};
constexpr Description build_family{"semel_build_info", "Always 1; the label names the version.",
                                   MetricType::Gauge};
constexpr Description bodies_family{
    "semel_memory_bodies_bytes", "Bytes of request bodies held in memory (limit: memory.bodies).",
    MetricType::Gauge};
constexpr Description joiners_family{
    "semel_joiners", "Requests that wait for or follow another request's call.", MetricType::Gauge};
constexpr Description peer_connections_family{
    "semel_peer_connections", "Other gateways that follow a call of this process now.",
    MetricType::Gauge};
constexpr Description running_family{"semel_running", "Upstream calls that run.",
                                     MetricType::Gauge};

struct OwnCounter {
    Description description;
    Counter Metrics::* counter;
};
constexpr OwnCounter own_counters[] = {
    {{"semel_paid_maybe_twice_total",
      "Calls repeated although an earlier one may have been processed."},
     &Metrics::paid_maybe_twice},
    {{"semel_record_pending_total",
      "Answers given to their client before the record was confirmed."},
     &Metrics::record_pending},
    {{"semel_answers_not_kept_total", "Answers above record.max_bytes, recorded without body."},
     &Metrics::answers_not_kept},
    {{"semel_usage_unknown_total", "Complete answers in which the upstream stated no usage."},
     &Metrics::usage_unknown},
    {{"semel_user_header_ignored_total", "X-User-Id headers of clients that may not name users."},
     &Metrics::user_header_ignored},
    {{"semel_observed_duplicates_total", "Duplicates seen on routes under mode: observe."},
     &Metrics::observed_duplicates},
    {{"semel_abandoned_calls_total", "Calls ended early because their client had left."},
     &Metrics::abandoned_calls},
    {{"semel_peer_follows_total",
      "Calls of other gateways followed at their peer address, for all who wait here together."},
     &Metrics::peer_follows},
    {{"semel_peer_fallbacks_total",
      "Follows that broke off or could not begin: the record was asked instead."},
     &Metrics::peer_fallbacks},
    {{"semel_peer_refused_total", "Requests at the peer address that did not prove themselves."},
     &Metrics::peer_refused},
};

/// What other modules count and this one only shows.
constexpr Description watched[] = {
    {"semel_grants_total", "Attempts granted, retries and takeovers included."},
    {"semel_retries_total", "Grants after a failed attempt."},
    {"semel_takeovers_total", "Grants after an owner died."},
    {"semel_takeovers_after_start_total",
     "Takeovers whose former owner had already sent its call: a possible second payment."},
    {"semel_replays_total", "Acquires answered with a recorded answer."},
    {"semel_mismatches_total", "Acquires refused because the id names another request."},
    {"semel_in_flight_total", "Acquires that met a living owner."},
    {"semel_unknown_outcomes_total",
     "Acquires that met an unknown outcome under on_unknown: hold."},
    {"semel_exhausted_total", "Acquires refused because the attempts are used up."},
    {"semel_renewals_total", "Leases renewed."},
    {"semel_leases_lost_total", "Leases that ran out or were taken over while their owner worked."},
    {"semel_leases", "Leases held now.", MetricType::Gauge},
    {"semel_fenced_total", "Writes refused because a newer token exists."},
    {"semel_claim_lost_total",
     "Claims that the store had lost: made anew at complete, or fenced by a later first grant."},
    {"semel_store_errors_total", "Store operations that failed or whose result is not known."},
    {"semel_settled_acquires_total",
     "Acquires without a reply whose possible lease was given back."},
    {"semel_swept_total", "Dead leases settled by the sweeper."},
    {"semel_purged_total", "Expired records removed."},
    {"semel_purge_behind",
     "1: the last pass of clean-up ended before all expired records were gone.", MetricType::Gauge},
    {"semel_store_batches_total", "Batches written to the store."},
    {"semel_store_operations_total", "Operations in these batches."},
    {"semel_spooled_total",
     "Answers put into the spool because the store did not take them in time."},
    {"semel_spool_delivered_total", "Spooled answers that reached their record."},
    {"semel_spool_overtaken_total",
     "Spooled answers dropped because a later attempt had been granted."},
    {"semel_spool_entries", "Answers in the spool now.", MetricType::Gauge},
    {"semel_hot_record_bytes", "Recorded answers kept in memory (limit: memory.hot_records).",
     MetricType::Gauge},
    {"semel_clock_jumps_total", "Jumps of the machine's clock that were noticed."},
    {"semel_http_connections_total", "Connections accepted on the API and admin addresses."},
    {"semel_http_connections_open", "Connections open now.", MetricType::Gauge},
    {"semel_http_rejected_requests_total", "Requests refused by the HTTP parser or a limit."},
    {"semel_http_accept_errors_total",
     "Accepts that failed, such as for want of file descriptors."},
};

/// Of consumers: each has the label `consumer`.
constexpr Description of_consumers[] = {
    {"semel_messages_received_total", "Messages delivered by the broker, redeliveries included."},
    {"semel_effects_applied_total", "Messages whose effect happened, in this process."},
    {"semel_duplicates_suppressed_total", "Deliveries whose effect had happened before."},
    {"semel_messages_skipped_total", "Messages settled unread because a rule says skip."},
    {"semel_payload_mismatch_total", "Messages whose id names another message."},
    {"semel_message_retries_total", "Runs that failed and are due again."},
    {"semel_message_not_yet_total", "Runs that found what they need missing, and are due again."},
    {"semel_message_busy_total", "Messages that met another owner at work on them."},
    {"semel_message_fenced_total", "Runs given up because their partition had another owner."},
    {"semel_message_unknown_outcomes_total",
     "Runs that may have had their effect without saying so; transaction asks its database afterwards."},
    {"semel_message_takeovers_total", "Messages taken over from an owner that died."},
    {"semel_message_suspects_total",
     "Messages run alone because their owners died while they ran."},
    {"semel_results_total", "Answers published and confirmed, those of duplicates included."},
    {"semel_results_again_total", "Published answers of messages that were done before."},
    {"semel_results_failed_total",
     "Publications of answers that were not confirmed; most are repeated."},
    {"semel_results_gone_total", "Duplicates that published nothing: their answer was erased."},
    {"semel_dead_letters_total", "Messages given up on, their letters confirmed, by class."},
    {"semel_observed_messages_total", "Messages seen under mode: observe, by what they would be."},
    {"semel_observed_ids_total", "Ids of these, by the place they were found in."},
    {"semel_observed_forgotten_total",
     "Ids that made room for later ones; what comes again after that counts as first."},
    {"semel_dead_letters_failed_total", "Letters that were not confirmed, and are repeated."},
    {"semel_retry_copies_total", "Failed messages that went to wait at the broker, confirmed."},
    {"semel_retry_copies_failed_total",
     "Copies that were not confirmed; their messages stay in hand."},
    {"semel_retry_copies_waiting",
     "Copies that wait in topics of Kafka, over the partitions of this process.",
     MetricType::Gauge},
    {"semel_retry_stored_total", "Messages that went to wait beside the records."},
    {"semel_retry_stored_failed_total",
     "Times the store did not take them, or did not let go of them; both are repeated."},
    {"semel_retry_in_store", "Messages that wait beside the records, of this process's partitions.",
     MetricType::Gauge},
    {"semel_breaker_opened_total", "Times the consumer stopped by itself."},
    {"semel_partitions_assigned_total", "Partitions that came to this process."},
    {"semel_partitions_revoked_total", "Partitions that left it."},
    {"semel_partitions_lost_total", "Partitions that were taken away from it."},
    {"semel_cleanup_deleted_total", "Expired rows of message_dedup removed."},
    {"semel_incomplete_offsets", "Messages in hand that are not finished.", MetricType::Gauge},
    {"semel_inflight", "Messages that run.", MetricType::Gauge},
    {"semel_messages_waiting", "Messages that failed and are not due yet.", MetricType::Gauge},
    {"semel_messages_parked", "Messages that wait behind failed ones of their lane.",
     MetricType::Gauge},
    {"semel_partitions", "Partitions of this process.", MetricType::Gauge},
    {"semel_partitions_paused", "Of these, those that are paused.", MetricType::Gauge},
    {"semel_consumer_paused", "1: paused by a person. 2: stopped by itself (the breaker is open).",
     MetricType::Gauge},
    {"semel_consumer_lag", "Messages behind, over the partitions of this process.",
     MetricType::Gauge},
    {"semel_commit_watermark_age_seconds", "Age of the oldest unfinished message in hand.",
     MetricType::Gauge},
    {"semel_dedup_horizon_seconds", "How long a message that is done stays known.",
     MetricType::Gauge},
};

/// Name of the second label of a consumer's metric that has one.
std::string_view kind_label(std::string_view metric) {
    if (metric == "semel_observed_messages_total") return "result";
    if (metric == "semel_observed_ids_total") return "place";
    return "class";
}

MetricFamily family(const Description& description) {
    return {std::string(description.name), std::string(description.help), description.type, {}};
}

ClientMetric sample(MetricType type, double value, std::vector<ClientMetric::Label> labels = {}) {
    ClientMetric metric;
    metric.label = std::move(labels);
    if (type == MetricType::Gauge) {
        metric.gauge.value = value;
    } else {
        metric.counter.value = value;
    }
    return metric;
}

MetricFamily single(const Description& description, double value,
                    std::vector<ClientMetric::Label> labels = {}) {
    MetricFamily out = family(description);
    out.metric.push_back(sample(description.type, value, std::move(labels)));
    return out;
}

ClientMetric::Label label(std::string_view name, std::string_view value) {
    return {std::string(name), std::string(value)};
}

MetricFamily histogram(const Description& description, const Histogram& histogram) {
    MetricFamily out = family(description);
    ClientMetric metric;
    std::uint64_t cumulative = 0;
    for (std::size_t i = 0; i < Histogram::bounds_seconds.size(); ++i) {
        cumulative += histogram.count(i);
        metric.histogram.bucket.push_back({cumulative, Histogram::bounds_seconds[i]});
    }
    metric.histogram.sample_count = cumulative + histogram.count(Histogram::bounds_seconds.size());
    metric.histogram.sample_sum = histogram.sum_seconds();
    out.metric.push_back(std::move(metric));
    return out;
}

}  // namespace

void Histogram::observe(std::chrono::nanoseconds duration) {
    const double seconds = std::chrono::duration<double>(duration).count();
    const auto bucket = std::lower_bound(bounds_seconds.begin(), bounds_seconds.end(), seconds) -
                        bounds_seconds.begin();
    counts_[static_cast<std::size_t>(bucket)].fetch_add(1, std::memory_order_relaxed);
    const auto us = std::chrono::duration_cast<std::chrono::microseconds>(duration).count();
    sum_us_.fetch_add(us > 0 ? static_cast<std::uint64_t>(us) : 0, std::memory_order_relaxed);
}

double Histogram::sum_seconds() const {
    return static_cast<double>(sum_us_.load(std::memory_order_relaxed)) / 1e6;
}

void Metrics::watch(std::string_view name, std::function<std::uint64_t()> read) {
    const auto found = std::find_if(std::begin(watched), std::end(watched),
                                    [&](const Description& d) { return d.name == name; });
    SEMEL_ASSERT(found != std::end(watched), "only metrics of the documented list can be watched");
    const std::lock_guard lock(mutex_);
    watched_.emplace_back(found->name, std::move(read));
}

void Metrics::watch_consumer(std::string_view name, std::string consumer,
                             std::function<double()> read, std::string_view kind) {
    const auto found = std::find_if(std::begin(of_consumers), std::end(of_consumers),
                                    [&](const Description& d) { return d.name == name; });
    SEMEL_ASSERT(found != std::end(of_consumers),
                 "only metrics of the documented list can be watched");
    const std::lock_guard lock(mutex_);
    of_consumers_.push_back({found->name, std::move(consumer), kind, std::move(read)});
}

std::string Metrics::render() const {
    std::vector<MetricFamily> families;
    families.push_back(single(build_family, 1, {label("version", SEMEL_VERSION)}));

    MetricFamily by_route = family(requests_family);
    for (std::size_t route = 0; route < routes; ++route) {
        for (std::size_t outcome = 0; outcome < outcomes; ++outcome) {
            const std::uint64_t value = requests_[route * outcomes + outcome].value();
            if (value == 0) continue;  // most pairs cannot happen
            by_route.metric.push_back(sample(
                requests_family.type, static_cast<double>(value),
                {label("route", route_names[route]), label("outcome", outcome_names[outcome])}));
        }
    }
    families.push_back(std::move(by_route));
    MetricFamily by_reason = family(unprotected_family);
    for (std::size_t i = 0; i < reasons; ++i) {
        by_reason.metric.push_back(sample(unprotected_family.type,
                                          static_cast<double>(unprotected_[i].value()),
                                          {label("reason", reason_names[i])}));
    }
    families.push_back(std::move(by_reason));
    MetricFamily by_kind = family(tokens_family);
    for (std::size_t i = 0; i < token_kinds; ++i) {
        by_kind.metric.push_back(sample(tokens_family.type, static_cast<double>(tokens_[i].value()),
                                        {label("kind", token_names[i])}));
    }
    families.push_back(std::move(by_kind));

    families.push_back(histogram(upstream_family, upstream_seconds));
    families.push_back(histogram(first_byte_family, first_byte_seconds));
    families.push_back(histogram(purge_family, purge_seconds));
    families.push_back(single(joiners_family, static_cast<double>(joiners.value())));
    families.push_back(
        single(peer_connections_family, static_cast<double>(peer_connections.value())));
    families.push_back(single(running_family, static_cast<double>(running.value())));
    families.push_back(single(bodies_family, static_cast<double>(bodies_bytes.value())));
    for (const OwnCounter& own : own_counters) {
        families.push_back(
            single(own.description, static_cast<double>((this->*own.counter).value())));
    }
    const std::lock_guard lock(mutex_);
    for (const Description& description : watched) {
        std::uint64_t sum = 0;
        for (const auto& [name, read] : watched_) {
            if (name == description.name) sum += read();
        }
        families.push_back(single(description, static_cast<double>(sum)));
    }
    for (const Description& description : of_consumers) {
        MetricFamily by_consumer = family(description);
        for (const OfConsumer& one : of_consumers_) {
            if (one.name != description.name) continue;
            std::vector<ClientMetric::Label> labels{label("consumer", one.consumer)};
            if (!one.kind.empty()) labels.push_back(label(kind_label(one.name), one.kind));
            by_consumer.metric.push_back(sample(description.type, one.read(), std::move(labels)));
        }
        families.push_back(std::move(by_consumer));
    }
    std::ostringstream out;
    prometheus::TextSerializer().Serialize(out, families);
    return out.str();
}

std::vector<std::string_view> Metrics::watched_names() {
    std::vector<std::string_view> out;
    for (const Description& description : watched) out.push_back(description.name);
    return out;
}

std::vector<std::string_view> Metrics::consumer_names() {
    std::vector<std::string_view> out;
    for (const Description& description : of_consumers) out.push_back(description.name);
    return out;
}

std::vector<std::string_view> Metrics::names() {
    std::vector<std::string_view> out = watched_names();
    for (const std::string_view name : consumer_names()) out.push_back(name);
    for (const OwnCounter& own : own_counters) out.push_back(own.description.name);
    for (const Description& description :
         {build_family, requests_family, unprotected_family, tokens_family, upstream_family,
          first_byte_family, purge_family, joiners_family, peer_connections_family, running_family,
          bodies_family}) {
        out.push_back(description.name);
    }
    std::sort(out.begin(), out.end());
    return out;
}

}  // namespace semel::telemetry
