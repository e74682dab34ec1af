// Member: the Source on librdkafka. One poll thread serves the group's events and takes messages;
// the partitions' own queues are led to a queue beside the events', so that a full window never
// delays a rebalance.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <thread>

#include "brokers/kafka/handles.hpp"
#include "brokers/kafka/held.hpp"

namespace semel::brokers::kafka {

using HeldPtr = std::shared_ptr<Held>;
using HeldList = std::vector<HeldPtr>;

inline Held& held_of(const AssignmentPtr& assignment) { return static_cast<Held&>(*assignment); }

inline std::string name_of(const Partition& partition) {
    return partition.topic + "[" + std::to_string(partition.number) + "]";
}

/// Whether rebalances come as differences; otherwise they take away everything first.
inline bool cooperative(rd_kafka_t* client) {
    const char* protocol = rd_kafka_rebalance_protocol(client);
    return protocol != nullptr && std::string_view(protocol) == "COOPERATIVE";
}

class Member final : public Source {
  public:
    Member(SourceConfig config, Conf conf);
    ~Member() override;

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
    base::Result<std::string> topic_id(const std::string& topic,
                                       std::chrono::milliseconds within) override;
    [[nodiscard]] SourceTraits traits() const override;
    [[nodiscard]] base::SteadyTime last_poll() const override;
    void stop(std::chrono::milliseconds drain) override;

  private:
    using Clock = std::chrono::steady_clock;
    using Command = std::function<void()>;
    enum class Phase : std::uint8_t { running, leaving, closing, done };

    /// Partitions on their way out: they drain, then their marks are committed.
    struct Revoke {
        HeldList which;
        TopicPartitions list;  ///< To be unassigned; null: everything, because this member leaves.
        base::SteadyTime deadline;
        bool committing = false;
        base::SteadyTime commit_deadline;
    };
    struct CommitWaiter {
        std::uint64_t after;  ///< Answered by the commit of this number or a later one.
        std::shared_ptr<std::promise<base::Result<void>>> promise;
    };

    // ---- poll thread
    void run();
    void round();
    void wait();
    void run_commands();
    void serve_events();
    void on_event(rd_kafka_event_t* event);
    void on_rebalance(rd_kafka_event_t* event);
    void look_for_partitions();
    void try_assign();
    void assign(const rd_kafka_topic_partition_list_t* list);
    void unassign(const rd_kafka_topic_partition_list_t* list);
    void refused(const rd_kafka_error_t* error);
    void begin_revoke(HeldList which, TopicPartitions list, base::SteadyTime deadline);
    void serve_revoke();
    void finish_revoke();
    void lose(const HeldList& which);
    void seek_where_needed();
    void restart_fetchers();
    void forward_all();
    void drop_strays();
    void apply_pause(const HeldPtr& held);
    bool puts_to_sleep(const HeldPtr& held, const Delivery& delivery);
    void wake_sleepers();
    void take_messages();
    void take(const rd_kafka_message_t* message, std::vector<Delivery>& into);
    void on_message_error(rd_kafka_resp_err_t code, const std::string& text, const char* topic,
                          std::int32_t partition, std::int64_t offset);
    void hold(const HeldPtr& held, ProblemKind why, std::string text);
    void commit_due();
    bool send_commit(const HeldList& which);
    void on_commit(rd_kafka_event_t* event);
    void answer_commits(const base::Result<void>& result);
    void on_client_error(rd_kafka_resp_err_t code, const std::string& text);
    void on_statistics(std::string_view json);
    void fail(const std::string& text);
    void tell(ProblemKind kind, std::string text, std::optional<Partition> partition = {});
    void set_reachable(bool reachable, const std::string& text);
    void close_group();
    [[nodiscard]] bool window_open() const;
    [[nodiscard]] HeldPtr find(const char* topic, std::int32_t partition) const;
    [[nodiscard]] TopicPartitions list_of(const HeldList& which) const;
    [[nodiscard]] std::vector<std::string> all_topics() const;
    [[nodiscard]] bool is_delayed(std::string_view topic) const;
    [[nodiscard]] std::string who() const;

    // ---- any thread
    void post(Command command);
    void wake();
    /// The client, kept alive by the lock; null after stop().
    std::pair<std::shared_lock<std::shared_mutex>, rd_kafka_t*> client();
    TopicPartitions assigned_list() const;

    const SourceConfig config_;
    Conf conf_;
    Listener* listener_ = nullptr;
    mutable std::shared_mutex client_mutex_;  ///< Unique only to start and to destroy.
    Client client_;
    Queue events_, messages_, commits_;
    int wake_fd_ = -1;
    std::thread thread_;
    std::mutex stop_mutex_;

    std::mutex commands_mutex_;
    std::deque<Command> commands_;
    bool refuse_commands_ = true;

    Outstanding outstanding_;
    std::atomic<std::size_t> window_;
    std::atomic<bool> starved_{false};
    std::atomic<std::int64_t> last_poll_{0};

    mutable std::mutex held_mutex_;  ///< Guards held_ for readers; only the poll thread writes.
    std::map<Partition, HeldPtr> held_;

    // The poll thread's.
    Phase phase_ = Phase::running;
    std::uint64_t epochs_ = 0;
    TopicPartitions pending_assign_;
    base::SteadyTime next_assign_try_{};
    base::SteadyTime next_look_{};  ///< For partitions; observing.
    std::optional<Revoke> revoke_;
    std::optional<base::SteadyTime> leave_at_;  ///< stop() was called; the drain's deadline.
    base::SteadyTime close_deadline_{};
    base::SteadyTime next_seek_{};
    base::SteadyTime next_wake_ = base::SteadyTime::max();  ///< Of a partition that sleeps.
    base::SteadyTime next_commit_{};
    std::uint64_t commits_sent_ = 0;
    HeldList committing_;  ///< Of the commit on its way; empty: none.
    std::vector<CommitWaiter> commit_waiters_;
    bool commit_wanted_ = false;
    bool restart_wanted_ = false;
    base::SteadyTime forward_until_{};
    std::deque<Event> stray_;  ///< Messages that came the way of the events.
    bool reachable_ = true;
    bool suspicious_ = false;  ///< A connection failed: perhaps none is up.
    std::string last_failure_;
    bool failed_ = false;
    const void* last_topic_ = nullptr;
    HeldPtr last_held_;
    std::vector<Header> headers_;
};

}  // namespace semel::brokers::kafka
