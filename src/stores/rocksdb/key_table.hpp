// A hash table by stored key for the writer: one block of memory, no allocation per entry. One
// thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/key.hpp"

namespace semel::stores {

/// Pointers to values are good until the next insert or erase. Stored keys are keyed hashes: nobody
/// chooses where they fall.
template <class Value>
class KeyTable {
  public:
    [[nodiscard]] std::size_t size() const { return size_; }
    [[nodiscard]] bool empty() const { return size_ == 0; }

    /// Null if absent.
    [[nodiscard]] Value* find(const core::StoredKey& key) {
        if (size_ == 0) return nullptr;
        for (std::size_t at = home(key); slots_[at].used; at = next(at)) {
            if (slots_[at].key == key) return &slots_[at].value;
        }
        return nullptr;
    }
    [[nodiscard]] bool contains(const core::StoredKey& key) { return find(key) != nullptr; }

    /// The value under `key`, made if it was absent.
    Value& operator[](const core::StoredKey& key) {
        if ((size_ + 1) * 4 > slots_.size() * 3)
            move_to(slots_.empty() ? slots_min : slots_.size() * 2);
        std::size_t at = home(key);
        for (; slots_[at].used; at = next(at)) {
            if (slots_[at].key == key) return slots_[at].value;
        }
        slots_[at].used = true;
        slots_[at].key = key;
        ++size_;
        return slots_[at].value;
    }

    void erase(const core::StoredKey& key) {
        if (size_ == 0) return;
        std::size_t at = home(key);
        for (; slots_[at].used; at = next(at)) {
            if (slots_[at].key == key) return remove(at);
        }
    }

    void clear() {
        if (size_ == 0) return;
        for (Slot& slot : slots_) {
            if (slot.used) slot = {};
        }
        size_ = 0;
    }

    /// `visit(key, value)` for each, in no order. `visit` must not insert or erase.
    template <class Visit>
    void each(Visit visit) {
        if (size_ == 0) return;
        for (Slot& slot : slots_) {
            if (slot.used) visit(slot.key, slot.value);
        }
    }

  private:
    struct Slot {
        core::StoredKey key;
        Value value{};
        bool used = false;
    };
    static constexpr std::size_t slots_min = 64;
    static constexpr std::size_t slots_kept = 4096;

    [[nodiscard]] std::size_t home(const core::StoredKey& key) const {
        return base::DigestHash{}(key) & (slots_.size() - 1);
    }
    [[nodiscard]] std::size_t next(std::size_t at) const { return (at + 1) & (slots_.size() - 1); }

    /// Closes the gap: whoever stands behind it and would rather stand in it moves there.
    void remove(std::size_t gap) {
        for (std::size_t at = next(gap); slots_[at].used; at = next(at)) {
            const std::size_t mask = slots_.size() - 1;
            if (((at - home(slots_[at].key)) & mask) < ((at - gap) & mask)) continue;
            slots_[gap] = std::move(slots_[at]);
            gap = at;
        }
        slots_[gap] = {};
        --size_;
        // each() and clear() go over all slots, also when most are left over from a better time.
        if (slots_.size() > slots_kept && size_ * 16 < slots_.size()) move_to(slots_.size() / 4);
    }

    void move_to(std::size_t slots) {
        std::vector<Slot> old(slots);
        old.swap(slots_);
        for (Slot& slot : old) {
            if (!slot.used) continue;
            std::size_t at = home(slot.key);
            while (slots_[at].used) at = next(at);
            slots_[at] = std::move(slot);
        }
    }

    std::vector<Slot> slots_;  ///< A power of two, at most three quarters used.
    std::size_t size_ = 0;
};

}  // namespace semel::stores
