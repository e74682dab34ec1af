// The flow of a message: claim -> (read) -> ready -> handler -> complete or fail -> verdict. One
// Run object per message, no coroutine; what one turn of the loop brings goes to the records as one
// batch.
#include "consumer/strategies/recorded.hpp"

#include <algorithm>
#include <cstring>
#include <list>
#include <mutex>
#include <random>
#include <unordered_map>
#include <utility>

#include "base/fault_point.hpp"
#include "base/hash.hpp"
#include "consumer/strategies/past.hpp"
#include "consumer/strategies/record_queue.hpp"
#include "consumer/strategies/recorded_run.hpp"

namespace semel::consumer {
namespace {

using base::Error;
using base::SteadyTime;
using core::Decided;
using State = Run::State;
using Answered = base::Result<Decided>;

/// Claims that wait for a handler start within this part of their lease: they are not renewed.
constexpr int ahead_part = 10;
/// A claim must have this part of its lease left when its handler starts.
constexpr int margin_part = 5;
constexpr milliseconds busy_min{50};
constexpr milliseconds again_first{50};
constexpr milliseconds again_max{2000};
/// An acquire that the store's clock overtook is asked again so often.
constexpr std::uint32_t late_max = 3;
/// Messages whose end is being written, beyond those in hand; then nothing more is taken.
constexpr std::size_t writing_max = 4096;
/// Of what a handler says about its failure, this much is kept.
constexpr std::size_t reason_max_bytes = 1024;
/// After cancel_all, before what still runs is abandoned.
constexpr milliseconds cancel_patience{1000};
/// One long call makes the estimate longer faster than short ones make it shorter.
constexpr int longer_part = 2;
constexpr int shorter_part = 16;

enum Kind : std::uint8_t { step, renewal, probe, giving_back, letter };

template <class... F>
struct Overloaded : F... {
    using F::operator()...;
};

class Recorded final : public Strategy {
  public:
    Recorded(runtime::Loop& loop, RecordedOptions options, Records& records, Handler& handler,
             ConsumerCounters& counters)
        : loop_(loop),
          options_(std::move(options)),
          records_(records),
          handler_(handler),
          counters_(counters),
          gate_(std::make_shared<Gate>()),
          queue_(
              loop, records,
              [this](const RecordQueue::Tag& tag, Answered result) {
                  answered(tag, std::move(result));
              },
              [this] { after(); }) {
        gate_->owner = this;
        const std::string seed = base::random_bytes(2 * sizeof nonce_base_);
        std::memcpy(&nonce_base_, seed.data(), sizeof nonce_base_);
        std::uint64_t random_seed = 0;
        std::memcpy(&random_seed, seed.data() + sizeof nonce_base_, sizeof random_seed);
        random_.seed(random_seed);
    }

    ~Recorded() override {
        {
            const std::lock_guard lock(gate_->mutex);
            gate_->owner = nullptr;
        }
        for (const runtime::TimerId timer : {tick_timer_, stop_timer_}) loop_.cancel(timer);
        for (const Run& run : pool_.all()) loop_.cancel(run.timer);
        for (const auto& back : backs_) loop_.cancel(back->timer);
    }

    // ---------------------------------------------------------------- Strategy

    [[nodiscard]] std::size_t capacity() const override {
        const std::size_t limit = options_.concurrency + ahead();
        const bool full = stopping_ || in_hand_ >= limit || pool_.used() >= limit + writing_max ||
                          // In large portions, unless a handler would stand idle.
                          (in_hand_ >= options_.concurrency && limit - in_hand_ < limit / 2);
        if (full) capacity_wanted_ = true;
        return full ? 0 : limit - in_hand_;
    }

    void run(std::vector<Message*> messages, bool alone, const Answer& answer) override {
        capacity_wanted_ = true;
        const auto shared = std::make_shared<const Answer>(answer);
        std::vector<RunAt> firsts;
        firsts.reserve(messages.size());
        last_of_lane_.clear();
        for (Message* message : messages) {
            Run& run = pool_.take();
            run.message = message;
            run.answer = shared;
            run.alone = alone;
            enter(run, State::waiting);
            if (message->lane != 0) {
                const auto [last, is_first] = last_of_lane_.try_emplace(message->lane, &run);
                if (!is_first) {
                    last->second->next = &run;
                    last->second = &run;
                    continue;
                }
            }
            run.first = true;
            firsts.emplace_back(&run);
        }
        arm_tick();
        for (const RunAt& first : firsts) {
            if (!first.valid()) continue;
            if (!stopping_) {
                claim(*first.run);
                continue;
            }
            hold_rest(*first.run);
            if (first.valid()) decide(*first.run, Held{});
        }
    }

