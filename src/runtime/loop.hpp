// Loop: one event loop, run by one thread: its executor, its timers, its time. Real or virtual
// (simulation).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "base/time.hpp"
#include "runtime/asio.hpp"

namespace semel::runtime {

using base::SteadyTime;

/// Names a timer of one loop; 0 names none.
using TimerId = std::uint64_t;

/// All functions but post() and executor() are for the loop's own thread.
/// Timers are kept in one ordered map behind a single Asio timer, so that a deadline per request
/// costs a map node and no kernel timer. In a simulation there is no Asio timer: the driver asks
/// for next_timer(), moves its clock and calls fire().
class Loop {
  public:
    enum class Mode { real, simulated };
    explicit Loop(base::Clock& clock, Mode mode = Mode::real);
    ~Loop();
    Loop(const Loop&) = delete;
    Loop& operator=(const Loop&) = delete;

    [[nodiscard]] Executor executor() { return io_.get_executor(); }
    [[nodiscard]] asio::io_context& io() { return io_; }
    [[nodiscard]] base::Clock& clock() { return clock_; }
    [[nodiscard]] SteadyTime now() const { return clock_.steady(); }

    /// Calls `fire` on this loop at or soon after `when` (real mode: within a millisecond or so).
    TimerId at(SteadyTime when, std::function<void()> fire);
    /// Forgets the timer; no effect if it fired or is 0.
    void cancel(TimerId id);

    /// Suspends until `when`.
    Task<> sleep_until(SteadyTime when);
    Task<> sleep_for(std::chrono::nanoseconds d) { return sleep_until(now() + d); }

    /// Runs `fn` on this loop's thread, later. From any thread.
    template <class Fn>
    void post(Fn&& fn) {
        asio::post(io_, std::forward<Fn>(fn));
    }

    /// Starts a coroutine that nobody awaits. It is counted in `spawned()` until it ends; an
    /// exception that leaves it ends the process (a coroutine of ours turns errors into values).
    void spawn(Task<> task);
    [[nodiscard]] std::size_t spawned() const { return spawned_; }

    /// A coroutine of this loop that waits for something outside it. The loop destroys what still
    /// waits when it is itself destroyed, so that a simulated crash (or a test's end) leaves no
    /// coroutine behind.
    class Suspended {
      public:
        Suspended() = default;
        Suspended(const Suspended&) = delete;
        Suspended& operator=(const Suspended&) = delete;
        virtual ~Suspended() = default;
        /// Destroys the coroutine without resuming it.
        virtual void abandon() = 0;

      private:
        friend class Loop;
        Suspended* previous_ = nullptr;
        Suspended* next_ = nullptr;
    };
    void suspend(Suspended& waits);
    void resume(Suspended& waits);

    // ---- simulation only
    /// Runs handlers until none is ready.
    void run_ready();
    [[nodiscard]] std::optional<SteadyTime> next_timer() const;
    /// Fires all timers due at now().
    void fire_due();

  private:
    void arm();

    base::Clock& clock_;
    Mode mode_;
    using TimerMap = std::multimap<SteadyTime, std::pair<TimerId, std::function<void()>>>;
    TimerMap timers_;
    std::map<TimerId, TimerMap::iterator> by_id_;
    TimerId last_id_ = 0;
    Suspended* suspended_ = nullptr;  ///< Doubly linked.
    asio::io_context io_;  // after the timers: coroutines that it destroys may still cancel theirs
    asio::basic_waitable_timer<std::chrono::steady_clock,
                               asio::wait_traits<std::chrono::steady_clock>, Executor>
        timer_;
    SteadyTime armed_for_ = SteadyTime::max();
    std::size_t spawned_ = 0;
};

}  // namespace semel::runtime
