#include "mock/mock.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "http/server.hpp"

namespace semel::mock {

namespace {

constexpr unsigned threads_max = 64;

base::Error wrong(std::string detail) {
    return {.code = base::ErrorCode::invalid_argument,
            .detail = "mock-upstream: " + std::move(detail)};
}

std::optional<std::uint64_t> number_up_to(std::string_view text, std::uint64_t max) {
    std::uint64_t value = 0;
    const auto [after, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (text.empty() || error != std::errc() || after != text.data() + text.size() || value > max)
        return std::nullopt;
    return value;
}

/// "250ms", "2s" or "0".
std::optional<milliseconds> duration_of(std::string_view text) {
    constexpr std::uint64_t max = 3'600'000;
    if (text.ends_with("ms")) {
        const auto value = number_up_to(text.substr(0, text.size() - 2), max);
        return value ? std::optional(milliseconds(*value)) : std::nullopt;
    }
    if (text.ends_with("s")) {
        const auto value = number_up_to(text.substr(0, text.size() - 1), max / 1000);
        return value ? std::optional(milliseconds(*value * 1000)) : std::nullopt;
    }
    return text == "0" ? std::optional(milliseconds(0)) : std::nullopt;
}

/// One loop with its thread, handler and listener.
class Worker {
  public:
    Worker(State& state, Defaults defaults) : handler_(loop_, state, defaults) {}
    ~Worker() {
        if (!thread_.joinable()) return;
        loop_.post([this] {
            if (server_) server_->close();
            server_.reset();
            guard_.reset();
            loop_.io().stop();
        });
        thread_.join();
    }
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

    /// The port, once it listens.
    base::Result<std::uint16_t> start(const std::string& host, std::uint16_t port,
                                      bool reuse_port) {
        std::promise<base::Result<std::uint16_t>> listening;
        auto result = listening.get_future();
        loop_.post([&] {
            auto server =
                http::Server::listen(loop_, host, port, handler_, {}, counters_, reuse_port);
            if (!server) {
                listening.set_value(server.error());
                return;
            }
            server_ = std::move(*server);
            listening.set_value(server_->port());
        });
        thread_ = std::thread([this] { loop_.io().run(); });
        return result.get();
    }

  private:
    http::ServerCounters counters_;  // outlives what the loop still holds when it ends
    runtime::Loop loop_{base::system_clocks()};
    runtime::asio::executor_work_guard<runtime::Executor> guard_{loop_.executor()};
    Upstream handler_;
    std::unique_ptr<http::Server> server_;  // used on the loop only
    std::thread thread_;
};

class Running final : public Server {
  public:
    base::Result<void> listen(const Options& options) {
        port_ = options.port;
        for (unsigned i = 0; i < options.threads; ++i) {
            workers_.push_back(std::make_unique<Worker>(state_, options.defaults));
            const auto port = workers_.back()->start(options.host, port_, options.threads > 1);
            if (!port) return port.error();
            port_ = *port;
        }
        return {};
    }
    [[nodiscard]] std::uint16_t port() const override { return port_; }
    [[nodiscard]] State& state() override { return state_; }

  private:
    State state_;
    std::uint16_t port_ = 0;
    std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace

base::Result<Options> parse_options(const std::vector<std::string>& arguments) {
    Options options;
    constexpr std::array<std::string_view, 6> known{"--host",    "--port", "--threads",
                                                    "--latency", "--gap",  "--length"};
    for (std::size_t i = 0; i < arguments.size(); ++i) {
        std::string name = arguments[i];
        std::string value;
        const std::size_t equals = name.find('=');
        if (equals != std::string::npos) {
            value = name.substr(equals + 1);
            name.resize(equals);
        }
        if (std::find(known.begin(), known.end(), name) == known.end()) {
            return wrong("unknown option '" + name + "'; see semel mock-upstream --help");
        }
        if (equals == std::string::npos) {
            if (++i == arguments.size()) return wrong(name + " needs a value");
            value = arguments[i];
        }
        const auto refused = [&](const char* expected) {
            return wrong(name + " '" + value + "' is not " + expected);
        };
        if (name == "--host") {
            options.host = value;
        } else if (name == "--port") {
            const auto port = number_up_to(value, 65535);
            if (!port) return refused("a port from 0 to 65535");
            options.port = static_cast<std::uint16_t>(*port);
        } else if (name == "--threads") {
            const auto threads = number_up_to(value, threads_max);
            if (!threads || *threads == 0) return refused("a number from 1 to 64");
            options.threads = static_cast<unsigned>(*threads);
        } else if (name == "--length") {
            const auto length = number_up_to(value, 1'000'000);
            if (!length) return refused("a number of events up to 1000000");
            options.defaults.length = static_cast<std::uint32_t>(*length);
        } else {
            const auto duration = duration_of(value);
            if (!duration) return refused("a duration up to one hour, such as 250ms or 2s");
            (name == "--latency" ? options.defaults.latency : options.defaults.gap) = *duration;
        }
    }
    return options;
}

base::Result<std::unique_ptr<Server>> Server::start(const Options& options) {
    auto server = std::make_unique<Running>();
    const auto listening = server->listen(options);
    if (!listening) return listening.error();
    return std::unique_ptr<Server>(std::move(server));
}

std::string help() {
    return R"(Options:
  --host ADDRESS     where to listen (default 127.0.0.1)
  --port N           (default 9999; 0: any free one, printed to stdout)
  --threads N        event loops (default 1)
  --latency D        time before the head of an answer, such as 250ms (default 0)
  --gap D            time between two events of a stream (default 0)
  --length N         events of a stream (default 5)

It serves POST /v1/chat/completions (plain and streaming, with usage), GET /v1/models, GET /v1/files/BYTES/content, and takes any
other POST or PUT under /v1/. The model's name says how a call is answered:
  fast               at once; so does any other name
  slow-MS            after MS milliseconds
  stream-N-MS        N events, MS milliseconds apart
  big-BYTES          an answer whose text has BYTES bytes
  err-STATUS         that status; 429 and 503 with Retry-After: 1
  fail-N-then-ok-STATUS   the first N calls get STATUS
  cut-N              N events, then the connection breaks
  errevent-N         N events, then an error event and a clean end
  noterm-N           N events and a clean end without [DONE]
  stall-N            N events, then silence
  short              fewer bytes than Content-Length says
  closeafterread     the connection closes without an answer
Calls are counted: GET /calls (?contains=TEXT, ?model=NAME), DELETE /calls. POST /script
{"model": "m", "chunks": ["base64", ...], "gap_ms": 0, "end": "finish|cut|stall"} makes model m answer exactly these bytes.
)";
}

int run(const std::vector<std::string>& arguments) {
    for (const std::string& argument : arguments) {
        if (argument != "--help" && argument != "-h") continue;
        std::fputs(
            ("semel mock-upstream: a pretended AI API that counts paid calls\n\n" + help()).c_str(),
            stdout);
        return 0;
    }
    const auto options = parse_options(arguments);
    if (!options) {
        std::fprintf(stderr, "%s\n", options.error().detail.c_str());
        return 2;
    }
    sigset_t ends;
    sigemptyset(&ends);
    sigaddset(&ends, SIGINT);
    sigaddset(&ends, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &ends, nullptr);  // before the threads, which inherit it
    const auto server = Server::start(*options);
    if (!server) {
        std::fprintf(stderr, "mock-upstream: %s\n", server.error().detail.c_str());
        return 1;
    }
    const bool bracketed = options->host.find(':') != std::string::npos;
    const std::string host = bracketed ? "[" + options->host + "]" : options->host;
    std::printf("http://%s:%u\n", host.c_str(), static_cast<unsigned>((*server)->port()));
    std::fflush(stdout);
    int signal = 0;
    sigwait(&ends, &signal);
    return 0;
}

}  // namespace semel::mock
