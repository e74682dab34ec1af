// The strategy `recorded` when processes die, stores fail and two members meet: what a consumer
// around it would do is done by a small one here.
#include <random>

#include "consumer/strategies/recorded_test.hpp"

namespace semel::consumer {
namespace {

/// One process with all that is delivered to it, and what a consumer does with verdicts.
class Member {
  public:
    Member(RecordedTest& test, const std::string& id, const std::vector<Message*>& messages)
        : test_(test), node(test.node(id)) {
        given(messages);
        node->strategy->on_capacity = [this] { step(); };
    }

    void given(const std::vector<Message*>& more) {
        for (Message* message : more) {
            const std::uint64_t lane = message->lane != 0 ? message->lane : --own_lane_;
            lane_of_[message] = lane;
            lanes_[lane].queue.push_back(message);
        }
    }

    /// Gives the strategy what may run.
    void step() {
        const SteadyTimePoint now = test_.clock.steady();
        if (!suspects_.empty()) {
            if (out_ > 0) return;
            Message* one = *suspects_.begin();
            suspects_.erase(suspects_.begin());
            alone.push_back(one->id);
            give({one}, true);
            return;
        }
        std::vector<Message*> batch;
        const std::size_t capacity = node->strategy->capacity();
        for (auto& [id, lane] : lanes_) {
            if (lane.out > 0 || lane.due > now) continue;
            for (std::size_t i = 0; i < lane.queue.size() && batch.size() < capacity; ++i) {
                batch.push_back(lane.queue[i]);
                ++lane.out;
            }
        }
        if (!batch.empty()) give(std::move(batch), false);
    }
    [[nodiscard]] bool done() const {
        return std::all_of(lanes_.begin(), lanes_.end(),
                           [](const auto& lane) { return lane.second.queue.empty(); });
    }
    [[nodiscard]] std::vector<Message*> unsettled() const {
        std::vector<Message*> rest;
        for (const auto& [id, lane] : lanes_)
            rest.insert(rest.end(), lane.queue.begin(), lane.queue.end());
        return rest;
    }
    /// Steps until nothing is left or `within` is over.
    bool run_to_end(std::chrono::milliseconds within) {
        for (auto passed = 0ms; passed < within && !done(); passed += 1ms) {
            step();
            test_.run_for(1ms);
        }
        return done();
    }

    std::set<std::string> applied, duplicates;
    std::map<std::string, DeadClass> dead;
    std::vector<std::string> alone;  ///< Ids that ran alone.
    std::size_t busy = 0;            ///< Times it was told Busy.

  private:
    using SteadyTimePoint = base::SteadyTime;
    struct Lane {
        std::deque<Message*> queue;
        std::size_t out = 0;
        SteadyTimePoint due{};
    };

    void give(std::vector<Message*> batch, bool by_itself) {
        for (Message* one : batch) ++one->runs;
        out_ += batch.size();
        if (by_itself) ++lanes_[lane_of_[batch.front()]].out;
        node->strategy->run(std::move(batch), by_itself,
                            [this](Message& one, const Verdict& verdict) {
                                --out_;
                                told(one, verdict);
                            });
    }
    void told(Message& one, const Verdict& verdict) {
        Lane& lane = lanes_[lane_of_[&one]];
        --lane.out;
        const SteadyTimePoint now = test_.clock.steady();
        if (std::holds_alternative<Applied>(verdict) ||
            std::holds_alternative<Duplicate>(verdict)) {
            // What is settled is durable: whatever happens, it was not lost.
            const core::RecordPtr record = test_.record(one.id);
            ASSERT_TRUE(record && record->status == Status::completed) << one.id;
            (std::holds_alternative<Applied>(verdict) ? applied : duplicates).insert(one.id);
            std::erase(lane.queue, &one);
        } else if (const auto* is_dead = std::get_if<Dead>(&verdict)) {
            dead[one.id] = is_dead->why;
            std::erase(lane.queue, &one);
        } else if (const auto* retry = std::get_if<Retry>(&verdict)) {
            lane.due = now + retry->delay;
        } else if (const auto* waits = std::get_if<Busy>(&verdict)) {
            lane.due = now + waits->remaining;
            ++busy;
        } else if (std::holds_alternative<Ill>(verdict)) {
            lane.due = now + 500ms;
        } else if (std::holds_alternative<Suspect>(verdict)) {
            suspects_.insert(&one);
        }
    }

