// TransactionalInbox::run: transactions over ever smaller parts of a batch, until every message is
// decided.
#include <algorithm>
#include <deque>
#include <exception>
#include <iterator>
#include <random>
#include <thread>
#include <unordered_set>
#include <utility>

#include "base/fault_point.hpp"
#include "inbox/claims.hpp"
#include "inbox/guarded.hpp"
#include "inbox/inbox.hpp"
#include "inbox/steps.hpp"
#include "inbox/words.hpp"

namespace semel::inbox {
namespace {

using sql::ResultRows;
using sql::Statement;
using sql::Trouble;
using SteadyTime = std::chrono::steady_clock::time_point;

/// Tries of a part of several messages before its messages go one by one, at once after a lock
/// time-out: a lock that somebody holds on one of them is no reason for the others to wait. A
/// deadlock is over at the second try.
constexpr unsigned group_tries_max = 2;
constexpr milliseconds pause_min{2};
constexpr milliseconds pause_max{100};
constexpr unsigned reconnects_max = 3;

/// Messages that go into one transaction, and what is known of earlier tries.
struct Part {
    std::vector<std::size_t> messages;  ///< Indices into the batch, ascending.
    unsigned tries = 0;                 ///< Ended by locks.
    bool uncertain = false;             ///< A COMMIT's answer is missing.
    std::optional<SteadyTime> give_up = {};
};

/// The effects, in one of two forms.
struct Work {
    std::span<const std::vector<Effect>> statements;
    const Callback* callback = nullptr;
    bool batchable = true;
};

class Runner {
  public:
    Runner(const InboxOptions& options, std::shared_ptr<Executor>& connection, const Batch& batch,
           const Work& work, const Connect& connect)
        : options_(options),
          connection_(connection),
          batch_(batch),
          work_(work),
          connect_(connect),
          tables_(connection->dialect(), options.place),
          id_(new_claim_id()),
          position_(batch.expected_offset),
          decided_(batch.messages.size()) {
        report_.results.resize(batch.messages.size());
        report_.next_offset = position_;
    }

    RunReport run() {
        std::vector<std::size_t> all(batch_.messages.size());
        for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
        if (work_.callback != nullptr && !work_.batchable)
            singly(all);
        else if (!all.empty())
            parts_.push_back({.messages = std::move(all)});
        while ((begun_ || !parts_.empty()) && !over_) {
            if (begun_) {
                Begun begun = std::move(*begun_);
                begun_.reset();
                claim(std::move(begun));
                continue;
            }
            Part part = std::move(parts_.front());
            parts_.pop_front();
            hold_back(part);
            if (!part.messages.empty()) attempt(std::move(part));
        }
        for (std::size_t i = 0; i < decided_.size(); ++i) {
            if (!decided_[i]) report_.results[i] = rest_;
        }
        return std::move(report_);
    }

  private:
    [[nodiscard]] const Message& message(std::size_t i) const { return batch_.messages[i]; }
    [[nodiscard]] bool ordered() const { return batch_.expected_offset.has_value(); }
    [[nodiscard]] bool lane_blocked(std::size_t i) const {
        if (ordered()) return lane_all_blocked_;
        return !message(i).lane.empty() && blocked_.contains(message(i).lane);
    }
    [[nodiscard]] bool same_lane(std::size_t a, std::size_t b) const {
        return ordered() || (!message(a).lane.empty() && message(a).lane == message(b).lane);
    }

    void decide(std::size_t i, MessageResult result) {
        const bool settled =
            result.outcome == Outcome::applied || result.outcome == Outcome::duplicate;
        if (!settled && ordered()) lane_all_blocked_ = true;
        if (!settled && !message(i).lane.empty()) blocked_.insert(message(i).lane);
        report_.results[i] = std::move(result);
        decided_[i] = true;
    }
    void hold_back(Part& part) {
        std::erase_if(part.messages, [&](std::size_t i) {
            if (!lane_blocked(i)) return false;
            decide(i, {.outcome = Outcome::held,
                       .reason = "one before it in its lane was not applied"});
            return true;
        });
    }
    /// Nothing more is tried: every message that is not decided gets `rest`.
    void end(MessageResult rest) {
        rest_ = std::move(rest);
        over_ = true;
    }

