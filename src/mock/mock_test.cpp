#include "mock/mock.hpp"

#include <gtest/gtest.h>

#include "base/json_scan.hpp"
#include "http/test_sockets.hpp"

namespace semel::mock {
namespace {

using namespace std::chrono_literals;
using http::test::Raw;
using Kind = Behaviour::Kind;

TEST(MockBehaviour, is_read_from_the_name_of_the_model) {
    const Defaults defaults{.latency = 3ms, .gap = 4ms, .length = 7};
    const auto of = [&](std::string_view model) { return behaviour_of(model, defaults); };
    for (const char* model : {"fast", "gpt-4o-mini", "slow-x", "slow-1-2", "stream-3", "err-99",
                              "err-600", "cut", "cut-", "cut-a", "fail-1-ok-503", "big--1",
                              "stream-1-2-3", "", "-", "slow-99999999999999999999"}) {
        const Behaviour behaviour = of(model);
        EXPECT_EQ(behaviour.kind, Kind::normal) << model;
        EXPECT_EQ(behaviour.latency, 3ms) << model;
        EXPECT_EQ(behaviour.gap, 4ms) << model;
        EXPECT_EQ(behaviour.events, 7u) << model;
        EXPECT_EQ(behaviour.failures, 0u) << model;
    }
    EXPECT_EQ(of("slow-250").latency, 250ms);
    EXPECT_EQ(of("slow-99999999999").latency, 1h);
    EXPECT_EQ(of("stream-30-20").events, 30u);
    EXPECT_EQ(of("stream-30-20").gap, 20ms);
    EXPECT_EQ(of("err-429").kind, Kind::error);
    EXPECT_EQ(of("err-429").status, 429);
    EXPECT_EQ(of("cut-8").kind, Kind::cut);
    EXPECT_EQ(of("cut-8").events, 8u);
    EXPECT_EQ(of("errevent-8").kind, Kind::error_event);
    EXPECT_EQ(of("noterm-8").kind, Kind::no_terminator);
    EXPECT_EQ(of("stall-8").kind, Kind::stall);
    EXPECT_EQ(of("short").kind, Kind::short_body);
    EXPECT_EQ(of("closeafterread").kind, Kind::close_after_read);
    EXPECT_EQ(of("big-1000").content_bytes, 1000u);
    EXPECT_EQ(of("fail-2-then-ok-503").failures, 2u);
    EXPECT_EQ(of("fail-2-then-ok-503").status, 503);
}

TEST(MockScript, reads_exact_bytes_and_refuses_what_is_no_script) {
    EXPECT_EQ(base64_decode(""), "");
    EXPECT_EQ(base64_decode("AP/+"), std::string("\0\xFF\xFE", 3));
    EXPECT_EQ(base64_decode("YQ=="), "a");
    EXPECT_EQ(base64_decode("YWI="), "ab");
    for (const char* text : {"YQ", "Y===", "YQ=a", "Y Q=", "-_-_"})
        EXPECT_EQ(base64_decode(text), std::nullopt) << text;
    const auto script = parse_script(
        R"({"model":"m","chunks":["YQ==","YWI="],"gap_ms":5,"status":201,"content_type":"a/b","headers":{"x-y":"z"},"end":"cut"})");
    ASSERT_TRUE(script);
    EXPECT_EQ(script->chunks, (std::vector<std::string>{"a", "ab"}));
    EXPECT_EQ(script->gap, 5ms);
    EXPECT_EQ(script->status, 201);
    EXPECT_EQ(script->headers, "x-y: z\r\n");
    EXPECT_EQ(script->end, Script::End::cut);
    for (const char* text :
         {"", "{}", R"({"model":"m"})", R"({"model":1,"chunks":[]})",
          R"({"model":"m","chunks":["?"]})", R"({"model":"m","chunks":[],"end":"x"})",
          R"({"model":"m","chunks":[],"status":99})",
          R"({"model":"m","chunks":[],"headers":{"a":"b\r\nc: d"}})",
          R"({"model":"m","chunks":[],"gap_ms":-1})"}) {
        EXPECT_FALSE(parse_script(text)) << text;
    }
}

TEST(MockOptions, say_what_is_wrong_with_an_argument) {
    const auto options = parse_options({"--port", "0", "--latency=250ms", "--gap", "2s", "--length",
                                        "9", "--threads", "2", "--host", "::1"});
    ASSERT_TRUE(options);
    EXPECT_EQ(options->port, 0);
    EXPECT_EQ(options->defaults.latency, 250ms);
    EXPECT_EQ(options->defaults.gap, 2s);
    EXPECT_EQ(options->defaults.length, 9u);
    EXPECT_EQ(options->threads, 2u);
    EXPECT_EQ(options->host, "::1");
    const auto message = [](const std::vector<std::string>& arguments) {
        return parse_options(arguments).error().detail;
    };
    EXPECT_EQ(message({"--prot", "1"}),
              "mock-upstream: unknown option '--prot'; see semel mock-upstream --help");
    EXPECT_EQ(message({"--port"}), "mock-upstream: --port needs a value");
    EXPECT_EQ(message({"--port", "65536"}),
              "mock-upstream: --port '65536' is not a port from 0 to 65535");
    EXPECT_EQ(message({"--latency", "5"}),
              "mock-upstream: --latency '5' is not a duration up to one hour, such as 250ms or 2s");
    EXPECT_EQ(message({"--threads", "0"}),
              "mock-upstream: --threads '0' is not a number from 1 to 64");
}

class MockServer : public testing::Test {
  protected:
    void SetUp() override {
        auto started = Server::start({.port = 0});
        ASSERT_TRUE(started) << started.error().detail;
        server_ = std::move(*started);
    }
    /// The whole answer, head included, read to the end of the connection.
    std::string ask(std::string_view method, std::string_view target, std::string_view body = "") {
        Raw raw = Raw::to(server_->port());
        raw.send(
            std::string(method) + " " + std::string(target) +
            " HTTP/1.1\r\nHost: mock\r\nX-Probe: seen\r\nConnection: close\r\nContent-Length: " +
            std::to_string(body.size()) + "\r\n\r\n" + std::string(body));
        return raw.until_end();
    }
    static std::string request(std::string_view model, std::string_view text,
                               std::string_view more = "") {
        return "{\"model\":\"" + std::string(model) +
               "\",\"messages\":[{\"role\":\"user\",\"content\":\"" + std::string(text) + "\"}]" +
               std::string(more) + "}";
    }
    std::string chat(std::string_view model, std::string_view text = "hi",
                     std::string_view more = "") {
        return ask("POST", "/v1/chat/completions", request(model, text, more));
    }
    std::string stream(std::string_view model, std::string_view more = "") {
        return chat(model, "hi", ",\"stream\":true" + std::string(more));
    }
    static std::string body_of(const std::string& answer) {
        return answer.substr(answer.find("\r\n\r\n") + 4);
    }
    static std::size_t count(std::string_view text, std::string_view part) {
        std::size_t n = 0;
        for (std::size_t at = text.find(part); at != std::string_view::npos;
             at = text.find(part, at + part.size()))
            ++n;
        return n;
    }
    static constexpr std::string_view last_chunk = "0\r\n\r\n";