    RecordedTest& test_;
    std::map<Message*, std::uint64_t> lane_of_;
    std::map<std::uint64_t, Lane> lanes_;
    std::set<Message*> suspects_;
    std::size_t out_ = 0;
    std::uint64_t own_lane_ = 0;

  public:
    std::unique_ptr<RecordedTest::Node> node;  ///< Last: it dies first.
};

struct RecordedFaults : RecordedTest {
    std::mt19937_64 dice{20261130};
    std::uint64_t roll(std::uint64_t bound) { return bound == 0 ? 0 : dice() % bound; }

    /// Each handler takes so long.
    void slow(Member& member, std::chrono::microseconds takes) {
        ScriptedHandler& handler = member.node->handler;
        auto alive = std::weak_ptr<int>(alive_[&member] = std::make_shared<int>());
        handler.script = [this, &handler, alive, takes](const Message& m, const Attempt&) {
            later(takes, [&handler, alive, id = m.id] {
                if (!alive.expired()) handler.end(id);
            });
            return std::nullopt;
        };
    }
    void kill(std::unique_ptr<Member>& member) {
        alive_.erase(member.get());
        member.reset();
        run_for(lease + 1s);
    }
    std::vector<Message*> crowd(int size) {
        std::vector<Message*> all;
        for (int i = 0; i < size; ++i) all.push_back(&message("m" + std::to_string(100 + i)));
        return all;
    }

