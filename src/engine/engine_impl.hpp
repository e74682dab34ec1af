// The inside of an Engine, in three files: engine.cpp (claims, look-ups, its life), recording.cpp
// (how an answer comes into its record, at once or from the spool), leases.cpp (who is renewed
// when).
#pragma once

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include "engine/batcher.hpp"
#include "engine/engine.hpp"
#include "engine/tenant_keys.hpp"
#include "runtime/signal.hpp"

namespace semel::engine {

using base::Error;
using base::ErrorCode;
using core::Decided;
using core::Fenced;
using core::Nonce;
using core::RecordPtr;

/// A grant must have this part of its lease left when it reaches its owner, else it is given back.
inline constexpr int margin_part = 5;
/// Between two tries in the background.
inline constexpr milliseconds background_backoff_first{50};
inline constexpr milliseconds background_backoff_max{2000};

class Backoff {
  public:
    Backoff(milliseconds first, milliseconds max) : next_(first), max_(max) {}
    milliseconds next() { return std::exchange(next_, std::min(next_ * 2, max_)); }

  private:
    milliseconds next_;
    milliseconds max_;
};

class Engine::Impl {
  public:
    Impl(Engine& engine, HotRecords& hot, Spool& spool, Vault* vault);

    ~Impl();

    // ---------------------------------------------------------------- operations

    Task<Result<Acquired>> acquire(AcquireRequest request);
    Task<Result<bool>> start(LeaseGuard& lease);
    Task<Result<void>> put_chunk(LeaseGuard& lease, std::uint32_t n, std::string bytes,
                                 std::optional<SteadyTime> until);
    Task<Completion> complete(LeaseGuard& lease, core::Answer answer, core::Usage usage,
                              std::optional<core::Append> append,
                              std::vector<std::string> unwritten, std::optional<SteadyTime> until);
    Task<RecordPtr> fail(LeaseGuard& lease, core::Fail failure);
    Task<> release(LeaseGuard& lease);
    Task<Result<RecordPtr>> get(StoredKey key);
    Task<Result<Decided>> ask(core::Item item, core::TenantTag tenant);
    Task<> stop();
    RecordPtr find_hot(const StoredKey& key);

    /// The store was out a moment ago, and a lease that looks dead may be one whose owner could not
    /// renew: it is not taken over yet. `refused` is not set where an acquire may decide.
    Task<Result<Acquired>> in_grace(const AcquireRequest& request);

    // ---------------------------------------------------------------- leases

    void hold(LeaseGuard& lease);

    /// Ends the renewal of a guard; harmless if it has ended.
    void settle_guard(LeaseGuard& lease);
    [[nodiscard]] std::size_t leases() const { return leases_.size(); }

  private:
    /// An acquire that made a lost claim anew and got no reply: it may be executed until then.
    struct UnansweredClaim {
        Nonce nonce;
        StoreTime not_after;
    };
    /// An answer on its way into its record.
    struct Delivery {
        explicit Delivery(SpoolEntry e) : entry(std::move(e)) {}
        SpoolEntry entry;
        std::optional<core::FencingToken> spooled_as;  ///< Token under which the spool holds it.
        std::optional<UnansweredClaim> unanswered;
        DataKeyPtr data_key;  ///< Of this process's own answer; null for one that an earlier
                              ///< process spooled.
        std::shared_ptr<const std::string> plain;  ///< The body as it was before it was sealed.
        SteadyTime keep_at{};  ///< When the lease is renewed next while it waits in the spool.
    };
    /// The nonce under which a lost claim is made anew. A function of the lost one: whoever
    /// delivers the answer, now or in a later process, asks with the same, so that what a lost
    /// reply granted is granted again and not once more.
    static Nonce claim_nonce(const Nonce& lost);

    // ---- background work

    void in_background(Task<> task);
    Task<> counted(Task<> task);
    /// False: the engine stops.
    Task<bool> pause(milliseconds d);

    /// Repeats release(key, nonce) until the store confirms it at a time past `not_after`: then no
    /// lease of this nonce lives and no acquire of it can be granted any more.
    Task<> settle(StoredKey key, Nonce nonce, StoreTime not_after);

    /// Brings a spooled answer into its record, however long it takes.
    Task<> deliver(Delivery delivery);

    /// Renews the lease of an answer that waits in the spool: a store that has no room for an
    /// answer may have some for the claim of a takeover, which would be paid for again.
    Task<> keep(Delivery& delivery);
    Task<> deliver_left_over(StoredKey key);

