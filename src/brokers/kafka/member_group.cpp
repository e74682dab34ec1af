// The group: partitions that come and go, and what is committed of them. On the poll thread.
#include <algorithm>

#include "brokers/kafka/group.hpp"
#include "brokers/kafka/member.hpp"

namespace semel::brokers::kafka {

using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

constexpr seconds kAskWithin{5};        // questions of the poll thread itself
constexpr milliseconds kAskAgain{500};  // after one that failed
constexpr seconds kCommitWithin{10};    // the last commit of a revoke
constexpr seconds kLookEvery{30};       // for partitions that are new

// What passes by itself: the next commit tries again, or the partition is lost anyhow.
bool passes(rd_kafka_resp_err_t code) {
    switch (code) {
        case RD_KAFKA_RESP_ERR__NO_OFFSET:
        case RD_KAFKA_RESP_ERR__WAIT_COORD:
        case RD_KAFKA_RESP_ERR__TRANSPORT:
        case RD_KAFKA_RESP_ERR__TIMED_OUT:
        case RD_KAFKA_RESP_ERR__TIMED_OUT_QUEUE:
        case RD_KAFKA_RESP_ERR__DESTROY:
        case RD_KAFKA_RESP_ERR_REQUEST_TIMED_OUT:
        case RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS:
        case RD_KAFKA_RESP_ERR_COORDINATOR_NOT_AVAILABLE:
        case RD_KAFKA_RESP_ERR_NOT_COORDINATOR:
        case RD_KAFKA_RESP_ERR_ILLEGAL_GENERATION:
        case RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID:
        case RD_KAFKA_RESP_ERR_REBALANCE_IN_PROGRESS:
            return true;
        default:
            return false;
    }
}

}  // namespace

void Member::on_rebalance(rd_kafka_event_t* event) {
    const auto code = rd_kafka_event_error(event);
    const rd_kafka_topic_partition_list_t* list = rd_kafka_event_topic_partition_list(event);
    if (phase_ != Phase::running || leave_at_) {
        // Closing: what was held is released already, what comes is not taken.
        if (code != RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS && revoke_ && revoke_->list == nullptr) {
            if (rd_kafka_assignment_lost(client_.get()) == 0) {
                revoke_->list.reset(rd_kafka_topic_partition_list_copy(list));
                return;
            }
            lose(std::exchange(revoke_, std::nullopt)->which);
        }
        // The library wants an answer to each; its own close takes away what comes now.
        code == RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS ? assign(list) : unassign(list);
        return;
    }
    if (code == RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS) {
        pending_assign_.reset(rd_kafka_topic_partition_list_copy(list));
        next_assign_try_ = {};
        set_reachable(true, {});
        return;
    }
    pending_assign_.reset();
    HeldList which;
    for (int i = 0; list != nullptr && i < list->cnt; ++i) {
        if (HeldPtr held = find(list->elems[i].topic, list->elems[i].partition))
            which.push_back(std::move(held));
    }
    if (code != RD_KAFKA_RESP_ERR__REVOKE_PARTITIONS ||
        rd_kafka_assignment_lost(client_.get()) != 0) {
        // What drained until now is gone as well, whether the list names it or not.
        const HeldList draining = revoke_ ? std::move(revoke_->which) : HeldList{};
        for (const HeldPtr& held : draining) {
            if (std::find(which.begin(), which.end(), held) == which.end()) which.push_back(held);
        }
        revoke_.reset();
        lose(which);
        unassign(list);
        return;
    }
    begin_revoke(std::move(which), TopicPartitions(rd_kafka_topic_partition_list_copy(list)),
                 Clock::now() + config_.drain);
}

