// The idempotency key of an intent: who, what and which, encoded so that no two keys share bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/hash.hpp"

namespace semel::core {

/// Each part is at most this many bytes; a longer one is refused before any store is asked.
inline constexpr std::size_t key_part_max_bytes = 255;

/// The full name of an intent. Parts are compared as bytes: no folding, trimming or truncation.
struct IntentKey {
    std::string_view tenant;     ///< From the credential, never from a header the client chooses.
    std::string_view operation;  ///< `chat`, a consumer's scope, or the normalized route.
    std::string_view user;       ///< Only on /api/chat; else empty.
    std::string_view session;    ///< Only on /api/chat; else empty.
    std::string_view id;         ///< The id that the client made.
};

/// Injective encoding: every part preceded by its length in one byte. Empty optional if a part is too long.
std::optional<std::string> encode(const IntentKey& key);

/// What stores index by and what `Semel-Intent` shows: HMAC of the encoding under the deployment's secret, so that
/// neither ids nor users can be read from a data directory or guessed into one.
using StoredKey = base::Digest;

/// The first bits of a stored key are its bucket. Keys that one step may touch together (the intents of a session, its turn and
/// its conversation) are in one bucket, so that a store spread over several servers keeps them on one of them.
inline constexpr std::uint16_t key_buckets = 1024;
std::uint16_t bucket_of(const StoredKey& key);
/// Moves `key` into the bucket of `other`. 246 bits still tell keys apart.
void join_bucket(StoredKey& key, const StoredKey& other);

}  // namespace semel::core
