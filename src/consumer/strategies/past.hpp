// Past: what a message's record says about the runs before this one, and how it is written there.
// Pure.
//
// What counts. Claims are granted with starts_call and charge_crash, so in the record
//   attempt = runs that failed + owners that died (crashes_charged) + claims given back (uncharged)
//   + the present one.
// A failed run is therefore recorded with Certainty::unknown under on_unknown: rerun: that charges
// it, while not_processed would count it among those given back, and no message would ever be given
// up. Under on_unknown: hold Certainty::unknown makes the record UNKNOWN, so a failed run is
// recorded as not_processed, and the number of failed runs stands in the failure's code
// ("handler-failed.2"). Claims are not started then before their handler is (Start), and an owner's
// death before that costs nothing; it forgets the number: more runs, never fewer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "consumer/verdict.hpp"
#include "core/record.hpp"

namespace semel::consumer {

/// Failure codes of runs that may be tried again.
inline constexpr std::string_view code_failed = "handler-failed";
inline constexpr std::string_view code_not_yet = "not-yet";
inline constexpr std::string_view code_unknown = "handler-unknown";

/// Deaths of owners while a message ran among others, after which it is a suspect.
inline constexpr std::uint32_t crowd_crashes_max = 2;

struct Past {
    std::uint32_t failed_runs = 0;
    /// It was being given up when its owner died: to be finished, not to be run.
    std::optional<DeadClass> given_up;
    bool suspect = false;
    /// An owner died in it and nothing is known of what it did. Told by the record, not by the
    /// grant: a takeover whose answer was lost is granted as a repetition, or given back and
    /// granted as a retry.
    bool may_double = false;
    std::uint32_t lone_deaths = 0;  ///< Times it ran alone since it last ended by itself.
    std::string reason;             ///< The last failure's words.
};
/// `record` is granted to who asks (or, in a plain look before an acquire, not yet: `granted`
/// false).
Past past_of(const core::Record& record, bool hold_unknown, bool granted);

/// What is known of a record that is DEAD, UNKNOWN or final.
Dead dead_of(const core::Record& record, bool hold_unknown, DeadClass otherwise);

/// The code under which the failure of a run is recorded; `failed_runs`: this one included.
std::string code_of(std::string_view code, std::uint32_t failed_runs, bool hold_unknown);
/// The label of the k-th run alone.
std::string lone_label(std::uint32_t k);
/// UNKNOWN that is to become DEAD goes by a decision (Resolve), whose reason replaces code and
/// message: both are kept in it.
std::string resolve_reason(const core::Failure& failure);

/// The fingerprint of who does not compare.
bool not_compared(const core::Fingerprint& fingerprint);

}  // namespace semel::consumer
