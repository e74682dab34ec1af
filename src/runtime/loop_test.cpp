#include "runtime/loop.hpp"

#include <gtest/gtest.h>

#include <thread>

#include "runtime/signal.hpp"

namespace semel::runtime {
namespace {

using namespace std::chrono_literals;

TEST(Loop, timers_fire_in_order_and_a_cancelled_one_does_not) {
    Loop loop(base::system_clocks());
    std::string order;
    loop.at(loop.now() + 3ms, [&] { order += 'b'; });
    loop.at(loop.now() + 1ms, [&] { order += 'a'; });
    const TimerId cancelled = loop.at(loop.now() + 2ms, [&] { order += 'x'; });
    loop.cancel(cancelled);
    loop.io().run();
    EXPECT_EQ(order, "ab");
}

Task<> waits_for(Signal& signal, Loop& loop, SteadyTime deadline, bool& notified) {
    notified = co_await signal.wait(loop, signal.version(), deadline);
}

Task<> waits_since(Signal& signal, Loop& loop, std::uint64_t seen, bool& notified) {
    notified = co_await signal.wait(loop, seen, SteadyTime::max());
}

TEST(Signal, a_waiter_is_woken_from_another_thread) {
    Loop loop(base::system_clocks());
    Signal signal;
    bool notified = false;
    // The version is from before the other thread begins: whether it is faster or slower than the
    // wait must not matter.
    loop.spawn(waits_since(signal, loop, signal.version(), notified));
    std::thread other([&] { signal.notify(); });
    loop.io().run();
    other.join();
    EXPECT_TRUE(notified);
    EXPECT_EQ(loop.spawned(), 0u);
}

TEST(Signal, a_deadline_ends_the_wait) {
    Loop loop(base::system_clocks());
    Signal signal;
    bool notified = true;
    loop.spawn(waits_for(signal, loop, loop.now() + 1ms, notified));
    loop.io().run();
    EXPECT_FALSE(notified);
}

Task<> sees_a_change_before_the_wait(Signal& signal, Loop& loop, bool& notified) {
    const auto seen = signal.version();
    signal.notify();
    notified = co_await signal.wait(loop, seen, SteadyTime::max());
}

TEST(Signal, a_change_between_look_and_wait_is_not_lost) {
    Loop loop(base::system_clocks());
    Signal signal;
    bool notified = false;
    loop.spawn(sees_a_change_before_the_wait(signal, loop, notified));
    loop.io().run();
    EXPECT_TRUE(notified);
}

}  // namespace
}  // namespace semel::runtime