    // ---- what is left of a part goes to the front, so that the batch's order is kept

    void push(std::span<const std::size_t> messages, const Part& from) {
        if (messages.empty()) return;
        Part part{.messages = {messages.begin(), messages.end()}, .uncertain = from.uncertain};
        parts_.push_front(std::move(part));
    }
    void singly(std::span<const std::size_t> messages, bool uncertain = false) {
        for (std::size_t n = messages.size(); n-- > 0;)
            parts_.push_front({.messages = {messages[n]}, .uncertain = uncertain});
    }
    /// Around the one that seems to be at fault.
    void split_at(const Part& part, std::size_t culprit) {
        const std::span<const std::size_t> all = part.messages;
        push(all.subspan(culprit + 1), part);
        push(all.subspan(culprit, 1), part);
        push(all.first(culprit), part);
    }
    void split_in_half(const Part& part) {
        const std::span<const std::size_t> all = part.messages;
        push(all.subspan(all.size() / 2), part);
        push(all.first(all.size() / 2), part);
    }

    // ---- one transaction

    /// The transaction failed; `culprit` is the position in the part of the message that made it
    /// fail, if that is known.
    void failed(Part part, std::optional<std::size_t> culprit, MessageResult result) {
        if (part.messages.size() == 1) {
            decide(part.messages[0], std::move(result));
        } else if (culprit) {
            split_at(part, *culprit);
        } else {
            split_in_half(part);
        }
    }

    /// A transaction whose first trip is sent, or about to be.
    struct Begun {
        Part part;
        Claims claims;
        std::size_t fence = 0;      ///< Of its statement in the trip.
        std::size_t claims_at = 0;  ///< The first of those of `claims`.
        std::vector<ResultRows> results = {};
    };
    /// Adds the statements of the first trip: BEGIN, the fence, the claims.
    Begun begin(Part part, std::vector<Statement>& trip) {
        ++report_.transactions;
        attempted_at_ = std::chrono::steady_clock::now();
        std::vector<const Message*> messages;
        for (const std::size_t i : part.messages) messages.push_back(&message(i));
        Begun begun{.part = std::move(part), .claims = {tables_, options_, messages, id_}};
        add(trip, beginning(tables_.dialect, options_.lock_wait, options_.idle_limit));
        begun.fence = trip.size();
        if (batch_.fence) trip.push_back(fencing(tables_, options_.scope, batch_.fence->partition));
        begun.claims_at = trip.size();
        add(trip, begun.claims.next());
        base::fault_point("inbox.claim.before");
        return begun;
    }

    void attempt(Part part) {
        if (connection_->in_transaction()) {
            ++report_.transactions;
            return end({.outcome = Outcome::undecided,
                        .reason = "the connection is inside a transaction"});
        }
        std::vector<Statement> trip;
        Begun begun = begin(std::move(part), trip);
        auto answer = exchange(trip);
        if (auto* problem = std::get_if<Problem>(&answer))
            return troubled(std::move(begun.part), std::move(*problem), false);
        begun.results = std::move(std::get<0>(answer));
        claim(std::move(begun));
    }

    void claim(Begun begun) {
        const std::span<const ResultRows> results = begun.results;
        Part& part = begun.part;
        base::fault_point("inbox.claim.after");
        if (batch_.fence && epoch_of(results[begun.fence]) != batch_.fence->epoch) {
            const std::string now = std::to_string(epoch_of(results[begun.fence]));
            roll_back(*connection_);
            return fenced_off(part, "the partition's epoch is " + now + " and not " +
                                        std::to_string(batch_.fence->epoch));
        }
        Claims& claims = begun.claims;
        claims.absorb(results.subspan(begun.claims_at));
        for (auto more = claims.next(); !more.empty(); more = claims.next()) {
            auto found = exchange(more);
            if (auto* problem = std::get_if<Problem>(&found))
                return troubled(std::move(part), std::move(*problem), false);
            claims.absorb(std::get<0>(found));
        }
        effect(std::move(part), claims);
    }

