// Leases of running calls: which are held, and their renewal.
#include "engine/engine_impl.hpp"

namespace semel::engine {

void Engine::Impl::hold(LeaseGuard& lease) {
    lease.id_ = ++last_lease_;
    lease.position_ = leases_.size();
    leases_.push_back(&lease);
    if (tick_timer_ == 0 && !stopping_) arm_tick();
}

void Engine::Impl::settle_guard(LeaseGuard& lease) {
    if (lease.id_ == 0) return;
    if (lease.keeper_.asking()) renewing_.erase(lease.id_);
    leases_[lease.position_] = leases_.back();
    leases_[lease.position_]->position_ = lease.position_;
    leases_.pop_back();
    lease.id_ = 0;
}

void Engine::Impl::arm_tick() {
    tick_timer_ =
        loop_.at(loop_.now() + options_.lease / core::LeaseKeeper::ticks_per_lease, [this] {
            tick_timer_ = 0;
            tick();
        });
}

void Engine::Impl::tick() {
    const SteadyTime now = loop_.now();
    for (LeaseGuard* lease : leases_) {
        if (lease->keeper_.step(now, core::LeaseTick{}) != core::LeaseAction::renew) continue;
        renewing_.emplace(lease->id_, lease);
        core::Item item{lease->key_, core::Renew{lease->token(), lease->nonce_, options_.lease}};
        loop_.spawn(renew(lease->id_, std::move(item)));
    }
    if (!leases_.empty()) arm_tick();
}

Task<> Engine::Impl::renew(std::uint64_t id, core::Item item) {
    const SteadyTime deadline = loop_.now() + options_.lease / 3;
    auto reply = co_await batcher_.call(std::move(item), deadline);
    core::LeaseEvent event = core::LeaseUnanswered{};
    if (!reply) {
        ++counters_.store_errors;
    } else if (const auto* fenced = std::get_if<Fenced>(&reply->outcome)) {
        event = core::LeaseRefused{fenced->record};
    } else {
        ++counters_.renewals;
        event = core::LeaseRenewed{};
    }
    const auto found = renewing_.find(id);
    if (found == renewing_.end()) co_return;  // settled meanwhile
    LeaseGuard& lease = *found->second;
    renewing_.erase(found);
    if (lease.keeper_.step(loop_.now(), event) != core::LeaseAction::overtaken) co_return;
    ++counters_.leases_lost;
    const auto* refused = std::get_if<core::LeaseRefused>(&event);
    if (refused && refused->record && began_after(lease.token(), *refused->record))
        ++counters_.claim_lost;
    if (lease.on_overtaken) lease.on_overtaken();
}

}  // namespace semel::engine
