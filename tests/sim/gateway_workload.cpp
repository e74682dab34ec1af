#include "sim/gateway_workload.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "base/json_scan.hpp"
#include "gateway/gateway.hpp"
#include "gateway/identity.hpp"
#include "gateway/peer_server.hpp"
#include "sim/fake_exchange.hpp"
#include "sim/fake_upstream.hpp"
#include "sim/peer_net.hpp"

namespace semel::sim {
namespace {

using core::RecordPtr;
using core::Status;
using runtime::Task;
using support::Fate;
using namespace std::chrono_literals;

constexpr milliseconds lease = 6s;
constexpr milliseconds client_limit =
    45s;  ///< Then a client gives up the connection and asks again.
constexpr milliseconds heal_limit =
    900s;  ///< From the end of the faults to the last client's answer.
constexpr std::string_view secret = "simulated secret";
constexpr std::string_view peer_secret = "simulated peer secret";
constexpr std::string_view credential = "simulated credential";

enum class Kind { plain, stream, chat, chat_stream };

struct Intent {
    int number = 0;
    Kind kind = Kind::plain;
    std::string id;
    std::string text;     ///< Unique; its upstream calls are known by it.
    std::string session;  ///< Of the chat kinds.
    core::StoredKey key;
    bool hold = false;
    // What the checks know.
    unsigned paid = 0;
    unsigned grants = 0;
    unsigned decisions_to_rerun = 0;
    bool deciding = false;
    bool disturbed = false;  ///< Something happened that excuses a second payment.
    bool answered = false;
    bool imposter_answered = false;
    std::set<std::string> finals;  ///< Distinct whole answers that clients took as final.
    RecordPtr completed;
};

[[nodiscard]] bool is_chat(const Intent& intent) {
    return intent.kind == Kind::chat || intent.kind == Kind::chat_stream;
}
[[nodiscard]] bool is_stream(const Intent& intent) {
    return intent.kind == Kind::stream || intent.kind == Kind::chat_stream;
}

struct Client {
    Intent* intent = nullptr;
    bool imposter = false;  ///< Asks something else under the intent's id.
    int asking = 0;
    int requests = 0;
    bool done = false;
};

config::Config config_of(bool hold) {
    config::Config config;
    config::UpstreamConfig upstream{.name = "sim",
                                    .base_url = "http://upstream.invalid",
                                    .models = {"*"},
                                    .stream_usage = config::StreamUsage::inject};
    upstream.first_byte_timeout = 30s;
    upstream.idle_timeout = 5s;
    config.upstreams.push_back(upstream);
    config::RouteConfig route;
    route.on_unknown = hold ? config::OnUnknown::hold : config::OnUnknown::rerun;
    route.join_timeout = 20s;
    config.routes["/v1/chat/completions"] = route;
    route.model = "m";
    route.on_running = config::OnRunning::join;
    config.routes["/api/chat"] = route;
    config.engine.lease = lease;
    return config;
}

class GatewayApp final : public App {
  public:
    GatewayApp(Process& process, FakeUpstream& upstream, PeerNet& net, bool hold)
        : config_(config_of(hold)),
          shared_(config_, std::string(secret), *process.hot, metrics_, "/tmp",
                  std::string(peer_secret)),
          client_(net.client(process, make_fake_client(*process.loop, upstream))),
          gateway_(shared_, *process.engine, *client_),
          peers_(shared_, *process.loop, lease) {
        net.serve(process, peers_);
    }
    gateway::Gateway& gateway() { return gateway_; }
    telemetry::Metrics& metrics() { return metrics_; }

  private:
    config::Config config_;
    telemetry::Metrics metrics_;
    gateway::Process shared_;
    std::unique_ptr<http::Client> client_;
    gateway::Gateway gateway_;
    gateway::PeerServer peers_;
};

class Workload {
  public:
    explicit Workload(const GatewayRunOptions& options)
        : options_(options),
          hmac_(secret),
          hold_(Rng(options.seed ^ 0x5eed).percent(35)),
          world_(options.seed, world_options(options)) {
        world_.tracing = options.trace;
    }

    GatewayRunReport run();

  private:
    WorldOptions world_options(const GatewayRunOptions& options) {
        WorldOptions world;
        world.processes = 1 + static_cast<int>(Rng(options.seed ^ 0xabcd).below(3));
        world.engine.lease = lease;
        world.wrap_store = options.wrap_store;
        world.make_app = [this](Process& process) {
            return std::make_unique<GatewayApp>(process, upstream_, net_, hold_);
        };
        return world;
    }

