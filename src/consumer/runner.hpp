// Runner: what takes the messages of one source, as it is seen by whoever starts and stops it. A
// Consumer makes their effects; an Observer only looks at them.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "brokers/source.hpp"

namespace semel::consumer {

/// How it stands, for people.
struct ConsumerState {
    std::string name, group, source, promise;
    std::string condition;  ///< "running", "paused", "draining", "ill", "stopped", "refused"
    std::string reason;     ///< Of a condition that is not running.
    std::vector<brokers::AssignmentState> partitions;
    std::vector<std::string>
        alarms;  ///< What a person should look at, in sentences; newest last, at most 20.
    std::size_t in_hand = 0, running = 0, waiting = 0, parked = 0;
};

/// Thread-safe. One that was started must be stopped before it ends.
class Runner {
  public:
    Runner() = default;
    Runner(const Runner&) = delete;
    Runner& operator=(const Runner&) = delete;
    virtual ~Runner() = default;

    /// Once. An Error: what is wrong in itself; it will never run.
    virtual base::Result<void> start() = 0;
    /// Takes nothing new and starts nothing; what runs ends. Membership stays.
    virtual void pause(std::string reason) = 0;
    virtual void resume() = 0;
    /// As pause(), and leaves when nothing runs any more. resume() does not undo it.
    virtual void drain() = 0;
    [[nodiscard]] virtual ConsumerState state() const = 0;
    /// Blocks. Idempotent.
    virtual void stop() = 0;
};

}  // namespace semel::consumer
