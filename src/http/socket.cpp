#include "http/socket.hpp"

#include <algorithm>
#include <cerrno>
#include <charconv>

namespace semel::http {

namespace {
constexpr std::size_t kPiecesPerWrite = 64;  // below IOV_MAX; more pieces only cost another call
}  // namespace

void Gather::add(std::string_view bytes) {
    if (bytes.empty()) return;
    pieces_.push_back({const_cast<char*>(bytes.data()), bytes.size()});
}

void Gather::advance(std::size_t n) {
    while (n > 0) {
        iovec& piece = pieces_[at_];
        const std::size_t part = std::min(n, piece.iov_len);
        piece.iov_base = static_cast<char*>(piece.iov_base) + part;
        piece.iov_len -= part;
        n -= part;
        if (piece.iov_len == 0) ++at_;
    }
}

Gather::Sent Gather::send(int socket, std::size_t& moved) {
    while (!empty()) {
        msghdr message{};
        message.msg_iov = pieces_.data() + at_;
        message.msg_iovlen = std::min(pieces_.size() - at_, kPiecesPerWrite);
        const ssize_t n = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0) {
            if (errno == EINTR) continue;
            return errno == EAGAIN || errno == EWOULDBLOCK ? Sent::blocked : Sent::broken;
        }
        moved += static_cast<std::size_t>(n);
        advance(static_cast<std::size_t>(n));
    }
    return Sent::all;
}

Peeked peek(int socket) {
    char byte = 0;
    ssize_t n = 0;
    do {
        n = ::recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    if (n > 0) return Peeked::bytes;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Peeked::nothing;
    return Peeked::closed;
}

void append_number(std::string& out, std::uint64_t value, int base) {
    char digits[20];
    const auto end = std::to_chars(digits, digits + sizeof digits, value, base).ptr;
    out.append(digits, static_cast<std::size_t>(end - digits));
}

}  // namespace semel::http
