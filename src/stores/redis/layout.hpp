// Where things lie in Redis, and the bytes of a record: docs/internals/redis-layout.md.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.hpp"
#include "core/store.hpp"

namespace semel::stores::redis {

/// Names of keys under one prefix. All names that belong to a stored key have its bucket as hash
/// tag, so they share a server. Thread-safe.
class Names {
  public:
    explicit Names(std::string prefix);

    [[nodiscard]] std::string record(const core::StoredKey& key) const;
    [[nodiscard]] std::string conversation(const core::StoredKey& key) const;
    [[nodiscard]] std::string chunk(const core::StoredKey& key, core::FencingToken token,
                                    std::uint32_t n) const;
    /// The set of a bucket's undecided records, by the end of their lease.
    [[nodiscard]] std::string undecided(std::uint16_t bucket) const;
    /// A list of parked messages: its fence and their bytes; their places in order.
    [[nodiscard]] std::string parking(const core::StoredKey& list) const;
    [[nodiscard]] std::string places(const core::StoredKey& list) const;
    /// A deployment-wide value.
    [[nodiscard]] std::string value(std::string_view name) const;
    /// A pattern for SCAN: every key of this deployment that a listing or a purge looks at.
    [[nodiscard]] std::string pattern() const;
    [[nodiscard]] std::uint16_t slot(std::uint16_t bucket) const { return slots_[bucket]; }
    [[nodiscard]] std::uint16_t value_slot() const { return value_slot_; }

    /// What a name found by SCAN is.
    struct Parsed {
        enum class Kind : std::uint8_t { other, record, conversation, chunk };
        Kind kind = Kind::other;
        core::StoredKey key;
        core::FencingToken token;  ///< Of a chunk.
    };
    [[nodiscard]] Parsed parse(std::string_view name) const;

  private:
    [[nodiscard]] std::string begin(std::uint16_t bucket, char kind) const;

    const std::string prefix_;
    std::array<std::uint16_t, core::key_buckets> slots_{};
    std::uint16_t value_slot_ = 0;
};

inline constexpr std::uint8_t layout_version = 1;
/// A record begins with its token, the end of its lease and its creation: what a first grant
/// decides.
inline constexpr std::size_t record_times_bytes = 24;

/// Appends the record's bytes, body included.
void encode(const core::Record& record, std::string& out);
/// Error store_corrupt or store_version. `answer_elsewhere` is set if the bytes say that the answer
/// was left out because the reader has it.
base::Result<core::Record> decode(std::string_view bytes, bool* answer_elsewhere = nullptr);

/// A turn of a conversation, without its number, time and mark, which the script sets.
std::string encode_turn(const core::Append& turn);
/// The inverse, of what a script stored.
base::Result<core::Turn> decode_turn(std::string_view bytes);

/// A parked message's place as the field or member that has it: big-endian, so that bytes sort like
/// numbers.
std::string place_name(std::uint64_t place);
/// The inverse. Error store_corrupt.
base::Result<std::uint64_t> place_in(std::string_view name);

/// Little-endian numbers, as the scripts' struct.pack writes them.
void put8(std::string& out, std::uint8_t value);
void put32(std::string& out, std::uint32_t value);
void put64(std::string& out, std::uint64_t value);

/// Reads them. After the end every read gives zero and ok() is false.
class Cursor {
  public:
    explicit Cursor(std::string_view bytes) : bytes_(bytes) {}
    std::uint8_t u8();
    std::uint32_t u32();
    std::uint64_t u64();
    std::string_view take(std::size_t size);
    std::string_view rest();
    [[nodiscard]] bool ok() const { return ok_; }
    [[nodiscard]] bool at_end() const { return at_ == bytes_.size(); }

  private:
    std::string_view bytes_;
    std::size_t at_ = 0;
    bool ok_ = true;
};

}  // namespace semel::stores::redis
