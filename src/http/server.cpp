#include "http/server.hpp"

#include <boost/asio/ip/address.hpp>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/assert.hpp"
#include "http/deadlines.hpp"
#include "http/parser.hpp"
#include "http/socket.hpp"
#include "runtime/signal.hpp"

namespace semel::http {

using runtime::as_tuple;
using runtime::Loop;
using namespace std::chrono_literals;

namespace {

constexpr std::chrono::milliseconds kAcceptRetry = 100ms;  ///< After EMFILE and the like.
constexpr std::size_t kSpareBuffersMax = 256;  ///< Kept for the next requests; 4 MiB of them.

class Session;

// Outlives the Server while sessions run: each of them holds it.
struct State {
    State(Loop& l, Handler& h, ServerLimits limit, ServerCounters& count)
        : loop(l),
          handler(h),
          limits(limit),
          counters(count),
          deadlines(std::make_shared<Deadlines>(l)),
          acceptor(l.executor()) {}

    std::unique_ptr<char[]> take_buffer() {
        if (spare_buffers.empty()) return std::unique_ptr<char[]>(new char[kReadBytes]);
        auto memory = std::move(spare_buffers.back());
        spare_buffers.pop_back();
        return memory;
    }
    void give_buffer(std::unique_ptr<char[]> memory) {
        if (memory != nullptr && spare_buffers.size() < kSpareBuffersMax) {
            spare_buffers.push_back(std::move(memory));
        }
    }

    Loop& loop;
    Handler& handler;
    const ServerLimits limits;
    ServerCounters& counters;
    std::shared_ptr<Deadlines> deadlines;
    Acceptor acceptor;
    runtime::Signal session_ended;
    std::vector<std::unique_ptr<char[]>> spare_buffers;
    Session* first = nullptr;
    std::size_t open = 0;
    std::size_t running = 0;
    bool accepting = true;
    bool draining = false;
};

// One connection and, one after the other, its exchanges.
class Session final : public Exchange, private Deadline {
  public:
    Session(std::shared_ptr<State> state, Socket socket);
    ~Session() override;

    Task<> run();
    void drain();
    void close_now();

    Session* next = nullptr;

    // Exchange
    const RequestHead& head() const override { return head_; }
    std::string peer() const override;
    Task<BodyStatus> read_body(std::string& into, std::uint64_t limit) override;
    Task<BodyPiece> read_some() override;
    Task<bool> respond(const ResponseHead& head, std::span<const std::string_view> body) override;
    void begin(const ResponseHead& head, std::optional<std::uint64_t> length) override;
    Task<bool> write(std::string_view bytes) override;
    Task<bool> finish(std::string_view last) override;
    void cut() override;
    bool client_gone() override;

  private:
    enum class Answer { none, streaming, done };
    enum class Read { bytes, closed, timed_out };

    void expired() override;
    Task<bool> serve_one();
    Task<bool> read_head();
    Task<Read> fill();
    Task<bool> prepare_body();
    Task<BodyStatus> fail_body(BodyStatus status);
    void take_request();
    void settle_body();
    void compose_head(int status, std::string_view headers, std::optional<std::uint64_t> length,
                      bool chunked);
    Gather::Sent push_out();
    Task<bool> flush();
    Task<> refuse(const Refusal& refusal);
    Task<> linger();
    void close_socket();
    [[nodiscard]] bool answer_has_body() const {
        return head_.method != "HEAD" && status_ != 204 && status_ != 304;
    }

