// PeerServer: gives the journal of a flight that runs here to other gateways of the same store,
// whose clients joined it there.
#pragma once

#include <chrono>
#include <deque>
#include <string>
#include <unordered_set>

#include "gateway/flight.hpp"
#include "gateway/gateway.hpp"
#include "gateway/peer_wire.hpp"
#include "http/exchange.hpp"

namespace semel::gateway {

/// Nonces of served questions that are remembered: none of them is taken a second time.
inline constexpr std::size_t peer_nonces_max = 4096;

/// How often a living owner says something to those who follow it from elsewhere, and how long
/// these wait before they take it for frozen.
std::chrono::milliseconds peer_ping_every(std::chrono::milliseconds lease);
std::chrono::milliseconds peer_silence_max(std::chrono::milliseconds lease);

/// The handler of the peer address. One per loop, on its thread. Everybody without the proof gets
/// 401 and no hint, whatever was asked.
class PeerServer final : public http::Handler {
  public:
    /// `process` was made with a peer secret and outlives it, and every coroutine of `loop`.
    PeerServer(Process& process, Loop& loop, std::chrono::milliseconds lease);
    ~PeerServer() override = default;

    Task<> handle(http::Exchange& exchange) override;

  private:
    bool proven(const http::RequestHead& head);
    Task<> serve(http::Exchange& exchange, const PeerQuestion& question, std::string out);
    Task<FlightPtr> find(http::Exchange& exchange, const PeerQuestion& question, std::string& out);

    Process::State& state_;
    Loop& loop_;
    const std::chrono::milliseconds ping_every_;
    std::deque<std::string> nonces_;  ///< Oldest first.
    std::unordered_set<std::string> seen_nonces_;
};

}  // namespace semel::gateway
