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

}  // namespace semel::core
