// What server and client share of sockets: their concrete types, uninitialised read buffers,
// gathered writes without a signal.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <boost/asio/basic_socket_acceptor.hpp>
#include <boost/asio/basic_stream_socket.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/asio.hpp"

namespace semel::http {

using runtime::error_code;
namespace asio = boost::asio;
using tcp = asio::ip::tcp;
using Socket = asio::basic_stream_socket<tcp, runtime::Executor>;
using Acceptor = asio::basic_socket_acceptor<tcp, runtime::Executor>;

/// How much one read may take.
inline constexpr std::size_t kReadBytes = 16 * 1024;
/// An idle connection's own: most requests' heads fit.
inline constexpr std::size_t kFirstBytes = 1024;

/// A read buffer of kReadBytes. Not zeroed: that would cost 5 % of a core at full load.
class ReadBuffer {
  public:
    [[nodiscard]] bool allocated() const { return memory_ != nullptr; }
    [[nodiscard]] bool empty() const { return begin_ == end_; }
    [[nodiscard]] char* data() { return memory_.get() + begin_; }
    [[nodiscard]] std::size_t size() const { return end_ - begin_; }
    [[nodiscard]] std::string_view view() { return {data(), size()}; }
    void consume(std::size_t n) { begin_ += n; }
    /// The whole memory, to read into; only when empty.
    [[nodiscard]] char* memory() { return memory_.get(); }
    void filled(std::size_t n) {
        begin_ = 0;
        end_ = n;
    }
    void give(std::unique_ptr<char[]> memory) { memory_ = std::move(memory); }
    std::unique_ptr<char[]> take() {
        begin_ = end_ = 0;
        return std::move(memory_);
    }

  private:
    std::unique_ptr<char[]> memory_;
    std::size_t begin_ = 0;
    std::size_t end_ = 0;
};

/// Pieces that wait to be written, in order. Views must live until they are written.
class Gather {
  public:
    enum class Sent { all, blocked, broken };
    void clear() {
        pieces_.clear();
        at_ = 0;
    }
    void add(std::string_view bytes);
    [[nodiscard]] bool empty() const { return at_ == pieces_.size(); }
    [[nodiscard]] std::string_view front() const {
        return {static_cast<const char*>(pieces_[at_].iov_base), pieces_[at_].iov_len};
    }
    /// Counts `n` bytes as written.
    void advance(std::size_t n);
    /// Writes as much as the socket takes now. `moved` grows by the bytes taken.
    Sent send(int socket, std::size_t& moved);

  private:
    std::vector<iovec> pieces_;
    std::size_t at_ = 0;
};

/// What is to be read from a socket now, without taking it.
enum class Peeked { nothing, bytes, closed };
Peeked peek(int socket);

/// Appends digits without a detour over a stream or snprintf.
void append_number(std::string& out, std::uint64_t value, int base = 10);

}  // namespace semel::http