// Who observes is in no group, and takes every partition itself.
void Member::look_for_partitions() {
    if (!config_.observe || pending_assign_ != nullptr || phase_ != Phase::running || leave_at_ ||
        Clock::now() < next_look_)
        return;
    next_look_ = Clock::now() + (held_.empty() ? kAskAgain : milliseconds(kLookEvery));
    const auto all = partitions_of(client_.get(), config_.topics, kAskWithin);
    if (!all) return set_reachable(false, who() + ": " + all.error().detail);
    set_reachable(true, {});
    TopicPartitions fresh(rd_kafka_topic_partition_list_new((*all)->cnt));
    for (int i = 0; i < (*all)->cnt; ++i) {
        const rd_kafka_topic_partition_t& one = (*all)->elems[i];
        if (!held_.contains({one.topic, one.partition}))
            rd_kafka_topic_partition_list_add(fresh.get(), one.topic, one.partition);
    }
    if (fresh->cnt > 0) pending_assign_ = std::move(fresh);
}

// Until the positions are known the assignment waits; the group waits for us only to join, not
// here.
void Member::try_assign() {
    if (pending_assign_ == nullptr || Clock::now() < next_assign_try_) return;
    const TopicPartitions list(rd_kafka_topic_partition_list_copy(pending_assign_.get()));
    const TopicPartitions fresh(rd_kafka_topic_partition_list_new(list->cnt));
    const TopicPartitions copies(rd_kafka_topic_partition_list_new(list->cnt));
    const auto again = [this](const std::string& why) {
        next_assign_try_ = Clock::now() + kAskAgain;
        tell(ProblemKind::notice, who() + ": its partitions begin later: " + why);
    };
    if (list->cnt > 0) {
        auto code = rd_kafka_committed(client_.get(), list.get(), milliseconds_of(kAskWithin));
        for (int i = 0; i < list->cnt && code == RD_KAFKA_RESP_ERR_NO_ERROR; ++i) {
            code = list->elems[i].err;
            if (list->elems[i].offset < 0)
                rd_kafka_topic_partition_list_add(
                    is_delayed(list->elems[i].topic) ? copies.get() : fresh.get(),
                    list->elems[i].topic, list->elems[i].partition);
        }
        if (code != RD_KAFKA_RESP_ERR_NO_ERROR)
            return again(std::string("the committed offsets: ") + rd_kafka_err2str(code));
    }
    if (fresh->cnt > 0 && config_.start != Start::fail) {
        const End end = config_.start == Start::earliest ? End::first : End::last_stable;
        if (auto done = ends_of(client_.get(), fresh.get(), end, kAskWithin); !done)
            return again(done.error().detail);
    }
    // What waits there was written by this group, before it was first read.
    if (copies->cnt > 0) {
        if (auto done = ends_of(client_.get(), copies.get(), End::first, kAskWithin); !done)
            return again(done.error().detail);
    }
    pending_assign_.reset();
    std::vector<AssignmentPtr> told;
    HeldList without;
    for (int i = 0; i < list->cnt; ++i) {
        rd_kafka_topic_partition_t& one = list->elems[i];
        const bool known = one.offset >= 0;
        const bool delayed = is_delayed(one.topic);
        const bool refused = !known && !delayed && config_.start == Start::fail;
        std::int64_t start = one.offset;
        if (!known) {
            const auto* at = rd_kafka_topic_partition_list_find(
                delayed ? copies.get() : fresh.get(), one.topic, one.partition);
            start = refused ? 0 : at->offset;
        }
        auto held = std::make_shared<Held>(Partition{one.topic, one.partition}, ++epochs_, start,
                                           outstanding_);
        if (known)
            held->set_committed(
                one.offset,
                one.metadata == nullptr
                    ? std::string{}
                    : std::string(static_cast<const char*>(one.metadata), one.metadata_size));
        one.offset = start;
        held->delayed = delayed;
        if (refused) {
            held->stopped = true;
            without.push_back(held);
        }
        told.push_back(held);
        const std::lock_guard lock(held_mutex_);
        held_[held->partition()] = held;
    }
    // Before the assign, or first messages take the way of the events.
    forward_all();
    assign(list.get());
    for (const AssignmentPtr& one : told) held_of(one).library_paused = true;
    rd_kafka_pause_partitions(client_.get(), list.get());
    if (!told.empty()) listener_->assigned(told);
    for (const HeldPtr& held : without)
        tell(ProblemKind::no_offset,
             who() + ": nothing is committed for " + name_of(held->partition()) +
                 " and start is `fail`: say where to begin with `semel consumer reset`, or use "
                 "start: earliest or latest",
             held->partition());
}

