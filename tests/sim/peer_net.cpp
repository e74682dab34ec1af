#include "sim/peer_net.hpp"

#include "base/assert.hpp"
#include "runtime/signal.hpp"

namespace semel::sim {

using http::CallError;
using runtime::Loop;
using runtime::Task;
using Called = std::variant<std::unique_ptr<http::Response>, CallError>;

struct PeerNet::Connection {
    Process* client = nullptr;
    int client_incarnation = 0;
    SteadyTime last_delivery = SteadyTime::min();  ///< Bytes arrive in the order they were sent.
    // What has arrived at the client.
    bool has_head = false;
    int status = 0;
    std::string bytes;
    bool ended = false;
    bool broken = false;
    runtime::Signal changed;
    // What the server can see.
    bool client_gone = false;
};

/// A server's answer, sent over the net.
class PeerNet::ServerSide final : public http::Exchange {
  public:
    ServerSide(PeerNet& net, std::shared_ptr<Connection> connection, http::Request request)
        : net_(net), connection_(std::move(connection)), request_(std::move(request)) {
        head_.method = request_.method;
        head_.target = request_.target;
        head_.path = head_.target.substr(0, head_.target.find('?'));
        std::string_view lines = request_.headers;
        while (!lines.empty()) {
            const auto end = lines.find("\r\n");
            const auto colon = lines.find(": ");
            head_.headers.push_back(
                {lines.substr(0, colon), lines.substr(colon + 2, end - colon - 2)});
            lines.remove_prefix(end + 2);
        }
    }
    ~ServerSide() override {
        if (!ended_) cut();
    }
    [[nodiscard]] const http::RequestHead& head() const override { return head_; }
    [[nodiscard]] std::string peer() const override { return "192.0.2.2:1"; }
    Task<http::BodyStatus> read_body(std::string&, std::uint64_t) override {
        co_return http::BodyStatus::ok;
    }
    Task<http::BodyPiece> read_some() override { co_return http::BodyPiece{}; }
    using http::Exchange::respond;
    Task<bool> respond(const http::ResponseHead& head,
                       std::span<const std::string_view> body) override {
        begin(head, std::nullopt);
        std::string all;
        for (const auto piece : body) all += piece;
        co_return co_await finish(all);
    }
    void begin(const http::ResponseHead& head, std::optional<std::uint64_t>) override {
        status_ = head.status;
    }
    Task<bool> write(std::string_view bytes) override {
        if (client_gone()) co_return false;
        send(bytes);
        co_return true;
    }
    Task<bool> finish(std::string_view last) override {
        ended_ = true;
        if (client_gone()) co_return false;
        send(last);
        net_.to_client(connection_, [](Connection& c) { c.ended = true; });
        co_return true;
    }
    void cut() override {
        ended_ = true;
        net_.to_client(connection_, [](Connection& c) { c.broken = true; });
    }
    bool client_gone() override { return connection_->client_gone || connection_->broken; }

  private:
    void send(std::string_view text) {
        std::string bytes(text);
        if (net_.tamper) net_.tamper(bytes);
        net_.to_client(connection_, [status = status_, bytes](Connection& c) {
            c.has_head = true;
            c.status = status;
            c.bytes += bytes;
        });
    }

    PeerNet& net_;
    std::shared_ptr<Connection> connection_;
    http::Request request_;
    http::RequestHead head_;  ///< Views into request_.
    int status_ = 0;
    bool ended_ = false;
};

class PeerNet::ClientSide final : public http::Response {
  public:
    ClientSide(Loop& loop, std::shared_ptr<Connection> connection, milliseconds idle)
        : loop_(loop), connection_(std::move(connection)), idle_(idle) {}
    ~ClientSide() override { connection_->client_gone = true; }
    [[nodiscard]] int status() const override { return connection_->status; }
    [[nodiscard]] const std::vector<http::Header>& headers() const override { return headers_; }
    [[nodiscard]] std::optional<std::uint64_t> content_length() const override { return {}; }
    void cancel() override { SEMEL_ASSERT(false, "peers are left by destroying the response"); }
    Task<std::variant<std::string_view, CallError>> read_some() override {
        const SteadyTime limit = loop_.now() + idle_;
        for (;;) {
            const auto seen = connection_->changed.version();
            if (!connection_->bytes.empty()) {
                piece_ = std::exchange(connection_->bytes, {});
                co_return std::string_view(piece_);
            }
            if (connection_->broken)
                co_return CallError{CallError::Kind::reset, true, "the connection was reset"};
            if (connection_->ended) co_return std::string_view{};
            if (!co_await connection_->changed.wait(loop_, seen, limit))
                co_return CallError{CallError::Kind::idle_timeout, true, "the body stopped"};
        }
    }

