#include "admin/records.hpp"

#include <algorithm>
#include <array>
#include <boost/json.hpp>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <future>
#include <optional>

namespace semel::admin {

namespace json = boost::json;
using core::Record;
using core::Status;
using core::StoredKey;
using core::StoreTime;

namespace {

struct StatusName {
    Status status;
    std::string_view name;
};
constexpr std::array<StatusName, 5> status_names{{{Status::processing, "PROCESSING"},
                                                  {Status::completed, "COMPLETED"},
                                                  {Status::failed, "FAILED"},
                                                  {Status::unknown, "UNKNOWN"},
                                                  {Status::dead, "DEAD"}}};

std::string_view name_of(Status status) {
    for (const StatusName& one : status_names) {
        if (one.status == status) return one.name;
    }
    return "?";
}

std::string_view name_of(core::BodyKind kind) {
    switch (kind) {
        case core::BodyKind::inline_body: return "inline";
        case core::BodyKind::chunks: return "chunks";
        case core::BodyKind::not_kept: return "not_kept";
    }
    return "?";
}

/// The value of `name` in a query string; percent-encoding is not needed by any value of this API.
std::optional<std::string_view> parameter(std::string_view query, std::string_view name) {
    while (!query.empty()) {
        const auto end = query.find('&');
        const std::string_view pair = query.substr(0, end);
        query = end == std::string_view::npos ? std::string_view{} : query.substr(end + 1);
        const auto equals = pair.find('=');
        if (pair.substr(0, equals) != name) continue;
        return equals == std::string_view::npos ? std::string_view{} : pair.substr(equals + 1);
    }
    return std::nullopt;
}

bool flag(std::string_view query, std::string_view name) {
    const auto value = parameter(query, name);
    return value && (*value == "1" || *value == "true");
}

std::optional<std::string> bytes_of_hex(std::string_view text) {
    if (text.size() % 2 != 0) return std::nullopt;
    std::string bytes;
    for (std::size_t i = 0; i < text.size(); i += 2) {
        unsigned value = 0;
        const auto [end, error] = std::from_chars(text.data() + i, text.data() + i + 2, value, 16);
        if (error != std::errc{} || end != text.data() + i + 2) return std::nullopt;
        bytes.push_back(static_cast<char>(value));
    }
    return bytes;
}

json::value count_or_null(std::int64_t count) {
    if (count < 0) return nullptr;  // the upstream did not say; never estimated
    return count;
}

json::value time_or_null(StoreTime time) {
    if (time.us == 0) return nullptr;
    return json::value(rfc3339(time));
}

json::object describe(const StoredKey& intent, const Record& record, StoreTime now) {
    json::object o;
    o["intent"] = base::base64url(intent.view());
    o["operation"] = record.label;
    o["status"] = name_of(record.status);
    o["final"] = record.final;
    o["cancelled"] = record.cancelled;
    o["attempt"] = record.attempt;
    o["attempts_uncharged"] = record.uncharged_attempts;
    o["possible_second_payments"] = record.possible_second_payments;
    o["generation"] = record.generation;
    o["token"] = record.token.value;
    o["owner"] = record.owner.id;
    o["call_started"] = record.call_started;
    o["lease_remaining_ms"] = nullptr;
    if (record.status == Status::processing) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(record.lease_end - now);
        o["lease_remaining_ms"] = std::max<std::int64_t>(0, left.count());
    }
    o["created"] = time_or_null(record.created);
    o["completed"] = time_or_null(record.completed);
    o["expires"] = time_or_null(record.expires);
    json::object usage;
    usage["model"] = record.usage.model.empty() ? json::value(nullptr) : json::value(record.usage.model);
    usage["input_tokens"] = count_or_null(record.usage.input_tokens);
    usage["output_tokens"] = count_or_null(record.usage.output_tokens);
    usage["cached_tokens"] = count_or_null(record.usage.cached_tokens);
    usage["reasoning_tokens"] = count_or_null(record.usage.reasoning_tokens);
    json::array upstream_ids;
    for (const std::string& id : record.usage.upstream_ids) upstream_ids.emplace_back(id);
    usage["upstream_ids"] = std::move(upstream_ids);
    o["usage"] = std::move(usage);
    o["failure"] = nullptr;
    if (!record.failure.code.empty()) {
        o["failure"] = json::object{{"code", record.failure.code},
                                    {"message", record.failure.message},
                                    {"http_status", record.failure.http_status}};
    }
    o["answer"] = nullptr;
    if (record.answer) {
        o["answer"] = json::object{{"http_status", record.answer->http_status},
                                   {"content_type", record.answer->content_type},
                                   {"stream", record.answer->stream},
                                   {"body_kind", name_of(record.answer->body_kind)},
                                   {"body_bytes", record.answer->body_bytes}};
    }
    return o;
}

Reply json_reply(const json::value& value) { return {.body = json::serialize(value) + "\n"}; }

Reply store_problem(const base::Error& error) {
    return problem(503, "Store unavailable", error.detail.empty() ? "the store did not answer" : error.detail);
}

Reply no_such_record() {
    return problem(404, "No such record",
                   "no record is kept under this intent: it never was, has expired, or belongs to another store");
}

/// What a resolution asks for, as it came.
struct Resolution {
    core::Resolve::Decision decision = core::Resolve::Decision::failed;
    core::FencingToken token;
    std::string reason;
    std::string content_type = "application/json";
    std::optional<std::string> body;
};

/// The request of POST …/resolve; an empty `why` if it could be read.
Resolution parse_resolution(std::string_view text, std::string& why) {
    Resolution wanted;
    boost::system::error_code failed;
    const json::value parsed = json::parse(json::string_view(text.data(), text.size()), failed);
    if (failed || !parsed.is_object()) {
        why = R"(the body must be a JSON object like {"decision": "failed", "token": 1, "reason": "…"})";
        return wanted;
    }
    bool has_decision = false;
    bool has_token = false;
    for (const auto& [key, value] : parsed.as_object()) {
        const std::string_view name(key.data(), key.size());
        if (name == "token") {
            boost::system::error_code not_a_number;
            wanted.token.value = value.to_number<std::uint64_t>(not_a_number);
            if (not_a_number) why = "token must be the number that the record shows now";
            has_token = true;
            continue;
        }
        if (!value.is_string()) {
            why = std::string(name) + " must be a string";
            return wanted;
        }
        const json::string& string = value.as_string();
        const std::string_view content(string.data(), string.size());
        if (name == "decision") {
            has_decision = true;
            if (content == "completed") {
                wanted.decision = core::Resolve::Decision::completed;
            } else if (content == "failed") {
                wanted.decision = core::Resolve::Decision::failed;
            } else if (content == "rerun") {
                wanted.decision = core::Resolve::Decision::rerun;
            } else {
                why = "decision must be completed, failed or rerun";
            }
        } else if (name == "reason") {
            wanted.reason = content;
        } else if (name == "content_type") {
            wanted.content_type = content;
        } else if (name == "body") {
            wanted.body = std::string(content);
        } else {
            why = "unknown member " + std::string(name) + "; known: decision, token, reason, content_type, body";
        }
    }
    if (why.empty() && !has_decision) why = "decision is missing: completed, failed or rerun";
    if (why.empty() && !has_token) {
        why = "token is missing: give the one that the record shows now, so that a decision about an older state is refused";
    }
    const bool completes = wanted.decision == core::Resolve::Decision::completed;
    if (why.empty() && completes && !wanted.body) why = "decision completed needs the answer in body";
    if (why.empty() && !completes && wanted.body) why = "body belongs to decision completed only";
    return wanted;
}

/// An answer of /api/chat as the gateway itself would have written it: replays change "fromCache":false, so it must be there.
std::string chat_answer(std::string_view body) {
    json::object given = json::parse(json::string_view(body.data(), body.size())).as_object();
    json::object answer{{"fromCache", false}};
    for (const auto& [key, value] : given) {
        if (key != "fromCache") answer[key] = value;
    }
    return json::serialize(answer);
}

bool is_event_stream(std::string_view content_type) { return content_type.starts_with("text/event-stream"); }

/// `content` of the object that an answer of /api/chat is, or that its stream's last event carries; nothing: it is no such answer.
std::optional<std::string> chat_content(std::string_view content_type, std::string_view body) {
    if (is_event_stream(content_type)) {
        constexpr std::string_view done = "event: done\ndata: ";
        const auto at = body.rfind(done);
        if (at == std::string_view::npos) return std::nullopt;
        body.remove_prefix(at + done.size());
        body = body.substr(0, body.find('\n'));
    }
    boost::system::error_code failed;
    const json::value parsed = json::parse(json::string_view(body.data(), body.size()), failed);
    if (failed || !parsed.is_object()) return std::nullopt;
    const json::value* content = parsed.as_object().if_contains("content");
    const json::value* status = parsed.as_object().if_contains("status");
    if (content == nullptr || !content->is_string() || status == nullptr || *status != "COMPLETED") return std::nullopt;
    return std::string(std::string_view(content->as_string().data(), content->as_string().size()));
}

}  // namespace

