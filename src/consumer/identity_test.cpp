#include "consumer/identity.hpp"

#include <gtest/gtest.h>

#include "base/json_scan.hpp"
#include "inbox/names.hpp"

namespace semel::consumer {
namespace {

using brokers::Header;
using config::ValueFrom;
using config::ValueSpec;

class FakeAssignment final : public brokers::Assignment {
  public:
    using Assignment::Assignment;
};

brokers::AssignmentPtr orders(std::string topic = "orders", std::int32_t number = 3) {
    return std::make_shared<FakeAssignment>(brokers::Partition{std::move(topic), number}, 1);
}

brokers::Delivery delivery(std::optional<std::string_view> value, std::vector<Header> headers = {},
                           std::optional<std::string_view> key = {}, std::int64_t position = 7) {
    return brokers::make_delivery({.assignment = orders(), .position = position}, key, value,
                                  headers);
}

brokers::Delivery amqp(std::string_view value, std::vector<Header> headers = {},
                       brokers::AmqpProperties properties = {}) {
    brokers::Delivery out = delivery(value, std::move(headers));
    out.properties = std::make_unique<brokers::AmqpProperties>(std::move(properties));
    return out;
}

/// What identify says, with the delivery back in either case.
struct Told {
    Identified what;
    brokers::Delivery rest;

