// Digest of a request: guards against one id used for two requests, and can name what differs without keeping it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/hash.hpp"

namespace semel::core {

/// The first bytes of two HMACs: of a top-level member's name and of its canonical value. Enough to say that a field
/// differs, not enough to find out its value.
struct FieldMark {
    std::uint64_t name = 0;
    std::uint64_t value = 0;
    friend bool operator==(const FieldMark&, const FieldMark&) = default;
};

/// Top-level members beyond this many are covered by the digests but not named one by one.
inline constexpr std::size_t fingerprint_fields_max = 64;

struct Fingerprint {
    base::Digest raw;        ///< Over the bytes as they came (and method, path, query, kept headers).
    base::Digest canonical;  ///< Over the canonical form; empty (all zero) if the body has none: then raw alone decides.
    std::vector<FieldMark> fields;  ///< Sorted by name mark; at most fingerprint_fields_max.

    /// Same request: equal raw digests, or both canonical and equal.
    [[nodiscard]] bool matches(const Fingerprint& other) const {
        return raw == other.raw || (!canonical.empty() && canonical == other.canonical);
    }
};

/// The name marks whose values differ between the two, or that only one has; sorted. Empty although the fingerprints do
/// not match: the difference lies outside the top-level members (a header, the query, a body that is not JSON).
std::vector<std::uint64_t> differing_fields(const Fingerprint& a, const Fingerprint& b);

}  // namespace semel::core
