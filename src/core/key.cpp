#include "core/key.hpp"

namespace semel::core {

std::optional<std::string> encode(const IntentKey& key) {
    std::string out;
    const std::string_view parts[] = {key.tenant, key.operation, key.user, key.session, key.id};
    std::size_t total = std::size(parts);
    for (const std::string_view part : parts) total += part.size();
    out.reserve(total);
    for (const std::string_view part : parts) {
        if (part.size() > key_part_max_bytes) return std::nullopt;
        out += static_cast<char>(static_cast<unsigned char>(part.size()));
        out += part;
    }
    return out;
}

namespace {
constexpr unsigned bucket_low_bits = 2;  // of the second byte
}

std::uint16_t bucket_of(const StoredKey& key) {
    return static_cast<std::uint16_t>(key.bytes[0] << bucket_low_bits |
                                      key.bytes[1] >> (8 - bucket_low_bits));
}

void join_bucket(StoredKey& key, const StoredKey& other) {
    constexpr std::uint8_t kept = 0xff >> bucket_low_bits;
    key.bytes[0] = other.bytes[0];
    key.bytes[1] = static_cast<std::uint8_t>((other.bytes[1] & ~kept) | (key.bytes[1] & kept));
}

}  // namespace semel::core