Reply problem(int status, std::string_view title, std::string_view detail) {
    const json::object o{{"title", title}, {"status", status}, {"detail", detail}};
    return {.status = status, .content_type = "application/problem+json", .body = json::serialize(o) + "\n"};
}

std::string rfc3339(StoreTime time) {
    if (time.us == 0) return {};
    using namespace std::chrono;
    const sys_time<microseconds> point{microseconds{time.us}};
    const auto day = floor<days>(point);
    const year_month_day date{day};
    const hh_mm_ss clock{floor<milliseconds>(point - day)};
    std::array<char, 48> text{};
    const int length = std::snprintf(text.data(), text.size(), "%04d-%02u-%02uT%02d:%02d:%02d.%03dZ",
                                     static_cast<int>(date.year()), static_cast<unsigned>(date.month()),
                                     static_cast<unsigned>(date.day()), static_cast<int>(clock.hours().count()),
                                     static_cast<int>(clock.minutes().count()), static_cast<int>(clock.seconds().count()),
                                     static_cast<int>(clock.subseconds().count()));
    return {text.data(), static_cast<std::size_t>(length)};
}

std::string record_json(const StoredKey& intent, const Record& record, StoreTime now) {
    return json::serialize(describe(intent, record, now));
}

std::string why_not_an_answer(std::string_view operation, std::string_view content_type, std::string_view body) {
    if (body.size() > resolve_body_max_bytes) return "the answer is larger than 16 MiB";
    if (is_event_stream(content_type)) {
        if (operation.find("chat/completions") != std::string_view::npos &&
            !(body.ends_with("data: [DONE]\n\n") || body.ends_with("data: [DONE]\r\n\r\n"))) {
            return "a stream of this route is whole only if it ends with \"data: [DONE]\" and an empty line";
        }
        if (operation == "chat" && !chat_content(content_type, body)) {
            return "a stream of /api/chat is whole only if its last event is \"event: done\" with the answer's object: "
                   "\"status\": \"COMPLETED\" and its \"content\"";
        }
        if (!(body.ends_with("\n\n") || body.ends_with("\r\n\r\n"))) return "the stream's last event is not ended by an empty line";
        return {};
    }
    if (!content_type.starts_with("application/json")) {
        return "content_type must be application/json, or text/event-stream for a request that asked for a stream";
    }
    boost::system::error_code failed;
    const json::value parsed = json::parse(json::string_view(body.data(), body.size()), failed);
    if (failed || !parsed.is_object()) return "the answer is not a JSON object";
    if (operation == "chat" && !chat_content(content_type, body)) {
        return "an answer of /api/chat is its own object: {\"fromCache\":false, \"requestId\": …, \"status\": \"COMPLETED\", "
               "\"content\": …}";
    }
    return {};
}

