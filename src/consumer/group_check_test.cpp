#include "consumer/group_check.hpp"

#include <gtest/gtest.h>

#include <deque>

namespace semel::consumer {
namespace {

using std::chrono::milliseconds;

/// Answers what it is told to; what the check does not use is refused.
class FakeSource final : public brokers::Source {
  public:
    brokers::GroupDescription group{.state = "Stable", .members = {}};
    std::vector<brokers::CommittedPosition> commits;
    std::size_t describe_fails = 0, committed_fails = 0, asked = 0;
    bool queue = false;
    std::function<void()> on_describe;

    void member(std::string client_id, bool self = false) {
        group.members.push_back({.id = client_id + "-1",
                                 .client_id = std::move(client_id),
                                 .host = "10.0.0.9",
                                 .self = self});
    }
    void commit(std::int32_t partition, std::string metadata) {
        commits.push_back(
            {.partition = {"orders", partition}, .offset = 5, .metadata = std::move(metadata)});
    }

    base::Result<void> start(brokers::Listener&) override { return no(); }
    void begin(const brokers::AssignmentPtr&, std::optional<std::int64_t>) override {}
    std::size_t settle(std::span<const brokers::Receipt>) override { return 0; }
    void drained(const brokers::AssignmentPtr&) override {}
    void pause(const brokers::AssignmentPtr&) override {}
    void resume(const brokers::AssignmentPtr&) override {}
    void window(std::size_t) override {}
    base::Result<void> seek(const brokers::AssignmentPtr&, std::int64_t, milliseconds) override {
        return no();
    }
    base::Result<void> commit(milliseconds) override { return no(); }
    std::vector<brokers::AssignmentState> state() const override { return {}; }
    base::Result<std::vector<brokers::PartitionLag>> lag(milliseconds) override { return no(); }
    base::Result<brokers::GroupDescription> describe(milliseconds) override {
        ++asked;
        if (on_describe) on_describe();
        if (describe_fails > 0) {
            --describe_fails;
            return no();
        }
        return group;
    }
    base::Result<std::vector<brokers::CommittedPosition>> committed(milliseconds) override {
        if (committed_fails > 0) {
            --committed_fails;
            return no();
        }
        return commits;
    }
    brokers::SourceTraits traits() const override {
        return {.name = "fake", .commits_positions = !queue};
    }
    base::SteadyTime last_poll() const override { return {}; }
    void stop(milliseconds) override {}

