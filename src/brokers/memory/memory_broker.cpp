#include "brokers/memory/memory_broker.hpp"

#include <algorithm>

#include "base/assert.hpp"
#include "brokers/memory/memory_source.hpp"

namespace semel::brokers::memory {

namespace {
constexpr std::chrono::seconds kDrain{20};
constexpr int kRoundsUntilStuck = 100'000;
}  // namespace

class MemoryPublisher final : public Publisher {
  public:
    explicit MemoryPublisher(MemoryBroker& broker) : broker_(broker) {}
    void publish(Outgoing message, PublishDone done) override {
        if (stopped_)
            return done(base::Error{.code = base::ErrorCode::stopping,
                                    .detail = "memory: the publisher is stopping"});
        const Partition first{message.topic, message.partition.value_or(0)};
        const std::optional<base::Error> failing = broker_.publishing_fails_;
        if (!broker_.logs_.contains(first))
            return done(base::Error{.code = base::ErrorCode::io,
                                    .detail = "memory: no topic " + message.topic});
        if (failing && failing->applied == base::Applied::no) return done(*failing);
        Partition where = first;
        if (!message.partition && message.key) {
            std::int32_t count = 0;
            while (broker_.logs_.contains({message.topic, count})) ++count;
            where.number = static_cast<std::int32_t>(std::hash<std::string>{}(*message.key) %
                                                     static_cast<std::size_t>(count));
        }
        const std::int64_t offset = broker_.append(where, {.key = std::move(message.key),
                                                           .value = std::move(message.value),
                                                           .headers = std::move(message.headers),
                                                           .timestamp_ms = message.timestamp_ms});
        if (failing) return done(*failing);
        done(PublishedAt{.partition = where.number, .position = offset});
    }
    bool flush(std::chrono::milliseconds) override { return true; }
    void stop(std::chrono::milliseconds) override { stopped_ = true; }

