#include "admin/consumers.hpp"

#include <boost/json.hpp>

#include "base/assert.hpp"
#include "base/percent.hpp"

namespace semel::admin {

namespace {

namespace json = boost::json;

constexpr std::string_view root = "/admin/consumers";
constexpr std::size_t reason_max_bytes = 500;

json::object of(const ConsumerPartition& partition) {
    return {{"topic", partition.topic},
            {"partition", partition.number},
            {"position", partition.position},
            {"committable", partition.committable},
            {"committed", partition.committed < 0 ? json::value() : partition.committed},
            {"in_flight", partition.in_flight},
            {"paused", partition.paused},
            {"held", partition.held}};
}

json::object of(const ConsumerView& view) {
    json::array partitions;
    for (const ConsumerPartition& partition : view.partitions)
        partitions.emplace_back(of(partition));
    json::array alarms;
    for (const std::string& alarm : view.alarms) alarms.emplace_back(alarm);
    json::object counts;
    for (const auto& [name, count] : view.counts) counts[name] = count;
    return {{"name", view.name},
            {"group", view.group},
            {"source", view.source},
            {"strategy", view.strategy},
            {"promise", view.promise},
            {"condition", view.condition},
            {"reason", view.reason.empty() ? json::value() : json::value(view.reason)},
            {"in_hand", view.in_hand},
            {"running", view.running},
            {"waiting", view.waiting},
            {"parked", view.parked},
            {"partitions", std::move(partitions)},
            {"alarms", std::move(alarms)},
            {"counts", std::move(counts)}};
}

json::object of(const ConsumerLags& lags) {
    json::array partitions;
    std::int64_t sum = 0;
    for (const ConsumerLag& one : lags.partitions) {
        sum += one.lag;
        partitions.emplace_back(
            json::object{{"topic", one.topic},
                         {"partition", one.number},
                         {"begin", one.begin},
                         {"end", one.end},
                         {"committed", one.committed < 0 ? json::value() : one.committed},
                         {"lag", one.lag}});
    }
    return {{"lag", sum}, {"behind_ms", lags.behind_ms}, {"partitions", std::move(partitions)}};
}

Reply said(const json::object& body) { return {.body = json::serialize(body) + "\n"}; }

Reply no_such(const std::string& name, const std::vector<ConsumerView>& all) {
    std::string known;
    for (const ConsumerView& one : all) known += (known.empty() ? "" : ", ") + one.name;
    return problem(
        404, "Not found",
        "there is no consumer " + name +
            (known.empty() ? "; the configuration names none" : "; there are: " + known));
}

Reply wrong_method(std::string_view allowed) {
    return problem(405, "Method not allowed", "use " + std::string(allowed));
}

/// Why somebody pauses it; nullopt: the body is not understood.
std::optional<std::string> reason_of(std::string_view body) {
    if (body.find_first_not_of(" \t\r\n") == std::string_view::npos) return std::string{};
    boost::system::error_code failed;
    const json::value parsed = json::parse(json::string_view(body.data(), body.size()), failed);
    if (failed || !parsed.is_object()) return std::nullopt;
    const json::value* reason = parsed.as_object().if_contains("reason");
    if (reason == nullptr) return std::string{};
    if (!reason->is_string()) return std::nullopt;
    return std::string(reason->as_string()).substr(0, reason_max_bytes);
}

/// `name` is one of the list.
Reply tell(const ConsumerControls& controls, const std::string& name, ConsumerCommand command,
           std::string_view body) {
    const auto reason = reason_of(body);
    if (!reason)
        return problem(400, "Bad request", "the body must be {\"reason\": \"...\"} or empty");
    const auto told = controls.tell(name, command, *reason);
    SEMEL_ASSERT(told.has_value(), "it is one of the list");
    if (!*told) return problem(409, "Conflict", told->error().detail);
    return said({{"name", name}, {"done", true}});
}

}  // namespace

Reply answer_about_consumers(const ConsumerControls& controls, std::string_view method,
                             std::string_view path, std::string_view body) {
    const bool reads = method == "GET" || method == "HEAD";
    path.remove_prefix(root.size());
    const std::vector<ConsumerView> all =
        controls.list ? controls.list() : std::vector<ConsumerView>{};
    if (path.empty()) {
        if (!reads) return wrong_method("GET");
        json::array consumers;
        for (const ConsumerView& one : all) consumers.emplace_back(of(one));
        return said({{"consumers", std::move(consumers)}});
    }
    path.remove_prefix(1);
    // A name may hold slashes, written as %2F.
    const std::size_t slash = path.find('/');
    const std::string name = base::percent_decoded(path.substr(0, slash));
    const std::string_view what =
        slash == std::string_view::npos ? std::string_view{} : path.substr(slash + 1);
    const ConsumerView* found = nullptr;
    for (const ConsumerView& one : all) {
        if (one.name == name) found = &one;
    }
    if (found == nullptr) return no_such(name, all);
    if (what.empty()) return reads ? said(of(*found)) : wrong_method("GET");
    if (what == "lag") {
        if (!reads) return wrong_method("GET");
        const auto lags = controls.lag(name);
        SEMEL_ASSERT(lags.has_value(), "it is one of the list");
        if (!*lags) return problem(503, "Service unavailable", lags->error().detail);
        return said(of(**lags));
    }
    for (const auto& [word, command] :
         {std::pair("pause", ConsumerCommand::pause), std::pair("resume", ConsumerCommand::resume),
          std::pair("drain", ConsumerCommand::drain)}) {
        if (what != word) continue;
        return method == "POST" ? tell(controls, name, command, body) : wrong_method("POST");
    }
    return problem(404, "Not found",
                   "a consumer has lag (GET), pause, resume and drain (POST) below its name");
}

}  // namespace semel::admin
