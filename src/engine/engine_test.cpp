// The engine on a memory store behind a network whose faults the test chooses, in virtual time.
#include "engine/engine.hpp"

#include <gtest/gtest.h>

#include <boost/asio/thread_pool.hpp>
#include <map>
#include <thread>

#include "engine/sweeper.hpp"
#include "stores/memory/memory_store.hpp"
#include "support/faulty_store.hpp"
#include "support/virtual_time.hpp"

namespace semel::engine {
namespace {

using namespace std::chrono_literals;
using core::Status;
using core::StoredKey;
using support::Fate;
using support::FaultyStore;

StoredKey key_of(const std::string& name) { return base::sha256(name); }

core::Answer answer_of(const std::string& body) {
    core::Answer answer;
    answer.http_status = 200;
    answer.body = std::make_shared<const std::string>(body);
    answer.body_bytes = body.size();
    return answer;
}

/// A store that forgets single records: a failover that lost the last second.
class Amnesia final : public core::Store {
  public:
    explicit Amnesia(base::Clock& clock) : clock_(clock) {}
    /// The key's record and its past are gone from now on.
    void forget(const StoredKey& key) { stores_.erase(key); }

    void submit(std::vector<core::Item> items, core::BatchDone done) override {
        core::BatchResults results;
        for (core::Item& item : items) {
            auto& store = stores_[item.key];
            if (!store) store = stores::make_memory_store(clock_);
            store->submit({std::move(item)}, [&](core::BatchResults one) {
                results.push_back(std::move(one.front()));
            });
        }
        done(std::move(results));
    }
    base::Result<core::ScanPage> scan(const core::ScanFilter& filter, const std::string&,
                                      std::size_t limit) override {
        core::ScanPage all;
        for (auto& [key, store] : stores_) {
            auto page = store->scan(filter, {}, limit);
            for (auto& found : page->records) all.records.push_back(found);
        }
        return all;
    }
    base::Result<std::size_t> purge(std::size_t) override { return std::size_t{0}; }
    [[nodiscard]] core::StoreTime now() const override { return {clock_.wall_us()}; }
    [[nodiscard]] core::Durability durability() const override { return {}; }
    base::Result<void> health() override { return {}; }
    void stop() override {}

  private:
    base::Clock& clock_;
    std::map<StoredKey, std::unique_ptr<core::Store>> stores_;
};

struct EngineTest : testing::Test, support::VirtualTime {
    /// One process.
    struct Node {
        Node(EngineTest& t, const std::string& id)
            : store(
                  t.truth, [&t](auto d, auto fn) { t.later(d, std::move(fn)); },
                  [](std::uint64_t) { return std::uint64_t{0}; }),
              engine(t.loop, store, {.owner = {id, {}}, .lease = 9s}, hot, *spool, counters) {}
        FaultyStore store;
        HotRecords hot{1 << 20};
        std::unique_ptr<Spool> spool = std::move(*Spool::open(""));
        EngineCounters counters;
        Engine engine;
    };

    Amnesia truth{clock};
    std::unique_ptr<Node> a = std::make_unique<Node>(*this, "a");
    std::unique_ptr<Node> b = std::make_unique<Node>(*this, "b");

