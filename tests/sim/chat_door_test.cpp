// Turns of /api/chat asked over HTTP and from within the process: two gateway processes, one store,
// virtual time.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "consumer/strategies/ai.hpp"
#include "gateway/chat_api.hpp"
#include "gateway/chat_door.hpp"
#include "gateway/gateway.hpp"
#include "sim/fake_exchange.hpp"
#include "sim/fake_upstream.hpp"
#include "sim/world.hpp"

namespace semel::sim {
namespace {

using gateway::ChatDoor;
using gateway::InnerAnswer;
using gateway::InnerTurn;
using runtime::Task;
using namespace std::chrono_literals;

constexpr milliseconds answer_after = 2s;

class GatewayApp final : public App {
  public:
    GatewayApp(Process& process, FakeUpstream& upstream, const config::Config& config)
        : shared(config, "secret", *process.hot, metrics_, "/tmp"),
          client_(make_fake_client(*process.loop, upstream)),
          gateway(shared, *process.engine, *client_),
          door(shared, {{*process.engine, *client_}}) {}

  private:
    telemetry::Metrics metrics_;

  public:
    gateway::Process shared;

  private:
    std::unique_ptr<http::Client> client_;

  public:
    gateway::Gateway gateway;
    ChatDoor door;
};

class Door : public testing::Test {
  protected:
    explicit Door(config::RouteConfig route = {.on_running = config::OnRunning::accept})
        : route_(std::move(route)), world_(1, options()) {
        upstream_.plan = [](const FakeUpstream::Call& call) {
            return answered(
                200,
                R"({"model":"m-1","choices":[{"index":0,"message":{"role":"assistant","content":"reply )" +
                    std::to_string(call.number) +
                    R"("},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":3}})");
        };
        for (auto& process : world_.processes()) world_.start(*process);
    }

    static UpstreamPlan answered(int status, const std::string& body) {
        UpstreamPlan plan;
        plan.status = status;
        plan.head_after = answer_after;
        plan.body.push_back({0ms, body});
        return plan;
    }

    WorldOptions options() {
        config_.upstreams.push_back({.name = "sim",
                                     .base_url = "http://upstream.invalid",
                                     .api_key = "sk",
                                     .has_api_key = true,
                                     .models = {"m*"}});
        config_.clients.push_back({"shop", {"token-of-shop"}, true});
        config_.clients.push_back({"other", {"token-of-other"}, true});
        config_.routes["/v1/chat/completions"] = {};
        config_.routes["/api/chat"] = route_;
        WorldOptions world;
        world.processes = 2;
        world.make_app = [this](Process& process) {
            return std::make_unique<GatewayApp>(process, upstream_, config_);
        };
        return world;
    }

    Process& process(std::size_t n) { return *world_.processes()[n]; }
    GatewayApp& app(std::size_t n) { return static_cast<GatewayApp&>(*process(n).app); }

    static InnerTurn turn(std::string id, std::string prompt = "hello") {
        return {.tenant = "shop",
                .user = "ann",
                .session = "s1",
                .request_id = std::move(id),
                .prompt = std::move(prompt),
                .model = "m"};
    }
    using Answer = std::shared_ptr<std::optional<InnerAnswer>>;
    Answer inside(InnerTurn asked, std::size_t n = 0) {
        auto answer = std::make_shared<std::optional<InnerAnswer>>();
        app(n).door.ask(std::move(asked), [answer](InnerAnswer said) {
            EXPECT_FALSE(*answer) << "one answer";
            *answer = std::move(said);
        });
        return answer;
    }
    InnerAnswer ask(InnerTurn asked) {
        const Answer answer = inside(std::move(asked));
        EXPECT_TRUE(world_.run_until([&] { return answer->has_value(); }, world_.now() + 600s));
        return answer->value_or(InnerAnswer{});
    }

