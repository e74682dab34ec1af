#include "consumer/lanes.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>

#include "consumer/breaker.hpp"

namespace semel::consumer {
namespace {

using base::SteadyTime;
using std::chrono::milliseconds;

constexpr SteadyTime kStart{std::chrono::hours{1}};

brokers::AssignmentPtr assignment(std::int32_t number) {
    return std::make_shared<brokers::Assignment>(brokers::Partition{"t", number}, 1);
}

std::unique_ptr<Message> message(const brokers::AssignmentPtr& of, std::uint64_t lane,
                                 std::string id) {
    auto out = std::make_unique<Message>();
    out->delivery.receipt.assignment = of;
    out->lane = lane;
    out->id = std::move(id);
    return out;
}

std::vector<std::string> ids(const std::vector<Message*>& messages) {
    std::vector<std::string> out;
    for (const Message* one : messages) out.push_back(one->id);
    return out;
}

using Ids = std::vector<std::string>;

struct LanesTest : testing::Test {
    brokers::AssignmentPtr p = assignment(0), q = assignment(1);
    std::map<std::string, std::unique_ptr<Message>> all;
    Lanes lanes;
    Message& add(const std::string& id, std::uint64_t lane, bool to_q = false) {
        auto& one = all[id] = message(to_q ? q : p, lane, id);
        lanes.add(*one);
        return *one;
    }
    Message& at(const std::string& id) { return *all.at(id); }
};

TEST_F(LanesTest, room_is_shared_between_lanes_and_a_lane_out_gives_nothing_more) {
    for (const char* id : {"a1", "a2", "a3", "a4"}) add(id, 7);
    add("n1", 0);
    add("b1", 8);
    EXPECT_EQ(ids(lanes.take(2, kStart)), (Ids{"a1", "n1"}));
    EXPECT_EQ(ids(lanes.take(9, kStart)), (Ids{"b1"})) << "lane 7 is out";
    lanes.finished(at("a1"));
    EXPECT_EQ(ids(lanes.take(2, kStart)), (Ids{"a2", "a3"})) << "alone it has all the room";
    lanes.finished(at("a3"));
    EXPECT_TRUE(lanes.take(9, kStart).empty()) << "a2 has not been told back";
    lanes.finished(at("a2"));
    EXPECT_EQ(ids(lanes.take(9, kStart)), (Ids{"a4"}));
    EXPECT_EQ(lanes.running(), 3u);
    EXPECT_EQ(lanes.size(), 3u);
}

TEST_F(LanesTest, a_failed_message_holds_its_lane_and_no_other) {
    for (const char* id : {"a1", "a2", "a3"}) add(id, 7);
    add("b1", 8);
    EXPECT_EQ(lanes.take(9, kStart).size(), 4u);
    lanes.again(at("a1"), kStart + milliseconds{100});
    lanes.again(at("a2"), SteadyTime::min());
    lanes.again(at("a3"), SteadyTime::min());
    lanes.finished(at("b1"));
    EXPECT_EQ(lanes.waiting(), 1u);
    EXPECT_EQ(lanes.parked(), 2u);
    EXPECT_EQ(lanes.parked(*p), 2u);
    EXPECT_EQ(lanes.parked(*q), 0u);
    add("b2", 8);
    EXPECT_EQ(ids(lanes.take(9, kStart + milliseconds{99})), (Ids{"b2"}));
    EXPECT_EQ(lanes.next_due(), kStart + milliseconds{100});
    EXPECT_EQ(ids(lanes.take(9, kStart + milliseconds{100})), (Ids{"a1", "a2", "a3"}));
    EXPECT_EQ(lanes.parked(), 0u);
    EXPECT_EQ(lanes.next_due(), SteadyTime::max());
}

TEST_F(LanesTest, what_is_set_aside_holds_its_lane_until_it_is_finished) {
    add("a1", 7);
    add("a2", 7);
    EXPECT_EQ(ids(lanes.take(1, kStart)), (Ids{"a1"}));
    lanes.set_aside(at("a1"));
    EXPECT_EQ(lanes.running(), 0u);
    EXPECT_EQ(lanes.parked(), 1u);
    EXPECT_TRUE(lanes.take(9, kStart).empty());
    EXPECT_TRUE(lanes.drop(*p).size() == 1u) << "a2; a1 is taken";
    lanes.finished(at("a1"));
    EXPECT_EQ(lanes.size(), 0u);
    EXPECT_EQ(lanes.parked(), 0u);
}

TEST_F(LanesTest, an_older_message_that_comes_back_goes_before_newer_ones) {
    for (const char* id : {"n1", "n2", "n3", "n4"}) add(id, 0);
    EXPECT_EQ(ids(lanes.take(2, kStart)), (Ids{"n1", "n2"}));
    lanes.again(at("n2"), SteadyTime::min());
    lanes.again(at("n1"), SteadyTime::min());
    EXPECT_EQ(ids(lanes.take(3, kStart)), (Ids{"n1", "n2", "n3"}));
}

// Random adds, takes, ends and drops against what the rules say of each lane.
TEST(LanesProperty, no_lane_is_ever_out_of_order_and_no_message_is_lost) {
    for (std::uint64_t seed = 1; seed <= 400; ++seed) {
        SCOPED_TRACE("seed " + std::to_string(seed));
        std::mt19937_64 random(seed);
        const auto below = [&](std::uint64_t n) { return random() % n; };
        const std::vector<brokers::AssignmentPtr> partitions = {assignment(0), assignment(1),
                                                                assignment(2)};
        Lanes lanes;
        std::vector<std::unique_ptr<Message>> all;
        std::map<std::uint64_t, std::deque<Message*>> order;  // of each lane, those in hand
        std::set<Message*> out, aside;
        std::size_t left = 300, ended = 0, dropped = 0;
        SteadyTime now = kStart;
        const auto end = [&](Message& one) {
            if (one.lane != 0) std::erase(order[one.lane], &one);
            out.erase(&one);
            aside.erase(&one);
        };
        const auto check = [&] {
            std::size_t parked = 0;
            for (const auto& [lane, messages] : order) {
                std::size_t stays = 0, running = 0;
                for (const Message* one : messages) {
                    const auto state = one->in_hand.state;
                    stays += state == InHand::State::waiting || state == InHand::State::aside;
                    running += state == InHand::State::running;
                }
                if (stays > 0) parked += messages.size() - stays - running;
            }
            ASSERT_EQ(lanes.parked(), parked);
            ASSERT_EQ(lanes.parked(*partitions[0]) + lanes.parked(*partitions[1]) +
                          lanes.parked(*partitions[2]),
                      parked);
            ASSERT_EQ(lanes.running(), out.size());
        };
        for (int step = 0; step < 20'000 && (left > 0 || lanes.size() > 0); ++step) {
            switch (below(8)) {
                case 0:
                case 1:
                    if (left > 0) {
                        --left;
                        const std::uint64_t part = below(3);
                        const std::uint64_t key = below(4);
                        all.push_back(message(partitions[part], key == 0 ? 0 : part * 10 + key,
                                              std::to_string(left)));
                        if (all.back()->lane != 0)
                            order[all.back()->lane].push_back(all.back().get());
                        lanes.add(*all.back());
                    }
                    break;
                case 2:
                case 3: {
                    const std::size_t max = below(6);
                    const std::vector<Message*> taken = lanes.take(max, now);
                    ASSERT_LE(taken.size(), max);
                    std::map<std::uint64_t, std::size_t> from;
                    std::uint64_t last = 0;
                    for (Message* one : taken) {
                        ASSERT_FALSE(out.contains(one) || aside.contains(one)) << "given twice";
                        if (one->lane == 0) continue;
                        if (one->lane != last)
                            ASSERT_FALSE(from.contains(one->lane)) << "not together";
                        last = one->lane;
                        ASSERT_EQ(order[one->lane].at(from[one->lane]++), one) << "out of order";
                    }
                    for (const auto& [lane, count] : from) {
                        for (const Message* one : order[lane])
                            ASSERT_FALSE(out.contains(const_cast<Message*>(one)) ||
                                         aside.contains(const_cast<Message*>(one)))
                                << "its lane was out";
                    }
                    out.insert(taken.begin(), taken.end());
                    break;
                }
                case 4:
                case 5:
                    if (!out.empty()) {
                        Message& one =
                            **std::next(out.begin(), static_cast<long>(below(out.size())));
                        switch (below(4)) {
                            case 0:
                                lanes.again(one, now + milliseconds{below(50)});
                                out.erase(&one);
                                break;
                            case 1:
                                lanes.set_aside(one);
                                out.erase(&one);
                                aside.insert(&one);
                                break;
                            default:
                                lanes.finished(one);
                                end(one);
                                ++ended;
                        }
                    } else if (!aside.empty()) {
                        Message& one = **aside.begin();
                        switch (below(3)) {
                            case 0:
                                lanes.again(one, SteadyTime::min());
                                aside.erase(&one);
                                break;
                            case 1:
                                lanes.recall(one);
                                aside.erase(&one);
                                out.insert(&one);
                                break;
                            default:
                                lanes.finished(one);
                                end(one);
                                ++ended;
                        }
                    }
                    break;
                case 6:
                    now += milliseconds{below(30)};
                    break;
                default:
                    if (below(100) == 0) {
                        const brokers::AssignmentPtr& gone = partitions[below(3)];
                        for (Message* one : lanes.drop(*gone)) {
                            ASSERT_EQ(one->delivery.receipt.assignment, gone);
                            ASSERT_FALSE(out.contains(one) || aside.contains(one));
                            end(*one);
                            ++dropped;
                        }
                    }
            }
            check();
            if (HasFatalFailure()) return;
        }
        EXPECT_EQ(lanes.size(), 0u);
        EXPECT_EQ(ended + dropped, 300u);
    }
}

// Two members hold copies of the same two messages in lanes of opposite order. A member claims all
// that it takes in one step; before a lane waits for a foreign owner, what it claimed and did not
// start is given back (verdict.hpp: Busy, and Held behind it).
struct Member {
    brokers::AssignmentPtr partition = assignment(0);
    std::vector<std::unique_ptr<Message>> messages;
    Lanes lanes;
    std::vector<Message*> batch;  ///< Claimed up to `claimed`, run up to `next`.
    std::size_t next = 0;
    bool claimed = false, running = false;

