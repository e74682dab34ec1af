// Clean-up: when it runs, in which steps, and that nothing waits for it. In virtual time.
#include "engine/sweeper.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "stores/memory/memory_store.hpp"
#include "support/virtual_time.hpp"

namespace semel::engine {
namespace {

using namespace std::chrono_literals;

/// A memory store with so many expired records besides. Each purge takes some virtual time, as the
/// test's runner gives it.
class Heap final : public core::Store {
  public:
    explicit Heap(base::Clock& clock) : clock_(clock), inner_(stores::make_memory_store(clock)) {}

    std::size_t expired = 0;
    bool down = false;
    std::vector<base::SteadyTime> purges;  ///< When each purge was asked for.

    void submit(std::vector<core::Item> items, core::BatchDone done) override {
        inner_->submit(std::move(items), std::move(done));
    }
    base::Result<core::ScanPage> scan(const core::ScanFilter& filter, const std::string& cursor,
                                      std::size_t limit) override {
        return inner_->scan(filter, cursor, limit);
    }
    base::Result<std::size_t> purge(std::size_t limit) override {
        purges.push_back(clock_.steady());
        if (down) return base::Error{.code = base::ErrorCode::store_unavailable};
        const std::size_t gone = std::min(limit, expired);
        expired -= gone;
        return gone;
    }
    [[nodiscard]] core::StoreTime now() const override { return inner_->now(); }
    [[nodiscard]] core::Durability durability() const override { return {}; }
    base::Result<void> health() override { return {}; }
    void stop() override {}

  private:
    base::Clock& clock_;
    std::unique_ptr<core::Store> inner_;
};

struct CleanUp : testing::Test, support::VirtualTime {
    static constexpr auto start_of_day = 8h;  ///< The manual clock begins at 08:00 UTC.

    Heap store{clock};
    HotRecords hot{1 << 20};
    std::unique_ptr<Spool> spool = std::move(*Spool::open(""));
    EngineCounters counters;
    Engine engine{loop, store, {.owner = {"a", {}}, .lease = 9s}, hot, *spool, counters};
    std::chrono::microseconds work_takes{0};
    std::vector<std::chrono::nanoseconds> steps;
    std::unique_ptr<Sweeper> sweeper;