    void effect(Part part, const Claims& claims) {
        const std::vector<Claim> claimed = claims.result();
        // One that cannot be done ends its lane here. Where others of that lane stand behind it,
        // the part is cut.
        for (std::size_t n = 0; n + 1 < part.messages.size(); ++n) {
            const bool stops = claimed[n].kind == Claim::Kind::mismatch ||
                               claimed[n].kind == Claim::Kind::undecided;
            const auto behind = part.messages.begin() + static_cast<std::ptrdiff_t>(n) + 1;
            if (!stops || std::none_of(behind, part.messages.end(), [&](std::size_t later) {
                    return same_lane(part.messages[n], later);
                }))
                continue;
            roll_back(*connection_);
            const std::span<const std::size_t> all = part.messages;
            push(all.subspan(n + 1), part);
            push(all.first(n + 1), part);
            return;
        }
        if (work_.callback != nullptr)
            call_back(std::move(part), claims, claimed);
        else
            execute(std::move(part), claimed);
    }

    void execute(Part part, const std::vector<Claim>& claimed) {
        std::vector<Statement> trip;
        std::vector<std::pair<std::size_t, const Effect*>>
            origin;  // position in the part, and the effect
        bool checked = false;
        for (std::size_t n = 0; n < part.messages.size(); ++n) {
            if (claimed[n].kind != Claim::Kind::fresh) continue;
            for (const Effect& one : work_.statements[part.messages[n]]) {
                if (controls_transaction(one.statement.text, tables_.dialect)) {
                    roll_back(*connection_);
                    return failed(std::move(part), n,
                                  {.outcome = Outcome::failed,
                                   .fatal = true,
                                   .reason = "an effect must not begin or end a transaction: " +
                                             first_word(one.statement.text)});
                }
                trip.push_back(one.statement);
                origin.emplace_back(n, &one);
                checked = checked || one.rows != Rows::any;
            }
        }
        const std::size_t effects = trip.size();
        const std::optional<std::int64_t> target = add_advance(part, claimed, trip);
        // The numbers of rows are judged before the COMMIT.
        const bool together = !checked && !target;
        if (together) add(trip, committing(tables_.dialect));
        if (!trip.empty()) {
            std::size_t at = 0;
            auto answer = exchange(trip, &at);
            if (auto* problem = std::get_if<Problem>(&answer)) {
                const bool its_own = problem->trouble == Trouble::refused && at < effects;
                if (its_own) {
                    if (!connection_->in_transaction())
                        return transaction_gone(std::move(part), origin[at].first,
                                                std::move(*problem));
                    roll_back(*connection_);
                    return failed(std::move(part), origin[at].first,
                                  {.outcome = Outcome::failed, .reason = problem->error.detail});
                }
                return troubled(std::move(part), std::move(*problem), together);
            }
            const std::span<const ResultRows> results = std::get<0>(answer);
            for (std::size_t i = 0; i < effects; ++i) {
                if (auto wrong = judge(*origin[i].second, results[i])) {
                    roll_back(*connection_);
                    return failed(std::move(part), origin[i].first, std::move(*wrong));
                }
            }
            if (target && !position_moved(part, claimed, results.subspan(effects, 2), *target))
                return;
        }
        if (!together) {
            base::fault_point("inbox.commit.before");
            auto answer = exchange(committing(tables_.dialect));
            if (auto* problem = std::get_if<Problem>(&answer))
                return troubled(std::move(part), std::move(*problem), true);
        }
        base::fault_point("inbox.commit.after");
        committed(part, claimed, target);
    }

    /// Why the effect may not be committed; empty: it may.
    static std::optional<MessageResult> judge(const Effect& effect, const ResultRows& result) {
        const auto rows = std::max(result.affected, static_cast<std::int64_t>(result.rows.size()));
        if (effect.rows == Rows::any || rows == 1 ||
            (effect.rows == Rows::at_least_one && rows > 1))
            return {};
        const std::string words =
            first_word(effect.statement.text) + " found " + std::to_string(rows) + " rows";
        if (rows == 0) return MessageResult{.outcome = Outcome::not_yet, .reason = words};
        return MessageResult{
            .outcome = Outcome::failed, .fatal = true, .reason = words + " where one was expected"};
    }

