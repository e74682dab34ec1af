#include <gtest/gtest.h>

#include "config/testing.hpp"

namespace semel::config {
namespace {

using namespace std::chrono_literals;

constexpr const char* kafka =
    "    source: { kafka: { brokers: \"127.0.0.1:9092\", topics: [orders], group: shop } }\n";
constexpr const char* rabbitmq =
    "    source: { rabbitmq: { url: \"amqp://guest:guest@127.0.0.1/\", queue: orders } }\n";
constexpr const char* http = "    handler: { http: { url: \"http://127.0.0.1:8080/orders\" } }\n";
constexpr const char* database =
    "    database: { postgres: { url: \"postgresql://db.internal/shop\" } }\n";
constexpr const char* sql = "    handler: { sql: { statements: [\"UPDATE a SET b = 1\"] } }\n";
constexpr const char* redis_store = "store: { redis: { url: \"redis://h\" } }\n";
constexpr const char* state =
    "    state: { table: orders, key: { column: no, value: { json: /no } }, status: s, from: "
    "[NEW], "
    "to: PAID, terminal: [PAID] }\n";

/// One consumer of these lines, each with four blanks in front.
std::string consumer(const std::string& lines, const std::string& before = "") {
    return before + "consumers:\n  - name: orders\n" + lines;
}

TEST(ConsumerConfig, a_short_one_has_the_documented_defaults) {
    const Config config = accepted(consumer(std::string(kafka) + http));
    ASSERT_EQ(config.consumers.size(), 1u);
    const ConsumerConfig& one = config.consumers[0];
    EXPECT_EQ(one.name, "orders");
    ASSERT_TRUE(one.kafka);
    EXPECT_FALSE(one.rabbitmq);
    EXPECT_EQ(one.kafka->topics, std::vector<std::string>{"orders"});
    EXPECT_EQ(one.kafka->start, Start::earliest);
    EXPECT_EQ(one.kafka->drain, 20s);
    EXPECT_TRUE(one.kafka->properties.empty());
    EXPECT_EQ(one.kafka->instance_id, "");
    EXPECT_EQ(one.scope, "shop/orders");
    EXPECT_FALSE(one.id.from);
    EXPECT_EQ(one.id.on_missing, OnMissingId::dead_letter);
    EXPECT_EQ(one.id.on_tombstone, OnTombstone::deliver);
    EXPECT_EQ(one.id.on_mismatch, OnMismatch::dead_letter);
    EXPECT_TRUE(one.id.fingerprint);
    EXPECT_TRUE(one.id.fingerprint_members.empty());
    EXPECT_FALSE(one.business_key);
    EXPECT_EQ(one.payload, Payload::json);
    EXPECT_EQ(one.strategy, ConsumerStrategy::store);
    EXPECT_FALSE(one.database);
    EXPECT_EQ(one.handler.kind, HandlerKind::http);
    EXPECT_EQ(one.handler.http.timeout, 30s);
    EXPECT_EQ(one.ordering, Ordering::key);
    EXPECT_EQ(one.concurrency, 16u);
    EXPECT_FALSE(one.retention) << "auto";
    EXPECT_EQ(one.retention_dead, 24h * 30);
    EXPECT_EQ(one.retry.attempts, 3u);
    EXPECT_EQ(one.retry.crashes, 5u);
    EXPECT_EQ(one.retry.initial, 1s);
    EXPECT_EQ(one.retry.factor, 2.0);
    EXPECT_EQ(one.retry.max, 60s);
    EXPECT_EQ(one.retry.jitter, 0.2);
    EXPECT_TRUE(one.retry.delays.empty());
    EXPECT_FALSE(one.hold_unknown);
    EXPECT_EQ(one.breaker_dead_share, 0.5);
    EXPECT_FALSE(one.dead_letter.stop);
    EXPECT_EQ(one.dead_letter.topic, "orders.shop.dlq");
    EXPECT_FALSE(one.dead_letter.create);
    EXPECT_EQ(one.dead_letter.body, LetterBody::raw);
    EXPECT_EQ(one.dead_letter.headers, LetterHeaders::spring);
    EXPECT_EQ(one.park_limit, 5000u);
    EXPECT_TRUE(one.accept.empty());
    EXPECT_EQ(one.line, 2);
    EXPECT_TRUE(config.warnings.empty()) << config.warnings.front();

    const Config other = accepted(consumer(std::string(rabbitmq) + http));
    const ConsumerConfig& queue = other.consumers.at(0);
    ASSERT_TRUE(queue.rabbitmq);
    EXPECT_EQ(queue.ordering, Ordering::none);
    EXPECT_EQ(queue.scope, "orders/orders");
    EXPECT_EQ(queue.dead_letter.queue, "orders.dlq");
    EXPECT_EQ(queue.rabbitmq->prefetch, 100);
    EXPECT_EQ(queue.rabbitmq->consumer_timeout, 30min);
    EXPECT_FALSE(queue.rabbitmq->declare);
    EXPECT_EQ(queue.rabbitmq->shown_url, "amqp://127.0.0.1/");
    EXPECT_TRUE(other.warnings.empty()) << "guest is known to everybody";
    EXPECT_TRUE(accepted("consumers: []").consumers.empty());
}

TEST(ConsumerConfig, reads_every_key_of_a_consumer_with_a_handler) {
    const Config config = accepted(R"(
consumers:
  - name: orders
    source:
      kafka:
        brokers: "a:9092,b:9092"
        topics: [orders, "^late-.*"]
        group: shop
        instance_id: ${POD_NAME}
        start: fail
        drain: 5s
        properties: { security.protocol: SSL, sasl.password: "${DB_PASSWORD}", fetch.min.bytes: 10 }
    scope: shop/old-name
    id: { json: /a~1b/0, source: shop-events, fingerprint: [/orderNo, /amount] }
    on_missing_id: offset
    on_tombstone: skip
    on_mismatch: duplicate
    business_key: { header: order-no }
    payload: json
    strategy: table
    database: { postgres: { url: "postgresql://u@db.internal/shop", schema: shop, connections: 9, migrate: false } }
    handler: { http: { url: "https://orders.internal/hook", timeout: 5s, ca_file: /ca.pem } }
    ordering: none
    concurrency: 3
    dedup: { retention: 10d, dead: 60d }
    retry: { attempts: 7, crashes: 2, backoff: { initial: 10ms, factor: 1.5, max: 1s, jitter: 0 }, delays: [1m, 2h] }
    on_unknown: hold
    breaker: { dead_share: 20% }
    dead_letter: { topic: dead-orders, create: true, body: envelope, headers: none }
    park_limit: 17
    accept: [short_dedup, unshared_store]
)");
    const ConsumerConfig& one = config.consumers.at(0);
    EXPECT_EQ(one.kafka->brokers, "a:9092,b:9092");
    EXPECT_EQ(one.kafka->topics, (std::vector<std::string>{"orders", "^late-.*"}));
    EXPECT_EQ(one.kafka->instance_id, "orders-3");
    EXPECT_EQ(one.kafka->start, Start::fail);
    EXPECT_EQ(one.kafka->drain, 5s);
    EXPECT_EQ(one.kafka->properties,
              (std::map<std::string, std::string>{{"security.protocol", "SSL"},
                                                  {"sasl.password", "pw-hidden"},
                                                  {"fetch.min.bytes", "10"}}));
    EXPECT_EQ(one.scope, "shop/old-name");
    EXPECT_EQ(one.id.from, (ValueSpec{ValueFrom::json, "/a~1b/0"}));
    EXPECT_EQ(one.id.source, "shop-events");
    EXPECT_EQ(one.id.fingerprint_members, (std::vector<std::string>{"/orderNo", "/amount"}));
    EXPECT_EQ(one.id.on_missing, OnMissingId::offset);
    EXPECT_EQ(one.id.on_tombstone, OnTombstone::skip);
    EXPECT_EQ(one.id.on_mismatch, OnMismatch::duplicate);
    EXPECT_EQ(one.business_key, (ValueSpec{ValueFrom::header, "order-no"}));
    EXPECT_EQ(one.strategy, ConsumerStrategy::table);
    ASSERT_TRUE(one.database);
    EXPECT_EQ(one.database->kind, DatabaseKind::postgres);
    EXPECT_EQ(one.database->url, "postgresql://u@db.internal/shop");
    EXPECT_EQ(one.database->shown_url, "postgresql://db.internal/shop");
    EXPECT_EQ(one.database->schema, "shop");
    EXPECT_EQ(one.database->connections, 9u);
    EXPECT_FALSE(one.database->migrate);
    EXPECT_EQ(one.handler.http.url, "https://orders.internal/hook");
    EXPECT_EQ(one.handler.http.timeout, 5s);
    EXPECT_EQ(one.handler.http.ca_file, "/ca.pem");
    EXPECT_EQ(one.ordering, Ordering::none);
    EXPECT_EQ(one.concurrency, 3u);
    EXPECT_EQ(one.retention, 24h * 10);
    EXPECT_EQ(one.retention_dead, 24h * 60);
    EXPECT_EQ(one.retry.attempts, 7u);
    EXPECT_EQ(one.retry.crashes, 2u);
    EXPECT_EQ(one.retry.initial, 10ms);
    EXPECT_EQ(one.retry.factor, 1.5);
    EXPECT_EQ(one.retry.max, 1s);
    EXPECT_EQ(one.retry.jitter, 0.0);
    EXPECT_EQ(one.retry.delays, (std::vector<milliseconds>{1min, 2h}));
    EXPECT_TRUE(one.hold_unknown);
    EXPECT_EQ(one.breaker_dead_share, 0.2);
    EXPECT_EQ(one.dead_letter.topic, "dead-orders");
    EXPECT_TRUE(one.dead_letter.create);
    EXPECT_EQ(one.dead_letter.body, LetterBody::envelope);
    EXPECT_EQ(one.dead_letter.headers, LetterHeaders::none);
    EXPECT_EQ(one.park_limit, 17u);
    EXPECT_TRUE(one.accepts(Accept::short_dedup) && one.accepts(Accept::unshared_store));
}

TEST(ConsumerConfig, reads_statements_transitions_and_queues) {
    const Config config = accepted(R"yaml(
store: { mysql: { url: "mysql://semel@db.internal/shop" } }
consumers:
  - name: stock
    source: { kafka: { brokers: "b:9092", topics: stock, group: stock } }
    id: { header: message-id, fingerprint: none }
    strategy: transaction
    handler:
      sql:
        params: { sku: { json: /sku }, by: { constant: semel }, k: { key: true } }
        statements:
          - "UPDATE stock SET qty = qty - 1 WHERE sku = :sku"
          - { sql: "INSERT INTO log VALUES (:by, :k)", rows: any }
          - { sql: "DELETE FROM todo WHERE sku = :sku", rows: ">=1" }
    dead_letter: stop
  - name: payments
    source:
      rabbitmq:
        url: "amqps://semel:${DB_PASSWORD}@mq.internal/shop"
        queue: payment-result
        prefetch: 7
        consumer_timeout: 2h
        ca_file: /ca.pem
        declare: { type: quorum, single_active_consumer: true, dead_letter_exchange: dead, delivery_limit: 50 }
    id: { property: correlation-id }
    business_key: { json: /orderNo }
    ordering: partition
    strategy: state
    state:
      table: orders
      key: { column: order_no, value: { json: /orderNo } }
      status: status
      version: version
      message_id_column: paid_by
      from: [PENDING, PROCESSING]
      to: PAID
      terminal: [PAID, CLOSED]
      set: { transaction_id: { json: /transactionId }, route: { property: routing-key } }
      on_superseded: ack
    retry: { attempts: 9 }
    dead_letter: { exchange: dead }
)yaml");
    const ConsumerConfig& stock = config.consumers.at(0);
    ASSERT_TRUE(stock.database) << "that of the store";
    EXPECT_EQ(stock.database->kind, DatabaseKind::mysql);
    EXPECT_EQ(stock.database->shown_url, "mysql://db.internal/shop");
    EXPECT_FALSE(stock.id.fingerprint);
    EXPECT_EQ(stock.handler.kind, HandlerKind::sql);
    EXPECT_EQ(stock.handler.sql.params.at("sku"), (ValueSpec{ValueFrom::json, "/sku"}));
    EXPECT_EQ(stock.handler.sql.params.at("by"), (ValueSpec{ValueFrom::constant, "semel"}));
    EXPECT_EQ(stock.handler.sql.params.at("k").from, ValueFrom::key);
    ASSERT_EQ(stock.handler.sql.statements.size(), 3u);
    EXPECT_EQ(stock.handler.sql.statements[0].rows, SqlRows::one);
    EXPECT_EQ(stock.handler.sql.statements[1].rows, SqlRows::any);
    EXPECT_EQ(stock.handler.sql.statements[2].rows, SqlRows::at_least_one);
    EXPECT_TRUE(stock.dead_letter.stop);
    const ConsumerConfig& payments = config.consumers.at(1);
    EXPECT_EQ(payments.rabbitmq->prefetch, 7);
    EXPECT_EQ(payments.rabbitmq->consumer_timeout, 2h);
    EXPECT_EQ(payments.rabbitmq->shown_url, "amqps://mq.internal/shop");
    EXPECT_EQ(payments.rabbitmq->ca_file, "/ca.pem");
    EXPECT_TRUE(payments.rabbitmq->declare && payments.rabbitmq->quorum);
    EXPECT_TRUE(payments.rabbitmq->single_active_consumer);
    EXPECT_EQ(payments.rabbitmq->dead_letter_exchange, "dead");
    EXPECT_EQ(payments.rabbitmq->delivery_limit, 50u);
    EXPECT_EQ(payments.id.from, (ValueSpec{ValueFrom::property, "correlation-id"}));
    EXPECT_EQ(payments.ordering, Ordering::partition);
    EXPECT_EQ(payments.state.table, "orders");
    EXPECT_EQ(payments.state.key_column, "order_no");
    EXPECT_EQ(payments.state.version_column, "version");
    EXPECT_EQ(payments.state.message_id_column, "paid_by");
    EXPECT_EQ(payments.state.from, (std::vector<std::string>{"PENDING", "PROCESSING"}));
    EXPECT_EQ(payments.state.terminal, (std::vector<std::string>{"PAID", "CLOSED"}));
    EXPECT_EQ(payments.state.set.at("route"), (ValueSpec{ValueFrom::property, "routing-key"}));
    EXPECT_EQ(payments.state.on_superseded, OnSuperseded::ack);
    EXPECT_EQ(payments.dead_letter.exchange, "dead");
    EXPECT_EQ(payments.dead_letter.queue, "");
    for (const std::string& warning : config.warnings) ADD_FAILURE() << warning;
}

TEST(ConsumerConfig, of_a_queue_as_much_is_taken_in_advance_as_its_handlers_can_use) {
    const auto prefetch = [](const std::string& more) {
        return accepted(consumer(std::string(rabbitmq) + more)).consumers.at(0).rabbitmq->prefetch;
    };
    EXPECT_EQ(prefetch(http), 100);
    EXPECT_EQ(prefetch(std::string(http) + "    concurrency: 300\n"), 600);
    EXPECT_EQ(prefetch(std::string("    strategy: transaction\n") + database + sql), 1000);
}

TEST(ConsumerConfig, reads_a_worker_of_chat_turns) {
    const Config config = accepted(R"(
upstreams: [ { name: openai, base_url: "https://api.openai.com", api_key_env: API_KEY } ]
consumers:
  - name: ai-worker
    source: { kafka: { brokers: "b:9092", topics: [ai-tasks], group: ai-worker } }
    id: { json: /businessRequestId }
    handler: { ai: { tenant: shop, user: { json: /userId }, session: { json: /sessionId }, prompt: { json: /prompt }, model: gpt-4o-mini, result: { topic: ai-results }, on_duplicate: republish } }
)");
    const AiHandlerConfig& ai = config.consumers.at(0).handler.ai;
    EXPECT_EQ(config.consumers[0].handler.kind, HandlerKind::ai);
    EXPECT_EQ(ai.tenant, "shop");
    EXPECT_EQ(ai.user, (ValueSpec{ValueFrom::json, "/userId"}));
    EXPECT_EQ(ai.session, (ValueSpec{ValueFrom::json, "/sessionId"}));
    EXPECT_EQ(ai.prompt, (ValueSpec{ValueFrom::json, "/prompt"}));
    EXPECT_EQ(ai.model, "gpt-4o-mini");
    EXPECT_EQ(config.consumers[0].handler.results.topic, "ai-results");
    EXPECT_EQ(config.consumers[0].handler.results.on_duplicate, OnDuplicate::republish);
}

TEST(ConsumerConfig, reads_where_answers_go) {
    const auto results = [](const std::string& text) {
        return accepted(consumer(text)).consumers.at(0).handler.results;
    };
    EXPECT_FALSE(results(std::string(kafka) + http).any());
    const ResultsConfig topic =
        results(std::string(kafka) + http + "    results: { topic: answers }\n");
    EXPECT_EQ(topic.topic, "answers");
    EXPECT_EQ(topic.on_duplicate, OnDuplicate::silent);
    const ResultsConfig queue =
        results(std::string(rabbitmq) + "    handler: callback\n" +
                "    results: { queue: answers, on_duplicate: republish }\n");
    EXPECT_EQ(queue.queue, "answers");
    EXPECT_EQ(queue.on_duplicate, OnDuplicate::republish);
    EXPECT_EQ(results(std::string(rabbitmq) + http + "    results: { exchange: x }\n").exchange,
              "x");
}

TEST(ConsumerConfig, a_function_of_the_program_goes_with_every_strategy_but_state) {
    const Config config = accepted(R"(
consumers:
  - name: a
    source: { kafka: { brokers: "b:9092", topics: [t], group: a } }
    handler: callback
  - name: b
    source: { kafka: { brokers: "b:9092", topics: [t], group: b } }
    strategy: table
    database: { postgres: { url: "postgresql://semel@h/d" } }
    handler: callback
  - name: c
    source: { rabbitmq: { url: "amqp://h/", queue: q } }
    strategy: transaction
    database: { postgres: { url: "postgresql://semel@h/d" } }
    handler: callback
)");
    ASSERT_EQ(config.consumers.size(), 3U);
    for (const ConsumerConfig& one : config.consumers)
        EXPECT_EQ(one.handler.kind, HandlerKind::callback);
}

TEST(ConsumerConfig, redis_is_another_word_for_the_store_where_that_is_redis) {
    const std::string lines = std::string(kafka) + http + "    strategy: redis\n";
    const Config config = accepted(consumer(lines, redis_store));
    EXPECT_EQ(config.consumers.at(0).strategy, ConsumerStrategy::store);
    EXPECT_EQ(
        read(consumer(lines)).error().detail,
        "semel.yaml:5: consumers[0].strategy: redis is another word for store where the store "
        "is Redis, and here it is not: write store, or configure store.redis");
}

struct Wrong {
    std::string yaml;
    std::string says;
};

TEST(ConsumerConfig, what_does_not_go_together_is_refused_with_the_reason) {
    const std::string on_kafka = std::string(kafka) + http;
    const std::string on_rabbitmq = std::string(rabbitmq) + http;
    const std::string ai_upstream =
        "upstreams: [ { name: u, base_url: \"http://127.0.0.1:1\" } ]\n";
    const std::string ai = "    handler: { ai: { tenant: t, prompt: { json: /p }, model: m } }\n";
    const std::vector<Wrong> wrong{
        // strategy x handler
        {consumer(std::string(kafka) + sql), "handler.sql: its statements and the record"},
        {consumer(std::string(kafka)), "handler must name one of http, ai"},
        {consumer(on_kafka + database + "    strategy: transaction\n"),
         "is no part of the database's transaction"},
        {consumer(std::string(kafka) + database + "    strategy: transaction\n"),
         "handler must name sql"},
        {consumer(on_kafka + database + state + "    strategy: state\n"),
         "the declared transition is the whole effect"},
        {consumer(std::string(kafka) + database + "    strategy: state\n"),
         "state must say table, key, status, from, to and terminal"},
        {consumer(on_kafka + state), "state is for strategy: state"},
        {consumer(std::string(kafka) + ai + database + "    strategy: table\n", ai_upstream),
         "keeps its records where /api/chat does"},
        {consumer(std::string(kafka) + "    handler: { callback: x }\n"),
         "handler.callback takes no settings: write handler: callback"},
        {consumer(std::string(kafka) + "    handler: calback\n"),
         "'calback' is neither callback (a function of a C++ program that links the library)"},
        {consumer(std::string(kafka) + database + "    strategy: state\n    handler: callback\n" +
                  state),
         "the declared transition is the whole effect"},
        {consumer(std::string(kafka) + "    handler: { http: { url: \"http://a\" }, ai: {} }\n"),
         "must name exactly one of http, sql, ai"},
        // database
        {consumer(std::string(kafka) + sql + "    strategy: transaction\n"),
         "database must name the database of this strategy"},
        {consumer(on_kafka + "    strategy: table\n"), "the store is none"},
        {consumer(on_kafka + database), "database has no effect under strategy: store"},
        {consumer(on_kafka + "    strategy: table\n    database: {}\n"),
         "must name exactly one of postgres, mysql"},
        {consumer(on_kafka +
                  "    strategy: table\n    database: { postgres: { url: \"mysql://h/d\" } }\n"),
         "database.postgres.url must be a URL that begins with postgresql://"},
        {consumer(std::string(kafka) + sql + database +
                  "    strategy: transaction\n    on_unknown: hold\n"),
         "the database always knows"},
        // source
        {consumer(http), "source must name exactly one of kafka, rabbitmq"},
        {consumer(std::string("    source: {}\n") + http), "exactly one of kafka, rabbitmq"},
        {consumer(std::string("    source: { kafka: { topics: [a], group: g } }\n") + http),
         "source.kafka.brokers must be"},
        {consumer(std::string("    source: { kafka: { brokers: b, topics: [], group: g } }\n") +
                  http),
         "topics must name at least one topic"},
        {consumer(std::string("    source: { kafka: { brokers: b, topics: [a, a], group: g } }\n") +
                  http),
         "'a' is given twice"},
        {consumer(std::string("    source: { kafka: { brokers: b, topics: a } }\n") + http),
         "group must be a name"},
        {consumer(std::string("    source: { rabbitmq: { url: \"http://h\", queue: q } }\n") +
                  http),
         "begins with amqp:// or amqps://"},
        {consumer(std::string("    source: { rabbitmq: { url: \"amqp://h\", queue: q, prefetch: 0 "
                              "} }\n") +
                  http),
         "would mean without bound"},
        {consumer(std::string("    source: { rabbitmq: { url: \"amqp://h\", queue: q, ca_file: c "
                              "} }\n") +
                  http),
         "ca_file is for TLS"},
        {consumer(std::string("    source: { rabbitmq: { url: \"amqp://h\", queue: q, declare: { "
                              "type: classic, delivery_limit: 3 } } }\n") +
                  http),
         "delivery_limit is for quorum queues"},
        // ids and values
        {consumer(on_kafka + "    id: { json: messageId }\n"), "'messageId' is no JSON pointer"},
        {consumer(on_kafka + "    id: { json: /a~2 }\n"), "is no JSON pointer"},
        {consumer(on_kafka + "    id: { json: /a, header: b }\n"), "a value comes from one place"},
        {consumer(on_kafka + "    id: {}\n"), "id must say where the value comes from"},
        {consumer(on_kafka + "    id: { property: message-id }\n"), "is for RabbitMQ"},
        {consumer(on_rabbitmq + "    id: { property: mesage-id }\n"),
         "is no property of AMQP; did you mean 'message-id'?"},
        {consumer(on_rabbitmq + "    id: { key: true }\n"), "messages of RabbitMQ have no key"},
        {consumer(on_rabbitmq + "    id: { offset: true }\n"), "delivery tags name no message"},
        {consumer(on_kafka + "    id: { offset: false }\n"), "write true, or remove it"},
        {consumer(on_rabbitmq + "    on_missing_id: offset\n"), "RabbitMQ has no offsets"},
        {consumer(on_kafka + "    id: { key: true, fingerprint: all }\n"),
         "is neither none nor a list of JSON pointers"},
        {consumer(on_kafka + "    id: { key: true, fingerprint: [] }\n"), "name what is compared"},
        {consumer(on_kafka + "    id: { key: true, fingerprint: [a] }\n"), "is no JSON pointer"},
        {consumer(on_kafka + "    payload: bytes\n    id: { json: /a }\n"),
         "a payload is never read as JSON"},
        {consumer(on_kafka + "    business_key: { offset: true }\n"),
         "unknown key 'offset' in consumers[0].business_key"},
        // ordering and waits
        {consumer(on_rabbitmq + "    ordering: partition\n"),
         "add declare: { single_active_consumer: true }"},
        {consumer(on_rabbitmq + "    ordering: key\n"), "messages of RabbitMQ have no key"},
        {consumer(std::string("    source: { rabbitmq: { url: \"amqp://h\", queue: q, declare: { "
                              "single_active_consumer: true } } }\n") +
                  http + "    ordering: partition\n"),
         "the queue is subscribed exclusively, which such a queue refuses"},
        {consumer(on_kafka + "    ordering: partition\n    retry: { delays: [1m] }\n"),
         "would stop its whole partition"},
        {consumer(on_rabbitmq + "    retry: { delays: [10m, 20m] }\n"),
         "may stay unacknowledged for 1954s, and after 30m the broker takes it back"},
        {consumer(on_rabbitmq + "    retry: { delays: [1h] }\n"),
         "or let delayed messages wait at the broker (retry.wait: broker)"},
        {consumer(on_rabbitmq +
                  "    retry: { wait: broker, backoff: { max: 30m }, delays: [1h] }\n"),
         "may stay unacknowledged for 1830s"},
        {consumer(on_kafka + "    retry: { delays: [1h], wait: broker }\n"),
         "a copy comes behind messages that are younger"},
        {consumer(on_kafka + "    ordering: none\n    retry: { wait: broker }\n"),
         "wait: broker has nothing to wait for"},
        {consumer(on_kafka + "    ordering: none\n    retry: { delays: [1h], create: true }\n"),
         "retry.create is for wait: broker"},
        {consumer(on_kafka + "    ordering: none\n    retry: { delays: [1h], wait: elsewhere }\n"),
         "'elsewhere'"},
        {consumer(on_rabbitmq + "    retry: { wait: store }\n"), "wait: store is for Kafka"},
        {consumer(on_kafka + "    retry: { wait: store }\n") + "store: { memory: {} }\n",
         "what waits there would be lost with the process"},
        {consumer(on_kafka + "    retry: { wait: store }\n    accept: unshared_store\n"),
         "another member would not find what waits"},
        {consumer(std::string(kafka) + state + database +
                  "    strategy: state\n    retry: { wait: store }\n"),
         "another member would not find what waits"},
        {consumer(on_kafka + "    retry: { wait: store, create: true }\n" + redis_store),
         "retry.create is for wait: broker"},
        {consumer(on_kafka + "    ordering: none\n    retry: { delays: [1h], wait: broker }\n"
                             "    dead_letter: { topic: orders.shop.retry.1h }\n"),
         "is where copies of this consumer wait"},
        {consumer(std::string("    source: { kafka: { brokers: b, topics: [\"^ord\"], group: g } "
                              "}\n") +
                  http +
                  "    ordering: none\n    retry: { delays: [1h], wait: broker }\n"
                  "    dead_letter: { topic: d }\n"),
         "'^ord' is a pattern"},
        {consumer(std::string("    source: { kafka: { brokers: b, topics: [a], group: g/h } }\n") +
                  http + "    ordering: none\n    retry: { delays: [1h], wait: broker }\n"),
         "'a.g/h.retry.1h', which is no name of a topic"},
        {consumer(on_rabbitmq + "    retry: { delays: [60d], wait: broker }\n"),
         "60d is longer than a queue of RabbitMQ can make a message wait"},
        {consumer(std::string(rabbitmq) +
                  "    handler: { http: { url: \"http://a\", timeout: 11m } }\n"),
         "consumer_timeout"},
        // dedup
        {consumer(on_kafka + "    dedup: { retention: 6d }\n"),
         "6d is shorter than 7d: a message that comes again later"},
        {consumer(on_kafka + "    dedup: { retention: 8d }\n    retry: { delays: [8d] }\n"),
         "8d is shorter than 9d"},
        {consumer(on_kafka + "    dedup: { retention: 1s }\n    accept: short_dedup\n"),
         "must be longer than engine.lease"},
        {consumer(on_kafka + "    dedup: { retention: soon }\n"), "is no duration"},
        {consumer(std::string(kafka) + state + database +
                  "    strategy: state\n    dedup: { retention: 9d }\n"),
         "the business table knows for ever"},
        // retry and the rest
        {consumer(on_kafka + "    retry: { attempts: 0 }\n"), "the first run counts"},
        {consumer(on_kafka + "    retry: { crashes: 0 }\n"), "crashes: write 1 or more"},
        {consumer(on_kafka + "    retry: { backoff: { initial: 2s, max: 1s } }\n"),
         "is shorter than backoff.initial"},
        {consumer(on_kafka + "    retry: { backoff: { factor: 0.5 } }\n"),
         "is not a number from 1 to 100"},
        {consumer(on_kafka + "    retry: { backoff: { jitter: nan } }\n"),
         "is not a number from 0 to 1"},
        {consumer(on_kafka + "    retry: { delays: [1m, 5] }\n"),
         "retry.delays: '5' is no duration"},
        {consumer(on_kafka + "    concurrency: 0\n"), "concurrency: write 1 or more"},
        {consumer(on_kafka + "    park_limit: 0\n"), "park_limit: write 1 or more"},
        {consumer(on_kafka + "    breaker: { dead_share: 0.5 }\n"),
         "is no share: write 1% to 100%"},
        {consumer(on_kafka + "    breaker: { dead_share: 101% }\n"), "is no share"},
        {consumer(on_kafka + "    accept: [everything]\n"),
         "'everything' is not one of short_dedup, unshared_store"},
        // dead letters
        {consumer(on_kafka + "    dead_letter: { topic: orders }\n"),
         "a dead letter would come again for ever"},
        {consumer(std::string("    source: { kafka: { brokers: b, topics: [\"^ord\"], group: g } "
                              "}\n") +
                  http + "    dead_letter: { topic: orders.dlq }\n"),
         "is one that this consumer reads (^ord)"},
        {consumer(std::string("    source: { kafka: { brokers: b, topics: [a, b], group: g } }\n") +
                  http),
         "must be named where there are several topics"},
        {consumer(on_rabbitmq + "    dead_letter: { queue: orders }\n"), "is the queue itself"},
        {consumer(on_rabbitmq + "    dead_letter: { topic: x }\n"), "topic is for Kafka"},
        {consumer(on_kafka + "    dead_letter: { queue: x }\n"), "queue is for RabbitMQ"},
        {consumer(on_rabbitmq + "    dead_letter: { queue: a, exchange: b }\n"), "one of them"},
        {consumer(on_rabbitmq + "    dead_letter: { exchange: b, create: true }\n"),
         "whoever binds queues to it"},
        {consumer(on_kafka + "    dead_letter: go\n"), "'go' is neither stop nor a map with topic"},
        // handlers
        {consumer(std::string(kafka) + "    handler: { http: {} }\n"),
         "handler.http.url must be http(s)://HOST"},
        {consumer(std::string(kafka) + database +
                  "    strategy: transaction\n    handler: { sql: {} }\n"),
         "statements must be a list of 1 to 64"},
        {consumer(std::string(kafka) + database +
                  "    strategy: transaction\n    handler: { sql: { statements: [\" ; \"] } }\n"),
         "statements[0] is no SQL statement"},
        {consumer(
             std::string(kafka) + database +
             "    strategy: transaction\n    handler: { sql: { statements: [ { sql: a, rows: 2 "
             "} ] } }\n"),
         "'2' is not one of 1, any, >=1"},
        {consumer(std::string(kafka) + ai), "there are no upstreams"},
        {consumer(std::string(kafka) + "    handler: { ai: { tenant: t, prompt: { json: /p } } }\n",
                  ai_upstream),
         "ai.model must be named"},
        {consumer(std::string(kafka) + "    handler: { ai: { tenant: t, model: m } }\n",
                  ai_upstream),
         "prompt must say where the prompt is"},
        {consumer(
             std::string(kafka) +
                 "    handler: { ai: { tenant: t, model: m, prompt: { json: /p }, on_duplicate: "
                 "republish } }\n",
             ai_upstream),
         "nothing is published without `result`"},
        {consumer(std::string(kafka) +
                      "    handler: { ai: { tenant: t, model: m, prompt: { json: /p } } }\n"
                      "    results: { topic: answers }\n",
                  ai_upstream),
         "handler ai says it inside handler.ai"},
        {consumer(std::string(kafka) + http + "    results: { on_duplicate: silent }\n"),
         "topic must be where results are published"},
        {consumer(std::string(kafka) + http + "    results: { queue: answers }\n"),
         "queue is for RabbitMQ"},
        {consumer(std::string(rabbitmq) + http + "    results: { topic: answers }\n"),
         "topic is for Kafka"},
        {consumer(std::string(rabbitmq) + http + "    results: { queue: a, exchange: b }\n"),
         "exchange stands beside queue"},
        {consumer(std::string(kafka) + http + "    results: { topic: orders }\n"),
         "is one that this consumer reads"},
        {consumer(std::string(kafka) + http +
                  "    dead_letter: { topic: dead }\n    results: { topic: dead }\n"),
         "is that of the dead letters"},
        {consumer(std::string(kafka) + "    strategy: transaction\n" + database + sql +
                  "    results: { topic: answers }\n"),
         "takes no part in the database's transaction"},
        {consumer(std::string(kafka) +
                      "    handler: { ai: { tenant: t, model: m, prompt: { json: /p }, result: { "
                      "topic: orders } } }\n",
                  ai_upstream),
         "is one that this consumer reads"},
        {consumer(std::string(kafka) + ai,
                  ai_upstream + "clients: [ { name: web, token_env: API_KEY } ]\n"),
         "'t' is none of the clients"},
        {consumer(std::string(kafka) + ai, ai_upstream + "routes: { /api/chat: { mode: off } }\n"),
         "would not be recorded"},
        // state
        {consumer(
             std::string(kafka) + database +
             "    strategy: state\n    state: { table: t, key: { column: c, value: { json: /a } "
             "}, status: s, from: [A], to: B, terminal: [C] }\n"),
         "terminal must contain the target state 'B'"},
        {consumer(
             std::string(kafka) + database +
             "    strategy: state\n    state: { table: t, key: { column: c, value: { json: /a } "
             "}, status: s, from: [A], to: B, terminal: [B, C] }\n"),
         "on_superseded must say what becomes of a message"},
        {consumer(
             std::string(kafka) + database +
             "    strategy: state\n    state: { table: t, key: { column: c, value: { json: /a } "
             "}, status: s, from: [A, B], to: B, terminal: [B] }\n"),
         "a duplicate could not be told"},
        {consumer(
             std::string(kafka) + database +
             "    strategy: state\n    state: { table: t, key: { column: c, value: { json: /a } "
             "}, status: s, from: [A], to: B, terminal: [A, B], on_superseded: ack }\n"),
         "is no end"},
        {consumer(std::string(kafka) + database +
                  "    strategy: state\n    state: { table: t, status: s, from: [A], to: B, "
                  "terminal: [B] }\n"),
         "state.key must say which row is meant"},
        // two of them
        {consumer(on_kafka) + "  - name: orders\n" + on_kafka, "two consumers are called 'orders'"},
        {consumer(on_kafka) + "  - name: other\n" + on_kafka, "read one topic in one group"},
        {consumer(on_rabbitmq) + "  - name: other\n" + on_rabbitmq, "read one queue"},
        {consumer(on_kafka + "    scope: s\n") + "  - name: other\n    scope: s\n" + on_rabbitmq,
         "have the same scope 's'"},
        // later
        {consumer(on_kafka + "    on_unknown: probe\n"),
         "'probe' is not supported by this version"},
        {consumer(on_kafka + "    dead_leter: stop\n"), "did you mean 'dead_letter'?"},
    };
    for (const Wrong& one : wrong) {
        const auto result = read(one.yaml);
        ASSERT_FALSE(result) << one.says << "\n" << one.yaml;
        EXPECT_NE(result.error().detail.find(one.says), std::string::npos)
            << result.error().detail << "\ninstead of: " << one.says << "\n"
            << one.yaml;
        EXPECT_TRUE(result.error().detail.starts_with("semel.yaml:")) << result.error().detail;
    }
}

TEST(ConsumerConfig, a_duration_is_written_back_in_its_largest_exact_unit) {
    EXPECT_EQ(duration_word(std::chrono::milliseconds{1500}), "1500ms");
    EXPECT_EQ(duration_word(std::chrono::seconds{90}), "90s");
    EXPECT_EQ(duration_word(std::chrono::hours{48}), "2d");
}

TEST(ConsumerConfig, a_declared_consumer_timeout_makes_room_for_longer_waits) {
    const Config config = accepted(consumer(
        std::string("    source: { rabbitmq: { url: \"amqp://h\", queue: q, consumer_timeout: 2h } "
                    "}\n") +
        http + "    retry: { delays: [1h] }\n"));
    EXPECT_EQ(config.consumers.at(0).rabbitmq->consumer_timeout, 2h);
    EXPECT_TRUE(read(consumer(
        std::string("    source: { rabbitmq: { url: \"amqp://h\", queue: q, consumer_timeout: 0 } "
                    "}\n") +
        http + "    retry: { delays: [100d] }\n")))
        << "0: the broker has none";
}

TEST(ConsumerConfig, copies_wait_beside_what_their_messages_came_from) {
    const std::string waits =
        "    retry: { delays: [90s, 1h, 1500ms, 1h], wait: broker, create: "
        "true }\n";
    const Config config = accepted(
        consumer(std::string("    source: { kafka: { brokers: b, topics: [a, b], group: g } }\n") +
                 http + "    ordering: none\n    dead_letter: { topic: d }\n" + waits));
    const ConsumerConfig& kafka_one = config.consumers.at(0);
    EXPECT_EQ(kafka_one.retry.wait, RetryWait::broker);
    EXPECT_TRUE(kafka_one.retry.create);
    EXPECT_EQ(copy_targets(kafka_one, "b"),
              (std::vector<std::string>{"b.g.retry.90s", "b.g.retry.1h", "b.g.retry.1500ms",
                                        "b.g.retry.1h"}));
    EXPECT_EQ(all_copy_targets(kafka_one),
              (std::vector<std::string>{"a.g.retry.90s", "a.g.retry.1h", "a.g.retry.1500ms",
                                        "b.g.retry.90s", "b.g.retry.1h", "b.g.retry.1500ms"}));
    const Config other = accepted(consumer(std::string(rabbitmq) + http + waits));
    EXPECT_EQ(all_copy_targets(other.consumers.at(0)),
              (std::vector<std::string>{"orders.orders.retry.90s", "orders.orders.retry.1h",
                                        "orders.orders.retry.1500ms"}))
        << "an hour at the broker is none in hand: consumer_timeout allows it";
    const Config in_hand =
        accepted(consumer(std::string(kafka) + http + "    retry: { delays: [1h] }\n"));
    EXPECT_EQ(in_hand.consumers.at(0).retry.wait, RetryWait::in_hand);
    EXPECT_TRUE(all_copy_targets(in_hand.consumers.at(0)).empty());
}

TEST(ConsumerConfig, what_fails_waits_beside_records_that_every_member_finds) {
    const std::string waits = "    retry: { delays: [1h], wait: store }\n";
    const Config one = accepted(consumer(std::string(kafka) + http + waits));
    EXPECT_EQ(one.consumers.at(0).retry.wait, RetryWait::store)
        << "a group of one, on the embedded store of its records";
    EXPECT_TRUE(read(consumer(std::string(kafka) + http + waits, redis_store)));
    EXPECT_TRUE(read(consumer(
        std::string(kafka) + state + database + "    strategy: state\n" + waits, redis_store)));
    EXPECT_TRUE(all_copy_targets(one.consumers.at(0)).empty());
}

TEST(ConsumerConfig, a_quorum_queue_that_may_drop_messages_is_told) {
    const auto warnings = [](const std::string& declare) {
        return accepted(
                   consumer("    source: { rabbitmq: { url: \"amqp://h\", queue: q, declare: " +
                            declare + " } }\n" + http))
            .warnings;
    };
    ASSERT_EQ(warnings("{ type: quorum }").size(), 1u);
    EXPECT_NE(warnings("{}").front().find("delivery_limit"), std::string::npos);
    EXPECT_TRUE(warnings("{ type: quorum, dead_letter_exchange: dead }").empty());
    EXPECT_TRUE(warnings("{ type: classic }").empty());
}

TEST(ConsumerConfig, passwords_of_sources_and_databases_enter_no_message) {
    const Config config = accepted(consumer(
        std::string(
            "    source: { rabbitmq: { url: \"amqp://semel:pw-plain@mq/\", queue: q } }\n") +
        http +
        "    strategy: table\n    database: { mysql: { url: \"mysql://u:pw-plain@db/shop\" } }\n"));
    EXPECT_EQ(config.consumers.at(0).rabbitmq->shown_url, "amqp://mq/");
    EXPECT_EQ(config.consumers[0].database->shown_url, "mysql://db/shop");
    ASSERT_EQ(config.warnings.size(), 2u);
    for (const std::string& warning : config.warnings) {
        EXPECT_NE(warning.find("a password stands in the file"), std::string::npos) << warning;
        EXPECT_EQ(warning.find("pw-plain"), std::string::npos) << warning;
    }
}

TEST(ConsumerConfig, a_pattern_takes_in_what_matches_it_and_a_name_itself_alone) {
    EXPECT_TRUE(takes_in("orders", "orders"));
    EXPECT_FALSE(takes_in("orders", "orders.dlq"));
    EXPECT_TRUE(takes_in("^orders", "orders.dlq"));
    EXPECT_FALSE(takes_in("^orders$", "orders.dlq"));
    EXPECT_FALSE(takes_in("^(", "anything")) << "the broker's library says what is wrong with it";
}

TEST(ConsumerConfig, the_reference_page_names_every_key) {
    const std::string in = "{ " + std::string(stray_key) + " }";
    const auto of_source = [&](const std::string& source) {
        return consumer("    source: " + source + "\n");
    };
    const auto of = [&](const std::string& key, const std::string& more = "") {
        return consumer(kafka + more + "    " + key + "\n");
    };
    EXPECT_GT(keys_on_the_reference_page(
                  {"consumers: [ " + in + " ]",
                   of_source(in),
                   of_source("{ kafka: " + in + " }"),
                   of_source("{ rabbitmq: " + in + " }"),
                   of_source("{ rabbitmq: { url: \"amqp://h\", queue: q, declare: " + in + " } }"),
                   of("id: " + in),
                   of("business_key: " + in),
                   of("handler: " + in),
                   of("handler: { http: " + in + " }"),
                   of("handler: { sql: " + in + " }"),
                   of("handler: { sql: { statements: [ " + in + " ] } }"),
                   of("handler: { ai: " + in + " }"),
                   of("handler: { ai: { tenant: t, prompt: { key: true }, result: " + in + " } }"),
                   of("state: " + in),
                   of("state: { table: t, key: " + in + " }"),
                   of("dedup: " + in),
                   of("retry: " + in),
                   of("retry: { backoff: " + in + " }"),
                   of("breaker: " + in),
                   of("dead_letter: " + in),
                   of("database: " + in),
                   of("database: { postgres: " + in + " }"),
                   of("database: { mysql: " + in + " }")}),
              80u);
}

}  // namespace
}  // namespace semel::config
