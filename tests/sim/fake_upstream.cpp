#include "sim/fake_upstream.hpp"

namespace semel::sim {
namespace {

using http::CallError;
using runtime::Loop;
using runtime::Task;

/// A coroutine that waits for a moment. Owned by the loop's timer alone: what the coroutine itself
/// holds must not keep it.
struct Waiter {
    using Handler = runtime::asio::async_result<runtime::UseAwaitable, void()>::handler_type;
    explicit Waiter(Handler h) : handler(std::move(h)) {}
    void resume() {
        if (!handler) return;
        Handler taken = std::move(*handler);
        handler.reset();
        std::move(taken)();
    }
    std::optional<Handler> handler;
    runtime::TimerId timer = 0;
};

/// Ends waits early; shared by a call, its response and its canceller.
struct Interrupt {
    explicit Interrupt(Loop& l) : loop(l) {}
    void fire() {
        cancelled = true;
        const auto waiting = waiter.lock();
        if (!waiting) return;
        loop.cancel(waiting->timer);
        loop.post([waiting] { waiting->resume(); });
    }
    Loop& loop;
    std::weak_ptr<Waiter> waiter;
    bool cancelled = false;
};

/// False: cancelled before `when`.
Task<bool> wait_until(Loop& loop, std::shared_ptr<Interrupt> interrupt, SteadyTime when) {
    if (interrupt->cancelled || loop.now() >= when) co_return !interrupt->cancelled;
    runtime::UseAwaitable token;  // async_initiate of Boost 1.81 wants an lvalue
    co_await runtime::asio::async_initiate<runtime::UseAwaitable, void()>(
        [&loop, &interrupt, when](Waiter::Handler handler) {
            auto waiter = std::make_shared<Waiter>(std::move(handler));
            interrupt->waiter = waiter;
            waiter->timer = loop.at(when, [waiter] { waiter->resume(); });
        },
        token);
    co_return !interrupt->cancelled;
}

CallError error(CallError::Kind kind, bool maybe_processed, std::string detail) {
    return {kind, maybe_processed, std::move(detail)};
}
CallError cancelled() { return error(CallError::Kind::cancelled, true, "cancelled"); }

class FakeResponse final : public http::Response {
  public:
    FakeResponse(Loop& loop, UpstreamPlan plan, SteadyTime head_at, milliseconds idle,
                 std::shared_ptr<Interrupt> interrupt)
        : loop_(loop),
          plan_(std::move(plan)),
          at_(head_at),
          idle_(idle),
          interrupt_(std::move(interrupt)) {
        for (const auto& [name, value] : plan_.headers) headers_.push_back({name, value});
        for (const auto& piece : plan_.body) length_ += piece.bytes.size();
    }
    [[nodiscard]] int status() const override { return plan_.status; }
    [[nodiscard]] const std::vector<http::Header>& headers() const override { return headers_; }
    [[nodiscard]] std::optional<std::uint64_t> content_length() const override {
        if (!plan_.with_length) return std::nullopt;
        return length_;
    }
    void cancel() override { interrupt_->fire(); }

    Task<std::variant<std::string_view, CallError>> read_some() override {
        const bool at_end = next_ == plan_.body.size();
        const milliseconds gap = at_end ? plan_.end_after : plan_.body[next_].after;
        const bool stalls = at_end && plan_.end == UpstreamPlan::End::stall;
        const SteadyTime there = at_ + gap;
        // Counted from the call, not from the read: what came while the reader was away lies in the
        // kernel's buffer.
        const SteadyTime limit = std::max(loop_.now(), at_) + idle_;
        const bool in_time = !stalls && there <= limit;
        if (!co_await wait_until(loop_, interrupt_, in_time ? there : limit)) co_return cancelled();
        if (!in_time) co_return error(CallError::Kind::idle_timeout, true, "the body stopped");
        at_ = there;
        if (!at_end) co_return std::string_view(plan_.body[next_++].bytes);
        switch (plan_.end) {
            case UpstreamPlan::End::complete:
                co_return std::string_view{};
            case UpstreamPlan::End::cut:
                co_return error(CallError::Kind::cut, true, "the body ended early");
            case UpstreamPlan::End::reset:
            case UpstreamPlan::End::stall:
                break;
        }
        co_return error(CallError::Kind::reset, true, "the connection was reset");
    }

