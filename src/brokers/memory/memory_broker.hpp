// MemoryBroker: a broker of topics, partitions and groups in this process, for tests. No threads:
// what a poll thread would do happens in pump(), so that every interleaving can be made on purpose.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "brokers/publisher.hpp"
#include "brokers/source.hpp"

namespace semel::brokers::memory {

class MemorySource;

/// One message in the log.
struct Entry {
    std::optional<std::string> key, value;
    std::vector<OutgoingHeader> headers;
    std::optional<std::int64_t> timestamp_ms;
};

/// Owns its logs and groups; sources and publishers made by it must not outlive it. Used by one
/// thread, but for Source::settle, which only the thread of pump() may call here as well.
class MemoryBroker {
  public:
    MemoryBroker() = default;
    MemoryBroker(const MemoryBroker&) = delete;
    MemoryBroker& operator=(const MemoryBroker&) = delete;
    ~MemoryBroker();

    void create_topic(const std::string& topic, std::int32_t partitions);
    /// Deletes the topic and makes another one under its name: empty, with an id of its own; what
    /// groups have committed of it is gone. Assignments stay and are out of range.
    void recreate_topic(const std::string& topic, std::int32_t partitions);
    /// False: Source::topic_id() answers as a library that cannot ask for it.
    void tell_topic_ids(bool told) { topic_ids_told_ = told; }
    /// Its offset. The topic must exist.
    std::int64_t append(const Partition& where, Entry entry);
    /// Offsets that hold nothing: compaction, markers. The next append lies behind them.
    void leave_hole(const Partition& where, std::int64_t count);
    /// Retention: what lies before `offset` is gone.
    void expire(const Partition& where, std::int64_t offset);

    /// A member of `group`; it joins with its start(). Partitions are dealt in order of joining.
    std::unique_ptr<Source> join(const std::string& group, std::vector<std::string> topics,
                                 std::string client_id = "memory");
    std::unique_ptr<Publisher> publisher();

    /// Deals the group's partitions anew: revokes first, then (when all are released) assigns.
    /// Happens by itself when a member joins or leaves. `eager`: every partition is revoked first.
    void rebalance(const std::string& group, bool eager = true);
    /// Moves one partition to nobody, until the next rebalance: only this one is revoked.
    void revoke(const std::string& group, const Partition& which);
    /// The member is out, without a word (it was frozen too long): `lost` at its next pump; the
    /// others get its partitions. It may join again by rebalance().
    void expel(Source& member);
    /// As SIGKILL: the member hears nothing any more, ever.
    void crash(Source& member);
    /// Commits are refused from now on.
    void fail_commits(bool failing) { commits_fail_ = failing; }
    /// Publishing ends like this from now on; nullopt: as usual. With `applied` yes or unknown the
    /// message is in the log all the same.
    void fail_publishing(std::optional<base::Error> how) { publishing_fails_ = std::move(how); }

    /// One round of every poll thread, until nothing happens any more: revokes, assigns,
    /// deliveries, commits. `now` is what drains are measured by.
    void pump(base::SteadyTime now = {});

    /// -1: nothing.
    [[nodiscard]] std::int64_t committed(const std::string& group, const Partition& which) const;
    void set_committed(const std::string& group, const Partition& which, std::int64_t offset,
                       std::string metadata = {});
    [[nodiscard]] std::int64_t end(const Partition& which) const;
    [[nodiscard]] const std::map<std::int64_t, Entry>& log(const Partition& which) const;

  private:
    friend class MemorySource;
    friend class MemoryPublisher;
    struct Log {
        std::map<std::int64_t, Entry> entries;
        std::int64_t begin = 0, end = 0;
    };
    struct Commit {
        std::int64_t offset = -1;
        std::string metadata;
    };
    struct Group {
        std::vector<MemorySource*> members;  ///< In the order of joining.
        std::map<Partition, MemorySource*> owners;
        std::map<Partition, Commit> commits;
        bool deal = false;  ///< Partitions without an owner are to be dealt.
    };
    void left(MemorySource& member);
    void deal(const std::string& name, Group& group);
    std::vector<Partition> partitions_of(const Group& group) const;

    std::map<Partition, Log> logs_;
    std::map<std::string, std::string> topic_ids_;
    std::uint64_t topics_made_ = 0;
    bool topic_ids_told_ = true;
    std::map<std::string, Group> groups_;
    bool commits_fail_ = false;
    std::optional<base::Error> publishing_fails_;
};

}  // namespace semel::brokers::memory
