#include "cli/reset_target.hpp"

#include <gtest/gtest.h>

namespace semel::cli {
namespace {

using Kind = ResetTarget::Kind;

constexpr std::int64_t now_ms = 1'796'000'000'123;  // 2026-11-30T00:53:20.123Z

ResetTarget target(const std::string& text) {
    const auto result = reset_target(text, now_ms);
    EXPECT_TRUE(result) << text << ": " << result.error().detail;
    return result ? *result : ResetTarget{};
}

TEST(ResetTarget, names_an_end_or_an_offset) {
    EXPECT_EQ(target("earliest").kind, Kind::earliest);
    EXPECT_EQ(target("latest").kind, Kind::latest);
    EXPECT_EQ(target("0").kind, Kind::offset);
    EXPECT_EQ(target("1907").at, 1907);
    EXPECT_EQ(target("9223372036854775807").kind, Kind::offset);
}

TEST(ResetTarget, names_a_moment_in_any_zone) {
    for (const char* same :
         {"2026-11-30T00:00:00Z", "2026-11-30t00:00:00z", "2026-11-30 00:00:00.000Z",
          "2026-11-30T01:00:00+01:00", "2026-11-29T18:30:00-05:30", "2026-11-30T00:00:00-00:00"}) {
        EXPECT_EQ(target(same).kind, Kind::time) << same;
        EXPECT_EQ(target(same).at, 1'795'996'800'000) << same;
    }
    EXPECT_EQ(target("2026-11-30T00:00:00.5Z").at, 1'795'996'800'500);
    EXPECT_EQ(target("2026-11-30T00:00:00.1239999Z").at, 1'795'996'800'123);
    EXPECT_EQ(target("2024-02-29T23:59:59Z").at, 1'709'251'199'000);
    EXPECT_EQ(target("1970-01-01T00:00:00Z").at, 0);
}

TEST(ResetTarget, names_how_long_ago) {
    EXPECT_EQ(target("-2h").at, now_ms - 2 * 3'600'000);
    EXPECT_EQ(target("-90s").at, now_ms - 90'000);
    EXPECT_EQ(target("-30m").at, now_ms - 30 * 60'000);
    EXPECT_EQ(target("-7d").at, now_ms - 7 * std::int64_t{86'400'000});
    EXPECT_EQ(target("-0s").at, now_ms);
    EXPECT_EQ(target("-36500d").at, 0) << "before the epoch there is nothing";
}

TEST(ResetTarget, refuses_what_could_be_read_in_two_ways_or_not_at_all) {
    for (const char* wrong : {"",
                              "-",
                              "-1",
                              "+1",
                              "1h",
                              "-1w",
                              "-h",
                              "--1h",
                              "-1.5h",
                              "-99999999999999d",
                              "Earliest",
                              "12x",
                              "9223372036854775808",
                              "2026-11-30",
                              "2026-11-30T00:00:00",
                              "2026-02-29T00:00:00Z",
                              "2026-13-01T00:00:00Z",
                              "2026-00-01T00:00:00Z",
                              "2026-11-30T24:00:00Z",
                              "2026-11-30T00:60:00Z",
                              "2026-11-30T00:00:00.Z",
                              "2026-11-30T00:00:00Z ",
                              "2026-11-30T00:00:00+1:00",
                              "2026-11-30T00:00:00+0100",
                              "-026-11-30T00:00:00Z",
                              "2026-11--1T00:00:00Z",
                              "26-11-30T00:00:00Z"}) {
        const auto result = reset_target(wrong, now_ms);
        ASSERT_FALSE(result) << wrong;
        EXPECT_EQ(result.error().code, base::ErrorCode::invalid_argument);
        EXPECT_NE(result.error().detail.find("is neither"), std::string::npos)
            << result.error().detail;
    }
    const auto ahead = reset_target("2026-11-30T01:00:00Z", now_ms);
    ASSERT_FALSE(ahead);
    EXPECT_NE(ahead.error().detail.find("lies ahead"), std::string::npos);
}

TEST(ResetTarget, a_moment_is_shown_in_utc) {
    EXPECT_EQ(time_in_words(now_ms), "2026-11-30T00:53:20.123Z");
    EXPECT_EQ(time_in_words(0), "1970-01-01T00:00:00.000Z");
}

}  // namespace
}  // namespace semel::cli