  private:
    Loop& loop_;
    UpstreamPlan plan_;
    SteadyTime at_;  ///< When the last piece (or the head) came.
    milliseconds idle_;
    std::shared_ptr<Interrupt> interrupt_;
    std::vector<http::Header> headers_;  ///< Views into plan_.
    std::uint64_t length_ = 0;
    std::size_t next_ = 0;
};

class FakeClient final : public http::Client {
  public:
    FakeClient(Loop& loop, FakeUpstream& upstream) : loop_(loop), upstream_(upstream) {}

    Task<std::variant<std::unique_ptr<http::Response>, CallError>> call(
        const http::Origin& origin, http::Request request, http::Timeouts timeouts,
        CancelToken* cancel) override {
        auto interrupt = std::make_shared<Interrupt>(loop_);
        FakeUpstream::Call arrived{origin.base_path + request.target, request.headers, {}, 0};
        if (request.source) {
            for (;;) {
                const auto piece = co_await request.source();
                if (!piece)
                    co_return error(CallError::Kind::body_source, true,
                                    "the request's body broke off");
                if (piece->empty()) break;
                arrived.body.append(*piece);
            }
        } else {
            arrived.body = request.body;
        }
        if (cancel != nullptr && cancel->cancelled) co_return cancelled();
        if (cancel != nullptr) cancel->fire = [interrupt] { interrupt->fire(); };
        const SteadyTime sent = loop_.now();
        UpstreamPlan plan = upstream_.arrive(std::move(arrived));
        auto outcome = co_await head(std::move(plan), sent, timeouts, interrupt);
        if (cancel != nullptr) cancel->fire = nullptr;
        co_return outcome;
    }

  private:
    Task<std::variant<std::unique_ptr<http::Response>, CallError>> head(
        UpstreamPlan plan, SteadyTime sent, http::Timeouts timeouts,
        std::shared_ptr<Interrupt> interrupt) {
        using Start = UpstreamPlan::Start;
        const SteadyTime limit = sent + timeouts.first_byte;
        const SteadyTime there = sent + plan.head_after;
        switch (plan.start) {
            case Start::refused:
                co_await wait_until(loop_, interrupt, sent + milliseconds{1});
                co_return error(CallError::Kind::refused, false, "connection refused");
            case Start::connect_timeout:
                if (!co_await wait_until(loop_, interrupt, sent + timeouts.connect))
                    co_return cancelled();
                co_return error(CallError::Kind::connect_timeout, false, "no connection in time");
            case Start::reset:
                if (!co_await wait_until(loop_, interrupt, std::min(there, limit)))
                    co_return cancelled();
                co_return error(CallError::Kind::reset, true, "the connection was reset");
            case Start::silent:
            case Start::answered:
                break;
        }
        if (plan.start == Start::silent || there > limit) {
            if (!co_await wait_until(loop_, interrupt, limit)) co_return cancelled();
            co_return error(CallError::Kind::first_byte_timeout, true, "no head in time");
        }
        if (!co_await wait_until(loop_, interrupt, there)) co_return cancelled();
        std::unique_ptr<http::Response> response =
            std::make_unique<FakeResponse>(loop_, std::move(plan), there, timeouts.idle, interrupt);
        co_return response;
    }

    Loop& loop_;
    FakeUpstream& upstream_;
};

}  // namespace

std::unique_ptr<http::Client> make_fake_client(Loop& loop, FakeUpstream& upstream) {
    return std::make_unique<FakeClient>(loop, upstream);
}

}  // namespace semel::sim