    void call_back(Part part, const Claims& claims, std::vector<Claim> claimed) {
        const bool alone = part.messages.size() == 1;
        Guarded guarded(*connection_, !alone);
        std::vector<std::size_t>
            again;  // failed beside others, or held by such a one: each in a transaction of its own
        for (std::size_t n = 0; n < part.messages.size(); ++n) {
            const std::size_t i = part.messages[n];
            if (claimed[n].kind != Claim::Kind::fresh) {
                // The position must not pass the one that failed.
                if (ordered() && !again.empty()) again.push_back(i);
                continue;
            }
            const bool waits = std::any_of(again.begin(), again.end(), [&](std::size_t before) {
                return same_lane(before, i);
            });
            guarded.next();
            EffectOutcome outcome = NotYet{};
            if (!waits) {
                outcome = call(guarded, message(i));
                if (!connection_->in_transaction())
                    return transaction_gone(std::move(part), n, std::move(outcome));
                if (auto* problem = std::get_if<Problem>(&outcome);
                    problem != nullptr && problem->trouble != Trouble::refused)
                    return troubled(std::move(part), std::move(*problem), false);
                if (std::holds_alternative<Did>(outcome)) {
                    if (!connection_->aborted()) continue;
                    // A statement failed unnoticed. PostgreSQL's COMMIT would be a silent ROLLBACK.
                    const std::optional<Problem>& why = guarded.problem();
                    if (why && why->trouble == Trouble::contended)
                        return troubled(std::move(part), *why, false);
                    outcome =
                        Failed{.reason = "a statement of it failed: " +
                                         (why ? why->error.detail : "its transaction is aborted")};
                }
            }
            if (alone || claimed[n].retry) {
                roll_back(*connection_);
                return failed(std::move(part), n, result_of(outcome));
            }
            // Undone to before it, and its claim taken back: the others go on.
            std::vector<Statement> undo = guarded.undo();
            const base::Digest key = claims.key(n);
            undo.push_back(unclaiming(tables_, {&key, 1}, id_));
            auto answer = exchange(undo);
            if (auto* problem = std::get_if<Problem>(&answer))
                return troubled(std::move(part), std::move(*problem), false);
            again.push_back(i);
            // The second of two equal ids is not done by a first one that is not.
            for (std::size_t later = n + 1; later < part.messages.size(); ++later) {
                if (claims.key(later) == key && claimed[later].kind == Claim::Kind::done)
                    again.push_back(part.messages[later]);
            }
        }
        std::sort(again.begin(), again.end());
        again.erase(std::unique(again.begin(), again.end()), again.end());
        Part rest{.messages = again};
        for (std::size_t n = part.messages.size(); n-- > 0;) {
            if (!std::binary_search(again.begin(), again.end(), part.messages[n])) continue;
            part.messages.erase(part.messages.begin() + static_cast<std::ptrdiff_t>(n));
            claimed.erase(claimed.begin() + static_cast<std::ptrdiff_t>(n));
        }
        std::vector<Statement> trip;
        const std::optional<std::int64_t> target = add_advance(part, claimed, trip);
        if (target) {
            auto answer = exchange(trip);
            if (auto* problem = std::get_if<Problem>(&answer))
                return troubled(std::move(part), std::move(*problem), false);
            if (!position_moved(part, claimed, std::get<0>(answer), *target)) return;
        }
        base::fault_point("inbox.commit.before");
        if (alone && !target && next_goes_along()) return commit_and_begin(part, claimed);
        auto answer = exchange(committing(tables_.dialect));
        if (auto* problem = std::get_if<Problem>(&answer)) {
            singly(rest.messages);
            return troubled(std::move(part), std::move(*problem), true);
        }
        base::fault_point("inbox.commit.after");
        singly(rest.messages);
        committed(part, claimed, target);
    }

