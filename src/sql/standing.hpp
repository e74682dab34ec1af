// Standing: what this process knows of its database from the answers that came and did not come: whether it answers, since when,
// and what its clock says.
#pragma once

#include <chrono>
#include <mutex>
#include <string>

#include "base/result.hpp"
#include "base/time.hpp"

namespace semel::sql {

using base::SteadyTime;
using base::StoreTime;

/// Thread-safe.
class Standing {
  public:
    /// A connection without anything to do asks for the time so often.
    static constexpr std::chrono::milliseconds probe_every{500};
    /// Three probes were not answered: the database is out, and owners may not be able to renew.
    static constexpr std::chrono::milliseconds silence_limit{1500};

    Standing();

    /// A statement was answered.
    void answered(SteadyTime sent, SteadyTime received);
    /// It told the database's time, read between these two moments.
    void told(StoreTime at, SteadyTime sent, SteadyTime received);
    /// One connection more may be used.
    void connected();
    /// One of them is of no use any more. `words`: what happened and what to do.
    void broke(std::string words);
    /// A connection could not be made; that matters if there is no other.
    void unreachable(std::string words);
    /// A write was refused for want of room: no owner can renew.
    void full();
    /// To be called now and then: notices silence.
    void look(SteadyTime now);
    /// Whether it was long enough silent to ask for the time; true once in probe_every.
    bool probe_due(SteadyTime now);

    [[nodiscard]] StoreTime now() const;
    [[nodiscard]] SteadyTime answering_since() const;
    /// What is wrong; empty: it answers.
    [[nodiscard]] std::string problem() const;

  private:
    mutable std::mutex mutex_;  // guards all below
    bool answering_ = false;
    unsigned connections_ = 0;
    std::string problem_ = "no connection was made yet";
    SteadyTime since_;
    SteadyTime last_answer_;
    SteadyTime last_probe_;
    SteadyTime full_at_ = SteadyTime::min();
    // The database's clock minus the steady one, in us, lay between these two at clock_at_.
    std::int64_t offset_low_;
    std::int64_t offset_high_;
    SteadyTime clock_at_ = SteadyTime::min();  ///< min: guessed from this machine's clock.
};

}  // namespace semel::sql
