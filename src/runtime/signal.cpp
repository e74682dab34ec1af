#include "runtime/signal.hpp"

#include <algorithm>
#include <optional>

namespace semel::runtime {

// Touched on its own loop's thread only, apart from the pointer that notify() takes out of the
// list.
struct Signal::Waiter : Loop::Suspended {
    explicit Waiter(Loop& l) : loop(l) { loop.suspend(*this); }
    virtual void resume(bool notified) = 0;
    void fire(bool notified) {
        if (done) return;
        done = true;
        loop.resume(*this);
        loop.cancel(timer);
        resume(notified);
    }
    Loop& loop;
    TimerId timer = 0;
    bool done = false;
};

namespace {
template <class Handler>
struct WaiterOf final : Signal::Waiter {
    WaiterOf(Loop& l, Handler h) : Waiter(l), handler(std::move(h)) {}
    void resume(bool notified) override {
        Handler resumed = std::move(*handler);
        handler.reset();
        std::move(resumed)(notified);
    }
    void abandon() override {
        done = true;
        const auto kept = std::move(handler);  // its end may bring the end of this waiter
        handler.reset();
    }
    std::optional<Handler> handler;
};
}  // namespace

void Signal::notify() {
    std::vector<std::shared_ptr<Waiter>> woken;
    {
        const std::lock_guard lock(mutex_);
        version_.fetch_add(1, std::memory_order_acq_rel);
        woken.swap(waiters_);
    }
    for (auto& waiter : woken) {
        Loop& loop = waiter->loop;
        loop.post([waiter = std::move(waiter)] { waiter->fire(true); });
    }
}

Task<bool> Signal::wait(Loop& loop, std::uint64_t seen, SteadyTime deadline) {
    if (version() != seen) co_return true;
    UseAwaitable token;
    co_return co_await asio::async_initiate<UseAwaitable, void(bool)>(
        [this, &loop, seen, deadline](auto handler) {
            auto waiter = std::make_shared<WaiterOf<decltype(handler)>>(loop, std::move(handler));
            bool changed = false;
            {
                const std::lock_guard lock(mutex_);
                changed = version() != seen;
                if (!changed) waiters_.push_back(waiter);
            }
            if (changed) {
                loop.post([waiter] { waiter->fire(true); });
                return;
            }
            if (deadline == SteadyTime::max()) return;
            waiter->timer = loop.at(deadline, [this, waiter] {
                {
                    const std::lock_guard lock(mutex_);
                    std::erase(waiters_, waiter);
                }
                waiter->fire(false);
            });
        },
        token);
}

}  // namespace semel::runtime
