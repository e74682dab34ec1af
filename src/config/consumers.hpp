// The `consumers:` of the configuration as values: docs/reference/config.md.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "config/store_config.hpp"

namespace semel::config {

/// Where a value of a message comes from.
enum class ValueFrom : std::uint8_t {
    json,         ///< `name`: JSON pointer (RFC 6901) into the payload.
    header,       ///< `name`: of a header; names are compared as bytes on Kafka and AMQP.
    property,     ///< `name`: of an AMQP property, as message-id.
    key,          ///< The message's key.
    offset,       ///< topic-partition-offset: catches redelivery only. As an id only.
    cloudevents,  ///< The event's source and id. As an id only.
    constant,     ///< `name` itself.
};
struct ValueSpec {
    ValueFrom from = ValueFrom::json;
    std::string name;
    friend bool operator==(const ValueSpec&, const ValueSpec&) = default;
};

enum class OnMissingId : std::uint8_t { dead_letter, offset, skip };
enum class OnTombstone : std::uint8_t { deliver, skip, dead_letter };
enum class OnMismatch : std::uint8_t { dead_letter, duplicate };
enum class Payload : std::uint8_t { json, bytes };

struct IdConfig {
    /// Empty: the usual order: CloudEvents, the header Idempotency-Key, the header id (Debezium's
    /// outbox), the property message-id.
    std::optional<ValueSpec> from;
    std::string
        source;  ///< Ids are unique across topics: this stands for the topic. Empty: they are not.
    OnMissingId on_missing = OnMissingId::dead_letter;
    OnTombstone on_tombstone = OnTombstone::deliver;
    OnMismatch on_mismatch = OnMismatch::dead_letter;
    bool fingerprint = true;  ///< Two messages of one id are compared.
    std::vector<std::string>
        fingerprint_members;  ///< JSON pointers of what is compared; empty: the whole payload.
};

enum class Start : std::uint8_t { earliest, latest, fail };
struct KafkaSourceConfig {
    std::string brokers;
    std::vector<std::string> topics;  ///< Names, or patterns that begin with "^".
    std::string group;
    std::string instance_id;  ///< Static membership; empty: none.
    Start start = Start::earliest;
    std::map<std::string, std::string>
        properties;  ///< librdkafka's, for the consumer; those that are no consumer's own also for
                     ///< the publisher.
    milliseconds drain{20'000};  ///< For revoked partitions.
};
struct RabbitmqSourceConfig {
    std::string url;
    std::string shown_url;  ///< Without user and password.
    std::string queue;
    std::uint16_t prefetch = 0;  ///< Never 0 once it is read: see usual_prefetch().
    bool declare = false;        ///< The queue is declared as said below; else it must exist.
    bool quorum = true;
    bool single_active_consumer = false;
    std::string dead_letter_exchange;
    std::optional<std::uint32_t> delivery_limit;
    milliseconds consumer_timeout{30 * 60 * 1000};  ///< The broker's; 0: none.
    std::string ca_file;
};

enum class ConsumerStrategy : std::uint8_t { store, table, transaction, state };
enum class Ordering : std::uint8_t { partition, key, none };

enum class DatabaseKind : std::uint8_t { postgres, mysql };
struct DatabaseConfig {
    DatabaseKind kind = DatabaseKind::postgres;
    std::string url;
    std::string shown_url;
    std::string schema;        ///< Of our tables; empty: the connection's own.
    unsigned connections = 4;  ///< At most that many at once, of this consumer.
    bool migrate = true;       ///< Make or update our tables at the start.
};

struct HttpHandlerConfig {
    std::string url;
    milliseconds timeout{30'000};  ///< From the last byte of the request to the end of the answer.
    std::string ca_file;
};
enum class SqlRows : std::uint8_t { one, any, at_least_one };
struct SqlStatementConfig {
    std::string sql;  ///< With :name for the parameters.
    SqlRows rows = SqlRows::one;
};
struct SqlHandlerConfig {
    std::map<std::string, ValueSpec> params;
    std::vector<SqlStatementConfig> statements;
};
enum class OnDuplicate : std::uint8_t { silent, republish };
struct AiHandlerConfig {
    std::string tenant;
    std::optional<ValueSpec> user, session;
    ValueSpec prompt;
    std::string model;  ///< Empty: the default of /api/chat.
};
/// Where the answers of a handler are published: `results`, of handler ai handler.ai.result.
struct ResultsConfig {
    std::string topic;     ///< Kafka.
    std::string queue;     ///< RabbitMQ; with `exchange` empty.
    std::string exchange;  ///< RabbitMQ: published there, under the queue's name as routing key.
    OnDuplicate on_duplicate = OnDuplicate::silent;
    /// False: what handlers answer is dropped.
    [[nodiscard]] bool any() const { return !topic.empty() || !queue.empty() || !exchange.empty(); }
};
/// callback: a function of the program that links the library.
enum class HandlerKind : std::uint8_t { none, http, sql, ai, callback };
struct HandlerConfig {
    HandlerKind kind = HandlerKind::none;
    HttpHandlerConfig http;
    SqlHandlerConfig sql;
    AiHandlerConfig ai;
    ResultsConfig results;
};

enum class OnSuperseded : std::uint8_t { dead_letter, ack };
struct StateConfig {
    std::string table;
    std::string key_column;
    ValueSpec key;
    std::string status_column;
    std::string version_column;     ///< Empty: none.
    std::string message_id_column;  ///< Empty: none. Else it holds the id that made the transition.
    std::vector<std::string> from;
    std::string to;
    std::vector<std::string> terminal;
    std::map<std::string, ValueSpec> set;
    OnSuperseded on_superseded = OnSuperseded::dead_letter;
};

/// Where a failed message is until it is due.
enum class RetryWait : std::uint8_t {
    in_hand,  ///< In the process, unsettled.
    broker,   ///< While one of `delays` passes: at the broker, as a copy; the original is settled.
    /// For longer waits beside the records, with those behind it in its lane; settled at the
    /// broker.
    store,
};
struct RetryConfig {
    std::uint32_t attempts = 3;  ///< Runs in place, the first included.
    std::uint32_t crashes = 5;   ///< Deaths of the process while this message ran alone.
    milliseconds initial{1000};
    double factor = 2.0;
    milliseconds max{60'000};
    double jitter = 0.2;
    std::vector<milliseconds> delays;  ///< One more run each, after that long.
    RetryWait wait = RetryWait::in_hand;
    bool create = false;  ///< The topics or queues of copies are made at the start if missing.
};

enum class LetterBody : std::uint8_t { raw, envelope };
enum class LetterHeaders : std::uint8_t { spring, none };
struct DeadLetterConfig {
    bool stop = false;     ///< No letters: the lane stops with an alarm.
    std::string topic;     ///< Kafka; empty: <topic>.<group>.dlq.
    std::string queue;     ///< RabbitMQ; with `exchange` empty. Empty: <queue>.dlq.
    std::string exchange;  ///< RabbitMQ: published there, under the queue's name as routing key.
    bool create = false;   ///< Made at the start if it is missing.
    LetterBody body = LetterBody::raw;
    LetterHeaders headers = LetterHeaders::spring;
};

/// What a person knowingly accepts (`accept: [...]`).
enum class Accept : std::uint8_t { short_dedup, unshared_store };

struct ConsumerConfig {
    std::string name;
    bool observe = false;  ///< mode: observe: messages are looked at and counted, nothing else.
    std::optional<KafkaSourceConfig> kafka;  ///< Exactly one of the two.
    std::optional<RabbitmqSourceConfig> rabbitmq;
    std::string scope;  ///< Never empty: default <group>/<name>, on RabbitMQ <queue>/<name>.
    IdConfig id;
    std::optional<ValueSpec> business_key;
    Payload payload = Payload::json;
    ConsumerStrategy strategy = ConsumerStrategy::store;
    std::optional<StoreConfig> store;        ///< Its own, of strategy store; empty: the process's.
    std::optional<DatabaseConfig> database;  ///< Set for table, transaction, state.
    HandlerConfig handler;
    StateConfig state;  ///< Strategy state only.
    Ordering ordering = Ordering::key;
    unsigned concurrency = 16;
    std::optional<milliseconds> retention;  ///< Empty: auto.
    milliseconds retention_dead{std::chrono::hours{24 * 30}};
    RetryConfig retry;
    bool hold_unknown = false;  ///< on_unknown: hold.
    double breaker_dead_share = 0.5;
    DeadLetterConfig dead_letter;
    std::size_t park_limit = 5000;  ///< Messages that may wait behind failed ones (wait: store:
                                    ///< failed or behind such); then their partitions pause.
    std::set<Accept> accept;
    int line = 0;  ///< In the file, for messages.

    /// Of Kafka the group, of RabbitMQ the queue.
    [[nodiscard]] const std::string& group() const {
        return kafka ? kafka->group : rabbitmq->queue;
    }
    [[nodiscard]] bool accepts(Accept what) const { return accept.contains(what); }
};

/// Where copies wait (retry.wait: broker): <topic>.<group>.retry.<delay>, on RabbitMQ
/// <queue>.<consumer>.retry.<delay>; one for each of retry.delays, in their order. `topic`: one of
/// the consumer's topics, or its queue.
std::vector<std::string> copy_targets(const ConsumerConfig& consumer, const std::string& topic);
/// Those of all topics of the consumer, each once. Empty: failed messages wait in hand, or none is
/// run (mode: observe).
std::vector<std::string> all_copy_targets(const ConsumerConfig& consumer);
/// A duration as the configuration writes it, exactly: "7d", "90s", "1500ms".
std::string duration_word(milliseconds duration);

/// True if `topic`, a name or a pattern that begins with "^", takes in `name`.
bool takes_in(const std::string& topic, const std::string& name);

}  // namespace semel::config
