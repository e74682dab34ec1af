#include "base/json_scan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <boost/json.hpp>
#include <functional>
#include <random>

namespace semel::base {
namespace {

namespace bj = boost::json;
using Random = std::mt19937_64;

std::size_t below(Random& random, std::size_t n) { return random() % n; }

bj::value random_value(Random& random, int depth) {
    static const char* strings[] = {"",     "a",    "hé中🙂", "line\nbreak", "quote\"back\\slash",
                                    "\x01", "user", "123",    "true"};
    switch (below(random, depth > 0 ? 8 : 6)) {
        case 0:
            return nullptr;
        case 1:
            return below(random, 2) == 0;
        case 2:
            return static_cast<std::int64_t>(random()) >> below(random, 63);
        case 3:
            return static_cast<double>(below(random, 1000)) / 8.0 - 50.0;
        case 4:
            return strings[below(random, std::size(strings))];
        case 5:
            return bj::string(below(random, 3) == 0 ? 1100 : below(random, 40),
                              static_cast<char>('a' + below(random, 26)));
        case 6: {
            bj::array array;
            for (std::size_t n = below(random, 5); n > 0; --n)
                array.push_back(random_value(random, depth - 1));
            return array;
        }
        default: {
            bj::object object;
            for (std::size_t n = below(random, 6); n > 0; --n) {
                object[std::string(1 + below(random, 3),
                                   static_cast<char>('a' + below(random, 6)))] =
                    random_value(random, depth - 1);
            }
            return object;
        }
    }
}

bj::object random_object(Random& random) {
    bj::object object;
    for (std::size_t n = 1 + below(random, 6); n > 0; --n) {
        object[std::string(1, static_cast<char>('a' + below(random, 12)))] =
            random_value(random, 4);
    }
    return object;
}

/// The same value with members in random order and white space in random places.
void write_shuffled(Random& random, const bj::value& value, std::string& out) {
    const auto blank = [&] {
        static const char* blanks[] = {"", "", " ", "\n", "\t", " \r\n"};
        out += blanks[below(random, std::size(blanks))];
    };
    blank();
    if (const bj::object* object = value.if_object()) {
        std::vector<const bj::key_value_pair*> members;
        for (const auto& member : *object) members.push_back(&member);
        std::shuffle(members.begin(), members.end(), random);
        out += '{';
        for (std::size_t i = 0; i < members.size(); ++i) {
            if (i > 0) out += ',';
            blank();
            out += bj::serialize(bj::string(members[i]->key()));
            blank();
            out += ':';
            write_shuffled(random, members[i]->value(), out);
        }
        blank();
        out += '}';
    } else if (const bj::array* array = value.if_array()) {
        out += '[';
        for (std::size_t i = 0; i < array->size(); ++i) {
            if (i > 0) out += ',';
            write_shuffled(random, (*array)[i], out);
        }
        blank();
        out += ']';
    } else {
        out += bj::serialize(value);
    }
    blank();
}

/// `beyond_oracle`: the text holds a number that is valid JSON and too large for Boost's double.
std::optional<bj::value> oracle(std::string_view text, bool* beyond_oracle = nullptr) {
    bj::error_code error;
    bj::parse_options options;
    options.max_depth = json_depth_max;
    bj::value value = bj::parse({text.data(), text.size()}, error, {}, options);
    if (beyond_oracle != nullptr) *beyond_oracle = error == bj::error::exponent_overflow;
    if (error) return std::nullopt;
    return value;
}

void mutate(Random& random, std::string& text) {
    static const char* pieces[] = {"\"",
                                   "\\",
                                   "{",
                                   "}",
                                   "[",
                                   "]",
                                   ",",
                                   ":",
                                   "0",
                                   "-",
                                   "e",
                                   ".",
                                   "\\u12",
                                   "\\ud83d\\ude00",
                                   "\\ud83d",
                                   "\xC3",
                                   "\xED\xA0\x80",
                                   "\xF4\x90\x80\x80",
                                   "\xE0\x80\x80",
                                   "\x01",
                                   "true",
                                   " ",
                                   "\xEF\xBB\xBF",
                                   "é"};
    for (std::size_t n = 1 + below(random, 3); n > 0; --n) {
        const std::size_t at = below(random, text.size() + 1);
        switch (below(random, 4)) {
            case 0:
                text.insert(at, pieces[below(random, std::size(pieces))]);
                break;
            case 1:
                text.erase(at, 1 + below(random, 3));
                break;
            case 2:
                if (at < text.size()) text[at] = static_cast<char>(random());
                break;
            default:
                text.resize(at);
        }
    }
}

TEST(JsonScan, agrees_with_another_parser_about_what_is_valid) {
    Random random(20240601);
    int valid = 0;
    int invalid = 0;
    for (int round = 0; round < 60000; ++round) {
        std::string text;
        write_shuffled(random, random_object(random), text);
        if (round % 4 != 0) mutate(random, text);
        bool beyond_oracle = false;
        const auto expected = oracle(text, &beyond_oracle);
        if (beyond_oracle) continue;
        const bool is_object = expected && expected->is_object();
        (is_object ? valid : invalid) += 1;
        const auto members = top_level_members(text);
        ASSERT_EQ(members.has_value(), is_object) << text;
        if (!members) continue;
        for (const JsonMember& member : *members) {
            const auto name = unescape(member.name);
            ASSERT_TRUE(name) << text;
            ASSERT_TRUE(expected->as_object().contains(*name)) << text;
            ASSERT_EQ(oracle(*find_member(*members, *name)), expected->as_object().at(*name))
                << text;
        }
    }
    EXPECT_GT(valid, 10000);
    EXPECT_GT(invalid, 10000);
}

TEST(JsonScan, refuses_each_rule_of_the_grammar_that_is_broken) {
    for (const char* text : {"",
                             " ",
                             "{",
                             "}",
                             "[]",
                             "1",
                             "{\"a\"}",
                             "{\"a\":}",
                             "{\"a\":1,}",
                             "{,}",
                             "{\"a\":1}x",
                             "{\"a\":1}{}",
                             "{a:1}",
                             "{'a':1}",
                             "{\"a\":01}",
                             "{\"a\":1.}",
                             "{\"a\":.5}",
                             "{\"a\":+1}",
                             "{\"a\":1e}",
                             "{\"a\":-}",
                             "{\"a\":NaN}",
                             "{\"a\":True}",
                             "{\"a\":\"\t\"}",
                             "{\"a\":\"\\x\"}",
                             "{\"a\":\"\\u12g4\"}",
                             "{\"a\":\"\\ud800\"}",
                             "{\"a\":\"\\udc00\"}",
                             "{\"a\":\"\xFF\"}",
                             "{\"a\":\"\xC0\xAF\"}",
                             "{\"a\":\"\xED\xA0\x80\"}",
                             "{\"a\":\"\xF4\x90\x80\x80\"}",
                             "{\"a\":\"\xE2\x82\"}",
                             "\xEF\xBB\xBF{}",
                             "{\"a\":[1,]}",
                             "{\"a\":[,1]}",
                             "{\"a\":[1}",
                             "{\"a\":1 \"b\":2}",
                             "{\"a\":1]",
                             "{\"a\":/**/1}"}) {
        EXPECT_FALSE(top_level_members(text)) << text;
    }
    EXPECT_FALSE(top_level_members(std::string_view("{\"a\":\"\0\"}", 9)));
    EXPECT_TRUE(
        top_level_members(" {\"a\" : [ 1 , -0.5e+3, {\"b\":null} ] , \"\":\"\\ud83d\\ude00\"}\n"));
}

TEST(JsonScan, takes_64_levels_and_not_65) {
    const auto nested = [](std::size_t levels) {
        return "{\"a\":" + std::string(levels - 1, '[') + std::string(levels - 1, ']') + "}";
    };
    EXPECT_TRUE(top_level_members(nested(64)));
    EXPECT_TRUE(canonical(nested(64)));
    EXPECT_FALSE(top_level_members(nested(65)));
    EXPECT_FALSE(canonical(nested(65)));
    EXPECT_FALSE(canonical(std::string(1 << 20, '[')));
}

TEST(JsonScan, bounds_the_members_it_keeps) {
    std::string text = "{";
    for (std::size_t i = 0; i <= json_members_max; ++i) text += "\"" + std::to_string(i) + "\":1,";
    text += "\"end\":1}";
    EXPECT_FALSE(top_level_members(text));
    EXPECT_FALSE(canonical(text));
}

TEST(JsonScan, reads_values_as_they_are_spelled) {
    const auto members = top_level_members(
        R"( { "a" : 1.0 , "b":"x\n" ,"c": [1, 2] , "\u0064":{ "e" : null }, "a":2 } )");
    ASSERT_TRUE(members);
    ASSERT_EQ(members->size(), 5u);
    EXPECT_EQ((*members)[0].value, "1.0");
    EXPECT_EQ(find_member(*members, "a"), "2");  // the last one
    EXPECT_EQ(find_member(*members, "b"), "\"x\\n\"");
    EXPECT_EQ(find_member(*members, "c"), "[1, 2]");
    EXPECT_EQ(find_member(*members, "d"), "{ \"e\" : null }");
    EXPECT_EQ(find_member(*members, "\\u0064"), std::nullopt);
    EXPECT_EQ(find_member(*members, "z"), std::nullopt);
    const auto elements = array_elements("[ {\"a\":[1,2]} , 3,[] ]");
    ASSERT_TRUE(elements);
    EXPECT_EQ(*elements, (std::vector<std::string_view>{"{\"a\":[1,2]}", "3", "[]"}));
    EXPECT_FALSE(array_elements("{}"));
    EXPECT_TRUE(array_elements("[]")->empty());
}

TEST(JsonScan, scalars_are_what_they_say_and_nothing_else) {
    EXPECT_EQ(json_string("\"a\\u00e9\\ud83d\\ude42\\/\""), "aé🙂/");
    EXPECT_EQ(json_string("\"a\"b\""), std::nullopt);
    EXPECT_EQ(json_string("1"), std::nullopt);
    EXPECT_EQ(json_string("\""), std::nullopt);
    EXPECT_EQ(json_bool("true"), true);
    EXPECT_EQ(json_bool("false"), false);
    EXPECT_EQ(json_bool("1"), std::nullopt);
    EXPECT_TRUE(json_is_null("null"));
    EXPECT_EQ(json_integer("-12"), -12);
    EXPECT_EQ(json_integer("9223372036854775807"), INT64_MAX);
    for (const char* text : {"9223372036854775808", "1.0", "1e3", "01", "", "-", "\"1\""}) {
        EXPECT_EQ(json_integer(text), std::nullopt) << text;
    }
}

TEST(JsonScan, what_it_quotes_it_reads_back) {
    Random random(7);
    for (int round = 0; round < 5000; ++round) {
        std::string text;
        for (std::size_t n = below(random, 30); n > 0; --n) text += static_cast<char>(random());
        std::string quoted;
        append_json_string(quoted, text);
        const auto back = json_string(quoted);
        ASSERT_TRUE(back) << quoted;
        const bool valid = oracle(quoted)->as_string() == *back;
        ASSERT_TRUE(valid);
        std::string again;
        append_json_string(again, *back);
        ASSERT_EQ(again, quoted);
    }
    std::string quoted;
    append_json_string(quoted, "a\"\\\n\x01é🙂");
    EXPECT_EQ(quoted, "\"a\\\"\\\\\\n\\u0001é🙂\"");
}

TEST(Canonical, order_of_members_and_white_space_do_not_matter) {
    Random random(99);
    for (int round = 0; round < 5000; ++round) {
        const bj::value value = random_object(random);
        const std::string text = bj::serialize(value);
        const auto plain = canonical(text);
        ASSERT_TRUE(plain) << value;
        std::string shuffled;
        write_shuffled(random, value, shuffled);
        const auto other = canonical(shuffled);
        ASSERT_TRUE(other) << shuffled;
        ASSERT_EQ(plain->digest, other->digest) << shuffled;
        ASSERT_EQ(plain->members, other->members);
        ASSERT_EQ(plain->members.size(), value.as_object().size());
    }
}

/// Calls `with` for the value and each value inside it, each time with one change made to it.
void each_change(bj::value& root, bj::value& at, const std::function<void()>& with) {
    const bj::value before = at;
    at = before.is_string() ? bj::value(bj::string(std::string(before.as_string()) + "x"))
                            : bj::value("changed");
    with();
    at = before;
    if (bj::object* object = at.if_object()) {
        (*object)["added"] = 1;
        with();
        object->erase("added");
        std::vector<std::string> names;
        for (const auto& member : *object) names.emplace_back(member.key());
        for (const std::string& name : names) {
            each_change(root, object->at(name), with);
            const bj::value value = object->at(name);
            object->erase(name);
            with();
            (*object)[name] = value;
        }
    } else if (bj::array* array = at.if_array()) {
        array->push_back(1);
        with();
        array->pop_back();
        for (bj::value& element : *array) each_change(root, element, with);
        if (array->size() > 1 && array->front() != array->back()) {
            std::swap(array->front(), array->back());
            with();
            std::swap(array->front(), array->back());
        }
    }
}

TEST(Canonical, any_change_of_a_value_matters) {
    Random random(5);
    int changes = 0;
    for (int round = 0; round < 300; ++round) {
        bj::value value = random_object(random);
        const Digest digest = canonical(bj::serialize(value))->digest;
        each_change(value, value, [&] {
            ++changes;
            const std::string text = bj::serialize(value);
            ASSERT_NE(canonical(text)->digest, digest) << text;
        });
        ASSERT_EQ(canonical(bj::serialize(value))->digest, digest);
    }
    EXPECT_GT(changes, 3000);
}

TEST(Canonical, names_the_members_that_differ) {
    const auto a = canonical(
        R"({"model":"m","messages":[{"role":"user","content":"hello, this is longer"}],"stream":true})");
    const auto b = canonical(
        R"({"stream":true, "messages":[{"content":"hello, this is longer!","role":"user"}],"model":"m"})");
    ASSERT_TRUE(a && b);
    ASSERT_EQ(a->members.size(), 3u);
    EXPECT_EQ(a->members[0].first, "messages");
    EXPECT_NE(a->members[0].second, b->members[0].second);
    EXPECT_EQ(a->members[1], b->members[1]);
    EXPECT_EQ(a->members[2], b->members[2]);
}

TEST(Canonical, spelling_matters) {
    const auto digest = [](std::string_view text) { return canonical(text).value().digest; };
    EXPECT_NE(digest(R"({"a":1.0})"), digest(R"({"a":1})"));
    EXPECT_NE(digest(R"({"a":"\u0061"})"), digest(R"({"a":"a"})"));
    EXPECT_NE(digest(R"({"\u0061":1})"), digest(R"({"a":1})"));
    EXPECT_NE(digest(R"(["a"])"), digest(R"({"a":1})"));
    EXPECT_NE(digest(R"({"a":{}})"), digest(R"({"a":[]})"));
    EXPECT_NE(digest(R"({"a":"1"})"), digest(R"({"a":1})"));
    EXPECT_NE(digest(R"({"a":[1,2]})"), digest(R"({"a":[12]})"));
    EXPECT_NE(digest(R"({"a":[[1],2]})"), digest(R"({"a":[[1,2]]})"));
    EXPECT_NE(digest(R"({"a":"b\",\"c\":\"d"})"), digest(R"({"a":"b","c":"d"})"));
    EXPECT_NE(digest(R"({"a":{"b":1},"c":2})"), digest(R"({"a":{"b":1,"c":2}})"));
    const std::string image(5000, 'i');
    EXPECT_NE(digest("{\"a\":{\"b\":\"" + image + "\"}}"),
              digest("{\"a\":{\"b\":\"" + image + "i\"}}"));
}

TEST(Canonical, repeated_names_have_no_canonical_form) {
    for (const char* text : {R"({"a":1,"a":1})", R"({"a":1,"b":2,"a":3})", R"({"x":{"a":1,"a":1}})",
                             R"({"x":[{"b":0,"a":1,"b":1}]})", R"({"a":1,"\u0061":2})",
                             R"([{"a":1,"a":1}])", R"({"x":{"\u0062":1,"c":1,"b":1}})"}) {
        EXPECT_TRUE(top_level_members(text) || array_elements(text)) << text;
        EXPECT_FALSE(canonical(text)) << text;
    }
    EXPECT_TRUE(canonical(R"({"a":{"a":{"a":1}},"b":[{"a":1},{"a":1}]})"));
    EXPECT_FALSE(canonical("{\"a\":1"));
}

TEST(Canonical, takes_a_body_of_20_megabytes) {
    std::string body =
        R"({"stream":false,"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,)";
    body += std::string(20 << 20, 'A');
    body += R"("}}]}],"model":"vision"})";
    const auto first = canonical(body);
    ASSERT_TRUE(first);
    body[body.size() / 2] = 'B';
    EXPECT_NE(canonical(body)->digest, first->digest);
}

}  // namespace
}  // namespace semel::base
