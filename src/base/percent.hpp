// Percent-encoding of URLs' parts.
#pragma once

#include <string>
#include <string_view>

namespace semel::base {

/// RFC 3986. A '%' that no two hexadecimal digits follow stays as it is.
std::string percent_decoded(std::string_view text);
/// All but the unreserved characters of RFC 3986.
std::string percent_encoded(std::string_view text);

}  // namespace semel::base
