#include "http/parser.hpp"

#include <gtest/gtest.h>

#include <ostream>

namespace semel::http {
namespace {

constexpr Parser::Kind kRequest = Parser::Kind::request;
constexpr Parser::Kind kResponse = Parser::Kind::response;

// What came out of a byte stream: messages until it ended or was refused.
struct Outcome {
    std::size_t messages = 0;
    std::string body;  // of all messages, each followed by '|'
    bool refused = false;
    int status = 0;     // of the refusal
    bool whole = true;  // the stream ended where a message ended
    std::string headers;
    std::size_t left = 0;  // bytes after a message that closes

    friend bool operator==(const Outcome&, const Outcome&) = default;
    friend void PrintTo(const Outcome& o, std::ostream* to) {
        *to << "{messages " << o.messages << ", body '" << o.body.substr(0, 80) << "', refused "
            << o.refused << " with " << o.status << ", whole " << o.whole << ", left " << o.left
            << "}";
    }
};

Outcome feed(std::string_view stream, std::size_t step, Parser::Kind kind, bool end_of_stream) {
    Outcome out;
    Parser parser(kind, {.head_max_bytes = 8192, .headers_max = 20, .target_max_bytes = 1024});
    std::size_t at = 0;
    std::string body;
    const auto message_ends = [&] {
        ++out.messages;
        out.body += body + '|';
        body.clear();
        const MessageHead& head = parser.head();
        for (const Header& h : head.headers) {
            out.headers.append(h.name).append("=").append(h.value).append(";");
        }
        return head.keep_alive || head.status / 100 == 1;
    };
    while (at < stream.size()) {
        std::string piece(stream.substr(at, step));
        const Parser::Taken taken = parser.state() == Parser::State::head
                                        ? parser.take_head(piece)
                                        : parser.take_body(piece.data(), piece.size());
        if (parser.state() == Parser::State::refused) {
            out.refused = true;
            out.status = parser.refusal().status;
            return out;  // what had been decoded of the refused body depends on the cuts
        }
        EXPECT_LE(taken.bytes, piece.size());
        body += taken.body;
        at += taken.bytes;
        if (parser.state() == Parser::State::complete) {
            if (!message_ends()) {
                out.left = stream.size() - at;
                return out;
            }
            parser.begin();
        }
    }
    if (end_of_stream && parser.state() == Parser::State::body && parser.finish()) {
        message_ends();
        return out;
    }
    out.whole = parser.state() == Parser::State::head && !parser.started();
    return out;
}

enum class Verdict { accepted, refused, unfinished };

struct Case {
    const char* name;
    std::string stream;
    Verdict verdict;
    std::size_t messages = 1;  // accepted: how many
    std::string body = "|";    // accepted: their bodies
    int status = 400;          // refused
    Parser::Kind kind = kRequest;

