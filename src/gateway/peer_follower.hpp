// PeerFollower: brings the answer of an intent that another process owns into the flight of this
// one: over the owner's peer address, and from the record where that breaks off.
#pragma once

#include "engine/engine.hpp"
#include "gateway/flight.hpp"
#include "gateway/peer_wire.hpp"
#include "gateway/state.hpp"
#include "http/client.hpp"

namespace semel::gateway {

/// What the record says to a follower that has bytes of the attempt `token` and lost its owner.
enum class LostOwner : std::uint8_t {
    wait,      ///< The owner may still complete: ask again.
    complete,  ///< The record holds the whole of this attempt's answer.
    over,      ///< This attempt gives no answer any more.
};
/// `at`: the store's time of the look. `grace`: the store was out, and the owner could not renew.
LostOwner judge_lost_owner(const core::RecordPtr& record, core::FencingToken token,
                           core::StoreTime at, bool grace);

/// For one loop. One connection for each flight, however many clients follow it here.
class PeerFollower {
  public:
    PeerFollower(Process::State& state, engine::Engine& engine, http::Client& client)
        : state_(state), engine_(engine), client_(client) {}

    enum class Followed {
        ended,      ///< The flight has ended and left the table.
        ask_again,  ///< The owner does not run that attempt (yet, or any more): ask the store.
        lost,       ///< The owner cannot be followed; nothing of its answer is in the journal.
    };
    /// Whether `owner` is somebody to be followed at all.
    [[nodiscard]] bool may_follow(const core::Owner& owner) const;
    /// `flight` is in the phase `elsewhere` and its journal is empty. At most as long as clients
    /// follow it.
    Task<Followed> follow(FlightPtr flight, core::StoredKey key, core::InFlight in_flight);

  private:
    enum class Ending { whole, cut, moved_on, gone, broken, left };
    Task<Ending> read(FlightPtr flight, PeerQuestion question, std::string peer);
    Task<Ending> take(Flight& flight, http::Response& response, std::string_view nonce);
    Task<> recover(FlightPtr flight, core::StoredKey key, core::InFlight in_flight);
    Task<bool> append_record(Flight& flight, core::StoredKey key, core::RecordPtr record);
    void end(const FlightPtr& flight, const core::StoredKey& key, Ending ending);

    Process::State& state_;
    engine::Engine& engine_;
    http::Client& client_;
};

}  // namespace semel::gateway