    std::shared_ptr<FakeExchange> over_http(FakeRequest request, std::size_t n = 0,
                                            const std::string& token = "token-of-shop") {
        request.headers.emplace_back("Host", "localhost");
        request.headers.emplace_back("Authorization", "Bearer " + token);
        request.headers.emplace_back("X-User-Id", "ann");
        auto exchange = std::make_shared<FakeExchange>(*process(n).loop, std::move(request));
        process(n).loop->spawn(serve(exchange, &app(n).gateway));
        return exchange;
    }
    static Task<> serve(std::shared_ptr<FakeExchange> exchange, gateway::Gateway* gateway) {
        co_await gateway->handle(*exchange);
    }
    static FakeRequest post(const std::string& id, const std::string& prompt = "hello") {
        return {.target = "/api/chat",
                .headers = {{"Content-Type", "application/json"}, {"Idempotency-Key", id}},
                .body = R"({"content":")" + prompt + R"(","sessionId":"s1","model":"m"})"};
    }
    Received until_answered(const std::shared_ptr<FakeExchange>& exchange) {
        EXPECT_TRUE(world_.run_until(
            [&] { return exchange->received().state == Received::State::finished; },
            world_.now() + 600s));
        return exchange->received();
    }
    Received http(FakeRequest request, const std::string& token = "token-of-shop") {
        return until_answered(over_http(std::move(request), 0, token));
    }
    /// What the session holds, as its messages over HTTP.
    std::string history() {
        return http({.method = "GET", .target = "/api/chat/sessions/s1/messages"}).body;
    }
    static std::size_t count(const std::string& text, const std::string& what) {
        std::size_t n = 0;
        for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
        return n;
    }
    static std::string cached(std::string body) {
        const auto at = body.find("\"fromCache\":false");
        EXPECT_NE(at, std::string::npos) << body;
        return at == std::string::npos ? body : body.replace(at, 17, "\"fromCache\":true");
    }

    config::RouteConfig route_;
    config::Config config_;
    FakeUpstream upstream_;
    World world_;
};

TEST_F(Door, a_turn_over_http_is_the_same_intent_inside) {
    const Received first = http(post("id-1"));
    ASSERT_EQ(first.status, 200);
    const InnerAnswer inner = ask(turn("id-1"));
    EXPECT_EQ(inner.status, 200);
    EXPECT_TRUE(inner.replayed);
    EXPECT_EQ(inner.body, first.body) << "as it is recorded, also where it is a replay";
    EXPECT_EQ(http(post("id-1")).body, cached(first.body));
    EXPECT_EQ(upstream_.paid_in_all(), 1u);
    EXPECT_EQ(count(history(), "\"requestId\":\"id-1\""), 2u)
        << "one turn: what was said, the answer";
}

TEST_F(Door, a_turn_inside_is_the_same_intent_over_http) {
    const InnerAnswer first = ask(turn("id-1"));
    ASSERT_EQ(first.status, 200);
    EXPECT_FALSE(first.replayed);
    EXPECT_NE(first.body.find(R"("content":"reply 1")"), std::string::npos);
    const Received again = http(post("id-1"));
    EXPECT_EQ(again.body, cached(first.body));
    EXPECT_EQ(again.header("X-Idempotent-Replayed"), "true");
    EXPECT_EQ(ask(turn("id-1")).body, first.body);
    EXPECT_EQ(upstream_.paid_in_all(), 1u);

    EXPECT_EQ(http(post("id-1"), "token-of-other").status, 200);
    EXPECT_EQ(upstream_.paid_in_all(), 2u) << "another client's id is another intent";
}

