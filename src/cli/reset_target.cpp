#include "cli/reset_target.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <optional>
#include <string_view>
#include <utility>

namespace semel::cli {

namespace {

using std::chrono::milliseconds;
using Days = std::chrono::sys_days;

constexpr std::int64_t ago_max_ms = std::int64_t{100} * 365 * 24 * 3600 * 1000;

/// Takes exactly `digits` digits from the front.
std::optional<int> number(std::string_view& text, std::size_t digits) {
    int out = 0;
    if (text.size() < digits) return std::nullopt;
    const auto [after, error] = std::from_chars(text.data(), text.data() + digits, out);
    if (error != std::errc() || after != text.data() + digits || text.front() == '-')
        return std::nullopt;
    text.remove_prefix(digits);
    return out;
}

bool take(std::string_view& text, std::string_view any_of) {
    if (text.empty() || any_of.find(text.front()) == std::string_view::npos) return false;
    text.remove_prefix(1);
    return true;
}

/// Digits behind the seconds' point, as milliseconds; finer ones are dropped.
std::optional<std::int64_t> fraction(std::string_view& text) {
    std::int64_t out = 0;
    std::int64_t unit = 100;
    std::size_t digits = 0;
    while (digits < text.size() && text[digits] >= '0' && text[digits] <= '9') {
        out += (text[digits] - '0') * unit;
        unit /= 10;
        ++digits;
    }
    text.remove_prefix(digits);
    return digits == 0 ? std::nullopt : std::optional(out);
}

/// East of UTC, in minutes.
std::optional<int> zone(std::string_view& text) {
    if (take(text, "zZ")) return 0;
    const bool west = text.starts_with('-');
    if (!take(text, "+-")) return std::nullopt;
    const auto hours = number(text, 2);
    if (!hours || *hours > 23 || !take(text, ":")) return std::nullopt;
    const auto minutes = number(text, 2);
    if (!minutes || *minutes > 59) return std::nullopt;
    const int east = *hours * 60 + *minutes;
    return west ? -east : east;
}

std::optional<std::int64_t> rfc3339(std::string_view text) {
    const auto year = number(text, 4);
    if (!year || !take(text, "-")) return std::nullopt;
    const auto month = number(text, 2);
    if (!month || !take(text, "-")) return std::nullopt;
    const auto day = number(text, 2);
    if (!day || !take(text, "tT ")) return std::nullopt;
    const auto hour = number(text, 2);
    if (!hour || *hour > 23 || !take(text, ":")) return std::nullopt;
    const auto minute = number(text, 2);
    if (!minute || *minute > 59 || !take(text, ":")) return std::nullopt;
    const auto second = number(text, 2);
    if (!second || *second > 60) return std::nullopt;  // 60: a leap second
    std::int64_t milli = 0;
    if (take(text, ".")) {
        const auto part = fraction(text);
        if (!part) return std::nullopt;
        milli = *part;
    }
    const auto east = zone(text);
    if (!east || !text.empty()) return std::nullopt;
    const std::chrono::year_month_day date{std::chrono::year(*year),
                                           std::chrono::month(static_cast<unsigned>(*month)),
                                           std::chrono::day(static_cast<unsigned>(*day))};
    if (!date.ok()) return std::nullopt;
    const std::int64_t seconds = std::int64_t{Days(date).time_since_epoch().count()} * 86'400 +
                                 *hour * 3600 + (*minute - *east) * 60 + *second;
    return seconds * 1000 + milli;
}

/// "2h" as milliseconds.
std::optional<std::int64_t> duration(std::string_view text) {
    static constexpr std::array<std::pair<std::string_view, std::int64_t>, 4> units{
        {{"s", 1000}, {"m", 60'000}, {"h", 3'600'000}, {"d", 86'400'000}}};
    std::int64_t count = 0;
    const auto [after, error] = std::from_chars(text.data(), text.data() + text.size(), count);
    if (error != std::errc() || count < 0) return std::nullopt;
    text.remove_prefix(static_cast<std::size_t>(after - text.data()));
    for (const auto& [unit, size] : units) {
        if (text == unit && count <= ago_max_ms / size) return count * size;
    }
    return std::nullopt;
}

}  // namespace

base::Result<ResetTarget> reset_target(const std::string& text, std::int64_t now_ms) {
    using Kind = ResetTarget::Kind;
    if (text == "earliest") return ResetTarget{.kind = Kind::earliest};
    if (text == "latest") return ResetTarget{.kind = Kind::latest};
    const char* const end = text.data() + text.size();
    std::int64_t offset = 0;
    const auto [after, error] = std::from_chars(text.data(), end, offset);
    if (error == std::errc() && after == end && offset >= 0 && text.front() != '-')
        return ResetTarget{.kind = Kind::offset, .at = offset};
    std::optional<std::int64_t> time;
    if (text.starts_with('-')) {
        if (const auto ago = duration(std::string_view(text).substr(1))) time = now_ms - *ago;
    } else {
        time = rfc3339(text);
    }
    const auto refuse = [&text](const std::string& why) {
        return base::Error{.code = base::ErrorCode::invalid_argument,
                           .detail = "--to " + text + why};
    };
    if (!time)
        return refuse(
            " is neither earliest, latest, an offset, a time with its zone "
            "(2026-11-30T08:00:00Z) nor how long ago (-2h)");
    if (*time > now_ms) return refuse(" lies ahead; for the end write latest");
    return ResetTarget{.kind = Kind::time, .at = std::max<std::int64_t>(0, *time)};
}

std::string time_in_words(std::int64_t unix_ms) {
    const std::chrono::sys_time<milliseconds> at{milliseconds(unix_ms)};
    const Days day = std::chrono::floor<std::chrono::days>(at);
    const std::chrono::year_month_day date(day);
    const std::chrono::hh_mm_ss<milliseconds> time(at - day);
    std::array<char, 40> out{};
    std::snprintf(out.data(), out.size(), "%04d-%02u-%02uT%02d:%02d:%02d.%03dZ",
                  static_cast<int>(date.year()), static_cast<unsigned>(date.month()),
                  static_cast<unsigned>(date.day()), static_cast<int>(time.hours().count()),
                  static_cast<int>(time.minutes().count()),
                  static_cast<int>(time.seconds().count()),
                  static_cast<int>(time.subseconds().count()));
    return out.data();
}

}  // namespace semel::cli
