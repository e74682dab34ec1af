#include "config/consumers.hpp"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <utility>

#include "config/consumer_parts.hpp"
#include "config/consumer_reader.hpp"
#include "config/stores.hpp"

namespace semel::config {

namespace {

constexpr unsigned concurrency_max = 10'000;
/// Of RabbitMQ, where nothing is written.
constexpr std::size_t prefetch_least = 100;
constexpr std::size_t prefetch_of_statements = 1000;
static_assert(2 * concurrency_max <= std::numeric_limits<std::uint16_t>::max());
constexpr std::uint32_t runs_max = 1000;
constexpr std::size_t delays_max = 32;
constexpr std::size_t park_limit_max = 10'000'000;
constexpr milliseconds one_ms{1};

RetryConfig read_retry(const Map& map) {
    RetryConfig retry;
    map.read_count<std::uint32_t>("attempts", retry.attempts, runs_max);
    if (retry.attempts == 0) map.refuse("attempts", ": the first run counts; write 1 or more");
    map.read_count<std::uint32_t>("crashes", retry.crashes, runs_max);
    if (retry.crashes == 0) map.refuse("crashes", ": write 1 or more");
    if (const YAML::Node* at = map.find("backoff")) {
        const Map backoff(map.document(), *at, map.path("backoff"),
                          {"initial", "factor", "max", "jitter"});
        backoff.read("initial", retry.initial, one_ms);
        backoff.read_number("factor", retry.factor, 1, 100);
        if (backoff.find("max") == nullptr) retry.max = std::max(retry.max, retry.initial);
        backoff.read("max", retry.max, one_ms);
        if (retry.max < retry.initial)
            backoff.refuse("max", " is shorter than backoff.initial; lengthen it");
        backoff.read_number("jitter", retry.jitter, 0, 1);
    }
    for (const YAML::Node& item : map.items("delays"))
        retry.delays.push_back(map.duration_of(item, map.path("delays"), one_ms, duration_max));
    if (retry.delays.size() > delays_max) map.refuse("delays", " has more than 32 entries");
    map.read("wait", retry.wait,
             {{"in_hand", RetryWait::in_hand},
              {"broker", RetryWait::broker},
              {"store", RetryWait::store}});
    map.read("create", retry.create);
    return retry;
}

DeadLetterConfig read_dead_letter(const Map& map, const ConsumerConfig& consumer) {
    DeadLetterConfig letters;
    const YAML::Node* node = map.find("dead_letter");
    if (node != nullptr && node->IsScalar()) {
        const std::string word = map.document().text(*node, map.path("dead_letter"));
        if (word != "stop")
            map.refuse("dead_letter", ": " + quoted(word) + " is neither stop nor a map with " +
                                          (consumer.kafka ? "topic" : "queue or exchange"));
        letters.stop = true;
        return letters;
    }
    if (node != nullptr) {
        static constexpr std::initializer_list<std::string_view> keys{"topic",  "queue", "exchange",
                                                                      "create", "body",  "headers"};
        const Map target(map.document(), *node, map.path("dead_letter"), keys);
        read_target(target, consumer.kafka.has_value(), "letters", letters.topic, letters.queue,
                    letters.exchange);
        target.read("create", letters.create);
        if (letters.create && !letters.exchange.empty())
            target.refuse("create",
                          ": an exchange is made by whoever binds queues to it; make it, or "
                          "name a queue");
        target.read("body", letters.body,
                    {{"raw", LetterBody::raw}, {"envelope", LetterBody::envelope}});
        target.read("headers", letters.headers,
                    {{"spring", LetterHeaders::spring}, {"none", LetterHeaders::none}});
    }
    if (consumer.rabbitmq) {
        if (letters.queue.empty() && letters.exchange.empty())
            letters.queue = consumer.rabbitmq->queue + ".dlq";
        return letters;
    }
    if (letters.topic.empty()) {
        const auto& topics = consumer.kafka->topics;
        const bool several = topics.size() > 1 || topics.front().starts_with('^');
        if (several && consumer.observe) return letters;  // none are written
        if (several)
            map.refuse("dead_letter",
                       ".topic must be named where there are several topics or a "
                       "pattern: the default <topic>.<group>.dlq is for one topic");
        letters.topic = topics.front() + "." + consumer.kafka->group + ".dlq";
    }
    return letters;
}

void read_share(const Map& map, std::string_view key, double& into) {
    const YAML::Node* at = map.find(key);
    if (at == nullptr) return;
    const std::string text = map.document().text(*at, map.path(key));
    unsigned percent = 0;
    const bool sign = text.size() > 1 && text.back() == '%';
    const std::string_view digits = std::string_view(text).substr(0, text.size() - (sign ? 1 : 0));
    const auto [after, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), percent);
    if (!sign || error != std::errc() || after != digits.data() + digits.size() || percent > 100)
        map.refuse(key, ": " + quoted(text) + " is no share: write 1% to 100%, or 0% for never");
    into = percent / 100.0;
}

std::set<Accept> read_accepted(const Map& map) {
    std::set<Accept> accepted;
    for (const YAML::Node& item : map.items("accept", true)) {
        const std::string word = map.document().text(item, map.path("accept"));
        if (word == "short_dedup") {
            accepted.insert(Accept::short_dedup);
        } else if (word == "unshared_store") {
            accepted.insert(Accept::unshared_store);
        } else {
            map.document().refuse(item, map.path("accept") + ": " + quoted(word) +
                                            " is not one of short_dedup, unshared_store");
        }
    }
    return accepted;
}

void read_dedup(const Map& map, ConsumerConfig& consumer) {
    std::string text = "auto";
    if (const YAML::Node* at = map.find("retention"); at != nullptr && at->IsScalar())
        text = map.document().text(*at, map.path("retention"));
    if (text != "auto") {
        milliseconds retention{0};
        map.read("retention", retention, one_ms);
        consumer.retention = retention;
    }
    map.read("dead", consumer.retention_dead, one_ms);
}

constexpr std::initializer_list<std::string_view> consumer_keys{
    "name",     "source",        "scope",        "id",          "business_key",
    "payload",  "strategy",      "database",     "handler",     "state",
    "ordering", "concurrency",   "dedup",        "retry",       "on_unknown",
    "breaker",  "dead_letter",   "park_limit",   "accept",      "mode",
    "store",    "on_missing_id", "on_tombstone", "on_mismatch", "results"};

/// What runs is taken from what has arrived, and what waits here for its turn can be taken by
/// nobody else: a turn with a model takes long, statements of a database come in batches.
std::uint16_t usual_prefetch(const ConsumerConfig& consumer) {
    const std::size_t twice = 2 * std::size_t{consumer.concurrency};
    if (consumer.handler.kind == HandlerKind::ai) return static_cast<std::uint16_t>(twice);
    const bool statements = consumer.strategy == ConsumerStrategy::transaction ||
                            consumer.strategy == ConsumerStrategy::state;
    return static_cast<std::uint16_t>(
        std::max(statements ? prefetch_of_statements : prefetch_least, twice));
}

ConsumerConfig read_consumer(const Map& map, Config& config) {
    ConsumerConfig consumer;
    consumer.line = map.node().Mark().line + 1;
    consumer.name = map.required_name("name");
    map.read("mode", consumer.observe, {{"run", false}, {"observe", true}});
    read_source(map, consumer, config.warnings);
    map.read("payload", consumer.payload, {{"json", Payload::json}, {"bytes", Payload::bytes}});
    const Messages messages{.kafka = consumer.kafka.has_value(), .payload = consumer.payload};
    consumer.scope = consumer.group() + "/" + consumer.name;
    if (map.find("scope") != nullptr) {
        consumer.scope = map.required_name("scope");
    } else if (consumer.scope.size() > name_max_bytes) {
        map.refuse("scope", " must be given: <group>/<name> has more than 255 characters");
    }
    read_id(map, consumer, messages);
    if (map.find("business_key") != nullptr)
        consumer.business_key = read_value(map, "business_key", messages);
    map.read("strategy", consumer.strategy,
             {{"store", ConsumerStrategy::store},
              {"redis", ConsumerStrategy::store},
              {"table", ConsumerStrategy::table},
              {"transaction", ConsumerStrategy::transaction},
              {"state", ConsumerStrategy::state}});
    if (map.find("store") != nullptr) consumer.store = read_store(map, config.warnings);
    if (const YAML::Node* at = map.find("strategy");
        at != nullptr && at->Scalar() == "redis" &&
        store_of(consumer, config).kind != StoreKind::redis)
        map.refuse("strategy",
                   ": redis is another word for store where the store is Redis, and here "
                   "it is not: write store, or configure store.redis");
    if (consumer.strategy != ConsumerStrategy::store || map.find("database") != nullptr)
        consumer.database = read_database(map, config.store, config.warnings);
    consumer.handler = read_handler(map, messages);
    if (const YAML::Node* at = map.find("results")) {
        if (consumer.handler.kind == HandlerKind::ai)
            map.refuse("results",
                       ": handler ai says it inside handler.ai, as result and on_duplicate");
        consumer.handler.results = read_results(Map(map.document(), *at, map.path("results"),
                                                    {"topic", "queue", "exchange", "on_duplicate"}),
                                                messages);
    }
    if (const YAML::Node* at = map.find("state")) {
        consumer.state = read_state(Map(map.document(), *at, map.path("state"),
                                        {"table", "key", "status", "version", "message_id_column",
                                         "from", "to", "terminal", "set", "on_superseded"}),
                                    messages);
    }
    consumer.ordering = messages.kafka ? Ordering::key : Ordering::none;
    map.read(
        "ordering", consumer.ordering,
        {{"partition", Ordering::partition}, {"key", Ordering::key}, {"none", Ordering::none}});
    map.read_count<unsigned>("concurrency", consumer.concurrency, concurrency_max);
    if (consumer.concurrency == 0) map.refuse("concurrency", ": write 1 or more");
    if (consumer.rabbitmq && consumer.rabbitmq->prefetch == 0)
        consumer.rabbitmq->prefetch = usual_prefetch(consumer);
    if (const YAML::Node* at = map.find("dedup"))
        read_dedup(Map(map.document(), *at, map.path("dedup"), {"retention", "dead"}), consumer);
    if (const YAML::Node* at = map.find("retry"))
        consumer.retry =
            read_retry(Map(map.document(), *at, map.path("retry"),
                           {"attempts", "crashes", "backoff", "delays", "wait", "create"}));
    map.read("on_unknown", consumer.hold_unknown, {{"rerun", false}, {"hold", true}}, {"probe"});
    if (const YAML::Node* at = map.find("breaker"))
        read_share(Map(map.document(), *at, map.path("breaker"), {"dead_share"}), "dead_share",
                   consumer.breaker_dead_share);
    consumer.dead_letter = read_dead_letter(map, consumer);
    map.read_count<std::size_t>("park_limit", consumer.park_limit, park_limit_max);
    if (consumer.park_limit == 0) map.refuse("park_limit", ": write 1 or more");
    consumer.accept = read_accepted(map);
    check_consumer(map, consumer, config);
    return consumer;
}

}  // namespace

std::vector<ConsumerConfig> read_consumers(const Map& root, Config& config) {
    std::vector<ConsumerConfig> consumers;
    for (const YAML::Node& item : root.items("consumers")) {
        const Map map(root.document(), item, "consumers[" + std::to_string(consumers.size()) + "]",
                      consumer_keys);
        ConsumerConfig consumer = read_consumer(map, config);
        for (const ConsumerConfig& other : consumers) check_beside(map, consumer, other);
        consumers.push_back(std::move(consumer));
    }
    return consumers;
}

}  // namespace semel::config
