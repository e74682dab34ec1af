// Breaker: when a consumer stops by itself because not its messages but something around them is
// ill.
#pragma once

#include <bitset>
#include <chrono>
#include <cstddef>
#include <string>

#include "base/time.hpp"

namespace semel::consumer {

struct BreakerRules {
    double dead_share = 0.5;  ///< Of the last `of` decided messages; more opens. 0: never.
    /// Wait before the first probe; doubled after each that did not close it, up to probe_max.
    std::chrono::milliseconds probe_first{1000};
    std::chrono::milliseconds probe_max{30'000};
};

/// Closed: everything runs. Open: nothing runs until the next probe is due; then one message runs.
/// A value, used by one thread.
///
/// It opens for one of two reasons. Ill: a run said so; whatever shows that it is over closes it.
/// Dead letters: too many of the last messages would have become some. The first `of` messages
/// count as if as many good ones had come before them, so that a single bad one opens nothing and
/// most of the first hundred do. Then only a message that is applied closes it: a duplicate says
/// nothing of the handler, and one that failed once more is what it opened for.
///
/// What runs already when it opens may be given up in the records all the same. So until `of` were
/// decided, and while more than half as many as would open it are dead, no more may run at once
/// than would open it if all of them died: each that does not die makes room for one more.
class Breaker {
  public:
    static constexpr std::size_t of = 100;
    /// So many may always run at once.
    static constexpr std::size_t running_least = 10;

    explicit Breaker(BreakerRules rules) : rules_(rules) {}

    /// A message was decided. With `dead` true it would get a dead letter. True: the breaker is
    /// open because of it (and of others before it); the letter is not to be written, the message
    /// runs again.
    bool decided(bool dead, base::SteadyTime now);
    /// A run found the handler, the store or the database ill. True: it has just opened.
    bool ill(std::string reason, base::SteadyTime now);
    /// How a probe ended that was neither ill nor dead.
    enum class Probe {
        applied,    ///< It ran well.
        duplicate,  ///< It had run before.
        failed,     ///< It ran, and failed as a message may.
    };
    /// True: it was open and is closed.
    bool probed(Probe how, base::SteadyTime now);
    /// How many may start now beside those that run: as many as one likes (npos), or so many. While
    /// it is open: none, or one (a probe).
    [[nodiscard]] std::size_t allowed(base::SteadyTime now, std::size_t running) const;
    /// When the next probe is due; SteadyTime::max(): it is closed.
    [[nodiscard]] base::SteadyTime next_probe() const;
    [[nodiscard]] bool open() const { return open_; }
    /// Why; empty while closed.
    [[nodiscard]] const std::string& reason() const { return reason_; }
    /// After a person has said so (resume): closed, its memory cleared.
    void reset();

    static constexpr std::size_t npos = static_cast<std::size_t>(-1);

  private:
    [[nodiscard]] std::size_t dead_at_most() const;
    bool note(bool dead);
    void open_now(std::string reason, base::SteadyTime now);
    void back_off(base::SteadyTime now);

    BreakerRules rules_;
    std::string reason_;
    std::bitset<of> dead_;  ///< Of the last decided, as a ring.
    std::size_t at_ = 0;
    std::size_t decided_ = 0;  ///< Since the start, a closing or a reset; at most `of`.
    bool open_ = false;
    bool over_letters_ = false;  ///< Open, and because of dead letters.
    std::chrono::milliseconds wait_{0};
    base::SteadyTime next_probe_{};
};

}  // namespace semel::consumer
