// What is read from a request: its id, its caller, its fingerprint, and what an OpenAI body says.
#include <gtest/gtest.h>

#include "gateway/dialects/openai.hpp"
#include "gateway/fingerprint.hpp"
#include "gateway/follower.hpp"
#include "gateway/identity.hpp"
#include "gateway/problem.hpp"
#include "gateway/protected.hpp"
#include "gateway/request_id.hpp"
#include "gateway/upstreams.hpp"

namespace semel::gateway {
namespace {

using namespace std::chrono_literals;

http::RequestHead head_with(std::vector<http::Header> headers,
                            std::string_view target = "/v1/chat/completions") {
    http::RequestHead head;
    head.method = "POST";
    head.target = target;
    const auto query = target.find('?');
    head.path = target.substr(0, query);
    if (query != std::string_view::npos) head.query = target.substr(query + 1);
    head.headers = std::move(headers);
    return head;
}

std::string id_of(std::vector<http::Header> headers, bool alias = false) {
    const http::RequestHead head = head_with(std::move(headers));
    const RequestId id = read_request_id(head, alias);
    if (const auto* text = std::get_if<std::string>(&id)) return *text;
    return std::holds_alternative<NoId>(id) ? "(none)" : "(malformed)";
}

TEST(RequestId, bare_and_quoted_values_are_the_same_id) {
    EXPECT_EQ(id_of({{"Idempotency-Key", "8e03978e-40d5"}}), "8e03978e-40d5");
    EXPECT_EQ(id_of({{"idempotency-key", "\"8e03978e-40d5\""}}), "8e03978e-40d5");
    EXPECT_EQ(id_of({{"Idempotency-Key", R"("a\"b\\c")"}}), "a\"b\\c");
    EXPECT_EQ(id_of({{"Idempotency-Key", std::string(255, 'k')}}), std::string(255, 'k'));
}

TEST(RequestId, every_malformed_value_is_told_apart_from_a_missing_one) {
    EXPECT_EQ(id_of({}), "(none)");
    const std::string too_long(256, 'k');
    const std::string nul("a\0b", 3);
    for (const std::string_view bad :
         {std::string_view(""), std::string_view("\"\""), std::string_view("\"open"),
          std::string_view("\"a\"b\""), std::string_view("a b"), std::string_view("a,b"),
          std::string_view("k1, k2"), std::string_view("a\"b"), std::string_view("\"a\";p=1"),
          std::string_view("\"a\\x\""), std::string_view("\"a\\\""),
          std::string_view("caf\xc3\xa9"), std::string_view("a\tb"), std::string_view("\x7f"),
          std::string_view("\xff"), std::string_view(too_long), std::string_view(nul)}) {
        EXPECT_EQ(id_of({{"Idempotency-Key", bad}}), "(malformed)") << testing::PrintToString(bad);
    }
}

TEST(RequestId, equal_lines_count_as_one_and_different_ones_are_malformed) {
    EXPECT_EQ(id_of({{"Idempotency-Key", "k"}, {"Idempotency-Key", "\"k\""}}), "k");
    EXPECT_EQ(id_of({{"Idempotency-Key", "k"}, {"Idempotency-Key", "K"}}), "(malformed)");
}

TEST(RequestId, the_alias_is_looked_at_only_where_allowed_and_only_without_the_key) {
    EXPECT_EQ(id_of({{"X-Request-Id", "r"}}), "(none)");
    EXPECT_EQ(id_of({{"X-Request-Id", "r"}}, true), "r");
    EXPECT_EQ(id_of({{"X-Request-Id", "r"}, {"Idempotency-Key", "k"}}, true), "k");
    EXPECT_EQ(id_of({{"X-Request-Id", "r"}, {"Idempotency-Key", ""}}, true), "(malformed)");
}

config::Config plain_config() {
    config::Config config;
    config.routes["/v1/chat/completions"] = {};
    config.routes["/api/chat"] = {};
    return config;
}

std::string who(const Identity& identity, std::vector<http::Header> headers,
                bool with_body = false) {
    http::RequestHead head = head_with(std::move(headers));
    if (with_body) head.content_length = 2;
    TenantCache cache;
    const auto found = identity.identify(head, cache);
    if (const auto* caller = std::get_if<Caller>(&found)) return caller->tenant;
    return std::to_string(std::get<Refusal>(found).status);
}

TEST(Identity,
     with_clients_only_their_tokens_are_admitted_and_two_tokens_of_one_client_are_one_tenant) {
    const base::Hmac secret("secret");
    config::Config config = plain_config();
    config.clients = {{.name = "web", .tokens = {"t1", "t2"}, .may_name_users = true},
                      {.name = "batch", .tokens = {"t3"}}};
    const Identity identity(config, secret);
    EXPECT_EQ(who(identity, {{"Authorization", "Bearer t1"}}), tenant_of_client("web"));
    EXPECT_EQ(who(identity, {{"Authorization", "bearer t2"}}), tenant_of_client("web"));
    EXPECT_EQ(who(identity, {{"X-Api-Key", "t3"}}), tenant_of_client("batch"));
    EXPECT_EQ(who(identity, {{"Authorization", "Bearer t4"}}), "401");
    EXPECT_EQ(who(identity, {{"Authorization", "Bearer "}}), "401");
    EXPECT_EQ(who(identity, {}), "401");
    EXPECT_FALSE(identity.credential_goes_upstream());
}

TEST(Identity, without_clients_a_credential_is_its_own_tenant_and_shows_nowhere) {
    const base::Hmac secret("secret");
    const Identity identity(plain_config(), secret);
    const http::Header host{"Host", "127.0.0.1:8787"};
    const std::string a = who(identity, {host, {"Authorization", "Bearer key-a"}});
    const std::string b = who(identity, {host, {"Authorization", "Bearer key-b"}});
    EXPECT_NE(a, b);
    EXPECT_EQ(a.find("key-a"), std::string::npos);
    EXPECT_EQ(who(identity, {host}), anonymous_tenant);
    EXPECT_NE(a, tenant_of_credential(base::Hmac("other secret"), "key-a"));
}

TEST(Identity, a_foreign_web_page_cannot_use_a_loopback_address_without_clients) {
    const base::Hmac secret("secret");
    const Identity identity(plain_config(), secret);
    EXPECT_EQ(who(identity, {{"Host", "evil.example"}}), "403");
    EXPECT_EQ(who(identity, {{"Host", "127.0.0.1.evil.example"}}), "403");
    EXPECT_EQ(who(identity, {{"Host", "localhost:8787"}, {"Origin", "https://evil.example"}}),
              "403");
    EXPECT_EQ(who(identity, {{"Host", "localhost:8787"}, {"Origin", "null"}}), "403");
    EXPECT_EQ(who(identity, {{"Host", "[::1]:8787"}, {"Origin", "http://localhost:3000"}}),
              anonymous_tenant);
    const http::Header host{"Host", "localhost"};
    EXPECT_EQ(who(identity, {host}, true), "415");
    EXPECT_EQ(who(identity, {host, {"Content-Type", "text/plain; charset=utf-8"}}, true), "415");
    EXPECT_EQ(who(identity, {host, {"Content-Type", "application/x-www-form-urlencoded"}}, true),
              "415");
    EXPECT_EQ(who(identity, {host, {"Content-Type", "application/json"}}, true), anonymous_tenant);
}

TEST(Identity, anonymous_callers_need_loopback_or_permission) {
    const base::Hmac secret("secret");
    config::Config config = plain_config();
    config.listen.host = "0.0.0.0";
    EXPECT_EQ(who(Identity(config, secret), {{"Host", "gateway"}}), "401");
    config.allow_anonymous = true;
    EXPECT_EQ(who(Identity(config, secret), {{"Host", "gateway"}}), anonymous_tenant);
}

TEST(StoredKey, intents_conversations_and_turns_never_share_a_key) {
    const base::Hmac secret("secret");
    const core::IntentKey key{
        .tenant = "t", .operation = "chat", .user = "u", .session = "s", .id = {}};
    const auto intent = stored_key(secret, key);
    EXPECT_NE(intent, conversation_key(secret, "t", "u", "s"));
    EXPECT_NE(intent, turn_key(secret, "t", "u", "s"));
    EXPECT_NE(conversation_key(secret, "t", "u", "s"), turn_key(secret, "t", "u", "s"));
    EXPECT_NE(conversation_key(secret, "t", "us", ""), conversation_key(secret, "t", "u", "s"));
}

TEST(Fingerprints, order_of_members_and_white_space_do_not_matter_and_everything_else_does) {
    const base::Hmac secret("secret");
    const Fingerprints prints(secret);
    const http::RequestHead head = head_with({});
    const std::string body =
        R"({"model":"m","messages":[{"role":"user","content":"hi"}],"stream":false})";
    const auto one = prints.of(head, body);
    EXPECT_TRUE(one.matches(prints.of(
        head, R"({ "stream":false, "messages":[{"content":"hi","role":"user"}], "model":"m" })")));
    for (const char* other :
         {R"({"model":"m","messages":[{"role":"user","content":"ho"}],"stream":false})",
          R"({"model":"n","messages":[{"role":"user","content":"hi"}],"stream":false})",
          R"({"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true})",
          R"({"model":"m","messages":[{"role":"user","content":"hi"}]})",
          R"({"model":"m","messages":[{"role":"user","content":"hi"}],"stream":false,"n":1})",
          "not json"}) {
        EXPECT_FALSE(one.matches(prints.of(head, other))) << other;
    }
    EXPECT_FALSE(one.matches(prints.of(head_with({}, "/v1/chat/completions?x=1"), body)));
    EXPECT_FALSE(one.matches(prints.of(head_with({{"OpenAI-Project", "p"}}), body)));
    EXPECT_TRUE(one.matches(prints.of(head_with({{"X-Stainless-Retry-Count", "1"}}), body)));
    EXPECT_TRUE(prints.of(head, "not json").matches(prints.of(head, "not json")));
    EXPECT_FALSE(prints.of(head, R"({"a":1,"a":2})").matches(prints.of(head, R"({"a":2,"a":1})")));
}

TEST(Fingerprints, a_mismatch_names_the_members_that_differ) {
    const base::Hmac secret("secret");
    const Fingerprints prints(secret);
    const http::RequestHead head = head_with({});
    const std::string now = R"({"model":"b","messages":[1],"mine":1,"same":2})";
    const auto before =
        prints.of(head, R"({"model":"a","messages":[1],"temperature":0.5,"theirs":1,"same":2})");
    const auto names = prints.names(core::differing_fields(before, prints.of(head, now)), now);
    EXPECT_EQ(names,
              (std::vector<std::string>{"(another member)", "mine", "model", "temperature"}));
}

TEST(OpenAi, usage_is_asked_for_and_everything_else_stays_byte_for_byte) {
    using openai::with_usage_asked;
    EXPECT_EQ(with_usage_asked(R"( {"model":"m","stream":true})"),
              R"( {"stream_options":{"include_usage":true},"model":"m","stream":true})");
    EXPECT_EQ(with_usage_asked(R"({"stream_options":null,"stream":true})"),
              R"({"stream_options":{"include_usage":true},"stream":true})");
    EXPECT_EQ(with_usage_asked(R"({"stream_options":{},"stream":true})"),
              R"({"stream_options":{"include_usage":true},"stream":true})");
    EXPECT_EQ(with_usage_asked(R"({"stream_options":{"x": 1},"stream":true})"),
              R"({"stream_options":{"include_usage":true,"x": 1},"stream":true})");
    EXPECT_EQ(with_usage_asked(R"({"stream_options":{"include_usage": false},"stream":true})"),
              R"({"stream_options":{"include_usage": true},"stream":true})");
    EXPECT_FALSE(with_usage_asked(R"({"stream_options":{"include_usage":true},"stream":true})"));
    EXPECT_FALSE(with_usage_asked(R"({"stream_options":"?","stream":true})"));
    EXPECT_FALSE(with_usage_asked("{}"));
    EXPECT_FALSE(with_usage_asked("not json"));
}

TEST(OpenAi, request_facts_also_where_names_are_escaped) {
    const auto facts = openai::read_request(
        R"({"m\u006fdel":"x","stream":true,"stream_options":{"include_usage":true}})");
    EXPECT_EQ(facts.model, "x");
    EXPECT_TRUE(facts.stream);
    EXPECT_TRUE(facts.usage_wanted);
    EXPECT_FALSE(openai::read_request("[1]").is_object);
    EXPECT_EQ(openai::read_request(R"({"model":7})").model, "");
}

TEST(OpenAi, events_are_judged_by_what_they_mean) {
    core::Usage usage;
    EXPECT_TRUE(openai::read_event("", "[DONE]", usage).terminal);
    EXPECT_TRUE(openai::read_event("", R"({"error":{"message":"x"}})", usage).error);
    EXPECT_TRUE(openai::read_event("error", "overloaded", usage).error);
    EXPECT_FALSE(openai::read_event(
                     "", R"({"choices":[{"delta":{"content":"an \"error\" in text"}}]})", usage)
                     .error);
    EXPECT_FALSE(openai::read_event("", R"({"error":null,"choices":[]})", usage).error);
    const auto last = openai::read_event(
        "",
        R"({"model":"m","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":2}}})",
        usage);
    EXPECT_TRUE(last.usage_only);
    EXPECT_EQ(usage.input_tokens, 3);
    EXPECT_EQ(usage.output_tokens, 5);
    EXPECT_EQ(usage.cached_tokens, 2);
    EXPECT_FALSE(
        openai::read_event("", R"({"choices":[{"delta":{}}],"usage":null})", usage).usage_only);
    EXPECT_FALSE(
        openai::read_event("", R"({"choices":[{"delta":{}}],"usage":{"prompt_tokens":3}})", usage)
            .usage_only);
}

