// Nothing of the URL is quoted in an error: a slash that somebody forgot to encode would put a part
// of the password there.
#include "stores/mysql/url.hpp"

#include <charconv>
#include <optional>

namespace semel::stores::mysql {
namespace {

constexpr std::size_t kMaxUrlBytes = 4096;
constexpr std::size_t kMaxHostBytes = 255;
constexpr std::size_t kMaxNameBytes = 256;        // of a user or database: 64 or 80 characters
constexpr std::size_t kMaxSocketPathBytes = 107;  // sockaddr_un
constexpr const char* kEncode =
    "; in user and password, characters such as @ : / ? # % must be percent-encoded";

base::Error refused(std::string why) {
    return {.code = base::ErrorCode::invalid_argument, .detail = "the MySQL URL " + std::move(why)};
}

bool digit(char c) { return c >= '0' && c <= '9'; }
bool letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

template <class Allowed>
bool all(std::string_view text, Allowed allowed) {
    for (const char c : text) {
        if (!allowed(c)) return false;
    }
    return true;
}

std::optional<std::string> decoded(std::string_view text) {
    std::string out;
    for (std::size_t i = 0; i < text.size(); ++i) {
        if (text[i] != '%') {
            out += text[i];
            continue;
        }
        unsigned value = 0;
        if (i + 2 >= text.size()) return {};
        const char* const begin = text.data() + i + 1;
        if (std::from_chars(begin, begin + 2, value, 16).ptr != begin + 2) return {};
        // The server's protocol ends names at a NUL.
        if (value == 0) return {};
        out += static_cast<char>(value);
        i += 2;
    }
    return out;
}

// Empty: fine.
std::string take_user(std::string_view text, Target& target) {
    const std::size_t colon = text.find(':');
    const bool password = colon != std::string_view::npos;
    if (password && text.find(':', colon + 1) != std::string_view::npos)
        return std::string("has more than one colon before its @") + kEncode;
    auto user = decoded(text.substr(0, colon));
    auto secret = password ? decoded(text.substr(colon + 1)) : std::string{};
    if (!user || !secret)
        return std::string("has a % that two hexadecimal digits (not 00) do not follow") + kEncode;
    if (user->empty() || user->size() > kMaxNameBytes)
        return "names no user: mysql://user:password@host:port/database";
    target.user = std::move(*user);
    target.password = std::move(*secret);
    return {};
}

std::string take_address(std::string_view text, Target& target) {
    std::string_view rest;
    if (text.starts_with('[')) {
        const std::size_t end = text.find(']');
        if (end == std::string_view::npos) return "has a [ without ] around an IPv6 address";
        target.host = text.substr(1, end - 1);
        rest = text.substr(end + 1);
        if (target.host.find(':') == std::string::npos || !all(target.host, [](char c) {
                return digit(c) || (letter(c) && (c | 32) <= 'f') || c == ':' || c == '.';
            }))
            return "has something other than an IPv6 address between [ and ]";
    } else {
        const std::size_t colon = text.find(':');
        target.host = text.substr(0, colon);
        rest = colon == std::string_view::npos ? std::string_view{} : text.substr(colon);
        if (target.host.empty()) return "names no host";
        if (target.host.size() > kMaxHostBytes || !all(target.host, [](char c) {
                return letter(c) || digit(c) || c == '.' || c == '-' || c == '_';
            }))
            return std::string(
                       "has a host name with characters other than letters, digits, dots and "
                       "hyphens") +
                   kEncode;
    }
    if (rest.empty()) return {};
    unsigned port = 0;
    const char* const end = rest.data() + rest.size();
    const bool number = rest.size() > 1 && rest[0] == ':' && digit(rest[1]) &&
                        std::from_chars(rest.data() + 1, end, port).ptr == end;
    if (!number || port == 0 || port > 65'535)
        return std::string("has a port that is no number from 1 to 65535") + kEncode;
    target.port = static_cast<std::uint16_t>(port);
    return {};
}

std::string take_setting(std::string_view name, const std::string& value, Target& target) {
    const bool path = value.size() > 1 && value[0] == '/';
    if (name == "socket") {
        if (!path || value.size() > kMaxSocketPathBytes)
            return "has a socket that is no absolute path of at most 107 bytes";
        target.socket = value;
    } else if (name == "ca_file") {
        if (!path) return "has a ca_file that is no absolute path";
        target.ca_file = value;
    } else if (name == "tls") {
        if (value != "required" && value != "verify")
            return "has a tls that is neither required nor verify";
        target.tls = value == "verify" ? Tls::verify : Tls::required;
    } else {
        return "has a setting other than socket, tls and ca_file behind its ?";
    }
    return {};
}

std::string take_query(std::string_view query, Target& target) {
    while (!query.empty()) {
        const std::string_view one = query.substr(0, query.find('&'));
        query.remove_prefix(std::min(one.size() + 1, query.size()));
        const std::size_t equals = one.find('=');
        if (equals == std::string_view::npos) return "has a setting without = behind its ?";
        const auto value = decoded(one.substr(equals + 1));
        if (!value)
            return "has a % that two hexadecimal digits (not 00) do not follow behind its ?";
        std::string problem = take_setting(one.substr(0, equals), *value, target);
        if (!problem.empty()) return problem;
    }
    if (!target.ca_file.empty() && target.tls != Tls::verify)
        return "names a ca_file, which only tls=verify looks at";
    if (!target.socket.empty() && target.tls != Tls::off) return "asks for TLS over a unix socket";
    return {};
}

std::string take(std::string_view url, Target& target) {
    constexpr std::string_view kScheme = "mysql://";
    if (url.size() > kMaxUrlBytes) return "is longer than 4096 bytes";
    if (!all(url, [](char c) { return c > ' ' && c < 0x7f; }))
        return "has a space, control or non-ASCII character: percent-encode it";
    if (!url.starts_with(kScheme)) return "must begin with mysql:// (for MariaDB as well)";
    if (url.find('#') != std::string_view::npos) return "has a #: percent-encode it in a password";
    std::string_view rest = url.substr(kScheme.size());
    const std::size_t slash = rest.find('/');
    std::string_view authority = rest.substr(0, slash);
    if (authority.find('?') != std::string_view::npos)
        return "has a ? before its database, or one in its password, which must be percent-encoded";
    const std::size_t at = authority.find('@');
    if (at == std::string_view::npos)
        return "names no user: mysql://user:password@host:port/database";
    if (authority.find('@', at + 1) != std::string_view::npos)
        return "has more than one @; percent-encode it in a password";
    std::string problem = take_user(authority.substr(0, at), target);
    if (problem.empty()) problem = take_address(authority.substr(at + 1), target);
    if (!problem.empty()) return problem;
    const std::string_view path =
        slash == std::string_view::npos ? std::string_view{} : rest.substr(slash + 1);
    const std::size_t question = path.find('?');
    auto database = decoded(path.substr(0, question));
    if (!database || database->empty() || database->size() > kMaxNameBytes ||
        database->find('/') != std::string::npos)
        return "names no database: mysql://user:password@host:port/database";
    target.database = std::move(*database);
    return question == std::string_view::npos ? std::string{}
                                              : take_query(path.substr(question + 1), target);
}

}  // namespace

base::Result<Target> parse_url(std::string_view url) {
    Target target;
    std::string problem = take(url, target);
    if (!problem.empty()) return refused(std::move(problem));
    return target;
}

std::string describe(const Target& target) {
    if (!target.socket.empty()) return target.socket;
    const bool v6 = target.host.find(':') != std::string::npos;
    return (v6 ? "[" + target.host + "]" : target.host) + ":" + std::to_string(target.port);
}

}  // namespace semel::stores::mysql