    void make_intents();
    void script_upstream();
    void watch_store(Process& process);
    void plan_faults();
    void ask(Client& client);
    Task<> serve(std::shared_ptr<FakeExchange> exchange, GatewayApp* app, Client* client,
                 int request);
    void received(Client& client, int request, const FakeExchange& exchange, bool process_died,
                  std::uint64_t pending_answers);
    void check_bytes(const Intent& intent, const Received& got);
    void check_final(Intent& intent, const Received& got, bool pending);
    void decide(Intent& intent);
    void heal();
    void check_end();
    [[nodiscard]] Intent* by_text(const std::string& body);
    [[nodiscard]] FakeRequest request_of(const Client& client) const;
    void disturb_all() {
        for (auto& intent : intents_) intent->disturbed = true;
    }
    void violate(const Intent& intent, const std::string& what) {
        world_.violate("intent " + std::to_string(intent.number) + ": " + what);
    }

    GatewayRunOptions options_;
    base::Hmac hmac_;
    FakeUpstream upstream_;
    bool hold_;
    PeerNet net_{world_};
    World world_;
    bool healed_ = false;
    std::vector<std::unique_ptr<Intent>> intents_;
    std::vector<std::unique_ptr<Client>> clients_;
    std::map<core::StoredKey, Intent*> by_key_;
    GatewayRunReport report_;
};

// ---------------------------------------------------------------- intents and clients

void Workload::make_intents() {
    Rng& rng = world_.rng;
    const std::string tenant = gateway::tenant_of_credential(hmac_, credential);
    const int count = 2 + static_cast<int>(rng.below(4));
    for (int i = 0; i < count; ++i) {
        auto intent = std::make_unique<Intent>();
        intent->number = i;
        intent->kind = static_cast<Kind>(rng.below(4));
        intent->id = "id-" + std::to_string(i);
        intent->text = "<intent " + std::to_string(i) + ">";
        intent->hold = hold_;
        if (is_chat(*intent)) {
            intent->session = "s" + std::to_string(rng.below(2));
            intent->key = gateway::stored_key(hmac_, {.tenant = tenant,
                                                      .operation = "chat",
                                                      .user = "u",
                                                      .session = intent->session,
                                                      .id = intent->id});
        } else {
            intent->key = gateway::stored_key(hmac_, {.tenant = tenant,
                                                      .operation = "/v1/chat/completions",
                                                      .user = {},
                                                      .session = {},
                                                      .id = intent->id});
        }
        by_key_[intent->key] = intent.get();
        const int askers = 1 + static_cast<int>(rng.below(4));
        for (int c = 0; c < askers; ++c) {
            auto client = std::make_unique<Client>();
            client->intent = intent.get();
            client->imposter = c == 3;
            Client* raw = client.get();
            // Half of them at once, as double clicks are; the rest whenever.
            world_.after(rng.one_in(2) ? microseconds(i * 1000) : rng.between(0s, 40s),
                         [this, raw] { ask(*raw); });
            clients_.push_back(std::move(client));
        }
        intents_.push_back(std::move(intent));
    }
}

FakeRequest Workload::request_of(const Client& client) const {
    const Intent& intent = *client.intent;
    const std::string text = intent.text + (client.imposter ? " but other" : "");
    FakeRequest request;
    request.headers = {{"Host", "localhost"},
                       {"Content-Type", "application/json"},
                       {"Authorization", "Bearer " + std::string(credential)},
                       {"Idempotency-Key", intent.id}};
    if (is_chat(intent)) {
        request.target = "/api/chat";
        request.headers.emplace_back("X-User-Id", "u");
        request.body = R"({"content":")" + text + R"(","sessionId":")" + intent.session +
                       R"(","stream":)" + (is_stream(intent) ? "true" : "false") + "}";
    } else {
        request.body = R"({"model":"m","messages":[{"role":"user","content":")" + text +
                       R"("}],"stream":)" + (is_stream(intent) ? "true" : "false") + "}";
    }
    return request;
}

