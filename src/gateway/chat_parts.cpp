#include "gateway/chat_parts.hpp"

#include "base/percent.hpp"

namespace semel::gateway {

std::optional<std::string> query_value(std::string_view query, std::string_view name) {
    while (!query.empty()) {
        const auto end = query.find('&');
        const std::string_view pair = query.substr(0, end);
        query = end == std::string_view::npos ? std::string_view{} : query.substr(end + 1);
        const auto equals = pair.find('=');
        if (pair.substr(0, equals) == name) {
            return base::percent_decoded(
                equals == std::string_view::npos ? std::string_view{} : pair.substr(equals + 1));
        }
    }
    return std::nullopt;
}

std::optional<std::uint64_t> number(const std::optional<std::string>& text) {
    if (!text || text->empty() || text->size() > 18) return std::nullopt;
    std::uint64_t value = 0;
    for (const char c : *text) {
        if (c < '0' || c > '9') return std::nullopt;
        value = value * 10 + static_cast<std::uint64_t>(c - '0');
    }
    return value;
}

Problem not_found(std::string what) {
    return {.status = 404,
            .slug = "not-found",
            .detail = std::move(what) +
                      " is not known here (it never was, is purged, or is somebody else's).",
            .should_retry = false};
}

Problem bad_request(std::string detail) {
    return {.status = 400,
            .slug = "request-malformed",
            .detail = std::move(detail),
            .should_retry = false};
}

}  // namespace semel::gateway
