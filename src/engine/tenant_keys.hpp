// TenantKeys: one loop's way to the vault: asks the store for what the vault lacks, in time and in the background where it can.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>

#include "engine/batcher.hpp"
#include "engine/vault.hpp"
#include "runtime/loop.hpp"

namespace semel::engine {

/// One per engine, on its loop.
class TenantKeys {
  public:
    /// Runs a task that nobody waits for; drops it where the engine stops.
    using Background = std::function<void(Task<>)>;

    /// `vault` may be null: nothing is sealed then. All references outlive it. `patience`: for each answer of the store.
    TenantKeys(Loop& loop, Batcher& batcher, Vault* vault, std::chrono::milliseconds patience,
               std::atomic<std::uint64_t>& store_errors, Background background);

    [[nodiscard]] Vault* vault() const { return vault_; }
    /// Whether what is kept for this tenant is sealed.
    [[nodiscard]] bool sealed(const core::TenantTag& tenant) const { return vault_ != nullptr && tenant != core::TenantTag{}; }
    /// Looks at the mark of erasures in the background, where it is time to.
    void look_in_time();
    /// The tenant's key if it may be used as it is, else null.
    [[nodiscard]] DataKeyPtr ready(const core::TenantTag& tenant);
    /// The tenant's present key, from the store where it must be. Error: the store did not give it, or did not say whether the
    /// tenant was erased.
    Task<Result<DataKeyPtr>> ask(core::TenantTag tenant);
    /// Reads a known key again, so that one that the store has lost, in a failover, is there again and the same for all.
    Task<> read_again(core::TenantTag tenant);

  private:
    Task<Result<void>> look();
    Task<> look_unasked();
    base::Error unavailable(const std::string& what, const base::Error& cause);

    Loop& loop_;
    Batcher& batcher_;
    Vault* vault_;
    std::chrono::milliseconds patience_;
    std::atomic<std::uint64_t>& store_errors_;
    Background background_;
};

}  // namespace semel::engine