    friend void PrintTo(const Case& c, std::ostream* to) { *to << c.name; }
};

class Table : public testing::TestWithParam<Case> {};

TEST_P(Table, has_one_verdict_however_the_bytes_are_cut) {
    const Case& c = GetParam();
    const bool eof = c.kind == kResponse;
    const Outcome whole = feed(c.stream, c.stream.size(), c.kind, eof);
    switch (c.verdict) {
        case Verdict::accepted:
            EXPECT_FALSE(whole.refused) << whole.status;
            EXPECT_TRUE(whole.whole);
            EXPECT_EQ(whole.messages, c.messages);
            EXPECT_EQ(whole.body, c.body);
            break;
        case Verdict::refused:
            EXPECT_TRUE(whole.refused) << "bodies: " << whole.body;
            EXPECT_EQ(whole.status, c.status);
            break;
        case Verdict::unfinished:
            EXPECT_FALSE(whole.refused) << whole.status;
            EXPECT_FALSE(whole.whole);
            EXPECT_EQ(whole.messages, 0u);
            break;
    }
    for (const std::size_t step : {1u, 2u, 3u, 7u, 61u}) {
        EXPECT_EQ(feed(c.stream, step, c.kind, eof), whole) << "in steps of " << step;
    }
}

std::vector<Case> cases() {
    using enum Verdict;
    const std::string p = "POST / HTTP/1.1\r\nHost: a\r\n";
    const std::string chunked = p + "Transfer-Encoding: chunked\r\n\r\n";
    const std::string get = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";
    const std::string r = "HTTP/1.1 200 OK\r\n";
    const std::string empty_chunked = "\r\n\r\n0\r\n\r\n";
    return {
        {"content_length", p + "Content-Length: 3\r\n\r\nabc", accepted, 1, "abc|"},
        {"length_then_chunked",
         p + "Content-Length: 3\r\nTransfer-Encoding: chunked" + empty_chunked, refused},
        {"chunked_then_length",
         p + "Transfer-Encoding: chunked\r\nContent-Length: 3" + empty_chunked, refused},
        {"identity_then_length", p + "Transfer-Encoding: identity\r\nContent-Length: 3\r\n\r\nabc",
         refused},
        {"two_equal_lengths", p + "Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", refused},
        {"two_lengths", p + "Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", refused},
        {"length_list", p + "Content-Length: 3, 3\r\n\r\nabc", refused},
        {"length_plus", p + "Content-Length: +3\r\n\r\nabc", refused},
        {"length_minus", p + "Content-Length: -1\r\n\r\nabc", refused},
        {"length_trailing_blank", p + "Content-Length: 3 \r\n\r\nabc", accepted, 1, "abc|"},
        {"length_with_blank", p + "Content-Length: 1 2\r\n\r\nabc", refused},
        {"length_hex", p + "Content-Length: 0x3\r\n\r\nabc", refused},
        {"length_empty", p + "Content-Length: \r\n\r\nabc", refused},
        {"length_over_64_bits", p + "Content-Length: 18446744073709551616\r\n\r\nabc", refused},
        {"length_64_bits", p + "Content-Length: 18446744073709551615\r\n\r\nabc", refused, 0, "",
         413},
        {"length_leading_zeros", p + "Content-Length: 0000000003\r\n\r\nabc", accepted, 1, "abc|"},
        {"folded_header", p + "X-A: b\r\n c\r\nContent-Length: 0\r\n\r\n", refused},
        {"folded_header_tab", p + "X-A: b\r\n\tc\r\n\r\n", refused},
        {"folded_coding", p + "Transfer-Encoding:\r\n chunked" + empty_chunked, refused},
        {"folded_length", p + "Content-Length: 1\r\n 2\r\n\r\nabcdefghijkl", refused},
        {"folded_request_line", "POST / HTTP/1.1\r\n X: y\r\nHost: a\r\n\r\n", refused},
        {"bare_lf_everywhere", "POST / HTTP/1.1\nHost: a\nContent-Length: 3\n\nabc", refused},
        {"bare_lf_one_header", "POST / HTTP/1.1\r\nHost: a\nContent-Length: 3\r\n\r\nabc", refused},
        {"bare_lf_ends_head", p + "Content-Length: 3\r\n\nabc", refused},
        {"bare_cr_in_value", p + "X-A: b\rContent-Length: 3\r\n\r\n", refused},
        {"cr_cr_lf", p + "X-A: b\r\r\nContent-Length: 0\r\n\r\n", refused},
        {"blank_before_colon_coding", p + "Transfer-Encoding : chunked" + empty_chunked, refused},
        {"blank_before_colon_length", p + "Content-Length : 3\r\n\r\nabc", refused},
        {"blank_before_colon", p + "X-A : b\r\n\r\n", refused},
        {"blank_in_name", p + "X A: b\r\n\r\n", refused},
        {"nul_in_value", p + std::string("X-A: b\0c\r\n\r\n", 12), refused},
        {"control_in_value",
         p + "X-A: b\x01"
             "c\r\n\r\n",
         refused},
        {"del_in_value",
         p + "X-A: b\x7f"
             "c\r\n\r\n",
         refused},
        {"eight_bit_value", p + "X-A: b\xff\r\n\r\n", accepted},
        {"tab_in_value", p + "X-A: b\tc\r\n\r\n", accepted},
        {"empty_name", p + ": b\r\n\r\n", refused},
        {"no_colon", p + "XA\r\n\r\n", refused},
        {"coding_xchunked", p + "Transfer-Encoding: xchunked" + empty_chunked, refused, 0, "", 501},
        {"coding_chunked_identity", p + "Transfer-Encoding: chunked, identity" + empty_chunked,
         refused},
        {"coding_gzip_chunked", p + "Transfer-Encoding: gzip, chunked" + empty_chunked, refused, 0,
         "", 501},
        {"coding_chunked_chunked", p + "Transfer-Encoding: chunked, chunked" + empty_chunked,
         refused},
        {"coding_twice",
         p + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked" + empty_chunked, refused},
        {"coding_chunked_then_identity",
         p + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity" + empty_chunked, refused},
        {"coding_identity_then_chunked",
         p + "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked" + empty_chunked, refused},
        {"coding_trailing_tab", p + "Transfer-Encoding: chunked\t" + empty_chunked, refused},
        {"coding_vertical_tab",
         p +
             "Transfer-Encoding: \x0b"
             "chunked" +
             empty_chunked,
         refused},
        {"coding_quoted", p + "Transfer-Encoding: \"chunked\"" + empty_chunked, refused, 0, "",
         501},
        {"coding_odd_case", p + "Transfer-Encoding: cHuNkEd" + empty_chunked, accepted},
        {"coding_empty", p + "Transfer-Encoding: " + empty_chunked, refused},
        {"coding_in_1_0",
         "POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked" + empty_chunked, refused},
        {"chunk_extension", chunked + "3;a=b\r\nabc\r\n0\r\n\r\n", accepted, 1, "abc|"},
        {"chunk_extension_control", chunked + "3;a=b\x01\r\nabc\r\n0\r\n\r\n", refused},
        {"chunk_extension_bare_lf", chunked + "3;a\nabc\r\n0\r\n\r\n", refused},
        {"chunk_extension_endless",
         chunked + "3;" + std::string(20000, 'a') + "\r\nabc\r\n0\r\n\r\n", refused},
        {"chunk_size_bare_lf", chunked + "3\nabc\r\n0\r\n\r\n", refused},
        {"chunk_data_bare_lf", chunked + "3\r\nabc\n0\r\n\r\n", refused},
        {"chunk_size_cr_x", chunked + "3\rxabc\r\n0\r\n\r\n", refused},
        {"chunk_data_no_crlf", chunked + "3\r\nabcXX0\r\n\r\n", refused},
        {"chunk_size_blank", chunked + "3 \r\nabc\r\n0\r\n\r\n", refused},
        {"chunk_size_hex_prefix", chunked + "0x3\r\nabc\r\n0\r\n\r\n", refused},
        {"chunk_size_minus", chunked + "-1\r\nabc\r\n0\r\n\r\n", refused},
        {"chunk_size_empty", chunked + "\r\nabc\r\n0\r\n\r\n", refused},
        {"chunk_size_17_digits", chunked + "fffffffffffffffff\r\nabc", refused},
        {"chunk_size_16_digits", chunked + "ffffffffffffffff\r\nabc", refused},
        {"chunk_size_zeros", chunked + std::string(5000, '0') + "3\r\nabc\r\n0\r\n\r\n", accepted,
         1, "abc|"},
        {"chunk_size_endless_zeros", chunked + std::string(20000, '0') + "3\r\nabc\r\n0\r\n\r\n",
         refused},
        {"chunks_of_one_byte", chunked + "1\r\na\r\n1\r\nb\r\n1\r\nc\r\n0\r\n\r\n", accepted, 1,
         "abc|"},
        {"trailer", chunked + "0\r\nX: y\r\n\r\n", accepted},
        {"trailer_endless", chunked + "0\r\nX: " + std::string(20000, 'y') + "\r\n\r\n", refused},
        {"trailer_coding", chunked + "0\r\nTransfer-Encoding: chunked\r\n\r\n", refused},
        {"no_host", "GET / HTTP/1.1\r\n\r\n", refused},
        {"no_host_in_1_0", "GET / HTTP/1.0\r\n\r\n", accepted},
        {"two_hosts", "GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", refused},
        {"host_with_path", "GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", refused},
        {"host_list", "GET / HTTP/1.1\r\nHost: a, b\r\n\r\n", refused},
        {"version_1_2", "GET / HTTP/1.2\r\nHost: a\r\n\r\n", refused},
        {"version_0_9_line", "GET /\r\n\r\n", refused},
        {"version_0_9", "GET / HTTP/0.9\r\nHost: a\r\n\r\n", refused},
        {"version_2_0", "GET / HTTP/2.0\r\nHost: a\r\n\r\n", refused},
        {"h2_preface", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", refused},
        {"lower_case_method", "get / HTTP/1.1\r\nHost: a\r\n\r\n", refused},
        {"unknown_method", "FOO / HTTP/1.1\r\nHost: a\r\n\r\n", refused},
        {"unwanted_method", "TRACE / HTTP/1.1\r\nHost: a\r\n\r\n", refused, 0, "", 501},
        {"two_blanks_in_line", "GET  / HTTP/1.1\r\nHost: a\r\n\r\n", refused},
        {"two_blanks_before_version", "GET /  HTTP/1.1\r\nHost: a\r\n\r\n", refused},
        {"tab_in_line", "GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n", refused},
        {"blank_in_target", "GET /a b HTTP/1.1\r\nHost: a\r\n\r\n", refused},
        {"eight_bit_target", "GET /\xc3\xa9 HTTP/1.1\r\nHost: a\r\n\r\n", refused},
        {"fragment", "GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n", refused},
        {"cr_in_target", "GET /a\rb HTTP/1.1\r\nHost: a\r\n\r\n", refused},
        {"absolute_form", "GET http://a/ HTTP/1.1\r\nHost: a\r\n\r\n", refused},
        {"asterisk_form", "OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", refused},
        {"authority_form", "GET a:80 HTTP/1.1\r\nHost: a\r\n\r\n", refused},
        {"empty_lines_before", "\r\n\r\n" + get, accepted},
        {"many_empty_lines_before", "\r\n\r\n\r\n" + get, refused},
        {"bare_cr_before", "\r" + get, refused},
        {"get_with_body", "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc", accepted, 1,
         "abc|"},
        {"pipelined",
         get + p + "Content-Length: 2\r\n\r\nxy" + chunked + "1\r\nz\r\n0\r\n\r\n" + get, accepted,
         4, "|xy|z||"},
        {"upgrade_with_body",
         p + "Connection: upgrade\r\nUpgrade: x\r\nContent-Length: 3\r\n\r\nabc", refused},
        {"upgrade_websocket",
         "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", refused},
        {"upgrade_h2c_is_ignored",
         p + "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\nabc" +
             get,
         accepted, 2, "abc||"},
        {"connect", "CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\nxx", refused},
        {"rtsp", "PLAY rtsp://a RTSP/1.0\r\nHost: a\r\n\r\n", refused},
        {"rtsp_get", "GET / RTSP/1.0\r\nHost: a\r\n\r\n", refused},
        {"ice_source", "SOURCE / ICE/1.0\r\nHost: a\r\n\r\n", refused},
        {"ice_get", "GET / ICE/1.1\r\nHost: a\r\n\r\n", refused},
        {"large_header", p + "X: " + std::string(100000, 'a') + "\r\n\r\n", refused, 0, "", 431},
        {"many_headers",
         p +
             [] {
                 std::string s;
                 for (int i = 0; i < 30; ++i) s += "X: y\r\n";
                 return s;
             }() +
             "\r\n",
         refused, 0, "", 431},
        {"long_target", "GET /" + std::string(2000, 'a') + " HTTP/1.1\r\nHost: a\r\n\r\n", refused,
         0, "", 414},
        {"endless_target", "GET /" + std::string(4000, 'a'), refused, 0, "", 414},
        {"long_line_with_a_blank_early", "GET / " + std::string(1100, 'a') + "\r\n", refused, 0, "",
         414},
        {"other_expectation", p + "Expect: foo\r\nContent-Length: 3\r\n\r\nabc", refused, 0, "",
         417},
        {"tls_hello", std::string("\x16\x03\x01\x02\x00\x01", 6), refused},
        {"half_a_head", p, unfinished},
        {"half_a_body", p + "Content-Length: 3\r\n\r\nab", unfinished},

        {"answer", r + "Content-Length: 1\r\n\r\nx", accepted, 1, "x|", 0, kResponse},
        {"answer_length_and_chunked",
         r + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", refused, 0, "",
         400, kResponse},
        {"answer_two_lengths", r + "Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", refused, 0,
         "", 400, kResponse},
        {"answer_gzip_coding", r + "Transfer-Encoding: gzip\r\n\r\nabc", refused, 0, "", 400,
         kResponse},
        {"answer_coding_in_1_0", "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
         refused, 0, "", 400, kResponse},
        {"answer_to_eof", r + "\r\nabc", accepted, 1, "abc|", 0, kResponse},
        {"answer_short", r + "Content-Length: 5\r\n\r\nabc", unfinished, 0, "", 0, kResponse},
        {"answer_short_chunk", r + "Transfer-Encoding: chunked\r\n\r\n5\r\nabc", unfinished, 0, "",
         0, kResponse},
        {"answer_without_final_chunk", r + "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
         unfinished, 0, "", 0, kResponse},
        {"answer_204_with_length", "HTTP/1.1 204 No\r\nContent-Length: 3\r\n\r\n", accepted, 1, "|",
         0, kResponse},
        {"answer_304",
         "HTTP/1.1 304 Not Modified\r\nContent-Length: 3\r\n\r\n" + r +
             "Content-Length: 1\r\n\r\nx",
         accepted, 2, "|x|", 0, kResponse},
        {"answer_100_then_200", "HTTP/1.1 100 Continue\r\n\r\n" + r + "Content-Length: 1\r\n\r\nx",
         accepted, 2, "|x|", 0, kResponse},
        {"answer_extra_bytes", r + "Content-Length: 1\r\n\r\nxEXTRA", refused, 0, "", 400,
         kResponse},
        {"answer_bare_lf", "HTTP/1.1 200 OK\nContent-Length: 1\n\nx", refused, 0, "", 400,
         kResponse},
        {"answer_without_reason", "HTTP/1.1 200\r\nContent-Length: 1\r\n\r\nx", accepted, 1, "x|",
         0, kResponse},
        {"answer_status_99", "HTTP/1.1 099 OK\r\nContent-Length: 1\r\n\r\nx", refused, 0, "", 400,
         kResponse},
        {"answer_status_600", "HTTP/1.1 600 OK\r\nContent-Length: 1\r\n\r\nx", refused, 0, "", 400,
         kResponse},
        {"answer_status_1000", "HTTP/1.1 1000 OK\r\nContent-Length: 1\r\n\r\nx", refused, 0, "",
         400, kResponse},
        {"answer_switches",
         "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n", refused,
         0, "", 400, kResponse},
        {"answer_nonsense", "hello there\r\n\r\n", refused, 0, "", 400, kResponse},
        {"answer_folded", r + "X: a\r\n b\r\n\r\n", refused, 0, "", 400, kResponse},
    };
}

INSTANTIATE_TEST_SUITE_P(Parser, Table, testing::ValuesIn(cases()),
                         [](const auto& param) { return std::string(param.param.name); });

TEST(Parser, drops_trailers_and_gives_values_without_blanks) {
    const Outcome out = feed(
        "POST / HTTP/1.1\r\nHost:  a \t\r\nX-Empty:\r\nTransfer-Encoding: "
        "chunked\r\n\r\n0\r\nX-Late: y\r\n\r\n",
        4096, kRequest, false);
    EXPECT_EQ(out.headers, "Host=a;X-Empty=;Transfer-Encoding=chunked;");
}

TEST(Parser, nothing_after_a_closing_request_is_read) {
    const Outcome out = feed(
        "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\nGET /second HTTP/1.1\r\nHost: "
        "a\r\n\r\n",
        4096, kRequest, false);
    EXPECT_EQ(out.messages, 1u);
    EXPECT_GT(out.left, 0u);
}

TEST(Parser, an_answer_to_head_has_no_body_whatever_its_headers_say) {
    Parser parser(kResponse, {});
    parser.begin(true);
    parser.take_head("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n");
    EXPECT_EQ(parser.state(), Parser::State::complete);
    EXPECT_EQ(parser.head().content_length, 5u);
    EXPECT_TRUE(parser.head().keep_alive);
}

TEST(Parser, chunks_are_decoded_to_one_piece_in_place) {
    Parser parser(kRequest, {});
    parser.take_head("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n");
    std::string wire = "3\r\nabc\r\n10;x\r\n0123456789abcdef\r\n1\r\n!\r\n0\r\n\r\nGET";
    const Parser::Taken taken = parser.take_body(wire.data(), wire.size());
    EXPECT_EQ(taken.body, "abc0123456789abcdef!");
    EXPECT_EQ(taken.bytes, wire.size() - 3);
    EXPECT_EQ(parser.state(), Parser::State::complete);
    EXPECT_EQ(wire.substr(taken.bytes), "GET");
}

TEST(Parser, keeps_the_connection_by_version_and_header) {
    const auto keeps = [](std::string_view head) {
        Parser parser(kRequest, {});
        parser.take_head(head);
        EXPECT_EQ(parser.state(), Parser::State::complete);
        return parser.head().keep_alive;
    };
    EXPECT_TRUE(keeps("GET / HTTP/1.1\r\nHost: a\r\n\r\n"));
    EXPECT_FALSE(keeps("GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"));
    EXPECT_FALSE(keeps("GET / HTTP/1.0\r\nHost: a\r\n\r\n"));
    EXPECT_TRUE(keeps("GET / HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\n\r\n"));
}

TEST(Message, names_compare_without_case_and_hop_headers_are_known) {
    EXPECT_TRUE(name_is("Content-TYPE", "content-type"));
    EXPECT_FALSE(name_is("Content-Type", "content-typ"));
    for (const char* name : {"Connection", "TE", "Host", "transfer-encoding", "Proxy-Authorization",
                             "Keep-Alive", "Trailer", "Upgrade", "Content-Length", "Expect"}) {
        EXPECT_TRUE(is_hop_by_hop(name)) << name;
    }
    for (const char* name : {"Authorization", "Content-Type", "X-Request-Id", "Proxy", "Accept"}) {
        EXPECT_FALSE(is_hop_by_hop(name)) << name;
    }
    const std::vector<Header> headers{{"Connection", "close, X-Own ,x-two"}, {"X-Own", "y"}};
    EXPECT_TRUE(named_by_connection(headers, "x-own"));
    EXPECT_TRUE(named_by_connection(headers, "X-Two"));
    EXPECT_FALSE(named_by_connection(headers, "X"));
    ResponseHead head;
    head.add("Retry-After", std::uint64_t{17});
    EXPECT_EQ(head.headers, "Retry-After: 17\r\n");
}

}  // namespace
}  // namespace semel::http
