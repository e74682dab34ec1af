// What comes to a consumer and leaves it: partitions, pauses, the end.
#include "brokers/memory/memory_source.hpp"
#include "consumer/consumer_world.hpp"

namespace semel::consumer {
namespace {

using namespace testing_world;
using Ids = std::vector<std::string>;

struct ConsumerPartitions : ConsumerWorld {
    void revoke(const Partition& which) {
        {
            const std::lock_guard lock(mutex);
            broker.revoke("g", which);
        }
        loop.run_ready();
    }
    void expel() {
        const std::lock_guard lock(mutex);
        broker.expel(source->inner());
    }
    [[nodiscard]] bool holds(const Partition& which) const {
        return std::ranges::any_of(
            source->state(), [&](const auto& one) { return one.assignment->partition() == which; });
    }
    void begun_without_waiting() {
        consumer =
            std::make_unique<Consumer>(loop, options, *source, strategy, outlet.get(), counters);
        ASSERT_TRUE(consumer->start());
    }
};

// List 3 no. 11 of the cases: two partitions, one is revoked.
TEST_F(ConsumerPartitions, a_revoked_partition_leaves_and_the_others_work_stays) {
    for (const char* id : {"a0", "a1", "a2"}) append(p0, id, "k");
    for (const char* id : {"b0", "b1", "b2"}) append(p1, id, "k");
    strategy.script = [](Message&, bool) { return std::nullopt; };
    strategy.capacity_max = 4;
    start();
    until([&] { return strategy.running() == (Ids{"a0", "b0"}); });
    revoke(p1);
    EXPECT_TRUE(strategy.left.contains(p1));
    EXPECT_FALSE(strategy.left.contains(p0));
    round();
    EXPECT_TRUE(holds(p1)) << "it runs";
    EXPECT_FALSE(source->drained_parts.contains(p1));
    strategy.end("b0", Applied{});
    round();
    EXPECT_EQ(strategy.running(), (Ids{"a0", "b1"})) << "this strategy goes on with what it has";
    strategy.end("b1", Retry{.delay = 1s});
    round();
    EXPECT_TRUE(source->drained_parts.contains(p1));
    EXPECT_FALSE(holds(p1));
    EXPECT_EQ(committed(p1), 1) << "b0 was settled in time";
    EXPECT_EQ(strategy.marks.at(p1), 1) << "and the strategy was told before it left";
    EXPECT_EQ(counters.revoked, 1u);
    EXPECT_EQ(counters.partitions, 1u);
    for (const char* id : {"a0", "a1", "a2"}) {
        strategy.end(id, Applied{});
        round();
    }
    EXPECT_EQ(committed(p0), 3);
    EXPECT_EQ(strategy.runs["b2"], 0);
}

TEST_F(ConsumerPartitions, what_is_revoked_waits_for_its_letter_on_the_way_and_for_no_other) {
    for (const char* id : {"dead", "later", "suspect"}) append(p0, id);
    publisher->hold = true;
    strategy.script = [](Message& one, bool alone) -> std::optional<Verdict> {
        if (one.id == "dead") return Dead{.why = DeadClass::fatal, .token = {7}};
        if (one.id == "later") return Retry{.delay = 1s};
        return alone ? std::nullopt : std::optional<Verdict>(Suspect{});
    };
    start();
    until([&] { return strategy.running() == (Ids{"suspect"}); });
    strategy.end("suspect", Suspect{});
    revoke(p0);
    round();
    if (!strategy.running().empty()) strategy.end("suspect", Held{});
    round();
    EXPECT_TRUE(holds(p0));
    publisher->let_go();
    round();
    EXPECT_FALSE(holds(p0));
    EXPECT_EQ(committed(p0), 1);
    EXPECT_EQ(letters().size(), 1u);
    EXPECT_EQ(strategy.letters["dead"], 1);
    EXPECT_EQ(counters.in_hand, 0u);
}

TEST_F(ConsumerPartitions, what_is_lost_is_never_settled_and_late_answers_are_void) {
    for (const char* id : {"m0", "m1", "m2", "m3"}) append(p0, id);
    publisher->hold = true;
    strategy.script = [](Message& one, bool) -> std::optional<Verdict> {
        if (one.id == "m3") return Dead{.why = DeadClass::fatal, .token = {7}};
        return std::nullopt;
    };
    start();
    until([&] { return strategy.running().size() == 3 && publisher->held.size() == 1; });
    expel();
    round();
    EXPECT_EQ(counters.lost, 2u);
    EXPECT_TRUE(strategy.left.contains(p0));
    EXPECT_EQ(counters.partitions, 0u);
    strategy.end("m0", Applied{});
    strategy.end("m1", Retry{.delay = 1s});
    strategy.end("m2", Dead{.why = DeadClass::attempts, .token = {9}});
    publisher->let_go();
    advance(2s);
    EXPECT_EQ(source->settled, 0u);
    EXPECT_EQ(strategy.letters["m3"], 0) << "its letter is the next owner's to tell of";
    EXPECT_EQ(counters.in_hand, 0u);
    EXPECT_EQ(committed(p0), 0);
    {
        const std::lock_guard lock(mutex);
        broker.rebalance("g");
    }
    strategy.script = nullptr;
    until([&] { return committed(p0) == 4; });
    EXPECT_EQ(strategy.runs["m0"], 2);
    EXPECT_EQ(counters.assigned, 4u);
}

TEST_F(ConsumerPartitions, what_is_lost_may_be_given_back_at_once_and_with_the_last_it_is_gone) {
    for (const char* id : {"m0", "m1", "m2"}) append(p0, id);
    append(p1, "n0");
    strategy.script = [](Message&, bool) -> std::optional<Verdict> { return std::nullopt; };
    strategy.on_leaving = [&](const AssignmentPtr& which) {
        for (const std::string& id : strategy.running())
            if ((which->partition() == p0) == id.starts_with("m")) strategy.end(id, Fenced{});
    };
    start();
    until([&] { return strategy.running().size() == 4; });
    expel();
    round();
    EXPECT_EQ(counters.lost, 2u);
    EXPECT_EQ(counters.partitions, 0u);
    EXPECT_EQ(counters.in_hand, 0u);
    EXPECT_EQ(source->settled, 0u);
    {
        const std::lock_guard lock(mutex);
        broker.rebalance("g");
    }
    strategy.script = nullptr;
    until([&] { return committed(p0) == 3; });
    EXPECT_EQ(counters.assigned, 4u);
}

TEST_F(ConsumerPartitions, a_partition_begins_where_its_strategy_says) {
    for (int i = 0; i < 5; ++i) append(p0, "m" + std::to_string(i));
    strategy.on_assigned = [&](const AssignmentPtr& which) -> AssignAnswer {
        if (which->partition() == p0) return BeginAt{.offset = 3};
        return BeginAt{};
    };
    start();
    until([&] { return strategy.log.size() == 2; });
    EXPECT_EQ(strategy.log, (Ids{"m3", "m4"}));
}

TEST_F(ConsumerPartitions, a_partition_that_is_not_ours_yet_is_asked_for_until_it_is) {
    append(p0, "m");
    std::atomic<int> asked{0};
    std::atomic<bool> ours{false};
    strategy.on_assigned = [&](const AssignmentPtr& which) -> AssignAnswer {
        if (which->partition() != p0) return BeginAt{};
        ++asked;
        if (!ours) return NotYetOurs{.reason = "the former owner's transaction is open"};
        return BeginAt{};
    };
    const base::SteadyTime from = clock.steady();
    begun_without_waiting();
    until([&] {
        clock.advance(20ms);
        return asked >= 5 && alarmed("partition t-0 cannot begin yet");
    });
    EXPECT_GE(clock.steady() - from, 10s);
    EXPECT_LE(asked, 6 + (clock.steady() - from) / 2s) << "0.2 s, 0.4 s ... 2 s";
    EXPECT_EQ(strategy.runs["m"], 0);
    ours = true;
    until([&] {
        clock.advance(100ms);
        return committed(p0) == 1;
    });
    EXPECT_TRUE(consumer->state().alarms.empty());
}

TEST_F(ConsumerPartitions, a_refused_partition_stays_silent_and_the_other_runs) {
    append(p0, "m");
    append(p1, "n");
    strategy.on_assigned = [&](const AssignmentPtr& which) -> AssignAnswer {
        if (which->partition() == p0) return Refused{.reason = "the group was reset; run reset"};
        return BeginAt{};
    };
    begun_without_waiting();
    until([&] { return committed(p1) == 1 && alarmed("t-0 stays silent: the group was reset"); });
    advance(30s);
    EXPECT_EQ(strategy.runs["m"], 0);
    EXPECT_EQ(condition(), "running");
}

TEST_F(ConsumerPartitions, an_answer_to_a_claim_that_comes_after_the_revoke_begins_nothing) {
    append(p0, "m");
    std::atomic<bool> go{false}, waits{false}, went{false};
    strategy.on_assigned = [&](const AssignmentPtr& which) -> AssignAnswer {
        if (which->partition() == p0) {
            waits = true;
            while (!go) std::this_thread::yield();
            went = true;
        }
        return BeginAt{};
    };
    begun_without_waiting();
    until([&] { return waits.load(); });
    revoke(p0);
    round();
    EXPECT_FALSE(holds(p0));
    go = true;
    until([&] {
        return went &&
               std::ranges::all_of(source->state(), [](const auto& one) { return one.begun; });
    });
    advance(1s);
    EXPECT_TRUE(strategy.log.empty());
}

TEST_F(ConsumerPartitions, who_must_not_stay_in_the_group_leaves_before_its_first_message) {
    append(p0, "m");
    options.check_group = [](brokers::Source&) {
        return GroupFinding{.stays = false, .sentence = "member b works on another store"};
    };
    begun_without_waiting();
    until([&] { return source->stopped.load() && source->state().empty(); });
    EXPECT_EQ(condition(), "refused");
    EXPECT_EQ(consumer->state().reason, "member b works on another store");
    EXPECT_TRUE(alarmed("member b works on another store"));
    EXPECT_TRUE(strategy.log.empty());
}

TEST_F(ConsumerPartitions, who_stays_although_something_was_found_works_with_an_alarm) {
    append(p0, "m");
    options.check_group = [](brokers::Source&) {
        return GroupFinding{.stays = true, .sentence = "member b was sent away"};
    };
    start();
    until([&] { return committed(p0) == 1; });
    EXPECT_TRUE(alarmed("member b was sent away"));
}

TEST_F(ConsumerPartitions, the_watermark_is_told_now_and_then_and_never_ahead) {
    for (int i = 0; i < 10; ++i) append(p0, "m" + std::to_string(i));
    strategy.script = [](Message& one, bool) -> std::optional<Verdict> {
        if (one.id == "m5") return std::nullopt;
        return Applied{};
    };
    start();
    until([&] { return strategy.running().size() == 1; });
    advance(400ms);
    EXPECT_EQ(strategy.marks.at(p0), 5);
    strategy.end("m5", Applied{});
    advance(400ms);
    EXPECT_EQ(strategy.marks.at(p0), 10);
}

// ---------------------------------------------------------------- by people

TEST_F(ConsumerPartitions, a_pause_starts_nothing_and_keeps_membership) {
    strategy.script = [](Message&, bool) { return std::nullopt; };
    append(p0, "runs");
    start();
    until([&] { return strategy.running().size() == 1; });
    consumer->pause("deploying");
    round();
    EXPECT_EQ(condition(), "paused");
    EXPECT_EQ(consumer->state().reason, "deploying");
    EXPECT_EQ(counters.paused, 1u);
    append(p0, "later");
    strategy.end("runs", Applied{});
    advance(60s);
    EXPECT_EQ(committed(p0), 1) << "what ran was settled";
    EXPECT_EQ(strategy.runs["later"], 0);
    EXPECT_TRUE(holds(p0));
    strategy.script = nullptr;
    consumer->resume();
    round();
    EXPECT_EQ(committed(p0), 2);
    EXPECT_EQ(condition(), "running");
    EXPECT_EQ(counters.paused, 0u);
}

TEST_F(ConsumerPartitions, a_drain_leaves_the_group_when_nothing_runs_any_more) {
    strategy.script = [](Message&, bool) { return std::nullopt; };
    append(p0, "runs");
    start();
    until([&] { return strategy.running().size() == 1; });
    append(p0, "later");
    consumer->drain();
    consumer->resume();
    advance(1s);
    EXPECT_EQ(condition(), "draining");
    EXPECT_TRUE(holds(p0));
    EXPECT_FALSE(source->stopped);
    strategy.end("runs", Applied{});
    until([&] { return condition() == "stopped"; });
    EXPECT_TRUE(source->stopped);
    EXPECT_EQ(committed(p0), 1);
    EXPECT_EQ(strategy.runs["later"], 0);
    EXPECT_EQ(counters.in_hand, 0u);
}

TEST_F(ConsumerPartitions, stop_lets_end_what_runs_and_settles_it) {
    strategy.script = [](Message&, bool) { return std::nullopt; };
    append(p0, "m0");
    append(p0, "m1");
    start();
    until([&] { return strategy.running().size() == 2; });
    std::atomic<bool> done{false};
    std::thread blocked([&] {
        consumer->stop();
        done = true;
    });
    until([&] { return condition() == "stopped"; });
    EXPECT_FALSE(done);
    strategy.end("m1", Retry{.delay = 1s});
    strategy.end("m0", Applied{});
    until([&] { return done.load(); });
    blocked.join();
    EXPECT_EQ(committed(p0), 1);
    EXPECT_TRUE(strategy.stopped);
    EXPECT_EQ(strategy.marks.at(p0), 1);
    consumer->stop();
}

TEST_F(ConsumerPartitions, stop_ends_in_time_although_a_handler_hangs) {
    strategy.script = [](Message& one, bool) -> std::optional<Verdict> {
        if (one.id == "hangs") return std::nullopt;
        return Applied{};
    };
    strategy.hangs = true;
    options.stop_drain = 500ms;
    append(p0, "hangs");
    append(p0, "waits");
    start();
    until([&] { return strategy.running().size() == 1; });
    const base::SteadyTime before = clock.steady();
    stop();
    EXPECT_GE(clock.steady() - before, 500ms);
    EXPECT_EQ(committed(p0), 0) << "waits was settled, hangs was not";
    EXPECT_EQ(source->drained_parts.count(p0), 1u) << "the source was not kept waiting";
    strategy.end("hangs", Applied{});
    loop.run_ready();
}

TEST_F(ConsumerPartitions, stop_does_not_wait_for_an_outlet_that_is_away) {
    broker.fail_publishing(base::Error{.code = base::ErrorCode::io, .detail = "no such topic"});
    strategy.script = [](Message&, bool) { return Dead{.why = DeadClass::fatal, .token = {7}}; };
    append(p0, "m");
    start();
    until([&] { return counters.letters_failed == 1; });
    const base::SteadyTime before = clock.steady();
    stop();
    EXPECT_EQ(clock.steady(), before);
    EXPECT_EQ(committed(p0), 0);
}

TEST_F(ConsumerPartitions, problems_become_alarms_and_a_fatal_one_ends_it) {
    start();
    using brokers::ProblemKind;
    consumer->problem({.kind = ProblemKind::unreachable, .partition = {}, .text = "no broker"});
    consumer->problem(
        {.kind = ProblemKind::no_offset, .partition = p0, .text = "nothing committed"});
    consumer->problem({.kind = ProblemKind::notice, .partition = {}, .text = "a word"});
    round();
    EXPECT_EQ(consumer->state().alarms, (Ids{"no broker", "nothing committed"}));
    consumer->problem({.kind = ProblemKind::reachable, .partition = {}, .text = "back"});
    for (int i = 0; i < 30; ++i)
        consumer->problem({.kind = ProblemKind::out_of_range,
                           .partition = Partition{"t", i},
                           .text = "gone " + std::to_string(i)});
    round();
    EXPECT_EQ(consumer->state().alarms.size(), 20u);
    EXPECT_EQ(consumer->state().alarms.back(), "gone 29");
    consumer->problem({.kind = ProblemKind::fatal, .partition = {}, .text = "fenced instance id"});
    append(p0, "m");
    round();
    EXPECT_EQ(condition(), "stopped");
    EXPECT_EQ(consumer->state().reason, "fenced instance id");
    EXPECT_TRUE(strategy.log.empty());
}

TEST_F(ConsumerPartitions, a_source_that_cannot_start_leaves_nothing_to_stop) {
    consumer = std::make_unique<Consumer>(loop, options, *source, strategy, outlet.get(), counters);
    ConsumerCounters others;
    Consumer second(loop, options, *source, strategy, outlet.get(), others);
    ASSERT_TRUE(consumer->start());
    EXPECT_FALSE(second.start()) << "this source has a listener";
    round();
    EXPECT_EQ(second.state().condition, "stopped");
    second.stop();
}

// ---------------------------------------------------------------- threads

// The loop on its own thread, the broker on another, people on a third: ThreadSanitizer's test.
TEST(ConsumerThreads, messages_flow_while_partitions_move_and_people_look_and_pause) {
    constexpr int messages = 4000;
    base::Clock& clock = base::system_clocks();
    runtime::Loop loop(clock);
    std::recursive_mutex mutex;
    MemoryBroker broker;
    broker.create_topic("t", 2);
    broker.create_topic("dead", 1);
    for (int i = 0; i < messages; ++i)
        broker.append({"t", i % 2}, {.key = std::to_string(i % 20),
                                     .value = R"({"id":")" + std::to_string(i) + R"("})"});
    LockedSource source(broker.join("g", {"t"}), mutex);
    source.window(500);
    LockedPublisher publisher(broker.publisher(), mutex);
    deadletter::Outlet outlet(publisher, {.topic = "dead", .exchange = {}}, {});
    ScriptedStrategy strategy;
    strategy.script = [](Message& one, bool alone) -> std::optional<Verdict> {
        if (one.runs == 1 && one.id.ends_with("7")) return Retry{.delay = 1ms};
        if (!alone && one.id.ends_with("99")) return Suspect{};
        if (one.id.ends_with("55")) return Dead{.why = DeadClass::fatal, .token = {3}};
        return Applied{};
    };
    ConsumerOptions options;
    options.name = "orders";
    options.group = "g";
    options.identity.scope = "g/orders";
    options.identity.id.from = config::ValueSpec{.from = config::ValueFrom::json, .name = "/id"};
    ConsumerCounters counters;
    Consumer consumer(loop, options, source, strategy, &outlet, counters);

    auto work = runtime::asio::make_work_guard(loop.io());
    std::thread loop_thread([&] { loop.io().run(); });
    std::atomic<bool> stopping{false};
    std::thread pump([&] {
        int turn = 0;
        while (!stopping) {
            {
                const std::lock_guard lock(mutex);
                broker.pump(clock.steady());
                if (++turn % 400 == 0) broker.revoke("g", {"t", turn % 800 == 0 ? 0 : 1});
                if (turn % 400 == 50) broker.rebalance("g", false);
            }
            std::this_thread::yield();
        }
    });
    ASSERT_TRUE(consumer.start());
    const auto give_up = std::chrono::steady_clock::now() + 90s;
    int looks = 0;
    const auto done = [&] {
        const std::lock_guard lock(mutex);
        return broker.committed("g", {"t", 0}) == messages / 2 &&
               broker.committed("g", {"t", 1}) == messages / 2;
    };
    while (!done() && std::chrono::steady_clock::now() < give_up) {
        static_cast<void>(consumer.state());
        if (++looks % 1000 == 10) consumer.pause("a look");
        if (looks % 1000 == 20) consumer.resume();
        std::this_thread::yield();
    }
    EXPECT_TRUE(done());
    consumer.stop();
    stopping = true;
    pump.join();
    work.reset();
    loop_thread.join();
    std::map<std::string, std::set<std::string>> ran;
    for (int i = 0; i < messages; ++i) EXPECT_GE(strategy.runs[std::to_string(i)], 1) << i;
    const std::lock_guard lock(mutex);
    EXPECT_GE(broker.log({"dead", 0}).size(), 40u) << "each that ends with 55";
}

}  // namespace
}  // namespace semel::consumer
