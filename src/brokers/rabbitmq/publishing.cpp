#include "brokers/rabbitmq/publishing.hpp"

#include <amqp_framing.h>

#include <algorithm>

namespace semel::brokers::rabbitmq {

using std::chrono::milliseconds;

namespace {

constexpr milliseconds kIdle{500};
constexpr milliseconds kQueueFullRetry{100};
constexpr std::uint8_t kPersistent = 2;
constexpr std::size_t kShortTextMax = 255;  // AMQP's short strings

std::size_t size_of(const std::vector<OutgoingHeader>& headers) {
    std::size_t size = 0;
    for (const OutgoingHeader& one : headers)
        size += one.name.size() + 6 + (one.value ? one.value->size() : 0);
    return size;
}

// What no broker could take; empty if it can be sent.
std::string unsendable(const Outgoing& message) {
    if (message.key || message.partition) return "AMQP has no keys and no partitions";
    if (size_of(message.headers) > amqp_headers_max_bytes)
        return "its headers have more than " + std::to_string(amqp_headers_max_bytes) +
               " bytes, which do not fit into a frame";
    const AmqpProperties& p = message.properties;
    for (const std::string* one :
         {&message.topic, &p.exchange, &p.message_id, &p.content_type, &p.content_encoding,
          &p.correlation_id, &p.reply_to, &p.type, &p.app_id, &p.user_id, &p.expiration}) {
        if (one->size() > kShortTextMax) return "a routing key or property has more than 255 bytes";
    }
    for (const OutgoingHeader& one : message.headers) {
        if (one.name.size() > kShortTextMax) return "a header's name has more than 255 bytes";
    }
    return {};
}

std::string body_of(const Outgoing& message) { return message.value.value_or(std::string{}); }

}  // namespace

base::Result<std::unique_ptr<Publisher>> make_publisher(PublisherConfig config) {
    auto endpoint = parse_url(config.url);
    if (!endpoint) return std::move(endpoint.error());
    return std::unique_ptr<Publisher>(
        std::make_unique<Publishing>(std::move(config), std::move(*endpoint)));
}

Publishing::Publishing(PublisherConfig config, Endpoint endpoint)
    : config_(std::move(config)),
      connection_(std::move(endpoint), config_.name + " publisher", config_.ca_file,
                  config_.heartbeat),
      problem_(config_.problem) {
    thread_ = std::thread([this] { run(); });
}

Publishing::~Publishing() { stop(milliseconds{0}); }

// ---------------------------------------------------------------- any thread

void Publishing::publish(Outgoing message, PublishDone done) {
    base::Error error;
    {
        const std::lock_guard lock(mutex_);
        if (stopping_) {
            error = {.code = base::ErrorCode::stopping,
                     .detail = "rabbitmq: the publisher is stopping"};
        } else if (undecided_ >= config_.queued) {
            error = {.retry_after = kQueueFullRetry,
                     .detail = "rabbitmq: publishing to " + message.topic + ": " +
                               std::to_string(undecided_) + " messages wait already"};
        } else if (const std::string why = unsendable(message); !why.empty()) {
            error = {.code = base::ErrorCode::invalid_argument,
                     .detail = "rabbitmq: publishing to " + message.topic + ": " + why};
        } else {
            incoming_.push_back({.message = std::move(message),
                                 .done = std::move(done),
                                 .deadline = Clock::now() + config_.timeout});
            ++undecided_;
        }
    }
    if (!error.detail.empty()) return done(std::move(error));
    mailbox_.wake();
}

bool Publishing::flush(milliseconds within) {
    std::unique_lock lock(mutex_);
    return all_decided_.wait_for(lock, within, [this] { return undecided_ == 0; });
}

void Publishing::on_problem(std::function<void(const Problem&)> told) {
    mailbox_.post([this, told = std::move(told)]() mutable { problem_ = std::move(told); });
}

void Publishing::stop(milliseconds within) {
    const std::lock_guard stop_lock(stop_mutex_);
    if (!thread_.joinable()) return;
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    flush(within);
    {
        const std::lock_guard lock(mutex_);
        ended_ = true;
    }
    mailbox_.wake();
    thread_.join();
}

// ---------------------------------------------------------------- the I/O thread

void Publishing::run() {
    for (;;) {
        {
            const std::lock_guard lock(mutex_);
            if (ended_) break;
            std::move(incoming_.begin(), incoming_.end(), std::back_inserter(queue_));
            incoming_.clear();
        }
        expire();
        if (!connection_.is_open() && Clock::now() >= next_try_) connect();
        if (connection_.is_open()) read();
        if (connection_.is_open()) send();
        milliseconds wait = kIdle;
        if (!connection_.is_open())
            wait = std::clamp(std::chrono::ceil<milliseconds>(next_try_ - Clock::now()),
                              milliseconds{0}, kIdle);
        {
            const std::lock_guard lock(mutex_);
            if (ended_ || !incoming_.empty()) continue;
        }
        mailbox_.wait(connection_.fd(), wait);
    }
    // Nothing is left after a flush; otherwise it ends in doubt.
    for (auto& [tag, item] : std::exchange(sent_, {}))
        fail(std::move(item), base::ErrorCode::stopping, base::Applied::unknown, "stopping");
    for (Item& item : std::exchange(queue_, {}))
        fail(std::move(item), base::ErrorCode::stopping, base::Applied::no, "stopping");
    std::deque<Item> late;
    {
        const std::lock_guard lock(mutex_);
        late.swap(incoming_);
    }
    for (Item& item : late)
        fail(std::move(item), base::ErrorCode::stopping, base::Applied::no, "stopping");
    connection_.close();
}

void Publishing::tell(ProblemKind kind, const std::string& text) {
    if (problem_) problem_({.kind = kind, .text = "rabbitmq: publisher: " + text});
}

void Publishing::connect() {
    std::optional<base::Error> error = connection_.open();
    if (!error) {
        amqp_confirm_select(connection_.state(), work_channel);
        error = connection_.last_error("asking for confirms");
    }
    if (error) {
        connection_.drop();
        next_try_ = Clock::now() + backoff_.next();
        reachable_ = false;
        if (std::exchange(last_problem_, error->detail) != error->detail)
            tell(ProblemKind::unreachable, error->detail + "; trying on");
        return;
    }
    backoff_.reset();
    last_problem_.clear();
    last_tag_ = 0;
    if (!std::exchange(reachable_, true)) tell(ProblemKind::reachable, "connected again");
}

void Publishing::send() {
    while (!queue_.empty() && !blocked_ && sent_.size() < unconfirmed_max) {
        const std::uint64_t tag = ++last_tag_;
        const auto at = sent_.emplace(tag, std::move(queue_.front())).first;
        queue_.pop_front();
        if (!send(at->second)) return;
        // A blocked or returned word must not wait behind a thousand messages.
        if (tag % 64 == 0) {
            read();
            if (!connection_.is_open()) return;
        }
    }
}

bool Publishing::send(const Item& item) {
    const Outgoing& message = item.message;
    amqp_basic_properties_t properties{};
    const auto set = [&properties](amqp_flags_t flag, amqp_bytes_t& field,
                                   const std::string& from) {
        if (from.empty()) return;
        properties._flags |= flag;
        field = bytes(from);
    };
    const AmqpProperties& from = message.properties;
    set(AMQP_BASIC_MESSAGE_ID_FLAG, properties.message_id, from.message_id);
    set(AMQP_BASIC_CONTENT_TYPE_FLAG, properties.content_type, from.content_type);
    set(AMQP_BASIC_CONTENT_ENCODING_FLAG, properties.content_encoding, from.content_encoding);
    set(AMQP_BASIC_CORRELATION_ID_FLAG, properties.correlation_id, from.correlation_id);
    set(AMQP_BASIC_REPLY_TO_FLAG, properties.reply_to, from.reply_to);
    set(AMQP_BASIC_TYPE_FLAG, properties.type, from.type);
    set(AMQP_BASIC_APP_ID_FLAG, properties.app_id, from.app_id);
    set(AMQP_BASIC_USER_ID_FLAG, properties.user_id, from.user_id);
    set(AMQP_BASIC_EXPIRATION_FLAG, properties.expiration, from.expiration);
    properties._flags |= AMQP_BASIC_DELIVERY_MODE_FLAG;
    properties.delivery_mode = kPersistent;
    if (from.priority) {
        properties._flags |= AMQP_BASIC_PRIORITY_FLAG;
        properties.priority = *from.priority;
    }
    if (message.timestamp_ms) {
        properties._flags |= AMQP_BASIC_TIMESTAMP_FLAG;
        properties.timestamp = static_cast<std::uint64_t>(*message.timestamp_ms / 1000);
    }
    std::vector<amqp_table_entry_t> entries(message.headers.size());
    for (std::size_t i = 0; i < entries.size(); ++i) {
        const OutgoingHeader& one = message.headers[i];
        entries[i].key = bytes(one.name);
        entries[i].value.kind = one.value ? AMQP_FIELD_KIND_UTF8 : AMQP_FIELD_KIND_VOID;
        if (one.value) entries[i].value.value.bytes = bytes(*one.value);
    }
    if (!entries.empty()) {
        properties._flags |= AMQP_BASIC_HEADERS_FLAG;
        properties.headers = {.num_entries = static_cast<int>(entries.size()),
                              .entries = entries.data()};
    }
    const std::string body = body_of(message);
    const int status = amqp_basic_publish(connection_.state(), work_channel, bytes(from.exchange),
                                          bytes(message.topic), 1, 0, &properties, bytes(body));
    if (status == AMQP_STATUS_OK) return true;
    lose(library_error(status, "publishing").detail);
    return false;
}

void Publishing::read() {
    for (;;) {
        auto frame = connection_.next_frame();
        if (!frame) return lose(frame.error().detail);
        if (!*frame || !on_frame(**frame)) return;
    }
}

// False: the connection is gone.
bool Publishing::on_frame(const amqp_frame_t& frame) {
    if (frame.frame_type != AMQP_FRAME_METHOD) return true;
    if (const auto error = Connection::closed_by(frame)) {
        lose(error->detail);
        return false;
    }
    const void* const said = frame.payload.method.decoded;
    switch (frame.payload.method.id) {
        case AMQP_BASIC_ACK_METHOD: {
            const auto* ack = static_cast<const amqp_basic_ack_t*>(said);
            on_confirm(ack->delivery_tag, ack->multiple != 0, true);
            return true;
        }
        case AMQP_BASIC_NACK_METHOD: {
            const auto* nack = static_cast<const amqp_basic_nack_t*>(said);
            on_confirm(nack->delivery_tag, nack->multiple != 0, false);
            return true;
        }
        case AMQP_BASIC_RETURN_METHOD:
            return on_return(*static_cast<const amqp_basic_return_t*>(said));
        case AMQP_CONNECTION_BLOCKED_METHOD:
            blocked_ = true;
            tell(
                ProblemKind::blocked,
                "the broker takes no messages (" +
                    std::string(view(static_cast<const amqp_connection_blocked_t*>(said)->reason)) +
                    "); they wait here");
            return true;
        case AMQP_CONNECTION_UNBLOCKED_METHOD:
            blocked_ = false;
            tell(ProblemKind::unblocked, "the broker takes messages again");
            return true;
        default:
            return true;
    }
}

// A return carries no tag. It is matched with the first unconfirmed message of the same bytes: of
// equal ones it does not matter which is said to be missing.
bool Publishing::on_return(const amqp_basic_return_t& said) {
    const std::string exchange(view(said.exchange)), key(view(said.routing_key));
    const std::string why =
        std::to_string(said.reply_code) + " " + std::string(view(said.reply_text));
    amqp_message_t message{};
    const amqp_rpc_reply_t reply =
        amqp_read_message(connection_.state(), work_channel, &message, 0);
    if (reply.reply_type != AMQP_RESPONSE_NORMAL) {
        lose(reply_error(reply, "reading a returned message").detail);
        return false;
    }
    const amqp_basic_properties_t& from = message.properties;
    const bool has_id = (from._flags & AMQP_BASIC_MESSAGE_ID_FLAG) != 0;
    const int headers = (from._flags & AMQP_BASIC_HEADERS_FLAG) != 0 ? from.headers.num_entries : 0;
    const auto same = [&](const Item& item) {
        const Outgoing& mine = item.message;
        if (!item.returned.empty() || mine.topic != key || mine.properties.exchange != exchange ||
            mine.value.value_or("") != view(message.body) ||
            mine.properties.message_id != (has_id ? view(from.message_id) : std::string_view{}) ||
            mine.headers.size() != static_cast<std::size_t>(headers))
            return false;
        for (int i = 0; i < headers; ++i) {
            const OutgoingHeader& one = mine.headers[static_cast<std::size_t>(i)];
            if (one.name != view(from.headers.entries[i].key) ||
                one.value != text_of(from.headers.entries[i].value))
                return false;
        }
        return true;
    };
    const auto at =
        std::find_if(sent_.begin(), sent_.end(), [&](const auto& one) { return same(one.second); });
    if (at != sent_.end()) at->second.returned = why;
    amqp_destroy_message(&message);
    return true;
}

void Publishing::on_confirm(std::uint64_t tag, bool multiple, bool confirmed) {
    const auto end = sent_.upper_bound(tag);
    auto at = multiple ? sent_.begin() : sent_.find(tag);
    if (at == sent_.end()) return;
    std::vector<Item> decided;
    for (; at != end; at = sent_.erase(at)) decided.push_back(std::move(at->second));
    for (Item& item : decided) {
        if (!item.returned.empty()) {
            // Confirmed that it is nowhere.
            const std::string why = "no queue takes it (" + item.returned +
                                    "): create the queue, or bind one for this routing key";
            fail(std::move(item), base::ErrorCode::io, base::Applied::no, why);
        } else if (confirmed) {
            finish(std::move(item), PublishedAt{});
        } else {
            fail(std::move(item), base::ErrorCode::io, base::Applied::unknown,
                 "the broker could not process it");
        }
    }
}

void Publishing::expire() {
    const auto now = Clock::now();
    while (!queue_.empty() && queue_.front().deadline <= now) {
        Item item = std::move(queue_.front());
        queue_.pop_front();
        fail(std::move(item), base::ErrorCode::io, base::Applied::no,
             blocked_ ? "the broker took no messages in time"
                      : "not connected in time: " + last_problem_);
    }
    while (!sent_.empty() && sent_.begin()->second.deadline <= now) {
        Item item = std::move(sent_.begin()->second);
        sent_.erase(sent_.begin());
        fail(std::move(item), base::ErrorCode::io, base::Applied::unknown, "not confirmed in time");
    }
}

void Publishing::lose(const std::string& why) {
    connection_.drop();
    next_try_ = Clock::now() + backoff_.next();
    if (std::exchange(blocked_, false))
        tell(ProblemKind::unblocked, "the connection over which it took no messages is gone");
    reachable_ = false;
    last_problem_ = why;
    tell(ProblemKind::unreachable, why);
    for (auto& [tag, item] : std::exchange(sent_, {}))
        fail(std::move(item), base::ErrorCode::io, base::Applied::unknown, why);
}

void Publishing::fail(Item item, base::ErrorCode code, base::Applied applied,
                      const std::string& why) {
    base::Error error{.code = code,
                      .applied = applied,
                      .detail = "rabbitmq: publishing to " + item.message.topic + ": " + why};
    finish(std::move(item), std::move(error));
}

void Publishing::finish(Item item, base::Result<PublishedAt> result) {
    item.done(std::move(result));
    const std::lock_guard lock(mutex_);
    if (--undecided_ == 0) all_decided_.notify_all();
}

}  // namespace semel::brokers::rabbitmq
