#include "http/server.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <condition_variable>
#include <mutex>

#include "http/test_sockets.hpp"
#include "runtime/signal.hpp"

namespace semel::http {
namespace {

using namespace std::chrono_literals;
using test::Raw;

// Something that happens on the loop and is waited for in the test.
class Event {
  public:
    void set() {
        const std::lock_guard lock(mutex_);
        ++count_;
        changed_.notify_all();
    }
    bool wait(int times = 1) {
        std::unique_lock lock(mutex_);
        return changed_.wait_for(lock, 10s, [&] { return count_ >= times; });
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    int count_ = 0;
};

Task<> echo(Exchange& exchange) {
    std::string body;
    const BodyStatus status = co_await exchange.read_body(body, 8 * 1024 * 1024);
    if (status == BodyStatus::malformed || status == BodyStatus::closed ||
        status == BodyStatus::timed_out)
        co_return;
    ResponseHead head;
    if (status == BodyStatus::too_large) {
        head.status = 413;
        body = "too large";
    }
    head.add("X-Path", exchange.head().path);
    co_await exchange.respond(head, body);
}

class ServerTest : public testing::Test {
  protected:
    void start() {
        server_ = thread_.on([this] {
            auto made =
                Server::listen(thread_.loop, "127.0.0.1", 0, handler_, limits_, counters_, true);
            EXPECT_TRUE(made) << made.error().detail;
            return std::move(made.value());
        });
        port_ = server_->port();
    }
    void TearDown() override {
        thread_.on([this] {
            server_.reset();
            return 0;
        });
    }
    Raw connect() { return Raw::to(port_); }
    std::string ask(std::string_view request) {
        Raw raw = connect();
        raw.send(request);
        return raw.message();
    }

    test::LambdaHandler handler_{};
    ServerLimits limits_;
    ServerCounters counters_;
    test::LoopThread thread_;
    std::unique_ptr<Server> server_;
    std::uint16_t port_ = 0;

