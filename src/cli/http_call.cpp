#include "cli/http_call.hpp"

#include <memory>
#include <optional>

#include "base/time.hpp"
#include "http/client.hpp"
#include "runtime/loop.hpp"

namespace semel::cli {

namespace {

constexpr http::Timeouts patience{.connect = std::chrono::seconds{5},
                                  .first_byte = std::chrono::seconds{15},
                                  .idle = std::chrono::seconds{15}};

using Called = std::variant<HttpAnswer, http::CallError>;

runtime::Task<> call(http::Client& client, http::Origin origin, http::Request request, std::optional<Called>& result) {
    auto called = co_await client.call(origin, std::move(request), patience, nullptr);
    if (auto* failed = std::get_if<http::CallError>(&called)) {
        result = std::move(*failed);
        co_return;
    }
    auto& response = std::get<std::unique_ptr<http::Response>>(called);
    HttpAnswer answer{.status = response->status()};
    answer.content_type = response->header("Content-Type").value_or("");
    for (;;) {
        auto piece = co_await response->read_some();
        if (auto* failed = std::get_if<http::CallError>(&piece)) {
            result = std::move(*failed);
            co_return;
        }
        const std::string_view bytes = std::get<std::string_view>(piece);
        if (bytes.empty()) break;
        answer.body += bytes;
    }
    result = std::move(answer);
}

/// Runs one call on a loop of its own.
base::Result<Called> call_and_wait(const std::string& base_url, http::Request request, const std::string& ca_file) {
    auto origin = http::parse_origin(base_url);
    if (!origin) return origin.error();
    runtime::Loop loop(base::system_clocks());
    const auto client = http::make_client(loop, ca_file);
    std::optional<Called> result;
    auto task = call(*client, *origin, std::move(request), result);
    loop.spawn(std::move(task));
    while (!result) loop.io().run_one();
    return std::move(*result);
}

}  // namespace

base::Result<HttpAnswer> http_call(const std::string& base_url, const std::string& method, const std::string& target,
                                   const std::string& body) {
    http::Request request{.method = method, .target = target};
    if (!body.empty()) {
        request.headers = "Content-Type: application/json\r\n";
        request.body = body;
        request.has_body = true;
    }
    auto called = call_and_wait(base_url, std::move(request), {});
    if (!called) return called.error();
    if (auto* failed = std::get_if<http::CallError>(&*called)) return base::Error{.detail = failed->detail};
    return std::move(std::get<HttpAnswer>(*called));
}

base::Result<void> can_connect(const std::string& base_url, const std::string& ca_file) {
    auto called = call_and_wait(base_url, {.method = "HEAD", .target = "/"}, ca_file);
    if (!called) return called.error();
    const auto* failed = std::get_if<http::CallError>(&*called);
    const bool connected = failed == nullptr || (failed->kind != http::CallError::Kind::refused &&
                                                 failed->kind != http::CallError::Kind::connect_timeout);
    if (connected) return {};
    return base::Error{.detail = failed->detail};
}

std::string authority(const config::Address& address) {
    const bool ipv6 = address.host.find(':') != std::string::npos;
    return (ipv6 ? "[" + address.host + "]" : address.host) + ":" + std::to_string(address.port);
}

}  // namespace semel::cli
