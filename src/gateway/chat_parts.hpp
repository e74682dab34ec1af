// What the paths of /api/chat have in common: how their parts and queries are read, and the
// problems that they answer with.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "gateway/problem.hpp"

namespace semel::gateway {

/// The first value of a query's parameter, decoded; nullopt: it has none.
std::optional<std::string> query_value(std::string_view query, std::string_view name);
/// A decimal number of 1 to 18 digits; nullopt: it is none.
std::optional<std::uint64_t> number(const std::optional<std::string>& text);

/// 404. `what` begins the sentence: "This session".
Problem not_found(std::string what);
/// 400.
Problem bad_request(std::string detail);

}  // namespace semel::gateway