void Workload::ask(Client& client) {
    if (client.done) return;
    Process* process = world_.any_alive();
    if (process == nullptr) {
        world_.after(500ms, [this, &client] { ask(client); });
        return;
    }
    Rng& rng = world_.rng;
    const int request = client.asking = ++client.requests;
    auto exchange = std::make_shared<FakeExchange>(*process->loop, request_of(client));
    if (!healed_ && rng.percent(20)) {
        exchange->vanish_at = world_.now() + rng.between(1ms, 15s);
        ++report_.vanished;
    }
    if (rng.percent(15)) exchange->write_takes = rng.between(1ms, 800ms);
    const int incarnation = process->incarnation;
    // What a client sees when its gateway dies, or when it has waited long enough: what came until
    // then.
    const auto give_up = [this, &client, request, exchange, process, incarnation](bool died) {
        if (died && process->alive && process->incarnation == incarnation) return;
        if (client.asking != request) return;
        exchange->vanish_at = std::min(exchange->vanish_at, world_.now());
        received(client, request, *exchange, died, 0);
    };
    world_.after(client_limit, [give_up] { give_up(false); });
    for (auto at = 500ms; at < client_limit; at += 500ms)
        world_.after(at, [give_up] { give_up(true); });
    auto& app = static_cast<GatewayApp&>(*process->app);
    process->loop->spawn(serve(exchange, &app, &client, request));
}

Task<> Workload::serve(std::shared_ptr<FakeExchange> exchange, GatewayApp* app, Client* client,
                       int request) {
    co_await app->gateway().handle(*exchange);
    const bool gone = exchange->vanish_at <= world_.now();
    if (!exchange->answered() && !gone)
        violate(*client->intent, "a request was left without an answer");
    received(*client, request, *exchange, false, app->metrics().record_pending.value());
}

// ---------------------------------------------------------------- what clients see

/// In any answer, whole or not: bytes of one attempt only.
void Workload::check_bytes(const Intent& intent, const Received& got) {
    std::set<std::string> calls;
    for (std::size_t at = got.body.find("[call "); at != std::string::npos;
         at = got.body.find("[call ", at + 1)) {
        calls.insert(got.body.substr(at, got.body.find(']', at) - at));
    }
    if (calls.size() > 1) violate(intent, "an answer carries bytes of two attempts: " + got.body);
}

void Workload::check_final(Intent& intent, const Received& got, bool pending) {
    std::string body = got.body;
    constexpr std::string_view heartbeat = ": semel\n";  // given to clients, never recorded
    for (auto at = body.find(heartbeat); at != std::string::npos; at = body.find(heartbeat, at))
        body.erase(at, heartbeat.size());
    constexpr std::string_view cached = "\"fromCache\":true";
    if (const auto at = body.rfind(cached); is_chat(intent) && at != std::string::npos)
        body.replace(at, cached.size(), "\"fromCache\":false");
    if (!pending) {
        // Last bytes after the record: by now the truth must hold exactly these bytes.
        const RecordPtr record = world_.record_opened(intent.key);
        const bool recorded = record && record->status == Status::completed && record->answer &&
                              record->answer->body && *record->answer->body == body;
        if (!recorded)
            violate(intent, "a whole answer left before (or without) its record: " + body);
    }
    if (pending) return;
    intent.finals.insert(body);
    if (intent.finals.size() > 1) violate(intent, "two different final answers");
}

