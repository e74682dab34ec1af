// Commit watermarks: which prefix of a partition's deliveries may be acknowledged when they finish
// in any order. No I/O; remembers what is unfinished, not what is finished.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace semel::core {

/// Everything below `committable()` is finished. For brokers that commit a position (Kafka).
/// Offsets have holes: compaction, aborted records and transaction markers are never delivered, so
/// "last + 1" is not the position. Memory is proportional to the unfinished ones, however many are
/// finished behind a stuck one. A value, used by one thread.
class CommitWatermark {
  public:
    /// `position`: the offset from which the consumer reads.
    explicit CommitWatermark(std::int64_t position) : position_(position) {}

    /// A message arrived. False, and nothing is noted, if the offset lies before the position: it
    /// was delivered already.
    bool deliver(std::int64_t offset);
    /// There is nothing to deliver before `position` that was not delivered (the end of the
    /// partition was reached). Never moves back.
    void advance(std::int64_t position);
    /// A delivered message is finished and durable. False if it is not unfinished: never delivered,
    /// or finished before.
    bool finish(std::int64_t offset);

    /// What may be committed: the lowest unfinished offset; with nothing in flight the position.
    /// Never falls.
    [[nodiscard]] std::int64_t committable() const;
    /// The next offset that the consumer would be given.
    [[nodiscard]] std::int64_t position() const { return position_; }
    /// Messages delivered and not finished.
    [[nodiscard]] std::size_t in_flight() const { return open_; }
    /// Entries held, finished ones included: at most 2 * in_flight() + `slack`.
    [[nodiscard]] std::size_t held() const { return entries_.size(); }

    static constexpr std::size_t slack = 64;

  private:
    struct Entry {
        std::int64_t offset;
        bool open;
    };
    void compact();

    std::int64_t position_;
    std::deque<Entry> entries_;  ///< In the order of delivery; the first one is open.
    std::size_t open_ = 0;
};

/// One acknowledgement to send: of `tag` alone, or of all up to and including it.
struct TagAcknowledgement {
    std::uint64_t tag = 0;
    bool multiple = false;
    friend bool operator==(const TagAcknowledgement&, const TagAcknowledgement&) = default;
};

/// The same for brokers that acknowledge tags (AMQP): one acknowledgement of all up to the lowest
/// unfinished tag. What is finished behind a stuck message is acknowledged tag by tag once it is
/// more than `singles_above`: unacknowledged, it would count against the prefetch and stop the
/// queue. A tag is acknowledged once; a broker closes the channel over a second time. One per
/// channel; a value, used by one thread.
class TagWatermark {
  public:
    explicit TagWatermark(std::size_t singles_above) : singles_above_(singles_above) {}

    /// Tags are delivered in ascending order.
    void deliver(std::uint64_t tag);
    /// False if the tag is not unfinished.
    bool finish(std::uint64_t tag);
    /// What is to be sent now, in this order; it counts as acknowledged. `all`: finished ones
    /// behind an unfinished one too, however few.
    std::vector<TagAcknowledgement> take(bool all = false);

    [[nodiscard]] std::size_t in_flight() const { return open_; }
    /// Finished and not taken.
    [[nodiscard]] std::size_t waiting() const { return waiting_; }
    [[nodiscard]] std::size_t held() const { return entries_.size(); }

  private:
    enum class State : std::uint8_t { open, finished, acknowledged };
    struct Entry {
        std::uint64_t tag;
        State state;
    };

    std::size_t singles_above_;
    std::deque<Entry> entries_;  ///< In the order of delivery.
    std::size_t open_ = 0;
    std::size_t waiting_ = 0;
};

}  // namespace semel::core
