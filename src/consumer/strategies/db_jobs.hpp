// DbJobs: what the strategies on a database have in common: parts of runs wait for a connection,
// and an end that waits for what runs.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "consumer/strategies/db_workers.hpp"
#include "consumer/strategy.hpp"

namespace semel::consumer {

struct TakenPartition;

/// A part of one Strategy::run() that goes to one connection.
struct DbJob {
    std::vector<Message*> messages;
    Strategy::Answer answer;
    std::shared_ptr<TakenPartition> partition;  ///< Null: none is kept.
    bool alone = false;                         ///< As in Strategy::run.
};

/// For the loop's thread.
class DbJobs {
  public:
    /// On a connection's thread; what it gives back runs on the loop, and answers the messages.
    using Run = std::function<std::function<void()>(Link&, const std::shared_ptr<DbJob>&)>;

    /// Jobs are meant to have at most `batch_max` messages. `on_room` is called when there may be
    /// more capacity than before.
    DbJobs(runtime::Loop& loop, const inbox::Connect& connect, unsigned connections,
           std::size_t batch_max, Run run, std::function<void()> on_room);

    /// As Strategy::capacity().
    [[nodiscard]] std::size_t capacity() const;
    [[nodiscard]] std::size_t batch_max() const { return batch_max_; }
    [[nodiscard]] bool stopping() const { return stopping_; }
    /// After stop(): ends Held at once.
    void push(DbJob job);
    /// Messages of the assignment that have not begun end Fenced.
    void drop(const brokers::AssignmentPtr& assignment);
    /// Messages that have not begun end Held.
    void hold_back();
    /// Work beside the jobs.
    void start(LoopWorkers::Work work) { workers_.start(std::move(work)); }

    /// As Strategy::stop(). `busy`: whether something else has to end first; then ended() is to be
    /// called when it has.
    void stop(milliseconds within, std::function<void()> done, std::function<bool()> busy = {});
    void ended();

  private:
    void pump();

    runtime::Loop& loop_;
    const std::size_t batch_max_;
    const Run run_;
    const std::function<void()> on_room_;
    std::deque<DbJob> waiting_;
    bool stopping_ = false;
    std::function<void()> stopped_;
    std::function<bool()> busy_;
    runtime::TimerId stop_timer_ = 0;
    LoopWorkers workers_;  // last: its threads end first
};

}  // namespace semel::consumer
