#include "stores/redis/link.hpp"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>

#include <boost/asio/ip/address.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/write.hpp>
#include <utility>

namespace semel::stores::redis {

namespace {

constexpr std::size_t kReadBytes = 64 * 1024;
// Memory that one huge command needed is given back.
constexpr std::size_t kKeptOutBytes = 1024 * 1024;
// After so many idle seconds the kernel asks whether the peer is still there, and so often until it
// gives up.
constexpr int kKeepAliveIdleS = 15;
constexpr int kKeepAliveEachS = 5;
constexpr int kKeepAliveTries = 3;

void set(int socket, int level, int name, int value) {
    ::setsockopt(socket, level, name, &value, sizeof value);
}

// Names verified by OpenSSL itself, so that a refusal has a reason.
void expect_name(SSL* ssl, const std::string& host) {
    in6_addr any{};
    if (::inet_pton(AF_INET, host.c_str(), &any) == 1 ||
        ::inet_pton(AF_INET6, host.c_str(), &any) == 1) {
        X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), host.c_str());
    } else {
        SSL_set_tlsext_host_name(ssl, host.c_str());
        SSL_set1_host(ssl, host.c_str());
    }
}

}  // namespace

base::Result<std::shared_ptr<asio::ssl::context>> tls_context(const std::string& ca_file) {
    auto context = std::make_shared<asio::ssl::context>(asio::ssl::context::tls_client);
    SSL_CTX_set_min_proto_version(context->native_handle(), TLS1_2_VERSION);
    context->set_verify_mode(asio::ssl::verify_peer);
    error_code ignored;
    context->set_default_verify_paths(ignored);
    error_code ec;
    if (!ca_file.empty()) context->load_verify_file(ca_file, ec);
    if (ec) {
        return base::Error{.code = base::ErrorCode::invalid_argument,
                           .detail = "the CA file " + ca_file + " cannot be used: " + ec.message() +
                                     "; it must hold certificates in PEM"};
    }
    return context;
}

Link::Link(asio::io_context& io, std::shared_ptr<asio::ssl::context> tls, User& user)
    : tls_context_(std::move(tls)),
      user_(&user),
      resolver_(io.get_executor()),
      socket_(io.get_executor()),
      limit_(io) {}

void Link::open(Place place, milliseconds limit) {
    place_ = std::move(place);
    name_ = place_.name();
    limit_ms_ = limit;
    limit_.expires_after(limit);
    limit_.async_wait([self = shared_from_this()](error_code ec) {
        if (ec || self->user_ == nullptr) return;
        const std::string within = " within " + std::to_string(self->limit_ms_.count()) + " ms";
        if (self->handshaking_) {
            self->broken(base::ErrorCode::store_unavailable,
                         "no TLS handshake with " + self->name_ + within +
                             ": does the server speak TLS on this port?");
        } else {
            self->broken(base::ErrorCode::store_unavailable,
                         "no connection to " + self->name_ + within +
                             ": is the server up, and no firewall between?");
        }
    });
    error_code ec;
    if (!place_.path.empty()) {
        endpoints_.push_back(asio::local::stream_protocol::endpoint(place_.path));
        return try_next();
    }
    const auto numeric = asio::ip::make_address(place_.address.host, ec);
    if (!ec) {
        endpoints_.push_back(asio::ip::tcp::endpoint(numeric, place_.address.port));
        return try_next();
    }
    resolver_.async_resolve(
        place_.address.host, std::to_string(place_.address.port),
        asio::ip::resolver_base::numeric_service,
        [self = shared_from_this()](error_code failed, const Resolver::results_type& found) {
            if (self->user_ == nullptr) return;
            if (failed) {
                self->broken(
                    base::ErrorCode::store_unavailable,
                    "the host name of " + self->name_ + " cannot be resolved: " + failed.message());
                return;
            }
            for (const auto& one : found) self->endpoints_.push_back(one.endpoint());
            self->try_next();
        });
}

void Link::try_next() {
    error_code ignored;
    socket_.close(ignored);
    socket_.async_connect(endpoints_[next_endpoint_], [self = shared_from_this()](error_code ec) {
        if (self->user_ == nullptr) return;
        if (!ec) return self->connected();
        if (++self->next_endpoint_ < self->endpoints_.size()) return self->try_next();
        self->broken(base::ErrorCode::store_unavailable, "no connection to " + self->name_ + ": " +
                                                             ec.message() + "; is the server up?");
    });
}

