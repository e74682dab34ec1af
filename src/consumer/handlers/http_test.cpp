// The http handler against a real server on a loop of its own, and against sockets that misbehave.
#include "consumer/handlers/http.hpp"

#include <mutex>
#include <set>

#include "http/test_sockets.hpp"

namespace semel::consumer {
namespace {

using namespace std::chrono_literals;
using http::test::LambdaHandler;
using http::test::LoopThread;
using http::test::Raw;
using http::test::RawListener;
using runtime::Task;

/// A message of topic "orders", partition 3, offset 41.
class MessageBuilder {
  public:
    explicit MessageBuilder(std::string id) : id_(std::move(id)) {}
    MessageBuilder& value(std::optional<std::string> text) {
        value_ = std::move(text);
        return *this;
    }
    MessageBuilder& key(std::string text) {
        key_ = std::move(text);
        return *this;
    }
    MessageBuilder& header(std::string name, std::optional<std::string> text) {
        headers_.emplace_back(std::move(name), std::move(text));
        return *this;
    }
    [[nodiscard]] std::shared_ptr<Message> build() const {
        auto message = std::make_shared<Message>();
        message->id = id_;
        std::vector<brokers::Header> headers;
        for (const auto& [name, text] : headers_) headers.push_back({name, text});
        auto assignment = std::make_shared<brokers::Assignment>(brokers::Partition{"orders", 3}, 1);
        message->delivery =
            brokers::make_delivery({std::move(assignment), 41, 0}, key_, value_, headers);
        return message;
    }

  private:
    std::string id_;
    std::optional<std::string> value_ = "{}", key_;
    std::vector<std::pair<std::string, std::optional<std::string>>> headers_;
};

std::shared_ptr<Message> message_of(std::string id) {
    return MessageBuilder(std::move(id)).build();
}

std::string lines_of(const MessageBuilder& builder) {
    return http_handler_headers(*builder.build(), {.number = 2, .token = {77}});
}

bool has_line(const std::string& lines, const std::string& line) {
    return ("\r\n" + lines).find("\r\n" + line + "\r\n") != std::string::npos;
}

std::string percent_decoded(const std::string& text) {
    std::string out;
    for (std::size_t i = 0; i < text.size(); ++i) {
        const bool coded = text[i] == '%' && i + 2 < text.size() &&
                           std::isxdigit(static_cast<unsigned char>(text[i + 1])) != 0 &&
                           std::isxdigit(static_cast<unsigned char>(text[i + 2])) != 0;
        if (coded) {
            out += static_cast<char>(std::stoi(text.substr(i + 1, 2), nullptr, 16));
            i += 2;
        } else {
            out += text[i];
        }
    }
    return out;
}

/// "handled", "not-yet 3000", "failed 0", "fatal", "unknown", "ill".
std::string kind_of(const HandlerOutcome& outcome) {
    if (std::holds_alternative<Handled>(outcome)) return "handled";
    if (const auto* o = std::get_if<HandledNotYet>(&outcome))
        return "not-yet " + std::to_string(o->after.count());
    if (const auto* o = std::get_if<HandledFailed>(&outcome))
        return "failed " + std::to_string(o->after.count());
    if (std::holds_alternative<HandledFatal>(outcome)) return "fatal";
    if (std::holds_alternative<HandledUnknown>(outcome)) return "unknown";
    return "ill";
}

std::string reason_of(const HandlerOutcome& outcome) {
    return std::visit(
        [](const auto& o) {
            if constexpr (requires { o.reason; }) {
                return o.reason;
            } else {
                return std::string{};
            }
        },
        outcome);
}

/// The consumer's loop with its client and a handler for `url`.
class Caller {
  public:
    explicit Caller(const std::string& url, milliseconds timeout = 5s, HttpHandlerWays ways = {}) {
        thread_.on([&] {
            client_ = http::make_client(thread_.loop);
            auto made =
                make_http_handler(thread_.loop, *client_, {.url = url, .timeout = timeout}, ways);
            EXPECT_TRUE(made) << (made ? "" : made.error().detail);
            handler_ = std::move(*made);
        });
    }
    ~Caller() {
        thread_.on([this] {
            handler_.reset();
            client_.reset();
        });
    }
    Caller(const Caller&) = delete;
    Caller& operator=(const Caller&) = delete;
    std::future<HandlerOutcome> start(std::shared_ptr<Message> message, Attempt attempt = {}) {
        auto done = std::make_shared<std::promise<HandlerOutcome>>();
        auto outcome = done->get_future();
        thread_.loop.post([this, message, attempt, done] {
            handler_->handle(*message, attempt, [message, done](HandlerOutcome said) {
                done->set_value(std::move(said));
            });
        });
        return outcome;
    }
    HandlerOutcome handle(std::shared_ptr<Message> message, Attempt attempt = {}) {
        return start(std::move(message), attempt).get();
    }
    void cancel_all() {
        thread_.on([this] { handler_->cancel_all(); });
    }
    std::string name() {
        return thread_.on([this] { return handler_->name(); });
    }

