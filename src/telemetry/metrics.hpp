// Metrics: what the process counts. The hot path is one relaxed atomic addition; all else happens
// when somebody scrapes.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace semel::telemetry {

class Counter {
  public:
    void add(std::uint64_t n = 1) { value_.fetch_add(n, std::memory_order_relaxed); }
    [[nodiscard]] std::uint64_t value() const { return value_.load(std::memory_order_relaxed); }

  private:
    std::atomic<std::uint64_t> value_{0};
};

class Gauge {
  public:
    void add(std::int64_t n = 1) { value_.fetch_add(n, std::memory_order_relaxed); }
    void sub(std::int64_t n = 1) { value_.fetch_sub(n, std::memory_order_relaxed); }
    [[nodiscard]] std::int64_t value() const { return value_.load(std::memory_order_relaxed); }

  private:
    std::atomic<std::int64_t> value_{0};
};

/// Durations, in buckets from a millisecond to ten minutes.
class Histogram {
  public:
    static constexpr std::array<double, 18> bounds_seconds{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
                                                           0.1,   0.25,   0.5,   1,    2.5,   5,
                                                           10,    30,     60,    120,  300,   600};
    void observe(std::chrono::nanoseconds duration);
    /// Of bucket `i`; the last one, bounds_seconds.size(), holds what is longer than all bounds.
    /// Not cumulative.
    [[nodiscard]] std::uint64_t count(std::size_t i) const {
        return counts_[i].load(std::memory_order_relaxed);
    }
    [[nodiscard]] double sum_seconds() const;

  private:
    std::array<std::atomic<std::uint64_t>, bounds_seconds.size() + 1> counts_{};
    std::atomic<std::uint64_t> sum_us_{0};
};

/// Label `route`: what the request asked for. Closed, so that no client can make series.
enum class Route : std::uint8_t {
    chat_completions,  ///< POST /v1/chat/completions
    api_chat,          ///< POST /api/chat
    api_chat_read,     ///< Status and sessions under /api/chat
    passed,            ///< Everything else under /v1/
    other,             ///< Paths that this product does not serve
};
/// Label `outcome`: how the request ended.
enum class RequestOutcome : std::uint8_t {
    executed,          ///< This request's own call was answered 2xx.
    joined,            ///< It got the bytes of a call that already ran.
    replayed,          ///< It got a recorded answer.
    taken_over,        ///< Executed after another owner had died.
    passed,            ///< Passed through without a record.
    accepted,          ///< 202: it runs.
    in_flight,         ///< 409: it still runs.
    mismatch,          ///< 422: the id names another request.
    unknown,           ///< 409: the outcome is unknown and held.
    attempts_used_up,  ///< 409: max_paid_attempts.
    not_kept,          ///< 409: the answer was too large to keep.
    upstream_failed,   ///< The upstream answered an error, or not at all, or was cut.
    client_gone,       ///< The client left before the end.
    bad_request,       ///< Refused by this gateway as malformed or too large.
    unauthorized,      ///< 401 or 403 of this gateway.
    not_found,         ///< 404 of this gateway.
    unavailable,       ///< 503: the store cannot be asked, memory is used up, or the process stops.
    served,            ///< Status and sessions.
};
/// Label `reason`: why a call went to the upstream without protection.
enum class Unprotected : std::uint8_t {
    no_key,    ///< The client sent none.
    route,     ///< The route is not protected in this version.
    mode,      ///< mode: off or observe.
    encoding,  ///< The answer came in a content coding that is not recorded.
};
/// Label `kind` of tokens, as the upstream states them.
enum class Tokens : std::uint8_t { input, output, cached, reasoning };

/// One for the process; all functions are thread-safe.
class Metrics {
  public:
    Metrics() = default;
    Metrics(const Metrics&) = delete;
    Metrics& operator=(const Metrics&) = delete;

    static constexpr std::size_t routes = 5;
    static constexpr std::size_t outcomes = 18;
    static constexpr std::size_t reasons = 4;
    static constexpr std::size_t token_kinds = 4;

    Counter& requests(Route route, RequestOutcome outcome) {
        return requests_[static_cast<std::size_t>(route) * outcomes +
                         static_cast<std::size_t>(outcome)];
    }
    Counter& unprotected(Unprotected reason) {
        return unprotected_[static_cast<std::size_t>(reason)];
    }
    Counter& tokens(Tokens kind) { return tokens_[static_cast<std::size_t>(kind)]; }

    Histogram
        upstream_seconds;  ///< Of each upstream call, from its start to its last byte or failure.
    Histogram first_byte_seconds;  ///< From a call's start to the head of its answer.
    Histogram purge_seconds;       ///< Of each step of clean-up.
    Gauge joiners;                 ///< Requests that wait for or follow another request's call.
    Gauge running;                 ///< Upstream calls that run.
    Gauge bodies_bytes;            ///< Of memory.bodies in use.
    Counter record_pending;    ///< Answers given to the client before their record was confirmed.
    Counter answers_not_kept;  ///< Answers above record.max_bytes.
    Counter usage_unknown;     ///< Complete answers without usage.
    Counter user_header_ignored;  ///< X-User-Id of clients that may not name users.
    Counter observed_duplicates;  ///< Duplicates seen under mode: observe.
    Counter paid_maybe_twice;  ///< Calls repeated although an earlier one may have been processed.
    Counter peer_follows;      ///< Calls of other processes that were followed, or tried to.
    Counter peer_fallbacks;    ///< Of these, those that had to be left to the record.
    Counter peer_refused;      ///< Requests at the peer address without the proof.
    Gauge peer_connections;    ///< Followers in other processes that are served now.
    Counter abandoned_calls;   ///< Calls ended at finish_limit or by on_disconnect: cancel.

    /// Has `read` called at each scrape for the metric `name` (one of watched_names()), on the
    /// scraping thread; several readers of one name are added up. What it reads must outlive this
    /// object.
    void watch(std::string_view name, std::function<std::uint64_t()> read);
    /// The same for a metric of one consumer, a name of consumer_names(). `consumer` is from the
    /// configuration, so that the set is closed. `kind`: of those that have a second label: the
    /// class of dead letters, the result and the place of what is observed.
    void watch_consumer(std::string_view name, std::string consumer, std::function<double()> read,
                        std::string_view kind = {});

    /// The text that Prometheus scrapes (format 0.0.4).
    [[nodiscard]] std::string render() const;

    /// Names of all metrics, and of those that others count, without labels.
    static std::vector<std::string_view> names();
    static std::vector<std::string_view> watched_names();
    static std::vector<std::string_view> consumer_names();

  private:
    std::array<Counter, routes * outcomes> requests_;
    std::array<Counter, reasons> unprotected_;
    std::array<Counter, token_kinds> tokens_;
    mutable std::mutex mutex_;
    std::vector<std::pair<std::string_view, std::function<std::uint64_t()>>>
        watched_;  // guarded by mutex_
    struct OfConsumer {
        std::string_view name;
        std::string consumer;
        std::string_view kind;
        std::function<double()> read;
    };
    std::vector<OfConsumer> of_consumers_;  // guarded by mutex_
};

}  // namespace semel::telemetry