    static Engine::AcquireRequest request(const std::string& name,
                                          core::OnUnknown on_unknown = core::OnUnknown::rerun) {
        Engine::AcquireRequest r;
        r.key = key_of(name);
        r.fingerprint.raw = base::sha256("body of " + name);
        r.policy.on_unknown = on_unknown;
        r.starts_call = on_unknown == core::OnUnknown::rerun;
        return r;
    }
    std::unique_ptr<LeaseGuard> granted(Node& node, const std::string& name,
                                        core::OnUnknown on_unknown = core::OnUnknown::rerun) {
        auto acquired = wait(node.engine.acquire(request(name, on_unknown)));
        EXPECT_TRUE(acquired && acquired->lease)
            << (acquired ? "not granted" : acquired.error().detail);
        return acquired ? std::move(acquired->lease) : nullptr;
    }
    core::RecordPtr record(const std::string& name) {
        core::RecordPtr found;
        truth.submit({core::Item{key_of(name), core::Get{}}}, [&](core::BatchResults results) {
            found = std::get<core::Found>(results.front()->outcome).record;
        });
        return found;
    }
    /// The next batch with such an operation has this fate.
    template <class Operation>
    static void strike(Node& node, Fate fate, int times = 1) {
        node.store.script =
            [fate, times](const std::vector<core::Item>& items) mutable -> std::optional<Fate> {
            const bool meant = std::any_of(items.begin(), items.end(), [](const core::Item& item) {
                return std::holds_alternative<Operation>(item.operation);
            });
            if (!meant || times == 0) return std::nullopt;
            --times;
            return fate;
        };
    }
};

TEST_F(EngineTest, a_grant_is_completed_and_replayed_from_memory_and_from_the_store) {
    auto lease = granted(*a, "x");
    EXPECT_EQ(a->engine.leases(), 1u);
    const Completion completion =
        wait(a->engine.complete(*lease, answer_of("hello"), {}, std::nullopt));
    EXPECT_EQ(completion.kind, Completion::Kind::recorded);
    EXPECT_EQ(a->engine.leases(), 0u);
    ASSERT_NE(a->engine.find_hot(key_of("x")), nullptr);
    EXPECT_EQ(b->engine.find_hot(key_of("x")), nullptr);
    auto again = wait(b->engine.acquire(request("x")));
    ASSERT_TRUE(again && again->refused);
    EXPECT_EQ(*std::get<core::Replay>(*again->refused).record->answer->body, "hello");
    EXPECT_NE(b->engine.find_hot(key_of("x")), nullptr) << "a replay is kept for the next one";
    const auto got = wait(b->engine.get(key_of("x")));
    EXPECT_EQ((*got)->token, lease->token());
}

TEST_F(EngineTest, a_lease_is_renewed_until_its_guard_goes_and_then_runs_out) {
    auto lease = granted(*a, "x");
    run_for(60s);
    auto busy = wait(b->engine.acquire(request("x")));
    ASSERT_TRUE(busy && busy->refused);
    EXPECT_EQ(std::get<core::InFlight>(*busy->refused).owner.id, "a");
    EXPECT_GT(a->counters.renewals, 15u);
    EXPECT_LT(a->counters.renewals, 45u) << "not more often than every sixth";
    lease.reset();
    run_for(9s);
    auto next = granted(*b, "x");
    EXPECT_EQ(next->granted().kind, core::Granted::Kind::takeover);
    EXPECT_TRUE(next->granted().possible_second_payment);
}

TEST_F(EngineTest, renewals_of_many_leases_are_one_batch) {
    std::vector<std::unique_ptr<LeaseGuard>> leases;
    for (int i = 0; i < 50; ++i) leases.push_back(granted(*a, "x" + std::to_string(i)));
    std::size_t batches = 0;
    std::size_t renewals = 0;
    a->store.on_submit = [&](const std::vector<core::Item>& items, Fate) {
        ++batches;
        renewals += items.size();
    };
    run_for(3s);
    EXPECT_GE(renewals, 50u);
    EXPECT_LE(batches, 2u) << "one a tick, and those not yet a sixth of a lease old with the next";
}

TEST_F(EngineTest, an_owner_that_was_overtaken_is_told_and_its_answer_is_not_recorded) {
    auto zombie = granted(*a, "x");
    int told = 0;
    zombie->on_overtaken = [&] { ++told; };
    a->store.down = true;
    run_for(10s);
    EXPECT_FALSE(zombie->overtaken()) << "no answer is no proof";
    auto next = granted(*b, "x");
    a->store.down = false;
    run_for(3s);
    EXPECT_TRUE(zombie->overtaken());
    EXPECT_EQ(told, 1);
    EXPECT_EQ(a->counters.leases_lost, 1u);
    const Completion late = wait(a->engine.complete(*zombie, answer_of("late"), {}, std::nullopt));
    EXPECT_EQ(late.kind, Completion::Kind::overtaken);
    EXPECT_EQ(late.record->token, next->token());
    EXPECT_EQ(record("x")->status, Status::processing);
    EXPECT_EQ(wait(a->engine.fail(*zombie, {}))->token, next->token())
        << "its fail changes nothing either";
    EXPECT_EQ(record("x")->status, Status::processing);
}

TEST_F(EngineTest, an_owner_swept_but_not_replaced_completes_all_the_same) {
    for (const auto policy : {core::OnUnknown::rerun, core::OnUnknown::hold}) {
        const std::string name = policy == core::OnUnknown::hold ? "held" : "rerun";
        auto lease = granted(*a, name, policy);
        if (policy == core::OnUnknown::hold) {
            EXPECT_TRUE(*wait(a->engine.start(*lease)));
        }
        a->store.down = true;
        run_for(10s);
        core::Item settle{key_of(name), core::Settle{lease->token()}};
        ASSERT_TRUE(wait(b->engine.ask(std::move(settle))));
        ASSERT_EQ(record(name)->status,
                  policy == core::OnUnknown::hold ? Status::unknown : Status::failed);
        a->store.down = false;
        run_for(5s);
        EXPECT_FALSE(lease->overtaken());
        EXPECT_EQ(wait(a->engine.complete(*lease, answer_of("truth"), {}, std::nullopt)).kind,
                  Completion::Kind::recorded);
        EXPECT_EQ(*record(name)->answer->body, "truth");
    }
}

TEST_F(EngineTest, an_acquire_whose_reply_is_lost_is_an_error_and_leaves_no_lease) {
    strike<core::Acquire>(*a, Fate::lose_reply);
    const auto lost = wait(a->engine.acquire(request("x")));
    ASSERT_FALSE(lost);
    EXPECT_EQ(lost.error().code, base::ErrorCode::store_unavailable);
    run_for(2500ms);
    EXPECT_EQ(a->counters.settled_acquires, 1u);
    EXPECT_EQ(record("x")->status, Status::failed);
    auto next = granted(*b, "x");
    EXPECT_FALSE(next->granted().possible_second_payment) << "a call that never left costs nothing";
    EXPECT_EQ(record("x")->uncharged_attempts, 1u);
}

TEST_F(EngineTest, an_acquire_executed_after_the_error_is_released_or_refused_as_too_late) {
    // Chance is 0 here: "late" is drawn as at once after the error. So the first release comes
    // after it; then another case, where the acquire arrives only after its not_after.
    strike<core::Acquire>(*a, Fate::execute_late);
    ASSERT_FALSE(wait(a->engine.acquire(request("x"))));
    run_for(2500ms);
    EXPECT_EQ(record("x")->status, Status::failed);

    core::Acquire late;
    late.not_after = truth.now() - 1us;
    std::optional<core::StoreOutcome> outcome;
    truth.submit({core::Item{key_of("y"), late}},
                 [&](core::BatchResults r) { outcome = r.front()->outcome; });
    EXPECT_TRUE(std::holds_alternative<core::Late>(*outcome));
}

TEST_F(EngineTest, releases_that_meet_faults_are_repeated_until_one_is_confirmed_past_not_after) {
    a->store.script = [n = 0](const std::vector<core::Item>& items) mutable -> std::optional<Fate> {
        if (std::holds_alternative<core::Acquire>(items[0].operation)) return Fate::lose_reply;
        if (std::holds_alternative<core::Release>(items[0].operation) && ++n <= 4)
            return n % 2 == 0 ? Fate::refuse : Fate::drop;
        return std::nullopt;
    };
    ASSERT_FALSE(wait(a->engine.acquire(request("x"))));
    run_for(8s);
    EXPECT_EQ(a->counters.settled_acquires, 1u);
    EXPECT_EQ(record("x")->status, Status::failed);
}

TEST_F(EngineTest, a_grant_that_comes_too_late_is_given_back) {
    strike<core::Acquire>(*a, Fate::delay_reply);  // after 2.5 s: past the patience of 2 s
    const SteadyTime asked = clock.steady();
    ASSERT_FALSE(wait(a->engine.acquire(request("x"))));
    EXPECT_LE(clock.steady() - asked, 2100ms) << "nobody waits longer than the patience";
    run_for(3s);
    EXPECT_EQ(record("x")->status, Status::failed);
    EXPECT_EQ(a->engine.leases(), 0u);
}

TEST_F(EngineTest, a_refused_acquire_is_an_error_without_a_trace) {
    a->store.down = true;
    const auto refused = wait(a->engine.acquire(request("x")));
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().applied, base::Applied::no);
    a->store.down = false;
    run_for(5s);
    EXPECT_EQ(a->counters.settled_acquires, 0u);
    EXPECT_EQ(record("x"), nullptr);
}

TEST_F(EngineTest, an_acquire_asks_again_where_the_stores_clock_was_ahead_of_what_it_knew) {
    a->store.skew = -5s;
    const auto late = wait(a->engine.acquire(request("x")));
    ASSERT_FALSE(late);
    EXPECT_EQ(late.error().code, base::ErrorCode::too_late);
    EXPECT_EQ(late.error().applied, base::Applied::no);
    EXPECT_EQ(record("x"), nullptr);
    a->store.skew = -1s;
    EXPECT_NE(granted(*a, "x"), nullptr);
}

TEST_F(EngineTest, a_complete_whose_reply_is_lost_is_repeated_and_counts_once) {
    auto lease = granted(*a, "x");
    strike<core::Complete>(*a, Fate::lose_reply, 2);
    const Completion completion =
        wait(a->engine.complete(*lease, answer_of("once"), {}, std::nullopt));
    EXPECT_EQ(completion.kind, Completion::Kind::recorded);
    EXPECT_EQ(*completion.record->answer->body, "once");
}

TEST_F(EngineTest, an_answer_that_cannot_be_recorded_in_time_is_spooled_and_delivered_later) {
    auto lease = granted(*a, "x");
    a->store.down = true;
    const SteadyTime since = clock.steady();
    EXPECT_EQ(wait(a->engine.complete(*lease, answer_of("kept"), {}, std::nullopt)).kind,
              Completion::Kind::pending);
    EXPECT_LE(clock.steady() - since, 2100ms);
    EXPECT_EQ(a->spool->size(), 1u);
    run_for(60s);
    EXPECT_EQ(a->spool->size(), 1u);
    a->store.down = false;
    run_for(3s);
    EXPECT_EQ(a->spool->size(), 0u);
    EXPECT_EQ(a->counters.spool_delivered, 1u);
    EXPECT_EQ(*record("x")->answer->body, "kept");
}

TEST_F(EngineTest, a_spooled_answer_overtaken_meanwhile_is_dropped_and_counted) {
    auto lease = granted(*a, "x");
    a->store.down = true;
    EXPECT_EQ(wait(a->engine.complete(*lease, answer_of("old"), {}, std::nullopt)).kind,
              Completion::Kind::pending);
    run_for(10s);
    auto next = granted(*b, "x");
    wait(b->engine.complete(*next, answer_of("new"), {}, std::nullopt));
    a->store.down = false;
    run_for(3s);
    EXPECT_EQ(a->spool->size(), 0u);
    EXPECT_EQ(a->counters.spool_overtaken, 1u);
    EXPECT_EQ(*record("x")->answer->body, "new");
}

TEST_F(EngineTest, an_answer_that_the_store_refuses_keeps_its_lease_while_it_waits_in_the_spool) {
    auto lease = granted(*a, "x");
    strike<core::Complete>(*a, Fate::refuse, 1'000'000);
    EXPECT_EQ(wait(a->engine.complete(*lease, answer_of("kept"), {}, std::nullopt)).kind,
              Completion::Kind::pending);
    for (int leases = 0; leases < 5; ++leases) {
        run_for(9s);
        const auto other = wait(b->engine.acquire(request("x")));
        ASSERT_TRUE(other && other->refused);
        EXPECT_TRUE(std::holds_alternative<core::InFlight>(*other->refused)) << "not called again";
    }
    a->store.script = nullptr;
    run_for(5s);
    EXPECT_EQ(a->counters.spool_delivered, 1u);
    EXPECT_EQ(*record("x")->answer->body, "kept");
    EXPECT_EQ(record("x")->attempt, 1u);
}

TEST_F(EngineTest, an_answer_whose_client_waited_already_is_spooled_when_that_patience_ends) {
    auto lease = granted(*a, "x");
    a->store.down = true;
    const SteadyTime since = clock.steady();
    EXPECT_EQ(
        wait(a->engine.complete(*lease, answer_of("kept"), {}, std::nullopt, {}, since + 300ms))
            .kind,
        Completion::Kind::pending);
    EXPECT_LE(clock.steady() - since, 400ms);
    EXPECT_EQ(a->spool->size(), 1u);
    a->store.down = false;
    run_for(3s);
    EXPECT_EQ(*record("x")->answer->body, "kept");
}

TEST_F(EngineTest, a_spooled_answer_of_many_chunks_is_delivered_by_a_store_that_is_slow) {
    auto lease = granted(*a, "x");
    a->store.down = true;
    core::Answer answer = answer_of("");
    answer.body = nullptr;
    answer.body_kind = core::BodyKind::chunks;
    const std::vector<std::string> chunks(10, "chunk");
    answer.chunk_count = 10;
    EXPECT_EQ(wait(a->engine.complete(*lease, answer, {}, std::nullopt, chunks)).kind,
              Completion::Kind::pending);
    a->store.down = false;
    a->store.faults.latency_min = a->store.faults.latency_max = 800ms;
    int seconds = 0;
    for (; a->spool->size() != 0 && seconds < 60; ++seconds) {
        run_for(1s);
        const auto meanwhile = wait(b->engine.acquire(request("x")));
        ASSERT_TRUE(meanwhile && meanwhile->refused) << "not called again";
    }
    EXPECT_GT(seconds, 9) << "longer than the lease";
    EXPECT_EQ(a->counters.spool_delivered, 1u);
    EXPECT_EQ(record("x")->answer->chunk_count, 10u);
    EXPECT_EQ(record("x")->attempt, 1u);
}

TEST_F(EngineTest, a_process_delivers_its_own_spooled_answer_before_it_acquires_the_key) {
    auto lease = granted(*a, "x");
    a->store.down = true;
    wait(a->engine.complete(*lease, answer_of("paid"), {}, std::nullopt));
    run_for(20s);  // the lease is long dead: an acquire would be granted
    const auto refused = wait(a->engine.acquire(request("x")));
    ASSERT_FALSE(refused) << "while it cannot deliver it must not acquire";
    a->store.down = false;
    const auto replay = wait(a->engine.acquire(request("x")));
    ASSERT_TRUE(replay && replay->refused);
    EXPECT_EQ(*std::get<core::Replay>(*replay->refused).record->answer->body, "paid");
}

TEST_F(EngineTest, what_an_earlier_process_spooled_is_delivered_at_the_start) {
    auto lease = granted(*a, "x");
    auto old_lease = granted(*a, "y");
    a->store.down = true;
    wait(a->engine.complete(*lease, answer_of("from the past"), {}, std::nullopt));
    EngineCounters counters;
    FaultyStore& store = b->store;
    Engine next(loop, store, {.owner = {"next", {}}, .lease = 9s}, b->hot, *a->spool, counters);
    run_for(1s);
    EXPECT_EQ(counters.spool_delivered, 1u);
    EXPECT_EQ(*record("x")->answer->body, "from the past");
    run_for(5s);
    wait(next.stop());
}

TEST_F(EngineTest, a_claim_that_the_store_lost_is_made_anew_and_completed) {
    auto lease = granted(*a, "x");
    truth.forget(key_of("x"));
    run_for(5s);
    EXPECT_FALSE(lease->overtaken()) << "gone is not taken";
    const Completion completion =
        wait(a->engine.complete(*lease, answer_of("saved"), {}, std::nullopt));
    EXPECT_EQ(completion.kind, Completion::Kind::recorded);
    EXPECT_EQ(a->counters.claim_lost, 1u);
    EXPECT_EQ(*record("x")->answer->body, "saved");
    EXPECT_TRUE(record("x")->fingerprint.matches(request("x").fingerprint));
}

TEST_F(EngineTest, a_claim_made_anew_whose_reply_is_lost_is_asked_for_again_with_the_same_nonce) {
    auto lease = granted(*a, "x");
    truth.forget(key_of("x"));
    strike<core::Acquire>(*a, Fate::lose_reply);
    EXPECT_EQ(wait(a->engine.complete(*lease, answer_of("saved"), {}, std::nullopt)).kind,
              Completion::Kind::recorded);
    EXPECT_EQ(record("x")->attempt, 1u) << "granted once";
    run_for(3s);
    EXPECT_EQ(a->counters.settled_acquires, 1u)
        << "afterwards no copy of it can be granted any more";
    EXPECT_EQ(*record("x")->answer->body, "saved");
}

TEST_F(EngineTest, a_spooled_answer_whose_claim_was_lost_is_claimed_once_whoever_delivers_it) {
    auto lease = granted(*a, "x");
    a->store.down = true;
    wait(a->engine.complete(*lease, answer_of("saved"), {}, std::nullopt));
    truth.forget(key_of("x"));
    a->store.down = false;
    // Both the delivery in the background and an acquire's own meet lost replies.
    strike<core::Acquire>(*a, Fate::lose_reply, 3);
    auto acquired = wait(a->engine.acquire(request("x")));
    for (int i = 0; i < 5 && !acquired; ++i) {
        run_for(1s);
        acquired = wait(a->engine.acquire(request("x")));
    }
    ASSERT_TRUE(acquired && acquired->refused);
    EXPECT_EQ(*std::get<core::Replay>(*acquired->refused).record->answer->body, "saved");
    EXPECT_EQ(record("x")->attempt, 1u);
    run_for(5s);
    EXPECT_EQ(*record("x")->answer->body, "saved");
    EXPECT_EQ(a->spool->size(), 0u);
}

TEST_F(EngineTest, a_claim_that_was_lost_and_taken_by_another_is_overtaken) {
    auto lease = granted(*a, "x");
    truth.forget(key_of("x"));
    auto other = granted(*b, "x");
    // Its token may be as high as ours by chance of the clock; the nonce tells them apart.
    const Completion completion =
        wait(a->engine.complete(*lease, answer_of("late"), {}, std::nullopt));
    EXPECT_EQ(completion.kind, Completion::Kind::overtaken);
    ASSERT_NE(completion.record, nullptr);
    EXPECT_EQ(completion.record->token, other->token());
}

TEST_F(EngineTest, a_failure_is_told_to_the_store_and_a_release_costs_no_attempt) {
    auto lease = granted(*a, "x");
    core::Fail failure;
    failure.certainty = core::Certainty::not_processed;
    failure.failure = {"upstream-refused", "connection refused", 0};
    strike<core::Fail>(*a, Fate::drop);
    const auto failed = wait(a->engine.fail(*lease, failure));
    ASSERT_NE(failed, nullptr);
    EXPECT_EQ(failed->status, Status::failed);
    EXPECT_EQ(failed->uncharged_attempts, 1u);
    auto second = granted(*a, "x");
    EXPECT_EQ(second->granted().attempt, 2u);
    strike<core::Release>(*a, Fate::drop);
    wait(a->engine.release(*second));
    run_for(3s);
    EXPECT_EQ(record("x")->status, Status::failed);
    EXPECT_EQ(record("x")->uncharged_attempts, 2u);
    EXPECT_EQ(a->engine.leases(), 0u);
}

TEST_F(EngineTest, a_failure_that_nobody_can_be_told_ends_with_the_lease) {
    auto lease = granted(*a, "x");
    a->store.down = true;
    EXPECT_EQ(wait(a->engine.fail(*lease, {})), nullptr);
    EXPECT_EQ(a->engine.leases(), 0u) << "no longer renewed";
    run_for(10s);
    EXPECT_EQ(granted(*b, "x")->granted().kind, core::Granted::Kind::takeover);
}

TEST_F(EngineTest, a_call_is_not_started_on_a_lost_lease) {
    auto lease = granted(*a, "x", core::OnUnknown::hold);
    a->store.down = true;
    run_for(10s);
    auto next = granted(*b, "x", core::OnUnknown::hold);
    a->store.down = false;
    EXPECT_FALSE(*wait(a->engine.start(*lease)));
    EXPECT_FALSE(record("x")->call_started);
    EXPECT_TRUE(*wait(b->engine.start(*next)));
    EXPECT_TRUE(record("x")->call_started);
}

TEST_F(EngineTest, the_sweeper_settles_dead_leases_but_leaves_time_after_an_outage) {
    Sweeper sweeper(b->engine, {.every = 3s, .takeover_grace = 3s},
                    [](const std::function<void()>& work) { work(); });
    auto lives = granted(*a, "lives");
    auto dies = granted(*a, "dies");
    sweeper.start();
    dies.reset();
    run_for(15s);
    EXPECT_EQ(record("dies")->status, Status::failed);
    EXPECT_EQ(record("dies")->failure.code, "lease-lost");
    EXPECT_EQ(record("lives")->status, Status::processing);
    EXPECT_EQ(b->counters.swept, 1u);

    a->store.down = b->store.down = true;
    run_for(12s);
    a->store.down = b->store.down = false;
    run_for(5s);
    EXPECT_EQ(record("lives")->status, Status::processing) << "its owner renewed first";
    wait(sweeper.stop());
}

TEST_F(EngineTest, after_an_outage_a_takeover_waits_for_the_owners_renewal) {
    auto lease = granted(*a, "x");
    a->store.down = b->store.down = true;
    run_for(12s);  // nobody could renew: the lease is dead
    a->store.down = false;
    a->store.answering = b->store.answering = clock.steady();
    b->store.down = false;
    auto early = wait(b->engine.acquire(request("x")));
    ASSERT_TRUE(early && early->refused) << "taken over before the owner could renew";
    const auto& in_flight = std::get<core::InFlight>(*early->refused);
    EXPECT_EQ(in_flight.owner.id, "a");
    EXPECT_EQ(in_flight.token, lease->token());
    EXPECT_GT(in_flight.remaining, 2900ms);
    EXPECT_LE(in_flight.remaining, 3000ms) << "a third of the lease";
    run_for(2s);  // the living owner renews
    early = wait(b->engine.acquire(request("x")));
    ASSERT_TRUE(early && early->refused);
    EXPECT_GT(std::get<core::InFlight>(*early->refused).remaining, 5s);
    run_for(3s);
    EXPECT_FALSE(lease->overtaken());
    EXPECT_EQ(wait(a->engine.complete(*lease, answer_of("once"), {}, std::nullopt)).kind,
              Completion::Kind::recorded);
    EXPECT_EQ(b->counters.takeovers, 0u);
}

TEST_F(EngineTest, the_grace_after_an_outage_ends_and_hides_nothing_else) {
    auto lease = granted(*a, "x");
    a->store.down = true;  // for good: this owner is dead
    run_for(12s);
    auto done = granted(*b, "done");
    ASSERT_EQ(wait(b->engine.complete(*done, answer_of("y"), {}, std::nullopt)).kind,
              Completion::Kind::recorded);
    b->store.answering = clock.steady();
    EXPECT_GT(b->engine.grace_left(), 2s);
    EXPECT_TRUE(granted(*b, "fresh")) << "what nobody runs is granted at once";
    auto replay = wait(b->engine.acquire(request("done")));
    EXPECT_TRUE(replay && replay->refused &&
                std::holds_alternative<core::Replay>(*replay->refused));
    auto other = request("x");
    other.fingerprint.raw = base::sha256("another body");
    const auto mismatch = wait(b->engine.acquire(other));
    EXPECT_TRUE(mismatch && mismatch->refused &&
                std::holds_alternative<core::Mismatch>(*mismatch->refused));
    run_for(3s);
    EXPECT_EQ(b->engine.grace_left(), 0s);
    auto taken = wait(b->engine.acquire(request("x")));
    ASSERT_TRUE(taken && taken->lease);
    EXPECT_EQ(taken->lease->granted().kind, core::Granted::Kind::takeover);
}

TEST_F(EngineTest, the_sweeper_leaves_time_after_an_outage_that_only_the_store_noticed) {
    Sweeper sweeper(b->engine, {.every = 3s, .takeover_grace = 3s},
                    [](const std::function<void()>& work) { work(); });
    auto lease = granted(*a, "x");
    a->store.down = true;
    run_for(7s);
    sweeper.start();
    run_for(1s);
    b->store.answering = clock.steady() + 1500ms;  // by the first pass the lease is dead
    run_for(3s);
    EXPECT_EQ(record("x")->status, Status::processing);
    run_for(3s);
    EXPECT_NE(record("x")->status, Status::processing);
    EXPECT_EQ(b->counters.swept, 1u);
    wait(sweeper.stop());
}

TEST_F(EngineTest, the_sweeper_runs_a_blocking_store_on_its_own_thread) {
    auto dies = granted(*a, "x");
    dies.reset();
    run_for(10s);
    Sweeper sweeper(b->engine, {.every = 1s, .takeover_grace = 1s});
    sweeper.start();
    for (int i = 0; i < 1'000'000 && b->counters.swept == 0; ++i) run_for(10ms);
    EXPECT_EQ(b->counters.swept, 1u);
    bool stopped = false;
    loop.spawn(set_when_done(sweeper.stop(), stopped));
    for (int i = 0; i < 1'000'000 && !stopped; ++i) run_for(10ms);
    EXPECT_TRUE(stopped);
}

TEST_F(EngineTest, after_stop_it_grants_nothing_and_background_work_ends) {
    auto lease = granted(*a, "x");
    a->store.down = true;
    wait(a->engine.complete(*lease, answer_of("kept"), {}, std::nullopt));
    wait(a->engine.stop());
    EXPECT_EQ(a->spool->size(), 1u);
    const auto refused = wait(a->engine.acquire(request("y")));
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, base::ErrorCode::stopping);
    EXPECT_EQ(loop.spawned(), 0u);
}

