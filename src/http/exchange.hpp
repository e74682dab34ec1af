// Exchange: one request and its answer, as a handler sees it. The server implements it on a socket, the simulation without.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "http/message.hpp"
#include "runtime/asio.hpp"

namespace semel::http {

using runtime::Task;

enum class BodyStatus {
    ok,         ///< All of it was read.
    too_large,  ///< Over the limit given; the rest was not read.
    malformed,  ///< The framing is broken; the server has answered 400 and closes.
    closed,     ///< The client went away in the middle.
    timed_out,  ///< The client sent nothing for the server's read time-out; the server answers 408.
};

struct BodyPiece {
    BodyStatus status = BodyStatus::ok;
    std::string_view bytes;  ///< Valid until the next call. Empty with ok: the end of the body.
};

/// One handler uses it, on its loop's thread. Exactly one answer is given: respond(), or begin() ... finish() or cut().
/// A handler that returns without an answer is a defect; the server then answers 500 and closes.
class Exchange {
  public:
    Exchange() = default;
    Exchange(const Exchange&) = delete;
    Exchange& operator=(const Exchange&) = delete;
    virtual ~Exchange() = default;

    [[nodiscard]] virtual const RequestHead& head() const = 0;
    /// Address of the peer, for logs. Never a credential.
    [[nodiscard]] virtual std::string peer() const = 0;

    /// Reads the whole body into `into`. Sends "100 Continue" first where the client asked for it: so check everything that
    /// the head alone decides before. At most `limit` bytes are read and kept.
    virtual Task<BodyStatus> read_body(std::string& into, std::uint64_t limit) = 0;
    /// Reads the body piece by piece; nothing is kept.
    virtual Task<BodyPiece> read_some() = 0;

    /// The whole answer: `body` is sent as given, from the pieces, in one gathered write with the head (HEAD: without it).
    /// False: the client is gone; nothing else may be sent. True: the socket accepted the last byte.
    virtual Task<bool> respond(const ResponseHead& head, std::span<const std::string_view> body) = 0;
    Task<bool> respond(const ResponseHead& head, std::string_view body) {
        const std::string_view pieces[] = {body};
        co_return co_await respond(head, std::span<const std::string_view>(pieces));
    }

    /// Starts a streamed answer (chunked; read-to-close for HTTP/1.0). With `length` the body is sent under that
    /// Content-Length instead. Nothing is sent before the first write or finish: the head leaves with it in one write.
    virtual void begin(const ResponseHead& head, std::optional<std::uint64_t> length = std::nullopt) = 0;
    /// Sends bytes as one chunk, after all before it was accepted by the socket (back-pressure). False: the client is gone.
    virtual Task<bool> write(std::string_view bytes) = 0;
    /// Sends `last` (may be empty) and the end of the body in one write. False: the client was gone before it was accepted.
    virtual Task<bool> finish(std::string_view last = {}) = 0;
    /// Ends the answer visibly broken: the connection is closed without the final chunk (or before Content-Length).
    virtual void cut() = 0;

    /// True once the peer is known to have closed (looks at the socket without blocking or taking bytes from it).
    virtual bool client_gone() = 0;
};

/// What a server calls for each request.
class Handler {
  public:
    Handler() = default;
    Handler(const Handler&) = delete;
    Handler& operator=(const Handler&) = delete;
    virtual ~Handler() = default;
    /// Runs on the connection's loop. `exchange` lives until the task ends. Must not throw.
    virtual Task<> handle(Exchange& exchange) = 0;
};

}  // namespace semel::http
