// Thousands of short lives of the engine on the memory store, each with its own luck; and planted
// defects, to see that the checks would notice. SEMEL_SEED=n replays one run with a trace;
// SEMEL_SEEDS=n sets the number of seeds in each range.
#include <gtest/gtest.h>

#include <cstdio>

#include "sim/engine_workload.hpp"
#include "sim/seeds.hpp"

namespace semel::sim {
namespace {

constexpr std::uint64_t seeds_per_range_default = 1000;
constexpr std::uint64_t ranges = 4;

class EngineSimulation : public testing::TestWithParam<std::uint64_t> {};

TEST_P(EngineSimulation, holds_its_invariants_under_every_seed) {
    const Seeds seeds = seeds_of(GetParam(), seeds_per_range_default);
    RunReport sum;
    for (std::uint64_t seed = seeds.first; seed <= seeds.last; ++seed) {
        const RunReport report = run_engine_workload({.seed = seed, .trace = seeds.replay});
        ASSERT_EQ(report.violation, "")
            << "seed " << seed << "; replay it with SEMEL_SEED=" << seed;
        sum.takeovers += report.takeovers;
        sum.pending += report.pending;
        sum.ghosts += report.ghosts;
        sum.ghosts_settled += report.ghosts_settled;
        sum.crashes += report.crashes;
        sum.pauses += report.pauses;
        sum.decisions += report.decisions;
        sum.spool_delivered += report.spool_delivered;
        sum.spool_overtaken += report.spool_overtaken;
        sum.leases_lost += report.leases_lost;
        sum.second_payments_counted += report.second_payments_counted;
    }
    if (seeds.last - seeds.first + 1 < seeds_per_range_default)
        return;  // too few to meet every trouble
    std::printf(
        "             takeovers %u, pending %u, ghosts %u (settled %u), crashes %u, pauses %u, "
        "decisions %u, "
        "spool delivered %u, overtaken %u, leases lost %u, second payments counted %u\n",
        sum.takeovers, sum.pending, sum.ghosts, sum.ghosts_settled, sum.crashes, sum.pauses,
        sum.decisions, sum.spool_delivered, sum.spool_overtaken, sum.leases_lost,
        sum.second_payments_counted);
    // Not vacuous: every kind of trouble was met.
    EXPECT_GT(sum.takeovers, 0u);
    EXPECT_GT(sum.pending, 0u);
    EXPECT_GT(sum.ghosts, 0u);
    EXPECT_GT(sum.ghosts_settled, 0u);
    EXPECT_GT(sum.crashes, 0u);
    EXPECT_GT(sum.pauses, 0u);
    EXPECT_GT(sum.decisions, 0u);
    EXPECT_GT(sum.spool_delivered, 0u);
    EXPECT_GT(sum.spool_overtaken, 0u);
    EXPECT_GT(sum.leases_lost, 0u);
    EXPECT_GT(sum.second_payments_counted, 0u);
}

INSTANTIATE_TEST_SUITE_P(Seeds, EngineSimulation, testing::Range<std::uint64_t>(0, ranges),
                         [](const auto& info) { return "range_" + std::to_string(info.param); });

TEST(EngineSimulationItself, the_same_seed_gives_the_same_run) {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
        const RunReport a = run_engine_workload({.seed = seed});
        const RunReport b = run_engine_workload({.seed = seed});
        EXPECT_EQ(a.grants, b.grants) << seed;
        EXPECT_EQ(a.paid, b.paid) << seed;
        EXPECT_EQ(a.ghosts, b.ghosts) << seed;
        EXPECT_EQ(a.ghosts_settled, b.ghosts_settled) << seed;
    }
}

}  // namespace
}  // namespace semel::sim