Reply Records::answer(std::string_view method, std::string_view path, std::string_view query, std::string_view body) {
    if (path == "/admin/lookup") {
        return method == "POST" ? lookup(body) : problem(405, "Method not allowed", "an intent is looked up by POST");
    }
    if (path == "/admin/tenants/erase") {
        return method == "POST" ? erase(body, flag(query, "dry_run"))
                                : problem(405, "Method not allowed", "a tenant is erased by POST");
    }
    constexpr std::string_view prefix = "/admin/records";
    const bool reads = method == "GET" || method == "HEAD";
    if (!path.starts_with(prefix)) return problem(404, "Not found", "the admin API has /admin/records, /admin/lookup and /admin/tenants/erase");
    path.remove_prefix(prefix.size());
    const auto wrong_method = [] {
        return problem(405, "Method not allowed", "records are read by GET and decided by POST …/resolve");
    };
    if (path.empty()) return reads ? list(query) : wrong_method();

    if (path.front() != '/') return problem(404, "Not found", "the admin API has /admin/records, /admin/lookup and /admin/tenants/erase");
    path.remove_prefix(1);
    const auto slash = path.find('/');
    StoredKey intent;
    if (!base::digest_from_base64url(path.substr(0, slash), intent)) {
        return problem(400, "Not an intent", "an intent is the 43 characters of the response header Semel-Intent");
    }
    if (slash == std::string_view::npos) return reads ? get(intent, flag(query, "body")) : wrong_method();
    if (path.substr(slash) != "/resolve") return problem(404, "Not found", "a record has /resolve only");
    return method == "POST" ? resolve(intent, body, flag(query, "dry_run")) : wrong_method();
}

