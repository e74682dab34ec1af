// Whole gateways in a simulated world: thousands of short lives, each with its own luck.
// SEMEL_SEED=n replays one run with a trace; SEMEL_SEEDS=n sets the number of seeds in each range.
#include <gtest/gtest.h>

#include <cstdio>

#include "sim/gateway_workload.hpp"
#include "sim/planted_store.hpp"
#include "sim/seeds.hpp"

namespace semel::sim {
namespace {

constexpr std::uint64_t seeds_per_range_default = 300;
constexpr std::uint64_t ranges = 4;

class GatewaySimulation : public testing::TestWithParam<std::uint64_t> {};

TEST_P(GatewaySimulation, shows_no_client_what_it_must_not_see_under_every_seed) {
    const Seeds seeds = seeds_of(GetParam(), seeds_per_range_default);
    GatewayRunReport sum;
    for (std::uint64_t seed = seeds.first; seed <= seeds.last; ++seed) {
        const GatewayRunReport report = run_gateway_workload({.seed = seed, .trace = seeds.replay});
        ASSERT_EQ(report.violation, "")
            << "seed " << seed << "; replay it with SEMEL_SEED=" << seed;
        sum.answers += report.answers;
        sum.joined += report.joined;
        sum.replayed += report.replayed;
        sum.taken_over += report.taken_over;
        sum.cut += report.cut;
        sum.mismatches += report.mismatches;
        sum.held += report.held;
        sum.decisions += report.decisions;
        sum.crashes += report.crashes;
        sum.pauses += report.pauses;
        sum.vanished += report.vanished;
        sum.turns += report.turns;
        sum.pending += report.pending;
        sum.peer_connections += report.peer_connections;
    }
    if (seeds.last - seeds.first + 1 < seeds_per_range_default)
        return;  // too few to meet every trouble
    std::printf(
        "             answers %u (joined %u, replayed %u, taken over %u, pending %u), cut %u, "
        "mismatches %u, held %u, decisions %u, "
        "crashes %u, pauses %u, vanished %u, turns %u, peer connections %u\n",
        sum.answers, sum.joined, sum.replayed, sum.taken_over, sum.pending, sum.cut, sum.mismatches,
        sum.held, sum.decisions, sum.crashes, sum.pauses, sum.vanished, sum.turns,
        sum.peer_connections);
    // Not vacuous: every kind of thing happened.
    for (const unsigned count :
         {sum.answers, sum.joined, sum.replayed, sum.taken_over, sum.cut, sum.mismatches, sum.held,
          sum.decisions, sum.crashes, sum.pauses, sum.vanished, sum.turns, sum.pending,
          sum.peer_connections}) {
        EXPECT_GT(count, 0u);
    }
}

INSTANTIATE_TEST_SUITE_P(Seeds, GatewaySimulation, testing::Range<std::uint64_t>(0, ranges),
                         [](const auto& info) { return "range_" + std::to_string(info.param); });

TEST(GatewaySimulationItself, the_same_seed_gives_the_same_run) {
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
        const GatewayRunReport a = run_gateway_workload({.seed = seed});
        const GatewayRunReport b = run_gateway_workload({.seed = seed});
        EXPECT_EQ(a.answers, b.answers) << seed;
        EXPECT_EQ(a.paid, b.paid) << seed;
        EXPECT_EQ(a.joined, b.joined) << seed;
        EXPECT_EQ(a.cut, b.cut) << seed;
    }
}

/// The checks must notice each of these within a number of seeds.
constexpr std::uint64_t planted_seeds_max = 400;

std::string first_violation(const GatewayRunOptions& base) {
    for (std::uint64_t seed = 0; seed < planted_seeds_max; ++seed) {
        GatewayRunOptions options = base;
        options.seed = seed;
        const GatewayRunReport report = run_gateway_workload(options);
        if (!report.violation.empty()) return report.violation;
    }
    return {};
}

struct Planted {
    const char* name;
    PlantedStore::Spoil spoil;
};

void PrintTo(const Planted& planted, std::ostream* out) { *out << planted.name; }

class GatewayPlantedDefect : public testing::TestWithParam<Planted> {};

TEST_P(GatewayPlantedDefect, is_caught) {
    GatewayRunOptions options;
    options.wrap_store = [](core::Store& inner) {
        return std::make_unique<PlantedStore>(inner, GetParam().spoil);
    };
    const std::string violation = first_violation(options);
    EXPECT_NE(violation, "") << GetParam().name;
    if (!violation.empty())
        std::printf("             %s: %.160s\n", GetParam().name, violation.c_str());
}

std::optional<core::StoreOutcome> same_fingerprint_for_all(core::Store&, core::Item& item) {
    if (auto* acquire = std::get_if<core::Acquire>(&item.operation))
        acquire->fingerprint = core::Fingerprint{};
    return std::nullopt;
}

std::optional<core::StoreOutcome> append_is_lost(core::Store&, core::Item& item) {
    if (auto* complete = std::get_if<core::Complete>(&item.operation)) complete->append.reset();
    return std::nullopt;
}

std::optional<core::StoreOutcome> unknown_counts_as_free(core::Store&, core::Item& item) {
    if (auto* fail = std::get_if<core::Fail>(&item.operation))
        fail->certainty = core::Certainty::not_processed;
    return std::nullopt;
}

std::optional<core::StoreOutcome> cut_answers_are_completed(core::Store& truth, core::Item& item) {
    const auto* fail = std::get_if<core::Fail>(&item.operation);
    if (fail == nullptr || fail->certainty != core::Certainty::unknown) return std::nullopt;
    core::Complete complete{.token = fail->token,
                            .nonce = fail->nonce,
                            .answer = {.http_status = 200,
                                       .content_type = "application/json",
                                       .body = std::make_shared<const std::string>("{}"),
                                       .body_bytes = 2}};
    item.operation = std::move(complete);
    static_cast<void>(truth);
    return std::nullopt;
}

INSTANTIATE_TEST_SUITE_P(
    OfTheStore, GatewayPlantedDefect,
    testing::Values(Planted{"complete_is_only_pretended", pretend<core::Complete>},
                    Planted{"complete_is_not_fenced", unfence<core::Complete>},
                    Planted{"one_fingerprint_for_all", same_fingerprint_for_all},
                    Planted{"the_turn_is_lost", append_is_lost},
                    Planted{"an_unknown_outcome_counts_as_free", unknown_counts_as_free},
                    Planted{"a_broken_answer_counts_as_complete", cut_answers_are_completed}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace semel::sim
