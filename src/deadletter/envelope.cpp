#include "deadletter/envelope.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <ctime>
#include <optional>

#include "base/json_scan.hpp"
#include "brokers/delayed.hpp"
#include "deadletter/cause.hpp"

namespace semel::deadletter {
namespace {

/// Members of one JSON object.
class Object {
  public:
    explicit Object(std::string& out) : out_(out) { out_ += '{'; }
    void end() { out_ += '}'; }

    std::string& raw(std::string_view name) {
        if (!first_) out_ += ',';
        first_ = false;
        base::append_json_string(out_, name);
        out_ += ':';
        return out_;
    }
    void text(std::string_view name, std::string_view value) {
        base::append_json_string(raw(name), value);
    }
    void number(std::string_view name, std::int64_t value) { raw(name) += std::to_string(value); }
    void bytes(std::string_view name, std::optional<std::string_view> value) {
        if (!value) {
            raw(name) += "null";
        } else if (is_utf8(*value)) {
            text(name, *value);
        } else {
            text(name, base64(*value));
            text(std::string(name) + "Encoding", "base64");
        }
    }

  private:
    std::string& out_;
    bool first_ = true;
};

void append_headers(std::string& out, const std::vector<brokers::Header>& headers) {
    out += '[';
    for (std::size_t i = 0; i < headers.size(); ++i) {
        if (i > 0) out += ',';
        Object one(out);
        one.bytes("name", headers[i].name);
        one.bytes("value", headers[i].value);
        one.end();
    }
    out += ']';
}

}  // namespace

std::string make_envelope(const brokers::Delivery& delivery, const Circumstances& about,
                          std::string_view error_message, std::string_view stack_trace) {
    std::string out;
    out.reserve((delivery.value ? delivery.value->size() : 0) + 1024);
    const Origin origin = origin_of(delivery);
    Object letter(out);
    letter.text("originalTopic", origin.partition.topic);
    letter.bytes("originalMessage", delivery.value);
    letter.text("errorMessage", error_message);
    letter.text("errorTime", rfc3339(about.died_ms));
    letter.number("retryCount", about.failed_runs);
    letter.text("stackTrace", stack_trace);
    if (!delivery.properties) {
        letter.number("originalPartition", origin.partition.number);
        letter.number("originalOffset", origin.offset);
        letter.bytes("originalKey", delivery.key);
    }
    if (origin.timestamp_ms) letter.number("originalTimestamp", *origin.timestamp_ms);
    append_headers(letter.raw("originalHeaders"), delivery.headers);
    letter.text("consumer", about.consumer);
    letter.text("group", about.group);
    if (!about.message_id.empty()) letter.bytes("messageId", about.message_id);
    letter.text("errorClass", about.error_class);
    letter.text("errorFingerprint", fingerprint_of(about.error_class, about.error_message));
    if (about.first_failure_ms != 0)
        letter.text("firstFailureTime", rfc3339(about.first_failure_ms));
    letter.end();
    return out;
}

Origin origin_of(const brokers::Delivery& delivery) {
    const auto copied = brokers::copied_from(delivery);
    if (!copied)
        return {.partition = delivery.partition(),
                .offset = delivery.position(),
                .timestamp_ms = delivery.timestamp_ms};
    Origin origin{.partition = copied->partition, .offset = copied->offset, .timestamp_ms = {}};
    for (const brokers::Header& header : delivery.headers) {
        if (header.name != "semel-original-timestamp" || !header.value) continue;
        std::int64_t at = 0;
        const char* const end = header.value->data() + header.value->size();
        if (std::from_chars(header.value->data(), end, at).ptr == end) origin.timestamp_ms = at;
    }
    return origin;
}

bool is_utf8(std::string_view bytes) {
    while (!bytes.empty()) {
        const auto at = [&](std::size_t i) { return static_cast<unsigned char>(bytes[i]); };
        const unsigned char lead = at(0);
        if (lead < 0x80) {
            bytes.remove_prefix(1);
            continue;
        }
        const std::size_t size = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
        if (lead < 0xc2 || lead > 0xf4 || bytes.size() < size) return false;
        for (std::size_t i = 1; i < size; ++i) {
            if ((at(i) & 0xc0) != 0x80) return false;
        }
        // Overlong forms, surrogates, beyond U+10FFFF.
        if ((lead == 0xe0 && at(1) < 0xa0) || (lead == 0xed && at(1) > 0x9f) ||
            (lead == 0xf0 && at(1) < 0x90) || (lead == 0xf4 && at(1) > 0x8f))
            return false;
        bytes.remove_prefix(size);
    }
    return true;
}

std::string base64(std::string_view bytes) {
    static constexpr std::string_view digits =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string out;
    out.reserve((bytes.size() + 2) / 3 * 4);
    for (std::size_t i = 0; i < bytes.size(); i += 3) {
        const std::size_t left = std::min<std::size_t>(bytes.size() - i, 3);
        std::uint32_t three = 0;
        for (std::size_t j = 0; j < 3; ++j)
            three = three << 8 | (j < left ? static_cast<unsigned char>(bytes[i + j]) : 0u);
        for (std::size_t j = 0; j < 4; ++j)
            out += j <= left ? digits[three >> (18 - 6 * j) & 63] : '=';
    }
    return out;
}

std::string rfc3339(std::int64_t unix_ms) {
    constexpr std::int64_t first = -62'167'219'200'000;  // 0000-01-01
    constexpr std::int64_t last = 253'402'300'799'999;   // 9999-12-31
    unix_ms = std::clamp(unix_ms, first, last);
    std::int64_t seconds = unix_ms / 1000;
    std::int64_t milliseconds = unix_ms % 1000;
    if (milliseconds < 0) {
        milliseconds += 1000;
        --seconds;
    }
    const auto time = static_cast<std::time_t>(seconds);
    std::tm utc{};
    gmtime_r(&time, &utc);
    std::array<char, 96> text{};
    const int size = std::snprintf(text.data(), text.size(), "%04d-%02d-%02dT%02d:%02d:%02d.%03dZ",
                                   utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday, utc.tm_hour,
                                   utc.tm_min, utc.tm_sec, static_cast<int>(milliseconds));
    return {text.data(), static_cast<std::size_t>(size)};
}

bool shorten(std::string& text, std::size_t max) {
    if (text.size() <= max) return false;
    constexpr std::size_t character_bytes = 4;
    std::size_t end = max;
    while (end > 0 && max - end < character_bytes &&
           (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80)
        --end;
    text.resize((static_cast<unsigned char>(text[end]) & 0xc0) == 0x80 ? max : end);
    return true;
}

}  // namespace semel::deadletter
