// Engine: the store's operations as coroutines on one loop, with what makes them safe to use: coalesced batches, leases
// renewed in the background, lost replies settled, answers spooled while the store is down; and where tenants have data keys,
// what goes into the store is sealed here and what comes out of it is opened.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/lease_keeper.hpp"
#include "core/store.hpp"
#include "engine/hot_records.hpp"
#include "engine/spool.hpp"
#include "engine/vault.hpp"
#include "runtime/loop.hpp"

namespace semel::engine {

using base::Result;
using base::SteadyTime;
using core::StoredKey;
using core::StoreTime;
using runtime::Loop;
using runtime::Task;
using std::chrono::milliseconds;

struct EngineOptions {
    core::Owner owner;
    milliseconds lease{10000};            ///< Renewed every third.
    milliseconds acquire_patience{2000};  ///< How long the store may take to grant; its not_after.
    milliseconds record_patience{2000};   ///< How long an answer waits for its record before the client gets it anyway.
    bool delivers_left_over = true;       ///< Delivers what an earlier process spooled; one engine of a process is enough.

    /// Sets the lease, and acquire_patience so that a grant reaches its owner while its lease lives.
    void set_lease(milliseconds of) {
        lease = of;
        acquire_patience = std::min(acquire_patience, of / 2);
    }
};

/// Counted by the engine, read by telemetry. Thread-safe; one instance may be shared by all engines of a process.
struct EngineCounters {
    std::atomic<std::uint64_t> granted{0}, retries{0}, takeovers{0}, possible_second_payments{0};
    std::atomic<std::uint64_t> replays{0}, mismatches{0}, in_flight{0}, unknown_outcomes{0}, exhausted{0};
    std::atomic<std::uint64_t> renewals{0}, leases_lost{0}, fenced{0}, claim_lost{0};
    std::atomic<std::uint64_t> store_errors{0}, settled_acquires{0}, swept{0}, purged{0};
    std::atomic<std::uint64_t> spooled{0}, spool_delivered{0}, spool_overtaken{0}, batches{0}, batched_operations{0};
    std::atomic<std::uint64_t> clock_jumps{0};
    std::atomic<std::uint64_t> purge_behind{0};  ///< 1: the last pass of clean-up left expired records behind.
};

class Engine;

/// A grant while its owner works. The lease is renewed in the background until the guard is settled (complete, fail, cancel,
/// release) or destroyed. Destroying it unsettled gives the lease up without a word: it runs out, as if the owner had died.
/// Used on the engine's loop.
class LeaseGuard {
  public:
    LeaseGuard(Engine& engine, StoredKey key, core::Granted granted, core::Nonce nonce, SteadyTime asked_at,
               core::Fingerprint fingerprint, core::Policy policy);
    ~LeaseGuard();
    LeaseGuard(const LeaseGuard&) = delete;
    LeaseGuard& operator=(const LeaseGuard&) = delete;

    [[nodiscard]] const StoredKey& key() const { return key_; }
    [[nodiscard]] const core::Granted& granted() const { return granted_; }
    [[nodiscard]] core::FencingToken token() const { return granted_.token; }
    /// True once another token is known to be current (somebody took over): what this owner does is for nothing.
    [[nodiscard]] bool overtaken() const { return keeper_.overtaken(); }
    /// Called on the loop when overtaken() becomes true. At most one.
    std::function<void()> on_overtaken;

