// FakeExchange: a client of a simulation: its request goes in, what it would see comes out. It may
// vanish or read slowly.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "http/exchange.hpp"
#include "runtime/loop.hpp"

namespace semel::sim {

using base::SteadyTime;

struct FakeRequest {
    std::string method = "POST";
    std::string target = "/v1/chat/completions";
    std::vector<std::pair<std::string, std::string>> headers;
    std::string body;
};

/// What the client has seen so far.
struct Received {
    enum class State {
        nothing,   ///< Not a byte.
        partial,   ///< Head, perhaps some body; the answer goes on.
        finished,  ///< The answer is whole.
        cut,       ///< Visibly broken by the server.
    };
    State state = State::nothing;
    int status = 0;
    std::string headers;  ///< Lines as the handler gave them.
    std::string body;
    std::optional<std::uint64_t> length;  ///< Announced with begin().
    SteadyTime first_byte_at{};
    SteadyTime ended_at{};
    /// The value of a header line; empty if there is none. Compares names exactly as written.
    [[nodiscard]] std::string header(const std::string& name) const;
};

/// On the loop of the process that handles it. Destroyed after its handler ended (or with the
/// crashed process).
class FakeExchange final : public http::Exchange {
  public:
    FakeExchange(runtime::Loop& loop, FakeRequest request);

    /// From then on the client is gone: sends fail, and what was not accepted before is not
    /// received.
    SteadyTime vanish_at = SteadyTime::max();
    /// A slow reader: each write is accepted only after this long.
    std::chrono::nanoseconds write_takes{0};
    /// The upload breaks off before its end.
    bool body_breaks = false;
    std::size_t body_piece_max = 64 * 1024;

    [[nodiscard]] const Received& received() const { return received_; }
    /// The handler gave an answer (also to a client that was gone).
    [[nodiscard]] bool answered() const { return answered_; }

    [[nodiscard]] const http::RequestHead& head() const override { return head_; }
    [[nodiscard]] std::string peer() const override { return "192.0.2.1:1"; }
    http::Task<http::BodyStatus> read_body(std::string& into, std::uint64_t limit) override;
    http::Task<http::BodyPiece> read_some() override;
    using http::Exchange::respond;
    http::Task<bool> respond(const http::ResponseHead& head,
                             std::span<const std::string_view> body) override;
    void begin(const http::ResponseHead& head, std::optional<std::uint64_t> length) override;
    http::Task<bool> write(std::string_view bytes) override;
    http::Task<bool> finish(std::string_view last) override;
    void cut() override;
    bool client_gone() override { return loop_.now() >= vanish_at; }

  private:
    /// Sends the head if it has not left, then `bytes`. False: the client went before it took them.
    http::Task<bool> send(std::string bytes);

    runtime::Loop& loop_;
    FakeRequest request_;
    http::RequestHead head_;  ///< Views into request_.
    std::size_t body_read_ = 0;
    http::ResponseHead response_;
    bool begun_ = false;
    bool answered_ = false;
    Received received_;
};

}  // namespace semel::sim
