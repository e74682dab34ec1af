#include "gateway/gateway.hpp"

#include <algorithm>

#include "gateway/chat_api.hpp"
#include "gateway/passthrough.hpp"
#include "gateway/protected.hpp"
#include "gateway/request_id.hpp"
#include "gateway/state.hpp"

namespace semel::gateway {

Process::Process(const config::Config& config, const std::string& secret, engine::HotRecords& hot,
                 telemetry::Metrics& metrics, std::string spill_path,
                 const std::string& peer_secret)
    : state_(std::make_unique<State>(config, secret, hot, metrics, std::move(spill_path),
                                     peer_secret)) {}
Process::~Process() = default;

void Process::drain() { state_->draining = true; }
std::size_t Process::running() const { return state_->running.load(); }

namespace {

/// A dot segment, also percent-encoded: an upstream that resolves it would leave the surface that
/// this gateway serves.
bool climbs(std::string_view path) {
    for (std::size_t at = 0; at < path.size();) {
        const std::size_t end = std::min(path.find('/', at), path.size());
        std::string_view segment = path.substr(at, end - at);
        at = end + 1;
        std::size_t dots = 0;
        while (!segment.empty()) {
            const bool encoded = segment.size() >= 3 && http::name_is(segment.substr(0, 3), "%2e");
            if (!encoded && segment.front() != '.') break;
            segment.remove_prefix(encoded ? 3 : 1);
            ++dots;
        }
        if (segment.empty() && (dots == 1 || dots == 2)) return true;
    }
    return false;
}

}  // namespace

class Gateway::Impl {
  public:
    Impl(Process::State& state, engine::Engine& engine, http::Client& client)
        : state_(state),
          protected_(state, engine, client),
          chat_(state, engine, client),
          passthrough_(state, engine.loop(), client) {}

    Task<> handle(http::Exchange& exchange) {
        const http::RequestHead& head = exchange.head();
        const bool chat = head.path == "/api/chat" || head.path.starts_with("/api/chat/");
        const Shape shape = chat ? Shape::problem_json : Shape::openai;
        if (!chat && head.path != "/v1" && !head.path.starts_with("/v1/")) {
            Problem problem{.status = 404,
                            .slug = "not-found",
                            .detail = "This address serves /v1/… (OpenAI dialect) and /api/chat.",
                            .should_retry = false};
            if (head.path.starts_with("/openai/")) {
                problem.detail =
                    "Azure deployment URLs are not served. Use the upstream's /openai/v1 surface "
                    "as base_url and call /v1/… here.";
            }
            state_.metrics.requests(telemetry::Route::other, telemetry::RequestOutcome::not_found)
                .add();
            co_await respond_problem(exchange, problem, shape);
            co_return;
        }
        if (climbs(head.path)) {
            state_.metrics.requests(telemetry::Route::other, telemetry::RequestOutcome::bad_request)
                .add();
            const Problem problem{.status = 400,
                                  .slug = "path-refused",
                                  .detail = "The path has '.' or '..' segments; send it resolved.",
                                  .should_retry = false};
            co_await respond_problem(exchange, problem, shape);
            co_return;
        }
        const std::variant<Caller, Refusal> who = state_.identity.identify(head, tenants_);
        if (const auto* refusal = std::get_if<Refusal>(&who)) {
            state_.metrics.requests(route_of(head, chat), telemetry::RequestOutcome::unauthorized)
                .add();
            co_await respond_problem(exchange,
                                     {.status = refusal->status,
                                      .slug = refusal->slug,
                                      .detail = refusal->message,
                                      .should_retry = false},
                                     shape);
            co_return;
        }
        const Caller& caller = std::get<Caller>(who);
        if (chat) {
            co_await chat_.handle(exchange, caller);
        } else if (head.path == "/v1/chat/completions" && head.method == "POST") {
            co_await protected_.handle(exchange, caller);
        } else {
            state_.metrics.requests(telemetry::Route::passed, telemetry::RequestOutcome::passed)
                .add();
            state_.metrics.unprotected(telemetry::Unprotected::route).add();
            co_await passthrough_.handle(exchange);
        }
    }

  private:
    static telemetry::Route route_of(const http::RequestHead& head, bool chat) {
        if (chat)
            return head.method == "POST" ? telemetry::Route::api_chat
                                         : telemetry::Route::api_chat_read;
        return head.path == "/v1/chat/completions" ? telemetry::Route::chat_completions
                                                   : telemetry::Route::passed;
    }

    Process::State& state_;
    TenantCache tenants_;
    ProtectedRoute protected_;
    ChatApi chat_;
    Passthrough passthrough_;
};

Gateway::Gateway(Process& process, engine::Engine& engine, http::Client& client)
    : impl_(std::make_unique<Impl>(process.state(), engine, client)) {}
Gateway::~Gateway() = default;
Task<> Gateway::handle(http::Exchange& exchange) { return impl_->handle(exchange); }

}  // namespace semel::gateway
