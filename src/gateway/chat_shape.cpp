#include "gateway/chat_shape.hpp"

#include "base/json_scan.hpp"

namespace semel::gateway {

namespace {

void number_or_null(std::string& out, std::int64_t value) {
    out += value < 0 ? "null" : std::to_string(value);
}

/// An upstream's refusal keeps its code where a client can act on it; what is wrong on our side of
/// the upstream is 502.
int chat_status(int upstream_status) {
    switch (upstream_status) {
        case 400:
        case 413:
        case 422:
        case 429:
        case 503:
        case 529:
            return upstream_status;
        default:
            return 502;
    }
}

}  // namespace

// `fromCache` stands first: it is the one place that differs between this answer and its replays
// (mark_from_cache).
std::string ChatShape::object() const {
    std::string out = R"({"fromCache":false,"requestId":)";
    base::append_json_string(out, asked_.request_id);
    out += R"(,"status":"COMPLETED","content":)";
    base::append_json_string(out, content_);
    out += R"(,"model":)";
    base::append_json_string(out, usage_.model);
    out += R"(,"usage":{"inputTokens":)";
    number_or_null(out, usage_.input_tokens);
    out += R"(,"outputTokens":)";
    number_or_null(out, usage_.output_tokens);
    out += R"(},"attempt":)" + std::to_string(attempt_) + "}";
    return out;
}

AnswerShape::Piece ChatShape::on_event(std::string_view, std::string_view event,
                                       std::string_view data) {
    const openai::EventMeaning meaning = openai::read_event(event, data, usage_);
    Piece piece{.terminal = meaning.terminal, .error = meaning.error};
    if (meaning.terminal) {
        piece.bytes = "event: done\ndata: " + object() + "\n\n";
    } else if (!meaning.error) {
        const std::string text = openai::delta_text(data);
        if (!text.empty()) {
            content_ += text;
            piece.bytes = "event: delta\ndata: {\"content\": ";
            base::append_json_string(piece.bytes, text);
            piece.bytes += "}\n\n";
        }
    }
    return piece;
}

AnswerHead ChatShape::stream_head(AnswerHead) {
    return {.status = 200, .content_type = "text/event-stream"};
}

std::optional<AnswerShape::Rendered> ChatShape::on_answer(AnswerHead, std::string body) {
    if (!openai::read_answer(body, usage_)) return std::nullopt;
    auto text = openai::answer_text(body);
    if (!text) return std::nullopt;
    content_ = std::move(*text);
    return Rendered{{.status = 200, .content_type = "application/json"}, object()};
}

AnswerShape::Rendered ChatShape::on_failure(AnswerHead upstream, std::string body) {
    Problem problem{
        .status = chat_status(upstream.status), .slug = "upstream-failed", .state = "FAILED"};
    if (upstream.status == 429 || upstream.status == 503 || upstream.status == 529)
        problem.should_retry = true;
    problem.detail = "The AI service answered " + std::to_string(upstream.status) + ".";
    if (upstream.status >= 200 && upstream.status <= 299) {
        problem.detail = "The AI service's answer is an error or cannot be read.";
    } else if (const auto members = base::top_level_members(body)) {
        // Its own words help the client more than ours; they are the upstream's, not the request's
        // content.
        if (const auto error = base::find_member(*members, "error")) {
            if (const auto inner = base::top_level_members(*error)) {
                if (const auto message = base::find_member(*inner, "message")) {
                    if (const auto text = base::json_string(*message))
                        problem.detail += " It says: " + *text;
                }
            }
        }
    }
    Rendered rendered = on_problem(problem);
    // Retry-After among them, as it came.
    rendered.head.kept_headers += upstream.kept_headers;
    rendered.head.from_gateway = false;
    return rendered;
}

AnswerShape::Rendered ChatShape::on_problem(const Problem& problem) {
    Problem own = problem;
    own.request_id = asked_.request_id;
    AnswerHead head;
    head.status = own.status;
    head.content_type = content_type_of(Shape::problem_json);
    head.kept_headers = header_lines(own);
    head.from_gateway = true;
    return {std::move(head), render(own, Shape::problem_json)};
}

std::optional<std::string> ChatShape::broken_tail(const Problem& problem) {
    Problem own = problem;
    own.request_id = asked_.request_id;
    return "event: error\ndata: " + render(own, Shape::problem_json) + "\n\n";
}

std::optional<core::Append> ChatShape::append() const {
    return core::Append{.conversation = asked_.conversation,
                        .request_id = asked_.request_id,
                        .user_content = asked_.user_content,
                        .answer_content = content_};
}

}  // namespace semel::gateway
