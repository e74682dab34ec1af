#include "consumer/handlers/callback.hpp"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace semel::consumer {
namespace {

class CallbackHandler final : public Handler {
  public:
    CallbackHandler(CallbackFunction function, unsigned threads) : function_(std::move(function)) {
        for (unsigned n = 0; n < std::max(threads, 1U); ++n)
            threads_.emplace_back([this] { work(); });
    }
    ~CallbackHandler() override {
        {
            const std::lock_guard lock(mutex_);
            ending_ = true;
        }
        more_.notify_all();
        cancel_all();
        threads_.clear();  // joins: a callback that runs ends first
    }

    void handle(const Message& message, const Attempt& attempt, Done done) override {
        bool wake = false;
        {
            const std::lock_guard lock(mutex_);
            queue_.push_back({&message, attempt, std::move(done)});
            wake = wants_another();
        }
        if (wake) more_.notify_one();
    }

    /// What runs cannot be interrupted; what no thread has taken yet has not begun.
    void cancel_all() override {
        std::deque<Call> calls;
        {
            const std::lock_guard lock(mutex_);
            calls.swap(queue_);
        }
        for (Call& call : calls) call.done(HandlerIll{"the callback's threads are stopping"});
    }

    [[nodiscard]] std::string name() const override { return "the callback"; }

  private:
    struct Call {
        const Message* message = nullptr;
        Attempt attempt;
        Done done;
    };

    /// Under the mutex: whether one more thread is to be woken. One at a time, and it wakes the
    /// next: of a burst of short calls the first thread does most before a second is awake, and
    /// waking one costs more than a short call.
    bool wants_another() {
        if (queue_.empty() || idle_ == 0 || waking_) return false;
        waking_ = true;
        return true;
    }

    void work() {
        for (;;) {
            Call call;
            bool wake = false;
            {
                std::unique_lock lock(mutex_);
                while (queue_.empty() && !ending_) {
                    ++idle_;
                    more_.wait(lock);
                    --idle_;
                    waking_ = false;  // also if another was faster: the next call wakes again
                }
                if (ending_) return;
                call = std::move(queue_.front());
                queue_.pop_front();
                wake = wants_another();
            }
            if (wake) more_.notify_one();
            call.done(outcome_of(call));
        }
    }

    HandlerOutcome outcome_of(const Call& call) const {
        try {
            return function_(*call.message, call.attempt);
        } catch (const std::exception& e) {
            return HandledFailed{.reason = e.what()};
        } catch (...) {
            return HandledFailed{.reason = "the callback threw what is no std::exception"};
        }
    }

    const CallbackFunction function_;
    std::mutex mutex_;  // guards the five below
    std::condition_variable more_;
    std::deque<Call> queue_;
    std::size_t idle_ = 0;  ///< Threads that wait.
    bool waking_ = false;   ///< One of them is about to wake.
    bool ending_ = false;
    std::vector<std::jthread> threads_;  // last: they use all of the above
};

}  // namespace

std::unique_ptr<Handler> make_callback_handler(CallbackFunction function, unsigned threads) {
    return std::make_unique<CallbackHandler>(std::move(function), threads);
}

}  // namespace semel::consumer
