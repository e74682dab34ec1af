#include "brokers/rabbitmq/subscriber.hpp"

#include <amqp_framing.h>

#include <algorithm>
#include <array>
#include <future>

namespace semel::brokers::rabbitmq {

using std::chrono::milliseconds;

namespace {

using Clock = std::chrono::steady_clock;

constexpr milliseconds kIdle{500};     // heartbeats are looked at
constexpr milliseconds kAckDelay{5};   // a finished message waits for others that long
constexpr milliseconds kGather{1};     // after some came: what follows is read together
constexpr milliseconds kGatherMax{8};  // the same where at least kManyPerMs come
constexpr double kManyPerMs = 8;
constexpr milliseconds kAllDelay{1000};  // what a crash would give again meanwhile
constexpr std::size_t kAckBatchMax = 500;
constexpr std::size_t kHandedOverMax = 500;
constexpr char kConsumerTag[] = "semel";

Subscription& subscription_of(const AssignmentPtr& assignment) {
    return static_cast<Subscription&>(*assignment);
}

std::string text(const amqp_basic_properties_t& from, amqp_flags_t flag, amqp_bytes_t field) {
    return (from._flags & flag) != 0 ? std::string(view(field)) : std::string{};
}

std::unique_ptr<AmqpProperties> properties_of(const amqp_basic_properties_t& from,
                                              const amqp_basic_deliver_t& how) {
    auto out = std::make_unique<AmqpProperties>();
    out->message_id = text(from, AMQP_BASIC_MESSAGE_ID_FLAG, from.message_id);
    out->content_type = text(from, AMQP_BASIC_CONTENT_TYPE_FLAG, from.content_type);
    out->content_encoding = text(from, AMQP_BASIC_CONTENT_ENCODING_FLAG, from.content_encoding);
    out->correlation_id = text(from, AMQP_BASIC_CORRELATION_ID_FLAG, from.correlation_id);
    out->reply_to = text(from, AMQP_BASIC_REPLY_TO_FLAG, from.reply_to);
    out->type = text(from, AMQP_BASIC_TYPE_FLAG, from.type);
    out->app_id = text(from, AMQP_BASIC_APP_ID_FLAG, from.app_id);
    out->user_id = text(from, AMQP_BASIC_USER_ID_FLAG, from.user_id);
    out->expiration = text(from, AMQP_BASIC_EXPIRATION_FLAG, from.expiration);
    if ((from._flags & AMQP_BASIC_PRIORITY_FLAG) != 0) out->priority = from.priority;
    out->exchange = view(how.exchange);
    out->routing_key = view(how.routing_key);
    return out;
}

/// How long what follows is waited for, after so many came within `time`. `room`: so many more may
/// come before the broker waits for acknowledgements.
milliseconds gather_next(std::size_t came, Clock::duration time, std::size_t room) {
    const double per_ms = static_cast<double>(came) /
                          std::max(std::chrono::duration<double, std::milli>(time).count(), 0.001);
    if (per_ms < kManyPerMs) return kGather;
    const double wanted = static_cast<double>(room / 2) / per_ms;
    return std::clamp(milliseconds{static_cast<milliseconds::rep>(wanted)}, kGather, kGatherMax);
}

base::Error invalid(std::string text) {
    return {.code = base::ErrorCode::invalid_argument, .detail = std::move(text)};
}

}  // namespace

base::Result<std::unique_ptr<Source>> make_source(SourceConfig config) {
    auto endpoint = parse_url(config.url);
    if (!endpoint) return std::move(endpoint.error());
    if (config.queue.empty()) return invalid("rabbitmq: a source needs the name of its queue");
    if (config.prefetch == 0)
        return invalid("rabbitmq: queue " + config.queue +
                       ": prefetch 0 means no limit to the broker: set it near the concurrency");
    if (config.declare && !config.declare->quorum && config.declare->delivery_limit)
        return invalid("rabbitmq: queue " + config.queue +
                       ": a delivery limit is a quorum queue's; a classic one has none");
    return std::unique_ptr<Source>(
        std::make_unique<Subscriber>(std::move(config), std::move(*endpoint)));
}

Subscriber::Subscriber(SourceConfig config, Endpoint endpoint)
    : config_(std::move(config)),
      ack_batch_(std::clamp<std::size_t>(config_.prefetch / 4, 1, kAckBatchMax)),
      connection_(std::move(endpoint), config_.name, config_.ca_file, config_.heartbeat),
      window_(config_.prefetch) {}

Subscriber::~Subscriber() { stop(milliseconds{0}); }

// ---------------------------------------------------------------- any thread

base::Result<void> Subscriber::start(Listener& listener) {
    if (listener_ != nullptr)
        return invalid("rabbitmq: queue " + config_.queue + ": start is for once");
    listener_ = &listener;
    last_poll_ = Clock::now().time_since_epoch().count();
    thread_ = std::thread([this] { run(); });
    return {};
}

void Subscriber::begin(const AssignmentPtr& assignment, std::optional<std::int64_t>) {
    mailbox_.post([this, assignment] {
        if (assignment == current_ && !current_->begun.exchange(true)) subscribe();
    });
}

std::size_t Subscriber::settle(std::span<const Receipt> receipts) {
    std::size_t settled = 0;
    for (std::span<const Receipt> rest = receipts; !rest.empty();) {
        const AssignmentPtr& which = rest.front().assignment;
        const auto end = std::find_if(rest.begin(), rest.end(), [&which](const Receipt& one) {
            return one.assignment != which;
        });
        const auto count = static_cast<std::size_t>(end - rest.begin());
        settled += subscription_of(which).settle(rest.first(count));
        rest = rest.subspan(count);
    }
    if (settled == 0) return 0;
    const bool first = !ack_pending_.exchange(true);
    if ((first && idle_) || subscription_of(receipts.back().assignment).finished() >= ack_batch_)
        mailbox_.wake();
    return settled;
}

void Subscriber::drained(const AssignmentPtr& assignment) {
    subscription_of(assignment).set_drained();
    mailbox_.wake();
}

void Subscriber::pause(const AssignmentPtr& assignment) {
    subscription_of(assignment).paused = true;
}

void Subscriber::resume(const AssignmentPtr& assignment) {
    subscription_of(assignment).paused = false;
    mailbox_.wake();
}

void Subscriber::window(std::size_t unsettled_max) {
    window_ = unsettled_max;
    mailbox_.wake();
}

base::Result<void> Subscriber::seek(const AssignmentPtr&, std::int64_t, milliseconds) {
    return invalid("rabbitmq: queue " + config_.queue + ": a queue has no positions to go to");
}

template <class T>
base::Result<T> Subscriber::ask(std::function<base::Result<T>()> what, const std::string& doing,
                                milliseconds within) {
    auto promise = std::make_shared<std::promise<base::Result<T>>>();
    auto future = promise->get_future();
    mailbox_.post([promise, what = std::move(what)] { promise->set_value(what()); });
    if (ended_ || future.wait_for(within) != std::future_status::ready)
        return base::Error{
            .code = base::ErrorCode::io,
            .applied = base::Applied::unknown,
            .detail = "rabbitmq: queue " + config_.queue + ": " + doing + ": no answer in time"};
    return future.get();
}

base::Result<void> Subscriber::commit(milliseconds within) {
    auto done = ask<bool>(
        [this]() -> base::Result<bool> {
            acknowledge(true);
            // The broker answers in order: what it says now, it says after the acknowledgements.
            auto counted = count();
            if (!counted) return std::move(counted.error());
            return true;
        },
        "acknowledging", within);
    if (!done) return std::move(done.error());
    return {};
}

base::Result<Subscriber::Counts> Subscriber::ask_counts(milliseconds within) {
    return ask<Counts>([this] { return count(); }, "asking for its length", within);
}

std::vector<AssignmentState> Subscriber::state() const {
    const std::lock_guard lock(current_mutex_);
    if (current_ == nullptr) return {};
    return {{.assignment = current_,
             .position = static_cast<std::int64_t>(current_->last_tag.load()),
             .in_flight = current_->unsettled(),
             .begun = current_->begun,
             .paused = current_->paused}};
}

base::Result<std::vector<PartitionLag>> Subscriber::lag(milliseconds within) {
    auto behind = ask<std::size_t>(
        [this]() -> base::Result<std::size_t> {
            auto counts = count();
            if (!counts) return std::move(counts.error());
            // What the prefetch has brought here is no longer ready in the queue.
            const std::size_t here =
                current_ == nullptr ? 0 : waiting_.size() + current_->unsettled();
            return counts->messages + here;
        },
        "asking for its length", within);
    if (!behind) return std::move(behind.error());
    return std::vector<PartitionLag>{
        {.partition = {config_.queue, 0}, .lag = static_cast<std::int64_t>(*behind)}};
}

base::Result<GroupDescription> Subscriber::describe(milliseconds within) {
    auto counts = ask_counts(within);
    if (!counts) return std::move(counts.error());
    return GroupDescription{.member_count = counts->consumers};
}

base::Result<std::vector<CommittedPosition>> Subscriber::committed(milliseconds) {
    return std::vector<CommittedPosition>{};
}

SourceTraits Subscriber::traits() const {
    const bool single = config_.declare && config_.declare->single_active_consumer;
    return {.name = "rabbitmq " + config_.queue,
            .one_consumer = single || config_.exclusive,
            .exclusive = config_.exclusive,
            .settle_within = config_.consumer_timeout,
            .library = std::string("librabbitmq ") + amqp_version()};
}

base::SteadyTime Subscriber::last_poll() const {
    return base::SteadyTime(base::SteadyTime::duration(last_poll_.load()));
}

void Subscriber::stop(milliseconds drain) {
    const std::lock_guard stop_lock(stop_mutex_);
    if (!thread_.joinable()) return;
    const base::SteadyTime deadline = Clock::now() + drain;
    mailbox_.post([this, deadline] { leave_at_ = deadline; });
    thread_.join();
}

// ---------------------------------------------------------------- the I/O thread

void Subscriber::run() {
    while (!done_) {
        const auto now = Clock::now();
        last_poll_ = now.time_since_epoch().count();
        const bool gathered = std::exchange(gathering_, false);
        if (leave_at_) leave();
        if (done_) break;
        if (!connection_.is_open() && !leave_at_ && now >= next_try_) connect();
        const std::size_t came = connection_.is_open() ? read() : 0;
        hand_over();
        acknowledge(false);
        // The broker writes some messages at a time: they would wake three threads here each time.
        if (came > 0 && connection_.is_open() && !leave_at_) {
            const auto read_at = Clock::now();
            // What a wait for the socket ended with says nothing about how many come.
            if (gathered) gather_ = gather_next(came, read_at - read_at_, room());
            read_at_ = read_at;
            gathering_ = true;
            mailbox_.wait(-1, gather_);
            continue;
        }
        milliseconds wait = kIdle;
        idle_ = true;  // before the look: a settle in between wakes
        if (ack_pending_ || leave_at_) wait = kAckDelay;
        if (!connection_.is_open())
            wait = std::clamp(std::chrono::ceil<milliseconds>(next_try_ - Clock::now()),
                              milliseconds{0}, wait);
        mailbox_.wait(connection_.fd(), wait);
        idle_ = false;
    }
    ended_ = true;
    mailbox_.wait(-1, milliseconds{0});  // whoever waits for an answer gets one
}

std::size_t Subscriber::room() const {
    if (current_ == nullptr) return 0;
    const std::size_t here = waiting_.size() + current_->unacknowledged();
    return config_.prefetch - std::min<std::size_t>(here, config_.prefetch);
}

void Subscriber::tell(ProblemKind kind, std::string text) {
    listener_->problem({.kind = kind,
                        .partition = Partition{config_.queue, 0},
                        .text = "rabbitmq: queue " + config_.queue + ": " + std::move(text)});
}

void Subscriber::connect() {
    std::optional<base::Error> error = connection_.open();
    const bool connected = !error;
    if (connected) error = set_up();
    if (error) {
        connection_.drop();
        next_try_ = Clock::now() + backoff_.next();
        // Once for each reason, not for each try.
        if (std::exchange(last_problem_, error->detail) != error->detail)
            tell(connected ? ProblemKind::cancelled : ProblemKind::unreachable,
                 error->detail + "; trying on");
        if (!connected) reachable_ = false;
        return;
    }
    if (!std::exchange(reachable_, true)) tell(ProblemKind::reachable, "connected again");
    auto fresh = std::make_shared<Subscription>(config_.queue, ++epochs_,
                                                std::max<std::size_t>(1, config_.prefetch / 2));
    {
        const std::lock_guard lock(current_mutex_);
        current_ = fresh;
    }
    listener_->assigned({fresh});
}

// The queue as declared, or as it stands; the prefetch. Nothing is delivered yet.
std::optional<base::Error> Subscriber::set_up() {
    const amqp_connection_state_t state = connection_.state();
    amqp_basic_qos(state, work_channel, 0, config_.prefetch, 0);
    if (auto error = connection_.last_error("setting the prefetch")) return error;
    std::vector<amqp_table_entry_t> entries;
    const auto add = [&entries](const char* name) -> amqp_field_value_t& {
        entries.push_back({});
        entries.back().key = amqp_cstring_bytes(name);
        return entries.back().value;
    };
    const auto add_text = [&add](const char* name, const std::string& value) {
        amqp_field_value_t& field = add(name);
        field.kind = AMQP_FIELD_KIND_UTF8;
        field.value.bytes = bytes(value);
    };
    const std::string type = config_.declare && config_.declare->quorum ? "quorum" : "classic";
    if (config_.declare) {
        add_text("x-queue-type", type);
        if (config_.declare->single_active_consumer) {
            amqp_field_value_t& field = add("x-single-active-consumer");
            field.kind = AMQP_FIELD_KIND_BOOLEAN;
            field.value.boolean = 1;
        }
        if (!config_.declare->dead_letter_exchange.empty())
            add_text("x-dead-letter-exchange", config_.declare->dead_letter_exchange);
        if (config_.declare->delivery_limit) {
            amqp_field_value_t& field = add("x-delivery-limit");
            field.kind = AMQP_FIELD_KIND_I64;
            field.value.i64 = *config_.declare->delivery_limit;
        }
    }
    const amqp_table_t table{.num_entries = static_cast<int>(entries.size()),
                             .entries = entries.data()};
    amqp_queue_declare(state, work_channel, bytes(config_.queue), config_.declare ? 0 : 1, 1, 0, 0,
                       table);
    return connection_.last_error(config_.declare ? "declaring it" : "looking for it");
}

void Subscriber::subscribe() {
    amqp_basic_consume(connection_.state(), work_channel, bytes(config_.queue),
                       amqp_cstring_bytes(kConsumerTag), 0, 0, config_.exclusive ? 1 : 0,
                       amqp_empty_table);
    if (const auto error = connection_.last_error("subscribing"))
        return lose(ProblemKind::cancelled, error->detail);
    backoff_.reset();
    last_problem_.clear();
}

std::size_t Subscriber::read() {
    // As many as the prefetch lets come: bounded.
    for (std::size_t came = 0;;) {
        auto frame = connection_.next_frame(arriving_.how != nullptr);
        if (!frame) {
            lose(ProblemKind::unreachable, frame.error().detail);
            return 0;
        }
        if (!*frame) return came;
        if ((*frame)->channel == work_channel && arrives(**frame)) {
            if (arriving_.properties != nullptr && arriving_.missing == 0) {
                on_delivery();
                ++came;
            }
        } else if (!on_frame(**frame)) {
            return 0;
        }
    }
}

// False: it is no part of a message.
bool Subscriber::arrives(const amqp_frame_t& frame) {
    switch (frame.frame_type) {
        case AMQP_FRAME_METHOD:
            if (frame.payload.method.id != AMQP_BASIC_DELIVER_METHOD) return false;
            arriving_ = {};
            arriving_.how = static_cast<const amqp_basic_deliver_t*>(frame.payload.method.decoded);
            return true;
        case AMQP_FRAME_HEADER:
            if (arriving_.how == nullptr) return false;
            arriving_.properties =
                static_cast<const amqp_basic_properties_t*>(frame.payload.properties.decoded);
            arriving_.missing = frame.payload.properties.body_size;
            return true;
        case AMQP_FRAME_BODY: {
            if (arriving_.properties == nullptr) return false;
            const std::string_view part = view(frame.payload.body_fragment);
            if (arriving_.parts.empty() && part.size() == arriving_.missing)
                arriving_.whole = part;
            else
                arriving_.parts += part;
            arriving_.missing -= std::min<std::uint64_t>(part.size(), arriving_.missing);
            return true;
        }
        default:
            return false;
    }
}

void Subscriber::on_delivery() {
    const Arriving arrived = std::exchange(arriving_, {});
    if (current_ == nullptr) return;
    const amqp_basic_properties_t& from = *arrived.properties;
    std::vector<Header> headers;
    std::vector<std::optional<std::string>> texts;
    if ((from._flags & AMQP_BASIC_HEADERS_FLAG) != 0) {
        texts.reserve(static_cast<std::size_t>(from.headers.num_entries));
        for (int i = 0; i < from.headers.num_entries; ++i) {
            const amqp_table_entry_t& one = from.headers.entries[i];
            texts.push_back(text_of(one.value));
            headers.push_back({.name = view(one.key), .value = texts.back()});
        }
        look_at_count(headers);
    }
    Delivery delivery = make_delivery(
        {.assignment = current_, .position = static_cast<std::int64_t>(arrived.how->delivery_tag)},
        std::nullopt, arrived.parts.empty() ? arrived.whole : arrived.parts, headers);
    delivery.redelivered = arrived.how->redelivered != 0;
    if ((from._flags & AMQP_BASIC_TIMESTAMP_FLAG) != 0)
        delivery.timestamp_ms = static_cast<std::int64_t>(from.timestamp) * 1000;
    delivery.properties = properties_of(from, *arrived.how);
    waiting_.push_back(std::move(delivery));
}

// A queue that counts deliveries (quorum) drops what came too often. Nobody can be asked whether it
// has a limit and an exchange for such messages; the count itself comes with what comes again.
void Subscriber::look_at_count(std::span<const Header> headers) {
    if (counting_told_ || (config_.declare && !config_.declare->dead_letter_exchange.empty()))
        return;
    const auto count = std::find_if(headers.begin(), headers.end(), [](const Header& one) {
        return one.name == "x-delivery-count";
    });
    if (count == headers.end() || !count->value) return;
    counting_told_ = true;
    tell(ProblemKind::notice, "it counts deliveries, and a message came again (count " +
                                  std::string(*count->value) +
                                  "): at its delivery limit (20 by default since RabbitMQ 4) the "
                                  "broker drops a message, unless the queue or a policy names a "
                                  "dead-letter exchange: name one");
}

// False: the connection is gone.
bool Subscriber::on_frame(const amqp_frame_t& frame) {
    if (frame.frame_type != AMQP_FRAME_METHOD) return true;
    if (const auto error = Connection::closed_by(frame)) {
        lose(frame.payload.method.id == AMQP_CHANNEL_CLOSE_METHOD ? ProblemKind::cancelled
                                                                  : ProblemKind::unreachable,
             error->detail);
        return false;
    }
    if (frame.payload.method.id == AMQP_BASIC_CANCEL_METHOD) {
        lose(ProblemKind::cancelled, "the broker ended the subscription: the queue was deleted");
        return false;
    }
    return true;
}

void Subscriber::hand_over() {
    if (current_ == nullptr || current_->paused || revoked_) return;
    const std::size_t window = window_;
    const std::size_t out = current_->unsettled();
    std::size_t room = std::min(waiting_.size(), window > out ? window - out : 0);
    while (room > 0) {
        const std::size_t count = std::min(room, kHandedOverMax);
        const auto end = waiting_.begin() + static_cast<std::ptrdiff_t>(count);
        std::vector<Delivery> batch(std::make_move_iterator(waiting_.begin()),
                                    std::make_move_iterator(end));
        waiting_.erase(waiting_.begin(), end);
        room -= count;
        current_->hand_over(batch);
        listener_->delivered(std::move(batch));
    }
}

void Subscriber::acknowledge(bool all) {
    if (current_ == nullptr || !connection_.is_open()) return;
    const auto now = Clock::now();
    const std::size_t finished = current_->finished();
    if (ack_pending_ && ack_at_ == base::SteadyTime::max()) ack_at_ = now + kAckDelay;
    all = all || (finished > 0 && now >= all_at_);
    if (!all && now < ack_at_ && finished < ack_batch_) return;
    ack_at_ = base::SteadyTime::max();
    if (all) all_at_ = now + kAllDelay;
    ack_pending_ = false;  // before the take: a settle in between asks again
    for (const core::TagAcknowledgement& one : current_->take(all)) {
        const int status =
            amqp_basic_ack(connection_.state(), work_channel, one.tag, one.multiple ? 1 : 0);
        if (status != AMQP_STATUS_OK)
            return lose(ProblemKind::unreachable, library_error(status, "acknowledging").detail);
    }
}

void Subscriber::lose(ProblemKind kind, const std::string& why) {
    connection_.drop();
    waiting_.clear();
    arriving_ = {};
    next_try_ = Clock::now() + backoff_.next();
    SubscriptionPtr gone;
    {
        const std::lock_guard lock(current_mutex_);
        gone = std::exchange(current_, nullptr);
    }
    if (kind == ProblemKind::unreachable) reachable_ = false;
    if (gone != nullptr) {
        gone->make_void();
        listener_->lost({gone});
    }
    if (std::exchange(last_problem_, why) != why)
        tell(kind, why + "; what was unsettled comes again");
}

// Nothing more is delivered; what arrived and was not handed over goes back to the queue.
void Subscriber::leave() {
    if (current_ != nullptr && connection_.is_open()) {
        if (!std::exchange(revoked_, true)) {
            waiting_.clear();
            if (current_->begun) {
                amqp_basic_cancel(connection_.state(), work_channel,
                                  amqp_cstring_bytes(kConsumerTag));
                if (const auto error = connection_.last_error("leaving"))
                    return lose(ProblemKind::notice, error->detail);
            }
            listener_->revoked({current_}, *leave_at_);
        }
        if (!current_->drained() && Clock::now() < *leave_at_) return;
        acknowledge(true);
    }
    if (current_ != nullptr) {
        connection_.close();
        SubscriptionPtr gone;
        {
            const std::lock_guard lock(current_mutex_);
            gone = std::exchange(current_, nullptr);
        }
        gone->make_void();
        listener_->released({gone});
    }
    connection_.drop();
    done_ = true;
}

base::Result<Subscriber::Counts> Subscriber::count() {
    if (!connection_.is_open())
        return base::Error{.code = base::ErrorCode::io,
                           .detail = "rabbitmq: queue " + config_.queue + ": not connected"};
    // On a channel of its own: a refusal closes it.
    const amqp_connection_state_t state = connection_.state();
    amqp_channel_open(state, query_channel);
    if (auto error = connection_.last_error("opening a channel")) return std::move(*error);
    const amqp_queue_declare_ok_t* said = amqp_queue_declare(
        state, query_channel, bytes(config_.queue), 1, 0, 0, 0, amqp_empty_table);
    if (said == nullptr) {
        base::Error error =
            reply_error(amqp_get_rpc_reply(state), "asking for the length of " + config_.queue);
        amqp_channel_close_ok_t closed{};
        amqp_send_method(state, query_channel, AMQP_CHANNEL_CLOSE_OK_METHOD, &closed);
        return error;
    }
    const Counts out{.messages = said->message_count, .consumers = said->consumer_count};
    amqp_channel_close(state, query_channel, AMQP_REPLY_SUCCESS);
    return out;
}

}  // namespace semel::brokers::rabbitmq