    std::shared_ptr<State> state_;
    Session* previous_ = nullptr;
    Socket socket_;
    Parser parser_;
    ReadBuffer input_;
    std::array<char, kFirstBytes> first_bytes_;  ///< What ends a connection's idleness; not zeroed.
    RequestHead head_;
    std::string out_;        // the answer's head
    std::string size_line_;  // of a chunk
    std::string stream_headers_;
    Gather gather_;
    Answer answer_ = Answer::none;
    int status_ = 0;
    std::optional<std::uint64_t> stream_length_;
    std::uint64_t streamed_ = 0;
    BodyStatus body_status_ = BodyStatus::ok;
    bool idle_ = false;       // waits for a request
    bool expired_ = false;    // the deadline passed and cancelled the wait
    bool continued_ = false;  // 100 was sent, or need not be
    bool head_sent_ = false;
    bool chunked_out_ = false;
    bool close_after_ = false;
    bool gone_ = false;     // nothing can be written any more
    bool discard_ = false;  // before closing, because the peer may still be sending
};

Session::Session(std::shared_ptr<State> state, Socket socket)
    : Deadline(state->deadlines),
      state_(std::move(state)),
      socket_(std::move(socket)),
      parser_(Parser::Kind::request, {state_->limits.head_max_bytes, state_->limits.headers_max,
                                      state_->limits.target_max_bytes}) {
    next = state_->first;
    if (next != nullptr) next->previous_ = this;
    state_->first = this;
    ++state_->open;
    state_->counters.open.fetch_add(1, std::memory_order_relaxed);
}

Session::~Session() {
    if (next != nullptr) next->previous_ = previous_;
    (previous_ != nullptr ? previous_->next : state_->first) = next;
    --state_->open;
    state_->counters.open.fetch_sub(1, std::memory_order_relaxed);
    state_->give_buffer(input_.take());
}

void Session::expired() {
    expired_ = true;
    error_code ignored;
    socket_.cancel(ignored);
}

void Session::close_socket() {
    clear();
    error_code ignored;
    socket_.close(ignored);
    gone_ = true;
}

void Session::drain() {
    // One whose next request is on its way already is served before it closes.
    if (!idle_ || peek(socket_.native_handle()) == Peeked::bytes) return;
    error_code ignored;
    socket_.cancel(ignored);
}

void Session::close_now() { close_socket(); }

std::string Session::peer() const {
    error_code ec;
    const auto endpoint = socket_.remote_endpoint(ec);
    if (ec) return {};
    std::string text = endpoint.address().to_string();
    if (endpoint.address().is_v6()) text = "[" + text + "]";
    text += ':';
    append_number(text, endpoint.port());
    return text;
}

Task<> Session::run() {
    for (;;) {
        const bool again = co_await serve_one();
        if (!again) break;
    }
    close_socket();
}

// True: the connection waits for another request.
Task<bool> Session::serve_one() {
    const bool complete = co_await read_head();
    if (!complete) co_return false;
    take_request();
    ++state_->running;
    co_await state_->handler.handle(*this);
    --state_->running;
    if (answer_ == Answer::none && !gone_) {
        close_after_ = true;
        constexpr Refusal defect{500, "internal_error", "the handler gave no answer"};
        co_await refuse(defect);
    }
    if (answer_ == Answer::streaming)
        cut();  // a defect as well: the client must not take it for whole
    if (gone_ && !discard_) co_return false;
    if (!close_after_) co_return true;
    if (discard_) co_await linger();
    co_return false;
}

// False: there is no request; all that had to be said was said.
Task<bool> Session::read_head() {
    parser_.begin();
    if (input_.empty()) {
        // An idle connection holds no large buffer, and those in use stay few and warm. Bytes are waited for rather than
        // readiness: Asio arms the latter with a system call each time.
        state_->give_buffer(input_.take());
        if (state_->draining) co_return false;
        idle_ = true;
        expired_ = false;
        set(state_->limits.keep_alive);
        const auto first = asio::buffer(first_bytes_);
        const auto [ec, n] = co_await socket_.async_read_some(first, as_tuple);
        idle_ = false;
        clear();
        if (ec || n == 0) co_return false;
        input_.give(state_->take_buffer());
        std::memcpy(input_.memory(), first_bytes_.data(), n);
        input_.filled(n);
    }
    expired_ = false;
    for (;;) {
        if (!input_.empty()) {
            const Parser::Taken taken = parser_.take_head(input_.view());
            input_.consume(taken.bytes);
            if (parser_.state() == Parser::State::refused) {
                state_->counters.rejected_requests.fetch_add(1, std::memory_order_relaxed);
                close_after_ = true;
                const Refusal refusal = parser_.refusal();
                co_await refuse(refusal);
                co_await linger();
                co_return false;
            }
            if (parser_.state() != Parser::State::head) {
                clear();
                co_return true;
            }
            if (!input_.empty()) continue;
        }
        // Once for the whole head: a client that sends a byte now and then does not move it.
        if (!is_set() && !expired_) set(state_->limits.head_timeout);
        const Read read = co_await fill();
        if (read == Read::bytes) continue;
        clear();
        if (read == Read::timed_out && parser_.started()) {
            state_->counters.rejected_requests.fetch_add(1, std::memory_order_relaxed);
            constexpr Refusal slow{408, "request_timeout",
                                   "the request's head did not come in time"};
            close_after_ = true;
            co_await refuse(slow);
            co_await linger();
        }
        co_return false;
    }
}

// Reads what there is into the empty buffer, under the deadline that is set.
Task<Session::Read> Session::fill() {
    if (!input_.allocated()) input_.give(state_->take_buffer());
    const auto memory = asio::buffer(input_.memory(), kReadBytes);
    const auto [ec, n] = co_await socket_.async_read_some(memory, as_tuple);
    input_.filled(n);
    if (n > 0) {
        expired_ = false;
        co_return Read::bytes;
    }
    co_return expired_ ? Read::timed_out : Read::closed;
}

void Session::take_request() {
    const MessageHead& from = parser_.head();
    head_.method = from.method;
    head_.target = from.target;
    const std::size_t mark = from.target.find('?');
    head_.path = from.target.substr(0, mark);
    head_.query =
        mark == std::string_view::npos ? std::string_view{} : from.target.substr(mark + 1);
    head_.headers.assign(from.headers.begin(), from.headers.end());
    head_.http_minor = from.minor;
    head_.content_length = from.content_length;
    head_.chunked = from.chunked;
    head_.expect_continue = from.expect_continue;
    answer_ = Answer::none;
    status_ = 0;
    body_status_ = BodyStatus::ok;
    continued_ = !from.expect_continue;
    head_sent_ = chunked_out_ = discard_ = false;
    close_after_ = !from.keep_alive;
}

// Sends 100 where it is due. False: the client is gone.
Task<bool> Session::prepare_body() {
    if (gone_) co_return false;
    if (continued_ || head_sent_) co_return true;
    continued_ = true;
    gather_.clear();
    gather_.add("HTTP/1.1 100 Continue\r\n\r\n");
    co_return co_await flush();
}

// Answers for the handler, which only has to return.
Task<BodyStatus> Session::fail_body(BodyStatus status) {
    clear();
    body_status_ = status;
    close_after_ = true;
    if (status == BodyStatus::closed) {
        gone_ = true;
        co_return status;
    }
    state_->counters.rejected_requests.fetch_add(1, std::memory_order_relaxed);
    if (answer_ == Answer::streaming) {
        cut();
    } else if (answer_ == Answer::none) {
        constexpr Refusal slow{408, "request_timeout", "the request's body did not come in time"};
        const Refusal refusal = status == BodyStatus::timed_out ? slow : parser_.refusal();
        co_await refuse(refusal);
    }
    co_return status;
}

Task<BodyStatus> Session::read_body(std::string& into, std::uint64_t limit) {
    into.clear();
    if (body_status_ != BodyStatus::ok) co_return body_status_;
    if (parser_.state() == Parser::State::complete) co_return BodyStatus::ok;
    if (head_.content_length.value_or(0) > limit) co_return BodyStatus::too_large;
    if (!continued_) {
        const bool ready = co_await prepare_body();
        if (!ready) co_return co_await fail_body(BodyStatus::closed);
    }
    if (head_.content_length) into.reserve(*head_.content_length);
    while (parser_.state() == Parser::State::body) {
        if (input_.empty()) {
            set(state_->limits.body_idle_timeout);
            const Read read = co_await fill();
            clear();
            if (read == Read::closed) co_return co_await fail_body(BodyStatus::closed);
            if (read == Read::timed_out) co_return co_await fail_body(BodyStatus::timed_out);
        }
        const Parser::Taken taken = parser_.take_body(input_.data(), input_.size());
        input_.consume(taken.bytes);
        if (parser_.state() == Parser::State::refused) {
            co_return co_await fail_body(BodyStatus::malformed);
        }
        if (taken.body.size() > limit - into.size()) co_return BodyStatus::too_large;
        into.append(taken.body);
    }
    co_return BodyStatus::ok;
}

Task<BodyPiece> Session::read_some() {
    if (body_status_ != BodyStatus::ok) co_return BodyPiece{body_status_, {}};
    if (!continued_ && parser_.state() == Parser::State::body) {
        const bool ready = co_await prepare_body();
        if (!ready) co_return BodyPiece{co_await fail_body(BodyStatus::closed), {}};
    }
    while (parser_.state() == Parser::State::body) {
        if (input_.empty()) {
            set(state_->limits.body_idle_timeout);
            const Read read = co_await fill();
            clear();
            if (read == Read::closed)
                co_return BodyPiece{co_await fail_body(BodyStatus::closed), {}};
            if (read == Read::timed_out)
                co_return BodyPiece{co_await fail_body(BodyStatus::timed_out), {}};
        }
        const Parser::Taken taken = parser_.take_body(input_.data(), input_.size());
        input_.consume(taken.bytes);
        if (parser_.state() == Parser::State::refused) {
            co_return BodyPiece{co_await fail_body(BodyStatus::malformed), {}};
        }
        if (!taken.body.empty()) co_return BodyPiece{BodyStatus::ok, taken.body};
    }
    co_return BodyPiece{BodyStatus::ok, {}};
}

// Before an answer's head leaves: what is left of the body decides whether the connection can be
// kept.
void Session::settle_body() {
    while (parser_.state() == Parser::State::body && !input_.empty()) {
        const Parser::Taken taken = parser_.take_body(input_.data(), input_.size());
        input_.consume(taken.bytes);
    }
    if (parser_.state() != Parser::State::complete) close_after_ = discard_ = true;
    if (state_->draining) close_after_ = true;
}

void Session::compose_head(int status, std::string_view headers,
                           std::optional<std::uint64_t> length, bool chunked) {
    out_.assign("HTTP/1.1 ");
    append_number(out_, static_cast<std::uint64_t>(status));
    out_ += ' ';
    out_ += reason_phrase(status);
    out_ += "\r\n";
    out_ += headers;
    if (length && status != 204 && status >= 200) {
        out_ += "Content-Length: ";
        append_number(out_, *length);
        out_ += "\r\n";
    }
    if (chunked) out_ += "Transfer-Encoding: chunked\r\n";
    if (close_after_) {
        out_ += "Connection: close\r\n";
    } else if (head_.http_minor == 0) {
        out_ += "Connection: keep-alive\r\n";
    }
    out_ += "\r\n";
}

Gather::Sent Session::push_out() {
    std::size_t moved = 0;
    const Gather::Sent sent = gather_.send(socket_.native_handle(), moved);
    if (sent == Gather::Sent::broken) gone_ = true;
    return sent;
}

// The rest of a write that the socket did not take at once.
Task<bool> Session::flush() {
    for (;;) {
        const Gather::Sent sent = push_out();
        if (sent != Gather::Sent::blocked) co_return sent == Gather::Sent::all;
        expired_ = false;
        set(state_->limits.write_idle_timeout);
        const auto [ec] = co_await socket_.async_wait(Socket::wait_write, as_tuple);
        clear();
        if (ec) {
            gone_ = true;
            co_return false;
        }
    }
}

Task<bool> Session::respond(const ResponseHead& head, std::span<const std::string_view> body) {
    if (gone_ || body_status_ == BodyStatus::malformed || body_status_ == BodyStatus::timed_out) {
        co_return false;  // the server answered itself, or nobody is there
    }
    SEMEL_ASSERT(answer_ == Answer::none, "an exchange has one answer");
    answer_ = Answer::done;
    status_ = head.status;
    settle_body();
    std::uint64_t length = 0;
    for (const std::string_view piece : body) length += piece.size();
    compose_head(head.status, head.headers, length, false);
    head_sent_ = true;
    gather_.clear();
    gather_.add(out_);
    if (answer_has_body()) {
        for (const std::string_view piece : body) gather_.add(piece);
    }
    if (push_out() == Gather::Sent::all) co_return true;
    if (gone_) co_return false;
    co_return co_await flush();
}

void Session::begin(const ResponseHead& head, std::optional<std::uint64_t> length) {
    if (answer_ == Answer::done && (gone_ || body_status_ != BodyStatus::ok)) return;
    SEMEL_ASSERT(answer_ == Answer::none, "an exchange has one answer");
    answer_ = Answer::streaming;
    status_ = head.status;
    stream_headers_ = head.headers;
    stream_length_ = length;
    streamed_ = 0;
    chunked_out_ = !length && head_.http_minor == 1 && answer_has_body();
    if (!length && !chunked_out_ && answer_has_body())
        close_after_ = true;  // HTTP/1.0: the end of the stream ends it
}

Task<bool> Session::write(std::string_view bytes) {
    if (gone_ || answer_ == Answer::done) co_return false;
    SEMEL_ASSERT(answer_ == Answer::streaming, "write() before begin()");
    gather_.clear();
    if (!head_sent_) {
        settle_body();
        compose_head(status_, stream_headers_, stream_length_, chunked_out_);
        head_sent_ = true;
        gather_.add(out_);
    }
    if (answer_has_body() && !bytes.empty()) {
        streamed_ += bytes.size();
        SEMEL_ASSERT(!stream_length_ || streamed_ <= *stream_length_,
                     "more bytes than the length promised");
        if (chunked_out_) {
            size_line_.clear();
            append_number(size_line_, bytes.size(), 16);
            size_line_ += "\r\n";
            gather_.add(size_line_);
        }
        gather_.add(bytes);
        if (chunked_out_) gather_.add("\r\n");
    }
    if (push_out() == Gather::Sent::all) co_return true;
    if (gone_) co_return false;
    co_return co_await flush();
}

Task<bool> Session::finish(std::string_view last) {
    if (gone_ || answer_ == Answer::done) co_return false;
    SEMEL_ASSERT(answer_ == Answer::streaming, "finish() before begin()");
    if (answer_has_body() && stream_length_ && streamed_ + last.size() != *stream_length_) {
        cut();  // short: the client must see it
        co_return false;
    }
    answer_ = Answer::done;
    gather_.clear();
    if (!head_sent_) {
        settle_body();
        compose_head(status_, stream_headers_, stream_length_, chunked_out_);
        head_sent_ = true;
        gather_.add(out_);
    }
    if (answer_has_body()) {
        if (chunked_out_ && !last.empty()) {
            size_line_.clear();
            append_number(size_line_, last.size(), 16);
            size_line_ += "\r\n";
            gather_.add(size_line_);
        }
        gather_.add(last);
        if (chunked_out_) gather_.add(last.empty() ? "0\r\n\r\n" : "\r\n0\r\n\r\n");
    }
    if (push_out() == Gather::Sent::all) co_return true;
    if (gone_) co_return false;
    co_return co_await flush();
}

void Session::cut() {
    answer_ = Answer::done;
    close_after_ = discard_ = true;
    if (gone_) return;
    // A close with unread bytes would be a reset, which may take back what was sent. So: end of
    // stream now, close later.
    error_code ignored;
    socket_.shutdown(Socket::shutdown_send, ignored);
    gone_ = true;
}

bool Session::client_gone() {
    return gone_ || !socket_.is_open() || peek(socket_.native_handle()) == Peeked::closed;
}

// The server's own answer, after which the connection closes.
Task<> Session::refuse(const Refusal& refusal) {
    answer_ = Answer::done;
    close_after_ = discard_ = true;
    std::string body = R"({"error":{"message":")";
    for (const char* c = refusal.reason; *c != '\0'; ++c) {
        if (*c == '"' || *c == '\\') body += '\\';
        body += *c;
    }
    body += R"(","type":")";
    body += refusal.status < 500 ? "invalid_request_error" : "server_error";
    body += R"(","param":null,"code":")";
    body += refusal.code;
    body += R"("}})";
    compose_head(refusal.status, "Content-Type: application/json\r\n", body.size(), false);
    gather_.clear();
    gather_.add(out_);
    if (!std::string_view(parser_.head().text).starts_with("HEAD ")) gather_.add(body);
    co_await flush();
}