    AssignAnswer assigned(const brokers::AssignmentPtr&) override { return BeginAt{}; }

    void leaving(const brokers::AssignmentPtr& assignment) override {
        const auto of_it = [&](const Run* run) {
            return run->message->delivery.receipt.assignment == assignment;
        };
        std::vector<RunAt> held;
        for (Run& run : pool_.all()) {
            if (!live(run)) continue;
            if (run.next != nullptr && of_it(run.next)) detach(run, held);
            if (run.first && unstarted(run) && of_it(&run)) {
                detach(run, held);
                held.emplace_back(&run);
            }
        }
        for (const RunAt& one : held)
            if (one.valid()) hold(*one.run);
        after();
    }

    void watermark(const brokers::AssignmentPtr&, std::int64_t) override {}

    void letter_published(const Message& message, const Dead& dead,
                          std::function<void(base::Result<void>)> done) override {
        auto& letter = *letters_.emplace_back(std::make_unique<Letter>(std::move(done)));
        const bool marked = dead.token.value != 0 &&
                            (dead.why == DeadClass::attempts || dead.why == DeadClass::crashes ||
                             dead.why == DeadClass::fatal);
        if (!marked) {
            loop_.post([gate = gate_, at = &letter] {
                if (gate->owner != nullptr) gate->owner->letter_marked(*at, {});
            });
            return;
        }
        queue_.push(step_on(message, core::LetterPublished{dead.token}), {&letter, Kind::letter});
    }

    void stop(milliseconds within, std::function<void()> done) override {
        stopping_ = true;
        stopped_ = std::move(done);
        const SteadyTime until = loop_.now() + within;
        stop_timer_ = loop_.at(until, [this] {
            handler_.cancel_all();
            stop_timer_ = loop_.at(loop_.now() + cancel_patience, [this] {
                stop_timer_ = 0;
                abandon();
            });
        });
        hold_unstarted();
        loop_.post([gate = gate_] {
            if (gate->owner != nullptr) gate->owner->after();
        });
    }

    [[nodiscard]] std::string promise() const override {
        std::string out = "Never lost: a message is settled only once its end is recorded in " +
                          records_.name() + ", or its dead letter is confirmed.";
        out += options_.hold_unknown
                   ? " Never run again where a process died in its handler: it becomes a dead "
                     "letter of class unknown."
                   : " Its effect is doubled only where a process died, or was cut off from the "
                     "store for longer than the lease, while its handler ran; that is counted.";
        if (!options_.store_promise.empty()) out += " " + options_.store_promise;
        return out;
    }

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
    void claim(Run& first) {
        if (!queue_.latest_now()) return learn_time(first);
        std::size_t more = usual_.count() == 0 ? 2 : 1 + claims_within_lease_part();
        for (Run* run = &first; run != nullptr && more > 0; run = run->next, --more) {
            if (run->state != State::waiting) continue;
            run->nonce = fresh_nonce();
            run->asked_first = loop_.now();
            enter(*run, run->alone && !run->lone ? State::looking : State::asking);
            send(*run);
        }
    }

    /// An acquire says until when the store may grant it, which takes the store's clock.
    void learn_time(Run& first) {
        unclocked_.emplace_back(&first);
        if (std::exchange(probing_, true)) return;
        queue_.push(step_on(*first.message, core::Get{}), {nullptr, Kind::probe});
    }
    void learned_time(const Answered& result) {
        probing_ = false;
        for (const RunAt& one : std::exchange(unclocked_, {})) {
            if (!one.valid() || one.run->state != State::waiting) continue;
            if (result) {
                claim(*one.run);
            } else {
                decide(*one.run, ill(result.error()));
            }
        }
    }

    void looked(Run& run, const Answered& result) {
        if (run.doomed) return decide(run, Held{});
        if (!result) return decide(run, ill(result.error()));
        const core::RecordPtr& record = found(*result);
        Past past;
        if (record) past = past_of(*record, options_.hold_unknown, false);
        // Else it is claimed to be given up.
        if (past.lone_deaths < options_.retry.crashes) run.lone = past.lone_deaths + 1;
        enter(run, State::asking);
        send(run);
    }

