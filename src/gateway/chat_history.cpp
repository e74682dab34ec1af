// What /api/chat tells of the past: the state of a request, a session and its messages; and how a
// session is forgotten.
#include <algorithm>

#include "base/json_scan.hpp"
#include "gateway/chat_api.hpp"
#include "gateway/chat_parts.hpp"
#include "gateway/chat_shape.hpp"
#include "gateway/protected.hpp"

namespace semel::gateway {

namespace {

constexpr std::uint32_t messages_limit_default = 100;
constexpr std::uint32_t messages_limit_max = 1000;

Task<> respond_json(http::Exchange& exchange, int status, std::string body,
                    std::string extra_headers = {}) {
    http::ResponseHead head{.status = status};
    head.add("Content-Type", "application/json");
    head.headers += "Cache-Control: no-store\r\n";
    head.headers += extra_headers;
    co_await exchange.respond(head, body);
}

}  // namespace

Task<> ChatApi::status(http::Exchange& exchange, const Caller& caller, std::string user,
                       std::string request_id) {
    const auto session = query_value(exchange.head().query, "sessionId");
    if (!session || session->empty() || session->size() > core::key_part_max_bytes) {
        co_await respond_problem(exchange, bad_request("Give the session: ?sessionId=…"),
                                 Shape::problem_json);
        co_return;
    }
    if (request_id.size() > core::key_part_max_bytes) {
        co_await respond_problem(exchange, not_found("This request"), Shape::problem_json);
        co_return;
    }
    const core::StoredKey key = stored_key(state_.hmac, {.tenant = caller.tenant,
                                                         .operation = "chat",
                                                         .user = user,
                                                         .session = *session,
                                                         .id = request_id});
    auto found = co_await engine_.get(key);
    if (found && *found && (*found)->status == core::Status::processing &&
        (*found)->lease_end <= engine_.store_now()) {
        // Its owner is dead. Asking settles it, so that nobody polls a dead call for ever.
        auto settled = co_await engine_.ask({key, core::Settle{(*found)->token}});
        if (settled) found = co_await engine_.get(key);
    }
    if (!found) {
        co_await respond_problem(exchange, store_problem(found.error()), Shape::problem_json);
        co_return;
    }
    std::string out = R"({"requestId":)";
    base::append_json_string(out, request_id);
    const core::RecordPtr record = *found;
    if (!record) {
        // Waiting for its turn, it has no record yet, but it is not unknown either.
        const FlightPtr flight = state_.flights.find(key);
        if (!flight) {
            co_await respond_problem(exchange, not_found("This request"), Shape::problem_json);
            co_return;
        }
        out += R"(,"status":"PROCESSING","message":"The request waits for its turn.","attempt":0})";
        co_await respond_json(exchange, 200, std::move(out), "Retry-After: 1\r\n");
        co_return;
    }
    switch (record->status) {
        case core::Status::processing:
            out +=
                R"(,"status":"PROCESSING","message":"The request is being processed.","attempt":)" +
                std::to_string(record->attempt) + "}";
            co_await respond_json(exchange, 200, std::move(out), "Retry-After: 1\r\n");
            co_return;
        case core::Status::completed: {
            std::string body;
            if (record->answer && record->answer->body_kind == core::BodyKind::inline_body &&
                record->answer->body) {
                body = *record->answer->body;
            }
            if (record->answer && record->answer->stream) {
                // A streamed answer's object is the data of its closing event.
                constexpr std::string_view done = "event: done\ndata: ";
                const auto at = body.rfind(done);
                body = at == std::string::npos ? std::string{} : body.substr(at + done.size());
                while (!body.empty() && body.back() == '\n') body.pop_back();
            }
            if (body.empty()) {
                const bool erased = record->answer && record->answer->sealed_under != 0;
                out += R"(,"status":"COMPLETED","message":")";
                out += erased ? "The answer was erased with its tenant's data."
                              : "The answer is too large for this call; ask for it with its id.";
                out += R"(","attempt":)" + std::to_string(record->attempt) + "}";
                co_await respond_json(exchange, 200, std::move(out));
                co_return;
            }
            co_await respond_json(exchange, 200, mark_from_cache(body));
            co_return;
        }
        case core::Status::failed:
        case core::Status::dead: {
            const bool again = record->status == core::Status::failed && !record->final;
            out += R"(,"status":"FAILED","errorMessage":)";
            std::string message = record->failure.message.empty()
                                      ? "the attempt did not end in an answer"
                                      : record->failure.message;
            message += again ? "; submit again with the same id" : "; it is final";
            base::append_json_string(out, message);
            out += R"(,"errorCode":)";
            base::append_json_string(out, record->failure.code);
            out += R"(,"attempt":)" + std::to_string(record->attempt) + "}";
            co_await respond_json(exchange, 200, std::move(out));
            co_return;
        }
        case core::Status::unknown:
            out +=
                R"(,"status":"UNKNOWN","errorMessage":"The AI service may have processed the request, and no usable answer came; it is held until somebody decides.","attempt":)" +
                std::to_string(record->attempt) + "}";
            co_await respond_json(exchange, 200, std::move(out));
            co_return;
    }
}

Task<> ChatApi::session(http::Exchange& exchange, const Caller& caller, std::string user,
                        std::string session) {
    if (session.size() > core::key_part_max_bytes) {
        co_await respond_problem(exchange, not_found("This session"), Shape::problem_json);
        co_return;
    }
    auto read = co_await engine_.ask(
        {conversation_key(state_.hmac, caller.tenant, user, session), core::GetConversation{}});
    if (!read) {
        co_await respond_problem(exchange, store_problem(read.error()), Shape::problem_json);
        co_return;
    }
    const auto* found = std::get_if<core::ConversationFound>(&read->outcome);
    if (found == nullptr) {
        co_await respond_problem(exchange, not_found("This session"), Shape::problem_json);
        co_return;
    }
    std::string out = R"({"sessionId":)";
    base::append_json_string(out, session);
    out += R"(,"createdAt":")" + rfc3339(found->conversation.created) + R"(","lastUsedAt":")" +
           rfc3339(found->conversation.last_used) + R"(","turns":)" +
           std::to_string(found->conversation.turns) + "}";
    co_await respond_json(exchange, 200, std::move(out));
}

