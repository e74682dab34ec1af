// Where `semel consumer reset --to` points.
#pragma once

#include <cstdint>
#include <string>

#include "base/result.hpp"

namespace semel::cli {

struct ResetTarget {
    enum class Kind : std::uint8_t { earliest, latest, offset, time };
    Kind kind = Kind::earliest;
    std::int64_t at = 0;  ///< The offset, or the time: Unix, in milliseconds.
};

/// `text`: earliest, latest, an offset, a time (RFC 3339, with a zone: 2026-11-30T08:00:00Z,
/// 2026-11-30T09:00:00+01:00), or how long ago (-2h, -30m, -7d). `now_ms`: Unix time.
/// invalid_argument: it is none of them, or lies ahead.
base::Result<ResetTarget> reset_target(const std::string& text, std::int64_t now_ms);

/// In UTC, as RFC 3339.
std::string time_in_words(std::int64_t unix_ms);

}  // namespace semel::cli