  private:
    friend class Engine;
    Engine& engine_;
    StoredKey key_;
    core::Granted granted_;
    core::Nonce nonce_;
    core::Fingerprint fingerprint_;
    core::Policy policy_;
    DataKeyPtr data_key_;  ///< Everything of this attempt is sealed under it. Null: nothing is.
    core::LeaseKeeper keeper_;
    std::uint64_t id_ = 0;      ///< Names this guard to a renewal that is on its way; 0: settled, or the engine is gone.
    std::size_t position_ = 0;  ///< In the engine's list of leases.
};

/// What became of `complete`.
struct Completion {
    enum class Kind {
        recorded,   ///< The record holds this answer.
        overtaken,  ///< A later attempt was granted (or the record was decided otherwise): `record` is the present state.
        pending,    ///< Not recorded within record_patience: the spool holds it and will deliver. The client gets its answer.
    };
    Kind kind = Kind::recorded;
    core::RecordPtr record;
};

/// One per loop, all on the same Store. Functions are for the loop's thread.
class Engine {
  public:
    /// `hot`, `spool` and `vault` are shared by the process's engines and thread-safe; they and `store` must outlive the engine.
    /// Without a vault nothing is sealed, and what is sealed cannot be read.
    Engine(Loop& loop, core::Store& store, EngineOptions options, HotRecords& hot, Spool& spool, EngineCounters& counters,
           Vault* vault = nullptr);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    struct AcquireRequest {
        StoredKey key;
        core::Fingerprint fingerprint;
        core::Policy policy;
        bool starts_call = false;
        std::string label;
        std::shared_ptr<const core::Append> turn;  ///< core::Acquire's, as the client said it.
        core::TenantTag tenant = {};               ///< Under whose data key it is sealed; zero: it is not.
    };
    /// A grant, or the normal answer that is none. Before it asks the store it delivers this process's own spool entry of the
    /// key, and makes sure that the tenant's data key is the present one. Error: nothing was granted that anybody may act on; where the reply was lost the engine repeats a release in the
    /// background until no live lease can be left. Never returns Granted after not_after or past the lease's own limit. Within
    /// the takeover grace a dead lease of somebody else is answered as InFlight.
    struct Acquired {
        std::unique_ptr<LeaseGuard> lease;          ///< Set exactly if granted.
        std::optional<core::StoreOutcome> refused;  ///< Else: InFlight, NotDue, Replay, Mismatch, UnknownOutcome, Exhausted.
        StoreTime at;
    };
    Task<Result<Acquired>> acquire(AcquireRequest request);

    /// Marks the paid call as about to leave. False: the lease is lost, do not call.
    Task<Result<bool>> start(LeaseGuard& lease);
    /// Writes the chunks of a big answer (before complete). An Error leaves chunks that the store removes later. `until`: that is how
    /// long the store may take, instead of record_patience from now.
    Task<Result<void>> put_chunk(LeaseGuard& lease, std::uint32_t n, std::string bytes, std::optional<SteadyTime> until = {});
    /// Records the answer. Fenced(absent) (the store lost the claim): acquires anew with the same fingerprint and completes,
    /// counted as claim_lost. Never an Error: what cannot be recorded in time is spooled. `unwritten`: all chunks of a big answer
    /// (plain) where put_chunk failed: they are written before the record, and spooled with it. `until`: when it is spooled, for a
    /// client that has waited for chunks already.
    Task<Completion> complete(LeaseGuard& lease, core::Answer answer, core::Usage usage, std::optional<core::Append> append,
                              std::vector<std::string> unwritten = {}, std::optional<SteadyTime> until = {});
    /// Records a failure. The record's state after it; null if the store could not be told (the lease then runs out).
    Task<core::RecordPtr> fail(LeaseGuard& lease, core::Fail failure);
    /// Gives an unused grant back, uncharged.
    Task<> release(LeaseGuard& lease);

    /// The record as it is; hot ones are answered without the store. Null: absent or expired. An answer whose data key is gone
    /// is one that was not kept, here and in everything else that the engine gives out.
    Task<Result<core::RecordPtr>> get(StoredKey key);
    /// A completed, unexpired record from memory; null if there is none, or if it must first be asked whether its tenant was
    /// erased (acquire and get do). Costs no store access.
    [[nodiscard]] core::RecordPtr find_hot(const StoredKey& key) const;
    /// Any other operation, coalesced with the rest of this loop turn's. What Get, GetChunk and GetTurns find is opened, for the
    /// latter two under the key of `tenant`: a chunk that cannot be opened is missing, a turn is `erased`.
    Task<Result<core::Decided>> ask(core::Item item, core::TenantTag tenant = {});

    /// What is left of the takeover grace (a third of the lease, from when a store that was out answers again): until then a
    /// living owner may not have been able to renew. 0: none.
    [[nodiscard]] std::chrono::nanoseconds grace_left() const;
    /// The store's clock as far as this process knows it.
    [[nodiscard]] StoreTime store_now() const;
    [[nodiscard]] Loop& loop() { return loop_; }
    [[nodiscard]] core::Store& store() { return store_; }
    [[nodiscard]] const EngineOptions& options() const { return options_; }
    [[nodiscard]] EngineCounters& counters() { return counters_; }

    /// Leases held now.
    [[nodiscard]] std::size_t leases() const;
    /// Stops renewing; what is spooled stays spooled. After it only destruction.
    Task<> stop();

  private:
    friend class LeaseGuard;
    class Impl;
    Loop& loop_;
    core::Store& store_;
    EngineOptions options_;
    EngineCounters& counters_;
    std::unique_ptr<Impl> impl_;
};

}  // namespace semel::engine
