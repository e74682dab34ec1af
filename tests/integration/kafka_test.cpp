// The Kafka leaf against a real broker: what a commit covers, what a rebalance leaves behind, and
// what the log's holes, ends and losses do to it.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "integration/kafka_harness.hpp"

namespace semel::brokers::kafka {
namespace {

// ---------------------------------------------------------------- messages

TEST(Kafka, nulls_empties_repeated_headers_and_keys_arrive_as_they_were_published) {
    const std::string topic = server().new_topic(8);
    ASSERT_TRUE(pen().write({.topic = topic,
                             .partition = 3,
                             .key = "k",
                             .value = std::string("a\0b", 3),
                             .headers = {{"x", "1"}, {"x", "2"}, {"n", std::nullopt}, {"e", ""}},
                             .timestamp_ms = 1'700'000'000'123}));
    ASSERT_TRUE(pen().write({.topic = topic, .partition = 3, .key = "k", .value = std::nullopt}));
    ASSERT_TRUE(pen().write({.topic = topic, .partition = 3, .key = "", .value = ""}));
    ASSERT_TRUE(pen().write({.topic = topic, .partition = 3, .value = "no key"}));
    // The partitions that Java's clients give these keys: (murmur2 & 0x7fffffff) % 8.
    const auto first = pen().write({.topic = topic, .key = "21", .value = "p"});
    const auto second = pen().write({.topic = topic, .key = "foobar", .value = "p"});
    ASSERT_TRUE(first && second);
    EXPECT_EQ(first->partition, 4);
    EXPECT_EQ(second->partition, 6);

    auto source = source_of(config_for(topic, new_group()));
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_count(6)) << listener.all_problems();
    std::vector<Got> got;
    for (const Got& one : listener.got()) {
        if (one.partition() == 3) got.push_back(one);
    }
    ASSERT_EQ(got.size(), 4u);
    EXPECT_EQ(got[0].value, std::string("a\0b", 3));
    EXPECT_EQ(got[0].key, "k");
    using HeaderList = decltype(got[0].headers);
    EXPECT_EQ(got[0].headers, (HeaderList{{"x", "1"}, {"x", "2"}, {"n", std::nullopt}, {"e", ""}}));
    EXPECT_EQ(got[0].timestamp_ms, 1'700'000'000'123);
    EXPECT_EQ(got[1].value, std::nullopt) << "a tombstone";
    EXPECT_EQ(got[2].value, "") << "empty is not null";
    EXPECT_EQ(got[2].key, "");
    EXPECT_EQ(got[3].key, std::nullopt);
}

TEST(Kafka, what_a_broker_refuses_is_known_not_to_be_there) {
    const std::string topic = server().new_topic(1, {{"max.message.bytes", "1000"}});
    const auto said = pen().write({.topic = topic, .value = std::string(20'000, 'x')});
    ASSERT_FALSE(said);
    EXPECT_EQ(said.error().applied, base::Applied::no);
    EXPECT_EQ(said.error().code, base::ErrorCode::invalid_argument);
    EXPECT_NE(said.error().detail.find(topic), std::string::npos);
}

// ---------------------------------------------------------------- commits

TEST(Kafka, a_commit_covers_what_is_finished_below_the_lowest_unfinished_and_comes_in_any_order) {
    const std::string topic = server().new_topic(), group = new_group();
    pen().write(topic, numbered("m", 10));
    auto source = source_of(config_for(topic, group));
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_count(10));
    const std::vector<Got> got = listener.got();
    for (const std::size_t i : {9u, 0u, 1u, 7u, 3u}) source->settle(got[i].receipt);
    ASSERT_TRUE(source->commit(kWithin));
    EXPECT_EQ(server().committed(group, topic), 2) << "2 is unfinished";
    EXPECT_EQ(source->settle(got[3].receipt), 0u) << "settled before";
    source->settle(got[2].receipt);
    ASSERT_TRUE(source->commit(kWithin));
    EXPECT_EQ(server().committed(group, topic), 4);
    for (const Got& one : got) source->settle(one.receipt);
    EXPECT_TRUE(committed_becomes(group, topic, 10)) << "by itself, in its interval";
    const auto lag = source->lag(kWithin);
    ASSERT_TRUE(lag) << lag.error().detail;
    ASSERT_EQ(lag->size(), 1u);
    EXPECT_EQ(lag->front().lag, 0);
    EXPECT_EQ(lag->front().end, 10);
}

TEST(Kafka, compaction_markers_and_aborted_records_leave_no_lag_and_skip_nothing) {
    const std::string group = new_group();
    // Three partitions: markers at the end, aborted records at the end, and a compacted log.
    const std::string topic = server().new_topic(2);
    server().transaction({{topic, 0, "a", "t1"}, {topic, 0, "b", "t2"}}, true);
    server().transaction({{topic, 0, "c", "aborted"}}, false);
    server().transaction({{topic, 0, "d", "t3"}}, true);
    pen().write(topic, {"plain"}, 1);
    server().transaction({{topic, 1, "e", "aborted"}, {topic, 1, "f", "aborted"}}, false);
    const std::string compacted = server().new_topic(1, {{"cleanup.policy", "compact"},
                                                         {"segment.ms", "50"},
                                                         {"min.cleanable.dirty.ratio", "0.01"},
                                                         {"delete.retention.ms", "0"}});
    for (int i = 0; i < 30; ++i)
        ASSERT_TRUE(pen().write({.topic = compacted, .key = "same", .value = std::to_string(i)}));
    // The cleaner leaves the active segment alone: it is rolled by the next message.
    const auto kept = [&] {
        EXPECT_TRUE(pen().write({.topic = compacted, .key = "same", .value = "last"}));
        auto probe = source_of(config_for(compacted, new_group()));
        RecordingListener seen(*probe);
        EXPECT_TRUE(probe->start(seen));
        EXPECT_TRUE(ServerProcess::eventually([&] {
            const auto state = probe->state();
            return !state.empty() && state[0].position >= 30 && state[0].in_flight == seen.count();
        }));
        return seen.count();
    };
    ASSERT_TRUE(ServerProcess::eventually([&] { return kept() < 20; }, seconds{20}))
        << "the log was not compacted";

    SourceConfig config = config_for(topic, group);
    config.topics = {topic, compacted};
    auto source = source_of(config);
    RecordingListener listener(*source, {.settle = true});
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_told("assigned", 3));
    const bool caught_up = ServerProcess::eventually([&] {
        const auto lag = source->lag(kWithin);
        return lag && lag->size() == 3 &&
               std::all_of(lag->begin(), lag->end(),
                           [](const PartitionLag& one) { return one.lag == 0; });
    });
    EXPECT_TRUE(caught_up) << "the marks do not pass markers and holes";
    EXPECT_EQ(server().committed(group, topic, 0), 7) << "3 messages, 1 aborted, 3 markers";
    EXPECT_EQ(server().committed(group, topic, 1), 4) << "1 message, 2 aborted, 1 marker";
    std::multiset<std::string> values;
    for (const Got& one : listener.got()) {
        if (one.receipt.assignment->topic() == topic) values.insert(*one.value);
    }
    EXPECT_EQ(values, (std::multiset<std::string>{"t1", "t2", "t3", "plain"}));
    source->stop(kWithin);
    auto again = source_of(config);
    RecordingListener nothing(*again);
    ASSERT_TRUE(again->start(nothing));
    ASSERT_TRUE(nothing.wait_told("assigned", 3));
    pen().write(topic, {"new"}, 0);
    ASSERT_TRUE(nothing.wait_count(1));
    EXPECT_EQ(nothing.values(), std::vector<std::string>{"new"});
}

TEST(Kafka, the_text_beside_commits_and_the_members_are_there_for_who_asks) {
    const std::string topic = server().new_topic(2), group = new_group();
    pen().write(topic, {"a"});
    SourceConfig config = config_for(topic, group);
    config.client_id = "semel-store-42";
    config.commit_metadata = "store=42";
    auto source = source_of(config);
    RecordingListener listener(*source, {.settle = true});
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_count(1));
    EXPECT_EQ(listener.told("assigned")[0]->committed(), std::nullopt);
    ASSERT_TRUE(source->commit(kWithin));
    const auto group_seen = source->describe(kWithin);
    ASSERT_TRUE(group_seen) << group_seen.error().detail;
    EXPECT_EQ(group_seen->state, "Stable");
    ASSERT_EQ(group_seen->member_count, 1u);
    EXPECT_EQ(group_seen->members[0].client_id, "semel-store-42");
    EXPECT_TRUE(group_seen->members[0].self);
    EXPECT_EQ(group_seen->members[0].partitions.size(), 2u);
    const auto commits = source->committed(kWithin);
    ASSERT_TRUE(commits) << commits.error().detail;
    ASSERT_EQ(commits->size(), 2u);
    for (const CommittedPosition& one : *commits) EXPECT_EQ(one.metadata, "store=42");
    source->stop(kWithin);

    auto next = source_of(config);
    RecordingListener told(*next);
    ASSERT_TRUE(next->start(told));
    ASSERT_TRUE(told.wait_told("assigned", 2));
    EXPECT_EQ(told.told("assigned")[0]->committed(), 1);
    EXPECT_EQ(told.told("assigned")[0]->committed_metadata(), "store=42");
}

// ---------------------------------------------------------------- members

TEST(Kafka, a_revoke_commits_what_is_finished_and_nothing_else_and_the_rest_goes_to_the_other) {
    const std::string topic = server().new_topic(2), group = new_group();
    for (const std::int32_t partition : {0, 1}) pen().write(topic, numbered("m", 6), partition);
    auto first = source_of(config_for(topic, group));
    RecordingListener at_first(*first, {.drain = false});
    ASSERT_TRUE(first->start(at_first));
    ASSERT_TRUE(at_first.wait_count(12));
    const std::vector<Got> got = at_first.got();
    for (const Got& one : got) {
        if (one.offset() < 2) first->settle(one.receipt);
    }
    ASSERT_TRUE(first->commit(kWithin));

    auto second = source_of(config_for(topic, group));
    RecordingListener at_second(*second);
    ASSERT_TRUE(second->start(at_second));
    ASSERT_TRUE(at_first.wait_told("revoked", 2));
    // What runs may end while it drains; offset 3 stays unfinished, 4 is finished behind it.
    for (const Got& one : got) {
        if (one.offset() == 2 || one.offset() == 4)
            EXPECT_EQ(first->settle(one.receipt), 1u) << "still ours until it is released";
    }
    EXPECT_EQ(at_first.told("released").size(), 0u);
    for (const AssignmentPtr& one : at_first.told("revoked")) first->drained(one);
    ASSERT_TRUE(at_first.wait_told("released", 2));
    for (const Got& one : got) EXPECT_EQ(first->settle(one.receipt), 0u) << "void";
    for (const std::int32_t partition : {0, 1})
        EXPECT_EQ(server().committed(group, topic, partition), 3);

    ASSERT_TRUE(at_second.wait_count(3));
    ASSERT_TRUE(at_first.wait_count(15)) << "its own partition came back and goes on";
    const std::int32_t moved = at_second.got()[0].partition();
    EXPECT_EQ(at_second.offsets(moved), sequence(3, 3));
    EXPECT_EQ(at_second.offsets(1 - moved), std::vector<std::int64_t>{}) << "it stayed";
    for (const Got& one : at_second.got()) second->settle(one.receipt);
    EXPECT_TRUE(committed_becomes(group, topic, 6, moved));
    EXPECT_EQ(server().committed(group, topic, 1 - moved), 3) << "not its business";
    EXPECT_EQ(at_first.told("lost").size(), 0u);
}

TEST(Kafka, a_drain_has_an_end_and_what_is_unfinished_then_comes_again) {
    const std::string topic = server().new_topic(), group = new_group();
    pen().write(topic, numbered("m", 4));
    SourceConfig config = config_for(topic, group);
    config.drain = milliseconds{300};
    auto first = source_of(config);
    RecordingListener at_first(*first, {.drain = false});
    ASSERT_TRUE(first->start(at_first));
    ASSERT_TRUE(at_first.wait_count(4));
    first->settle(at_first.got()[0].receipt);
    config.instance_id.clear();
    auto second = source_of(config);
    RecordingListener at_second(*second);
    ASSERT_TRUE(second->start(at_second));
    ASSERT_TRUE(at_first.wait_told("released", 1)) << "the handler of 1 never ends";
    EXPECT_EQ(server().committed(group, topic), 1);
    first->stop(milliseconds{0});
    ASSERT_TRUE(at_second.wait_count(3));
    EXPECT_EQ(at_second.offsets(), sequence(1, 3));
}

TEST(Kafka, a_killed_members_unfinished_messages_come_again) {
    const std::string topic = server().new_topic(), group = new_group();
    pen().write(topic, {"ok 0", "ok 1", "stuck 2", "ok 3"});
    Child child(topic, group);
    ASSERT_TRUE(child.wait_line("delivered 0 3")) << child.process().log();
    ASSERT_TRUE(committed_becomes(group, topic, 2));
    child.process().kill();
    auto source = source_of(config_for(topic, group));
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_count(2, seconds{20}));
    EXPECT_EQ(listener.offsets(), sequence(2, 2));
}

