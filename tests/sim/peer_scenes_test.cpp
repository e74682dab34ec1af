// Scenes of two gateway processes on one store whose clients join each other's calls over the peer
// addresses.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "gateway/gateway.hpp"
#include "gateway/identity.hpp"
#include "gateway/peer_server.hpp"
#include "sim/fake_exchange.hpp"
#include "sim/fake_upstream.hpp"
#include "sim/peer_net.hpp"

namespace semel::sim {
namespace {

using runtime::Task;
using State = Received::State;
using namespace std::chrono_literals;

constexpr milliseconds lease = 6s;
constexpr std::string_view peer_secret = "kept in the store";

class GatewayApp final : public App {
  public:
    GatewayApp(Process& process, FakeUpstream& upstream, const config::Config& config,
               PeerNet& net)
        : shared_(config, "secret", *process.hot, metrics, "/tmp", std::string(peer_secret)),
          client_(net.client(process, make_fake_client(*process.loop, upstream))),
          gateway(shared_, *process.engine, *client_),
          peers(shared_, *process.loop, lease) {
        net.serve(process, peers);
    }

  private:
    gateway::Process shared_;
    std::unique_ptr<http::Client> client_;

  public:
    telemetry::Metrics metrics;
    gateway::Gateway gateway;
    gateway::PeerServer peers;
    gateway::Process& shared() { return shared_; }
};

std::string event(unsigned call, int i, std::string_view pad = {}) {
    return "data: {\"model\":\"m\",\"choices\":[{\"delta\":{\"content\":\"call " +
           std::to_string(call) + " event " + std::to_string(i) + std::string(pad) + "\"}}]}\n\n";
}

class PeerScenes : public testing::Test {
  protected:
    PeerScenes() : net_(world_), world_(7, options()) {
        stream(10, 500ms);
        for (auto& process : world_.processes()) world_.start(*process);
    }

    WorldOptions options() {
        config_.upstreams.push_back(
            {.name = "sim", .base_url = "http://upstream.invalid", .models = {"*"}});
        config_.routes["/v1/chat/completions"] = {};
        config::RouteConfig chat;
        chat.on_running = config::OnRunning::join;
        chat.model = "m";
        config_.routes["/api/chat"] = chat;
        WorldOptions world;
        world.processes = 2;
        world.engine.lease = lease;
        world.make_app = [this](Process& process) {
            return std::make_unique<GatewayApp>(process, upstream_, config_, net_);
        };
        return world;
    }

    /// The upstream streams `events` events, `gap` apart, and ends well.
    void stream(int events, milliseconds gap, std::size_t pad = 0) {
        upstream_.plan = [events, gap, pad](const FakeUpstream::Call& call) {
            UpstreamPlan plan;
            plan.headers = {{"Content-Type", "text/event-stream"}, {"x-request-id", "up-1"}};
            plan.with_length = false;
            for (int i = 0; i < events; ++i)
                plan.body.push_back({gap, event(call.number, i, std::string(pad, 'p'))});
            plan.body.push_back({0ms, "data: [DONE]\n\n"});
            return plan;
        };
    }
    void answer(int status, std::string body, milliseconds after) {
        upstream_.plan = [status, body, after](const FakeUpstream::Call&) {
            UpstreamPlan plan;
            plan.status = status;
            plan.headers = {{"Content-Type", "application/json"}, {"x-request-id", "up-1"}};
            plan.head_after = after;
            plan.body = {{1ms, body}};
            return plan;
        };
    }

