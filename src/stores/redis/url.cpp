// parse_url and describe. Nothing of the URL is quoted in an error: a slash that somebody forgot to
// encode would put a part of the password there.
#include <charconv>
#include <optional>

#include "stores/redis/client.hpp"

namespace semel::stores::redis {

namespace {

constexpr std::size_t kMaxUrlBytes = 4096;
constexpr std::size_t kMaxHostBytes = 255;
constexpr std::size_t kMaxSentinels = 64;
constexpr std::size_t kMaxSocketPathBytes = 107;  // sockaddr_un
constexpr int kMaxDatabase = 1'000'000;  // the server's own limit is its setting `databases`
constexpr std::uint16_t kServerPort = 6379;
constexpr std::uint16_t kSentinelPort = 26379;

base::Error refused(std::string why) {
    return {.code = base::ErrorCode::invalid_argument, .detail = "the Redis URL " + std::move(why)};
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

std::optional<int> number(std::string_view text, int limit) {
    int value = 0;
    if (text.empty() || !all(text, digit) || (text.size() > 1 && text[0] == '0')) return {};
    const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (code != std::errc{} || end != text.data() + text.size() || value > limit) return {};
    return value;
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
        out += static_cast<char>(value);
        i += 2;
    }
    return out;
}

// Empty: fine.
std::string take_user(std::string_view text, Target& target) {
    constexpr const char* kEncode =
        "; in user and password, characters such as @ : / ? # % must be percent-encoded";
    const std::size_t colon = text.find(':');
    const bool password = colon != std::string_view::npos;
    if (password && text.find(':', colon + 1) != std::string_view::npos)
        return std::string("has more than one colon before its @") + kEncode;
    const auto user = decoded(text.substr(0, colon));
    const auto secret = password ? decoded(text.substr(colon + 1)) : std::string{};
    if (!user || !secret)
        return std::string("has a % that two hexadecimal digits do not follow") + kEncode;
    if (user->empty() && secret->empty()) return "has neither user nor password before its @";
    target.user = *user;
    target.password = *secret;
    return {};
}

std::string take_address(std::string_view text, std::uint16_t port, Target& target) {
    constexpr const char* kEncode =
        "; characters such as @ : / ? # in a password must be percent-encoded";
    Address address{.port = port};
    std::string_view rest;
    if (text.starts_with('[')) {
        const std::size_t end = text.find(']');
        if (end == std::string_view::npos) return "has a [ without ] around an IPv6 address";
        address.host = text.substr(1, end - 1);
        rest = text.substr(end + 1);
        if (address.host.find(':') == std::string::npos || !all(address.host, [](char c) {
                return digit(c) || (letter(c) && (c | 32) <= 'f') || c == ':' || c == '.';
            }))
            return "has something other than an IPv6 address between [ and ]";
    } else {
        const std::size_t colon = text.find(':');
        address.host = text.substr(0, colon);
        rest = colon == std::string_view::npos ? std::string_view{} : text.substr(colon);
        if (address.host.empty()) return "names no host";
        if (address.host.size() > kMaxHostBytes || !all(address.host, [](char c) {
                return letter(c) || digit(c) || c == '.' || c == '-' || c == '_';
            }))
            return std::string(
                       "has a host name with characters other than letters, digits, dots and "
                       "hyphens") +
                   kEncode;
    }
    if (!rest.empty()) {
        const auto given = rest.starts_with(':') ? number(rest.substr(1), 65'535) : std::nullopt;
        if (!given || *given == 0)
            return std::string("has a port that is no number from 1 to 65535") + kEncode;
        address.port = static_cast<std::uint16_t>(*given);
    }
    target.addresses.push_back(std::move(address));
    return {};
}

std::string take_database(std::string_view text, Target& target) {
    const auto database = number(text, kMaxDatabase);
    if (!database) return "has a database that is no number from 0 to 1000000";
    target.database = *database;
    return {};
}

std::string take_socket(std::string_view rest, Target& target) {
    const std::size_t question = rest.find('?');
    const auto path = decoded(rest.substr(0, question));
    if (!path || path->size() < 2 || (*path)[0] != '/' || path->find('\0') != std::string::npos)
        return "names no socket: it must be unix:///path/to/socket";
    if (path->size() > kMaxSocketPathBytes)
        return "names a socket whose path is longer than 107 bytes";
    target.path = *path;
    if (question == std::string_view::npos) return {};
    const std::string_view query = rest.substr(question + 1);
    if (!query.starts_with("db=")) return "has a query other than ?db=N";
    return take_database(query.substr(3), target);
}

std::string take_master(std::string_view fragment, Target& target) {
    if (fragment.empty() || !all(fragment, [](char c) {
            return letter(c) || digit(c) || c == '.' || c == '-' || c == '_';
        }))
        return "must end in #master-name, the name by which the sentinels watch the master "
               "(letters, digits, . - _)";
    target.master_name = fragment;
    return {};
}

std::string take(std::string_view url, Target& target) {
    if (url.size() > kMaxUrlBytes) return "is longer than 4096 bytes";
    if (!all(url, [](char c) { return c > ' ' && c < 0x7f; }))
        return "has a space, control or non-ASCII character: percent-encode it";
    const std::size_t colon = url.find("://");
    const std::string_view scheme =
        colon == std::string_view::npos ? std::string_view{} : url.substr(0, colon);
    if (scheme == "unix") {
        target.kind = Target::Kind::unix_socket;
    } else if (scheme == "redis-sentinel" || scheme == "rediss-sentinel") {
        target.kind = Target::Kind::sentinel;
    } else if (scheme != "redis" && scheme != "rediss") {
        return "must begin with redis://, rediss:// (TLS), unix://, redis-sentinel:// or "
               "rediss-sentinel://";
    }
    target.tls = scheme.starts_with("rediss");
    const bool sentinel = target.kind == Target::Kind::sentinel;

    std::string_view rest = url.substr(colon + 3);
    const std::size_t hash = rest.find('#');
    if (!sentinel && hash != std::string_view::npos)
        return "has a #, which only redis-sentinel:// has; percent-encode it in a password";
    if (sentinel) {
        const std::string problem = take_master(
            hash == std::string_view::npos ? std::string_view{} : rest.substr(hash + 1), target);
        if (!problem.empty()) return problem;
        rest = rest.substr(0, hash);
    }

    const std::size_t slash = rest.find('/');
    std::string_view authority = rest.substr(0, slash);
    if (authority.find('?') != std::string_view::npos)
        return "has a query, or a ? in its password, which must be percent-encoded";
    if (const std::size_t at = authority.find('@'); at != std::string_view::npos) {
        if (authority.find('@', at + 1) != std::string_view::npos)
            return "has more than one @; percent-encode it in a password";
        std::string problem = take_user(authority.substr(0, at), target);
        if (!problem.empty()) return problem;
        authority = authority.substr(at + 1);
    }
    const std::string_view path =
        slash == std::string_view::npos ? std::string_view{} : rest.substr(slash);
    if (target.kind == Target::Kind::unix_socket) {
        if (!authority.empty()) return "names a host: unix:///path/to/socket has three slashes";
        return take_socket(path, target);
    }
    if (path.find('?') != std::string_view::npos) return "has a query, which only unix:// has";

    while (true) {
        const std::size_t comma = sentinel ? authority.find(',') : std::string_view::npos;
        std::string problem = take_address(authority.substr(0, comma),
                                           sentinel ? kSentinelPort : kServerPort, target);
        if (!problem.empty()) return problem;
        if (comma == std::string_view::npos) break;
        if (target.addresses.size() == kMaxSentinels) return "names more than 64 sentinels";
        authority = authority.substr(comma + 1);
    }
    return path.size() <= 1 ? std::string{} : take_database(path.substr(1), target);
}

}  // namespace

base::Result<Target> parse_url(std::string_view url) {
    Target target;
    std::string problem = take(url, target);
    if (!problem.empty()) return refused(std::move(problem));
    return target;
}

std::string describe(const Target& target) {
    std::string text;
    switch (target.kind) {
        case Target::Kind::unix_socket:
            text = "unix://" + target.path;
            return target.database == 0 ? text : text + "?db=" + std::to_string(target.database);
        case Target::Kind::sentinel:
            text = target.tls ? "rediss-sentinel://" : "redis-sentinel://";
            break;
        case Target::Kind::server:
            text = target.tls ? "rediss://" : "redis://";
            break;
    }
    bool first = true;
    for (const Address& address : target.addresses) {
        if (!first) text += ',';
        first = false;
        const bool v6 = address.host.find(':') != std::string::npos;
        text += (v6 ? "[" + address.host + "]" : address.host) + ":" + std::to_string(address.port);
    }
    if (target.database != 0) text += "/" + std::to_string(target.database);
    return target.master_name.empty() ? text : text + "#" + target.master_name;
}

}  // namespace semel::stores::redis
