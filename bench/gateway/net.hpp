// What the measuring programs share: clock, sockets on loopback, options, and a reader of HTTP/1.1
// answers. Header only; single-threaded; every failure that makes a measurement worthless ends the
// process with a sentence.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "fail.hpp"

namespace bench {

constexpr std::int64_t us = 1'000;
constexpr std::int64_t ms = 1'000'000;
constexpr std::int64_t second = 1'000'000'000;

/// Nanoseconds of the monotonic clock.
inline std::int64_t now() {
    timespec t{};
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<std::int64_t>(t.tv_sec) * second + t.tv_nsec;
}

[[noreturn]] inline void fail_errno(const std::string& what) {
    fail(what + ": " + std::strerror(errno));
}

/// `--name value` pairs. An option that is not in `defaults` ends the process and lists the known
/// ones.
class Options {
  public:
    Options(int argc, char** argv, std::map<std::string, std::string> defaults)
        : values_(std::move(defaults)) {
        for (int i = 1; i < argc; i += 2) {
            const std::string name =
                std::string_view(argv[i]).substr(0, 2) == "--" ? argv[i] + 2 : "";
            if (!values_.contains(name) || i + 1 >= argc) {
                std::string known;
                for (const auto& [key, value] : values_) known += " --" + key + " (" + value + ")";
                fail("unknown option or no value: " + std::string(argv[i]) +
                     "; options and defaults:" + known);
            }
            values_[name] = argv[i + 1];
        }
    }
    [[nodiscard]] const std::string& text(const std::string& name) const {
        return values_.at(name);
    }
    [[nodiscard]] std::int64_t number(const std::string& name) const {
        const std::string& value = values_.at(name);
        std::int64_t out = 0;
        const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), out);
        if (error != std::errc{} || end != value.data() + value.size() || out < 0) {
            fail("--" + name + " " + value + ": not a number");
        }
        return out;
    }

  private:
    std::map<std::string, std::string> values_;
};

inline sockaddr_in loopback(std::int64_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

inline void no_delay(int fd) {
    const int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

/// A socket on its way to 127.0.0.1:`port`; writable once connected.
inline int begin_connect(std::int64_t port) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) fail_errno("socket");
    no_delay(fd);
    const sockaddr_in address = loopback(port);
    if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 &&
        errno != EINPROGRESS) {
        fail_errno("connect to port " + std::to_string(port));
    }
    return fd;
}

class Poll {
  public:
    Poll() : fd_(epoll_create1(EPOLL_CLOEXEC)) {
        if (fd_ < 0) fail_errno("epoll_create1");
        prctl(PR_SET_TIMERSLACK, 1UL);  // timers to the microsecond: the default rounds up by 50
    }
    void watch(int fd, std::uint32_t interest, std::uint64_t tag, bool known = false) const {
        epoll_event event{};
        event.events = interest;
        event.data.u64 = tag;
        if (epoll_ctl(fd_, known ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event) != 0)
            fail_errno("epoll_ctl");
    }
    /// Waits until something happens or `until` (ns; negative: for ever). What happened is in
    /// events[0..answer).
    int wait(std::int64_t until) {
        timespec patience{};
        if (until >= 0) {
            const std::int64_t left = std::max<std::int64_t>(0, until - now());
            patience = {.tv_sec = left / second, .tv_nsec = left % second};
        }
        const int count = epoll_pwait2(fd_, events, static_cast<int>(std::size(events)),
                                       until < 0 ? nullptr : &patience, nullptr);
        if (count < 0 && errno != EINTR) fail_errno("epoll_pwait2");
        return std::max(0, count);
    }
    epoll_event events[512];

  private:
    int fd_;
};

/// The value of a header in a head (lines with CRLF), or nothing.
inline std::string_view header(std::string_view head, std::string_view name) {
    for (std::size_t at = head.find("\r\n"); at != head.npos && at + 2 < head.size();) {
        const std::size_t begin = at + 2;
        at = head.find("\r\n", begin);
        std::string_view line = head.substr(begin, at == head.npos ? at : at - begin);
        if (line.size() > name.size() && line[name.size()] == ':' &&
            strncasecmp(line.data(), name.data(), name.size()) == 0) {
            line.remove_prefix(name.size() + 1);
            while (!line.empty() && line.front() == ' ') line.remove_prefix(1);
            return line;
        }
    }
    return {};
}