    static Task<> serve(std::shared_ptr<FakeExchange> exchange, http::Handler* handler,
                        unsigned* ended) {
        co_await handler->handle(*exchange);
        ++*ended;
    }
    std::shared_ptr<FakeExchange> ask(Process& process, FakeRequest request) {
        auto exchange = std::make_shared<FakeExchange>(*process.loop, std::move(request));
        process.loop->spawn(serve(exchange, &app(process).gateway, &ended_));
        return exchange;
    }
    std::shared_ptr<FakeExchange> ask(Process& process) { return ask(process, completions_); }
    std::vector<std::shared_ptr<FakeExchange>> ask(Process& process, int times) {
        std::vector<std::shared_ptr<FakeExchange>> all;
        for (int i = 0; i < times; ++i) all.push_back(ask(process));
        return all;
    }
    [[nodiscard]] bool all_ended(unsigned count, milliseconds within) {
        return world_.run_until([&] { return ended_ == count; }, world_.now() + within);
    }
    static GatewayApp& app(Process& process) { return static_cast<GatewayApp&>(*process.app); }
    static telemetry::Metrics& metrics(Process& process) { return app(process).metrics; }
    Process& first() { return *world_.processes()[0]; }
    Process& second() { return *world_.processes()[1]; }
    [[nodiscard]] unsigned paid() const { return upstream_.paid_in_all(); }

    static constexpr std::string_view body_ =
        R"({"model":"m","stream":true,"messages":[{"role":"user","content":"x"}]})";
    FakeRequest completions_{.headers = {{"Host", "localhost"},
                                         {"Content-Type", "application/json"},
                                         {"Idempotency-Key", "one"}},
                             .body = std::string(body_)};
    FakeRequest chat_{.target = "/api/chat",
                      .headers = {{"Host", "localhost"},
                                  {"Content-Type", "application/json"},
                                  {"X-Request-Id", "one"}},
                      .body = R"({"content":"x","sessionId":"s","stream":true})"};
    config::Config config_;
    FakeUpstream upstream_;
    unsigned ended_ = 0;
    PeerNet net_;
    World world_;
};

TEST_F(PeerScenes, a_thousand_joiners_elsewhere_get_every_byte_as_it_comes_over_one_connection) {
    const auto owner = ask(first());
    world_.run_for(1800ms);  // three events are out
    const auto here = ask(first());
    const auto elsewhere = ask(second(), 1000);
    world_.run_for(50ms);
    for (const auto& joiner : elsewhere)
        ASSERT_EQ(joiner->received().body, owner->received().body) << "all that was out so far";
    for (int i = 0; i < 6; ++i) {
        world_.run_for(500ms);
        ASSERT_EQ(elsewhere.front()->received().body, owner->received().body) << "and then live";
        ASSERT_EQ(elsewhere.back()->received().body, owner->received().body);
    }
    ASSERT_TRUE(all_ended(1002, 5s));
    EXPECT_EQ(paid(), 1u);
    EXPECT_EQ(net_.connections, 1u);
    EXPECT_EQ(metrics(second()).peer_follows.value(), 1u);
    EXPECT_EQ(metrics(second()).peer_fallbacks.value(), 0u);
    EXPECT_EQ(metrics(first()).peer_connections.value(), 0) << "nobody is left";
    for (const auto& joiner : elsewhere) {
        const Received& got = joiner->received();
        ASSERT_EQ(got.state, State::finished);
        ASSERT_EQ(got.body, owner->received().body);
        ASSERT_EQ(got.status, 200);
        ASSERT_EQ(got.headers, here->received().headers) << "as joiners of its own process";
    }
    EXPECT_EQ(here->received().header("Semel-Outcome"), "joined");
    EXPECT_EQ(here->received().header("x-request-id"), "up-1");
}

TEST_F(PeerScenes, a_plain_answer_and_its_headers_come_over_the_peer_address_when_it_is_whole) {
    for (const std::size_t bytes : {std::size_t{10}, std::size_t{3'000'000}}) {
        const std::string id = "plain " + std::to_string(bytes);
        completions_.headers.back().second = "plain-" + std::to_string(bytes);
        completions_.body = R"({"model":"m","messages":[{"role":"user","content":"y"}]})";
        answer(200, R"({"choices":[{"message":{"content":")" + std::string(bytes, 'z') + R"("}}]})",
               3s);
        ended_ = 0;
        const auto owner = ask(first());
        world_.run_for(1s);
        const auto here = ask(first());
        const auto elsewhere = ask(second(), 3);
        ASSERT_TRUE(all_ended(5, 10s)) << id;
        for (const auto& joiner : elsewhere) {
            EXPECT_EQ(joiner->received().body, owner->received().body);
            EXPECT_EQ(joiner->received().headers, here->received().headers);
            EXPECT_EQ(joiner->received().length, here->received().length);
            EXPECT_LT(joiner->received().ended_at - owner->received().ended_at, 20ms);
        }
        EXPECT_NE(here->received().header("Idempotency-Expires"), "");
    }
    EXPECT_EQ(paid(), 2u);
}

TEST_F(PeerScenes, a_failure_is_the_same_for_everyone_who_joined_it_wherever) {
    answer(429, R"({"error":{"message":"slow down"}})", 2s);
    const auto owner = ask(first());
    world_.run_for(1s);
    const auto here = ask(first());
    const auto elsewhere = ask(second(), 20);
    ASSERT_TRUE(all_ended(22, 10s));
    EXPECT_EQ(owner->received().status, 429);
    for (const auto& joiner : elsewhere) {
        EXPECT_EQ(joiner->received().status, 429);
        EXPECT_EQ(joiner->received().body, owner->received().body);
        EXPECT_EQ(joiner->received().headers, here->received().headers);
    }
    EXPECT_EQ(paid(), 1u) << "none of them starts another call";
}

TEST_F(PeerScenes, chat_streams_and_plain_chats_are_joined_elsewhere_and_marked_as_cached) {
    for (const bool streams : {true, false}) {
        chat_.headers.back().second = streams ? "streams" : "plain";
        chat_.body = std::string(R"({"content":"x","sessionId":")") + (streams ? "a" : "b") +
                     R"(","stream":)" + (streams ? "true}" : "false}");
        if (!streams)
            answer(200, R"({"model":"m","choices":[{"message":{"content":"hello"}}]})", 3s);
        ended_ = 0;
        const auto owner = ask(first(), chat_);
        world_.run_for(1s);
        const auto here = ask(first(), chat_);
        const auto elsewhere = ask(second(), chat_);
        ASSERT_TRUE(all_ended(3, 20s));
        const std::string& body = elsewhere->received().body;
        EXPECT_EQ(elsewhere->received().state, State::finished);
        EXPECT_EQ(body, here->received().body);
        EXPECT_EQ(elsewhere->received().headers, here->received().headers);
        EXPECT_NE(body.find("\"fromCache\":true"), std::string::npos) << body;
        EXPECT_NE(owner->received().body.find("\"fromCache\":false"), std::string::npos);
    }
    EXPECT_EQ(paid(), 2u);
    EXPECT_EQ(metrics(second()).peer_fallbacks.value(), 0u);
}

