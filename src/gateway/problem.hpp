// Errors as clients see them: one description, rendered in the shape of the route that was asked.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace semel::gateway {

struct Problem {
    int status = 500;
    std::string slug;                  ///< One of docs/reference/errors.md, e.g. `key-reused`.
    std::string detail;                ///< What happened and what to do. No content of the request.
    std::optional<int> retry_after_s;  ///< Seconds, at most 60: SDKs ignore more.
    std::optional<bool> should_retry;  ///< x-should-retry: overrides the SDKs' own rule.
    std::vector<std::string> differs;  ///< Names of members, for `key-reused`.
    std::string intent;                ///< Semel-Intent, where one is known.
    std::string state;                 ///< PROCESSING, FAILED, UNKNOWN, where one is known.
    std::string request_id;            ///< /api/chat only.
    bool safe_new_key = false;         ///< A new id cannot lead to a second effect.
};

enum class Shape {
    openai,        ///< {"error": {"message", "type", "param", "code"}}
    problem_json,  ///< RFC 9457 plus requestId, state, message
};

/// The body, and its content type.
std::string render(const Problem& problem, Shape shape);
std::string_view content_type_of(Shape shape);
/// Ready header lines: Retry-After, x-should-retry, Link where they apply.
std::string header_lines(const Problem& problem);

/// The Retry-After of an answer that says "still running": the whole seconds it has run so
/// far, 1..8, so that an SDK's two retries span more than its time-out.
int running_retry_after_s(std::chrono::microseconds running_for);

}  // namespace semel::gateway
