// Connection: one AMQP connection with one working channel, for one I/O thread; and what that
// thread is woken by.
#pragma once

#include <amqp.h>

#include <chrono>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "brokers/rabbitmq/rabbitmq.hpp"

namespace semel::brokers::rabbitmq {

inline constexpr amqp_channel_t work_channel = 1;
inline constexpr amqp_channel_t query_channel = 2;

inline amqp_bytes_t bytes(std::string_view text) {
    return {.len = text.size(), .bytes = const_cast<char*>(text.data())};
}
inline std::string_view view(amqp_bytes_t text) {
    return {static_cast<const char*>(text.bytes), text.len};
}

/// Not thread-safe.
class Connection {
  public:
    Connection(Endpoint endpoint, std::string name, std::string ca_file,
               std::chrono::seconds heartbeat);
    ~Connection();
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    /// Connects, logs in, opens work_channel. Blocks, some seconds at most. What went wrong, or
    /// nullopt.
    std::optional<base::Error> open();
    /// Without a word to the broker.
    void drop();
    /// With one, so that everything sent before is taken. Blocks, some seconds at most.
    void close();
    [[nodiscard]] bool is_open() const { return state_ != nullptr; }
    [[nodiscard]] amqp_connection_state_t state() { return state_; }
    [[nodiscard]] int fd() const;

    /// What the last call that has an answer said; nullopt: it went well.
    std::optional<base::Error> last_error(const std::string& doing);
    /// The next frame that lies ready, if any. An error: the connection is broken. Sends
    /// heartbeats. What earlier frames point to stays valid only if `keep`.
    base::Result<std::optional<amqp_frame_t>> next_frame(bool keep = false);
    /// What a channel.close or connection.close frame says; nullopt for others.
    static std::optional<base::Error> closed_by(const amqp_frame_t& frame);
    [[nodiscard]] std::string name() const;  ///< host:port/vhost

  private:
    const Endpoint endpoint_;
    const std::string connection_name_;
    const std::string ca_file_;
    const std::chrono::seconds heartbeat_;
    amqp_connection_state_t state_ = nullptr;
};

base::Error library_error(int status, const std::string& doing,
                          base::Applied applied = base::Applied::no);
base::Error reply_error(const amqp_rpc_reply_t& reply, const std::string& doing);

/// Fields as text: numbers in decimal, tables and arrays as JSON. nullopt: void.
std::optional<std::string> text_of(const amqp_field_value_t& value);

/// Commands for an I/O thread, and the descriptor that wakes it. Thread-safe.
class Mailbox {
  public:
    Mailbox();
    ~Mailbox();
    Mailbox(const Mailbox&) = delete;
    Mailbox& operator=(const Mailbox&) = delete;
    void post(std::function<void()> command);
    void wake();
    /// On the I/O thread: waits for the mailbox or for `socket` (-1: none), and runs what came.
    void wait(int socket, std::chrono::milliseconds within);

  private:
    std::mutex mutex_;
    std::deque<std::function<void()>> commands_;
    int fd_ = -1;
};

/// Time between two tries to connect: from 100 ms, doubled to 5 s.
class Backoff {
  public:
    [[nodiscard]] std::chrono::milliseconds next() {
        const auto now = delay_;
        delay_ = std::min(delay_ * 2, std::chrono::milliseconds{5000});
        return now;
    }
    void reset() { delay_ = std::chrono::milliseconds{100}; }

  private:
    std::chrono::milliseconds delay_{100};
};

}  // namespace semel::brokers::rabbitmq
