// Small worlds: one intent, two owners, a sweeper, a person and a clock, enumerated completely up
// to a length. What is checked after every step is a list of invariants about what was seen, not a
// second transition table.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/transition.hpp"

namespace semel::model {

/// The same state in everything that the worlds know of, lease end included. Both may be null.
bool same_record(const core::RecordPtr& a, const core::RecordPtr& b);

/// Something that happens. `owner` counts where the kind is an owner's.
struct Step {
    enum class Kind : std::uint8_t {
        // an owner's
        acquire,        ///< Under a nonce of its own.
        acquire_again,  ///< The same acquire, repeated.
        start,
        renew,
        release,
        release_lost,  ///< By nonce alone: the reply to acquire was lost.
        complete,
        fail_free,
        fail_unknown,
        refuse,
        cancel,
        // of somebody who knows the current token, but not the nonce
        forged_renew,
        forged_release,
        forged_complete,
        forged_fail,
        forged_cancel,
        // of anybody
        acquire_other_body,
        acquire_late,
        settle,
        settle_stale,  ///< With the token before the current one, as the next ones.
        letter_published,
        resolve_completed,
        resolve_failed,
        resolve_rerun,
        resolve_stale,
        reopen,
        reopen_stale,
        // time passes, nobody acts
        lease_passes,
        retention_passes,
    };
    Kind kind = Kind::acquire;
    std::uint8_t owner = 0;
};

std::string name_of(const Step& step);
bool passes_time(const Step& step);
/// By how much.
std::chrono::microseconds time_of(const Step& step);
/// The whole alphabet.
const std::vector<Step>& all_steps();

/// What one world is played under.
struct Rules {
    std::string name;
    core::Policy policy;
};
const std::vector<Rules>& all_rules();

/// What is known of one intent from outside. A value: copied at every branch.
class World {
  public:
    explicit World(const Rules& rules, core::StoreTime now) : rules_(&rules), now_(now) {}

    /// Whether the step says anything here: who was never granted has no token to name.
    [[nodiscard]] bool enabled(const Step& step) const;
    /// The operation that the step means now.
    [[nodiscard]] core::Operation operation(const Step& step) const;
    /// Takes in what came of it (`record`: what Get shows afterwards, null if absent). Empty, or
    /// the invariant that is broken.
    [[nodiscard]] std::string observe(const Step& step, const core::Operation& asked,
                                      const core::Outcome& outcome, const core::RecordPtr& record,
                                      core::StoreTime at);
    /// Time passed; `record` is what Get shows now.
    [[nodiscard]] std::string observe_time(const core::RecordPtr& record, core::StoreTime at);

    [[nodiscard]] core::StoreTime now() const { return now_; }
    /// True if the last step told nobody anything new and changed nothing: whatever may follow is
    /// enumerated without it.
    [[nodiscard]] bool idle() const { return idle_; }

  private:
    struct OwnerView {
        core::Nonce nonce;  ///< Of its latest acquire.
        core::FencingToken token;
        bool asked = false;
        bool granted = false;
    };
    [[nodiscard]] std::string broken(const Step& step, const core::Operation& asked,
                                     const core::Outcome& outcome,
                                     const core::RecordPtr& after) const;

    const Rules* rules_;
    core::StoreTime now_;
    core::RecordPtr seen_;  ///< What Get showed last.
    std::array<OwnerView, 2> owners_;
    std::uint8_t nonces_ = 0;
    core::FencingToken highest_;   ///< Of all tokens of this key so far.
    core::FencingToken previous_;  ///< The one before the current.
    bool maybe_processed_ =
        false;  ///< By what the owners said: the latest attempt's call may have been paid.
    bool idle_ = false;
};

/// core::decide, or one with a planted bug.
using Decide =
    std::function<core::Transition(const core::RecordPtr&, core::Operation, core::StoreTime)>;

struct Explored {
    std::uint64_t steps = 0;   ///< Decided and checked.
    std::uint64_t worlds = 0;  ///< Of them, those that changed something.
    std::string broken;        ///< The first invariant found broken; empty if none.
    std::vector<Step> path;    ///< How it came to that.
};
std::string path_name(const std::vector<Step>& path);

/// Plays all sequences of at most `length` steps under `rules`, each beginning with an acquire. An
/// idle step is checked and not followed any further.
Explored explore(const Rules& rules, std::size_t length, const Decide& decide);

/// All sequences for a store to replay: of `length` steps, or shorter and ending with a step that
/// is idle.
std::vector<std::vector<Step>> sequences(const Rules& rules, std::size_t length);

}  // namespace semel::model
