#include "gateway/protected.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "gateway/request_id.hpp"

namespace semel::gateway {

using namespace std::chrono_literals;
using Outcome = telemetry::RequestOutcome;

Task<> respond_problem(http::Exchange& exchange, const Problem& problem, Shape shape) {
    http::ResponseHead head{.status = problem.status};
    head.add("Content-Type", content_type_of(shape));
    head.add("Semel-Error-Source", "gateway");
    head.headers += "Cache-Control: no-store\r\n";
    if (problem.status == 401) head.add("WWW-Authenticate", "Bearer");
    head.headers += header_lines(problem);
    const std::string body = render(problem, shape);
    co_await exchange.respond(head, body);
}

SteadyTime join_deadline(const http::RequestHead& head, const config::RouteConfig& route,
                         SteadyTime now) {
    auto patience = std::chrono::duration_cast<std::chrono::milliseconds>(route.join_timeout);
    auto announced = head.header("x-stainless-read-timeout");
    if (!announced) announced = head.header("x-stainless-timeout");
    if (announced) {
        const std::string text(*announced);
        char* end = nullptr;
        const double seconds = std::strtod(text.c_str(), &end);
        if (end != text.c_str() && std::isfinite(seconds) && seconds > 0 && seconds < 1e6) {
            const auto read_timeout =
                std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
            patience = std::min(
                patience, read_timeout - std::min<std::chrono::milliseconds>(2s, read_timeout / 4));
        }
    }
    return now + patience;
}

Task<std::shared_ptr<Body>> read_budgeted_body(Process::State& state, http::Exchange& exchange,
                                               std::uint64_t limit, telemetry::Route route) {
    const Shape shape = route == telemetry::Route::api_chat ? Shape::problem_json : Shape::openai;
    const auto count = [&](Outcome outcome) { state.metrics.requests(route, outcome).add(); };
    const std::optional<std::uint64_t> announced = exchange.head().content_length;
    auto body = std::make_shared<Body>(state.bodies);
    if (announced.value_or(0) > limit) {
        count(Outcome::bad_request);
        co_await respond_problem(
            exchange,
            {.status = 413,
             .slug = "body-too-large",
             .detail = "The body is larger than " + std::to_string(limit >> 20) +
                       " MiB, the limit of protected routes.",
             .should_retry = false},
            shape);
        co_return nullptr;
    }
    if (!body->reserve(exchange.head().chunked ? limit : announced.value_or(0))) {
        count(Outcome::unavailable);
        co_await respond_problem(
            exchange,
            {.status = 503,
             .slug = "busy",
             .detail =
                 "This gateway holds as many request bodies as memory.bodies allows. Try again.",
             .retry_after_s = 1,
             .should_retry = true},
            shape);
        co_return nullptr;
    }
    const http::BodyStatus status = co_await exchange.read_body(body->text, limit);
    body->settle();
    switch (status) {
        case http::BodyStatus::ok:
            co_return body;
        case http::BodyStatus::too_large:
            count(Outcome::bad_request);
            co_await respond_problem(
                exchange,
                {.status = 413,
                 .slug = "body-too-large",
                 .detail = "The body is larger than " + std::to_string(limit >> 20) +
                           " MiB, the limit of protected routes.",
                 .should_retry = false},
                shape);
            co_return nullptr;
        case http::BodyStatus::malformed:
        case http::BodyStatus::closed:
        case http::BodyStatus::timed_out:
            count(status == http::BodyStatus::closed ? Outcome::client_gone : Outcome::bad_request);
            co_return nullptr;  // the server has answered, or there is nobody to answer
    }
    co_return nullptr;
}

Task<> ProtectedRoute::unprotected(http::Exchange& exchange, telemetry::Unprotected why) {
    state_.metrics.unprotected(why).add();
    state_.metrics.requests(telemetry::Route::chat_completions, Outcome::passed).add();
    co_await passthrough_.handle(exchange);
}

namespace {

/// Owns its call: runs on after the client that brought it is gone.
Task<> own(Owner& owner, FlightPtr flight, std::unique_ptr<Call> call) {
    co_await owner.run(std::move(flight), *call);
}

}  // namespace

Task<> ProtectedRoute::handle(http::Exchange& exchange, const Caller& caller) {
    const http::RequestHead& head = exchange.head();
    const config::RouteConfig& route = state_.completions_route;
    Loop& loop = owner_.engine().loop();
    const SteadyTime asked_at = loop.now();
    if (route.mode == config::Mode::off) {
        co_await unprotected(exchange, telemetry::Unprotected::mode);
        co_return;
    }
    RequestId id = read_request_id(head, false);
    if (const auto* malformed = std::get_if<MalformedId>(&id)) {
        state_.metrics.requests(telemetry::Route::chat_completions, Outcome::bad_request).add();
        co_await respond_problem(
            exchange,
            {.status = 400,
             .slug = "key-malformed",
             .detail = "The Idempotency-Key is not usable: " + malformed->reason +
                       ". Send 1 to 255 visible ASCII characters, such as a UUID.",
             .should_retry = false},
            Shape::openai);
        co_return;
    }
    if (std::holds_alternative<NoId>(id)) {
        if (route.key == config::KeyRule::required && route.mode == config::Mode::on) {
            state_.metrics.requests(telemetry::Route::chat_completions, Outcome::bad_request).add();
            co_await respond_problem(exchange,
                                     {.status = 400,
                                      .slug = "key-missing",
                                      .detail = "This route needs an Idempotency-Key header: one "
                                                "id per operation, the same on every retry of it.",
                                      .should_retry = false},
                                     Shape::openai);
            co_return;
        }
        co_await unprotected(exchange, telemetry::Unprotected::no_key);
        co_return;
    }
    std::string& client_id = std::get<std::string>(id);
    const core::StoredKey key = stored_key(state_.hmac, {.tenant = caller.tenant,
                                                         .operation = head.path,
                                                         .user = {},
                                                         .session = {},
                                                         .id = client_id});
    if (route.mode == config::Mode::observe) {
        if (state_.observed.seen_before(key)) state_.metrics.observed_duplicates.add();
        co_await unprotected(exchange, telemetry::Unprotected::mode);
        co_return;
    }
    const std::shared_ptr<Body> body = co_await read_budgeted_body(
        state_, exchange, protected_body_max_bytes, telemetry::Route::chat_completions);
    if (!body) co_return;

    Asked asked{.exchange = exchange,
                .key = key,
                .route = &route,
                .shape = Shape::openai,
                .id = std::move(client_id),
                .body = body->text,
                .wait_until = join_deadline(head, route, asked_at),
                .metrics_route = telemetry::Route::chat_completions};
    asked.fingerprint.raw = state_.fingerprints.raw_of(head, body->text);
    core::RecordPtr hot = owner_.engine().find_hot(key);
    if (hot && hot->fingerprint.raw == asked.fingerprint.raw) {
        co_await follower_.replay(asked, std::move(hot));
        co_return;
    }
    state_.fingerprints.complete(asked.fingerprint, head, body->text);
    const openai::RequestFacts facts = openai::read_request(body->text);
    for (;;) {
        if (core::RecordPtr record = owner_.engine().find_hot(key)) {
            co_await follower_.replay(asked, std::move(record));
            co_return;
        }
        Flights::Entry entry =
            state_.flights.enter(key, asked.fingerprint, state_.spill_path, loop.now());
        if (entry.leads) {
            std::optional<Problem> refused;
            const Upstream* upstream = state_.upstreams.choose(facts.model);
            if (state_.draining.load(std::memory_order_relaxed)) {
                refused = Problem{.status = 503,
                                  .slug = "draining",
                                  .detail = "This gateway is shutting down. Try again.",
                                  .retry_after_s = 1,
                                  .should_retry = true};
            }
            auto call = std::make_unique<Call>();
            call->key = key;
            call->fingerprint = asked.fingerprint;
            call->route = &route;
            call->upstream = upstream;
            call->refused = std::move(refused);
            call->target = head.target;
            call->body = body;
            call->label = head.path;
            call->tenant = tenant_tag(state_.hmac, caller.tenant);
            bool strip_usage = false;
            if (upstream != nullptr) {
                call->headers = upstream_headers(
                    head, *upstream,
                    {.credential_goes_upstream = state_.identity.credential_goes_upstream(),
                     .protected_route = true});
                if (upstream->config->idempotency_key == config::UpstreamKey::forward) {
                    // Its own name for the intent: the client's id would be another tenant's at the
                    // upstream.
                    call->headers +=
                        "Idempotency-Key: semel-" + base::base64url(key.view()) + "\r\n";
                }
                if (facts.stream && !facts.usage_wanted &&
                    upstream->config->stream_usage == config::StreamUsage::inject) {
                    if (auto spliced = openai::with_usage_asked(body->text)) {
                        call->own_body = std::move(*spliced);
                        call->has_own_body = true;
                        strip_usage = true;
                    }
                }
            } else if (!call->refused) {
                call->refused =
                    Problem{.status = 404,
                            .slug = "model-not-found",
                            .detail = "No configured upstream serves the model of this request.",
                            .should_retry = false};
            }
            call->shape = std::make_unique<OpenAiShape>(strip_usage);
            loop.spawn(own(owner_, entry.flight, std::move(call)));
        }
        if (co_await follower_.follow(asked, entry.flight, entry.leads) ==
            Follower::Followed::answered)
            co_return;
    }
}

}  // namespace semel::gateway