    void asked(Run& run, Answered result) {
        if (!result) {
            const bool nothing = result.error().applied == base::Applied::no && !run.unsure;
            if (nothing)
                return decide(run, run.doomed ? Verdict(Held{}) : Verdict(ill(result.error())));
            run.unsure = true;
            if (loop_.now() >= run.asked_first + options_.patience)
                return unanswered(run, result.error().detail);
            return again(run);
        }
        base::fault_point("consumer.claim.after");
        core::StoreOutcome& outcome = result->outcome;
        if (const auto* granted = std::get_if<core::Granted>(&outcome))
            return granted_to(run, *granted);
        if (std::holds_alternative<core::Late>(outcome)) {
            if (++run.late <= late_max && !run.doomed) return send(run);
            return unanswered(run,
                              "its clock was past the time limit of each claim: check its clock");
        }
        if (run.doomed) return decide(run, Held{});
        if (std::holds_alternative<core::InFlight>(outcome) && !run.first) {
            // By the time it is the first of its lane this says nothing any more: the other may be
            // the one before it.
            enter(run, State::waiting);
            return;
        }
        if (std::holds_alternative<core::Mismatch>(outcome)) {
            enter(run, State::comparing);
            return send(run);
        }
        decide(run, refused(run, outcome));
    }

    /// What an acquire that was not granted says of the message.
    Verdict refused(const Run& run, const core::StoreOutcome& outcome) const {
        const bool hold = options_.hold_unknown;
        if (const auto* flight = std::get_if<core::InFlight>(&outcome)) {
            // Most owners end long before their lease: asked soon at first, then less and less
            // often.
            const auto patient = busy_min * (std::int64_t{1} << std::min(run.message->runs, 10U));
            return Busy{std::clamp(std::min(flight->remaining, patient), busy_min,
                                   std::max(options_.lease, busy_min))};
        }
        if (const auto* due = std::get_if<core::NotDue>(&outcome))
            return Retry{.delay = due->remaining, .reason = "it is not due yet", .charged = false};
        if (const auto* replay = std::get_if<core::Replay>(&outcome)) {
            if (replay->record->status == core::Status::completed) return Duplicate{};
            return dead_of(*replay->record, hold, DeadClass::fatal);
        }
        if (const auto* unknown = std::get_if<core::UnknownOutcome>(&outcome))
            return dead_of(*unknown->record, hold, DeadClass::unknown);
        if (const auto* exhausted = std::get_if<core::Exhausted>(&outcome))
            return dead_of(*exhausted->record, hold, DeadClass::attempts);
        return Held{};  // it changed hands meanwhile: looked at again
    }

    void compared(Run& run, const Answered& result) {
        if (run.doomed) return decide(run, Held{});
        if (!result) return decide(run, ill(result.error()));
        const core::RecordPtr& record = found(*result);
        if (!record) return decide(run, Held{});
        const bool comparable =
            !not_compared(run.message->fingerprint) && !not_compared(record->fingerprint);
        if (!comparable && !run.fingerprint) {
            run.fingerprint = record->fingerprint;
            enter(run, State::asking);
            return send(run);
        }
        ++counters_.mismatches;
        if (options_.mismatch_is_duplicate) return decide(run, Duplicate{});
        decide(run, Dead{.why = DeadClass::mismatch,
                         .reason = "its id was used for another message",
                         .first_failure_ms = record->created.us / 1000,
                         .generation = record->generation});
    }

    void granted_to(Run& run, const core::Granted& granted) {
        run.token = granted.token;
        run.attempt = granted.attempt;
        run.again = milliseconds{0};
        if (granted.kind == core::Granted::Kind::takeover) ++counters_.takeovers;
        if (granted.attempt > 1 && (!run.doomed || options_.hold_unknown)) {
            enter(run, State::reading);
            return send(run);
        }
        if (run.doomed) return give_back(run, Held{});
        make_ready(run);
    }

    void was_read(Run& run, const Answered& result) {
        if (!result) return give_back(run, ill(result.error()));
        const core::RecordPtr& record = found(*result);
        if (!record || record->token != run.token || record->nonce != run.nonce)
            return decide(run, Held{});  // taken over already
        run.record = record;
        const Past past = past_of(*record, options_.hold_unknown, true);
        run.failed_runs = past.failed_runs;
        run.may_double = past.may_double;
        if (run.doomed) return give_back(run, Held{});
        if (past.given_up) return give_up(run, *past.given_up, past.reason);
        if (past.suspect && !run.lone) {
            if (past.lone_deaths < options_.retry.crashes)
                return give_back(run, Suspect{past.lone_deaths});
            return give_up(run, DeadClass::crashes,
                           "the process died " + std::to_string(past.lone_deaths) +
                               " times while it ran alone");
        }
        make_ready(run);
    }