    explicit Member(const Ids& which) {
        for (const std::string& id : which) {
            messages.push_back(message(partition, 1, id));
            lanes.add(*messages.back());
        }
    }
};

TEST(LanesProperty, two_members_with_crossed_lanes_never_stall) {
    for (std::uint64_t seed = 1; seed <= 10'000; ++seed) {
        std::mt19937_64 random(seed);
        Member members[2] = {Member({"Y", "X"}), Member({"X", "Y"})};
        std::map<std::string, int> owner = {{"X", -1}, {"Y", -1}};  // 2: done
        int effects = 0, steps = 0;
        SteadyTime now = kStart;
        while (members[0].lanes.size() + members[1].lanes.size() > 0 && ++steps < 1000) {
            const int who = static_cast<int>(random() % 2);
            Member& me = members[who];
            if (me.batch.empty()) {
                me.batch = me.lanes.take(1 + random() % 3, now);
                me.next = 0;
                me.claimed = me.running = false;
                if (me.batch.empty()) now += milliseconds{5};
            } else if (!me.claimed) {
                for (const Message* one : me.batch) {
                    if (owner[one->id] == -1) owner[one->id] = who;
                }
                me.claimed = true;
            } else if (Message& one = *me.batch[me.next]; me.running) {
                ++effects;
                owner[one.id] = 2;
                me.running = false;
                me.lanes.finished(one);
                if (++me.next == me.batch.size()) me.batch.clear();
            } else if (owner[one.id] == 2) {
                me.lanes.finished(one);
                if (++me.next == me.batch.size()) me.batch.clear();
            } else if (owner[one.id] == who) {
                me.running = true;
            } else {
                me.lanes.again(one, now + milliseconds{10});
                for (std::size_t i = me.next + 1; i < me.batch.size(); ++i) {
                    if (owner[me.batch[i]->id] == who) owner[me.batch[i]->id] = -1;
                    me.lanes.again(*me.batch[i], SteadyTime::min());
                }
                me.batch.clear();
            }
        }
        ASSERT_LT(steps, 1000) << "a stall, seed " << seed;
        ASSERT_EQ(effects, 2) << "seed " << seed;
    }
}

// ---------------------------------------------------------------- the breaker

struct BreakerTest : testing::Test {
    Breaker breaker{{}};
    SteadyTime now = kStart;
    bool dead() { return breaker.decided(true, now); }
};

TEST_F(BreakerTest, most_of_the_first_hundred_open_it_and_a_few_do_not) {
    for (int i = 0; i < 50; ++i) ASSERT_FALSE(dead()) << i;
    EXPECT_TRUE(dead()) << "more than half of a hundred";
    EXPECT_TRUE(breaker.open());
    EXPECT_NE(breaker.reason().find("50%"), std::string::npos);
    EXPECT_TRUE(dead()) << "what still ran gets no letter either";
    EXPECT_EQ(breaker.allowed(now, 0), 0u);
}

TEST_F(BreakerTest, half_of_the_messages_dead_over_a_long_time_do_not_open_it) {
    for (int i = 0; i < 1000; ++i) ASSERT_FALSE(breaker.decided(i % 2 == 0, now)) << i;
}

TEST_F(BreakerTest, over_dead_letters_only_an_applied_message_closes_it) {
    while (!breaker.open()) dead();
    EXPECT_EQ(breaker.next_probe(), now + milliseconds{1000});
    now = breaker.next_probe();
    EXPECT_EQ(breaker.allowed(now, 1), 0u) << "one runs";
    EXPECT_EQ(breaker.allowed(now, 0), 1u);
    EXPECT_FALSE(breaker.probed(Breaker::Probe::duplicate, now));
    EXPECT_EQ(breaker.allowed(now, 0), 1u) << "a duplicate says nothing: the next at once";
    EXPECT_TRUE(dead());
    EXPECT_EQ(breaker.next_probe(), now + milliseconds{2000});
    now = breaker.next_probe();
    EXPECT_FALSE(breaker.probed(Breaker::Probe::failed, now));
    EXPECT_EQ(breaker.next_probe(), now + milliseconds{4000});
    now = breaker.next_probe();
    EXPECT_TRUE(breaker.probed(Breaker::Probe::applied, now));
    EXPECT_FALSE(dead()) << "what was is forgotten";
}

TEST_F(BreakerTest, ill_backs_off_to_a_limit_and_any_other_end_of_a_probe_closes_it) {
    EXPECT_TRUE(breaker.ill("the handler answers 404", now));
    EXPECT_FALSE(breaker.ill("the handler answers 404", now)) << "the others that ran";
    EXPECT_EQ(breaker.next_probe(), now + milliseconds{1000});
    for (int i = 0; i < 10; ++i) {
        now = breaker.next_probe();
        EXPECT_FALSE(breaker.ill("it refuses connections", now));
    }
    EXPECT_EQ(breaker.next_probe(), now + milliseconds{30'000});
    EXPECT_EQ(breaker.reason(), "it refuses connections");
    now = breaker.next_probe();
    EXPECT_TRUE(breaker.probed(Breaker::Probe::failed, now));
    EXPECT_FALSE(breaker.open());
    EXPECT_TRUE(breaker.reason().empty());
    EXPECT_TRUE(breaker.ill("again", now));
    EXPECT_EQ(breaker.next_probe(), now + milliseconds{1000}) << "from the start";
    breaker.reset();
    EXPECT_FALSE(breaker.open());
    EXPECT_GT(breaker.allowed(now, 5), 1u);
}

TEST_F(BreakerTest,
       at_first_only_so_many_run_at_once_as_could_open_it_and_each_that_lives_makes_room) {
    EXPECT_EQ(breaker.allowed(now, 0), 51u);
    EXPECT_EQ(breaker.allowed(now, 50), 1u);
    EXPECT_EQ(breaker.allowed(now, 80), 0u);
    for (int i = 0; i < 30; ++i) dead();
    EXPECT_EQ(breaker.allowed(now, 0), 21u);
    for (int i = 0; i < 20; ++i) dead();
    EXPECT_EQ(breaker.allowed(now, 0), Breaker::running_least) << "never one after the other";
    breaker.reset();
    for (int i = 0; i < 99; ++i) breaker.decided(false, now);
    EXPECT_EQ(breaker.allowed(now, 0), 150u);
    breaker.decided(false, now);
    EXPECT_EQ(breaker.allowed(now, 5000), Breaker::npos);
}

TEST_F(BreakerTest, near_its_limit_fewer_run_until_the_dead_ones_are_past) {
    for (int i = 0; i < 100; ++i) breaker.decided(false, now);
    for (int i = 0; i < 25; ++i) dead();
    EXPECT_EQ(breaker.allowed(now, 1000), Breaker::npos) << "a quarter are dead";
    dead();
    EXPECT_EQ(breaker.allowed(now, 0), 25u);
    EXPECT_EQ(breaker.allowed(now, 1000), 0u);
    for (int i = 0; i < 75; ++i) breaker.decided(false, now);
    EXPECT_EQ(breaker.allowed(now, 1000), Breaker::npos);
}

TEST_F(BreakerTest, a_share_of_zero_never_opens_it) {
    Breaker never{{.dead_share = 0}};
    for (int i = 0; i < 500; ++i) ASSERT_FALSE(never.decided(true, now));
    EXPECT_EQ(never.allowed(now, 5000), Breaker::npos);
}

}  // namespace
}  // namespace semel::consumer
