// What both HTTP targets do: read messages out of the bytes, whole and in pieces, and compare what
// came out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/assert.hpp"
#include "http/parser.hpp"

namespace semel::fuzz {

struct Read {
    std::size_t messages = 0;
    std::string text;  // heads and bodies of the complete messages
    bool refused = false;

    friend bool operator==(const Read&, const Read&) = default;
};

inline bool inside(std::string_view part, std::string_view whole) {
    return part.empty() || (part.data() >= whole.data() &&
                            part.data() + part.size() <= whole.data() + whole.size());
}

inline void check(const http::MessageHead& head, http::Parser::Kind kind) {
    std::size_t hosts = 0;
    for (const http::Header& h : head.headers) {
        SEMEL_ASSERT(!h.name.empty() && inside(h.name, head.text), "names are views of the head");
        SEMEL_ASSERT(inside(h.value, head.text), "values are views of the head");
        SEMEL_ASSERT(h.name.find_first_of(" \t:\r\n") == std::string_view::npos,
                     "a name is a token");
        SEMEL_ASSERT(h.value.find_first_of(std::string_view("\r\n\0", 3)) == std::string_view::npos,
                     "a value cannot end its line");
        if (http::name_is(h.name, "host")) ++hosts;
    }
    SEMEL_ASSERT(!(head.chunked && head.content_length), "a message has one framing");
    if (kind == http::Parser::Kind::request) {
        SEMEL_ASSERT(hosts == 1 || (hosts == 0 && head.minor == 0), "one Host");
        SEMEL_ASSERT(head.target.starts_with('/'), "origin form only");
        SEMEL_ASSERT(
            head.target.find_first_of(std::string_view(" \t\r\n#\0", 6)) == std::string_view::npos,
            "a target cannot end the request line");
        SEMEL_ASSERT(!head.to_eof, "a request does not end with the stream");
    } else {
        SEMEL_ASSERT(head.status >= 100 && head.status <= 599, "a status is 100 to 599");
    }
}

inline Read read(std::string_view bytes, std::size_t step, http::Parser::Kind kind,
                 bool answers_head) {
    using State = http::Parser::State;
    Read out;
    http::Parser parser(kind, {.head_max_bytes = 1024, .headers_max = 16, .target_max_bytes = 256});
    parser.begin(answers_head);
    std::string body;
    std::string piece;
    const auto complete = [&] {
        check(parser.head(), kind);
        ++out.messages;
        out.text += parser.head().text;
        out.text += body;
        body.clear();
    };
    for (std::size_t at = 0; at < bytes.size();) {
        piece.assign(bytes.substr(at, step));
        const http::Parser::Taken taken = parser.state() == State::head
                                              ? parser.take_head(piece)
                                              : parser.take_body(piece.data(), piece.size());
        if (parser.state() == State::refused) {
            SEMEL_ASSERT(parser.refusal().status >= 400, "a refusal has a status");
            out.refused = true;
            return out;
        }
        SEMEL_ASSERT(taken.bytes > 0 && taken.bytes <= piece.size(), "bytes are taken or refused");
        SEMEL_ASSERT(inside(taken.body, piece), "a body is decoded in place");
        body += taken.body;
        at += taken.bytes;
        if (parser.state() != State::complete) continue;
        complete();
        if (!parser.head().keep_alive && parser.head().status / 100 != 1) return out;
        parser.begin(answers_head);
    }
    if (parser.state() == State::body && parser.finish()) complete();
    return out;
}

/// The first byte chooses how the others are cut; the result must not depend on it.
inline void read_both_ways(const std::uint8_t* data, std::size_t size, http::Parser::Kind kind) {
    if (size == 0) return;
    const std::size_t step = 1 + (data[0] & 0x1f);
    const bool answers_head = kind == http::Parser::Kind::response && (data[0] & 0x80) != 0;
    const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
    const Read whole = read(bytes, std::max<std::size_t>(bytes.size(), 1), kind, answers_head);
    const Read pieces = read(bytes, step, kind, answers_head);
    SEMEL_ASSERT(whole == pieces, "the cuts between reads change nothing");
}

}  // namespace semel::fuzz
