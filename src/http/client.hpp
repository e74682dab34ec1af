// Client: requests to upstreams over HTTP/1.1 and HTTPS with kept connections. Never repeats a request that may have been processed.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "base/result.hpp"
#include "http/message.hpp"
#include "runtime/loop.hpp"

namespace semel::http {

using runtime::Loop;
using runtime::Task;

/// Where an upstream lives: http(s)://host[:port][/base/path].
struct Origin {
    bool tls = false;
    std::string host;       ///< Without brackets.
    std::uint16_t port = 80;
    std::string base_path;  ///< "" or "/v1beta": no trailing slash.
    std::string authority;  ///< What goes into Host.
};

/// Error invalid_argument with the reason: not http(s), user info, query, fragment, bad port.
base::Result<Origin> parse_origin(std::string_view url);

struct Timeouts {
    std::chrono::milliseconds connect{std::chrono::seconds{10}};      ///< Name, TCP and TLS together.
    std::chrono::milliseconds first_byte{std::chrono::seconds{600}};  ///< From the last request byte to the head.
    std::chrono::milliseconds idle{std::chrono::seconds{300}};        ///< Between two reads of a body, or writes of a request.
};

/// How a call failed, and whether the upstream may have seen it.
struct CallError {
    enum class Kind {
        refused,             ///< No connection (refused, unreachable, name or TLS failed): not processed.
        connect_timeout,     ///< Same.
        reset,               ///< The connection broke after bytes of the request may have left.
        first_byte_timeout,  ///< No head in time.
        idle_timeout,        ///< The body stopped.
        cut,                 ///< The body ended before its framing said so.
        bad_response,        ///< Not HTTP, or over a limit.
        body_source,         ///< The request's own body could not be read to its end (the client's upload broke).
        cancelled,           ///< Response::cancel or the caller's stop.
    };
    Kind kind = Kind::refused;
    bool maybe_processed = false;  ///< Request bytes may have reached the upstream.
    std::string detail;
    /// The connection had served a call before and broke before a byte of the answer came: most likely the server closed it
    /// for having been idle while the request was on its way. Nobody knows, so it is never sent again here.
    bool on_kept = false;
};

/// A piece of the request's body; empty: the end. Nullopt: it broke off. An answer that comes before the end is noticed between
/// two pieces and while one is being written: then no further piece is asked for.
using BodySource = std::function<Task<std::optional<std::string_view>>()>;

struct Request {
    std::string method;
    std::string target;   ///< Path and query, appended to the origin's base path.
    std::string headers;  ///< Ready lines "Name: value\r\n"; without Host, framing and Connection.
    std::string_view body;                            ///< Must outlive the call. Ignored where `source` is set.
    BodySource source;                                ///< Streamed body, sent chunked or under `source_length`.
    std::optional<std::uint64_t> source_length;
    bool has_body = false;  ///< Send Content-Length: 0 for an empty body as well (POST).
    bool own_connection = false;  ///< None that served a call before.
};

/// An answer whose body is being read. Destroying it early closes its connection; at the end of the body the connection goes
/// back to the pool by itself.
class Response {
  public:
    Response() = default;
    Response(const Response&) = delete;
    Response& operator=(const Response&) = delete;
    virtual ~Response() = default;
    [[nodiscard]] virtual int status() const = 0;
    [[nodiscard]] virtual const std::vector<Header>& headers() const = 0;
    [[nodiscard]] std::optional<std::string_view> header(std::string_view name) const {
        for (const Header& h : headers()) {
            if (name_is(h.name, name)) return h.value;
        }
        return std::nullopt;
    }
    /// The next bytes (valid until the next call); empty: the body is complete. After an error nothing more comes.
    virtual Task<std::variant<std::string_view, CallError>> read_some() = 0;
    /// The Content-Length, if the body has one.
    [[nodiscard]] virtual std::optional<std::uint64_t> content_length() const = 0;
    /// Makes a pending and every later read end with `cancelled`, and closes. From the loop's thread.
    virtual void cancel() = 0;
};

/// For one loop; all calls on its thread.
class Client {
  public:
    Client() = default;
    Client(const Client&) = delete;
    Client& operator=(const Client&) = delete;
    virtual ~Client() = default;

    /// Lets the caller end a call before its head has come. Fire from the loop's thread.
    struct CancelToken {
        std::function<void()> fire;  ///< Set by the client while a call runs; empty otherwise.
        void cancel() {
            cancelled = true;
            if (fire) fire();
        }
        bool cancelled = false;
    };

    /// Sends the request and waits for the head of the answer (1xx are skipped). A kept connection is used only if it is
    /// readable-free at that moment; a request that broke on one is never sent again. `cancel` may be null, else must outlive.
    virtual Task<std::variant<std::unique_ptr<Response>, CallError>> call(const Origin& origin, Request request,
                                                                          Timeouts timeouts, CancelToken* cancel) = 0;
};

/// The real one, on sockets. `ca_file`: extra trust for tests; empty: the system's.
std::unique_ptr<Client> make_client(Loop& loop, std::string ca_file = {});

}  // namespace semel::http
