// KnownCompleted: the keys that this process has seen COMPLETED, as well as a fixed table can remember them.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/key.hpp"

namespace semel::core {

/// An acquire of such a key begins with a plain read, which writes nothing and also works when the store is full. A wrong guess
/// costs a round trip, never an answer. Thread-safe.
class KnownCompleted {
  public:
    void remember(const StoredKey& key) {
        Row& row = row_of(key);
        // Where it is or nothing is; in a full row any may go, and these bytes are as good as
        // random.
        std::atomic<std::uint64_t>* place = &row[part(key, 24) % row.size()];
        for (auto& one : row) {
            const std::uint64_t seen = one.load(std::memory_order_relaxed);
            if (seen == mark(key)) return;
            if (seen == 0) place = &one;
        }
        place->store(mark(key), std::memory_order_relaxed);
    }
    [[nodiscard]] bool holds(const StoredKey& key) {
        for (const auto& one : row_of(key)) {
            if (one.load(std::memory_order_relaxed) == mark(key)) return true;
        }
        return false;
    }
    void forget(const StoredKey& key) {
        for (auto& one : row_of(key)) {
            std::uint64_t seen = mark(key);
            one.compare_exchange_strong(seen, 0, std::memory_order_relaxed);
        }
    }

  private:
    /// One cache line. Keys that fall together have room beside each other.
    using Row = std::array<std::atomic<std::uint64_t>, 8>;
    static constexpr std::size_t rows = 1U << 14;
    static std::uint64_t part(const StoredKey& key, std::size_t from) {
        std::uint64_t value = 0;
        std::memcpy(&value, key.bytes.data() + from, sizeof value);
        return value;
    }
    static std::uint64_t mark(const StoredKey& key) { return part(key, 8); }
    Row& row_of(const StoredKey& key) { return rows_[part(key, 16) % rows]; }

    std::vector<Row> rows_ = std::vector<Row>(rows);
};

}  // namespace semel::core
