// SeenIds: which messages were seen lately, in memory, up to a fixed number of them.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/hash.hpp"
#include "core/fingerprint.hpp"

namespace semel::consumer {

/// Some 50 MiB, where all of them are in use.
inline constexpr std::size_t seen_ids_max = 500'000;

/// Where a message was seen first.
struct SeenAt {
    std::int32_t partition = 0;
    std::int64_t offset = 0;
    bool same = true;  ///< The fingerprints match.
};

/// When it is full, the id that has been known longest makes room. Of keys and fingerprints only
/// the first bytes are kept (16 and 8): two ids in 2^64 are taken for one. For one thread.
class SeenIds {
  public:
    explicit SeenIds(std::size_t most) : most_(most) {}

    /// Where it was seen before; nullopt: it was not, or is forgotten, and is remembered now.
    std::optional<SeenAt> see(const base::Digest& key, const core::Fingerprint& fingerprint,
                              std::int32_t partition, std::int64_t offset) {
        const Key short_key{front(key, 0), front(key, 8)};
        const auto found = seen_.find(short_key);
        if (found != seen_.end()) {
            const Entry& first = found->second;
            const bool same =
                first.raw == front(fingerprint.raw, 0) ||
                (first.canonical != 0 && first.canonical == front(fingerprint.canonical, 0));
            return SeenAt{.partition = first.partition, .offset = first.offset, .same = same};
        }
        if (order_.size() < most_) {
            order_.push_back(short_key);
        } else {
            seen_.erase(std::exchange(order_[oldest_], short_key));
            oldest_ = (oldest_ + 1) % most_;
            ++forgotten_;
        }
        seen_.emplace(short_key, Entry{.raw = front(fingerprint.raw, 0),
                                       .canonical = front(fingerprint.canonical, 0),
                                       .offset = offset,
                                       .partition = partition});
        return std::nullopt;
    }
    [[nodiscard]] std::size_t size() const { return seen_.size(); }
    [[nodiscard]] std::uint64_t forgotten() const { return forgotten_; }

  private:
    using Key = std::array<std::uint64_t, 2>;
    struct Hash {
        std::size_t operator()(const Key& key) const { return key[0]; }  // of a hash already
    };
    struct Entry {
        std::uint64_t raw = 0, canonical = 0;  ///< canonical 0: it has none.
        std::int64_t offset = 0;
        std::int32_t partition = 0;
    };
    static std::uint64_t front(const base::Digest& digest, std::size_t at) {
        std::uint64_t out = 0;
        std::memcpy(&out, digest.bytes.data() + at, sizeof out);
        return out;
    }

    const std::size_t most_;
    std::unordered_map<Key, Entry, Hash> seen_;
    std::vector<Key> order_;  ///< A ring, once it is full; `oldest_` goes next.
    std::size_t oldest_ = 0;
    std::uint64_t forgotten_ = 0;
};

}  // namespace semel::consumer
