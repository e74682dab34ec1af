// Sends chat completions at a fixed rate (open loop), or a fixed number as fast as answers come.
// Prints one JSON object.
//
//     bench_rate_client --port N [--connections 16] [--rate 2000 --seconds 3 | --rate 0 --requests
//     N] [--key PREFIX] [--model M]
//
// At a fixed rate latency counts from when a request should have been sent, so that a stall is not
// hidden by the requests that it held back. With --key each request has an id of its own.
#include "net.hpp"

namespace {

using namespace bench;

/// Without any answer for so long the measurement is given up.
constexpr std::int64_t patience = 30 * second;

struct Connection {
    int fd = -1;
    std::int64_t next = 0;  ///< When its next request is to be sent.
    std::int64_t due = 0;   ///< When the running one should have been.
    bool busy = false;
    Answer answer;
};

}  // namespace

int main(int argc, char** argv) {
    const Options options(argc, argv,
                          {{"port", ""},
                           {"connections", "16"},
                           {"rate", "2000"},
                           {"seconds", "3"},
                           {"requests", "0"},
                           {"key", ""},
                           {"model", "chat"}});
    const std::int64_t count = options.number("connections"), rate = options.number("rate");
    const std::int64_t wanted =
        rate > 0 ? rate * options.number("seconds") : options.number("requests");
    const std::string& prefix = options.text("key");
    const std::string& model = options.text("model");
    if (count == 0 || wanted == 0)
        fail("nothing to send: give --rate and --seconds, or --requests");

    Poll poll;
    std::vector<Connection> connections(static_cast<std::size_t>(count));
    const std::int64_t interval = rate > 0 ? count * second / rate : 0;
    const std::int64_t start = now() + 20 * ms;
    for (std::size_t i = 0; i < connections.size(); ++i) {
        const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        const sockaddr_in address = loopback(options.number("port"));
        if (fd < 0 || connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
            fail_errno("connect");
        no_delay(fd);
        poll.watch(fd, EPOLLIN, i);
        connections[i].fd = fd;
        connections[i].next = start + interval * static_cast<std::int64_t>(i) / count;
    }

    std::vector<std::int64_t> latencies;
    latencies.reserve(static_cast<std::size_t>(wanted));
    std::int64_t sent = 0, ok = 0, not_2xx = 0, answered = 0;
    std::int64_t last_answer = start;
    char buffer[64 * 1024];
    while (answered < wanted) {
        const std::int64_t at = now();
        if (at - last_answer > patience) fail("no answer for 30 s");
        std::int64_t wake = at + second;
        for (Connection& c : connections) {
            if (c.busy || sent == wanted) continue;
            if (c.next > at) {
                wake = std::min(wake, c.next);
                continue;
            }
            const std::string key = prefix.empty() ? "" : prefix + "-" + std::to_string(sent);
            const std::string request = chat_request(model, false, key, false);
            if (send(c.fd, request.data(), request.size(), MSG_NOSIGNAL) !=
                static_cast<ssize_t>(request.size())) {
                fail_errno("send");
            }
            c.due = interval > 0 ? c.next : at;
            c.next += interval;
            c.answer = {};
            c.busy = true;
            ++sent;
        }
        const int events = poll.wait(wake);
        for (int i = 0; i < events; ++i) {
            Connection& c = connections[poll.events[i].data.u64];
            const ssize_t got = read(c.fd, buffer, sizeof buffer);
            if (got <= 0)
                fail("a connection was closed after " + std::to_string(answered) + " answers");
            if (!c.answer.feed({buffer, static_cast<std::size_t>(got)}, [](std::string_view) {}))
                continue;
            last_answer = now();
            latencies.push_back(last_answer - c.due);
            (c.answer.ok() ? ok : not_2xx) += 1;
            c.busy = false;
            ++answered;
        }
    }
    const double seconds = static_cast<double>(last_answer - start) / static_cast<double>(second);
    std::sort(latencies.begin(), latencies.end());
    std::printf(
        "{\"sent\":%lld,\"ok\":%lld,\"not_2xx\":%lld,\"per_second\":%.0f,\"p50_us\":%.1f,\"p99_"
        "us\":%.1f,\"max_us\":%.1f}\n",
        static_cast<long long>(sent), static_cast<long long>(ok), static_cast<long long>(not_2xx),
        static_cast<double>(answered) / seconds, quantile_us(latencies, 0.50),
        quantile_us(latencies, 0.99), quantile_us(latencies, 1));
}
