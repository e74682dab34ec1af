// The poll thread: its round, the flow of messages, and what the library has to say.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "brokers/delayed.hpp"
#include "brokers/kafka/member.hpp"

namespace semel::brokers::kafka {

using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

constexpr milliseconds kSeekWithin{1000};
constexpr milliseconds kSeekAgain{10};
constexpr seconds kCloseWithin{10};
constexpr milliseconds kForwardAgain{1000};
constexpr milliseconds kSleepMin{100};     // of a partition of delayed copies
constexpr milliseconds kSleepMax{60'000};  // then it is looked at again
constexpr milliseconds kIdle{100};         // a lost wake-up costs this
constexpr int kLogLevelMax = 4;            // syslog's "warning"

}  // namespace

void Member::run() {
    while (phase_ != Phase::done) {
        last_poll_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
        round();
    }
    std::deque<Command> left;
    {
        const std::lock_guard lock(commands_mutex_);
        refuse_commands_ = true;
        left.swap(commands_);
    }
    for (const Command& command : left) command();  // whoever waits for one is answered
    answer_commits(error_of(RD_KAFKA_RESP_ERR__DESTROY, "committing"));
}

void Member::round() {
    run_commands();
    serve_events();
    look_for_partitions();
    try_assign();
    serve_revoke();
    if (leave_at_ && !revoke_ && phase_ == Phase::running) close_group();
    wake_sleepers();
    seek_where_needed();
    take_messages();
    commit_due();
    if (phase_ == Phase::closing &&
        (rd_kafka_consumer_closed(client_.get()) != 0 || Clock::now() > close_deadline_))
        phase_ = Phase::done;
    if (phase_ != Phase::done) wait();
}

// Returns at once if there is something to take.
void Member::wait() {
    const bool take_more =
        window_open() && (!stray_.empty() || rd_kafka_queue_length(messages_.get()) > 0);
    const bool more = take_more || rd_kafka_queue_length(events_.get()) > 0 ||
                      rd_kafka_queue_length(commits_.get()) > 0;
    pollfd waiting{.fd = wake_fd_, .events = POLLIN, .revents = 0};
    const auto now = Clock::now();
    milliseconds most = next_seek_ > now ? kSeekAgain : kIdle;
    if (next_wake_ - now < most)
        most = std::max(std::chrono::ceil<milliseconds>(next_wake_ - now), milliseconds{0});
    ::poll(&waiting, 1, more ? 0 : milliseconds_of(most));
    std::uint64_t drained = 0;
    [[maybe_unused]] const auto got = ::read(wake_fd_, &drained, sizeof drained);
}

void Member::run_commands() {
    std::deque<Command> now;
    {
        const std::lock_guard lock(commands_mutex_);
        now.swap(commands_);
    }
    for (const Command& command : now) command();
}

void Member::serve_events() {
    while (Event event{rd_kafka_queue_poll(events_.get(), 0)}) {
        if (rd_kafka_event_type(event.get()) == RD_KAFKA_EVENT_FETCH) {
            stray_.push_back(std::move(event));
            forward_all();
        } else {
            on_event(event.get());
        }
    }
    while (const Event event{rd_kafka_queue_poll(commits_.get(), 0)}) on_event(event.get());
}

void Member::on_event(rd_kafka_event_t* event) {
    switch (rd_kafka_event_type(event)) {
        case RD_KAFKA_EVENT_REBALANCE:
            on_rebalance(event);
            break;
        case RD_KAFKA_EVENT_OFFSET_COMMIT:
            on_commit(event);
            break;
        case RD_KAFKA_EVENT_STATS:
            on_statistics(rd_kafka_event_stats(event));
            break;
        case RD_KAFKA_EVENT_ERROR: {
            const char* text = rd_kafka_event_error_string(event);
            on_message_error(rd_kafka_event_error(event), text == nullptr ? "" : text, "",
                             RD_KAFKA_PARTITION_UA, RD_KAFKA_OFFSET_INVALID);
            break;
        }
        case RD_KAFKA_EVENT_LOG: {
            const char *facility = nullptr, *text = nullptr;
            int level = 0;
            if (rd_kafka_event_log(event, &facility, &text, &level) == 0 && level <= kLogLevelMax)
                tell(ProblemKind::notice, std::string(facility) + ": " + text);
            break;
        }
        default:
            break;
    }
}

void Member::apply_pause(const HeldPtr& held) {
    if (held->is_void() || held->draining) return;
    const bool wanted = !held->begun || held->user_paused || held->stopped || held->sleeps();
    if (wanted == held->library_paused) return;
    const TopicPartitions list = list_of({held});
    held->library_paused = wanted;
    if (wanted) {
        rd_kafka_pause_partitions(client_.get(), list.get());
        return;
    }
    // Where the library itself would go on depends on its version. The first begin has its offset
    // with the assignment, but without a seek its fetcher sleeps on for up to a second.
    held->must_seek = held->marks().position;
    rd_kafka_resume_partitions(client_.get(), list.get());
    next_seek_ = {};
}

// True: it is a copy that is not due. Its partition sleeps, behind all that was delivered of it,
// and comes to this message again when it is; what lies behind it is due later.
bool Member::puts_to_sleep(const HeldPtr& held, const Delivery& delivery) {
    const auto due = due_of(delivery);
    if (!due) return false;
    const std::int64_t left = *due - base::system_clocks().wall_us() / 1000;
    if (left <= 0) return false;
    // Not for each of many that are due one after the other.
    held->sleeps_until = Clock::now() + std::clamp(milliseconds{left}, kSleepMin, kSleepMax);
    next_wake_ = std::min(next_wake_, held->sleeps_until);
    apply_pause(held);
    return true;
}

void Member::wake_sleepers() {
    const auto now = Clock::now();
    if (next_wake_ > now) return;
    next_wake_ = base::SteadyTime::max();
    for (const auto& [partition, held] : held_) {
        if (!held->sleeps()) continue;
        if (held->sleeps_until > now) {
            next_wake_ = std::min(next_wake_, held->sleeps_until);
            continue;
        }
        held->sleeps_until = {};
        apply_pause(held);
    }
}

void Member::seek_where_needed() {
    if (phase_ != Phase::running || revoke_ || Clock::now() < next_seek_) return;
    // Between a rebalance's event and our answer an assign would be taken for the answer.
    if (pending_assign_ == nullptr && std::exchange(restart_wanted_, false)) restart_fetchers();
    if (Clock::now() < forward_until_) forward_all();
    const bool seeking = std::any_of(held_.begin(), held_.end(), [](const auto& one) {
        return one.second->must_seek && !one.second->library_paused && !one.second->draining;
    });
    if (seeking) drop_strays();
    const TopicPartitions list(rd_kafka_topic_partition_list_new(8));
    for (const auto& [partition, held] : held_) {
        if (!held->must_seek || held->library_paused || held->draining) continue;
        rd_kafka_topic_partition_list_add(list.get(), partition.topic.c_str(), partition.number)
            ->offset = *held->must_seek;
    }
    if (list->cnt == 0) return;
    const KafkaError error(
        rd_kafka_seek_partitions(client_.get(), list.get(), milliseconds_of(kSeekWithin)));
    for (int i = 0; i < list->cnt; ++i) {
        const rd_kafka_topic_partition_t& one = list->elems[i];
        if (error == nullptr && one.err == RD_KAFKA_RESP_ERR_NO_ERROR) {
            find(one.topic, one.partition)->must_seek.reset();
        } else {
            next_seek_ = Clock::now() + kSeekAgain;  // the fetcher is not ready yet
        }
    }
}

// A fetcher that ran out of range has ended, and only an assignment starts one. An eager one is
// given as a whole: the others go on from where they are, and what was fetched for them is fetched
// again.
void Member::restart_fetchers() {
    HeldList which, paused;
    const bool all = !cooperative(client_.get());
    for (const auto& [partition, held] : held_) {
        if (!all && (!held->must_seek || held->library_paused)) continue;
        which.push_back(held);
        if (held->library_paused) paused.push_back(held);
    }
    if (which.empty()) return;
    const TopicPartitions list = list_of(which);
    for (int i = 0; i < list->cnt; ++i) {
        Held& held = *which[static_cast<std::size_t>(i)];
        list->elems[i].offset = held.marks().position;
        if (!held.library_paused) held.must_seek.reset();
    }
    if (!all) KafkaError(rd_kafka_incremental_unassign(client_.get(), list.get()));
    assign(list.get());
    forward_until_ = Clock::now() + kForwardAgain;
    if (!paused.empty()) rd_kafka_pause_partitions(client_.get(), list_of(paused).get());
}

// Messages that came the way of the events were taken from the library already, so that it does not
// know them to be outdated when their partition is moved or sought: whoever stays fetches again.
void Member::drop_strays() {
    if (stray_.empty()) return;
    stray_.clear();
    for (const auto& [partition, held] : held_) {
        if (held->begun && !held->library_paused && !held->must_seek)
            held->must_seek = held->marks().position;
    }
    next_seek_ = {};
}

bool Member::window_open() const {
    return outstanding_.messages.load() < window_ &&
           outstanding_.bytes.load() < config_.window_bytes;
}

void Member::take_messages() {
    if (phase_ != Phase::running) return;
    std::vector<Delivery> batch;
    for (std::size_t i = 0; i < delivered_batch_max; ++i) {
        if (!window_open()) {
            starved_ = true;
            if (!window_open()) break;  // else somebody settled in between
            starved_ = false;
        }
        if (!stray_.empty()) {
            while (const auto* message = rd_kafka_event_message_next(stray_.front().get()))
                take(message, batch);
            stray_.pop_front();
            continue;
        }
        const MessagePtr message(rd_kafka_consume_queue(messages_.get(), 0));
        if (message == nullptr) break;
        take(message.get(), batch);
    }
    if (!batch.empty()) listener_->delivered(std::move(batch));
}

void Member::take(const rd_kafka_message_t* message, std::vector<Delivery>& into) {
    const char* topic = message->rkt == nullptr ? "" : rd_kafka_topic_name(message->rkt);
    if (message->err != RD_KAFKA_RESP_ERR_NO_ERROR) {
        const char* text = rd_kafka_message_errstr(message);
        on_message_error(message->err, text == nullptr ? "" : text, topic, message->partition,
                         message->offset);
        return;
    }
    // Messages come in runs of one partition.
    if (message->rkt != last_topic_ || last_held_ == nullptr ||
        last_held_->partition().number != message->partition) {
        last_held_ = find(topic, message->partition);
        last_topic_ = message->rkt;
    }
    if (last_held_ == nullptr || last_held_->draining || last_held_->must_seek ||
        last_held_->sleeps())
        return;
    headers_.clear();
    rd_kafka_headers_t* headers = nullptr;
    if (rd_kafka_message_headers(message, &headers) == RD_KAFKA_RESP_ERR_NO_ERROR) {
        const char* name = nullptr;
        const void* value = nullptr;
        std::size_t size = 0;
        for (std::size_t i = 0; rd_kafka_header_get_all(headers, i, &name, &value, &size) ==
                                RD_KAFKA_RESP_ERR_NO_ERROR;
             ++i) {
            Header& header = headers_.emplace_back(Header{.name = name, .value = {}});
            if (value != nullptr)
                header.value = std::string_view(static_cast<const char*>(value), size);
        }
    }
    const auto view = [](const void* bytes, std::size_t size) -> std::optional<std::string_view> {
        if (bytes == nullptr) return std::nullopt;
        return std::string_view(static_cast<const char*>(bytes), size);
    };
    Delivery delivery = make_delivery({.assignment = last_held_, .position = message->offset},
                                      view(message->key, message->key_len),
                                      view(message->payload, message->len), headers_);
    if (last_held_->delayed && puts_to_sleep(last_held_, delivery)) return;
    if (!last_held_->deliver(message->offset, delivery.receipt.size)) return;
    rd_kafka_timestamp_type_t kind{};
    if (const std::int64_t at = rd_kafka_message_timestamp(message, &kind);
        kind != RD_KAFKA_TIMESTAMP_NOT_AVAILABLE)
        delivery.timestamp_ms = at;
    into.push_back(std::move(delivery));
}

void Member::on_message_error(rd_kafka_resp_err_t code, const std::string& text, const char* topic,
                              std::int32_t partition, std::int64_t offset) {
    const HeldPtr held = find(topic, partition);
    switch (code) {
        case RD_KAFKA_RESP_ERR__PARTITION_EOF:
            if (held != nullptr && !held->draining && !held->must_seek && !held->sleeps())
                held->advance(offset);
            return;
        case RD_KAFKA_RESP_ERR__AUTO_OFFSET_RESET:
        case RD_KAFKA_RESP_ERR_OFFSET_OUT_OF_RANGE:
            if (held != nullptr && !held->stopped && !held->must_seek)
                hold(held, ProblemKind::out_of_range,
                     who() + ": position " + std::to_string(held->marks().position) + " of " +
                         name_of(held->partition()) +
                         " is not in the log (expired, truncated or a new topic of the same "
                         "name): nothing of it is handled until `semel consumer reset` says where "
                         "to go on; what lies between may never have been handled");
            return;
        case RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART:
        case RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED:
        case RD_KAFKA_RESP_ERR__UNKNOWN_TOPIC:
        case RD_KAFKA_RESP_ERR__UNKNOWN_PARTITION:
            return tell(ProblemKind::topic,
                        who() + ": " + (*topic == '\0' ? "" : std::string(topic) + ": ") + text,
                        *topic == '\0' ? std::nullopt : std::optional(Partition{topic, partition}));
        default:
            on_client_error(code, text);
    }
}

void Member::hold(const HeldPtr& held, ProblemKind why, std::string text) {
    held->stopped = true;
    apply_pause(held);
    tell(why, std::move(text), held->partition());
}

// ---------------------------------------------------------------- errors and the end

void Member::tell(ProblemKind kind, std::string text, std::optional<Partition> partition) {
    listener_->problem({.kind = kind, .partition = std::move(partition), .text = std::move(text)});
}

void Member::set_reachable(bool reachable, const std::string& text) {
    if (std::exchange(reachable_, reachable) == reachable) return;
    tell(reachable ? ProblemKind::reachable : ProblemKind::unreachable,
         reachable ? who() + ": brokers answer again"
                   : who() + ": no broker of " + config_.brokers + " answers; trying on: " + text);
}

void Member::on_client_error(rd_kafka_resp_err_t code, const std::string& text) {
    // Told as itself or as _FATAL; what follows a fatal error says the same again.
    std::array<char, 512> why{};
    const auto fatal = rd_kafka_fatal_error(client_.get(), why.data(), why.size());
    if (fatal == RD_KAFKA_RESP_ERR_FENCED_INSTANCE_ID)
        return fail("another process has joined with the instance id " + config_.instance_id +
                    ", so that this one is out: give each process its own (${POD_NAME}), and "
                    "start this one again");
    if (fatal != RD_KAFKA_RESP_ERR_NO_ERROR) return fail(why.data());
    switch (code) {
        case RD_KAFKA_RESP_ERR__ALL_BROKERS_DOWN:
        case RD_KAFKA_RESP_ERR__TRANSPORT:
        case RD_KAFKA_RESP_ERR__RESOLVE:
        case RD_KAFKA_RESP_ERR__AUTHENTICATION:
        case RD_KAFKA_RESP_ERR__SSL:
            // One broker's, or all of them: the next statistics tell.
            last_failure_ = text;
            suspicious_ = true;
            return tell(ProblemKind::notice, who() + ": " + text);
        case RD_KAFKA_RESP_ERR__PARTITION_EOF:
        case RD_KAFKA_RESP_ERR__AUTO_OFFSET_RESET:
            return;
        default:
            tell(ProblemKind::notice, who() + ": " + text);
    }
}

// One broker of several may be away, and the library says "all" only when it happens to see them
// so.
void Member::on_statistics(std::string_view json) {
    const bool up = json.find("\"state\":\"UP\"") != json.npos;
    if (up) suspicious_ = false;
    if (up || suspicious_) set_reachable(up, last_failure_);
}

// The library has given everything up and answers no rebalance any more.
void Member::fail(const std::string& text) {
    if (std::exchange(failed_, true)) return;
    pending_assign_.reset();
    revoke_.reset();
    HeldList all;
    for (const auto& [partition, held] : held_) all.push_back(held);
    lose(all);
    tell(ProblemKind::fatal, who() + " cannot go on: " + text);
}

void Member::close_group() {
    phase_ = Phase::closing;
    close_deadline_ = Clock::now() + kCloseWithin;
    // The library waits for an answer to each, before it leaves the group.
    if (pending_assign_ != nullptr && !failed_) assign(pending_assign_.get());
    pending_assign_.reset();
    if (failed_) {
        phase_ = Phase::done;
        return;
    }
    KafkaError(rd_kafka_consumer_close_queue(client_.get(), events_.get()));
}

HeldPtr Member::find(const char* topic, std::int32_t partition) const {
    const auto at = held_.find(Partition{topic, partition});
    return at == held_.end() ? nullptr : at->second;
}

}  // namespace semel::brokers::kafka
