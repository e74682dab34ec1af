// For the tests of this folder: a loop on its own thread, raw sockets of both sides, and a wait for
// a task.
#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <functional>
#include <future>
#include <string>
#include <string_view>
#include <thread>

#include "http/client.hpp"
#include "http/server.hpp"

namespace semel::http::test {

/// A blocking socket whose reads give up after ten seconds.
class Raw {
  public:
    explicit Raw(int fd) : fd_(fd) {
        const timeval limit{10, 0};
        ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    }
    static Raw to(std::uint16_t port) {
        const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
        const sockaddr_in address = loopback(port);
        EXPECT_EQ(::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
        return Raw(fd);
    }
    Raw(Raw&& other) noexcept
        : fd_(std::exchange(other.fd_, -1)), pending_(std::move(other.pending_)) {}
    Raw& operator=(Raw&& other) noexcept {
        std::swap(fd_, other.fd_);
        std::swap(pending_, other.pending_);
        return *this;
    }
    Raw(const Raw&) = delete;
    Raw& operator=(const Raw&) = delete;
    ~Raw() { close(); }

    static sockaddr_in loopback(std::uint16_t port) {
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_port = htons(port);
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        return address;
    }
    bool send(std::string_view bytes) {
        while (!bytes.empty()) {
            const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
            if (n <= 0) return false;
            bytes.remove_prefix(static_cast<std::size_t>(n));
        }
        return true;
    }
    /// Reads until `text` has come; gives all up to and with it. Empty: the stream ended or nothing
    /// came.
    std::string until(std::string_view text) {
        for (;;) {
            const std::size_t at = pending_.find(text);
            if (at != std::string::npos) return take(at + text.size());
            if (!more()) return {};
        }
    }
    std::string exactly(std::size_t n) {
        while (pending_.size() < n) {
            if (!more()) return {};
        }
        return take(n);
    }
    /// A message with Content-Length: its head and body.
    std::string message() {
        const std::string head = until("\r\n\r\n");
        const std::size_t at = head.find("Content-Length: ");
        if (at == std::string::npos) return head;
        const std::size_t length = std::stoul(head.substr(at + 16));
        return length == 0 ? head : head + exactly(length);
    }
    std::string until_end() {
        while (more()) {
        }
        return take(pending_.size());
    }
    /// True if the stream ended in order, false if it was reset (or nothing came for ten seconds).
    bool ended_cleanly() {
        char byte = 0;
        return ::recv(fd_, &byte, 1, 0) == 0;
    }
    void end_sending() { ::shutdown(fd_, SHUT_WR); }
    void close() {
        if (fd_ >= 0) ::close(fd_);
        fd_ = -1;
    }
    /// Closes with a reset.
    void reset() {
        const linger hard{1, 0};
        ::setsockopt(fd_, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
        close();
    }
    [[nodiscard]] int fd() const { return fd_; }

  private:
    bool more() {
        char buffer[65536];
        const ssize_t n = ::recv(fd_, buffer, sizeof buffer, 0);
        if (n <= 0) return false;
        pending_.append(buffer, static_cast<std::size_t>(n));
        return true;
    }
    std::string take(std::size_t n) {
        std::string text = pending_.substr(0, n);
        pending_.erase(0, n);
        return text;
    }

    int fd_;
    std::string pending_;
};

/// Listens on a free port; accept() blocks.
class RawListener {
  public:
    RawListener() : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
        sockaddr_in address = Raw::loopback(0);
        address.sin_addr.s_addr = htonl(INADDR_ANY);  // also reached as 127.0.0.2
        EXPECT_EQ(::bind(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
        EXPECT_EQ(::listen(fd_, 64), 0);
        socklen_t size = sizeof address;
        ::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size);
        port_ = ntohs(address.sin_port);
        const timeval limit{10, 0};
        ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    }
    RawListener(const RawListener&) = delete;
    RawListener& operator=(const RawListener&) = delete;
    ~RawListener() { close(); }
    Raw accept() { return Raw(::accept(fd_, nullptr, nullptr)); }
    void close() {
        if (fd_ >= 0) ::close(fd_);
        fd_ = -1;
    }
    [[nodiscard]] std::uint16_t port() const { return port_; }

  private:
    int fd_;
    std::uint16_t port_ = 0;
};

/// A loop that a thread runs until the end of the test.
class LoopThread {
  public:
    LoopThread()
        : work_(runtime::asio::make_work_guard(loop.io())), thread_([this] { loop.io().run(); }) {}
    LoopThread(const LoopThread&) = delete;
    LoopThread& operator=(const LoopThread&) = delete;
    ~LoopThread() {
        loop.io().stop();
        thread_.join();
    }
    /// Runs `fn` on the loop and gives what it returns.
    template <class Fn>
    auto on(Fn fn) {
        std::packaged_task<decltype(fn())()> task(std::move(fn));
        auto result = task.get_future();
        loop.post([&task] { task(); });
        return result.get();
    }
    /// Waits for a coroutine that runs on the loop. `make` is called there.
    template <class T>
    T await(std::function<Task<T>()> make) {
        std::promise<T> result;
        loop.post([&] { loop.spawn(fulfil<T>(make, result)); });
        return result.get_future().get();
    }

    Loop loop{base::system_clocks()};

  private:
    template <class T>
    static Task<> fulfil(const std::function<Task<T>()>& make, std::promise<T>& result) {
        T value = co_await make();
        result.set_value(std::move(value));
    }

    runtime::asio::executor_work_guard<runtime::Executor> work_;
    std::thread thread_;
};

class LambdaHandler final : public Handler {
  public:
    std::function<Task<>(Exchange&)> fn;
    Task<> handle(Exchange& exchange) override { return fn(exchange); }
};

}  // namespace semel::http::test