TEST_F(Door, asked_at_once_from_everywhere_it_is_paid_once_and_is_one_turn) {
    std::vector<Answer> inner;
    std::vector<std::shared_ptr<FakeExchange>> outer;
    for (int i = 0; i < 10; ++i) {
        for (const std::size_t n : {0u, 1u}) {
            inner.push_back(inside(turn("id-1"), n));
            outer.push_back(over_http(post("id-1"), n));
        }
    }
    ASSERT_TRUE(world_.run_until(
        [&] {
            return std::all_of(inner.begin(), inner.end(),
                               [](const Answer& a) { return a->has_value(); });
        },
        world_.now() + 60s));
    unsigned paid = 0;
    for (const Answer& answer : inner) {
        ASSERT_EQ((*answer)->status, 200) << (*answer)->problem;
        EXPECT_EQ((*answer)->body, (*inner.front())->body);
        paid += (*answer)->replayed ? 0 : 1;
    }
    EXPECT_LE(paid, 1u);
    EXPECT_EQ(upstream_.paid_in_all(), 1u);
    for (const auto& exchange : outer) {
        const Received got = until_answered(exchange);
        EXPECT_TRUE(got.status == 202 || got.status == 200) << "over HTTP the route's dials count";
    }
    EXPECT_EQ(count(history(), "\"requestId\":\"id-1\""), 2u);
}

TEST_F(Door, whoever_waits_too_long_is_told_to_come_again_and_the_call_goes_on) {
    upstream_.plan = [](const FakeUpstream::Call&) {
        auto plan = answered(200, R"({"model":"m","choices":[{"message":{"content":"late"}}]})");
        plan.head_after = 60s;
        return plan;
    };
    const Answer own = inside(turn("id-1"));
    world_.run_for(1s);
    const auto began = world_.now();
    const InnerAnswer joined = ask(turn("id-1"));
    EXPECT_EQ(joined.status, 409);
    EXPECT_EQ(joined.problem, "in-flight");
    EXPECT_GE(joined.retry_after, 1s);
    EXPECT_EQ(world_.now() - began, ChatDoor::patience_default);
    const InnerAnswer next = ask(turn("id-2", "another"));
    EXPECT_EQ(next.problem, "in-flight") << "one turn of a session at a time";
    ASSERT_TRUE(world_.run_until([&] { return own->has_value(); }, world_.now() + 120s));
    EXPECT_EQ((*own)->status, 200) << "its own call is waited for as long as it takes";
    EXPECT_EQ(ask(turn("id-1")).body, (*own)->body);
    EXPECT_EQ(upstream_.paid_in_all(), 1u);
}

