#include "admin/admin.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json.hpp>
#include <memory>
#include <set>

#include "runtime/loop.hpp"
#include "stores/memory/memory_store.hpp"

namespace semel::admin {
namespace {

namespace json = boost::json;
using testing::HasSubstr;
using testing::Not;

class FixedClock final : public base::Clock {
  public:
    [[nodiscard]] base::SteadyTime steady() const override { return base::SteadyTime{std::chrono::microseconds{now_us}}; }
    [[nodiscard]] std::int64_t wall_us() const override { return 1'764'438'431'000'000 + now_us; }
    void advance(std::chrono::milliseconds by) { now_us += std::chrono::microseconds(by).count(); }
    std::int64_t now_us = 0;
};

core::StoredKey key(std::string_view name) { return base::sha256(name); }
std::string intent(std::string_view name) { return base::base64url(key(name).view()); }

class AdminApi : public testing::Test {
  protected:
    AdminApi()
        : store_(stores::make_memory_store(clock_)), records_(*store_, [](const IntentName& name) -> std::optional<core::StoredKey> {
              if (name.client.empty()) return std::nullopt;
              return key(name.client + "/" + name.operation + "/" + name.id);
          }) {}

    core::StoreOutcome ask(core::StoredKey k, core::StoreOperation operation) {
        std::vector<core::Item> items;
        items.push_back({k, std::move(operation)});
        std::optional<core::StoreOutcome> outcome;
        store_->submit(std::move(items), [&](core::BatchResults results) { outcome = results.at(0).value().outcome; });
        return std::move(outcome.value());
    }
    core::Granted acquire(std::string_view name, core::OnUnknown on_unknown = core::OnUnknown::hold,
                          std::string label = "/v1/chat/completions") {
        core::Acquire acquire{.owner = {.id = "me"}, .not_after = store_->now() + std::chrono::hours{1}};
        acquire.fingerprint.raw = base::sha256("request");
        acquire.nonce.bytes[0] = 7;
        acquire.policy.on_unknown = on_unknown;
        acquire.label = std::move(label);
        return std::get<core::Granted>(ask(key(name), acquire));
    }
    /// A record whose call may have happened.
    core::Granted unknown(std::string_view name, std::string label = "/v1/chat/completions") {
        const core::Granted granted = acquire(name, core::OnUnknown::hold, std::move(label));
        core::Nonce nonce;
        nonce.bytes[0] = 7;
        ask(key(name), core::Start{granted.token, nonce});
        core::Fail fail{.token = granted.token, .nonce = nonce, .failure = {"upstream-reset", "the connection broke", 0}};
        ask(key(name), fail);
        return granted;
    }
    json::value get(const std::string& path, std::string_view query = {}, int expected = 200) {
        const Reply reply = records_.answer("GET", path, query, {});
        EXPECT_EQ(reply.status, expected) << reply.body;
        return json::parse(reply.body);
    }
    Reply resolve(std::string_view name, const json::object& decision, std::string_view query = {}) {
        return records_.answer("POST", "/admin/records/" + intent(name) + "/resolve", query, json::serialize(decision));
    }
    core::RecordPtr record(std::string_view name) { return std::get<core::Found>(ask(key(name), core::Get{})).record; }

    FixedClock clock_;
    std::unique_ptr<core::Store> store_;
    Records records_;
};

/// Records of tenants, whose contents are sealed.
class SealedAdminApi : public AdminApi {
  protected:
    static core::TenantTag tag_of(std::string_view name) { return {{static_cast<std::uint8_t>(name.front())}}; }
    static std::optional<core::TenantTag> named(const IntentName& name) {
        if (name.client.empty()) return std::nullopt;
        return tag_of(name.client);
    }
    SealedAdminApi()
        : sealed_(*store_, [](const IntentName&) -> std::optional<core::StoredKey> { return std::nullopt; },
                  Tenants{.tag_of = named, .vault = &vault_}) {}

