#include "config/urls.hpp"

#include <algorithm>
#include <charconv>
#include <limits>

namespace semel::config {

bool all_digits(std::string_view text) {
    return !text.empty() &&
           std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

namespace {

std::optional<std::uint16_t> port_number(std::string_view text) {
    unsigned value = 0;
    if (!all_digits(text) || text.size() > 5) return std::nullopt;
    std::from_chars(text.data(), text.data() + text.size(), value);
    if (value > std::numeric_limits<std::uint16_t>::max()) return std::nullopt;
    return static_cast<std::uint16_t>(value);
}

}  // namespace

bool is_host(std::string_view host, bool bracketed) {
    return !host.empty() && std::all_of(host.begin(), host.end(), [&](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
               c == '.' || (bracketed ? c == ':' || c == '%' : c == '-' || c == '_');
    });
}

std::optional<Address> address_of(std::string_view text) {
    const std::size_t colon = text.rfind(':');
    if (colon == std::string_view::npos) return std::nullopt;
    const auto port = port_number(text.substr(colon + 1));
    std::string_view host = text.substr(0, colon);
    const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
    if (bracketed) host = host.substr(1, host.size() - 2);
    if (!port || !is_host(host, bracketed)) return std::nullopt;
    return Address{std::string(host), *port};
}

std::optional<BaseUrl> base_url_of(std::string_view url) {
    BaseUrl out;
    if (url.starts_with("https://")) {
        out.tls = true;
        url.remove_prefix(8);
    } else if (url.starts_with("http://")) {
        url.remove_prefix(7);
    } else {
        return std::nullopt;
    }
    const bool visible =
        std::all_of(url.begin(), url.end(), [](char c) { return c > 0x20 && c < 0x7F; });
    if (!visible || url.find_first_of("?#@\\") != std::string_view::npos) return std::nullopt;
    const std::size_t slash = url.find('/');
    if (slash != std::string_view::npos) out.path = url.substr(slash);
    const std::string_view authority = url.substr(0, slash);
    const auto address = address_of(authority);
    const bool bracketed =
        authority.size() > 2 && authority.front() == '[' && authority.back() == ']';
    if (address && address->port != 0) {
        out.host = address->host;
    } else if (bracketed && is_host(authority.substr(1, authority.size() - 2), true)) {
        out.host = authority.substr(1, authority.size() - 2);
    } else if (is_host(authority, false)) {
        out.host = authority;
    } else {
        return std::nullopt;
    }
    return out;
}

}  // namespace semel::config
