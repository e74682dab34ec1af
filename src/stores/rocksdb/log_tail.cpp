#include "stores/rocksdb/log_tail.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

namespace semel::stores {
namespace {

// RocksDB's log: blocks of 32 KiB; in them records of checksum (4, masked CRC-32C of type and payload), length (2), type (1),
// payload. A write is one `full` record, or a `first` one followed by others.
constexpr std::size_t block_bytes = 32768;
constexpr std::size_t header_bytes = 7;
constexpr std::uint8_t type_full = 1, type_first = 2, type_last = 4;

constexpr std::array<std::uint32_t, 256> crc_table = [] {
    std::array<std::uint32_t, 256> table{};
    for (std::uint32_t i = 0; i < 256; ++i) {
        std::uint32_t crc = i;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1U) != 0 ? 0x82F63B78U : 0U);
        table[i] = crc;
    }
    return table;
}();

std::uint32_t masked_crc(std::string_view bytes) {
    std::uint32_t crc = 0xFFFFFFFFU;
    for (const char c : bytes) crc = (crc >> 8) ^ crc_table[(crc ^ static_cast<unsigned char>(c)) & 0xFFU];
    crc = ~crc;
    return ((crc >> 15) | (crc << 17)) + 0xA282EAD8U;
}

std::uint32_t byte(std::string_view log, std::size_t at) { return static_cast<unsigned char>(log[at]); }

struct Physical {
    std::uint8_t type;
    std::size_t bytes;  ///< With its header.
};

/// The readable record that begins at `at`; empty if there is none.
std::optional<Physical> record_at(std::string_view log, std::size_t at) {
    const std::size_t block_end = std::min(at - at % block_bytes + block_bytes, log.size());
    if (block_end - at < header_bytes) return std::nullopt;
    const std::uint32_t type = byte(log, at + 6);
    if (type < type_full || type > type_last) return std::nullopt;
    const std::size_t length = byte(log, at + 4) | (byte(log, at + 5) << 8);
    if (block_end - at - header_bytes < length) return std::nullopt;
    const std::uint32_t stored = byte(log, at) | (byte(log, at + 1) << 8) | (byte(log, at + 2) << 16) | (byte(log, at + 3) << 24);
    if (masked_crc(log.substr(at + 6, 1 + length)) != stored) return std::nullopt;
    return Physical{static_cast<std::uint8_t>(type), header_bytes + length};
}

}  // namespace

bool only_last_write_is_torn(std::string_view log) {
    std::size_t at = 0;
    while (at < log.size()) {
        const std::size_t left_in_block = block_bytes - at % block_bytes;
        if (left_in_block < header_bytes) {
            at += left_in_block;  // the writer fills what no header fits into
            continue;
        }
        const auto record = record_at(log, at);
        if (!record) break;
        at += record->bytes;
    }
    if (at >= log.size() || log.size() - at > torn_write_max_bytes) return false;
    // The unreadable record's length cannot be trusted: a later write may begin anywhere.
    for (++at; at < log.size(); ++at) {
        const auto record = record_at(log, at);
        if (record && (record->type == type_full || record->type == type_first)) return false;
    }
    return true;
}

}  // namespace semel::stores
