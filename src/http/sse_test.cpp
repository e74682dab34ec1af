#include "http/sse.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace semel::http {
namespace {

struct Seen {
    std::string type;
    std::string data;
    bool oversized = false;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;

    friend bool operator==(const Seen&, const Seen&) = default;
};

std::vector<Seen> scan(std::string_view stream, std::size_t step,
                       std::size_t limit = SseScanner::kEventMaxBytes) {
    SseScanner scanner(limit);
    std::vector<Seen> seen;
    for (std::size_t at = 0; at < stream.size(); at += step) {
        scanner.feed(stream.substr(at, step), [&](const SseEvent& e) {
            seen.push_back({std::string(e.type), std::string(e.data), e.oversized, e.begin, e.end});
        });
    }
    EXPECT_EQ(scanner.position(), stream.size());
    return seen;
}

TEST(Sse, finds_the_same_events_however_the_stream_is_cut) {
    const std::string stream =
        "\xef\xbb\xbf: hello\n\nevent: delta\ndata: \xe4\xbd\xa0\xe5\xa5\xbd "
        "\xf0\x9f\x98\x80\r\n\r\n"
        "data: one\rdata:two\rid: 7\r\rretry: 10\n\n: ping\n\ndata\n\nevent: only\n\n"
        "data: \xff\xfe raw\n\ndata:  two blanks\n\ndata: last\r\n\r\ndata: unfinished\n";
    const std::vector<Seen> whole = scan(stream, stream.size());
    ASSERT_EQ(whole.size(), 6u);
    EXPECT_EQ(whole[0].type, "delta");
    EXPECT_EQ(whole[0].data, "\xe4\xbd\xa0\xe5\xa5\xbd \xf0\x9f\x98\x80");
    EXPECT_EQ(whole[1].data, "one\ntwo");
    EXPECT_EQ(whole[1].type, "");
    EXPECT_EQ(whole[2].data, "");
    EXPECT_EQ(whole[3].data, "\xff\xfe raw");
    EXPECT_EQ(whole[3].type, "");
    EXPECT_EQ(whole[4].data, " two blanks");
    EXPECT_EQ(whole[5].data, "last");
    for (std::size_t step = 1; step <= 7; ++step) {
        EXPECT_EQ(scan(stream, step), whole) << "in steps of " << step;
    }
}

TEST(Sse, events_tile_the_stream_and_end_after_their_blank_line) {
    const std::string stream = "data: a\n\n: c\n\ndata: b\n\n";
    const std::vector<Seen> seen = scan(stream, 3);
    ASSERT_EQ(seen.size(), 2u);
    EXPECT_EQ(seen[0].begin, 0u);
    EXPECT_EQ(seen[0].end, 9u);
    EXPECT_EQ(seen[1].begin, 9u);
    EXPECT_EQ(seen[1].end, stream.size());
}

TEST(Sse, an_event_of_eight_mebibytes_is_carried_and_one_over_the_limit_is_reported_without_data) {
    const std::string big(8 * 1024 * 1024, 'x');
    const std::string stream = "data: " + big + "\n\ndata: y\n\n";
    const std::vector<Seen> seen = scan(stream, 65536);
    ASSERT_EQ(seen.size(), 2u);
    EXPECT_EQ(seen[0].data, big);

    for (const std::size_t step : {1u, 7u, 1000u}) {
        const std::string lines =
            "data: " + std::string(60, 'a') + "\ndata: " + std::string(60, 'b') + "\n\n";
        const std::string line = "data: " + std::string(500, 'c') + "\n\n";
        const std::vector<Seen> limited = scan(lines + line + "data: ok\n\n", step, 100);
        ASSERT_EQ(limited.size(), 3u) << step;
        EXPECT_TRUE(limited[0].oversized);
        EXPECT_TRUE(limited[1].oversized);
        EXPECT_EQ(limited[1].data, "");
        EXPECT_FALSE(limited[2].oversized);
        EXPECT_EQ(limited[2].data, "ok");
    }
}

TEST(Sse, a_line_of_ones_own_fits_only_between_events) {
    SseScanner scanner;
    const auto none = [](const SseEvent&) {};
    EXPECT_TRUE(scanner.at_event_boundary());
    scanner.feed("data: a", none);
    EXPECT_FALSE(scanner.at_event_boundary());
    scanner.feed("\n", none);
    EXPECT_FALSE(scanner.at_event_boundary());
    scanner.feed("\n", none);
    EXPECT_TRUE(scanner.at_event_boundary());
    scanner.feed("data: b\r\n\r", none);
    EXPECT_FALSE(scanner.at_event_boundary()) << "half of a CRLF";
    scanner.feed("\n", none);
    EXPECT_TRUE(scanner.at_event_boundary());
    scanner.feed(": comment\n", none);
    EXPECT_FALSE(scanner.at_event_boundary());
    EXPECT_EQ(scanner.event_begin(), 19u);
}

}  // namespace
}  // namespace semel::http
