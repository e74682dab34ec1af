// Messages that wait beside the records: what is kept of them, when the broker may forget them, and
// in which order they come back.
#include "consumer/parking.hpp"

#include <gmock/gmock.h>

#include "consumer/consumer_world.hpp"
#include "stores/memory/memory_store.hpp"

namespace semel::consumer {
namespace {

using namespace testing_world;
using brokers::Delivery;
using brokers::Header;
using testing::ElementsAre;
using testing::IsEmpty;
using Ids = std::vector<std::string>;
using Places = std::vector<std::uint64_t>;

const Retry long_wait{.delay = 10s, .reason = "not now", .step = 0};

// ---------------------------------------------------------------- bytes

Delivery delivery(std::optional<std::string_view> key, std::optional<std::string_view> value,
                  const std::vector<Header>& headers, std::int64_t place = 42) {
    Delivery out = brokers::make_delivery(
        {.assignment = std::make_shared<brokers::Assignment>(Partition{"t", 3}, 1),
         .position = place},
        key, value, headers);
    out.timestamp_ms = 1234567890123;
    return out;
}

void expect_same(const Delivery& a, const Delivery& b) {
    EXPECT_EQ(a.key, b.key);
    EXPECT_EQ(a.value, b.value);
    EXPECT_EQ(a.timestamp_ms, b.timestamp_ms);
    EXPECT_EQ(a.position(), b.position());
    EXPECT_EQ(a.partition(), b.partition());
    ASSERT_EQ(a.headers.size(), b.headers.size());
    for (std::size_t i = 0; i < a.headers.size(); ++i) {
        EXPECT_EQ(a.headers[i].name, b.headers[i].name);
        EXPECT_EQ(a.headers[i].value, b.headers[i].value);
    }
}

TEST(ParkedBytes, bring_back_every_byte_and_tell_null_from_empty) {
    const std::string binary("\0\xff{\n", 4);
    const std::vector<Header> headers{{"a", "1"}, {"a", binary}, {"", ""}, {"none", {}}};
    for (const auto& key : {std::optional<std::string_view>{}, std::optional<std::string_view>{""},
                            std::optional<std::string_view>{binary}}) {
        for (const auto& value :
             {std::optional<std::string_view>{}, std::optional<std::string_view>{""},
              std::optional<std::string_view>{binary}}) {
            Delivery original = delivery(key, value, headers);
            for (const bool timed : {true, false}) {
                if (!timed) original.timestamp_ms.reset();
                const auto back =
                    decode_parked(original.receipt.assignment, 42, encode_parked(original));
                ASSERT_TRUE(back);
                expect_same(original, *back);
            }
        }
    }
}

TEST(ParkedBytes, that_are_damaged_are_no_message) {
    const Delivery original = delivery("k", "value", {{"name", "content"}});
    const std::string bytes = encode_parked(original);
    const auto read = [&](std::string_view text) {
        return decode_parked(original.receipt.assignment, 0, text).has_value();
    };
    ASSERT_TRUE(read(bytes));
    for (std::size_t size = 0; size < bytes.size(); ++size)
        EXPECT_FALSE(read(std::string_view(bytes).substr(0, size))) << size;
    EXPECT_FALSE(read(bytes + "x"));
    std::string newer = bytes;
    newer[0] = 2;
    EXPECT_FALSE(read(newer));
    // Counts and lengths that the bytes cannot hold allocate nothing.
    std::string huge = bytes;
    for (std::size_t at = 2; at < huge.size(); ++at) {
        std::string wrong = bytes;
        wrong[at] = '\xff';
        static_cast<void>(read(wrong));
    }
}

// ---------------------------------------------------------------- the consumer

/// The memory store, whose answers can be kept back and whose puts can fail.
class HeldStore final : public core::Store {
  public:
    explicit HeldStore(base::Clock& clock) : inner_(stores::make_memory_store(clock)) {}
    void submit(std::vector<core::Item> items, core::BatchDone done) override {
        const bool puts = std::holds_alternative<core::Park>(items.at(0).operation);
        const bool takes = std::holds_alternative<core::Unpark>(items.at(0).operation);
        if ((puts && fail_puts) || (takes && fail_takes)) {
            core::BatchResults failed;
            for (std::size_t i = 0; i < items.size(); ++i)
                failed.emplace_back(base::Error{.code = base::ErrorCode::store_unavailable,
                                                .detail = "the store is away"});
            return done(std::move(failed));
        }
        largest_put = std::max(largest_put, puts ? items.size() : 0);
        if (!puts || !hold) return inner_->submit(std::move(items), std::move(done));
        inner_->submit(std::move(items), [this, done](core::BatchResults results) {
            held.emplace_back([done, results = std::move(results)] { done(results); });
        });
    }
    void let_go() {
        hold = false;
        for (const auto& answer : std::exchange(held, {})) answer();
    }
    base::Result<core::ScanPage> scan(const core::ScanFilter& filter, const std::string& cursor,
                                      std::size_t limit) override {
        return inner_->scan(filter, cursor, limit);
    }
    base::Result<std::size_t> purge(std::size_t limit) override { return inner_->purge(limit); }
    [[nodiscard]] core::StoreTime now() const override { return inner_->now(); }
    [[nodiscard]] core::Durability durability() const override { return inner_->durability(); }
    base::Result<void> health() override { return inner_->health(); }
    void stop() override { inner_->stop(); }

