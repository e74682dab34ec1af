// The id that the client made: where it is read from and what is a valid one.
#pragma once

#include <string>
#include <string_view>
#include <variant>

#include "http/message.hpp"

namespace semel::gateway {

struct NoId {};
struct MalformedId {
    std::string reason;  ///< Never contains what was sent.
};
using RequestId = std::variant<NoId, std::string, MalformedId>;

/// Reads `Idempotency-Key`: bare or a structured-field string (RFC 8941 section 3.3.3), which mean
/// the same id. Where it is present no other header is looked at; else `X-Request-Id`, if `alias`
/// is set (proxies rewrite it, so only where the contract says so). Valid: 1..255 visible ASCII
/// characters, case-sensitive. Equal lines count as one; lines that differ are malformed.
RequestId read_request_id(const http::RequestHead& head, bool alias);

}  // namespace semel::gateway