TEST(Kafka, a_member_frozen_beyond_its_session_loses_and_never_commits) {
    const std::string topic = server().new_topic(), group = new_group();
    pen().write(topic, {"ok 0", "stuck 1", "stuck 2"});
    Child child(topic, group);
    ASSERT_TRUE(child.wait_line("delivered 0 2")) << child.process().log();
    ASSERT_TRUE(committed_becomes(group, topic, 1));
    child.process().freeze();
    auto source = source_of(config_for(topic, group));
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_count(2, seconds{20})) << "its messages are given to another";
    EXPECT_EQ(listener.offsets(), sequence(1, 2));
    source->settle(listener.got()[0].receipt);
    ASSERT_TRUE(committed_becomes(group, topic, 2));
    child.process().thaw();
    ASSERT_TRUE(child.wait_line("lost 1, settled late 0")) << child.process().log();
    EXPECT_EQ(server().committed(group, topic), 2);
    source->settle(listener.got()[1].receipt);
    EXPECT_TRUE(committed_becomes(group, topic, 3));
    source->stop(milliseconds{0});
    EXPECT_TRUE(ServerProcess::eventually([&] {
        const std::string log = child.process().log();
        return log.find("assigned 0", log.find("lost 1")) != std::string::npos;
    })) << "it has joined again";
}

