// Vault: the data keys of the tenants that this process serves, read from the store where they lie wrapped, and how long it may
// go on with them without having asked whether one was erased.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/result.hpp"
#include "base/time.hpp"
#include "engine/hot_records.hpp"
#include "engine/sealing.hpp"

namespace semel::engine {

/// One per process; thread-safe. It does no I/O: who has a store at hand asks it what `*_wanted` says and hands over the answer.
///
/// A tenant is erased by putting a fresh key in the place of its old one, and then a fresh mark in the place of the
/// deployment's mark of erasures. All processes look at that one mark; when it changes they forget every key and every opened
/// record, and read anew what they need.
class Vault {
  public:
    /// A mark looked at longer ago than this is looked at again, while its keys stay in use.
    static constexpr std::chrono::milliseconds look_after{2000};
    /// Later than this nothing is sealed, and nothing is opened, before it was looked at again: an erasure in another process is
    /// noticed within this time.
    static constexpr std::chrono::milliseconds usable_for{5000};
    /// A key read longer ago than this is read again in the background, and put back if the store has lost it (a failover).
    static constexpr std::chrono::seconds read_again_after{30};
    /// Between two looks in the background.
    static constexpr std::chrono::milliseconds look_again_after{500};

    /// `secret`: the deployment's. `hot`: emptied when an erasure is noticed; may be null, else it outlives the vault.
    Vault(std::string_view secret, HotRecords* hot);
    ~Vault();
    Vault(const Vault&) = delete;
    Vault& operator=(const Vault&) = delete;

    /// The tenant's key, if it is known; null: it must be read. Says nothing about its age: see `fresh`.
    [[nodiscard]] DataKeyPtr find(const core::TenantTag& tenant) const;
    /// Whether the tenant's key is known and is this one.
    [[nodiscard]] bool is_current(const core::TenantTag& tenant, std::uint64_t key_id) const;

    /// Reads a tenant's key; where the store has none it gets the one known here, else a first one.
    struct KeyWanted {
        core::ClaimValue operation;
        std::uint64_t generation = 0;
    };
    [[nodiscard]] KeyWanted key_wanted(const core::TenantTag& tenant) const;
    /// The store's answer to it, asked at `asked_at`. Null: an erasure was noticed meanwhile, ask again. Error store_corrupt: it
    /// was not wrapped under this deployment's secret.
    base::Result<DataKeyPtr> take_key(const core::TenantTag& tenant, const std::string& wrapped, std::uint64_t generation,
                                      base::SteadyTime asked_at);
    /// True for one caller, where it is time to read the known key of the tenant again.
    [[nodiscard]] bool begin_reading_again(const core::TenantTag& tenant, base::SteadyTime now);

    /// The mark was looked at a short time ago: keys may be used.
    [[nodiscard]] bool fresh(base::SteadyTime now) const;
    /// What was opened may be given out from memory: fresh, or the store did not answer when it was last asked.
    [[nodiscard]] bool may_replay(base::SteadyTime now) const;
    /// True for one caller at a time, where it is time to look again.
    [[nodiscard]] bool begin_look(base::SteadyTime now);
    [[nodiscard]] static core::ClaimValue mark_wanted();
    /// The store's answer to it. `asked_at`: before it was asked.
    void take_mark(const std::string& mark, base::SteadyTime asked_at);
    void no_mark();

    /// Erasing, in this order, each answered before the next: the tenant's fresh key, then the fresh mark. Take it here, too.
    [[nodiscard]] core::ReplaceValue fresh_key(const core::TenantTag& tenant) const;
    [[nodiscard]] static core::ReplaceValue fresh_mark();

    /// What the store knows a turn's client id as: a keyed hash.
    [[nodiscard]] std::string stored_id(const core::StoredKey& conversation, std::string_view request_id) const;

  private:
    static constexpr std::size_t shard_count = 16;
    /// Keys kept per shard; beyond, the shard begins anew.
    static constexpr std::size_t shard_keys_max = 1024;
    struct TagHash {
        std::size_t operator()(const core::TenantTag& tag) const noexcept;
    };
    struct Known {
        DataKeyPtr key;
        std::string wrapped;
        std::int64_t read_at_ns = 0;
    };
    struct Shard {
        mutable std::mutex mutex;
        std::unordered_map<core::TenantTag, Known, TagHash> keys;
    };
    [[nodiscard]] Shard& shard_of(const core::TenantTag& tenant) const;
    [[nodiscard]] std::string wrapped(const core::TenantTag& tenant, std::uint64_t id, std::string_view secret) const;
    [[nodiscard]] std::string fresh_wrapped(const core::TenantTag& tenant) const;

    base::Hmac ids_;
    std::unique_ptr<const base::AesKey> wrapping_;
    HotRecords* hot_;
    std::unique_ptr<Shard[]> shards_;
    std::atomic<std::uint64_t> generation_{0};     ///< Grows with each erasure noticed.
    std::atomic<std::int64_t> looked_at_ns_;       ///< When the mark was last asked for that came.
    std::atomic<std::int64_t> look_begun_ns_;
    std::atomic<bool> unanswered_{false};          ///< The last look got no answer.
    std::mutex mark_mutex_;
    std::string mark_;  // guarded by mark_mutex_
};

}  // namespace semel::engine