    std::unique_ptr<Server> server_;
};

TEST_F(MockServer, answers_name_their_call_and_state_usage) {
    const std::string first = chat("fast", "one two three");
    EXPECT_TRUE(first.starts_with("HTTP/1.1 200 OK\r\n")) << first;
    EXPECT_NE(first.find("x-request-id: req_1\r\n"), std::string::npos);
    const std::string body = body_of(first);
    EXPECT_TRUE(base::top_level_members(body)) << body;
    EXPECT_NE(body.find("\"content\":\"answer of call 1\""), std::string::npos) << body;
    EXPECT_NE(body.find("\"prompt_tokens\":6,\"completion_tokens\":4,\"total_tokens\":10"),
              std::string::npos)
        << body;
    EXPECT_NE(chat("fast").find("answer of call 2"), std::string::npos);
    EXPECT_NE(body_of(chat("big-5000")).find(std::string(4900, 'x')), std::string::npos);
    EXPECT_TRUE(
        ask("POST", "/base/v1/chat/completions", request("fast", "x")).starts_with("HTTP/1.1 200"));
    EXPECT_TRUE(ask("POST", "/v1/chat/completions", "{nonsense").starts_with("HTTP/1.1 400"));
}

TEST_F(MockServer, a_stream_has_its_events_a_finish_and_usage_only_if_asked) {
    const std::string plain = stream("stream-30-0");
    EXPECT_EQ(count(plain, "data: "), 32u);
    EXPECT_EQ(count(plain, "usage"), 0u);
    EXPECT_EQ(count(plain, "\"finish_reason\":\"stop\""), 1u);
    EXPECT_EQ(count(plain, "\"role\":\"assistant\""), 1u);
    EXPECT_TRUE(plain.ends_with("data: [DONE]\n\n\r\n0\r\n\r\n")) << plain;
    const std::string usage = stream("stream-30-0", ",\"stream_options\":{\"include_usage\":true}");
    EXPECT_EQ(count(usage, "data: "), 33u);
    EXPECT_EQ(count(usage, "\"usage\":null"), 31u);
    EXPECT_EQ(
        count(usage, "\"choices\":[],\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":90,"), 1u)
        << usage;
}

TEST_F(MockServer, breaks_off_in_each_way_it_can) {
    EXPECT_EQ(chat("closeafterread"), "");
    const std::string cut = stream("cut-3");
    EXPECT_EQ(count(cut, "data: "), 3u);
    EXPECT_FALSE(cut.ends_with(last_chunk));
    const std::string error_event = stream("errevent-3");
    EXPECT_EQ(count(error_event, "data: "), 4u);
    EXPECT_EQ(count(error_event, "\"error\""), 1u);
    EXPECT_TRUE(error_event.ends_with(last_chunk));
    const std::string no_terminator = stream("noterm-3");
    EXPECT_EQ(count(no_terminator, "data: "), 3u);
    EXPECT_EQ(count(no_terminator, "[DONE]"), 0u);
    EXPECT_TRUE(no_terminator.ends_with(last_chunk));
    const std::string short_body = chat("short");
    const std::size_t length =
        std::stoul(short_body.substr(short_body.find("Content-Length: ") + 16));
    EXPECT_EQ(body_of(short_body).size() + 100, length);
    const std::string cut_plain = chat("cut-0");
    EXPECT_LT(body_of(cut_plain).size(),
              std::stoul(cut_plain.substr(cut_plain.find("Content-Length: ") + 16)));
    Raw stalled = Raw::to(server_->port());
    const std::string body = request("stall-2", "x", ",\"stream\":true");
    stalled.send("POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: " +
                 std::to_string(body.size()) + "\r\n\r\n" + body);
    EXPECT_NE(stalled.until("w1 "), "");
    stalled.close();
    EXPECT_EQ(server_->state().calls.count("", ""), 7u);
}

TEST_F(MockServer, fails_as_often_as_the_name_says) {
    const std::string refused = chat("err-429");
    EXPECT_TRUE(refused.starts_with("HTTP/1.1 429 ")) << refused;
    EXPECT_NE(refused.find("Retry-After: 1\r\n"), std::string::npos);
    EXPECT_EQ(chat("err-500").find("Retry-After"), std::string::npos);
    EXPECT_TRUE(chat("fail-2-then-ok-503").starts_with("HTTP/1.1 503 "));
    EXPECT_TRUE(chat("fail-2-then-ok-503").starts_with("HTTP/1.1 503 "));
    EXPECT_TRUE(chat("fail-2-then-ok-503").starts_with("HTTP/1.1 200 "));
    EXPECT_TRUE(chat("fail-1-then-ok-500").starts_with("HTTP/1.1 500 "));
}

TEST_F(MockServer, counts_calls_per_body_and_forgets_them_when_told) {
    chat("fast", "twice");
    chat("fast", "twice");
    chat("slow-0", "once more");
    const std::string calls = body_of(ask("GET", "/calls"));
    EXPECT_TRUE(calls.starts_with("{\"total\":3,\"not_kept\":0,")) << calls;
    EXPECT_NE(
        calls.find("{\"sha256\":\"" + base::hex(base::sha256(request("fast", "twice")).view()) +
                   "\",\"count\":2,\"model\":\"fast\",\"path\":\"/v1/chat/"
                   "completions\",\"numbers\":[1,2],"),
        std::string::npos)
        << calls;
    EXPECT_NE(calls.find("\"x-probe\":\"seen\""), std::string::npos) << calls;
    EXPECT_TRUE(base::top_level_members(calls));
    EXPECT_TRUE(body_of(ask("GET", "/calls?contains=once%20more")).starts_with("{\"total\":1,"));
    EXPECT_TRUE(
        body_of(ask("GET", "/calls?contains=%22twice%22&model=fast")).starts_with("{\"total\":2,"));
    EXPECT_TRUE(body_of(ask("GET", "/calls?model=none")).starts_with("{\"total\":0,"));
    ask("DELETE", "/calls");
    EXPECT_TRUE(body_of(ask("GET", "/calls")).starts_with("{\"total\":0,"));
    EXPECT_NE(chat("fast").find("answer of call 1"), std::string::npos);
}

TEST_F(MockServer, gives_the_bytes_of_a_script) {
    EXPECT_TRUE(
        ask("POST", "/script",
            R"({"model":"m","chunks":["AP8=","IQ=="],"status":202,"content_type":"x/y","headers":{"x-z":"1"}})")
            .starts_with("HTTP/1.1 200"));
    const std::string answer = chat("m");
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 202 ")) << answer;
    EXPECT_NE(answer.find("Content-Type: x/y\r\n"), std::string::npos);
    EXPECT_NE(answer.find("x-z: 1\r\n"), std::string::npos);
    EXPECT_EQ(body_of(answer), std::string("2\r\n\0\xFF\r\n1\r\n!\r\n0\r\n\r\n", 18));
    EXPECT_TRUE(ask("POST", "/script", R"({"model":"m","chunks":["IQ=="],"end":"cut"})")
                    .starts_with("HTTP/1.1 200"));
    EXPECT_FALSE(chat("m").ends_with(last_chunk));
    EXPECT_TRUE(ask("POST", "/script", "{}").starts_with("HTTP/1.1 400"));
    ask("DELETE", "/script");
    EXPECT_NE(chat("m").find("answer of call"), std::string::npos);
}

TEST_F(MockServer, takes_uploads_and_gives_downloads_of_any_size) {
    const std::string upload = ask("POST", "/v1/files", std::string(3'000'000, 'u'));
    EXPECT_NE(
        upload.find("{\"received_bytes\":3000000,\"sha256\":\"" +
                    base::hex(base::sha256(std::string(3'000'000, 'u')).view()) + "\",\"call\":1}"),
        std::string::npos)
        << upload;
    EXPECT_EQ(body_of(ask("GET", "/v1/files/1000001/content")), std::string(1'000'001, 'd'));
    EXPECT_NE(ask("GET", "/v1/models").find("\"object\":\"list\""), std::string::npos);
    EXPECT_NE(ask("DELETE", "/v1/files/a?b=c").find("\"target\":\"/v1/files/a?b=c\""),
              std::string::npos);
    EXPECT_TRUE(ask("GET", "/elsewhere").starts_with("HTTP/1.1 404"));
    EXPECT_TRUE(ask("PUT", "/calls").starts_with("HTTP/1.1 405"));
    EXPECT_EQ(server_->state().calls.count("", ""), 1u);  // reads are not paid
}

}  // namespace
}  // namespace semel::mock