  private:
    std::map<Member*, std::shared_ptr<int>> alive_;
};

TEST_F(RecordedFaults, ten_deaths_of_a_crowd_leave_nobody_dead) {
    options.concurrency = 100;
    std::vector<Message*> left = crowd(100);
    std::set<std::string> applied;
    std::unique_ptr<Member> member;
    for (int death = 0; death < 10; ++death) {
        member = std::make_unique<Member>(*this, "a", left);
        slow(*member, 50ms);
        // The first three deaths meet all of them in their handlers, the others whom they meet.
        member->run_to_end(std::chrono::milliseconds(death < 3 ? 30 : 20 + roll(400)));
        ASSERT_TRUE(member->dead.empty());
        applied.insert(member->applied.begin(), member->applied.end());
        left = member->unsettled();
        kill(member);
    }
    member = std::make_unique<Member>(*this, "a", left);
    slow(*member, 50ms);
    ASSERT_TRUE(member->run_to_end(60s));
    EXPECT_TRUE(member->dead.empty());
    EXPECT_FALSE(member->alone.empty());  // suspects were run alone
    applied.insert(member->applied.begin(), member->applied.end());
    applied.insert(member->duplicates.begin(), member->duplicates.end());
    EXPECT_EQ(applied.size(), 100u);
    for (Message* one : left) EXPECT_EQ(record(one->id)->status, Status::completed);
}

TEST_F(RecordedFaults,
       a_message_that_kills_its_process_is_the_only_one_dead_and_only_after_the_budget) {
    options.concurrency = 100;
    options.retry.crashes = 3;
    std::vector<Message*> left = crowd(100);
    const std::string poison = left[40]->id;
    std::map<std::string, DeadClass> dead;
    std::set<std::string> applied;
    int deaths = 0, alone = 0;
    for (bool over = false; !over;) {
        auto member = std::make_unique<Member>(*this, "a", left);
        bool killed = false;
        member->node->handler.script = [&](const Message& m,
                                           const Attempt&) -> std::optional<HandlerOutcome> {
            if (m.id == poison) killed = true;
            if (killed) return std::nullopt;  // dies with the process
            return Handled{};
        };
        while (!killed && !member->done()) {
            member->step();
            if (!killed) run_for(1ms);
        }
        over = !killed;
        applied.insert(member->applied.begin(), member->applied.end());
        dead.insert(member->dead.begin(), member->dead.end());
        alone += killed && !member->alone.empty() && member->alone.back() == poison ? 1 : 0;
        left = member->unsettled();
        kill(member);
        ASSERT_LT(++deaths, 20);
    }
    EXPECT_EQ(dead, (std::map<std::string, DeadClass>{{poison, DeadClass::crashes}}));
    EXPECT_EQ(alone, 3);
    EXPECT_EQ(applied.size(), 99u);
    EXPECT_EQ(record(poison)->status, Status::dead);
    EXPECT_EQ(record(poison)->failure.code, "crashes");
}

TEST_F(RecordedFaults, a_clean_failure_between_deaths_clears_the_suspicion_of_dying_alone) {
    options.retry = {.attempts = 50, .crashes = 2, .initial = 1ms, .jitter = 0};
    Message& m = message("1");
    // Dies in a crowd twice, then once alone.
    for (int i = 0; i < 3; ++i) {
        auto a = node("a");
        a->handler.script = [](const Message&, const Attempt&) { return std::nullopt; };
        a->run({&m});
        settle();
        if (i == 2) {
            ASSERT_TRUE(a->last<Suspect>("1"));
            a->run({&m}, true);
            settle();
        }
        ASSERT_TRUE(a->handler.running("1"));
        die(a);
    }
    EXPECT_EQ(record("1")->label, "alone:1");
    // Alone again, and it ends by itself.
    auto a = node("a");
    a->handler.script = [](const Message&, const Attempt&) { return HandledFailed{"no", 0ms}; };
    a->run({&m});
    settle();
    ASSERT_TRUE(a->last<Suspect>("1"));
    a->run({&m}, true);
    settle();
    EXPECT_EQ(record("1")->label, "alone:2");
    ASSERT_TRUE(a->last<Retry>("1"));
    run_for(1s);
    a->handler.script = {};
    a->run({&m});
    settle();
    EXPECT_TRUE(a->last<Applied>("1"));
}

TEST_F(RecordedFaults, lanes_in_opposite_order_never_stall) {
    Member a(*this, "a", {}), b(*this, "b", {});
    for (Member* one : {&a, &b}) {
        one->node->network.random = [this](std::uint64_t bound) { return roll(bound); };
        ScriptedHandler& handler = one->node->handler;
        handler.script = [this, &handler](const Message& m, const Attempt&) {
            later(std::chrono::microseconds(roll(4000)),
                  [&handler, id = m.id] { handler.end(id); });
            return std::nullopt;
        };
    }
    std::size_t met = 0;
    for (int round = 0; round < 10'000; ++round) {
        const std::string x = "x" + std::to_string(round), y = "y" + std::to_string(round);
        const base::SteadyTime began = clock.steady();
        const std::uint64_t first = roll(6), second = roll(6);
        for (std::uint64_t tick = 0; tick < 6 || !a.done() || !b.done(); ++tick) {
            if (tick == first) a.given({&message(y, 1), &message(x, 1)});
            if (tick == second) b.given({&message(x, 1), &message(y, 1)});
            a.step();
            b.step();
            run_for(std::chrono::microseconds(300 + roll(400)));
            // Neither waits for the other's lease.
            ASSERT_LT(clock.steady() - began, lease / 2) << "round " << round;
        }
        met += a.busy + b.busy > 0 ? 1 : 0;
        ASSERT_EQ(a.node->handler.count(x) + b.node->handler.count(x), 1u);
        ASSERT_EQ(a.node->handler.count(y) + b.node->handler.count(y), 1u);
        for (Member* one : {&a, &b}) {
            one->node->handler.calls.clear();
            one->busy = 0;
        }
        messages.clear();
    }
    EXPECT_GT(met, 1000u);  // they did get in each other's way
}

TEST_F(RecordedFaults, a_claim_whose_answer_was_lost_is_asked_for_again_and_counts_once) {
    auto a = node("a");
    a->run({&message("warm up")});
    settle();
    strike<core::Acquire>(*a, Fate::lose_reply, 2);
    a->run({&message("1")});
    run_for(1s);
    EXPECT_TRUE(a->last<Applied>("1"));
    EXPECT_EQ(record("1")->attempt, 1u);
    EXPECT_EQ(a->handler.count("1"), 1u);
}

TEST_F(RecordedFaults, a_claim_that_stays_unanswered_is_given_up_and_given_back) {
    auto a = node("a"), b = node("b");
    a->run({&message("warm up")});
    settle();
    strike<core::Acquire>(*a, Fate::lose_reply, 1000);
    a->run({&message("1")});
    run_for(options.patience + 2s);
    EXPECT_NE(a->get<Ill>("1").reason.find("the store"), std::string::npos);
    EXPECT_TRUE(a->handler.count("1") == 0);
    run_for(3s);  // past the time at which the last of them might still have been granted
    b->run({&message("1")});
    settle();
    EXPECT_TRUE(b->last<Applied>("1"));  // it did not have to wait for a lease
    EXPECT_EQ(b->counters.takeovers, 0u);
}

TEST_F(RecordedFaults, a_run_after_a_death_is_counted_though_the_takeovers_answer_was_lost) {
    for (const bool given_back : {false, true}) {
        const std::string id = given_back ? "given back" : "asked again";
        auto a = node("a");
        a->handler.script = [](const Message&, const Attempt&) { return std::nullopt; };
        a->run({&message(id)});
        settle();
        die(a);
        auto b = node("b");
        b->run({&message("warm up " + id)});
        settle();
        strike<core::Acquire>(*b, Fate::lose_reply, given_back ? 1000 : 1);
        Message& m = message(id);
        b->run({&m});
        run_for(options.patience + 5s);
        EXPECT_EQ(b->last<Ill>(id), given_back);
        b->store.script = {};
        if (given_back) b->run({&m});
        settle();
        EXPECT_TRUE(b->last<Applied>(id));
        EXPECT_EQ(b->counters.takeovers, 0u);
        EXPECT_EQ(b->counters.unknown_outcomes, 1u) << id;
    }
}

TEST_F(RecordedFaults, a_store_that_refuses_makes_the_messages_ill_and_nothing_is_charged) {
    auto a = node("a");
    a->store.down = true;
    a->run({&message("1"), &message("2", 4), &message("3", 4)});
    settle();
    EXPECT_TRUE(a->last<Ill>("1") && a->last<Ill>("2") && a->last<Held>("3"));
    a->store.down = false;
    a->run({&message("1"), &message("2", 4), &message("3", 4)});
    settle();
    a->store.down = true;
    a->run({&message("4")});
    settle();
    EXPECT_TRUE(a->last<Applied>("1") && a->last<Applied>("3") && a->last<Ill>("4"));
    EXPECT_EQ(record("1")->attempt, 1u);
}

TEST_F(RecordedFaults, an_effect_is_recorded_however_long_the_store_is_away) {
    auto a = node("a");
    a->handler.script = [](const Message&, const Attempt&) { return std::nullopt; };
    a->run({&message("1"), &message("2")});
    settle();
    strike<core::Complete>(*a, Fate::lose_reply);
    a->handler.end("1");
    settle();
    EXPECT_TRUE(a->last<Applied>("1"));
    std::vector<std::string> told;
    a->strategy->on_trouble = [&](std::string text) { told.push_back(std::move(text)); };
    a->store.down = true;
    a->handler.end("2", HandledFailed{"no", 0ms});
    run_for(60s);
    EXPECT_FALSE(a->answered("2"));
    ASSERT_EQ(told.size(), 1u);
    EXPECT_NE(told[0].find("1 message(s)"), std::string::npos) << told[0];
    a->store.down = false;
    run_for(10s);
    EXPECT_TRUE(a->last<Retry>("2"));
    EXPECT_EQ(told, (std::vector<std::string>{told[0], ""}));
    EXPECT_EQ(record("2")->failure.code, "handler-failed");
}

TEST_F(RecordedFaults, a_handled_message_whose_claim_the_store_lost_is_claimed_anew_and_recorded) {
    auto a = node("a");
    a->handler.script = [](const Message&, const Attempt&) { return std::nullopt; };
    a->run({&message("1")});
    settle();
    // A failover to a replica that had not heard of it.
    auto replica = memory_store(clock);
    auto records = records_on_store(loop, *replica, secret, "the replica");
    struct Switched final : core::Store {
        core::Store* now_at = nullptr;
        void submit(std::vector<core::Item> items, core::BatchDone done) override {
            now_at->submit(std::move(items), std::move(done));
        }
        base::Result<core::ScanPage> scan(const core::ScanFilter& f, const std::string& c,
                                          std::size_t n) override {
            return now_at->scan(f, c, n);
        }
        base::Result<std::size_t> purge(std::size_t n) override { return now_at->purge(n); }
        [[nodiscard]] core::StoreTime now() const override { return now_at->now(); }
        [[nodiscard]] core::Durability durability() const override { return {}; }
        base::Result<void> health() override { return {}; }
        void stop() override {}
    } switched;
    switched.now_at = truth.get();
    auto own = records_on_store(loop, switched, secret, "the store");
    ScriptedHandler handler;
    handler.script = [](const Message&, const Attempt&) { return std::nullopt; };
    ConsumerCounters counters;
    auto strategy = make_recorded(loop, options, *own, handler, counters);
    std::vector<Verdict> told;
    Message& m = message("2");
    strategy->run({&m}, false, [&](Message&, Verdict v) { told.push_back(std::move(v)); });
    settle();
    switched.now_at = replica.get();
    handler.end("2");
    settle();
    ASSERT_EQ(told.size(), 1u);
    EXPECT_TRUE(std::holds_alternative<Applied>(told.front()));
    truth.swap(replica);
    EXPECT_EQ(record("2")->status, Status::completed);
    EXPECT_EQ(counters.unknown_outcomes, 0u);
    truth.swap(replica);
    a->handler.end("1");
    settle();
}

TEST_F(RecordedFaults, whatever_the_network_does_nothing_is_lost_and_doubles_are_counted) {
    options.concurrency = 8;
    options.retry = {.attempts = 1000, .crashes = 1000, .initial = 100ms, .max = 1s, .jitter = 0.2};
    for (int world = 0; world < 60; ++world) {
        truth = memory_store(clock);
        dice.seed(static_cast<std::uint64_t>(world) + 1);
        std::map<std::string, int> effects;
        std::uint64_t marked = 0;
        std::vector<std::unique_ptr<Member>> members(3);
        std::vector<std::vector<Message*>> left(3);
        for (auto& hand : left) {
            // Every member is given every message: redeliveries after rebalances.
            for (int i = 0; i < 24; ++i)
                hand.push_back(&message("w" + std::to_string(world) + "-" + std::to_string(i),
                                        i % 3 == 0 ? 0 : 1 + static_cast<std::uint64_t>(i % 5)));
        }
        const auto born = [&](std::size_t n) {
            auto& member = members[n];
            member = std::make_unique<Member>(*this, "p" + std::to_string(n), left[n]);
            Node& one = *member->node;
            one.network.random = [this](std::uint64_t bound) { return roll(bound); };
            one.store.faults = {.refuse = 300,
                                .drop = 200,
                                .lose_reply = 300,
                                .execute_late = 100,
                                .delay_reply = 200,
                                .repeat = 200};
            one.handler.script = [&](const Message& m, const Attempt&) -> HandlerOutcome {
                if (roll(3) == 0) return HandledFailed{"no", 0ms};
                if (roll(20) == 0) return HandlerIll{"down"};
                ++effects[m.id];
                return Handled{};
            };
        };
        const auto gone = [&](std::size_t n) {
            marked +=
                members[n]->node->counters.takeovers + members[n]->node->counters.unknown_outcomes;
            left[n] = members[n]->unsettled();
            members[n].reset();
        };
        for (std::size_t n = 0; n < members.size(); ++n) born(n);
        bool over = false;
        for (int steps = 0; steps < 60'000 && !over; ++steps) {
            over = true;
            for (std::size_t n = 0; n < members.size(); ++n) {
                if (steps < 5000 && roll(40) == 0) {
                    gone(n);
                    born(n);
                }
                members[n]->step();
                over = over && members[n]->done();
            }
            run_for(5ms);
        }
        ASSERT_TRUE(over) << "world " << world;
        int doubled = 0;
        for (std::size_t n = 0; n < members.size(); ++n) {
            EXPECT_TRUE(members[n]->dead.empty());
            gone(n);
        }
        ASSERT_EQ(effects.size(), 24u) << "world " << world;
        for (const auto& [id, times] : effects) doubled += times - 1;
        EXPECT_LE(static_cast<std::uint64_t>(doubled), marked) << "world " << world;
        run_for(60s);  // late requests of this world
        messages.clear();
    }
}

}  // namespace
}  // namespace semel::consumer
