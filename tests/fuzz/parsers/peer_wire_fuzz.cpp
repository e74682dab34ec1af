// Any bytes as what another gateway sends: the same frames however they are cut, in their order,
// within their limits, and what is read is written back the same.
#include <algorithm>
#include <string>
#include <vector>

#include "base/assert.hpp"
#include "gateway/peer_wire.hpp"

namespace gateway = semel::gateway;

namespace {

struct Read {
    std::vector<std::string> frames;  // each as it is written
    gateway::PeerReader::State state = gateway::PeerReader::State::open;
    friend bool operator==(const Read&, const Read&) = default;
};

Read read(std::string_view bytes, std::size_t step) {
    Read out;
    gateway::PeerReader reader;
    bool head = false;
    bool last = false;
    for (std::size_t at = 0; at < bytes.size(); at += step) {
        reader.feed(bytes.substr(at, step));
        while (const auto frame = reader.next()) {
            SEMEL_ASSERT(out.frames.empty() == std::holds_alternative<gateway::PeerHello>(*frame),
                         "a hello is the first frame");
            if (const auto* one = std::get_if<gateway::PeerHead>(&*frame)) {
                SEMEL_ASSERT(!head, "there is one head");
                head = true;
                const std::string& lines = one->kept_headers;
                SEMEL_ASSERT(lines.empty() || lines.ends_with("\r\n"), "header lines are whole");
                SEMEL_ASSERT(lines.find("\r\n\r\n") == std::string::npos && !lines.starts_with('\r'),
                             "headers cannot end the head");
                SEMEL_ASSERT(std::count(lines.begin(), lines.end(), '\n') ==
                                 std::count(lines.begin(), lines.end(), '\r'),
                             "no line end but the lines' own");
            }
            if (const auto* data = std::get_if<gateway::PeerData>(&*frame)) {
                SEMEL_ASSERT(head && !data->bytes.empty() &&
                                 data->bytes.size() <= gateway::peer_data_max_bytes,
                             "data comes after a head, within its limit");
                SEMEL_ASSERT(data->last || !last, "nothing follows the last bytes");
                last = data->last;
            }
            out.frames.emplace_back();
            gateway::write_frame(out.frames.back(), *frame);
        }
    }
    out.state = reader.state();
    return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size == 0) return 0;
    const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
    const Read whole = read(bytes, std::max<std::size_t>(bytes.size(), 1));
    const Read pieces = read(bytes, 1 + data[0] % 9);
    // Given whole, a byte after the end refuses the end as well.
    if (whole.state != gateway::PeerReader::State::refused) {
        SEMEL_ASSERT(whole == pieces, "the cuts between reads change nothing");
        std::string written;
        for (const std::string& frame : whole.frames) written += frame;
        SEMEL_ASSERT(bytes.starts_with(written), "what was read is written back the same");
    } else {
        SEMEL_ASSERT(pieces.state == gateway::PeerReader::State::refused, "refused in any pieces");
    }
    if (const auto question = gateway::parse_peer_target(bytes)) {
        SEMEL_ASSERT(gateway::parse_peer_target(gateway::peer_target(*question)) == question,
                     "a target is written back the same");
    }
    return 0;
}
