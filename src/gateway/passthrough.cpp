#include "gateway/passthrough.hpp"

#include <vector>

#include "gateway/dialects/openai.hpp"
#include "gateway/problem.hpp"
#include "gateway/protected.hpp"

namespace semel::gateway {

using namespace std::chrono_literals;

namespace {

/// A body up to this size is read whole: one write upstream, and its model can choose the upstream.
/// Larger ones are streamed.
constexpr std::uint64_t small_body_max_bytes = 64 * 1024;
/// How often it is looked whether the client of an unanswered request is still there.
constexpr auto client_look = 1s;

/// Ends the upstream call when the client has left. Lives in the handler's frame.
class ClientWatch {
  public:
    ClientWatch(runtime::Loop& loop, http::Exchange& exchange, http::Client::CancelToken& cancel)
        : loop_(loop), exchange_(exchange), cancel_(cancel) {
        arm();
    }
    ~ClientWatch() { loop_.cancel(timer_); }
    ClientWatch(const ClientWatch&) = delete;
    ClientWatch& operator=(const ClientWatch&) = delete;
    http::Response* response = nullptr;

  private:
    void arm() {
        timer_ = loop_.at(loop_.now() + client_look, [this] {
            if (exchange_.client_gone()) {
                cancel_.cancel();
                if (response != nullptr) response->cancel();
                return;
            }
            arm();
        });
    }
    runtime::Loop& loop_;
    http::Exchange& exchange_;
    http::Client::CancelToken& cancel_;
    runtime::TimerId timer_ = 0;
};

std::string passed_headers(const std::vector<http::Header>& headers) {
    std::string out;
    out.reserve(512);
    for (const http::Header& header : headers) {
        if (http::is_hop_by_hop(header.name) || http::named_by_connection(headers, header.name))
            continue;
        out.append(header.name).append(": ").append(header.value).append("\r\n");
    }
    return out;
}

bool is_json(const http::RequestHead& head) {
    return head.header("content-type").value_or(std::string_view{}).find("json") !=
           std::string_view::npos;
}

}  // namespace

Task<> Passthrough::handle(http::Exchange& exchange) {
    const http::RequestHead& head = exchange.head();
    std::string small;
    bool streamed = false;
    std::string_view model;
    std::string model_text;
    if (head.has_body()) {
        // The model chooses among several upstreams: then also a larger JSON body is read, up to
        // the protected routes' limit.
        const std::uint64_t limit = state_.upstreams.size() > 1 && is_json(head)
                                        ? protected_body_max_bytes
                                        : small_body_max_bytes;
        streamed = head.chunked || *head.content_length > limit;
        if (!streamed) {
            const http::BodyStatus status = co_await exchange.read_body(small, limit);
            if (status != http::BodyStatus::ok) co_return;
            if (state_.upstreams.size() > 1 && is_json(head)) {
                model_text = openai::read_request(small).model;
                model = model_text;
            }
        }
    }
    const Upstream* upstream = state_.upstreams.choose(model);
    if (upstream == nullptr) {
        co_await respond_problem(
            exchange,
            {.status = 404,
             .slug = "model-not-found",
             .detail = "No configured upstream serves the model of this request.",
             .should_retry = false},
            Shape::openai);
        co_return;
    }
    http::Request request{
        .method = std::string(head.method),
        .target = std::string(head.target),
        .headers = upstream_headers(
            head, *upstream,
            {.credential_goes_upstream = state_.identity.credential_goes_upstream()}),
        .body = small,
        .has_body = head.has_body() || head.content_length.has_value()};
    if (streamed) {
        request.source_length = head.content_length;
        request.source = [&exchange]() -> Task<std::optional<std::string_view>> {
            const http::BodyPiece piece = co_await exchange.read_some();
            if (piece.status != http::BodyStatus::ok) co_return std::nullopt;
            co_return piece.bytes;
        };
    }
    http::Client::CancelToken cancel;
    ClientWatch watch(loop_, exchange, cancel);
    auto answer =
        co_await client_.call(upstream->origin, std::move(request), upstream->timeouts, &cancel);
    if (const auto* error = std::get_if<http::CallError>(&answer)) {
        using Kind = http::CallError::Kind;
        if (error->kind == Kind::cancelled || error->kind == Kind::body_source)
            co_return exchange.cut();
        const bool late =
            error->kind == Kind::first_byte_timeout || error->kind == Kind::idle_timeout;
        Problem problem{.status = late ? 504 : 502,
                        .slug = late ? "upstream-timeout" : "upstream-failed",
                        .detail = "The upstream did not answer (" + error->detail + ")."};
        if (!error->maybe_processed) {
            problem.slug = "upstream-unreachable";
            problem.retry_after_s = 1;
        }
        co_await respond_problem(exchange, problem, Shape::openai);
        co_return;
    }
    const auto response = std::get<std::unique_ptr<http::Response>>(std::move(answer));
    watch.response = response.get();
    http::ResponseHead out{.status = response->status(),
                           .headers = passed_headers(response->headers())};
    exchange.begin(out, response->content_length());
    for (;;) {
        auto read = co_await response->read_some();
        if (std::holds_alternative<http::CallError>(read)) {
            exchange.cut();
            co_return;
        }
        const std::string_view piece = std::get<std::string_view>(read);
        if (piece.empty()) break;
        if (!co_await exchange.write(piece)) co_return;
    }
    co_await exchange.finish();
}

}  // namespace semel::gateway
