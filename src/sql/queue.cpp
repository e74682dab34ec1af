#include "sql/queue.hpp"

#include <algorithm>
#include <atomic>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/parking.hpp"

namespace semel::sql {

struct Submission {
    Listener done;
    core::BatchResults results;  ///< Empty if each is told by itself.
    std::atomic<std::size_t> open{0};
    Tasks held;  ///< By index; null once queued. Guarded by the queue's lock.
};

namespace {

using std::chrono::steady_clock;

/// Tasks looked at for one batch: those of a key that is in it already are passed over, and there
/// may be many.
constexpr std::size_t looked_at_per_item = 4;

template <class T>
bool is(const core::StoreOperation& operation) {
    return std::holds_alternative<T>(operation);
}

/// What was submitted about a list of parked messages so far.
struct ListItems {
    std::optional<std::size_t> whole;  ///< The last one about all of it,
    std::vector<std::size_t> since;    ///< and those about places behind that.
};

/// Which items must wait for which, so that all are applied as if one after the other.
void put_in_order(const std::vector<core::Item>& items, Tasks& tasks) {
    const auto after = [&](std::size_t former, std::size_t i) {
        tasks[former]->followers.push_back(i);
        ++tasks[i]->waits_for;
    };
    std::unordered_map<StoredKey, std::size_t, base::DigestHash> last;
    const auto after_last_on = [&](const StoredKey& key, std::size_t i) {
        const auto [it, first] = last.try_emplace(key, i);
        if (!first && it->second != i) after(it->second, i);
        it->second = i;
    };
    // What a person resolved may append to any conversation: only its record says to which.
    std::optional<std::size_t> resolve;
    std::vector<std::size_t> talk_since;
    std::unordered_map<StoredKey, ListItems, base::DigestHash> lists;
    for (std::size_t i = 0; i < items.size(); ++i) {
        after_last_on(tasks[i]->touches, i);
        if (const auto part = core::parking_part(items[i].operation);
            part != core::ParkingPart::none) {
            ListItems& list = lists[items[i].key];
            if (list.whole) after(*list.whole, i);
            if (part == core::ParkingPart::place) {
                list.since.push_back(i);
                continue;
            }
            for (const std::size_t former : list.since) after(former, i);
            list.since.clear();
            list.whole = i;
            continue;
        }
        if (tasks[i]->conversation) after_last_on(*tasks[i]->conversation, i);
        const core::StoreOperation& operation = items[i].operation;
        if (is<core::Resolve>(operation)) {
            if (resolve) after(*resolve, i);
            for (const std::size_t former : talk_since) after(former, i);
            talk_since.clear();
            resolve = i;
        } else if (tasks[i]->conversation || is<core::GetConversation>(operation) ||
                   is<core::GetTurns>(operation) || is<core::DeleteConversation>(operation)) {
            if (resolve) after(*resolve, i);
            talk_since.push_back(i);
        }
    }
}

}  // namespace

Kind first_kind(const core::StoreOperation& operation, bool known) {
    if (is<core::Acquire>(operation)) return known ? Kind::read : Kind::insert;
    if (const auto* complete = std::get_if<core::Complete>(&operation)) {
        // The statement compares bytes; that the empty nonce is nobody's says decide().
        return complete->nonce == Nonce{} ? Kind::change : Kind::complete;
    }
    if (is<core::Get>(operation)) return Kind::read;
    if (is<core::Park>(operation)) return Kind::park;
    if (is<core::Unpark>(operation)) return Kind::unpark;
    if (is<core::PutChunk>(operation) || is<core::GetChunk>(operation) ||
        is<core::GetConversation>(operation) || is<core::GetTurns>(operation) ||
        is<core::DeleteConversation>(operation) || is<core::ClaimValue>(operation) ||
        is<core::ReplaceValue>(operation) || is<core::OpenParking>(operation) ||
        is<core::GetParked>(operation))
        return Kind::other;
    return Kind::change;
}

bool Queue::submit(std::vector<core::Item>& items, Listener& done,
                   const std::function<bool(const StoredKey&)>& known) {
    const SteadyTime now = steady_clock::now();
    const bool together = std::holds_alternative<core::BatchDone>(done);
    auto submission = std::make_shared<Submission>();
    Tasks tasks;
    tasks.reserve(items.size());
    for (std::size_t i = 0; i < items.size(); ++i) {
        TaskPtr& task = tasks.emplace_back(std::make_unique<Task>());
        task->submission = submission;
        task->index = i;
        task->key = items[i].key;
        task->touches = core::touched_by(items[i].key, items[i].operation);
        if (const auto* complete = std::get_if<core::Complete>(&items[i].operation);
            complete != nullptr && complete->append)
            task->conversation = complete->append->conversation;
        const bool look = is<core::Acquire>(items[i].operation) && known(task->key);
        task->kind = first_kind(items[i].operation, look);
        if (look) task->look = Task::Look::known;
        task->in_company = together && items.size() > 1;
        task->since = task->ready = now;
    }
    if (tasks.size() > 1) put_in_order(items, tasks);
    {
        const std::lock_guard lock(mutex_);
        if (closed_) return false;
        // Each is overwritten; a text would be allocated for nothing.
        if (together)
            submission->results.assign(items.size(), base::Error{.code = base::ErrorCode::stopping});
        submission->done = std::move(done);
        submission->open = items.size();
        submission->held.resize(items.size());
        unanswered_ += items.size();
        for (std::size_t i = 0; i < items.size(); ++i) {
            tasks[i]->operation = std::move(items[i].operation);
            if (tasks[i]->waits_for == 0) {
                put(std::move(tasks[i]));
            } else {
                submission->held[i] = std::move(tasks[i]);
            }
        }
    }
    work_.notify_one();
    return true;
}

void Queue::put(TaskPtr task) {
    if (task->alone) {
        const SteadyTime ready = task->ready;
        alone_.emplace(ready, std::move(task));
        return;
    }
    auto& queue = queued_[static_cast<std::size_t>(task->kind)];
    if (!queue.empty() && task->ready < queue.front()->ready) {
        queue.push_front(std::move(task));
    } else {
        queue.push_back(std::move(task));
    }
}

void Queue::again(TaskPtr task) {
    {
        const std::lock_guard lock(mutex_);
        put(std::move(task));
    }
    work_.notify_one();
}

void Queue::answer(TaskPtr task, base::Result<core::Decided> result) {
    Submission& submission = *task->submission;
    auto* const each = std::get_if<core::ItemDone>(&submission.done);
    if (each == nullptr) submission.results[task->index] = std::move(result);
    bool queued = false;
    if (!task->followers.empty()) {
        const SteadyTime now = steady_clock::now();
        const std::lock_guard lock(mutex_);
        for (const std::size_t index : task->followers) {
            TaskPtr& follower = submission.held[index];
            if (--follower->waits_for != 0) continue;
            follower->since = follower->ready = now;
            put(std::move(follower));
            queued = true;
        }
    }
    if (queued) work_.notify_one();
    if (each != nullptr) (*each)(task->index, std::move(result));
    const bool last_of_all = submission.open.fetch_sub(1, std::memory_order_acq_rel) == 1;
    if (last_of_all && each == nullptr)
        std::get<core::BatchDone>(submission.done)(std::move(submission.results));
    bool last = false;
    {
        // After `done`: who closes waits until it has been called.
        const std::lock_guard lock(mutex_);
        last = --unanswered_ == 0 && closed_;
    }
    if (last) end_.notify_all();
}

std::deque<TaskPtr>* Queue::earliest(SteadyTime now) {
    std::deque<TaskPtr>* best = nullptr;
    for (auto& queue : queued_) {
        if (queue.empty() || queue.front()->ready > now) continue;
        if (best == nullptr || queue.front()->ready < best->front()->ready) best = &queue;
    }
    return best;
}

Tasks Queue::take(std::chrono::milliseconds idle_after) {
    Tasks batch;
    bool more = false;
    {
        std::unique_lock lock(mutex_);
        const SteadyTime until = steady_clock::now() + idle_after;
        std::deque<TaskPtr>* queue = nullptr;
        for (;;) {
            const SteadyTime now = steady_clock::now();
            queue = earliest(now);
            const bool retry = !alone_.empty() && alone_.begin()->first <= now;
            if (retry && (queue == nullptr || alone_.begin()->first < queue->front()->ready)) {
                batch.push_back(std::move(alone_.begin()->second));
                alone_.erase(alone_.begin());
                break;
            }
            if (queue != nullptr) break;
            if (ended_ || now >= until) return batch;
            const SteadyTime next = alone_.empty() ? until : std::min(until, alone_.begin()->first);
            work_.wait_until(lock, next);
        }
        if (batch.empty()) {
            const std::size_t most = queue->front()->kind == Kind::other ? 1 : batch_max_;
            std::unordered_set<StoredKey, base::DigestHash> keys;
            std::deque<TaskPtr> passed;
            std::size_t parked_bytes = 0;
            for (std::size_t looked = 0;
                 !queue->empty() && batch.size() < most && looked < most * looked_at_per_item &&
                 parked_bytes < parked_bytes_max;
                 ++looked) {
                TaskPtr task = std::move(queue->front());
                queue->pop_front();
                const bool taken = keys.contains(task->touches) ||
                                   (task->conversation && keys.contains(*task->conversation));
                if (taken) {
                    passed.push_back(std::move(task));
                    continue;
                }
                keys.insert(task->touches);
                if (task->conversation) keys.insert(*task->conversation);
                if (const auto* park = std::get_if<core::Park>(&task->operation))
                    parked_bytes += park->bytes.size();
                batch.push_back(std::move(task));
            }
            while (!passed.empty()) {
                queue->push_front(std::move(passed.back()));
                passed.pop_back();
            }
        }
        more = !alone_.empty() || std::any_of(queued_.begin(), queued_.end(),
                                              [](const auto& each) { return !each.empty(); });
    }
    // Each woken worker wakes the next, so that a small submission stays one batch.
    if (more) work_.notify_one();
    return batch;
}

Tasks Queue::expired(SteadyTime now, const std::function<SteadyTime(const Task&)>& limit_of) {
    Tasks out;
    const std::lock_guard lock(mutex_);
    for (auto& queue : queued_) {
        for (TaskPtr& task : queue) {
            if (limit_of(*task) <= now) out.push_back(std::move(task));
        }
        std::erase(queue, nullptr);
    }
    for (auto it = alone_.begin(); it != alone_.end();) {
        if (limit_of(*it->second) <= now) {
            out.push_back(std::move(it->second));
            it = alone_.erase(it);
        } else {
            ++it;
        }
    }
    return out;
}

void Queue::close() {
    {
        std::unique_lock lock(mutex_);
        closed_ = true;
        end_.wait(lock, [this] { return unanswered_ == 0; });
        ended_ = true;
    }
    work_.notify_all();
    end_.notify_all();
}

bool Queue::closed() const {
    const std::lock_guard lock(mutex_);
    return closed_;
}

bool Queue::ended() const {
    const std::lock_guard lock(mutex_);
    return ended_;
}

bool Queue::pause(std::chrono::milliseconds duration) {
    std::unique_lock lock(mutex_);
    return end_.wait_for(lock, duration, [this] { return ended_; });
}

bool Queue::waiting() const {
    const std::lock_guard lock(mutex_);
    return !alone_.empty() || std::any_of(queued_.begin(), queued_.end(),
                                          [](const auto& each) { return !each.empty(); });
}

}  // namespace semel::sql