TEST_F(EngineTest, a_store_clock_that_jumps_by_more_than_a_lease_can_hide_is_counted) {
    granted(*a, "x");
    run_for(60s);
    granted(*a, "y");
    EXPECT_EQ(a->counters.clock_jumps, 0u);
    clock.jump_wall(
        1h);  // Amnesia makes a new store per key, whose clock is the wall clock at that moment
    granted(*a, "z");
    EXPECT_EQ(a->counters.clock_jumps, 1u);
}

// -------------------------------------------------------------------- real threads

/// Answers from a thread of its own, as a store with a writer does.
class ThreadedStore final : public core::Store {
  public:
    explicit ThreadedStore(core::Store& inner) : inner_(inner) {}
    ~ThreadedStore() override { pool_.join(); }
    void submit(std::vector<core::Item> items, core::BatchDone done) override {
        runtime::asio::post(pool_,
                            [this, items = std::move(items), done = std::move(done)]() mutable {
                                inner_.submit(std::move(items), std::move(done));
                            });
    }
    base::Result<core::ScanPage> scan(const core::ScanFilter& filter, const std::string& cursor,
                                      std::size_t limit) override {
        return inner_.scan(filter, cursor, limit);
    }
    base::Result<std::size_t> purge(std::size_t limit) override { return inner_.purge(limit); }
    [[nodiscard]] core::StoreTime now() const override { return inner_.now(); }
    [[nodiscard]] core::Durability durability() const override { return inner_.durability(); }
    base::Result<void> health() override { return inner_.health(); }
    void stop() override { inner_.stop(); }

