#include "brokers/kafka/producer.hpp"

#include <array>

namespace semel::brokers::kafka {

using std::chrono::milliseconds;

namespace {

constexpr milliseconds kPoll{100};
constexpr milliseconds kQueueFullRetry{100};

base::Applied applied_of(rd_kafka_msg_status_t status) {
    switch (status) {
        case RD_KAFKA_MSG_STATUS_NOT_PERSISTED:
            return base::Applied::no;
        case RD_KAFKA_MSG_STATUS_PERSISTED:
            return base::Applied::yes;
        default:
            return base::Applied::unknown;
    }
}

// The headers are the library's if it succeeds.
KafkaError produce(rd_kafka_t* client, Outgoing& message, rd_kafka_headers_t* headers,
                   void* opaque) {
    std::array<rd_kafka_vu_t, 8> fields{};
    fields[0].vtype = RD_KAFKA_VTYPE_TOPIC;
    fields[0].u.cstr = message.topic.c_str();
    fields[1].vtype = RD_KAFKA_VTYPE_PARTITION;
    fields[1].u.i32 = message.partition.value_or(RD_KAFKA_PARTITION_UA);
    fields[2].vtype = RD_KAFKA_VTYPE_MSGFLAGS;
    fields[2].u.i = RD_KAFKA_MSG_F_COPY;
    fields[3].vtype = RD_KAFKA_VTYPE_KEY;
    if (message.key) fields[3].u.mem = {message.key->data(), message.key->size()};
    fields[4].vtype = RD_KAFKA_VTYPE_VALUE;
    if (message.value) fields[4].u.mem = {message.value->data(), message.value->size()};
    fields[5].vtype = RD_KAFKA_VTYPE_TIMESTAMP;
    fields[5].u.i64 = message.timestamp_ms.value_or(0);
    fields[6].vtype = RD_KAFKA_VTYPE_HEADERS;
    fields[6].u.headers = headers;
    fields[7].vtype = RD_KAFKA_VTYPE_OPAQUE;
    fields[7].u.ptr = opaque;
    return KafkaError(rd_kafka_produceva(client, fields.data(), fields.size()));
}

}  // namespace

base::Result<std::unique_ptr<Publisher>> make_publisher(PublisherConfig config) {
    auto producer = std::make_unique<Producer>(std::move(config));
    if (auto done = producer->open(); !done) return std::move(done.error());
    return std::unique_ptr<Publisher>(std::move(producer));
}

Producer::~Producer() { stop(milliseconds{0}); }

base::Result<Client> Producer::make() {
    Conf conf(rd_kafka_conf_new());
    const std::array<std::pair<const char*, std::string>, 8> own{{
        {"bootstrap.servers", config_.brokers},
        {"client.id", config_.client_id},
        {"enable.idempotence", "true"},
        {"acks", "all"},
        {"partitioner", "murmur2_random"},
        {"delivery.timeout.ms", std::to_string(config_.timeout.count())},
        {"queue.buffering.max.messages", std::to_string(config_.queued)},
        {"linger.ms", "2"},
    }};
    for (const auto& [name, value] : own) {
        if (auto done = set(conf.get(), name, value); !done) return std::move(done.error());
    }
    if (auto done = set_all(conf.get(), Role::publisher, config_.properties); !done)
        return std::move(done.error());
    rd_kafka_conf_set_dr_msg_cb(conf.get(), &Producer::on_report);
    // What matters arrives with the messages' own errors; by default the rest is printed.
    rd_kafka_conf_set_error_cb(conf.get(), [](rd_kafka_t*, int, const char*, void*) {});
    rd_kafka_conf_set_log_cb(conf.get(), [](const rd_kafka_t*, int, const char*, const char*) {});
    std::array<char, 512> text{};
    Client client(rd_kafka_new(RD_KAFKA_PRODUCER, conf.get(), text.data(), text.size()));
    if (client == nullptr) return invalid(std::string("kafka: publisher: ") + text.data());
    static_cast<void>(conf.release());  // it is the client's now
    return client;
}

base::Result<void> Producer::open() {
    if (config_.brokers.empty()) return invalid("kafka: a publisher needs brokers");
    auto client = make();
    if (!client) return std::move(client.error());
    client_ = std::move(*client);
    thread_ = std::thread([this] { run(); });
    return {};
}

void Producer::publish(Outgoing message, PublishDone done) {
    const std::shared_lock lock(client_mutex_);
    if (stopping_ || client_ == nullptr) {
        return done(base::Error{.code = base::ErrorCode::stopping,
                                .detail = "kafka: the publisher is stopping"});
    }
    rd_kafka_headers_t* headers = rd_kafka_headers_new(message.headers.size());
    for (const OutgoingHeader& one : message.headers) {
        rd_kafka_header_add(headers, one.name.data(), static_cast<ssize_t>(one.name.size()),
                            one.value ? one.value->data() : nullptr,
                            one.value ? static_cast<ssize_t>(one.value->size()) : 0);
    }
    auto pending = std::make_unique<Pending>(
        Pending{.producer = this, .done = std::move(done), .topic = message.topic});
    {
        const std::lock_guard counted(pending_mutex_);
        ++pending_;
    }
    const KafkaError failed = produce(client_.get(), message, headers, pending.get());
    const auto code =
        failed == nullptr ? RD_KAFKA_RESP_ERR_NO_ERROR : rd_kafka_error_code(failed.get());
    if (code == RD_KAFKA_RESP_ERR_NO_ERROR) {
        static_cast<void>(pending.release());  // on_report's
        return;
    }
    rd_kafka_headers_destroy(headers);
    base::Error error = error_of(code, "publishing to " + message.topic);
    if (code == RD_KAFKA_RESP_ERR__QUEUE_FULL) error.retry_after = kQueueFullRetry;
    if (code == RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE)
        error.code = base::ErrorCode::invalid_argument;
    pending->done(std::move(error));
    decided();
}

void Producer::decided() {
    const std::lock_guard lock(pending_mutex_);
    if (--pending_ == 0) all_decided_.notify_all();
}

void Producer::on_report(rd_kafka_t*, const rd_kafka_message_t* message, void*) {
    const std::unique_ptr<Pending> pending(static_cast<Pending*>(message->_private));
    if (message->err == RD_KAFKA_RESP_ERR_NO_ERROR) {
        pending->done(PublishedAt{.partition = message->partition, .position = message->offset});
    } else {
        base::Error error = error_of(message->err, "publishing to " + pending->topic,
                                     applied_of(rd_kafka_message_status(message)));
        if (message->err == RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE)
            error.code = base::ErrorCode::invalid_argument;
        if (pending->producer->ended_) error.code = base::ErrorCode::stopping;
        pending->done(std::move(error));
    }
    pending->producer->decided();
}

void Producer::run() {
    while (!ended_) {
        rd_kafka_poll(client_.get(), milliseconds_of(kPoll));
        std::array<char, 256> text{};
        if (rd_kafka_fatal_error(client_.get(), text.data(), text.size()) !=
            RD_KAFKA_RESP_ERR_NO_ERROR)
            renew();
    }
    const std::unique_lock lock(client_mutex_);
    purge(client_.get());
    client_.reset();
}

// An idempotent producer that lost its place (its state expired at the broker, an unexpected
// sequence) refuses everything for ever. What it had queued is reported, then another one takes its
// place.
void Producer::renew() {
    const std::unique_lock lock(client_mutex_);
    auto fresh = make();
    if (!fresh) return;
    purge(client_.get());
    client_ = std::move(*fresh);
}

void Producer::purge(rd_kafka_t* client) {
    rd_kafka_purge(client, RD_KAFKA_PURGE_F_QUEUE | RD_KAFKA_PURGE_F_INFLIGHT);
    while (rd_kafka_outq_len(client) > 0) rd_kafka_poll(client, milliseconds_of(kPoll));
}

bool Producer::flush(milliseconds within) {
    std::unique_lock lock(pending_mutex_);
    return all_decided_.wait_for(lock, within, [this] { return pending_ == 0; });
}

void Producer::stop(milliseconds within) {
    const std::lock_guard stop_lock(stop_mutex_);
    if (!thread_.joinable()) return;
    stopping_ = true;
    flush(within);
    ended_ = true;
    thread_.join();
}

}  // namespace semel::brokers::kafka
