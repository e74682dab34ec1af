// Server: accepts connections on one loop, reads requests with llhttp, calls a Handler, writes the answers.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "base/result.hpp"
#include "http/exchange.hpp"
#include "runtime/loop.hpp"

namespace semel::http {

/// Limits of a listener; each has a name in docs/reference/limits.md.
struct ServerLimits {
    std::size_t head_max_bytes = 64 * 1024;   ///< Request line and headers together; 431 (414 for the line alone).
    std::size_t headers_max = 200;            ///< Header lines; 431.
    std::size_t target_max_bytes = 16 * 1024; ///< 414.
    std::chrono::milliseconds head_timeout{std::chrono::seconds{15}};  ///< From a request's first byte to its head's end; 408.
    std::chrono::milliseconds body_idle_timeout{std::chrono::seconds{30}};  ///< Between two reads of a body; 408.
    std::chrono::milliseconds write_idle_timeout{std::chrono::seconds{120}}; ///< A client that takes nothing for so long is cut.
    std::chrono::milliseconds keep_alive{std::chrono::seconds{75}};  ///< Idle between requests; longer than balancers keep theirs.
    std::size_t discard_max_bytes = 1024 * 1024;  ///< Of a refused body, before closing.
    std::chrono::milliseconds discard_timeout{std::chrono::seconds{2}};
    std::size_t connections_max = 16 * 1024;  ///< Per loop; more wait in the kernel's queue.
};

struct ServerCounters {
    std::atomic<std::uint64_t> connections{0};       ///< Accepted so far.
    std::atomic<std::uint64_t> open{0};              ///< Open now.
    std::atomic<std::uint64_t> rejected_requests{0}; ///< 4xx of the parser and the limits.
    std::atomic<std::uint64_t> accept_errors{0};     ///< EMFILE and the like; accepting goes on by itself.
};

/// One per loop and address. Several loops may listen on one port (SO_REUSEPORT).
class Server {
  public:
    /// Binds and listens; port 0 takes a free one. Error io: names the address and the reason.
    static base::Result<std::unique_ptr<Server>> listen(runtime::Loop& loop, const std::string& host, std::uint16_t port,
                                                        Handler& handler, ServerLimits limits, ServerCounters& counters,
                                                        bool reuse_port);
    virtual ~Server() = default;
    Server() = default;
    Server(const Server&) = delete;
    Server& operator=(const Server&) = delete;

    [[nodiscard]] virtual std::uint16_t port() const = 0;
    /// Stops accepting, closes idle connections, lets each running exchange end and its connection close after it.
    virtual void drain() = 0;
    /// Exchanges that run now.
    [[nodiscard]] virtual std::size_t running() const = 0;
    /// Closes everything at once.
    virtual void close() = 0;
};

}  // namespace semel::http