TEST_F(PeerScenes, a_chat_asked_in_two_processes_at_once_is_one_turn_that_both_follow) {
    const auto here = ask(first(), chat_);
    const auto there = ask(second(), chat_);
    world_.run_for(2s);
    EXPECT_FALSE(here->received().body.empty());
    EXPECT_EQ(here->received().body, there->received().body) << "while it runs";
    ASSERT_TRUE(all_ended(2, 20s));
    EXPECT_EQ(net_.connections, 1u);
    EXPECT_EQ(paid(), 1u);
}

TEST_F(PeerScenes, an_answer_that_its_owner_could_not_record_in_time_is_given_elsewhere_too) {
    answer(200, R"({"choices":[{"message":{"content":"z"}}]})", 3s);
    completions_.body = R"({"model":"m"})";
    const auto owner = ask(first());
    world_.run_for(1s);
    const auto elsewhere = ask(second(), 3);
    world_.run_for(1s);
    first().store->down = true;
    ASSERT_TRUE(all_ended(4, 10s));
    for (const auto& joiner : elsewhere) {
        EXPECT_EQ(joiner->received().body, owner->received().body);
        EXPECT_EQ(joiner->received().header("Semel-Record"), "pending");
        EXPECT_EQ(joiner->received().header("Semel-Outcome"), "joined");
    }
    first().store->down = false;
    world_.run_for(lease);
    const auto again = ask(second());
    ASSERT_TRUE(all_ended(5, 10s));
    EXPECT_EQ(again->received().header("Semel-Outcome"), "replayed");
    EXPECT_EQ(paid(), 1u);
}

