#include "core/key.hpp"

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <random>

namespace semel::core {
namespace {

using Parts = std::array<std::string, 5>;

std::optional<std::string> encoded(const Parts& parts) {
    return encode(IntentKey{parts[0], parts[1], parts[2], parts[3], parts[4]});
}

TEST(Key, one_text_split_into_parts_in_two_ways_never_encodes_alike) {
    // Every cut of "aaaa...": joined with any separator-free scheme these would collide.
    const std::string text(9, 'a');
    std::map<std::string, Parts> seen;
    for (std::size_t a = 0; a <= text.size(); ++a) {
        for (std::size_t b = a; b <= text.size(); ++b) {
            for (std::size_t c = b; c <= text.size(); ++c) {
                for (std::size_t d = c; d <= text.size(); ++d) {
                    const Parts parts{text.substr(0, a), text.substr(a, b - a),
                                      text.substr(b, c - b), text.substr(c, d - c), text.substr(d)};
                    const auto [it, fresh] = seen.emplace(encoded(parts).value(), parts);
                    EXPECT_TRUE(fresh || it->second == parts);
                }
            }
        }
    }
    EXPECT_EQ(seen.size(), 715U);
}

TEST(Key, random_parts_of_hostile_bytes_never_collide) {
    constexpr std::uint32_t seed = 20260101;
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    // Length bytes, separators, NUL and high bytes: whatever an encoding could mistake for
    // structure.
    const std::string alphabet("\0\1\2\3:/|\xff", 8);
    std::map<std::string, Parts> seen;
    for (int i = 0; i < 100'000; ++i) {
        Parts parts;
        for (std::string& part : parts) {
            const std::size_t size = random() % 4;
            for (std::size_t n = 0; n < size; ++n) part += alphabet[random() % alphabet.size()];
        }
        const auto [it, fresh] = seen.emplace(encoded(parts).value(), parts);
        ASSERT_TRUE(fresh || it->second == parts) << "two keys share one encoding";
    }
}

TEST(Key, a_part_of_255_bytes_is_taken_and_one_of_256_refused_wherever_it_stands) {
    for (std::size_t at = 0; at < 5; ++at) {
        Parts parts{"t", "o", "u", "s", "i"};
        parts[at] = std::string(key_part_max_bytes, 'x');
        const std::optional<std::string> longest = encoded(parts);
        ASSERT_TRUE(longest);
        EXPECT_EQ(longest->size(), 5 + 4 + key_part_max_bytes);
        parts[at] += 'x';
        EXPECT_FALSE(encoded(parts)) << "part " << at;
    }
}

TEST(Key, bytes_are_neither_folded_nor_trimmed) {
    const std::array<std::string, 6> ids{"a", "A", "a ", " a", std::string("a\0", 2), "\xc3\xa1"};
    std::map<std::string, std::string> seen;
    for (const std::string& id : ids) {
        EXPECT_TRUE(seen.emplace(encoded({"t", "o", "", "", id}).value(), id).second);
    }
}

}  // namespace
}  // namespace semel::core
