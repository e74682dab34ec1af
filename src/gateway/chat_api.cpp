#include "gateway/chat_api.hpp"

#include <algorithm>

#include "base/json_scan.hpp"
#include "base/percent.hpp"
#include "gateway/chat_parts.hpp"
#include "gateway/chat_shape.hpp"
#include "gateway/protected.hpp"
#include "gateway/request_id.hpp"

namespace semel::gateway {

using namespace std::chrono_literals;
using Outcome = telemetry::RequestOutcome;

namespace {

/// A turn that another process holds is asked for again this often.
constexpr auto turn_poll = 250ms;

}  // namespace

/// What a POST asks, checked. Shared by the client's coroutine and the owner's.
struct ChatApi::Question {
    std::string tenant, user, session, id, content, model;
    bool stream = false;
    bool model_given = false;
    core::StoredKey key, turn, conversation;
    core::Fingerprint fingerprint;
    std::string forwarded_headers;  ///< For the upstream.
    const config::RouteConfig* route = nullptr;
    const Upstream* upstream = nullptr;
    SteadyTime wait_until;
};

Task<> ChatApi::handle(http::Exchange& exchange, const Caller& caller) {
    const http::RequestHead& head = exchange.head();
    std::string user;
    if (const auto named = head.header("x-user-id")) {
        if (caller.may_name_users) {
            user = *named;
        } else {
            state_.metrics.user_header_ignored.add();
        }
    }
    if (user.size() > core::key_part_max_bytes) {
        co_await respond_problem(exchange, bad_request("X-User-Id is longer than 255 bytes."),
                                 Shape::problem_json);
        co_return;
    }
    const std::string_view path = head.path;
    constexpr std::string_view status_prefix = "/api/chat/status/";
    constexpr std::string_view sessions_prefix = "/api/chat/sessions/";
    constexpr std::string_view messages_suffix = "/messages";
    std::string_view allowed;
    if (path == "/api/chat") {
        allowed = "POST";
        if (head.method == "POST") co_return co_await ask(exchange, caller, std::move(user));
    } else if (path.starts_with(status_prefix) && path.size() > status_prefix.size()) {
        allowed = "GET";
        if (head.method == "GET") {
            co_return co_await status(exchange, caller, std::move(user),
                                      base::percent_decoded(path.substr(status_prefix.size())));
        }
    } else if (path.starts_with(sessions_prefix) && path.size() > sessions_prefix.size()) {
        std::string_view rest = path.substr(sessions_prefix.size());
        if (rest.ends_with(messages_suffix) && rest.size() > messages_suffix.size()) {
            rest.remove_suffix(messages_suffix.size());
            allowed = "GET";
            if (head.method == "GET")
                co_return co_await messages(exchange, caller, std::move(user),
                                            base::percent_decoded(rest));
        } else {
            allowed = "GET, DELETE";
            if (head.method == "GET")
                co_return co_await session(exchange, caller, std::move(user),
                                           base::percent_decoded(rest));
            if (head.method == "DELETE")
                co_return co_await forget(exchange, caller, std::move(user),
                                          base::percent_decoded(rest));
        }
    }
    if (allowed.empty()) {
        co_await respond_problem(exchange, not_found("This path"), Shape::problem_json);
        co_return;
    }
    http::ResponseHead out{.status = 405};
    const Problem problem{.status = 405,
                          .slug = "method-not-allowed",
                          .detail = "This path answers " + std::string(allowed) + " only.",
                          .should_retry = false};
    out.add("Content-Type", content_type_of(Shape::problem_json));
    out.add("Allow", allowed);
    out.add("Semel-Error-Source", "gateway");
    out.headers += "Cache-Control: no-store\r\n";
    const std::string body = render(problem, Shape::problem_json);
    co_await exchange.respond(out, body);
}

Task<> ChatApi::ask(http::Exchange& exchange, const Caller& caller, std::string user) {
    const http::RequestHead& head = exchange.head();
    const config::RouteConfig& route =
        caller.inner_route != nullptr ? *caller.inner_route : state_.chat_route;
    Loop& loop = engine_.loop();
    const SteadyTime asked_at = loop.now();
    const auto refuse = [&](Problem problem) -> Task<> {
        state_.metrics.requests(telemetry::Route::api_chat, Outcome::bad_request).add();
        co_await respond_problem(exchange, problem, Shape::problem_json);
    };
    RequestId read_id = read_request_id(head, true);
    if (const auto* malformed = std::get_if<MalformedId>(&read_id)) {
        co_await refuse({.status = 400,
                         .slug = "key-malformed",
                         .detail = "The request's id is not usable: " + malformed->reason +
                                   ". Send 1 to 255 visible ASCII characters, such as a UUID.",
                         .should_retry = false});
        co_return;
    }
    if (std::holds_alternative<NoId>(read_id)) {
        co_await refuse({.status = 400,
                         .slug = "key-missing",
                         .detail = "Send X-Request-Id (or Idempotency-Key): one id per operation, "
                                   "the same on every retry of it.",
                         .should_retry = false});
        co_return;
    }
    const std::shared_ptr<Body> body = co_await read_budgeted_body(
        state_, exchange, chat_body_max_bytes, telemetry::Route::api_chat);
    if (!body) co_return;

    auto question = std::make_shared<Question>();
    question->tenant = caller.tenant;
    question->user = std::move(user);
    question->id = std::move(std::get<std::string>(read_id));
    const auto members = base::top_level_members(body->text);
    if (!members) {
        co_await refuse(bad_request("The body is not a JSON object (valid UTF-8)."));
        co_return;
    }
    const auto text_member = [&](std::string_view name, std::string& into) -> bool {
        const auto raw = base::find_member(*members, name);
        if (!raw) return false;
        auto text = base::json_string(*raw);
        if (!text || text->empty()) return false;
        into = std::move(*text);
        return true;
    };
    if (!text_member("content", question->content)) {
        co_await refuse(bad_request("'content' must be a string that is not empty."));
        co_return;
    }
    if (!text_member("sessionId", question->session) ||
        question->session.size() > core::key_part_max_bytes) {
        co_await refuse(bad_request("'sessionId' must be a string of 1 to 255 bytes."));
        co_return;
    }
    if (base::find_member(*members, "model")) {
        if (!text_member("model", question->model)) {
            co_await refuse(
                bad_request("'model', where given, must be a string that is not empty."));
            co_return;
        }
        question->model_given = true;
    }
    if (const auto raw = base::find_member(*members, "stream")) {
        const auto stream = base::json_bool(*raw);
        if (!stream) {
            co_await refuse(bad_request("'stream', where given, must be true or false."));
            co_return;
        }
        question->stream = *stream;
    }
    // Defaults of the configuration never enter the fingerprint: they may change between a try and
    // its retry.
    std::vector<std::pair<std::string_view, std::string_view>> parts{
        {"content", question->content}, {"stream", question->stream ? "true" : "false"}};
    if (question->model_given) parts.emplace_back("model", question->model);
    question->fingerprint = state_.fingerprints.of_parts(parts);
    if (!question->model_given) question->model = route.model;
    question->key = stored_key(state_.hmac, {.tenant = question->tenant,
                                             .operation = "chat",
                                             .user = question->user,
                                             .session = question->session,
                                             .id = question->id});
    question->turn = turn_key(state_.hmac, question->tenant, question->user, question->session);
    question->conversation =
        conversation_key(state_.hmac, question->tenant, question->user, question->session);
    question->route = &route;
    question->wait_until = join_deadline(head, route, asked_at);
    question->upstream =
        question->model.empty() ? nullptr : state_.upstreams.choose(question->model);
    if (question->upstream != nullptr) {
        // Only who asks goes along: the request upstream is one of our own making.
        const http::RequestHead credentials = [&head] {
            http::RequestHead only;
            for (const http::Header& header : head.headers) {
                if (is_credential_header(header.name)) only.headers.push_back(header);
            }
            return only;
        }();
        question->forwarded_headers = upstream_headers(
            credentials, *question->upstream,
            {.credential_goes_upstream = state_.identity.credential_goes_upstream(),
             .protected_route = true});
        question->forwarded_headers += "Content-Type: application/json\r\n";
        if (question->upstream->config->idempotency_key == config::UpstreamKey::forward) {
            question->forwarded_headers +=
                "Idempotency-Key: semel-" + base::base64url(question->key.view()) + "\r\n";
        }
    }
    Asked asked{.exchange = exchange,
                .key = question->key,
                .fingerprint = question->fingerprint,
                .route = &route,
                .shape = Shape::problem_json,
                .id = question->id,
                .body = body->text,
                .wait_until = question->wait_until,
                .chat = true,
                .as_recorded = caller.inner_route != nullptr,
                .status_path = "/api/chat/status/" + base::percent_encoded(question->id) +
                               "?sessionId=" + base::percent_encoded(question->session),
                .metrics_route = telemetry::Route::api_chat};
    for (;;) {
        if (core::RecordPtr record = engine_.find_hot(question->key)) {
            co_await follower_.replay(asked, std::move(record));
            co_return;
        }
        Flights::Entry entry = state_.flights.enter(question->key, question->fingerprint,
                                                    state_.spill_path, loop.now());
        if (entry.leads) loop.spawn(own_turn(entry.flight, question));
        if (co_await follower_.follow(asked, entry.flight, entry.leads) ==
            Follower::Followed::answered)
            co_return;
    }
}

/// In another process: here it would have a flight.
bool ChatApi::runs_elsewhere(const core::RecordPtr& record, const Question& question) const {
    return record && record->status == core::Status::processing &&
           record->lease_end > engine_.store_now() &&
           record->fingerprint.matches(question.fingerprint);
}

/// Whoever only asks again for what is decided, or runs already, waits for nobody's turn.
bool ChatApi::needs_no_turn(const core::RecordPtr& record, const Question& question) const {
    if (!record) return false;
    return record->status == core::Status::completed || record->status == core::Status::unknown ||
           record->status == core::Status::dead || record->final ||
           !record->fingerprint.matches(question.fingerprint) || runs_elsewhere(record, question);
}

Task<std::optional<std::unique_ptr<engine::LeaseGuard>>> ChatApi::take_turn(
    FlightPtr flight, const Question& question) {
    Loop& loop = engine_.loop();
    core::Policy policy;
    policy.retention_failed = state_.config.engine.retention_failed;
    core::Fingerprint any;  // every turn of a session is the same "request": the lease itself
    any.raw = question.turn;
    for (;;) {
        const std::uint64_t seen = state_.turns_changed.version();
        auto acquired = co_await engine_.acquire(
            {.key = question.turn, .fingerprint = any, .policy = policy, .label = "turn"});
        if (!acquired) {
            state_.flights.leave(question.key, flight);
            flight->break_off(store_problem(acquired.error()));
            co_return nullptr;
        }
        if (acquired->lease) co_return std::move(acquired->lease);
        if (loop.now() >= question.wait_until) {
            state_.flights.leave(question.key, flight);
            flight->break_off({.status = 409,
                               .slug = "in-flight",
                               .detail = "Another turn of this session is still running; nothing "
                                         "was begun for this one. Try again with the same id.",
                               .retry_after_s = 1,
                               .should_retry = true,
                               .state = "PROCESSING"});
            co_return nullptr;
        }
        const auto* taken = std::get_if<core::InFlight>(&*acquired->refused);
        if (taken != nullptr && taken->owner.id != engine_.options().owner.id) {
            // Another process has the turn: perhaps for this very request, asked there as well.
            const auto known = co_await engine_.get(question.key);
            if (known && needs_no_turn(*known, question)) co_return std::nullopt;
        }
        co_await state_.turns_changed.wait(loop, seen,
                                           std::min(question.wait_until, loop.now() + turn_poll));
    }
}

Task<> ChatApi::own_turn(FlightPtr flight, std::shared_ptr<Question> question) {
    const auto call_of = [&] {
        Call call;
        call.key = question->key;
        call.fingerprint = question->fingerprint;
        call.route = question->route;
        call.upstream = question->upstream;
        call.target = "/v1/chat/completions";
        call.headers = question->forwarded_headers;
        call.has_own_body = true;
        call.label = "chat";
        call.shape =
            std::make_unique<ChatShape>(ChatShape::Asked{.request_id = question->id,
                                                         .model = question->model,
                                                         .user_content = question->content,
                                                         .conversation = question->conversation});
        call.turn = std::make_shared<const core::Append>(
            core::Append{.conversation = question->conversation,
                         .request_id = question->id,
                         .user_content = question->content});
        call.tenant = tenant_tag(state_.hmac, question->tenant);
        if (state_.draining.load(std::memory_order_relaxed)) {
            call.refused = Problem{.status = 503,
                                   .slug = "draining",
                                   .detail = "This gateway is shutting down. Try again.",
                                   .retry_after_s = 1,
                                   .should_retry = true};
        } else if (question->model.empty()) {
            call.refused = bad_request(
                "The request names no 'model' and the configuration has none for /api/chat.");
        } else if (question->upstream == nullptr) {
            call.refused =
                Problem{.status = 404,
                        .slug = "model-not-found",
                        .detail = "No configured upstream serves the model of this request.",
                        .should_retry = false};
        }
        return call;
    };
    auto known = co_await engine_.get(question->key);
    std::unique_ptr<engine::LeaseGuard> turn;
    while (!turn) {
        if (known && needs_no_turn(*known, *question)) {
            Call call = call_of();
            call.runs_elsewhere = runs_elsewhere(*known, *question);
            // Else it is decided; between this look and an acquire that may change, and this call
            // has no history.
            call.look_only = !call.runs_elsewhere;
            co_await owner_.run(flight, call);
            co_return;
        }
        auto taken = co_await take_turn(flight, *question);
        if (!taken) {
            known = co_await engine_.get(question->key);
            continue;
        }
        if (!*taken) co_return;
        turn = std::move(*taken);
    }
    auto history =
        co_await engine_.ask({question->conversation, core::GetConversation{question->id}});
    bool holds_id = false;
    std::uint64_t turns = 0;
    if (history) {
        if (const auto* found = std::get_if<core::ConversationFound>(&history->outcome)) {
            holds_id = found->holds_id;
            turns = found->conversation.turns;
        }
    }
    if (holds_id)
        known = co_await engine_.get(question->key);  // decided while the turn was waited for?
    std::vector<core::Turn> recent;
    if (history && turns > 0 && !holds_id) {
        auto read = co_await engine_.ask(
            {question->conversation, core::GetTurns{.limit = history_turns_max, .newest = true}},
            tenant_tag(state_.hmac, question->tenant));
        if (read) {
            if (auto* found = std::get_if<core::TurnsFound>(&read->outcome))
                recent = std::move(found->turns);
            std::erase_if(recent, engine::erased);
        } else {
            history = read.error();
        }
    }
    if (!history || !known) {
        state_.flights.leave(question->key, flight);
        flight->break_off(store_problem(!history ? history.error() : known.error()));
    } else if (holds_id && !*known) {
        state_.flights.leave(question->key, flight);
        flight->break_off(
            {.status = 409,
             .slug = "expired",
             .detail =
                 "This session holds the turn of this id already, and its answer's record has "
                 "expired. It is not asked a second time; read it in the session's messages.",
             .should_retry = false});
    } else {
        Call call = call_of();
        std::string& body = call.own_body;
        body = R"({"model":)";
        base::append_json_string(body, question->model);
        body += R"(,"messages":[)";
        std::size_t bytes = question->content.size();
        auto first = recent.end();
        while (first != recent.begin() && bytes + std::prev(first)->user_content.size() +
                                                  std::prev(first)->answer_content.size() <=
                                              history_max_bytes) {
            --first;
            bytes += first->user_content.size() + first->answer_content.size();
        }
        const auto message = [&body](std::string_view role, std::string_view content) {
            body += R"({"role":")";
            body += role;
            body += R"(","content":)";
            base::append_json_string(body, content);
            body += '}';
        };
        for (; first != recent.end(); ++first) {
            message("user", first->user_content);
            body += ',';
            message("assistant", first->answer_content);
            body += ',';
        }
        message("user", question->content);
        body += ']';
        if (question->stream) {
            body += R"(,"stream":true)";
            if (question->upstream != nullptr &&
                question->upstream->config->stream_usage == config::StreamUsage::inject) {
                body += R"(,"stream_options":{"include_usage":true})";
            }
        }
        body += '}';
        co_await owner_.run(flight, call);
    }
    co_await engine_.release(*turn);
    state_.turns_changed.notify();
}

}  // namespace semel::gateway