void Link::connected() {
    error_code ignored;
    socket_.non_blocking(true, ignored);
    const int handle = socket_.native_handle();
    if (place_.path.empty()) {
        set(handle, IPPROTO_TCP, TCP_NODELAY, 1);
        set(handle, SOL_SOCKET, SO_KEEPALIVE, 1);
        set(handle, IPPROTO_TCP, TCP_KEEPIDLE, kKeepAliveIdleS);
        set(handle, IPPROTO_TCP, TCP_KEEPINTVL, kKeepAliveEachS);
        set(handle, IPPROTO_TCP, TCP_KEEPCNT, kKeepAliveTries);
    }
    if (tls_context_ == nullptr) return opened();
    handshaking_ = true;
    tls_ = std::make_unique<asio::ssl::stream<Socket&>>(socket_, *tls_context_);
    expect_name(tls_->native_handle(), place_.address.host);
    tls_->async_handshake(
        asio::ssl::stream_base::client, [self = shared_from_this()](error_code ec) {
            if (self->user_ == nullptr) return;
            if (!ec) return self->opened();
            const long verdict = SSL_get_verify_result(self->tls_->native_handle());
            if (verdict != X509_V_OK) {
                self->broken(
                    base::ErrorCode::invalid_argument,
                    "the certificate of " + self->name_ +
                        " is not trusted: " + X509_verify_cert_error_string(verdict) +
                        "; name its authority in ca_file, and the host as the certificate does");
            } else {
                self->broken(base::ErrorCode::invalid_argument,
                             "no TLS with " + self->name_ + ": " + ec.message() +
                                 "; if the server does not speak TLS on this port, use a URL "
                                 "without the second s");
            }
        });
}

void Link::opened() {
    limit_.cancel();
    in_ = std::make_unique_for_overwrite<char[]>(kReadBytes);
    user_->link_opened();
    if (user_ != nullptr) read();
}

void Link::read() {
    const auto into = asio::buffer(in_.get(), kReadBytes);
    auto done = [self = shared_from_this()](error_code ec, std::size_t n) { self->got(ec, n); };
    if (tls_ != nullptr) {
        tls_->async_read_some(into, std::move(done));
    } else {
        socket_.async_read_some(into, std::move(done));
    }
}

void Link::got(error_code ec, std::size_t n) {
    if (user_ == nullptr) return;
    if (ec) return broken_while_speaking(ec);
    user_->link_heard();
    reader_.feed({in_.get(), n});
    Reply reply;
    while (user_ != nullptr) {
        const ReplyReader::Next next = reader_.next(reply);
        if (next == ReplyReader::Next::more) break;
        if (next == ReplyReader::Next::broken) {
            broken(base::ErrorCode::store_unavailable,
                   heard_ ? name_ + " broke the protocol: " + reader_.problem()
                          : "what answers at " + name_ + " is not Redis without TLS (" +
                                reader_.problem() + "): if it speaks TLS, use rediss://");
            return;
        }
        heard_ = true;
        user_->link_received(std::move(reply));
    }
    if (user_ == nullptr) return;
    user_->link_read();
    if (user_ != nullptr) read();
}

void Link::send() {
    auto done = [self = shared_from_this()](error_code ec, std::size_t) { self->sent(ec); };
    if (tls_ != nullptr) {
        asio::async_write(*tls_, asio::buffer(out_), std::move(done));
    } else {
        asio::async_write(socket_, asio::buffer(out_), std::move(done));
    }
}

void Link::sent(error_code ec) {
    if (user_ == nullptr) return;
    if (ec) return broken_while_speaking(ec);
    out_.clear();
    if (out_.capacity() > kKeptOutBytes) std::string{}.swap(out_);
    user_->link_written();
}

void Link::broken_while_speaking(error_code ec) {
    const bool ended = ec == asio::error::eof || ec == asio::ssl::error::stream_truncated ||
                       ec == asio::error::connection_reset || ec == asio::error::broken_pipe;
    if (!heard_ && ended && tls_ == nullptr) {
        return broken(
            base::ErrorCode::store_unavailable,
            name_ +
                " closed the connection before its first answer: if it speaks TLS, use rediss://; "
                "else it may be shutting down or at its maxclients");
    }
    broken(base::ErrorCode::store_unavailable,
           ended ? name_ + " closed the connection"
                 : "the connection to " + name_ + " broke: " + ec.message());
}

void Link::broken(base::ErrorCode code, std::string sentence) {
    User* const user = user_;
    close();
    user->link_broken({.code = code, .detail = std::move(sentence)});
}

void Link::close() {
    if (user_ == nullptr) return;
    user_ = nullptr;
    limit_.cancel();
    resolver_.cancel();
    error_code ignored;
    socket_.close(ignored);
}

}  // namespace semel::stores::redis
