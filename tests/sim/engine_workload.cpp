#include "sim/engine_workload.hpp"

#include <algorithm>
#include <utility>

namespace semel::sim {
namespace {

using base::Result;
using core::Certainty;
using core::RecordPtr;
using core::Status;
using engine::Completion;
using engine::Engine;
using runtime::Task;
using support::Fate;
using namespace std::chrono_literals;

constexpr milliseconds lease = 6s;
constexpr milliseconds patience = 2s;
constexpr milliseconds join_limit = 15s;
constexpr milliseconds client_limit = 40s;  ///< Then a client asks again.
/// A ghost's lease must be gone by then: past its not_after and a few tries, but before it runs out
/// by itself.
constexpr milliseconds settle_limit = patience + 1500ms;
constexpr milliseconds heal_limit =
    300s;  ///< From the end of the faults to the last client's answer.

struct Intent {
    int number = 0;
    std::string body;
    core::StoredKey key;
    core::Fingerprint fingerprint;
    bool hold = false;
    // What the checks know about it.
    bool disturbed = false;  ///< Something happened that excuses a second payment.
    unsigned grants = 0;
    unsigned decisions_to_rerun = 0;
    bool deciding = false;
    std::uint64_t last_token = 0;
    core::FencingToken current_token;  ///< After the last step.
    std::uint32_t last_attempt = 0;
    std::set<std::uint64_t> tokens_held;           ///< Tokens that an owner was given.
    std::vector<std::string> final_answers;        ///< Distinct ones that clients took as final.
    std::map<std::uint64_t, std::string> pending;  ///< Token -> answer given before its record.
    RecordPtr completed;                           ///< As it was when it was first seen completed.
};

enum class Reply { final_answer, final_failure, pending_answer, held, retry };

struct Client {
    int number = 0;
    Intent* intent = nullptr;
    int asking = 0;  ///< Number of the request that is under way; 0: none.
    int requests = 0;
    bool done = false;
};

class Workload;

/// What a process does with a client's request: as a gateway does, without HTTP.
class Owner final : public App {
  public:
    Owner(Workload& workload, Process& process);
    void submit(Client& client, int request);

  private:
    Task<> serve(Client* client, int request);
    Task<bool> own(std::unique_ptr<engine::LeaseGuard> grant, Client* client, int request);
    Task<> run_call(engine::LeaseGuard& grant, Intent& intent, std::string& answer,
                    std::optional<core::Fail>& failure);

    Workload& workload_;
    Process& process_;
    std::unique_ptr<http::Client> client_;
};

class Workload {
  public:
    explicit Workload(const RunOptions& options)
        : options_(options), world_(options.seed, world_options(options)) {
        world_.tracing = options.trace;
        scenario_ = Scenario::draw(world_.rng);
        if (options.adjust) options.adjust(scenario_);
    }

    RunReport run();

    World& world() { return world_; }
    FakeUpstream& upstream() { return upstream_; }
    const RunOptions& options() const { return options_; }
    RunReport& report() { return report_; }
    std::set<Intent*>& owned_by(const Process& p) {
        return owned_[static_cast<std::size_t>(p.number)];
    }
    void reply(Client& client, int request, Reply kind, const std::string& answer,
               std::uint64_t token);
    void held(Intent& intent, core::FencingToken token);

  private:
    WorldOptions world_options(const RunOptions& options) {
        WorldOptions world;
        // The scenario's number of processes comes from the same seed: drawn again, with the same
        // result.
        Rng rng(options.seed);
        Scenario scenario = Scenario::draw(rng);
        if (options.adjust) options.adjust(scenario);
        world.processes = scenario.processes;
        world.engine.lease = lease;
        world.engine.acquire_patience = patience;
        world.engine.record_patience = patience;
        world.wrap_store = options.wrap_store;
        world.make_spool = options.make_spool;
        world.make_app = [this](Process& process) {
            return std::make_unique<Owner>(*this, process);
        };
        return world;
    }

