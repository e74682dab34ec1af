#include "cli/readers.hpp"

namespace semel::cli {

void add_readers(telemetry::Metrics& metrics, const Readable& readable) {
    const auto watch = [&metrics](std::string_view name, const std::atomic<std::uint64_t>& value) {
        metrics.watch(name, [&value] { return value.load(std::memory_order_relaxed); });
    };
    const engine::EngineCounters& e = readable.engine;
    watch("semel_grants_total", e.granted);
    watch("semel_retries_total", e.retries);
    watch("semel_takeovers_total", e.takeovers);
    watch("semel_takeovers_after_start_total", e.possible_second_payments);
    watch("semel_replays_total", e.replays);
    watch("semel_mismatches_total", e.mismatches);
    watch("semel_in_flight_total", e.in_flight);
    watch("semel_unknown_outcomes_total", e.unknown_outcomes);
    watch("semel_exhausted_total", e.exhausted);
    watch("semel_renewals_total", e.renewals);
    watch("semel_leases_lost_total", e.leases_lost);
    watch("semel_fenced_total", e.fenced);
    watch("semel_claim_lost_total", e.claim_lost);
    watch("semel_store_errors_total", e.store_errors);
    watch("semel_settled_acquires_total", e.settled_acquires);
    watch("semel_swept_total", e.swept);
    watch("semel_purged_total", e.purged);
    watch("semel_purge_behind", e.purge_behind);
    watch("semel_store_batches_total", e.batches);
    watch("semel_store_operations_total", e.batched_operations);
    watch("semel_spooled_total", e.spooled);
    watch("semel_spool_delivered_total", e.spool_delivered);
    watch("semel_spool_overtaken_total", e.spool_overtaken);
    watch("semel_clock_jumps_total", e.clock_jumps);
    for (const http::ServerCounters* server : {&readable.api, &readable.admin}) {
        watch("semel_http_connections_total", server->connections);
        watch("semel_http_connections_open", server->open);
        watch("semel_http_rejected_requests_total", server->rejected_requests);
        watch("semel_http_accept_errors_total", server->accept_errors);
    }
    metrics.watch("semel_spool_entries", [&spool = readable.spool] { return std::uint64_t{spool.size()}; });
    metrics.watch("semel_hot_record_bytes", [&hot = readable.hot] { return std::uint64_t{hot.bytes()}; });
}

}  // namespace semel::cli
