// Held: one assigned partition, with what the poll thread and the settling threads know of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

#include "base/time.hpp"
#include "brokers/delivery.hpp"
#include "core/watermark.hpp"

namespace semel::brokers::kafka {

/// What is out over all partitions of a source, for its window.
struct Outstanding {
    std::atomic<std::size_t> messages{0};
    std::atomic<std::size_t> bytes{0};
};

class Held final : public Assignment {
  public:
    Held(Partition partition, std::uint64_t epoch, std::int64_t start, Outstanding& outstanding)
        : Assignment(std::move(partition), epoch), start_(start), mark_(start), out_(outstanding) {}

    void set_committed(std::optional<std::int64_t> offset, std::string metadata) {
        committed_ = offset;
        committed_metadata_ = std::move(metadata);
        if (offset) confirmed_ = *offset;
    }
    /// Where it begins without a begin(from).
    [[nodiscard]] std::int64_t start() const { return start_; }

    // ---- any thread

    bool settle(std::int64_t offset, std::size_t size) {
        const std::lock_guard lock(mutex_);
        if (void_ || !mark_.finish(offset)) return false;
        bytes_ -= size;
        out_.messages.fetch_sub(1);
        out_.bytes.fetch_sub(size);
        return true;
    }
    void set_drained() { drained_.store(true, std::memory_order_release); }
    struct Marks {
        std::int64_t position, committable, confirmed;
        std::size_t in_flight;
    };
    [[nodiscard]] Marks marks() const {
        const std::lock_guard lock(mutex_);
        return {mark_.position(), mark_.committable(), confirmed_, mark_.in_flight()};
    }
    [[nodiscard]] bool is_void() const {
        const std::lock_guard lock(mutex_);
        return void_;
    }

    // ---- poll thread

    /// False: it was delivered in this assignment already.
    bool deliver(std::int64_t offset, std::size_t size) {
        const std::lock_guard lock(mutex_);
        if (!mark_.deliver(offset)) return false;
        bytes_ += size;
        out_.messages.fetch_add(1);
        out_.bytes.fetch_add(size);
        return true;
    }
    void advance(std::int64_t position) {
        const std::lock_guard lock(mutex_);
        mark_.advance(position);
    }
    /// Begins anew at `position`; nothing may be in flight.
    void restart(std::int64_t position) {
        const std::lock_guard lock(mutex_);
        mark_ = core::CommitWatermark(position);
    }
    void confirm(std::int64_t offset) {
        const std::lock_guard lock(mutex_);
        confirmed_ = offset;
    }
    /// Receipts are refused from now on, and count no more.
    void make_void() {
        const std::lock_guard lock(mutex_);
        if (std::exchange(void_, true)) return;
        out_.messages.fetch_sub(mark_.in_flight());
        out_.bytes.fetch_sub(std::exchange(bytes_, 0));
    }
    [[nodiscard]] bool drained() const {
        return drained_.load(std::memory_order_acquire) || marks().in_flight == 0;
    }

    // The poll thread's own, without a lock; `begun` and the two below are read by state().
    std::atomic<bool> begun{false};
    std::atomic<bool> user_paused{false};
    std::atomic<bool> stopped{false};  ///< No offset, or out of range: Source's "held".
    bool delayed = false;              ///< Of a topic of delayed copies.
    /// Its next message is not due before; until then its messages are discarded. The first moment
    /// of the clock: it does not sleep.
    base::SteadyTime sleeps_until{};
    [[nodiscard]] bool sleeps() const { return sleeps_until != base::SteadyTime{}; }
    bool draining = false;
    bool library_paused = false;
    /// Its messages are discarded until a seek to here has succeeded.
    std::optional<std::int64_t> must_seek;
    /// The position that the last commit on its way names.
    std::int64_t asked = -1;

  private:
    const std::int64_t start_;
    mutable std::mutex mutex_;  ///< Guards the members below.
    core::CommitWatermark mark_;
    std::size_t bytes_ = 0;
    std::int64_t confirmed_ = -1;
    bool void_ = false;
    std::atomic<bool> drained_{false};
    Outstanding& out_;  ///< Not touched once void; the source voids all before it goes.
};

}  // namespace semel::brokers::kafka
