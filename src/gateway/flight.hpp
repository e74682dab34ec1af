// Flights: the intents that are asked for in this process right now. The first asker's owner works;
// everyone follows.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "core/store.hpp"
#include "gateway/journal.hpp"
#include "gateway/problem.hpp"
#include "runtime/signal.hpp"

namespace semel::gateway {

using base::SteadyTime;

/// More followers of one intent are refused with 429.
inline constexpr std::uint32_t followers_max = 10'000;

/// One intent in this process, from the first request until its owner is done with it. Thread-safe.
class Flight {
  public:
    enum class Phase : std::uint8_t {
        asking,     ///< The owner waits for its admission.
        elsewhere,  ///< Another process owns it; our owner follows it there, or asks again until
                    ///< it may take over.
        running,    ///< Granted: the journal fills.
        refused,    ///< The admission was no grant: `refusal()`.
        broken,     ///< The store could not be asked: `problem()`.
        moved_on,   ///< Overtaken before a byte left: look again.
        done,       ///< The journal has ended.
    };

    Flight(core::Fingerprint fingerprint, std::string spill_path, SteadyTime began)
        : fingerprint_(std::move(fingerprint)), journal_(std::move(spill_path)), began_(began) {}

    [[nodiscard]] const core::Fingerprint& fingerprint() const { return fingerprint_; }
    [[nodiscard]] Journal& journal() { return journal_; }
    [[nodiscard]] runtime::Signal& changed() { return changed_; }
    [[nodiscard]] SteadyTime began() const { return began_; }

    [[nodiscard]] Phase phase() const { return phase_.load(); }
    /// Whether the fingerprint is known to be the record's (so another one is a mismatch at once).
    [[nodiscard]] bool admitted() const {
        const Phase now = phase();
        return now == Phase::elsewhere || now == Phase::running || now == Phase::done ||
               now == Phase::moved_on;
    }

    // ---- the owner
    void elsewhere() {
        from_elsewhere_ = true;
        set(Phase::elsewhere);
    }
    /// Before the journal gets the head of another process's attempt.
    void follows(std::uint32_t attempt, bool takeover) {
        attempt_ = attempt;
        takeover_ = takeover;
    }
    void granted(const core::Granted& grant) {
        attempt_ = grant.attempt;
        takeover_ = grant.kind == core::Granted::Kind::takeover;
        token_ = grant.token;
        from_elsewhere_ = false;
        // The leader's own follower has nothing to do with it. Sequentially consistent with attach(): whoever comes later
        // sees the phase, whoever came before is counted.
        phase_.store(Phase::running);
        if (followers_.load() > 1) changed_.notify();
    }
    void refuse(core::StoreOutcome outcome) {
        refusal_ = std::move(outcome);
        set(Phase::refused);
    }
    void break_off(Problem problem) {
        problem_ = std::move(problem);
        set(Phase::broken);
    }
    void move_on() { set(Phase::moved_on); }
    void done() { set(Phase::done); }

    // ---- followers, after the phase that sets it
    [[nodiscard]] const core::StoreOutcome& refusal() const { return *refusal_; }
    [[nodiscard]] const Problem& problem() const { return problem_; }
    [[nodiscard]] std::uint32_t attempt() const { return attempt_; }
    [[nodiscard]] bool takeover() const { return takeover_; }
    /// Of the attempt that runs, or ran, in this process.
    [[nodiscard]] core::FencingToken token() const { return token_; }
    /// Another process has the attempt: whoever asks here joins, also who asked first. Any phase.
    [[nodiscard]] bool from_elsewhere() const { return from_elsewhere_; }

    /// False: followers_max are there already.
    bool attach();
    void detach(SteadyTime now);
    [[nodiscard]] std::uint32_t followers() const {
        return followers_.load(std::memory_order_acquire);
    }
    /// When the last follower left; meaningful while followers() == 0.
    [[nodiscard]] SteadyTime left_at() const {
        return SteadyTime(SteadyTime::duration(left_at_.load()));
    }

  private:
    void set(Phase phase) {
        phase_.store(phase, std::memory_order_release);
        changed_.notify();
    }

    const core::Fingerprint fingerprint_;
    Journal journal_;
    runtime::Signal changed_;
    const SteadyTime began_;
    std::atomic<Phase> phase_{Phase::asking};
    std::optional<core::StoreOutcome> refusal_;
    Problem problem_;
    std::uint32_t attempt_ = 0;
    bool takeover_ = false;
    core::FencingToken token_;
    std::atomic<bool> from_elsewhere_{false};
    std::atomic<std::uint32_t> followers_{0};
    std::atomic<SteadyTime::rep> left_at_{0};
};

using FlightPtr = std::shared_ptr<Flight>;

/// Follows a flight for as long as it lives.
class Attachment {
  public:
    Attachment(FlightPtr flight, runtime::Loop& loop) : flight_(std::move(flight)), loop_(loop) {
        attached_ = flight_->attach();
    }
    ~Attachment() {
        if (attached_) flight_->detach(loop_.now());
    }
    Attachment(const Attachment&) = delete;
    Attachment& operator=(const Attachment&) = delete;
    [[nodiscard]] bool attached() const { return attached_; }

  private:
    FlightPtr flight_;
    runtime::Loop& loop_;
    bool attached_ = false;
};

/// All flights of a process, striped by key so that cores do not wait for one lock. Thread-safe.
class Flights {
  public:
    struct Entry {
        FlightPtr flight;
        bool leads = false;  ///< It was made by this call: the caller must see to its owner.
    };
    Entry enter(const core::StoredKey& key, const core::Fingerprint& fingerprint,
                const std::string& spill_path, SteadyTime now);
    [[nodiscard]] FlightPtr find(const core::StoredKey& key);
    /// Forgets the flight, if it is still the key's.
    void leave(const core::StoredKey& key, const FlightPtr& flight);
    [[nodiscard]] std::size_t size() const { return size_.load(std::memory_order_relaxed); }

  private:
    static constexpr std::size_t stripe_count = 64;
    struct Stripe {
        std::mutex mutex;
        std::unordered_map<core::StoredKey, FlightPtr, base::DigestHash>
            flights;  // guarded by mutex
    };
    Stripe& stripe(const core::StoredKey& key) { return stripes_[key.bytes[9] % stripe_count]; }

    Stripe stripes_[stripe_count];
    std::atomic<std::size_t> size_{0};
};

}  // namespace semel::gateway