TEST_F(PeerScenes, who_does_not_join_is_answered_at_once_and_follows_nobody) {
    config_.routes["/api/chat"].on_running = config::OnRunning::accept;
    config_.routes["/v1/chat/completions"].on_running = config::OnRunning::reject;
    ask(first(), chat_);
    ask(first());
    world_.run_for(1s);
    const auto accepted = ask(second(), chat_);
    const auto rejected = ask(second());
    world_.run_for(100ms);
    EXPECT_EQ(accepted->received().status, 202);
    EXPECT_EQ(rejected->received().status, 409);
    EXPECT_EQ(net_.connections, 0u);
    ASSERT_TRUE(all_ended(4, 20s));
    EXPECT_EQ(paid(), 2u);
}

TEST_F(PeerScenes, a_broken_connection_is_made_anew_and_no_byte_is_lost_or_doubled) {
    const auto owner = ask(first());
    world_.run_for(100ms);
    const auto elsewhere = ask(second(), 5);
    for (int i = 0; i < 4; ++i) {
        world_.run_for(700ms);
        net_.break_all();
    }
    ASSERT_TRUE(all_ended(6, 20s));
    for (const auto& joiner : elsewhere) {
        EXPECT_EQ(joiner->received().state, State::finished);
        EXPECT_EQ(joiner->received().body, owner->received().body);
    }
    EXPECT_EQ(paid(), 1u);
    EXPECT_GT(net_.connections, 1u);
    EXPECT_GT(metrics(second()).peer_fallbacks.value(), 0u);
}

