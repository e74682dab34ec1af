#include "http/deadlines.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>

namespace semel::http {
namespace {

using namespace std::chrono_literals;

class HandClock final : public base::Clock {
  public:
    base::SteadyTime now{1000s};
    base::SteadyTime steady() const override { return now; }
    std::int64_t wall_us() const override { return 0; }
};

class Probe final : public Deadline {
  public:
    Probe(const std::shared_ptr<Deadlines>& list, std::function<void()> f)
        : Deadline(list), fn(std::move(f)) {}

  private:
    void expired() override {
        const auto call = fn;  // it may destroy this object
        call();
    }
    std::function<void()> fn;
};

class DeadlinesTest : public testing::Test {
  protected:
    void advance(std::chrono::milliseconds by) {
        clock_.now += by;
        loop_.fire_due();
    }
    HandClock clock_;
    runtime::Loop loop_{clock_, runtime::Loop::Mode::simulated};
    std::shared_ptr<Deadlines> list_ = std::make_shared<Deadlines>(loop_);
};

TEST_F(DeadlinesTest, each_passes_once_when_its_time_has_come) {
    std::string order;
    Probe early(list_, [&] { order += 'e'; });
    Probe late(list_, [&] { order += 'l'; });
    Probe cleared(list_, [&] { order += 'c'; });
    late.set(300ms);
    cleared.set(200ms);
    early.set(100ms);
    cleared.clear();
    advance(99ms);
    EXPECT_EQ(order, "");
    advance(1ms);
    EXPECT_EQ(order, "e");
    EXPECT_FALSE(early.is_set());
    late.set(500ms);  // later than before: the timer for the old one passes for nothing
    advance(300ms);
    EXPECT_EQ(order, "e");
    advance(200ms);
    EXPECT_EQ(order, "el");
    advance(10s);
    EXPECT_EQ(order, "el");
    EXPECT_FALSE(loop_.next_timer()) << "nothing is due, nothing is armed";
}

TEST_F(DeadlinesTest, one_that_passes_may_destroy_itself_and_others_and_set_new_ones) {
    int passed = 0;
    std::optional<Probe> first, second, third;
    Probe survivor(list_, [&] { ++passed; });
    const auto all_go = [&] {
        ++passed;
        first.reset();
        second.reset();
        third.reset();
        survivor.set(50ms);
    };
    first.emplace(list_, all_go);
    second.emplace(list_, all_go);
    third.emplace(list_, all_go);
    first->set(10ms);
    second->set(10ms);
    third->set(10ms);
    advance(10ms);
    EXPECT_EQ(passed, 1) << "the others of the same moment are gone";
    advance(50ms);
    EXPECT_EQ(passed, 2);
}

TEST_F(DeadlinesTest, deadlines_that_move_on_cost_no_timers) {
    Probe busy(list_, [] {});
    busy.set(100ms);
    const auto armed = loop_.next_timer();
    for (int i = 0; i < 1000; ++i) {
        clock_.now += 10us;
        busy.set(100ms);
    }
    EXPECT_EQ(loop_.next_timer(), armed);
}

TEST_F(DeadlinesTest, a_list_may_end_before_its_timer_fires) {
    {
        Probe probe(list_, [] { FAIL(); });
        probe.set(10ms);
    }
    list_.reset();
    advance(20ms);
    EXPECT_FALSE(loop_.next_timer());
}

}  // namespace
}  // namespace semel::http