TEST(OpenAi, a_success_status_with_an_error_or_nonsense_is_no_answer) {
    const auto complete = [](std::string_view body) {
        core::Usage usage;
        return openai::read_answer(body, usage);
    };
    EXPECT_TRUE(complete(R"({"choices":[]})"));
    EXPECT_FALSE(complete(R"({"error":{"message":"x"}})"));
    EXPECT_FALSE(complete(R"({"choices":[)"));
    EXPECT_FALSE(complete("<html>"));
    EXPECT_FALSE(complete(""));
}

TEST(Upstreams, headers_of_one_hop_credentials_for_us_and_the_clients_key_do_not_go_upstream) {
    config::Config config = plain_config();
    config.upstreams = {{.name = "u",
                         .base_url = "http://127.0.0.1:1",
                         .api_key = "own",
                         .has_api_key = true,
                         .models = {"*"}}};
    const Upstreams upstreams(config);
    const http::RequestHead head = head_with({{"Host", "me"},
                                              {"Authorization", "Bearer client"},
                                              {"Idempotency-Key", "k"},
                                              {"Connection", "close, X-Hop"},
                                              {"X-Hop", "1"},
                                              {"Semel-Upstream", "x"},
                                              {"Accept-Encoding", "gzip"},
                                              {"Content-Type", "application/json"},
                                              {"X-Keep", "2"}});
    const std::string lines = upstream_headers(head, *upstreams.first(), {.protected_route = true});
    EXPECT_EQ(lines.find("client"), std::string::npos);
    EXPECT_EQ(lines.find("Idempotency-Key"), std::string::npos);
    EXPECT_EQ(lines.find("X-Hop"), std::string::npos);
    EXPECT_EQ(lines.find("Semel-Upstream"), std::string::npos);
    EXPECT_EQ(lines.find("gzip"), std::string::npos);
    EXPECT_NE(lines.find("Authorization: Bearer own\r\n"), std::string::npos);
    EXPECT_NE(lines.find("X-Keep: 2\r\n"), std::string::npos);
    const std::string passed = upstream_headers(head, *upstreams.first(), {});
    EXPECT_NE(passed.find("Accept-Encoding: gzip\r\n"), std::string::npos);
}

