// What names a message, a partition and the inbox's tables, and how names get into statements.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/hash.hpp"
#include "base/result.hpp"
#include "sql/executor.hpp"

namespace semel::inbox {

/// Longest scope, source, topic, owner and table name part, in bytes.
inline constexpr std::size_t name_max_bytes = 255;
/// Longest message id, in bytes.
inline constexpr std::size_t message_id_max_bytes = 1024;
/// A longer business key is cut in the table, where it is for people only. In characters.
inline constexpr std::size_t business_key_max = 255;

/// A message's identity over all its deliveries. Bytes: nothing is folded, trimmed or cut.
struct MessageName {
    std::string_view
        scope;  ///< Who consumes, e.g. "<group>/<consumer>". Scopes do not see each other.
    std::string_view source;  ///< Whose ids these are: a topic, a queue, a CloudEvents source.
    std::string_view id;
};

/// What the tables tell messages apart by: SHA-256 over scope, source and id, each preceded by its
/// length in 4 bytes (big endian).
base::Digest key_hash(const MessageName& name);

/// `bytes` for people: UTF-8 as it is; a backslash, a control character and what is not UTF-8 as
/// \\ or \x1f. Tells any two apart.
std::string readable(std::string_view bytes);
/// readable(), but at most `max` characters.
std::string readable(std::string_view bytes, std::size_t max);

/// Error invalid_argument, which says what is wrong: scope or source longer than name_max_bytes, id
/// empty or longer than message_id_max_bytes.
base::Result<void> check(const MessageName& name);
/// For scopes, topics and owners where a table compares them: 1 to name_max_bytes of UTF-8 without
/// control characters. `what` begins the error's sentence.
base::Result<void> check_label(std::string_view label, const char* what);

/// Which tables. The defaults are the ones of the connection's own database (MySQL) or search path
/// (PostgreSQL).
struct Place {
    std::string schema;  ///< Schema (PostgreSQL) or database (MySQL); empty: the connection's.
    std::string dedup_table =
        "message_dedup";  ///< 1 to 40 of a-z, 0-9, _, not beginning with a digit.
};
base::Result<void> check(const Place& place);

/// The tables as statements name them, schema and quotes included.
struct Tables {
    Tables(sql::Dialect dialect, const Place& place);
    /// `table` of the same schema.
    [[nodiscard]] std::string named(std::string_view table) const;

    sql::Dialect dialect;
    std::string prefix;  ///< Schema with its dot, or empty.
    std::string dedup, assignments, offsets, schema, flights, crashes;
};

/// Builds one statement's text with its parameters, so that no value stands in a text and their
/// order cannot go wrong.
class StatementBuilder {
  public:
    explicit StatementBuilder(sql::Dialect dialect) : dialect_(dialect) {}

    StatementBuilder& text(std::string_view words) {
        statement_.text += words;
        return *this;
    }
    StatementBuilder& number(std::int64_t value);
    StatementBuilder& bytes(std::string_view value);
    /// UTF-8 that becomes text whatever the connection's character set is.
    StatementBuilder& utf8(std::string_view value);
    /// PostgreSQL: an array of bytea in its text form.
    StatementBuilder& byte_array(std::string literal);
    /// A scope, topic or owner where semel_assignments and semel_offsets compare it.
    StatementBuilder& label(std::string_view value);
    StatementBuilder& null() { return text("NULL"); }
    /// A time column's value from microseconds since 1970.
    StatementBuilder& time(std::int64_t us);

    sql::Statement finish() { return std::move(statement_); }

  private:
    void place(sql::Parameter value, const char* type);

    sql::Dialect dialect_;
    sql::Statement statement_;
};

/// The database's clock, as a time column holds it.
[[nodiscard]] const char* clock_of(sql::Dialect dialect);
/// Microseconds since 1970 of a time column or expression.
[[nodiscard]] std::string microseconds_of(sql::Dialect dialect, std::string_view column);
/// The column name `partition`, which is a word of MySQL's.
[[nodiscard]] const char* partition_column(sql::Dialect dialect);

/// The number in a result's value; 0 if it is NULL or none.
std::int64_t number_of(const std::optional<std::string>& value);

}  // namespace semel::inbox