TEST(Kafka, a_second_process_with_the_same_instance_id_ends_the_first_with_a_sentence) {
    const std::string topic = server().new_topic(), group = new_group();
    SourceConfig config = config_for(topic, group);
    config.instance_id = "pod-1";
    auto first = source_of(config);
    RecordingListener at_first(*first);
    ASSERT_TRUE(first->start(at_first));
    ASSERT_TRUE(at_first.wait_told("assigned", 1));
    auto second = source_of(config);
    RecordingListener at_second(*second);
    ASSERT_TRUE(second->start(at_second));
    ASSERT_TRUE(at_first.wait_problem(ProblemKind::fatal)) << at_first.all_problems();
    EXPECT_NE(at_first.problem_of(ProblemKind::fatal).find("pod-1"), std::string::npos);
    EXPECT_EQ(at_first.told("lost").size(), 1u);
    EXPECT_TRUE(at_second.wait_told("assigned", 1));
    EXPECT_TRUE(first->state().empty());
}

// ---------------------------------------------------------------- where it begins

TEST(Kafka, the_start_of_a_new_group_is_what_was_said) {
    const std::string topic = server().new_topic();
    pen().write(topic, {"old"});
    const std::string group = new_group();
    SourceConfig config = config_for(topic, group);
    config.start = Start::latest;
    {
        auto latest = source_of(config);
        RecordingListener listener(*latest);
        ASSERT_TRUE(latest->start(listener));
        ASSERT_TRUE(listener.wait_told("assigned", 1));
        EXPECT_TRUE(committed_becomes(group, topic, 1))
            << "committed at once: a crash before the first message skips nothing";
    }
    pen().write(topic, {"while nobody listened"});
    auto again = source_of(config);
    RecordingListener listener(*again);
    ASSERT_TRUE(again->start(listener));
    ASSERT_TRUE(listener.wait_count(1));
    EXPECT_EQ(listener.values(), std::vector<std::string>{"while nobody listened"});

    config.group = new_group();
    config.start = Start::fail;
    auto fails = source_of(config);
    RecordingListener held(*fails);
    ASSERT_TRUE(fails->start(held));
    ASSERT_TRUE(held.wait_problem(ProblemKind::no_offset));
    ASSERT_EQ(fails->state().size(), 1u);
    EXPECT_TRUE(fails->state()[0].held);
    fails->begin(held.told("assigned")[0], 1);
    ASSERT_TRUE(held.wait_count(1));
    EXPECT_EQ(held.offsets(), sequence(1, 1));
}