    void make_ready(Run& run) {
        enter(run, State::ready);
        if (run.first) ready_.emplace_back(&run);
    }

    /// It is not known whether the claim was granted, and it will not be waited for any longer.
    void unanswered(Run& run, const std::string& why) {
        give_back_later(run, run.not_after);
        Verdict verdict = Ill{records_.name() + ": " + why};
        if (run.doomed) verdict = Held{};
        decide(run, std::move(verdict));
    }

    void give_back(Run& run, Verdict verdict) {
        hold_rest(run);
        run.verdict = std::move(verdict);
        enter(run, State::releasing);
        send(run);
    }
    void given_back(Run& run, const Answered& result) {
        if (!result) give_back_later(run, {});
        decide(run, std::move(run.verdict));
    }

    void give_back_later(const Run& run, core::StoreTime not_after) {
        auto& back = *backs_.emplace_back(std::make_unique<GiveBack>());
        back.key = run.message->key;
        back.source = run.message->source;
        back.id = run.message->id;
        back.nonce = run.nonce;
        back.not_after = not_after;
        send(back);
    }
    void send(GiveBack& back) {
        RecordStep step{.key = back.key,
                        .source = back.source,
                        .id = back.id,
                        .business_key = {},
                        .operation = core::Release{core::FencingToken{}, back.nonce}};
        queue_.push(std::move(step), {&back, Kind::giving_back});
    }
    void gave_back(GiveBack& back, const Answered& result) {
        if (result && result->at > back.not_after) {
            backs_.remove_if([&](const auto& one) { return one.get() == &back; });
            return;
        }
        back.timer = loop_.at(loop_.now() + back.again, [this, at = &back] {
            at->timer = 0;
            send(*at);
        });
        back.again = std::min(back.again * 2, again_max);
    }

    // ---------------------------------------------------------------- handlers

    /// Starts what may start.
    void pump() {
        if (ready_.empty()) return;
        const SteadyTime now = loop_.now();
        while (has_slot() && !ready_.empty() && !stopping_) {
            const RunAt next = ready_.front();
            ready_.pop_front();
            if (!next.valid() || next.run->state != State::ready) continue;
            Run& run = *next.run;
            if (now > run.asked_at + (options_.lease - options_.lease / margin_part)) {
                give_back(run, Held{});
                continue;
            }
            ++running_;
            if (!options_.hold_unknown) {
                call(run, now);
                continue;
            }
            enter(run, State::starting);
            send(run);
        }
    }

    void start_answered(Run& run, const Answered& result) {
        --running_;
        if (!result) return give_back(run, ill(result.error()));
        if (!std::holds_alternative<core::Applied>(result->outcome)) return decide(run, Held{});
        const SteadyTime now = loop_.now();
        if (stopping_ || now > run.asked_at + (options_.lease - options_.lease / margin_part))
            return give_back(run, Held{});
        ++running_;
        call(run, now);
    }

    void call(Run& run, SteadyTime now) {
        enter(run, State::running);
        run.ran = true;
        if (run.may_double) ++counters_.unknown_outcomes;
        run.started = now;
        run.keeper.emplace(run.asked_at, options_.lease, run.token, run.nonce);
        Attempt attempt{.number = run.failed_runs + 1, .token = run.token};
        if (run.record && !options_.hold_unknown)
            attempt.number = run.record->attempt - run.record->uncharged_attempts;
        base::fault_point("consumer.effect.before");
        handler_.handle(*run.message, attempt, [gate = gate_, at = &run](HandlerOutcome outcome) {
            const std::lock_guard lock(gate->mutex);
            if (gate->owner == nullptr) return;
            gate->ended.emplace_back(at, std::move(outcome));
            if (gate->ended.size() > 1) return;
            gate->owner->loop_.post([gate] {
                if (gate->owner != nullptr) gate->owner->handlers_ended();
            });
        });
    }

    void handlers_ended() {
        std::vector<std::pair<Run*, HandlerOutcome>> ended;
        {
            const std::lock_guard lock(gate_->mutex);
            ended.swap(gate_->ended);
        }
        const SteadyTime now = loop_.now();
        for (auto& [run, outcome] : ended) {
            --running_;
            if (run->state == State::abandoned) {
                decide(*run, Held{});
                continue;
            }
            learn_duration(now - run->started);
            handler_ended(*run, std::move(outcome));
        }
        after();
    }