    ServerTest() { handler_.fn = echo; }
};

std::string post(std::string_view path, std::string_view body, std::string_view more = "") {
    return "POST " + std::string(path) + " HTTP/1.1\r\nHost: a\r\n" + std::string(more) +
           "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + std::string(body);
}

TEST_F(ServerTest, answers_pipelined_requests_in_order_on_one_kept_connection) {
    start();
    Raw raw = connect();
    raw.send(post("/one", "first") + "GET /two?x=1 HTTP/1.1\r\nHost: a\r\n\r\n" +
             "POST /three HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: "
             "chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n");
    EXPECT_EQ(raw.message(), "HTTP/1.1 200 OK\r\nX-Path: /one\r\nContent-Length: 5\r\n\r\nfirst");
    EXPECT_EQ(raw.message(), "HTTP/1.1 200 OK\r\nX-Path: /two\r\nContent-Length: 0\r\n\r\n");
    EXPECT_EQ(raw.message(), "HTTP/1.1 200 OK\r\nX-Path: /three\r\nContent-Length: 5\r\n\r\nabcde");
    raw.send(post("/four", "x"));
    EXPECT_EQ(raw.message(), "HTTP/1.1 200 OK\r\nX-Path: /four\r\nContent-Length: 1\r\n\r\nx");
    EXPECT_EQ(counters_.connections.load(), 1u);
}

TEST_F(ServerTest, serves_http_1_0_and_close_and_keep_alive) {
    start();
    Raw old = connect();
    old.send("GET /a HTTP/1.0\r\n\r\n");
    EXPECT_EQ(old.until_end(),
              "HTTP/1.1 200 OK\r\nX-Path: /a\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    Raw kept = connect();
    kept.send("GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
    EXPECT_EQ(
        kept.message(),
        "HTTP/1.1 200 OK\r\nX-Path: /a\r\nContent-Length: 0\r\nConnection: keep-alive\r\n\r\n");
    kept.send("GET /b HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    EXPECT_EQ(kept.until_end(),
              "HTTP/1.1 200 OK\r\nX-Path: /b\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
}

TEST_F(ServerTest, says_100_before_the_body_is_read_and_417_to_other_expectations) {
    start();
    Raw raw = connect();
    raw.send("POST /a HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n");
    EXPECT_EQ(raw.until("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
    raw.send("abc");
    EXPECT_TRUE(raw.message().ends_with("\r\n\r\nabc"));

    Raw large = connect();
    large.send(
        "POST /a HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 99999999\r\n\r\n");
    EXPECT_TRUE(large.message().starts_with("HTTP/1.1 413 ")) << "refused before 100";

    Raw empty = connect();
    empty.send("POST /a HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 0\r\n\r\n");
    EXPECT_TRUE(empty.message().starts_with("HTTP/1.1 200 "));

    Raw other = connect();
    other.send("POST /a HTTP/1.1\r\nHost: a\r\nExpect: foo\r\nContent-Length: 3\r\n\r\nabc");
    const std::string answer = other.until_end();
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 417 Expectation Failed\r\n")) << answer;
    EXPECT_NE(answer.find("Connection: close\r\n"), std::string::npos);
}

TEST_F(ServerTest, nothing_is_said_between_the_head_of_an_answer_and_its_end) {
    handler_.fn = [](Exchange& exchange) -> Task<> {
        exchange.begin(ResponseHead{});
        co_await exchange.write("abc");
        const BodyPiece piece = co_await exchange.read_some();
        EXPECT_EQ(piece.bytes, "xyz");
        co_await exchange.finish(piece.bytes);
    };
    start();
    Raw raw = connect();
    raw.send("POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n");
    EXPECT_TRUE(raw.until("abc\r\n").starts_with("HTTP/1.1 200 OK\r\n"));
    raw.send("xyz");
    EXPECT_EQ(raw.until_end(), "3\r\nxyz\r\n0\r\n\r\n") << "no 100 any more";
}

TEST_F(ServerTest, head_gets_the_head_alone) {
    handler_.fn = [](Exchange& exchange) -> Task<> {
        ResponseHead head;
        if (exchange.head().path == "/stream") {
            exchange.begin(head);
            co_await exchange.write("abc");
            co_await exchange.finish("def");
        } else {
            co_await exchange.respond(head, "abcdef");
        }
    };
    start();
    Raw raw = connect();
    raw.send("HEAD / HTTP/1.1\r\nHost: a\r\n\r\n");
    EXPECT_EQ(raw.until("\r\n\r\n"), "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n");
    raw.send("HEAD /stream HTTP/1.1\r\nHost: a\r\n\r\n");
    EXPECT_EQ(raw.until("\r\n\r\n"), "HTTP/1.1 200 OK\r\n\r\n");
    raw.send("GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    EXPECT_EQ(raw.until_end(),
              "HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nabcdef");
}

TEST_F(ServerTest, streams_in_chunks_by_length_or_to_the_end) {
    handler_.fn = [](Exchange& exchange) -> Task<> {
        ResponseHead head;
        head.add("X-A", "b");
        if (exchange.head().path == "/length") {
            exchange.begin(head, 6);
        } else {
            exchange.begin(head);
        }
        EXPECT_TRUE(co_await exchange.write("abc"));
        EXPECT_TRUE(co_await exchange.finish("def"));
    };
    start();
    Raw raw = connect();
    raw.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    EXPECT_EQ(raw.until("0\r\n\r\n"),
              "HTTP/1.1 200 OK\r\nX-A: b\r\nTransfer-Encoding: "
              "chunked\r\n\r\n3\r\nabc\r\n3\r\ndef\r\n0\r\n\r\n");
    raw.send("GET /length HTTP/1.1\r\nHost: a\r\n\r\n");
    EXPECT_EQ(raw.message(), "HTTP/1.1 200 OK\r\nX-A: b\r\nContent-Length: 6\r\n\r\nabcdef");
    Raw old = connect();
    old.send("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
    EXPECT_EQ(old.until_end(), "HTTP/1.1 200 OK\r\nX-A: b\r\nConnection: close\r\n\r\nabcdef");
}

TEST_F(ServerTest, a_cut_answer_ends_without_its_end_and_without_a_reset) {
    handler_.fn = [](Exchange& exchange) -> Task<> {
        exchange.begin(ResponseHead{});
        co_await exchange.write("abc");
        exchange.cut();
        EXPECT_TRUE(exchange.client_gone());
    };
    start();
    Raw raw = connect();
    // Unread bytes would turn a plain close into a reset.
    raw.send("GET / HTTP/1.1\r\nHost: a\r\n\r\nGET /next HTTP/1.1\r\nHost: a\r\n\r\n");
    EXPECT_EQ(raw.until("abc\r\n"),
              "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n");
    EXPECT_TRUE(raw.ended_cleanly());
}

TEST_F(ServerTest, a_short_or_unfinished_answer_is_cut_and_a_missing_one_is_500) {
    handler_.fn = [](Exchange& exchange) -> Task<> {
        if (exchange.head().path == "/none") co_return;
        if (exchange.head().path == "/short") {
            exchange.begin(ResponseHead{}, 10);
            EXPECT_FALSE(co_await exchange.finish("abc"));
            co_return;
        }
        exchange.begin(ResponseHead{});
        co_await exchange.write("abc");
    };
    start();
    EXPECT_TRUE(ask("GET /none HTTP/1.1\r\nHost: a\r\n\r\n").starts_with("HTTP/1.1 500 "));
    Raw shorter = connect();
    shorter.send("GET /short HTTP/1.1\r\nHost: a\r\n\r\n");
    EXPECT_EQ(shorter.until_end(), "");
    Raw open = connect();
    open.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    EXPECT_EQ(open.until_end(),
              "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n");
}

TEST_F(ServerTest, refuses_bad_requests_with_a_short_error_and_closes) {
    start();
    const std::string answer = [&] {
        Raw raw = connect();
        raw.send(
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: "
            "chunked\r\n\r\n0\r\n\r\n" +
            post("/smuggled", "x"));
        return raw.until_end();
    }();
    EXPECT_TRUE(
        answer.starts_with("HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n"))
        << answer;
    EXPECT_NE(
        answer.find(R"("type":"invalid_request_error","param":null,"code":"malformed_request"}})"),
        std::string::npos)
        << answer;
    EXPECT_EQ(answer.find("smuggled"), std::string::npos);

    struct Bad {
        std::string request;
        const char* status;
    };
    const Bad bad[] = {
        {"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "HTTP/1.1 400 "},
        {"GET /" + std::string(20000, 'a') + " HTTP/1.1\r\nHost: a\r\n\r\n", "HTTP/1.1 414 "},
        {"GET / HTTP/1.1\r\nHost: a\r\nX: " + std::string(1024 * 1024, 'a') + "\r\n\r\n",
         "HTTP/1.1 431 "},
        {"GET / HTTP/1.1\r\nHost: a\r\n" +
             [] {
                 std::string s;
                 for (int i = 0; i < 10000; ++i) s += "X: y\r\n";
                 return s;
             }() +
             "\r\n",
         "HTTP/1.1 431 "},
        {"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
         "HTTP/1.1 501 "},
    };
    for (const Bad& b : bad) {
        Raw raw = connect();
        raw.send(b.request);
        const std::string got = raw.until_end();
        EXPECT_TRUE(got.starts_with(b.status)) << got;
    }
    EXPECT_EQ(counters_.rejected_requests.load(), 6u);
}

TEST_F(ServerTest, an_early_answer_reaches_a_client_that_is_still_sending) {
    start();
    Raw raw = connect();
    // Within the discarded amount: the client may send all of it and then reads the answer, not a
    // reset.
    raw.send("POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 9000000\r\n\r\n" +
             std::string(900'000, 'x'));
    const std::string answer = raw.message();
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 413 ")) << answer;
    EXPECT_NE(answer.find("Connection: close\r\n"), std::string::npos);
    EXPECT_TRUE(raw.ended_cleanly());
}

TEST_F(ServerTest, an_ignored_small_body_does_not_cost_the_connection) {
    handler_.fn = [](Exchange& exchange) -> Task<> {
        co_await exchange.respond(ResponseHead{}, "ok");
    };
    start();
    Raw raw = connect();
    raw.send(post("/a", "ignored"));
    EXPECT_EQ(raw.message(), "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    raw.send(post("/b", "ignored"));
    EXPECT_EQ(raw.message(), "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
}

TEST_F(ServerTest, slow_heads_and_bodies_get_408_and_idle_connections_close) {
    limits_.head_timeout = 50ms;
    limits_.body_idle_timeout = 50ms;
    limits_.keep_alive = 50ms;
    start();
    Raw head = connect();
    head.send("GET / HTTP/1.1\r\nHo");
    EXPECT_TRUE(head.until_end().starts_with("HTTP/1.1 408 "));
    Raw body = connect();
    body.send("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\na");
    EXPECT_TRUE(body.until_end().starts_with("HTTP/1.1 408 "));
    Raw idle = connect();
    EXPECT_EQ(idle.until_end(), "");
    Raw used = connect();
    used.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    EXPECT_EQ(used.until_end(), "HTTP/1.1 200 OK\r\nX-Path: /\r\nContent-Length: 0\r\n\r\n");
}

TEST_F(ServerTest, dripping_bytes_do_not_move_the_head_timeout) {
    limits_.head_timeout = 60ms;
    start();
    Raw raw = connect();
    const auto begin = std::chrono::steady_clock::now();
    raw.send("GET / HTTP/1.1\r\nX: ");
    const timeval drip{0, 5000};
    ::setsockopt(raw.fd(), SOL_SOCKET, SO_RCVTIMEO, &drip, sizeof drip);
    std::string answer;
    for (int i = 0; i < 1000 && answer.empty(); ++i) {
        raw.send("y");
        answer = raw.until("\r\n\r\n");  // gives up after 5 ms: the drip
    }
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 408 ")) << answer;
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 4s);
}

TEST_F(ServerTest, the_body_is_read_in_pieces_and_five_megabytes_come_back_whole) {
    handler_.fn = [](Exchange& exchange) -> Task<> {
        if (exchange.head().path == "/whole") {
            co_await echo(exchange);
            co_return;
        }
        std::uint64_t sum = 0;
        for (;;) {
            const BodyPiece piece = co_await exchange.read_some();
            EXPECT_EQ(piece.status, BodyStatus::ok);
            if (piece.bytes.empty()) break;
            EXPECT_LE(piece.bytes.size(), 64u * 1024);
            sum += piece.bytes.size();
        }
        co_await exchange.respond(ResponseHead{}, std::to_string(sum));
    };
    start();
    std::string big(5 * 1024 * 1024, 'x');
    for (std::size_t i = 0; i < big.size(); i += 7) big[i] = static_cast<char>('a' + i % 26);
    Raw raw = connect();
    std::thread sender([&] { raw.send(post("/whole", big)); });
    const std::string answer = raw.message();
    sender.join();
    EXPECT_TRUE(answer.ends_with(big));
    std::string chunks = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
    for (int i = 0; i < 100; ++i) chunks += "2710\r\n" + std::string(10000, 'y') + "\r\n";
    chunks += "0\r\n\r\n";
    raw.send(chunks);
    EXPECT_TRUE(raw.message().ends_with("\r\n\r\n1000000"));
}

TEST_F(ServerTest, a_chunked_body_over_the_limit_is_too_large) {
    handler_.fn = [](Exchange& exchange) -> Task<> {
        std::string body;
        const BodyStatus status = co_await exchange.read_body(body, 10);
        ResponseHead head;
        head.status = status == BodyStatus::too_large ? 413 : 200;
        co_await exchange.respond(head, body);
    };
    start();
    EXPECT_TRUE(ask("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: "
                    "chunked\r\n\r\nb\r\n12345678901\r\n0\r\n\r\n")
                    .starts_with("HTTP/1.1 413 "));
    EXPECT_TRUE(ask("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: "
                    "chunked\r\n\r\na\r\n1234567890\r\n0\r\n\r\n")
                    .ends_with("1234567890"));
}

TEST_F(ServerTest, a_client_that_left_is_noticed) {
    Event started, left;
    bool gone_before = true, gone_after = false, written = true;
    BodyStatus status = BodyStatus::ok;
    handler_.fn = [&](Exchange& exchange) -> Task<> {
        if (exchange.head().path == "/body") {
            std::string body;
            status = co_await exchange.read_body(body, 1000);
            left.set();
            co_return;
        }
        gone_before = exchange.client_gone();
        exchange.begin(ResponseHead{});
        co_await exchange.write("a");
        started.set();
        while (!exchange.client_gone()) co_await thread_.loop.sleep_for(1ms);
        gone_after = true;
        while (written) written = co_await exchange.write("b");
        left.set();
    };
    start();
    Raw raw = connect();
    raw.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    ASSERT_TRUE(started.wait());
    raw.close();
    ASSERT_TRUE(left.wait());
    EXPECT_FALSE(gone_before);
    EXPECT_TRUE(gone_after);
    EXPECT_FALSE(written);
    Raw half = connect();
    half.send("POST /body HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nabc");
    half.close();
    ASSERT_TRUE(left.wait(2));
    EXPECT_EQ(status, BodyStatus::closed);
}

TEST_F(ServerTest, a_slow_reader_holds_the_writer_back_and_one_that_takes_nothing_is_cut) {
    limits_.write_idle_timeout = 200ms;
    std::atomic<std::uint64_t> accepted{0};
    Event ended;
    handler_.fn = [&](Exchange& exchange) -> Task<> {
        const std::string piece(64 * 1024, 'x');
        exchange.begin(ResponseHead{});
        for (int i = 0; i < 1600; ++i) {  // 100 MiB
            const bool taken = co_await exchange.write(piece);
            if (!taken) break;
            accepted += piece.size();
        }
        ended.set();
    };
    start();
    Raw raw = connect();
    raw.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    ASSERT_TRUE(ended.wait());
    EXPECT_LT(accepted.load(), 20u * 1024 * 1024)
        << "only what the kernel's buffers hold was accepted";
}

#if !__has_feature(address_sanitizer)
// Not in the build with ASan and UBSan: UBSan's check of vtables opens a pipe, and takes one that
// cannot be opened for a broken object. (The product is built with UBSan there and this file is
// not: its own feature macro says nothing.)
TEST_F(ServerTest, accepting_goes_on_after_the_descriptors_were_used_up) {
    start();
    rlimit saved{};
    ::getrlimit(RLIMIT_NOFILE, &saved);
    std::vector<Raw> clients;
    for (int i = 0; i < 20; ++i) clients.push_back(connect());
    for (Raw& c : clients) c.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    for (Raw& c : clients) EXPECT_FALSE(c.message().empty());
    // One more descriptor is made for the client's side; none is left for the server's.
    const int spare = ::dup(0);
    const rlimit low{static_cast<rlim_t>(spare) + 1, saved.rlim_max};
    ::close(spare);
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
    Raw waiting = connect();
    waiting.send("GET /late HTTP/1.1\r\nHost: a\r\n\r\n");
    const auto give_up = std::chrono::steady_clock::now() + 10s;
    while (counters_.accept_errors.load() == 0 && std::chrono::steady_clock::now() < give_up)
        std::this_thread::yield();
    EXPECT_GE(counters_.accept_errors.load(), 1u);
    clients[0].send("GET /b HTTP/1.1\r\nHost: a\r\n\r\n");
    EXPECT_FALSE(clients[0].message().empty()) << "connections that exist are served";
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &saved), 0);
    EXPECT_TRUE(waiting.message().starts_with("HTTP/1.1 200 "));
}
#endif

TEST_F(ServerTest, connections_above_the_limit_wait_in_the_queue) {
    limits_.connections_max = 2;
    start();
    Raw first = connect();
    Raw second = connect();
    first.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    second.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    EXPECT_FALSE(first.message().empty());
    EXPECT_FALSE(second.message().empty());
    Raw third = connect();
    third.send("GET /third HTTP/1.1\r\nHost: a\r\n\r\n");
    second.send("GET /b HTTP/1.1\r\nHost: a\r\n\r\n");
    EXPECT_FALSE(second.message().empty());
    EXPECT_EQ(counters_.open.load(), 2u);
    first.close();
    EXPECT_TRUE(third.message().starts_with("HTTP/1.1 200 OK\r\nX-Path: /third"));
}

TEST_F(ServerTest, drain_ends_idle_connections_and_lets_exchanges_finish) {
    Event started;
    runtime::Signal go;
    handler_.fn = [&](Exchange& exchange) -> Task<> {
        if (exchange.head().path == "/slow") {
            const std::uint64_t seen = go.version();
            started.set();
            co_await go.wait(thread_.loop, seen, base::SteadyTime::max());
        }
        co_await exchange.respond(ResponseHead{}, "ok");
    };
    start();
    Raw idle = connect();
    idle.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    EXPECT_FALSE(idle.message().empty());
    Raw busy = connect();
    busy.send("GET /slow HTTP/1.1\r\nHost: a\r\n\r\n");
    ASSERT_TRUE(started.wait());
    const std::size_t running = thread_.on([&] {
        server_->drain();
        return server_->running();
    });
    EXPECT_EQ(running, 1u);
    EXPECT_TRUE(idle.ended_cleanly());
    go.notify();
    EXPECT_EQ(busy.until_end(),
              "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok");
    EXPECT_EQ(thread_.on([&] { return server_->running(); }), 0u);
}

TEST_F(ServerTest, close_ends_running_exchanges_as_well) {
    Event started, ended;
    handler_.fn = [&](Exchange& exchange) -> Task<> {
        exchange.begin(ResponseHead{});
        bool taken = co_await exchange.write("a");
        started.set();
        while (taken) {
            co_await thread_.loop.sleep_for(1ms);
            taken = co_await exchange.write("b");
        }
        ended.set();
    };
    start();
    Raw raw = connect();
    raw.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    ASSERT_TRUE(started.wait());
    thread_.on([&] {
        server_->close();
        return 0;
    });
    EXPECT_TRUE(ended.wait());
}

TEST_F(ServerTest, says_why_it_cannot_listen) {
    start();
    const std::string detail = thread_.on([&] {
        auto second =
            Server::listen(thread_.loop, "127.0.0.1", port_, handler_, limits_, counters_, false);
        return second ? std::string() : second.error().detail;
    });
    EXPECT_NE(detail.find("127.0.0.1:" + std::to_string(port_)), std::string::npos) << detail;
    EXPECT_NE(detail.find("in use"), std::string::npos) << detail;
}

}  // namespace
}  // namespace semel::http
