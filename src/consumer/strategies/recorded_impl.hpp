// Recorded: the strategies `store` and `table`. The flow of a message: claim -> (read) -> ready ->
// handler -> complete or fail -> verdict. One Run object per message, no coroutine; what one turn
// of the loop brings goes to the records as one batch. recorded.cpp: what the consumer calls, and
// time; recorded_claims.cpp: until a message may start; recorded_ends.cpp: its handler, and what is
// written of it; recorded_steps.cpp: verdicts, lanes, the steps on the records.
#pragma once

#include <cstring>
#include <deque>
#include <list>
#include <mutex>
#include <random>
#include <unordered_map>
#include <utility>

#include "base/assert.hpp"
#include "consumer/strategies/past.hpp"
#include "consumer/strategies/record_queue.hpp"
#include "consumer/strategies/recorded.hpp"
#include "consumer/strategies/recorded_run.hpp"

namespace semel::consumer {

class Recorded final : public Strategy {
    using SteadyTime = base::SteadyTime;
    using State = Run::State;
    using Answered = base::Result<core::Decided>;
    enum Kind : std::uint8_t { step, renewal, probe, giving_back, letter };
    /// Claims that wait for a handler start within this part of their lease: they are not renewed.
    static constexpr int ahead_part = 10;
    static constexpr milliseconds again_first{50};
    static constexpr milliseconds again_max{2000};
    /// Records that have not taken for so long how a message ended are an alarm.
    static constexpr milliseconds trouble_after{3000};

  public:
    Recorded(runtime::Loop& loop, RecordedOptions options, Records& records, Handler& handler,
             ConsumerCounters& counters, Results* results);

    ~Recorded() override;

    // ---------------------------------------------------------------- Strategy

    [[nodiscard]] std::size_t capacity() const override;

    void run(std::vector<Message*> messages, bool alone, const Answer& answer) override;

    AssignAnswer assigned(const brokers::AssignmentPtr&) override { return BeginAt{}; }

    void leaving(const brokers::AssignmentPtr& assignment) override;

    void hold_back() override { hold_unstarted(); }

    void watermark(const brokers::AssignmentPtr&, std::int64_t) override {}

    void letter_published(const Message& message, const Dead& dead,
                          std::function<void(base::Result<void>)> done) override;

    void stop(milliseconds within, std::function<void()> done) override;

    [[nodiscard]] std::string promise() const override;

  private:
    /// What other threads hold.
    struct Gate {
        std::mutex mutex;
        Recorded* owner = nullptr;
        std::vector<std::pair<Run*, HandlerOutcome>>
            ended;  ///< While there are any, a post is under way.
    };
    /// A claim that may exist and nobody wants: released until the store says that none can be
    /// granted any more.
    struct GiveBack {
        base::Digest key;
        std::string source, id;
        core::Nonce nonce;
        core::StoreTime not_after;
        milliseconds again{again_first};
        runtime::TimerId timer = 0;
    };
    struct Letter {
        explicit Letter(std::function<void(base::Result<void>)> fn) : done(std::move(fn)) {}
        std::function<void(base::Result<void>)> done;
    };

    // ---------------------------------------------------------------- claims

    /// The first of a lane is to be claimed, and what follows it as far as that will start soon.
    void claim(Run& first);

    /// An acquire says until when the store may grant it, which takes the store's clock.
    void learn_time(Run& first);
    void learned_time(const Answered& result);

    void looked(Run& run, const Answered& result);

    void asked(Run& run, Answered result);

    /// What an acquire that was not granted says of the message.
    Verdict refused(const Run& run, const core::StoreOutcome& outcome) const;

    void compared(Run& run, const Answered& result);

    void granted_to(Run& run, const core::Granted& granted);

    void was_read(Run& run, const Answered& result);

    void make_ready(Run& run) {
        enter(run, State::ready);
        if (run.first) ready_.emplace_back(&run);
    }

