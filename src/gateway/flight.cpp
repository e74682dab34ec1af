#include "gateway/flight.hpp"

namespace semel::gateway {

bool Flight::attach() {
    if (followers_.fetch_add(1) < followers_max) return true;
    followers_.fetch_sub(1, std::memory_order_acq_rel);
    return false;
}

void Flight::detach(SteadyTime now) {
    left_at_.store(now.time_since_epoch().count());
    followers_.fetch_sub(1, std::memory_order_acq_rel);
}

Flights::Entry Flights::enter(const core::StoredKey& key, const core::Fingerprint& fingerprint,
                              const std::string& spill_path, SteadyTime now) {
    Stripe& home = stripe(key);
    const std::lock_guard lock(home.mutex);
    const auto [where, made] = home.flights.try_emplace(key);
    if (made) {
        where->second = std::make_shared<Flight>(fingerprint, spill_path, now);
        size_.fetch_add(1, std::memory_order_relaxed);
    }
    return {where->second, made};
}

FlightPtr Flights::find(const core::StoredKey& key) {
    Stripe& home = stripe(key);
    const std::lock_guard lock(home.mutex);
    const auto found = home.flights.find(key);
    return found == home.flights.end() ? nullptr : found->second;
}

void Flights::leave(const core::StoredKey& key, const FlightPtr& flight) {
    Stripe& home = stripe(key);
    const std::lock_guard lock(home.mutex);
    const auto found = home.flights.find(key);
    if (found == home.flights.end() || found->second != flight) return;
    home.flights.erase(found);
    size_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace semel::gateway
