// Addresses and URLs as the configuration writes them.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "config/config.hpp"

namespace semel::config {

bool all_digits(std::string_view text);

/// A name or an address; of IPv6 what stands between the brackets.
bool is_host(std::string_view host, bool bracketed);

/// HOST:PORT or [IPV6]:PORT; nullopt: neither.
std::optional<Address> address_of(std::string_view text);

struct BaseUrl {
    std::string host;
    std::string path;
    bool tls = false;
};

/// http(s)://HOST[:PORT][/PATH] without user, query and fragment; nullopt: it is none.
std::optional<BaseUrl> base_url_of(std::string_view url);

}  // namespace semel::config
