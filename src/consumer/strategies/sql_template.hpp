// SQL of the configuration: statements with ":name" for values of the message, and names of tables
// and columns. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "consumer/identity.hpp"
#include "sql/executor.hpp"

namespace semel::consumer {

/// A statement whose places are found. Immutable; thread-safe.
///
/// A place is a colon and a name outside of strings, quoted names, comments and casts (a::int).
/// Each place is a parameter of its own, so that on PostgreSQL it takes the type that its
/// surroundings want: a message's numbers go as text there. On MySQL and MariaDB a number beside an
/// arithmetic sign (or behind LIMIT, OFFSET, DIV, MOD) becomes a number of the statement, exact to
/// the last digit; elsewhere it goes as text too, which compares with every column and uses its
/// index.
class SqlTemplate {
  public:
    /// `names`: of the parameters there are. `subject` begins an error's sentence ("statement 2").
    /// Error invalid_argument: a place that names none of them, several statements, a statement
    /// that controls the transaction (on MySQL also DDL), a place of the dialect's own ($1, ?).
    static base::Result<SqlTemplate> parse(sql::Dialect dialect, std::string_view text,
                                           std::span<const std::string> names,
                                           const std::string& subject);

    /// `values`: one per name of parse().
    [[nodiscard]] sql::Statement bind(std::span<const Extracted> values) const;
    /// Whether names[index] has a place.
    [[nodiscard]] bool uses(std::size_t index) const;

  private:
    struct Place {
        std::size_t name = 0;
        bool arithmetic = false;
    };
    sql::Dialect dialect_ = sql::Dialect::postgres;
    std::vector<std::string> pieces_;  ///< One more than places.
    std::vector<Place> places_;
};

/// How a value goes to the database where nothing is computed with it.
sql::Parameter parameter_of(sql::Dialect dialect, const Extracted& value);

/// A JSON number without exponent and without zeros behind the point if those are all: 1E+3 is
/// 1000, 3.0 is 3 (an integer column of PostgreSQL takes nothing else). Empty: it is none, or has
/// an exponent beyond number_exponent_max.
std::string plain_number(std::string_view json);
inline constexpr int number_exponent_max = 100;

/// `name` (or, if `with_schema`, also schema.name) in the dialect's quotes, exactly as it is
/// spelled. Error invalid_argument: not 1 to 63 of letters, digits, _ and $, beginning with a
/// letter or _.
base::Result<std::string> quoted_name(sql::Dialect dialect, std::string_view name, bool with_schema,
                                      const std::string& subject);

}  // namespace semel::consumer