    /// Whether the next message's transaction can begin in the trip that commits this one's.
    bool next_goes_along() {
        while (!parts_.empty()) {
            hold_back(parts_.front());
            if (!parts_.front().messages.empty()) break;
            parts_.pop_front();
        }
        return !parts_.empty() && parts_.front().messages.size() == 1;
    }
    void commit_and_begin(Part& part, const std::vector<Claim>& claimed) {
        std::vector<Statement> trip = committing(tables_.dialect);
        const std::size_t commit = trip.size() - 1;
        Begun next = begin(parts_.front(), trip);
        std::size_t at = 0;
        auto answer = exchange(trip, &at);
        auto* problem = std::get_if<Problem>(&answer);
        if (problem != nullptr && at <= commit) {
            --report_.transactions;  // it will begin
            return troubled(std::move(part), std::move(*problem), true);
        }
        base::fault_point("inbox.commit.after");
        parts_.pop_front();
        committed(part, claimed, {});
        if (problem != nullptr) return troubled(std::move(next.part), std::move(*problem), false);
        next.results = std::move(std::get<0>(answer));
        begun_.emplace(std::move(next));
    }

    EffectOutcome call(Guarded& guarded, const Message& one) const {
        try {
            return (*work_.callback)(guarded, one);
        } catch (const std::exception& error) {
            return Failed{.reason = error.what()};
        } catch (...) {
            return Failed{.reason = "the callback threw something that is no exception"};
        }
    }
    static MessageResult result_of(const EffectOutcome& outcome) {
        if (const auto* not_yet = std::get_if<NotYet>(&outcome))
            return {.outcome = Outcome::not_yet, .reason = not_yet->reason};
        if (const auto* failure = std::get_if<Failed>(&outcome))
            return {.outcome = Outcome::failed, .fatal = failure->fatal, .reason = failure->reason};
        return {.outcome = Outcome::failed, .reason = std::get<Problem>(outcome).error.detail};
    }
    /// The callback's own doing, past the guard, or the connection is gone.
    void transaction_gone(Part part, std::size_t n, EffectOutcome outcome) {
        if (auto* problem = std::get_if<Problem>(&outcome);
            problem != nullptr && problem->trouble != Trouble::refused)
            return troubled(std::move(part), std::move(*problem), false);
        // If it was committed, claims of messages whose turn has not come were committed with it.
        std::vector<base::Digest> keys;
        for (std::size_t later = n + 1; later < part.messages.size(); ++later) {
            const Message& one = message(part.messages[later]);
            keys.push_back(key_hash({options_.scope, one.source, one.id}));
        }
        if (!keys.empty()) static_cast<void>(connection_->run(unclaiming(tables_, keys, id_)));
        for (std::size_t before = 0; before <= n; ++before) {
            decide(part.messages[before],
                   {.outcome = Outcome::unknown,
                    .reason = "an effect ended the inbox's transaction: it must not"});
        }
        end({.outcome = Outcome::undecided,
             .reason = "an effect before it ended the inbox's transaction"});
    }

    // ---- the position, with ordering by partition

    std::optional<std::int64_t> add_advance(const Part& part, const std::vector<Claim>& claimed,
                                            std::vector<Statement>& trip) const {
        if (!ordered()) return {};
        std::optional<std::int64_t> target;
        for (std::size_t n = 0; n < part.messages.size(); ++n) {
            if (claimed[n].kind == Claim::Kind::mismatch ||
                claimed[n].kind == Claim::Kind::undecided)
                break;
            target = message(part.messages[n]).next_offset;
        }
        if (target)
            add(trip, advancing(tables_, options_.scope, *batch_.fence, *target, position_));
        return target;
    }
    /// False: it was not where it had to be; then everything is rolled back and decided.
    bool position_moved(const Part& part, const std::vector<Claim>& claimed,
                        std::span<const ResultRows> results, std::int64_t target) {
        const AdvanceOutcome outcome =
            advance_outcome(results, *batch_.fence, batch_.fence->epoch, target, position_);
        if (std::holds_alternative<Advanced>(outcome)) return true;
        const auto& now = std::get<Unexpected>(outcome).next_offset;
        const bool nothing_new = std::none_of(claimed.begin(), claimed.end(), [](const Claim& one) {
            return one.kind == Claim::Kind::fresh;
        });
        // All of it was done before, and the position with it.
        if (nothing_new && now && *now >= target) return true;
        roll_back(*connection_);
        fenced_off(part, "the partition's position is " +
                             (now ? std::to_string(*now) : std::string("unknown")) + " and not " +
                             std::to_string(*position_));
        return false;
    }

