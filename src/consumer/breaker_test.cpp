// How many messages still meet a handler that has become ill, with a real strategy: what runs when
// the first of them says so, and then one probe at a time.
#include "consumer/breaker.hpp"

#include "consumer/consumer_world.hpp"
#include "consumer/strategies/recorded.hpp"
#include "stores/memory/memory_store.hpp"
#include "support/faulty_store.hpp"

namespace semel::consumer::testing_world {
namespace {

constexpr unsigned at_once = 100;

/// Answers after some time, each call another; well at first, then as it is told.
class FallingIll final : public Handler {
  public:
    explicit FallingIll(runtime::Loop& loop) : loop_(loop) {}

    std::optional<HandlerOutcome> illness;  ///< Of those that start from now on.
    std::size_t calls = 0, bad_calls = 0, open = 0, most_open = 0;
    /// Of those that started when the strategy had heard of the first bad one.
    std::size_t after_first_bad = 0, most_open_after = 0;

    void handle(const Message&, const Attempt&, Done done) override {
        ++calls;
        ++open;
        most_open = std::max(most_open, open);
        if (heard_) {
            ++after_first_bad;
            most_open_after = std::max(most_open_after, open);
        }
        const HandlerOutcome outcome = illness.value_or(Handled{});
        const bool bad = illness.has_value();
        if (bad) ++bad_calls;
        const auto takes = 20ms + std::chrono::milliseconds{calls % 7};
        loop_.at(loop_.now() + takes, [this, bad, outcome, done = std::move(done)] {
            --open;
            done(outcome);
            if (bad) loop_.post([this] { heard_ = true; });
        });
    }
    void cancel_all() override {}
    [[nodiscard]] std::string name() const override { return "the handler"; }

  private:
    runtime::Loop& loop_;
    bool heard_ = false;
};

struct BreakerOvershoot : ConsumerWorld {
    std::unique_ptr<core::Store> truth = stores::make_memory_store(clock);
    support::FaultyStore store{*truth,
                               [this](auto delay, auto fn) { loop.at(loop.now() + delay, fn); },
                               [](std::uint64_t bound) { return bound / 2; }};
    base::Hmac secret{"secret"};
    std::unique_ptr<Records> records = records_on_store(loop, store, secret, "the store");
    FallingIll handler{loop};
    std::unique_ptr<Strategy> recorded;
    std::size_t appended = 0;

    void TearDown() override {
        ConsumerWorld::TearDown();
        recorded.reset();
    }
    void pass(std::chrono::milliseconds time) {
        for (; time > 0ms; time -= 1ms) {
            clock.advance(1ms);
            round();
        }
    }
    void append_many(std::size_t count) {
        for (std::size_t n = 0; n < count; ++n, ++appended)
            append(appended % 2 == 0 ? p0 : p1, "m" + std::to_string(appended));
    }
    /// Under way, with more than the breaker looks back at behind it, and much before it.
    void start_well(bool hold_unknown) {
        RecordedOptions rules{.name = "orders", .owner = {"a", {}}, .concurrency = at_once};
        rules.hold_unknown = hold_unknown;
        rules.slot_until_recorded = true;
        recorded = make_recorded(loop, std::move(rules), *records, handler, counters);
        consumer =
            std::make_unique<Consumer>(loop, options, *source, *recorded, outlet.get(), counters);
        ASSERT_TRUE(consumer->start());
        until([&] {
            const auto held = source->state();
            return held.size() == 2 &&
                   std::ranges::all_of(held, [](const auto& one) { return one.begun; });
        });
        append_many(6000);
        while (counters.applied < 2000) pass(1ms);
        ASSERT_EQ(handler.most_open, at_once) << "as many as may run";
    }
    void falls_ill(HandlerOutcome with) {
        handler.illness = std::move(with);
        for (int ms = 0; counters.breaker_opened == 0 && ms < 5000; ++ms) pass(1ms);
        ASSERT_EQ(counters.breaker_opened, 1u);
    }
    [[nodiscard]] std::size_t records_that_are(core::Status status) const {
        std::size_t count = 0;
        std::string cursor;
        do {
            const auto page =
                truth->scan({.status = static_cast<std::uint8_t>(status)}, cursor, 1000);
            count += page->records.size();
            cursor = page->next;
        } while (!cursor.empty());
        return count;
    }
};

TEST_F(BreakerOvershoot, once_one_finds_the_handler_ill_none_starts_but_a_probe_now_and_then) {
    start_well(false);
    falls_ill(HandlerIll{"it answers 404"});
    EXPECT_EQ(handler.after_first_bad, 0u);
    EXPECT_LE(handler.bad_calls, at_once) << "those that ran when the first of them ended";
    advance(60s);
    EXPECT_GE(handler.after_first_bad, 4u);
    EXPECT_LE(handler.after_first_bad, 6u) << "after 1, 3, 7, 15, 31 and 61 s";
    EXPECT_EQ(handler.most_open_after, 1u);
    EXPECT_TRUE(letters().empty());
    handler.illness.reset();
    for (int ms = 0; counters.applied < appended && ms < 60'000; ++ms) pass(1ms);
    EXPECT_EQ(counters.applied, appended);
    EXPECT_EQ(handler.calls - handler.bad_calls, appended) << "each ran well once";
}

TEST_F(BreakerOvershoot, it_is_the_same_where_each_start_is_written_down) {
    start_well(true);
    falls_ill(HandlerIll{"it answers 401"});
    EXPECT_EQ(handler.after_first_bad, 0u);
    EXPECT_LE(handler.bad_calls, at_once);
    advance(60s);
    EXPECT_LE(handler.after_first_bad, 6u);
    EXPECT_EQ(handler.most_open_after, 1u);
    EXPECT_TRUE(letters().empty());
}

TEST_F(BreakerOvershoot, what_is_claimed_ahead_is_given_back_when_too_many_would_be_dead) {
    start_well(false);
    falls_ill(HandledFatal{"it answers 400"});
    const std::size_t met = handler.bad_calls;
    pass(500ms);
    EXPECT_EQ(handler.bad_calls, met) << "none starts once it is open";
    EXPECT_LE(met, 2 * at_once) << "some start while the first verdicts are written down";
    EXPECT_LE(records_that_are(core::Status::dead), met);
    EXPECT_LE(letters().size(), 51u);
    EXPECT_GT(counters.in_hand, 2 * met) << "there was more to be met";
    advance(60s);
    EXPECT_LE(handler.bad_calls, met + 6);
}

}  // namespace
}  // namespace semel::consumer::testing_world