  private:
    Loop& loop_;
    std::shared_ptr<Connection> connection_;
    milliseconds idle_;
    std::vector<http::Header> headers_;
    std::string piece_;
};

class PeerNet::NetClient final : public http::Client {
  public:
    NetClient(PeerNet& net, Process& process, std::unique_ptr<http::Client> others)
        : net_(net), process_(process), loop_(*process.loop), others_(std::move(others)) {}

    Task<Called> call(const http::Origin& origin, http::Request request, http::Timeouts timeouts,
                      CancelToken* cancel) override {
        if (!origin.host.starts_with("p") || origin.host.find('.') != std::string::npos)
            co_return co_await others_->call(origin, std::move(request), timeouts, cancel);
        const auto found =
            net_.served_.find(origin.host + ":" + std::to_string(origin.port));
        const bool there = found != net_.served_.end() && found->second.process->alive &&
                           found->second.process->incarnation == found->second.incarnation;
        if (net_.reach == Reach::swallowed) {
            co_await loop_.sleep_for(timeouts.connect);
            co_return CallError{CallError::Kind::connect_timeout, false, "no connection"};
        }
        if (net_.reach == Reach::refused || !there) {
            co_await loop_.sleep_for(milliseconds{1});
            co_return CallError{CallError::Kind::refused, false, "connection refused"};
        }
        ++net_.connections;
        auto connection = std::make_shared<Connection>();
        connection->client = &process_;
        connection->client_incarnation = process_.incarnation;
        net_.open_.push_back(connection);
        const Served served = found->second;
        net_.world_.after(
            net_.world_.rng.between(net_.latency_min, net_.latency_max),
            [net = &net_, served, connection, request = std::move(request)] {
                Process& server = *served.process;
                if (!server.alive || server.incarnation != served.incarnation) {
                    net->to_client(connection, [](Connection& c) { c.broken = true; });
                    return;
                }
                server.loop->spawn(
                    run(std::make_shared<ServerSide>(*net, connection, request), served.handler));
            },
            served.process);
        const SteadyTime limit = loop_.now() + timeouts.first_byte;
        for (;;) {
            const auto seen = connection->changed.version();
            if (connection->has_head) break;
            if (connection->broken)
                co_return CallError{CallError::Kind::reset, true, "the connection was reset"};
            if (!co_await connection->changed.wait(loop_, seen, limit)) {
                connection->client_gone = true;
                co_return CallError{CallError::Kind::first_byte_timeout, true, "no head in time"};
            }
        }
        std::unique_ptr<http::Response> response =
            std::make_unique<ClientSide>(loop_, connection, timeouts.idle);
        co_return response;
    }

  private:
    PeerNet& net_;
    Process& process_;
    Loop& loop_;
    std::unique_ptr<http::Client> others_;
};

Task<> PeerNet::run(std::shared_ptr<ServerSide> side, http::Handler* handler) {
    co_await handler->handle(*side);
}

void PeerNet::to_client(const std::shared_ptr<Connection>& connection,
                        std::function<void(Connection&)> what) {
    const SteadyTime now = world_.now();
    const SteadyTime at = std::max(
        connection->last_delivery, now + world_.rng.between(latency_min, latency_max));
    connection->last_delivery = at;
    world_.after(
        std::chrono::ceil<microseconds>(at - now),
        [connection, what = std::move(what)] {
            const Process& client = *connection->client;
            if (!client.alive || client.incarnation != connection->client_incarnation) {
                connection->client_gone = true;
                return;
            }
            what(*connection);
            connection->changed.notify();
        },
        connection->client);
}

void PeerNet::serve(Process& process, http::Handler& handler) {
    const std::string address =
        "p" + std::to_string(process.number) + ":" + std::to_string(process.incarnation);
    served_[address] = {&process, process.incarnation, &handler};
}

void PeerNet::break_all() {
    for (const auto& weak : open_) {
        if (const auto connection = weak.lock())
            to_client(connection, [](Connection& c) { c.broken = true; });
    }
    open_.clear();
}

std::unique_ptr<http::Client> PeerNet::client(Process& process,
                                              std::unique_ptr<http::Client> others) {
    return std::make_unique<NetClient>(*this, process, std::move(others));
}

}  // namespace semel::sim