// Says that nothing more comes and takes what the peer is still sending, for a while: it shall read
// the answer, not a reset.
Task<> Session::linger() {
    if (!socket_.is_open()) co_return;
    error_code ignored;
    socket_.shutdown(Socket::shutdown_send, ignored);
    std::size_t left = state_->limits.discard_max_bytes;
    expired_ = false;
    set(state_->limits.discard_timeout);
    for (;;) {
        const Read read = co_await fill();
        if (read != Read::bytes || input_.size() >= left) break;
        left -= input_.size();
        input_.consume(input_.size());
    }
    clear();
}

Task<> serve(std::unique_ptr<Session> session, std::shared_ptr<State> state) {
    co_await session->run();
    session.reset();
    state->session_ended.notify();
}

Task<> accept_loop(std::shared_ptr<State> state) {
    while (state->accepting) {
        const std::uint64_t seen = state->session_ended.version();
        if (state->open >= state->limits.connections_max) {
            co_await state->session_ended.wait(state->loop, seen, base::SteadyTime::max());
            continue;
        }
        auto [ec, socket] = co_await state->acceptor.async_accept(as_tuple);
        if (!state->accepting) break;
        if (ec == asio::error::connection_aborted) continue;
        if (ec) {
            // No descriptors or no memory: connections wait in the kernel's queue until some are
            // free again.
            state->counters.accept_errors.fetch_add(1, std::memory_order_relaxed);
            co_await state->loop.sleep_for(kAcceptRetry);
            continue;
        }
        state->counters.connections.fetch_add(1, std::memory_order_relaxed);
        error_code ignored;
        socket.set_option(tcp::no_delay(true), ignored);
        auto session = std::make_unique<Session>(state, std::move(socket));
        state->loop.spawn(serve(std::move(session), state));
    }
}