  private:
    static base::Error no() { return {.code = base::ErrorCode::io, .detail = "no broker answers"}; }
};

class GroupCheck : public ::testing::Test {
  protected:
    GroupFinding check(std::string store = "store-a") {
        const GroupWaiting waiting{.now = [this] { return now_; },
                                   .wait =
                                       [this](milliseconds time) {
                                           waits_.push_back(time);
                                           now_ += time;
                                       }};
        return check_unshared_group(source_, store, "shop", milliseconds{10'000}, waiting);
    }
    void self() { source_.member("pod-1 " + store_mark("store-a"), true); }

    FakeSource source_;
    base::SteadyTime now_{};
    std::vector<milliseconds> waits_;
};

TEST_F(GroupCheck, a_member_alone_in_its_group_stays) {
    self();
    GroupFinding found = check();
    EXPECT_TRUE(found.stays);
    EXPECT_EQ(found.sentence, "");
    source_.commit(0, store_mark("store-a"));
    source_.commit(1, "");  // of another consumer before
    source_.commit(2, "somebody's text");
    found = check();
    EXPECT_TRUE(found.stays);
    EXPECT_EQ(found.sentence, "");
    EXPECT_TRUE(waits_.empty());
}

TEST_F(GroupCheck, who_meets_a_stranger_leaves) {
    self();
    source_.member("java-client");
    for (const char* text : {"", "somebody's text"}) {
        source_.commits.clear();
        source_.commit(0, text);
        const GroupFinding found = check();
        EXPECT_FALSE(found.stays);
        EXPECT_NE(found.sentence.find("`java-client` (10.0.0.9)"), std::string::npos)
            << found.sentence;
        EXPECT_NE(found.sentence.find("unshared_store"), std::string::npos) << found.sentence;
    }
}

TEST_F(GroupCheck, of_two_stores_the_one_in_the_commits_stays_and_says_so) {
    self();
    source_.member("pod-2 " + store_mark("store-b"));
    source_.commit(0, store_mark("store-a"));
    const GroupFinding first = check();
    EXPECT_TRUE(first.stays);
    EXPECT_NE(first.sentence.find("pod-2"), std::string::npos) << first.sentence;
    source_.group.members[0].self = false;
    source_.group.members[1].self = true;
    const GroupFinding second = check("store-b");
    EXPECT_FALSE(second.stays);
    EXPECT_NE(second.sentence.find("store-a"), std::string::npos) << second.sentence;
}

TEST_F(GroupCheck, a_former_process_of_the_same_store_is_no_stranger) {
    self();
    source_.member("pod-1 " + store_mark("store-a"));
    EXPECT_TRUE(check().stays);
    EXPECT_EQ(check().sentence, "");
    // A name that begins like ours is another.
    source_.member("pod-1 " + store_mark("store-a2"));
    EXPECT_FALSE(check().stays);
}

TEST_F(GroupCheck, a_directory_that_was_swapped_is_noticed_alone) {
    self();
    source_.commit(0, store_mark("store-a"));
    source_.commit(1, store_mark("store-old"));
    const GroupFinding found = check();
    EXPECT_FALSE(found.stays);
    EXPECT_NE(found.sentence.find("orders-1"), std::string::npos) << found.sentence;
    EXPECT_NE(found.sentence.find("store-old"), std::string::npos) << found.sentence;
}

TEST_F(GroupCheck, a_broker_that_cannot_be_asked_is_waited_for) {
    self();
    source_.describe_fails = 3;
    source_.committed_fails = 1;
    EXPECT_TRUE(check().stays);
    EXPECT_EQ(source_.asked, 5u);
    EXPECT_EQ(waits_, (std::vector<milliseconds>{milliseconds{100}, milliseconds{200},
                                                 milliseconds{400}, milliseconds{800}}));
}

TEST_F(GroupCheck, after_its_patience_it_does_not_stay_on_trust) {
    self();
    source_.describe_fails = SIZE_MAX;
    source_.on_describe = [this] { now_ += milliseconds{700}; };
    const base::SteadyTime begin = now_;
    const GroupFinding found = check();
    EXPECT_FALSE(found.stays);
    EXPECT_NE(found.sentence.find("no broker answers"), std::string::npos) << found.sentence;
    EXPECT_LE(now_ - begin, milliseconds{10'700});
    EXPECT_GE(now_ - begin, milliseconds{10'000});
}

TEST_F(GroupCheck, a_coordinator_that_does_not_list_us_yet_is_asked_again) {
    source_.group.state = "PreparingRebalance";
    source_.member("java-client");
    source_.on_describe = [this] {
        if (source_.asked != 3) return;
        source_.group.members.clear();
        self();
    };
    EXPECT_TRUE(check().stays);
    EXPECT_EQ(source_.asked, 3u);
}

TEST_F(GroupCheck, a_queue_is_not_asked) {
    source_.queue = true;
    EXPECT_TRUE(check().stays);
    EXPECT_EQ(source_.asked, 0u);
}

TEST(StoreMark, any_store_id_gives_a_mark_that_is_safe_and_its_own) {
    EXPECT_EQ(store_mark("01J9.a_b-C"), "semel-store=01J9.a_b-C");
    EXPECT_NE(store_mark("a b"), store_mark("a c"));
    EXPECT_NE(store_mark(std::string(65, 'a')), store_mark(std::string(66, 'a')));
    for (const std::string& id : {std::string("a b;=\n"), std::string(5000, 'x'), std::string(),
                                  std::string("\0\xff", 2)}) {
        const std::string mark = store_mark(id);
        EXPECT_LE(mark.size(), 80u);
        EXPECT_EQ(mark.find_first_not_of(
                      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.="),
                  std::string::npos)
            << mark;
    }
}

}  // namespace
}  // namespace semel::consumer
