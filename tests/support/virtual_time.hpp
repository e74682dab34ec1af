// A loop in virtual time, for fixtures: it passes as far as the next timer or event, and no further
// than it is told.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "runtime/loop.hpp"
#include "support/manual_clock.hpp"

namespace semel::support {

struct VirtualTime {
    ManualClock clock;
    runtime::Loop loop{clock, runtime::Loop::Mode::simulated};
    std::multimap<base::SteadyTime, std::function<void()>> events;

    void later(std::chrono::microseconds d, std::function<void()> fn) {
        events.emplace(clock.steady() + d, std::move(fn));
    }

    void run_for(std::chrono::microseconds d) {
        using std::chrono::microseconds;
        const base::SteadyTime end = clock.steady() + d;
        for (;;) {
            loop.fire_due();
            loop.run_ready();
            base::SteadyTime next = loop.next_timer().value_or(base::SteadyTime::max());
            if (!events.empty()) next = std::min(next, events.begin()->first);
            if (next > end) break;
            clock.advance(
                std::max(std::chrono::ceil<microseconds>(next - clock.steady()), microseconds{0}));
            while (!events.empty() && events.begin()->first <= clock.steady()) {
                auto event = events.extract(events.begin());
                event.mapped()();
            }
        }
        clock.advance(std::chrono::ceil<microseconds>(end - clock.steady()));
        loop.fire_due();
        loop.run_ready();
    }

    /// Runs a task to its end; virtual time passes as it needs.
    template <class T>
    T wait(runtime::Task<T> task) {
        std::optional<T> result;
        loop.spawn(store_into(std::move(task), result));
        run_until([&result] { return result.has_value(); });
        return std::move(*result);
    }
    void wait(runtime::Task<> task) {
        bool done = false;
        loop.spawn(set_when_done(std::move(task), done));
        run_until([&done] { return done; });
    }

    static runtime::Task<> set_when_done(runtime::Task<> task, bool& done) {
        co_await std::move(task);
        done = true;
    }

  private:
    template <class Done>
    void run_until(Done done) {
        constexpr int steps_max = 100'000;
        for (int i = 0; i < steps_max && !done(); ++i) run_for(std::chrono::milliseconds{1});
        EXPECT_TRUE(done()) << "it never ended";
    }
    template <class T>
    static runtime::Task<> store_into(runtime::Task<T> task, std::optional<T>& into) {
        into.emplace(co_await std::move(task));
    }
};

}  // namespace semel::support