  private:
    LoopThread thread_;
    std::unique_ptr<http::Client> client_;
    std::unique_ptr<Handler> handler_;
};

struct Seen {
    std::string target, body;
    std::vector<std::pair<std::string, std::string>> headers;
    [[nodiscard]] std::string header(std::string_view name) const {
        for (const auto& [n, v] : headers) {
            if (http::name_is(n, name)) return v;
        }
        return "(none)";
    }
};

/// A service that answers as `answer` says and remembers the last request.
class Service {
  public:
    Service() {
        handler_.fn = [this](http::Exchange& exchange) { return serve(exchange); };
        auto listening = thread_.on([this] {
            return http::Server::listen(thread_.loop, "127.0.0.1", 0, handler_, {}, counters,
                                        false);
        });
        server_ = std::move(*listening);
    }
    ~Service() {
        thread_.on([this] { server_->close(); });
    }
    Service(const Service&) = delete;
    Service& operator=(const Service&) = delete;
    [[nodiscard]] std::string url(const std::string& path = "/orders") const {
        return "http://127.0.0.1:" + std::to_string(server_->port()) + path;
    }
    void answers(int status, std::string headers = {}, std::string body = {}) {
        const std::lock_guard lock(mutex_);
        status_ = status;
        headers_ = std::move(headers);
        body_ = std::move(body);
    }
    Seen seen() {
        const std::lock_guard lock(mutex_);
        return seen_;
    }
    http::ServerCounters counters;

  private:
    Task<> serve(http::Exchange& exchange) {
        Seen seen;
        seen.target = exchange.head().target;
        for (const http::Header& h : exchange.head().headers)
            seen.headers.emplace_back(h.name, h.value);
        co_await exchange.read_body(seen.body, 1 << 20);
        http::ResponseHead head;
        std::string body;
        {
            const std::lock_guard lock(mutex_);
            seen_ = std::move(seen);
            head.status = status_;
            head.headers = headers_;
            body = body_;
        }
        co_await exchange.respond(head, body);
    }

