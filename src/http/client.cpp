#include "http/client.hpp"

#include <boost/asio/ip/address.hpp>
#include <cerrno>
#include <deque>

#include "base/assert.hpp"
#include "http/deadlines.hpp"
#include "http/parser.hpp"
#include "http/socket.hpp"
#include "http/tls.hpp"
#include "runtime/signal.hpp"

namespace semel::http {

using runtime::as_tuple;

namespace {

/// Shorter than any server's known keep-alive, so that a kept connection is rarely one that is just
/// closing.
constexpr std::chrono::milliseconds kIdleKeep{std::chrono::seconds{15}};
constexpr std::size_t kIdlePerOriginMax = 1024;
constexpr std::size_t kKitsMax = 256;  ///< Kept for the next calls.
constexpr std::size_t kTlsJoinMaxBytes =
    16 * 1024;                   ///< Head and body in one TLS record up to this.
constexpr int kInterimMax = 16;  ///< 1xx answers before the real one.
constexpr ParserLimits kResponseLimits{.head_max_bytes = 64 * 1024, .headers_max = 200};

class Call;
class Connection;
struct ClientState;

// The kept connections to one place.
struct Pool {
    bool tls = false;
    std::string host;
    std::uint16_t port = 0;
    std::vector<std::unique_ptr<Connection>> idle;
};

// What a call needs for its time and the next call can use again.
struct Kit {
    Parser parser{Parser::Kind::response, kResponseLimits};
    ReadBuffer input;
    Gather gather;
    std::string out;
};

// One connection: used by a call, or kept in its pool. Its deadline is the call's, or the end of
// its keeping.
class Connection final : public Deadline {
  public:
    Connection(const std::shared_ptr<ClientState>& state, Pool& p);

    Pool& pool;
    Socket socket;
    std::unique_ptr<TlsSession> tls;
    Call* user = nullptr;

    /// Nothing came in since the last answer, and the peer did not close.
    bool quiet() { return tls ? tls->quiet() : peek(socket.native_handle()) == Peeked::nothing; }

  private:
    void expired() override;
};

// Outlives the Client while calls and answers are out.
struct ClientState {
    ClientState(Loop& l, std::string ca)
        : loop(l), deadlines(std::make_shared<Deadlines>(l)), ca_file(std::move(ca)) {}
    ~ClientState();

    Pool& pool_of(const Origin& origin) {
        for (Pool& p : pools) {
            if (p.port == origin.port && p.tls == origin.tls && p.host == origin.host) return p;
        }
        return pools.emplace_back(Pool{origin.tls, origin.host, origin.port, {}});
    }

    std::unique_ptr<Connection> take_idle(Pool& pool) {
        while (!pool.idle.empty()) {
            auto connection = std::move(pool.idle.back());
            pool.idle.pop_back();
            connection->clear();
            if (connection->quiet()) return connection;
        }
        return nullptr;
    }

    void keep(std::unique_ptr<Connection> connection) {
        Pool& pool = connection->pool;
        if (pool.idle.size() >= kIdlePerOriginMax) return;
        connection->user = nullptr;
        connection->set(kIdleKeep);
        pool.idle.push_back(std::move(connection));
    }

    TlsContext* tls_context(std::string& problem) {
        if (tls == nullptr) tls = TlsContext::make(ca_file, problem);
        return tls.get();
    }

    Loop& loop;
    std::shared_ptr<Deadlines> deadlines;
    std::string ca_file;
    std::unique_ptr<TlsContext> tls;
    std::vector<std::unique_ptr<Kit>> kits;
    std::deque<Pool> pools;  // a Pool's address is kept by its connections
};

// A look-up in the background. A name server that hangs must not hold the call over its time-out,
// so the call waits for the signal, which its end fires as well.
struct Resolving {
    explicit Resolving(Loop& loop) : resolver(loop.executor()) {}
    asio::ip::basic_resolver<tcp, runtime::Executor> resolver;
    runtime::Signal changed;
    bool done = false;
    error_code ec;
    std::vector<tcp::endpoint> endpoints;
};

using Failure = std::optional<CallError>;

// One request and the answer to it.
class Call final : public Response {
  public:
    Call(std::shared_ptr<ClientState> state, Timeouts timeouts);
    ~Call() override;