  private:
    MemoryBroker& broker_;
    bool stopped_ = false;
};

MemoryBroker::~MemoryBroker() {
    for (const auto& [name, group] : groups_)
        SEMEL_ASSERT(group.members.empty(), "sources end before their broker");
}

void MemoryBroker::create_topic(const std::string& topic, std::int32_t partitions) {
    for (std::int32_t number = 0; number < partitions; ++number) logs_[{topic, number}];
    topic_ids_.try_emplace(topic, "topic-" + std::to_string(++topics_made_));
}

void MemoryBroker::recreate_topic(const std::string& topic, std::int32_t partitions) {
    const auto of_topic = [&](const auto& entry) { return entry.first.topic == topic; };
    std::erase_if(logs_, of_topic);
    for (auto& [name, group] : groups_) std::erase_if(group.commits, of_topic);
    topic_ids_.erase(topic);
    create_topic(topic, partitions);
}

std::int64_t MemoryBroker::append(const Partition& where, Entry entry) {
    Log& log = logs_.at(where);
    log.entries.emplace(log.end, std::move(entry));
    return log.end++;
}

void MemoryBroker::leave_hole(const Partition& where, std::int64_t count) {
    logs_.at(where).end += count;
}

void MemoryBroker::expire(const Partition& where, std::int64_t offset) {
    Log& log = logs_.at(where);
    log.entries.erase(log.entries.begin(), log.entries.lower_bound(offset));
    log.begin = std::max(log.begin, offset);
}

std::unique_ptr<Source> MemoryBroker::join(const std::string& group,
                                           std::vector<std::string> topics, std::string client_id) {
    return std::make_unique<MemorySource>(*this, group, std::move(topics), std::move(client_id));
}

std::unique_ptr<Publisher> MemoryBroker::publisher() {
    return std::make_unique<MemoryPublisher>(*this);
}

std::vector<Partition> MemoryBroker::partitions_of(const Group& group) const {
    std::set<std::string> topics;
    for (const MemorySource* member : group.members)
        topics.insert(member->topics_.begin(), member->topics_.end());
    std::vector<Partition> out;
    for (const auto& [partition, log] : logs_) {
        if (topics.contains(partition.topic)) out.push_back(partition);
    }
    return out;
}

void MemoryBroker::rebalance(const std::string& name, bool eager) {
    Group& group = groups_[name];
    const std::vector<Partition> all = partitions_of(group);
    for (std::size_t i = 0; i < group.members.size(); ++i) {
        std::vector<Partition> leaving;
        for (const auto& [partition, owner] : group.owners) {
            const auto place = static_cast<std::size_t>(
                std::find(all.begin(), all.end(), partition) - all.begin());
            if (owner == group.members[i] && (eager || place % group.members.size() != i))
                leaving.push_back(partition);
        }
        MemorySource& member = *group.members[i];
        member.drain_until_ = member.now_ + kDrain;
        member.begin_revoke(leaving);
    }
    group.deal = true;
}

void MemoryBroker::revoke(const std::string& name, const Partition& which) {
    Group& group = groups_[name];
    const auto owner = group.owners.find(which);
    if (owner == group.owners.end()) return;
    owner->second->drain_until_ = owner->second->now_ + kDrain;
    owner->second->begin_revoke({which});
}

void MemoryBroker::expel(Source& member) {
    auto& source = static_cast<MemorySource&>(member);
    source.expelled_ = true;
    Group& group = groups_[source.group_];
    std::erase_if(group.owners, [&](const auto& one) { return one.second == &source; });
    // Its place comes last from now on.
    std::erase(group.members, &source);
    if (!group.members.empty()) rebalance(source.group_, false);
    group.members.push_back(&source);
}

void MemoryBroker::crash(Source& member) {
    auto& source = static_cast<MemorySource&>(member);
    source.crashed_ = true;
    for (const auto& [partition, one] : source.held_) one->gone = true;
    left(source);
}

void MemoryBroker::left(MemorySource& member) {
    Group& group = groups_[member.group_];
    std::erase_if(group.owners, [&](const auto& one) { return one.second == &member; });
    if (std::erase(group.members, &member) > 0 && !group.members.empty())
        rebalance(member.group_, false);
}

// When everything that is to move is free.
void MemoryBroker::deal(const std::string&, Group& group) {
    for (const MemorySource* member : group.members) {
        if (!member->leaving_.empty() || member->expelled_) return;
    }
    group.deal = false;
    const std::vector<Partition> all = partitions_of(group);
    for (std::size_t i = 0; i < all.size() && !group.members.empty(); ++i) {
        MemorySource*& owner = group.owners[all[i]];
        if (owner != nullptr) continue;
        owner = group.members[i % group.members.size()];
        owner->give(all[i], logs_.at(all[i]), group.commits[all[i]]);
    }
}

void MemoryBroker::pump(base::SteadyTime now) {
    for (int round = 0; round < kRoundsUntilStuck; ++round) {
        bool happened = false;
        for (auto& [name, group] : groups_) {
            // A listener may end another source.
            const std::vector<MemorySource*> members = group.members;
            for (MemorySource* member : members) {
                if (std::find(group.members.begin(), group.members.end(), member) !=
                    group.members.end())
                    happened = member->pump(now) || happened;
            }
            if (group.deal) {
                deal(name, group);
                happened = happened || !group.deal;
            }
        }
        if (!happened) return;
    }
    SEMEL_ASSERT(false, "a listener that begins anew in every round never ends");
}

std::int64_t MemoryBroker::committed(const std::string& group, const Partition& which) const {
    const auto at = groups_.find(group);
    if (at == groups_.end()) return -1;
    const auto commit = at->second.commits.find(which);
    return commit == at->second.commits.end() ? -1 : commit->second.offset;
}

void MemoryBroker::set_committed(const std::string& group, const Partition& which,
                                 std::int64_t offset, std::string metadata) {
    groups_[group].commits[which] = {.offset = offset, .metadata = std::move(metadata)};
}

std::int64_t MemoryBroker::end(const Partition& which) const { return logs_.at(which).end; }

const std::map<std::int64_t, Entry>& MemoryBroker::log(const Partition& which) const {
    return logs_.at(which).entries;
}

}  // namespace semel::brokers::memory