TEST_F(PeerScenes, an_owner_that_is_lost_in_mid_stream_and_completes_is_continued_from_its_record) {
    for (const std::size_t pad : {std::size_t{0}, std::size_t{100'000}}) {  // inline, and in chunks
        stream(10, 500ms, pad);
        completions_.headers.back().second = "pad-" + std::to_string(pad);
        ended_ = 0;
        net_.reach = PeerNet::Reach::yes;
        const auto owner = ask(first());
        world_.run_for(100ms);
        const auto elsewhere = ask(second(), 5);
        world_.run_for(2s);
        net_.reach = PeerNet::Reach::refused;
        net_.break_all();
        world_.run_for(1s);
        const std::string so_far = elsewhere.front()->received().body;
        ASSERT_FALSE(so_far.empty());
        ASSERT_LT(so_far.size(), owner->received().body.size());
        ASSERT_TRUE(all_ended(6, 30s));
        for (const auto& joiner : elsewhere) {
            EXPECT_EQ(joiner->received().state, State::finished);
            EXPECT_EQ(joiner->received().body, owner->received().body);
            EXPECT_LT(joiner->received().ended_at - owner->received().ended_at, 1s);
        }
    }
    EXPECT_EQ(paid(), 2u);
}

TEST_F(PeerScenes, an_owner_that_cannot_be_reached_is_replayed_within_a_second_of_its_completion) {
    for (const PeerNet::Reach reach : {PeerNet::Reach::refused, PeerNet::Reach::swallowed}) {
        net_.reach = reach;
        completions_.headers.back().second = "reach-" + std::to_string(static_cast<int>(reach));
        ended_ = 0;
        const auto owner = ask(first());
        world_.run_for(1s);
        const auto elsewhere = ask(second(), 20);
        ASSERT_TRUE(all_ended(21, 30s));
        for (const auto& joiner : elsewhere) {
            EXPECT_EQ(joiner->received().body, owner->received().body);
            EXPECT_EQ(joiner->received().header("Semel-Outcome"), "replayed");
            EXPECT_LT(joiner->received().ended_at - owner->received().ended_at, 1s);
        }
    }
    EXPECT_EQ(paid(), 2u);
    EXPECT_EQ(net_.connections, 0u);
}

TEST_F(PeerScenes, an_owner_that_dies_in_mid_stream_leaves_its_joiners_visibly_cut) {
    ask(first());
    world_.run_for(1s);
    const auto elsewhere = ask(second(), 20);
    world_.run_for(1s);
    world_.crash(first());
    const SteadyTime died = world_.now();
    const auto late = ask(second());  // attached to the same flight, which has bytes
    ASSERT_TRUE(all_ended(21, 60s));
    for (const auto& joiner : elsewhere) {
        EXPECT_EQ(joiner->received().state, State::cut);
        EXPECT_NE(joiner->received().body.find("call 1"), std::string::npos);
        EXPECT_EQ(joiner->received().body.find("call 2"), std::string::npos);
        EXPECT_LT(joiner->received().ended_at - died, lease + 1s);
    }
    EXPECT_EQ(late->received().state, State::cut);
    const auto again = ask(second());
    ASSERT_TRUE(all_ended(22, 20s));
    EXPECT_EQ(again->received().header("Semel-Outcome"), "taken-over");
    EXPECT_EQ(paid(), 2u) << "calls = counted attempts";
    EXPECT_EQ(again->received().header("Semel-Attempt"), "2");
}

TEST_F(PeerScenes, joiners_without_a_byte_get_the_new_attempt_of_a_dead_owners_intent) {
    for (const bool chat : {false, true}) {
        const FakeRequest& request = chat ? chat_ : completions_;
        upstream_.plan = [](const FakeUpstream::Call& call) {
            UpstreamPlan plan;
            plan.headers = {{"Content-Type", "text/event-stream"}};
            plan.with_length = false;
            plan.head_after = call.number % 2 == 1 ? 30s : 10ms;  // the first says nothing for long
            plan.body = {{0ms, event(call.number, 0)}, {0ms, "data: [DONE]\n\n"}};
            return plan;
        };
        ended_ = 0;
        const unsigned paid_before = paid();
        ask(first(), request);
        world_.run_for(3s);
        std::vector<std::shared_ptr<FakeExchange>> elsewhere;
        for (int i = 0; i < 20; ++i) elsewhere.push_back(ask(second(), request));
        world_.run_for(1s);
        EXPECT_EQ(metrics(first()).peer_connections.value(), 1);
        world_.crash(first());
        const SteadyTime died = world_.now();
        ASSERT_TRUE(all_ended(20, 60s));
        unsigned taken_over = 0;
        for (const auto& joiner : elsewhere) {
            const Received& got = joiner->received();
            EXPECT_EQ(got.state, State::finished);
            EXPECT_LT(got.first_byte_at - died, lease + 1s);
            EXPECT_NE(got.body.find("call 2"), std::string::npos) << got.body;
            EXPECT_EQ(got.header("Semel-Attempt"), "2");
            if (got.header("Semel-Outcome") == "taken-over") ++taken_over;
        }
        EXPECT_EQ(taken_over, 1u);
        EXPECT_EQ(paid() - paid_before, 2u);
        world_.start(first());
    }
}

TEST_F(PeerScenes, a_frozen_owner_is_dropped_and_its_late_answer_is_nobodys) {
    const auto owner = ask(first());
    world_.run_for(100ms);
    const auto elsewhere = ask(second(), 5);
    world_.run_for(2s);
    world_.pause(first(), 30s);
    ASSERT_TRUE(all_ended(5, 20s));
    for (const auto& joiner : elsewhere) EXPECT_EQ(joiner->received().state, State::cut);
    const auto taker = ask(second());
    ASSERT_TRUE(all_ended(6, 20s));
    EXPECT_EQ(taker->received().header("Semel-Outcome"), "taken-over");
    ASSERT_TRUE(all_ended(7, 60s));
    EXPECT_EQ(owner->received().state, State::cut);
    EXPECT_EQ(paid(), 2u);
    const auto again = ask(first());
    ASSERT_TRUE(all_ended(8, 10s));
    EXPECT_EQ(again->received().body, taker->received().body);
}

TEST_F(PeerScenes, an_owner_that_froze_for_less_than_its_lease_is_found_again) {
    const auto owner = ask(first());
    world_.run_for(100ms);
    const auto elsewhere = ask(second(), 5);
    world_.run_for(2s);
    world_.pause(first(), 3500ms);  // longer than it may be silent
    ASSERT_TRUE(all_ended(6, 60s));
    for (const auto& joiner : elsewhere) {
        EXPECT_EQ(joiner->received().state, State::finished);
        EXPECT_EQ(joiner->received().body, owner->received().body);
    }
    EXPECT_EQ(paid(), 1u);
    EXPECT_EQ(metrics(second()).peer_fallbacks.value(), 1u);
}

TEST_F(PeerScenes, a_quiet_upstream_is_no_frozen_owner) {
    stream(2, 25s);
    const auto owner = ask(first());
    world_.run_for(100ms);
    const auto elsewhere = ask(second());
    ASSERT_TRUE(all_ended(2, 120s));
    EXPECT_EQ(elsewhere->received().state, State::finished);
    EXPECT_EQ(net_.connections, 1u);
    EXPECT_EQ(metrics(second()).peer_fallbacks.value(), 0u);
}

TEST_F(PeerScenes, a_stranger_at_the_peer_address_is_not_believed) {
    // It knows the protocol and not the secret; or it sends nonsense.
    for (const bool nonsense : {false, true}) {
        completions_.headers.back().second = nonsense ? "nonsense" : "no-proof";
        net_.tamper = [nonsense](std::string& bytes) {
            if (nonsense) {
                bytes = "what you asked for";
            } else if (bytes.starts_with('H')) {
                bytes[10] = static_cast<char>(bytes[10] + 1);
            }
        };
        ended_ = 0;
        const auto owner = ask(first());
        world_.run_for(100ms);
        const auto elsewhere = ask(second(), 3);
        ASSERT_TRUE(all_ended(4, 60s));
        for (const auto& joiner : elsewhere) {
            EXPECT_EQ(joiner->received().header("Semel-Outcome"), "replayed");
            EXPECT_EQ(joiner->received().body, owner->received().body);
        }
    }
    EXPECT_GT(metrics(second()).peer_fallbacks.value(), 0u);
    EXPECT_EQ(paid(), 2u);
}

TEST_F(PeerScenes, only_who_proves_to_know_the_secret_is_told_anything) {
    ask(first());
    world_.run_for(1s);
    const core::RecordPtr record = world_.record(
        gateway::stored_key(base::Hmac("secret"), {.tenant = gateway::anonymous_tenant,
                                                   .operation = "/v1/chat/completions",
                                                   .user = {},
                                                   .session = {},
                                                   .id = "one"}));
    ASSERT_TRUE(record);
    const std::string target = gateway::peer_target(
        {.key = gateway::stored_key(base::Hmac("secret"), {.tenant = gateway::anonymous_tenant,
                                                           .operation = "/v1/chat/completions",
                                                           .user = {},
                                                           .session = {},
                                                           .id = "one"}),
         .token = record->token});
    const std::string nonce = base::base64url(base::random_bytes(gateway::peer_nonce_bytes));
    const std::string proof =
        "Semel-Peer " + gateway::peer_proof(base::Hmac(peer_secret), target, nonce);
    const std::string wrong =
        "Semel-Peer " + gateway::peer_proof(base::Hmac("another"), target, nonce);
    const auto request = [&](std::string method, std::string path,
                             std::vector<std::pair<std::string, std::string>> headers) {
        auto exchange = std::make_shared<FakeExchange>(
            *first().loop, FakeRequest{.method = std::move(method),
                                       .target = std::move(path),
                                       .headers = std::move(headers),
                                       .body = {}});
        first().loop->spawn(serve(exchange, &app(first()).peers, &ended_));
        world_.run_for(10ms);
        return exchange;
    };
    const auto at = [&](std::string path, std::string authorization) {
        return request("GET", std::move(path),
                       {{"Authorization", std::move(authorization)}, {"Semel-Peer-Nonce", nonce}});
    };
    for (const auto& refused :
         {request("GET", target, {}), request("GET", target, {{"Authorization", proof}}),
          request("GET", target, {{"Semel-Peer-Nonce", nonce}}), at(target, wrong),
          at(target, ""), at(target, proof.substr(0, proof.size() - 1)), at(target, proof + "x"),
          at(target + "&from=1", proof), at("/", proof), at("/metrics", ""),
          request("POST", target, {{"Authorization", proof}, {"Semel-Peer-Nonce", nonce}}),
          request("GET", target,
                  {{"Authorization", proof}, {"Semel-Peer-Nonce", std::string(100, 'n')}})}) {
        EXPECT_EQ(refused->received().status, 401);
        EXPECT_EQ(refused->received().body, "");
        EXPECT_EQ(refused->received().headers, "");
    }
    EXPECT_EQ(metrics(first()).peer_refused.value(), 12u);
    const auto taken = at(target, proof);
    EXPECT_EQ(taken->received().status, 200);
    EXPECT_NE(taken->received().body.find("call 1 event 0"), std::string::npos);
    EXPECT_EQ(at(target, proof)->received().status, 401) << "a nonce is good for one question";
    const std::string other = base::base64url(base::random_bytes(gateway::peer_nonce_bytes));
    const auto nothing =
        request("GET", "/metrics",
                {{"Authorization",
                  "Semel-Peer " + gateway::peer_proof(base::Hmac(peer_secret), "/metrics", other)},
                 {"Semel-Peer-Nonce", other}});
    EXPECT_EQ(nothing->received().status, 404) << "there is no other route";
}

TEST_F(PeerScenes, followers_that_leave_leave_the_owner_and_one_that_stays_keeps_the_call) {
    config_.routes["/v1/chat/completions"].on_disconnect = config::OnDisconnect::cancel;
    const auto owner = ask(first());
    world_.run_for(100ms);
    const auto gone = ask(second());
    const auto stays = ask(second());
    world_.run_for(1s);
    owner->vanish_at = world_.now();
    gone->vanish_at = world_.now();
    ASSERT_TRUE(all_ended(3, 20s));
    EXPECT_EQ(stays->received().state, State::finished)
        << "somebody in another process still wanted the answer";
    completions_.headers.back().second = "two";
    const auto second_owner = ask(first());
    world_.run_for(100ms);
    const auto second_joiner = ask(second());
    world_.run_for(1s);
    ASSERT_EQ(metrics(first()).peer_connections.value(), 1);
    second_owner->vanish_at = second_joiner->vanish_at = world_.now();
    world_.run_for(5s);
    EXPECT_EQ(metrics(first()).peer_connections.value(), 0);
    EXPECT_EQ(metrics(first()).abandoned_calls.value(), 1u) << "nobody anywhere wanted it";
}

TEST_F(PeerScenes, a_draining_process_serves_those_who_follow_it_to_the_end) {
    const auto owner = ask(first());
    world_.run_for(100ms);
    const auto elsewhere = ask(second(), 3);
    world_.run_for(1s);
    app(first()).shared().drain();
    app(second()).shared().drain();
    const auto late = ask(second());
    ASSERT_TRUE(all_ended(5, 20s));
    for (const auto& joiner : elsewhere)
        EXPECT_EQ(joiner->received().body, owner->received().body);
    EXPECT_EQ(late->received().body, owner->received().body) << "it joins what runs";
    EXPECT_EQ(app(first()).shared().running(), 0u);
    EXPECT_EQ(app(second()).shared().running(), 0u) << "to follow is not to run a call";
}

TEST_F(PeerScenes, a_joiner_elsewhere_is_told_in_time_to_come_again) {
    config_.routes["/v1/chat/completions"].join_timeout = 3s;
    answer(200, R"({"choices":[{"message":{"content":"z"}}]})", 10s);
    completions_.body = R"({"model":"m"})";
    const auto owner = ask(first());
    world_.run_for(1s);
    const auto elsewhere = ask(second(), 2);
    ASSERT_TRUE(world_.run_until([&] { return ended_ == 2; }, world_.now() + 4s));
    for (const auto& joiner : elsewhere) EXPECT_EQ(joiner->received().status, 409);
    ASSERT_TRUE(all_ended(3, 20s));
    EXPECT_EQ(owner->received().status, 200);
}

}  // namespace
}  // namespace semel::sim
