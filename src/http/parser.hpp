// Parser: one HTTP/1.1 message after the other out of a byte stream, strictly. llhttp does the
// grammar; what it lets pass is checked here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "http/message.hpp"

namespace semel::http {

struct ParserLimits {
    std::size_t head_max_bytes = 64 * 1024;    ///< Start line and headers together.
    std::size_t headers_max = 200;             ///< Header lines.
    std::size_t target_max_bytes = 16 * 1024;  ///< Requests only.
};

/// Framing bytes (chunk sizes, extensions, trailers) in one gap between two pieces of body.
inline constexpr std::size_t kFramingGapMaxBytes = 16 * 1024;
/// Framing bytes of a whole message: this, and as often the body's own length. A body in chunks of
/// one byte has 5 a byte.
inline constexpr std::size_t kFramingBaseMaxBytes = 64 * 1024;
inline constexpr std::uint64_t kFramingPerBodyByte = 16;
/// Empty lines before a request line that are skipped (clients that end a body with one too many).
inline constexpr std::size_t kBlankLinesMax = 2;
/// A Content-Length or a chunk above it is taken for an attack on arithmetic, not for a length.
inline constexpr std::uint64_t kLengthMax = std::uint64_t{1} << 53;

/// Why a message was refused. `status` and `code` are what a server answers; a client only looks at
/// `reason`.
struct Refusal {
    int status = 400;
    const char* code = "malformed_request";
    const char* reason = "the request is not valid HTTP/1.1";
};

/// The head of a message that was received. Views point into `text`.
struct MessageHead {
    std::string text;  ///< The raw head: start line, header lines, empty line.
    std::vector<Header> headers;
    std::string_view method;  ///< Requests only, as is `target`.
    std::string_view target;
    int status = 0;  ///< Responses only.
    int minor = 1;   ///< HTTP/1.minor
    std::optional<std::uint64_t> content_length;
    bool chunked = false;
    bool keep_alive =
        false;  ///< By version and Connection. A body that ends with the stream never keeps.
    bool to_eof = false;           ///< Responses only: the body ends with the stream.
    bool bodyless = false;         ///< No body follows, whatever the headers say.
    bool expect_continue = false;  ///< Requests only.
};

/// Sans-I/O, for one connection at a time. After a refusal only begin() may be called.
class Parser {
  public:
    enum class Kind { request, response };
    enum class State { head, body, complete, refused };
    struct Taken {
        std::size_t bytes = 0;  ///< How many of the given bytes belong to what was read; the others
                                ///< are the next message's.
        std::string_view body;  ///< Decoded body bytes; take_body() only.
    };

    Parser(Kind kind, ParserLimits limits);
    ~Parser();
    Parser(const Parser&) = delete;
    Parser& operator=(const Parser&) = delete;

    /// Forgets the message and expects the head of the next one. `bodyless`: it answers a HEAD
    /// request.
    void begin(bool bodyless = false);
    [[nodiscard]] State state() const { return state_; }
    /// In state `head`: some bytes of the head were seen.
    [[nodiscard]] bool started() const { return !head_.text.empty() || blank_bytes_ > 0; }
    [[nodiscard]] const Refusal& refusal() const { return refusal_; }
    /// From state `body` or `complete` on, until begin().
    [[nodiscard]] const MessageHead& head() const { return head_; }

    /// State `head`: takes bytes up to the head's end at most. Same verdict however the bytes are
    /// cut.
    Taken take_head(std::string_view bytes);
    /// State `body`: takes bytes up to the message's end at most. Decodes chunks in place, so that
    /// `body` is one piece in `bytes`. May take bytes and give none.
    Taken take_body(char* bytes, std::size_t size);
    /// The stream ended. True if the message is complete by that (a response without framing, whose
    /// state is then `complete`).
    bool finish();

  private:
    struct Llhttp;
    /// The first line is not over at `length` bytes, but must be: 32 is the longest method, two
    /// blanks, the version and CR.
    [[nodiscard]] bool request_line_too_long(std::size_t length) const {
        return kind_ == Kind::request && lines_ == 0 && length > limits_.target_max_bytes + 32;
    }
    bool scan_line(std::size_t line_begin, std::size_t line_end);
    void parse_head();
    void check_request();
    void check_response();
    void refuse(int status, const char* code, const char* reason);
    void malformed(const char* reason) { refuse(400, "malformed_request", reason); }

    const Kind kind_;
    const ParserLimits limits_;
    State state_ = State::head;
    Refusal refusal_;
    MessageHead head_;
    std::unique_ptr<Llhttp> llhttp_;
    // Of the head's scan.
    std::size_t line_begin_ = 0;
    std::size_t scanned_ = 0;
    std::size_t lines_ = 0;
    std::size_t blank_bytes_ = 0;
    bool answers_head_ = false;
};

}  // namespace semel::http
