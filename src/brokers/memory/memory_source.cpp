#include "brokers/memory/memory_source.hpp"

#include <algorithm>

namespace semel::brokers::memory {

namespace {

MemoryAssignment& mine(const AssignmentPtr& assignment) {
    return static_cast<MemoryAssignment&>(*assignment);
}

base::Error invalid(std::string text) {
    return {.code = base::ErrorCode::invalid_argument, .detail = std::move(text)};
}

std::vector<AssignmentPtr> as_told(const std::vector<MemoryAssignmentPtr>& which) {
    return {which.begin(), which.end()};
}

}  // namespace

MemorySource::MemorySource(MemoryBroker& broker, std::string group, std::vector<std::string> topics,
                           std::string client_id)
    : broker_(broker),
      group_(std::move(group)),
      topics_(std::move(topics)),
      client_id_(std::move(client_id)) {}

MemorySource::~MemorySource() { stop(std::chrono::milliseconds{0}); }

base::Result<void> MemorySource::start(Listener& listener) {
    if (listener_ != nullptr) return invalid("memory: start is for once");
    listener_ = &listener;
    group().members.push_back(this);
    broker_.rebalance(group_);
    return {};
}

void MemorySource::begin(const AssignmentPtr& assignment, std::optional<std::int64_t> from) {
    MemoryAssignment& one = mine(assignment);
    if (one.gone || one.begun || (one.held && !from)) return;
    if (from) one.mark = core::CommitWatermark(*from);
    one.begun = true;
    one.held = false;
}

std::size_t MemorySource::settle(std::span<const Receipt> receipts) {
    std::size_t settled = 0;
    for (const Receipt& receipt : receipts) {
        MemoryAssignment& one = mine(receipt.assignment);
        settled += !one.gone && one.mark.finish(receipt.position) ? 1 : 0;
    }
    return settled;
}

void MemorySource::drained(const AssignmentPtr& assignment) { mine(assignment).drained = true; }
void MemorySource::pause(const AssignmentPtr& assignment) { mine(assignment).paused = true; }
void MemorySource::resume(const AssignmentPtr& assignment) { mine(assignment).paused = false; }

base::Result<void> MemorySource::seek(const AssignmentPtr& assignment, std::int64_t position,
                                      std::chrono::milliseconds) {
    MemoryAssignment& one = mine(assignment);
    if (one.gone || (!one.paused && !one.held) || one.mark.in_flight() > 0)
        return invalid(
            "memory: " + one.topic() +
            " can be moved only while it is paused and none of its messages is unsettled");
    one.mark = core::CommitWatermark(position);
    one.held = false;
    one.begun = true;
    return {};
}

base::Result<void> MemorySource::commit(std::chrono::milliseconds) {
    if (broker_.commits_fail_)
        return base::Error{.code = base::ErrorCode::io, .detail = "memory: commits fail"};
    commit_marks();
    return {};
}

std::vector<AssignmentState> MemorySource::state() const {
    std::vector<AssignmentState> out;
    for (const auto& [partition, one] : held_)
        out.push_back({.assignment = one,
                       .position = one->mark.position(),
                       .committable = one->mark.committable(),
                       .committed = broker_.committed(group_, partition),
                       .in_flight = one->mark.in_flight(),
                       .begun = one->begun,
                       .paused = one->paused,
                       .held = one->held});
    return out;
}

base::Result<std::vector<PartitionLag>> MemorySource::lag(std::chrono::milliseconds) {
    std::vector<PartitionLag> out;
    for (const auto& [partition, one] : held_) {
        const MemoryBroker::Log& log = broker_.logs_.at(partition);
        const std::int64_t committed = broker_.committed(group_, partition);
        out.push_back({.partition = partition,
                       .begin = log.begin,
                       .end = log.end,
                       .committed = committed,
                       .lag = std::max<std::int64_t>(0, log.end - std::max(committed, log.begin))});
    }
    return out;
}

base::Result<GroupDescription> MemorySource::describe(std::chrono::milliseconds) {
    GroupDescription out{.state = "Stable"};
    for (const MemorySource* member : group().members) {
        GroupMember& one = out.members.emplace_back();
        one.id = one.client_id = member->client_id_;
        one.self = member == this;
        for (const auto& [partition, owner] : group().owners) {
            if (owner == member) one.partitions.push_back(partition);
        }
    }
    out.member_count = out.members.size();
    return out;
}

base::Result<std::vector<CommittedPosition>> MemorySource::committed(std::chrono::milliseconds) {
    std::vector<CommittedPosition> out;
    for (const auto& [partition, commit] : group().commits)
        out.push_back(
            {.partition = partition, .offset = commit.offset, .metadata = commit.metadata});
    return out;
}

base::Result<std::string> MemorySource::topic_id(const std::string& topic,
                                                 std::chrono::milliseconds) {
    const auto at = broker_.topic_ids_.find(topic);
    if (at == broker_.topic_ids_.end())
        return base::Error{.code = base::ErrorCode::io, .detail = "memory: no topic " + topic};
    return broker_.topic_ids_told_ ? at->second : std::string{};
}

SourceTraits MemorySource::traits() const {
    return {.name = "memory (group " + group_ + ")",
            .commits_positions = true,
            .keyed = true,
            .one_consumer = true,
            .library = "memory"};
}

void MemorySource::stop(std::chrono::milliseconds drain) {
    if (std::exchange(stopped_, true) || listener_ == nullptr) return;
    if (!crashed_) {
        std::vector<Partition> all;
        for (const auto& [partition, one] : held_) all.push_back(partition);
        drain_until_ = now_ + drain;
        if (!all.empty()) begin_revoke(all);
        finish_revoke(true);
    }
    broker_.left(*this);
}

// ---------------------------------------------------------------- what a poll thread does

std::size_t MemorySource::in_flight() const {
    std::size_t out = 0;
    for (const auto& [partition, one] : held_) out += one->mark.in_flight();
    return out;
}

void MemorySource::give(const Partition& which, MemoryBroker::Log& log,
                        const MemoryBroker::Commit& commit) {
    const bool known = commit.offset >= 0;
    auto one = std::make_shared<MemoryAssignment>(
        which, ++epochs_, known ? commit.offset : log.begin,
        known ? std::optional(commit.offset) : std::nullopt, commit.metadata);
    held_[which] = one;
    told_.push_back(std::move(one));
}

void MemorySource::begin_revoke(const std::vector<Partition>& which) {
    std::vector<MemoryAssignmentPtr> now;
    for (const Partition& partition : which) {
        const auto at = held_.find(partition);
        if (at == held_.end() || at->second->draining) continue;
        at->second->draining = true;
        now.push_back(at->second);
    }
    // Given and taken before it was told: nobody needs to know.
    std::erase_if(told_, [&](const MemoryAssignmentPtr& one) { return one->draining; });
    if (now.empty()) return;
    leaving_.insert(leaving_.end(), now.begin(), now.end());
    listener_->revoked(as_told(now), drain_until_);
}

bool MemorySource::finish_revoke(bool everything) {
    std::vector<MemoryAssignmentPtr> out;
    for (const MemoryAssignmentPtr& one : leaving_) {
        if (everything || one->drained || one->mark.in_flight() == 0 || now_ >= drain_until_)
            out.push_back(one);
    }
    if (out.empty()) return false;
    commit_marks();
    for (const MemoryAssignmentPtr& one : out) {
        one->gone = true;
        std::erase(leaving_, one);
        held_.erase(one->partition());
        group().owners.erase(one->partition());
    }
    listener_->released(as_told(out));
    return true;
}

void MemorySource::lose() {
    std::vector<MemoryAssignmentPtr> all;
    for (auto& [partition, one] : std::exchange(held_, {})) {
        one->gone = true;
        all.push_back(one);
    }
    leaving_.clear();
    told_.clear();
    if (!all.empty()) listener_->lost(as_told(all));
}

bool MemorySource::commit_marks() {
    if (broker_.commits_fail_) return false;
    bool moved = false;
    for (const auto& [partition, one] : held_) {
        if (!one->begun || one->held) continue;
        std::int64_t& offset = group().commits[partition].offset;
        moved = moved || offset != one->mark.committable();
        offset = one->mark.committable();
    }
    return moved;
}

bool MemorySource::deliver() {
    std::vector<Delivery> batch;
    for (const auto& [partition, one] : held_) {
        if (!one->begun || one->paused || one->held || one->draining) continue;
        const MemoryBroker::Log& log = broker_.logs_.at(partition);
        const std::int64_t from = one->mark.position();
        if (from < log.begin || from > log.end) {
            one->held = true;
            listener_->problem({.kind = ProblemKind::out_of_range,
                                .partition = partition,
                                .text = "memory: position " + std::to_string(from) + " of " +
                                        partition.topic + " is not in the log"});
            continue;
        }
        auto at = log.entries.lower_bound(from);
        std::size_t room = window_ > in_flight() ? window_ - in_flight() : 0;
        for (; at != log.entries.end() && room > 0; ++at, --room) {
            std::vector<Header> headers;
            for (const OutgoingHeader& header : at->second.headers) {
                Header& to = headers.emplace_back(Header{.name = header.name, .value = {}});
                if (header.value) to.value = *header.value;
            }
            const auto view = [](const std::optional<std::string>& text) {
                return text ? std::optional<std::string_view>(*text) : std::nullopt;
            };
            batch.push_back(make_delivery({.assignment = one, .position = at->first},
                                          view(at->second.key), view(at->second.value), headers));
            batch.back().timestamp_ms = at->second.timestamp_ms;
            one->mark.deliver(at->first);
        }
        if (at == log.entries.end()) one->mark.advance(log.end);
    }
    if (batch.empty()) return false;
    listener_->delivered(std::move(batch));
    return true;
}

bool MemorySource::pump(base::SteadyTime now) {
    now_ = now;
    if (crashed_ || stopped_ || listener_ == nullptr) return false;
    if (std::exchange(expelled_, false)) {
        lose();
        return true;
    }
    bool happened = finish_revoke(false);
    if (!told_.empty()) {
        listener_->assigned(as_told(std::exchange(told_, {})));
        happened = true;
    }
    happened = deliver() || happened;
    return commit_marks() || happened;
}

}  // namespace semel::brokers::memory
