#include "runtime/loop.hpp"

#include <cstdio>
#include <exception>

#include "base/assert.hpp"

namespace semel::runtime {

Loop::Loop(base::Clock& clock, Mode mode) : clock_(clock), mode_(mode), io_(1), timer_(io_) {}
Loop::~Loop() {
    while (suspended_ != nullptr) {
        Suspended& waits = *suspended_;
        resume(waits);
        waits.abandon();
    }
    while (!timers_.empty()) {
        // Out of the map first: what dies with the callback may cancel other timers.
        auto node = timers_.extract(timers_.begin());
        by_id_.erase(node.mapped().first);
    }
}

void Loop::suspend(Suspended& waits) {
    waits.next_ = suspended_;
    if (suspended_ != nullptr) suspended_->previous_ = &waits;
    suspended_ = &waits;
}

void Loop::resume(Suspended& waits) {
    if (suspended_ == &waits) suspended_ = waits.next_;
    if (waits.previous_ != nullptr) waits.previous_->next_ = waits.next_;
    if (waits.next_ != nullptr) waits.next_->previous_ = waits.previous_;
    waits.previous_ = waits.next_ = nullptr;
}

TimerId Loop::at(SteadyTime when, std::function<void()> fire) {
    const TimerId id = ++last_id_;
    const auto where = timers_.emplace(when, std::pair{id, std::move(fire)});
    by_id_.emplace_hint(by_id_.end(), id, where);
    if (mode_ == Mode::real && when < armed_for_) arm();
    return id;
}

void Loop::cancel(TimerId id) {
    const auto found = by_id_.find(id);
    if (found == by_id_.end()) return;
    timers_.erase(found->second);
    by_id_.erase(found);
    // The Asio timer stays armed: it fires for nothing once, which is cheaper than to set it anew
    // for each request.
}

void Loop::arm() {
    if (timers_.empty()) return;
    armed_for_ = timers_.begin()->first;
    timer_.expires_at(armed_for_);
    timer_.async_wait([this](error_code ec) {
        if (ec) return;  // set anew, or the loop is ending
        armed_for_ = SteadyTime::max();
        fire_due();
        if (!timers_.empty() && timers_.begin()->first < armed_for_) arm();
    });
}

void Loop::fire_due() {
    const SteadyTime now = clock_.steady();
    while (!timers_.empty() && timers_.begin()->first <= now) {
        auto node = timers_.extract(timers_.begin());
        by_id_.erase(node.mapped().first);
        node.mapped().second();
    }
}

Task<> Loop::sleep_until(SteadyTime when) {
    UseAwaitable token;  // async_initiate of Boost 1.81 wants an lvalue
    co_await asio::async_initiate<UseAwaitable, void()>(
        [this, when](auto handler) {
            auto shared = std::make_shared<decltype(handler)>(std::move(handler));
            at(when, [shared] { std::move (*shared)(); });
        },
        token);
}

void Loop::spawn(Task<> task) {
    ++spawned_;
    asio::co_spawn(io_.get_executor(), std::move(task), [this](std::exception_ptr failure) {
        --spawned_;
        if (!failure) return;
        try {
            std::rethrow_exception(failure);
        } catch (const std::exception& e) {
            std::fprintf(stderr, "semel: exception left a coroutine: %s\n", e.what());
        } catch (...) {
            std::fprintf(stderr, "semel: unknown exception left a coroutine\n");
        }
        SEMEL_ASSERT(false, "coroutines turn errors into values");
    });
}

void Loop::run_ready() {
    io_.restart();
    while (io_.poll() > 0) io_.restart();
}

std::optional<SteadyTime> Loop::next_timer() const {
    if (timers_.empty()) return std::nullopt;
    return timers_.begin()->first;
}

}  // namespace semel::runtime
