// Heads of HTTP/1.1 messages as values: names, values, and the few questions everybody asks of them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace semel::http {

struct Header {
    std::string_view name;   ///< As it came.
    std::string_view value;  ///< Without leading and trailing blanks.
};

/// Case-insensitive equality of header names (ASCII).
bool name_is(std::string_view name, std::string_view expected);

/// The head of a request. Views point into memory of the message that it came with and live as long as its exchange.
struct RequestHead {
    std::string_view method;  ///< Upper case, from the allow-list.
    std::string_view target;  ///< Origin-form, as it came: path and query.
    std::string_view path;    ///< The target up to '?'.
    std::string_view query;   ///< After '?', without it.
    std::vector<Header> headers;
    int http_minor = 1;
    std::optional<std::uint64_t> content_length;  ///< Absent: chunked, or no body.
    bool chunked = false;
    bool expect_continue = false;

    [[nodiscard]] bool has_body() const { return chunked || content_length.value_or(0) > 0; }
    /// The value of the first header of that name; nullopt if there is none.
    [[nodiscard]] std::optional<std::string_view> header(std::string_view name) const;
    /// All values of that name, in order.
    [[nodiscard]] std::vector<std::string_view> all(std::string_view name) const;
};

/// The head of a response that we send. Framing (Content-Length, Transfer-Encoding, Connection) is the server's: never set
/// those here.
struct ResponseHead {
    int status = 200;
    std::string headers;  ///< Ready lines, each "Name: value\r\n".

    void add(std::string_view name, std::string_view value) {
        headers.append(name).append(": ").append(value).append("\r\n");
    }
    void add(std::string_view name, std::uint64_t value);
};

/// Headers of one hop (RFC 9110 7.6.1) plus those that `Connection` names must not be passed on. Also true for Host,
/// Content-Length, Expect and Proxy-*, which each side makes anew.
bool is_hop_by_hop(std::string_view name);
/// True if a `Connection` header among `headers` names `name`: then that one is of this hop as well.
bool named_by_connection(const std::vector<Header>& headers, std::string_view name);

std::string_view reason_phrase(int status);

}  // namespace semel::http
