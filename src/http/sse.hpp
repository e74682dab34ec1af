// SSE: finds events in a server-sent event stream (WHATWG) while it passes. Never alters or keeps
// back a byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace semel::http {

/// One event that has data. Blocks without data (comments, lone fields) are not events; their bytes
/// count to the next one's.
struct SseEvent {
    std::string_view type;  ///< The `event` field; empty: none. Valid during the call.
    std::string_view
        data;  ///< All `data` lines joined by LF. Valid during the call. Empty where oversized.
    bool oversized =
        false;  ///< It was over the limit; it is reported without data, and scanning went on.
    std::uint64_t begin =
        0;                  ///< Position in the stream of the first byte after the previous event.
    std::uint64_t end = 0;  ///< Position after the line end that ended it. A LF that follows a CR
                            ///< there is the next one's.
};

class SseScanner {
  public:
    /// An event whose lines hold more than this is reported as oversized. Larger than any single
    /// event of the APIs known.
    static constexpr std::size_t kEventMaxBytes = 16 * 1024 * 1024;

    explicit SseScanner(std::size_t event_max_bytes = kEventMaxBytes)
        : event_max_(event_max_bytes) {}

    /// Scans the next bytes of the stream and calls `on_event` for each event that they end. Same
    /// events however the stream is cut; invalid UTF-8 is carried as it is.
    void feed(std::string_view bytes, const std::function<void(const SseEvent&)>& on_event);
    /// True where nothing of a block has come yet, so that a whole line of one's own may be put
    /// into the stream here. False after a lone CR, which may be half of a CRLF.
    [[nodiscard]] bool at_event_boundary() const { return !in_block_ && !after_cr_; }
    /// Position of the first byte after the last event: what may be held back when an event is to
    /// be judged before it passes.
    [[nodiscard]] std::uint64_t event_begin() const { return event_begin_; }
    /// Bytes seen so far.
    [[nodiscard]] std::uint64_t position() const { return position_; }

  private:
    void end_line(std::string_view line);
    void reset_block();

    const std::size_t event_max_;
    std::string line_;  // the line's begin, where it came in an earlier feed
    std::string data_;
    std::string type_;
    bool has_data_ = false;
    bool oversized_ = false;
    bool line_cut_ = false;  // the current line lost bytes to the limit
    bool in_block_ = false;
    bool after_cr_ = false;
    bool first_line_ = true;
    std::uint64_t position_ = 0;
    std::uint64_t event_begin_ = 0;
};

}  // namespace semel::http
