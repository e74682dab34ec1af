// RecordQueue: collects what a strategy asks of its records and sends it in batches: few round
// trips, and never long waits.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "consumer/records.hpp"
#include "runtime/loop.hpp"

namespace semel::consumer {

using std::chrono::milliseconds;

/// For one loop, used on its thread. Sends what one turn of the loop brought as one batch if
/// nothing is on its way; else what gathers meanwhile goes with the answer, once it is many, or
/// after a moment. `records` outlives it.
class RecordQueue {
  public:
    static constexpr std::size_t batch_max = 512;
    static constexpr std::size_t batches_max = 4;    ///< On their way at once.
    static constexpr std::size_t batch_early = 128;  ///< So many do not wait for the batch before.
    static constexpr milliseconds wait_max{5};       ///< Nor does what waits so long.

    /// Whom an answer is for.
    struct Tag {
        void* of = nullptr;
        std::uint8_t kind = 0;
    };
    using Answered = std::function<void(const Tag& tag, base::Result<core::Decided> result)>;

    /// `answered` for each step, then `over` once for the batch. Either may push.
    RecordQueue(runtime::Loop& loop, Records& records, Answered answered,
                std::function<void()> over);
    ~RecordQueue();
    RecordQueue(const RecordQueue&) = delete;
    RecordQueue& operator=(const RecordQueue&) = delete;

    void push(RecordStep step, const Tag& tag) { push(tag) = std::move(step); }
    /// A step to be filled before anything else is asked of this queue.
    RecordStep& push(const Tag& tag);
    /// The store's time now, rather too late than too early; nullopt before its first answer.
    [[nodiscard]] std::optional<core::StoreTime> latest_now() const;

  private:
    struct Sent {
        std::vector<Tag> tags;
        base::SteadyTime at;
    };
    void arm();
    void flush(bool patient);
    void send();
    void take_answers(const Sent& sent, std::vector<base::Result<core::Decided>> results);
    void learn(const Sent& sent, const std::vector<base::Result<core::Decided>>& results);

    runtime::Loop& loop_;
    Records& records_;
    Answered answered_;
    std::function<void()> over_;
    std::shared_ptr<RecordQueue*> self_;  ///< Points to null once this is gone.
    RecordSteps steps_;
    std::vector<Tag> tags_;
    std::size_t out_ = 0;
    bool armed_ = false;
    runtime::TimerId timer_ = 0;
    std::optional<std::int64_t> ahead_us_;  ///< The store's clock minus the steady one, at most.
};

}  // namespace semel::consumer
