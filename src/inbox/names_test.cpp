#include "inbox/names.hpp"

#include <gtest/gtest.h>

#include <set>

namespace semel::inbox {
namespace {

using namespace std::string_literals;

std::string hash(std::string_view scope, std::string_view source, std::string_view id) {
    return base::hex(key_hash({scope, source, id}).view());
}

TEST(Names, the_key_hash_is_what_the_guide_says) {
    // printf '\0\0\0\3svc\0\0\0\6orders\0\0\0\2m1' | sha256sum
    EXPECT_EQ(hash("svc", "orders", "m1"),
              base::hex(base::sha256("\0\0\0\3svc\0\0\0\6orders\0\0\0\2m1"s).view()));
}

TEST(Names, bytes_that_move_from_one_part_to_the_next_make_another_key) {
    std::set<std::string> hashes;
    for (const auto& [scope, source, id] : {std::tuple{"ab", "c", "d"},
                                            {"a", "bc", "d"},
                                            {"a", "b", "cd"},
                                            {"", "abc", "d"},
                                            {"abc", "", "d"}})
        hashes.insert(hash(scope, source, id));
    for (const std::string& id : {"m"s, "M"s, "m "s, " m"s, "m\0"s, "\0m"s, "\xc3\xa9"s,
                                  "e\xcc\x81"s, "e"s, std::string(300, 'm'), std::string(301, 'm')})
        hashes.insert(hash("s", "t", id));
    EXPECT_EQ(hashes.size(), 5U + 11U);
}

TEST(Names, what_people_read_tells_any_two_ids_apart) {
    EXPECT_EQ(readable("order-1"), "order-1");
    EXPECT_EQ(readable("Gr\xc3\xb6\xc3\x9f"
                       "e"),
              "Gr\xc3\xb6\xc3\x9f"
              "e");
    EXPECT_EQ(readable("a\0b\x7f"s), "a\\x00b\\x7f");
    EXPECT_EQ(readable("a\\x00b"), "a\\\\x00b") << "no other id reads like an escaped one";
    EXPECT_EQ(readable("\xff\xc3(\xed\xa0\x80"), "\\xff\\xc3(\\xed\\xa0\\x80")
        << "neither cut characters nor surrogates are UTF-8";
    EXPECT_EQ(readable("\xc3\xa9\xc3\xa9\xc3\xa9", 2), "\xc3\xa9\xc3\xa9");
    EXPECT_EQ(readable("ab\x01", 5), "ab") << "an escape is whole or absent";
}

TEST(Names, what_is_too_long_or_unreadable_is_refused_in_words) {
    EXPECT_TRUE(check(MessageName{"s", "", std::string(message_id_max_bytes, 'x')}));
    EXPECT_NE(check(MessageName{"s", "", std::string(message_id_max_bytes + 1, 'x')})
                  .error()
                  .detail.find("1025 bytes"),
              std::string::npos);
    EXPECT_FALSE(check(MessageName{"s", "t", ""}));
    EXPECT_FALSE(check(MessageName{std::string(256, 's'), "t", "x"}));
    EXPECT_FALSE(check(MessageName{"s", std::string(256, 't'), "x"}));
    EXPECT_TRUE(check_label("orders/\xc3\xa9", "scope"));
    for (const std::string& bad : {""s, "a\nb"s, "a\0"s, "\xff"s, std::string(256, 'a')})
        EXPECT_FALSE(check_label(bad, "topic"));
    EXPECT_TRUE(check(Place{"shop", "message_dedup"}));
    for (const char* bad : {"", "Shop", "1x", "a-b", "a`b", "a\"; DROP"}) {
        EXPECT_FALSE(check(Place{"shop", bad}));
        if (*bad != '\0') EXPECT_FALSE(check(Place{bad, "message_dedup"}));
    }
}

}  // namespace
}  // namespace semel::inbox