    void make_intents();
    void script_upstream();
    void watch_store(Process& process);
    void applied(Process& process, const core::Item& item, const Result<core::Decided>& result,
                 Fate fate);
    void plan_faults();
    void heal();
    void ask(Client& client);
    void decide(Intent& intent, core::FencingToken token);
    Task<> tell(Engine* engine, core::Item item, Intent* intent);
    void check_fence(Intent& intent, const core::Item& item, const core::Decided& decided);
    void check_ghost(Process& process, Intent& intent, core::Nonce nonce, SteadyTime since,
                     int incarnation);
    void check_end();
    void disturb_owned(Process& process) {
        for (Intent* intent : owned_by(process)) intent->disturbed = true;
    }
    Intent* intent_of(const core::StoredKey& key) {
        const auto found = by_key_.find(key);
        return found == by_key_.end() ? nullptr : found->second;
    }

    RunOptions options_;
    World world_;
    Scenario scenario_;
    FakeUpstream upstream_;
    bool healed_ = false;
    std::vector<std::unique_ptr<Intent>> intents_;
    std::vector<std::unique_ptr<Client>> clients_;
    std::map<core::StoredKey, Intent*> by_key_;
    std::map<std::size_t, std::set<Intent*>> owned_;  ///< By process: calls that run there.
    std::map<std::pair<int, core::Nonce>, SteadyTime>
        release_trouble_;  ///< A release of it met a fault.
    RunReport report_;
};

// -------------------------------------------------------------------- Owner

Owner::Owner(Workload& workload, Process& process)
    : workload_(workload),
      process_(process),
      client_(make_fake_client(*process.loop, workload.upstream())) {
    workload_.owned_by(process).clear();
}

void Owner::submit(Client& client, int request) { process_.loop->spawn(serve(&client, request)); }

Task<> Owner::serve(Client* client, int request) {
    Intent& intent = *client->intent;
    Engine& engine = *process_.engine;
    runtime::Loop& loop = *process_.loop;
    const SteadyTime deadline = loop.now() + join_limit;
    while (loop.now() < deadline) {
        if (const RecordPtr hot = engine.find_hot(intent.key)) {
            workload_.reply(*client, request, Reply::final_answer, *hot->answer->body,
                            hot->token.value);
            co_return;
        }
        core::Policy policy;
        policy.on_unknown = intent.hold ? core::OnUnknown::hold : core::OnUnknown::rerun;
        Engine::AcquireRequest acquire{.key = intent.key,
                                       .fingerprint = intent.fingerprint,
                                       .policy = policy,
                                       .starts_call = !intent.hold,
                                       .label = "sim"};
        auto acquired = co_await engine.acquire(std::move(acquire));
        if (!acquired) break;
        if (acquired->lease) {
            const bool answered = co_await own(std::move(acquired->lease), client, request);
            if (answered) co_return;
            continue;
        }
        const core::StoreOutcome& refused = *acquired->refused;
        if (const auto* replay = std::get_if<core::Replay>(&refused)) {
            const bool has_answer = replay->record->status == Status::completed;
            workload_.reply(*client, request,
                            has_answer ? Reply::final_answer : Reply::final_failure,
                            has_answer ? *replay->record->answer->body : std::string("failed"),
                            replay->record->token.value);
            co_return;
        }
        if (const auto* unknown = std::get_if<core::UnknownOutcome>(&refused)) {
            workload_.held(intent, unknown->record->token);
            workload_.reply(*client, request, Reply::held, {}, 0);
            co_return;
        }
        const auto* running = std::get_if<core::InFlight>(&refused);
        if (running == nullptr) {
            workload_.world().violate("intent " + std::to_string(intent.number) +
                                      ": an admission nobody expected");
            break;
        }
        const milliseconds wait = std::clamp(running->remaining, 10ms, 700ms);
        co_await loop.sleep_for(wait);
    }
    workload_.reply(*client, request, Reply::retry, {}, 0);
}

/// The paid call and what becomes of it. True: the client has its reply.
Task<bool> Owner::own(std::unique_ptr<engine::LeaseGuard> grant, Client* client, int request) {
    Intent& intent = *client->intent;
    Engine& engine = *process_.engine;
    World& world = workload_.world();
    if (!intent.tokens_held.insert(grant->token().value).second) {
        world.violate("intent " + std::to_string(intent.number) + ": two owners hold token " +
                      std::to_string(grant->token().value));
    }
    workload_.owned_by(process_).insert(&intent);
    if (intent.hold) {
        const auto started = co_await engine.start(*grant);
        if (!started || !*started) {
            if (!started) co_await engine.release(*grant);
            workload_.owned_by(process_).erase(&intent);
            workload_.reply(*client, request, Reply::retry, {}, 0);
            co_return true;
        }
    }
    std::string answer;
    std::optional<core::Fail> failure;
    co_await run_call(*grant, intent, answer, failure);
    if (failure) {
        if (failure->certainty == Certainty::unknown) intent.disturbed = true;
        co_await engine.fail(*grant, std::move(*failure));
        workload_.owned_by(process_).erase(&intent);
        workload_.reply(*client, request, Reply::retry, {}, 0);
        co_return true;
    }
    core::Answer recorded;
    recorded.http_status = 200;
    recorded.content_type = "application/json";
    recorded.body = std::make_shared<const std::string>(answer);
    recorded.body_bytes = answer.size();
    const auto token = grant->token().value;
    const Completion completion =
        co_await engine.complete(*grant, std::move(recorded), core::Usage{}, std::nullopt);
    workload_.owned_by(process_).erase(&intent);
    switch (completion.kind) {
        case Completion::Kind::recorded:
            workload_.reply(*client, request, Reply::final_answer, answer, token);
            co_return true;
        case Completion::Kind::pending:
            ++workload_.report().pending;
            intent.disturbed = true;
            intent.pending[token] = answer;
            workload_.reply(*client, request,
                            workload_.options().defects.pending_answer_is_final
                                ? Reply::final_answer
                                : Reply::pending_answer,
                            answer, token);
            co_return true;
        case Completion::Kind::overtaken:
            if (workload_.options().defects.fenced_answer_is_final) {
                workload_.reply(*client, request, Reply::final_answer, answer, token);
                co_return true;
            }
            co_return false;  // looks again: joins, or replays
    }
    co_return false;
}

Task<> Owner::run_call(engine::LeaseGuard& grant, Intent& intent, std::string& answer,
                       std::optional<core::Fail>& failure) {
    http::Origin origin;
    http::Request request;
    request.method = "POST";
    request.target = "/v1/chat/completions";
    request.body = intent.body;
    http::Timeouts timeouts;
    timeouts.first_byte = 30s;
    timeouts.idle = 5s;
    workload_.world().trace("p" + std::to_string(process_.number) + " calls for intent " +
                            std::to_string(intent.number) + " with token " +
                            std::to_string(grant.token().value));
    const auto fails = [&](const http::CallError& e) {
        failure = core::Fail{
            .certainty = e.maybe_processed ? Certainty::unknown : Certainty::not_processed,
            .failure = {e.maybe_processed ? "upstream-reset" : "upstream-refused", e.detail, 0}};
    };
    auto called = co_await client_->call(origin, std::move(request), timeouts, nullptr);
    if (const auto* e = std::get_if<http::CallError>(&called)) {
        fails(*e);
        co_return;
    }
    http::Response& response = *std::get<0>(called);
    for (;;) {
        const auto piece = co_await response.read_some();
        if (const auto* e = std::get_if<http::CallError>(&piece)) {
            fails(*e);
            co_return;
        }
        const std::string_view bytes = std::get<0>(piece);
        if (bytes.empty()) break;
        answer += bytes;
    }
    if (response.status() == 429) {
        failure = core::Fail{.certainty = Certainty::not_processed,
                             .failure = {"upstream-status", "429", 429}};
    }
}

// -------------------------------------------------------------------- clients and operator

void Workload::make_intents() {
    for (int i = 0; i < scenario_.intents; ++i) {
        auto intent = std::make_unique<Intent>();
        intent->number = i;
        intent->body = "intent-" + std::to_string(i);
        intent->key = key_of(intent->body);
        intent->fingerprint = fingerprint_of(intent->body);
        intent->hold = world_.rng.percent(scenario_.hold);
        by_key_[intent->key] = intent.get();
        for (int c = 0; c < scenario_.clients_per_intent; ++c) {
            auto client = std::make_unique<Client>();
            client->number = static_cast<int>(clients_.size());
            client->intent = intent.get();
            Client* raw = client.get();
            world_.after(world_.rng.between(0s, scenario_.faults_for / 2),
                         [this, raw] { ask(*raw); });
            clients_.push_back(std::move(client));
        }
        intents_.push_back(std::move(intent));
    }
}

void Workload::ask(Client& client) {
    if (client.done) return;
    Process* process = world_.any_alive();
    if (process == nullptr) {
        world_.after(500ms, [this, &client] { ask(client); });
        return;
    }
    const int request = client.asking = ++client.requests;
    static_cast<Owner&>(*process->app).submit(client, request);
    world_.after(client_limit, [this, &client, request] {
        if (client.asking != request) return;
        client.asking = 0;
        ask(client);
    });
}

void Workload::reply(Client& client, int request, Reply kind, const std::string& answer,
                     std::uint64_t token) {
    Intent& intent = *client.intent;
    const bool final = kind == Reply::final_answer || kind == Reply::final_failure;
    // Also what a client no longer waits for was given as final: to its connection.
    if (final && std::find(intent.final_answers.begin(), intent.final_answers.end(), answer) ==
                     intent.final_answers.end()) {
        intent.final_answers.push_back(answer);
        if (intent.final_answers.size() > 1) {
            world_.violate("intent " + std::to_string(intent.number) + ": two final answers: '" +
                           intent.final_answers[0] + "' and '" + answer + "'");
        }
    }
    if (client.done || client.asking != request) return;
    client.asking = 0;
    world_.trace("client " + std::to_string(client.number) + " of intent " +
                 std::to_string(intent.number) + " gets " +
                 (final                           ? "final '" + answer + "'"
                  : kind == Reply::pending_answer ? "pending '" + answer + "'"
                  : kind == Reply::held           ? "held"
                                                  : "retry") +
                 " token " + std::to_string(token));
    if (final || kind == Reply::pending_answer) {
        client.done = true;
        return;
    }
    world_.after(world_.rng.between(100ms, 8s), [this, &client] { ask(client); });
}

void Workload::held(Intent& intent, core::FencingToken token) {
    if (intent.deciding) return;
    intent.deciding = true;
    world_.after(world_.rng.between(1s, 20s), [this, &intent, token] { decide(intent, token); });
}

void Workload::decide(Intent& intent, core::FencingToken token) {
    intent.deciding = false;
    Process* process = world_.any_alive();
    if (process == nullptr) return;  // the next client that finds it held asks for a decision again
    core::Resolve resolve;
    resolve.token_seen = token;
    const bool rerun = world_.rng.percent(70);
    resolve.decision = rerun ? core::Resolve::Decision::rerun : core::Resolve::Decision::failed;
    resolve.reason = "the operator decided";
    ++intent.decisions_to_rerun;  // after `failed`, too, the next request runs again
    ++report_.decisions;
    world_.trace("operator decides intent " + std::to_string(intent.number) +
                 (rerun ? ": rerun" : ": failed"));
    process->loop->spawn(tell(process->engine.get(), core::Item{intent.key, resolve}, &intent));
    // A person who clicks twice: the second click must find that the token it saw is gone.
    if (!world_.rng.one_in(2)) return;
    world_.after(world_.rng.between(10ms, 6s), [this, &intent, resolve] {
        Process* other = world_.any_alive();
        if (other != nullptr)
            other->loop->spawn(tell(other->engine.get(), core::Item{intent.key, resolve}, &intent));
    });
}

Task<> Workload::tell(Engine* engine, core::Item item, Intent* intent) {
    // Whatever came of it: clients that find it held again ask again.
    (void)co_await engine->ask(std::move(item));
    intent->deciding = false;
}

// -------------------------------------------------------------------- upstream and faults

void Workload::script_upstream() {
    upstream_.plan = [this](const FakeUpstream::Call& call) {
        Rng& rng = world_.rng;
        UpstreamPlan plan;
        plan.head_after =
            std::chrono::duration_cast<milliseconds>(rng.between(5ms, scenario_.call_max));
        plan.body.push_back(
            {1ms, "answer to " + call.body + ", call " + std::to_string(call.number)});
        if (healed_ || !rng.percent(scenario_.upstream_trouble)) return plan;
        switch (rng.below(5)) {
            case 0:
                plan.start = UpstreamPlan::Start::refused;
                break;
            case 1:
                plan.start = UpstreamPlan::Start::reset;
                plan.paid = rng.one_in(2);
                break;
            case 2:
                plan.status = 429;
                plan.paid = false;
                break;
            case 3:
                plan.end = UpstreamPlan::End::cut;
                break;
            default:
                plan.start = UpstreamPlan::Start::silent;
                break;
        }
        return plan;
    };
    upstream_.on_paid = [this](const FakeUpstream::Call& call) {
        ++report_.paid;
        for (auto& intent : intents_) {
            if (intent->body == call.body && upstream_.paid(call.body) > intent->grants) {
                world_.violate("intent " + std::to_string(intent->number) +
                               ": more paid calls than grants");
            }
        }
    };
}

void Workload::watch_store(Process& process) {
    FaultyStore& store = *process.store;
    Process* raw = &process;
    store.faults = scenario_.store_faults;
    store.on_submit = [this, raw](const std::vector<core::Item>& items, Fate fate) {
        if (fate == Fate::serve) return;
        for (const core::Item& item : items) {
            Intent* intent = intent_of(item.key);
            if (intent == nullptr) continue;
            // A repeated request is no excuse. A lost acquire is none either: it must be settled.
            const bool owners_word = std::holds_alternative<core::Renew>(item.operation) ||
                                     std::holds_alternative<core::Complete>(item.operation) ||
                                     std::holds_alternative<core::Fail>(item.operation);
            if (owners_word && fate != Fate::repeat) intent->disturbed = true;
            if (const auto* release = std::get_if<core::Release>(&item.operation)) {
                release_trouble_[{raw->number, release->nonce}] = world_.now();
            }
        }
    };
    store.on_applied = [this, raw](const core::Item& item, const Result<core::Decided>& result,
                                   Fate fate) { applied(*raw, item, result, fate); };
}

/// Sees every step in the order in which the store took it.
void Workload::applied(Process& process, const core::Item& item,
                       const Result<core::Decided>& result, Fate fate) {
    Intent* intent = intent_of(item.key);
    if (intent == nullptr || !result) return;
    if (const auto* granted = std::get_if<core::Granted>(&result->outcome)) {
        if (granted->kind != core::Granted::Kind::repeated) {
            ++report_.grants;
            ++intent->grants;
            if (granted->kind == core::Granted::Kind::takeover) ++report_.takeovers;
            if (granted->possible_second_payment) ++report_.second_payments_counted;
            if (granted->token.value <= intent->last_token) {
                world_.violate("intent " + std::to_string(intent->number) +
                               ": a token did not grow");
            }
            if (granted->attempt <= intent->last_attempt) {
                world_.violate("intent " + std::to_string(intent->number) +
                               ": the count of attempts fell");
            }
            intent->last_token = granted->token.value;
            intent->last_attempt = granted->attempt;
        }
        const auto& acquire = std::get<core::Acquire>(item.operation);
        if (fate == Fate::lose_reply || fate == Fate::execute_late || fate == Fate::delay_reply) {
            ++report_.ghosts;
            world_.trace("ghost of p" + std::to_string(process.number) + " on intent " +
                         std::to_string(intent->number));
            const SteadyTime since = world_.now();
            // Of a former life of the process: nobody is left who could settle it, the lease runs
            // out.
            const std::string lives =
                "p" + std::to_string(process.number) + "." + std::to_string(process.incarnation);
            if (acquire.owner.id == lives)
                world_.after(settle_limit, [this, p = &process, intent, nonce = acquire.nonce,
                                            since, n = process.incarnation] {
                    check_ghost(*p, *intent, nonce, since, n);
                });
        }
    }
    const RecordPtr record = world_.record(item.key);
    check_fence(*intent, item, *result);
    if (intent->completed) {
        const bool same = record && record->status == Status::completed &&
                          record->token == intent->completed->token &&
                          *record->answer->body == *intent->completed->answer->body;
        if (!same)
            world_.violate("intent " + std::to_string(intent->number) +
                           ": a completed record changed");
    } else if (record && record->status == Status::completed) {
        intent->completed = record;
    }
}

/// Only the current owner's word counts, and only a decision about what is there.
void Workload::check_fence(Intent& intent, const core::Item& item, const core::Decided& decided) {
    if (const auto* granted = std::get_if<core::Granted>(&decided.outcome))
        intent.current_token = granted->token;
    const auto* applied = std::get_if<core::Applied>(&decided.outcome);
    if (applied == nullptr) return;
    const RecordPtr& record =
        applied->record;  // after this step; later ones of the same batch may have changed it again
    const auto owners = [&](core::FencingToken token, const core::Nonce& nonce) {
        return record && (token.value == 0 || record->token == token) && record->nonce == nonce;
    };
    bool allowed = true;
    if (const auto* op = std::get_if<core::Start>(&item.operation))
        allowed = owners(op->token, op->nonce);
    if (const auto* op = std::get_if<core::Renew>(&item.operation))
        allowed = owners(op->token, op->nonce);
    if (const auto* op = std::get_if<core::Release>(&item.operation))
        allowed = owners(op->token, op->nonce);
    if (const auto* op = std::get_if<core::Complete>(&item.operation))
        allowed = owners(op->token, op->nonce);
    if (const auto* op = std::get_if<core::Fail>(&item.operation))
        allowed = owners(op->token, op->nonce);
    if (const auto* op = std::get_if<core::Resolve>(&item.operation))
        allowed = op->token_seen == intent.current_token;
    if (!allowed)
        world_.violate("intent " + std::to_string(intent.number) +
                       ": a step under another token took effect");
    if (record) intent.current_token = record->token;
}

void Workload::check_ghost(Process& process, Intent& intent, core::Nonce nonce, SteadyTime since,
                           int incarnation) {
    if (!process.alive || process.incarnation != incarnation || process.last_disturbed >= since)
        return;                                                      // died, or could not
    if (release_trouble_.contains({process.number, nonce})) return;  // still trying
    const RecordPtr record = world_.record(intent.key);
    if (record && record->status == Status::processing && record->nonce == nonce) {
        world_.violate("intent " + std::to_string(intent.number) +
                       ": a lease lives whose owner does not know of it");
    }
}

void Workload::plan_faults() {
    Rng& rng = world_.rng;
    const auto at = [&] { return rng.between(100ms, scenario_.faults_for); };
    const auto some_process = [&] {
        return world_.processes()[rng.below(world_.processes().size())].get();
    };
    for (unsigned i = 0; i < scenario_.crashes; ++i) {
        Process* p = some_process();
        const microseconds down_for = rng.between(10ms, 12s);
        world_.after(at(), [this, p, down_for] {
            if (!p->alive || healed_) return;
            disturb_owned(*p);
            ++report_.crashes;
            world_.crash(*p);
            world_.after(down_for, [this, p] {
                if (!p->alive) world_.start(*p);
            });
        });
    }
    for (unsigned i = 0; i < scenario_.pauses; ++i) {
        Process* p = some_process();
        const auto d = std::chrono::duration_cast<milliseconds>(rng.between(100ms, 25s));
        world_.after(at(), [this, p, d] {
            if (!p->alive || world_.paused(*p) || healed_) return;
            disturb_owned(*p);
            ++report_.pauses;
            world_.pause(*p, d);
        });
    }
    for (unsigned i = 0; i < scenario_.outages; ++i) {
        Process* p = some_process();
        const bool all = rng.one_in(2);
        const microseconds d = rng.between(100ms, 20s);
        world_.after(at(), [this, p, all, d] {
            if (healed_) return;
            for (auto& process : world_.processes()) {
                if (!all && process.get() != p) continue;
                process->store->down = true;
                process->last_disturbed = world_.now() + d;
                world_.after(d, [q = process.get()] { q->store->down = false; });
            }
        });
    }
    world_.after(scenario_.faults_for, [this] { heal(); });
}

void Workload::heal() {
    healed_ = true;
    world_.heal();
}

// -------------------------------------------------------------------- the run and its checks

RunReport Workload::run() {
    make_intents();
    script_upstream();
    for (auto& process : world_.processes()) {
        watch_store(*process);
        world_.start(*process);
    }
    plan_faults();
    const auto all_done = [this] {
        return healed_ && std::all_of(clients_.begin(), clients_.end(),
                                      [](const auto& client) { return client->done; });
    };
    const bool finished =
        world_.run_until(all_done, world_.now() + scenario_.faults_for + heal_limit);
    if (!finished && world_.violation.empty()) {
        for (const auto& client : clients_) {
            if (client->done) continue;
            const RecordPtr record = world_.record(client->intent->key);
            world_.violate("client " + std::to_string(client->number) + " of intent " +
                           std::to_string(client->intent->number) +
                           " never got an answer; status " +
                           (record ? std::to_string(static_cast<int>(record->status)) : "absent"));
            break;
        }
    }
    // What is still under way may end: calls of owners whose clients went elsewhere, spooled
    // answers, dead leases.
    if (world_.violation.empty()) world_.run_for(scenario_.call_max + 3 * lease + 60s);
    if (world_.violation.empty()) check_end();
    for (auto& process : world_.processes()) {
        if (!process->counters) continue;
        const auto& counters = *process->counters;
        report_.spool_delivered += static_cast<unsigned>(counters.spool_delivered);
        report_.spool_overtaken += static_cast<unsigned>(counters.spool_overtaken);
        report_.ghosts_settled += static_cast<unsigned>(counters.settled_acquires);
        report_.leases_lost += static_cast<unsigned>(counters.leases_lost);
    }
    report_.violation = world_.violation;
    return report_;
}

void Workload::check_end() {
    for (const auto& intent : intents_) {
        const std::string name = "intent " + std::to_string(intent->number);
        const unsigned paid = upstream_.paid(intent->body);
        const RecordPtr record = world_.record(intent->key);
        if (!record) {
            world_.violate(name + ": no record");
            continue;
        }
        if (record->status == Status::processing)
            world_.violate(name + ": PROCESSING, and nobody works on it");
        if (intent->hold) {
            if (paid > 1 + intent->decisions_to_rerun) {
                world_.violate(name + ": held, but paid " + std::to_string(paid) + " times with " +
                               std::to_string(intent->decisions_to_rerun) + " decisions");
            }
        } else if (paid > 1 + record->possible_second_payments) {
            world_.violate(name + ": paid " + std::to_string(paid) + " times, " +
                           std::to_string(record->possible_second_payments) +
                           " possible second payments counted");
        }
        if (!intent->disturbed && intent->decisions_to_rerun == 0 && paid > 1) {
            world_.violate(name + ": paid " + std::to_string(paid) +
                           " times, though nothing happened to it");
        }
        if (record->status == Status::completed && !intent->final_answers.empty() &&
            *record->answer->body != intent->final_answers.front()) {
            world_.violate(name + ": the record differs from the final answer");
        }
        // An answer given before its record reaches it, unless a later attempt overtook it.
        for (const auto& [token, answer] : intent->pending) {
            if (record->token.value != token || record->final) continue;
            const bool kept =
                record->status == Status::completed && *record->answer->body == answer;
            if (!kept)
                world_.violate(name + ": an answer given as pending never reached its record");
        }
    }
    for (const auto& process : world_.processes()) {
        if (process->spool->size() != 0)
            world_.violate("p" + std::to_string(process->number) + ": the spool is not empty");
        if (process->engine && process->engine->leases() != 0) {
            world_.violate("p" + std::to_string(process->number) + ": a lease is still renewed");
        }
    }
}

}  // namespace

Scenario Scenario::draw(Rng& rng) {
    Scenario s;
    s.processes = 1 + static_cast<int>(rng.below(4));
    s.intents = 2 + static_cast<int>(rng.below(5));
    s.clients_per_intent = 1 + static_cast<int>(rng.below(3));
    // Each kind of trouble is absent in some runs: rare ones would drown in the frequent ones.
    const auto maybe = [&](unsigned max) {
        return rng.one_in(2) ? 0 : static_cast<unsigned>(rng.below(max)) + 1;
    };
    s.store_faults.refuse = maybe(500);
    s.store_faults.drop = maybe(800);
    s.store_faults.lose_reply = maybe(1500);
    s.store_faults.execute_late = maybe(1500);
    s.store_faults.delay_reply = maybe(1000);
    s.store_faults.repeat = maybe(1500);
    s.store_faults.late_max = rng.one_in(2) ? 4s : 15s;
    s.crashes = maybe(10);
    s.pauses = maybe(10);
    s.outages = rng.one_in(3) ? maybe(6) : 0;
    s.upstream_trouble = maybe(40);
    s.hold = rng.one_in(3) ? 60 : 0;
    const milliseconds call_max[] = {500ms, 8s, 20s};
    s.call_max = call_max[rng.below(3)];
    s.faults_for = std::chrono::duration_cast<milliseconds>(rng.between(20s, 60s));
    return s;
}

RunReport run_engine_workload(const RunOptions& options) {
    Workload workload(options);
    return workload.run();
}

}  // namespace semel::sim
