// Groups whose members come and go: what the two rebalance protocols promise to those who stay, and
// topics that are made anew.
#include <map>
#include <random>
#include <set>

#include "integration/kafka_harness.hpp"

namespace semel::brokers::kafka {
namespace {

// Cooperative assignors, and topics' ids, are there from this version on.
constexpr int kNewer = 0x020c0000;

bool newer() { return library_version() >= kNewer; }

TEST(KafkaLibrary, is_the_one_that_was_configured) {
#ifdef SEMEL_KAFKA_BUNDLED
    EXPECT_TRUE(newer()) << library_name();
#else
    EXPECT_FALSE(newer()) << library_name() << ": the tests of newer ones are not built";
#endif
}

TEST(KafkaLibrary, reads_and_writes_every_codec_and_has_oidc_where_it_is_newer) {
    const std::string topic = server().new_topic();
    for (const char* codec : {"gzip", "snappy", "lz4", "zstd"}) {
        auto publisher = make_publisher(
            {.brokers = server().address(), .properties = {{"compression.codec", codec}}});
        ASSERT_TRUE(publisher) << publisher.error().detail;
        bool there = false;
        (*publisher)
            ->publish({.topic = topic, .value = codec + std::string(5000, 'x')},
                      [&there](const auto& at) { there = at.has_value(); });
        EXPECT_TRUE((*publisher)->flush(kWithin));
        EXPECT_TRUE(there) << codec;
    }
    auto source = source_of(config_for(topic, new_group()));
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_count(4)) << listener.all_problems();
    EXPECT_EQ(listener.values()[3], "zstd" + std::string(5000, 'x'));
    const auto oidc = check_properties(
        Role::source, {{"sasl.mechanisms", "OAUTHBEARER"}, {"sasl.oauthbearer.method", "oidc"}});
    EXPECT_EQ(oidc.has_value(), newer());
    if (!oidc) EXPECT_NE(oidc.error().detail.find("OIDC"), std::string::npos);
    EXPECT_TRUE(check_properties(Role::source, {{"sasl.mechanisms", "SCRAM-SHA-512"}}));
    EXPECT_TRUE(check_properties(Role::source, {{"sasl.mechanisms", "GSSAPI"}}));
}

TEST(KafkaTopicId, a_topic_made_anew_under_its_name_has_another_id_where_the_library_can_ask) {
    const std::string topic = server().new_topic();
    auto source = source_of(config_for(topic, new_group()));
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_told("assigned", 1));
    const auto id = source->topic_id(topic, kWithin);
    ASSERT_TRUE(id) << id.error().detail;
    EXPECT_EQ(id->empty(), !newer()) << *id;
    const auto again = source->topic_id(topic, kWithin);
    ASSERT_TRUE(again) << again.error().detail;
    EXPECT_EQ(*again, *id);
    if (!newer()) return;
    EXPECT_FALSE(source->topic_id("there-is-no-such-topic", kWithin));
    server().delete_topic(topic);
    ASSERT_TRUE(ServerProcess::eventually([&] { return !source->topic_id(topic, kWithin); }));
    server().create_topic(topic, 1);
    EXPECT_TRUE(ServerProcess::eventually([&] {
        const auto anew = source->topic_id(topic, kWithin);
        return anew && !anew->empty() && *anew != *id;
    }));
}

// A member that settles everything and keeps what it was told.
struct Joined {
    explicit Joined(const SourceConfig& config)
        : source(source_of(config)), listener(*source, {.settle = true}) {
        EXPECT_TRUE(source->start(listener));
    }
    [[nodiscard]] std::set<std::int32_t> partitions() const {
        std::set<std::int32_t> out;
        for (const AssignmentState& one : source->state())
            out.insert(one.assignment->partition().number);
        return out;
    }
    std::unique_ptr<Source> source;
    RecordingListener listener;
};

SourceConfig cooperative_config(const std::string& topic, const std::string& group) {
    SourceConfig config = config_for(topic, group);
    config.properties["partition.assignment.strategy"] = "cooperative-sticky";
    return config;
}

// Offsets of each assignment, in the order of their arrival: without a gap and without a
// repetition.
void expect_unbroken(const RecordingListener& listener) {
    std::map<const Assignment*, std::int64_t> next;
    for (const Got& one : listener.got()) {
        const auto [at, fresh] = next.try_emplace(one.receipt.assignment.get(), one.offset());
        EXPECT_EQ(one.offset(), at->second) << "partition " << one.partition();
        at->second = one.offset() + 1;
    }
}

TEST(KafkaCooperative,
     is_refused_by_a_library_that_can_lose_its_assignment_and_taken_by_a_newer_one) {
    const auto made = make_source(cooperative_config("t", "g"));
    EXPECT_EQ(made.has_value(), newer());
    if (!made) EXPECT_NE(made.error().detail.find("cooperative"), std::string::npos);
}

