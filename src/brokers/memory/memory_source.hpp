// MemorySource: a member of a MemoryBroker's group.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "brokers/memory/memory_broker.hpp"
#include "core/watermark.hpp"

namespace semel::brokers::memory {

class MemoryAssignment final : public Assignment {
  public:
    MemoryAssignment(Partition partition, std::uint64_t epoch, std::int64_t start,
                     std::optional<std::int64_t> committed, std::string metadata)
        : Assignment(std::move(partition), epoch), mark(start) {
        committed_ = committed;
        committed_metadata_ = std::move(metadata);
    }
    core::CommitWatermark mark;
    bool begun = false, paused = false, held = false, draining = false, drained = false;
    bool gone = false;
};
using MemoryAssignmentPtr = std::shared_ptr<MemoryAssignment>;

class MemorySource final : public Source {
  public:
    MemorySource(MemoryBroker& broker, std::string group, std::vector<std::string> topics,
                 std::string client_id);
    ~MemorySource() override;

    base::Result<void> start(Listener& listener) override;
    void begin(const AssignmentPtr& assignment, std::optional<std::int64_t> from) override;
    using Source::settle;
    std::size_t settle(std::span<const Receipt> receipts) override;
    void drained(const AssignmentPtr& assignment) override;
    void pause(const AssignmentPtr& assignment) override;
    void resume(const AssignmentPtr& assignment) override;
    void window(std::size_t unsettled_max) override { window_ = unsettled_max; }
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
    [[nodiscard]] base::SteadyTime last_poll() const override { return now_; }
    /// Does not wait: what is not drained by the listener's `revoked` is given up.
    void stop(std::chrono::milliseconds drain) override;

  private:
    friend class MemoryBroker;
    /// True if anything happened.
    bool pump(base::SteadyTime now);
    void give(const Partition& which, MemoryBroker::Log& log, const MemoryBroker::Commit& commit);
    void begin_revoke(const std::vector<Partition>& which);
    bool finish_revoke(bool everything);
    void lose();
    bool deliver();
    bool commit_marks();
    [[nodiscard]] std::size_t in_flight() const;
    MemoryBroker::Group& group() { return broker_.groups_[group_]; }

    MemoryBroker& broker_;
    const std::string group_;
    const std::vector<std::string> topics_;
    const std::string client_id_;
    Listener* listener_ = nullptr;
    std::map<Partition, MemoryAssignmentPtr> held_;
    std::vector<MemoryAssignmentPtr> told_;  ///< Given, and not yet told.
    std::vector<MemoryAssignmentPtr> leaving_;
    base::SteadyTime now_{};
    base::SteadyTime drain_until_{};
    std::uint64_t epochs_ = 0;
    std::size_t window_ = SIZE_MAX;
    bool expelled_ = false, crashed_ = false, stopped_ = false;
};

}  // namespace semel::brokers::memory
