#include <charconv>

#include "brokers/rabbitmq/rabbitmq.hpp"

namespace semel::brokers::rabbitmq {

namespace {

base::Error invalid(const std::string& why) {
    return {.code = base::ErrorCode::invalid_argument,
            .detail = "rabbitmq: the url " + why +
                      ": write amqp://user:password@host:port/vhost (amqps for TLS)"};
}

// False if a % is not followed by two hexadecimal digits.
bool decode(std::string_view text, std::string& out) {
    out.clear();
    for (std::size_t i = 0; i < text.size(); ++i) {
        if (text[i] != '%') {
            out += text[i];
            continue;
        }
        unsigned value = 0;
        if (i + 2 >= text.size()) return false;
        const char* const digits = text.data() + i + 1;
        if (std::from_chars(digits, digits + 2, value, 16).ptr != digits + 2) return false;
        out += static_cast<char>(value);
        i += 2;
    }
    return true;
}

}  // namespace

base::Result<Endpoint> parse_url(const std::string& url) {
    Endpoint out;
    std::string_view rest = url;
    if (rest.starts_with("amqps://")) {
        out.tls = true;
        out.port = 5671;
        rest.remove_prefix(8);
    } else if (rest.starts_with("amqp://")) {
        rest.remove_prefix(7);
    } else {
        return invalid("does not begin with amqp:// or amqps://");
    }
    std::string_view path;
    if (const auto slash = rest.find('/'); slash != rest.npos) {
        path = rest.substr(slash + 1);
        rest = rest.substr(0, slash);
    }
    if (path.find_first_of("/?#") != path.npos)
        return invalid("has more than a vhost behind the host (write a / in its name as %2f)");
    if (!path.empty() && !decode(path, out.vhost)) return invalid("has a bad % in the vhost");
    if (const auto at = rest.rfind('@'); at != rest.npos) {
        const std::string_view login = rest.substr(0, at);
        rest.remove_prefix(at + 1);
        const auto colon = login.find(':');
        if (!decode(login.substr(0, colon), out.user) ||
            (colon != login.npos && !decode(login.substr(colon + 1), out.password)))
            return invalid("has a bad % in the user or password");
    }
    std::string_view port;
    if (rest.starts_with('[')) {  // IPv6
        const auto end = rest.find(']');
        if (end == rest.npos) return invalid("has an address without its ]");
        out.host = rest.substr(1, end - 1);
        port = rest.substr(end + 1);
    } else {
        const auto colon = rest.find(':');
        out.host = rest.substr(0, colon);
        port = colon == rest.npos ? std::string_view{} : rest.substr(colon);
    }
    if (out.host.empty()) return invalid("names no host");
    if (!port.empty()) {
        const char* const end = port.data() + port.size();
        const auto [at, code] = std::from_chars(port.data() + 1, end, out.port);
        if (port.front() != ':' || at != end || code != std::errc{} || out.port == 0)
            return invalid("has a bad port");
    }
    return out;
}

}  // namespace semel::brokers::rabbitmq
