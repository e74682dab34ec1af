// One structured line per decision, to stderr. Never a prompt, an answer, a credential or a raw
// key.
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <variant>

namespace semel::log {

enum class Level { debug, info, warn, error, off };

/// `key=value`. Views must live until the call returns, no longer.
struct Field {
    using Value = std::variant<std::string_view, std::int64_t, std::uint64_t, double, bool>;
    std::string_view key;
    Value value;

    Field(std::string_view k, std::string_view v) : key(k), value(v) {}
    Field(std::string_view k, const char* v) : key(k), value(std::string_view(v)) {}
    Field(std::string_view k, const std::string& v) : key(k), value(std::string_view(v)) {}
    Field(std::string_view k, bool v) : key(k), value(v) {}
    Field(std::string_view k, double v) : key(k), value(v) {}
    template <std::signed_integral T>
    Field(std::string_view k, T v) : key(k), value(static_cast<std::int64_t>(v)) {}
    template <std::unsigned_integral T>
    Field(std::string_view k, T v) : key(k), value(static_cast<std::uint64_t>(v)) {}
};
using Fields = std::initializer_list<Field>;

/// Lines below `level` are dropped. Default: info. Thread-safe, as all here.
void set_level(Level level);
/// False: `text` is none of debug, info, warn, error, off, and nothing was changed.
bool set_level(std::string_view text);

/// "2026-01-31T12:00:00.123Z info EVENT key=value ...". `event` is a constant such as "lease.lost".
void write(Level level, std::string_view event, Fields fields);
inline void debug(std::string_view event, Fields fields = {}) {
    write(Level::debug, event, fields);
}
inline void info(std::string_view event, Fields fields = {}) { write(Level::info, event, fields); }
inline void warn(std::string_view event, Fields fields = {}) { write(Level::warn, event, fields); }
inline void error(std::string_view event, Fields fields = {}) {
    write(Level::error, event, fields);
}

/// What follows the level in a line. A value with blanks, quotes, '=' or control characters is
/// quoted and escaped, so that no value can forge a field or a line.
std::string format(std::string_view event, Fields fields);

}  // namespace semel::log