    void learn_duration(std::chrono::nanoseconds took) {
        took = std::max(took, std::chrono::nanoseconds{1000});
        if (usual_.count() == 0) {
            usual_ = took;
        } else {
            usual_ += (took - usual_) / (took > usual_ ? longer_part : shorter_part);
        }
    }

    void handler_ended(Run& run, HandlerOutcome outcome) {
        if (!std::holds_alternative<Handled>(outcome)) hold_rest(run);
        std::visit(Overloaded{
                       [&](Handled&) {
                           base::fault_point("consumer.effect.after");
                           enter(run, State::completing);
                           send(run);
                       },
                       [&](HandledNotYet& end) {
                           ++counters_.not_yet;
                           failed(run, code_not_yet, std::move(end.reason), end.after);
                       },
                       [&](HandledFailed& end) {
                           failed(run, code_failed, std::move(end.reason), end.after);
                       },
                       [&](HandledFatal& end) {
                           ++run.failed_runs;
                           give_up(run, DeadClass::fatal, std::move(end.reason));
                       },
                       [&](HandledUnknown& end) {
                           ++counters_.unknown_outcomes;
                           if (!options_.hold_unknown)
                               return failed(run, code_unknown, std::move(end.reason), {});
                           ++run.failed_runs;
                           fail(run, core::Certainty::unknown,
                                code_of(code_unknown, run.failed_runs, true),
                                std::move(end.reason));
                       },
                       [&](HandlerIll& end) {
                           give_back(run, Ill{std::move(end.reason)});
                           hold_unstarted();
                       },
                   },
                   outcome);
    }

    // ---------------------------------------------------------------- failures

    /// A run failed: again later, or never.
    void failed(Run& run, std::string_view code, std::string reason, milliseconds asked_for) {
        ++run.failed_runs;
        const double random = std::uniform_real_distribution<double>(0.0, 1.0)(random_);
        const auto wait = options_.retry.wait_after(run.failed_runs, asked_for, random);
        if (!wait) return give_up(run, DeadClass::attempts, std::move(reason));
        run.delay = *wait;
        run.verdict = Retry{.delay = *wait, .reason = reason, .charged = true};
        fail(run, options_.hold_unknown ? core::Certainty::not_processed : core::Certainty::unknown,
             code_of(code, run.failed_runs, options_.hold_unknown), std::move(reason));
    }

    /// FAILED under the class's name and due now, then an acquire that is bound to find its budget
    /// used up: DEAD. If this process dies in between, the next owner finds the name and goes on
    /// from there.
    void give_up(Run& run, DeadClass why, std::string reason) {
        run.giving_up = why;
        run.delay = milliseconds{0};
        // What did not run now (a crash, an interrupted giving up) is not charged as another failed
        // run.
        fail(run, run.ran ? core::Certainty::unknown : core::Certainty::not_processed,
             code_of(name_of(why), run.failed_runs, options_.hold_unknown), std::move(reason));
    }

    void fail(Run& run, core::Certainty certainty, std::string code, std::string reason) {
        if (reason.size() > reason_max_bytes) reason.resize(reason_max_bytes);
        run.certainty = certainty;
        run.failure = {.code = std::move(code), .message = std::move(reason), .http_status = 0};
        enter(run, State::failing);
        send(run);
    }

    void fail_written(Run& run, const Answered& result) {
        if (!result) return again(run);
        if (const auto* fenced = std::get_if<core::Fenced>(&result->outcome))
            return decide(run, after_fenced(fenced->record));
        const core::Record& record = *std::get<core::Applied>(result->outcome).record;
        run.token = record.token;
        run.again = milliseconds{0};
        if (record.status == core::Status::dead)
            return decide(run, dead_of(record, options_.hold_unknown, DeadClass::attempts));
        if (!run.giving_up) {
            if (record.status == core::Status::unknown)
                return decide(run, dead_of(record, options_.hold_unknown, DeadClass::unknown));
            return decide(run, std::move(run.verdict));
        }
        enter(run, record.status == core::Status::unknown ? State::resolving : State::exhausting);
        if (run.state == State::exhausting) run.nonce = fresh_nonce();
        send(run);
    }

    void exhausted(Run& run, const Answered& result) {
        if (!result || std::holds_alternative<core::Late>(result->outcome)) return again(run);
        if (const auto* granted = std::get_if<core::Granted>(&result->outcome)) {
            // The store has forgotten the message, or a person has decided otherwise.
            run.token = granted->token;
            run.record = nullptr;
            return give_back(run, Held{});
        }
        decide(run, refused(run, result->outcome));
    }

