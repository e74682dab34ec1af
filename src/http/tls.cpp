#include "http/tls.hpp"

#include <arpa/inet.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>

#include <cerrno>
#include <climits>

#include "base/assert.hpp"

namespace semel::http {

namespace {

int clamped(std::size_t n) { return static_cast<int>(n < INT_MAX ? n : INT_MAX); }

std::string last_error(const SSL* ssl) {
    const long verdict = ssl != nullptr ? SSL_get_verify_result(ssl) : X509_V_OK;
    if (verdict != X509_V_OK) {
        return std::string("certificate refused: ") + X509_verify_cert_error_string(verdict);
    }
    const unsigned long code = ERR_peek_error();
    const char* reason = code != 0 ? ERR_reason_error_string(code) : nullptr;
    return reason != nullptr ? reason : "connection broke";
}

// OpenSSL's own socket BIO writes without MSG_NOSIGNAL: a peer that is gone would send us SIGPIPE.
int socket_write(BIO* bio, const char* bytes, int n) {
    BIO_clear_retry_flags(bio);
    const int socket = static_cast<int>(reinterpret_cast<std::intptr_t>(BIO_get_data(bio)));
    const ssize_t done =
        ::send(socket, bytes, static_cast<std::size_t>(n), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (done < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        BIO_set_retry_write(bio);
    return static_cast<int>(done);
}

int socket_read(BIO* bio, char* into, int n) {
    BIO_clear_retry_flags(bio);
    const int socket = static_cast<int>(reinterpret_cast<std::intptr_t>(BIO_get_data(bio)));
    const ssize_t done = ::recv(socket, into, static_cast<std::size_t>(n), MSG_DONTWAIT);
    if (done < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        BIO_set_retry_read(bio);
    if (done == 0) BIO_set_flags(bio, BIO_FLAGS_IN_EOF);
    return static_cast<int>(done);
}

long socket_control(BIO* bio, int command, long, void*) {
    if (command == BIO_CTRL_FLUSH) return 1;
    if (command == BIO_CTRL_EOF) return BIO_test_flags(bio, BIO_FLAGS_IN_EOF) != 0 ? 1 : 0;
    return 0;
}

BIO_METHOD* socket_method() {
    static BIO_METHOD* const method = [] {
        BIO_METHOD* m = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "semel socket");
        BIO_meth_set_write(m, socket_write);
        BIO_meth_set_read(m, socket_read);
        BIO_meth_set_ctrl(m, socket_control);
        return m;
    }();
    return method;
}

class Session final : public TlsSession {
  public:
    Session(SSL_CTX* context, int socket, const std::string& host) : ssl_(SSL_new(context)) {
        SEMEL_ASSERT(ssl_ != nullptr, "out of memory for a TLS session");
        BIO* bio = BIO_new(socket_method());
        SEMEL_ASSERT(bio != nullptr, "out of memory for a TLS session");
        BIO_set_data(bio, reinterpret_cast<void*>(static_cast<std::intptr_t>(socket)));
        BIO_set_init(bio, 1);
        SSL_set_bio(ssl_, bio, bio);
        SSL_set_connect_state(ssl_);
        in6_addr address{};
        if (inet_pton(AF_INET, host.c_str(), &address) == 1 ||
            inet_pton(AF_INET6, host.c_str(), &address) == 1) {
            X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl_), host.c_str());
        } else {
            SSL_set_tlsext_host_name(ssl_, host.c_str());
            SSL_set1_host(ssl_, host.c_str());
        }
    }
    ~Session() override { SSL_free(ssl_); }

    TlsStatus handshake() override {
        ERR_clear_error();
        return status_of(SSL_do_handshake(ssl_));
    }

    TlsStatus read(char* into, std::size_t size, std::size_t& n) override {
        ERR_clear_error();
        const int done = SSL_read(ssl_, into, clamped(size));
        n = done > 0 ? static_cast<std::size_t>(done) : 0;
        return status_of(done);
    }

    TlsStatus write(std::string_view bytes, std::size_t& n) override {
        ERR_clear_error();
        const int done = SSL_write(ssl_, bytes.data(), clamped(bytes.size()));
        n = done > 0 ? static_cast<std::size_t>(done) : 0;
        return status_of(done);
    }

    bool quiet() override {
        char byte = 0;
        ERR_clear_error();
        return status_of(SSL_peek(ssl_, &byte, 1)) == TlsStatus::want_read;
    }

    const std::string& error() const override { return error_; }

  private:
    TlsStatus status_of(int done) {
        if (done > 0) return TlsStatus::ok;
        switch (SSL_get_error(ssl_, done)) {
            case SSL_ERROR_WANT_READ:
                return TlsStatus::want_read;
            case SSL_ERROR_WANT_WRITE:
                return TlsStatus::want_write;
            case SSL_ERROR_ZERO_RETURN:
                return TlsStatus::closed;
            default:
                error_ = last_error(ssl_);
                return TlsStatus::failed;
        }
    }

    SSL* ssl_;
    std::string error_;
};

class Context final : public TlsContext {
  public:
    explicit Context(SSL_CTX* context) : context_(context) {}
    ~Context() override { SSL_CTX_free(context_); }
    std::unique_ptr<TlsSession> session(int socket, const std::string& host) override {
        return std::make_unique<Session>(context_, socket, host);
    }

  private:
    SSL_CTX* context_;
};

}  // namespace

std::unique_ptr<TlsContext> TlsContext::make(const std::string& ca_file, std::string& problem) {
    ERR_clear_error();
    SSL_CTX* context = SSL_CTX_new(TLS_client_method());
    if (context == nullptr) {
        problem = "OpenSSL gives no TLS context: " + last_error(nullptr);
        return nullptr;
    }
    SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
    SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                                  SSL_MODE_RELEASE_BUFFERS);
    SSL_CTX_set_default_verify_paths(context);
    if (!ca_file.empty() && SSL_CTX_load_verify_locations(context, ca_file.c_str(), nullptr) != 1) {
        problem = "the CA file " + ca_file + " cannot be used: " + last_error(nullptr);
        SSL_CTX_free(context);
        return nullptr;
    }
    return std::make_unique<Context>(context);
}

}  // namespace semel::http