TEST(Kafka, an_owner_may_begin_elsewhere_than_at_the_committed_position) {
    const std::string topic = server().new_topic(), group = new_group();
    pen().write(topic, numbered("m", 20));
    server().set_committed(group, topic, 0, 3);
    auto source = source_of(config_for(topic, group));
    RecordingListener listener(*source, {.begin = false});
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_told("assigned", 1));
    const AssignmentPtr assignment = listener.told("assigned")[0];
    EXPECT_EQ(assignment->committed(), 3);
    EXPECT_EQ(listener.count(), 0u) << "silent until it is begun";
    source->begin(assignment, 12);  // as a database's own position says
    ASSERT_TRUE(listener.wait_count(8));
    EXPECT_EQ(listener.offsets(), sequence(12, 8));
    EXPECT_TRUE(committed_becomes(group, topic, 12)) << "the committed one is only a copy";
}

TEST(Kafka, an_expired_position_stops_its_partition_alone_and_with_an_alarm) {
    const std::string topic = server().new_topic(2), group = new_group();
    for (const std::int32_t partition : {0, 1}) pen().write(topic, numbered("m", 10), partition);
    for (const std::int32_t partition : {0, 1}) server().set_committed(group, topic, partition, 2);
    server().delete_records(topic, 0, 5);
    auto source = source_of(config_for(topic, group));
    RecordingListener listener(*source, {.settle = true});
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_problem(ProblemKind::out_of_range)) << listener.all_problems();
    ASSERT_TRUE(listener.wait_count(8));
    EXPECT_EQ(listener.offsets(1), sequence(2, 8));
    EXPECT_EQ(listener.offsets(0), std::vector<std::int64_t>{}) << "neither skipped nor repeated";
    EXPECT_EQ(server().committed(group, topic, 0), 2) << "an operator's to decide";
    AssignmentPtr stopped;
    for (const AssignmentState& one : source->state()) {
        if (one.held) stopped = one.assignment;
    }
    ASSERT_NE(stopped, nullptr);
    ASSERT_TRUE(source->seek(stopped, 5, kWithin));
    ASSERT_TRUE(listener.wait_count(13)) << listener.all_problems();
    EXPECT_EQ(listener.offsets(0), sequence(5, 5));
    EXPECT_TRUE(committed_becomes(group, topic, 10, 0));
}

