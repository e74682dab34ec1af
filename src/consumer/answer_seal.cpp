#include "consumer/answer_seal.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/assert.hpp"

namespace semel::consumer {

using base::Result;
using engine::DataKeyPtr;
using runtime::Task;

namespace {

/// How long the store may take to give a key.
constexpr std::chrono::milliseconds key_patience{2000};

}  // namespace

AnswerSeal::AnswerSeal(runtime::Loop& loop, core::Store& store, engine::Vault& vault,
                       core::TenantTag tenant, Background background)
    : loop_(loop),
      vault_(vault),
      tenant_(tenant),
      batcher_(loop, store, {}),
      keys_(loop, batcher_, &vault, key_patience, store_errors_, std::move(background)) {
    SEMEL_ASSERT(keys_.sealed(tenant), "answers are sealed under somebody's key");
}

bool AnswerSeal::concerns(const core::Operation& operation) {
    if (std::holds_alternative<core::Acquire>(operation)) return true;
    const auto* complete = std::get_if<core::Complete>(&operation);
    return complete != nullptr && complete->answer.body;
}

Task<Result<DataKeyPtr>> AnswerSeal::ask() {
    auto key = co_await keys_.ask(tenant_);
    if (!key) {
        base::Error error = std::move(key.error());
        error.applied = base::Applied::no;
        co_return error;
    }
    co_return std::move(*key);
}

Task<Result<DataKeyPtr>> AnswerSeal::ask_anew() {
    const base::SteadyTime asked_at = loop_.now();
    engine::Vault::KeyWanted wanted = vault_.key_wanted(tenant_);
    const std::uint64_t generation = wanted.generation;
    core::Item item{core::StoredKey{}, std::move(wanted.operation)};
    auto reply = co_await batcher_.call(std::move(item), asked_at + key_patience);
    if (!reply) {
        base::Error error = std::move(reply.error());
        error.applied = base::Applied::no;
        co_return error;
    }
    const auto* value = std::get_if<core::Value>(&reply->outcome);
    SEMEL_ASSERT(value != nullptr, "a store answers ClaimValue with Value");
    auto key = vault_.take_key(tenant_, value->value, generation, asked_at);
    if (key && *key) co_return std::move(*key);
    // An erasure was noticed meanwhile, or the key is none of this deployment's.
    auto asked = co_await ask();
    co_return asked;
}

void AnswerSeal::seal(core::Item& item, const engine::DataKey& key) const {
    if (auto* acquire = std::get_if<core::Acquire>(&item.operation)) acquire->tenant = tenant_;
    if (auto* complete = std::get_if<core::Complete>(&item.operation);
        complete != nullptr && complete->answer.body)
        key.seal(item.key, complete->answer);
}

bool sealed_under_another(const std::vector<Result<core::Decided>>& results,
                          const engine::DataKey& key) {
    return std::any_of(results.begin(), results.end(), [&key](const auto& one) {
        if (!one) return false;
        const auto* replay = std::get_if<core::Replay>(&one->outcome);
        if (replay == nullptr || !replay->record->answer) return false;
        const std::uint64_t under = replay->record->answer->sealed_under;
        return under != 0 && under != key.id();
    });
}

}  // namespace semel::consumer
