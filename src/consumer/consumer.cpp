#include "consumer/consumer_impl.hpp"

#include <algorithm>

#include "base/assert.hpp"
#include "telemetry/log.hpp"

namespace semel::consumer {

// ---------------------------------------------------------------- the public face

Consumer::Consumer(runtime::Loop& loop, ConsumerOptions options, brokers::Source& source,
                   Strategy& strategy, deadletter::Outlet* outlet, ConsumerCounters& counters)
    : impl_(std::make_shared<Impl>(loop, std::move(options), source, strategy, outlet, counters)),
      source_(source) {}

Consumer::~Consumer() = default;

base::Result<void> Consumer::start() { return impl_->start(*this); }
void Consumer::stop() { impl_->stop(); }
ConsumerState Consumer::state() const { return impl_->state(); }

void Consumer::pause(std::string reason) {
    impl_->on_loop(
        [reason = std::move(reason)](Impl& impl) mutable { impl.pause(std::move(reason)); });
}
void Consumer::resume() {
    impl_->on_loop([](Impl& impl) { impl.resume(); });
}
void Consumer::drain() {
    impl_->on_loop([](Impl& impl) { impl.drain(); });
}

void Consumer::assigned(const std::vector<brokers::AssignmentPtr>& which) {
    impl_->on_loop([which](Impl& impl) { impl.assigned(which); });
}
void Consumer::delivered(std::vector<brokers::Delivery> messages) {
    impl_->on_loop([messages = std::move(messages)](Impl& impl) mutable {
        impl.delivered(std::move(messages));
    });
}
void Consumer::revoked(const std::vector<brokers::AssignmentPtr>& which, base::SteadyTime) {
    impl_->on_loop([which](Impl& impl) { impl.revoked(which); });
}
void Consumer::released(const std::vector<brokers::AssignmentPtr>& which) {
    impl_->on_loop([which](Impl& impl) { impl.gone(which, false); });
}
void Consumer::lost(const std::vector<brokers::AssignmentPtr>& which) {
    impl_->on_loop([which](Impl& impl) { impl.gone(which, true); });
}
void Consumer::problem(const brokers::Problem& what) {
    impl_->on_loop([what](Impl& impl) { impl.problem(what); });
}

// ---------------------------------------------------------------- its life

namespace {

// Kept for as long as the process lives, where a leak checker finds it.
void given_up(Message& message) {
    static std::mutex mutex;
    static auto& all = *new std::vector<Message*>;
    const std::lock_guard lock(mutex);
    all.push_back(&message);
}

}  // namespace

Consumer::Impl::Impl(runtime::Loop& loop, ConsumerOptions options, brokers::Source& source,
                     Strategy& strategy, deadletter::Outlet* outlet, ConsumerCounters& counters)
    : loop_(loop),
      options_(std::move(options)),
      source_(source),
      strategy_(strategy),
      outlet_(outlet),
      counters_(counters),
      identity_(options_.identity),
      source_name_(source.traits().name),
      promise_(strategy.promise()),
      commits_positions_(source.traits().commits_positions),
      breaker_(options_.breaker) {
    SEMEL_ASSERT(options_.letters_stop || outlet_ != nullptr, "dead letters need somewhere to go");
}

Consumer::Impl::~Impl() {
    SEMEL_ASSERT(!started_ || stopped_, "a consumer is stopped before it ends");
}

base::Result<void> Consumer::Impl::start(brokers::Listener& listener) {
    if (started_.exchange(true))
        return base::Error{.code = base::ErrorCode::invalid_argument,
                           .detail = "consumer " + options_.name + " was started before"};
    answer_ = [weak = weak_from_this()](Message& message, Verdict verdict) {
        if (const auto self = weak.lock(); self && !self->over_)
            self->answered(message, std::move(verdict));
    };
    log::info("consumer.started",
              {{"consumer", options_.name}, {"source", source_name_}, {"promise", promise_}});
    on_loop([](Impl& impl) {
        impl.strategy_.on_capacity = [weak = impl.weak_from_this()] {
            if (const auto self = weak.lock(); self && !self->over_) self->wake();
        };
        impl.strategy_.on_trouble = [weak = impl.weak_from_this()](std::string text) {
            const auto self = weak.lock();
            if (!self || self->over_) return;
            if (text.empty())
                self->no_alarm("records");
            else
                self->alarm("records", std::move(text));
        };
        impl.show();
        impl.tick();
    });
    const base::Result<void> joined = source_.start(listener);
    if (joined) return {};
    // Nothing comes of such a source.
    on_loop([](Impl& impl) { impl.end(); });
    stopped_ = true;
    return joined.error();
}

void Consumer::Impl::pause(std::string reason) {
    if (!paused_) log::info("consumer.paused", {{"consumer", options_.name}, {"reason", reason}});
    paused_ = true;
    pause_reason_ = std::move(reason);
    show();
}

void Consumer::Impl::resume() {
    log::info("consumer.resumed", {{"consumer", options_.name}});
    paused_ = false;
    breaker_.reset();
    breaker_closed();
    no_alarm("letters");
    for (auto at = letters_.begin(); at != letters_.end();) {
        if (at->second.stage != LetterOnItsWay::Stage::stopped) {
            ++at;
            continue;
        }
        lanes_.again(*at->second.message, base::SteadyTime::min());
        at = letters_.erase(at);
    }
    show();
    wake();
}

void Consumer::Impl::drain() {
    if (draining_) return;
    log::info("consumer.draining", {{"consumer", options_.name}});
    draining_ = true;
    show();
    check_quiet();
}

// Leaves the group for good; what is in hand is dropped when the source says `revoked`.
void Consumer::Impl::leave(std::string why) {
    if (std::exchange(leaving_, true)) return;
    left_why_ = std::move(why);
    // The source leaves on a thread of its own: what is finished is to be known to it before.
    flush();
    control_.submit([self = shared_from_this()] {
        self->source_.stop(leave_within);
        self->on_loop([](Impl& impl) {
            impl.left_ = true;
            impl.show();
        });
    });
}

void Consumer::Impl::stop() {
    std::call_once(stop_once_, [this] {
        if (!started_ || stopped_) return;
        source_.window(0);
        on_loop([](Impl& impl) { impl.begin_stop(); });
        quiet_promise_.get_future().wait();
        control_.stop();
        source_.stop(leave_within);
        std::promise<void> ended;
        on_loop([&ended](Impl& impl) {
            impl.end();
            ended.set_value();
        });
        ended.get_future().wait();
        stopped_ = true;
    });
}

void Consumer::Impl::begin_stop() {
    stopping_ = true;
    stop_by_ = now() + options_.stop_drain;
    show();
    for (const auto& [which, partition] : partitions_) {
        if (partition->phase == HeldPartition::Phase::begun)
            strategy_.leaving(partition->assignment);
    }
    stop_timer_ = loop_.at(stop_by_, [self = shared_from_this()] {
        self->stop_timer_ = 0;
        self->stop_strategy();
    });
    check_quiet();
}

// Nothing runs any more, or may no longer.
void Consumer::Impl::check_quiet() {
    if (lanes_.running() > 0 || letters_out_ > 0) return;
    if (stopping_)
        stop_strategy();
    else if (draining_)
        leave("drained on request; the partitions were handed over");
}

void Consumer::Impl::stop_strategy() {
    if (std::exchange(strategy_stopping_, true)) return;
    loop_.cancel(std::exchange(stop_timer_, 0));
    flush();
    tell_watermarks();
    const auto left = std::chrono::duration_cast<milliseconds>(
        std::max(stop_by_ - now(), base::SteadyTime::duration::zero()));
    stop_timer_ = loop_.at(now() + left + stop_margin, [self = shared_from_this()] {
        self->stop_timer_ = 0;
        self->strategy_stopped(false);
    });
    strategy_.stop(left, [weak = weak_from_this()] {
        if (const auto self = weak.lock(); self && !self->over_) self->strategy_stopped(true);
    });
}

void Consumer::Impl::strategy_stopped(bool in_time) {
    if (std::exchange(quiet_, true)) return;
    loop_.cancel(std::exchange(stop_timer_, 0));
    flush();
    if (!in_time || lanes_.running() > 0 || letters_out_ > 0)
        log::warn("consumer.abandoned", {{"consumer", options_.name},
                                         {"running", lanes_.running()},
                                         {"letters", letters_out_}});
    for (const auto& [which, partition] : partitions_) {
        if (partition->phase == HeldPartition::Phase::leaving) check_left(*partition);
    }
    quiet_promise_.set_value();
}

void Consumer::Impl::end() {
    flush();
    over_ = true;
    loop_.cancel(timer_);
    loop_.cancel(tick_);
    strategy_.on_capacity = nullptr;
    strategy_.on_trouble = nullptr;
    Message* next = nullptr;
    for (Message* message = lanes_.oldest(); message != nullptr; message = next) {
        next = message->in_hand.newer;
        const auto letter = letters_.find(message->in_hand.arrival);
        // What a strategy that did not end in time may still read is given up together with it.
        if (message->in_hand.state == InHand::State::running ||
            (letter != letters_.end() && letter->second.stage == LetterOnItsWay::Stage::marking))
            given_up(*message);
        else
            const std::unique_ptr<Message> own(message);
    }
    letters_.clear();
    copies_.clear();
    suspects_.clear();
    spared_.clear();
    partitions_.clear();
    show();
    log::info("consumer.stopped", {{"consumer", options_.name}});
}

// ---------------------------------------------------------------- what people see

void Consumer::Impl::show() {
    const char* condition = "running";
    std::string reason;
    if (over_ || stopping_ || !fatal_.empty() || (left_ && refused_.empty())) {
        condition = "stopped";
        reason = !fatal_.empty() ? fatal_ : left_ ? left_why_ : "it was told to stop";
    } else if (!refused_.empty()) {
        condition = "refused";
        reason = refused_;
    } else if (draining_) {
        condition = "draining";
        reason = "what runs is let end, then the group is left";
    } else if (paused_) {
        condition = "paused";
        reason = pause_reason_;
    } else if (breaker_.open()) {
        condition = "ill";
        reason = breaker_.reason();
    }
    counters_.paused = paused_ || draining_ ? 1 : breaker_.open() ? 2 : 0;
    const std::lock_guard lock(shown_mutex_);
    shown_condition_ = condition;
    shown_reason_ = std::move(reason);
}

void Consumer::Impl::alarm(std::string about, std::string text) {
    const std::lock_guard lock(shown_mutex_);
    const auto same = std::find_if(alarms_.begin(), alarms_.end(),
                                   [&](const auto& one) { return one.first == about; });
    if (same != alarms_.end()) {
        if (same->second == text) return;
        alarms_.erase(same);
    }
    log::warn("consumer.alarm", {{"consumer", options_.name}, {"about", about}, {"text", text}});
    alarms_.emplace_back(std::move(about), std::move(text));
    if (alarms_.size() > alarms_max) alarms_.pop_front();
}

void Consumer::Impl::no_alarm(std::string_view about) {
    const std::lock_guard lock(shown_mutex_);
    std::erase_if(alarms_, [&](const auto& one) { return one.first == about; });
}

ConsumerState Consumer::Impl::state() const {
    ConsumerState out{.name = options_.name,
                      .group = options_.group,
                      .source = source_name_,
                      .promise = promise_,
                      .condition = {},
                      .reason = {},
                      .partitions = source_.state(),
                      .alarms = {},
                      .in_hand = counters_.in_hand,
                      .running = counters_.running,
                      .waiting = counters_.waiting,
                      .parked = counters_.parked};
    const std::lock_guard lock(shown_mutex_);
    out.condition = shown_condition_;
    out.reason = shown_reason_;
    for (const auto& [about, text] : alarms_) out.alarms.push_back(text);
    return out;
}

}  // namespace semel::consumer
