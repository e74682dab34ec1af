#include "telemetry/log.hpp"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <charconv>
#include <type_traits>

namespace semel::log {

namespace {

spdlog::level::level_enum vendor_level(Level level) {
    switch (level) {
        case Level::debug:
            return spdlog::level::debug;
        case Level::info:
            return spdlog::level::info;
        case Level::warn:
            return spdlog::level::warn;
        case Level::error:
            return spdlog::level::err;
        case Level::off:
            return spdlog::level::off;
    }
    return spdlog::level::info;
}

spdlog::logger& logger() {
    static spdlog::logger instance = [] {
        spdlog::logger made("semel", std::make_shared<spdlog::sinks::stderr_sink_mt>());
        made.set_formatter(std::make_unique<spdlog::pattern_formatter>(
            "%Y-%m-%dT%H:%M:%S.%eZ %l %v", spdlog::pattern_time_type::utc));
        made.set_level(spdlog::level::info);
        made.flush_on(spdlog::level::trace);
        return made;
    }();
    return instance;
}

void append_text(std::string& out, std::string_view text) {
    const bool plain = !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
        return static_cast<unsigned char>(c) > 0x20 && c != 0x7F && c != '"' && c != '=' &&
               c != '\\';
    });
    if (plain) {
        out += text;
        return;
    }
    static constexpr char digits[] = "0123456789abcdef";
    out += '"';
    for (const char c : text) {
        const auto byte = static_cast<unsigned char>(c);
        if (c == '"' || c == '\\') {
            out += '\\';
            out += c;
        } else if (byte < 0x20 || byte == 0x7F) {
            out += "\\x";
            out += digits[byte >> 4];
            out += digits[byte & 15];
        } else {
            out += c;
        }
    }
    out += '"';
}

template <class Number>
void append_number(std::string& out, Number value) {
    char buffer[32];
    const auto [end, error] = std::to_chars(buffer, buffer + sizeof buffer, value);
    out.append(buffer, end);
}

}  // namespace

void set_level(Level level) { logger().set_level(vendor_level(level)); }

bool set_level(std::string_view text) {
    constexpr std::pair<std::string_view, Level> levels[] = {{"debug", Level::debug},
                                                             {"info", Level::info},
                                                             {"warn", Level::warn},
                                                             {"error", Level::error},
                                                             {"off", Level::off}};
    for (const auto& [name, level] : levels) {
        if (name != text) continue;
        set_level(level);
        return true;
    }
    return false;
}

std::string format(std::string_view event, Fields fields) {
    std::string out(event);
    for (const Field& field : fields) {
        out += ' ';
        out += field.key;
        out += '=';
        std::visit(
            [&](const auto& value) {
                using Value = std::decay_t<decltype(value)>;
                if constexpr (std::is_same_v<Value, std::string_view>) {
                    append_text(out, value);
                } else if constexpr (std::is_same_v<Value, bool>) {
                    out += value ? "true" : "false";
                } else {
                    append_number(out, value);
                }
            },
            field.value);
    }
    return out;
}

void write(Level level, std::string_view event, Fields fields) {
    if (!logger().should_log(vendor_level(level))) return;
    logger().log(vendor_level(level), spdlog::string_view_t("{}"), format(event, fields));
}

}  // namespace semel::log