class SocketServer final : public Server {
  public:
    SocketServer(std::shared_ptr<State> state, std::uint16_t port)
        : state_(std::move(state)), port_(port) {}
    ~SocketServer() override { close(); }

    std::uint16_t port() const override { return port_; }
    std::size_t running() const override { return state_->running; }

    void drain() override {
        stop_accepting();
        state_->draining = true;
        for (Session* s = state_->first; s != nullptr; s = s->next) s->drain();
    }

    void close() override {
        stop_accepting();
        state_->draining = true;
        for (Session* s = state_->first; s != nullptr; s = s->next) s->close_now();
    }

  private:
    void stop_accepting() {
        state_->accepting = false;
        error_code ignored;
        state_->acceptor.close(ignored);
        state_->session_ended.notify();
    }

    std::shared_ptr<State> state_;
    std::uint16_t port_;
};

base::Error listen_error(const std::string& host, std::uint16_t port, const std::string& step,
                         const error_code& ec) {
    return {.code = base::ErrorCode::io,
            .detail = "cannot listen on " + host + ":" + std::to_string(port) + " (" + step +
                      "): " + ec.message() + "; choose another address or free this one"};
}

}  // namespace

base::Result<std::unique_ptr<Server>> Server::listen(runtime::Loop& loop, const std::string& host,
                                                     std::uint16_t port, Handler& handler,
                                                     ServerLimits limits, ServerCounters& counters,
                                                     bool reuse_port) {
    error_code ec;
    tcp::endpoint endpoint;
    const auto address = asio::ip::make_address(host, ec);
    if (!ec) {
        endpoint = {address, port};
    } else {
        asio::ip::basic_resolver<tcp, runtime::Executor> resolver(loop.executor());
        const auto found = resolver.resolve(host, std::to_string(port), tcp::resolver::passive, ec);
        if (ec || found.empty()) return listen_error(host, port, "its name", ec);
        endpoint = found.begin()->endpoint();
    }
    auto state = std::make_shared<State>(loop, handler, limits, counters);
    Acceptor& acceptor = state->acceptor;
    acceptor.open(endpoint.protocol(), ec);
    if (ec) return listen_error(host, port, "socket", ec);
    acceptor.set_option(Acceptor::reuse_address(true), ec);
    if (!ec && reuse_port) {
        using ReusePort = asio::detail::socket_option::boolean<SOL_SOCKET, SO_REUSEPORT>;
        acceptor.set_option(ReusePort(true), ec);
    }
    if (ec) return listen_error(host, port, "options", ec);
    acceptor.bind(endpoint, ec);
    if (ec) return listen_error(host, port, "bind", ec);
    acceptor.listen(asio::socket_base::max_listen_connections, ec);
    if (ec) return listen_error(host, port, "listen", ec);
    const std::uint16_t bound = acceptor.local_endpoint(ec).port();
    loop.spawn(accept_loop(state));
    return std::unique_ptr<Server>(std::make_unique<SocketServer>(std::move(state), bound));
}

}  // namespace semel::http
