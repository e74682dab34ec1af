#include "consumer/strategies/record_queue.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/assert.hpp"

namespace semel::consumer {
namespace {

std::int64_t us(base::SteadyTime at) {
    return std::chrono::duration_cast<std::chrono::microseconds>(at.time_since_epoch()).count();
}

}  // namespace

RecordQueue::RecordQueue(runtime::Loop& loop, Records& records, Answered answered,
                         std::function<void()> over)
    : loop_(loop),
      records_(records),
      answered_(std::move(answered)),
      over_(std::move(over)),
      self_(std::make_shared<RecordQueue*>(this)) {}

RecordQueue::~RecordQueue() {
    *self_ = nullptr;
    loop_.cancel(timer_);
}

RecordStep& RecordQueue::push(const Tag& tag) {
    tags_.push_back(tag);
    if (!armed_) arm();
    return steps_.emplace_back();
}

std::optional<core::StoreTime> RecordQueue::latest_now() const {
    if (!ahead_us_) return std::nullopt;
    return core::StoreTime{us(loop_.now()) + *ahead_us_};
}

/// Behind everything that is ready now: the rest of this turn joins.
void RecordQueue::arm() {
    armed_ = true;
    loop_.post([self = self_] {
        if (*self != nullptr) (*self)->flush(true);
    });
}

void RecordQueue::flush(bool patient) {
    armed_ = false;
    while (!steps_.empty() && out_ < batches_max) {
        if (patient && out_ > 0 && steps_.size() < batch_early) break;
        send();
    }
    if (steps_.empty()) {
        loop_.cancel(std::exchange(timer_, 0));
    } else if (out_ < batches_max && timer_ == 0) {
        timer_ = loop_.at(loop_.now() + wait_max, [this] {
            timer_ = 0;
            flush(false);
        });
    }
}

void RecordQueue::send() {
    auto sent = std::make_shared<Sent>();
    RecordSteps steps;
    if (steps_.size() <= batch_max) {
        steps.swap(steps_);
        sent->tags.swap(tags_);
    } else {
        const auto cut = static_cast<std::ptrdiff_t>(batch_max);
        steps.assign(std::make_move_iterator(steps_.begin()),
                     std::make_move_iterator(steps_.begin() + cut));
        steps_.erase(steps_.begin(), steps_.begin() + cut);
        sent->tags.assign(tags_.begin(), tags_.begin() + cut);
        tags_.erase(tags_.begin(), tags_.begin() + cut);
    }
    // What comes next is about as much.
    if (steps_.empty()) {
        steps_.reserve(steps.size());
        tags_.reserve(steps.size());
    }
    sent->at = loop_.now();
    ++out_;
    records_.submit(std::move(steps),
                    [self = self_, sent](std::vector<base::Result<core::Decided>> results) {
                        if (*self != nullptr) (*self)->take_answers(*sent, std::move(results));
                    });
}

void RecordQueue::take_answers(const Sent& sent, std::vector<base::Result<core::Decided>> results) {
    SEMEL_ASSERT(results.size() == sent.tags.size(), "records answer every step");
    --out_;
    learn(sent, results);
    const std::shared_ptr<RecordQueue*> self = self_;
    for (std::size_t i = 0; i < results.size(); ++i) {
        answered_(sent.tags[i], std::move(results[i]));
        if (*self == nullptr) return;
    }
    over_();
    if (*self != nullptr && !steps_.empty() && !armed_) arm();
}

void RecordQueue::learn(const Sent& sent, const std::vector<base::Result<core::Decided>>& results) {
    const auto decided = std::find_if(results.rbegin(), results.rend(),
                                      [](const auto& one) { return one.has_value(); });
    if (decided != results.rend()) ahead_us_ = (*decided)->at.us - us(sent.at);
}

}  // namespace semel::consumer