void Workload::received(Client& client, int request, const FakeExchange& exchange,
                        bool process_died, std::uint64_t pending_answers) {
    const Received& got = exchange.received();
    Intent& intent = *client.intent;
    check_bytes(intent, got);
    if (client.asking != request) return;
    client.asking = 0;
    const bool whole = got.state == Received::State::finished && !process_died;
    world_.trace("client of intent " + std::to_string(intent.number) + " got " +
                 std::to_string(got.status) + (whole ? " whole" : " broken") + " " +
                 got.header("Semel-Outcome") + " " + got.body.substr(0, 120));
    const auto again = [&](microseconds after) {
        world_.after(after, [this, &client] { ask(client); });
    };
    const auto soon = world_.rng.between(100ms, 8s);
    if (got.state == Received::State::cut) ++report_.cut;
    if (!whole) return again(soon);
    // A success status with an error or half an object in it passes as it came, and is no answer.
    const bool nonsense =
        got.status == 200 && !is_stream(intent) && got.body.find("[call ") == std::string::npos;
    if (nonsense) return again(soon);
    if (got.status == 200) {
        const bool ends =
            !is_stream(intent) ||
            got.body.find(intent.kind == Kind::stream ? "data: [DONE]" : "event: done\n") !=
                std::string::npos;
        if (!ends) {
            const bool told = got.body.find("event: error\n") != std::string::npos;
            if (!told)
                violate(intent, "a stream without its end was presented as whole: " + got.body);
            return again(soon);
        }
        if (got.header("Semel-Record") == "pending") ++report_.pending;
        // A stream cannot say that its record is still to come: whoever had such an answer is
        // believed less.
        const bool pending = pending_answers > 0;
        check_final(intent, got, pending);
        // Whoever of the two kinds of askers has an answer, the other must never get one.
        (client.imposter ? intent.imposter_answered : intent.answered) = true;
        if (intent.imposter_answered && intent.answered)
            violate(intent, "two different requests under one id both got an answer");
        ++report_.answers;
        const std::string outcome = got.header("Semel-Outcome");
        if (outcome == "joined") ++report_.joined;
        if (outcome == "replayed") ++report_.replayed;
        if (outcome == "taken-over") ++report_.taken_over;
        const bool marked = got.header("X-Idempotent-Replayed") == "true";
        if (marked != (outcome == "joined" || outcome == "replayed"))
            violate(intent, "the replay mark does not say what happened");
        client.done = true;
        return;
    }
    if (got.status == 409 && got.body.find("outcome") != std::string::npos &&
        got.body.find("unknown") != std::string::npos) {
        if (!intent.hold) violate(intent, "held although the policy is rerun");
        ++report_.held;
        if (!intent.deciding) {
            intent.deciding = true;
            world_.after(world_.rng.between(1s, 20s), [this, &intent] { decide(intent); });
        }
        return again(soon);
    }
    if (got.status == 422) {
        const bool other = std::any_of(clients_.begin(), clients_.end(), [&](const auto& c) {
            return c->imposter != client.imposter && c->intent == &intent;
        });
        if (!other) violate(intent, "422 although nobody asked anything else");
        ++report_.mismatches;
        client.done = true;
        return;
    }
    const bool expected = got.status == 409 || got.status == 429 || got.status == 500 ||
                          got.status == 502 || got.status == 503 || got.status == 504;
    if (!expected)
        violate(intent, "unexpected status " + std::to_string(got.status) + ": " + got.body);
    again(soon);
}

void Workload::decide(Intent& intent) {
    intent.deciding = false;
    const RecordPtr record = world_.record(intent.key);
    if (!record || record->status != Status::unknown) return;
    core::Resolve resolve{.token_seen = record->token,
                          .decision = core::Resolve::Decision::rerun,
                          .reason = "the operator decided"};
    ++intent.decisions_to_rerun;
    ++report_.decisions;
    world_.truth().submit({core::Item{intent.key, resolve}}, [](core::BatchResults) {});
}

// ---------------------------------------------------------------- the upstream

Intent* Workload::by_text(const std::string& body) {
    Intent* found = nullptr;
    std::size_t last = 0;
    for (auto& intent : intents_) {
        const auto at =
            body.rfind(intent->text);  // the newest message: earlier turns stand before it
        if (at != std::string::npos && (found == nullptr || at > last)) {
            found = intent.get();
            last = at;
        }
    }
    return found;
}

