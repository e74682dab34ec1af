// Any bytes as an event stream: the same events however it is cut, and they tile it.
#include <cstdint>
#include <string>
#include <vector>

#include "base/assert.hpp"
#include "http/sse.hpp"

namespace {

using semel::http::SseEvent;
using semel::http::SseScanner;

struct Seen {
    std::string type;
    std::string data;
    bool oversized = false;
    std::uint64_t end = 0;

    friend bool operator==(const Seen&, const Seen&) = default;
};

constexpr std::size_t kEventMax = 64;

std::vector<Seen> scan(std::string_view bytes, std::size_t step) {
    SseScanner scanner(kEventMax);
    std::vector<Seen> seen;
    std::uint64_t end = 0;
    for (std::size_t at = 0; at < bytes.size(); at += step) {
        scanner.feed(bytes.substr(at, step), [&](const SseEvent& e) {
            SEMEL_ASSERT(e.begin == end && e.end > e.begin, "events tile the stream");
            SEMEL_ASSERT(e.data.size() <= kEventMax, "an event has a limit");
            end = e.end;
            const char last = bytes[e.end - 1];
            SEMEL_ASSERT(last == '\n' || last == '\r', "an event ends with a line");
            seen.push_back({std::string(e.type), std::string(e.data), e.oversized, e.end});
        });
        SEMEL_ASSERT(scanner.event_begin() == end, "the open event begins after the last one");
    }
    SEMEL_ASSERT(scanner.position() == bytes.size(), "every byte is seen once");
    return seen;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size == 0) return 0;
    const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
    const auto whole = scan(bytes, bytes.empty() ? 1 : bytes.size());
    SEMEL_ASSERT(whole == scan(bytes, 1 + data[0] % 9), "the cuts between reads change nothing");
    SEMEL_ASSERT(whole == scan(bytes, 1), "the cuts between reads change nothing");
    return 0;
}
