#include "gateway/problem.hpp"

#include <algorithm>

#include "base/json_scan.hpp"
#include "http/message.hpp"

namespace semel::gateway {
namespace {

constexpr std::string_view problem_base = "https://semel.dev/problems/";

std::string_view openai_type(int status) {
    switch (status) {
        case 401:
            return "authentication_error";
        case 403:
            return "permission_error";
        case 409:
            return "conflict_error";
        case 429:
            return "rate_limit_error";
        default:
            return status >= 500 ? "api_error" : "invalid_request_error";
    }
}

std::string title_of(const std::string& slug) {
    std::string title = slug;
    std::replace(title.begin(), title.end(), '-', ' ');
    if (!title.empty() && title[0] >= 'a' && title[0] <= 'z')
        title[0] = static_cast<char>(title[0] - 'a' + 'A');
    return title;
}

void member(std::string& out, std::string_view name, std::string_view value) {
    if (out.back() != '{') out += ',';
    base::append_json_string(out, name);
    out += ':';
    base::append_json_string(out, value);
}

void raw_member(std::string& out, std::string_view name, std::string_view value) {
    if (out.back() != '{') out += ',';
    base::append_json_string(out, name);
    out += ':';
    out += value;
}

}  // namespace

std::string render(const Problem& problem, Shape shape) {
    std::string out = "{";
    if (shape == Shape::openai) {
        std::string code = problem.slug;
        std::replace(code.begin(), code.end(), '-', '_');
        std::string error = "{";
        member(error, "message", problem.detail);
        member(error, "type", openai_type(problem.status));
        if (problem.differs.size() == 1) {
            member(error, "param", problem.differs.front());
        } else {
            raw_member(error, "param", "null");
        }
        member(error, "code", code);
        error += '}';
        raw_member(out, "error", error);
        out += '}';
        return out;
    }
    member(out, "type", std::string(problem_base) + problem.slug);
    member(out, "title", title_of(problem.slug));
    raw_member(out, "status", std::to_string(problem.status));
    member(out, "detail", problem.detail);
    member(out, "message", problem.detail);
    if (!problem.request_id.empty()) member(out, "requestId", problem.request_id);
    if (!problem.intent.empty()) member(out, "intent", problem.intent);
    if (!problem.state.empty()) member(out, "state", problem.state);
    raw_member(out, "retryable",
               problem.should_retry.value_or(problem.retry_after_s.has_value()) ? "true" : "false");
    raw_member(out, "safe_new_key", problem.safe_new_key ? "true" : "false");
    if (!problem.differs.empty()) {
        std::string names = "[";
        for (const std::string& name : problem.differs) {
            if (names.size() > 1) names += ',';
            base::append_json_string(names, name);
        }
        raw_member(out, "differs", names + "]");
    }
    out += '}';
    return out;
}

std::string_view content_type_of(Shape shape) {
    return shape == Shape::openai ? "application/json" : "application/problem+json";
}

std::string header_lines(const Problem& problem) {
    std::string out;
    if (problem.retry_after_s) {
        out += "Retry-After: " + std::to_string(std::clamp(*problem.retry_after_s, 1, 60)) + "\r\n";
    }
    if (problem.should_retry) {
        out += *problem.should_retry ? "x-should-retry: true\r\n" : "x-should-retry: false\r\n";
    }
    return out;
}

int running_retry_after_s(std::chrono::microseconds running_for) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(running_for).count();
    return static_cast<int>(std::clamp<std::int64_t>(seconds, 1, 8));
}

}  // namespace semel::gateway
