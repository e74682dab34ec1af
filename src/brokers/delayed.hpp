// Delayed: a copy of a message that waits at the broker for its next run, as its headers tell it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "brokers/delivery.hpp"

namespace semel::brokers {

/// When the copy is due: Unix time in milliseconds, in decimal.
inline constexpr std::string_view due_header = "semel-due-timestamp";
/// Kafka: "<topic>-<partition>-<offset>" of the message that was copied, also in a copy of a copy.
inline constexpr std::string_view copy_of_header = "semel-copy-of";

/// Where a message lies, or lay.
struct Position {
    Partition partition;
    std::int64_t offset = 0;
    friend bool operator==(const Position&, const Position&) = default;
};
/// As copy_of_header has it.
std::string in_words(const Position& position);

/// When it is due (Unix time in milliseconds); nullopt: no header says so, or none that can be
/// read.
std::optional<std::int64_t> due_of(const Delivery& delivery);
/// Of what it is a copy; nullopt: no header says so, or none that can be read. Anybody can write
/// headers: only what lies where nobody else writes is to be believed.
std::optional<Position> copied_from(const Delivery& delivery);

}  // namespace semel::brokers
