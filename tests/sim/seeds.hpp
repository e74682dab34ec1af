// Which seeds a simulation runs: SEMEL_SEED=n replays one, SEMEL_SEEDS=n sets how many each range
// has.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <optional>

namespace semel::sim {

struct Seeds {
    std::uint64_t first = 0;
    std::uint64_t last = 0;
    bool replay = false;  ///< One seed, to be traced.
};

inline std::optional<std::uint64_t> number_from(const char* variable) {
    const char* text = std::getenv(variable);
    if (text == nullptr) return std::nullopt;
    return std::strtoull(text, nullptr, 10);
}

/// The seeds of the range with this number.
inline Seeds seeds_of(std::uint64_t range, std::uint64_t per_range_default) {
    if (const auto one = number_from("SEMEL_SEED")) return {*one, *one, true};
    const std::uint64_t per_range = number_from("SEMEL_SEEDS").value_or(per_range_default);
    return {range * per_range, (range + 1) * per_range - 1, false};
}

}  // namespace semel::sim
