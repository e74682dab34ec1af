#include "brokers/memory/memory_broker.hpp"

#include <gtest/gtest.h>

#include "support/recording_listener.hpp"

namespace semel::brokers::memory {
namespace {

using support::RecordingListener;

constexpr std::chrono::milliseconds kNow{0};

struct MemoryBrokerTest : testing::Test {
    MemoryBroker broker;
    void SetUp() override {
        broker.create_topic("t", 2);
        for (const std::int32_t partition : {0, 1}) {
            for (int i = 0; i < 4; ++i)
                broker.append({"t", partition}, {.value = "m" + std::to_string(i)});
        }
    }
};

TEST_F(MemoryBrokerTest, commits_the_lowest_unfinished_and_passes_holes) {
    broker.leave_hole({"t", 0}, 3);
    auto source = broker.join("g", {"t"});
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    broker.pump();
    ASSERT_EQ(listener.count(), 8u);
    for (const support::Got& one : listener.got()) {
        if (one.partition() == 0 && one.offset() != 1) source->settle(one.receipt);
    }
    broker.pump();
    EXPECT_EQ(broker.committed("g", {"t", 0}), 1);
    EXPECT_EQ(broker.committed("g", {"t", 1}), 0);
    source->settle(listener.got()[1].receipt);
    broker.pump();
    EXPECT_EQ(broker.committed("g", {"t", 0}), 7) << "the end";
}

TEST_F(MemoryBrokerTest, a_topic_made_anew_under_its_name_has_another_id_and_nothing_of_the_old) {
    auto source = broker.join("g", {"t"});
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    broker.pump();
    const auto id = source->topic_id("t", kNow);
    ASSERT_TRUE(id);
    EXPECT_EQ(*source->topic_id("t", kNow), *id);
    broker.recreate_topic("t", 2);
    EXPECT_NE(*source->topic_id("t", kNow), *id);
    EXPECT_EQ(broker.end({"t", 0}), 0);
    EXPECT_EQ(broker.committed("g", {"t", 0}), -1);
    broker.pump();
    EXPECT_TRUE(listener.wait_problem(ProblemKind::out_of_range)) << "its positions mean nothing";
    EXPECT_FALSE(source->topic_id("none", kNow));
    broker.tell_topic_ids(false);
    EXPECT_EQ(*source->topic_id("t", kNow), "");
}

TEST_F(MemoryBrokerTest, a_rebalance_releases_before_it_assigns_and_the_unfinished_come_again) {
    auto first = broker.join("g", {"t"});
    RecordingListener at_first(*first, {.drain = false});
    ASSERT_TRUE(first->start(at_first));
    broker.pump();
    const auto got = at_first.got();
    first->settle(got[0].receipt);
    auto second = broker.join("g", {"t"});
    RecordingListener at_second(*second);
    ASSERT_TRUE(second->start(at_second));
    broker.pump();
    EXPECT_EQ(at_first.told("revoked").size(), 2u);
    EXPECT_EQ(at_second.told("assigned").size(), 0u) << "the first still drains";
    EXPECT_EQ(first->settle(got[1].receipt), 1u);
    for (const auto& one : at_first.told("revoked")) first->drained(one);
    broker.pump();
    EXPECT_EQ(broker.committed("g", {"t", 0}), 2);
    EXPECT_EQ(first->settle(got[2].receipt), 0u);
    EXPECT_EQ(at_first.offsets(0), (std::vector<std::int64_t>{0, 1, 2, 3, 2, 3})) << "it came back";
    EXPECT_EQ(at_second.offsets(1), (std::vector<std::int64_t>{0, 1, 2, 3}));
}

TEST_F(MemoryBrokerTest, one_of_two_partitions_is_revoked_and_the_other_stays) {
    auto source = broker.join("g", {"t"});
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    broker.pump();
    broker.revoke("g", {"t", 1});
    broker.pump();
    ASSERT_EQ(listener.told("released").size(), 1u);
    EXPECT_EQ(source->settle(listener.got()[0].receipt), 1u);
    EXPECT_EQ(source->settle(listener.got()[4].receipt), 0u);
    broker.rebalance("g", false);
    broker.pump();
    EXPECT_EQ(listener.offsets(0).size(), 4u);
    EXPECT_EQ(listener.offsets(1).size(), 8u);
}

TEST_F(MemoryBrokerTest, expelled_and_crashed_members_commit_nothing) {
    auto first = broker.join("g", {"t"});
    RecordingListener at_first(*first);
    ASSERT_TRUE(first->start(at_first));
    broker.pump();
    auto second = broker.join("g", {"t"});
    RecordingListener at_second(*second);
    broker.expel(*first);
    EXPECT_EQ(first->settle(at_first.got()[0].receipt), 1u) << "it does not know yet";
    broker.pump();
    EXPECT_EQ(at_first.told("lost").size(), 2u);
    EXPECT_EQ(broker.committed("g", {"t", 0}), 0);
    broker.rebalance("g");
    broker.pump();
    ASSERT_EQ(at_first.told("assigned").size(), 4u) << "it may come again";
    first->settle(at_first.got().back().receipt);
    broker.crash(*first);
    ASSERT_TRUE(second->start(at_second));
    broker.pump();
    EXPECT_EQ(at_second.count(), 8u);
    EXPECT_EQ(at_first.told("released").size(), 0u);
}

TEST_F(MemoryBrokerTest, windows_pauses_positions_and_expiry_behave_as_on_a_real_broker) {
    broker.set_committed("g", {"t", 0}, 1, "store=7");
    auto source = broker.join("g", {"t"});
    RecordingListener listener(*source, {.begin = false});
    ASSERT_TRUE(source->start(listener));
    broker.pump();
    const auto both = listener.told("assigned");
    ASSERT_EQ(both.size(), 2u);
    EXPECT_EQ(both[0]->committed(), 1);
    EXPECT_EQ(both[0]->committed_metadata(), "store=7");
    EXPECT_EQ(both[1]->committed(), std::nullopt);
    EXPECT_EQ(listener.count(), 0u);
    source->window(2);
    source->begin(both[0], 2);
    broker.pump();
    EXPECT_EQ(listener.offsets(0), (std::vector<std::int64_t>{2, 3}));
    source->window(100);
    source->pause(both[1]);
    source->begin(both[1]);
    broker.pump();
    EXPECT_EQ(listener.count(), 2u);
    broker.expire({"t", 1}, 2);
    source->resume(both[1]);
    broker.pump();
    EXPECT_NE(listener.problem_of(ProblemKind::out_of_range), "");
    EXPECT_EQ(listener.count(), 2u);
    ASSERT_TRUE(source->seek(both[1], 2, kNow));
    broker.pump();
    EXPECT_EQ(listener.offsets(1), (std::vector<std::int64_t>{2, 3}));
    EXPECT_FALSE(source->seek(both[1], 0, kNow)) << "messages of it are out";
}

TEST_F(MemoryBrokerTest, publishing_can_fail_with_and_without_the_message_being_there) {
    auto publisher = broker.publisher();
    const auto publish = [&](const std::string& topic) {
        std::optional<base::Result<PublishedAt>> said;
        publisher->publish({.topic = topic, .partition = 0, .value = "x"},
                           [&said](base::Result<PublishedAt> at) { said.emplace(std::move(at)); });
        return *said;
    };
    EXPECT_EQ(publish("t")->position, 4);
    EXPECT_EQ(publish("nowhere").error().applied, base::Applied::no);
    broker.fail_publishing(base::Error{.applied = base::Applied::unknown, .detail = "cut"});
    EXPECT_FALSE(publish("t"));
    EXPECT_EQ(broker.end({"t", 0}), 6) << "it may be there";
    broker.fail_publishing(base::Error{.applied = base::Applied::no, .detail = "full"});
    EXPECT_FALSE(publish("t"));
    EXPECT_EQ(broker.end({"t", 0}), 6);
    auto source = broker.join("g", {"t"});
    RecordingListener listener(*source, {.settle = true});
    ASSERT_TRUE(source->start(listener));
    broker.fail_commits(true);
    broker.pump();
    EXPECT_EQ(listener.count(), 10u);
    EXPECT_FALSE(source->commit(kNow));
    EXPECT_EQ(broker.committed("g", {"t", 0}), -1);
    broker.fail_commits(false);
    broker.pump();
    EXPECT_EQ(broker.committed("g", {"t", 0}), 6);
}

}  // namespace
}  // namespace semel::brokers::memory
