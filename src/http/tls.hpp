// TLS: the client's side of one TLS session on a non-blocking socket, without waiting. The caller
// waits and calls again.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace semel::http {

enum class TlsStatus {
    ok,
    want_read,   ///< Call again once the socket is readable.
    want_write,  ///< Call again once it is writable.
    closed,      ///< The peer ended the session properly (close_notify).
    failed,      ///< Broken, cut without close_notify, or not to be trusted: see error().
};

class TlsSession {
  public:
    TlsSession() = default;
    TlsSession(const TlsSession&) = delete;
    TlsSession& operator=(const TlsSession&) = delete;
    virtual ~TlsSession() = default;
    virtual TlsStatus handshake() = 0;
    virtual TlsStatus read(char* into, std::size_t size, std::size_t& n) = 0;
    /// May take a part. After want_* the same bytes must be offered again.
    virtual TlsStatus write(std::string_view bytes, std::size_t& n) = 0;
    /// True if nothing but session tickets came since the last read: the session can carry another
    /// request.
    virtual bool quiet() = 0;
    [[nodiscard]] virtual const std::string& error() const = 0;
};

/// Trust and settings of all sessions of a client: TLS 1.2 or newer, the system's CAs and those of
/// `ca_file`, names verified.
class TlsContext {
  public:
    /// Null: `problem` says why (a `ca_file` that cannot be read).
    static std::unique_ptr<TlsContext> make(const std::string& ca_file, std::string& problem);
    TlsContext() = default;
    TlsContext(const TlsContext&) = delete;
    TlsContext& operator=(const TlsContext&) = delete;
    virtual ~TlsContext() = default;
    /// A session on the connected non-blocking socket, which must outlive it. `host`: a name (sent
    /// as SNI) or an address.
    virtual std::unique_ptr<TlsSession> session(int socket, const std::string& host) = 0;
};

}  // namespace semel::http