Reply Records::lookup(std::string_view body) {
    boost::system::error_code failed;
    const json::value parsed = json::parse(json::string_view(body.data(), body.size()), failed);
    if (failed || !parsed.is_object()) {
        return problem(400, "Not a name", R"(the body must be a JSON object like {"operation": "chat", "client": "web", "id": "…"})");
    }
    IntentName name;
    const std::array<std::pair<std::string_view, std::string*>, 6> members{{{"operation", &name.operation},
                                                                            {"client", &name.client},
                                                                            {"credential", &name.credential},
                                                                            {"user", &name.user},
                                                                            {"session", &name.session},
                                                                            {"id", &name.id}}};
    for (const auto& [key, value] : parsed.as_object()) {
        const std::string_view member(key.data(), key.size());
        const auto found = std::ranges::find(members, member, &std::pair<std::string_view, std::string*>::first);
        if (found == members.end() || !value.is_string()) {
            return problem(400, "Not a name", "operation, client, credential, user, session and id are strings; nothing else is known");
        }
        *found->second = std::string(std::string_view(value.as_string().data(), value.as_string().size()));
    }
    if (name.operation.empty() || name.id.empty()) return problem(400, "Not a name", "operation and id must be given");
    if (!name.client.empty() && !name.credential.empty()) {
        return problem(400, "Not a name", "give the client or the credential, not both");
    }
    const auto intent = intent_of_(name);
    if (!intent) return problem(400, "Not a name", "say whose it is (client, or credential where no clients are configured); each part may have at most 255 bytes");
    return json_reply(json::object{{"intent", base::base64url(intent->view())}});
}

Reply Records::list(std::string_view query) {
    core::ScanFilter filter;
    if (const auto wanted = parameter(query, "status"); wanted && !wanted->empty()) {
        std::string upper(*wanted);
        std::ranges::transform(upper, upper.begin(), [](char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 32) : c; });
        const auto found = std::ranges::find(status_names, upper, &StatusName::name);
        if (found == status_names.end()) {
            return problem(400, "Unknown status", "status is one of PROCESSING, COMPLETED, FAILED, UNKNOWN, DEAD");
        }
        filter.status = static_cast<std::uint8_t>(found->status);
    }
    std::size_t limit = page_default_records;
    if (const auto wanted = parameter(query, "limit")) {
        const auto [end, error] = std::from_chars(wanted->data(), wanted->data() + wanted->size(), limit);
        if (error != std::errc{} || end != wanted->data() + wanted->size() || limit == 0 || limit > page_max_records) {
            return problem(400, "Bad limit", "limit is a number from 1 to 1000");
        }
    }
    std::string cursor;
    if (const auto wanted = parameter(query, "cursor")) {
        const auto bytes = bytes_of_hex(*wanted);
        if (!bytes) return problem(400, "Bad cursor", "cursor is the next of an earlier page, unchanged");
        cursor = *bytes;
    }
    const auto page = store_.scan(filter, cursor, limit);
    if (!page) return store_problem(page.error());
    json::array records;
    for (const auto& [intent, record] : page->records) records.push_back(describe(intent, *record, page->at));
    json::object o;
    o["records"] = std::move(records);
    o["next"] = page->next.empty() ? json::value(nullptr) : json::value(base::hex(page->next));
    return json_reply(o);
}

