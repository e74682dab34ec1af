#include "linearizability/client.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <optional>
#include <utility>

#include "linearizability/history.hpp"

namespace semel::linearizability {
namespace {

using namespace core;
using std::chrono::microseconds;
using std::chrono::milliseconds;

// Times are short, so that leases end, records expire and zombies wake up hundreds of times in a
// second.
constexpr microseconds pause_max{1200};
constexpr microseconds sleep_min{8'000};
constexpr microseconds sleep_max{25'000};
constexpr unsigned lease_max_ms = 8;
constexpr unsigned retention_max_ms = 12;
/// An acquire that was lost on the way is not done later than this: who has dozens that may still
/// be done can explain anything.
constexpr microseconds patience{25'000};
/// Batches of one client that are not answered yet.
constexpr unsigned in_flight_max = 2;
constexpr unsigned batch_max = 4;

class Client {
  public:
    Client(Store& store, Board& board, const Work& work, unsigned number, base::SteadyTime begin)
        : store_(store),
          board_(board),
          work_(work),
          number_(number),
          begin_(begin),
          rng_(work.seed * 1000 + number) {}

    Recorded run() {
        {
            std::unique_lock lock(mutex_);
            answered_.wait_until(lock, begin_, [] { return false; });
        }
        while (std::chrono::steady_clock::now() - begin_ < work_.duration) {
            submit();
            std::unique_lock lock(mutex_);
            const unsigned allowed = rng_.one_in(6) ? in_flight_max - 1 : 0;
            answered_.wait(lock, [&] { return in_flight_ <= allowed; });
            // Thinking, or asleep like a stopped process. Nobody waits for anything here.
            const microseconds pause = rng_.percent(4) ? rng_.between(sleep_min, sleep_max)
                                                       : rng_.between(microseconds{0}, pause_max);
            answered_.wait_for(lock, pause, [] { return false; });
        }
        std::unique_lock lock(mutex_);
        answered_.wait(lock, [&] { return in_flight_ == 0; });
        return std::move(recorded_);
    }

  private:
    void submit() {
        const std::uint64_t size = rng_.percent(50) ? 1 : 1 + rng_.below(batch_max);
        std::vector<Item> items;
        std::vector<Asked> asked;
        const std::string one_key = key();
        for (std::uint64_t i = 0; i < size; ++i) {
            // Several on one key are as frequent as several keys.
            std::string key_name = rng_.percent(50) ? one_key : key();
            Operation operation = choose(key_name);
            items.push_back(
                {key_of(work_.salt + key_name),
                 std::visit([](const auto& op) -> StoreOperation { return op; }, operation)});
            asked.push_back(
                {number_, 0, ++sequence_, std::move(key_name), {}, std::move(operation)});
        }
        unsigned slot = 0;
        {
            const std::lock_guard lock(mutex_);
            ++in_flight_;
            if (slot_taken_[slot]) ++slot;
            slot_taken_[slot] = true;
        }
        const base::SteadyTime call = std::chrono::steady_clock::now();
        for (Asked& one : asked) {
            one.slot = slot;
            one.call = call;
        }
        store_.submit(std::move(items), [this, asked = std::move(asked)](
                                            const BatchResults& results) { take(asked, results); });
    }

    void take(const std::vector<Asked>& asked, const BatchResults& results) {
        const base::SteadyTime now = std::chrono::steady_clock::now();
        const std::lock_guard lock(mutex_);
        for (std::size_t i = 0; i < asked.size(); ++i) {
            recorded_.lines += line_of(asked[i], results[i], now);
            ++recorded_.operations;
            if (results[i]) {
                learn(asked[i], results[i]->outcome);
            } else {
                ++recorded_.errors[results[i].error().detail];
            }
        }
        slot_taken_[asked.front().slot] = false;
        --in_flight_;
        answered_.notify_one();
    }

    void learn(const Asked& asked, const StoreOutcome& outcome) {
        if (const Granted* granted = std::get_if<Granted>(&outcome)) {
            const Seen seen{granted->token, std::get<Acquire>(asked.operation).nonce,
                            granted->generation};
            mine_[asked.key].push_back(seen);
            board_.add(asked.key, seen);
            return;
        }
        const auto see = [&](const RecordPtr& record) {
            if (record) board_.add(asked.key, {record->token, record->nonce, record->generation});
        };
        if (const Applied* it = std::get_if<Applied>(&outcome)) see(it->record);
        if (const Fenced* it = std::get_if<Fenced>(&outcome)) see(it->record);
        if (const Found* it = std::get_if<Found>(&outcome)) see(it->record);
        if (const UnknownOutcome* it = std::get_if<UnknownOutcome>(&outcome)) see(it->record);
        if (const Exhausted* it = std::get_if<Exhausted>(&outcome)) see(it->record);
    }

    /// Of the keys in use now; rarely one of those before, for which somebody may still come back.
    std::string key() {
        auto generation = static_cast<std::uint64_t>((std::chrono::steady_clock::now() - begin_) /
                                                     work_.keys_change);
        if (generation > 0 && rng_.percent(3)) --generation;
        return "k" + std::to_string(generation) + "." + std::to_string(rng_.below(work_.keys));
    }

    Nonce new_nonce() {
        Nonce nonce;
        for (std::uint8_t& byte : nonce.bytes) byte = static_cast<std::uint8_t>(rng_.next());
        return nonce;
    }

    /// Under which names to act: mostly my own grant, also an old one, another's, or half of one.
    Seen name_for(const std::string& key) {
        std::optional<Seen> own;
        {
            const std::lock_guard lock(mutex_);
            const std::vector<Seen>& grants = mine_[key];
            if (!grants.empty())
                own = rng_.percent(75) ? grants.back() : grants[rng_.below(grants.size())];
        }
        Seen seen = own && rng_.percent(75) ? *own : board_.pick(key, rng_);
        // Whom a decision took the record from has no name: that of nobody is none to act under.
        if (seen.nonce == Nonce{}) seen.nonce = new_nonce();
        if (rng_.percent(5)) seen.nonce = own && rng_.percent(50) ? own->nonce : new_nonce();
        if (rng_.percent(5)) seen.token.value = own && rng_.percent(50) ? own->token.value : 1;
        return seen;
    }

    milliseconds up_to(unsigned max) {
        return milliseconds(1 + static_cast<std::int64_t>(rng_.below(max)));
    }

    Usage usage() {
        Usage usage;
        usage.input_tokens = static_cast<std::int64_t>(rng_.below(1000));
        return usage;
    }

    Answer answer() {
        auto body = std::make_shared<const std::string>("answer " + std::to_string(number_) + "." +
                                                        std::to_string(++answers_));
        Answer answer;
        answer.http_status = 200;
        answer.content_type = "text/plain";
        answer.body_bytes = body->size();
        answer.body_digest = base::sha256(*body);
        answer.body = std::move(body);
        return answer;
    }

    Policy policy() {
        Policy policy;
        policy.kind = rng_.percent(65) ? IntentKind::http : IntentKind::message;
        policy.on_unknown = rng_.percent(50)   ? OnUnknown::rerun
                            : rng_.percent(50) ? OnUnknown::hold
                                               : OnUnknown::probe;
        policy.on_failed = rng_.percent(70) ? OnFailed::rerun : OnFailed::replay;
        if (rng_.percent(30)) policy.max_attempts = 2 + static_cast<std::uint32_t>(rng_.below(4));
        if (rng_.percent(30)) policy.max_crashes = 1 + static_cast<std::uint32_t>(rng_.below(2));
        policy.retention_completed = up_to(retention_max_ms);
        policy.retention_failed = up_to(retention_max_ms);
        policy.retention_dead = up_to(retention_max_ms);
        return policy;
    }

    Acquire acquire(const std::string& key) {
        Acquire op;
        op.fingerprint = fingerprint_of(rng_.percent(93) ? 0 : 1);
        op.owner = {"owner-" + std::to_string(number_),
                    "127.0.0.1:" + std::to_string(7000 + number_)};
        op.nonce = new_nonce();
        const std::lock_guard lock(mutex_);
        // As after a lost reply.
        if (rng_.percent(10) && !mine_[key].empty()) op.nonce = mine_[key].back().nonce;
        op.lease = rng_.percent(10) ? milliseconds{40} : up_to(lease_max_ms);
        op.not_after =
            store_.now() + (rng_.percent(5) ? rng_.between(-pause_max, pause_max) : patience);
        op.policy = policy();
        op.starts_call = rng_.percent(55);
        op.charge_crash = rng_.percent(30);
        return op;
    }

    Fail fail(const Seen& name) {
        constexpr Certainty certainties[] = {Certainty::not_processed, Certainty::unknown,
                                             Certainty::unknown, Certainty::refused_for_good};
        Fail op{.token = name.token, .nonce = name.nonce};
        op.certainty = certainties[rng_.below(std::size(certainties))];
        op.failure = rng_.percent(50) ? Failure{"upstream-status", "it said 503", 503}
                                      : Failure{"upstream-reset", "the connection was reset", 0};
        if (op.certainty == Certainty::refused_for_good) op.answer = answer();
        op.usage = usage();
        op.delay = up_to(lease_max_ms);
        op.scheduled_copy = rng_.percent(30);
        return op;
    }

    Resolve resolve(const Seen& name) {
        constexpr Resolve::Decision decisions[] = {
            Resolve::Decision::completed, Resolve::Decision::failed, Resolve::Decision::rerun};
        Resolve op{.token_seen = name.token};
        op.decision = decisions[rng_.below(std::size(decisions))];
        if (op.decision == Resolve::Decision::completed && rng_.percent(70)) op.answer = answer();
        op.reason = "somebody decided";
        return op;
    }

    Operation choose(const std::string& key) {
        const Seen name = name_for(key);
        const std::uint64_t dice = rng_.below(100);
        if (dice < 30 || name.token.value == 0) return acquire(key);
        if (dice < 38) return Get{};
        if (dice < 46) return Start{name.token, name.nonce};
        if (dice < 55) return Renew{name.token, name.nonce, up_to(lease_max_ms)};
        if (dice < 65) return Complete{name.token, name.nonce, answer(), usage(), std::nullopt};
        if (dice < 75) return fail(name);
        // By the nonce alone: after a lost reply nobody knows the token.
        if (dice < 80) return Release{rng_.percent(25) ? FencingToken{} : name.token, name.nonce};
        if (dice < 83) return Cancel{name.token, name.nonce, usage()};
        const Seen other = board_.pick(key, rng_);
        if (dice < 89) return Settle{other.token};
        if (dice < 95) return resolve(other);
        if (dice < 98)
            return Reopen{std::max(other.generation, 1U), fingerprint_of(rng_.percent(80) ? 0 : 1)};
        return LetterPublished{other.token};
    }

    Store& store_;
    Board& board_;
    const Work& work_;
    const unsigned number_;
    const base::SteadyTime begin_;
    sim::Rng rng_;  // of this client's thread only
    std::uint64_t sequence_ = 0;
    std::uint64_t answers_ = 0;

    std::mutex mutex_;  // guards all below
    std::condition_variable answered_;
    unsigned in_flight_ = 0;
    std::array<bool, in_flight_max> slot_taken_{};
    std::map<std::string, std::vector<Seen>> mine_;
    Recorded recorded_;
};

}  // namespace

void Board::add(const std::string& key, const Seen& seen) {
    const std::lock_guard lock(mutex_);
    std::vector<Seen>& all = seen_[key];
    // What is seen late is no news.
    if (!all.empty() && all.back().token >= seen.token) return;
    if (all.size() == kept) all.erase(all.begin());
    all.push_back(seen);
}

Seen Board::pick(const std::string& key, sim::Rng& rng) {
    const std::lock_guard lock(mutex_);
    const auto it = seen_.find(key);
    if (it == seen_.end()) return {};
    return rng.percent(60) ? it->second.back() : it->second[rng.below(it->second.size())];
}

Recorded run_client(Store& store, Board& board, const Work& work, unsigned client,
                    base::SteadyTime begin) {
    return Client(store, board, work, client, begin).run();
}

}  // namespace semel::linearizability
