#include "http/client.hpp"

#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <semaphore>

#include "http/test_sockets.hpp"

namespace semel::http {
namespace {

using namespace std::chrono_literals;
using test::Raw;
using test::RawListener;
using Kind = CallError::Kind;

// A call and what came of it, whole.
struct Result {
    bool answered = false;  // a head came
    int status = 0;
    std::string body;
    std::size_t pieces = 0;
    std::optional<CallError> error;
    std::string x;  // the header X
};

class ClientTest : public testing::Test {
  protected:
    explicit ClientTest(std::string ca_file = {}) {
        client_ = thread_.on([&] { return make_client(thread_.loop, ca_file); });
    }
    ~ClientTest() override {
        if (peer_.joinable()) peer_.join();
        thread_.on([this] {
            client_.reset();
            return 0;
        });
    }

    // What the upstream does, on a thread of its own.
    void upstream(std::function<void(RawListener&)> script) {
        if (peer_.joinable()) peer_.join();
        peer_ = std::thread([this, script = std::move(script)] { script(listener_); });
    }
    Origin origin() {
        return parse_origin("http://127.0.0.1:" + std::to_string(listener_.port())).value();
    }
    Result call(Request request) { return call(origin(), std::move(request)); }
    Result call(Origin to, Request request) {
        return thread_.await<Result>(
            [&]() -> Task<Result> { return whole(to, std::move(request), timeouts_, &cancel_); });
    }
    Task<Result> whole(Origin to, Request request, Timeouts timeouts, Client::CancelToken* cancel) {
        Result result;
        auto outcome = co_await client_->call(to, std::move(request), timeouts, cancel);
        if (auto* error = std::get_if<CallError>(&outcome)) {
            result.error = *error;
            co_return result;
        }
        const auto response = std::move(std::get<0>(outcome));
        result.answered = true;
        result.status = response->status();
        for (;;) {
            auto piece = co_await response->read_some();
            if (auto* error = std::get_if<CallError>(&piece)) {
                result.error = *error;
                break;
            }
            const std::string_view bytes = std::get<0>(piece);
            if (bytes.empty()) break;
            ++result.pieces;
            result.body += bytes;
            if (cancel_after_ != 0 && result.body.size() >= cancel_after_) response->cancel();
        }
        result.x = response->header("x").value_or("");
        co_return result;
    }
    static Request post(std::string_view body) {
        Request request;
        request.method = "POST";
        request.target = "/v1/x?a=b";
        request.headers = "Content-Type: text/plain\r\n";
        request.body = body;
        request.has_body = true;
        return request;
    }
    static Request get() {
        Request request;
        request.method = "GET";
        request.target = "/";
        return request;
    }
    void expect_error(const Result& result, Kind kind, bool maybe_processed) {
        ASSERT_TRUE(result.error);
        EXPECT_EQ(result.error->kind, kind) << result.error->detail;
        EXPECT_EQ(result.error->maybe_processed, maybe_processed) << result.error->detail;
        EXPECT_FALSE(result.error->detail.empty());
    }

