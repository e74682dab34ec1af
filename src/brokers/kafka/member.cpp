#include "brokers/kafka/member.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "brokers/kafka/group.hpp"

namespace semel::brokers::kafka {

using std::chrono::milliseconds;

namespace {

constexpr std::uint64_t kWakeUp = 1;

}  // namespace

base::Result<std::unique_ptr<Source>> make_source(SourceConfig config) {
    if (config.brokers.empty() || config.topics.empty() || config.group.empty())
        return invalid("kafka: a source needs brokers, at least one topic and a group");
    if (config.commit_metadata.size() > metadata_max_bytes)
        return invalid("kafka: the text beside a commit has " +
                       std::to_string(config.commit_metadata.size()) + " bytes; brokers take " +
                       std::to_string(metadata_max_bytes));
    Conf conf(rd_kafka_conf_new());
    const std::string kilobytes =
        std::to_string(std::max<std::size_t>(1, config.fetched_bytes / 1024));
    const std::array<std::pair<const char*, std::string>, 17> own{{
        {"bootstrap.servers", config.brokers},
        {"group.id", config.group},
        {"client.id", config.client_id},
        {"enable.auto.commit", "false"},
        {"enable.auto.offset.store", "false"},
        {"auto.offset.reset", "error"},
        {"isolation.level", "read_committed"},
        {"enable.partition.eof", "true"},
        {"partition.assignment.strategy", "range,roundrobin"},
        {"queued.max.messages.kbytes", kilobytes},
        {"queued.min.messages", "300000"},  // the bytes are the limit
        {"fetch.error.backoff.ms", "50"},   // in 2.0.2 also after a full queue
        {"fetch.wait.max.ms", "100"},
        {"log.queue", "true"},
        {"statistics.interval.ms", "1000"},
        {"topic.metadata.refresh.interval.ms", "60000"},
        {"reconnect.backoff.max.ms", "5000"},
    }};
    for (const auto& [name, value] : own) {
        if (auto done = set(conf.get(), name, value); !done) return std::move(done.error());
    }
    if (!config.instance_id.empty() && !config.observe) {
        if (auto done = set(conf.get(), "group.instance.id", config.instance_id); !done)
            return std::move(done.error());
    }
    if (auto done = set_all(conf.get(), Role::source, config.properties); !done)
        return std::move(done.error());
    // A member that drains longer than the group waits for it is expelled, and what it drained
    // comes again.
    const long long interval = number_of(conf.get(), "max.poll.interval.ms");
    if (config.drain.count() * 2 > interval)
        return invalid("kafka: drain (" + std::to_string(config.drain.count()) +
                       " ms) may be half of max.poll.interval.ms (" + std::to_string(interval) +
                       ") at most: the group expels a member that hands over later");
    rd_kafka_conf_set_events(conf.get(), RD_KAFKA_EVENT_REBALANCE | RD_KAFKA_EVENT_OFFSET_COMMIT |
                                             RD_KAFKA_EVENT_ERROR | RD_KAFKA_EVENT_LOG |
                                             RD_KAFKA_EVENT_STATS);
    return std::unique_ptr<Source>(std::make_unique<Member>(std::move(config), std::move(conf)));
}

Member::Member(SourceConfig config, Conf conf)
    : config_(std::move(config)), conf_(std::move(conf)), window_(config_.window) {}

Member::~Member() { stop(milliseconds{0}); }

std::vector<std::string> Member::all_topics() const {
    std::vector<std::string> all = config_.topics;
    all.insert(all.end(), config_.delayed.begin(), config_.delayed.end());
    return all;
}

bool Member::is_delayed(std::string_view topic) const {
    return std::find(config_.delayed.begin(), config_.delayed.end(), topic) !=
           config_.delayed.end();
}

std::string Member::who() const { return "kafka: group " + config_.group; }

// ---------------------------------------------------------------- any thread

base::Result<void> Member::start(Listener& listener) {
    if (listener_ != nullptr) return invalid(who() + ": start is for once");
    listener_ = &listener;
    std::array<char, 512> text{};
    {
        const std::unique_lock lock(client_mutex_);
        client_.reset(rd_kafka_new(RD_KAFKA_CONSUMER, conf_.get(), text.data(), text.size()));
        if (client_ == nullptr) return invalid(who() + ": " + text.data());
        static_cast<void>(conf_.release());  // it is the client's now
        rd_kafka_poll_set_consumer(client_.get());
        events_.reset(rd_kafka_queue_get_consumer(client_.get()));
        messages_.reset(rd_kafka_queue_new(client_.get()));
        commits_.reset(rd_kafka_queue_new(client_.get()));
    }
    rd_kafka_set_log_queue(client_.get(), events_.get());
    wake_fd_ = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    for (rd_kafka_queue_t* queue : {events_.get(), messages_.get(), commits_.get()})
        rd_kafka_queue_io_event_enable(queue, wake_fd_, &kWakeUp, sizeof kWakeUp);
    const TopicPartitions topics(rd_kafka_topic_partition_list_new(8));
    for (const std::string& topic : all_topics())
        rd_kafka_topic_partition_list_add(topics.get(), topic.c_str(), RD_KAFKA_PARTITION_UA);
    if (const auto code = config_.observe ? RD_KAFKA_RESP_ERR_NO_ERROR
                                          : rd_kafka_subscribe(client_.get(), topics.get());
        code != RD_KAFKA_RESP_ERR_NO_ERROR)
        return invalid(who() +
                       ": cannot subscribe (a pattern begins with ^): " + rd_kafka_err2str(code));
    {
        const std::lock_guard lock(commands_mutex_);
        refuse_commands_ = false;
    }
    last_poll_ = Clock::now().time_since_epoch().count();
    thread_ = std::thread([this] { run(); });
    return {};
}

void Member::wake() {
    [[maybe_unused]] const auto written = ::write(wake_fd_, &kWakeUp, sizeof kWakeUp);
}

void Member::post(Command command) {
    {
        const std::lock_guard lock(commands_mutex_);
        if (refuse_commands_) return;
        commands_.push_back(std::move(command));
    }
    wake();
}

std::pair<std::shared_lock<std::shared_mutex>, rd_kafka_t*> Member::client() {
    std::shared_lock lock(client_mutex_);
    rd_kafka_t* const client = client_.get();
    return {std::move(lock), client};
}

std::size_t Member::settle(std::span<const Receipt> receipts) {
    std::size_t settled = 0;
    for (const Receipt& receipt : receipts)
        settled += held_of(receipt.assignment).settle(receipt.position, receipt.size);
    if (settled > 0 && starved_.load() && window_open() && starved_.exchange(false)) wake();
    return settled;
}

void Member::begin(const AssignmentPtr& assignment, std::optional<std::int64_t> from) {
    post([this, held = std::static_pointer_cast<Held>(assignment), from] {
        if (held->begun || held->is_void()) return;
        if (held->stopped && !from) return;
        if (from && (held->stopped || *from != held->start())) {
            held->restart(*from);
            held->must_seek = from;
        }
        held->stopped = false;
        held->begun = true;
        commit_wanted_ = true;
        apply_pause(held);
    });
}

void Member::drained(const AssignmentPtr& assignment) {
    held_of(assignment).set_drained();
    post([] {});
}

void Member::pause(const AssignmentPtr& assignment) {
    post([this, held = std::static_pointer_cast<Held>(assignment)] {
        held->user_paused = true;
        apply_pause(held);
    });
}

void Member::resume(const AssignmentPtr& assignment) {
    post([this, held = std::static_pointer_cast<Held>(assignment)] {
        held->user_paused = false;
        apply_pause(held);
    });
}

void Member::window(std::size_t unsettled_max) {
    window_ = unsettled_max;
    post([] {});
}

base::Result<void> Member::seek(const AssignmentPtr& assignment, std::int64_t position,
                                milliseconds within) {
    auto promise = std::make_shared<std::promise<base::Result<void>>>();
    auto future = promise->get_future();
    post([this, promise, position, held = std::static_pointer_cast<Held>(assignment)] {
        if (held->is_void() || held->draining) {
            promise->set_value(invalid(who() + ": " + name_of(held->partition()) +
                                       " is no longer assigned to this member"));
        } else if ((!held->user_paused && !held->stopped) || held->marks().in_flight > 0) {
            promise->set_value(invalid(who() + ": " + name_of(held->partition()) +
                                       " can be moved only while it is paused and none of its "
                                       "messages is unsettled"));
        } else {
            held->restart(position);
            held->must_seek = position;
            restart_wanted_ = restart_wanted_ || (held->stopped && held->begun);
            held->stopped = false;
            held->begun = true;
            commit_wanted_ = true;
            apply_pause(held);
            promise->set_value({});
        }
    });
    if (future.wait_for(within) != std::future_status::ready)
        return error_of(RD_KAFKA_RESP_ERR__TIMED_OUT, "moving " + name_of(assignment->partition()),
                        base::Applied::unknown);
    return future.get();
}

base::Result<void> Member::commit(milliseconds within) {
    auto promise = std::make_shared<std::promise<base::Result<void>>>();
    auto future = promise->get_future();
    post([this, promise] {
        // What is on its way may have been sent before the last settle.
        commit_waiters_.push_back({.after = commits_sent_ + 1, .promise = promise});
        commit_wanted_ = true;
    });
    if (future.wait_for(within) != std::future_status::ready)
        return error_of(RD_KAFKA_RESP_ERR__TIMED_OUT, "committing", base::Applied::unknown);
    return future.get();
}

std::vector<AssignmentState> Member::state() const {
    std::vector<AssignmentState> out;
    const std::lock_guard lock(held_mutex_);
    for (const auto& [partition, held] : held_) {
        const Held::Marks marks = held->marks();
        out.push_back({.assignment = held,
                       .position = marks.position,
                       .committable = marks.committable,
                       .committed = marks.confirmed,
                       .in_flight = marks.in_flight,
                       .begun = held->begun,
                       .paused = held->user_paused,
                       .held = held->stopped});
    }
    return out;
}

TopicPartitions Member::assigned_list() const {
    const std::lock_guard lock(held_mutex_);
    TopicPartitions out(rd_kafka_topic_partition_list_new(static_cast<int>(held_.size())));
    for (const auto& [partition, held] : held_)
        rd_kafka_topic_partition_list_add(out.get(), partition.topic.c_str(), partition.number);
    return out;
}

base::Result<std::vector<PartitionLag>> Member::lag(milliseconds within) {
    const auto [lock, client] = this->client();
    if (client == nullptr) return error_of(RD_KAFKA_RESP_ERR__DESTROY, "asking for the lag");
    const TopicPartitions first = assigned_list();
    const TopicPartitions last(rd_kafka_topic_partition_list_copy(first.get()));
    if (first->cnt == 0) return std::vector<PartitionLag>{};
    if (auto done = ends_of(client, first.get(), End::first, within); !done)
        return std::move(done.error());
    if (auto done = ends_of(client, last.get(), End::last_stable, within); !done)
        return std::move(done.error());
    // What others have committed since.
    std::map<Partition, std::int64_t> of_group;
    if (config_.observe) {
        auto committed = committed_of(client, config_.topics, within);
        if (!committed) return std::move(committed.error());
        for (CommittedPosition& one : *committed) of_group[std::move(one.partition)] = one.offset;
    }
    std::vector<PartitionLag> out;
    const std::lock_guard held_lock(held_mutex_);
    for (int i = 0; i < first->cnt; ++i) {
        const rd_kafka_topic_partition_t& begins = first->elems[i];
        const auto* ends =
            rd_kafka_topic_partition_list_find(last.get(), begins.topic, begins.partition);
        PartitionLag one{.partition = {begins.topic, begins.partition},
                         .begin = begins.offset,
                         .end = ends == nullptr ? begins.offset : ends->offset};
        if (const auto at = held_.find(one.partition); at != held_.end())
            one.committed = at->second->marks().confirmed;
        if (const auto at = of_group.find(one.partition); at != of_group.end())
            one.committed = at->second;
        one.lag = std::max<std::int64_t>(0, one.end - std::max(one.committed, one.begin));
        out.push_back(std::move(one));
    }
    return out;
}

base::Result<GroupDescription> Member::describe(milliseconds within) {
    const auto [lock, client] = this->client();
    if (client == nullptr) return error_of(RD_KAFKA_RESP_ERR__DESTROY, "describing the group");
    return describe_group(client, config_.group, within);
}

base::Result<std::vector<CommittedPosition>> Member::committed(milliseconds within) {
    const auto [lock, client] = this->client();
    if (client == nullptr) return error_of(RD_KAFKA_RESP_ERR__DESTROY, "reading commits");
    return committed_of(client, all_topics(), within);
}

base::Result<std::string> Member::topic_id(const std::string& topic, milliseconds within) {
    const auto [lock, client] = this->client();
    if (client == nullptr) return error_of(RD_KAFKA_RESP_ERR__DESTROY, "asking for a topic's id");
    return topic_id_of(client, topic, within);
}

SourceTraits Member::traits() const {
    std::string topics;
    for (const std::string& topic : config_.topics) topics += (topics.empty() ? "" : ", ") + topic;
    return {.name = "kafka " + topics + (config_.observe ? " (beside group " : " (group ") +
                    config_.group + ")",
            .commits_positions = true,
            .keyed = true,
            .one_consumer = true,
            .library = library_name()};
}

base::SteadyTime Member::last_poll() const {
    return base::SteadyTime(base::SteadyTime::duration(last_poll_.load(std::memory_order_relaxed)));
}

void Member::stop(milliseconds drain) {
    const std::lock_guard stop_lock(stop_mutex_);
    if (thread_.joinable()) {
        const base::SteadyTime deadline = Clock::now() + drain;
        post([this, deadline] {
            leave_at_ = deadline;
            if (revoke_) revoke_->deadline = std::min(revoke_->deadline, deadline);
        });
        thread_.join();
    }
    const std::unique_lock lock(client_mutex_);
    stray_.clear();
    events_.reset();
    messages_.reset();
    commits_.reset();
    // It has left its group already, or cannot.
    if (client_ != nullptr)
        rd_kafka_destroy_flags(client_.release(), RD_KAFKA_DESTROY_F_NO_CONSUMER_CLOSE);
    if (wake_fd_ >= 0) ::close(std::exchange(wake_fd_, -1));
}

}  // namespace semel::brokers::kafka