void Member::assign(const rd_kafka_topic_partition_list_t* list) {
    last_topic_ = nullptr;
    last_held_.reset();
    if (cooperative(client_.get()) || config_.observe) {
        refused(KafkaError(rd_kafka_incremental_assign(client_.get(), list)).get());
    } else {
        rd_kafka_assign(client_.get(), list);
    }
}

// An incremental step that is not taken leaves the library with other partitions than ours.
void Member::refused(const rd_kafka_error_t* error) {
    if (error != nullptr)
        tell(ProblemKind::notice, who() + ": the library refused a change of its assignment: " +
                                      rd_kafka_error_string(error));
}

void Member::unassign(const rd_kafka_topic_partition_list_t* list) {
    last_topic_ = nullptr;
    last_held_.reset();
    if (list != nullptr && cooperative(client_.get())) {
        refused(KafkaError(rd_kafka_incremental_unassign(client_.get(), list)).get());
    } else {
        rd_kafka_assign(client_.get(), nullptr);
    }
}

// A fetcher that ends takes its queue's direction with it. What meanwhile came the way of the
// events is older than what comes behind it the right way.
void Member::forward_all() {
    for (const auto& [partition, held] : held_) {
        const Queue own(
            rd_kafka_queue_get_partition(client_.get(), partition.topic.c_str(), partition.number));
        if (own != nullptr) rd_kafka_queue_forward(own.get(), messages_.get());
    }
}

void Member::begin_revoke(HeldList which, TopicPartitions list, base::SteadyTime deadline) {
    std::vector<AssignmentPtr> told(which.begin(), which.end());
    for (const HeldPtr& held : which) held->draining = true;
    revoke_.emplace(
        Revoke{.which = std::move(which), .list = std::move(list), .deadline = deadline});
    if (!told.empty()) listener_->revoked(told, deadline);
}

void Member::serve_revoke() {
    if (leave_at_ && !revoke_ && phase_ == Phase::running) {
        HeldList all;
        for (const auto& [partition, held] : held_) all.push_back(held);
        if (!all.empty()) begin_revoke(std::move(all), nullptr, *leave_at_);
    }
    if (!revoke_) return;
    if (!revoke_->committing) {
        const bool drained = std::all_of(revoke_->which.begin(), revoke_->which.end(),
                                         [](const HeldPtr& held) { return held->drained(); });
        if (!drained && Clock::now() < revoke_->deadline) return;
        if (rd_kafka_assignment_lost(client_.get()) == 0) {
            if (!committing_.empty()) return;  // its answer comes first
            revoke_->committing = send_commit(revoke_->which);
            revoke_->commit_deadline = Clock::now() + kCommitWithin;
        }
    }
    if (revoke_->committing && !committing_.empty() && Clock::now() < revoke_->commit_deadline)
        return;
    finish_revoke();
}

void Member::finish_revoke() {
    Revoke revoke = std::move(*std::exchange(revoke_, std::nullopt));
    if (rd_kafka_assignment_lost(client_.get()) != 0) {
        lose(revoke.which);
    } else {
        std::vector<AssignmentPtr> told(revoke.which.begin(), revoke.which.end());
        for (const HeldPtr& held : revoke.which) {
            held->make_void();
            const std::lock_guard lock(held_mutex_);
            held_.erase(held->partition());
        }
        drop_strays();
        if (!told.empty()) listener_->released(told);
    }
    if (revoke.list != nullptr) unassign(revoke.list.get());
}

void Member::lose(const HeldList& which) {
    std::vector<AssignmentPtr> told(which.begin(), which.end());
    for (const HeldPtr& held : which) {
        held->make_void();
        const std::lock_guard lock(held_mutex_);
        held_.erase(held->partition());
    }
    drop_strays();
    if (!told.empty()) listener_->lost(told);
}

// ---------------------------------------------------------------- commits