    test::LoopThread thread_;
    std::unique_ptr<Client> client_;
    RawListener listener_;
    Timeouts timeouts_;
    Client::CancelToken cancel_;
    std::size_t cancel_after_ = 0;
    std::thread peer_;
};

constexpr std::string_view kOk = "HTTP/1.1 200 OK\r\nX: y\r\nContent-Length: 2\r\n\r\nok";

TEST_F(ClientTest, sends_a_request_as_given_and_keeps_the_connection) {
    std::string first, second;
    upstream([&](RawListener& l) {
        Raw raw = l.accept();
        first = raw.message();
        raw.send(kOk);
        second = raw.message();
        raw.send(
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: "
            "chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n");
    });
    Result result = call(post("hello"));
    EXPECT_FALSE(result.error);
    EXPECT_EQ(result.status, 200);
    EXPECT_EQ(result.body, "ok");
    EXPECT_EQ(result.x, "y")
        << "headers live as long as the answer, though its connection is kept for others";
    Origin with_path = origin();
    with_path.base_path = "/base";
    result = call(with_path, post(""));
    EXPECT_EQ(result.body, "ok");
    peer_.join();
    const std::string host = "Host: 127.0.0.1:" + std::to_string(listener_.port()) + "\r\n";
    EXPECT_EQ(first, "POST /v1/x?a=b HTTP/1.1\r\n" + host +
                         "Content-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello");
    EXPECT_EQ(second, "POST /base/v1/x?a=b HTTP/1.1\r\n" + host +
                          "Content-Type: text/plain\r\nContent-Length: 0\r\n\r\n");
}

TEST_F(ClientTest, a_connection_that_closed_or_spoke_while_kept_is_not_used_again) {
    int connections = 0;
    std::counting_semaphore<3> said(0);  // all that the connection is to say has arrived
    upstream([&](RawListener& l) {
        for (const char* rest : {"", "HTTP/1.1 408 Request Timeout\r\n\r\n", "end"}) {
            Raw raw = l.accept();
            ++connections;
            raw.message();
            raw.send(std::string(kOk) + (std::string_view(rest) == "end" ? "" : rest));
            if (*rest == '\0') raw.end_sending();
            said.release();
            if (std::string_view(rest) == "end") continue;
            // The client closes what it does not use: seen before the next request is sent.
            if (*rest != '\0') EXPECT_EQ(raw.until_end(), "");
        }
    });
    for (int i = 0; i < 3; ++i) {
        const Result result = call(post("x"));
        EXPECT_FALSE(result.error) << result.error->detail;
        EXPECT_EQ(result.body, "ok");
        said.acquire();
    }
    peer_.join();
    EXPECT_EQ(connections, 3);
}

TEST_F(ClientTest, a_request_that_broke_on_a_kept_connection_is_never_sent_again) {
    int requests = 0;
    upstream([&](RawListener& l) {
        Raw raw = l.accept();
        raw.message();
        ++requests;
        raw.send(kOk);
        raw.message();
        ++requests;
        raw.close();
    });
    EXPECT_EQ(call(post("x")).body, "ok");
    const Result second = call(post("y"));
    expect_error(second, Kind::reset, true);
    EXPECT_TRUE(second.error->on_kept) << "who sent it may decide to send it again";
    peer_.join();
    EXPECT_EQ(requests, 2);
}

TEST_F(ClientTest, nobody_listening_is_refused_and_not_processed) {
    const Origin to = origin();
    listener_.close();
    expect_error(call(to, post("x")), Kind::refused, false);
    Origin nowhere = to;
    nowhere.host = "no-such-name.invalid";
    expect_error(call(nowhere, post("x")), Kind::refused, false);
    EXPECT_EQ(call(nowhere, post("x")).error->detail.rfind(nowhere.authority, 0), 0u);
}

TEST_F(ClientTest, a_connect_that_hangs_ends_at_its_timeout) {
    // A listener whose queue is full: further connects get no answer.
    const int full = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = Raw::loopback(0);
    ASSERT_EQ(::bind(full, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    ASSERT_EQ(::listen(full, 0), 0);
    socklen_t size = sizeof address;
    ::getsockname(full, reinterpret_cast<sockaddr*>(&address), &size);
    const Raw in_queue = Raw::to(ntohs(address.sin_port));
    timeouts_.connect = 50ms;
    const Origin to =
        parse_origin("http://127.0.0.1:" + std::to_string(ntohs(address.sin_port))).value();
    expect_error(call(to, post("x")), Kind::connect_timeout, false);
    ::close(full);
}

TEST_F(ClientTest, breaks_before_and_after_the_head_are_told_apart) {
    upstream([](RawListener& l) {
        {
            Raw raw = l.accept();
            raw.message();
            raw.reset();
        }
        for (const char* answer :
             {"", "HTTP/1.1 200 OK\r\nContent-Le",
              "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
              "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
              "HTTP/1.1 200 OK\r\n\r\nabc"}) {
            Raw raw = l.accept();
            raw.message();
            raw.send(answer);
        }
    });
    expect_error(call(post("x")), Kind::reset, true);
    expect_error(call(post("x")), Kind::reset, true);
    expect_error(call(post("x")), Kind::reset, true);
    Result short_length = call(post("x"));
    expect_error(short_length, Kind::cut, true);
    EXPECT_EQ(short_length.body, "abc");
    expect_error(call(post("x")), Kind::cut, true);
    const Result to_eof = call(post("x"));
    EXPECT_FALSE(to_eof.error);
    EXPECT_EQ(to_eof.body, "abc");
}

TEST_F(ClientTest, nonsense_and_endless_heads_are_bad_responses) {
    std::string many = "HTTP/1.1 200 OK\r\n";
    for (int i = 0; i < 300; ++i) many += "X: y\r\n";
    std::string interim;
    for (int i = 0; i < 20; ++i) interim += "HTTP/1.1 102 Processing\r\n\r\n";
    const std::vector<std::string> bad{
        "SSH-2.0-x\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
        "HTTP/1.1 200 OK\r\nX: " + std::string(70000, 'x') + "\r\n\r\n",
        many + "\r\n",
        interim,
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"};
    upstream([&](RawListener& l) {
        for (const std::string& answer : bad) {
            Raw raw = l.accept();
            raw.message();
            raw.send(answer);
            raw.until_end();
        }
    });
    for (const std::string& answer : bad) {
        SCOPED_TRACE(answer.substr(0, 60));
        expect_error(call(post("x")), Kind::bad_response, true);
    }
    peer_.join();
}

TEST_F(ClientTest, silence_ends_at_the_timeout_of_its_phase) {
    timeouts_.first_byte = 50ms;
    timeouts_.idle = 50ms;
    std::promise<void> over;
    upstream([&](RawListener& l) {
        Raw silent = l.accept();
        silent.message();
        silent.until_end();
        Raw stalled = l.accept();
        stalled.message();
        stalled.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc");
        stalled.until_end();
        Raw unread = l.accept();
        unread.until("\r\n\r\n");
        over.get_future().wait();
    });
    expect_error(call(post("x")), Kind::first_byte_timeout, true);
    const Result stalled = call(post("x"));
    expect_error(stalled, Kind::idle_timeout, true);
    EXPECT_EQ(stalled.body, "abc");
    const std::string big(64 * 1024 * 1024, 'x');
    expect_error(call(post(big)), Kind::idle_timeout, true);
    over.set_value();
    peer_.join();
}

TEST_F(ClientTest, an_early_answer_to_a_large_upload_is_read) {
    upstream([](RawListener& l) {
        {
            Raw raw = l.accept();
            raw.until("\r\n\r\n");
            raw.send(
                "HTTP/1.1 413 Content Too Large\r\nContent-Length: 3\r\nConnection: "
                "close\r\n\r\nbig");
            raw.end_sending();
            raw.until_end();
        }
        Raw raw = l.accept();
        raw.until("\r\n\r\n");
        raw.send("HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\nno");
        raw.until_end();
    });
    const std::string big(64 * 1024 * 1024, 'x');
    const Result result = call(post(big));
    EXPECT_FALSE(result.error);
    EXPECT_EQ(result.status, 413);
    EXPECT_EQ(result.body, "big");

    std::size_t pieces = 0;
    const std::string piece(256 * 1024, 'y');
    Request streamed = post("");
    streamed.source = [&]() -> Task<std::optional<std::string_view>> {
        if (++pieces > 100'000) co_return std::string_view{};
        co_return std::string_view(piece);
    };
    const Result early = call(std::move(streamed));
    EXPECT_FALSE(early.error);
    EXPECT_EQ(early.status, 401);
    EXPECT_LT(pieces, 10'000u) << "the upload was stopped";
}

TEST_F(ClientTest, interim_answers_do_not_stop_an_upload) {
    std::string got;
    upstream([&](RawListener& l) {
        Raw raw = l.accept();
        raw.until("\r\n\r\n");
        raw.send("HTTP/1.1 100 Continue\r\n\r\n");
        got = raw.exactly(32 * 1024 * 1024);
        raw.send(kOk);
    });
    const std::string big(32 * 1024 * 1024, 'x');
    const Result result = call(post(big));
    EXPECT_EQ(result.body, "ok");
    peer_.join();
    EXPECT_EQ(got, big);
}

TEST_F(ClientTest, streams_a_body_in_chunks_or_under_its_length) {
    std::string chunked, sized;
    upstream([&](RawListener& l) {
        Raw raw = l.accept();
        chunked = raw.until("0\r\n\r\n");
        raw.send(kOk);
        sized = raw.message();
        raw.send(kOk);
    });
    const auto source = [](std::vector<std::string> pieces) -> BodySource {
        const auto left = std::make_shared<std::vector<std::string>>(std::move(pieces));
        const auto at = std::make_shared<std::size_t>(0);
        return [left, at]() -> Task<std::optional<std::string_view>> {
            if (*at == left->size()) co_return std::string_view{};
            co_return std::string_view((*left)[(*at)++]);
        };
    };
    Request request = post("");
    request.source = source({"abc", std::string(17, 'x')});
    EXPECT_EQ(call(std::move(request)).body, "ok");
    request = post("");
    request.source = source({"abc", "de"});
    request.source_length = 5;
    EXPECT_EQ(call(std::move(request)).body, "ok");
    peer_.join();
    EXPECT_TRUE(chunked.ends_with("Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n11\r\n" +
                                  std::string(17, 'x') + "\r\n0\r\n\r\n"))
        << chunked;
    EXPECT_TRUE(sized.ends_with("Content-Length: 5\r\n\r\nabcde")) << sized;
}

TEST_F(ClientTest, an_upload_that_breaks_off_is_not_ended_as_if_it_were_whole) {
    std::string got;
    upstream([&](RawListener& l) {
        Raw raw = l.accept();
        got = raw.until_end();
        for (int i = 0; i < 2; ++i) l.accept().until_end();
    });
    const auto breaking = [](std::optional<std::string_view> last) {
        return [last, n = std::make_shared<int>(0)]() -> Task<std::optional<std::string_view>> {
            if ((*n)++ == 0) co_return std::string_view("abc");
            co_return last;
        };
    };
    Request request = post("");
    request.source = breaking(std::nullopt);
    expect_error(call(std::move(request)), Kind::body_source, true);
    for (const std::string_view last : {std::string_view{}, std::string_view("too much")}) {
        request = post("");
        request.source = breaking(last);
        request.source_length = 5;
        expect_error(call(std::move(request)), Kind::body_source, true);
    }
    request = post("");
    request.source = []() -> Task<std::optional<std::string_view>> { co_return std::nullopt; };
    peer_.join();
    EXPECT_TRUE(got.ends_with("\r\n\r\n3\r\nabc\r\n")) << got;
    upstream([](RawListener& l) { l.accept().until_end(); });
    expect_error(call(std::move(request)), Kind::body_source, false);
}

TEST_F(ClientTest, a_call_is_cancelled_before_and_after_its_head) {
    upstream([this](RawListener& l) {
        Raw waiting = l.accept();
        waiting.message();
        thread_.on([this] {
            cancel_.cancel();
            return 0;
        });
        waiting.until_end();
        Raw streaming = l.accept();
        streaming.message();
        streaming.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc");
        streaming.until_end();
    });
    expect_error(call(post("x")), Kind::cancelled, true);
    EXPECT_FALSE(cancel_.fire);
    expect_error(call(post("x")), Kind::cancelled, false);
    cancel_.cancelled = false;
    cancel_after_ = 3;
    const Result cut = call(post("x"));
    expect_error(cut, Kind::cancelled, true);
    EXPECT_EQ(cut.body, "abc");
}

TEST_F(ClientTest, an_answer_dropped_early_closes_its_connection) {
    upstream([](RawListener& l) {
        Raw raw = l.accept();
        raw.message();
        raw.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc");
        EXPECT_EQ(raw.until_end(), "");
        Raw next = l.accept();
        next.message();
        next.send(kOk);
    });
    const int status = thread_.await<int>([&]() -> Task<int> {
        const Origin to = origin();
        auto outcome = co_await client_->call(to, post("x"), timeouts_, nullptr);
        co_return std::get<0>(outcome)->status();
    });
    EXPECT_EQ(status, 200);
    EXPECT_EQ(call(post("x")).body, "ok");
}

TEST_F(ClientTest, answers_without_body_leave_the_connection_usable) {
    int connections = 0;
    upstream([&](RawListener& l) {
        Raw raw = l.accept();
        ++connections;
        for (const char* answer :
             {"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "HTTP/1.1 204 No Content\r\n\r\n",
              "HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n"}) {
            raw.until("\r\n\r\n");
            raw.send(answer);
        }
        raw.until("\r\n\r\n");
        raw.send(kOk);
    });
    Request head = get();
    head.method = "HEAD";
    EXPECT_EQ(call(std::move(head)).status, 200);
    EXPECT_EQ(call(get()).status, 204);
    EXPECT_EQ(call(get()).status, 304);
    EXPECT_EQ(call(get()).body, "ok");
    peer_.join();
    EXPECT_EQ(connections, 1);
}

TEST_F(ClientTest, a_large_answer_is_read_as_the_reader_takes_it) {
    constexpr std::size_t kSize = 20 * 1024 * 1024;
    upstream([](RawListener& l) {
        Raw raw = l.accept();
        raw.message();
        raw.send("HTTP/1.1 200 OK\r\nContent-Length: " + std::to_string(kSize) + "\r\n\r\n");
        raw.send(std::string(kSize, 'z'));
    });
    const Result result = call(get());
    EXPECT_FALSE(result.error);
    EXPECT_EQ(result.body.size(), kSize);
    EXPECT_GE(result.pieces, kSize / (16 * 1024)) << "no piece is larger than one read";
}

TEST(Origin, is_read_from_a_url_or_refused_with_the_reason) {
    const Origin a = parse_origin("https://api.openai.com/v1/").value();
    EXPECT_TRUE(a.tls);
    EXPECT_EQ(a.host, "api.openai.com");
    EXPECT_EQ(a.port, 443);
    EXPECT_EQ(a.base_path, "/v1");
    EXPECT_EQ(a.authority, "api.openai.com");
    const Origin b = parse_origin("http://[::1]:8080").value();
    EXPECT_EQ(b.host, "::1");
    EXPECT_EQ(b.port, 8080);
    EXPECT_EQ(b.authority, "[::1]:8080");
    EXPECT_EQ(b.base_path, "");
    for (const char* bad : {"", "ftp://a", "a:80", "http://", "http://a:0", "http://a:65536",
                            "http://a:x", "http://a:", "http://a?b", "http://a/#b", "http://[::1",
                            "http://[x]", "http://a b", "http://a/\r\nX: y", "http://:80"}) {
        const auto origin = parse_origin(bad);
        ASSERT_FALSE(origin) << bad;
        EXPECT_EQ(origin.error().code, base::ErrorCode::invalid_argument);
    }
    const auto secret = parse_origin("http://user:hunter2@a");
    ASSERT_FALSE(secret);
    EXPECT_EQ(secret.error().detail.find("hunter2"), std::string::npos) << secret.error().detail;
}

// ---- TLS: a server of OpenSSL's own under a certificate made here.

struct Certificate {
    EVP_PKEY* key = nullptr;
    X509* x509 = nullptr;

    explicit Certificate(const char* alt_names) {
        key = EVP_EC_gen("P-256");
        x509 = X509_new();
        X509_set_version(x509, 2);
        ASN1_INTEGER_set(X509_get_serialNumber(x509), 1);
        X509_gmtime_adj(X509_getm_notBefore(x509), -3600);
        X509_gmtime_adj(X509_getm_notAfter(x509), 3600);
        X509_set_pubkey(x509, key);
        X509_NAME* name = X509_get_subject_name(x509);
        X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC,
                                   reinterpret_cast<const unsigned char*>("semel test"), -1, -1, 0);
        X509_set_issuer_name(x509, name);
        X509V3_CTX context;
        X509V3_set_ctx_nodb(&context);
        X509V3_set_ctx(&context, x509, x509, nullptr, nullptr, 0);
        for (const auto& [nid, value] : {std::pair{NID_basic_constraints, "critical,CA:TRUE"},
                                         std::pair{NID_subject_alt_name, alt_names}}) {
            X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value);
            X509_add_ext(x509, extension, -1);
            X509_EXTENSION_free(extension);
        }
        X509_sign(x509, key, EVP_sha256());
    }
    Certificate(const Certificate&) = delete;
    Certificate& operator=(const Certificate&) = delete;
    ~Certificate() {
        X509_free(x509);
        EVP_PKEY_free(key);
    }
    /// As a CA file, in a fresh temporary folder.
    [[nodiscard]] std::string file() const {
        std::string folder =
            (std::filesystem::temp_directory_path() / "semel-http-XXXXXX").string();
        EXPECT_NE(::mkdtemp(folder.data()), nullptr);
        const std::string path = folder + "/ca.pem";
        FILE* out = std::fopen(path.c_str(), "w");
        EXPECT_NE(out, nullptr);
        PEM_write_X509(out, x509);
        std::fclose(out);
        return path;
    }
};

class TlsClientTest : public ClientTest {
  protected:
    struct Trusted {
        Certificate certificate{"DNS:localhost,IP:127.0.0.1"};
        std::string file = certificate.file();
        ~Trusted() { std::filesystem::remove_all(std::filesystem::path(file).parent_path()); }
    };
    static Trusted& trusted() {
        static Trusted one;
        return one;
    }
    TlsClientTest() : ClientTest(trusted().file) {}

    // One TLS connection: `serve` gets it after the handshake. False: the handshake failed.
    static bool serve(Raw raw, const Certificate& certificate,
                      const std::function<void(SSL*, Raw&)>& serve) {
        SSL_CTX* context = SSL_CTX_new(TLS_server_method());
        SSL_CTX_use_certificate(context, certificate.x509);
        SSL_CTX_use_PrivateKey(context, certificate.key);
        SSL* ssl = SSL_new(context);
        SSL_set_fd(ssl, raw.fd());
        const bool secured = SSL_accept(ssl) == 1;
        if (secured) serve(ssl, raw);
        SSL_free(ssl);
        SSL_CTX_free(context);
        return secured;
    }
    static std::string read_until(SSL* ssl, std::string_view end) {
        std::string got;
        char buffer[16384];
        while (!got.ends_with(end)) {
            const int n = SSL_read(ssl, buffer, sizeof buffer);
            if (n <= 0) break;
            got.append(buffer, static_cast<std::size_t>(n));
        }
        return got;
    }
    static void write(SSL* ssl, std::string_view bytes) {
        SSL_write(ssl, bytes.data(), static_cast<int>(bytes.size()));
    }
    Origin secure_origin(const char* host) {
        return parse_origin("https://" + std::string(host) + ":" + std::to_string(listener_.port()))
            .value();
    }
};

TEST_F(TlsClientTest, calls_over_tls_by_name_and_by_address_and_keeps_the_connection) {
    std::string first, name, version;
    upstream([&](RawListener& l) {
        serve(l.accept(), trusted().certificate, [&](SSL* ssl, Raw&) {
            const char* sni = SSL_get_servername(ssl, TLSEXT_NAMETYPE_host_name);
            name = sni != nullptr ? sni : "";
            version = SSL_get_version(ssl);
            first = read_until(ssl, "hello");
            write(ssl, kOk);
            read_until(ssl, "again");
            write(ssl, kOk);
        });
        serve(l.accept(), trusted().certificate, [&](SSL* ssl, Raw&) {
            read_until(ssl, "hello");
            write(ssl, kOk);
        });
    });
    Result result = call(secure_origin("localhost"), post("hello"));
    EXPECT_FALSE(result.error) << result.error->detail;
    EXPECT_EQ(result.body, "ok");
    EXPECT_EQ(call(secure_origin("localhost"), post("again")).body, "ok");
    result = call(secure_origin("127.0.0.1"), post("hello"));
    EXPECT_FALSE(result.error) << result.error->detail;
    peer_.join();
    EXPECT_TRUE(first.ends_with("\r\n\r\nhello"));
    EXPECT_EQ(name, "localhost");
    EXPECT_EQ(version, "TLSv1.3");
}

TEST_F(TlsClientTest, refuses_a_certificate_of_another_name_or_of_an_unknown_ca) {
    const Certificate stranger("DNS:localhost");
    upstream([&](RawListener& l) {
        EXPECT_FALSE(serve(l.accept(), stranger, [](SSL*, Raw&) {}));
        EXPECT_FALSE(serve(l.accept(), trusted().certificate, [](SSL*, Raw&) {}));
        // Not TLS at all.
        Raw plain = l.accept();
        plain.send("HTTP/1.1 400 Bad Request\r\n\r\n");
        plain.until_end();
    });
    const Result unknown = call(secure_origin("localhost"), post("x"));
    expect_error(unknown, Kind::refused, false);
    EXPECT_NE(unknown.error->detail.find("certificate refused"), std::string::npos)
        << unknown.error->detail;
    // The loopback range: reachable, but not in the certificate.
    expect_error(call(secure_origin("127.0.0.2"), post("x")), Kind::refused, false);
    expect_error(call(secure_origin("localhost"), post("x")), Kind::refused, false);
    peer_.join();
}

TEST_F(TlsClientTest, a_stream_cut_without_close_notify_is_cut) {
    upstream([&](RawListener& l) {
        for (const bool orderly : {false, true}) {
            serve(l.accept(), trusted().certificate, [&](SSL* ssl, Raw&) {
                read_until(ssl, "x");
                write(ssl, "HTTP/1.1 200 OK\r\n\r\nabc");
                if (orderly) SSL_shutdown(ssl);
            });
        }
    });
    expect_error(call(secure_origin("localhost"), post("x")), Kind::cut, true);
    const Result whole = call(secure_origin("localhost"), post("x"));
    EXPECT_FALSE(whole.error);
    EXPECT_EQ(whole.body, "abc");
}

TEST_F(TlsClientTest, large_bodies_pass_both_ways_and_an_early_answer_is_read) {
    const std::string big(8 * 1024 * 1024, 'x');
    std::size_t got = 0;
    upstream([&](RawListener& l) {
        serve(l.accept(), trusted().certificate, [&](SSL* ssl, Raw&) {
            got = read_until(ssl, "x!").size();
            write(ssl, "HTTP/1.1 200 OK\r\nContent-Length: " + std::to_string(big.size()) +
                           "\r\n\r\n" + big);
        });
        serve(l.accept(), trusted().certificate, [&](SSL* ssl, Raw& raw) {
            write(ssl, "HTTP/1.1 413 Content Too Large\r\nContent-Length: 3\r\n\r\nbig");
            raw.end_sending();
            raw.until_end();
        });
    });
    const Result echoed = call(secure_origin("localhost"), post(big + "!"));
    EXPECT_FALSE(echoed.error);
    EXPECT_EQ(echoed.body, big);
    const std::string huge(64 * 1024 * 1024, 'x');
    const Result early = call(secure_origin("127.0.0.1"), post(huge));
    EXPECT_FALSE(early.error) << early.error->detail;
    EXPECT_EQ(early.status, 413);
    EXPECT_EQ(early.body, "big");
    peer_.join();
    EXPECT_GT(got, big.size());
}

TEST(TlsClient, names_a_ca_file_that_cannot_be_used) {
    test::LoopThread thread;
    auto client = thread.on([&] { return make_client(thread.loop, "/no/such/ca.pem"); });
    RawListener listener;
    const Origin to = parse_origin("https://localhost:" + std::to_string(listener.port())).value();
    const std::string detail = thread.await<std::string>([&]() -> Task<std::string> {
        Request request;
        request.method = "GET";
        request.target = "/";
        auto outcome = co_await client->call(to, std::move(request), Timeouts{}, nullptr);
        const auto* error = std::get_if<CallError>(&outcome);
        co_return error != nullptr && error->kind == Kind::refused ? error->detail : "not refused";
    });
    EXPECT_NE(detail.find("/no/such/ca.pem"), std::string::npos) << detail;
    thread.on([&] {
        client.reset();
        return 0;
    });
}

}  // namespace
}  // namespace semel::http
