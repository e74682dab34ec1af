// Journal: the answer of one attempt while it comes, kept from its first byte so that every
// duplicate can have all of it.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "core/record.hpp"

namespace semel::gateway {

/// Head of an answer as clients get it.
struct AnswerHead {
    int status = 200;
    std::string content_type;
    /// End-to-end headers that also a duplicate gets; ready lines. Content-Type is not among them.
    std::string kept_headers;
    /// Those that only the client that caused the call gets (rate limits and the like); ready
    /// lines.
    std::string live_headers;
    std::optional<std::uint64_t> content_length;
    bool from_gateway = false;  ///< Made by us, not by the upstream.
};

/// Journals keep this much in memory, what comes after it in an unlinked file.
inline constexpr std::size_t journal_memory_max_bytes = 1024 * 1024;

/// One producer (the owner's loop), any number of readers on any loop. Thread-safe. It says nothing
/// when it changes: whoever writes to it notifies the flight's signal.
class Journal {
  public:
    enum class End : std::uint8_t {
        open,   ///< More may come.
        whole,  ///< The answer is complete as it stands.
        cut,    ///< It ended short: end the client's answer visibly broken.
    };
    struct View {
        bool has_head = false;
        bool streaming = false;  ///< Bytes may leave before the end.
        End end = End::open;
        std::uint64_t bytes = 0;    ///< Appended so far.
        /// Where finish()'s `last`, held pieces included, begins; meaningful once it ended.
        std::uint64_t last_at = 0;
        bool record_pending = false;
        core::StoreTime expires;  ///< Of the record; 0 while not known.
    };

    explicit Journal(std::string spill_path);
    ~Journal();
    Journal(const Journal&) = delete;
    Journal& operator=(const Journal&) = delete;

    void set_head(AnswerHead head, bool streaming);
    /// From now on bytes may leave before the end.
    void set_streaming();
    /// False: the spill file could not be written (disk full): the journal is closed as cut.
    bool append(std::string_view bytes);
    /// Keeps bytes that nobody sees before finish(): pieces of its `last`, where that comes in
    /// pieces. Nothing may be appended after them. False: as append().
    bool append_held(std::string_view bytes);
    /// Forgets what is held. Only finish(cut) without `last` may follow.
    void drop_held();
    /// All that was appended, also what is held.
    [[nodiscard]] std::uint64_t stored() const;
    /// Shows what is held, appends `last` and ends, in one step.
    void finish(End end, std::string_view last, bool record_pending = false,
                core::StoreTime expires = {});

    [[nodiscard]] View view() const;
    /// The head; call only after view().has_head. Immutable from then on.
    [[nodiscard]] const AnswerHead& head() const { return head_; }
    /// Copies at most `max` bytes from `offset` into `out` (replacing it). Empty at the end, or if
    /// the spill file cannot be read.
    void read(std::uint64_t offset, std::size_t max, std::string& out) const;
    /// The whole body, shared, if it lies in memory; null otherwise. Only after it ended whole.
    [[nodiscard]] std::shared_ptr<const std::string> body() const;

  private:
    bool store_locked(std::string_view bytes);
    bool spill(std::string_view bytes);

    const std::string spill_path_;
    mutable std::mutex mutex_;
    AnswerHead head_;     // written once, before has_head
    View view_;           // guarded by mutex_
    std::string memory_;  // guarded by mutex_, until it ends whole: then body_
    std::shared_ptr<const std::string> body_;
    int spill_fd_ = -1;
    std::uint64_t spilled_ = 0;
    std::uint64_t held_ = 0;  ///< Bytes behind view_.bytes.
};

}  // namespace semel::gateway