    /// `origin` and `request` live in the caller's coroutine.
    Task<Failure> run(const Origin& origin, Request& request);
    void timed_out() { abort(phase_); }

    // Response
    int status() const override { return kit_->parser.head().status; }
    const std::vector<Header>& headers() const override { return kit_->parser.head().headers; }
    Task<std::variant<std::string_view, CallError>> read_some() override;
    std::optional<std::uint64_t> content_length() const override {
        if (kit_->parser.head().bodyless) return std::nullopt;
        return kit_->parser.head().content_length;
    }
    void cancel() override { abort(CallError::Kind::cancelled); }

  private:
    enum class Got { bytes, nothing, closed, broken };
    enum class Sending { all, answered, failed };

    void abort(CallError::Kind kind);
    Failure fail(CallError::Kind kind, std::string detail);
    Failure aborted();
    Failure no_connection(const std::string& detail);
    Task<Failure> connect(const Origin& origin);
    Task<Failure> resolve(const Origin& origin, std::vector<tcp::endpoint>& endpoints);
    Task<Failure> secure(const Origin& origin);
    void compose(const Origin& origin, const Request& request);
    Gather::Sent push();
    Task<Sending> send_gathered(Failure& failure);
    Task<Sending> send_source(const BodySource& source, std::optional<std::uint64_t> length,
                              Failure& failure);
    Task<> wait_until_writable_or_readable();
    Got receive_now();
    Task<Got> receive();
    bool take_answer_head(Failure& failure);
    Task<Failure> read_head();
    void release();

