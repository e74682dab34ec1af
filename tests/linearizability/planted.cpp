#include "linearizability/planted.hpp"

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

#include "core/transition.hpp"

namespace semel::linearizability {
namespace {

using namespace core;
using std::chrono::microseconds;

/// What "one tick early" is here: leases are given in whole milliseconds.
constexpr microseconds tick{1000};

using Decide = std::function<Transition(const RecordPtr&, Operation, StoreTime)>;

/// How a store can be wrong although each decision is right.
enum class Flaw {
    none,
    torn_step,        ///< Another step may come between reading and writing.
    stale_read,       ///< Get tells the record as it was before the last write.
    lost_write,       ///< Some completions are acknowledged and not written.
    clock_goes_back,  ///< Now and then a decision is made at a time before the last one's.
    denied,           ///< Some steps are done and told as not done.
};

struct Fault {
    Decide decide;
    Flaw flaw = Flaw::none;
};

/// A copy of the record, changed.
template <class Change>
RecordPtr changed(const RecordPtr& found, Change change) {
    if (!found) return found;
    auto copy = std::make_shared<Record>(*found);
    change(*copy);
    return copy;
}

Transition right(const RecordPtr& found, Operation operation, StoreTime now) {
    return decide(found, std::move(operation), now);
}

/// The operation is changed before it is decided, if it is an Op and there is a record.
template <class Op, class Change>
Fault asks(Change change) {
    return {[change](const RecordPtr& found, Operation operation, StoreTime now) {
        if (Op* op = std::get_if<Op>(&operation); op != nullptr && found) change(*op, *found);
        return decide(found, std::move(operation), now);
    }};
}

/// Whoever asks is taken for the owner, if there is one.
template <class Op>
Fault unfenced() {
    return asks<Op>([](Op& op, const Record& found) {
        if (found.nonce == Nonce{}) return;
        op.token = found.token;
        op.nonce = found.nonce;
    });
}

/// An Op is decided on a changed record.
template <class Op, class Change>
Fault sees(Change change) {
    return {[change](const RecordPtr& found, Operation operation, StoreTime now) {
        const bool mine = std::holds_alternative<Op>(operation);
        return decide(mine ? changed(found, change) : found, std::move(operation), now);
    }};
}

/// What an Op writes is changed.
template <class Op, class Change>
Fault writes(Change change) {
    return {[change](const RecordPtr& found, Operation operation, StoreTime now) {
        const bool mine = std::holds_alternative<Op>(operation);
        Transition transition = decide(found, std::move(operation), now);
        if (mine && transition.write != Transition::Write::none) {
            transition.record =
                changed(transition.record, [&](Record& record) { change(record, found); });
        }
        return transition;
    }};
}

Transition restart_tokens(const RecordPtr& found, Operation operation, StoreTime now) {
    Transition transition = decide(found, std::move(operation), now);
    Granted* granted = std::get_if<Granted>(&transition.outcome);
    if (granted == nullptr || granted->kind != Granted::Kind::fresh) return transition;
    granted->token.value = 1;
    transition.record = changed(transition.record, [](Record& r) { r.token.value = 1; });
    return transition;
}

Transition release_deletes(const RecordPtr& found, Operation operation, StoreTime now) {
    const bool release = std::holds_alternative<Release>(operation);
    Transition transition = decide(found, std::move(operation), now);
    if (release && transition.write != Transition::Write::none) transition.record = nullptr;
    return transition;
}

/// For those whose lease or time is over within the tick it is over already; the others notice
/// nothing.
Transition take_over_early(const RecordPtr& found, Operation operation, StoreTime now) {
    const bool early = std::holds_alternative<Acquire>(operation) && found &&
                       found->status == Status::processing && found->lease_end - tick <= now;
    const auto end = [&](Record& record) { record.lease_end = now; };
    return decide(early ? changed(found, end) : found, std::move(operation), now);
}

Transition expire_early(const RecordPtr& found, Operation operation, StoreTime now) {
    const bool early = found && found->expires.us != 0 && found->expires - tick <= now;
    const auto end = [&](Record& record) { record.expires = now; };
    return decide(early ? changed(found, end) : found, std::move(operation), now);
}

Transition unknown_as_fail(const RecordPtr& found, Operation operation, StoreTime now) {
    if (Fail* op = std::get_if<Fail>(&operation);
        op != nullptr && op->certainty == Certainty::unknown) {
        op->certainty = Certainty::not_processed;
    }
    return decide(found, std::move(operation), now);
}

const std::map<std::string, Fault>& faults() {
    static const std::map<std::string, Fault> all{
        {"none", {right}},
        {"early-takeover", {take_over_early}},
        {"unfenced-complete", unfenced<Complete>()},
        {"unfenced-fail", unfenced<Fail>()},
        {"unfenced-renew", unfenced<Renew>()},
        {"unfenced-start", unfenced<Start>()},
        {"unfenced-cancel", unfenced<Cancel>()},
        {"complete-ignores-nonce", asks<Complete>([](Complete& op, const Record& found) {
             if (op.token == found.token) op.nonce = found.nonce;
         })},
        {"renew-ignores-token", asks<Renew>([](Renew& op, const Record& found) {
             if (op.nonce == found.nonce) op.token = found.token;
         })},
        {"release-deletes", {release_deletes}},
        {"tokens-restart", {restart_tokens}},
        {"late-acquire", asks<Acquire>([](Acquire& op, const Record&) {
             op.not_after = StoreTime{std::int64_t{1} << 60};
         })},
        {"busy-before-mismatch", asks<Acquire>([](Acquire& op, const Record& found) {
             if (found.status == Status::processing) op.fingerprint = found.fingerprint;
         })},
        {"attempt-not-counted", writes<Acquire>([](Record& record, const RecordPtr& found) {
             if (record.attempt == 1) return;
             record.attempt = found->attempt;
             record.uncharged_attempts = 0;
         })},
        {"unknown-as-fail", {unknown_as_fail}},
        {"resolve-without-compare",
         asks<Resolve>([](Resolve& op, const Record& found) { op.token_seen = found.token; })},
        {"resolve-keeps-token", writes<Resolve>([](Record& record, const RecordPtr& found) {
             record.token = found->token;
             record.nonce = found->nonce;
         })},
        {"complete-after-cancel", sees<Complete>([](Record& record) {
             if (record.cancelled) record.call_started = true;
             record.final = record.cancelled = false;
         })},
        {"complete-overwrites", sees<Complete>([](Record& record) {
             if (record.status != Status::completed) return;
             record.status = Status::unknown;
             record.expires = {};
         })},
        {"fail-after-complete", sees<Fail>([](Record& record) {
             if (record.status != Status::completed) return;
             record.status = Status::unknown;
             record.expires = {};
         })},
        {"early-expiry", {expire_early}},
        {"torn-step", {right, Flaw::torn_step}},
        {"stale-read", {right, Flaw::stale_read}},
        {"lost-write", {right, Flaw::lost_write}},
        {"clock-goes-back", {right, Flaw::clock_goes_back}},
        {"denied-but-done", {right, Flaw::denied}},
    };
    return all;
}

/// Those flaws that show now and then do so once in this many steps.
constexpr std::uint64_t now_and_then = 25;

class PlantedStore final : public Store {
  public:
    PlantedStore(const Fault& fault, base::Clock& clock)
        : fault_(fault),
          clock_(clock),
          wall_at_start_us_(clock.wall_us()),
          steady_at_start_(clock.steady()) {}