void Workload::script_upstream() {
    upstream_.plan = [this](const FakeUpstream::Call& call) {
        Rng& rng = world_.rng;
        Intent* intent = by_text(call.body);
        UpstreamPlan plan;
        plan.head_after = std::chrono::duration_cast<milliseconds>(
            rng.one_in(4) ? rng.between(5s, 20s) : rng.between(1ms, 3s));
        const std::string mark = "[call " + std::to_string(report_.paid + 1) + "]";
        const unsigned trouble = healed_ ? 100 : static_cast<unsigned>(rng.below(12));
        const bool stream = call.body.find("\"stream\":true") != std::string::npos;
        if (stream) {
            plan.headers = {{"Content-Type", "text/event-stream"}};
            plan.with_length = false;
            const int events = 1 + static_cast<int>(rng.below(6));
            const auto piece = [&](std::string bytes) {
                const auto gap = std::chrono::duration_cast<milliseconds>(
                    rng.one_in(8) ? rng.between(1s, 4s) : rng.between(0ms, 200ms));
                // Cut anywhere, also inside an event.
                const std::size_t middle = rng.below(bytes.size());
                plan.body.push_back({gap, bytes.substr(0, middle)});
                plan.body.push_back({0ms, bytes.substr(middle)});
            };
            for (int i = 0; i < events; ++i)
                piece("data: {\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"" +
                      mark + std::to_string(i) + "\"}}]}\n\n");
            if (trouble == 0) piece("data: {\"error\":{\"message\":\"overloaded\"}}\n\n");
            if (trouble > 1) {
                piece(
                    "data: "
                    "{\"model\":\"m\",\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_"
                    "tokens\":" +
                    std::to_string(events) + "}}\n\n");
                piece("data: [DONE]\n\n");
            }
            std::erase_if(plan.body, [](const UpstreamPlan::Piece& p) { return p.bytes.empty(); });
        } else {
            plan.body.push_back(
                {1ms,
                 "{\"model\":\"m\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\","
                 "\"content\":\"" +
                     mark + "\"}}],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":1}}"});
            if (trouble == 0) plan.body.back().bytes = "{\"choices\":[";
            if (trouble == 1) plan.body.back().bytes = R"({"error":{"message":"no"}})";
        }
        switch (trouble) {
            case 2:
                plan.start = UpstreamPlan::Start::refused;
                break;
            case 3:
                plan.start = UpstreamPlan::Start::reset;
                break;
            case 4:
                plan.start = UpstreamPlan::Start::silent;
                break;
            case 5:
                plan.end = UpstreamPlan::End::cut;
                break;
            case 6:
                plan.status = rng.one_in(2) ? 429 : 500;
                plan.headers = {{"Content-Type", "application/json"}, {"Retry-After", "1"}};
                plan.paid = plan.status == 500;
                plan.with_length = true;
                plan.body = {{1ms, R"({"error":{"message":"refused"}})"}};
                break;
            default:
                break;
        }
        // A stream's cut after its terminal event harms nobody; everything else does.
        if (intent != nullptr && (trouble <= 6)) intent->disturbed = true;
        return plan;
    };
    upstream_.on_paid = [this](const FakeUpstream::Call& call) {
        ++report_.paid;
        Intent* intent = by_text(call.body);
        if (intent == nullptr) {
            world_.violate("a call that no intent asked for: " + call.body);
            return;
        }
        ++intent->paid;
        world_.trace("paid call " + std::to_string(report_.paid) + " for intent " +
                     std::to_string(intent->number));
        if (intent->paid > intent->grants) violate(*intent, "more paid calls than grants");
        if (intent->hold && intent->paid > 1 + intent->decisions_to_rerun)
            violate(*intent, "held, and paid again without a decision");
    };
}

// ---------------------------------------------------------------- store and faults

void Workload::watch_store(Process& process) {
    FaultyStore& store = *process.store;
    Rng& rng = world_.rng;
    if (rng.percent(60)) {
        store.faults.refuse = static_cast<unsigned>(rng.below(150));
        store.faults.drop = static_cast<unsigned>(rng.below(150));
        store.faults.lose_reply = static_cast<unsigned>(rng.below(150));
        store.faults.execute_late = static_cast<unsigned>(rng.below(100));
        store.faults.delay_reply = static_cast<unsigned>(rng.below(100));
        store.faults.repeat = static_cast<unsigned>(rng.below(200));
    }
    store.on_submit = [this](const std::vector<core::Item>& items, Fate fate) {
        if (fate == Fate::serve || fate == Fate::repeat) return;
        for (const core::Item& item : items) {
            const auto found = by_key_.find(item.key);
            if (found == by_key_.end()) continue;
            Intent& intent = *found->second;
            if (!std::holds_alternative<core::Acquire>(item.operation) &&
                !std::holds_alternative<core::Get>(item.operation))
                intent.disturbed = true;
        }
    };
    store.on_applied = [this](const core::Item& item, const base::Result<core::Decided>& result,
                              Fate) {
        const auto found = by_key_.find(item.key);
        if (found == by_key_.end() || !result) return;
        Intent& intent = *found->second;
        if (const auto* granted = std::get_if<core::Granted>(&result->outcome);
            granted && granted->kind != core::Granted::Kind::repeated)
            ++intent.grants;
        const RecordPtr record = world_.record(item.key);
        if (intent.completed) {
            const bool same = record && record->status == Status::completed &&
                              *record->answer->body == *intent.completed->answer->body;
            if (!same) violate(intent, "a completed record changed");
        } else if (record && record->status == Status::completed) {
            intent.completed = record;
        }
    };
}

