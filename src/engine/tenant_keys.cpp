#include "engine/tenant_keys.hpp"

#include <utility>

#include "base/assert.hpp"

namespace semel::engine {

using base::Error;
using base::ErrorCode;

TenantKeys::TenantKeys(Loop& loop, Batcher& batcher, Vault* vault,
                       std::chrono::milliseconds patience, std::atomic<std::uint64_t>& store_errors,
                       Background background)
    : loop_(loop),
      batcher_(batcher),
      vault_(vault),
      patience_(patience),
      store_errors_(store_errors),
      background_(std::move(background)) {}

Error TenantKeys::unavailable(const std::string& what, const Error& cause) {
    ++store_errors_;
    return {.code = ErrorCode::store_unavailable,
            .applied = base::Applied::no,
            .retry_after = std::chrono::seconds{1},
            .detail = what + "; " + cause.detail};
}

void TenantKeys::look_in_time() {
    if (vault_->begin_look(loop_.now())) background_(look_unasked());
}

Task<> TenantKeys::look_unasked() {
    const auto looked = co_await look();
    if (!looked) co_return;  // counted and noted; whoever needs the answer asks himself
}

Task<Result<void>> TenantKeys::look() {
    const SteadyTime asked_at = loop_.now();
    core::Item item{core::StoredKey{}, Vault::mark_wanted()};
    auto reply = co_await batcher_.call(std::move(item), asked_at + patience_);
    if (!reply) {
        vault_->no_mark();
        co_return unavailable("the store did not say whether the tenant was erased", reply.error());
    }
    const auto* mark = std::get_if<core::Value>(&reply->outcome);
    SEMEL_ASSERT(mark != nullptr, "a store answers ClaimValue with Value");
    vault_->take_mark(mark->value, asked_at);
    co_return Result<void>{};
}

DataKeyPtr TenantKeys::ready(const core::TenantTag& tenant) {
    const SteadyTime now = loop_.now();
    if (!vault_->fresh(now)) return nullptr;
    look_in_time();
    if (vault_->begin_reading_again(tenant, now)) background_(read_again(tenant));
    return vault_->find(tenant);
}

Task<Result<DataKeyPtr>> TenantKeys::ask(core::TenantTag tenant) {
    const SteadyTime deadline = loop_.now() + patience_;
    for (;;) {
        if (!vault_->fresh(loop_.now())) {
            auto looked = co_await look();
            if (!looked) co_return std::move(looked.error());
        }
        if (DataKeyPtr known = vault_->find(tenant)) co_return known;
        const SteadyTime asked_at = loop_.now();
        Vault::KeyWanted wanted = vault_->key_wanted(tenant);
        const std::uint64_t generation = wanted.generation;
        core::Item item{core::StoredKey{}, std::move(wanted.operation)};
        auto reply = co_await batcher_.call(std::move(item), deadline);
        if (!reply)
            co_return unavailable("the store did not give the tenant's data key", reply.error());
        const auto* value = std::get_if<core::Value>(&reply->outcome);
        SEMEL_ASSERT(value != nullptr, "a store answers ClaimValue with Value");
        auto key = vault_->take_key(tenant, value->value, generation, asked_at);
        if (!key) {
            ++store_errors_;
            co_return std::move(key.error());
        }
        if (*key) co_return std::move(*key);
    }
}

Task<> TenantKeys::read_again(core::TenantTag tenant) {
    const SteadyTime asked_at = loop_.now();
    Vault::KeyWanted wanted = vault_->key_wanted(tenant);
    const std::uint64_t generation = wanted.generation;
    core::Item item{core::StoredKey{}, std::move(wanted.operation)};
    auto reply = co_await batcher_.call(std::move(item), asked_at + patience_);
    const auto* value = reply ? std::get_if<core::Value>(&reply->outcome) : nullptr;
    if (value == nullptr || !vault_->take_key(tenant, value->value, generation, asked_at))
        ++store_errors_;
}

}  // namespace semel::engine
