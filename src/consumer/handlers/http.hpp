// The handler `http`: a service in any language gets the message as a POST. What it gets and may
// answer: docs/guides/http-handlers.md.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "config/consumers.hpp"
#include "consumer/handler.hpp"
#include "http/client.hpp"

namespace semel::consumer {

/// Of a message's key, trace and headers together, as header lines: less than common servers take
/// (Tomcat: 8 KiB for all of a head, Python: 100 lines). What does not fit is left out, and
/// `Semel-Headers-Cut: true` says so.
inline constexpr std::size_t message_headers_max_bytes = 6 * 1024;
inline constexpr std::size_t message_headers_max_lines = 64;
/// Of an answer's body that are read (and dropped) so that the connection can be kept; a larger one
/// is not read on.
inline constexpr std::size_t handled_body_max_bytes = 1024 * 1024;
/// Of a refusal's body that are looked at for `"fatal": true`.
inline constexpr std::size_t refusal_body_max_bytes = 64 * 1024;
/// A longer Retry-After counts as this.
inline constexpr std::chrono::hours retry_after_max{1};

struct HttpHandlerWays {
    /// The body of a 2xx that is not empty is the handler's answer.
    bool answers = false;
    /// A request on a connection that was kept, and that broke without a byte of an answer, is sent
    /// once more, on a new one, under the same id: servers close connections that were idle without
    /// a word. It may then run twice, as after any unknown outcome that is run again (on_unknown:
    /// rerun); else it is an unknown outcome.
    bool repeats_on_new_connection = true;
};

/// `client` is the loop's own and outlives the handler, as the loop does. `done` is called on the
/// loop, never before handle returns. Destroying it leaves running calls to their end. Error
/// invalid_argument: the URL.
base::Result<std::unique_ptr<Handler>> make_http_handler(runtime::Loop& loop, http::Client& client,
                                                         config::HttpHandlerConfig config,
                                                         HttpHandlerWays ways = {});

/// The header lines of a message, Content-Type included. Pure.
std::string http_handler_headers(const Message& message, const Attempt& attempt);

/// `text` as a header's value, so that percent-decoding gives it back, whatever it is: as it is if
/// it is visible ASCII without a
/// `%` before two hexadecimal digits (and, with `blanks`, if its only blanks are between such
/// characters); else all bytes that are not, and `%`, as %XX.
std::string header_value_of(std::string_view text, bool blanks);

/// Retry-After as a wait: seconds or an HTTP date, at most retry_after_max; 0: neither, or in the
/// past. `now_us`: the wall clock.
milliseconds retry_after_of(std::string_view value, std::int64_t now_us);

}  // namespace semel::consumer