    // ---- how a transaction ends

    void committed(const Part& part, const std::vector<Claim>& claimed,
                   std::optional<std::int64_t> target) {
        if (target) report_.next_offset = position_ = std::max(*target, *position_);
        for (std::size_t n = 0; n < part.messages.size(); ++n) {
            switch (claimed[n].kind) {
                case Claim::Kind::fresh:
                case Claim::Kind::ours:
                    decide(part.messages[n], {.outcome = Outcome::applied});
                    break;
                case Claim::Kind::done:
                    decide(part.messages[n], {.outcome = Outcome::duplicate});
                    break;
                case Claim::Kind::mismatch:
                    decide(part.messages[n],
                           {.outcome = Outcome::mismatch,
                            .reason = "the id was used with another fingerprint"});
                    break;
                case Claim::Kind::undecided:
                    decide(part.messages[n],
                           {.outcome = Outcome::undecided, .reason = "its row is undecided"});
                    break;
            }
        }
    }

    /// Nothing of the part was done in this transaction; but of an earlier one whose COMMIT had no
    /// answer. Whoever raised the epoch has waited for the end of that.
    void fenced_off(const Part& part, const std::string& why) {
        std::vector<base::Digest> keys;
        for (const std::size_t i : part.messages)
            keys.push_back(key_hash({options_.scope, message(i).source, message(i).id}));
        std::unordered_set<std::string> done;
        bool known = true;
        if (part.uncertain) {
            auto answer = connection_->run(reading_claimed(tables_, keys, id_));
            known = std::holds_alternative<ResultRows>(answer);
            if (known) {
                for (const sql::Values& row : std::get<ResultRows>(answer).rows)
                    done.insert(row[0].value_or(""));
            }
        }
        for (std::size_t n = 0; n < part.messages.size(); ++n) {
            if (!known)
                decide(part.messages[n], {.outcome = Outcome::unknown, .reason = why});
            else if (done.contains(std::string(keys[n].view())))
                decide(part.messages[n], {.outcome = Outcome::applied});
            else
                decide(part.messages[n], {.outcome = Outcome::fenced, .reason = why});
        }
        end({.outcome = Outcome::fenced, .reason = why});
    }

    void troubled(Part part, Problem problem, bool committing) {
        switch (problem.trouble) {
            case Trouble::contended:
                roll_back(*connection_);
                return contended(std::move(part), std::move(problem));
            case Trouble::lost:
                part.uncertain =
                    part.uncertain || (committing && problem.error.applied != base::Applied::no);
                return reconnect(std::move(part), std::move(problem));
            case Trouble::refused:
                roll_back(*connection_);
                // A constraint that is checked at COMMIT: somebody's effect, but whose is not said.
                if (committing)
                    return failed(std::move(part), {},
                                  {.outcome = Outcome::failed, .reason = problem.error.detail});
                [[fallthrough]];  // the inbox's own statement: no message's fault
            case Trouble::full:
            case Trouble::not_writable:
                if (problem.trouble != Trouble::refused) roll_back(*connection_);
                return give_up(part, std::move(problem));
        }
    }

    void contended(Part part, Problem problem) {
        const SteadyTime now = std::chrono::steady_clock::now();
        if (!part.give_up) part.give_up = now + options_.patience;
        ++part.tries;
        const bool waited = now - attempted_at_ >= options_.lock_wait;
        if (part.messages.size() > 1 && (waited || part.tries >= group_tries_max))
            return singly(part.messages, part.uncertain);
        if (now >= *part.give_up) {
            return decide(part.messages[0],
                          {.outcome = part.uncertain ? Outcome::unknown : Outcome::undecided,
                           .reason = problem.error.detail});
        }
        pause(part.tries);
        // The others need not wait for a lock that this one needs, unless their order says so.
        const bool lone =
            part.messages.size() == 1 && !ordered() && message(part.messages[0]).lane.empty();
        if (lone)
            parts_.push_back(std::move(part));
        else
            parts_.push_front(std::move(part));
    }