Reply Records::get(const StoredKey& intent, bool with_body) {
    const auto decided = ask({intent, core::Get{}});
    if (!decided) return store_problem(decided.error());
    const auto* found = std::get_if<core::Found>(&decided->outcome);
    if (found == nullptr || !found->record) return no_such_record();
    const auto record = opened(intent, found->record);
    if (!record) return store_problem(record.error());
    if (!with_body) return json_reply(describe(intent, **record, decided->at));
    if (!(*record)->answer) return problem(404, "No answer", "the record holds no answer yet");
    auto body = body_of(intent, **record);
    if (!body) return problem(404, "Answer not kept", body.error().detail);
    // Not under its own type: what an upstream sent is not to be run on the admin address's origin.
    return {.content_type = "application/octet-stream", .body = std::move(*body)};
}

base::Result<std::string> Records::body_of(const StoredKey& intent, const Record& record) {
    const core::Answer& answer = *record.answer;
    if (answer.body_kind == core::BodyKind::not_kept) {
        return base::Error{.detail = answer.sealed_under != 0 ? "the answer was erased with its tenant's data"
                                                              : "the answer was larger than record.max_bytes and was not kept"};
    }
    if (answer.body_kind == core::BodyKind::inline_body) return answer.body ? *answer.body : std::string{};
    const auto data_key = data_key_of(record.tenant);
    if (!data_key) return data_key.error();
    std::string whole;
    for (std::uint32_t n = 0; n < answer.chunk_count; ++n) {
        auto decided = ask({intent, core::GetChunk{.token = record.token, .n = n}});
        if (!decided) return decided.error();
        auto* chunk = std::get_if<core::ChunkFound>(&decided->outcome);
        if (chunk == nullptr) return base::Error{.detail = "a part of the answer is missing: it has just expired"};
        if (*data_key) {
            const engine::Place place{.kind = engine::Place::Kind::chunk, .of = intent, .n = n};
            const auto plain = (*data_key)->open(place, chunk->bytes);
            if (!plain) return base::Error{.detail = "the answer was erased with its tenant's data"};
            whole += *plain;
        } else {
            whole += chunk->bytes;
        }
    }
    return whole;
}

