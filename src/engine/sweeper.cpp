#include "engine/sweeper.hpp"

#include <boost/asio/thread_pool.hpp>

#include <algorithm>
#include <utility>

#include "runtime/signal.hpp"

namespace semel::engine {

namespace asio = runtime::asio;
using std::chrono::nanoseconds;

namespace {

/// How often it is looked whether clean-up may begin: the wall clock may jump.
constexpr milliseconds window_look{std::chrono::minutes{1}};
constexpr std::chrono::microseconds day{std::chrono::hours{24}};

}  // namespace

class Sweeper::Impl {
  public:
    Impl(Engine& engine, SweeperOptions options, BlockingRunner runner)
        : engine_(engine), loop_(engine.loop()), options_(options), runner_(std::move(runner)) {
        if (runner_) return;
        worker_ = std::make_unique<asio::thread_pool>(1);
        runner_ = [this](std::function<void()> work) { asio::post(*worker_, std::move(work)); };
    }
    ~Impl() {
        if (worker_) worker_->join();
    }

    void start() {
        running_ = 2;
        loop_.spawn(settles());
        loop_.spawn(purges());
    }

    Task<> stop() {
        stopping_ = true;
        signal_.notify();
        while (running_ > 0) {
            const auto seen = signal_.version();
            if (running_ == 0) break;
            co_await signal_.wait(loop_, seen, SteadyTime::max());
        }
    }

  private:
    Task<> settles() {
        while (co_await pause(options_.every)) co_await settle_dead_leases();
        ended();
    }

    Task<> purges() {
        const milliseconds every =
            options_.purge_every.count() > 0 ? options_.purge_every : options_.every;
        SteadyTime due = loop_.now() + every;
        for (;;) {
            nanoseconds wait = due - loop_.now();
            if (wait <= nanoseconds{0}) wait = std::min<nanoseconds>(until_window(), window_look);
            if (wait > nanoseconds{0}) {
                if (!co_await pause(wait)) break;
                continue;
            }
            co_await purge();
            if (stopping_) break;
            due = loop_.now() + every;
        }
        ended();
    }

    void ended() {
        --running_;
        signal_.notify();
    }

    Task<bool> pause(nanoseconds d) {
        const SteadyTime until = loop_.now() + d;
        while (!stopping_ && loop_.now() < until)
            co_await signal_.wait(loop_, signal_.version(), until);
        co_return !stopping_;
    }

    /// How long clean-up has to wait for its time of day; 0: it may run.
    [[nodiscard]] nanoseconds until_window() const {
        if (!options_.purge_at) return nanoseconds{0};
        const std::chrono::microseconds now{loop_.clock().wall_us()};
        const auto since = (now % day + day - *options_.purge_at) % day;
        return since < options_.purge_window ? nanoseconds{0} : nanoseconds{day - since};
    }

    /// Runs `work` where it may block and comes back with its result.
    template <class T>
    Task<Result<T>> blocking(std::function<Result<T>()> work) {
        runtime::UseAwaitable token;  // async_initiate of Boost 1.81 wants an lvalue
        co_return co_await asio::async_initiate<runtime::UseAwaitable, void(Result<T>)>(
            [this, &work](auto handler) {
                auto shared = std::make_shared<decltype(handler)>(std::move(handler));
                runner_([this, work = std::move(work), shared]() mutable {
                    auto result = std::make_shared<Result<T>>(work());
                    // Moved: the last reference to the handler must go on the loop's thread.
                    loop_.post([shared = std::move(shared), result] {
                        std::move (*shared)(std::move(*result));
                    });
                });
            },
            token);
    }

    Task<> settle_dead_leases() {
        std::string cursor;
        do {
            std::function<Result<core::ScanPage>()> scan = [this, cursor] {
                return engine_.store().scan({.undecided_only = true, .dead_leases_only = true},
                                            cursor, options_.scan_page);
            };
            auto page = co_await blocking<core::ScanPage>(std::move(scan));
            if (!page) {
                ++engine_.counters().store_errors;
                store_was_out();
                co_return;
            }
            // Owners that live renew as soon as the store is back: they come first.
            const SteadyTime back = engine_.store().answering_since();
            if (loop_.now() < std::max(settle_from_, back + options_.takeover_grace)) co_return;
            for (const auto& [key, record] : page->records) {
                // A message is delivered again, and whoever takes it over charges the crash; settled here it would look as if its
                // handler had failed.
                if (record->policy.kind == core::IntentKind::message) continue;
                core::Item item{key, core::Settle{record->token}};
                const auto settled = co_await engine_.ask(std::move(item));
                if (!settled) {
                    store_was_out();
                    co_return;
                }
                if (std::holds_alternative<core::Applied>(settled->outcome))
                    ++engine_.counters().swept;
                if (stopping_) co_return;
            }
            cursor = page->next;
        } while (!cursor.empty() && !stopping_);
    }

    /// As if the store answered again with the next pass: not every store says when it does.
    void store_was_out() { settle_from_ = loop_.now() + options_.every + options_.takeover_grace; }

    /// Until nothing expired is left, or the pass is at an end before.
    Task<> purge() { engine_.counters().purge_behind = co_await purge_steps() ? 0 : 1; }

    /// True: everything that had expired is gone.
    Task<bool> purge_steps() {
        nanoseconds took{0};
        for (std::size_t step = 0; step < options_.purge_steps_max; ++step) {
            // A store that is slow because it has much to do for others gets as much time without
            // clean-up as with it.
            if (!co_await pause(took) || until_window() > nanoseconds{0}) co_return false;
            std::function<Result<std::size_t>()> work = [this] {
                return engine_.store().purge(options_.purge_step);
            };
            const SteadyTime began = loop_.now();
            const auto gone = co_await blocking<std::size_t>(std::move(work));
            took = loop_.now() - began;
            if (options_.on_purge_step) options_.on_purge_step(took);
            if (!gone) {
                ++engine_.counters().store_errors;
                co_return false;
            }
            engine_.counters().purged += *gone;
            if (*gone < options_.purge_step) co_return true;
        }
        co_return false;
    }

    Engine& engine_;
    Loop& loop_;
    SweeperOptions options_;
    BlockingRunner runner_;
    std::unique_ptr<asio::thread_pool> worker_;
    runtime::Signal signal_;
    SteadyTime settle_from_ = SteadyTime::min();
    int running_ = 0;  ///< Coroutines.
    bool stopping_ = false;
};

Sweeper::Sweeper(Engine& engine, SweeperOptions options, BlockingRunner runner)
    : impl_(std::make_unique<Impl>(engine, options, std::move(runner))) {}
Sweeper::~Sweeper() = default;
void Sweeper::start() { impl_->start(); }
Task<> Sweeper::stop() { return impl_->stop(); }

}  // namespace semel::engine
