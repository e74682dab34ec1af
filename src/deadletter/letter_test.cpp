#include "deadletter/letter.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "base/json_scan.hpp"
#include "deadletter/cause.hpp"
#include "deadletter/envelope.hpp"
#include "deadletter/outlet.hpp"

namespace semel::deadletter {
namespace {

using brokers::Header;
using brokers::Outgoing;

class FakeAssignment final : public brokers::Assignment {
  public:
    using Assignment::Assignment;
};

brokers::Delivery delivery(std::optional<std::string_view> value, std::vector<Header> headers = {},
                           std::optional<std::string_view> key = {}, std::string topic = "orders") {
    auto assignment = std::make_shared<FakeAssignment>(brokers::Partition{std::move(topic), 3}, 1);
    return brokers::make_delivery({.assignment = std::move(assignment), .position = 258}, key,
                                  value, headers);
}

brokers::Delivery amqp(std::string_view value, std::vector<Header> headers,
                       brokers::AmqpProperties properties) {
    brokers::Delivery out = delivery(value, std::move(headers));
    out.properties = std::make_unique<brokers::AmqpProperties>(std::move(properties));
    return out;
}

Circumstances about() {
    return {.consumer = "billing",
            .group = "shop",
            .message_id = "m-1",
            .key = base::sha256("key"),
            .generation = 2,
            .error_class = "fatal",
            .error_message = "order 17 is closed",
            .stack_trace = {},
            .failed_runs = 3,
            .died_ms = 1'769'860'800'123,
            .first_failure_ms = 1'769'860'700'000};
}

std::optional<std::string> header(const Outgoing& letter, std::string_view name) {
    std::optional<std::string> found;
    for (const auto& one : letter.headers) {
        if (one.name != name) continue;
        EXPECT_FALSE(found.has_value()) << name << " is there twice";
        found = one.value.value_or("<null>");
    }
    return found;
}

std::size_t headers_size(const Outgoing& letter) {
    std::size_t size = 0;
    for (const auto& one : letter.headers)
        size += one.name.size() + 6 + (one.value ? one.value->size() : 0);
    return size;
}

/// The letter as it would be delivered.
brokers::Delivery received(const Outgoing& letter, std::string topic) {
    std::vector<Header> headers;
    for (const auto& one : letter.headers) {
        headers.push_back({.name = one.name, .value = {}});
        if (one.value) headers.back().value = *one.value;
    }
    std::optional<std::string_view> key, value;
    if (letter.key) key = *letter.key;
    if (letter.value) value = *letter.value;
    return delivery(value, std::move(headers), key, std::move(topic));
}

TEST(Letter, says_what_happened_in_headers_and_leaves_the_rest_alone) {
    brokers::Delivery one =
        delivery("{\"a\":1}", {{"trace", "t"}, {"trace", std::nullopt}, {"", "\xff"}}, "k");
    one.timestamp_ms = 0x0102030405;
    const Outgoing letter = make_letter(one, about(), {});
    EXPECT_EQ(letter.value, "{\"a\":1}");
    EXPECT_EQ(letter.key, "k");
    EXPECT_EQ(letter.topic, "");
    EXPECT_FALSE(letter.partition.has_value());
    EXPECT_FALSE(letter.timestamp_ms.has_value()) << "an old time would end its retention at once";
    ASSERT_GE(letter.headers.size(), 3u);
    EXPECT_EQ(letter.headers[0].value, "t");
    EXPECT_EQ(letter.headers[1].value, std::nullopt);
    EXPECT_EQ(letter.headers[2].value, "\xff");
    const std::map<std::string, std::string> expected{
        {"semel-letter-id", base::base64url(base::sha256("key").view()) + ".2"},
        {"semel-consumer", "billing"},
        {"semel-group", "shop"},
        {"semel-message-id", "m-1"},
        {"semel-generation", "2"},
        {"semel-original-source", "orders"},
        {"semel-original-topic", "orders"},
        {"semel-original-partition", "3"},
        {"semel-original-offset", "258"},
        {"semel-original-timestamp", "4328719365"},
        {"semel-original-key", "k"},
        {"semel-error-class", "fatal"},
        {"semel-error-message", "order 17 is closed"},
        {"semel-error-fingerprint", fingerprint_of("fatal", "order 17 is closed")},
        {"semel-failed-runs", "3"},
        {"semel-first-failure-time", "2026-01-31T11:58:20.000Z"},
        {"semel-died-at", "2026-01-31T12:00:00.123Z"},
        {"kafka_dlt-original-topic", "orders"},
        {"kafka_dlt-original-partition", std::string("\0\0\0\3", 4)},
        {"kafka_dlt-original-offset", std::string("\0\0\0\0\0\0\1\2", 8)},
        {"kafka_dlt-original-timestamp", std::string("\0\0\0\1\2\3\4\5", 8)},
        {"kafka_dlt-original-consumer-group", "shop"},
        {"kafka_dlt-exception-fqcn", "semel.fatal"},
        {"kafka_dlt-exception-message", "order 17 is closed"}};
    for (const auto& [name, value] : expected) EXPECT_EQ(header(letter, name), value) << name;
    EXPECT_EQ(letter.headers.size(), expected.size() + 3);

    const Outgoing plain = make_letter(one, about(), {.headers = config::LetterHeaders::none});
    EXPECT_TRUE(std::none_of(plain.headers.begin(), plain.headers.end(),
                             [](const auto& h) { return h.name.starts_with("kafka_dlt-"); }));
    const Outgoing tombstone = make_letter(delivery(std::nullopt), about(), {});
    EXPECT_FALSE(tombstone.value.has_value());
    EXPECT_FALSE(tombstone.key.has_value());
    EXPECT_EQ(make_letter(delivery(""), about(), {}).value, "");
}

TEST(Letter, the_same_death_gives_the_same_letter_and_another_generation_another_id) {
    const brokers::Delivery one = delivery("x", {{"a", "b"}}, "k");
    const Outgoing first = make_letter(one, about(), {}), again = make_letter(one, about(), {});
    ASSERT_EQ(first.headers.size(), again.headers.size());
    for (std::size_t i = 0; i < first.headers.size(); ++i) {
        EXPECT_EQ(first.headers[i].name, again.headers[i].name);
        EXPECT_EQ(first.headers[i].value, again.headers[i].value);
    }
    Circumstances later = about();
    later.generation = 3;
    EXPECT_NE(header(first, "semel-letter-id"),
              header(make_letter(one, later, {}), "semel-letter-id"));
}

TEST(Letter, bytes_that_are_no_text_are_told_in_base64) {
    Circumstances circumstances = about();
    circumstances.message_id = "\xff\x01";
    const Outgoing letter = make_letter(delivery("x", {}, "\xfe"), circumstances, {});
    EXPECT_EQ(header(letter, "semel-message-id"), "/wE=");
    EXPECT_EQ(header(letter, "semel-message-id-encoding"), "base64");
    EXPECT_EQ(header(letter, "semel-original-key"), "/g==");
    EXPECT_EQ(header(letter, "semel-original-key-encoding"), "base64");
    const Outgoing large = make_letter(delivery("x", {}, std::string(2000, 'k')), about(), {});
    EXPECT_EQ(large.key->size(), 2000u);
    EXPECT_EQ(header(large, "semel-original-key"), std::nullopt);
}

TEST(Letter, a_second_death_replaces_what_is_said_and_keeps_where_it_came_from) {
    for (const auto family : {config::LetterHeaders::spring, config::LetterHeaders::none}) {
        const Form form{.headers = family};
        const Outgoing first =
            make_letter(delivery("x", {{"mine", "1"}, {"semel-mine", "2"}}, "k"), about(), form);
        Circumstances later = about();
        later.consumer = "redrive";
        later.group = "other";
        later.error_class = "attempts";
        later.error_message = "again";
        later.generation = 3;
        later.first_failure_ms += 1000;
        Outgoing letter = first;
        for (int deaths = 0; deaths < 3; ++deaths)
            letter = make_letter(received(letter, "orders.redrive"), later, form);
        EXPECT_EQ(letter.headers.size(), first.headers.size());
        EXPECT_EQ(header(letter, "mine"), "1");
        EXPECT_EQ(header(letter, "semel-mine"), "2") << "only our own names are replaced";
        for (const char* kept :
             {"semel-original-topic", "semel-original-partition", "semel-original-offset",
              "semel-original-key", "semel-original-source", "semel-first-failure-time",
              "kafka_dlt-original-topic", "kafka_dlt-original-offset",
              "kafka_dlt-original-consumer-group"})
            EXPECT_EQ(header(letter, kept), header(first, kept)) << kept;
        EXPECT_EQ(header(letter, "semel-consumer"), "redrive");
        EXPECT_EQ(header(letter, "semel-error-class"), "attempts");
        EXPECT_EQ(header(letter, "semel-error-message"), "again");
        if (family == config::LetterHeaders::spring) {
            EXPECT_EQ(header(letter, "kafka_dlt-exception-message"), "again");
        }
    }
    // Somebody else's dead letter topic, read by us: what Spring said is the message's own if we
    // write no such headers.
    const std::vector<Header> theirs{{"kafka_dlt-exception-message", "theirs"},
                                     {"kafka_dlt-original-topic", "first"}};
    EXPECT_EQ(header(make_letter(delivery("x", theirs), about(),
                                 {.headers = config::LetterHeaders::none}),
                     "kafka_dlt-exception-message"),
              "theirs");
    const Outgoing ours = make_letter(delivery("x", theirs), about(), {});
    EXPECT_EQ(header(ours, "kafka_dlt-exception-message"), "order 17 is closed");
    EXPECT_EQ(header(ours, "kafka_dlt-original-topic"), "first");
    EXPECT_EQ(header(ours, "kafka_dlt-original-offset"), std::nullopt)
        << "not half of one death and half of another";
}

TEST(Letter, a_delayed_copy_dies_where_its_original_lay) {
    const brokers::Delivery copy = delivery("{}",
                                            {{"semel-original-source", "orders"},
                                             {"semel-original-topic", "orders"},
                                             {"semel-original-timestamp", "77"},
                                             {"semel-original-partition", "1"},
                                             {"semel-original-offset", "9"},
                                             {"semel-copy-of", "orders-1-9"},
                                             {"semel-due-timestamp", "5"}},
                                            "k", "orders.shop.retry.1m");
    const Outgoing letter = make_letter(copy, about(), {});
    EXPECT_EQ(header(letter, "semel-original-topic"), "orders");
    EXPECT_EQ(header(letter, "semel-original-partition"), "1");
    EXPECT_EQ(header(letter, "semel-original-offset"), "9");
    EXPECT_EQ(header(letter, "kafka_dlt-original-topic"), "orders");
    EXPECT_EQ(header(letter, "kafka_dlt-original-partition"), std::string("\0\0\0\1", 4));
    EXPECT_EQ(header(letter, "kafka_dlt-original-offset"), std::string("\0\0\0\0\0\0\0\x9", 8));
    EXPECT_EQ(header(letter, "kafka_dlt-original-timestamp"), std::string("\0\0\0\0\0\0\0M", 8));
    EXPECT_EQ(header(letter, "semel-copy-of"), std::nullopt) << "of one copy alone";
    EXPECT_EQ(header(letter, "semel-due-timestamp"), std::nullopt);
    const std::string envelope = make_envelope(copy, about(), "e", "");
    for (const char* member : {"\"originalTopic\":\"orders\"", "\"originalPartition\":1",
                               "\"originalOffset\":9", "\"originalTimestamp\":77"})
        EXPECT_NE(envelope.find(member), std::string::npos) << member << " in " << envelope;
}

TEST(Letter, the_stack_trace_is_cut_first_then_the_message_then_headers_from_the_end) {
    Circumstances circumstances = about();
    circumstances.stack_trace = std::string(100'000, 's');
    circumstances.error_message = std::string(100'000, 'm');
    const Outgoing roomy = make_letter(delivery("x"), circumstances, {});
    EXPECT_EQ(header(roomy, "semel-stack-trace")->size(), letter_stack_trace_max_bytes);
    EXPECT_EQ(header(roomy, "kafka_dlt-exception-stacktrace"), header(roomy, "semel-stack-trace"));
    EXPECT_EQ(header(roomy, "semel-error-message")->size(), letter_error_message_max_bytes);
    EXPECT_EQ(header(roomy, "semel-cut"), "stack-trace, error-message");
    EXPECT_LE(headers_size(roomy), letter_headers_max_bytes);

    const auto with = [&](std::size_t each) {
        const std::string value(each, 'h');
        const Outgoing letter =
            make_letter(delivery("x", {{"first", value}, {"second", value}, {"third", "3"}}),
                        circumstances, {});
        EXPECT_LE(headers_size(letter), letter_headers_max_bytes);
        return letter;
    };
    const Outgoing tight = with(15'000);
    EXPECT_EQ(header(tight, "semel-error-message")->size(), letter_error_message_max_bytes);
    EXPECT_LT(header(tight, "semel-stack-trace")->size(), 6'000u);
    EXPECT_EQ(header(tight, "third"), "3");
    const Outgoing tighter = with(22'500);
    EXPECT_EQ(header(tighter, "semel-stack-trace"), std::nullopt);
    EXPECT_LT(header(tighter, "semel-error-message")->size(), 2'000u);
    EXPECT_EQ(header(tighter, "third"), "3");
    const Outgoing tightest = with(30'000);
    EXPECT_EQ(header(tightest, "semel-error-message")->size(), 256u) << "a reason stays";
    EXPECT_EQ(header(tightest, "first")->size(), 30'000u);
    EXPECT_EQ(header(tightest, "second"), std::nullopt);
    EXPECT_EQ(header(tightest, "third"), std::nullopt);
    EXPECT_EQ(header(tightest, "semel-cut"), "stack-trace, error-message, headers=2");
    EXPECT_EQ(header(tightest, "semel-original-topic"), "orders") << "ours are never cut";
    const Outgoing second = make_letter(received(tightest, "orders.redrive"), circumstances, {});
    EXPECT_EQ(header(second, "semel-original-topic"), "orders")
        << "nor are those of the first death";
    EXPECT_EQ(header(second, "kafka_dlt-original-topic"), "orders");
    brokers::Delivery crowded = received(tightest, "orders.redrive");
    const std::string large(40'000, 'l');
    crowded.headers.insert(crowded.headers.begin(), {.name = "large", .value = large});
    const Outgoing crowd = make_letter(crowded, circumstances, {});
    EXPECT_LE(headers_size(crowd), letter_headers_max_bytes);
    EXPECT_EQ(header(crowd, "semel-original-topic"), "orders");
    EXPECT_EQ(header(crowd, "kafka_dlt-original-offset")->size(), 8u);
    EXPECT_EQ(header(crowd, "first"), std::nullopt);
    EXPECT_EQ(header(crowd, "large")->size(), large.size());

    circumstances.error_message = "\xe2\x82\xac";
    while (circumstances.error_message.size() <= letter_error_message_max_bytes)
        circumstances.error_message += "\xe2\x82\xac";
    EXPECT_TRUE(
        is_utf8(*header(make_letter(delivery("x"), circumstances, {}), "semel-error-message")));
}

TEST(Letter, on_rabbitmq_nothing_steers_the_letter_that_was_meant_for_the_message) {
    const brokers::Delivery one = amqp(
        "x", {{"x-death", "[]"}, {"x-delivery-count", "3"}, {"CC", "[\"orders\"]"}, {"h", "v"}},
        {.message_id = "m-1",
         .content_type = "text/plain",
         .correlation_id = "c",
         .type = "t",
         .app_id = "app",
         .user_id = "alice",
         .expiration = "60000",
         .priority = std::uint8_t{4},
         .exchange = "ex",
         .routing_key = "rk"});
    const Form form{.kafka = false};
    const Outgoing letter = make_letter(one, about(), form);
    EXPECT_EQ(letter.properties.message_id, "m-1");
    EXPECT_EQ(letter.properties.content_type, "text/plain");
    EXPECT_EQ(letter.properties.correlation_id, "c");
    EXPECT_EQ(letter.properties.app_id, "app");
    EXPECT_EQ(letter.properties.priority, 4);
    EXPECT_EQ(letter.properties.user_id, "") << "the broker refuses another user's name";
    EXPECT_EQ(letter.properties.expiration, "") << "the letter would expire";
    EXPECT_EQ(letter.properties.exchange, "");
    EXPECT_EQ(letter.properties.routing_key, "");
    EXPECT_EQ(header(letter, "semel-original-user-id"), "alice");
    EXPECT_EQ(header(letter, "semel-original-expiration"), "60000");
    EXPECT_EQ(header(letter, "semel-original-exchange"), "ex");
    EXPECT_EQ(header(letter, "semel-original-routing-key"), "rk");
    EXPECT_EQ(header(letter, "CC"), std::nullopt)
        << "the broker refuses it as text, and would follow it otherwise";
    EXPECT_EQ(header(letter, "semel-original-CC"), "[\"orders\"]");
    EXPECT_EQ(header(letter, "x-death"), "[]");
    EXPECT_EQ(header(letter, "x-delivery-count"), std::nullopt);
    EXPECT_EQ(header(letter, "h"), "v");
    EXPECT_EQ(header(letter, "semel-original-offset"), std::nullopt) << "a tag names nothing later";
    EXPECT_EQ(header(letter, "kafka_dlt-original-topic"), "orders");
    EXPECT_EQ(header(letter, "kafka_dlt-exception-fqcn"), "semel.fatal");
    EXPECT_FALSE(letter.key.has_value());

    const Outgoing nameless = make_letter(amqp("x", {}, {}), about(), form);
    EXPECT_EQ(nameless.properties.message_id, header(nameless, "semel-letter-id"));
    const Outgoing envelope =
        make_letter(one, about(), {.body = config::LetterBody::envelope, .kafka = false});
    EXPECT_EQ(envelope.properties.content_type, "application/json");
    EXPECT_EQ(header(envelope, "semel-original-content-type"), "text/plain");
    EXPECT_EQ(header(envelope, "semel-body"), "envelope");
}

/// Reads an envelope as its readers do.
class Envelope {
  public:
    explicit Envelope(const std::string& text)
        : text_(text),
          members_(base::top_level_members(text_).value_or(std::vector<base::JsonMember>())) {}

    [[nodiscard]] std::string raw(std::string_view name) const {
        return std::string(base::find_member(members_, name).value_or(""));
    }
    [[nodiscard]] std::optional<std::string> bytes(const std::string& name) const {
        const auto text = base::json_string(raw(name));
        return text && raw(name + "Encoding") == "\"base64\"" ? decoded(*text) : text;
    }
    static std::string decoded(const std::string& text) {
        static const std::string digits =
            "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        std::string out;
        std::uint32_t bits = 0, count = 0;
        for (const char c : text.substr(0, text.find('='))) {
            bits = bits << 6 | static_cast<std::uint32_t>(digits.find(c));
            if ((count += 6) >= 8) out += static_cast<char>(bits >> (count -= 8) & 0xff);
        }
        return out;
    }

  private:
    std::string text_;
    std::vector<base::JsonMember> members_;
};

TEST(Letter, the_envelope_has_the_members_that_are_promised) {
    brokers::Delivery one =
        delivery("{\"a\":\"\xc3\xa9\"}", {{"h", "v"}, {"h", std::nullopt}, {"b", "\xff"}}, "k");
    one.timestamp_ms = 5;
    Circumstances circumstances = about();
    circumstances.stack_trace = "at main";
    const Form form{.body = config::LetterBody::envelope};
    const Outgoing letter = make_letter(one, circumstances, form);
    EXPECT_EQ(letter.key, "k");
    EXPECT_EQ(header(letter, "semel-error-class"), "fatal");
    EXPECT_EQ(*letter.value,
              "{\"originalTopic\":\"orders\",\"originalMessage\":\"{\\\"a\\\":\\\"\xc3\xa9\\\"}\","
              "\"errorMessage\":\"order 17 is closed\","
              "\"errorTime\":\"2026-01-31T12:00:00.123Z\",\"retryCount\":3,\"stackTrace\":\"at "
              "main\",\"originalPartition\":3,"
              "\"originalOffset\":258,\"originalKey\":\"k\",\"originalTimestamp\":5,"
              "\"originalHeaders\":[{\"name\":\"h\",\"value\":\"v\"},"
              "{\"name\":\"h\",\"value\":null},{\"name\":\"b\",\"value\":\"/"
              "w==\",\"valueEncoding\":\"base64\"}],\"consumer\":\"billing\","
              "\"group\":\"shop\",\"messageId\":\"m-1\",\"errorClass\":\"fatal\","
              "\"errorFingerprint\":\"" +
                  fingerprint_of("fatal", "order 17 is closed") +
                  "\",\"firstFailureTime\":\"2026-01-31T11:58:20.000Z\"}");
    const Envelope tombstone(*make_letter(delivery(std::nullopt), about(), form).value);
    EXPECT_EQ(tombstone.raw("originalMessage"), "null");
    EXPECT_EQ(tombstone.raw("originalKey"), "null");
    EXPECT_EQ(Envelope(*make_letter(delivery(""), about(), form).value).raw("originalMessage"),
              "\"\"");
}

TEST(Letter, whatever_is_delivered_comes_back_from_its_letter) {
    std::mt19937 random(20260131);
    const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
    const auto any_bytes = [&](std::size_t max) {
        static constexpr std::string_view pieces[] = {
            "a",    "\"",           "\\", "\xc3\xa9", "\xf0\x9f\x92\xb8",
            "\xff", "\xed\xa0\x80", "{}", "\n",       "/"};
        std::string out;
        const bool text = below(2) == 0;
        for (std::size_t n = below(max + 1); n > 0; --n) {
            if (text) {
                out += pieces[below(std::size(pieces))];
            } else {
                out += static_cast<char>(random());
            }
        }
        return out;
    };
    for (int round = 0; round < 3000; ++round) {
        std::optional<std::string> value, key;
        if (below(8) != 0) value = any_bytes(40);
        if (below(3) != 0) key = any_bytes(10);
        std::vector<std::pair<std::string, std::optional<std::string>>> mine;
        for (std::size_t n = below(4); n > 0; --n) {
            mine.emplace_back(any_bytes(5), std::nullopt);
            if (below(5) != 0) mine.back().second = any_bytes(10);
        }
        std::vector<Header> headers;
        for (const auto& [name, content] : mine) {
            headers.push_back({.name = name, .value = {}});
            if (content) headers.back().value = *content;
        }
        std::optional<std::string_view> value_view, key_view;
        if (value) value_view = *value;
        if (key) key_view = *key;
        const brokers::Delivery one = delivery(value_view, headers, key_view);
        Circumstances circumstances = about();
        circumstances.message_id = any_bytes(20);
        circumstances.error_message = any_bytes(200);
        circumstances.stack_trace = any_bytes(200);
        circumstances.died_ms = static_cast<std::int64_t>(random()) << below(33);

        const Outgoing raw = make_letter(one, circumstances,
                                         {.headers = below(2) == 0 ? config::LetterHeaders::spring
                                                                   : config::LetterHeaders::none});
        EXPECT_EQ(raw.value, value);
        EXPECT_EQ(raw.key, key);
        ASSERT_GE(raw.headers.size(), mine.size());
        for (std::size_t i = 0; i < mine.size(); ++i) {
            EXPECT_EQ(raw.headers[i].name, mine[i].first);
            EXPECT_EQ(raw.headers[i].value, mine[i].second);
        }
        const Outgoing letter =
            make_letter(one, circumstances, {.body = config::LetterBody::envelope});
        const Envelope envelope(*letter.value);
        ASSERT_FALSE(envelope.raw("originalTopic").empty()) << "no valid JSON: " << *letter.value;
        EXPECT_EQ(envelope.bytes("originalMessage"), value);
        EXPECT_EQ(envelope.bytes("originalKey"), key);
        const std::string list = envelope.raw("originalHeaders");
        const auto elements = base::array_elements(list);
        ASSERT_EQ(elements->size(), mine.size());
        for (std::size_t i = 0; i < mine.size(); ++i) {
            const Envelope each{std::string((*elements)[i])};
            EXPECT_EQ(each.bytes("name"), mine[i].first);
            EXPECT_EQ(each.bytes("value"), mine[i].second);
        }
        if (HasFailure()) {
            FAIL() << "round " << round;
        }
    }
}

TEST(Cause, failures_that_differ_in_numbers_ids_and_quoted_values_are_one) {
    const auto same = [](std::string_view a, std::string_view b) {
        EXPECT_EQ(fingerprint_of("fatal", a), fingerprint_of("fatal", b))
            << normalized(a) << " | " << normalized(b);
    };
    same("order 17 is closed", "order 18 is closed");
    same("order A-17/x is closed", "order B-9/x is closed");
    same("no user 01890a5d-ac96-774b-bcce-b302099a8057",
         "no user 3f2b8a00-1111-4222-8333-944455556666");
    same("key \"a b\" (1) exists", "key \"\" (2) exists");
    same("column 'x' of `t`", "column 'yy' of `u`");
    same("127.0.0.1:8080 refused  it\n", "10.0.0.9:99 refused it");
    same("took 1.5s", "took 20ms");
    EXPECT_EQ(normalized("it isn't the users' fault, 'x' is"), "it isn't the users' fault, ? is");
    EXPECT_NE(fingerprint_of("fatal", "closed"), fingerprint_of("fatal", "open"));
    EXPECT_NE(fingerprint_of("fatal", "closed"), fingerprint_of("attempts", "closed"));
    EXPECT_TRUE(fingerprint_of("fatal", "").starts_with("fatal:"));
    EXPECT_EQ(fingerprint_of("fatal", "order 17 is closed"), "fatal:2c215502e7728d64")
        << "docs name it";
    const std::string quotes(1 << 20, '"');
    EXPECT_LE(normalized(quotes).size(), letter_error_message_max_bytes);
}

TEST(Rfc3339, moments_without_a_name_are_the_nearest_that_has_one) {
    EXPECT_EQ(rfc3339(0), "1970-01-01T00:00:00.000Z");
    EXPECT_EQ(rfc3339(-1), "1969-12-31T23:59:59.999Z");
    EXPECT_EQ(rfc3339(INT64_MAX), "9999-12-31T23:59:59.999Z");
    EXPECT_EQ(rfc3339(INT64_MIN), "0000-01-01T00:00:00.000Z");
}

class FakePublisher final : public brokers::Publisher {
  public:
    void publish(Outgoing message, brokers::PublishDone done) override {
        published.push_back(std::move(message));
        if (fails) {
            done(base::Error{.code = base::ErrorCode::io,
                             .applied = base::Applied::unknown,
                             .detail = "no answer"});
        } else {
            done(brokers::PublishedAt{});
        }
    }
    bool flush(std::chrono::milliseconds) override { return true; }
    void stop(std::chrono::milliseconds) override {}

    std::vector<Outgoing> published;
    bool fails = false;
};

TEST(Outlet, publishes_to_its_target_what_redaction_has_left) {
    FakePublisher publisher;
    Outlet outlet(publisher, {.topic = "orders.dlq", .exchange = "dlx"}, {.kafka = false},
                  [](Outgoing& letter) { letter.value = "redacted"; });
    EXPECT_EQ(outlet.target().name(), "dlx/orders.dlq");
    std::vector<base::Result<void>> done;
    const auto note = [&](base::Result<void> result) { done.push_back(std::move(result)); };
    outlet.publish(delivery("secret"), about(), note);
    publisher.fails = true;
    outlet.publish(delivery("secret"), about(), note);
    ASSERT_EQ(publisher.published.size(), 2u);
    EXPECT_EQ(publisher.published[0].topic, "orders.dlq");
    EXPECT_EQ(publisher.published[0].properties.exchange, "dlx");
    EXPECT_EQ(publisher.published[0].value, "redacted");
    EXPECT_EQ(header(publisher.published[0], "semel-letter-id"),
              header(publisher.published[1], "semel-letter-id"));
    ASSERT_EQ(done.size(), 2u);
    EXPECT_TRUE(done[0].has_value());
    ASSERT_FALSE(done[1].has_value());
    EXPECT_EQ(done[1].error().applied, base::Applied::unknown);
}

}  // namespace
}  // namespace semel::deadletter
