// The simulation's own client and upstream do what tests on top of them rely on.
#include <gtest/gtest.h>

#include "sim/fake_exchange.hpp"
#include "sim/fake_upstream.hpp"
#include "support/manual_clock.hpp"

namespace semel::sim {
namespace {

using namespace std::chrono_literals;
using http::CallError;
using runtime::Task;

struct Fakes : testing::Test {
    support::ManualClock clock;
    runtime::Loop loop{clock, runtime::Loop::Mode::simulated};
    FakeUpstream upstream;
    std::unique_ptr<http::Client> client = make_fake_client(loop, upstream);
    std::string log;

    void run_for(std::chrono::milliseconds d) {
        for (const SteadyTime end = clock.steady() + d; clock.steady() < end; clock.advance(1ms)) {
            loop.run_ready();
            loop.fire_due();
            loop.run_ready();
        }
    }
    Task<> calls(std::string body, http::Client::CancelToken* cancel) {
        http::Request request;
        request.body = body;
        http::Timeouts timeouts;
        timeouts.idle = 1s;
        const http::Origin origin;
        auto called = co_await client->call(origin, std::move(request), timeouts, cancel);
        if (const auto* e = std::get_if<CallError>(&called)) {
            log += "error " + std::to_string(static_cast<int>(e->kind)) +
                   (e->maybe_processed ? "?" : "!");
            co_return;
        }
        http::Response& response = *std::get<0>(called);
        log += std::to_string(response.status()) + ":";
        for (;;) {
            const auto piece = co_await response.read_some();
            if (const auto* e = std::get_if<CallError>(&piece)) {
                log += "error " + std::to_string(static_cast<int>(e->kind));
                co_return;
            }
            if (std::get<0>(piece).empty()) break;
            log += std::get<0>(piece);
        }
        log += ".";
    }
    static std::string kind(CallError::Kind k) {
        return "error " + std::to_string(static_cast<int>(k));
    }
};

TEST_F(Fakes, the_upstream_answers_in_time_cuts_stalls_and_counts_what_was_paid) {
    upstream.plan = [](const FakeUpstream::Call& call) {
        UpstreamPlan plan;
        plan.body = {{10ms, "a"}, {10ms, "b"}};
        if (call.body == "cut") plan.end = UpstreamPlan::End::cut;
        if (call.body == "stall") plan.end = UpstreamPlan::End::stall;
        if (call.body == "refused") plan.start = UpstreamPlan::Start::refused;
        return plan;
    };
    loop.spawn(calls("whole", nullptr));
    run_for(65ms);
    EXPECT_EQ(log, "200:a") << "the second event comes after 70 ms";
    run_for(10ms);
    EXPECT_EQ(log, "200:ab.");
    for (const auto& [body, wanted] :
         {std::pair<std::string, std::string>{"cut", "200:ab" + kind(CallError::Kind::cut)},
          {"stall", "200:ab" + kind(CallError::Kind::idle_timeout)},
          {"refused", kind(CallError::Kind::refused) + "!"}}) {
        log.clear();
        loop.spawn(calls(body, nullptr));
        run_for(2s);
        EXPECT_EQ(log, wanted) << body;
    }
    EXPECT_EQ(upstream.paid("whole"), 1u);
    EXPECT_EQ(upstream.paid("cut"), 1u);
    EXPECT_EQ(upstream.paid("refused"), 0u);
    EXPECT_EQ(upstream.calls("refused"), 1u);
    EXPECT_EQ(upstream.paid_in_all(), 3u);
}

TEST_F(Fakes, a_call_is_cancelled_before_its_head) {
    http::Client::CancelToken cancel;
    loop.spawn(calls("x", &cancel));
    run_for(10ms);
    cancel.cancel();
    run_for(1ms);
    EXPECT_EQ(log, kind(CallError::Kind::cancelled) + "?");
}

Task<> streams(FakeExchange& exchange, std::string& sent) {
    http::ResponseHead head;
    head.add("Content-Type", "text/event-stream");
    exchange.begin(head, std::nullopt);
    for (int i = 0; i < 3; ++i) sent += co_await exchange.write("event ") ? 'y' : 'n';
    sent += co_await exchange.finish("end") ? 'y' : 'n';
}

struct FakeClients : Fakes {
    FakeExchange exchange{
        loop, {.target = "/v1/x?y=1", .headers = {{"Idempotency-Key", "k"}}, .body = "{}"}};
    std::string sent;
};

TEST_F(FakeClients, see_what_was_sent_before_they_vanished) {
    EXPECT_EQ(exchange.head().path, "/v1/x");
    EXPECT_EQ(exchange.head().query, "y=1");
    exchange.write_takes = 10ms;
    exchange.vanish_at = clock.steady() + 25ms;
    loop.spawn(streams(exchange, sent));
    run_for(100ms);
    EXPECT_EQ(sent, "yynn");
    EXPECT_EQ(exchange.received().body, "event event ");
    EXPECT_EQ(exchange.received().state, Received::State::partial);
    EXPECT_EQ(exchange.received().header("Content-Type"), "text/event-stream");
    EXPECT_TRUE(exchange.client_gone());
}

TEST_F(FakeClients, that_stay_get_everything_in_their_own_time) {
    exchange.write_takes = 10ms;
    loop.spawn(streams(exchange, sent));
    run_for(35ms);
    EXPECT_EQ(exchange.received().state, Received::State::partial);
    run_for(10ms);
    EXPECT_EQ(exchange.received().state, Received::State::finished);
    EXPECT_EQ(exchange.received().body, "event event event end");
}

}  // namespace
}  // namespace semel::sim
