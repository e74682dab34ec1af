// The body of a letter as one JSON object, and the texts that letters are made of.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "brokers/delivery.hpp"
#include "deadletter/letter.hpp"

namespace semel::deadletter {

/// `body: envelope`. Message, key and headers as strings where they are UTF-8, else in base64,
/// which a member
/// `...Encoding` beside them says; null where there is none.
std::string make_envelope(const brokers::Delivery& delivery, const Circumstances& about,
                          std::string_view error_message, std::string_view stack_trace);

/// Where a message lay when it was first delivered: a delayed copy says so itself.
struct Origin {
    brokers::Partition partition;
    std::int64_t offset = 0;
    std::optional<std::int64_t> timestamp_ms;
};
Origin origin_of(const brokers::Delivery& delivery);

bool is_utf8(std::string_view bytes);
/// RFC 4648 section 4, padded.
std::string base64(std::string_view bytes);
/// "2026-01-31T12:00:00.123Z". Years before 0 and behind 9999 as the first and last moment that has
/// such a name.
std::string rfc3339(std::int64_t unix_ms);
/// Cuts `text` to at most `max` bytes, between characters where it is UTF-8. True: it was longer.
bool shorten(std::string& text, std::size_t max);

}  // namespace semel::deadletter