Reply Records::resolve(const StoredKey& intent, std::string_view body, bool dry_run) {
    std::string why;
    Resolution wanted = parse_resolution(body, why);
    if (!why.empty()) return problem(400, "Not a decision", why);

    const auto decided = ask({intent, core::Get{}});
    if (!decided) return store_problem(decided.error());
    const auto* found = std::get_if<core::Found>(&decided->outcome);
    if (found == nullptr || !found->record) return no_such_record();
    const Record& record = *found->record;
    if (record.status != Status::unknown && record.status != Status::dead) {
        return problem(409, "Nothing to decide",
                       "the record is " + std::string(name_of(record.status)) + "; only UNKNOWN and DEAD are decided by hand");
    }
    if (record.token != wanted.token) {
        return problem(409, "Decided on an older state",
                       "the record's token is now " + std::to_string(record.token.value) + "; look at it again");
    }
    core::Resolve resolve{.token_seen = wanted.token, .decision = wanted.decision, .reason = wanted.reason};
    if (wanted.body) {
        const std::string unfit = why_not_an_answer(record.label, wanted.content_type, *wanted.body);
        if (!unfit.empty()) return problem(422, "Not a whole answer", unfit);
        core::Answer answer{.http_status = 200, .content_type = wanted.content_type};
        answer.stream = is_event_stream(wanted.content_type);
        if (record.label == "chat") resolve.answer_content = chat_content(wanted.content_type, *wanted.body);
        if (record.label == "chat" && !answer.stream) wanted.body = chat_answer(*wanted.body);
        answer.body_bytes = wanted.body->size();
        answer.body_digest = base::sha256(*wanted.body);
        answer.body = std::make_shared<const std::string>(std::move(*wanted.body));
        const auto data_key = data_key_of(record.tenant);
        if (!data_key) return store_problem(data_key.error());
        if (*data_key) {
            (*data_key)->seal(intent, answer);
            if (resolve.answer_content && record.turn) {
                const engine::Place place{.kind = engine::Place::Kind::reply,
                                          .of = record.turn->conversation,
                                          .request_id = record.turn->request_id};
                resolve.answer_content = (*data_key)->seal(place, *resolve.answer_content);
            }
        }
        resolve.answer = std::move(answer);
    }
    if (dry_run) {
        json::object o{{"dry_run", true}};
        o["record"] = describe(intent, record, decided->at);
        return json_reply(o);
    }
    const auto done = ask({intent, std::move(resolve)});
    if (!done) return store_problem(done.error());
    if (const auto* applied = std::get_if<core::Applied>(&done->outcome); applied != nullptr && applied->record) {
        return json_reply(describe(intent, *applied->record, done->at));
    }
    return problem(409, "Decided on an older state", "the record changed in between; look at it again");
}

std::variant<core::TenantTag, Reply> Records::tenant_meant(std::string_view body) {
    const auto unclear = [](std::string_view why) { return problem(400, "Not a tenant", why); };
    boost::system::error_code failed;
    const json::value parsed = json::parse(json::string_view(body.data(), body.size()), failed);
    if (failed || !parsed.is_object() || parsed.as_object().size() != 1 || !parsed.as_object().begin()->value().is_string()) {
        return unclear(R"(the body must be a JSON object with one member: {"client": "…"}, {"credential": "…"}, {"consumer": "…"} or {"record": "<intent>"})");
    }
    const auto& [key, value] = *parsed.as_object().begin();
    const std::string_view member(key.data(), key.size());
    const std::string_view text(value.as_string().data(), value.as_string().size());
    if (member == "record") {
        StoredKey intent;
        if (!base::digest_from_base64url(text, intent)) return unclear("an intent is the 43 characters of the response header Semel-Intent");
        const auto decided = ask({intent, core::Get{}});
        if (!decided) return store_problem(decided.error());
        const auto* found = std::get_if<core::Found>(&decided->outcome);
        if (found == nullptr || !found->record) return no_such_record();
        if (found->record->tenant == core::TenantTag{}) return unclear("the record was kept for no tenant");
        return found->record->tenant;
    }
    IntentName name;
    if (member == "client") {
        name.client = text;
    } else if (member == "credential") {
        name.credential = text;
    } else if (member == "consumer") {
        name.consumer = text;
        if (const auto tag = text.empty() ? std::nullopt : tenants_.tag_of(name)) return *tag;
        return unclear("no consumer of this name records answers in this store: one with a store of its own is erased there "
                       "(semel record erase --consumer NAME --config FILE), and what lies in a database is deleted there");
    } else {
        return unclear("client, credential, consumer or record say which tenant is meant; nothing else is known");
    }
    const auto tag = text.empty() ? std::nullopt : tenants_.tag_of(name);
    if (!tag) return unclear("a client's name has 1 to 255 bytes, a credential at least one");
    return *tag;
}