TopicPartitions Member::list_of(const HeldList& which) const {
    TopicPartitions list(rd_kafka_topic_partition_list_new(static_cast<int>(which.size())));
    for (const HeldPtr& held : which)
        rd_kafka_topic_partition_list_add(list.get(), held->topic().c_str(),
                                          held->partition().number);
    return list;
}

void Member::commit_due() {
    if (!committing_.empty() || phase_ != Phase::running) return;
    // Where rebalances are differences, partitions that stay go on meanwhile; elsewhere all leave,
    // and the revoke's own commit is the only one.
    if (revoke_ && (revoke_->committing || !cooperative(client_.get()))) return;
    if (!commit_wanted_ && Clock::now() < next_commit_) return;
    next_commit_ = Clock::now() + config_.commit_interval;
    commit_wanted_ = false;
    HeldList all;
    for (const auto& [partition, held] : held_) {
        if (held->begun && !held->must_seek) all.push_back(held);
    }
    if (!send_commit(all)) answer_commits({});
}

// False: there is nothing to commit.
bool Member::send_commit(const HeldList& which) {
    ++commits_sent_;
    if (config_.observe) return false;
    HeldList moved;
    for (const HeldPtr& held : which) {
        if (held->stopped || !held->begun) continue;
        const Held::Marks marks = held->marks();
        held->asked = marks.committable;
        if (marks.committable != marks.confirmed) moved.push_back(held);
    }
    if (moved.empty()) return false;
    const TopicPartitions list = list_of(moved);
    for (int i = 0; i < list->cnt; ++i) {
        rd_kafka_topic_partition_t& one = list->elems[i];
        one.offset = moved[static_cast<std::size_t>(i)]->asked;
        if (config_.commit_metadata.empty()) continue;
        // The list frees it.
        one.metadata = rd_kafka_mem_malloc(nullptr, config_.commit_metadata.size());
        std::copy(config_.commit_metadata.begin(), config_.commit_metadata.end(),
                  static_cast<char*>(one.metadata));
        one.metadata_size = config_.commit_metadata.size();
    }
    if (rd_kafka_commit_queue(client_.get(), list.get(), commits_.get(), nullptr, nullptr) !=
        RD_KAFKA_RESP_ERR_NO_ERROR)
        return false;
    committing_ = std::move(moved);
    return true;
}

void Member::on_commit(rd_kafka_event_t* event) {
    const HeldList asked = std::exchange(committing_, {});
    auto code = rd_kafka_event_error(event);
    const rd_kafka_topic_partition_list_t* list = rd_kafka_event_topic_partition_list(event);
    for (const HeldPtr& held : asked) {
        const rd_kafka_topic_partition_t* one =
            list == nullptr ? nullptr
                            : rd_kafka_topic_partition_list_find(list, held->topic().c_str(),
                                                                 held->partition().number);
        const auto its = code != RD_KAFKA_RESP_ERR_NO_ERROR ? code
                         : one == nullptr                   ? RD_KAFKA_RESP_ERR__BAD_MSG
                                                            : one->err;
        if (its == RD_KAFKA_RESP_ERR_NO_ERROR) {
            held->confirm(held->asked);
            continue;
        }
        if (code == RD_KAFKA_RESP_ERR_NO_ERROR) code = its;
    }
    if (code == RD_KAFKA_RESP_ERR_NO_ERROR) {
        set_reachable(true, {});
        return answer_commits({});
    }
    base::Error error =
        error_of(code, "committing for the group " + config_.group,
                 code == RD_KAFKA_RESP_ERR__TRANSPORT || code == RD_KAFKA_RESP_ERR__TIMED_OUT
                     ? base::Applied::unknown
                     : base::Applied::no);
    if (!passes(code)) tell(ProblemKind::commit, error.detail);
    answer_commits(error);
}

void Member::answer_commits(const base::Result<void>& result) {
    std::erase_if(commit_waiters_, [&](const CommitWaiter& waiter) {
        if (phase_ == Phase::running && waiter.after > commits_sent_) return false;
        waiter.promise->set_value(result);
        return true;
    });
    commit_wanted_ = commit_wanted_ || !commit_waiters_.empty();
}

}  // namespace semel::brokers::kafka