    /// The tenant's key, as a gateway has it.
    engine::DataKeyPtr data_key(std::string_view tenant) {
        const auto wanted = vault_.key_wanted(tag_of(tenant));
        const auto wrapped = std::get<core::Value>(ask({}, wanted.operation)).value;
        return vault_.take_key(tag_of(tenant), wrapped, wanted.generation, clock_.steady()).value();
    }
    void completed(std::string_view name, std::string_view tenant, const std::string& body) {
        core::Acquire acquire{.owner = {.id = "me"}, .not_after = store_->now() + std::chrono::hours{1}, .tenant = tag_of(tenant)};
        acquire.nonce.bytes[0] = 7;
        const auto granted = std::get<core::Granted>(ask(key(name), acquire));
        core::Complete complete{.token = granted.token, .nonce = acquire.nonce};
        complete.answer.body = std::make_shared<const std::string>(body);
        data_key(tenant)->seal(key(name), complete.answer);
        ask(key(name), complete);
    }
    Reply erase(const std::string& body, std::string_view query = {}) {
        return sealed_.answer("POST", "/admin/tenants/erase", query, body);
    }
    Reply body_of(std::string_view name) { return sealed_.answer("GET", "/admin/records/" + intent(name), "body=1", {}); }

    engine::Vault vault_{"secret", nullptr};
    Records sealed_;
};

TEST_F(SealedAdminApi, a_tenants_answers_are_read_until_it_is_erased_and_others_stay) {
    completed("a", "web", "of web");
    completed("b", "batch", "of batch");
    EXPECT_EQ(body_of("a").body, "of web");
    EXPECT_EQ(records_.answer("GET", "/admin/records/" + intent("a"), "body=1", {}).status, 404) << "without the secret";
    const auto before = data_key("web")->id();
    EXPECT_EQ(erase(R"({"client": "web"})", "dry_run=1").status, 200);
    EXPECT_EQ(body_of("a").body, "of web") << "a dry run changes nothing";
    const Reply done = erase(R"({"client": "web"})");
    EXPECT_EQ(done.status, 200) << done.body;
    EXPECT_EQ(json::parse(done.body).at("erased"), true);
    EXPECT_NE(data_key("web")->id(), before);
    EXPECT_EQ(body_of("a").status, 404);
    EXPECT_THAT(body_of("a").body, HasSubstr("erased"));
    const Reply shown = sealed_.answer("GET", "/admin/records/" + intent("a"), {}, {});
    EXPECT_EQ(json::parse(shown.body).at("answer").at("body_kind"), "not_kept");
    EXPECT_EQ(json::parse(shown.body).at("status"), "COMPLETED");
    EXPECT_EQ(body_of("b").body, "of batch");
    EXPECT_EQ(erase(json::serialize(json::object{{"record", intent("b")}})).status, 200);
    EXPECT_EQ(body_of("b").status, 404) << "meant by one of its records";
}

TEST_F(SealedAdminApi, what_means_nobody_erases_nobody) {
    completed("a", "web", "of web");
    EXPECT_EQ(erase(R"({"client": "misspelled"})").status, 404);
    EXPECT_EQ(erase(json::serialize(json::object{{"record", intent("unknown")}})).status, 404);
    for (const char* unclear : {"", "[]", "{}", R"({"client": ""})", R"({"client": 1})", R"({"user": "u"})", R"({"record": "short"})",
                                R"({"client": "web", "credential": "c"})"}) {
        EXPECT_EQ(erase(unclear).status, 400) << unclear;
    }
    EXPECT_EQ(sealed_.answer("GET", "/admin/tenants/erase", {}, {}).status, 405);
    EXPECT_EQ(records_.answer("POST", "/admin/tenants/erase", {}, R"({"client": "web"})").status, 409);
    EXPECT_EQ(body_of("a").body, "of web");
    acquire("of nobody");
    EXPECT_EQ(erase(json::serialize(json::object{{"record", intent("of nobody")}})).status, 400);
}

TEST_F(AdminApi, a_running_record_shows_its_lease_and_nothing_of_its_request) {
    const core::Granted granted = acquire("a");
    clock_.advance(std::chrono::seconds{4});
    const json::value shown = get("/admin/records/" + intent("a"));
    EXPECT_EQ(shown.at("status"), "PROCESSING");
    EXPECT_EQ(shown.at("intent"), json::string_view(intent("a")));
    EXPECT_EQ(shown.at("token").to_number<std::uint64_t>(), granted.token.value);
    EXPECT_EQ(shown.at("lease_remaining_ms").to_number<int>(), 6000);
    EXPECT_TRUE(shown.at("completed").is_null());
    EXPECT_TRUE(shown.at("expires").is_null());
    EXPECT_TRUE(shown.at("usage").at("input_tokens").is_null()) << "unknown counts are never shown as a number";
    EXPECT_FALSE(shown.as_object().contains("nonce"));
}

TEST_F(AdminApi, a_completed_record_shows_its_answer_but_gives_the_bytes_only_when_asked_for) {
    const core::Granted granted = acquire("a");
    core::Answer answer{.http_status = 200, .content_type = "application/json", .body_bytes = 13};
    answer.body = std::make_shared<const std::string>("{\"secret\":\"\xff\"}");
    core::Nonce nonce;
    nonce.bytes[0] = 7;
    core::Complete complete{.token = granted.token, .nonce = nonce, .answer = answer};
    complete.usage.model = "m";
    complete.usage.input_tokens = 0;
    ask(key("a"), complete);

    const Reply shown = records_.answer("GET", "/admin/records/" + intent("a"), {}, {});
    EXPECT_THAT(shown.body, Not(HasSubstr("secret")));
    const json::value parsed = json::parse(shown.body);
    EXPECT_EQ(parsed.at("status"), "COMPLETED");
    EXPECT_EQ(parsed.at("answer").at("body_kind"), "inline");
    EXPECT_EQ(parsed.at("usage").at("input_tokens"), 0);
    EXPECT_TRUE(parsed.at("lease_remaining_ms").is_null());
    const Reply bytes = records_.answer("GET", "/admin/records/" + intent("a"), "body=1", {});
    EXPECT_EQ(bytes.body, *answer.body);
    EXPECT_EQ(bytes.content_type, "application/octet-stream") << "an upstream's page must not run on this origin";
}

TEST_F(AdminApi, pages_cover_every_record_of_a_status_once) {
    for (int i = 0; i < 7; ++i) acquire("run" + std::to_string(i));
    for (int i = 0; i < 5; ++i) unknown("held" + std::to_string(i));
    std::set<std::string> seen;
    std::string query = "status=unknown&limit=2";
    for (int pages = 0; pages < 10; ++pages) {
        const json::value page = get("/admin/records", query);
        for (const json::value& one : page.at("records").as_array()) {
            EXPECT_EQ(one.at("status"), "UNKNOWN");
            EXPECT_TRUE(seen.insert(one.at("intent").as_string().c_str()).second) << "listed twice";
        }
        if (page.at("next").is_null()) break;
        query = "status=unknown&limit=2&cursor=" + std::string(page.at("next").as_string().c_str());
    }
    EXPECT_EQ(seen.size(), 5U);
    EXPECT_EQ(get("/admin/records").at("records").as_array().size(), 12U);
}

TEST_F(AdminApi, what_is_not_understood_is_refused_with_a_sentence) {
    get("/admin/records", "status=odd", 400);
    get("/admin/records", "limit=0", 400);
    get("/admin/records", "limit=1001", 400);
    get("/admin/records", "cursor=xyz", 400);
    get("/admin/records/short", {}, 400);
    get("/admin/recordsets", {}, 404);
    get("/admin/records/" + intent("a") + "/other", {}, 404);
    EXPECT_THAT(get("/admin/records/" + intent("absent"), {}, 404).at("detail").as_string().c_str(), HasSubstr("no record"));
    EXPECT_EQ(records_.answer("DELETE", "/admin/records/" + intent("a"), {}, {}).status, 405);
    EXPECT_EQ(records_.answer("GET", "/admin/records/" + intent("a") + "/resolve", {}, {}).status, 405);
}

TEST_F(AdminApi, a_record_resolved_as_completed_replays_the_given_answer) {
    const core::Granted granted = unknown("a");
    const std::string body = R"({"id":"chatcmpl-1","choices":[]})";
    const json::object decision{{"decision", "completed"}, {"token", granted.token.value}, {"body", body}, {"reason", "found it"}};
    EXPECT_EQ(resolve("a", decision, "dry_run=1").status, 200);
    EXPECT_EQ(record("a")->status, core::Status::unknown) << "a dry run changes nothing";

    const Reply done = resolve("a", decision);
    ASSERT_EQ(done.status, 200) << done.body;
    EXPECT_EQ(json::parse(done.body).at("status"), "COMPLETED");
    const core::RecordPtr kept = record("a");
    EXPECT_EQ(*kept->answer->body, body);
    EXPECT_EQ(kept->answer->http_status, 200);
    EXPECT_EQ(kept->answer->body_bytes, body.size());
    EXPECT_EQ(kept->answer->body_digest, base::sha256(body));
    EXPECT_FALSE(kept->answer->stream);
    EXPECT_GT(kept->token, granted.token) << "the owner that was given up may not overwrite the decision";
}

TEST_F(AdminApi, a_stream_is_resolved_by_whole_events_only) {
    const core::Granted granted = unknown("a");
    json::object decision{{"decision", "completed"}, {"token", granted.token.value}, {"content_type", "text/event-stream"}};
    for (const char* cut : {"data: {}\n\n", "data: {}\n\ndata: [DONE]", "data: {}\n\ndata: [DONE]\n"}) {
        decision["body"] = cut;
        EXPECT_EQ(resolve("a", decision).status, 422) << cut;
    }
    decision["body"] = "data: {}\n\ndata: [DONE]\n\n";
    EXPECT_EQ(resolve("a", decision).status, 200);
    EXPECT_TRUE(record("a")->answer->stream);
}

TEST_F(AdminApi, an_answer_no_sdk_would_take_is_refused) {
    const core::Granted granted = unknown("a");
    for (const char* body : {"", "[]", "{", "hello"}) {
        const Reply reply = resolve("a", {{"decision", "completed"}, {"token", granted.token.value}, {"body", body}});
        EXPECT_EQ(reply.status, 422) << body;
    }
    const Reply html = resolve(
        "a", {{"decision", "completed"}, {"token", granted.token.value}, {"body", "{}"}, {"content_type", "text/html"}});
    EXPECT_EQ(html.status, 422);
    EXPECT_EQ(record("a")->status, core::Status::unknown);
}

TEST_F(AdminApi, a_chat_answer_is_its_own_object_not_the_upstreams) {
    const core::Granted granted = unknown("a", "chat");
    json::object decision{{"decision", "completed"}, {"token", granted.token.value}, {"body", R"({"choices":[]})"}};
    EXPECT_EQ(resolve("a", decision).status, 422);
    decision["content_type"] = "text/event-stream";
    for (const char* body : {"event: delta\ndata: {}\n\n", "event: done\ndata: {}\n\n", "event: done\ndata: {\"status\":\n\n"}) {
        decision["body"] = body;
        EXPECT_EQ(resolve("a", decision).status, 422) << body;
    }
    decision["content_type"] = "application/json";
    decision["body"] = R"({"requestId": "r", "status": "COMPLETED", "content": "hello", "fromCache": true})";
    EXPECT_EQ(resolve("a", decision).status, 200);
    EXPECT_EQ(*record("a")->answer->body, R"({"fromCache":false,"requestId":"r","status":"COMPLETED","content":"hello"})")
        << "as the gateway writes it, so that replays can mark it";
}

TEST_F(AdminApi, a_decision_on_an_older_state_or_on_a_record_that_needs_none_changes_nothing) {
    const core::Granted granted = unknown("a");
    EXPECT_EQ(resolve("a", {{"decision", "failed"}, {"token", granted.token.value - 1}}).status, 409);
    EXPECT_EQ(record("a")->status, core::Status::unknown);
    EXPECT_EQ(resolve("a", {{"decision", "failed"}, {"token", granted.token.value}}).status, 200);
    EXPECT_EQ(record("a")->status, core::Status::failed);
    const Reply again = resolve("a", {{"decision", "failed"}, {"token", granted.token.value}});
    EXPECT_EQ(again.status, 409);
    EXPECT_THAT(again.body, HasSubstr("FAILED"));
    EXPECT_EQ(resolve("absent", {{"decision", "failed"}, {"token", 1}}).status, 404);
}

TEST_F(AdminApi, a_malformed_decision_is_refused_before_the_record_is_looked_at) {
    unknown("a");
    const std::string path = "/admin/records/" + intent("a") + "/resolve";
    for (const char* body :
         {"", "[]", "{}", R"({"decision": "failed"})", R"({"token": 1})", R"({"decision": "maybe", "token": 1})",
          R"({"decision": "failed", "token": -1})", R"({"decision": "failed", "token": "1"})",
          R"({"decision": "failed", "token": 1, "body": "{}"})", R"({"decision": "completed", "token": 1})",
          R"({"decision": "failed", "token": 1, "colour": "red"})", R"({"decision": "failed", "token": 1, "reason": 5})"}) {
        EXPECT_EQ(records_.answer("POST", path, {}, body).status, 400) << body;
    }
}

TEST_F(AdminApi, an_intent_is_found_by_its_clients_name_for_it) {
    acquire("web//v1/chat/completions/click-1");
    const Reply found = records_.answer("POST", "/admin/lookup", {},
                                        R"({"operation": "/v1/chat/completions", "client": "web", "id": "click-1"})");
    ASSERT_EQ(found.status, 200) << found.body;
    EXPECT_EQ(get("/admin/records/" + std::string(json::parse(found.body).at("intent").as_string().c_str())).at("status"), "PROCESSING");
    for (const char* bad : {"", R"({"operation": "chat", "client": "web"})", R"({"operation": "chat", "id": "x"})",
                            R"({"operation": "chat", "id": "x", "client": "web", "credential": "s3cret"})",
                            R"({"operation": "chat", "id": 5, "client": "web"})"}) {
        const Reply refused = records_.answer("POST", "/admin/lookup", {}, bad);
        EXPECT_EQ(refused.status, 400) << bad;
        EXPECT_THAT(refused.body, Not(HasSubstr("s3cret")));
    }
}

TEST_F(AdminApi, times_are_rfc_3339_in_utc) {
    EXPECT_EQ(rfc3339({0}), "");
    EXPECT_EQ(rfc3339({1'764'438'431'250'000}), "2025-11-29T17:47:11.250Z");
    EXPECT_EQ(rfc3339({951'782'400'000'000}), "2000-02-29T00:00:00.000Z");
}

// ---------------------------------------------------------------- the handler

/// One request given as values; the answer as it was given.
class FakeExchange final : public http::Exchange {
  public:
    FakeExchange(std::string_view method, std::string_view path, std::vector<http::Header> headers) {
        head_.method = method;
        head_.path = head_.target = path;
        head_.headers = std::move(headers);
    }
    [[nodiscard]] const http::RequestHead& head() const override { return head_; }
    [[nodiscard]] std::string peer() const override { return "127.0.0.1:1"; }
    runtime::Task<http::BodyStatus> read_body(std::string& into, std::uint64_t) override {
        into.clear();
        co_return http::BodyStatus::ok;
    }
    runtime::Task<http::BodyPiece> read_some() override { co_return http::BodyPiece{}; }
    runtime::Task<bool> respond(const http::ResponseHead& head, std::span<const std::string_view> pieces) override {
        status = head.status;
        for (const std::string_view piece : pieces) body += piece;
        co_return true;
    }
    void begin(const http::ResponseHead&, std::optional<std::uint64_t>) override {}
    runtime::Task<bool> write(std::string_view) override { co_return true; }
    runtime::Task<bool> finish(std::string_view) override { co_return true; }
    void cut() override {}
    bool client_gone() override { return false; }

    int status = 0;
    std::string body;

  private:
    http::RequestHead head_;
};

class AdminAddress : public AdminApi {
  protected:
    int ask_handler(Admin& admin, std::string_view path, std::vector<http::Header> headers) {
        runtime::Loop loop(clock_, runtime::Loop::Mode::simulated);
        FakeExchange exchange("GET", path, std::move(headers));
        loop.spawn(admin.handle(exchange));
        loop.run_ready();
        EXPECT_EQ(loop.spawned(), 0U);
        body = exchange.body;
        return exchange.status;
    }
    Probes probes() {
        return {.not_alive = [] { return std::vector<std::string>{}; },
                .not_ready = [this] { return reasons; },
                .metrics = [] { return std::string("semel_up 1\n"); },
                .consumers = {}};
    }
    static std::optional<core::StoredKey> nobody(const IntentName&) { return std::nullopt; }
    std::vector<std::string> reasons;
    std::string body;
};

TEST_F(AdminAddress, readiness_names_its_reasons_and_health_does_not_depend_on_it) {
    Admin admin(*store_, nobody, probes(), true);
    EXPECT_EQ(ask_handler(admin, "/readyz", {}), 200);
    reasons = {"store: the disk is full"};
    EXPECT_EQ(ask_handler(admin, "/readyz", {}), 503);
    EXPECT_THAT(body, HasSubstr("the disk is full"));
    EXPECT_EQ(ask_handler(admin, "/healthz", {}), 200);
    EXPECT_EQ(ask_handler(admin, "/metrics", {}), 200);
    EXPECT_EQ(body, "semel_up 1\n");
    EXPECT_EQ(ask_handler(admin, "/v1/models", {}), 404);
}

class AdminConsumers : public testing::Test {
  protected:
    AdminConsumers() {
        controls_.list = [] {
            ConsumerView view;
            view.name = "shop/orders";
            view.group = "shop";
            view.condition = "paused";
            view.reason = "a person said so";
            view.partitions.push_back({.topic = "orders", .number = 3, .position = 9});
            view.alarms = {"partition orders-3 stays silent"};
            view.counts = {{"applied", 7}};
            return std::vector<ConsumerView>{view};
        };
        controls_.lag = [this](const std::string& name) -> std::optional<base::Result<ConsumerLags>> {
            if (name != "shop/orders") return std::nullopt;
            if (away_) return base::Error{.detail = "no broker answers"};
            return ConsumerLags{.partitions = {{.topic = "orders", .number = 0, .end = 5, .lag = 5},
                                               {.topic = "orders", .number = 1, .end = 9, .committed = 7, .lag = 2}},
                                .behind_ms = 1500};
        };
        controls_.tell = [this](const std::string& name, ConsumerCommand command,
                                const std::string& reason) -> std::optional<base::Result<void>> {
            if (name != "shop/orders") return std::nullopt;
            if (away_) return base::Error{.detail = "it does not run yet"};
            told_.emplace_back(command, reason);
            return base::Result<void>{};
        };
    }
    Reply ask(std::string_view method, std::string_view path, std::string_view body = {}) {
        return answer_about_consumers(controls_, method, path, body);
    }
    bool away_ = false;
    std::vector<std::pair<ConsumerCommand, std::string>> told_;
    ConsumerControls controls_;
};

TEST_F(AdminConsumers, are_listed_and_shown_with_what_somebody_should_look_at) {
    const Reply all = ask("GET", "/admin/consumers");
    EXPECT_EQ(all.status, 200);
    const json::value one = json::parse(all.body).at("consumers").at(0);
    EXPECT_EQ(one.at("name"), "shop/orders");
    EXPECT_EQ(one.at("condition"), "paused");
    EXPECT_EQ(one.at("alarms").at(0), "partition orders-3 stays silent");
    EXPECT_EQ(one.at("partitions").at(0).at("partition"), 3);
    EXPECT_TRUE(one.at("partitions").at(0).at("committed").is_null()) << "nothing yet";
    EXPECT_EQ(one.at("counts").at("applied"), 7);
    EXPECT_EQ(json::parse(ask("GET", "/admin/consumers/shop%2Forders").body), one);
    const Reply none = ask("GET", "/admin/consumers/nobody");
    EXPECT_EQ(none.status, 404);
    EXPECT_THAT(none.body, HasSubstr("there are: shop/orders"));
    controls_ = {};
    EXPECT_EQ(json::parse(ask("GET", "/admin/consumers").body).at("consumers").as_array().size(), 0U);
}

TEST_F(AdminConsumers, lag_is_summed_and_says_when_it_cannot_be_asked) {
    const json::value lag = json::parse(ask("GET", "/admin/consumers/shop%2Forders/lag").body);
    EXPECT_EQ(lag.at("lag"), 7);
    EXPECT_EQ(lag.at("behind_ms"), 1500);
    EXPECT_EQ(lag.at("partitions").at(1).at("committed"), 7);
    away_ = true;
    const Reply unknown = ask("GET", "/admin/consumers/shop%2Forders/lag");
    EXPECT_EQ(unknown.status, 503);
    EXPECT_THAT(unknown.body, HasSubstr("no broker answers"));
}

TEST_F(AdminConsumers, are_told_by_post_alone_with_an_optional_reason) {
    EXPECT_EQ(ask("POST", "/admin/consumers/shop%2Forders/pause", R"({"reason": "a move"})").status, 200);
    EXPECT_EQ(ask("POST", "/admin/consumers/shop%2Forders/resume").status, 200);
    EXPECT_EQ(ask("POST", "/admin/consumers/shop%2Forders/drain", "{}").status, 200);
    const std::vector<std::pair<ConsumerCommand, std::string>> wanted{
        {ConsumerCommand::pause, "a move"}, {ConsumerCommand::resume, ""}, {ConsumerCommand::drain, ""}};
    EXPECT_EQ(told_, wanted);
    EXPECT_EQ(ask("GET", "/admin/consumers/shop%2Forders/pause").status, 405);
    EXPECT_EQ(ask("POST", "/admin/consumers").status, 405);
    EXPECT_EQ(ask("POST", "/admin/consumers/shop%2Forders").status, 405);
    EXPECT_EQ(ask("POST", "/admin/consumers/shop%2Forders/lag").status, 405);
    EXPECT_EQ(ask("POST", "/admin/consumers/shop%2Forders/explode").status, 404);
    EXPECT_EQ(ask("POST", "/admin/consumers/nobody/pause").status, 404);
    for (const char* body : {"pause", "[]", R"({"reason": 7})"})
        EXPECT_EQ(ask("POST", "/admin/consumers/shop%2Forders/pause", body).status, 400) << body;
    away_ = true;
    EXPECT_EQ(ask("POST", "/admin/consumers/shop%2Forders/pause").status, 409);
    EXPECT_EQ(told_, wanted);
}

TEST_F(AdminAddress, the_consumers_are_behind_the_same_rules_as_the_records) {
    Admin admin(*store_, nobody, probes(), true);
    EXPECT_EQ(ask_handler(admin, "/admin/consumers", {{"Host", "localhost"}}), 200);
    EXPECT_EQ(body, "{\"consumers\":[]}\n");
    EXPECT_EQ(ask_handler(admin, "/admin/consumers", {{"Host", "evil.example"}}), 403);
    EXPECT_EQ(ask_handler(admin, "/admin/consumers", {{"Host", "localhost"}, {"Origin", "https://evil.example"}}), 403);
    Admin elsewhere(*store_, nobody, probes(), false);
    EXPECT_EQ(ask_handler(elsewhere, "/admin/consumers", {{"Host", "localhost"}}), 403);
}

TEST_F(AdminAddress, a_foreign_page_cannot_use_the_admin_api_of_a_loopback_address) {
    Admin admin(*store_, nobody, probes(), true);
    for (const char* host : {"localhost", "127.0.0.1:8788", "[::1]:8788", "LOCALHOST:1"}) {
        EXPECT_EQ(ask_handler(admin, "/admin/records", {{"Host", host}}), 200) << host;
        EXPECT_EQ(ask_handler(admin, "/admin/records", {{"Host", host}, {"Origin", "http://localhost:3000"}}), 200) << host;
    }
    for (const char* host : {"evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "127.evil", "[::1].evil", ""}) {
        EXPECT_EQ(ask_handler(admin, "/admin/records", {{"Host", host}}), 403) << host;
    }
    EXPECT_EQ(ask_handler(admin, "/admin/records", {}), 403) << "no Host";
    for (const char* origin : {"https://evil.example", "null", "http://127.0.0.1.evil.example"}) {
        EXPECT_EQ(ask_handler(admin, "/admin/records", {{"Host", "localhost"}, {"Origin", origin}}), 403) << origin;
    }
}

TEST_F(AdminAddress, elsewhere_than_on_loopback_only_health_and_metrics_answer) {
    Admin admin(*store_, nobody, probes(), false);
    EXPECT_EQ(ask_handler(admin, "/admin/records", {{"Host", "localhost"}}), 403);
    EXPECT_EQ(ask_handler(admin, "/readyz", {{"Host", "gateway.internal"}}), 200);
    EXPECT_EQ(ask_handler(admin, "/metrics", {{"Host", "gateway.internal"}}), 200);
}

}  // namespace
}  // namespace semel::admin