// ---------------------------------------------------------------- flow

TEST(Kafka, pausing_at_any_moment_skips_nothing_and_repeats_nothing) {
    constexpr int count = 15'000;
    const std::string topic = server().new_topic(2), group = new_group();
    for (const std::int32_t partition : {0, 1})
        pen().write(topic, numbered("a message of some length ", count), partition);
    SourceConfig config = config_for(topic, group);
    config.fetched_bytes = 64 * 1024;  // it fetches all the time
    auto source = source_of(config);
    RecordingListener listener(*source, {.settle = true});
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_told("assigned", 2));
    const std::vector<AssignmentPtr> both = listener.told("assigned");
    std::mt19937 random(7);
    while (listener.count() < std::size_t{2} * count && !HasFailure()) {
        const AssignmentPtr& one = both[random() % 2];
        source->pause(one);
        if (random() % 2 == 0) source->pause(one);
        if (random() % 4 == 0) {  // a while without it; the other goes on
            const std::size_t before = listener.count();
            ServerProcess::eventually([&] { return listener.count() > before; }, milliseconds{20});
        }
        source->resume(one);
        if (random() % 2 == 0) source->resume(one);
        const std::size_t before = listener.count();
        EXPECT_TRUE(ServerProcess::eventually(
            [&] { return listener.count() > before || listener.count() == 2 * count; },
            seconds{20}))
            << "stands still at " << before;
    }
    for (const std::int32_t partition : {0, 1})
        EXPECT_EQ(listener.offsets(partition), sequence(0, count));
    EXPECT_TRUE(committed_becomes(group, topic, count, 0));
}