inline std::size_t to_size(std::string_view digits, int base = 10) {
    std::size_t out = 0;
    std::from_chars(digits.data(), digits.data() + digits.size(), out, base);
    return out;
}

/// Reads one HTTP/1.1 answer from pieces: with Content-Length, chunked, or until the connection
/// closes.
class Answer {
  public:
    /// Takes bytes and calls `body(std::string_view)` for each piece of the body. True once the
    /// answer is whole.
    template <class Body>
    bool feed(std::string_view bytes, Body&& body) {
        pending_ += bytes;
        std::string_view rest = pending_;
        if (state_ == State::head) {
            const std::size_t end = rest.find("\r\n\r\n");
            if (end == rest.npos) return false;
            read_head(rest.substr(0, end + 2));
            rest.remove_prefix(end + 4);
        }
        while (state_ != State::whole && !rest.empty()) {
            if (state_ == State::size) {
                const std::size_t end = rest.find("\r\n");
                if (end == rest.npos) break;
                left_ = to_size(rest.substr(0, end), 16);
                rest.remove_prefix(end + 2);
                state_ = left_ == 0 ? State::last : State::chunk;
            } else if (state_ == State::chunk_end || state_ == State::last) {
                if (rest.size() < 2) break;
                rest.remove_prefix(2);
                state_ = state_ == State::last ? State::whole : State::size;
            } else {
                const std::string_view piece = rest.substr(0, left_);
                body(piece);
                rest.remove_prefix(piece.size());
                if (state_ != State::until_close) left_ -= piece.size();
                if (left_ == 0) state_ = state_ == State::chunk ? State::chunk_end : State::whole;
            }
        }
        pending_ = std::string(rest);
        return state_ == State::whole;
    }
    /// The connection has ended. True if that ends a whole answer.
    [[nodiscard]] bool closed() const {
        return state_ == State::whole || state_ == State::until_close;
    }
    [[nodiscard]] bool ok() const { return status_ >= 200 && status_ < 300; }
    [[nodiscard]] bool reusable() const { return state_ == State::whole && !close_; }

  private:
    enum class State { head, length, size, chunk, chunk_end, last, until_close, whole };

    void read_head(std::string_view head) {
        status_ = static_cast<int>(to_size(head.substr(std::min<std::size_t>(9, head.size()), 3)));
        const std::string_view length = header(head, "content-length");
        close_ = header(head, "connection") == "close";
        if (header(head, "transfer-encoding") == "chunked") {
            state_ = State::size;
        } else if (!length.empty()) {
            left_ = to_size(length);
            state_ = left_ == 0 ? State::whole : State::length;
        } else {
            left_ = std::string::npos;
            state_ = State::until_close;
        }
    }

    std::string pending_;
    State state_ = State::head;
    std::size_t left_ = 0;
    int status_ = 0;
    bool close_ = false;
};

/// A POST of a chat completion. With `key` empty no Idempotency-Key is sent.
inline std::string chat_request(const std::string& model, bool stream, const std::string& key,
                                bool close) {
    std::string body =
        R"({"model":")" + model +
        R"(","messages":[{"role":"user","content":"Summarise the notes of )" +
        R"(this morning's meeting in one line, please, and name who does what."}],"temperature":0.7)" +
        (stream ? R"(,"stream":true})" : "}");
    return "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: "
           "application/json\r\n"
           "Authorization: Bearer sk-bench\r\n" +
           (key.empty() ? std::string() : "Idempotency-Key: " + key + "\r\n") +
           (close ? "Connection: close\r\n" : "") +
           "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

/// The value that `share` of the sorted values do not exceed, in microseconds.
inline double quantile_us(const std::vector<std::int64_t>& sorted, double share) {
    if (sorted.empty()) fail("nothing was measured");
    const auto rank = static_cast<std::size_t>(share * static_cast<double>(sorted.size()));
    return static_cast<double>(sorted[std::min(rank, sorted.size() - 1)]) / static_cast<double>(us);
}

}  // namespace bench
