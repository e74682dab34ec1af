// Planted defects: each rule of the protocol is broken once, and the checks must notice within a
// number of seeds.
#include <gtest/gtest.h>

#include "sim/engine_workload.hpp"
#include "sim/planted_store.hpp"

namespace semel::sim {
namespace {

using base::Result;
using core::Decided;
using core::Item;
using core::RecordPtr;
using namespace std::chrono_literals;

constexpr std::uint64_t seeds_max = 300;

/// Forgets what is put into it.
class LeakySpool final : public engine::Spool {
  public:
    Result<void> put(engine::SpoolEntry) override { return {}; }
    std::optional<engine::SpoolEntry> find(const core::StoredKey&) override { return std::nullopt; }
    bool holds(const core::StoredKey&, core::FencingToken) override { return false; }
    std::vector<core::StoredKey> keys() override { return {}; }
    void remove(const core::StoredKey&, core::FencingToken) override {}
    [[nodiscard]] std::size_t size() const override { return 0; }
    [[nodiscard]] const std::vector<std::string>& problems() const override { return none_; }

  private:
    std::vector<std::string> none_;
};

RunOptions with(PlantedStore::Spoil spoil) {
    RunOptions options;
    options.wrap_store = [spoil = std::move(spoil)](core::Store& inner) {
        return std::make_unique<PlantedStore>(inner, spoil);
    };
    return options;
}

/// The first seed whose run violates something, and what.
struct Caught {
    std::uint64_t seed = seeds_max;
    std::string violation;
};
Caught hunt(RunOptions options) {
    for (std::uint64_t seed = 0; seed < seeds_max; ++seed) {
        options.seed = seed;
        RunReport report = run_engine_workload(options);
        if (!report.violation.empty()) return {seed, report.violation};
    }
    return {};
}

void expect_caught(RunOptions options) {
    const Caught caught = hunt(std::move(options));
    EXPECT_LT(caught.seed, seeds_max) << "the checks are blind to this defect";
    std::printf("             caught by seed %llu: %s\n",
                static_cast<unsigned long long>(caught.seed), caught.violation.c_str());
}

TEST(PlantedDefect, none_the_decorator_alone_violates_nothing) {
    const Caught caught = hunt(with([](core::Store&, Item&) { return std::nullopt; }));
    EXPECT_EQ(caught.violation, "") << "seed " << caught.seed;
}

TEST(PlantedDefect, a_complete_that_is_not_fenced_is_caught) {
    expect_caught(with(unfence<core::Complete>));
}
TEST(PlantedDefect, a_fail_that_is_not_fenced_is_caught) {
    expect_caught(with(unfence<core::Fail>));
}
TEST(PlantedDefect, renewals_that_are_never_sent_are_caught) {
    expect_caught(with(pretend<core::Renew>));
}
TEST(PlantedDefect, a_lost_acquire_that_is_not_released_is_caught) {
    expect_caught(with([](core::Store& truth, Item& item) -> std::optional<core::StoreOutcome> {
        const auto* release = std::get_if<core::Release>(&item.operation);
        if (release == nullptr || release->token.value != 0) return std::nullopt;
        return core::Fenced{look(truth, item.key)};
    }));
}
TEST(PlantedDefect, an_acquire_without_its_time_limit_is_caught) {
    expect_caught(with([](core::Store&, Item& item) -> std::optional<core::StoreOutcome> {
        if (auto* acquire = std::get_if<core::Acquire>(&item.operation))
            acquire->not_after.us = INT64_MAX;
        return std::nullopt;
    }));
}
TEST(PlantedDefect, a_lease_that_ends_early_is_caught) {
    expect_caught(with([](core::Store&, Item& item) -> std::optional<core::StoreOutcome> {
        if (auto* acquire = std::get_if<core::Acquire>(&item.operation)) acquire->lease = 10ms;
        return std::nullopt;
    }));
}
TEST(PlantedDefect, a_running_intent_granted_to_a_second_owner_is_caught) {
    expect_caught(with([](core::Store& truth, Item& item) -> std::optional<core::StoreOutcome> {
        const auto* acquire = std::get_if<core::Acquire>(&item.operation);
        if (acquire == nullptr) return std::nullopt;
        const RecordPtr record = look(truth, item.key);
        if (!record || record->status != core::Status::processing ||
            record->nonce == acquire->nonce)
            return std::nullopt;
        return core::Granted{.kind = core::Granted::Kind::repeated,
                             .token = record->token,
                             .attempt = record->attempt};
    }));
}
TEST(PlantedDefect, an_unknown_outcome_taken_for_a_free_failure_is_caught) {
    expect_caught(with([](core::Store&, Item& item) -> std::optional<core::StoreOutcome> {
        if (auto* fail = std::get_if<core::Fail>(&item.operation))
            fail->certainty = core::Certainty::not_processed;
        return std::nullopt;
    }));
}
TEST(PlantedDefect, a_call_that_is_never_marked_as_started_is_caught) {
    expect_caught(with([](core::Store& truth, Item& item) -> std::optional<core::StoreOutcome> {
        if (auto* acquire = std::get_if<core::Acquire>(&item.operation))
            acquire->starts_call = false;
        return pretend<core::Start>(truth, item);
    }));
}
TEST(PlantedDefect, an_intent_held_as_unknown_that_runs_again_by_itself_is_caught) {
    expect_caught(with([](core::Store&, Item& item) -> std::optional<core::StoreOutcome> {
        if (auto* acquire = std::get_if<core::Acquire>(&item.operation))
            acquire->policy.on_unknown = core::OnUnknown::rerun;
        return std::nullopt;
    }));
}
TEST(PlantedDefect, a_complete_that_is_swallowed_is_caught) {
    expect_caught(with(pretend<core::Complete>));
}
TEST(PlantedDefect, a_decision_under_the_old_token_is_caught) {
    // Resolve as a compare-and-set on nothing: it strikes whatever is there.
    expect_caught(with([](core::Store& truth, Item& item) -> std::optional<core::StoreOutcome> {
        auto* resolve = std::get_if<core::Resolve>(&item.operation);
        if (resolve == nullptr) return std::nullopt;
        const RecordPtr record = look(truth, item.key);
        if (!record || record->status != core::Status::processing) return std::nullopt;
        item.operation = core::Cancel{record->token, record->nonce, {}};
        return std::nullopt;
    }));
}
TEST(PlantedDefect, a_spool_that_forgets_is_caught) {
    RunOptions options;
    options.make_spool = [] { return std::make_unique<LeakySpool>(); };
    expect_caught(std::move(options));
}
TEST(PlantedDefect, an_overtaken_owners_answer_given_as_final_is_caught) {
    RunOptions options;
    options.defects.fenced_answer_is_final = true;
    expect_caught(std::move(options));
}
TEST(PlantedDefect, an_answer_without_a_record_given_as_final_is_caught) {
    RunOptions options;
    options.defects.pending_answer_is_final = true;
    expect_caught(std::move(options));
}

}  // namespace
}  // namespace semel::sim
