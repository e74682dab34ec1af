#include "admin/admin.hpp"

#include <boost/json.hpp>

namespace semel::admin {

namespace {

/// Of a request to the admin API: a resolution carries its answer in JSON, escaped.
constexpr std::uint64_t request_max_bytes = 4 * resolve_body_max_bytes;

/// "localhost", "127.0.0.1:8788", "[::1]:8788": a name of this machine for itself.
bool loopback_authority(std::string_view authority) {
    if (authority.starts_with("[::1]")) {
        authority.remove_prefix(5);
        return authority.empty() || authority.front() == ':';
    }
    const std::string_view host = authority.substr(0, authority.find(':'));
    if (http::name_is(host, "localhost")) return true;
    return host.starts_with("127.") && host.find_first_not_of("0123456789.") == std::string_view::npos;
}

bool loopback_origin(std::string_view origin) {
    for (const std::string_view scheme : {"http://", "https://"}) {
        if (origin.starts_with(scheme)) return loopback_authority(origin.substr(scheme.size()));
    }
    return false;
}

Reply state_reply(std::string_view good, const std::vector<std::string>& reasons) {
    boost::json::object state;
    state["status"] = reasons.empty() ? good : "unavailable";
    boost::json::array list;
    for (const std::string& reason : reasons) list.emplace_back(reason);
    state["reasons"] = std::move(list);
    return {.status = reasons.empty() ? 200 : 503, .body = boost::json::serialize(state) + "\n"};
}

}  // namespace

Admin::Admin(core::Store& store, IntentOf intent_of, Probes probes, bool on_loopback, Tenants tenants)
    : records_(store, std::move(intent_of), std::move(tenants)), probes_(std::move(probes)), on_loopback_(on_loopback) {}

std::string Admin::refused(const http::RequestHead& head) const {
    if (!on_loopback_) {
        return "the admin API answers on a loopback address only; set admin: 127.0.0.1:PORT, or run `semel record` on this "
               "machine";
    }
    const auto host = head.header("Host");
    if (!host || !loopback_authority(*host)) return "the Host header does not name this machine's loopback address";
    for (const std::string_view origin : head.all("Origin")) {
        if (!loopback_origin(origin)) return "requests from web pages of other origins are refused";
    }
    return {};
}

runtime::Task<> Admin::handle(http::Exchange& exchange) {
    const http::RequestHead& head = exchange.head();
    const bool reads = head.method == "GET" || head.method == "HEAD";
    Reply reply;
    if (head.path == "/healthz" && reads) {
        reply = state_reply("ok", probes_.not_alive());
    } else if (head.path == "/readyz" && reads) {
        reply = state_reply("ready", probes_.not_ready());
    } else if (head.path == "/metrics" && reads) {
        reply = {.content_type = "text/plain; version=0.0.4; charset=utf-8", .body = probes_.metrics()};
    } else if (head.path.starts_with("/admin/")) {
        if (const std::string why = refused(head); !why.empty()) {
            reply = problem(403, "Forbidden", why);
        } else {
            std::string body;
            const http::BodyStatus read = co_await exchange.read_body(body, request_max_bytes);
            if (read == http::BodyStatus::too_large) {
                reply = problem(413, "Request too large", "an answer given by hand may have at most 16 MiB");
            } else if (read != http::BodyStatus::ok) {
                co_return;  // the server has answered, or there is nobody to answer
            } else if (head.path == "/admin/consumers" || head.path.starts_with("/admin/consumers/")) {
                reply = answer_about_consumers(probes_.consumers, head.method, head.path, body);
            } else {
                reply = records_.answer(head.method, head.path, head.query, body);
            }
        }
    } else {
        reply = problem(404, "Not found",
                        "this is the admin address: /healthz, /readyz, /metrics, /admin/records, /admin/consumers; the API is on `listen`");
    }
    http::ResponseHead answer;
    answer.status = reply.status;
    answer.add("Content-Type", reply.content_type);
    answer.add("Cache-Control", "no-store");
    answer.add("X-Content-Type-Options", "nosniff");
    co_await exchange.respond(answer, reply.body);
}

}  // namespace semel::admin
