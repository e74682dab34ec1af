// One connection to a Redis server or sentinel, used once: opened, spoken on, closed. TCP, unix
// socket or TLS.
#pragma once

#include <boost/asio/basic_stream_socket.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/error.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <memory>
#include <string>
#include <vector>

#include "runtime/asio.hpp"
#include "stores/redis/wire.hpp"

namespace semel::stores::redis {

namespace asio = runtime::asio;
using runtime::error_code;

/// A server's address: a host and port, or the path of a unix socket.
struct Place {
    Address address;
    std::string path;
    [[nodiscard]] std::string name() const { return path.empty() ? name_of(address) : path; }
};

/// TLS 1.2 or newer, the system's authorities and those of `ca_file`, names verified. Error
/// invalid_argument: `ca_file`.
base::Result<std::shared_ptr<asio::ssl::context>> tls_context(const std::string& ca_file);

/// All on the thread of its io_context. Alive while an operation is under way, whoever else lets go
/// of it.
class Link : public std::enable_shared_from_this<Link> {
  public:
    /// Who is told. Each may call close().
    class User {
      public:
        virtual void link_opened() = 0;
        virtual void link_heard() = 0;  ///< Bytes came; their replies follow.
        virtual void link_received(Reply&& reply) = 0;
        virtual void link_read() = 0;  ///< All replies of these bytes were given.
        virtual void
        link_written() = 0;  ///< What was sent is in the system's hands: the next may be sent.
        /// Could not be opened, or broke. The last call. Error store_unavailable or
        /// invalid_argument.
        virtual void link_broken(base::Error why) = 0;

      protected:
        ~User() = default;
    };
    /// `tls` null: without TLS. `user` must live until close() or link_broken.
    Link(asio::io_context& io, std::shared_ptr<asio::ssl::context> tls, User& user);

    /// Opens within `limit` (all addresses of the name together).
    void open(Place place, milliseconds limit);
    /// What the next send() sends. Filled only while nothing is being sent.
    [[nodiscard]] std::string& out() { return out_; }
    void send();
    /// The user is told nothing any more. Idempotent.
    void close();

  private:
    using Socket = asio::basic_stream_socket<asio::generic::stream_protocol, runtime::Executor>;
    using Endpoint = asio::generic::stream_protocol::endpoint;
    using Resolver = asio::ip::basic_resolver<asio::ip::tcp, runtime::Executor>;

    void try_next();
    void connected();
    void opened();
    void read();
    void got(error_code ec, std::size_t n);
    void sent(error_code ec);
    void broken(base::ErrorCode code, std::string sentence);
    void broken_while_speaking(error_code ec);

    std::shared_ptr<asio::ssl::context> tls_context_;
    User* user_;
    Resolver resolver_;
    Socket socket_;
    std::unique_ptr<asio::ssl::stream<Socket&>> tls_;
    asio::steady_timer limit_;
    milliseconds limit_ms_{};
    Place place_;
    std::string name_;
    std::vector<Endpoint> endpoints_;
    std::size_t next_endpoint_ = 0;
    bool handshaking_ = false;
    bool heard_ = false;
    ReplyReader reader_;
    std::unique_ptr<char[]> in_;
    std::string out_;
};

}  // namespace semel::stores::redis
