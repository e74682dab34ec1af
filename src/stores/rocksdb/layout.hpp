// The bytes of the embedded store: column families, keys and small values (docs/internals/rocksdb-layout.md). No RocksDB here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/store.hpp"

namespace semel::stores::layout {

inline constexpr const char* index_family = "index";
inline constexpr const char* answers_family = "answers";
inline constexpr const char* claims_family = "claims";
inline constexpr const char* ends_family = "ends";
inline constexpr const char* expiries_family = "expiries";
inline constexpr const char* chunks_family = "chunks";
inline constexpr const char* conversations_family = "conversations";
inline constexpr const char* meta_family = "default";

/// Beside RocksDB's files, so that a directory of a newer version is recognised before anything in it is touched.
inline constexpr const char* version_file = "SEMEL_LAYOUT";
inline constexpr const char* new_version_file = "SEMEL_LAYOUT.new";  ///< While it is written.
/// Ends of messages in the order of their keys, before RocksDB takes the file over.
inline constexpr const char* sorted_file = "SEMEL_ENDS.sst";

// ---- index: StoredKey -> the record itself while it is undecided, else where it lies.

/// Where a decided record lies in `answers`: by expiry, then by a number that is never used twice. New entries go to the end
/// (no compaction of old answers), and purging reads from the front.
struct AnswerKey {
    base::StoreTime expires;
    std::uint64_t number = 0;
    friend bool operator==(const AnswerKey&, const AnswerKey&) = default;
};
inline constexpr std::size_t answer_key_bytes = 16;

std::string encode(const AnswerKey& key);
std::optional<AnswerKey> decode_answer_key(std::string_view bytes);

/// First byte of a value in `index`.
inline constexpr char index_holds_record = 'U';
inline constexpr char index_holds_decided = 'R';  ///< The record of a decided message follows; `expiries` says when it goes.
inline constexpr char index_points = 'D';
struct IndexEntry {
    std::string_view key, value;
};
// A value in `answers`: the StoredKey, then the record's encoding with its body.

// ---- expiries: AnswerKey -> StoredKeys one behind the other, of decided records that the index holds.

// ---- claims: number -> claims of one group of the writer, one behind the other. Each names its key, and stands for as long as
// the index holds nothing of its key with the same or a higher token.
std::string claims_key(std::uint64_t number);
/// Adds a claim: the key, and the record's encoding.
void put_claim(std::string& into, const core::StoredKey& key, std::string_view record);
struct Claim {
    core::StoredKey key;
    std::string_view record;
};
inline constexpr std::size_t claim_head_bytes = sizeof(core::StoredKey::bytes) + 4;
/// Of the record of a claim that begins at `claim`.
std::size_t claim_size(const char* claim);
/// Takes the first claim from `bytes`; empty if they are damaged.
std::optional<Claim> take_claim(std::string_view& bytes);

// ---- ends: number -> ends of messages of one group of the writer, in the form of claims; in place of the record what the index
// is to hold. Each stands for as long as the index holds nothing of its key that is newer.

// ---- chunks: StoredKey, token, n -> bytes
/// The `n` under which a purged record leaves word how long its chunks stay: a slow reader may still be fetching them.
inline constexpr std::uint32_t chunk_keep_until = 0xFFFFFFFFU;
std::string chunk_key(const core::StoredKey& key, core::FencingToken token, std::uint32_t n);
/// The prefix of all chunks of one token.
std::string chunk_prefix(const core::StoredKey& key, core::FencingToken token);
struct ChunkName {
    core::StoredKey key;
    core::FencingToken token;
    std::uint32_t n = 0;
};
/// Empty if the bytes are no chunk's key.
std::optional<ChunkName> decode_chunk_key(std::string_view bytes);

// ---- conversations: 'h' key -> head; 't' key number -> turn; 'i' key request id -> empty
std::string head_key(const core::StoredKey& conversation);
std::string turn_key(const core::StoredKey& conversation, std::uint64_t number);
std::string turn_prefix(const core::StoredKey& conversation);
inline constexpr char head_prefix = 'h';
std::string id_key(const core::StoredKey& conversation, std::string_view request_id);
std::string id_prefix(const core::StoredKey& conversation);

// ---- parked messages, in the family of conversations: 'f' key -> the list's fence; 'm' key place -> message
std::string fence_key(const core::StoredKey& list);
std::string parked_prefix(const core::StoredKey& list);
std::string parked_key(const core::StoredKey& list, std::uint64_t place);

std::string encode(const core::Conversation& head);
std::optional<core::Conversation> decode_conversation(std::string_view bytes);
std::string encode(const core::Turn& turn);
/// The number comes from the key.
std::optional<core::Turn> decode_turn(std::uint64_t number, std::string_view bytes);

// ---- meta
inline constexpr std::string_view clock_key = "clock";    ///< Store time that no grant was given beyond.
inline constexpr std::string_view closed_key = "closed";  ///< Present: stopped cleanly, nothing written since.
inline constexpr std::string_view boot_key = "boot";      ///< Of the machine's run in which the store was opened.
std::string value_key(std::string_view name);

// ---- numbers, big-endian so that bytes sort like numbers
void put_u64(std::string& out, std::uint64_t value);
std::uint64_t get_u64(std::string_view eight_bytes);

/// A stored key from 32 bytes; empty for any other length.
std::optional<core::StoredKey> stored_key(std::string_view bytes);

}  // namespace semel::stores::layout
