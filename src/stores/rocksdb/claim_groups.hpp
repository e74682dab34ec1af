// Which claims lie together in one entry of the family `claims`, and how many of them are still
// open. One thread, no RocksDB.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "base/assert.hpp"
#include "core/key.hpp"

namespace semel::stores {

/// A group's number names its entry; it is never used twice. An entry goes when its last claim was
/// decided or written elsewhere.
class ClaimGroups {
  public:
    struct Group {
        std::vector<core::StoredKey> keys;
        std::size_t bytes = 0;  ///< Of the entry.
        std::size_t open = 0;   ///< Claims for which the entry is the truth.
    };

    [[nodiscard]] bool empty() const { return groups_.empty(); }
    [[nodiscard]] std::size_t bytes() const { return bytes_; }
    [[nodiscard]] std::size_t count() const { return groups_.size(); }

    /// An entry that was written.
    void add(std::uint64_t number, Group group) {
        bytes_ += group.bytes;
        if (group.open == 0) return drop(number, group);
        groups_.emplace(number, std::move(group));
    }

    /// A claim of `number` is recorded elsewhere now.
    void closed(std::uint64_t number) {
        const auto it = groups_.find(number);
        SEMEL_ASSERT(it != groups_.end() && it->second.open > 0,
                     "a group lives as long as one of its claims is open");
        if (--it->second.open > 0) return;
        drop(number, it->second);
        groups_.erase(it);
    }

    /// Its claims lie elsewhere now, and its entry was removed by who calls.
    void removed(std::uint64_t number) {
        const auto it = groups_.find(number);
        if (it == groups_.end()) return;
        bytes_ -= it->second.bytes;
        groups_.erase(it);
    }

    /// Groups by number, the oldest first.
    [[nodiscard]] const std::map<std::uint64_t, Group>& all() const { return groups_; }

    /// Entries without an open claim, to be removed with the next write.
    [[nodiscard]] const std::vector<std::uint64_t>& over() const { return over_; }
    void over_removed() { over_.clear(); }

    void clear() {
        groups_.clear();
        over_.clear();
        bytes_ = 0;
    }

  private:
    void drop(std::uint64_t number, const Group& group) {
        bytes_ -= group.bytes;
        over_.push_back(number);
    }

    std::map<std::uint64_t, Group> groups_;
    std::vector<std::uint64_t> over_;
    std::size_t bytes_ = 0;
};

}  // namespace semel::stores
