#include "stores/rocksdb/store_clock.hpp"

#include <gtest/gtest.h>

#include "support/manual_clock.hpp"

namespace semel::stores {
namespace {

using namespace std::chrono_literals;
using base::StoreTime;
using std::chrono::hours;
using std::chrono::microseconds;

constexpr std::int64_t noon = 1'800'000'000'000'000;
constexpr StoreTime at_noon{noon};
constexpr hours year{24 * 365};

std::int64_t us(microseconds d) { return d.count(); }

TEST(StoreClock, a_new_store_starts_at_the_wall_clock) {
    const ClockStart start = choose_start(std::nullopt, noon, false);
    EXPECT_EQ(start.start, at_noon);
    EXPECT_FALSE(start.kept);
}

TEST(StoreClock, a_wall_clock_up_to_a_week_ahead_is_believed) {
    const ClockStart start = choose_start(at_noon, noon + us(7 * 24h), false);
    EXPECT_EQ(start.start, at_noon + 7 * 24h);
    EXPECT_FALSE(start.kept);
}

TEST(StoreClock, a_wall_clock_further_ahead_is_not_believed_and_reported) {
    const ClockStart start = choose_start(at_noon, noon + us(year), false);
    EXPECT_EQ(start.start, at_noon);
    EXPECT_TRUE(start.kept);
    EXPECT_EQ(start.wall_ahead_us, us(year));
}

TEST(StoreClock, a_wall_clock_behind_never_takes_the_store_back) {
    const ClockStart start = choose_start(at_noon, noon - us(year), false);
    EXPECT_EQ(start.start, at_noon);
    EXPECT_TRUE(start.kept);
}

TEST(StoreClock, the_reserve_that_a_crash_leaves_is_not_reported_as_a_jump) {
    const ClockStart start = choose_start(at_noon, noon - us(10s), false);
    EXPECT_EQ(start.start, at_noon);
    EXPECT_FALSE(start.kept);
}

TEST(StoreClock, accepting_moves_it_in_either_direction_and_says_so) {
    for (const hours jump : {year, -year}) {
        const ClockStart start = choose_start(at_noon, noon + us(jump), true);
        EXPECT_EQ(start.start, at_noon + jump);
        EXPECT_TRUE(start.moved);
        EXPECT_FALSE(start.kept);
    }
}

TEST(StoreClock, it_follows_a_wall_clock_ahead_by_a_second_a_minute) {
    support::ManualClock wall;
    StoreClock clock(wall, {wall.wall_us()});
    wall.jump_wall(year);
    const StoreTime before = clock.now();
    wall.advance(10min);
    clock.follow_wall();
    EXPECT_EQ(clock.now() - before, 10min + 10s);
}

TEST(StoreClock, following_in_small_steps_adds_up_to_the_same) {
    support::ManualClock wall;
    StoreClock clock(wall, {wall.wall_us()});
    wall.jump_wall(year);
    const StoreTime before = clock.now();
    for (int i = 0; i < 6'000'000; i += 100) {
        wall.advance(100us * 100);
        clock.follow_wall();
    }
    EXPECT_NEAR(static_cast<double>((clock.now() - before).count()), 610e6, 2e6);
}

TEST(StoreClock, it_stops_following_when_it_has_caught_up) {
    support::ManualClock wall;
    StoreClock clock(wall, {wall.wall_us()});
    wall.jump_wall(1s);
    wall.advance(10min);
    clock.follow_wall();
    EXPECT_EQ(clock.now().us, wall.wall_us());
}

TEST(StoreClock, a_wall_clock_set_back_while_running_changes_nothing) {
    support::ManualClock wall;
    StoreClock clock(wall, {wall.wall_us()});
    const StoreTime before = clock.now();
    wall.jump_wall(-year);
    wall.advance(1min);
    clock.follow_wall();
    EXPECT_EQ(clock.now() - before, 1min);
}

}  // namespace
}  // namespace semel::stores