    static void pause(unsigned tries) {
        thread_local std::minstd_rand random{std::random_device{}()};
        const auto longest =
            std::min<std::int64_t>(pause_max.count(), pause_min.count() << std::min(tries, 10U));
        std::this_thread::sleep_for(
            milliseconds{std::uniform_int_distribution<std::int64_t>(0, longest)(random)});
    }

    void reconnect(Part part, Problem problem) {
        if (!connect_ || report_.reconnects == reconnects_max)
            return give_up(part, std::move(problem));
        ++report_.reconnects;
        try {
            auto answer = connect_();
            if (std::holds_alternative<Problem>(answer)) return give_up(part, std::move(problem));
            connection_ = std::move(std::get<0>(answer));
        } catch (const std::exception&) {
            return give_up(part, std::move(problem));
        }
        parts_.push_front(std::move(part));
    }

    void give_up(const Part& part, Problem problem) {
        const MessageResult rest{.outcome = Outcome::undecided, .reason = problem.error.detail};
        for (const std::size_t i : part.messages) {
            decide(i, part.uncertain
                          ? MessageResult{.outcome = Outcome::unknown, .reason = rest.reason}
                          : rest);
        }
        report_.problem = std::move(problem);
        // Other parts may be uncertain as well.
        for (const Part& other : parts_) {
            if (!other.uncertain) continue;
            for (const std::size_t i : other.messages)
                decide(i, {.outcome = Outcome::unknown, .reason = rest.reason});
        }
        end(rest);
    }

    static void add(std::vector<Statement>& to, std::vector<Statement> from) {
        std::move(from.begin(), from.end(), std::back_inserter(to));
    }
    Tried<std::vector<ResultRows>> exchange(std::span<const Statement> statements,
                                            std::size_t* failed = nullptr) {
        return connection_->run(statements, failed);
    }

    const InboxOptions& options_;
    std::shared_ptr<Executor>& connection_;
    const Batch& batch_;
    const Work& work_;
    const Connect& connect_;
    const Tables tables_;
    const ClaimId id_;
    std::optional<std::int64_t>
        position_;                ///< With ordering by partition: after what is committed.
    std::deque<Part> parts_;      ///< Still to do, in the batch's order.
    std::optional<Begun> begun_;  ///< Sent along with the COMMIT of the one before.
    std::unordered_set<std::string> blocked_;
    bool lane_all_blocked_ = false;
    std::vector<bool> decided_;
    MessageResult rest_;
    bool over_ = false;
    SteadyTime attempted_at_;
    RunReport report_;
};

RunReport refused_report(const Batch& batch, Problem problem) {
    RunReport report;
    report.results.assign(batch.messages.size(),
                          {.outcome = Outcome::undecided, .reason = problem.error.detail});
    report.problem = std::move(problem);
    return report;
}

}  // namespace

RunReport TransactionalInbox::run(std::shared_ptr<Executor>& connection, const Batch& batch,
                                  std::span<const std::vector<Effect>> effects,
                                  const Connect& connect) const {
    if (auto problem = refusal(batch)) return refused_report(batch, std::move(*problem));
    if (effects.size() != batch.messages.size()) {
        return refused_report(
            batch, refused("inbox: " + std::to_string(batch.messages.size()) +
                           " messages, but effects of " + std::to_string(effects.size())));
    }
    const Work work{.statements = effects};
    return Runner(options_, connection, batch, work, connect).run();
}

RunReport TransactionalInbox::run(std::shared_ptr<Executor>& connection, const Batch& batch,
                                  const Callback& effect, const Connect& connect,
                                  bool batchable) const {
    if (auto problem = refusal(batch)) return refused_report(batch, std::move(*problem));
    const Work work{.callback = &effect, .batchable = batchable};
    return Runner(options_, connection, batch, work, connect).run();
}

std::optional<Problem> TransactionalInbox::refusal(const Batch& batch) const {
    if (auto problem = refusal(std::span<const Message>(batch.messages))) return problem;
    if (batch.fence) {
        if (auto problem = refusal(batch.fence->partition)) return problem;
    } else if (batch.expected_offset) {
        return refused("inbox: a batch with an expected offset needs a fence");
    }
    return {};
}

}  // namespace semel::inbox
