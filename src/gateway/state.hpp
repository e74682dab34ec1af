// What the gateways of one process share, spelled out; and the request as the protected routes
// carry it around.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "base/hash.hpp"
#include "config/config.hpp"
#include "engine/hot_records.hpp"
#include "gateway/fingerprint.hpp"
#include "gateway/flight.hpp"
#include "gateway/gateway.hpp"
#include "gateway/identity.hpp"
#include "gateway/observed.hpp"
#include "gateway/upstreams.hpp"
#include "runtime/signal.hpp"

namespace semel::gateway {

/// Request bodies on protected JSON routes.
inline constexpr std::uint64_t protected_body_max_bytes = 64ull << 20;

/// Bytes of request bodies held by this process, against `memory.bodies`. Thread-safe.
class BodyBudget {
  public:
    BodyBudget(std::uint64_t max, telemetry::Gauge& shown) : max_(max), shown_(shown) {}
    /// False: over the budget; nothing was taken.
    bool take(std::uint64_t bytes) {
        if (used_.fetch_add(bytes, std::memory_order_relaxed) + bytes > max_) {
            used_.fetch_sub(bytes, std::memory_order_relaxed);
            return false;
        }
        shown_.add(static_cast<std::int64_t>(bytes));
        return true;
    }
    void give_back(std::uint64_t bytes) {
        used_.fetch_sub(bytes, std::memory_order_relaxed);
        shown_.sub(static_cast<std::int64_t>(bytes));
    }

  private:
    const std::uint64_t max_;
    telemetry::Gauge& shown_;
    std::atomic<std::uint64_t> used_{0};
};

/// A request's body, counted against the budget for as long as anybody needs it.
class Body {
  public:
    explicit Body(BodyBudget& budget) : budget_(budget) {}
    ~Body() { budget_.give_back(counted_); }
    Body(const Body&) = delete;
    Body& operator=(const Body&) = delete;
    /// Before bytes are read: their number, or the limit where it is not known.
    bool reserve(std::uint64_t bytes) {
        if (!budget_.take(bytes)) return false;
        counted_ += bytes;
        return true;
    }
    /// After: what was reserved and is not needed.
    void settle() {
        if (counted_ <= text.size()) return;
        budget_.give_back(counted_ - text.size());
        counted_ = text.size();
    }
    std::string text;

  private:
    BodyBudget& budget_;
    std::uint64_t counted_ = 0;
};
using BodyPtr = std::shared_ptr<const Body>;

class Process::State {
  public:
    State(const config::Config& config_, const std::string& secret, engine::HotRecords& hot_,
          telemetry::Metrics& metrics_, std::string spill_path_, const std::string& peer_secret_)
        : config(config_),
          hmac(secret),
          identity(config_, hmac),
          fingerprints(hmac),
          upstreams(config_),
          bodies(config_.memory_bodies, metrics_.bodies_bytes),
          hot(hot_),
          metrics(metrics_),
          spill_path(std::move(spill_path_)),
          peer_secret(peer_secret_.empty() ? nullptr
                                           : std::make_unique<const base::Hmac>(peer_secret_)),
          chat_route(config_.routes.at("/api/chat")),
          completions_route(config_.routes.at("/v1/chat/completions")) {}

    const config::Config& config;
    const base::Hmac hmac;
    const Identity identity;
    const Fingerprints fingerprints;
    const Upstreams upstreams;
    BodyBudget bodies;
    Flights flights;
    Observed observed;
    engine::HotRecords& hot;
    telemetry::Metrics& metrics;
    const std::string spill_path;
    /// By which gateways of one store prove themselves to each other; null: the store is not shared.
    const std::unique_ptr<const base::Hmac> peer_secret;
    const config::RouteConfig& chat_route;
    const config::RouteConfig& completions_route;
    runtime::Signal turns_changed;  ///< A turn of some session ended in this process.
    std::atomic<bool> draining{false};
    std::atomic<std::size_t> running{0};
};

/// Counts a call that runs, for drain().
class RunningCall {
  public:
    explicit RunningCall(Process::State& state) : state_(state) {
        state_.running.fetch_add(1);
        state_.metrics.running.add();
    }
    ~RunningCall() {
        state_.running.fetch_sub(1);
        state_.metrics.running.sub();
    }
    RunningCall(const RunningCall&) = delete;
    RunningCall& operator=(const RunningCall&) = delete;

  private:
    Process::State& state_;
};

}  // namespace semel::gateway
