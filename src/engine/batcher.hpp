// Batcher: collects what a loop asks of the store within one turn and hands it over as one batch. A
// store that answers singly resumes each waiter as its answer comes.
#pragma once

#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "core/answers_singly.hpp"
#include "core/store.hpp"
#include "runtime/loop.hpp"

namespace semel::engine {

using base::Result;
using base::SteadyTime;
using core::Decided;
using runtime::Loop;
using runtime::Task;

/// One per loop, used on its thread; it may be destroyed while batches are out (their answers are
/// dropped then, and the coroutines that wait for them are destroyed by the loop, not resumed). The
/// loop and the store outlive it.
class Batcher {
  public:
    static constexpr std::size_t batch_items_max = 512;
    /// Room made for a batch beforehand.
    static constexpr std::size_t batch_items_usual = 32;
    /// Items that wait for an answer, over all batches. Above, the store is told to be unavailable:
    /// it does not keep up.
    static constexpr std::size_t waiting_items_max = 64 * 1024;
    /// How often deadlines are looked at: an answer is given up at most this much too late.
    static constexpr std::chrono::milliseconds deadline_step{50};

    /// Called on the loop for each batch that was answered: an outcome's store time, when the batch
    /// was sent, now.
    using Observer = std::function<void(core::StoreTime at, SteadyTime sent, SteadyTime answered)>;

    Batcher(Loop& loop, core::Store& store, Observer observer);
    ~Batcher();
    Batcher(const Batcher&) = delete;
    Batcher& operator=(const Batcher&) = delete;

    /// Submits `item` with the others of this loop turn. Error store_unavailable with applied ==
    /// unknown: no answer by `deadline` (it may still take effect); with applied == no:
    /// waiting_items_max is reached.
    Task<Result<Decided>> call(core::Item item, SteadyTime deadline = SteadyTime::max());

    [[nodiscard]] std::uint64_t batches() const { return batches_; }
    [[nodiscard]] std::size_t waiting() const { return waiting_; }

  private:
    using Handler =
        runtime::asio::async_result<runtime::UseAwaitable, void(Result<Decided>)>::handler_type;
    struct Waiter {
        std::optional<Handler> handler;  ///< Empty: its deadline passed.
        SteadyTime deadline;
    };
    struct Batch {
        std::vector<Waiter> waiters;
        core::BatchResults results;
        SteadyTime sent;
        std::size_t open = 0;  ///< Waiters that have no answer yet. Only where the store answers singly.
    };
    using BatchPtr = std::shared_ptr<Batch>;
    struct Answer {
        BatchPtr batch;
        std::size_t index;
        Result<Decided> result;
    };
    struct Gate;

    static Task<Result<Decided>> refuse();
    void add(core::Item item, SteadyTime deadline, Handler handler);
    void flush();
    void flush_singly(core::AnswersSingly& store, const BatchPtr& batch, std::vector<core::Item> items);
    void answered(const BatchPtr& batch);
    void answered_singly();
    void resume(Waiter& waiter, Result<Decided> result);
    void watch_deadlines();
    void expire();

    Loop& loop_;
    core::Store& store_;
    core::AnswersSingly* const singly_;  ///< The store as well; null: it answers batches.
    Observer observer_;
    std::shared_ptr<Gate> gate_;  ///< What the store's threads hold: outlives this object.
    std::vector<core::Item> items_;
    std::vector<Waiter> waiters_;  ///< Of items_.
    std::list<BatchPtr> out_;
    std::size_t waiting_ = 0;
    std::uint64_t batches_ = 0;
    runtime::TimerId deadline_timer_ = 0;
};

}  // namespace semel::engine