#ifdef SEMEL_KAFKA_BUNDLED
TEST(KafkaCooperative, partitions_that_stay_are_not_revoked_and_keep_position_pause_and_messages) {
    constexpr int partitions = 6;
    const std::string topic = server().new_topic(partitions), group = new_group();
    for (std::int32_t p = 0; p < partitions; ++p) pen().write(topic, numbered("m", 10), p);
    Joined first(cooperative_config(topic, group));
    ASSERT_TRUE(first.listener.wait_count(std::size_t{10} * partitions));
    const std::vector<AssignmentPtr> before = first.listener.told("assigned");
    ASSERT_EQ(before.size(), std::size_t{partitions});
    for (const AssignmentPtr& one : before) first.source->pause(one);

    {
        Joined second(cooperative_config(topic, group));
        ASSERT_TRUE(ServerProcess::eventually([&] { return second.partitions().size() == 3; }))
            << first.listener.all_problems() << second.listener.all_problems();
        EXPECT_EQ(first.listener.told("revoked").size(), 3u) << "only those that move";
        EXPECT_EQ(first.listener.told("released").size(), 3u);
        const std::set<std::int32_t> stayed = first.partitions();
        ASSERT_EQ(stayed.size(), 3u);
        for (const AssignmentState& one : first.source->state()) {
            EXPECT_TRUE(one.paused) << "a pause outlives the rebalance of others";
            EXPECT_NE(std::find(before.begin(), before.end(), one.assignment), before.end())
                << "the same assignment as before";
        }
        for (std::int32_t p = 0; p < partitions; ++p) pen().write(topic, numbered("n", 5), p);
        ASSERT_TRUE(second.listener.wait_count(15));
        EXPECT_FALSE(first.listener.wait_count(std::size_t{10} * partitions + 1, milliseconds{200}))
            << "paused";
        for (const AssignmentPtr& one : before) first.source->resume(one);
        ASSERT_TRUE(first.listener.wait_count(std::size_t{10} * partitions + 15));
        for (const std::int32_t p : stayed) {
            EXPECT_EQ(first.listener.offsets(p), sequence(0, 15));
            EXPECT_EQ(second.listener.offsets(p), std::vector<std::int64_t>{});
        }
    }
    // It has left: its three come back, as new assignments that nobody has paused.
    ASSERT_TRUE(ServerProcess::eventually([&] { return first.partitions().size() == 6; }));
    EXPECT_EQ(first.listener.told("revoked").size(), 3u) << "nothing was taken to give more";
    for (std::int32_t p = 0; p < partitions; ++p) pen().write(topic, numbered("o", 2), p);
    ASSERT_TRUE(first.listener.wait_count(std::size_t{10} * partitions + 15 + 12));
    expect_unbroken(first.listener);
    for (std::int32_t p = 0; p < partitions; ++p)
        EXPECT_TRUE(committed_becomes(group, topic, 17, p));
    EXPECT_EQ(first.listener.told("lost").size(), 0u);
}

TEST(KafkaCooperative, while_some_drain_the_others_settle_and_commit) {
    const std::string topic = server().new_topic(2), group = new_group();
    for (const std::int32_t p : {0, 1}) pen().write(topic, numbered("m", 4), p);
    auto first = source_of(cooperative_config(topic, group));
    RecordingListener at_first(*first, {.drain = false});
    ASSERT_TRUE(first->start(at_first));
    ASSERT_TRUE(at_first.wait_count(8));
    Joined second(cooperative_config(topic, group));
    ASSERT_TRUE(at_first.wait_told("revoked", 1));
    const std::int32_t moving = at_first.told("revoked")[0]->partition().number;
    for (const Got& one : at_first.got()) {
        if (one.partition() != moving || one.offset() < 2)
            EXPECT_EQ(first->settle(one.receipt), 1u);
    }
    EXPECT_TRUE(committed_becomes(group, topic, 4, 1 - moving)) << "not after the drain only";
    EXPECT_EQ(at_first.told("released").size(), 0u) << "it drains";
    first->drained(at_first.told("revoked")[0]);
    ASSERT_TRUE(second.listener.wait_count(2));
    EXPECT_EQ(second.listener.offsets(moving), sequence(2, 2)) << "from what was committed";
    pen().write(topic, {"later"}, 1 - moving);
    ASSERT_TRUE(at_first.wait_count(9)) << "it fetches again";
    EXPECT_EQ(at_first.offsets(1 - moving), sequence(0, 5));
}