TEST(Upstreams, cookies_and_rate_limits_are_for_the_first_client_only) {
    const auto sorted = sort_headers({{"Content-Type", "application/json"},
                                      {"Set-Cookie", "s=1"},
                                      {"x-ratelimit-remaining", "9"},
                                      {"x-request-id", "req_1"},
                                      {"Location", "/x"},
                                      {"Keep-Alive", "5"},
                                      {"Foo", "1"},
                                      {"Connection", "foo"}});
    const std::string kept = lines_of(sorted.kept);
    EXPECT_NE(kept.find("x-request-id: req_1"), std::string::npos);
    EXPECT_NE(kept.find("Location: /x"), std::string::npos);
    EXPECT_EQ(kept.find("Cookie"), std::string::npos);
    EXPECT_EQ(kept.find("ratelimit"), std::string::npos);
    EXPECT_NE(sorted.live_lines.find("Set-Cookie"), std::string::npos);
    EXPECT_EQ(sorted.live_lines.find("Foo"), std::string::npos);
    EXPECT_EQ(sorted.live_lines.find("Keep-Alive"), std::string::npos);
    EXPECT_EQ(sorted.upstream_ids, std::vector<std::string>{"req_1"});
}

TEST(JoinDeadline, is_shortly_before_the_clients_own_time_out) {
    const config::RouteConfig route;
    const base::SteadyTime now{};
    EXPECT_EQ(join_deadline(head_with({}), route, now) - now, route.join_timeout);
    EXPECT_EQ(join_deadline(head_with({{"x-stainless-timeout", "2"}}), route, now) - now, 1500ms);
    EXPECT_EQ(join_deadline(head_with({{"x-stainless-timeout", "60"}}), route, now) - now, 58s);
    EXPECT_EQ(
        join_deadline(head_with({{"x-stainless-timeout", "60"}, {"x-stainless-read-timeout", "4"}}),
                      route, now) -
            now,
        3s);
    EXPECT_EQ(join_deadline(head_with({{"x-stainless-timeout", "NOT_GIVEN"}}), route, now) - now,
              route.join_timeout);
    EXPECT_EQ(join_deadline(head_with({{"x-stainless-timeout", "-1"}}), route, now) - now,
              route.join_timeout);
    EXPECT_EQ(join_deadline(head_with({{"x-stainless-timeout", "inf"}}), route, now) - now,
              route.join_timeout);
}