    /// It is not known whether the claim was granted, and it will not be waited for any longer.
    void unanswered(Run& run, const std::string& why);

    void give_back(Run& run, Verdict verdict);
    void given_back(Run& run, const Answered& result);

    void give_back_later(const Run& run, core::StoreTime not_after);
    void send(GiveBack& back);
    void gave_back(GiveBack& back, const Answered& result);

    // ---------------------------------------------------------------- handlers

    /// Starts what may start.
    void pump();

    void start_answered(Run& run, const Answered& result);

    void call(Run& run, SteadyTime now);

    void handlers_ended();

    void learn_duration(std::chrono::nanoseconds took);

    void handler_ended(Run& run, HandlerOutcome outcome);

    // ---------------------------------------------------------------- failures

    /// A run failed: again later, or never.
    void failed(Run& run, std::string_view code, std::string reason, milliseconds asked_for);

    /// FAILED under the class's name and due now, then an acquire that is bound to find its budget
    /// used up: DEAD. If this process dies in between, the next owner finds the name and goes on
    /// from there.
    void give_up(Run& run, DeadClass why, std::string reason);

    void fail(Run& run, core::Certainty certainty, std::string code, std::string reason);

    void fail_written(Run& run, const Answered& result);

    void exhausted(Run& run, const Answered& result);

    /// The claim is another's, or gone.
    static Verdict after_fenced(const core::RecordPtr& record) {
        if (record && record->status == core::Status::completed) return Duplicate{};
        return Held{};
    }

    // ---------------------------------------------------------------- successes

    void completed(Run& run, const Answered& result);
    void reclaimed(Run& run, const Answered& result);
    /// It was handled, but this claim does not say so any more.
    void overtaken(Run& run, Verdict verdict);
    /// Its record holds the answer `run.result`, by the step that was just answered: ends once that
    /// is published.
    void publish(Run& run);
    /// `record` holds it, at the store's time `at`.
    void publish_found(Run& run, const core::Record& record, core::StoreTime at);
    [[nodiscard]] Results::Done when_published(Run& run);
    /// Of a message that another owner completed. Whether its answer is published is not known
    /// here: it is claimed again, and the record looked at.
    [[nodiscard]] Verdict elsewhere(Verdict verdict) const {
        const bool asks = results_ != nullptr && std::holds_alternative<Duplicate>(verdict);
        return asks ? Verdict(Held{}) : verdict;
    }

    // ---------------------------------------------------------------- verdicts and lanes

    void decide(Run& run, Verdict verdict);

    /// `first` may be told, started or claimed, and those behind it in turn.
    void advance(Run& first);

    void tell(Run& run);

    /// Takes all behind `run` out of its lane.
    static void detach(Run& run, std::vector<RunAt>& into);
    /// Ends Held all that has no handler yet: this process stops, or the handler is ill and is not
    /// to be asked by all who wait.
    void hold_unstarted();
    void hold_rest(Run& run);
    /// Ends one that has not started, and has no lane any more.
    void hold(Run& run);

    // ---------------------------------------------------------------- steps

    void send(Run& run);

    core::Operation operation_of(Run& run);

    core::Acquire acquire(Run& run);

    core::Answer answer_to_record(Run& run);

    /// The step had no answer: sent once more after a moment, for as long as it takes.
    void again(Run& run);

    void answered(const RecordQueue::Tag& tag, Answered result);

    /// Fenced: a person reopened it meanwhile, or it is forgotten: the letter is published all the
    /// same.
    void letter_marked(Letter& letter, base::Result<void> result);

    static const core::RecordPtr& found(const core::Decided& decided) {
        const auto* got = std::get_if<core::Found>(&decided.outcome);
        SEMEL_ASSERT(got != nullptr, "records answer Get with Found");
        return got->record;
    }

    // ---------------------------------------------------------------- time

    void arm_tick();

    void tick();

