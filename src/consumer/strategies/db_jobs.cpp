#include "consumer/strategies/db_jobs.hpp"

#include <utility>

namespace semel::consumer {

DbJobs::DbJobs(runtime::Loop& loop, const inbox::Connect& connect, unsigned connections,
               std::size_t batch_max, Run run, std::function<void()> on_room)
    : loop_(loop),
      batch_max_(batch_max),
      run_(std::move(run)),
      on_room_(std::move(on_room)),
      workers_(loop, connect, connections) {
    workers_.on_end = [this] {
        pump();
        on_room_();
        ended();
    };
}

std::size_t DbJobs::capacity() const {
    const std::size_t out = workers_.running() + waiting_.size();
    if (stopping_ || out >= workers_.size()) return 0;
    return (workers_.size() - out) * batch_max_;
}

void DbJobs::push(DbJob job) {
    if (stopping_) {
        for (Message* one : job.messages) job.answer(*one, Held{});
        return;
    }
    waiting_.push_back(std::move(job));
    pump();
}

void DbJobs::pump() {
    while (workers_.running() < workers_.size() && !waiting_.empty()) {
        auto job = std::make_shared<DbJob>(std::move(waiting_.front()));
        waiting_.pop_front();
        workers_.start([this, job](Link& link) { return run_(link, job); });
    }
}

void DbJobs::drop(const brokers::AssignmentPtr& assignment) {
    std::vector<std::pair<Message*, Strategy::Answer>> dropped;
    for (DbJob& job : waiting_) {
        std::erase_if(job.messages, [&](Message* one) {
            if (one->delivery.receipt.assignment != assignment) return false;
            dropped.emplace_back(one, job.answer);
            return true;
        });
    }
    std::erase_if(waiting_, [](const DbJob& job) { return job.messages.empty(); });
    for (const auto& [message, answer] : dropped) answer(*message, Fenced{});
    if (!dropped.empty()) on_room_();
}

void DbJobs::hold_back() {
    for (const DbJob& job : std::exchange(waiting_, {}))
        for (Message* one : job.messages) job.answer(*one, Held{});
}

void DbJobs::stop(milliseconds within, std::function<void()> done, std::function<bool()> busy) {
    stopping_ = true;
    stopped_ = std::move(done);
    busy_ = std::move(busy);
    hold_back();
    stop_timer_ = loop_.at(loop_.now() + within, [this] { workers_.abandon(); });
    ended();
}

void DbJobs::ended() {
    if (!stopped_ || workers_.running() > 0 || (busy_ && busy_())) return;
    loop_.cancel(stop_timer_);
    loop_.post(std::exchange(stopped_, nullptr));
}

}  // namespace semel::consumer
