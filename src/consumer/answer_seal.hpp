// AnswerSeal: what handlers answered, sealed before a store sees it, as the gateway's answers are.
#pragma once

#include <atomic>
#include <functional>
#include <vector>

#include "core/store.hpp"
#include "engine/batcher.hpp"
#include "engine/tenant_keys.hpp"
#include "engine/vault.hpp"
#include "runtime/loop.hpp"

namespace semel::consumer {

/// For one loop and one tenant. It lies beside the records of a store, asks that store for the
/// tenant's data key, and uses it on the items that hold answers. All references outlive it.
class AnswerSeal {
  public:
    /// Runs what nobody waits for; drops it where the records end.
    using Background = engine::TenantKeys::Background;

    AnswerSeal(runtime::Loop& loop, core::Store& store, engine::Vault& vault,
               core::TenantTag tenant, Background background);

    /// Whether the key must be there before it is sent: it may be answered with an answer, or holds
    /// one. So nothing runs whose answer could not be sealed.
    [[nodiscard]] static bool concerns(const core::Operation& operation);
    /// The present key, where it may be used as it is; else null: ask.
    [[nodiscard]] engine::DataKeyPtr ready() { return keys_.ready(tenant_); }
    /// Error, of which nothing was applied: the store did not give it.
    runtime::Task<base::Result<engine::DataKeyPtr>> ask();
    /// The same, read from the store whatever is known here.
    runtime::Task<base::Result<engine::DataKeyPtr>> ask_anew();

    /// Of an acquire the tenant, of a completion the answer.
    void seal(core::Item& item, const engine::DataKey& key) const;

  private:
    runtime::Loop& loop_;
    engine::Vault& vault_;
    const core::TenantTag tenant_;
    std::atomic<std::uint64_t> store_errors_{0};  ///< Of the keys alone: who asks is told.
    engine::Batcher batcher_;
    engine::TenantKeys keys_;
};

/// Whether a replay among them is sealed under another key than this one.
[[nodiscard]] bool sealed_under_another(const std::vector<base::Result<core::Decided>>& results,
                                        const engine::DataKey& key);

}  // namespace semel::consumer