  private:
    core::Store& inner_;
    runtime::asio::thread_pool pool_{1};
};

Task<> races_for(Engine& engine, int intents, std::atomic<int>& won, std::atomic<int>& replayed) {
    for (int i = 0; i < intents; ++i) {
        const std::string name = "race " + std::to_string(i);
        for (bool done = false; !done;) {
            auto acquired = co_await engine.acquire(EngineTest::request(name));
            SEMEL_ASSERT(acquired, "a healthy store answers");
            if (acquired->lease) {
                const Completion c =
                    co_await engine.complete(*acquired->lease, answer_of(name), {}, std::nullopt);
                if (c.kind == Completion::Kind::recorded) ++won;
                done = true;
            } else if (std::holds_alternative<core::Replay>(*acquired->refused)) {
                ++replayed;
                done = true;
            }
        }
    }
}
Task<> ends(Task<> task, Engine& engine, runtime::Loop& loop) {
    co_await std::move(task);
    co_await engine.stop();
    loop.io().stop();
}

TEST(EngineThreads, two_loops_on_one_store_complete_every_intent_once) {
    constexpr int intents = 300;
    auto memory = stores::make_memory_store(base::system_clocks());
    HotRecords hot(1 << 20);
    auto spool = std::move(*Spool::open(""));
    EngineCounters counters;
    std::atomic<int> won{0};
    std::atomic<int> replayed{0};
    {
        ThreadedStore store(*memory);
        const auto run = [&](const std::string& id) {
            runtime::Loop loop(base::system_clocks());
            Engine engine(loop, store, {.owner = {id, {}}}, hot, *spool, counters);
            Sweeper sweeper(engine, {.every = 5ms, .takeover_grace = 5ms});
            sweeper.start();
            loop.spawn(ends(races_for(engine, intents, won, replayed), engine, loop));
            auto keep = runtime::asio::make_work_guard(loop.io());
            loop.io().run();
        };
        std::thread one([&] { run("one"); });
        std::thread two([&] { run("two"); });
        one.join();
        two.join();
    }
    EXPECT_EQ(won, intents);
    EXPECT_EQ(replayed, intents);
    EXPECT_EQ(counters.granted, static_cast<unsigned>(intents));
}

}  // namespace
}  // namespace semel::engine