TEST_F(Door, the_limits_of_the_route_hold_inside) {
    const auto refused = [&](InnerTurn asked, int status, const std::string& slug) {
        const InnerAnswer said = ask(std::move(asked));
        EXPECT_EQ(said.status, status);
        EXPECT_EQ(said.problem, slug);
        EXPECT_EQ(said.body, "");
    };
    refused(turn(""), 400, "key-malformed");
    refused(turn(std::string(256, 'x')), 400, "key-malformed");
    refused(turn("a b"), 400, "key-malformed");
    refused(turn("Zo\xc3\xab"), 400, "key-malformed");
    refused(turn("big", std::string(gateway::chat_body_max_bytes, 'x')), 413, "body-too-large");
    refused(turn("empty", ""), 400, "request-malformed");
    InnerTurn other = turn("long user");
    other.user = std::string(256, 'u');
    refused(other, 400, "request-malformed");
    other = turn("no-session");
    other.session.clear();
    refused(other, 400, "request-malformed");
    other = turn("no-model");
    other.model.clear();
    refused(other, 400, "request-malformed");
    other = turn("other-model");
    other.model = "x";
    refused(other, 404, "model-not-found");
    EXPECT_EQ(upstream_.paid_in_all(), 0u);

    ASSERT_EQ(ask(turn(R"(quo"te\,)")).status, 200);
    EXPECT_EQ(http(post(R"("quo\"te\\,")")).header("X-Idempotent-Replayed"), "true");
    const InnerAnswer reused = ask(turn(R"(quo"te\,)", "something else"));
    EXPECT_EQ(reused.status, 422);
    EXPECT_EQ(reused.problem, "key-reused");
    EXPECT_EQ(upstream_.paid_in_all(), 1u);
}

TEST_F(Door, a_failed_call_is_told_as_the_record_knows_it) {
    const auto after = [&](const std::string& id, UpstreamPlan plan) {
        upstream_.plan = [plan](const FakeUpstream::Call&) { return plan; };
        return ask(turn(id));
    };
    const InnerAnswer locked = after("a", answered(401, R"({"error":{"message":"no key"}})"));
    EXPECT_EQ(locked.status, 502);
    EXPECT_EQ(locked.problem, "upstream-failed");
    EXPECT_EQ(locked.upstream_status, 401);
    EXPECT_FALSE(locked.final);
    auto limited = answered(429, "{}");
    limited.headers.emplace_back("Retry-After", "17");
    const InnerAnswer later = after("b", limited);
    EXPECT_EQ(later.status, 429);
    EXPECT_EQ(later.upstream_status, 429);
    EXPECT_EQ(later.retry_after, 17s);
    EXPECT_EQ(after("c", answered(422, "{}")).upstream_status, 422);
    EXPECT_EQ(after("d", {.start = UpstreamPlan::Start::refused}).problem, "upstream-unreachable");
    const InnerAnswer broken = after("e", {.start = UpstreamPlan::Start::reset});
    EXPECT_EQ(broken.problem, "upstream-failed");
    EXPECT_EQ(broken.upstream_status, 0) << "nobody knows";
    EXPECT_EQ(after("e", answered(200, R"({"model":"m","choices":[{"message":{"content":"ok"}}]})"))
                  .status,
              200)
        << "failed turns are asked again under their id";
}

TEST_F(Door, a_turn_that_is_to_be_held_is_held_for_everybody) {
    upstream_.plan = [](const FakeUpstream::Call&) {
        return UpstreamPlan{.start = UpstreamPlan::Start::reset};
    };
    InnerTurn held = turn("id-1");
    held.hold_unknown = true;
    EXPECT_EQ(ask(held).problem, "outcome-unknown");
    EXPECT_EQ(ask(held).problem, "outcome-unknown");
    EXPECT_EQ(upstream_.paid_in_all(), 1u);
    const Received status = http({.method = "GET", .target = "/api/chat/status/id-1?sessionId=s1"});
    EXPECT_NE(status.body.find(R"("status":"UNKNOWN")"), std::string::npos) << status.body;
}

TEST_F(Door, a_door_that_is_closed_asks_nothing_and_a_draining_process_begins_nothing) {
    app(0).shared.drain();
    EXPECT_EQ(ask(turn("id-1")).problem, "draining");
    app(1).door.close();
    const Answer answer = inside(turn("id-1"), 1);
    ASSERT_TRUE(answer->has_value()) << "at once";
    EXPECT_EQ((*answer)->status, 0);
    EXPECT_EQ(upstream_.paid_in_all(), 0u);
}

/// Refusals are recorded for good.
class ReplayingDoor : public Door {
  protected:
    ReplayingDoor() : Door({.on_failed = config::OnFailed::replay}) {}
};

TEST_F(ReplayingDoor, a_recorded_refusal_says_that_it_is_final) {
    upstream_.plan = [](const FakeUpstream::Call&) { return answered(404, "{}"); };
    for (int i = 0; i < 2; ++i) {
        const InnerAnswer said = ask(turn("id-1"));
        EXPECT_EQ(said.status, 502);
        EXPECT_EQ(said.problem, "upstream-failed");
        EXPECT_EQ(said.upstream_status, 404);
        EXPECT_TRUE(said.final);
    }
    EXPECT_EQ(upstream_.calls(R"({"model":"m","messages":[{"role":"user","content":"hello"}]})"),
              1u);
}

/// Messages through the strategy and the door, as `semel serve` wires them.
class AiMessages : public Door {
  protected:
    AiMessages() { restart(); }

    void restart() {
        strategy_.reset();
        records_ = consumer::records_on_store(*process(1).loop, world_.truth(), secret_, "truth");
        results_.emplace(
            *process(1).loop, consumer::ResultsOptions{.owner = {"a", {}}}, records_.get(),
            counters_, [this](std::string id, const consumer::HandlerAnswerPtr& answer, auto done) {
                published_.emplace_back(std::move(id), answer->body);
                done({});
            });
        consumer::AiOptions options;
        options.config.tenant = "shop";
        options.config.user = config::ValueSpec{config::ValueFrom::json, "/userId"};
        options.config.session = config::ValueSpec{config::ValueFrom::json, "/sessionId"};
        options.config.prompt = {config::ValueFrom::json, "/prompt"};
        options.config.model = "m";
        strategy_ = consumer::make_ai(
            *process(1).loop, options,
            [this](consumer::ChatTurn asked, std::function<void(consumer::ChatAnswer)> done) {
                app(1).door.ask({.tenant = asked.tenant,
                                 .user = asked.user,
                                 .session = asked.session,
                                 .request_id = asked.request_id,
                                 .prompt = asked.prompt,
                                 .model = asked.model,
                                 .hold_unknown = asked.hold_unknown},
                                [done](InnerAnswer said) {
                                    done({.status = said.status,
                                          .body = std::move(said.body),
                                          .problem = std::move(said.problem),
                                          .retry_after = said.retry_after,
                                          .replayed = said.replayed,
                                          .upstream_status = said.upstream_status,
                                          .final = said.final});
                                });
            },
            &*results_, counters_);
    }
    /// Delivers the message and waits for its verdict.
    std::string deliver(const std::string& id) {
        consumer::Message message;
        message.id = id;
        message.key = base::sha256(id);
        message.delivery = brokers::make_delivery(
            {std::make_shared<brokers::Assignment>(brokers::Partition{"tasks", 0}, 1), 0, 0},
            std::nullopt, R"({"userId":"ann","sessionId":"s1","prompt":"hello"})", {});
        std::optional<consumer::Verdict> verdict;
        strategy_->run({&message}, false, [&](consumer::Message&, consumer::Verdict said) {
            verdict = std::move(said);
        });
        EXPECT_TRUE(world_.run_until([&] { return verdict.has_value(); }, world_.now() + 60s));
        if (!verdict) return "none";
        return std::holds_alternative<consumer::Applied>(*verdict)     ? "applied"
               : std::holds_alternative<consumer::Duplicate>(*verdict) ? "duplicate"
                                                                       : "other";
    }

    consumer::ConsumerCounters counters_;
    std::vector<std::pair<std::string, std::string>> published_;
    base::Hmac secret_{"secret"};
    std::unique_ptr<consumer::Records> records_;
    std::optional<consumer::Results> results_;
    std::unique_ptr<consumer::Strategy> strategy_;
};

TEST_F(AiMessages, an_intent_over_http_and_by_message_is_paid_once_and_published_as_recorded) {
    const Received first = http(post("id-1"));
    EXPECT_EQ(deliver("id-1"), "duplicate");
    ASSERT_EQ(published_.size(), 1u);
    EXPECT_EQ(published_[0], std::pair(std::string("id-1"), first.body));
    EXPECT_EQ(deliver("id-1"), "duplicate");
    EXPECT_EQ(published_.size(), 1u);
    restart();
    EXPECT_EQ(deliver("id-1"), "duplicate");
    EXPECT_EQ(published_.size(), 1u) << "that it is published outlives the process";

    EXPECT_EQ(deliver("id-2"), "applied");
    EXPECT_EQ(http(post("id-2")).body, cached(published_.back().second));
    EXPECT_EQ(upstream_.paid_in_all(), 2u);
    const std::string all = history();
    EXPECT_EQ(count(all, "\"requestId\":\"id-1\""), 2u);
    EXPECT_EQ(count(all, "\"requestId\":\"id-2\""), 2u);
}

TEST_F(AiMessages, a_message_beside_its_own_request_joins_it) {
    const auto request = over_http(post("id-1"));
    EXPECT_EQ(deliver("id-1"), "duplicate");
    EXPECT_EQ(published_.back().second, until_answered(request).body);
    EXPECT_EQ(upstream_.paid_in_all(), 1u);
    EXPECT_EQ(count(history(), "\"requestId\":\"id-1\""), 2u);
}

}  // namespace
}  // namespace semel::sim