TEST(Problem, retry_after_of_a_running_call_grows_with_it_within_what_sdks_obey) {
    EXPECT_EQ(running_retry_after_s(200ms), 1);
    EXPECT_EQ(running_retry_after_s(4700ms), 4);
    EXPECT_EQ(running_retry_after_s(1h), 8);
}

TEST(Problem, each_shape_says_the_same) {
    const Problem problem{.status = 422,
                          .slug = "key-reused",
                          .detail = "a \"quoted\" word",
                          .should_retry = false,
                          .differs = {"model"},
                          .intent = "i",
                          .request_id = "r"};
    EXPECT_EQ(
        render(problem, Shape::openai),
        R"({"error":{"message":"a \"quoted\" word","type":"invalid_request_error","param":"model","code":"key_reused"}})");
    EXPECT_EQ(
        render(problem, Shape::problem_json),
        R"({"type":"https://semel.dev/problems/key-reused","title":"Key reused","status":422,"detail":"a \"quoted\" word","message":"a \"quoted\" word","requestId":"r","intent":"i","retryable":false,"safe_new_key":false,"differs":["model"]})");
    EXPECT_EQ(header_lines(problem), "x-should-retry: false\r\n");
}

TEST(Rfc3339, is_utc_in_whole_seconds) {
    EXPECT_EQ(rfc3339({0}), "1970-01-01T00:00:00Z");
    EXPECT_EQ(rfc3339({1'709'208'000'999'999}), "2024-02-29T12:00:00Z");
}

TEST(MarkFromCache, changes_our_own_member_and_no_text_that_looks_like_it) {
    EXPECT_EQ(mark_from_cache(R"({"fromCache":false,"content":"\"fromCache\":false"})"),
              R"({"fromCache":true,"content":"\"fromCache\":false"})");
}

}  // namespace
}  // namespace semel::gateway