TEST(Kafka, a_pause_lasts_and_is_not_felt_by_the_group) {
    const std::string topic = server().new_topic(), group = new_group();
    pen().write(topic, numbered("m", 5));
    SourceConfig config = config_for(topic, group);
    config.properties = {{"session.timeout.ms", "1500"},
                         {"heartbeat.interval.ms", "300"},
                         {"max.poll.interval.ms", "1500"}};
    config.drain = milliseconds{500};
    auto source = source_of(config);
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_count(5));
    source->pause(listener.told("assigned")[0]);
    pen().write(topic, {"later"});
    // Its handlers take more than twice the group's poll interval.
    EXPECT_FALSE(listener.wait_count(6, milliseconds{3500}));
    EXPECT_EQ(listener.told("lost").size() + listener.told("revoked").size(), 0u)
        << listener.all_problems();
    source->resume(listener.told("assigned")[0]);
    ASSERT_TRUE(listener.wait_count(6));
    EXPECT_EQ(listener.offsets(), sequence(0, 6));
}

TEST(Kafka, the_window_bounds_what_is_out_and_one_stuck_message_does_not_fill_it) {
    constexpr std::size_t count = 5000;
    const std::string topic = server().new_topic(), group = new_group();
    pen().write(topic, numbered("m", count));
    SourceConfig config = config_for(topic, group);
    config.window = 100;
    auto source = source_of(config);
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_count(100));
    EXPECT_FALSE(listener.wait_count(101, milliseconds{200}));
    std::size_t settled = 1;  // the first one is stuck
    while (settled < count && !HasFailure()) {
        const std::vector<Got> got = listener.got();
        for (; settled < got.size(); ++settled) source->settle(got[settled].receipt);
        const std::size_t next = std::min(count, settled + 99);
        ASSERT_TRUE(listener.wait_count(next)) << "stands still at " << settled;
        ASSERT_LE(listener.count(), settled + 99);
    }
    ASSERT_TRUE(source->commit(kWithin));
    EXPECT_EQ(server().committed(group, topic), 0);
    source->window(0);
    source->settle(listener.got()[0].receipt);
    pen().write(topic, {"x", "y"});
    EXPECT_FALSE(listener.wait_count(count + 1, milliseconds{200})) << "the window is shut";
    source->window(1);
    ASSERT_TRUE(listener.wait_count(count + 1));
    EXPECT_FALSE(listener.wait_count(count + 2, milliseconds{200})) << "one probe";
}

TEST(Kafka, patterns_find_topics_that_come_later) {
    const std::string group = new_group();
    server().create_topic("orders.eu", 1);
    pen().write("orders.eu", {"eu"});
    SourceConfig config = config_for("^orders\\..*", group);
    config.properties["topic.metadata.refresh.interval.ms"] = "200";
    auto source = source_of(config);
    RecordingListener listener(*source, {.settle = true});
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_count(1));
    server().create_topic("orders.us", 1);
    pen().write("orders.us", {"us"});
    ASSERT_TRUE(listener.wait_count(2)) << listener.all_problems();
    EXPECT_EQ(listener.values(), (std::vector<std::string>{"eu", "us"}));
}

// ---------------------------------------------------------------- brokers and users

TEST(Kafka, users_come_through_tls_and_a_wrong_password_is_said_without_it) {
    const std::string topic = server().new_topic(), group = new_group();
    pen().write(topic, {"m"});
    SourceConfig config = config_for(topic, group);
    config.brokers = server().secure_address();
    config.properties = {{"security.protocol", "sasl_ssl"},
                         {"ssl.ca.location", server().ca_file()},
                         {"sasl.mechanism", "PLAIN"},
                         {"sasl.username", "semel"},
                         {"sasl.password", "s3cret"}};
    auto source = source_of(config);
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    EXPECT_TRUE(listener.wait_count(1)) << listener.all_problems();
    auto publisher =
        make_publisher({.brokers = server().secure_address(), .properties = config.properties});
    ASSERT_TRUE(publisher);
    bool there = false;
    (*publisher)->publish({.topic = topic, .value = "n"}, [&there](const auto& at) {
        there = at.has_value();
    });
    EXPECT_TRUE((*publisher)->flush(kWithin));
    EXPECT_TRUE(there);

    config.properties["sasl.password"] = "wr0ng-one";
    auto wrong = source_of(config);
    RecordingListener refused(*wrong);
    ASSERT_TRUE(wrong->start(refused));
    EXPECT_TRUE(refused.wait_problem(ProblemKind::unreachable));
    EXPECT_NE(refused.all_problems().find("uthentication failed"), std::string::npos)
        << refused.all_problems();
    EXPECT_EQ(refused.all_problems().find("wr0ng-one"), std::string::npos);
}

