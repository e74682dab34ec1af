// Completed records in memory, so that a replay asks no store. Bounded by bytes, least recently used out first.
#pragma once

#include <cstddef>
#include <memory>

#include "core/record.hpp"

namespace semel::engine {

/// Thread-safe: striped by key, so that cores do not wait for one lock.
class HotRecords {
  public:
    /// `max_bytes`: of bodies and bookkeeping together; 0 keeps nothing.
    explicit HotRecords(std::size_t max_bytes);
    ~HotRecords();
    HotRecords(const HotRecords&) = delete;
    HotRecords& operator=(const HotRecords&) = delete;

    /// Keeps a COMPLETED record with an inline body (others are ignored; a body above an eighth of a stripe, too).
    void put(const core::StoredKey& key, core::RecordPtr record);
    /// Null if absent or expired at `now`.
    [[nodiscard]] core::RecordPtr find(const core::StoredKey& key, core::StoreTime now);
    void erase(const core::StoredKey& key);
    void clear();
    [[nodiscard]] std::size_t bytes() const;

  private:
    struct Stripe;
    static constexpr std::size_t stripe_count = 64;
    std::unique_ptr<Stripe[]> stripes_;
    std::size_t stripe_max_bytes_;
};

}  // namespace semel::engine
