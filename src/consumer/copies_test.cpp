// Copies that wait at the broker: what they look like, and when the original is settled.
#include "consumer/copies.hpp"

#include <gmock/gmock.h>

#include "brokers/delayed.hpp"
#include "consumer/consumer_world.hpp"

namespace semel::consumer {
namespace {

using namespace testing_world;
using brokers::Delivery;
using brokers::Header;
using brokers::Outgoing;
using testing::ElementsAre;
using testing::Pair;

constexpr const char* waits_1 = "t.g.retry.10s";
constexpr const char* waits_2 = "t.g.retry.1m";

CopyRules kafka_rules() {
    return {.kafka = true,
            .delays = {10s, 60s},
            .targets = {{"t", {waits_1, waits_2}},
                        {waits_1, {waits_1, waits_2}},
                        {waits_2, {waits_1, waits_2}}},
            .in_hand_max = 5s};
}

Delivery delivery(const Partition& from, std::int64_t offset, std::optional<std::string_view> value,
                  std::vector<Header> headers, std::optional<std::string_view> key = "k") {
    Delivery out = brokers::make_delivery(
        {.assignment = std::make_shared<brokers::Assignment>(from, 1), .position = offset}, key,
        value, headers);
    out.timestamp_ms = 1000;
    return out;
}
/// As it comes back from where it waits.
Delivery delivered(const Outgoing& copy, std::int64_t offset) {
    std::vector<Header> headers;
    for (const auto& one : copy.headers) {
        headers.push_back({.name = one.name, .value = {}});
        if (one.value) headers.back().value = *one.value;
    }
    return delivery({copy.topic, 0}, offset, copy.value, headers, copy.key);
}
std::vector<std::pair<std::string, std::optional<std::string>>> headers_of(const Outgoing& copy) {
    std::vector<std::pair<std::string, std::optional<std::string>>> out;
    for (const auto& one : copy.headers) out.emplace_back(one.name, one.value);
    return out;
}
std::optional<std::string> header(const Outgoing& copy, std::string_view name) {
    std::optional<std::string> found;
    for (const auto& one : copy.headers) {
        if (one.name == name) found = one.value;
    }
    return found;
}

TEST(Copies, a_step_waits_at_the_broker_and_what_is_left_of_one_only_if_it_is_long) {
    const CopyRules rules = kafka_rules();
    EXPECT_EQ(waits_at_broker(rules, Retry{.delay = 1s}), std::nullopt) << "in place";
    EXPECT_EQ(waits_at_broker(rules, Retry{.delay = 10s, .step = 0}), 0u);
    EXPECT_EQ(waits_at_broker(rules, Retry{.delay = 90s, .step = 1}), 1u);
    const auto left = [&](milliseconds delay) {
        return waits_at_broker(rules, Retry{.delay = delay, .charged = false});
    };
    EXPECT_EQ(left(5s), std::nullopt);
    EXPECT_EQ(left(6s), 0u);
    EXPECT_EQ(left(10s), 0u);
    EXPECT_EQ(left(11s), 1u);
    EXPECT_EQ(left(10min), 1u) << "longer than all: the longest";
    const CopyRules other{.delays = {60s, 10s, 30s}, .targets = {}, .in_hand_max = 0s};
    EXPECT_EQ(waits_at_broker(other, Retry{.delay = 20s, .charged = false}), 2u);
    EXPECT_EQ(waits_at_broker(other, Retry{.delay = 70s, .charged = false}), 0u);
}

TEST(Copies, a_copy_has_every_byte_and_says_where_it_lay_and_when_it_is_due) {
    const std::string bytes("\x00\xff{", 3);
    const Delivery original =
        delivery({"t", 3}, 42, bytes, {{"a", "1"}, {"b", {}}, {"a", bytes}, {"x-death", "mine"}});
    const Outgoing copy = make_copy(original, kafka_rules(), 0, 77'000);
    EXPECT_EQ(copy.topic, waits_1);
    EXPECT_EQ(copy.key, "k");
    EXPECT_EQ(copy.value, bytes);
    EXPECT_FALSE(copy.timestamp_ms) << "its own: it must not expire with the original";
    EXPECT_THAT(
        headers_of(copy),
        ElementsAre(Pair("a", "1"), Pair("b", std::nullopt), Pair("a", bytes),
                    Pair("x-death", "mine"), Pair("semel-original-source", "t"),
                    Pair("semel-original-topic", "t"), Pair("semel-original-timestamp", "1000"),
                    Pair("semel-original-partition", "3"), Pair("semel-original-offset", "42"),
                    Pair("semel-original-key", "k"), Pair("semel-copy-of", "t-3-42"),
                    Pair("semel-due-timestamp", "77000")));

    const Delivery back = delivered(copy, 7);
    EXPECT_EQ(brokers::due_of(back), 77'000);
    const Outgoing second = make_copy(back, kafka_rules(), 1, 99'000);
    EXPECT_EQ(second.topic, waits_2);
    auto expected = headers_of(copy);
    expected.back().second = "99000";
    EXPECT_EQ(headers_of(second), expected) << "of the original, not of the first copy";
    EXPECT_EQ(make_copy(delivery({"t", 0}, 1, {}, {}, {}), kafka_rules(), 0, 1).value, std::nullopt)
        << "a tombstone";
}

TEST(Copies, headers_that_say_copy_are_believed_only_where_nobody_else_writes) {
    const Delivery foreign = delivery({"t", 0}, 5, "v", {{"semel-copy-of", "t-0-1"}});
    EXPECT_EQ(header(make_copy(foreign, kafka_rules(), 0, 1), "semel-copy-of"), "t-0-5");
    for (const char* odd : {"", "t", "t-1", "-1-2", "t-x-1", "t-1-", "t-1-x", "t-99999999999-1"}) {
        EXPECT_EQ(brokers::copied_from(delivery({waits_1, 0}, 0, "v", {{"semel-copy-of", odd}})),
                  std::nullopt)
            << odd;
    }
    EXPECT_EQ(brokers::copied_from(delivery({waits_1, 0}, 0, "v", {{"semel-copy-of", "a-b-2-9"}})),
              (brokers::Position{.partition = {"a-b", 2}, .offset = 9}));
    for (const char* odd : {"", "soon", "-5", "1.5", "99999999999999999999"}) {
        EXPECT_EQ(brokers::due_of(delivery({waits_1, 0}, 0, "v", {{"semel-due-timestamp", odd}})),
                  std::nullopt)
            << odd;
    }
}

TEST(Copies, a_copy_in_a_queue_keeps_what_names_it_and_loses_what_would_steer_it) {
    const CopyRules rules{.kafka = false, .delays = {1s}, .targets = {{"q", {"q.c.retry.1s"}}}};
    Delivery original = delivery({"q", 0}, 9, "v",
                                 {{"x-death", "[]"},
                                  {"x-first-death-queue", "other"},
                                  {"x-delivery-count", "3"},
                                  {"CC", "[\"a\"]"},
                                  {"mine", "1"}},
                                 {});
    original.properties = std::make_unique<brokers::AmqpProperties>();
    original.properties->message_id = "m1";
    original.properties->content_type = "text/plain";
    original.properties->expiration = "5";
    original.properties->user_id = "guest";
    original.properties->exchange = "events";
    original.properties->routing_key = "order.paid";
    const Outgoing copy = make_copy(original, rules, 0, 50);
    EXPECT_EQ(copy.topic, "q.c.retry.1s");
    EXPECT_EQ(copy.properties.message_id, "m1");
    EXPECT_EQ(copy.properties.content_type, "text/plain");
    EXPECT_EQ(copy.properties.expiration, "") << "else it would come back at another time";
    EXPECT_EQ(copy.properties.user_id, "");
    EXPECT_EQ(copy.properties.exchange, "");
    EXPECT_EQ(copy.timestamp_ms, 1000);
    EXPECT_THAT(
        headers_of(copy),
        ElementsAre(Pair("semel-original-x-death", "[]"),
                    Pair("semel-original-x-first-death-queue", "other"),
                    Pair("semel-original-CC", "[\"a\"]"), Pair("mine", "1"),
                    Pair("semel-original-source", "q"), Pair("semel-original-topic", "q"),
                    Pair("semel-original-timestamp", "1000"),
                    Pair("semel-original-exchange", "events"),
                    Pair("semel-original-routing-key", "order.paid"),
                    Pair("semel-original-expiration", "5"), Pair("semel-original-user-id", "guest"),
                    Pair("semel-due-timestamp", "50")));

    auto headers = headers_of(copy);
    std::vector<Header> back_with;
    for (const auto& [name, value] : headers) back_with.push_back({.name = name, .value = *value});
    back_with.push_back({.name = "x-death", .value = "[{}]"});
    back_with.push_back({.name = "x-first-death-queue", .value = "q.c.retry.1s"});
    Delivery back = delivery({"q", 0}, 1, "v", back_with, {});
    back.properties = std::make_unique<brokers::AmqpProperties>(copy.properties);
    headers.back().second = "60";
    EXPECT_EQ(headers_of(make_copy(back, rules, 0, 60)), headers);
}

TEST(Copies, a_copy_is_the_same_message_as_its_original) {
    const auto rules = [](config::ValueFrom from) {
        IdentityRules out{.scope = "g/c", .id = {}, .business_key = {}, .copy_topics = {waits_1}};
        out.id.from = config::ValueSpec{.from = from, .name = "/id"};
        return out;
    };
    const auto identified = [](const IdentityRules& how, Delivery&& from) {
        Delivery rest;
        auto out = Identity(how).identify(std::move(from), rest);
        return std::move(std::get<std::unique_ptr<Message>>(out));
    };
    for (const auto from : {config::ValueFrom::json, config::ValueFrom::offset}) {
        const auto copy =
            make_copy(delivery({"t", 3}, 42, R"({"id":"a"})", {}), kafka_rules(), 0, 1);
        const auto first = identified(rules(from), delivery({"t", 3}, 42, R"({"id":"a"})", {}));
        const auto again = identified(rules(from), delivered(copy, 7));
        EXPECT_EQ(first->key, again->key);
        EXPECT_EQ(again->source, "t");
        EXPECT_EQ(first->fingerprint.raw, again->fingerprint.raw);
        EXPECT_EQ(again->copy_of, (brokers::Position{.partition = {"t", 3}, .offset = 42}));
        EXPECT_FALSE(first->copy_of);
    }
    const auto foreign = identified(rules(config::ValueFrom::offset),
                                    delivery({"t", 0}, 5, "{}", {{"semel-copy-of", "t-0-1"}}));
    EXPECT_EQ(foreign->id, "t-0-5") << "anybody can write headers there";
}

// ---------------------------------------------------------------- in a consumer

struct CopiesTest : ConsumerWorld {
    std::unique_ptr<CopyOutlet> copies;
    const Partition waiting{waits_1, 0};

    void SetUp() override {
        ConsumerWorld::SetUp();
        broker.create_topic(waits_1, 1);
        broker.create_topic(waits_2, 1);
        copies = std::make_unique<CopyOutlet>(*publisher, kafka_rules());
        options.copies = copies.get();
        options.identity.ordering = config::Ordering::none;
        options.identity.copy_topics = {waits_1, waits_2};
    }
    /// The first run of each message fails.
    void fails_once() {
        strategy.script = [this](Message& one, bool) -> std::optional<Verdict> {
            if (strategy.runs[one.id] == 1) return Retry{.delay = 10s, .reason = "503", .step = 0};
            return Applied{};
        };
    }
    std::size_t copied() {
        const std::lock_guard lock(mutex);
        return broker.log(waiting).size();
    }
};

TEST_F(CopiesTest, the_original_is_settled_once_its_copy_is_confirmed_and_not_before) {
    fails_once();
    publisher->hold = true;
    append(p0, "a");
    start();
    advance(1s);
    EXPECT_EQ(strategy.runs["a"], 1);
    EXPECT_EQ(committed(p0), 0);
    EXPECT_EQ(counters.in_hand, 1u);
    {
        const std::lock_guard lock(mutex);
        publisher->let_go();
    }
    advance(1s);
    EXPECT_EQ(committed(p0), 1);
    EXPECT_EQ(copied(), 1u);
    EXPECT_EQ(counters.copies, 1u);
    EXPECT_EQ(counters.retries, 1u);
    EXPECT_EQ(counters.in_hand, 0u);
    advance(60s);
    EXPECT_EQ(strategy.runs["a"], 1) << "it is the copy that runs";
}

TEST_F(CopiesTest, waits_in_place_stay_in_hand) {
    strategy.script = [this](Message& one, bool) -> std::optional<Verdict> {
        if (strategy.runs[one.id] == 1) return Retry{.delay = 1s, .reason = "503"};
        if (strategy.runs[one.id] == 2) return Retry{.delay = 4s, .charged = false};
        return Applied{};
    };
    append(p0, "a");
    start();
    advance(6s);
    EXPECT_EQ(strategy.runs["a"], 3);
    EXPECT_EQ(copied(), 0u);
    EXPECT_EQ(committed(p0), 1);
}

TEST_F(CopiesTest, one_that_cannot_be_copied_stays_in_hand_with_an_alarm_and_is_copied_later) {
    fails_once();
    broker.fail_publishing(base::Error{.detail = "no broker"});
    append(p0, "a");
    append(p0, "b");
    start();
    advance(3500ms);
    EXPECT_EQ(committed(p0), 0);
    EXPECT_EQ(copied(), 0u);
    EXPECT_TRUE(alarmed(waits_1)) << "where it would go";
    EXPECT_GE(counters.copies_failed, 6u);
    EXPECT_LE(counters.copies_failed, 8u) << "once a second each";
    {
        const std::lock_guard lock(mutex);
        broker.fail_publishing({});
    }
    advance(2s);
    EXPECT_EQ(copied(), 2u);
    EXPECT_EQ(committed(p0), 2);
    EXPECT_FALSE(alarmed(waits_1));
    EXPECT_EQ(strategy.runs["a"], 1);
}

TEST_F(CopiesTest, one_that_cannot_be_copied_until_it_is_due_runs_then) {
    fails_once();
    broker.fail_publishing(base::Error{.detail = "no broker"});
    append(p0, "a");
    start();
    advance(9s);
    EXPECT_EQ(strategy.runs["a"], 1);
    advance(2s);
    EXPECT_EQ(strategy.runs["a"], 2);
    EXPECT_EQ(committed(p0), 1);
}

TEST_F(CopiesTest, one_that_never_can_be_copied_is_not_tried_again) {
    fails_once();
    broker.fail_publishing(
        base::Error{.code = base::ErrorCode::invalid_argument, .detail = "it is too large"});
    append(p0, "a");
    start();
    advance(9s);
    EXPECT_EQ(counters.copies_failed, 1u);
    EXPECT_EQ(strategy.runs["a"], 1);
    advance(2s);
    EXPECT_EQ(strategy.runs["a"], 2);
    EXPECT_EQ(committed(p0), 1);
}

TEST_F(CopiesTest, a_copy_in_doubt_is_published_again) {
    fails_once();
    broker.fail_publishing(
        base::Error{.applied = base::Applied::unknown, .detail = "not confirmed in time"});
    append(p0, "a");
    start();
    advance(500ms);
    {
        const std::lock_guard lock(mutex);
        broker.fail_publishing({});
    }
    advance(2s);
    EXPECT_EQ(copied(), 2u) << "of which one runs: their record is the same";
    EXPECT_EQ(committed(p0), 1);
}

TEST_F(CopiesTest, a_partition_that_leaves_while_its_copy_is_on_its_way_waits_for_it) {
    fails_once();
    publisher->hold = true;
    append(p0, "a");
    append(p1, "b");
    start();
    advance(100ms);
    {
        const std::lock_guard lock(mutex);
        broker.revoke("g", p0);
    }
    advance(100ms);
    EXPECT_FALSE(source->drained_parts.contains(p0));
    {
        const std::lock_guard lock(mutex);
        publisher->let_go();
    }
    advance(100ms);
    EXPECT_EQ(committed(p0), 1) << "its copy is confirmed: settled before it left";
    EXPECT_EQ(committed(p1), 1);
    EXPECT_EQ(copied(), 2u);
}

TEST_F(CopiesTest, a_partition_that_is_lost_meanwhile_settles_nothing) {
    fails_once();
    publisher->hold = true;
    append(p0, "a");
    start();
    advance(100ms);
    {
        const std::lock_guard lock(mutex);
        broker.expel(source->inner());
    }
    advance(100ms);
    {
        const std::lock_guard lock(mutex);
        publisher->let_go();
    }
    advance(100ms);
    EXPECT_EQ(committed(p0), 0);
    EXPECT_EQ(counters.in_hand, 0u);
}

TEST_F(CopiesTest, a_stop_waits_for_copies_on_their_way) {
    fails_once();
    append(p0, "a");
    publisher->hold = true;
    start();
    advance(100ms);
    std::atomic<bool> done{false};
    std::thread stopping([&] {
        consumer->stop();
        done = true;
    });
    until([&] { return condition() == "stopped"; });
    round();
    EXPECT_FALSE(done);
    {
        const std::lock_guard lock(mutex);
        publisher->let_go();
    }
    until([&] { return done.load(); });
    stopping.join();
    EXPECT_EQ(committed(p0), 1);
}

}  // namespace
}  // namespace semel::consumer
