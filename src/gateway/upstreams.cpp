#include "gateway/upstreams.hpp"

#include <algorithm>
#include <atomic>

#include "base/assert.hpp"
#include "base/hash.hpp"
#include "gateway/identity.hpp"

namespace semel::gateway {
namespace {

bool any_of_names(std::string_view name, std::initializer_list<std::string_view> names) {
    return std::any_of(names.begin(), names.end(),
                       [name](std::string_view n) { return http::name_is(name, n); });
}

bool starts_with_name(std::string_view name, std::string_view prefix) {
    return name.size() >= prefix.size() && http::name_is(name.substr(0, prefix.size()), prefix);
}

void line(std::string& out, std::string_view name, std::string_view value) {
    out.append(name).append(": ").append(value).append("\r\n");
}

/// Unique over processes by its random part, within one by its number.
std::string next_attempt_id() {
    static const std::string process = "semel-" + base::hex(base::random_bytes(8)) + "-";
    static std::atomic<std::uint64_t> last{0};
    return process + std::to_string(last.fetch_add(1, std::memory_order_relaxed) + 1);
}

}  // namespace

Upstreams::Upstreams(const config::Config& config) {
    all_.reserve(config.upstreams.size());
    for (const config::UpstreamConfig& one : config.upstreams) {
        auto origin = http::parse_origin(one.base_url);
        SEMEL_ASSERT(origin.has_value(), "the configuration was checked");
        all_.push_back({&one,
                        std::move(*origin),
                        {one.connect_timeout, one.first_byte_timeout, one.idle_timeout}});
    }
}

const Upstream* Upstreams::choose(std::string_view model) const {
    if (model.empty()) return first();
    for (const Upstream& one : all_) {
        for (const std::string& pattern : one.config->models) {
            if (config::glob_matches(pattern, model)) return &one;
        }
    }
    return nullptr;
}

std::string upstream_headers(const http::RequestHead& head, const Upstream& upstream,
                             const ForwardRules& rules) {
    std::string out;
    out.reserve(512);
    const bool own_key = upstream.config->has_api_key;
    for (const http::Header& header : head.headers) {
        if (http::is_hop_by_hop(header.name) ||
            http::named_by_connection(head.headers, header.name))
            continue;
        if (is_credential_header(header.name) && (own_key || !rules.credential_goes_upstream))
            continue;
        if (starts_with_name(header.name, "semel-")) continue;
        if (rules.protected_route &&
            any_of_names(header.name, {"idempotency-key", "accept-encoding", "x-request-id",
                                       "x-client-request-id"})) {
            continue;
        }
        line(out, header.name, header.value);
    }
    if (own_key) {
        if (upstream.config->auth == config::UpstreamAuth::api_key) {
            line(out, "api-key", upstream.config->api_key);
        } else {
            line(out, "Authorization", "Bearer " + upstream.config->api_key);
        }
    }
    if (rules.protected_route) {
        line(out, "Accept-Encoding", "identity");
        // An id per attempt, never the intent's: engines and proxies upstream may refuse an id that
        // comes twice.
        line(out, "X-Client-Request-Id", next_attempt_id());
    }
    return out;
}

SortedHeaders sort_headers(const std::vector<http::Header>& headers) {
    SortedHeaders sorted;
    for (const http::Header& header : headers) {
        const std::string_view name = header.name;
        if (http::is_hop_by_hop(name) || http::named_by_connection(headers, name)) continue;
        if (any_of_names(name, {"content-type"})) {
            sorted.content_type = header.value;
            continue;
        }
        if (any_of_names(name, {"content-encoding"})) {
            if (!http::name_is(header.value, "identity")) sorted.content_encoding = header.value;
            continue;
        }
        if (starts_with_name(name, "access-control-") || starts_with_name(name, "semel-") ||
            any_of_names(
                name, {"cache-control", "alt-svc", "idempotency-key", "idempotent-replayed",
                       "x-idempotent-replayed", "idempotency-expires", "date", "server", "vary"})) {
            continue;
        }
        if (any_of_names(name, {"retry-after"})) sorted.retry_after = header.value;
        if (any_of_names(name, {"x-request-id", "request-id"}) && sorted.upstream_ids.size() < 4 &&
            header.value.size() <= 255) {
            sorted.upstream_ids.emplace_back(header.value);
        }
        if (any_of_names(name, {"x-request-id", "request-id", "location", "content-language",
                                "content-disposition", "retry-after", "openai-version",
                                "openai-model", "openai-processing-ms"})) {
            sorted.kept.emplace_back(name, header.value);
        } else {
            line(sorted.live_lines, name, header.value);
        }
    }
    return sorted;
}

std::string lines_of(const std::vector<std::pair<std::string, std::string>>& headers) {
    std::string out;
    for (const auto& [name, value] : headers) line(out, name, value);
    return out;
}

}  // namespace semel::gateway