TEST(KafkaCooperative, a_member_frozen_beyond_its_session_loses_all_and_never_commits) {
    const std::string topic = server().new_topic(2), group = new_group();
    for (const std::int32_t p : {0, 1}) pen().write(topic, {"ok 0", "stuck 1", "stuck 2"}, p);
    Child child(topic, group, "cooperative-sticky");
    for (const char* line : {"delivered 0 2", "delivered 1 2"})
        ASSERT_TRUE(child.wait_line(line)) << child.process().log();
    for (const std::int32_t p : {0, 1}) ASSERT_TRUE(committed_becomes(group, topic, 1, p));
    child.process().freeze();
    auto source = source_of(cooperative_config(topic, group));
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_count(4, seconds{20})) << "its messages are given to another";
    for (const std::int32_t p : {0, 1}) EXPECT_EQ(listener.offsets(p), sequence(1, 2));
    for (const Got& one : listener.got()) {
        if (one.offset() == 1) source->settle(one.receipt);
    }
    for (const std::int32_t p : {0, 1}) ASSERT_TRUE(committed_becomes(group, topic, 2, p));
    child.process().thaw();
    ASSERT_TRUE(child.wait_line("lost 2, settled late 0")) << child.process().log();
    for (const std::int32_t p : {0, 1}) EXPECT_EQ(server().committed(group, topic, p), 2);
    EXPECT_TRUE(ServerProcess::eventually([&] {
        const std::string log = child.process().log();
        return log.find("assigned", log.find("lost 2")) != std::string::npos;
    })) << "it has joined again, and gets one of the two";
}
#endif

// Members of one group join, leave and die while messages flow. Each message is settled at once, so
// that whatever a member was given and nobody settled in its time comes to another.
void storm(bool cooperative) {
    constexpr int partitions = 6, rounds = 12;
    const std::string topic = server().new_topic(partitions), group = new_group();
    const auto config = [&] {
        SourceConfig out =
            cooperative ? cooperative_config(topic, group) : config_for(topic, group);
        out.properties["session.timeout.ms"] = "1500";
        return out;
    };
    std::mt19937 random(cooperative ? 11 : 7);
    std::vector<std::unique_ptr<Joined>> members;
    std::map<std::int32_t, std::set<std::int64_t>> seen;
    std::size_t moved_back = 0;
    const auto leave = [&](std::size_t which) {
        Joined& member = *members[which];
        member.source->stop(seconds{5});
        expect_unbroken(member.listener);
        for (const Got& one : member.listener.got()) seen[one.partition()].insert(one.offset());
        members.erase(members.begin() + static_cast<std::ptrdiff_t>(which));
    };
    members.push_back(std::make_unique<Joined>(config()));
    int written = 0;
    for (int round = 0; round < rounds && !testing::Test::HasFailure(); ++round) {
        for (std::int32_t p = 0; p < partitions; ++p)
            pen().write(topic, numbered("m", 20, written), p);
        written += 20;
        const bool joins = members.size() == 1 || (members.size() < 4 && random() % 2 == 0);
        std::map<Joined*, std::set<std::int32_t>> before;
        for (const auto& member : members) before[member.get()] = member->partitions();
        std::map<Joined*, std::size_t> revoked;
        for (const auto& member : members)
            revoked[member.get()] = member->listener.told("revoked").size();
        if (joins) {
            members.push_back(std::make_unique<Joined>(config()));
        } else {
            leave(random() % members.size());
        }
        // All partitions are somebody's again, and nobody has none.
        ASSERT_TRUE(ServerProcess::eventually(
            [&] {
                std::set<std::int32_t> held;
                std::size_t count = 0;
                for (const auto& member : members) {
                    const auto its = member->partitions();
                    if (its.empty()) return false;
                    held.insert(its.begin(), its.end());
                    count += its.size();
                }
                return held.size() == partitions && count == partitions;
            },
            seconds{30}));
        if (!cooperative) continue;
        for (const auto& member : members) {
            if (!before.contains(member.get())) continue;
            const std::set<std::int32_t> now = member->partitions();
            const std::vector<AssignmentPtr> all = member->listener.told("revoked");
            for (std::size_t i = revoked[member.get()]; i < all.size(); ++i)
                moved_back += now.contains(all[i]->partition().number) ? 1 : 0;
        }
    }
    ASSERT_TRUE(ServerProcess::eventually(
        [&] {
            for (std::int32_t p = 0; p < partitions; ++p) {
                if (server().committed(group, topic, p) != written) return false;
            }
            return true;
        },
        seconds{30}))
        << "lag is left";
    while (!members.empty()) leave(0);
    for (std::int32_t p = 0; p < partitions; ++p)
        EXPECT_EQ(seen[p].size(), static_cast<std::size_t>(written)) << "partition " << p;
    EXPECT_EQ(moved_back, 0u) << "revoked from who kept them";
}

TEST(KafkaStorm, eager_members_come_and_go_and_no_message_is_missed) { storm(false); }

#ifdef SEMEL_KAFKA_BUNDLED
TEST(KafkaStorm, cooperative_members_come_and_go_and_what_stays_is_never_revoked) { storm(true); }
#endif

}  // namespace
}  // namespace semel::brokers::kafka
