// The callback handler on its threads, alone and behind the strategy.
#include "consumer/handlers/callback.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <future>
#include <map>
#include <stdexcept>
#include <thread>

#include "consumer/strategies/recorded.hpp"
#include "stores/memory/memory_store.hpp"

namespace semel::consumer {
namespace {

using namespace std::chrono_literals;

struct CallbackHandlerTest : testing::Test {
    static Message message(const std::string& id) {
        Message made;
        made.id = id;
        return made;
    }
    static std::future<HandlerOutcome> ask(Handler& handler, const Message& message) {
        auto promise = std::make_shared<std::promise<HandlerOutcome>>();
        auto future = promise->get_future();
        handler.handle(
            message, Attempt{.number = 3, .token = {17}},
            [promise](HandlerOutcome outcome) { promise->set_value(std::move(outcome)); });
        return future;
    }
};

TEST_F(CallbackHandlerTest, the_function_gets_message_and_attempt_and_its_outcome_is_handed_on) {
    const auto handler = make_callback_handler(
        [](const Message& m, const Attempt& attempt) -> HandlerOutcome {
            return HandledNotYet{
                m.id + std::to_string(attempt.number) + std::to_string(attempt.token.value), 5s};
        },
        1);
    const Message m = message("order ");
    const auto outcome = std::get<HandledNotYet>(ask(*handler, m).get());
    EXPECT_EQ(outcome.reason, "order 317");
    EXPECT_EQ(outcome.after, 5s);
}

TEST_F(CallbackHandlerTest, an_exception_is_a_failure_with_its_words) {
    const auto handler = make_callback_handler(
        [](const Message& m, const Attempt&) -> HandlerOutcome {
            if (m.id == "odd") throw 7;  // NOLINT: what users do
            throw std::runtime_error("the disk is full");
        },
        2);
    const Message known = message("known"), odd = message("odd");
    EXPECT_EQ(std::get<HandledFailed>(ask(*handler, known).get()).reason, "the disk is full");
    EXPECT_FALSE(std::get<HandledFailed>(ask(*handler, odd).get()).reason.empty());
}

TEST_F(CallbackHandlerTest, calls_run_side_by_side_and_what_has_not_begun_can_be_cancelled) {
    std::atomic<int> inside{0};
    std::atomic<bool> go{false};
    const auto handler = make_callback_handler(
        [&](const Message&, const Attempt&) {
            ++inside;
            inside.notify_all();
            go.wait(false);
            return Handled{};
        },
        2);
    const Message m = message("m");
    std::vector<std::future<HandlerOutcome>> calls;
    for (int i = 0; i < 4; ++i) calls.push_back(ask(*handler, m));
    for (int seen = inside; seen < 2; seen = inside) inside.wait(seen);
    handler->cancel_all();
    handler->cancel_all();
    int begun = 0, ill = 0;
    go = true;
    go.notify_all();
    for (auto& call : calls) {
        const HandlerOutcome outcome = call.get();
        begun += std::holds_alternative<Handled>(outcome) ? 1 : 0;
        ill += std::holds_alternative<HandlerIll>(outcome) ? 1 : 0;
    }
    EXPECT_EQ(begun, 2);
    EXPECT_EQ(ill, 2);
    EXPECT_EQ(inside, 2);
}

TEST_F(CallbackHandlerTest, thousands_of_messages_go_through_strategy_and_threads_once_each) {
    runtime::Loop loop{base::system_clocks()};
    auto store = stores::make_memory_store(base::system_clocks());
    const base::Hmac secret("secret");
    auto records = records_on_store(loop, *store, secret, "memory");
    std::atomic<int> calls{0};
    const auto handler = make_callback_handler(
        [&](const Message&, const Attempt&) {
            ++calls;
            return Handled{};
        },
        4);
    ConsumerCounters counters;
    auto strategy = make_recorded(loop, {.name = "x", .owner = {"a", {}}, .store_promise = {}},
                                  *records, *handler, counters);
    constexpr std::size_t total = 5000;
    std::deque<Message> messages;
    for (std::size_t i = 0; i < total; ++i) {
        Message& made = messages.emplace_back();
        made.id = std::to_string(i);
        made.key = base::sha256(made.id);
        made.lane = i % 3 == 0 ? 0 : 1 + i % 50;
    }
    std::deque<Message*> left;
    for (Message& one : messages) left.push_back(&one);
    std::size_t applied = 0;
    std::map<std::uint64_t, int> out_of_lane;
    bool stopped = false;
    std::function<void()> give = [&] {
        std::vector<Message*> batch;
        std::size_t capacity = strategy->capacity();
        std::deque<Message*> rest;
        for (Message* one : left) {
            const bool may =
                batch.size() < capacity && (one->lane == 0 || out_of_lane[one->lane] == 0);
            (may ? static_cast<void>(batch.push_back(one)) : rest.push_back(one));
        }
        left = std::move(rest);
        for (Message* one : batch) ++out_of_lane[one->lane];
        if (batch.empty()) return;
        strategy->run(std::move(batch), false, [&](Message& one, const Verdict& verdict) {
            --out_of_lane[one.lane];
            if (std::holds_alternative<Applied>(verdict)) {
                if (++applied == total) strategy->stop(1s, [&] { stopped = true; });
            } else {
                EXPECT_TRUE(std::holds_alternative<Held>(verdict)) << verdict.index();
                left.push_back(&one);
            }
        });
    };
    strategy->on_capacity = give;
    loop.post(give);
    const auto until = std::chrono::steady_clock::now() + 60s;
    while (!stopped && std::chrono::steady_clock::now() < until) {
        loop.io().restart();
        loop.io().run_one_for(20ms);
        if (!left.empty() && strategy->capacity() > 0) give();
    }
    EXPECT_TRUE(stopped);
    EXPECT_EQ(applied, total);
    EXPECT_EQ(calls, static_cast<int>(total));
}

}  // namespace
}  // namespace semel::consumer
