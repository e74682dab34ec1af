#include "core/watermark.hpp"

#include <algorithm>

#include "base/assert.hpp"

namespace semel::core {

namespace {

// Entries are sorted: deliveries of one partition or channel only grow.
template <class Entries, class Number>
auto find(Entries& entries, Number number, Number Entries::value_type::* member) {
    const auto at = std::lower_bound(
        entries.begin(), entries.end(), number,
        [member](const auto& entry, Number wanted) { return entry.*member < wanted; });
    return at != entries.end() && (*at).*member == number ? at : entries.end();
}

}  // namespace

bool CommitWatermark::deliver(std::int64_t offset) {
    if (offset < position_) return false;
    entries_.push_back({.offset = offset, .open = true});
    ++open_;
    position_ = offset + 1;
    return true;
}

void CommitWatermark::advance(std::int64_t position) { position_ = std::max(position_, position); }

bool CommitWatermark::finish(std::int64_t offset) {
    const auto at = find(entries_, offset, &Entry::offset);
    if (at == entries_.end() || !at->open) return false;
    at->open = false;
    --open_;
    while (!entries_.empty() && !entries_.front().open) entries_.pop_front();
    // Amortised: at least as many finishes lie between two compactions as one has entries to move.
    if (entries_.size() > 2 * open_ + slack) compact();
    return true;
}

void CommitWatermark::compact() {
    std::erase_if(entries_, [](const Entry& entry) { return !entry.open; });
    entries_.shrink_to_fit();
}

std::int64_t CommitWatermark::committable() const {
    return entries_.empty() ? position_ : entries_.front().offset;
}

void TagWatermark::deliver(std::uint64_t tag) {
    SEMEL_ASSERT(entries_.empty() || entries_.back().tag < tag,
                 "a channel counts its tags upwards");
    entries_.push_back({.tag = tag, .state = State::open});
    ++open_;
}

bool TagWatermark::finish(std::uint64_t tag) {
    const auto at = find(entries_, tag, &Entry::tag);
    if (at == entries_.end() || at->state != State::open) return false;
    at->state = State::finished;
    --open_;
    ++waiting_;
    return true;
}

std::vector<TagAcknowledgement> TagWatermark::take(bool all) {
    std::vector<TagAcknowledgement> out;
    // The tag that is named must itself be unacknowledged, or the broker does not know it.
    std::size_t covered = 0;
    std::uint64_t last = 0;
    while (!entries_.empty() && entries_.front().state != State::open) {
        if (entries_.front().state == State::finished) {
            last = entries_.front().tag;
            ++covered;
        }
        entries_.pop_front();
    }
    if (covered > 0) out.push_back({.tag = last, .multiple = covered > 1});
    waiting_ -= covered;
    if (waiting_ > (all ? 0 : singles_above_)) {
        for (Entry& entry : entries_) {
            if (entry.state != State::finished) continue;
            out.push_back({.tag = entry.tag, .multiple = false});
            entry.state = State::acknowledged;
        }
        waiting_ = 0;
        std::erase_if(entries_, [](const Entry& e) { return e.state == State::acknowledged; });
    }
    return out;
}

}  // namespace semel::core
