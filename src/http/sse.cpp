#include "http/sse.hpp"

#include <algorithm>

namespace semel::http {

void SseScanner::reset_block() {
    data_.clear();
    type_.clear();
    has_data_ = oversized_ = in_block_ = false;
    // One huge event must not hold its memory for the rest of a long stream.
    if (data_.capacity() > 256 * 1024) data_.shrink_to_fit();
}

void SseScanner::end_line(std::string_view line) {
    if (first_line_) {
        first_line_ = false;
        if (line.starts_with("\xef\xbb\xbf")) line.remove_prefix(3);
    }
    const std::size_t colon = line.find(':');
    const std::string_view field = line.substr(0, colon);
    std::string_view value =
        colon == std::string_view::npos ? std::string_view{} : line.substr(colon + 1);
    if (value.starts_with(' ')) value.remove_prefix(1);
    if (field == "data") {
        if (has_data_ && !oversized_) data_ += '\n';
        has_data_ = true;
        if (line_cut_ || data_.size() + value.size() > event_max_) oversized_ = true;
        if (oversized_) {
            data_.clear();
        } else {
            data_ += value;
        }
    } else if (field == "event") {
        if (line_cut_ || value.size() > event_max_) {
            oversized_ = true;
            data_.clear();
        } else {
            type_ = value;
        }
    }
}

void SseScanner::feed(std::string_view bytes,
                      const std::function<void(const SseEvent&)>& on_event) {
    const std::uint64_t base = position_;
    std::size_t at = 0;
    std::size_t next_lf = bytes.find(
        '\n');  // kept over lines that end in CR, so that no byte is looked at twice for it
    while (at < bytes.size()) {
        if (after_cr_) {
            after_cr_ = false;
            if (bytes[at] == '\n') {
                ++at;
                continue;
            }
        }
        if (next_lf < at) next_lf = bytes.find('\n', at);
        const std::string_view rest = bytes.substr(0, std::min(next_lf, bytes.size()));
        std::size_t end = rest.find('\r', at);
        if (end == std::string_view::npos) end = next_lf;
        const std::string_view part =
            bytes.substr(at, end == std::string_view::npos ? end : end - at);
        if (!part.empty()) in_block_ = true;
        if (end == std::string_view::npos) {
            // The limit is for a line's content; a few bytes more let its field name be told.
            const std::size_t room = event_max_ + 16 - line_.size();
            if (part.size() > room) line_cut_ = true;
            line_.append(part.substr(0, room));
            break;
        }
        after_cr_ = bytes[end] == '\r';
        at = end + 1;
        if (line_.empty() && part.empty()) {
            // Only a BOM-less empty first line gets here, too: nothing was asked, nothing is
            // reported.
            first_line_ = false;
            if (has_data_) {
                const std::uint64_t event_end = base + at;
                on_event({type_, oversized_ ? std::string_view{} : std::string_view(data_),
                          oversized_, event_begin_, event_end});
                event_begin_ = event_end;
            }
            reset_block();
            continue;
        }
        if (line_.empty()) {
            end_line(part);
        } else {
            const std::size_t room = event_max_ + 16 - line_.size();
            if (part.size() > room) line_cut_ = true;
            line_.append(part.substr(0, room));
            end_line(line_);
            line_.clear();
            if (line_.capacity() > 256 * 1024) line_.shrink_to_fit();
        }
        line_cut_ = false;
    }
    position_ = base + bytes.size();
}

}  // namespace semel::http
