// mode: observe: counts keys that come again, in bounded memory, and changes nothing.
#pragma once

#include <cstddef>
#include <deque>
#include <mutex>
#include <unordered_set>

#include "core/key.hpp"

namespace semel::gateway {

/// The latest keys that were seen. Older ones are forgotten, so the count is a lower bound.
inline constexpr std::size_t observed_keys_max = 100'000;

/// Thread-safe.
class Observed {
  public:
    /// True if the key was seen before (a duplicate).
    bool seen_before(const core::StoredKey& key) {
        const std::lock_guard lock(mutex_);
        if (!keys_.insert(key).second) return true;
        order_.push_back(key);
        if (order_.size() > observed_keys_max) {
            keys_.erase(order_.front());
            order_.pop_front();
        }
        return false;
    }

  private:
    std::mutex mutex_;
    std::unordered_set<core::StoredKey, base::DigestHash> keys_;  // guarded by mutex_
    std::deque<core::StoredKey> order_;                           // guarded by mutex_
};

}  // namespace semel::gateway