    bool hold = false;
    std::atomic<bool> fail_puts{false}, fail_takes{false};
    std::size_t largest_put = 0;
    std::vector<std::function<void()>> held;

  private:
    std::unique_ptr<core::Store> inner_;
};

struct ParkingTest : ConsumerWorld {
    HeldStore store{clock};
    const base::Hmac secret{"secret"};
    Parking parking{store, secret, "g/orders"};
    std::map<std::string, std::vector<Verdict>> verdicts;  ///< First to last; then Applied.

    void SetUp() override {
        ConsumerWorld::SetUp();
        options.parking = &parking;
        strategy.script = [this](Message& one, bool) -> std::optional<Verdict> {
            auto& left = verdicts[one.id];
            if (left.empty()) return Applied{};
            Verdict next = left.front();
            left.erase(left.begin());
            return next;
        };
    }
    /// As the store has them.
    [[nodiscard]] std::vector<core::ParkedMessage> in_the_store(const Partition& which) {
        return std::get<core::ParkedFound>(asked(which, core::GetParked{.from = 0, .limit = 1000}))
            .messages;
    }
    [[nodiscard]] Places listed(const Partition& which) {
        Places out;
        for (const auto& one : in_the_store(which)) out.push_back(one.place);
        return out;
    }
    /// The store's answer about the partition's list.
    core::StoreOutcome asked(const Partition& which, core::StoreOperation operation) {
        std::string name = "parked messages";
        const auto number = [&](std::uint64_t value, int bytes) {
            for (int i = 0; i < bytes; ++i) name.push_back(static_cast<char>(value >> (8 * i)));
        };
        for (const std::string& text : {std::string("g/orders"), which.topic}) {
            number(text.size(), 4);
            name += text;
        }
        number(static_cast<std::uint64_t>(which.number), 8);
        core::StoreOutcome outcome;
        store.submit({{secret(name), std::move(operation)}}, [&](core::BatchResults results) {
            ASSERT_TRUE(results.at(0));
            outcome = std::move(results.at(0)->outcome);
        });
        return outcome;
    }
    /// As a former owner of the partition left them.
    void plant(const Partition& which,
               const std::vector<std::pair<std::int64_t, std::string>>& messages,
               const std::string& key = "k") {
        core::Nonce fence;
        fence.bytes.fill(9);
        parking.open(which, fence, [](auto found) { ASSERT_TRUE(found); });
        for (const auto& [place, id] : messages) {
            const std::string value = R"({"id":")" + id + R"("})";
            const Delivery one = brokers::make_delivery(
                {.assignment = std::make_shared<brokers::Assignment>(which, 1), .position = place},
                key, value, {});
            parking.put(which, fence, {&one}, [](auto results) {
                ASSERT_TRUE(results.at(0));
                ASSERT_EQ(*results.at(0), Parking::Put::stored);
            });
        }
    }
    /// "a" and "b", of one lane: the store has them, and has not said so.
    void park_without_an_answer() {
        store.hold = true;
        verdicts["a"] = {long_wait};
        append(p0, "a", "k");
        append(p0, "b", "k");
        start();
        until([&] { return !store.held.empty(); });
    }
    /// Another member with the same store.
    void start_again() {
        stop();
        consumer.reset();
        source = std::make_unique<LockedSource>(broker.join("g", {"t"}), mutex);
        strategy.stopped = false;
        start();
    }
};

TEST_F(ParkingTest, what_waits_long_is_settled_with_all_behind_it_and_its_lane_keeps_its_order) {
    verdicts["a"] = {long_wait};
    append(p0, "a", "k");
    append(p0, "b", "k");
    append(p0, "other", "another key");
    append(p0, "c", "k");
    start();
    until([&] { return committed(p0) == 4; });
    EXPECT_EQ(strategy.log, (Ids{"a", "other"}));
    EXPECT_THAT(listed(p0), ElementsAre(0, 1, 3));
    append(p0, "d", "k");
    until([&] { return committed(p0) == 5; });
    EXPECT_THAT(listed(p0), ElementsAre(0, 1, 3, 4));
    EXPECT_EQ(counters.in_store, 4u);
    EXPECT_EQ(counters.stored, 4u);
    advance(11s);
    until([&] { return listed(p0).empty(); });
    EXPECT_EQ(strategy.log, (Ids{"a", "other", "a", "b", "c", "d"}));
    round();
    EXPECT_EQ(counters.in_store, 0u);
    EXPECT_EQ(counters.in_hand, 0u);
    EXPECT_EQ(counters.stores_failed, 0u);
}

TEST_F(ParkingTest, a_short_wait_is_waited_for_in_hand) {
    verdicts["a"] = {Retry{.delay = 2999ms, .reason = {}}};
    append(p0, "a", "k");
    append(p0, "b", "k");
    start();
    advance(1s);
    EXPECT_LT(committed(p0), 1);
    EXPECT_THAT(listed(p0), IsEmpty());
    advance(3s);
    EXPECT_EQ(committed(p0), 2);
    EXPECT_EQ(counters.stored, 0u);
}

TEST_F(ParkingTest, without_a_lane_each_message_waits_alone) {
    options.identity.ordering = config::Ordering::none;
    verdicts["b"] = {long_wait};
    for (const char* id : {"a", "b", "c"}) append(p0, id, "k");
    start();
    until([&] { return committed(p0) == 3; });
    EXPECT_THAT(listed(p0), ElementsAre(1));
    advance(11s);
    EXPECT_EQ(strategy.log, (Ids{"a", "b", "c", "b"}));
    EXPECT_THAT(listed(p0), IsEmpty());
}

TEST_F(ParkingTest, what_waits_comes_back_with_its_partition_before_what_is_younger) {
    verdicts["a"] = {long_wait};
    append(p0, "a", "k");
    append(p0, "b", "k");
    start();
    until([&] { return committed(p0) == 2; });
    stop();
    append(p0, "c", "k");
    start_again();
    until([&] { return strategy.log.size() == 4; });
    EXPECT_EQ(strategy.log, (Ids{"a", "a", "b", "c"})) << "this strategy keeps no due time";
    until([&] { return listed(p0).empty(); });
    EXPECT_EQ(committed(p0), 3);
}

// A process died between the store's answer and the commit.
TEST_F(ParkingTest, what_is_there_and_unsettled_keeps_its_place_among_those_that_are_not_there) {
    for (const char* id : {"a", "b", "c", "d"}) append(p0, id, "k");
    plant(p0, {{0, "a"}, {2, "c"}});
    start();
    until([&] { return committed(p0) == 4; });
    EXPECT_EQ(strategy.log, (Ids{"a", "b", "c", "d"}));
    until([&] { return listed(p0).empty(); });
    EXPECT_EQ(strategy.runs["a"], 1);
    EXPECT_EQ(strategy.runs["c"], 1);
}

TEST_F(ParkingTest, what_the_group_has_passed_and_what_it_has_not_come_in_their_order) {
    for (const char* id : {"a", "b", "c", "d"}) append(p0, id, "k");
    {
        const std::lock_guard lock(mutex);
        broker.set_committed("g", p0, 2);
    }
    plant(p0, {{0, "a"}, {1, "b"}, {3, "d"}});
    start();
    until([&] { return committed(p0) == 4 && listed(p0).empty(); });
    EXPECT_EQ(strategy.log, (Ids{"a", "b", "c", "d"}));
}

TEST_F(ParkingTest, what_the_broker_has_let_go_of_runs_all_the_same) {
    for (const char* id : {"a", "b", "c"}) append(p0, id, "k");
    plant(p0, {{0, "a"}});
    {
        const std::lock_guard lock(mutex);
        broker.expire(p0, 1);
        broker.set_committed("g", p0, 0);
    }
    plant(p1, {{0, "gone"}});
    {
        const std::lock_guard lock(mutex);
        broker.leave_hole(p1, 1);
        broker.set_committed("g", p1, 0);
    }
    append(p1, "z", "k");
    options.park_limit = 1000;
    start();
    until([&] { return committed(p1) == 2; });
    advance(1s);
    EXPECT_EQ(strategy.runs["gone"], 1) << "compacted: only the store has it";
    EXPECT_THAT(listed(p1), IsEmpty());
}

TEST_F(ParkingTest, who_has_lost_the_list_keeps_its_messages_in_hand) {
    start();
    core::Nonce other;
    other.bytes.fill(7);
    parking.open(p0, other, [](auto found) { ASSERT_TRUE(found); });
    verdicts["a"] = {long_wait};
    append(p0, "a", "k");
    append(p0, "b", "k");
    advance(5s);
    EXPECT_LT(committed(p0), 1);
    EXPECT_THAT(listed(p0), IsEmpty());
    EXPECT_EQ(counters.stored, 0u);
    advance(6s);
    EXPECT_EQ(strategy.log, (Ids{"a", "a", "b"}));
    EXPECT_EQ(committed(p0), 2);
}

TEST_F(ParkingTest, while_the_store_is_away_they_wait_in_hand_with_an_alarm) {
    store.fail_puts = true;
    verdicts["a"] = {long_wait};
    append(p0, "a", "k");
    append(p0, "b", "k");
    start();
    until([&] { return alarmed("cannot be put beside the records"); });
    advance(2s);
    EXPECT_LT(committed(p0), 1);
    EXPECT_GE(counters.stores_failed, 2u);
    store.fail_puts = false;
    advance(2s);
    until([&] { return committed(p0) == 2; });
    EXPECT_THAT(listed(p0), ElementsAre(0, 1));
    EXPECT_FALSE(alarmed("cannot be put beside the records"));
    store.fail_takes = true;
    advance(10s);
    EXPECT_EQ(strategy.log, (Ids{"a", "a", "b"}));
    EXPECT_TRUE(alarmed("cannot be taken out"));
    EXPECT_THAT(listed(p0), ElementsAre(0, 1));
    store.fail_takes = false;
    advance(2s);
    EXPECT_THAT(listed(p0), IsEmpty());
    EXPECT_FALSE(alarmed("cannot be taken out"));
}

TEST_F(ParkingTest, what_is_finished_before_the_store_has_answered_is_taken_out_again) {
    park_without_an_answer();
    advance(11s);
    EXPECT_EQ(strategy.log, (Ids{"a", "a", "b"}));
    EXPECT_EQ(committed(p0), 2);
    EXPECT_THAT(listed(p0), ElementsAre(0, 1));
    store.let_go();
    until([&] { return listed(p0).empty(); });
    EXPECT_EQ(counters.in_store, 0u);
}

TEST_F(ParkingTest, a_partition_waits_for_the_answer_before_it_leaves_and_loses_nothing) {
    park_without_an_answer();
    {
        const std::lock_guard lock(mutex);
        broker.revoke("g", p0);
    }
    round();
    EXPECT_FALSE(source->drained_parts.contains(p0));
    store.let_go();
    until([&] { return source->drained_parts.contains(p0); });
    EXPECT_LT(committed(p0), 1) << "they were dropped: whoever comes next has them from the broker";
    start_again();
    until([&] { return committed(p0) == 2 && listed(p0).empty(); });
    EXPECT_EQ(strategy.log, (Ids{"a", "a", "b"}));
}

TEST_F(ParkingTest, one_that_is_given_up_is_taken_out_after_its_letter) {
    verdicts["a"] = {long_wait, Dead{.why = DeadClass::attempts, .reason = "again", .token = {7}}};
    append(p0, "a", "k");
    append(p0, "b", "k");
    start();
    until([&] { return committed(p0) == 2; });
    advance(11s);
    until([&] { return listed(p0).empty(); });
    EXPECT_THAT(letters(), ElementsAre(R"({"id":"a"})"));
    EXPECT_EQ(strategy.log, (Ids{"a", "a", "b"}));
}

TEST_F(ParkingTest, a_message_that_cannot_be_read_there_is_left_there_with_an_alarm) {
    plant(p0, {{0, "a"}});
    {
        const std::lock_guard lock(mutex);
        broker.leave_hole(p0, 2);
        broker.set_committed("g", p0, 2);
    }
    core::Nonce fence;
    fence.bytes.fill(9);
    // Not through Parking, which writes what it can read.
    asked(p0, core::Park{.fence = fence, .place = 1, .bytes = "?"});
    start();
    until([&] { return strategy.runs["a"] == 1; });
    EXPECT_TRUE(alarmed("position 1, that waits beside the records cannot be read"));
    until([&] { return listed(p0) == Places{1}; });
}

TEST_F(ParkingTest, in_a_topic_that_was_made_again_what_waits_and_what_is_new_both_run) {
    for (const char* id : {"new 0", "new 1"}) append(p0, id, "k");
    plant(p0, {{0, "old 0"}, {1, "old 1"}, {7, "old 7"}});
    verdicts["new 1"] = {long_wait, long_wait};
    start();
    until([&] { return listed(p0) == Places{7} && committed(p0) == 1; });
    EXPECT_EQ(strategy.log, (Ids{"old 0", "new 0", "old 1", "new 1"}));
    EXPECT_EQ(counters.stored, 0u) << "its place was taken when it was to be put there";
    for (int i = 2; i < 8; ++i) append(p0, "new " + std::to_string(i), "k");
    advance(11s);
    EXPECT_THAT(listed(p0), ElementsAre(1, 2, 3, 4, 5, 6, 7)) << "again, and its place is free";
    EXPECT_EQ(strategy.runs["old 7"], 0) << "behind those that wait";
    advance(11s);
    until([&] { return listed(p0).empty(); });
    EXPECT_EQ(strategy.log, (Ids{"old 0", "new 0", "old 1", "new 1", "new 1", "new 1", "new 2",
                                 "new 3", "new 4", "new 5", "new 6", "old 7", "new 7"}));
}

TEST_F(ParkingTest, what_lies_there_is_sealed_and_opens_in_its_place_alone) {
    plant(p0, {{3, "a secret"}}, "a key");
    const std::string bytes = in_the_store(p0).at(0).bytes;
    for (const char* plain : {"a secret", "a key", "id"})
        EXPECT_EQ(bytes.find(plain), std::string::npos) << plain;
    core::Nonce fence;
    fence.bytes.fill(9);
    asked(p0, core::Park{.fence = fence, .place = 4, .bytes = bytes});
    std::vector<core::ParkedMessage> found;
    parking.open(p0, fence, [&](auto opened) { found = std::move(opened.value()); });
    ASSERT_EQ(found.size(), 2u);
    EXPECT_NE(found[0].bytes.find("a secret"), std::string::npos);
    EXPECT_EQ(found[1].bytes, "");
}

TEST_F(ParkingTest, too_many_that_wait_pause_their_partition) {
    options.park_limit = 4;
    options.identity.ordering = config::Ordering::none;
    for (int i = 0; i < 6; ++i) {
        verdicts["m" + std::to_string(i)] = {long_wait};
        append(p0, "m" + std::to_string(i));
    }
    start();
    until([&] { return committed(p0) == 6; });
    advance(1s);
    EXPECT_EQ(counters.paused_partitions, 1u) << "those that failed count as well";
    append(p0, "later");
    advance(1s);
    EXPECT_EQ(strategy.runs["later"], 0);
    advance(10s);
    until([&] { return strategy.runs["later"] == 1; });
    EXPECT_EQ(counters.paused_partitions, 0u);
}

TEST_F(ParkingTest, many_are_put_in_calls_of_bounded_size) {
    verdicts["m0"] = {long_wait};
    for (int i = 0; i < 600; ++i) append(p0, "m" + std::to_string(i), "k");
    start();
    until([&] { return committed(p0) == 600; });
    EXPECT_EQ(listed(p0).size(), 600u);
    EXPECT_LE(store.largest_put, 256u);
    EXPECT_GT(store.largest_put, 1u);
    advance(11s);
    until([&] { return listed(p0).empty(); });
    EXPECT_EQ(strategy.log.size(), 601u);
}

}  // namespace
}  // namespace semel::consumer
