#include "consumer/strategies/past.hpp"

#include <algorithm>
#include <charconv>

namespace semel::consumer {
namespace {

constexpr std::string_view lease_lost = "lease-lost";
constexpr std::string_view released = "released";
constexpr std::string_view resolved = "resolved";
constexpr std::string_view alone = "alone:";
constexpr std::string_view separator = ": ";

struct Code {
    std::string_view name;
    std::optional<std::uint32_t> failed_runs;
};
Code split(std::string_view code) {
    const auto dot = code.rfind('.');
    if (dot == std::string_view::npos) return {code, {}};
    std::uint32_t number = 0;
    const char* end = code.data() + code.size();
    const auto [at, error] = std::from_chars(code.data() + dot + 1, end, number);
    if (error != std::errc{} || at != end) return {code, {}};
    return {code.substr(0, dot), number};
}

std::optional<DeadClass> class_of(std::string_view name) {
    for (const DeadClass one : {DeadClass::attempts, DeadClass::crashes, DeadClass::fatal})
        if (name == name_of(one)) return one;
    return {};
}

struct Words {
    Code code;
    std::string_view message;
};
/// The failure as it was told, also behind a Resolve.
Words words_of(const core::Failure& failure) {
    const std::string_view message = failure.message;
    if (failure.code == resolved) {
        const auto end = message.find(separator);
        const Code code =
            split(message.substr(0, end == std::string_view::npos ? std::string_view::npos : end));
        if (end != std::string_view::npos && code.failed_runs && class_of(code.name))
            return {code, message.substr(end + separator.size())};
    }
    return {split(failure.code), message};
}

std::uint32_t lone_runs(std::string_view label) {
    if (!label.starts_with(alone)) return 0;
    std::uint32_t k = 0;
    std::from_chars(label.data() + alone.size(), label.data() + label.size(), k);
    return k;
}

/// Runs that ended as failures. `present`: the current attempt is one that has not ended.
std::uint32_t charged(const core::Record& record, bool present) {
    const std::int64_t failed = std::int64_t{record.attempt} - (present ? 1 : 0) -
                                record.uncharged_attempts - record.crashes_charged;
    return static_cast<std::uint32_t>(std::max<std::int64_t>(failed, 0));
}

}  // namespace

Past past_of(const core::Record& record, bool hold_unknown, bool granted) {
    const Words words = words_of(record.failure);
    Past past;
    past.failed_runs = hold_unknown ? words.code.failed_runs.value_or(0) : charged(record, granted);
    past.given_up = class_of(words.code.name);
    past.reason = words.message;
    const bool died = words.code.name == lease_lost || words.code.name == released ||
                      (!granted && record.status == core::Status::processing);
    past.may_double = words.code.name == lease_lost || (died && record.crashes_charged > 0);
    if (died) past.lone_deaths = lone_runs(record.label);
    past.suspect = died && (record.crashes_charged >= crowd_crashes_max || past.lone_deaths > 0);
    if (hold_unknown) past.may_double = false;  // only what had not started is granted again
    return past;
}

Dead dead_of(const core::Record& record, bool hold_unknown, DeadClass otherwise) {
    const Words words = words_of(record.failure);
    return {.why = class_of(words.code.name).value_or(otherwise),
            .reason = std::string(words.message),
            .failed_runs = hold_unknown && words.code.failed_runs ? *words.code.failed_runs
                                                                  : charged(record, false),
            .first_failure_ms = record.created.us / 1000,
            .generation = record.generation,
            .token = record.token,
            .letter_known = record.status == core::Status::dead && record.letter_published};
}

std::string code_of(std::string_view code, std::uint32_t failed_runs, bool hold_unknown) {
    std::string out(code);
    if (hold_unknown) out += "." + std::to_string(failed_runs);
    return out;
}

std::string lone_label(std::uint32_t k) { return std::string(alone) + std::to_string(k); }

std::string resolve_reason(const core::Failure& failure) {
    return failure.code + std::string(separator) + failure.message;
}

bool not_compared(const core::Fingerprint& fingerprint) {
    return fingerprint.raw.empty() && fingerprint.canonical.empty();
}

}  // namespace semel::consumer