    /// The claim is another's, or gone.
    static Verdict after_fenced(const core::RecordPtr& record) {
        if (record && record->status == core::Status::completed) return Duplicate{};
        return Held{};
    }

    // ---------------------------------------------------------------- successes

    void completed(Run& run, const Answered& result) {
        if (!result) return again(run);
        if (std::holds_alternative<core::Applied>(result->outcome)) {
            base::fault_point("consumer.record.after");
            return decide(run, Applied{});
        }
        const core::RecordPtr& record = std::get<core::Fenced>(result->outcome).record;
        if (!record) {
            // The store lost the claim (a failover): made anew, so that what is done is known to
            // be.
            run.nonce = fresh_nonce();
            run.keeper.reset();
            enter(run, State::reclaiming);
            return send(run);
        }
        overtaken(run, after_fenced(record));
    }
    void reclaimed(Run& run, const Answered& result) {
        if (!result || std::holds_alternative<core::Late>(result->outcome)) return again(run);
        if (const auto* granted = std::get_if<core::Granted>(&result->outcome)) {
            run.token = granted->token;
            enter(run, State::completing);
            return send(run);
        }
        const bool done = std::holds_alternative<core::Replay>(result->outcome);
        overtaken(run, done ? refused(run, result->outcome) : Verdict(Held{}));
    }
    /// It was handled, but this claim does not say so any more.
    void overtaken(Run& run, Verdict verdict) {
        if (!std::holds_alternative<Duplicate>(verdict)) ++counters_.unknown_outcomes;
        decide(run, std::move(verdict));
    }

    // ---------------------------------------------------------------- verdicts and lanes

    void decide(Run& run, Verdict verdict) {
        run.verdict = std::move(verdict);
        enter(run, State::decided);
        if (run.first) advance(run);
    }

    /// `first` may be told, started or claimed, and those behind it in turn.
    void advance(Run& first) {
        for (Run* run = &first;;) {
            if (run->state == State::waiting) return claim(*run);
            if (run->state == State::ready) return make_ready(*run);
            if (run->state != State::decided) return;
            const bool goes_on = std::holds_alternative<Applied>(run->verdict) ||
                                 std::holds_alternative<Duplicate>(run->verdict);
            std::vector<RunAt> rest;
            if (!goes_on) detach(*run, rest);
            const RunAt next(run->next);
            if (next.run != nullptr) next.run->first = true;
            tell(*run);
            for (const RunAt& one : rest)
                if (one.valid()) hold(*one.run);
            if (!next.valid()) return;
            run = next.run;
        }
    }

    void tell(Run& run) {
        Message& message = *run.message;
        const auto answer = std::move(run.answer);
        const Verdict verdict = std::move(run.verdict);
        if (run.timer != 0) loop_.cancel(run.timer);
        enter(run, State::gone);
        pool_.told(run);
        (*answer)(message, verdict);
    }

    /// Takes all behind `run` out of its lane.
    static void detach(Run& run, std::vector<RunAt>& into) {
        for (Run* one = std::exchange(run.next, nullptr); one != nullptr;) {
            into.emplace_back(one);
            one->first = true;
            one = std::exchange(one->next, nullptr);
        }
    }
    /// Ends Held all that has no handler yet: this process stops, or the handler is ill and is not
    /// to be asked by all who wait.
    void hold_unstarted() {
        std::vector<RunAt> held;
        for (Run& run : pool_.all()) {
            if (!live(run)) continue;
            run.next = nullptr;
            run.first = true;
            if (unstarted(run)) held.emplace_back(&run);
        }
        for (const RunAt& one : held)
            if (one.valid()) hold(*one.run);
    }
    void hold_rest(Run& run) {
        if (run.next == nullptr) return;
        std::vector<RunAt> rest;
        detach(run, rest);
        for (const RunAt& one : rest)
            if (one.valid()) hold(*one.run);
    }
    /// Ends one that has not started, and has no lane any more.
    void hold(Run& run) {
        switch (run.state) {
            case State::waiting:
            case State::decided:
                return decide(run, Held{});
            case State::ready:
                return give_back(run, Held{});
            case State::looking:
            case State::asking:
            case State::comparing:
            case State::reading:
                run.doomed = true;
                return;
            default:
                return;  // ends by itself
        }
    }

    // ---------------------------------------------------------------- steps

    void send(Run& run) {
        RecordStep out = step_on(*run.message, operation_of(run));
        ++run.out;
        queue_.push(std::move(out), {&run, Kind::step});
    }

