#include "consumer/control_threads.hpp"

#include <utility>

namespace semel::consumer {

void ControlThreads::submit(std::function<void()> job) {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    jobs_.push_back(std::move(job));
    if (jobs_.size() > idle_ && threads_.size() < most_) threads_.emplace_back([this] { work(); });
    changed_.notify_one();
}

void ControlThreads::work() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
        if (jobs_.empty()) {
            ++idle_;
            changed_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
            --idle_;
            continue;
        }
        const std::function<void()> job = std::move(jobs_.front());
        jobs_.pop_front();
        lock.unlock();
        job();
        lock.lock();
    }
}

void ControlThreads::stop() {
    std::vector<std::thread> threads;
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        jobs_.clear();
        threads.swap(threads_);
    }
    changed_.notify_all();
    for (std::thread& thread : threads) thread.join();
}

}  // namespace semel::consumer
