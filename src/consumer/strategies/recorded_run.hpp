// Run: one message in the hands of the strategy `recorded`, from run() until its verdict is told.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "consumer/handler.hpp"
#include "consumer/strategy.hpp"
#include "core/lease_keeper.hpp"
#include "core/operation.hpp"
#include "runtime/loop.hpp"

namespace semel::consumer {

struct Run {
    enum class State : std::uint8_t {
        free,
        waiting,    ///< Not claimed yet.
        looking,    ///< Alone: its record is read before it is claimed.
        asking,     ///< Acquire is on its way.
        comparing,  ///< Mismatch: the record is being read.
        reading,    ///< Granted and not its first attempt: the record is being read.
        ready,      ///< Claimed, not started.
        decided,    ///< Its verdict waits until it is the first of its lane.
        starting,   ///< on_unknown: hold: Start is on its way.
        running,    ///< With its handler.
        // ---- its handler has ended; below, something is being written
        completing,
        publishing,  ///< Recorded; its answer is on the way to where results go.
        reclaiming,  ///< The store had lost the claim of a handled message: Acquire is on its way.
        failing,
        resolving,   ///< UNKNOWN -> FAILED, on the way to DEAD.
        exhausting,  ///< FAILED -> DEAD.
        releasing,
        abandoned,  ///< Stopped without waiting for its handler.
        gone,       ///< Told; a step of it is still on its way.
    };

    Message* message = nullptr;
    std::shared_ptr<const Strategy::Answer> answer;
    std::uint64_t serial = 0;  ///< Another for each use of this object.
    Run* next = nullptr;       ///< The next of its lane.
    bool first = false;        ///< Of its lane.
    State state = State::free;
    bool doomed = false;    ///< Ends Held as soon as it is known what to give back.
    std::uint32_t out = 0;  ///< Steps on their way.

    Verdict verdict;  ///< Of decided, and of what is being written.

    // The claim.
    core::Nonce nonce;
    core::FencingToken token;
    core::StoreTime not_after;
    base::SteadyTime asked_first;  ///< Before the first acquire under this nonce was sent.
    base::SteadyTime asked_at;     ///< Before the acquire that was answered was sent.
    std::uint32_t attempt = 0;
    std::uint32_t late = 0;
    bool unsure = false;                           ///< An acquire under this nonce had no answer.
    std::optional<core::Fingerprint> fingerprint;  ///< Instead of the message's.
    bool alone = false;
    std::optional<std::uint32_t> lone;  ///< Its label says that this is the k-th run alone.

    // What the record says (of a second or later attempt).
    core::RecordPtr record;
    std::uint32_t failed_runs = 0;
    bool may_double = false;  ///< See Past.

    // The handler.
    bool ran = false;
    base::SteadyTime started;
    std::optional<core::LeaseKeeper> keeper;
    base::SteadyTime renewal_sent;

    // What is to be written.
    HandlerAnswerPtr result;         ///< To be published once it is recorded.
    std::uint64_t result_group = 0;  ///< That it was asked to be recorded in.
    std::optional<DeadClass> giving_up;
    core::Failure failure;
    core::Certainty certainty = core::Certainty::unknown;
    milliseconds delay{0};
    milliseconds again{0};  ///< Wait before the next try of a step that had no answer.
    runtime::TimerId timer = 0;
    base::SteadyTime writing_since{};  ///< When a tick first saw that its end is being written.
};

/// Its handler has ended, and the records have not taken yet how.
[[nodiscard]] inline bool is_being_written(Run::State state) {
    using State = Run::State;
    return state > State::running && state < State::abandoned && state != State::publishing;
}

/// A run at a moment: `valid` no more once the object is used for another message.
struct RunAt {
    explicit RunAt(Run* of) : run(of), serial(of == nullptr ? 0 : of->serial) {}
    [[nodiscard]] bool valid() const { return run != nullptr && run->serial == serial; }
    Run* run;
    std::uint64_t serial;
};

/// Objects that are used again and never move.
class RunPool {
  public:
    Run& take() {
        Run* run = nullptr;
        if (free_.empty()) {
            run = &all_.emplace_back();
        } else {
            run = free_.back();
            free_.pop_back();
        }
        run->serial = ++last_;
        ++used_;
        return *run;
    }
    /// Its verdict is told. Steps of it may still be on their way.
    void told(Run& run) {
        --used_;
        const std::uint32_t out = run.out;
        run = Run{};
        run.serial = ++last_;
        run.out = out;
        run.state = out == 0 ? Run::State::free : Run::State::gone;
        if (out == 0) free_.push_back(&run);
    }
    /// A step of one that is gone was answered.
    void answered_gone(Run& run) {
        if (run.out != 0) return;
        run.state = Run::State::free;
        free_.push_back(&run);
    }
    [[nodiscard]] std::size_t used() const { return used_; }
    [[nodiscard]] std::deque<Run>& all() { return all_; }

  private:
    std::deque<Run> all_;
    std::vector<Run*> free_;
    std::uint64_t last_ = 0;
    std::size_t used_ = 0;
};

}  // namespace semel::consumer