void Workload::plan_faults() {
    Rng& rng = world_.rng;
    constexpr milliseconds faults_for = 60s;
    const unsigned crashes = static_cast<unsigned>(rng.below(4));
    const unsigned pauses = static_cast<unsigned>(rng.below(3));
    const unsigned outages = static_cast<unsigned>(rng.below(2));
    const auto some = [&] {
        return world_.processes()[rng.below(world_.processes().size())].get();
    };
    for (unsigned i = 0; i < crashes; ++i) {
        Process* p = some();
        const microseconds down = rng.between(10ms, 12s);
        world_.after(rng.between(10ms, faults_for), [this, p, down] {
            if (!p->alive || healed_) return;
            disturb_all();
            ++report_.crashes;
            world_.crash(*p);
            world_.after(down, [this, p] {
                if (!p->alive) world_.start(*p);
            });
        });
    }
    for (unsigned i = 0; i < pauses; ++i) {
        Process* p = some();
        const auto d = std::chrono::duration_cast<milliseconds>(rng.between(100ms, 25s));
        world_.after(rng.between(10ms, faults_for), [this, p, d] {
            if (!p->alive || world_.paused(*p) || healed_) return;
            disturb_all();
            ++report_.pauses;
            world_.pause(*p, d);
        });
    }
    for (unsigned i = 0; i < outages; ++i) {
        const microseconds d = rng.between(100ms, 20s);
        world_.after(rng.between(10ms, faults_for), [this, d] {
            if (healed_) return;
            disturb_all();
            for (auto& process : world_.processes()) process->store->down = true;
            world_.after(d, [this] {
                for (auto& process : world_.processes()) process->store->down = false;
            });
        });
    }
    // Peers that cannot reach each other, or lose each other, cost no call: nobody is excused by it.
    const unsigned disconnections = static_cast<unsigned>(rng.below(6));
    for (unsigned i = 0; i < disconnections; ++i) {
        const auto reach = static_cast<PeerNet::Reach>(rng.below(3));
        world_.after(rng.between(10ms, faults_for), [this, reach] {
            net_.reach = healed_ ? PeerNet::Reach::yes : reach;
            net_.break_all();
        });
    }
    world_.after(faults_for, [this] { heal(); });
}

void Workload::heal() {
    healed_ = true;
    net_.reach = PeerNet::Reach::yes;
    world_.heal();
}

// ---------------------------------------------------------------- the end

void Workload::check_end() {
    std::map<std::string, std::vector<std::string>> turns;  // by session: request ids in order
    const std::string tenant = gateway::tenant_of_credential(hmac_, credential);
    const auto data_key = world_.data_key_of(gateway::tenant_tag(hmac_, tenant));
    for (const char* session : {"s0", "s1"}) {
        const core::StoredKey talk = gateway::conversation_key(hmac_, tenant, "u", session);
        world_.truth().submit(
            {core::Item{talk, core::GetTurns{.limit = 1000}}}, [&](core::BatchResults results) {
                if (auto* found = std::get_if<core::TurnsFound>(&results.front()->outcome)) {
                    for (core::Turn& turn : found->turns) {
                        engine::open_turn(talk, turn, data_key.get());
                        turns[session].push_back(turn.request_id);
                    }
                }
            });
    }
    for (auto& intent : intents_) {
        if (!intent->disturbed && intent->paid > 1)
            violate(*intent,
                    "paid " + std::to_string(intent->paid) + " times although nothing went wrong");
        if (!is_chat(*intent)) continue;
        const auto& ids = turns[intent->session];
        const auto times = std::count(ids.begin(), ids.end(), intent->id);
        report_.turns += static_cast<unsigned>(times);
        if (times > 1) violate(*intent, "its turn is in the conversation twice");
        if (intent->completed && times != 1)
            violate(*intent, "completed, and its turn is not in the conversation");
        if (!intent->completed && times != 0)
            violate(*intent, "not completed, and its turn is in the conversation");
    }
}

GatewayRunReport Workload::run() {
    make_intents();
    script_upstream();
    for (auto& process : world_.processes()) {
        watch_store(*process);
        world_.start(*process);
    }
    plan_faults();
    const auto all_done = [this] {
        return healed_ &&
               std::all_of(clients_.begin(), clients_.end(), [](const auto& c) { return c->done; });
    };
    const bool done = world_.run_until(all_done, world_.now() + 60s + heal_limit);
    if (done) {
        world_.run_for(3 * lease);  // what is spooled is delivered, what is dead is settled
        check_end();
    } else if (world_.violation.empty()) {
        for (auto& client : clients_) {
            if (!client->done)
                violate(*client->intent, "a client never got its answer after everything healed");
        }
    }
    report_.peer_connections = net_.connections;
    report_.violation = world_.violation;
    return report_;
}

}  // namespace

GatewayRunReport run_gateway_workload(const GatewayRunOptions& options) {
    Workload workload(options);
    return workload.run();
}

}  // namespace semel::sim