    core::Operation operation_of(Run& run) {
        switch (run.state) {
            case State::looking:
            case State::comparing:
            case State::reading:
                return core::Get{};
            case State::asking:
                base::fault_point("consumer.claim.before");
                return acquire(run);
            case State::reclaiming:
                return acquire(run);
            case State::exhausting: {
                core::Acquire bound = acquire(run);
                bound.policy.max_attempts = 1;
                bound.policy.max_crashes = 1;
                return bound;
            }
            case State::starting:
                return core::Start{run.token, run.nonce};
            case State::completing: {
                core::Answer answer;
                answer.http_status = 200;
                return core::Complete{run.token, run.nonce, std::move(answer), {}, {}};
            }
            case State::failing:
                return core::Fail{.token = run.token,
                                  .nonce = run.nonce,
                                  .certainty = run.certainty,
                                  .failure = run.failure,
                                  .answer = {},
                                  .usage = {},
                                  .delay = run.delay};
            case State::resolving:
                return core::Resolve{.token_seen = run.token,
                                     .decision = core::Resolve::Decision::failed,
                                     .answer = {},
                                     .answer_content = {},
                                     .reason = resolve_reason(run.failure)};
            case State::releasing:
                // Release would overwrite what the number of failed runs stands in.
                if (options_.hold_unknown && run.failed_runs > 0 && run.record)
                    return core::Fail{.token = run.token,
                                      .nonce = run.nonce,
                                      .certainty = core::Certainty::not_processed,
                                      .failure = run.record->failure,
                                      .answer = {},
                                      .usage = {}};
                return core::Release{run.token, run.nonce};
            default:
                SEMEL_ASSERT(false, "in no other state is a step sent");
        }
    }

    core::Acquire acquire(Run& run) {
        run.asked_at = loop_.now();
        run.not_after = *queue_.latest_now() + options_.patience;
        core::Acquire out;
        out.fingerprint = run.fingerprint ? *run.fingerprint : run.message->fingerprint;
        out.owner = options_.owner;
        out.nonce = run.nonce;
        out.lease = options_.lease;
        out.not_after = run.not_after;
        out.policy.kind = core::IntentKind::message;
        out.policy.on_unknown =
            options_.hold_unknown ? core::OnUnknown::hold : core::OnUnknown::rerun;
        out.policy.retention_completed = options_.retention;
        out.policy.retention_failed = options_.retention;
        out.policy.retention_dead = options_.retention_dead;
        out.starts_call = !options_.hold_unknown;
        out.charge_crash = !options_.hold_unknown;
        if (run.lone) out.label = lone_label(*run.lone);
        return out;
    }

    static RecordStep step_on(const Message& message, core::Operation operation) {
        return {.key = message.key,
                .source = message.source,
                .id = message.id,
                .business_key = message.business_key,
                .operation = std::move(operation)};
    }

    /// The step had no answer: sent once more after a moment, for as long as it takes.
    void again(Run& run) {
        run.again = run.again.count() == 0 ? again_first : std::min(run.again * 2, again_max);
        run.timer = loop_.at(loop_.now() + run.again, [this, at = RunAt(&run)] {
            if (!at.valid()) return;
            at.run->timer = 0;
            send(*at.run);
        });
    }

    void answered(const RecordQueue::Tag& tag, Answered result) {
        switch (static_cast<Kind>(tag.kind)) {
            case Kind::probe:
                return learned_time(result);
            case Kind::giving_back:
                return gave_back(*static_cast<GiveBack*>(tag.of), result);
            case Kind::letter: {
                base::Result<void> marked;
                if (!result) marked = result.error();
                return letter_marked(*static_cast<Letter*>(tag.of), std::move(marked));
            }
            case Kind::step:
            case Kind::renewal:
                break;
        }
        Run& run = *static_cast<Run*>(tag.of);
        --run.out;
        if (run.state == State::gone) return pool_.answered_gone(run);
        if (tag.kind == Kind::renewal) return renewed(run, result);
        switch (run.state) {
            case State::looking:
                return looked(run, result);
            case State::asking:
                return asked(run, std::move(result));
            case State::comparing:
                return compared(run, result);
            case State::reading:
                return was_read(run, result);
            case State::starting:
                return start_answered(run, result);
            case State::completing:
                return completed(run, result);
            case State::reclaiming:
                return reclaimed(run, result);
            case State::failing:
            case State::resolving:
                return fail_written(run, result);
            case State::exhausting:
                return exhausted(run, result);
            case State::releasing:
                return given_back(run, result);
            default:
                SEMEL_ASSERT(false, "in no other state is a step's answer awaited");
        }
    }

