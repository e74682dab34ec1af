// What runs in a consumer, and what became of it. consumer_partitions_test.cpp: what comes and
// goes.
#include "consumer/consumer_world.hpp"

namespace semel::consumer {
namespace {

using namespace testing_world;
using Ids = std::vector<std::string>;

struct ConsumerTest : ConsumerWorld {};

Dead dead_of(DeadClass why, std::uint64_t token = 5) {
    return {.why = why, .reason = "it is bad", .failed_runs = 3, .token = {token}};
}

// O-34, O-35, S7 of the invariants.
TEST_F(ConsumerTest, the_committed_position_never_passes_an_unfinished_message) {
    for (int i = 0; i < 5; ++i) append(p0, "m" + std::to_string(i));
    strategy.script = [](Message&, bool) { return std::nullopt; };
    start();
    until([&] { return strategy.running().size() == 5; });
    for (const char* id : {"m4", "m1", "m3"}) strategy.end(id, Applied{});
    round();
    EXPECT_EQ(committed(p0), 0);
    strategy.end("m0", Duplicate{});
    round();
    EXPECT_EQ(committed(p0), 2);
    strategy.end("m2", Retry{.delay = 10s, .reason = "not now"});
    round();
    EXPECT_EQ(committed(p0), 2) << "a failure is no reason to pass it";
    advance(10s);
    strategy.end("m2", Applied{});
    round();
    EXPECT_EQ(committed(p0), 5);
    EXPECT_EQ(counters.applied, 4u);
    EXPECT_EQ(counters.duplicates, 1u);
    EXPECT_EQ(counters.retries, 1u);
    EXPECT_EQ(counters.in_hand, 0u);
}

// L4 of the invariants.
TEST_F(ConsumerTest, a_failed_message_holds_its_key_and_the_others_flow) {
    for (const char* id : {"a1", "b1", "a2", "b2", "a3"}) append(p0, id, std::string(1, id[0]));
    bool fails = true;
    strategy.script = [&](Message& one, bool) -> std::optional<Verdict> {
        if (one.id == "a1" && fails) return Retry{.delay = 2s, .reason = "503"};
        return Applied{};
    };
    start();
    until([&] { return strategy.runs["b2"] == 1; });
    EXPECT_EQ(strategy.runs["a2"], 0);
    advance(1s);
    EXPECT_EQ(counters.parked, 2u);
    EXPECT_EQ(counters.waiting, 1u);
    EXPECT_EQ(committed(p0), 0);
    EXPECT_GE(counters.watermark_age_ms, 900);
    fails = false;
    advance(1s);
    EXPECT_EQ(committed(p0), 5);
    EXPECT_EQ(strategy.log.back(), "a3");
    EXPECT_EQ(strategy.runs["a1"], 2);
    EXPECT_EQ(strategy.runs["b1"], 1);
}

TEST_F(ConsumerTest, one_lane_a_partition_keeps_its_whole_order) {
    options.identity.ordering = config::Ordering::partition;
    for (int i = 0; i < 20; ++i) append(p0, std::to_string(100 + i), std::to_string(i % 3));
    int failures = 3;
    strategy.script = [&](Message& one, bool) -> std::optional<Verdict> {
        if (one.id == "105" && failures-- > 0) return Retry{.delay = 100ms};
        return Applied{};
    };
    start();
    advance(1s);
    EXPECT_EQ(committed(p0), 20);
    Ids once = strategy.log;
    once.erase(std::unique(once.begin(), once.end()), once.end());
    EXPECT_TRUE(std::ranges::is_sorted(once));
    EXPECT_EQ(strategy.runs["105"], 4);
    EXPECT_EQ(strategy.runs["106"], 1) << "those behind it were held, not run";
}

TEST_F(ConsumerTest, a_busy_message_is_asked_about_after_its_owners_time_and_charges_nobody) {
    append(p0, "m");
    strategy.script = [&](Message&, bool) -> std::optional<Verdict> {
        if (strategy.runs["m"] == 1) return Busy{.remaining = 3s};
        return Duplicate{};
    };
    start();
    advance(2900ms);
    EXPECT_EQ(strategy.runs["m"], 1);
    advance(200ms);
    EXPECT_EQ(strategy.runs["m"], 2);
    EXPECT_EQ(committed(p0), 1);
    EXPECT_EQ(counters.busy, 1u);
    EXPECT_EQ(counters.retries, 0u);
}

TEST_F(ConsumerTest, what_is_given_back_unstarted_without_end_does_not_keep_the_loop_busy) {
    append(p0, "m");
    strategy.script = [](Message&, bool) { return Held{}; };
    start();
    advance(10s);
    EXPECT_GT(strategy.runs["m"], 4);
    EXPECT_LT(strategy.runs["m"], 100);
    strategy.script = nullptr;
    advance(1s);
    EXPECT_EQ(committed(p0), 1);
}

TEST_F(ConsumerTest, a_fenced_message_is_never_settled) {
    append(p0, "m");
    strategy.script = [](Message&, bool) { return Fenced{}; };
    start();
    advance(5s);
    EXPECT_EQ(committed(p0), 0);
    EXPECT_GE(counters.fenced, 3u);
    EXPECT_LE(counters.fenced, 8u) << "asked about now and then";
    {
        const std::lock_guard lock(mutex);
        broker.expel(source->inner());
    }
    round();
    EXPECT_EQ(counters.lost, 2u);
    EXPECT_EQ(source->settled, 0u);
}

TEST_F(ConsumerTest, suspects_run_alone_after_what_runs_has_ended) {
    for (const char* id : {"s1", "long", "s2", "x"}) append(p0, id);
    strategy.script = [&](Message& one, bool alone) -> std::optional<Verdict> {
        if (one.id[0] == 's' && !alone) return Suspect{};
        if (one.id == "long" || alone) return std::nullopt;
        return Applied{};
    };
    start();
    until([&] { return strategy.runs["x"] == 1; });
    append(p0, "later");
    round();
    EXPECT_EQ(strategy.running(), (Ids{"long"}));
    EXPECT_EQ(strategy.runs["later"], 0) << "nothing starts beside";
    strategy.end("long", Applied{});
    round();
    EXPECT_EQ(strategy.running(), (Ids{"s1"}));
    strategy.end("s1", Applied{});
    round();
    EXPECT_EQ(strategy.running(), (Ids{"s2"}));
    EXPECT_EQ(strategy.runs["later"], 0);
    strategy.end("s2", Retry{.delay = 1s});
    round();
    EXPECT_EQ(strategy.runs["later"], 1);
    EXPECT_EQ(counters.suspects, 2u);
    EXPECT_EQ(strategy.alone_log, (Ids{"s1", "s2"}));
    EXPECT_EQ(committed(p0), 2) << "s2 failed cleanly";
}

TEST_F(ConsumerTest, many_suspects_do_not_keep_the_others_out) {
    for (int i = 0; i < 20; ++i) append(p0, "s" + std::to_string(i));
    append(p0, "x");
    std::size_t before_x = 0;
    strategy.script = [&](Message& one, bool alone) -> std::optional<Verdict> {
        if (one.id[0] == 's' && !alone) return Suspect{};
        if (one.id == "x" && one.runs == 1) return Held{};
        if (one.id == "x") before_x = strategy.alone_log.size();
        return Applied{};
    };
    start();
    until([&] { return committed(p0) == 21; });
    EXPECT_EQ(before_x, 8u) << "so many in a row, then the others' turn";
    EXPECT_EQ(strategy.alone_log.size(), 20u) << "which ends when no other wants it";
}

TEST_F(ConsumerTest, a_suspect_behind_another_of_its_lane_waits_for_its_turn) {
    append(p0, "a", "k");
    append(p0, "s", "k");
    strategy.script = [&](Message& one, bool alone) -> std::optional<Verdict> {
        if (one.id == "a" && strategy.runs["a"] == 1) return Retry{.delay = 1s};
        if (one.id == "s" && !alone) return Suspect{};
        return Applied{};
    };
    start();
    advance(3s);
    EXPECT_EQ(strategy.log, (Ids{"a", "a", "s", "s"}));
    EXPECT_EQ(committed(p0), 2);
}

// ---------------------------------------------------------------- dead letters

TEST_F(ConsumerTest, a_letter_is_confirmed_then_marked_then_the_message_is_settled) {
    append(p0, "m", "k");
    append(p0, "behind", "k");
    publisher->hold = true;
    strategy.script = [](Message& one, bool) -> std::optional<Verdict> {
        if (one.id == "m") return dead_of(DeadClass::attempts);
        return Applied{};
    };
    start();
    until([&] { return publisher->held.size() == 1; });
    advance(5s);
    EXPECT_EQ(committed(p0), 0);
    EXPECT_EQ(strategy.letters["m"], 0);
    EXPECT_EQ(strategy.runs["behind"], 0) << "its lane waits";
    EXPECT_EQ(counters.dead[0], 0u);
    bool fails = true;
    strategy.on_letter = [&](const Message&) -> base::Result<void> {
        if (fails) return base::Error{.code = base::ErrorCode::store_unavailable, .detail = "away"};
        return {};
    };
    publisher->let_go();
    round();
    EXPECT_EQ(letters(), (Ids{R"({"id":"m"})"}));
    EXPECT_EQ(committed(p0), 0) << "not marked";
    EXPECT_TRUE(alarmed("cannot be recorded"));
    fails = false;
    advance(1s);
    EXPECT_EQ(letters().size(), 1u) << "marking alone is repeated";
    EXPECT_EQ(strategy.letters["m"], 2);
    EXPECT_EQ(committed(p0), 2);
    EXPECT_EQ(counters.dead[static_cast<std::size_t>(DeadClass::attempts)], 1u);
    EXPECT_EQ(strategy.runs["behind"], 1);
}

// O-40.
TEST_F(ConsumerTest, an_outlet_that_fails_holds_the_lane_and_loses_nothing) {
    append(p0, "m", "k");
    append(p0, "behind", "k");
    append(p0, "other", "o");
    broker.fail_publishing(base::Error{.code = base::ErrorCode::io, .detail = "no such topic"});
    strategy.script = [](Message& one, bool) -> std::optional<Verdict> {
        if (one.id == "m") return dead_of(DeadClass::fatal);
        return Applied{};
    };
    start();
    advance(10s);
    EXPECT_EQ(strategy.runs["other"], 1);
    EXPECT_EQ(strategy.runs["behind"], 0);
    EXPECT_EQ(strategy.runs["m"], 1) << "the letter is repeated, not the message";
    EXPECT_EQ(committed(p0), 0);
    EXPECT_GE(counters.letters_failed, 9u);
    EXPECT_TRUE(alarmed("cannot be written to dead: no such topic"));
    EXPECT_EQ(consumer->state().alarms.size(), 1u);
    broker.fail_publishing(std::nullopt);
    advance(1s);
    EXPECT_EQ(letters().size(), 1u);
    EXPECT_EQ(committed(p0), 3);
    EXPECT_TRUE(consumer->state().alarms.empty());
    EXPECT_EQ(strategy.runs["behind"], 1);
}

TEST_F(ConsumerTest, a_letter_that_is_known_to_be_published_is_not_published_again) {
    append(p0, "m");
    strategy.script = [](Message&, bool) {
        Dead out = dead_of(DeadClass::attempts);
        out.letter_known = true;
        return out;
    };
    start();
    until([&] { return committed(p0) == 1; });
    EXPECT_TRUE(letters().empty());
    EXPECT_EQ(strategy.letters["m"], 0);
}

TEST_F(ConsumerTest, without_letters_a_dead_message_stops_its_lane_until_a_person_resumes) {
    options.letters_stop = true;
    outlet.reset();
    append(p0, "m", "k");
    append(p0, "behind", "k");
    append(p0, "other", "o");
    bool bad = true;
    strategy.script = [&](Message& one, bool) -> std::optional<Verdict> {
        if (one.id == "m" && bad) return dead_of(DeadClass::fatal);
        return Applied{};
    };
    start();
    advance(60s);
    EXPECT_EQ(strategy.runs["m"], 1);
    EXPECT_EQ(strategy.runs["behind"], 0);
    EXPECT_EQ(strategy.runs["other"], 1);
    EXPECT_TRUE(alarmed("position 0: given up (fatal: it is bad)"));
    consumer->resume();
    round();
    EXPECT_EQ(strategy.runs["m"], 2);
    EXPECT_TRUE(alarmed("given up")) << "it is still bad";
    bad = false;
    consumer->resume();
    round();
    EXPECT_EQ(committed(p0), 3);
    EXPECT_TRUE(consumer->state().alarms.empty());
}

TEST_F(ConsumerTest, what_cannot_be_read_gets_a_letter_and_has_no_record) {
    append(p0, "a", "k");
    append_raw(p0, "not json", "k");
    append_raw(p0, R"({"other":1})", "k");
    append(p0, "b", "k");
    start();
    until([&] { return committed(p0) == 4; });
    EXPECT_EQ(letters(), (Ids{"not json", R"({"other":1})"}));
    EXPECT_EQ(strategy.log, (Ids{"a", "b"}));
    EXPECT_TRUE(strategy.letters.empty());
    EXPECT_EQ(counters.dead[static_cast<std::size_t>(DeadClass::decode)], 1u);
    EXPECT_EQ(counters.dead[static_cast<std::size_t>(DeadClass::missing_id)], 1u);
    EXPECT_EQ(counters.received, 4u);
}

TEST_F(ConsumerTest, a_skipped_tombstone_is_settled_and_counted) {
    options.identity.id.on_tombstone = config::OnTombstone::skip;
    append_raw(p0, std::nullopt, "k");
    append(p0, "a", "k");
    start();
    until([&] { return committed(p0) == 2; });
    EXPECT_EQ(counters.skipped, 1u);
    EXPECT_EQ(strategy.log, (Ids{"a"}));
}

// ---------------------------------------------------------------- the breaker

TEST_F(ConsumerTest, an_ill_handler_stops_all_and_one_probe_at_a_time_finds_out_that_it_is_well) {
    for (int i = 0; i < 100; ++i) append(p0, std::to_string(i));
    bool ill = true;
    strategy.script = [&](Message&, bool) -> std::optional<Verdict> {
        if (ill) return Ill{.reason = "the handler answers 404"};
        return Applied{};
    };
    start();
    until([&] { return counters.breaker_opened == 1; });
    EXPECT_EQ(condition(), "ill");
    EXPECT_EQ(consumer->state().reason, "the handler answers 404");
    EXPECT_EQ(counters.paused, 2u);
    EXPECT_TRUE(alarmed("the handler answers 404"));
    const std::size_t before = strategy.log.size();
    EXPECT_EQ(before, 51u) << "those that ran when it opened";
    advance(5min);
    const std::size_t probes = strategy.log.size() - before;
    EXPECT_GE(probes, 10u);
    EXPECT_LE(probes, 15u) << "1 s, 2 s, 4 s ... 30 s";
    EXPECT_EQ(strategy.runs["0"], 1 + static_cast<int>(probes)) << "the first is the probe";
    ill = false;
    advance(30s);
    EXPECT_EQ(condition(), "running");
    EXPECT_EQ(committed(p0), 100);
    EXPECT_TRUE(letters().empty());
    EXPECT_TRUE(consumer->state().alarms.empty());
    EXPECT_EQ(counters.breaker_opened, 1u);
}

TEST_F(ConsumerTest,
       when_most_would_be_dead_letters_it_stops_and_after_the_cure_nothing_more_dies) {
    for (int i = 0; i < 300; ++i) append(p0, std::to_string(1000 + i), std::to_string(i % 50));
    bool broken = true;
    strategy.script = [&](Message&, bool) -> std::optional<Verdict> {
        if (broken) return dead_of(DeadClass::fatal);
        return Applied{};
    };
    start();
    advance(2min);
    EXPECT_EQ(condition(), "ill");
    EXPECT_EQ(letters().size(), 50u) << "half of a hundred and no more";
    EXPECT_EQ(committed(p0), 50);
    broken = false;
    advance(1min);
    EXPECT_EQ(condition(), "running");
    EXPECT_EQ(committed(p0), 300);
    EXPECT_EQ(letters().size(), 50u);
    EXPECT_EQ(counters.breaker_opened, 1u);
    std::map<std::string, Ids> of_key;
    Ids seen;
    for (const std::string& id : strategy.log) {
        if (strategy.runs[id] == 1)
            of_key[std::to_string((std::stoi(id) - 1000) % 50)].push_back(id);
    }
    for (const auto& [key, ids] : of_key) EXPECT_TRUE(std::ranges::is_sorted(ids));
}

TEST_F(ConsumerTest, of_a_thousand_that_could_run_no_more_are_given_up_than_open_the_breaker) {
    options.identity.ordering = config::Ordering::none;
    source->window(5000);
    strategy.capacity_max = 1000;
    for (int i = 0; i < 1000; ++i) append(p0, std::to_string(i));
    bool broken = true;
    Ids given_up;  // in the records, before the consumer knows
    strategy.script = [&](Message& one, bool) -> std::optional<Verdict> {
        if (!broken) return Applied{};
        given_up.push_back(one.id);
        return dead_of(DeadClass::fatal);
    };
    start();
    until([&] { return counters.breaker_opened == 1; });
    EXPECT_EQ(given_up.size(), 51u);
    EXPECT_EQ(letters().size(), 50u);
    broken = false;
    advance(1min);
    EXPECT_EQ(condition(), "running");
    EXPECT_EQ(committed(p0), 1000);
    EXPECT_EQ(letters().size(), 50u);
    for (int i = 0; i < 3000; ++i) append(p0, "more" + std::to_string(i));
    advance(1s);
    EXPECT_EQ(committed(p0), 4000);
    EXPECT_EQ(strategy.largest_batch, 1000u) << "where all goes well nothing is held back";
}

TEST_F(ConsumerTest, a_single_bad_lane_is_not_the_only_probe) {
    for (int i = 0; i < 60; ++i) append(p0, "bad" + std::to_string(i));
    append(p0, "good");
    strategy.capacity_max = 1;
    strategy.script = [&](Message& one, bool) -> std::optional<Verdict> {
        if (one.id != "good") return dead_of(DeadClass::fatal);
        return Applied{};
    };
    start();
    advance(10min);
    EXPECT_EQ(committed(p0), 61) << "the good one was a probe and closed it";
    EXPECT_EQ(letters().size(), 60u);
}

TEST_F(ConsumerTest,
       most_of_the_first_hundred_unreadable_opens_the_breaker_until_a_person_says_so) {
    for (int i = 0; i < 80; ++i) append_raw(p0, "avro", "k" + std::to_string(i));
    start();
    advance(2min);
    EXPECT_EQ(condition(), "ill");
    EXPECT_EQ(letters().size(), 50u);
    EXPECT_TRUE(strategy.log.empty());
    consumer->resume();
    advance(2min);
    EXPECT_EQ(letters().size(), 80u) << "thirty more are no new reason";
    EXPECT_EQ(committed(p0), 80);
}

// ---------------------------------------------------------------- limits

TEST_F(ConsumerTest, too_many_behind_failed_ones_pause_their_partition_and_no_other) {
    options.park_limit = 10;
    source->window(1000);
    bool fails = true;
    strategy.script = [&](Message& one, bool) -> std::optional<Verdict> {
        if (one.id == "bad" && fails) return Retry{.delay = 1s};
        return Applied{};
    };
    append(p0, "bad", "k");
    start();
    until([&] { return strategy.runs["bad"] == 1; });
    for (int i = 0; i < 30; ++i) append(p0, "a" + std::to_string(i), "k");
    advance(300ms);
    EXPECT_EQ(counters.paused_partitions, 1u);
    EXPECT_TRUE(alarmed("partition t-0 is paused"));
    const std::uint64_t in_hand = counters.in_hand;
    for (int i = 0; i < 100; ++i) append(p0, "b" + std::to_string(i), "k");
    for (int i = 0; i < 30; ++i) append(p1, "c" + std::to_string(i), "k");
    advance(1s);
    EXPECT_EQ(counters.in_hand, in_hand) << "nothing more comes";
    EXPECT_EQ(committed(p1), 30) << "the other partition goes on";
    fails = false;
    advance(2s);
    EXPECT_EQ(counters.paused_partitions, 0u);
    EXPECT_EQ(committed(p0), 131);
    EXPECT_TRUE(consumer->state().alarms.empty());
}

TEST_F(ConsumerTest, memory_is_bounded_by_the_window_behind_a_stuck_message) {
    constexpr std::size_t window = 2000;
    constexpr int behind = 200'000;
    source->window(window);
    options.identity.ordering = config::Ordering::none;
    append(p0, "stuck");
    for (int i = 0; i < behind; ++i) append(p0, "m" + std::to_string(i));
    std::size_t most = 0;
    strategy.capacity_max = 500;
    strategy.script = [&](Message& one, bool) -> std::optional<Verdict> {
        most = std::max<std::size_t>(most, counters.in_hand);
        if (one.id == "stuck") return std::nullopt;
        return Applied{};
    };
    start();
    until([&] { return counters.applied == behind; });
    EXPECT_LE(most, window);
    EXPECT_EQ(counters.in_hand, 1u);
    EXPECT_EQ(committed(p0), 0);
    EXPECT_LT(source->settles, behind / 50u) << "receipts are given back in batches";
    EXPECT_LT(strategy.batches, behind / 50u) << "messages are given in batches";
    strategy.end("stuck", Applied{});
    round();
    EXPECT_EQ(committed(p0), behind + 1);
}

TEST_F(ConsumerTest, never_more_runs_than_the_strategy_takes) {
    strategy.capacity_max = 3;
    for (int i = 0; i < 10; ++i) append(p0, std::to_string(i));
    strategy.script = [](Message&, bool) { return std::nullopt; };
    start();
    until([&] { return strategy.running().size() == 3; });
    round();
    for (int i = 0; i < 10; ++i) {
        strategy.end(std::to_string(i), Applied{});
        round();
    }
    EXPECT_EQ(strategy.most_at_once, 3u);
    EXPECT_EQ(committed(p0), 10);
}

}  // namespace
}  // namespace semel::consumer
