// Ends of messages that lie in the family `ends` and not in the index yet: found here until many of
// them go there together, in the order of their keys. One thread, no RocksDB.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/assert.hpp"
#include "core/key.hpp"
#include "stores/rocksdb/layout.hpp"

namespace semel::stores {

/// Two lots: one that grows, and one that is on its way to the index.
class Ends {
  public:
    /// With so many the growing lot is to go on its way.
    static constexpr std::size_t lot_max = 64 * 1024;
    static constexpr std::size_t lot_max_bytes = 16U << 20;

    /// An end, as sorted() takes it.
    struct Place {
        std::uint64_t head = 0;  ///< Of the key, so that few comparisons look at the rest.
        const char* at = nullptr;
    };

    /// No entry of `ends` is needed.
    [[nodiscard]] bool empty() const { return growing_.entries.empty() && moving_.entries.empty(); }
    [[nodiscard]] bool full() const {
        return growing_.table.size() >= lot_max || growing_.bytes >= lot_max_bytes;
    }

    /// What the index is to hold under `key`; nullopt: nothing of it is here. Good until the lot
    /// has moved.
    [[nodiscard]] std::optional<std::string_view> find(const core::StoredKey& key) const {
        const char* at = growing_.table.find(key);
        if (at == nullptr) at = moving_.table.find(key);
        if (at == nullptr) return std::nullopt;
        return end_at(at).value;
    }

    /// An entry that was written. The bytes stay where the answer points.
    const char* add_entry(std::uint64_t number, std::string bytes) {
        growing_.numbers.push_back(number);
        growing_.bytes += bytes.size();
        growing_.entries.push_back(std::move(bytes));
        return growing_.entries.back().data();
    }
    /// An end that begins at `at` within it; in place of an older one.
    void add(const char* at) { growing_.table.put(at); }

    /// The index holds, or will hold, something newer.
    void erase(const core::StoredKey& key) {
        if (growing_.table.erase(key)) growing_.superseded = true;
        if (moving_.table.erase(key)) moving_.superseded = true;
    }
    /// Entries hold ends that are superseded.
    [[nodiscard]] bool superseded() const { return growing_.superseded || moving_.superseded; }

    // ---- on the way to the index