    std::shared_ptr<ClientState> state_;
    std::unique_ptr<Kit> kit_;
    std::unique_ptr<Connection> connection_;
    std::shared_ptr<Resolving> resolving_;
    const Timeouts timeouts_;
    std::string where_;  // for error texts
    std::optional<CallError::Kind> abort_;
    Failure failed_;
    CallError::Kind phase_ = CallError::Kind::connect_timeout;  // what a deadline means now
    std::size_t sent_bytes_ = 0;
    int interim_ = 0;
    bool answers_head_ = false;
    bool reusable_ = true;
    bool tls_wants_read_ = false;
};

Connection::Connection(const std::shared_ptr<ClientState>& state, Pool& p)
    : Deadline(state->deadlines), pool(p), socket(state->loop.executor()) {}

void Connection::expired() {
    if (user != nullptr) {
        user->timed_out();
        return;
    }
    std::erase_if(pool.idle, [this](const auto& kept) { return kept.get() == this; });
}

ClientState::~ClientState() { pools.clear(); }

Call::Call(std::shared_ptr<ClientState> state, Timeouts timeouts)
    : state_(std::move(state)), timeouts_(timeouts) {
    if (state_->kits.empty()) {
        kit_ = std::make_unique<Kit>();
        kit_->input.give(std::unique_ptr<char[]>(new char[kReadBytes]));
    } else {
        kit_ = std::move(state_->kits.back());
        state_->kits.pop_back();
    }
}

Call::~Call() {
    connection_.reset();
    if (state_->kits.size() < kKitsMax) {
        kit_->input.filled(0);
        state_->kits.push_back(std::move(kit_));
    }
}

void Call::abort(CallError::Kind kind) {
    if (abort_) return;
    abort_ = kind;
    if (resolving_) resolving_->changed.notify();
    if (connection_) {
        error_code ignored;
        connection_->socket.cancel(ignored);
    }
}

Failure Call::fail(CallError::Kind kind, std::string detail) {
    connection_.reset();
    failed_ = CallError{kind, sent_bytes_ > 0, where_ + ": " + std::move(detail)};
    return failed_;
}

Failure Call::aborted() {
    switch (*abort_) {
        case CallError::Kind::connect_timeout:
            return fail(*abort_, "no connection within " +
                                     std::to_string(timeouts_.connect.count()) + " ms");
        case CallError::Kind::first_byte_timeout:
            return fail(*abort_,
                        "no answer within " + std::to_string(timeouts_.first_byte.count()) + " ms");
        case CallError::Kind::idle_timeout:
            return fail(*abort_,
                        "nothing moved for " + std::to_string(timeouts_.idle.count()) + " ms");
        default:
            return fail(CallError::Kind::cancelled, "the call was cancelled");
    }
}

Failure Call::no_connection(const std::string& detail) {
    if (abort_) return aborted();
    return fail(CallError::Kind::refused, detail);
}

Task<Failure> Call::resolve(const Origin& origin, std::vector<tcp::endpoint>& endpoints) {
    error_code ec;
    const auto address = asio::ip::make_address(origin.host, ec);
    if (!ec) {
        endpoints.emplace_back(address, origin.port);
        co_return std::nullopt;
    }
    resolving_ = std::make_shared<Resolving>(state_->loop);
    const std::uint64_t seen = resolving_->changed.version();
    resolving_->resolver.async_resolve(
        origin.host, std::to_string(origin.port),
        [resolving = resolving_](error_code result, const tcp::resolver::results_type& found) {
            resolving->done = true;
            resolving->ec = result;
            for (const auto& entry : found) resolving->endpoints.push_back(entry.endpoint());
            resolving->changed.notify();
        });
    const std::shared_ptr<Resolving> resolving = resolving_;
    co_await resolving->changed.wait(state_->loop, seen, base::SteadyTime::max());
    resolving_.reset();
    if (abort_) co_return aborted();
    if (resolving->ec)
        co_return no_connection("its name cannot be resolved: " + resolving->ec.message());
    endpoints = resolving->endpoints;
    if (endpoints.empty()) co_return no_connection("its name has no address");
    co_return std::nullopt;
}

Task<Failure> Call::secure(const Origin& origin) {
    std::string problem;
    TlsContext* context = state_->tls_context(problem);
    if (context == nullptr) co_return no_connection(problem);
    Socket& socket = connection_->socket;
    connection_->tls = context->session(socket.native_handle(), origin.host);
    for (;;) {
        const TlsStatus status = connection_->tls->handshake();
        if (status == TlsStatus::ok) co_return std::nullopt;
        if (status == TlsStatus::closed || status == TlsStatus::failed) {
            co_return no_connection("TLS failed: " + connection_->tls->error());
        }
        const auto direction =
            status == TlsStatus::want_read ? Socket::wait_read : Socket::wait_write;
        const auto [ec] = co_await socket.async_wait(direction, as_tuple);
        if (abort_) co_return aborted();
        if (ec) co_return no_connection("TLS failed: " + ec.message());
    }
}

Task<Failure> Call::connect(const Origin& origin) {
    connection_ = std::make_unique<Connection>(state_, state_->pool_of(origin));
    connection_->user = this;
    phase_ = CallError::Kind::connect_timeout;
    connection_->set(timeouts_.connect);
    std::vector<tcp::endpoint> endpoints;
    Failure failure = co_await resolve(origin, endpoints);
    if (failure) co_return failure;
    Socket& socket = connection_->socket;
    error_code last;
    for (const tcp::endpoint& endpoint : endpoints) {
        error_code ignored;
        socket.close(ignored);
        const auto [ec] = co_await socket.async_connect(endpoint, as_tuple);
        last = ec;
        if (abort_) co_return aborted();
        if (!ec) break;
    }
    if (last) co_return no_connection("cannot connect: " + last.message());
    error_code ignored;
    socket.set_option(tcp::no_delay(true), ignored);
    if (origin.tls) failure = co_await secure(origin);
    if (connection_) connection_->clear();
    co_return failure;
}

void Call::compose(const Origin& origin, const Request& request) {
    std::string& out = kit_->out;
    out.assign(request.method);
    out += ' ';
    out += origin.base_path;
    out += request.target;
    out += " HTTP/1.1\r\nHost: ";
    out += origin.authority;
    out += "\r\n";
    out += request.headers;
    if (request.source && !request.source_length) {
        out += "Transfer-Encoding: chunked\r\n";
    } else if (request.source || request.has_body || !request.body.empty()) {
        out += "Content-Length: ";
        append_number(out, request.source ? *request.source_length : request.body.size());
        out += "\r\n";
    }
    out += "\r\n";
}

// As much as the socket takes now.
Gather::Sent Call::push() {
    Gather& gather = kit_->gather;
    if (!connection_->tls) return gather.send(connection_->socket.native_handle(), sent_bytes_);
    while (!gather.empty()) {
        std::size_t n = 0;
        const TlsStatus status = connection_->tls->write(gather.front(), n);
        tls_wants_read_ = status == TlsStatus::want_read;
        // Part of a record may have left although the write is not done.
        sent_bytes_ += n > 0 ? n : 1;
        if (status == TlsStatus::want_read || status == TlsStatus::want_write)
            return Gather::Sent::blocked;
        if (status != TlsStatus::ok) return Gather::Sent::broken;
        gather.advance(n);
    }
    return Gather::Sent::all;
}

// One wait for both directions: an upstream that refuses an upload early does not read on, so only
// its answer wakes us.
Task<> Call::wait_until_writable_or_readable() {
    struct Either {
        bool over = false;
    };
    Socket& socket = connection_->socket;
    const auto either = std::make_shared<Either>();
    socket.async_wait(Socket::wait_read, [either, &socket](error_code) {
        if (either->over) return;  // the call may be gone, and the socket with it
        error_code ignored;
        socket.cancel(ignored);
    });
    if (tls_wants_read_) {
        // TLS cannot write before it has read; the wait below would be over at once, again and
        // again.
        co_await socket.async_wait(Socket::wait_read, as_tuple);
    } else {
        co_await socket.async_wait(Socket::wait_write, as_tuple);
    }
    either->over = true;
    error_code ignored;
    if (socket.is_open()) socket.cancel(ignored);
}

// Sends what is gathered. `answered`: a final answer's head came before everything was sent.
Task<Call::Sending> Call::send_gathered(Failure& failure) {
    for (;;) {
        const Gather::Sent sent = push();
        if (sent == Gather::Sent::all) {
            connection_->clear();
            co_return Sending::all;
        }
        if (sent == Gather::Sent::broken) {
            connection_->clear();
            reusable_ = false;
            if (sent_bytes_ == 0) {
                failure = fail(CallError::Kind::reset,
                               "the connection was closed before the request was sent");
                co_return Sending::failed;
            }
            // An upstream that answered and closed without reading on: its answer may be here all
            // the same.
            failure = co_await read_head();
            co_return failure ? Sending::failed : Sending::answered;
        }
        phase_ = CallError::Kind::idle_timeout;
        connection_->set(timeouts_.idle);
        co_await wait_until_writable_or_readable();
        if (abort_) {
            failure = aborted();
            co_return Sending::failed;
        }
        connection_->clear();
        const Got got = receive_now();
        if (got == Got::bytes && take_answer_head(failure)) co_return Sending::answered;
        if (!failure && (got == Got::closed || got == Got::broken)) {
            failure = fail(CallError::Kind::reset,
                           "it closed the connection while the request was being sent");
        }
        if (failure) co_return Sending::failed;
    }
}

Task<Call::Sending> Call::send_source(const BodySource& source, std::optional<std::uint64_t> length,
                                      Failure& failure) {
    std::uint64_t left = length.value_or(0);
    std::string size_line;
    bool first = true;
    for (;;) {
        const std::optional<std::string_view> piece = co_await source();
        if (abort_) {
            failure = aborted();
            co_return Sending::failed;
        }
        if (!piece || (length && (piece->size() > left || (piece->empty() && left > 0)))) {
            failure = fail(CallError::Kind::body_source,
                           piece ? "the request's body has another length than announced"
                                 : "the request's body broke off");
            co_return Sending::failed;
        }
        Gather& gather = kit_->gather;
        gather.clear();
        if (first) gather.add(kit_->out);
        if (!length) {
            size_line.clear();
            append_number(size_line, piece->size(), 16);
            size_line += "\r\n";
            gather.add(size_line);
            gather.add(*piece);
            gather.add("\r\n");
        } else {
            gather.add(*piece);
            left -= piece->size();
        }
        const bool last = piece->empty();
        if (!first && !last) {
            const Got got = receive_now();
            if (got == Got::bytes && take_answer_head(failure)) co_return Sending::answered;
            if (!failure && (got == Got::closed || got == Got::broken)) {
                failure = fail(CallError::Kind::reset,
                               "it closed the connection while the request was being sent");
            }
            if (failure) co_return Sending::failed;
        }
        first = false;
        const Sending sending = co_await send_gathered(failure);
        if (sending != Sending::all || last) co_return sending;
    }
}

// What is there now, without waiting, into the empty buffer.
Call::Got Call::receive_now() {
    ReadBuffer& input = kit_->input;
    if (!input.empty()) return Got::bytes;
    if (connection_->tls) {
        std::size_t n = 0;
        const TlsStatus status = connection_->tls->read(input.memory(), kReadBytes, n);
        input.filled(n);
        switch (status) {
            case TlsStatus::ok:
                return Got::bytes;
            case TlsStatus::want_read:
            case TlsStatus::want_write:
                tls_wants_read_ = status == TlsStatus::want_read;
                return Got::nothing;
            case TlsStatus::closed:
                return Got::closed;
            case TlsStatus::failed:
                return Got::broken;
        }
    }
    ssize_t n = 0;
    do {
        n = ::recv(connection_->socket.native_handle(), input.memory(), kReadBytes, MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? Got::nothing : Got::broken;
    input.filled(static_cast<std::size_t>(n));
    return n == 0 ? Got::closed : Got::bytes;
}

// Waits for bytes, under the deadline that is set. `broken` as well when the call was aborted.
Task<Call::Got> Call::receive() {
    Socket& socket = connection_->socket;
    if (!connection_->tls) {
        ReadBuffer& input = kit_->input;
        const auto memory = asio::buffer(input.memory(), kReadBytes);
        const auto [ec, n] = co_await socket.async_read_some(memory, as_tuple);
        input.filled(n);
        if (n > 0) co_return Got::bytes;
        co_return ec == asio::error::eof ? Got::closed : Got::broken;
    }
    for (;;) {
        const Got got = receive_now();
        if (got != Got::nothing) co_return got;
        const auto direction = tls_wants_read_ ? Socket::wait_read : Socket::wait_write;
        const auto [ec] = co_await socket.async_wait(direction, as_tuple);
        if (ec) co_return Got::broken;
    }
}

// True: the head of the final answer is complete. Interim ones (1xx) are skipped.
bool Call::take_answer_head(Failure& failure) {
    Parser& parser = kit_->parser;
    ReadBuffer& input = kit_->input;
    while (!input.empty()) {
        const Parser::Taken taken = parser.take_head(input.view());
        input.consume(taken.bytes);
        if (parser.state() == Parser::State::refused) {
            failure = fail(CallError::Kind::bad_response,
                           std::string("its answer cannot be read: ") + parser.refusal().reason);
            return false;
        }
        if (parser.state() == Parser::State::head) continue;
        if (parser.head().status >= 200) return true;
        if (++interim_ > kInterimMax) {
            failure = fail(CallError::Kind::bad_response, "it sends interim answers without end");
            return false;
        }
        parser.begin(answers_head_);
    }
    return false;
}

Task<Failure> Call::read_head() {
    phase_ = CallError::Kind::first_byte_timeout;
    connection_->set(timeouts_.first_byte);
    Failure failure;
    for (;;) {
        if (take_answer_head(failure)) {
            connection_->clear();
            co_return std::nullopt;
        }
        if (failure) co_return failure;
        const Got got = co_await receive();
        if (got == Got::bytes) continue;
        if (abort_) co_return aborted();
        co_return fail(CallError::Kind::reset, got == Got::closed
                                                   ? "it closed the connection without an answer"
                                                   : "the connection broke before an answer");
    }
}

Task<Failure> Call::run(const Origin& origin, Request& request) {
    where_ = origin.authority;
    answers_head_ = request.method == "HEAD";
    kit_->parser.begin(answers_head_);
    if (!request.own_connection) connection_ = state_->take_idle(state_->pool_of(origin));
    Failure failure;
    for (;;) {
        const bool kept = connection_ != nullptr;
        if (kept) {
            connection_->user = this;
        } else {
            failure = co_await connect(origin);
            if (failure) co_return failure;
        }
        compose(origin, request);
        Sending sending = Sending::all;
        if (request.source) {
            sending = co_await send_source(request.source, request.source_length, failure);
        } else {
            kit_->gather.clear();
            if (connection_->tls && request.body.size() <= kTlsJoinMaxBytes) {
                kit_->out += request.body;
                kit_->gather.add(kit_->out);
            } else {
                kit_->gather.add(kit_->out);
                kit_->gather.add(request.body);
            }
            sending = co_await send_gathered(failure);
        }
        if (sending == Sending::failed) {
            // Not a repetition: no byte of the request has left, because the kept connection had
            // just been closed.
            const bool unsent = failure->kind == CallError::Kind::reset && sent_bytes_ == 0;
            if (!kept || !unsent || request.source) {
                failure->on_kept = kept && failure->kind == CallError::Kind::reset;
                co_return failure;
            }
            failure.reset();
            failed_.reset();
            reusable_ = true;
            continue;
        }
        if (sending == Sending::answered) {
            reusable_ = false;
        } else {
            failure = co_await read_head();
            if (failure) {
                failure->on_kept = kept && failure->kind == CallError::Kind::reset;
                co_return failure;
            }
        }
        if (kit_->parser.state() == Parser::State::complete) release();
        co_return std::nullopt;
    }
}

// After the last byte of the answer.
void Call::release() {
    connection_->clear();
    if (reusable_ && kit_->parser.head().keep_alive && kit_->input.empty()) {
        state_->keep(std::move(connection_));
    }
    connection_.reset();
}

Task<std::variant<std::string_view, CallError>> Call::read_some() {
    Parser& parser = kit_->parser;
    ReadBuffer& input = kit_->input;
    for (;;) {
        if (abort_ && !failed_) aborted();
        if (failed_) co_return *failed_;
        if (parser.state() == Parser::State::complete) co_return std::string_view{};
        if (input.empty()) {
            phase_ = CallError::Kind::idle_timeout;
            connection_->set(timeouts_.idle);
            const Got got = co_await receive();
            connection_->clear();
            if (got != Got::bytes) {
                if (abort_) continue;
                if (got == Got::closed && parser.finish()) {
                    connection_.reset();
                    continue;
                }
                fail(CallError::Kind::cut, "its answer ended before it was complete");
                continue;
            }
        }
        const Parser::Taken taken = parser.take_body(input.data(), input.size());
        input.consume(taken.bytes);
        if (parser.state() == Parser::State::refused) {
            fail(CallError::Kind::bad_response,
                 std::string("its answer's body cannot be read: ") + parser.refusal().reason);
            continue;
        }
        if (parser.state() == Parser::State::complete) release();
        if (!taken.body.empty()) co_return taken.body;
    }
}

class SocketClient final : public Client {
  public:
    SocketClient(Loop& loop, std::string ca_file)
        : state_(std::make_shared<ClientState>(loop, std::move(ca_file))) {}

    Task<std::variant<std::unique_ptr<Response>, CallError>> call(const Origin& origin,
                                                                  Request request,
                                                                  Timeouts timeouts,
                                                                  CancelToken* cancel) override {
        if (cancel != nullptr && cancel->cancelled) {
            co_return CallError{CallError::Kind::cancelled, false,
                                origin.authority + ": the call was cancelled"};
        }
        auto running = std::make_unique<Call>(state_, timeouts);
        if (cancel != nullptr) cancel->fire = [call = running.get()] { call->cancel(); };
        const Failure failure = co_await running->run(origin, request);
        if (cancel != nullptr) cancel->fire = nullptr;
        if (failure) co_return *failure;
        co_return std::unique_ptr<Response>(std::move(running));
    }

  private:
    std::shared_ptr<ClientState> state_;
};

bool plain_name(std::string_view host) {
    if (host.empty() || host.size() > 253) return false;
    for (const char c : host) {
        const bool good = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                          (c >= '0' && c <= '9') || c == '.' || c == '-' || c == '_';
        if (!good) return false;
    }
    return true;
}

base::Error bad_url(std::string_view url, const char* why) {
    return {
        .code = base::ErrorCode::invalid_argument,
        .detail = "\"" + std::string(url) + "\" " + why + "; write http(s)://host[:port][/path]"};
}

}  // namespace

base::Result<Origin> parse_origin(std::string_view url) {
    Origin origin;
    const std::size_t scheme_end = url.find("://");
    const std::string_view scheme =
        url.substr(0, scheme_end == std::string_view::npos ? 0 : scheme_end);
    if (name_is(scheme, "https")) {
        origin.tls = true;
        origin.port = 443;
    } else if (!name_is(scheme, "http")) {
        return bad_url(url, "is not an http or https address");
    }
    std::string_view rest = url.substr(scheme_end + 3);
    for (const char c : rest) {
        if (c <= ' ' || c > '~')
            return bad_url(url, "holds a blank, a control or a non-ASCII character");
        if (c == '?') return bad_url(url, "has a query");
        if (c == '#') return bad_url(url, "has a fragment");
    }
    const std::size_t slash = rest.find('/');
    const std::string_view authority = rest.substr(0, slash);
    std::string_view path =
        slash == std::string_view::npos ? std::string_view{} : rest.substr(slash);
    while (path.ends_with('/')) path.remove_suffix(1);
    // The text is not repeated where it may hold a password.
    if (authority.find('@') != std::string_view::npos) {
        return bad_url(scheme, "address has user info before the host");
    }
    std::string_view host = authority;
    std::string_view port;
    bool has_port = false;
    if (authority.starts_with('[')) {
        const std::size_t end = authority.find(']');
        if (end == std::string_view::npos) return bad_url(url, "has no ']' after its address");
        host = authority.substr(1, end - 1);
        error_code ec;
        asio::ip::make_address_v6(std::string(host), ec);
        if (ec) return bad_url(url, "has no IPv6 address in its brackets");
        const std::string_view after = authority.substr(end + 1);
        has_port = !after.empty();
        if (has_port && after.front() != ':') return bad_url(url, "has a bad port");
        if (has_port) port = after.substr(1);
    } else {
        const std::size_t colon = authority.find(':');
        has_port = colon != std::string_view::npos;
        host = authority.substr(0, colon);
        if (has_port) port = authority.substr(colon + 1);
        if (!plain_name(host)) return bad_url(url, "has no valid host");
    }
    if (has_port) {
        unsigned value = 0;
        for (const char c : port) {
            if (c < '0' || c > '9' || port.size() > 5) return bad_url(url, "has a bad port");
            value = value * 10 + static_cast<unsigned>(c - '0');
        }
        if (value == 0 || value > 65535) return bad_url(url, "has a bad port");
        origin.port = static_cast<std::uint16_t>(value);
    }
    origin.host = host;
    origin.base_path = path;
    origin.authority = authority;
    return origin;
}

std::unique_ptr<Client> make_client(Loop& loop, std::string ca_file) {
    return std::make_unique<SocketClient>(loop, std::move(ca_file));
}

}  // namespace semel::http