Reply Records::erase(std::string_view body, bool dry_run) {
    if (tenants_.vault == nullptr || !tenants_.tag_of) {
        return problem(409, "Nothing is sealed", "this store is not opened with the deployment's secret; no tenant can be erased");
    }
    auto meant = tenant_meant(body);
    if (auto* refused = std::get_if<Reply>(&meant)) return std::move(*refused);
    const core::TenantTag tenant = std::get<core::TenantTag>(meant);
    json::object o{{"tenant", base::hex({reinterpret_cast<const char*>(tenant.bytes.data()), tenant.bytes.size()})}};
    if (dry_run) {
        o["dry_run"] = true;
        return json_reply(o);
    }
    const auto failed = [](const base::Error& error) {
        return problem(503, "Not erased for certain",
                       (error.detail.empty() ? "the store did not answer" : error.detail) + "; repeat the command");
    };
    // Whoever was never served has no key: a name that is misspelled is not reported as erased.
    const bool served = tenants_.vault->find(tenant) != nullptr;
    const core::ClaimValue first = tenants_.vault->key_wanted(tenant).operation;
    const auto present = ask_value(first);
    if (!present) return failed(present.error());
    if (!served && *present == first.value_if_absent) {
        return problem(404, "No such tenant", "no data is kept for this tenant: check its name");
    }
    const auto replaced = ask_value(tenants_.vault->fresh_key(tenant));
    if (!replaced) return failed(replaced.error());
    const auto asked_at = base::system_clocks().steady();
    const auto marked = ask_value(engine::Vault::fresh_mark());
    if (!marked) return failed(marked.error());
    tenants_.vault->take_mark(*marked, asked_at);
    o["erased"] = true;
    o["noticed_elsewhere_within_ms"] = engine::Vault::usable_for.count();
    o["not_covered"] = json::array{"copies of the store made before (backups, snapshots, replicas' files)",
                                   "what running calls still send to their clients; it is not kept",
                                   "what records hold besides contents: digests, times, models, token counts"};
    return json_reply(o);
}

base::Result<std::string> Records::ask_value(core::StoreOperation operation) {
    auto decided = ask({StoredKey{}, std::move(operation)});
    if (!decided) return decided.error();
    auto* value = std::get_if<core::Value>(&decided->outcome);
    SEMEL_ASSERT(value != nullptr, "ClaimValue and ReplaceValue are answered by a Value");
    return std::move(value->value);
}

base::Result<engine::DataKeyPtr> Records::data_key_of(const core::TenantTag& tenant) {
    engine::Vault* const vault = tenants_.vault;
    if (vault == nullptr || tenant == core::TenantTag{}) return engine::DataKeyPtr{};
    for (;;) {
        const auto now = base::system_clocks().steady();
        if (!vault->fresh(now)) {
            const auto mark = ask_value(engine::Vault::mark_wanted());
            if (!mark) return mark.error();
            vault->take_mark(*mark, now);
        }
        if (auto known = vault->find(tenant)) return known;
        const engine::Vault::KeyWanted wanted = vault->key_wanted(tenant);
        const auto wrapped = ask_value(wanted.operation);
        if (!wrapped) return wrapped.error();
        auto key = vault->take_key(tenant, *wrapped, wanted.generation, now);
        if (!key || *key) return key;
    }
}

base::Result<core::RecordPtr> Records::opened(const StoredKey& intent, core::RecordPtr record) {
    if (!engine::is_sealed(*record)) return record;
    const auto data_key = data_key_of(record->tenant);
    if (!data_key) return data_key.error();
    return engine::opened(intent, std::move(record), data_key->get());
}

base::Result<core::Decided> Records::ask(core::Item item) {
    auto answered = std::make_shared<std::promise<core::BatchResults>>();  // outlives a wait that was given up
    auto answer = answered->get_future();
    std::vector<core::Item> items;
    items.push_back(std::move(item));
    store_.submit(std::move(items), [answered](core::BatchResults results) { answered->set_value(std::move(results)); });
    if (answer.wait_for(store_patience) != std::future_status::ready) {
        return base::Error{.code = base::ErrorCode::store_unavailable,
                           .applied = base::Applied::unknown,
                           .detail = "the store did not answer within 10 s; look again before you repeat a decision"};
    }
    core::BatchResults results = answer.get();
    SEMEL_ASSERT(results.size() == 1, "a store gives one result per item");
    return std::move(results.front());
}

}  // namespace semel::admin
