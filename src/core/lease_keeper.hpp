// LeaseKeeper: when the owner of one lease renews it, and what it concludes from the answers. No
// clock and no I/O of its own.
#pragma once

#include <chrono>
#include <variant>

#include "base/time.hpp"
#include "core/record.hpp"

namespace semel::core {

/// Time passed: is a renewal due?
struct LeaseTick {};
/// The store confirmed the renewal that was sent last.
struct LeaseRenewed {};
/// The store refused it (Fenced). `record`: the state it named; null: it holds no record of the key
/// any more.
struct LeaseRefused {
    RecordPtr record;
};
/// No answer, or an Error: it may or may not have been renewed.
struct LeaseUnanswered {};
using LeaseEvent = std::variant<LeaseTick, LeaseRenewed, LeaseRefused, LeaseUnanswered>;

enum class LeaseAction : std::uint8_t {
    none,
    renew,      ///< Send a renewal now and report what became of it.
    overtaken,  ///< Said once: another token is current, or the record is decided for good. Never
                ///< renew again.
};

/// A value, used by one thread. All times are the owner's monotonic ones.
class LeaseKeeper {
  public:
    /// Time between two ticks; a lease is renewed at an age of one to two of them, so at the latest
    /// every third of its length.
    static constexpr int ticks_per_lease = 6;

    /// `asked_at`: from before the acquire was sent; the lease cannot end earlier than `asked_at +
    /// lease`.
    LeaseKeeper(base::SteadyTime asked_at, milliseconds lease, FencingToken token, Nonce nonce)
        : held_since_(asked_at), lease_(lease), token_(token), nonce_(nonce) {}

    LeaseAction step(base::SteadyTime now, const LeaseEvent& event);

    /// Until then nobody else can have been granted the intent, as long as the store's clock does
    /// not jump.
    [[nodiscard]] base::SteadyTime safe_until() const { return held_since_ + lease_; }
    [[nodiscard]] bool overtaken() const { return overtaken_; }
    /// A renewal is on its way.
    [[nodiscard]] bool asking() const { return asking_; }

  private:
    base::SteadyTime held_since_;  ///< From before the last confirmed acquire or renewal was sent.
    base::SteadyTime sent_at_{};
    milliseconds lease_;
    FencingToken token_;
    Nonce nonce_;
    bool asking_ = false;
    bool overtaken_ = false;
};

}  // namespace semel::core
