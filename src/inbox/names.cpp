#include "inbox/names.hpp"

#include <algorithm>
#include <charconv>
#include <utility>

namespace semel::inbox {
namespace {

constexpr std::size_t table_name_max_bytes = 40;
constexpr std::size_t schema_name_max_bytes = 63;

base::Error wrong(std::string detail) {
    return {.code = base::ErrorCode::invalid_argument, .detail = "inbox: " + std::move(detail)};
}

void add_sized(base::Sha256& hash, std::string_view part) {
    const auto size = static_cast<std::uint32_t>(part.size());
    const char prefix[4] = {static_cast<char>(size >> 24), static_cast<char>(size >> 16),
                            static_cast<char>(size >> 8), static_cast<char>(size)};
    hash.update({prefix, sizeof prefix}).update(part);
}

/// Length of the well-formed UTF-8 character at the front; 0: there is none.
std::size_t character(std::string_view bytes) {
    const auto at = [&](std::size_t i) { return static_cast<unsigned char>(bytes[i]); };
    const unsigned char lead = at(0);
    if (lead < 0x80) return 1;
    const std::size_t size = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
    if (lead < 0xc2 || lead > 0xf4 || bytes.size() < size) return 0;
    for (std::size_t i = 1; i < size; ++i) {
        if ((at(i) & 0xc0) != 0x80) return 0;
    }
    // Overlong forms, surrogates, beyond U+10FFFF.
    if ((lead == 0xe0 && at(1) < 0xa0) || (lead == 0xed && at(1) > 0x9f) ||
        (lead == 0xf0 && at(1) < 0x90) || (lead == 0xf4 && at(1) > 0x8f)) {
        return 0;
    }
    return size;
}

bool control(unsigned char c) { return c < 0x20 || c == 0x7f; }

bool table_name(std::string_view name, std::size_t max) {
    const auto allowed = [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
    };
    return !name.empty() && name.size() <= max && !(name[0] >= '0' && name[0] <= '9') &&
           std::all_of(name.begin(), name.end(), allowed);
}

std::string quoted(sql::Dialect dialect, std::string_view name) {
    const char quote = dialect == sql::Dialect::postgres ? '"' : '`';
    std::string text(1, quote);
    text += name;
    text += quote;
    return text;
}

}  // namespace

base::Digest key_hash(const MessageName& name) {
    base::Sha256 hash;
    add_sized(hash, name.scope);
    add_sized(hash, name.source);
    add_sized(hash, name.id);
    return hash.finish();
}

std::string readable(std::string_view bytes, std::size_t max) {
    constexpr char digits[] = "0123456789abcdef";
    std::string text;
    text.reserve(bytes.size());
    std::size_t characters = 0;
    while (!bytes.empty()) {
        const std::size_t size = character(bytes);
        const auto first = static_cast<unsigned char>(bytes[0]);
        std::string one;
        if (size == 0 || control(first)) {
            one = {'\\', 'x', digits[first >> 4], digits[first & 15]};
        } else if (first == '\\') {
            one = "\\\\";
        } else {
            one = bytes.substr(0, size);
        }
        characters += size > 1 ? 1 : one.size();
        if (characters > max) break;
        text += one;
        bytes.remove_prefix(std::max<std::size_t>(size, 1));
    }
    return text;
}

std::string readable(std::string_view bytes) { return readable(bytes, std::string::npos); }

base::Result<void> check(const MessageName& name) {
    const auto too_long = [](const char* what, std::size_t bytes, std::size_t max) {
        return wrong(std::string(what) + " of " + std::to_string(bytes) + " bytes: at most " +
                     std::to_string(max) + " are allowed");
    };
    if (name.scope.size() > name_max_bytes)
        return too_long("a scope", name.scope.size(), name_max_bytes);
    if (name.source.size() > name_max_bytes)
        return too_long("a source", name.source.size(), name_max_bytes);
    if (name.id.size() > message_id_max_bytes)
        return too_long("a message id", name.id.size(), message_id_max_bytes);
    if (name.id.empty()) return wrong("a message without an id: it cannot be told from others");
    return {};
}

base::Result<void> check_label(std::string_view label, const char* what) {
    const std::string subject = std::string("the ") + what;
    if (label.empty()) return wrong(subject + " is empty");
    if (label.size() > name_max_bytes) {
        return wrong(subject + " has " + std::to_string(label.size()) + " bytes: at most " +
                     std::to_string(name_max_bytes) + " are allowed");
    }
    while (!label.empty()) {
        const std::size_t size = character(label);
        if (size == 0 || control(static_cast<unsigned char>(label[0]))) {
            return wrong(subject + " holds a control character, or bytes that are not UTF-8");
        }
        label.remove_prefix(size);
    }
    return {};
}

base::Result<void> check(const Place& place) {
    if (!place.schema.empty() && !table_name(place.schema, schema_name_max_bytes)) {
        return wrong("the schema `" + readable(place.schema, schema_name_max_bytes) +
                     "`: 1 to 63 of a-z, 0-9 and _ are allowed, not beginning with a digit");
    }
    if (!table_name(place.dedup_table, table_name_max_bytes)) {
        return wrong("the table name `" + readable(place.dedup_table, table_name_max_bytes) +
                     "`: 1 to 40 of a-z, 0-9 and _ are allowed, not beginning with a digit");
    }
    return {};
}

Tables::Tables(sql::Dialect for_dialect, const Place& place)
    : dialect(for_dialect),
      prefix(place.schema.empty() ? std::string() : quoted(for_dialect, place.schema) + "."),
      dedup(named(place.dedup_table)),
      assignments(named("semel_assignments")),
      offsets(named("semel_offsets")),
      schema(named("semel_inbox_schema")),
      flights(named("semel_flights")),
      crashes(named("semel_crashes")) {}

std::string Tables::named(std::string_view table) const { return prefix + quoted(dialect, table); }

void StatementBuilder::place(sql::Parameter value, const char* type) {
    statement_.parameters.push_back(std::move(value));
    if (dialect_ == sql::Dialect::mysql) {
        statement_.text += '?';
        return;
    }
    statement_.text += '$';
    statement_.text += std::to_string(statement_.parameters.size());
    statement_.text += "::";
    statement_.text += type;
}

StatementBuilder& StatementBuilder::number(std::int64_t value) {
    place(value, "bigint");
    return *this;
}

StatementBuilder& StatementBuilder::bytes(std::string_view value) {
    place(sql::Bytes{std::string(value)}, "bytea");
    return *this;
}

StatementBuilder& StatementBuilder::utf8(std::string_view value) {
    const bool postgres = dialect_ == sql::Dialect::postgres;
    text(postgres ? "convert_from(" : "CONVERT(");
    bytes(value);
    return text(postgres ? ", 'UTF8')" : " USING utf8mb4)");
}

StatementBuilder& StatementBuilder::byte_array(std::string literal) {
    place(std::move(literal), "bytea[]");
    return *this;
}

StatementBuilder& StatementBuilder::label(std::string_view value) {
    return dialect_ == sql::Dialect::postgres ? utf8(value) : bytes(value);
}

StatementBuilder& StatementBuilder::time(std::int64_t us) {
    if (dialect_ == sql::Dialect::postgres) {
        text("(timestamptz 'epoch' + ").number(us);
        return text(" * interval '1 microsecond')");
    }
    text("DATE_ADD('1970-01-01', INTERVAL ").number(us);
    return text(" MICROSECOND)");
}

const char* clock_of(sql::Dialect dialect) {
    return dialect == sql::Dialect::postgres ? "clock_timestamp()" : "UTC_TIMESTAMP(6)";
}

std::string microseconds_of(sql::Dialect dialect, std::string_view column) {
    if (dialect == sql::Dialect::postgres) {
        return "(extract(epoch from " + std::string(column) + ") * 1000000)::bigint";
    }
    return "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', " + std::string(column) + ")";
}

const char* partition_column(sql::Dialect dialect) {
    return dialect == sql::Dialect::postgres ? "partition" : "`partition`";
}

std::int64_t number_of(const std::optional<std::string>& value) {
    std::int64_t number = 0;
    if (value) std::from_chars(value->data(), value->data() + value->size(), number);
    return number;
}

}  // namespace semel::inbox