    [[nodiscard]] const Message& message() const {
        static const Message none;
        const auto* one = std::get_if<std::unique_ptr<Message>>(&what);
        EXPECT_NE(one, nullptr) << "refused: " << reason();
        return one == nullptr ? none : **one;
    }
    [[nodiscard]] std::string reason() const {
        const auto* one = std::get_if<Unreadable>(&what);
        return one == nullptr ? std::string() : one->reason;
    }
    /// The class, "skipped" or "identified".
    [[nodiscard]] std::string outcome() const {
        if (const auto* one = std::get_if<Unreadable>(&what)) return name_of(one->why);
        return std::holds_alternative<Skipped>(what) ? "skipped" : "identified";
    }
};

IdentityRules rules(std::optional<ValueSpec> from = {}) {
    IdentityRules out;
    out.scope = "shop/orders";
    out.id.from = std::move(from);
    return out;
}

Told identify(brokers::Delivery one, IdentityRules by = rules()) {
    Told told;
    told.what = Identity(std::move(by)).identify(std::move(one), told.rest);
    return told;
}

std::string id_of(brokers::Delivery one, IdentityRules by = rules()) {
    return identify(std::move(one), std::move(by)).message().id;
}

TEST(Identity, the_usual_places_are_asked_in_their_order) {
    const std::vector<Header> all{{"id", "debezium"},
                                  {"idempotency-key", "http"},
                                  {"ce_source", "/shop"},
                                  {"ce_id", "event"}};
    const std::span<const Header> headers(all);
    const auto with = [&](std::size_t n) {
        const auto first = headers.first(n);
        return amqp("{}", {first.begin(), first.end()}, {.message_id = "property"});
    };
    EXPECT_EQ(id_of(with(0)), "property");
    EXPECT_EQ(id_of(with(1)), "debezium");
    EXPECT_EQ(id_of(with(2)), "http");
    const Told event = identify(delivery("{}", all));
    EXPECT_EQ(event.message().id, "event");
    EXPECT_EQ(event.message().source, "/shop") << "a CloudEvent's id belongs to its source";
    EXPECT_EQ(event.message().key,
              inbox::key_hash({.scope = "shop/orders", .source = "/shop", .id = "event"}));
    EXPECT_EQ(event.message().lane, 0u);
    EXPECT_EQ(identify(amqp("{}", all)).message().id, "http")
        << "AMQP spells CloudEvents otherwise";
    EXPECT_EQ(identify(amqp("{}", {{"cloudEvents:id", "a"}, {"cloudEvents:source", "s"}}))
                  .message()
                  .source,
              "s");
    EXPECT_EQ(
        identify(amqp("{}", {{"cloudEvents_id", "b"}, {"cloudEvents_source", "t"}})).message().id,
        "b");
    const Told nothing = identify(delivery("{\"id\":\"of no one\"}"));
    EXPECT_EQ(nothing.outcome(), "missing_id");
    EXPECT_NE(nothing.reason().find("Idempotency-Key"), std::string::npos) << nothing.reason();
}

TEST(Identity, a_structured_cloud_event_is_read_from_its_payload) {
    const std::vector<Header> type{{"content-type", "Application/CloudEvents+json; charset=utf-8"}};
    const Told event = identify(delivery(R"({"data":{},"source":"/shop","id":"4\u0031"})", type));
    EXPECT_EQ(event.message().id, "41");
    EXPECT_EQ(event.message().source, "/shop");
    EXPECT_EQ(identify(amqp(R"({"source":"s","id":"1"})", {},
                            {.content_type = "application/cloudevents"}))
                  .message()
                  .id,
              "1");
    EXPECT_EQ(identify(delivery("{", type)).outcome(), "decode");
    EXPECT_EQ(identify(delivery(R"({"source":"","id":"1"})", type)).outcome(), "missing_id");
    EXPECT_EQ(identify(delivery(R"({"source":"s","id":1})", type)).outcome(), "missing_id");
    EXPECT_EQ(identify(delivery(std::nullopt, type)).outcome(), "missing_id");
    const std::vector<Header> batch{{"content-type", "application/cloudevents-batch+json"}};
    EXPECT_EQ(identify(delivery("[]", batch)).outcome(), "missing_id");
    EXPECT_EQ(identify(delivery("{}", {{"ce_id", "1"}})).outcome(), "missing_id") << "no source";
    EXPECT_EQ(identify(delivery("{}", {{"id", "1"}}), rules(ValueSpec{ValueFrom::cloudevents, ""}))
                  .outcome(),
              "missing_id");
}

TEST(Identity, an_idempotency_key_is_the_same_bare_and_quoted) {
    const std::vector<Header> bare{{"Idempotency-Key", "8e03"}},
        quoted{{"Idempotency-Key", "\"8e03\""}};
    EXPECT_EQ(identify(delivery("1", bare)).message().key,
              identify(delivery("1", quoted)).message().key);
    EXPECT_EQ(id_of(delivery("1", {{"Idempotency-Key", R"("a\"b\\c")"}})), "a\"b\\c");
    const IdentityRules explicitly = rules(ValueSpec{ValueFrom::header, "Idempotency-Key"});
    EXPECT_EQ(id_of(delivery("1", quoted), explicitly), "8e03");
    EXPECT_EQ(id_of(delivery("1", {{"x", "\"8e03\""}}), rules(ValueSpec{ValueFrom::header, "x"})),
              "\"8e03\"");
    for (const char* broken : {"\"", "\"a", "\"a\"b", "\"a\\\"", R"("\x")", "\"\"", "\"a\"b\""})
        EXPECT_EQ(identify(delivery("1", {{"Idempotency-Key", broken}})).outcome(), "missing_id")
            << broken;
}

TEST(Identity, a_header_that_contradicts_itself_names_no_message) {
    EXPECT_EQ(id_of(delivery("1", {{"id", "a"}, {"id", "a"}})), "a");
    const Told twice = identify(delivery("1", {{"id", "a"}, {"x", "y"}, {"id", "b"}}));
    EXPECT_EQ(twice.outcome(), "missing_id");
    EXPECT_NE(twice.reason().find("`id`"), std::string::npos) << twice.reason();
    EXPECT_EQ(identify(delivery("1", {{"id", "a"}, {"id", std::nullopt}})).outcome(), "missing_id");
    EXPECT_EQ(
        identify(delivery("1", {{"Idempotency-Key", "a"}, {"idempotency-key", "b"}})).outcome(),
        "missing_id");
    EXPECT_EQ(id_of(delivery("1", {{"Idempotency-Key", "a"}, {"idempotency-key", "\"a\""}})), "a");
    EXPECT_EQ(
        identify(delivery("1", {{"ce_id", "a"}, {"ce_id", "b"}, {"ce_source", "s"}})).outcome(),
        "missing_id");
    EXPECT_EQ(
        identify(delivery("1", {{"ce_id", "a"}, {"ce_source", "s"}, {"ce_source", "t"}})).outcome(),
        "missing_id");
}

TEST(Identity, empty_and_oversized_ids_are_refused_and_never_cut) {
    const std::string most(inbox::message_id_max_bytes, 'x');
    EXPECT_EQ(id_of(delivery("1", {{"id", most}})), most);
    const Told longer = identify(delivery("1", {{"id", most + "x"}}));
    EXPECT_EQ(longer.outcome(), "missing_id");
    EXPECT_NE(longer.reason().find("1025 bytes"), std::string::npos) << longer.reason();
    EXPECT_EQ(identify(delivery("1", {{"id", std::string(1 << 20, 'x')}})).outcome(), "missing_id");
    EXPECT_EQ(identify(delivery("1", {{"id", ""}})).outcome(), "missing_id");
    EXPECT_EQ(identify(delivery("1", {{"id", std::nullopt}})).outcome(), "missing_id");
    const IdentityRules by_key = rules(ValueSpec{ValueFrom::key, ""});
    EXPECT_EQ(identify(delivery("1", {}, std::nullopt), by_key).outcome(), "missing_id");
    EXPECT_EQ(identify(delivery("1", {}, ""), by_key).outcome(), "missing_id");
    EXPECT_EQ(id_of(delivery("1", {}, std::string_view("\0k", 2)), by_key), std::string("\0k", 2));
    const std::string source(256, 's');
    EXPECT_EQ(identify(delivery("1", {{"ce_id", "a"}, {"ce_source", source}})).outcome(),
              "missing_id");
    EXPECT_EQ(identify(delivery("1", {{"id", "a"}, {original_source_header, source}})).outcome(),
              "missing_id");
}

TEST(Identity, ids_in_json_are_strings_and_integers) {
    const auto at = [](std::string_view value) {
        const std::string text = "{\"a\":{\"id\":" + std::string(value) + "}}";
        return identify(delivery(text), rules(ValueSpec{ValueFrom::json, "/a/id"}));
    };
    EXPECT_EQ(at("\"x\\u00e9\"").message().id, "x\xc3\xa9");
    EXPECT_EQ(at(" 42 ").message().id, "42");
    EXPECT_EQ(at("-123456789012345678901234567890").message().id,
              "-123456789012345678901234567890");
    for (const char* none : {"null", "true", "1.0", "1e3", "{}", "[1]", "\"\""})
        EXPECT_EQ(at(none).outcome(), "missing_id") << none;
    const IdentityRules by = rules(ValueSpec{ValueFrom::json, "/id"});
    EXPECT_EQ(identify(delivery("{\"ID\":1}"), by).outcome(), "missing_id");
    EXPECT_EQ(identify(delivery("{\"id\":1"), by).outcome(), "decode");
    EXPECT_EQ(identify(delivery(""), by).outcome(), "decode") << "empty is not a tombstone";
    EXPECT_EQ(identify(delivery(std::nullopt), by).outcome(), "missing_id");
    const Told framed = identify(delivery(std::string_view("\0\0\0\1\x2c{\"id\":1}", 13)), by);
    EXPECT_EQ(framed.outcome(), "decode");
    EXPECT_NE(framed.reason().find("schema 300"), std::string::npos) << framed.reason();
    EXPECT_EQ(framed.rest.value->size(), 13u) << "the delivery is given back whole";
}

TEST(Identity, an_id_in_a_header_needs_no_payload_that_can_be_read) {
    const Told broken = identify(delivery("{broken", {{"id", "a"}}));
    EXPECT_EQ(broken.message().id, "a");
    EXPECT_FALSE(broken.message().fingerprint.raw.empty());
    EXPECT_TRUE(broken.message().fingerprint.canonical.empty());
    IdentityRules members = rules();
    members.id.fingerprint_members = {"/amount"};
    EXPECT_EQ(identify(delivery("{broken", {{"id", "a"}}), members).outcome(), "decode");
    IdentityRules business = rules();
    business.business_key = ValueSpec{ValueFrom::json, "/orderNo"};
    EXPECT_EQ(identify(delivery("{broken", {{"id", "a"}}), business).outcome(), "decode");
    EXPECT_EQ(
        identify(delivery("{\"orderNo\":17}", {{"id", "a"}}), business).message().business_key,
        "17");
    EXPECT_EQ(
        identify(delivery("{\"orderNo\":{}}", {{"id", "a"}}), business).message().business_key, "");
    EXPECT_EQ(identify(delivery(std::nullopt, {{"id", "a"}}), business).message().business_key, "");
}

TEST(Identity, each_rule_for_missing_ids_and_tombstones_is_followed) {
    IdentityRules by = rules();
    const auto missing = [&](config::OnMissingId rule, brokers::Delivery one) {
        by.id.on_missing = rule;
        return identify(std::move(one), by);
    };
    EXPECT_EQ(missing(config::OnMissingId::dead_letter, delivery("1")).outcome(), "missing_id");
    const Told skipped = missing(config::OnMissingId::skip, delivery("1"));
    ASSERT_EQ(skipped.outcome(), "skipped");
    EXPECT_EQ(std::get<Skipped>(skipped.what).rule, "on_missing_id: skip");
    EXPECT_EQ(skipped.rest.value, "1");
    by.id.source = "everywhere";
    const Told offset = missing(config::OnMissingId::offset, delivery("1"));
    EXPECT_EQ(offset.message().id, "orders-3-7");
    EXPECT_EQ(offset.message().source, "orders") << "a position is of its topic alone";
    EXPECT_EQ(missing(config::OnMissingId::offset, delivery("1", {{"id", std::string(2000, 'x')}}))
                  .message()
                  .id,
              "orders-3-7");
    EXPECT_EQ(missing(config::OnMissingId::offset, delivery("1", {{"id", "a"}})).message().id, "a");
    // Tags of a queue begin anew: as ids they would make strangers duplicates.
    EXPECT_EQ(missing(config::OnMissingId::offset, amqp("1")).outcome(), "missing_id");
    EXPECT_EQ(identify(amqp("1"), rules(ValueSpec{ValueFrom::offset, ""})).outcome(), "missing_id");

    by = rules();
    const auto tombstone = [&](config::OnTombstone rule) {
        by.id.on_tombstone = rule;
        return identify(delivery(std::nullopt, {{"id", "a"}}), by);
    };
    const Told delivered = tombstone(config::OnTombstone::deliver);
    EXPECT_FALSE(delivered.message().delivery.value.has_value());
    EXPECT_EQ(tombstone(config::OnTombstone::dead_letter).outcome(), "tombstone");
    EXPECT_EQ(tombstone(config::OnTombstone::skip).outcome(), "skipped");
    EXPECT_EQ(identify(delivery("", {{"id", "a"}}), by).outcome(), "identified")
        << "null is not empty";
    EXPECT_FALSE(delivered.message().fingerprint.matches(
        identify(delivery("", {{"id", "a"}})).message().fingerprint));
    EXPECT_TRUE(delivered.message().fingerprint.matches(
        identify(delivery(std::nullopt, {{"id", "a"}})).message().fingerprint));
}

TEST(Identity, the_source_is_the_original_topic_unless_ids_are_unique_everywhere) {
    EXPECT_EQ(identify(delivery("1", {{"id", "a"}})).message().source, "orders");
    EXPECT_EQ(
        identify(delivery("1", {{"id", "a"}, {original_source_header, "first"}})).message().source,
        "first");
    EXPECT_EQ(identify(delivery("1", {{"id", "a"}, {original_source_header, ""}})).message().source,
              "orders");
    EXPECT_EQ(identify(delivery("1", {{"id", "a"},
                                      {original_source_header, "x"},
                                      {original_source_header, "y"}}))
                  .outcome(),
              "missing_id");
    IdentityRules constant = rules();
    constant.id.source = "everywhere";
    EXPECT_EQ(identify(delivery("1", {{"id", "a"}, {original_source_header, "first"}}), constant)
                  .message()
                  .source,
              "everywhere");
    EXPECT_EQ(identify(delivery("1", {{"ce_id", "a"}, {"ce_source", "/shop"}}), constant)
                  .message()
                  .source,
              "/shop");
}

core::Fingerprint print_of(std::string_view payload, const IdentityRules& by = rules()) {
    return identify(delivery(payload, {{"id", "a"}}), by).message().fingerprint;
}

TEST(Identity, the_fingerprint_sees_values_and_not_their_layout) {
    EXPECT_TRUE(print_of(R"({"a":1,"b":[2]})").matches(print_of(R"( {"b": [2], "a":1} )")));
    EXPECT_FALSE(print_of(R"({"a":1})").matches(print_of(R"({"a":2})")));
    EXPECT_TRUE(print_of("no json").matches(print_of("no json")));
    EXPECT_FALSE(print_of("no json").matches(print_of("no jsoN")));
    EXPECT_TRUE(print_of(R"({"a":1,"a":2})").canonical.empty())
        << "what it means depends on who reads it";
    IdentityRules bytes = rules();
    bytes.payload = config::Payload::bytes;
    EXPECT_FALSE(print_of(R"({"a":1,"b":2})", bytes).matches(print_of(R"({"b":2,"a":1})", bytes)));
    IdentityRules none = rules();
    none.id.fingerprint = false;
    EXPECT_TRUE(print_of("1", none).matches(print_of("2", none)));
    EXPECT_FALSE(print_of("1", none).raw.empty());
}

TEST(Identity, named_members_alone_decide_what_is_the_same) {
    IdentityRules by = rules();
    by.id.fingerprint_members = {"/order", "/lines/0/sku"};
    const core::Fingerprint first =
        print_of(R"({"order":{"a":1,"b":2},"lines":[{"sku":"x"}],"sent":1})", by);
    EXPECT_TRUE(first.matches(
        print_of(R"({"sent":2,"lines":[{"sku":"x","n":3}],"order":{"b":2,"a":1}})", by)));
    EXPECT_FALSE(first.matches(print_of(R"({"order":{"a":1,"b":2},"lines":[{"sku":"y"}]})", by)));
    EXPECT_FALSE(first.matches(print_of(R"({"order":{"a":1,"b":2},"lines":[]})", by)));
    EXPECT_FALSE(print_of(R"({"order":null})", by).matches(print_of(R"({})", by)))
        << "null is there";
    // What one member loses, the next must not gain.
    EXPECT_FALSE(
        print_of(R"({"order":"x"})", by).matches(print_of(R"({"lines":[{"sku":"x"}]})", by)));
}

TEST(Identity, an_unreadable_delivery_is_named_by_its_place_or_in_a_queue_by_its_content) {
    EXPECT_EQ(Identity::key_of_position(delivery("x")), Identity::key_of_position(delivery("y")));
    EXPECT_NE(Identity::key_of_position(delivery("x")),
              Identity::key_of_position(delivery("x", {}, {}, 8)));
    brokers::Delivery again = amqp("x");
    again.receipt.position = 99;
    EXPECT_EQ(Identity::key_of_position(amqp("x")), Identity::key_of_position(again));
    EXPECT_NE(Identity::key_of_position(amqp("x")), Identity::key_of_position(amqp("y")));
}

TEST(Pointer, rfc_6901_section_5) {
    const std::string_view json =
        R"({"foo":["bar","baz"],"":0,"a/b":1,"c%d":2,"e^f":3,"g|h":4,"i\\j":5,"k\"l":6," ":7,"m~n":8})";
    EXPECT_EQ(at_pointer(json, ""), json);
    EXPECT_EQ(at_pointer(json, "/foo"), R"(["bar","baz"])");
    EXPECT_EQ(at_pointer(json, "/foo/0"), "\"bar\"");
    EXPECT_EQ(at_pointer(json, "/"), "0");
    EXPECT_EQ(at_pointer(json, "/a~1b"), "1");
    EXPECT_EQ(at_pointer(json, "/c%d"), "2");
    EXPECT_EQ(at_pointer(json, "/e^f"), "3");
    EXPECT_EQ(at_pointer(json, "/g|h"), "4");
    EXPECT_EQ(at_pointer(json, "/i\\j"), "5");
    EXPECT_EQ(at_pointer(json, "/k\"l"), "6");
    EXPECT_EQ(at_pointer(json, "/ "), "7");
    EXPECT_EQ(at_pointer(json, "/m~0n"), "8");
}

TEST(Pointer, what_is_not_there_is_not_found) {
    const std::string_view json =
        R"({"a":[1,{"b":null,"\u0063":2}],"0":"zero","~1":3,"d":4,"d":5})";
    EXPECT_EQ(at_pointer(json, "/a/1/b"), "null");
    EXPECT_EQ(at_pointer(json, "/a/1/c"), "2") << "names count as they are decoded";
    EXPECT_EQ(at_pointer(json, "/0"), "\"zero\"");
    EXPECT_EQ(at_pointer(json, "/~01"), "3");
    EXPECT_EQ(at_pointer(json, "/d"), "5") << "as most parsers take it";
    for (const char* none :
         {"/a/2", "/a/-", "/a/01", "/a/+1", "/a/1e0", "/a/", "/a/4294967296",
          "/a/18446744073709551617", "/a/1/b/c", "/0/0", "/b", "/a/0/0", "a", "/~2", "/~"})
        EXPECT_EQ(at_pointer(json, none), std::nullopt) << none;
    EXPECT_EQ(at_pointer("{\"a\":1", "/a"), std::nullopt) << "what is broken is not searched";
    EXPECT_EQ(at_pointer("{\"a\":1}}", "/a"), std::nullopt);
    EXPECT_EQ(at_pointer(" 7\n", ""), "7");
    EXPECT_EQ(at_pointer("seven", ""), std::nullopt);
    EXPECT_EQ(at_pointer("", ""), std::nullopt);
    EXPECT_EQ(at_pointer(" [ 1 ,2]", "/1"), "2");
}

TEST(Extract, a_value_is_what_the_handlers_parameter_sees) {
    const brokers::Delivery one = delivery(R"({"s":"a\nb","n":1.50,"t":true,"z":null,"o":{}})",
                                           {{"h", "v"}, {"e", ""}, {"n", std::nullopt}}, "k");
    const auto value = [&](ValueFrom from, std::string name) {
        return extract(one, {from, std::move(name)});
    };
    const auto text = [&](ValueFrom from, std::string name) {
        const auto found = value(from, std::move(name));
        const auto* is = std::get_if<Extracted>(&found);
        return is != nullptr ? is->text : std::optional<std::string>("error");
    };
    EXPECT_EQ(text(ValueFrom::json, "/s"), "a\nb");
    EXPECT_EQ(text(ValueFrom::json, "/n"), "1.50");
    EXPECT_TRUE(std::get<Extracted>(value(ValueFrom::json, "/n")).number);
    EXPECT_TRUE(std::get<Extracted>(value(ValueFrom::json, "/t")).boolean);
    EXPECT_EQ(text(ValueFrom::json, "/z"), std::nullopt);
    EXPECT_EQ(text(ValueFrom::json, "/missing"), std::nullopt);
    EXPECT_TRUE(std::holds_alternative<ExtractError>(value(ValueFrom::json, "/o")));
    EXPECT_TRUE(std::holds_alternative<ExtractError>(value(ValueFrom::json, "")));
    EXPECT_EQ(text(ValueFrom::header, "h"), "v");
    EXPECT_EQ(text(ValueFrom::header, "H"), std::nullopt) << "names are bytes";
    EXPECT_EQ(text(ValueFrom::header, "e"), "");
    EXPECT_EQ(text(ValueFrom::header, "n"), std::nullopt);
    EXPECT_EQ(text(ValueFrom::key, ""), "k");
    EXPECT_EQ(text(ValueFrom::constant, "c"), "c");
    EXPECT_EQ(text(ValueFrom::property, "message-id"), std::nullopt);
    EXPECT_TRUE(std::holds_alternative<ExtractError>(value(ValueFrom::offset, "")));
    const auto twice = extract(delivery("1", {{"h", "a"}, {"h", "b"}}), {ValueFrom::header, "h"});
    EXPECT_TRUE(std::holds_alternative<ExtractError>(twice));
    EXPECT_TRUE(
        std::holds_alternative<ExtractError>(extract(delivery("{"), {ValueFrom::json, "/a"})));
    EXPECT_EQ(std::get<Extracted>(extract(delivery(std::nullopt), {ValueFrom::json, "/a"})).text,
              std::nullopt);
    const brokers::Delivery queued =
        amqp("1", {}, {.message_id = "m", .app_id = "app", .routing_key = "r"});
    EXPECT_EQ(std::get<Extracted>(extract(queued, {ValueFrom::property, "app-id"})).text, "app");
    EXPECT_EQ(std::get<Extracted>(extract(queued, {ValueFrom::property, "routing-key"})).text, "r");
    EXPECT_EQ(std::get<Extracted>(extract(queued, {ValueFrom::property, "type"})).text,
              std::nullopt);
}

}  // namespace
}  // namespace semel::consumer