    /// Before an acquire: false if the store gave no answer.
    Task<bool> deliver_once(SpoolEntry entry);
    [[nodiscard]] bool spool_holds(const Delivery& delivery) {
        return spool_.holds(delivery.entry.key, *delivery.spooled_as);
    }

    void delivered(const Delivery& delivery, const Completion& completion);

    // ---- recording an answer

    /// One try. Nullopt: no answer, try again. No deadline: nobody waits, and the chunks of a big
    /// answer may take long, as long as each of them is taken in time.
    Task<std::optional<Completion>> try_record(Delivery& delivery,
                                               std::optional<SteadyTime> deadline);

    /// The store lost the claim (a failover, a purge of an expired failure): acquires anew, so that
    /// the paid answer is kept. Nullopt: no answer yet, or granted and still to be recorded.
    Task<std::optional<Completion>> claim_anew(Delivery& delivery,
                                               std::optional<SteadyTime> deadline);
    [[nodiscard]] SteadyTime step_end(std::optional<SteadyTime> deadline) const {
        return deadline.value_or(loop_.now() + options_.record_patience);
    }

    /// What lost the claim may have lost its tenant's key as well: it is put back, or, if there is
    /// another by now, the answer is sealed under that one.
    Task<> seal_anew(Delivery& delivery);

    /// The work is decided: a copy of the acquire that is still unanswered must not leave a lease
    /// behind.
    void settle_claim(Delivery& delivery);

    // ---- renewals

    void arm_tick();
    void tick();
    Task<> renew(std::uint64_t id, core::Item item);

    // ---- small things

    /// A record that began after a grant does not follow it: the store forgot the claim, and
    /// somebody else was granted the key as a new one. (A token is at least the time of its grant.)
    static bool began_after(core::FencingToken token, const core::Record& record) {
        return record.created.us > static_cast<std::int64_t>(token.value);
    }

    [[nodiscard]] milliseconds usable_for() const {
        return std::min(options_.lease - options_.lease / margin_part, options_.acquire_patience);
    }

    /// Unique is enough: an unpredictable part per engine, and a counter.
    Nonce fresh_nonce();
    static Error stopping() {
        return {.code = ErrorCode::stopping,
                .applied = base::Applied::no,
                .detail = "this process is shutting down"};
    }
    static Error unavailable(std::string detail) {
        return {.code = ErrorCode::store_unavailable,
                .applied = base::Applied::no,
                .retry_after = std::chrono::seconds{1},
                .detail = std::move(detail)};
    }

    void count(const core::StoreOutcome& outcome);

    /// The record of an answer that was just recorded, without deciphering what is at hand.
    static RecordPtr as_it_was(const Delivery& delivery, RecordPtr record);

    /// Keeps a completed record that an outcome carries, opened, for the next replay.
    void remember(const StoredKey& key, const core::StoreOutcome& outcome, const DataKey* data_key);

    /// The store's clock minus ours lies between `at - answered` and `at - sent`. If two batches'
    /// spans lie further apart than a lease less one renewal, the store's clock jumped so far that
    /// a renewed lease may have been taken over.
    void watch_clock(StoreTime at, SteadyTime sent, SteadyTime answered);

    Engine& engine_;
    Loop& loop_;
    core::Store& store_;
    const EngineOptions& options_;
    EngineCounters& counters_;
    HotRecords& hot_;
    Spool& spool_;
    Vault* vault_;
    Batcher batcher_;
    TenantKeys keys_;
    std::vector<LeaseGuard*> leases_;
    std::unordered_map<std::uint64_t, LeaseGuard*> renewing_;
    std::map<StoredKey, UnansweredClaim>
        unanswered_claims_;  ///< Of answers that are still spooled.
    std::uint64_t last_lease_ = 0;
    runtime::TimerId tick_timer_ = 0;
    std::uint64_t nonce_base_ = 0;
    std::uint64_t last_nonce_ = 0;
    bool stopping_ = false;
    std::size_t background_ = 0;
    runtime::Signal stop_signal_;
    runtime::Signal background_ended_;
    bool clock_seen_ = false;
    std::int64_t clock_low_ = 0;  ///< Bounds of the store's clock minus ours, in us.
    std::int64_t clock_high_ = 0;
};

}  // namespace semel::engine