    void submit(std::vector<Item> items, BatchDone done) override {
        BatchResults results;
        for (Item& item : items) results.push_back(step(item));
        done(std::move(results));
    }

    base::Result<ScanPage> scan(const ScanFilter&, const std::string&, std::size_t) override {
        return ScanPage{.records = {}, .next = {}, .at = now()};
    }
    base::Result<std::size_t> purge(std::size_t) override { return std::size_t{0}; }
    [[nodiscard]] StoreTime now() const override {
        return StoreTime{wall_at_start_us_} +
               std::chrono::duration_cast<microseconds>(clock_.steady() - steady_at_start_);
    }
    [[nodiscard]] Durability durability() const override { return {}; }
    base::Result<void> health() override { return {}; }
    void stop() override {}

  private:
    struct Kept {
        RecordPtr now;
        RecordPtr before;
    };

    base::Result<Decided> step(Item& item) {
        const std::lock_guard in_line(step_mutex_);
        return std::visit(
            [&](auto& op) -> base::Result<Decided> {
                if constexpr (std::is_constructible_v<Operation, decltype(std::move(op))>) {
                    return apply(item.key, Operation{std::move(op)});
                } else {
                    return base::Error{.code = base::ErrorCode::invalid_argument,
                                       .detail = "planted: holds nothing but records"};
                }
            },
            item.operation);
    }

    base::Result<Decided> apply(const StoredKey& key, Operation operation) {
        const bool sometimes = ++steps_ % now_and_then == 0;
        const bool completes = std::holds_alternative<Complete>(operation);
        const bool reads = std::holds_alternative<Get>(operation);
        StoreTime at = now();
        if (fault_.flaw == Flaw::clock_goes_back && sometimes) at = at - tick;
        const Kept kept = records_[key];
        if (fault_.flaw == Flaw::stale_read && reads) return Decided{Found{kept.before}, at};
        if (fault_.flaw == Flaw::torn_step) {
            step_mutex_.unlock();
            std::this_thread::yield();
            step_mutex_.lock();
        }
        Transition transition = fault_.decide(kept.now, std::move(operation), at);
        const bool lost = fault_.flaw == Flaw::lost_write && completes && steps_ % 2 == 0;
        if (transition.write != Transition::Write::none && !lost)
            records_[key] = {transition.record, kept.now};
        if (fault_.flaw == Flaw::denied && sometimes) {
            return base::Error{.code = base::ErrorCode::store_unavailable,
                               .applied = base::Applied::no,
                               .detail = "planted: it was done all the same"};
        }
        return Decided{
            std::visit([](auto& o) -> StoreOutcome { return std::move(o); }, transition.outcome),
            at};
    }

    const Fault& fault_;
    base::Clock& clock_;
    const std::int64_t wall_at_start_us_;
    const base::SteadyTime steady_at_start_;
    std::mutex step_mutex_;  // guards all below
    std::map<StoredKey, Kept> records_;
    std::uint64_t steps_ = 0;
};

}  // namespace

std::vector<std::string> planted_faults() {
    std::vector<std::string> names;
    for (const auto& [name, fault] : faults()) {
        if (name != "none") names.push_back(name);
    }
    return names;
}

std::unique_ptr<Store> make_planted_store(const std::string& fault, base::Clock& clock) {
    const auto it = faults().find(fault);
    if (it == faults().end()) return nullptr;
    return std::make_unique<PlantedStore>(it->second, clock);
}

}  // namespace semel::linearizability
