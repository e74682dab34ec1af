#include "http/message.hpp"

#include <charconv>

namespace semel::http {

namespace {

constexpr char lower(char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c;
}

}  // namespace

bool name_is(std::string_view name, std::string_view expected) {
    if (name.size() != expected.size()) return false;
    for (std::size_t i = 0; i < name.size(); ++i) {
        if (lower(name[i]) != lower(expected[i])) return false;
    }
    return true;
}

std::optional<std::string_view> RequestHead::header(std::string_view name) const {
    for (const Header& h : headers) {
        if (name_is(h.name, name)) return h.value;
    }
    return std::nullopt;
}

std::vector<std::string_view> RequestHead::all(std::string_view name) const {
    std::vector<std::string_view> values;
    for (const Header& h : headers) {
        if (name_is(h.name, name)) values.push_back(h.value);
    }
    return values;
}

void ResponseHead::add(std::string_view name, std::uint64_t value) {
    char digits[20];
    const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
    add(name, std::string_view(digits, static_cast<std::size_t>(end - digits)));
}

bool is_hop_by_hop(std::string_view name) {
    // By length first: most names are decided without a comparison.
    switch (name.size()) {
        case 2:
            return name_is(name, "te");
        case 4:
            return name_is(name, "host");
        case 6:
            return name_is(name, "expect");
        case 7:
            return name_is(name, "upgrade") || name_is(name, "trailer");
        case 10:
            return name_is(name, "connection") || name_is(name, "keep-alive");
        case 14:
            return name_is(name, "content-length") || name_is(name, "http2-settings");
        case 17:
            return name_is(name, "transfer-encoding");
        default:
            break;
    }
    return name.size() > 6 && name_is(name.substr(0, 6), "proxy-");
}

bool named_by_connection(const std::vector<Header>& headers, std::string_view name) {
    for (const Header& h : headers) {
        if (!name_is(h.name, "connection")) continue;
        std::string_view rest = h.value;
        while (!rest.empty()) {
            const std::size_t comma = rest.find(',');
            std::string_view token = rest.substr(0, comma);
            rest = comma == std::string_view::npos ? std::string_view{} : rest.substr(comma + 1);
            while (!token.empty() && (token.front() == ' ' || token.front() == '\t')) {
                token.remove_prefix(1);
            }
            while (!token.empty() && (token.back() == ' ' || token.back() == '\t')) {
                token.remove_suffix(1);
            }
            if (name_is(token, name)) return true;
        }
    }
    return false;
}

std::string_view reason_phrase(int status) {
    switch (status) {
        case 100:
            return "Continue";
        case 101:
            return "Switching Protocols";
        case 200:
            return "OK";
        case 201:
            return "Created";
        case 202:
            return "Accepted";
        case 203:
            return "Non-Authoritative Information";
        case 204:
            return "No Content";
        case 205:
            return "Reset Content";
        case 206:
            return "Partial Content";
        case 300:
            return "Multiple Choices";
        case 301:
            return "Moved Permanently";
        case 302:
            return "Found";
        case 303:
            return "See Other";
        case 304:
            return "Not Modified";
        case 307:
            return "Temporary Redirect";
        case 308:
            return "Permanent Redirect";
        case 400:
            return "Bad Request";
        case 401:
            return "Unauthorized";
        case 402:
            return "Payment Required";
        case 403:
            return "Forbidden";
        case 404:
            return "Not Found";
        case 405:
            return "Method Not Allowed";
        case 406:
            return "Not Acceptable";
        case 407:
            return "Proxy Authentication Required";
        case 408:
            return "Request Timeout";
        case 409:
            return "Conflict";
        case 410:
            return "Gone";
        case 411:
            return "Length Required";
        case 412:
            return "Precondition Failed";
        case 413:
            return "Content Too Large";
        case 414:
            return "URI Too Long";
        case 415:
            return "Unsupported Media Type";
        case 416:
            return "Range Not Satisfiable";
        case 417:
            return "Expectation Failed";
        case 421:
            return "Misdirected Request";
        case 422:
            return "Unprocessable Content";
        case 424:
            return "Failed Dependency";
        case 425:
            return "Too Early";
        case 426:
            return "Upgrade Required";
        case 428:
            return "Precondition Required";
        case 429:
            return "Too Many Requests";
        case 431:
            return "Request Header Fields Too Large";
        case 451:
            return "Unavailable For Legal Reasons";
        case 500:
            return "Internal Server Error";
        case 501:
            return "Not Implemented";
        case 502:
            return "Bad Gateway";
        case 503:
            return "Service Unavailable";
        case 504:
            return "Gateway Timeout";
        case 505:
            return "HTTP Version Not Supported";
        case 507:
            return "Insufficient Storage";
        case 529:
            return "Site Overloaded";
        default:
            break;
    }
    return "Status";
}

}  // namespace semel::http