    /// Fenced: a person reopened it meanwhile, or it is forgotten: the letter is published all the
    /// same.
    void letter_marked(Letter& letter, base::Result<void> result) {
        const auto done = std::move(letter.done);
        letters_.remove_if([&](const auto& one) { return one.get() == &letter; });
        done(std::move(result));
    }

    static const core::RecordPtr& found(const Decided& decided) {
        const auto* got = std::get_if<core::Found>(&decided.outcome);
        SEMEL_ASSERT(got != nullptr, "records answer Get with Found");
        return got->record;
    }

    // ---------------------------------------------------------------- time

    void arm_tick() {
        if (tick_timer_ != 0) return;
        const milliseconds every =
            std::min(options_.lease / core::LeaseKeeper::ticks_per_lease, options_.patience / 2);
        tick_timer_ = loop_.at(loop_.now() + every, [this] {
            tick_timer_ = 0;
            tick();
        });
    }

    void tick() {
        const SteadyTime now = loop_.now();
        std::vector<RunAt> late;
        for (Run& run : pool_.all()) {
            if (!live(run)) continue;
            if (run.keeper) renew(run, now);
            if (run.state == State::asking && now >= run.asked_first + options_.patience)
                late.emplace_back(&run);
        }
        for (const RunAt& one : late)
            if (one.valid() && one.run->state == State::asking)
                unanswered(*one.run,
                           "no answer within " + std::to_string(options_.patience.count()) + " ms");
        if (pool_.used() != 0) arm_tick();
        after();
    }

    void renew(Run& run, SteadyTime now) {
        if (run.keeper->asking() && now >= run.renewal_sent + options_.lease / 3)
            run.keeper->step(now, core::LeaseUnanswered{});
        if (run.keeper->step(now, core::LeaseTick{}) != core::LeaseAction::renew) return;
        run.renewal_sent = now;
        ++run.out;
        queue_.push(step_on(*run.message, core::Renew{run.token, run.nonce, options_.lease}),
                    {&run, Kind::renewal});
    }

    void renewed(Run& run, const Answered& result) {
        if (!run.keeper || !run.keeper->asking()) return;
        core::LeaseEvent event = core::LeaseRenewed{};
        if (!result) {
            event = core::LeaseUnanswered{};
        } else if (const auto* fenced = std::get_if<core::Fenced>(&result->outcome)) {
            event = core::LeaseRefused{fenced->record};
        }
        // Overtaken: not renewed any more; what its handler says will be refused.
        run.keeper->step(loop_.now(), event);
    }

    // ---------------------------------------------------------------- the rest

    /// After anything happened: starts handlers, tells who waits.
    void after() {
        pump();
        if (capacity_wanted_ && on_capacity && capacity() > 0) {
            capacity_wanted_ = false;
            on_capacity();
        }
        if (stopping_ && pool_.used() == 0 && backs_.empty()) stopped();
    }

    /// Ends as if the process had died: the leases run out. What its handler still reads is told
    /// when that says it has ended.
    void abandon() {
        std::vector<RunAt> rest;
        for (Run& run : pool_.all()) {
            if (!live(run)) continue;
            run.keeper.reset();
            if (run.state == State::running) {
                enter(run, State::abandoned);
            } else {
                rest.emplace_back(&run);
            }
        }
        for (const RunAt& one : rest)
            if (one.valid()) decide(*one.run, Held{});
        stopped();
    }

    void stopped() {
        if (!stopped_) return;
        loop_.cancel(std::exchange(stop_timer_, 0));
        std::exchange(stopped_, {})();
    }

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

    Ill ill(const Error& error) const { return {records_.name() + ": " + error.detail}; }

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
    std::chrono::nanoseconds usual_{0};  ///< How long a handler takes; 0: not known yet.
    bool probing_ = false;
    bool stopping_ = false;
    mutable bool capacity_wanted_ = true;
    std::function<void()> stopped_;
    runtime::TimerId tick_timer_ = 0;
    runtime::TimerId stop_timer_ = 0;
    std::uint64_t nonce_base_ = 0;
    std::uint64_t last_nonce_ = 0;
    std::mt19937_64 random_;
};

}  // namespace

std::unique_ptr<Strategy> make_recorded(runtime::Loop& loop, RecordedOptions options,
                                        Records& records, Handler& handler,
                                        ConsumerCounters& counters) {
    return std::make_unique<Recorded>(loop, std::move(options), records, handler, counters);
}

}  // namespace semel::consumer
