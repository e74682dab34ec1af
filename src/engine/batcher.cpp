#include "engine/batcher.hpp"

#include <algorithm>
#include <mutex>

namespace semel::engine {

namespace asio = runtime::asio;

// The store's threads post through it. Closed under its mutex before the batcher goes, so that no
// post meets a dead loop.
struct Batcher::Gate {
    std::mutex mutex;
    Batcher* batcher = nullptr;
    std::vector<Answer> answers;  ///< Of single items; while there are any, a post for them is under way.
};

Batcher::Batcher(Loop& loop, core::Store& store, Observer observer)
    : loop_(loop),
      store_(store),
      singly_(dynamic_cast<core::AnswersSingly*>(&store)),
      observer_(std::move(observer)),
      gate_(std::make_shared<Gate>()) {
    gate_->batcher = this;
}

Batcher::~Batcher() {
    {
        const std::lock_guard lock(gate_->mutex);
        gate_->batcher = nullptr;
    }
    loop_.cancel(deadline_timer_);
    // Handlers are destroyed here, on the loop's thread: a store that still holds the batch must
    // find none in it.
    for (const BatchPtr& batch : out_) batch->waiters.clear();
}

Task<Result<Decided>> Batcher::refuse() {
    co_return base::Error{
        .code = base::ErrorCode::store_unavailable,
        .applied = base::Applied::no,
        .retry_after = std::chrono::seconds{1},
        .detail = "the store does not keep up: " + std::to_string(waiting_items_max) +
                  " operations of one event loop wait for it; send less or use a faster disk"};
}

Task<Result<Decided>> Batcher::call(core::Item item, SteadyTime deadline) {
    if (waiting_ >= waiting_items_max) return refuse();
    runtime::UseAwaitable token;  // async_initiate of Boost 1.81 wants an lvalue
    return asio::async_initiate<runtime::UseAwaitable, void(Result<Decided>)>(
        [this, item = std::move(item), deadline](Handler handler) mutable {
            add(std::move(item), deadline, std::move(handler));
        },
        token);
}

void Batcher::add(core::Item item, SteadyTime deadline, Handler handler) {
    ++waiting_;
    if (items_.empty()) {
        // An item is large and growing moves them all.
        items_.reserve(batch_items_usual);
        waiters_.reserve(batch_items_usual);
    }
    items_.push_back(std::move(item));
    waiters_.push_back(Waiter{std::move(handler), deadline});
    if (items_.size() == 1) {
        // Behind everything that is ready now: the rest of this turn joins the batch.
        loop_.post([gate = gate_] {
            if (gate->batcher != nullptr) gate->batcher->flush();
        });
    } else if (items_.size() == batch_items_max) {
        flush();
    }
}

void Batcher::flush() {
    if (items_.empty()) return;  // a full batch left before its turn was over
    auto batch = std::make_shared<Batch>();
    batch->waiters = std::exchange(waiters_, {});
    batch->sent = loop_.now();
    out_.push_back(batch);
    ++batches_;
    const bool timed = std::any_of(batch->waiters.begin(), batch->waiters.end(),
                                   [](const Waiter& w) { return w.deadline != SteadyTime::max(); });
    if (timed) watch_deadlines();
    std::vector<core::Item> items = std::exchange(items_, {});
    if (singly_ != nullptr) return flush_singly(*singly_, batch, std::move(items));
    store_.submit(std::move(items), [gate = gate_, batch](core::BatchResults results) {
        batch->results = std::move(results);
        const std::lock_guard lock(gate->mutex);
        if (gate->batcher == nullptr) return;
        gate->batcher->loop_.post([gate, batch] {
            if (gate->batcher != nullptr) gate->batcher->answered(batch);
        });
    });
}

void Batcher::flush_singly(core::AnswersSingly& store, const BatchPtr& batch,
                           std::vector<core::Item> items) {
    batch->open = items.size();
    const auto done = [gate = gate_, batch](std::size_t index, Result<Decided> result) {
        const std::lock_guard lock(gate->mutex);
        if (gate->batcher == nullptr) return;
        gate->answers.push_back({batch, index, std::move(result)});
        // One post for what a statement answers at once.
        if (gate->answers.size() > 1) return;
        gate->batcher->loop_.post([gate] {
            if (gate->batcher != nullptr) gate->batcher->answered_singly();
        });
    };
    store.submit_singly(std::move(items), done);
}

void Batcher::answered_singly() {
    std::vector<Answer> answers;
    {
        const std::lock_guard lock(gate_->mutex);
        answers.swap(gate_->answers);
    }
    for (Answer& answer : answers) {
        if (--answer.batch->open == 0) std::erase(out_, answer.batch);
        --waiting_;
        if (observer_ && answer.result) observer_(answer.result->at, answer.batch->sent, loop_.now());
        resume(answer.batch->waiters[answer.index], std::move(answer.result));
    }
}

void Batcher::resume(Waiter& waiter, Result<Decided> result) {
    if (!waiter.handler) return;
    Handler handler = std::move(*waiter.handler);
    waiter.handler.reset();
    std::move(handler)(std::move(result));
}

void Batcher::answered(const BatchPtr& batch) {
    std::erase(out_, batch);
    SEMEL_ASSERT(batch->results.size() == batch->waiters.size(),
                 "a store gives one result per item");
    waiting_ -= batch->waiters.size();
    if (observer_) {
        const auto decided = std::find_if(batch->results.begin(), batch->results.end(),
                                          [](const Result<Decided>& r) { return r.has_value(); });
        if (decided != batch->results.end()) observer_((*decided)->at, batch->sent, loop_.now());
    }
    // Resumes the coroutines right here: one post for the whole batch.
    for (std::size_t i = 0; i < batch->waiters.size(); ++i)
        resume(batch->waiters[i], std::move(batch->results[i]));
}

void Batcher::watch_deadlines() {
    if (deadline_timer_ != 0) return;
    deadline_timer_ = loop_.at(loop_.now() + deadline_step, [this] {
        deadline_timer_ = 0;
        expire();
    });
}

void Batcher::expire() {
    const SteadyTime now = loop_.now();
    std::vector<Handler> late;
    bool more = false;
    for (const BatchPtr& batch : out_) {
        for (Waiter& waiter : batch->waiters) {
            if (!waiter.handler || waiter.deadline == SteadyTime::max()) continue;
            if (waiter.deadline > now) {
                more = true;
                continue;
            }
            late.push_back(std::move(*waiter.handler));
            waiter.handler.reset();
        }
    }
    if (more) watch_deadlines();
    for (Handler& handler : late) {
        base::Error error{.code = base::ErrorCode::store_unavailable,
                          .applied = base::Applied::unknown,
                          .retry_after = std::chrono::seconds{1},
                          .detail = "the store did not answer in time"};
        std::move(handler)(Result<Decided>(std::move(error)));
    }
}

}  // namespace semel::engine
