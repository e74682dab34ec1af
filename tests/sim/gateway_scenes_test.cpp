// Scenes with a script, where the luck of a seed would have to be great: many joiners and one
// death.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "gateway/gateway.hpp"
#include "gateway/identity.hpp"
#include "sim/fake_exchange.hpp"
#include "sim/fake_upstream.hpp"
#include "sim/world.hpp"

namespace semel::sim {
namespace {

using runtime::Task;
using namespace std::chrono_literals;

constexpr milliseconds lease = 6s;

class GatewayApp final : public App {
  public:
    GatewayApp(Process& process, FakeUpstream& upstream, const config::Config& config)
        : shared_(config, "secret", *process.hot, metrics_, "/tmp"),
          client_(make_fake_client(*process.loop, upstream)),
          gateway_(shared_, *process.engine, *client_) {}
    gateway::Gateway& gateway() { return gateway_; }
    telemetry::Metrics& metrics() { return metrics_; }

  private:
    telemetry::Metrics metrics_;
    gateway::Process shared_;
    std::unique_ptr<http::Client> client_;
    gateway::Gateway gateway_;
};

/// Two gateway processes on one store, and an upstream that streams ten events, half a second
/// apart.
class Scenes : public testing::Test {
  protected:
    Scenes() : world_(1, options()) {
        upstream_.plan = [](const FakeUpstream::Call& call) {
            UpstreamPlan plan;
            plan.headers = {{"Content-Type", "text/event-stream"}};
            plan.with_length = false;
            for (int i = 0; i < 10; ++i) {
                plan.body.push_back(
                    {500ms, "data: {\"model\":\"m\",\"choices\":[{\"delta\":{\"content\":\"call " +
                                std::to_string(call.number) + " event " + std::to_string(i) +
                                "\"}}]}\n\n"});
            }
            plan.body.push_back({0ms, "data: [DONE]\n\n"});
            return plan;
        };
        for (auto& process : world_.processes()) world_.start(*process);
    }

    WorldOptions options() {
        config_.upstreams.push_back(
            {.name = "sim", .base_url = "http://upstream.invalid", .models = {"*"}});
        config_.routes["/v1/chat/completions"] = {};
        config_.routes["/api/chat"] = {};
        WorldOptions world;
        world.processes = 2;
        world.engine.lease = lease;
        world.make_app = [this](Process& process) {
            return std::make_unique<GatewayApp>(process, upstream_, config_);
        };
        return world;
    }

    static Task<> serve(std::shared_ptr<FakeExchange> exchange, gateway::Gateway* gateway,
                        unsigned* ended) {
        co_await gateway->handle(*exchange);
        ++*ended;
    }

    std::shared_ptr<FakeExchange> ask(Process& process) {
        FakeRequest request;
        request.headers = {{"Host", "localhost"},
                           {"Content-Type", "application/json"},
                           {"Idempotency-Key", "one"}};
        request.body = body_;
        auto exchange = std::make_shared<FakeExchange>(*process.loop, request);
        process.loop->spawn(
            serve(exchange, &static_cast<GatewayApp&>(*process.app).gateway(), &ended_));
        return exchange;
    }

    const std::string body_ = R"({"model":"m","stream":true})";
    config::Config config_;
    FakeUpstream upstream_;
    unsigned ended_ = 0;
    World world_;
};

TEST_F(Scenes, fifty_joiners_elsewhere_get_one_new_call_when_the_owner_dies_in_mid_stream) {
    Process& first = *world_.processes()[0];
    Process& second = *world_.processes()[1];
    auto owner = ask(first);
    world_.run_for(1s);
    std::vector<std::shared_ptr<FakeExchange>> joiners;
    for (int i = 0; i < 50; ++i) joiners.push_back(ask(second));
    world_.run_for(1s);
    ASSERT_EQ(owner->received().state, Received::State::partial);
    world_.crash(first);
    ASSERT_TRUE(world_.run_until([&] { return ended_ == 50; }, world_.now() + 60s));
    EXPECT_EQ(upstream_.paid(body_), 2u) << "one call of the dead, one new one";
    for (const auto& joiner : joiners) {
        EXPECT_EQ(joiner->received().state, Received::State::finished);
        EXPECT_EQ(joiner->received().body, joiners.front()->received().body);
        EXPECT_EQ(joiner->received().body.find("call 1"), std::string::npos)
            << "bytes of the first attempt";
        EXPECT_NE(joiner->received().body.find("[DONE]"), std::string::npos);
    }
    unsigned taken_over = 0;
    for (const auto& joiner : joiners)
        taken_over += joiner->received().header("Semel-Outcome") == "taken-over" ? 1 : 0;
    EXPECT_EQ(taken_over, 1u);
}

TEST_F(Scenes, a_zombies_joiners_are_cut_and_never_get_the_new_owners_bytes) {
    Process& first = *world_.processes()[0];
    Process& second = *world_.processes()[1];
    std::vector<std::shared_ptr<FakeExchange>> followers;
    for (int i = 0; i < 50; ++i) followers.push_back(ask(first));
    world_.run_for(2s);
    world_.pause(first, 20s);
    world_.run_for(7s);  // its lease is over
    auto taker = ask(second);
    ASSERT_TRUE(world_.run_until([&] { return ended_ == 51; }, world_.now() + 60s));
    EXPECT_EQ(upstream_.paid(body_), 2u);
    EXPECT_EQ(taker->received().state, Received::State::finished);
    EXPECT_NE(taker->received().body.find("call 2"), std::string::npos);
    for (const auto& follower : followers) {
        EXPECT_EQ(follower->received().state, Received::State::cut)
            << "visibly broken: its attempt was overtaken";
        EXPECT_NE(follower->received().body.find("call 1"), std::string::npos);
        EXPECT_EQ(follower->received().body.find("call 2"), std::string::npos)
            << "bytes of two attempts in one answer";
    }
    // Whoever asks again gets the record, wherever.
    auto again = ask(first);
    ASSERT_TRUE(world_.run_until([&] { return ended_ == 52; }, world_.now() + 10s));
    EXPECT_EQ(again->received().body, taker->received().body);
    EXPECT_EQ(upstream_.paid(body_), 2u);
}

TEST_F(Scenes, a_client_that_leaves_ends_the_call_only_where_the_route_says_so) {
    config_.routes["/v1/chat/completions"].on_disconnect = config::OnDisconnect::cancel;
    Process& first = *world_.processes()[0];
    auto gone = ask(first);
    gone->vanish_at = world_.now() + 2s;
    ASSERT_TRUE(world_.run_until([&] { return ended_ == 1; }, world_.now() + 30s));
    world_.run_for(2s);
    EXPECT_EQ(static_cast<GatewayApp&>(*first.app).metrics().abandoned_calls.value(), 1u);
    auto again = ask(first);
    ASSERT_TRUE(world_.run_until([&] { return ended_ == 2; }, world_.now() + 30s));
    EXPECT_EQ(upstream_.paid(body_), 2u);
    EXPECT_EQ(again->received().header("Semel-Attempt"), "2");
    EXPECT_EQ(again->received().state, Received::State::finished);
}

}  // namespace
}  // namespace semel::sim