    /// The growing lot sets out. None may be on its way.
    void set_out() {
        SEMEL_ASSERT(!moving(), "one lot is on its way at a time");
        moving_ = std::exchange(growing_, {});
    }
    [[nodiscard]] bool moving() const { return !moving_.entries.empty(); }
    /// Something of it was superseded on the way: as a whole it must not go over what is newer.
    [[nodiscard]] bool moving_superseded() const { return moving_.superseded; }
    [[nodiscard]] std::size_t moving_bytes() const { return moving_.bytes; }
    /// They point into the lot, which stays until moved().
    [[nodiscard]] std::vector<Place> moving_places() const { return moving_.table.all(); }
    /// By key. Any thread.
    static std::vector<layout::IndexEntry> sorted(std::vector<Place> places) {
        std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
            return a.head != b.head ? a.head < b.head : std::memcmp(a.at, b.at, key_bytes) < 0;
        });
        std::vector<layout::IndexEntry> out;
        out.reserve(places.size());
        for (const Place& one : places) out.push_back(end_at(one.at));
        return out;
    }
    /// The index holds the lot; its entries may go.
    void moved() {
        over_.insert(over_.end(), moving_.numbers.begin(), moving_.numbers.end());
        moving_ = {};
    }

    /// Of both lots, by key, those behind `cursor`.
    [[nodiscard]] std::vector<layout::IndexEntry> behind(std::string_view cursor) const {
        std::vector<Place> places = growing_.table.all();
        const std::vector<Place> more = moving_.table.all();
        places.insert(places.end(), more.begin(), more.end());
        std::erase_if(places, [&](const Place& one) { return end_at(one.at).key <= cursor; });
        return sorted(std::move(places));
    }

    /// Entries whose ends are all in the index, to be removed with the next write.
    [[nodiscard]] const std::vector<std::uint64_t>& over() const { return over_; }
    void over_removed() { over_.clear(); }

    void clear() {
        growing_ = {};
        moving_ = {};
        over_.clear();
    }

  private:
    static constexpr std::size_t key_bytes = sizeof(core::StoredKey::bytes);

    static std::uint64_t head_of(const char* key) {
        return layout::get_u64(std::string_view(key, sizeof(std::uint64_t)));
    }
    static layout::IndexEntry end_at(const char* at) {
        const std::size_t size = layout::claim_size(at);
        return {{at, key_bytes}, {at + layout::claim_head_bytes, size}};
    }
    /// By key, which lies at the place. Stored keys are keyed hashes: nobody chooses where they
    /// fall.
    class Table {
      public:
        [[nodiscard]] std::size_t size() const { return size_; }
        [[nodiscard]] bool empty() const { return size_ == 0; }
        [[nodiscard]] const char* find(const core::StoredKey& key) const {
            if (size_ == 0) return nullptr;
            const char* bytes = key.view().data();
            const std::uint64_t head = head_of(bytes);
            for (std::size_t i = home(head); places_[i].at != nullptr; i = next(i)) {
                if (is(places_[i], head, bytes)) return places_[i].at;
            }
            return nullptr;
        }
        void put(const char* at) {
            if ((size_ + 1) * 4 > places_.size() * 3) grow();
            const std::uint64_t head = head_of(at);
            std::size_t i = home(head);
            while (places_[i].at != nullptr && !is(places_[i], head, at)) i = next(i);
            if (places_[i].at == nullptr) ++size_;
            places_[i] = {head, at};
        }
        /// Whether it was there.
        bool erase(const core::StoredKey& key) {
            if (size_ == 0) return false;
            const char* bytes = key.view().data();
            const std::uint64_t head = head_of(bytes);
            std::size_t gap = home(head);
            while (places_[gap].at != nullptr && !is(places_[gap], head, bytes)) gap = next(gap);
            if (places_[gap].at == nullptr) return false;
            // Whoever stands behind the gap and would rather stand in it moves there.
            const std::size_t mask = places_.size() - 1;
            for (std::size_t i = next(gap); places_[i].at != nullptr; i = next(i)) {
                if (((i - home(places_[i].head)) & mask) < ((i - gap) & mask)) continue;
                places_[gap] = places_[i];
                gap = i;
            }
            places_[gap] = {};
            --size_;
            return true;
        }
        [[nodiscard]] std::vector<Place> all() const {
            std::vector<Place> out;
            out.reserve(size_);
            std::copy_if(places_.begin(), places_.end(), std::back_inserter(out),
                         [](const Place& one) { return one.at != nullptr; });
            return out;
        }

      private:
        static constexpr std::size_t places_min = 1024;

        static bool is(const Place& place, std::uint64_t head, const char* key) {
            return place.head == head && std::memcmp(place.at, key, key_bytes) == 0;
        }
        [[nodiscard]] std::size_t home(std::uint64_t head) const {
            return head & (places_.size() - 1);
        }
        [[nodiscard]] std::size_t next(std::size_t i) const {
            return (i + 1) & (places_.size() - 1);
        }
        void grow() {
            std::vector<Place> old(std::max(places_min, places_.size() * 2));
            old.swap(places_);
            for (const Place& one : old) {
                if (one.at == nullptr) continue;
                std::size_t i = home(one.head);
                while (places_[i].at != nullptr) i = next(i);
                places_[i] = one;
            }
        }

        std::vector<Place> places_;  ///< A power of two, at most three quarters used.
        std::size_t size_ = 0;
    };

    struct Lot {
        std::vector<std::uint64_t> numbers;  ///< Of its entries.
        std::deque<std::string> entries;     ///< Never moved: the table points into them.
        std::size_t bytes = 0;
        bool superseded = false;  ///< One of its ends is not in the table any more.
        Table table;
    };

    Lot growing_;
    Lot moving_;
    std::vector<std::uint64_t> over_;
};

}  // namespace semel::stores