Task<> ChatApi::messages(http::Exchange& exchange, const Caller& caller, std::string user,
                         std::string session) {
    const std::string_view query = exchange.head().query;
    const auto after_text = query_value(query, "after");
    const auto limit_text = query_value(query, "limit");
    const auto after = number(after_text);
    const auto limit = number(limit_text);
    if ((after_text && !after) || (limit_text && (!limit || *limit == 0))) {
        co_await respond_problem(exchange,
                                 bad_request("'after' must be a message number (the last answer's "
                                             "'next'), 'limit' a number from 1."),
                                 Shape::problem_json);
        co_return;
    }
    if (session.size() > core::key_part_max_bytes) {
        co_await respond_problem(exchange, not_found("This session"), Shape::problem_json);
        co_return;
    }
    const core::StoredKey key = conversation_key(state_.hmac, caller.tenant, user, session);
    const auto wanted = static_cast<std::uint32_t>(
        std::min<std::uint64_t>(limit.value_or(messages_limit_default), messages_limit_max));
    // Messages are numbered 2n-1 (user) and 2n (assistant) for turn n; a page ends with a whole
    // turn.
    const std::uint64_t after_turn = after.value_or(0) / 2;
    auto head = co_await engine_.ask({key, core::GetConversation{}});
    auto read =
        co_await engine_.ask({key, core::GetTurns{.after = after_turn, .limit = (wanted + 1) / 2}},
                             tenant_tag(state_.hmac, caller.tenant));
    if (!read || !head) {
        co_await respond_problem(exchange, store_problem(!read ? read.error() : head.error()),
                                 Shape::problem_json);
        co_return;
    }
    const auto* conversation = std::get_if<core::ConversationFound>(&head->outcome);
    const auto* turns = std::get_if<core::TurnsFound>(&read->outcome);
    if (conversation == nullptr || turns == nullptr) {
        co_await respond_problem(exchange, not_found("This session"), Shape::problem_json);
        co_return;
    }
    std::string out = R"({"messages":[)";
    bool first = true;
    for (const core::Turn& turn : turns->turns) {
        for (const bool of_user : {true, false}) {
            if (of_user && after.value_or(0) >= turn.number * 2 - 1) continue;
            if (!first) out += ',';
            first = false;
            const std::string_view role = of_user ? R"("role":"user")" : R"("role":"assistant")";
            if (engine::erased(turn)) {
                out += R"({"requestId":null,)";
                out += role;
                out += R"(,"content":null,"erased":true)";
            } else {
                out += R"({"requestId":)";
                base::append_json_string(out, turn.request_id);
                out += ',';
                out += role;
                out += R"(,"content":)";
                base::append_json_string(out, of_user ? turn.user_content : turn.answer_content);
            }
            out += R"(,"at":")" + rfc3339(turn.at) + '"';
            if (turn.late) out += R"(,"late":true)";
            out += '}';
        }
    }
    out += R"(],"next":)";
    const bool more =
        !turns->turns.empty() && turns->turns.back().number < conversation->conversation.turns;
    out += more ? std::to_string(turns->turns.back().number * 2) : "null";
    out += '}';
    co_await respond_json(exchange, 200, std::move(out));
}

Task<> ChatApi::forget(http::Exchange& exchange, const Caller& caller, std::string user,
                       std::string session) {
    if (session.size() > core::key_part_max_bytes) {
        co_await respond_problem(exchange, not_found("This session"), Shape::problem_json);
        co_return;
    }
    // The turn is taken for the deletion, so that no answer is appended to what was just deleted.
    core::Fingerprint any;
    any.raw = turn_key(state_.hmac, caller.tenant, user, session);
    core::Policy policy;
    policy.retention_failed = state_.config.engine.retention_failed;
    const core::StoredKey conversation =
        conversation_key(state_.hmac, caller.tenant, user, session);
    auto known = co_await engine_.ask({conversation, core::GetConversation{}});
    if (known && !std::holds_alternative<core::ConversationFound>(known->outcome)) {
        co_await respond_problem(exchange, not_found("This session"), Shape::problem_json);
        co_return;
    }
    auto turn = co_await engine_.acquire(
        {.key = any.raw, .fingerprint = any, .policy = policy, .label = "turn"});
    if (!known || !turn) {
        co_await respond_problem(exchange, store_problem(!known ? known.error() : turn.error()),
                                 Shape::problem_json);
        co_return;
    }
    if (!turn->lease) {
        co_await respond_problem(
            exchange,
            {.status = 409,
             .slug = "in-flight",
             .detail = "A turn of this session is running. Delete it when the turn has ended.",
             .retry_after_s = 1,
             .should_retry = true,
             .state = "PROCESSING"},
            Shape::problem_json);
        co_return;
    }
    auto deleted = co_await engine_.ask({conversation, core::DeleteConversation{}});
    co_await engine_.release(*turn->lease);
    state_.turns_changed.notify();
    if (!deleted) {
        co_await respond_problem(exchange, store_problem(deleted.error()), Shape::problem_json);
        co_return;
    }
    http::ResponseHead out{.status = 204};
    co_await exchange.respond(out, std::string_view{});
}

}  // namespace semel::gateway
