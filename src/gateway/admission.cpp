// How an owner comes to its grant, or to following the process that has it.
#include <algorithm>

#include "base/assert.hpp"
#include "gateway/owner.hpp"

namespace semel::gateway {

using namespace std::chrono_literals;

namespace {

/// How often an intent that another process owns is asked for again, at most and at least.
constexpr auto ask_again_min = 20ms;
constexpr auto ask_again_max = 500ms;
/// After an owner could not be followed, it is asked for its record only for so long; doubled each
/// time.
constexpr auto follow_again_first = 1s;
constexpr auto follow_again_max = 16s;

}  // namespace

/// What a waiting flight knows of the owner elsewhere.
struct Owner::Elsewhere {
    core::FencingToken token;
    std::chrono::milliseconds follow_again = follow_again_first;
    SteadyTime follow_from = SteadyTime::min();
    std::chrono::milliseconds ask_again = ask_again_min;
};

/// Another process works on it: follows it there if that is possible, else waits until it is time
/// to ask the store again. One acquire per process does, for all who wait here; the first to ask
/// after the lease is dead takes over. False: the flight has ended.
Task<bool> Owner::wait_elsewhere(FlightPtr flight, const Call& call, core::InFlight in_flight,
                                 Elsewhere& known) {
    Loop& loop = engine_.loop();
    flight->elsewhere();
    if (known.token != in_flight.token) known = Elsewhere{.token = in_flight.token};
    SteadyTime ask_at = loop.now() + std::clamp<std::chrono::nanoseconds>(
                                         in_flight.remaining / 4, ask_again_min, ask_again_max);
    if (peers_.may_follow(in_flight.owner) && loop.now() >= known.follow_from) {
        switch (co_await peers_.follow(flight, call.key, std::move(in_flight))) {
            case PeerFollower::Followed::ended:
                co_return false;
            case PeerFollower::Followed::ask_again:
                ask_at = loop.now() + known.ask_again;
                known.ask_again =
                    std::min<std::chrono::milliseconds>(known.ask_again * 2, ask_again_max);
                break;
            case PeerFollower::Followed::lost:
                known.follow_from = loop.now() + known.follow_again;
                known.follow_again =
                    std::min<std::chrono::milliseconds>(known.follow_again * 2, follow_again_max);
                ask_at = std::max(ask_at, loop.now() + ask_again_min);
                break;
        }
    }
    co_await loop.sleep_until(ask_at);
    if (flight->followers() != 0) co_return true;
    state_.flights.leave(call.key, flight);
    flight->move_on();
    co_return false;
}

Task<> Owner::follow_elsewhere(FlightPtr flight, Call& call) {
    Elsewhere elsewhere;
    for (;;) {
        const auto looked = co_await engine_.ask({call.key, core::Get{}});
        if (!looked) {
            state_.flights.leave(call.key, flight);
            flight->break_off(store_problem(looked.error()));
            co_return;
        }
        const auto* found = std::get_if<core::Found>(&looked->outcome);
        SEMEL_ASSERT(found != nullptr, "a store answers Get with Found");
        const core::RecordPtr record = found->record;
        const bool runs = record && record->status == core::Status::processing &&
                          record->fingerprint.matches(call.fingerprint) &&
                          (record->lease_end > looked->at || engine_.grace_left() > 0ms);
        if (!runs) {
            co_await engine_.loop().sleep_for(ask_again_min);
            state_.flights.leave(call.key, flight);
            flight->move_on();
            co_return;
        }
        core::InFlight in_flight{
            .owner = record->owner,
            .token = record->token,
            .remaining = std::chrono::ceil<std::chrono::milliseconds>(
                std::max<std::chrono::nanoseconds>(record->lease_end - looked->at,
                                                   engine_.grace_left())),
            .created = record->created};
        if (call.route->on_running != config::OnRunning::join) {
            state_.flights.leave(call.key, flight);
            flight->refuse(std::move(in_flight));
            co_return;
        }
        if (!co_await wait_elsewhere(flight, call, std::move(in_flight), elsewhere)) co_return;
    }
}

Task<std::unique_ptr<engine::LeaseGuard>> Owner::admit(FlightPtr flight, Call& call) {
    Elsewhere elsewhere;
    const core::Policy policy = policy_of(*call.route, state_.config.engine);
    for (;;) {
        engine::Engine::AcquireRequest request{
            .key = call.key,
            .fingerprint = call.fingerprint,
            .policy = policy,
            .starts_call = policy.on_unknown == core::OnUnknown::rerun,
            .label = call.label,
            .turn = call.turn,
            .tenant = call.tenant};
        auto acquired = co_await engine_.acquire(std::move(request));
        if (!acquired) {
            state_.flights.leave(call.key, flight);
            flight->break_off(store_problem(acquired.error()));
            co_return nullptr;
        }
        if (acquired->lease) co_return std::move(acquired->lease);
        const auto* in_flight = std::get_if<core::InFlight>(&*acquired->refused);
        if (in_flight == nullptr || call.route->on_running != config::OnRunning::join) {
            state_.flights.leave(call.key, flight);
            flight->refuse(std::move(*acquired->refused));
            co_return nullptr;
        }
        if (!co_await wait_elsewhere(flight, call, *in_flight, elsewhere)) co_return nullptr;
    }
}

}  // namespace semel::gateway