    void start(SweeperOptions options) {
        options.on_purge_step = [this](std::chrono::nanoseconds took) { steps.push_back(took); };
        // One after the other, as on the sweeper's own thread.
        auto free_at = std::make_shared<base::SteadyTime>(clock.steady());
        sweeper = std::make_unique<Sweeper>(
            engine, std::move(options), [this, free_at](std::function<void()> work) {
                *free_at = std::max(*free_at, clock.steady()) + work_takes;
                later(std::chrono::ceil<std::chrono::microseconds>(*free_at - clock.steady()),
                      std::move(work));
            });
        sweeper->start();
    }
    /// Since the manual clock's beginning.
    [[nodiscard]] std::chrono::microseconds since_start() const {
        return std::chrono::microseconds{clock.wall_us() - support::ManualClock::start_wall_us};
    }
    void run_until(std::chrono::microseconds time_of_day) {
        run_for(time_of_day - start_of_day - since_start());
    }
};

TEST_F(CleanUp, a_pass_ends_when_nothing_expired_is_left_or_at_its_limit_and_says_which) {
    store.expired = 64 * 512 + 10;
    start({.every = 3s, .takeover_grace = 3s});
    run_for(2900ms);
    EXPECT_TRUE(store.purges.empty());
    run_for(200ms);
    EXPECT_EQ(store.purges.size(), 64u);
    EXPECT_EQ(store.expired, 10u);
    EXPECT_EQ(counters.purge_behind, 1u);
    run_for(3s);
    EXPECT_EQ(store.purges.size(), 65u) << "a step that found less than it may take was the last";
    EXPECT_EQ(store.expired, 0u);
    EXPECT_EQ(counters.purge_behind, 0u);
    EXPECT_EQ(counters.purged, 64u * 512 + 10);
    EXPECT_EQ(steps.size(), 65u);
    wait(sweeper->stop());
}

TEST_F(CleanUp, between_two_steps_it_rests_as_long_as_the_store_took) {
    store.expired = 250;
    work_takes = 40ms;
    start({.every = 1h, .takeover_grace = 3s, .purge_every = 5s, .purge_step = 100});
    run_for(6s);
    ASSERT_EQ(store.purges.size(), 3u);
    EXPECT_EQ(store.purges[1] - store.purges[0], 80ms);
    EXPECT_EQ(store.purges[2] - store.purges[1], 80ms);
    EXPECT_EQ(steps, (std::vector<std::chrono::nanoseconds>{40ms, 40ms, 40ms}));
    wait(sweeper->stop());
}

TEST_F(CleanUp, a_store_that_fails_is_left_alone_until_the_next_pass) {
    store.expired = 5;
    store.down = true;
    start({.every = 1h, .takeover_grace = 3s, .purge_every = 10s});
    run_for(11s);
    EXPECT_EQ(store.purges.size(), 1u);
    EXPECT_EQ(counters.store_errors, 1u);
    EXPECT_EQ(counters.purge_behind, 1u);
    store.down = false;
    run_for(8s);
    EXPECT_EQ(store.purges.size(), 1u);
    run_for(2s);
    EXPECT_EQ(store.purges.size(), 2u);
    EXPECT_EQ(counters.purge_behind, 0u);
    wait(sweeper->stop());
}

TEST_F(CleanUp, with_a_time_of_day_it_runs_in_that_window_only) {
    start({.every = 1h,
           .takeover_grace = 3s,
           .purge_every = 10min,
           .purge_at = 23h + 30min,
           .purge_window = 1h});
    run_until(23h + 29min + 59s);
    EXPECT_TRUE(store.purges.empty());
    run_until(23h + 31min);
    EXPECT_EQ(store.purges.size(), 1u) << "not a whole interval later";
    run_until(24h + 29min + 59s);
    EXPECT_EQ(store.purges.size(), 6u) << "the window goes on past midnight";
    run_until(24h + 23h + 29min);
    EXPECT_EQ(store.purges.size(), 6u);
    run_until(24h + 23h + 31min);
    EXPECT_EQ(store.purges.size(), 7u);
    wait(sweeper->stop());
}

TEST_F(CleanUp, the_end_of_the_window_ends_a_pass_and_what_is_left_is_said) {
    store.expired = 1'000'000;
    work_takes = 10s;
    start({.every = 24h,
           .takeover_grace = 3s,
           .purge_every = 1s,
           .purge_at = 9h,
           .purge_window = 1min});
    run_until(12h);
    EXPECT_EQ(store.purges.size(), 3u) << "one each 20 s";
    EXPECT_EQ(counters.purge_behind, 1u);
    wait(sweeper->stop());
}

TEST_F(CleanUp, a_wall_clock_that_is_set_opens_the_window_within_a_minute) {
    start({.every = 1h, .takeover_grace = 3s, .purge_every = 10s, .purge_at = 3h});
    run_for(1min);
    EXPECT_TRUE(store.purges.empty());
    clock.jump_wall(-5h);
    run_for(1min);
    EXPECT_FALSE(store.purges.empty());
    wait(sweeper->stop());
}

TEST_F(CleanUp, dead_leases_are_settled_in_time_whether_it_runs_rests_or_waits_for_its_window) {
    const auto dead = [this](const std::string& name) {
        Engine::AcquireRequest request;
        request.key = base::sha256(name);
        request.fingerprint.raw = base::sha256("body of " + name);
        const auto acquired = wait(engine.acquire(std::move(request)));
        EXPECT_TRUE(acquired && acquired->lease);
    };
    store.expired = 1'000'000;
    work_takes = 500ms;
    dead("while it runs");
    start({.every = 3s, .takeover_grace = 3s});
    run_for(20s);  // a pass of clean-up takes a minute
    EXPECT_GT(store.purges.size(), 10u);
    EXPECT_LT(store.purges.size(), 64u) << "still the first pass";
    EXPECT_EQ(counters.swept, 1u);
    wait(sweeper->stop());

    dead("while it waits");
    const std::size_t before = store.purges.size();
    start({.every = 3s, .takeover_grace = 3s, .purge_at = 3h});
    run_for(20s);
    EXPECT_EQ(store.purges.size(), before);
    EXPECT_EQ(counters.swept, 2u);
    wait(sweeper->stop());
}

TEST_F(CleanUp, a_messages_dead_lease_is_left_to_its_next_delivery_which_charges_the_crash) {
    core::Acquire claim{.fingerprint = {.raw = base::sha256("payload"), .canonical = {}},
                        .owner = {"consumer", {}},
                        .nonce = {},
                        .lease = 1s,
                        .not_after = {std::numeric_limits<std::int64_t>::max()},
                        .policy = {.kind = core::IntentKind::message},
                        .starts_call = true,
                        .charge_crash = true,
                        .label = {},
                        .tenant = {},
                        .turn = nullptr};
    const base::Digest key = base::sha256("a message");
    claim.nonce.bytes.fill(1);
    ASSERT_TRUE(wait(engine.ask({key, claim})));
    start({.every = 1s, .takeover_grace = 1s});
    run_for(10s);
    EXPECT_EQ(counters.swept, 0u);
    claim.nonce.bytes.fill(2);
    const auto again = wait(engine.ask({key, claim}));
    ASSERT_TRUE(again);
    EXPECT_EQ(std::get<core::Granted>(again->outcome).kind, core::Granted::Kind::takeover);
    const auto found = wait(engine.ask({key, core::Get{}}));
    EXPECT_EQ(std::get<core::Found>(found->outcome).record->crashes_charged, 1u);
    wait(sweeper->stop());
}

}  // namespace
}  // namespace semel::engine
