// Subscriber: the Source on one queue.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <span>
#include <thread>

#include "brokers/rabbitmq/connection.hpp"
#include "core/watermark.hpp"

namespace semel::brokers::rabbitmq {

/// One subscription on one channel: its tags mean nothing on any other.
class Subscription final : public Assignment {
  public:
    Subscription(const std::string& queue, std::uint64_t epoch, std::size_t singles_above)
        : Assignment(Partition{queue, 0}, epoch), tags_(singles_above) {}

    // ---- any thread
    /// How many of them were unsettled. They are of this subscription.
    std::size_t settle(std::span<const Receipt> receipts) {
        const std::lock_guard lock(mutex_);
        if (void_) return 0;
        std::size_t settled = 0;
        for (const Receipt& receipt : receipts)
            settled += tags_.finish(static_cast<std::uint64_t>(receipt.position)) ? 1 : 0;
        unsettled_ -= settled;
        return settled;
    }
    [[nodiscard]] std::size_t unsettled() const {
        const std::lock_guard lock(mutex_);
        return unsettled_;
    }
    [[nodiscard]] std::size_t finished() const {
        const std::lock_guard lock(mutex_);
        return tags_.waiting();
    }
    [[nodiscard]] std::size_t unacknowledged() const {
        const std::lock_guard lock(mutex_);
        return tags_.in_flight() + tags_.waiting();
    }
    void set_drained() { drained_ = true; }

    // ---- the I/O thread
    /// These are handed to the listener, in the order of their tags.
    void hand_over(std::span<const Delivery> messages) {
        const std::lock_guard lock(mutex_);
        for (const Delivery& message : messages)
            tags_.deliver(static_cast<std::uint64_t>(message.position()));
        unsettled_ += messages.size();
        last_tag = static_cast<std::uint64_t>(messages.back().position());
    }
    std::vector<core::TagAcknowledgement> take(bool all) {
        const std::lock_guard lock(mutex_);
        return void_ ? std::vector<core::TagAcknowledgement>{} : tags_.take(all);
    }
    void make_void() {
        const std::lock_guard lock(mutex_);
        void_ = true;
        unsettled_ = 0;
    }
    [[nodiscard]] bool drained() const { return drained_ || unsettled() == 0; }

    std::atomic<bool> begun{false};
    std::atomic<bool> paused{false};
    std::atomic<std::uint64_t> last_tag{0};

  private:
    mutable std::mutex mutex_;  ///< Guards the members below.
    core::TagWatermark tags_;
    std::size_t unsettled_ = 0;  ///< Of those handed over.
    bool void_ = false;
    std::atomic<bool> drained_{false};
};
using SubscriptionPtr = std::shared_ptr<Subscription>;

class Subscriber final : public Source {
  public:
    Subscriber(SourceConfig config, Endpoint endpoint);
    ~Subscriber() override;

    base::Result<void> start(Listener& listener) override;
    void begin(const AssignmentPtr& assignment, std::optional<std::int64_t> from) override;
    using Source::settle;
    std::size_t settle(std::span<const Receipt> receipts) override;
    void drained(const AssignmentPtr& assignment) override;
    void pause(const AssignmentPtr& assignment) override;
    void resume(const AssignmentPtr& assignment) override;
    void window(std::size_t unsettled_max) override;
    base::Result<void> seek(const AssignmentPtr& assignment, std::int64_t position,
                            std::chrono::milliseconds within) override;
    base::Result<void> commit(std::chrono::milliseconds within) override;
    [[nodiscard]] std::vector<AssignmentState> state() const override;
    base::Result<std::vector<PartitionLag>> lag(std::chrono::milliseconds within) override;
    base::Result<GroupDescription> describe(std::chrono::milliseconds within) override;
    base::Result<std::vector<CommittedPosition>> committed(
        std::chrono::milliseconds within) override;
    [[nodiscard]] SourceTraits traits() const override;
    [[nodiscard]] base::SteadyTime last_poll() const override;
    void stop(std::chrono::milliseconds drain) override;

  private:
    using Clock = std::chrono::steady_clock;
    struct Counts {
        std::size_t messages = 0, consumers = 0;
    };

    /// A message of which not all frames are here. The pointers are into the library's buffers,
    /// which are not released meanwhile.
    struct Arriving {
        const amqp_basic_deliver_t* how = nullptr;            ///< Null: none.
        const amqp_basic_properties_t* properties = nullptr;  ///< Null: the header is missing, too.
        std::uint64_t missing = 0;                            ///< Bytes of the body.
        std::string_view whole;                               ///< The body, if one frame had it.
        std::string parts;                                    ///< Else what came of it so far.
    };

    // ---- the I/O thread
    void run();
    /// How many more the prefetch lets come.
    [[nodiscard]] std::size_t room() const;
    void connect();
    std::optional<base::Error> set_up();
    void subscribe();
    /// How many messages came.
    std::size_t read();
    bool arrives(const amqp_frame_t& frame);
    void on_delivery();
    void look_at_count(std::span<const Header> headers);
    bool on_frame(const amqp_frame_t& frame);
    void hand_over();
    /// What is finished, when its time has come; `all`: everything, at once.
    void acknowledge(bool all);
    void leave();
    /// The connection or channel is gone: everything unsettled comes again.
    void lose(ProblemKind kind, const std::string& why);
    void tell(ProblemKind kind, std::string text);
    base::Result<Counts> count();

    // ---- any thread
    base::Result<Counts> ask_counts(std::chrono::milliseconds within);
    /// Runs it on the I/O thread and waits for its answer.
    template <class T>
    base::Result<T> ask(std::function<base::Result<T>()> what, const std::string& doing,
                        std::chrono::milliseconds within);

    const SourceConfig config_;
    const std::size_t ack_batch_;
    Listener* listener_ = nullptr;
    Connection connection_;
    Mailbox mailbox_;
    std::thread thread_;
    std::mutex stop_mutex_;
    std::atomic<std::size_t> window_;
    std::atomic<bool> ack_pending_{false};
    /// The I/O thread waits for the socket, or is about to: it is woken for the first that is
    /// settled. Else it looks by itself.
    std::atomic<bool> idle_{false};
    std::atomic<std::int64_t> last_poll_{0};
    std::atomic<bool> ended_{false};

    mutable std::mutex current_mutex_;  ///< For readers; only the I/O thread writes.
    SubscriptionPtr current_;

    // The I/O thread's.
    std::deque<Delivery> waiting_;  ///< Arrived, not handed over; the prefetch bounds it.
    Arriving arriving_;
    std::uint64_t epochs_ = 0;
    Backoff backoff_;
    base::SteadyTime next_try_{};
    bool gathering_ = false;               ///< It waits for what follows, not for the socket.
    std::chrono::milliseconds gather_{1};  ///< How long.
    base::SteadyTime read_at_{};           ///< Since when.
    base::SteadyTime ack_at_ = base::SteadyTime::max();
    base::SteadyTime all_at_{};  ///< When those behind a stuck message are acknowledged, too.
    std::optional<base::SteadyTime> leave_at_;
    bool revoked_ = false;
    bool counting_told_ = false;
    std::string last_problem_;
    bool reachable_ = true;
    bool done_ = false;
};

}  // namespace semel::brokers::rabbitmq
