// Which operations on a list of parked messages may go at the same time: what batches go by.
#pragma once

#include <cstring>

#include "core/store.hpp"

namespace semel::core {

enum class ParkingPart : std::uint8_t {
    none,   ///< It is about something else.
    place,  ///< One place of the list: what is about another one may go before or after it.
    whole,  ///< All of the list.
};

inline ParkingPart parking_part(const StoreOperation& operation) {
    if (std::holds_alternative<Park>(operation) || std::holds_alternative<Unpark>(operation))
        return ParkingPart::place;
    if (std::holds_alternative<OpenParking>(operation) ||
        std::holds_alternative<GetParked>(operation))
        return ParkingPart::whole;
    return ParkingPart::none;
}

/// Stands for what an operation touches: a place of a list, else its key.
inline StoredKey touched_by(const StoredKey& key, const StoreOperation& operation) {
    std::uint64_t place = 0;
    if (const auto* park = std::get_if<Park>(&operation)) {
        place = park->place;
    } else if (const auto* unpark = std::get_if<Unpark>(&operation)) {
        place = unpark->place;
    } else {
        return key;
    }
    // In front: hashes go by the first bytes.
    StoredKey touched = key;
    std::uint64_t front = 0;
    std::memcpy(&front, touched.bytes.data(), sizeof front);
    front ^= place;
    std::memcpy(touched.bytes.data(), &front, sizeof front);
    return touched;
}

}  // namespace semel::core
