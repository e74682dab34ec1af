#include <array>
#include <utility>

#include "base/json_scan.hpp"
#include "consumer/identity.hpp"
#include "consumer/payload.hpp"

namespace semel::consumer {
namespace {

constexpr std::string_view blanks = " \t\r\n";

/// The token up to the next "/" with ~1 and ~0 resolved; `pointer` begins with "/" and is cut
/// behind it.
std::string next_token(std::string_view& pointer) {
    pointer.remove_prefix(1);
    const std::size_t end = std::min(pointer.find('/'), pointer.size());
    std::string token(pointer.substr(0, end));
    pointer.remove_prefix(end);
    for (std::size_t at = token.find('~'); at != std::string::npos; at = token.find('~', at + 1))
        token.replace(at, 2, token[at + 1] == '1' ? "/" : "~");
    return token;
}

/// The element's number; nullopt: RFC 6901 has no such index ("01", "-", "+1").
std::optional<std::size_t> index_of(std::string_view token) {
    constexpr std::size_t index_digits = 9;  // more elements than a text can have
    if (token.empty() || token.size() > index_digits || (token.size() > 1 && token[0] == '0'))
        return std::nullopt;
    std::size_t index = 0;
    for (const char c : token) {
        if (c < '0' || c > '9') return std::nullopt;
        index = index * 10 + static_cast<std::size_t>(c - '0');
    }
    return index;
}

std::string_view trimmed(std::string_view text) {
    const std::size_t begin = std::min(text.find_first_not_of(blanks), text.size());
    return text.substr(begin, text.find_last_not_of(blanks) + 1 - begin);
}

struct PropertyName {
    std::string_view name;
    std::string brokers::AmqpProperties::* member;
};
constexpr std::array<PropertyName, 11> property_names{{
    {"message-id", &brokers::AmqpProperties::message_id},
    {"content-type", &brokers::AmqpProperties::content_type},
    {"content-encoding", &brokers::AmqpProperties::content_encoding},
    {"correlation-id", &brokers::AmqpProperties::correlation_id},
    {"reply-to", &brokers::AmqpProperties::reply_to},
    {"type", &brokers::AmqpProperties::type},
    {"app-id", &brokers::AmqpProperties::app_id},
    {"user-id", &brokers::AmqpProperties::user_id},
    {"expiration", &brokers::AmqpProperties::expiration},
    {"exchange", &brokers::AmqpProperties::exchange},
    {"routing-key", &brokers::AmqpProperties::routing_key},
}};

std::variant<Extracted, ExtractError> from_json(const brokers::Delivery& delivery,
                                                std::string_view pointer) {
    if (!delivery.value) return Extracted{};
    Payload payload(*delivery.value);
    if (!payload.valid()) return ExtractError{not_json(*delivery.value)};
    const auto raw = payload.find(pointer);
    if (!raw) return Extracted{};
    return scalar_of(*raw, pointer);
}

}  // namespace

bool Payload::valid() {
    if (read_) return valid_;
    read_ = true;
    text_ = trimmed(text_);
    if (text_.starts_with('{')) {
        auto members = base::top_level_members(text_);
        valid_ = members.has_value();
        if (members) members_ = std::move(*members);
    } else if (text_.starts_with('[')) {
        valid_ = base::array_elements(text_).has_value();
    } else {
        valid_ = base::canonical(text_).has_value();  // of a scalar it says exactly that
    }
    return valid_;
}

std::optional<std::string_view> Payload::find(std::string_view pointer) {
    if (!is_pointer(pointer) || !valid()) return std::nullopt;
    std::string_view at = text_;
    bool outermost = true;
    while (!pointer.empty()) {
        const std::string token = next_token(pointer);
        std::optional<std::string_view> next;
        if (outermost && at.starts_with('{')) {
            next = base::find_member(members_, token);
        } else if (at.starts_with('{')) {
            const auto members = base::top_level_members(at);
            if (members) next = base::find_member(*members, token);
        } else if (const auto index = index_of(token); index && at.starts_with('[')) {
            const auto elements = base::array_elements(at);
            if (elements && *index < elements->size()) next = (*elements)[*index];
        }
        if (!next) return std::nullopt;
        at = *next;
        outermost = false;
    }
    return at;
}

std::string not_json(std::string_view value) {
    constexpr std::size_t frame = 5;  // a zero and the schema's number
    if (value.size() >= frame && value[0] == '\0') {
        std::uint32_t schema = 0;
        for (std::size_t i = 1; i < frame; ++i)
            schema = schema << 8 | static_cast<unsigned char>(value[i]);
        return "its payload is no JSON: it begins as the serializers of Confluent's schema "
               "registry begin (schema " +
               std::to_string(schema) +
               "); with `payload: bytes` and the id in a header or the key it need not be read";
    }
    if (value.empty()) return "its payload is no JSON: it is empty";
    return "its payload of " + std::to_string(value.size()) + " bytes is no valid JSON";
}

std::variant<Extracted, ExtractError> scalar_of(std::string_view raw, std::string_view pointer) {
    if (base::json_is_null(raw)) return Extracted{};
    if (raw.starts_with('{') || raw.starts_with('[')) {
        return ExtractError{"the JSON value at `" + std::string(pointer) + "` is an " +
                            (raw[0] == '{' ? "object" : "array") + ": one value is wanted"};
    }
    if (raw.starts_with('"')) return Extracted{.text = base::json_string(raw)};
    if (base::json_bool(raw)) return Extracted{.text = std::string(raw), .boolean = true};
    return Extracted{.text = std::string(raw), .number = true};
}

HeaderFound find_header(const brokers::Delivery& delivery, std::string_view name) {
    HeaderFound found;
    for (const brokers::Header& header : delivery.headers) {
        if (header.name != name) continue;
        if (found.present && found.value != header.value) found.ambiguous = true;
        if (!found.present) found.value = header.value;
        found.present = true;
    }
    return found;
}

std::string ambiguous_header(std::string_view name) {
    return "the header `" + std::string(name) + "` is there several times with different values";
}

std::optional<std::string_view> find_property(const brokers::Delivery& delivery,
                                              std::string_view name) {
    if (delivery.properties == nullptr) return std::nullopt;
    for (const PropertyName& one : property_names) {
        if (one.name != name) continue;
        const std::string& value = (*delivery.properties).*one.member;
        if (!value.empty()) return value;
    }
    return std::nullopt;
}

bool is_pointer(std::string_view pointer) {
    if (pointer.empty()) return true;
    if (pointer[0] != '/') return false;
    for (std::size_t at = pointer.find('~'); at != std::string_view::npos;
         at = pointer.find('~', at + 1)) {
        if (at + 1 == pointer.size() || (pointer[at + 1] != '0' && pointer[at + 1] != '1'))
            return false;
    }
    return true;
}

std::optional<std::string_view> at_pointer(std::string_view json, std::string_view pointer) {
    return Payload(json).find(pointer);
}

std::variant<Extracted, ExtractError> extract(const brokers::Delivery& delivery,
                                              const config::ValueSpec& spec) {
    const auto text = [](std::optional<std::string_view> value) {
        return value ? Extracted{.text = std::string(*value)} : Extracted{};
    };
    switch (spec.from) {
        case config::ValueFrom::json:
            return from_json(delivery, spec.name);
        case config::ValueFrom::header: {
            const HeaderFound found = find_header(delivery, spec.name);
            if (found.ambiguous) return ExtractError{ambiguous_header(spec.name)};
            return text(found.value);
        }
        case config::ValueFrom::property:
            return text(find_property(delivery, spec.name));
        case config::ValueFrom::key:
            return text(delivery.key);
        case config::ValueFrom::constant:
            return text(spec.name);
        case config::ValueFrom::offset:
        case config::ValueFrom::cloudevents:
            break;
    }
    return ExtractError{"`offset` and `cloudevents` say where an id is, not where a value is"};
}

}  // namespace semel::consumer