TEST(Kafka, a_missing_topic_is_told_and_the_others_go_on) {
    const std::string topic = server().new_topic();
    SourceConfig config = config_for(topic, new_group());
    config.topics = {topic, "there-is-no-such-topic"};
    auto source = source_of(config);
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_problem(ProblemKind::topic)) << listener.all_problems();
    EXPECT_NE(listener.problem_of(ProblemKind::topic).find("there-is-no-such-topic"),
              std::string::npos);
    pen().write(topic, {"m"});
    EXPECT_TRUE(listener.wait_count(1));
}

TEST(KafkaBroker, killed_and_back_again_nothing_is_lost_and_confirmed_messages_are_there_once) {
    // On a busy machine a broker takes longer to come back than the 30 s of a publisher's default.
    constexpr seconds patience{120};
    Pen writer(patience);
    const std::string topic = server().new_topic(), group = new_group();
    auto source = source_of(config_for(topic, group));
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_told("assigned", 1));
    std::mutex mutex;
    std::set<std::string> confirmed;
    int doubtful = 0;
    const auto write = [&](int first, int count) {
        for (const std::string& value : numbered("m", count, first)) {
            writer.publisher().publish(
                {.topic = topic, .value = value}, [&, value](const auto& at) {
                    const std::lock_guard lock(mutex);
                    at ? static_cast<void>(confirmed.insert(value)) : static_cast<void>(++doubtful);
                });
        }
    };
    write(0, 300);
    ASSERT_TRUE(listener.wait_count(1));
    source->settle(listener.got()[0].receipt);
    write(300, 300);
    server().kill();
    write(600, 100);
    EXPECT_TRUE(listener.wait_problem(ProblemKind::unreachable)) << listener.all_problems();
    const auto unanswered = source->commit(milliseconds{100});
    EXPECT_FALSE(unanswered);
    server().restart();
    ASSERT_TRUE(writer.publisher().flush(patience));
    EXPECT_EQ(doubtful, 0) << "an idempotent producer tries again for all of its time";
    // Assigned again or not: every confirmed message is delivered; finished ones are committed.
    EXPECT_TRUE(ServerProcess::eventually(
        [&] {
            const std::vector<std::string> values = listener.values();
            return std::set<std::string>(values.begin(), values.end()).size() >= 700;
        },
        patience))
        << listener.count() << "\n"
        << listener.all_problems();
    EXPECT_EQ(confirmed.size(), 700u);
    std::map<std::string, std::set<std::int64_t>> places;
    for (const Got& one : listener.got()) places[*one.value].insert(one.offset());
    for (const auto& [value, offsets] : places)
        EXPECT_EQ(offsets.size(), 1u) << value << " is in the log more than once";
    for (const Got& one : listener.got()) source->settle(one.receipt);
    EXPECT_TRUE(ServerProcess::eventually([&] { return server().committed(group, topic) == 700; },
                                          patience))
        << listener.all_problems();
    EXPECT_TRUE(listener.wait_problem(ProblemKind::reachable));
}

TEST(KafkaBroker, that_is_away_is_said_and_stopping_does_not_wait_for_it) {
    SourceConfig config = config_for("t", new_group());
    config.brokers = "127.0.0.1:" + std::to_string(ServerProcess::free_port());
    auto source = source_of(config);
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_problem(ProblemKind::unreachable));
    EXPECT_FALSE(source->describe(milliseconds{200}));
    const auto before = std::chrono::steady_clock::now();
    source->stop(seconds{20});
    EXPECT_LT(std::chrono::steady_clock::now() - before, seconds{8});
}

