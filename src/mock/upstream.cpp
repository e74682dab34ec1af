#include "mock/upstream.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <vector>

#include "base/json_scan.hpp"

namespace semel::mock {

using http::Exchange;
using http::ResponseHead;
using http::Task;

namespace {

constexpr std::uint64_t body_max_bytes = 256ull << 20;
constexpr std::uint64_t download_max_bytes = 1ull << 40;
constexpr std::uint64_t content_max_bytes = 1ull << 30;
constexpr milliseconds wait_max{std::chrono::hours{1}};
constexpr milliseconds stall_step{20};
/// Fixed, so that equal calls get equal answers.
constexpr std::string_view created = "1700000000";

/// The words between dashes.
std::vector<std::string_view> parts_of(std::string_view model) {
    std::vector<std::string_view> parts;
    while (true) {
        const std::size_t dash = model.find('-');
        parts.push_back(model.substr(0, dash));
        if (dash == std::string_view::npos) return parts;
        model.remove_prefix(dash + 1);
    }
}

std::optional<std::uint64_t> number_of(std::string_view text) {
    std::uint64_t value = 0;
    const auto [after, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (text.empty() || error != std::errc() || after != text.data() + text.size())
        return std::nullopt;
    return value;
}

milliseconds wait_of(std::uint64_t ms) {
    return milliseconds(std::min(ms, static_cast<std::uint64_t>(wait_max.count())));
}

bool is_status(std::uint64_t value) { return value >= 200 && value <= 599; }

std::uint64_t words_in(std::string_view text) {
    std::uint64_t words = 0;
    bool in_word = false;
    for (const char c : text) {
        const bool blank = c == ' ' || c == '\n' || c == '\t' || c == '\r';
        if (!blank && !in_word) ++words;
        in_word = !blank;
    }
    return words;
}

/// Words of all texts in `messages`, plus three a message for its frame.
std::uint64_t prompt_tokens_of(std::string_view messages) {
    std::uint64_t tokens = 0;
    const auto elements = base::array_elements(messages);
    if (!elements) return 0;
    for (const std::string_view element : *elements) {
        const auto members = base::top_level_members(element);
        const auto content = members ? base::find_member(*members, "content") : std::nullopt;
        if (!content) continue;
        tokens += 3;
        if (const auto text = base::json_string(*content)) {
            tokens += words_in(*text);
            continue;
        }
        const auto parts = base::array_elements(*content);
        if (!parts) continue;
        for (const std::string_view part : *parts) {
            const auto fields = base::top_level_members(part);
            const auto raw = fields ? base::find_member(*fields, "text") : std::nullopt;
            const auto text = raw ? base::json_string(*raw) : std::nullopt;
            if (text) tokens += words_in(*text);
        }
    }
    return tokens;
}

std::string usage_json(std::uint64_t prompt, std::uint64_t completion) {
    return "{\"prompt_tokens\":" + std::to_string(prompt) +
           ",\"completion_tokens\":" + std::to_string(completion) +
           ",\"total_tokens\":" + std::to_string(prompt + completion) +
           ",\"prompt_tokens_details\":{\"cached_tokens\":0},\"completion_tokens_details\":{"
           "\"reasoning_tokens\":0}}";
}

std::string error_json(std::string_view message, std::string_view type, std::string_view code) {
    std::string out = "{\"error\":{\"message\":";
    base::append_json_string(out, message);
    out += ",\"type\":";
    base::append_json_string(out, type);
    out += ",\"param\":null,\"code\":";
    base::append_json_string(out, code);
    return out + "}}";
}

ResponseHead json_head(int status, std::uint64_t number = 0) {
    ResponseHead head;
    head.status = status;
    head.add("Content-Type", "application/json");
    if (number > 0) head.add("x-request-id", "req_" + std::to_string(number));
    return head;
}

/// Everything of a chunk up to its delta.
std::string chunk_begin(std::uint64_t number, std::string_view model) {
    std::string out = "data: {\"id\":\"chatcmpl-" + std::to_string(number) +
                      "\",\"object\":\"chat.completion.chunk\",\"created\":";
    out.append(created).append(",\"model\":");
    base::append_json_string(out, model);
    return out + ",\"choices\":[";
}

/// The query's value of `name`, decoded; empty: there is none.
std::string query_value(std::string_view query, std::string_view name) {
    while (!query.empty()) {
        const std::size_t end = query.find('&');
        const std::string_view pair = query.substr(0, end);
        query.remove_prefix(end == std::string_view::npos ? query.size() : end + 1);
        const std::size_t equals = pair.find('=');
        if (pair.substr(0, equals) != name || equals == std::string_view::npos) continue;
        const std::string_view raw = pair.substr(equals + 1);
        std::string out;
        for (std::size_t i = 0; i < raw.size(); ++i) {
            unsigned byte = 0;
            if (raw[i] == '%' && i + 2 < raw.size() &&
                std::from_chars(raw.data() + i + 1, raw.data() + i + 3, byte, 16).ptr ==
                    raw.data() + i + 3) {
                out += static_cast<char>(byte);
                i += 2;
            } else {
                out += raw[i] == '+' ? ' ' : raw[i];
            }
        }
        return out;
    }
    return "";
}

}  // namespace

Behaviour behaviour_of(std::string_view model, const Defaults& defaults) {
    using Kind = Behaviour::Kind;
    Behaviour out{.latency = defaults.latency, .gap = defaults.gap, .events = defaults.length};
    const auto parts = parts_of(model);
    const auto number = [&](std::size_t i) {
        return i < parts.size() ? number_of(parts[i]) : std::nullopt;
    };
    const auto first = number(1);
    const auto with_events = [&](Kind kind) {
        if (!first || parts.size() != 2) return false;
        out.kind = kind;
        out.events = static_cast<std::uint32_t>(std::min<std::uint64_t>(*first, 1'000'000));
        return true;
    };
    if (model == "closeafterread") {
        out.kind = Kind::close_after_read;
    } else if (model == "short") {
        out.kind = Kind::short_body;
    } else if (parts[0] == "slow" && first && parts.size() == 2) {
        out.latency = wait_of(*first);
    } else if (parts[0] == "stream" && first && number(2) && parts.size() == 3) {
        out.events = static_cast<std::uint32_t>(std::min<std::uint64_t>(*first, 1'000'000));
        out.gap = wait_of(*number(2));
    } else if (parts[0] == "err" && first && parts.size() == 2 && is_status(*first)) {
        out.kind = Kind::error;
        out.status = static_cast<int>(*first);
    } else if (parts[0] == "big" && first && parts.size() == 2) {
        out.content_bytes = std::min(*first, content_max_bytes);
    } else if (parts[0] == "fail" && first && parts.size() == 5 && parts[2] == "then" &&
               parts[3] == "ok" && number(4) && is_status(*number(4))) {
        out.failures = *first;
        out.status = static_cast<int>(*number(4));
    } else if (parts[0] == "cut") {
        with_events(Kind::cut);
    } else if (parts[0] == "errevent") {
        with_events(Kind::error_event);
    } else if (parts[0] == "noterm") {
        with_events(Kind::no_terminator);
    } else if (parts[0] == "stall") {
        with_events(Kind::stall);
    }
    return out;
}

Task<> Upstream::handle(Exchange& exchange) {
    const http::RequestHead& head = exchange.head();
    const std::string_view path = head.path;
    if (path == "/calls" || path == "/script" || path == "/healthz") {
        co_await control(exchange);
        co_return;
    }
    const std::size_t version = path.find("/v1/");
    if (version == std::string_view::npos) {
        co_await exchange.respond(json_head(404),
                                  error_json("no such path; this is semel mock-upstream",
                                             "invalid_request_error", "not_found"));
        co_return;
    }
    const std::string_view resource = path.substr(version + 4);
    if (head.method == "POST" && resource == "chat/completions") {
        co_await completion(exchange);
        co_return;
    }
    if (head.method == "POST" || head.method == "PUT" || head.method == "PATCH") {
        co_await upload(exchange);
        co_return;
    }
    constexpr std::string_view files = "files/";
    constexpr std::string_view content = "/content";
    if (head.method == "GET" && resource.starts_with(files) && resource.ends_with(content) &&
        resource.size() > files.size() + content.size()) {
        const auto bytes = number_of(
            resource.substr(files.size(), resource.size() - files.size() - content.size()));
        if (bytes && *bytes <= download_max_bytes) {
            co_await download(exchange, *bytes);
            co_return;
        }
    }
    if (head.method == "GET" && resource == "models") {
        co_await exchange.respond(json_head(200),
                                  "{\"object\":\"list\",\"data\":[{\"id\":\"fast\",\"object\":"
                                  "\"model\",\"created\":1700000000,\"owned_by\":\"semel\"}]}");
        co_return;
    }
    std::string echo = "{\"object\":\"mock.echo\",\"method\":";
    base::append_json_string(echo, head.method);
    echo += ",\"target\":";
    base::append_json_string(echo, head.target);
    echo += '}';
    co_await exchange.respond(json_head(200), echo);
}

Task<> Upstream::completion(Exchange& exchange) {
    std::string body;
    const http::BodyStatus status = co_await exchange.read_body(body, body_max_bytes);
    if (status == http::BodyStatus::too_large) {
        co_await exchange.respond(json_head(413), error_json("the body is larger than 256 MiB",
                                                             "invalid_request_error", "too_large"));
    }
    if (status != http::BodyStatus::ok) co_return;
    Call call{.model = "fast"};
    const auto members = base::top_level_members(body);
    if (members) {
        if (const auto raw = base::find_member(*members, "model"))
            call.model = base::json_string(*raw).value_or("fast");
        if (const auto raw = base::find_member(*members, "stream"))
            call.stream = base::json_bool(*raw).value_or(false);
        if (const auto raw = base::find_member(*members, "messages"))
            call.prompt_tokens = prompt_tokens_of(*raw);
        const auto options = base::find_member(*members, "stream_options");
        const auto fields = options ? base::top_level_members(*options) : std::nullopt;
        const auto usage = fields ? base::find_member(*fields, "include_usage") : std::nullopt;
        call.include_usage = usage && base::json_bool(*usage).value_or(false);
    }
    call.number = state_.calls.add(exchange.head(), call.model, body, base::sha256(body));
    body = {};
    if (!members) {
        co_await exchange.respond(
            json_head(400, call.number),
            error_json("the body is not a JSON object", "invalid_request_error", "invalid_json"));
        co_return;
    }
    if (auto script = state_.scripts.find(call.model)) {
        co_await scripted(exchange, std::move(script), call.number);
        co_return;
    }
    Behaviour behaviour = behaviour_of(call.model, defaults_);
    if (behaviour.failures > 0 && state_.calls.count_of_model(call.model) <= behaviour.failures)
        behaviour.kind = Behaviour::Kind::error;
    if (behaviour.latency.count() > 0) co_await loop_.sleep_for(behaviour.latency);
    if (behaviour.kind == Behaviour::Kind::error) {
        ResponseHead head = json_head(behaviour.status, call.number);
        if (behaviour.status == 429 || behaviour.status == 503) head.add("Retry-After", "1");
        co_await exchange.respond(
            head, error_json("upstream says no to call " + std::to_string(call.number),
                             "mock_error", "mock"));
    } else if (behaviour.kind == Behaviour::Kind::close_after_read) {
        exchange.begin(json_head(200, call.number));
        exchange.cut();
    } else if (call.stream) {
        co_await stream(exchange, call, behaviour);
    } else {
        co_await plain(exchange, call, behaviour);
    }
}

Task<> Upstream::plain(Exchange& exchange, const Call& call, const Behaviour& behaviour) {
    std::string text = "answer of call " + std::to_string(call.number);
    if (text.size() < behaviour.content_bytes) {
        text += ' ';
        text.resize(std::max<std::size_t>(text.size(), behaviour.content_bytes), 'x');
    }
    std::string body = "{\"id\":\"chatcmpl-" + std::to_string(call.number) +
                       "\",\"object\":\"chat.completion\",\"created\":";
    body.append(created).append(",\"model\":");
    base::append_json_string(body, call.model);
    body += ",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"";
    body += text;  // digits and ASCII letters: nothing to escape
    body += "\",\"refusal\":null},\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":";
    body += usage_json(call.prompt_tokens, words_in(text));
    body += '}';
    const ResponseHead head = json_head(200, call.number);
    using Kind = Behaviour::Kind;
    switch (behaviour.kind) {
        case Kind::short_body:
        case Kind::cut:
            exchange.begin(head, body.size() + (behaviour.kind == Kind::cut ? 0 : 100));
            if (behaviour.kind == Kind::cut) body.resize(body.size() / 2);
            co_await exchange.write(body);
            exchange.cut();
            break;
        case Kind::stall:
            exchange.begin(head, body.size());
            co_await exchange.write(std::string_view(body).substr(0, body.size() / 2));
            co_await stall(exchange);
            break;
        case Kind::normal:
        case Kind::error_event:
        case Kind::no_terminator:
        case Kind::error:
        case Kind::close_after_read:
            co_await exchange.respond(head, body);
    }
}

Task<> Upstream::stream(Exchange& exchange, const Call& call, const Behaviour& behaviour) {
    using Kind = Behaviour::Kind;
    ResponseHead head;
    head.add("Content-Type", "text/event-stream; charset=utf-8");
    head.add("Cache-Control", "no-cache");
    head.add("x-request-id", "req_" + std::to_string(call.number));
    exchange.begin(head);
    const std::string begin = chunk_begin(call.number, call.model);
    const std::string_view end = call.include_usage ? "],\"usage\":null}\n\n" : "]}\n\n";
    for (std::uint32_t i = 0; i < behaviour.events; ++i) {
        std::string event = begin;
        event += "{\"index\":0,\"delta\":{";
        if (i == 0) event += "\"role\":\"assistant\",";
        event += "\"content\":\"call" + std::to_string(call.number) + " w" + std::to_string(i) +
                 " é中🙂 \"},\"logprobs\":null,\"finish_reason\":null}";
        event += end;
        const bool taken = co_await exchange.write(event);
        if (!taken) co_return;
        if (behaviour.gap.count() > 0) co_await loop_.sleep_for(behaviour.gap);
    }
    switch (behaviour.kind) {
        case Kind::cut:
        case Kind::short_body:
            exchange.cut();
            co_return;
        case Kind::stall:
            co_await stall(exchange);
            co_return;
        case Kind::no_terminator:
            co_await exchange.finish();
            co_return;
        case Kind::error_event:
            co_await exchange.finish(
                "data: "
                "{\"error\":{\"message\":\"overloaded\",\"type\":\"overloaded_error\",\"param\":"
                "null,\"code\":null}}\n\n");
            co_return;
        case Kind::normal:
        case Kind::error:
        case Kind::close_after_read:
            break;
    }
    std::string last =
        begin + "{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\"}";
    last += end;
    const bool taken = co_await exchange.write(last);
    if (!taken) co_return;
    if (call.include_usage) {
        const std::string usage =
            begin +
            "],\"usage\":" + usage_json(call.prompt_tokens, std::uint64_t{behaviour.events} * 3) +
            "}\n\n";
        const bool usage_taken = co_await exchange.write(usage);
        if (!usage_taken) co_return;
    }
    co_await exchange.finish("data: [DONE]\n\n");
}

Task<> Upstream::scripted(Exchange& exchange, std::shared_ptr<const Script> script,
                          std::uint64_t number) {
    ResponseHead head;
    head.status = script->status;
    head.headers = script->headers;
    head.add("Content-Type", script->content_type);
    head.add("x-request-id", "req_" + std::to_string(number));
    exchange.begin(head);
    for (const std::string& chunk : script->chunks) {
        const bool taken = chunk.empty() || co_await exchange.write(chunk);
        if (!taken) co_return;
        if (script->gap.count() > 0) co_await loop_.sleep_for(script->gap);
    }
    switch (script->end) {
        case Script::End::finish:
            co_await exchange.finish();
            break;
        case Script::End::cut:
            exchange.cut();
            break;
        case Script::End::stall:
            co_await stall(exchange);
            break;
    }
}

Task<> Upstream::stall(Exchange& exchange) {
    const auto give_up = loop_.now() + wait_max;
    while (!exchange.client_gone() && loop_.now() < give_up) co_await loop_.sleep_for(stall_step);
    exchange.cut();
}

Task<> Upstream::upload(Exchange& exchange) {
    constexpr std::size_t kept_of_uploads = 4096;
    base::Sha256 hash;
    std::uint64_t received = 0;
    std::string begin;
    while (true) {
        const http::BodyPiece piece = co_await exchange.read_some();
        if (piece.status != http::BodyStatus::ok) co_return;
        if (piece.bytes.empty()) break;
        received += piece.bytes.size();
        hash.update(piece.bytes);
        if (begin.size() < kept_of_uploads)
            begin += piece.bytes.substr(0, kept_of_uploads - begin.size());
    }
    const base::Digest digest = hash.finish();
    const std::uint64_t number = state_.calls.add(exchange.head(), "", begin, digest);
    const std::string answer = "{\"received_bytes\":" + std::to_string(received) +
                               ",\"sha256\":\"" + base::hex(digest.view()) +
                               "\",\"call\":" + std::to_string(number) + "}";
    co_await exchange.respond(json_head(200, number), answer);
}

Task<> Upstream::download(Exchange& exchange, std::uint64_t bytes) {
    static const std::string piece(64 * 1024, 'd');
    ResponseHead head;
    head.add("Content-Type", "application/octet-stream");
    exchange.begin(head, bytes);
    while (bytes > 0) {
        const std::size_t n = std::min<std::uint64_t>(bytes, piece.size());
        const bool taken = co_await exchange.write(std::string_view(piece).substr(0, n));
        if (!taken) co_return;
        bytes -= n;
    }
    co_await exchange.finish();
}

Task<> Upstream::control(Exchange& exchange) {
    const http::RequestHead& head = exchange.head();
    if (head.path == "/healthz") {
        co_await exchange.respond(json_head(200), "{\"status\":\"ok\"}");
    } else if (head.path == "/calls" && head.method == "GET") {
        co_await exchange.respond(json_head(200),
                                  state_.calls.json(query_value(head.query, "contains"),
                                                    query_value(head.query, "model")));
    } else if (head.path == "/calls" && head.method == "DELETE") {
        state_.calls.reset();
        co_await exchange.respond(json_head(200), "{\"total\":0}");
    } else if (head.path == "/script" && head.method == "DELETE") {
        state_.scripts.reset();
        co_await exchange.respond(json_head(200), "{\"scripts\":0}");
    } else if (head.path == "/script" && head.method == "POST") {
        std::string body;
        const http::BodyStatus status = co_await exchange.read_body(body, body_max_bytes);
        if (status != http::BodyStatus::ok) {
            if (status == http::BodyStatus::too_large)
                co_await exchange.respond(json_head(413),
                                          error_json("too large", "mock", "too_large"));
            co_return;
        }
        auto script = parse_script(body);
        if (!script) {
            co_await exchange.respond(
                json_head(400),
                error_json("a script is {\"model\": \"m\", \"chunks\": [\"base64\", ...]}", "mock",
                           "bad_script"));
            co_return;
        }
        state_.scripts.put(std::move(*script));
        co_await exchange.respond(json_head(200), "{\"registered\":true}");
    } else {
        co_await exchange.respond(
            json_head(405),
            error_json("use GET or DELETE /calls, POST or DELETE /script", "mock", "method"));
    }
}

}  // namespace semel::mock