    void tell_trouble(std::size_t unrecorded);
    void renew(Run& run, SteadyTime now);

    void renewed(Run& run, const Answered& result);

    // ---------------------------------------------------------------- the rest

    /// After anything happened: starts handlers, tells who waits.
    void after();

    /// Ends as if the process had died: the leases run out. What its handler still reads is told
    /// when that says it has ended.
    void abandon();

    void stopped();

    void enter(Run& run, State state) {
        const auto in_hand = [](State s) { return s != State::free && s <= State::running; };
        in_hand_ += in_hand(state) ? 1 : 0;
        in_hand_ -= in_hand(run.state) ? 1 : 0;
        const auto recording = [](State s) {
            return s == State::completing || s == State::reclaiming;
        };
        recording_ += recording(state) ? 1 : 0;
        recording_ -= recording(run.state) ? 1 : 0;
        run.state = state;
    }
    /// What has happened and is not recorded is what a death doubles.
    [[nodiscard]] bool has_slot() const {
        return running_ + (options_.slot_until_recorded ? recording_ : 0) < options_.concurrency;
    }
    static bool live(const Run& run) {
        return run.state != State::free && run.state != State::gone &&
               run.state != State::abandoned;
    }
    static bool unstarted(const Run& run) { return run.state < State::starting; }

    [[nodiscard]] std::size_t claims_within_lease_part() const {
        const std::chrono::nanoseconds part = options_.lease / ahead_part;
        return static_cast<std::size_t>(part / std::max(usual_, std::chrono::nanoseconds{1}));
    }
    /// Claims beyond those that run.
    [[nodiscard]] std::size_t ahead() const {
        if (usual_.count() == 0)
            return std::min<std::size_t>(options_.concurrency, options_.ahead_max);
        return std::min(options_.concurrency * claims_within_lease_part(), options_.ahead_max);
    }

    Ill ill(const base::Error& error) const { return {records_.name() + ": " + error.detail}; }

    /// Unique is enough: an unpredictable part per strategy, and a counter.
    core::Nonce fresh_nonce() {
        core::Nonce nonce;
        const std::uint64_t count = ++last_nonce_;
        std::memcpy(nonce.bytes.data(), &nonce_base_, sizeof nonce_base_);
        std::memcpy(nonce.bytes.data() + sizeof nonce_base_, &count, sizeof count);
        return nonce;
    }

    runtime::Loop& loop_;
    const RecordedOptions options_;
    Records& records_;
    Handler& handler_;
    ConsumerCounters& counters_;
    Results* const results_;
    const std::shared_ptr<Gate> gate_;
    RecordQueue queue_;
    RunPool pool_;
    std::deque<RunAt> ready_;       ///< Firsts of their lanes, claimed.
    std::vector<RunAt> unclocked_;  ///< Wait until the store's time is known.
    std::unordered_map<std::uint64_t, Run*> last_of_lane_;  ///< Within run().
    std::list<std::unique_ptr<GiveBack>> backs_;
    std::list<std::unique_ptr<Letter>> letters_;
    std::size_t in_hand_ = 0;            ///< Runs whose handler has not ended.
    std::size_t recording_ = 0;          ///< Handled, and not yet recorded.
    std::size_t running_ = 0;            ///< With a handler, or about to be.
    std::size_t ill_ = 0;                ///< Found the handler ill, not told yet: nothing starts.
    std::chrono::nanoseconds usual_{0};  ///< How long a handler takes; 0: not known yet.
    bool probing_ = false;
    bool troubled_ = false;  ///< And on_trouble was told.
    bool stopping_ = false;
    mutable bool capacity_wanted_ = true;
    std::function<void()> stopped_;
    runtime::TimerId tick_timer_ = 0;
    runtime::TimerId stop_timer_ = 0;
    std::uint64_t nonce_base_ = 0;
    std::uint64_t last_nonce_ = 0;
    std::mt19937_64 random_;
};

}  // namespace semel::consumer
