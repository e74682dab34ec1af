#include "gateway/peer_server.hpp"

#include <algorithm>

#include "base/assert.hpp"
#include "gateway/state.hpp"

namespace semel::gateway {

using namespace std::chrono_literals;

namespace {

constexpr auto ping_every_max = 1s;
constexpr auto silence_min = 2s;
/// A flight whose admission is still asked for is waited for so long: its grant may be on its way.
constexpr auto asking_patience = 1s;
constexpr std::size_t nonce_text_bytes = (peer_nonce_bytes * 8 + 5) / 6;

/// Counts a follower of another process for as long as it is served.
class Served {
  public:
    explicit Served(telemetry::Gauge& gauge) : gauge_(gauge) { gauge_.add(); }
    ~Served() { gauge_.sub(); }
    Served(const Served&) = delete;
    Served& operator=(const Served&) = delete;

  private:
    telemetry::Gauge& gauge_;
};

void write_end(std::string& out, PeerEnd::How how) { write_frame(out, PeerEnd{.how = how}); }

/// The head as a frame; nullopt: it is larger than a frame may be.
std::optional<PeerHead> head_of(const Flight& flight, const AnswerHead& head,
                                const Journal::View& view) {
    if (head.content_type.size() > peer_content_type_max_bytes ||
        head.kept_headers.size() > peer_headers_max_bytes)
        return std::nullopt;
    return PeerHead{.status = head.status,
                    .content_type = head.content_type,
                    .kept_headers = head.kept_headers,
                    .content_length = head.content_length,
                    .attempt = flight.attempt(),
                    .streaming = view.streaming,
                    .from_gateway = head.from_gateway,
                    .takeover = flight.takeover()};
}

}  // namespace

std::chrono::milliseconds peer_ping_every(std::chrono::milliseconds lease) {
    return std::min<std::chrono::milliseconds>(ping_every_max, lease / 6);
}

std::chrono::milliseconds peer_silence_max(std::chrono::milliseconds lease) {
    return std::max<std::chrono::milliseconds>(silence_min, lease / 3);
}

PeerServer::PeerServer(Process& process, Loop& loop, std::chrono::milliseconds lease)
    : state_(process.state()), loop_(loop), ping_every_(peer_ping_every(lease)) {
    SEMEL_ASSERT(state_.peer_secret != nullptr, "peers prove themselves by a secret");
}

bool PeerServer::proven(const http::RequestHead& head) {
    const auto proof = head.header("authorization");
    const auto nonce = head.header(peer_nonce_header);
    if (!proof || !proof->starts_with(peer_scheme) || !nonce ||
        nonce->size() != nonce_text_bytes || head.method != "GET")
        return false;
    const std::string expected = peer_proof(*state_.peer_secret, head.target, *nonce);
    if (!base::equal_constant_time(proof->substr(peer_scheme.size()), expected)) return false;
    if (!seen_nonces_.emplace(*nonce).second) return false;
    nonces_.emplace_back(*nonce);
    if (nonces_.size() > peer_nonces_max) {
        seen_nonces_.erase(nonces_.front());
        nonces_.pop_front();
    }
    return true;
}

Task<> PeerServer::handle(http::Exchange& exchange) {
    const http::RequestHead& head = exchange.head();
    http::ResponseHead answer{.status = 401};
    if (!proven(head)) {
        state_.metrics.peer_refused.add();
        co_await exchange.respond(answer, std::string_view{});
        co_return;
    }
    const auto question = parse_peer_target(head.target);
    if (!question) {
        answer.status = 404;
        co_await exchange.respond(answer, std::string_view{});
        co_return;
    }
    const Served served(state_.metrics.peer_connections);
    answer.status = 200;
    answer.add("Content-Type", peer_content_type);
    exchange.begin(answer);
    std::string out;
    write_frame(out,
                PeerHello{peer_answer_proof(*state_.peer_secret, *head.header(peer_nonce_header))});
    co_await serve(exchange, *question, std::move(out));
}

/// The flight, once its attempt is known to be the one asked for. Null: it is another, or there is
/// none, or the peer left (then nothing more can be written).
Task<FlightPtr> PeerServer::find(http::Exchange& exchange, const PeerQuestion& question,
                                 std::string& out) {
    const FlightPtr flight = state_.flights.find(question.key);
    if (!flight) co_return nullptr;
    const SteadyTime patience = loop_.now() + asking_patience;
    for (;;) {
        const std::uint64_t seen = flight->changed().version();
        const Flight::Phase phase = flight->phase();
        if (phase != Flight::Phase::asking) {
            const bool runs_here = phase == Flight::Phase::running || phase == Flight::Phase::done ||
                                   phase == Flight::Phase::moved_on;
            co_return runs_here && flight->token() == question.token ? flight : nullptr;
        }
        if (loop_.now() >= patience) co_return nullptr;
        const SteadyTime wake = std::min(patience, loop_.now() + ping_every_);
        if (co_await flight->changed().wait(loop_, seen, wake)) continue;
        write_frame(out, PeerPing{});
        if (!co_await exchange.write(out)) co_return nullptr;
        out.clear();
    }
}

Task<> PeerServer::serve(http::Exchange& exchange, const PeerQuestion& question, std::string out) {
    const FlightPtr flight = co_await find(exchange, question, out);
    if (!flight) {
        write_end(out, PeerEnd::How::gone);
        co_await exchange.finish(out);
        co_return;
    }
    // A follower elsewhere keeps the call running as one here does.
    const Attachment attachment(flight, loop_);
    if (!attachment.attached()) {
        write_end(out, PeerEnd::How::gone);
        co_await exchange.finish(out);
        co_return;
    }
    Journal& journal = flight->journal();
    bool head_sent = false;
    std::uint64_t at = question.from;
    std::string part;
    for (;;) {
        const std::uint64_t seen = flight->changed().version();
        const Flight::Phase phase = flight->phase();
        const Journal::View view = journal.view();
        if (phase == Flight::Phase::moved_on) {
            write_end(out, PeerEnd::How::moved_on);
            co_await exchange.finish(out);
            co_return;
        }
        // Cut and overtaken look alike in the journal: only the phase tells them apart.
        const bool ended = view.end == Journal::End::whole ||
                           (view.end == Journal::End::cut && phase == Flight::Phase::done);
        if (!head_sent && view.has_head && (view.streaming || ended)) {
            const auto head = head_of(*flight, journal.head(), view);
            if (!head || at > view.bytes) {
                write_end(out, PeerEnd::How::gone);
                co_await exchange.finish(out);
                co_return;
            }
            write_frame(out, *head);
            head_sent = true;
        }
        if (head_sent && at < view.bytes) {
            const bool last = view.end != Journal::End::open && at >= view.last_at;
            const std::uint64_t until =
                last || view.end == Journal::End::open ? view.bytes : view.last_at;
            const std::uint64_t size = std::min<std::uint64_t>(peer_data_max_bytes, until - at);
            journal.read(at, static_cast<std::size_t>(size), part);
            if (part.empty()) {  // the spill file cannot be read
                exchange.cut();
                co_return;
            }
            at += part.size();
            write_frame(out, PeerData{.bytes = part, .last = last});
            // What is here leaves in few writes; the last bytes with the end.
            if (at < view.bytes ? out.size() < peer_data_max_bytes : ended) continue;
            if (!co_await exchange.write(out)) co_return;
            out.clear();
            continue;
        }
        if (ended) {
            PeerEnd end{.how = view.end == Journal::End::whole ? PeerEnd::How::whole
                                                               : PeerEnd::How::cut,
                        .record_pending = view.record_pending,
                        .expires = view.expires};
            if (!head_sent) end.how = PeerEnd::How::gone;
            write_frame(out, end);
            co_await exchange.finish(out);
            co_return;
        }
        if (!out.empty()) {
            if (!co_await exchange.write(out)) co_return;
            out.clear();
            continue;
        }
        if (co_await flight->changed().wait(loop_, seen, loop_.now() + ping_every_)) continue;
        write_frame(out, PeerPing{});
    }
}

}  // namespace semel::gateway
