// A fast pretended AI API, so that the upstream is not what limits a measurement: one epoll loop, a
// hand-written reader, answers made beforehand. It trusts its callers; for tests and demonstrations
// there is `semel mock-upstream`.
//
//     bench_upstream [--port N]      prints the port; 0 takes a free one
//
// The body's model says what a POST gets: `stream-N-MS`: N events, MS milliseconds apart;
// `stamped-N-MS`: the same, and each says when it was sent;
// `bytes-N`: JSON of exactly N bytes; anything else: a chat completion of about 700 bytes. GET
// /count says how many POSTs there were.
#include <csignal>
#include <functional>
#include <queue>
#include <unordered_map>

#include "net.hpp"

namespace {

using namespace bench;

constexpr std::string_view json_type = "application/json";

std::string whole_answer(std::string_view type, const std::string& body) {
    return "HTTP/1.1 200 OK\r\nContent-Type: " + std::string(type) +
           "\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

/// A completion of the OpenAI dialect; `bytes` 0: about 700 bytes, else exactly so many.
std::string completion(std::size_t bytes) {
    const std::string head =
        R"({"id":"chatcmpl-bench00000000000000000000001","object":"chat.completion","created":1700000000,"model":"gpt-4o-mini",)"
        R"("choices":[{"index":0,"message":{"role":"assistant","content":")";
    const std::string tail =
        R"(","refusal":null},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":100,"completion_tokens":80,)"
        R"("total_tokens":180},"service_tier":"default","system_fingerprint":"fp_bench"})";
    constexpr std::string_view words = "The quick brown fox jumps over the lazy dog. ";
    const std::size_t wanted =
        bytes == 0 ? 7 * words.size() : bytes - std::min(bytes, head.size() + tail.size());
    std::string text;
    while (text.size() < wanted) text += words;
    return head + text.substr(0, wanted) + tail;
}

std::string event(std::string_view choices_and_more) {
    return R"(data: {"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1700000000,"model":"gpt-4o-mini",)" +
           std::string(choices_and_more) + "}\n\n";
}

std::string chunk(const std::string& data) {
    char size[20];
    const int digits = std::snprintf(size, sizeof size, "%zx\r\n", data.size());
    return std::string(size, static_cast<std::size_t>(digits)) + data + "\r\n";
}

const std::string stream_head =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
const std::string stream_event =
    chunk(event(R"("choices":[{"index":0,"delta":{"content":"word "},"finish_reason":null}])"));
/// An event that says when it was sent, by the clock that all processes of the machine share.
std::string stamped_event() {
    char digits[24];
    std::snprintf(digits, sizeof digits, "%019lld", static_cast<long long>(now()));
    return chunk(event(R"("choices":[{"index":0,"delta":{"content":"sent )" + std::string(digits) +
                       R"("},"finish_reason":null}])"));
}
const std::string stream_end =
    chunk(event(R"("choices":[{"index":0,"delta":{},"finish_reason":"stop"}])")) +
    chunk("data: [DONE]\n\n") + "0\r\n\r\n";

struct Connection {
    std::uint64_t generation =
        0;  ///< Tells a due event of an earlier connection with this descriptor.
    std::string in;
    std::string out;  ///< What the socket did not take yet.
    std::int64_t events_left =
        -1;  ///< Of the running stream; -1: none runs, 0: only its end is left.
    std::int64_t gap = 0;
    bool stamped = false;  ///< Its events say when they were sent.
};

struct Due {
    std::int64_t at;
    int fd;
    std::uint64_t generation;
    bool operator>(const Due& other) const { return at > other.at; }
};

class Upstream {
  public:
    explicit Upstream(std::int64_t port)
        : listener_(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {
        const int one = 1;
        setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        sockaddr_in address = loopback(port);
        socklen_t length = sizeof address;
        if (bind(listener_, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
            listen(listener_, 4096) != 0 ||
            getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
            fail_errno("listen on port " + std::to_string(port));
        }
        poll_.watch(listener_, EPOLLIN, static_cast<std::uint64_t>(listener_));
        std::printf("%d\n", ntohs(address.sin_port));
        std::fflush(stdout);
    }

    [[noreturn]] void run() {
        for (;;) {
            const int count = poll_.wait(due_.empty() ? -1 : due_.top().at);
            for (int i = 0; i < count; ++i) {
                const int fd = static_cast<int>(poll_.events[i].data.u64);
                if (fd == listener_) {
                    accept_all();
                } else {
                    serve(fd, poll_.events[i].events);
                }
            }
            send_due();
        }
    }

  private:
    void accept_all() {
        for (;;) {
            const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
            if (fd < 0) {
                if (errno != EAGAIN) fail_errno("accept");
                return;
            }
            no_delay(fd);
            connections_[fd] = {.generation = ++generations_, .in = {}, .out = {}};
            poll_.watch(fd, EPOLLIN, static_cast<std::uint64_t>(fd));
        }
    }

    void serve(int fd, std::uint32_t events) {
        const auto found = connections_.find(fd);
        if (found == connections_.end()) return;
        Connection& connection = found->second;
        if ((events & EPOLLOUT) != 0) write(fd, connection, "");
        if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) == 0) return;
        char buffer[64 * 1024];
        const ssize_t got = read(fd, buffer, sizeof buffer);
        if (got < 0 && errno == EAGAIN) return;
        if (got <= 0) {
            connections_.erase(found);
            close(fd);
            return;
        }
        connection.in.append(buffer, static_cast<std::size_t>(got));
        answer(fd, connection);
    }