TEST(KafkaReset, an_empty_group_is_moved_and_one_with_members_is_not) {
    const Cluster cluster{.brokers = server().address(), .properties = {}};
    const std::string topic = server().new_topic(2);
    const std::string group = new_group();
    std::vector<support::KafkaRecord> records;
    for (int i = 0; i < 10; ++i)
        records.push_back({.topic = topic, .partition = 0, .key = {}, .value = std::to_string(i)});
    server().transaction(records, true);
    server().delete_records(topic, 0, 3);
    const auto plan = [&](ResetTo to, std::int64_t offset, std::optional<std::int32_t> partition) {
        return plan_reset(cluster, group, {topic}, partition, to, offset, kWithin);
    };
    {
        auto source = source_of(config_for(topic, group));
        RecordingListener listener(*source);
        ASSERT_TRUE(source->start(listener));
        ASSERT_TRUE(listener.wait_count(7));
        const auto refused = plan(ResetTo::earliest, 0, {});
        ASSERT_FALSE(refused);
        EXPECT_EQ(refused.error().code, base::ErrorCode::invalid_argument);
        EXPECT_NE(refused.error().detail.find("has 1 member(s)"), std::string::npos)
            << refused.error().detail;
        for (const Got& one : listener.got()) source->settle(one.receipt);
        ASSERT_TRUE(source->commit(kWithin));
        source->stop(milliseconds{0});
    }
    const auto all = plan(ResetTo::earliest, 0, {});
    ASSERT_TRUE(all) << all.error().detail;
    ASSERT_EQ(all->size(), 2u);
    const auto one = plan(ResetTo::offset, 5, 0);
    ASSERT_TRUE(one) << one.error().detail;
    ASSERT_EQ(one->size(), 1u);
    EXPECT_EQ(one->front().begin, 3);
    EXPECT_EQ(one->front().end, 11) << "behind the transaction's marker";
    EXPECT_GE(one->front().committed, 10);
    EXPECT_EQ(one->front().to, 5);
    EXPECT_FALSE(plan(ResetTo::offset, 2, 0)) << "no longer in the log";
    EXPECT_FALSE(plan(ResetTo::offset, 5, {})) << "partition 1 is empty";
    EXPECT_FALSE(plan(ResetTo::latest, 0, 7)) << "there is none";
    ASSERT_TRUE(commit_reset(cluster, group, *one, "semel"));
    EXPECT_EQ(server().committed(group, topic, 0), 5);
    auto source = source_of(config_for(topic, group));
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_count(5));
    EXPECT_EQ(listener.offsets(0).front(), 5);
    EXPECT_EQ(listener.told("assigned").front()->committed_metadata(), "semel");
}

TEST(KafkaTopics, what_is_asked_for_at_the_start_is_said_and_nothing_is_made_by_asking) {
    const Cluster cluster{.brokers = server().address(), .properties = {}};
    const std::string kept = server().new_topic(3, {{"retention.ms", "86400000"}});
    const std::string endless = server().new_topic(1, {{"retention.ms", "-1"}});
    const std::string compacted = server().new_topic(1, {{"cleanup.policy", "compact"}});
    const auto found =
        look_at_topics(cluster, {kept, endless, compacted, "no-such-topic"}, kWithin);
    ASSERT_TRUE(found) << found.error().detail;
    ASSERT_EQ(found->size(), 3u);
    for (const TopicFacts& topic : *found) {
        if (topic.name == kept) {
            EXPECT_EQ(topic.partitions, 3u);
            EXPECT_EQ(topic.retention, std::chrono::hours{24});
            EXPECT_EQ(topic.about_retention, "");
        } else {
            EXPECT_FALSE(topic.retention);
            EXPECT_EQ(topic.about_retention,
                      topic.name == endless ? "retention.ms is -1" : "cleanup.policy is compact");
        }
    }
    const auto matched = look_at_topics(cluster, {"^" + kept + "$"}, kWithin);
    ASSERT_TRUE(matched) << matched.error().detail;
    EXPECT_EQ(matched->size(), 1u);
    const auto none = look_at_topics(cluster, {"no-such-topic"}, kWithin);
    ASSERT_TRUE(none);
    EXPECT_TRUE(none->empty()) << "asking made it";

    const std::string letters = kept + ".dlq";
    ASSERT_TRUE(ensure_topic(cluster, letters, kWithin));
    const auto made = look_at_topics(cluster, {letters}, kWithin);
    ASSERT_TRUE(made) << made.error().detail;
    EXPECT_EQ(made->size(), 1u);
    EXPECT_TRUE(ensure_topic(cluster, letters, kWithin)) << "it is there";
    const auto refused = ensure_topic(cluster, "no topic has this name!", kWithin);
    ASSERT_FALSE(refused);
    EXPECT_NE(refused.error().detail.find("no topic has this name!"), std::string::npos);
    const auto away =
        look_at_topics({.brokers = "127.0.0.1:1", .properties = {}}, {kept}, milliseconds{500});
    ASSERT_FALSE(away);
    EXPECT_EQ(away.error().code, base::ErrorCode::io) << away.error().detail;
}

}  // namespace
}  // namespace semel::brokers::kafka
