#include <algorithm>
#include <cctype>
#include <cmath>
#include <regex>

#include "config/consumer_reader.hpp"

namespace semel::config {

namespace {

using std::chrono::hours;

/// The longest x-message-ttl of RabbitMQ.
constexpr milliseconds queue_ttl_max{4'294'967'295};
/// Below it a done id is forgotten before people have looked at what came late.
constexpr milliseconds dedup_least{hours{24 * 7}};
/// On top of the last delay: for a redelivery that is itself late.
constexpr milliseconds dedup_margin{hours{24}};

std::string in_words(milliseconds duration) {
    static constexpr std::pair<const char*, std::int64_t> units[] = {
        {"d", 86'400'000}, {"h", 3'600'000}, {"m", 60'000}, {"s", 1000}};
    for (const auto& [unit, size] : units) {
        if (duration.count() >= size && duration.count() % size == 0)
            return std::to_string(duration.count() / size) + unit;
    }
    if (duration.count() < 1000) return std::to_string(duration.count()) + "ms";
    return std::to_string((duration.count() + 999) / 1000) + "s";
}

/// One directory, which one store alone can open, told to be opened in two ways.
bool at_odds(const StoreConfig& one, const StoreConfig& other) {
    return one.kind == StoreKind::rocksdb && other.kind == StoreKind::rocksdb &&
           one.path == other.path && one != other;
}
constexpr const char* two_ways =
    ".rocksdb: its directory is also that of another store of this file, with another durability; "
    "write the same, or name another directory";

milliseconds total(const std::vector<milliseconds>& delays) {
    milliseconds sum{0};
    for (const milliseconds delay : delays) sum += delay;
    return sum;
}

void check_mode(const Map& map, const ConsumerConfig& consumer) {
    if (!consumer.observe || consumer.kafka) return;
    map.refuse("mode",
               ": observe needs Kafka: a queue of RabbitMQ cannot be read without taking its "
               "messages away; bind a second queue to the same exchange, and read that one under "
               "mode: run with a handler that does nothing");
}

void check_handler(const Map& map, const ConsumerConfig& consumer) {
    const HandlerKind handler = consumer.handler.kind;
    // Who only looks need not know yet what is to be done.
    if (consumer.observe && handler == HandlerKind::none &&
        consumer.strategy != ConsumerStrategy::state)
        return;
    switch (consumer.strategy) {
        case ConsumerStrategy::store:
        case ConsumerStrategy::table:
            if (handler == HandlerKind::sql)
                map.refuse("handler",
                           ".sql: its statements and the record of the message would commit apart; "
                           "use strategy: transaction, where they commit together");
            if (handler == HandlerKind::none)
                map.refuse("handler",
                           " must name one of http, ai, or be callback: under this strategy it "
                           "makes the effect");
            if (handler == HandlerKind::ai && consumer.strategy == ConsumerStrategy::table)
                map.refuse("strategy",
                           ": handler ai keeps its records where /api/chat does, so that one id is "
                           "one turn whichever way it comes; use strategy: store");
            break;
        case ConsumerStrategy::transaction:
            if (handler == HandlerKind::http || handler == HandlerKind::ai)
                map.refuse("handler",
                           ": what a service elsewhere does is no part of the database's "
                           "transaction; use strategy: table or store, or handler: sql");
            if (handler == HandlerKind::none)
                map.refuse("handler",
                           " must name sql, whose statements are the effect, or be callback");
            break;
        case ConsumerStrategy::state:
            if (handler != HandlerKind::none)
                map.refuse("handler",
                           ": under strategy: state the declared transition is the whole "
                           "effect; remove it, or use strategy: transaction");
            if (map.find("state") == nullptr)
                map.refuse("state", " must say table, key, status, from, to and terminal");
            break;
    }
    if (consumer.strategy != ConsumerStrategy::state && map.find("state") != nullptr)
        map.refuse("state", " is for strategy: state; remove it, or say so");
}

void check_database(const Map& map, const ConsumerConfig& consumer) {
    if (consumer.strategy == ConsumerStrategy::store) {
        if (map.find("database") != nullptr)
            map.refuse("database",
                       " has no effect under strategy: store, whose records are in "
                       "`store`; remove it, or use strategy: table, transaction or "
                       "state");
        return;
    }
    if (!consumer.database)
        map.refuse("database",
                   " must name the database of this strategy, postgres or mysql: the "
                   "store is none");
    const bool in_transactions = consumer.strategy != ConsumerStrategy::table;
    if (in_transactions && consumer.hold_unknown)
        map.refuse("on_unknown",
                   ": hold has no meaning under this strategy: the database always "
                   "knows whether the effect happened; remove it");
}

/// What Kafka takes as the name of a topic.
bool is_topic_name(const std::string& name) {
    constexpr std::size_t topic_name_max = 249;
    return name.size() <= topic_name_max &&
           std::all_of(name.begin(), name.end(), [](unsigned char c) {
               return std::isalnum(c) != 0 || c == '.' || c == '_' || c == '-';
           });
}

void check_copies(const Map& map, const ConsumerConfig& consumer) {
    if (consumer.retry.wait != RetryWait::broker) {
        if (consumer.retry.create)
            map.refuse("retry",
                       ".create is for wait: broker, which needs topics or queues; remove it");
        return;
    }
    if (consumer.retry.delays.empty())
        map.refuse("retry",
                   ".wait: broker has nothing to wait for: waits between runs in place are always "
                   "in hand; name delays, or remove it");
    if (consumer.ordering != Ordering::none)
        map.refuse("retry",
                   ".wait: broker: a copy comes behind messages that are younger, so no order "
                   "would hold; say ordering: none if that is all right, or wait: in_hand");
    if (consumer.handler.kind == HandlerKind::ai)
        map.refuse("retry",
                   ".wait: broker: failed turns of handler ai are counted in the process, and a "
                   "copy that another one takes would be counted anew; use wait: in_hand");
    if (consumer.kafka) {
        for (const std::string& topic : consumer.kafka->topics) {
            if (topic.starts_with('^'))
                map.refuse("retry",
                           ".wait: broker needs topics by their names, each of which has topics "
                           "of copies beside it: " +
                               quoted(topic) + " is a pattern; name them, or use wait: in_hand");
        }
    }
    for (const std::string& target : all_copy_targets(consumer)) {
        if (consumer.kafka && !is_topic_name(target))
            map.refuse("retry", ".wait: broker: copies would wait in " + quoted(target) +
                                    ", which is no name of a topic (letters, digits, '.', '_', "
                                    "'-', at most 249); change source.kafka.group");
        if (consumer.rabbitmq && target.size() > name_max_bytes)
            map.refuse("retry", ".wait: broker: copies would wait in " + quoted(target) +
                                    ", which is too long for the name of a queue (255); shorten "
                                    "the consumer's name");
        if (!consumer.dead_letter.stop &&
            target == (consumer.kafka ? consumer.dead_letter.topic : consumer.dead_letter.queue))
            map.refuse("dead_letter", ": " + quoted(target) +
                                          " is where copies of this consumer wait (retry.wait: "
                                          "broker); name another");
    }
    for (const milliseconds delay : consumer.retry.delays) {
        if (consumer.rabbitmq && delay > queue_ttl_max)
            map.refuse("retry", ".delays: " + in_words(delay) +
                                    " is longer than a queue of RabbitMQ can make a message wait "
                                    "(49 d)");
    }
}

/// What waits beside the records is found by the next owner of its partition, wherever that runs.
void check_parking(const Map& map, const ConsumerConfig& consumer, const Config& config) {
    if (consumer.retry.wait != RetryWait::store) return;
    if (consumer.rabbitmq)
        map.refuse("retry",
                   ".wait: store is for Kafka, whose positions say where a message lay; on "
                   "RabbitMQ use wait: broker or wait: in_hand");
    const bool own_records = consumer.strategy == ConsumerStrategy::store;
    const StoreConfig& store = store_of(consumer, config);
    if (store.kind == StoreKind::memory)
        map.refuse("retry",
                   ".wait: store: the store is memory, and what waits there would be lost with the "
                   "process; use another store, or wait: in_hand");
    if (!store.shared() && (!own_records || consumer.handler.kind == HandlerKind::ai ||
                            consumer.accepts(Accept::unshared_store)))
        map.refuse(
            "retry",
            ".wait: store needs a store that every member of the group sees (redis, "
            "postgres or mysql): another member would not find what waits; use one, or wait: "
            "in_hand");
}

void check_ordering(const Map& map, const ConsumerConfig& consumer) {
    if (consumer.ordering == Ordering::partition && !consumer.retry.delays.empty())
        map.refuse("retry",
                   ".delays: under ordering: partition a delayed message would stop its "
                   "whole partition for so long; remove the delays, or use ordering: key");
    if (!consumer.rabbitmq || consumer.ordering == Ordering::none) return;
    if (consumer.ordering == Ordering::key)
        map.refuse("ordering",
                   ": messages of RabbitMQ have no key; use partition (the whole queue "
                   "in order) or none");
    if (!consumer.rabbitmq->single_active_consumer)
        map.refuse(
            "ordering",
            ": on RabbitMQ an order holds only while one consumer at a time gets the queue's "
            "messages; add declare: { single_active_consumer: true } to source.rabbitmq, or "
            "use ordering: none");
}

void check_store(const Map& map, const ConsumerConfig& consumer, const Config& config) {
    if (!consumer.store) return;
    if (consumer.strategy != ConsumerStrategy::store)
        map.refuse("store",
                   " is for strategy: store; under this strategy the records are in the "
                   "consumer's `database`; remove it");
    if (consumer.handler.kind == HandlerKind::ai)
        map.refuse("store",
                   ": handler ai keeps its records where /api/chat does, so that one id is one "
                   "turn whichever way it comes; remove it");
    if (at_odds(*consumer.store, config.store)) map.refuse("store", two_ways);
}

/// How long a message may stay unsettled: all its runs, and the waits between them, in hand.
milliseconds longest(const ConsumerConfig& consumer, const Config& config) {
    const RetryConfig& retry = consumer.retry;
    milliseconds of_one{0};
    if (consumer.handler.kind == HandlerKind::http) of_one = consumer.handler.http.timeout;
    if (consumer.handler.kind == HandlerKind::ai)
        of_one = config.routes.at("/api/chat").join_timeout;
    // At the broker a delay ends the message's stay.
    const bool away = retry.wait == RetryWait::broker;
    milliseconds sum = of_one * retry.attempts;
    if (!away) sum += of_one * retry.delays.size() + total(retry.delays);
    double wait = static_cast<double>(retry.initial.count());
    for (std::uint32_t i = 1; i < retry.attempts; ++i) {
        const double bounded = std::min(wait, static_cast<double>(retry.max.count()));
        sum += milliseconds(static_cast<std::int64_t>(std::ceil(bounded * (1 + retry.jitter))));
        wait *= retry.factor;
    }
    // Its copy stays for one run, and for what a handler asked for beyond the delay.
    if (away) sum = std::max<milliseconds>(sum, of_one + retry.max);
    return sum;
}

void check_rabbitmq(const Map& map, const ConsumerConfig& consumer, const Config& config) {
    if (!consumer.rabbitmq) return;
    const milliseconds allowed = consumer.rabbitmq->consumer_timeout;
    const milliseconds needed = longest(consumer, config);
    if (allowed.count() > 0 && needed >= allowed)
        map.refuse("source",
                   ".rabbitmq.consumer_timeout: with its retries a message may stay "
                   "unacknowledged for " +
                       in_words(needed) + ", and after " + in_words(allowed) +
                       " the broker takes it back and closes the channel; raise "
                       "consumer_timeout on the broker and say the figure here, or " +
                       (consumer.ordering == Ordering::none && !consumer.retry.delays.empty() &&
                                consumer.retry.wait == RetryWait::in_hand &&
                                consumer.handler.kind != HandlerKind::ai
                            ? "let delayed messages wait at the broker (retry.wait: broker), or "
                            : "") +
                       "shorten retry or the handler's timeout");
    const bool unshared = consumer.strategy == ConsumerStrategy::store &&
                          !store_of(consumer, config).shared() &&
                          consumer.handler.kind != HandlerKind::ai;
    if (unshared && consumer.rabbitmq->single_active_consumer &&
        !consumer.accepts(Accept::unshared_store))
        map.refuse("source",
                   ".rabbitmq.declare.single_active_consumer: on a store that is not "
                   "shared the queue is subscribed exclusively, which such a queue "
                   "refuses; use redis, postgres or mysql as the store, or accept: "
                   "[unshared_store] if no other process ever takes from the queue");
}

void check_letters(const Map& map, const ConsumerConfig& consumer) {
    const DeadLetterConfig& letters = consumer.dead_letter;
    if (consumer.rabbitmq) {
        if (!letters.stop && letters.queue == consumer.rabbitmq->queue)
            map.refuse("dead_letter",
                       ".queue is the queue itself: a dead letter would come again "
                       "for ever; name another");
        return;
    }
    for (const std::string& topic : consumer.kafka->topics) {
        if (!letters.stop && !letters.topic.empty() && takes_in(topic, letters.topic))
            map.refuse("dead_letter",
                       ": the topic " + quoted(letters.topic) +
                           " is one that this consumer reads (" + topic +
                           "): a dead letter would come again for ever; name another");
    }
}

void check_results(const Map& map, const ConsumerConfig& consumer) {
    const ResultsConfig& results = consumer.handler.results;
    if (!results.any()) return;
    const bool ai = consumer.handler.kind == HandlerKind::ai;
    const char* const key = ai ? "handler" : "results";
    const std::string inside = ai ? ".ai.result" : "";
    if (consumer.strategy == ConsumerStrategy::transaction ||
        consumer.strategy == ConsumerStrategy::state)
        map.refuse(key,
                   ": under this strategy nothing is answered: a broker takes no part in the "
                   "database's transaction. Write what is to be sent into a table in that "
                   "transaction, and let a connector send it (an outbox), or use strategy: store "
                   "or table");
    if (consumer.rabbitmq && results.queue == consumer.rabbitmq->queue)
        map.refuse(key, inside + ".queue is the queue itself; name another");
    if (consumer.rabbitmq && results.queue == consumer.dead_letter.queue && !results.queue.empty())
        map.refuse(key, inside + ".queue is that of the dead letters; name another");
    if (!consumer.kafka) return;
    for (const std::string& topic : consumer.kafka->topics) {
        if (takes_in(topic, results.topic))
            map.refuse(key, inside + ".topic: " + quoted(results.topic) +
                                " is one that this consumer reads; name another");
    }
    if (results.topic == consumer.dead_letter.topic)
        map.refuse(key, inside + ".topic is that of the dead letters; name another");
}

void check_dedup(const Map& map, const ConsumerConfig& consumer, const Config& config) {
    if (!consumer.retention) return;
    if (consumer.strategy == ConsumerStrategy::state)
        map.refuse("dedup",
                   ".retention has no meaning under strategy: state, where the business "
                   "table knows for ever; remove it");
    const milliseconds least = std::max(dedup_least, total(consumer.retry.delays) + dedup_margin);
    if (*consumer.retention < least && !consumer.accepts(Accept::short_dedup))
        map.refuse("dedup",
                   ".retention: " + in_words(*consumer.retention) + " is shorter than " +
                       in_words(least) +
                       ": a message that comes again later than that would have its effect "
                       "twice; lengthen it, write auto, or accept: [short_dedup]");
    if (*consumer.retention <= config.engine.lease)
        map.refuse("dedup",
                   ".retention must be longer than engine.lease: a record must outlive the "
                   "run that writes it");
}

void check_ai(const Map& map, const ConsumerConfig& consumer, const Config& config) {
    if (consumer.handler.kind != HandlerKind::ai) return;
    if (config.upstreams.empty())
        map.refuse("handler", ".ai: there are no upstreams, so nothing could be asked; name one");
    if (consumer.handler.ai.model.empty() && config.routes.at("/api/chat").model.empty())
        map.refuse("handler", ".ai.model must be named, here or as routes./api/chat.model");
    const auto named = [&](const ClientConfig& client) {
        return client.name == consumer.handler.ai.tenant;
    };
    if (!config.clients.empty() &&
        std::none_of(config.clients.begin(), config.clients.end(), named))
        map.refuse("handler", ".ai.tenant: " + quoted(consumer.handler.ai.tenant) +
                                  " is none of the clients; a turn belongs to one of them, so that "
                                  "it is the same turn over HTTP");
    if (config.routes.at("/api/chat").mode != Mode::on)
        map.refuse("handler",
                   ".ai: routes./api/chat.mode is not `on`, so turns would not be "
                   "recorded");
}

bool overlap(const KafkaSourceConfig& one, const KafkaSourceConfig& other) {
    for (const std::string& mine : one.topics) {
        for (const std::string& theirs : other.topics) {
            if (mine == theirs || takes_in(mine, theirs) || takes_in(theirs, mine)) return true;
        }
    }
    return false;
}

}  // namespace

std::string duration_word(milliseconds duration) {
    static constexpr std::pair<const char*, std::int64_t> units[] = {
        {"d", 86'400'000}, {"h", 3'600'000}, {"m", 60'000}, {"s", 1000}};
    for (const auto& [unit, size] : units) {
        if (duration.count() >= size && duration.count() % size == 0)
            return std::to_string(duration.count() / size) + unit;
    }
    return std::to_string(duration.count()) + "ms";
}

std::vector<std::string> copy_targets(const ConsumerConfig& consumer, const std::string& topic) {
    const std::string before =
        topic + "." + (consumer.kafka ? consumer.kafka->group : consumer.name) + ".retry.";
    std::vector<std::string> out;
    for (const milliseconds delay : consumer.retry.delays)
        out.push_back(before + duration_word(delay));
    return out;
}

std::vector<std::string> all_copy_targets(const ConsumerConfig& consumer) {
    std::vector<std::string> out;
    if (consumer.retry.wait != RetryWait::broker || consumer.observe) return out;
    const std::vector<std::string> topics =
        consumer.kafka ? consumer.kafka->topics : std::vector{consumer.rabbitmq->queue};
    for (const std::string& topic : topics) {
        for (std::string& one : copy_targets(consumer, topic)) {
            if (std::find(out.begin(), out.end(), one) == out.end()) out.push_back(std::move(one));
        }
    }
    return out;
}

bool takes_in(const std::string& topic, const std::string& name) {
    if (topic == name) return true;
    if (!topic.starts_with('^')) return false;
    try {
        return std::regex_search(name, std::regex(topic, std::regex::extended));
    } catch (const std::regex_error&) {  // the broker's library knows more, and says what is wrong
        return false;
    }
}

void check_consumer(const Map& map, const ConsumerConfig& consumer, const Config& config) {
    check_mode(map, consumer);
    check_handler(map, consumer);
    check_store(map, consumer, config);
    check_database(map, consumer);
    check_ordering(map, consumer);
    check_copies(map, consumer);
    check_parking(map, consumer, config);
    check_letters(map, consumer);
    check_results(map, consumer);
    check_dedup(map, consumer, config);
    check_ai(map, consumer, config);
    check_rabbitmq(map, consumer, config);
}

void check_beside(const Map& map, const ConsumerConfig& consumer, const ConsumerConfig& other) {
    if (consumer.name == other.name)
        map.refuse("name", ": two consumers are called " + quoted(consumer.name));
    if (consumer.store && other.store && at_odds(*consumer.store, *other.store))
        map.refuse("store", two_ways);
    if (consumer.observe || other.observe) return;  // who only looks is in nobody's way
    if (consumer.scope == other.scope)
        map.refuse("scope", ": consumers " + quoted(other.name) + " and " + quoted(consumer.name) +
                                " have the same scope " + quoted(consumer.scope) +
                                ": what one has done the other would take for a duplicate; name "
                                "another");
    if (consumer.kafka && other.kafka && consumer.kafka->group == other.kafka->group &&
        consumer.kafka->brokers == other.kafka->brokers && overlap(*consumer.kafka, *other.kafka))
        map.refuse("source",
                   ".kafka.group: consumers " + quoted(other.name) + " and " +
                       quoted(consumer.name) +
                       " read one topic in one group, so each partition would go to one of "
                       "them only; name another group");
    if (consumer.rabbitmq && other.rabbitmq && consumer.rabbitmq->url == other.rabbitmq->url &&
        consumer.rabbitmq->queue == other.rabbitmq->queue)
        map.refuse("source", ".rabbitmq.queue: consumers " + quoted(other.name) + " and " +
                                 quoted(consumer.name) +
                                 " read one queue, so each message would go to one of them only; "
                                 "bind a queue of its own to the exchange");
}

}  // namespace semel::config