    /// Answers every whole request that has arrived.
    void answer(int fd, Connection& connection) {
        while (connection.events_left < 0) {
            const std::size_t end = connection.in.find("\r\n\r\n");
            if (end == std::string::npos) return;
            const std::string_view head = std::string_view(connection.in).substr(0, end + 2);
            if (!header(head, "transfer-encoding").empty())
                fail("a request without Content-Length");
            const std::size_t total = end + 4 + to_size(header(head, "content-length"));
            if (connection.in.size() < total) return;
            const bool post = head.starts_with("POST");
            const std::string_view body =
                std::string_view(connection.in).substr(end + 4, total - end - 4);
            constexpr std::string_view name = "\"model\":\"";
            const std::size_t at = body.find(name);
            std::string_view model =
                at == body.npos ? std::string_view() : body.substr(at + name.size());
            model = model.substr(0, model.find('"'));
            if (!post) {
                write(fd, connection, whole_answer("text/plain", std::to_string(posts_)));
            } else {
                ++posts_;
                if (model.starts_with("stream-")) {
                    begin_stream(fd, connection, model.substr(7), false);
                } else if (model.starts_with("stamped-")) {
                    begin_stream(fd, connection, model.substr(8), true);
                } else if (model.starts_with("bytes-")) {
                    write(fd, connection, of_bytes(to_size(model.substr(6))));
                } else {
                    write(fd, connection, chat_);
                }
            }
            connection.in.erase(0, total);
        }
    }

    const std::string& of_bytes(std::size_t bytes) {
        std::string& made = of_bytes_[bytes];
        if (made.empty()) made = whole_answer(json_type, completion(bytes));
        return made;
    }

    void begin_stream(int fd, Connection& connection, std::string_view numbers, bool stamped) {
        const std::size_t dash = numbers.find('-');
        if (dash == numbers.npos) fail("a model of a stream without two numbers");
        connection.stamped = stamped;
        connection.events_left = static_cast<std::int64_t>(to_size(numbers.substr(0, dash)));
        connection.gap = static_cast<std::int64_t>(to_size(numbers.substr(dash + 1))) * ms;
        write(fd, connection, stream_head);
        due_.push({now(), fd, connection.generation});
    }

    /// Events whose time has come. The next one's time counts from this one's, not from when it was
    /// sent.
    void send_due() {
        while (!due_.empty() && due_.top().at <= now()) {
            const Due due = due_.top();
            due_.pop();
            const auto found = connections_.find(due.fd);
            if (found == connections_.end() || found->second.generation != due.generation) continue;
            Connection& connection = found->second;
            if (connection.events_left == 0) {
                connection.events_left = -1;
                write(due.fd, connection, stream_end);
                answer(due.fd, connection);
            } else {
                --connection.events_left;
                write(due.fd, connection, connection.stamped ? stamped_event() : stream_event);
                due_.push({due.at + connection.gap, due.fd, due.generation});
            }
        }
    }

    void write(int fd, Connection& connection, std::string_view bytes) {
        const bool waited = !connection.out.empty();
        if (waited) {
            connection.out += bytes;
            bytes = connection.out;
        }
        while (!bytes.empty()) {
            const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
            if (sent < 0) {
                if (errno != EAGAIN)
                    bytes = {};  // the reader is gone: its connection's end is read next
                break;
            }
            bytes.remove_prefix(static_cast<std::size_t>(sent));
        }
        std::string left(bytes);
        connection.out = std::move(left);
        const bool waits = !connection.out.empty();
        if (waits != waited) {
            poll_.watch(fd, waits ? EPOLLIN | EPOLLOUT : EPOLLIN, static_cast<std::uint64_t>(fd),
                        true);
        }
    }

    Poll poll_;
    int listener_;
    const std::string chat_ = whole_answer(json_type, completion(0));
    std::unordered_map<std::size_t, std::string> of_bytes_;
    std::unordered_map<int, Connection> connections_;
    std::priority_queue<Due, std::vector<Due>, std::greater<>> due_;
    std::uint64_t generations_ = 0;
    std::uint64_t posts_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
    const Options options(argc, argv, {{"port", "0"}});
    Upstream upstream(options.number("port"));
    upstream.run();
}