    std::mutex mutex_;
    int status_ = 200;  // these four: guarded by mutex_
    std::string headers_, body_;
    Seen seen_;
    LambdaHandler handler_;
    LoopThread thread_;
    std::unique_ptr<http::Server> server_;
};

TEST(HttpHandlerHeaders, a_message_arrives_with_its_bytes_its_id_and_where_it_came_from) {
    Service service;
    Caller caller(service.url("/orders/?shop=1"));
    const std::string bytes("{\"a\": \"\0\"} ", 11);
    auto message =
        MessageBuilder("order-17")
            .value(bytes)
            .key("Zoë 7")
            .header("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
            .header("x source", "shop one")
            .header("empty", std::nullopt)
            .build();
    EXPECT_EQ(kind_of(caller.handle(message, {.number = 3, .token = {1'700'000'000'000'123}})),
              "handled");
    const Seen seen = service.seen();
    EXPECT_EQ(seen.target, "/orders/?shop=1") << "path and query as configured, slash and all";
    EXPECT_EQ(seen.body, bytes);
    EXPECT_EQ(seen.header("Idempotency-Key"), "order-17");
    EXPECT_EQ(seen.header("Semel-Attempt"), "3");
    EXPECT_EQ(seen.header("Semel-Fencing-Token"), "1700000000000123");
    EXPECT_EQ(seen.header("Semel-Topic"), "orders");
    EXPECT_EQ(seen.header("Semel-Partition"), "3");
    EXPECT_EQ(seen.header("Semel-Offset"), "41");
    EXPECT_EQ(seen.header("Semel-Key"), "Zo%C3%AB 7");
    EXPECT_EQ(seen.header("traceparent"),
              "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
    EXPECT_EQ(seen.header("Semel-Header-x%20source"), "shop one");
    EXPECT_EQ(seen.header("Semel-Header-empty"), "");
    EXPECT_EQ(seen.header("Semel-Tombstone"), "(none)");
    EXPECT_EQ(seen.header("Semel-Headers-Cut"), "(none)");
    EXPECT_EQ(caller.name(), service.url("/orders/")) << "a query may hold a secret";
}

TEST(HttpHandlerHeaders, a_tombstone_has_no_body_and_says_so) {
    Service service;
    Caller caller(service.url());
    EXPECT_EQ(kind_of(caller.handle(MessageBuilder("k").value(std::nullopt).build())), "handled");
    EXPECT_EQ(service.seen().header("Semel-Tombstone"), "true");
    EXPECT_EQ(service.seen().header("Content-Length"), "0");
    EXPECT_EQ(service.seen().header("Content-Type"), "(none)");
    EXPECT_EQ(kind_of(caller.handle(MessageBuilder("k").value("").build())), "handled");
    EXPECT_EQ(service.seen().header("Semel-Tombstone"), "(none)") << "an empty value is none";
}

TEST(HttpHandlerHeaders, the_content_type_is_the_messages_own_else_json_if_it_looks_like_it) {
    const auto type_of = [](const MessageBuilder& builder) {
        const std::string lines = lines_of(builder);
        return lines.substr(14, lines.find("\r\n") - 14);
    };
    EXPECT_EQ(type_of(MessageBuilder("i").header("Content-Type", "application/avro")),
              "application/avro");
    EXPECT_EQ(type_of(MessageBuilder("i").header("content-type", "text/x\r\nEvil: 1")),
              "application/json")
        << "one that cannot stand in a head is none";
    EXPECT_EQ(type_of(MessageBuilder("i").value(" [1]\n")), "application/json");
    EXPECT_EQ(type_of(MessageBuilder("i").value("{half")), "application/octet-stream");
    EXPECT_EQ(type_of(MessageBuilder("i").value("")), "application/octet-stream");
    auto amqp = message_of("i");
    amqp->delivery.properties = std::make_unique<brokers::AmqpProperties>();
    amqp->delivery.properties->content_type = "application/cbor";
    const std::string lines = http_handler_headers(*amqp, {});
    EXPECT_TRUE(has_line(lines, "Content-Type: application/cbor"));
    EXPECT_EQ(lines.find("Semel-Offset"), std::string::npos) << "a delivery tag is no offset";
    EXPECT_TRUE(has_line(lines, "Semel-Topic: orders"));
}

TEST(HttpHandlerHeaders, values_are_told_apart_and_nothing_breaks_out_of_its_line) {
    const std::vector<std::string> values{"",
                                          "plain",
                                          "a b",
                                          " a",
                                          "a ",
                                          "100%",
                                          "a%20b",
                                          "a%2520b",
                                          "%zz",
                                          "\r\nEvil: 1",
                                          std::string("\0", 1),
                                          "Zo\xc3\xab",
                                          "\xff\xfe",
                                          "a%",
                                          "%4",
                                          "\x7f",
                                          "\t"};
    for (const bool blanks : {false, true}) {
        std::set<std::string> encoded;
        for (const std::string& value : values) {
            const std::string one = header_value_of(value, blanks);
            EXPECT_EQ(percent_decoded(one), value);
            EXPECT_TRUE(encoded.insert(one).second) << one << " stands for two values";
            for (const char c : one) EXPECT_TRUE(c >= 0x20 && c < 0x7f) << one;
        }
    }
    EXPECT_EQ(header_value_of("01J9-abc_7", false), "01J9-abc_7");
    EXPECT_EQ(header_value_of("a b", false), "a%20b");
    EXPECT_EQ(header_value_of("a b", true), "a b");
    const std::string lines =
        lines_of(MessageBuilder("id\r\nEvil: 1").header("na:me\r\nEvil", "x\r\nEvil: 1"));
    EXPECT_TRUE(has_line(lines, "Idempotency-Key: id%0D%0AEvil:%201")) << lines;
    EXPECT_TRUE(has_line(lines, "Semel-Header-na%3Ame%0D%0AEvil: x%0D%0AEvil: 1")) << lines;
    EXPECT_EQ(lines.find("\nEvil"), std::string::npos);
}

TEST(HttpHandlerHeaders, what_a_common_server_would_not_take_is_left_out_and_said_so) {
    MessageBuilder many("i");
    for (std::size_t i = 0; i < 3 * message_headers_max_lines; ++i)
        many.header("h" + std::to_string(i), "v");
    const std::string of_many = lines_of(many);
    EXPECT_TRUE(has_line(of_many, "Semel-Header-h63: v"));
    EXPECT_FALSE(has_line(of_many, "Semel-Header-h64: v"));
    EXPECT_TRUE(has_line(of_many, "Semel-Headers-Cut: true"));

    MessageBuilder big("i");
    big.header("big", std::string(message_headers_max_bytes, 'x')).header("small", "v");
    const std::string of_big = lines_of(big);
    EXPECT_EQ(of_big.find("Semel-Header-big"), std::string::npos);
    EXPECT_TRUE(has_line(of_big, "Semel-Header-small: v")) << "the others still go along";
    EXPECT_TRUE(has_line(of_big, "Semel-Headers-Cut: true"));
    EXPECT_LT(of_big.size(), 8u * 1024);
}

TEST(HttpHandler, a_status_says_what_became_of_the_message) {
    Service service;
    Caller caller(service.url());
    const std::vector<std::tuple<int, std::string, std::string>> table{
        {200, "", "handled"},
        {202, "", "handled"},
        {204, "", "handled"},
        {301, "Location: /x\r\n", "ill"},
        {302, "Location: /x\r\n", "ill"},
        {400, "", "fatal"},
        {401, "", "ill"},
        {403, "", "ill"},
        {404, "", "ill"},
        {405, "", "ill"},
        {407, "", "ill"},
        {408, "", "failed 0"},
        {409, "", "not-yet 0"},
        {409, "Retry-After: 3\r\n", "not-yet 3000"},
        {410, "", "ill"},
        {413, "", "fatal"},
        {415, "", "fatal"},
        {418, "", "fatal"},
        {421, "", "ill"},
        {422, "", "fatal"},
        {423, "", "not-yet 0"},
        {425, "", "not-yet 0"},
        {429, "Retry-After: 7\r\n", "failed 7000"},
        {431, "", "fatal"},
        {500, "", "failed 0"},
        {502, "", "failed 0"},
        {503, "Retry-After: 100000\r\n", "failed 3600000"},
        {503, "Retry-After: Sun, 06 Nov 1994 08:49:37 GMT\r\n", "failed 0"},
        {504, "", "failed 0"},
        {599, "", "failed 0"},
        // The header decides under any status.
        {200, "Semel-Outcome: retry\r\nRetry-After: 2\r\n", "failed 2000"},
        {200, "Semel-Outcome: fatal\r\n", "fatal"},
        {404, "Semel-Outcome: Not-Yet\r\n", "not-yet 0"},
        {500, "Semel-Outcome: fatal\r\n", "fatal"},
        {422, "Semel-Outcome: retry\r\n", "failed 0"},
        {500, "Semel-Outcome: whatever\r\n", "failed 0"},
    };
    for (const auto& [status, headers, expected] : table) {
        service.answers(status, headers, status == 204 ? "" : "secret words of the answer");
        const HandlerOutcome outcome = caller.handle(message_of("i"));
        EXPECT_EQ(kind_of(outcome), expected) << status << " " << headers;
        if (expected == "handled") continue;
        const std::string reason = reason_of(outcome);
        EXPECT_NE(reason.find(service.url() + " answered " + std::to_string(status)),
                  std::string::npos)
            << reason;
        EXPECT_EQ(reason.find("secret"), std::string::npos) << "no body in what people read";
    }
    EXPECT_EQ(service.counters.connections, 1u) << "the connection is kept, whatever is answered";
}

TEST(HttpHandler, a_json_body_may_call_a_failure_fatal) {
    Service service;
    Caller caller(service.url());
    const std::string json = "Content-Type: application/json\r\n";
    const std::string problem = "Content-Type: application/problem+json; charset=utf-8\r\n";
    const std::vector<std::tuple<int, std::string, std::string, std::string>> table{
        {500, json, R"({"fatal": true})", "fatal"},
        {404, problem, R"({"type": "about:blank", "fatal": true})", "fatal"},
        {500, json, R"({"fatal": false})", "failed 0"},
        {500, json, R"({"fatal": "true"})", "failed 0"},
        {500, json, R"({"nested": {"fatal": true}})", "failed 0"},
        {500, json, R"({"fatal": true)", "failed 0"},
        {500, "Content-Type: text/plain\r\n", R"({"fatal": true})", "failed 0"},
        {200, json, R"({"fatal": true})", "handled"},
        {500, json, R"({"fatal": true, "x": ")" + std::string(refusal_body_max_bytes, 'x') + "\"}",
         "failed 0"},
    };
    for (const auto& [status, headers, body, expected] : table) {
        service.answers(status, headers, body);
        EXPECT_EQ(kind_of(caller.handle(message_of("i"))), expected) << body.substr(0, 60);
    }
}

TEST(HttpHandler, a_large_answer_to_a_handled_message_is_not_read_to_its_end) {
    Service service;
    Caller caller(service.url());
    service.answers(200, "", std::string(8 * handled_body_max_bytes, 'x'));
    EXPECT_EQ(kind_of(caller.handle(message_of("i"))), "handled");
    service.answers(200, "", "ok");
    EXPECT_EQ(kind_of(caller.handle(message_of("i"))), "handled");
    EXPECT_EQ(service.counters.connections, 2u);
}

TEST(HttpHandler, many_run_side_by_side) {
    Service service;
    Caller caller(service.url());
    std::vector<std::future<HandlerOutcome>> all;
    for (int i = 0; i < 64; ++i) all.push_back(caller.start(message_of("i" + std::to_string(i))));
    for (auto& one : all) EXPECT_EQ(kind_of(one.get()), "handled");
}

TEST(HttpHandler, who_cannot_be_reached_is_ill_and_nothing_is_charged) {
    std::uint16_t free_port = 0;
    {
        RawListener listener;
        free_port = listener.port();
    }
    Caller refused("http://127.0.0.1:" + std::to_string(free_port) + "/orders");
    const HandlerOutcome outcome = refused.handle(message_of("i"));
    EXPECT_EQ(kind_of(outcome), "ill");
    EXPECT_NE(reason_of(outcome).find("cannot be reached"), std::string::npos)
        << reason_of(outcome);
    Caller unnamed("http://no-such-host.invalid/orders");
    EXPECT_EQ(kind_of(unnamed.handle(message_of("i"))), "ill");

    RawListener plain;  // it speaks no TLS
    Caller tls("https://127.0.0.1:" + std::to_string(plain.port()) + "/orders");
    auto calling = tls.start(message_of("i"));
    Raw peer = plain.accept();
    EXPECT_TRUE(peer.send("HTTP/1.1 200 OK\r\n\r\n"));
    EXPECT_EQ(kind_of(calling.get()), "ill");
}

TEST(HttpHandler, whoever_was_asked_and_did_not_say_leaves_the_outcome_unknown) {
    RawListener listener;
    const std::string url = "http://127.0.0.1:" + std::to_string(listener.port()) + "/orders";
    Caller caller(url, 200ms);
    const auto after = [&](const std::function<void(Raw&)>& act) {
        auto calling = caller.start(MessageBuilder("i").value("payload-words").build());
        Raw peer = listener.accept();
        EXPECT_NE(peer.until("payload-words"), "");
        act(peer);
        const HandlerOutcome outcome = calling.get();
        EXPECT_EQ(reason_of(outcome).find("payload-words"), std::string::npos);
        return kind_of(outcome) + ": " + reason_of(outcome);
    };
    const auto silent = after([](Raw&) {});
    EXPECT_EQ(silent.find("unknown: " + url), 0u) << silent;
    const auto reset = after([](Raw& peer) { peer.reset(); });
    EXPECT_EQ(reset.find("unknown: "), 0u) << reset;
    const auto closed = after([](Raw& peer) { peer.close(); });
    EXPECT_EQ(closed.find("unknown: "), 0u) << closed;
    const auto garbage = after([](Raw& peer) { peer.send("+PONG\r\n\r\n"); });
    EXPECT_EQ(garbage.find("unknown: "), 0u) << garbage;
    const auto cut = after([](Raw& peer) {
        peer.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf");
        peer.close();
    });
    EXPECT_EQ(cut.find("unknown: "), 0u) << "a success that was not told to its end: " << cut;
    const auto failed = after([](Raw& peer) {
        peer.send("HTTP/1.1 500 No\r\nContent-Length: 10\r\n\r\nhalf");
        peer.close();
    });
    EXPECT_EQ(failed.find("failed 0: "), 0u) << "a failure is one by its status: " << failed;
}

TEST(HttpHandler, a_kept_connection_that_was_closed_meanwhile_is_nobodys_failure) {
    RawListener listener;
    const std::string url = "http://127.0.0.1:" + std::to_string(listener.port()) + "/orders";
    constexpr std::string_view ok = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
    const auto on_kept_then = [&](Caller& caller, const std::function<void(Raw&)>& then) {
        auto first = caller.start(MessageBuilder("i").value("first-words").build());
        Raw peer = listener.accept();
        EXPECT_NE(peer.until("first-words"), "");
        EXPECT_TRUE(peer.send(ok));
        EXPECT_EQ(kind_of(first.get()), "handled");
        auto second = caller.start(MessageBuilder("j").value("second-words").build());
        EXPECT_NE(peer.until("second-words"), "");  // on its way when the service hangs up
        then(peer);
        return second;
    };
    for (const bool reset : {false, true}) {
        Caller caller(url);
        auto second = on_kept_then(caller, [&](Raw& peer) { reset ? peer.reset() : peer.close(); });
        Raw anew = listener.accept();
        EXPECT_NE(anew.until("second-words").find("Idempotency-Key: j"), std::string::npos);
        EXPECT_TRUE(anew.send(ok));
        EXPECT_EQ(kind_of(second.get()), "handled");
    }
    {
        // Closed once more, on a connection of its own: that is no idle connection any more.
        Caller caller(url);
        auto second = on_kept_then(caller, [](Raw& peer) { peer.close(); });
        Raw anew = listener.accept();
        EXPECT_NE(anew.until("second-words"), "");
        anew.close();
        EXPECT_EQ(kind_of(second.get()), "unknown");
    }
    {
        Caller hold(url, 5s, {.repeats_on_new_connection = false});
        auto second = on_kept_then(hold, [](Raw& peer) { peer.close(); });
        EXPECT_EQ(kind_of(second.get()), "unknown") << "it may have been done, and is not asked";
    }
}

TEST(HttpHandler, an_answer_that_trickles_does_not_hold_a_message_beyond_its_time) {
    RawListener listener;
    Caller caller("http://127.0.0.1:" + std::to_string(listener.port()) + "/orders", 300ms);
    auto calling = caller.start(message_of("i"));
    Raw peer = listener.accept();
    EXPECT_NE(peer.until("{}"), "");
    EXPECT_TRUE(peer.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"));
    // Each byte comes well within any idle time; the loop ends with the call.
    while (calling.wait_for(50ms) != std::future_status::ready) peer.send("1\r\nx\r\n");
    const HandlerOutcome outcome = calling.get();
    EXPECT_EQ(kind_of(outcome), "unknown");
    EXPECT_NE(reason_of(outcome).find("did not end its answer within 300 ms"), std::string::npos)
        << reason_of(outcome);
}

TEST(HttpHandler, cancelling_ends_what_runs_and_only_that) {
    RawListener listener;
    Caller caller("http://127.0.0.1:" + std::to_string(listener.port()) + "/orders", 60s);
    auto waiting = caller.start(message_of("a"));
    Raw first = listener.accept();
    EXPECT_NE(first.until("{}"), "");
    auto reading = caller.start(message_of("b"));
    Raw second = listener.accept();
    EXPECT_NE(second.until("{}"), "");
    EXPECT_TRUE(second.send("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n1"));
    caller.cancel_all();
    EXPECT_EQ(kind_of(waiting.get()), "unknown");
    EXPECT_EQ(kind_of(reading.get()), "unknown");
    caller.cancel_all();
    auto later = caller.start(message_of("c"));
    Raw third = listener.accept();
    EXPECT_NE(third.until("{}"), "");
    EXPECT_TRUE(third.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"));
    EXPECT_EQ(kind_of(later.get()), "handled");
}

TEST(HttpHandler, a_url_that_cannot_be_called_is_refused_with_the_reason) {
    LoopThread thread;
    const auto client = thread.on([&] { return http::make_client(thread.loop); });
    const auto refused = [&](const std::string& url) {
        auto made = make_http_handler(thread.loop, *client, {.url = url});
        if (made) return std::string{};
        EXPECT_EQ(made.error().code, base::ErrorCode::invalid_argument);
        return made.error().detail;
    };
    EXPECT_EQ(refused("http://127.0.0.1:8080"), "");
    EXPECT_EQ(refused("https://orders.internal/a/b?c=d"), "");
    for (const std::string url :
         {"orders:8080", "ftp://h/x", "http://user:pw@h/x", "http:///x", "http://h:99999/",
          "http://h/x#y", "http://h/a b", "http://h/\xc3\xab", ""}) {
        const std::string why = refused(url);
        EXPECT_NE(why, "") << url;
        EXPECT_EQ(why.find("pw"), std::string::npos) << "no password in a message";
    }
}

TEST(HttpHandler, retry_after_is_read_as_seconds_or_as_a_date) {
    constexpr std::int64_t now = 784'111'777'000'000;  // Sun, 06 Nov 1994 08:49:37 GMT
    EXPECT_EQ(retry_after_of("0", now), 0ms);
    EXPECT_EQ(retry_after_of("120", now), 120s);
    EXPECT_EQ(retry_after_of("3601", now), 1h);
    EXPECT_EQ(retry_after_of("99999999999999999999999", now), 1h);
    EXPECT_EQ(retry_after_of("Sun, 06 Nov 1994 08:50:37 GMT", now), 60s);
    EXPECT_EQ(retry_after_of("Mon, 07 Nov 1994 08:49:37 GMT", now), 1h);
    EXPECT_EQ(retry_after_of("Sun, 06 Nov 1994 08:49:30 GMT", now), 0ms);
    for (const std::string_view nonsense :
         {"", "-5", "1.5", "soon", "Sun, 06 Nov 1994 08:49:37 CET", "Sun, 31 Feb 1994 08:49:37 GMT",
          "Sun, 06 Xxx 1994 08:49:37 GMT", "Sun, 06 Nov 1994 28:49:37 GMT",
          "Sun, 0x Nov 1994 08:49:37 GMT"})
        EXPECT_EQ(retry_after_of(nonsense, now), 0ms) << nonsense;
}

}  // namespace
}  // namespace semel::consumer
