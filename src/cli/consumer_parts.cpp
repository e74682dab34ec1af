#include "cli/consumer_parts.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>

#include "cli/consumer_outlook.hpp"
#include "cli/guarantees.hpp"
#include "cli/intent_of.hpp"
#include "consumer/handlers/http.hpp"
#include "consumer/strategies/recorded.hpp"
#include "consumer/strategies/state.hpp"
#include "consumer/strategies/transaction.hpp"
#include "inbox/dedup_table.hpp"

namespace semel::cli {

namespace {

using config::ConsumerConfig;
using config::ConsumerStrategy;
using config::HandlerKind;
using std::chrono::milliseconds;

/// How long a group of one is asked about before its member gives up.
constexpr milliseconds group_patience{30'000};

consumer::RetryRules rules_of(const config::RetryConfig& retry) {
    return {.attempts = retry.attempts,
            .crashes = retry.crashes,
            .initial = retry.initial,
            .factor = retry.factor,
            .max = retry.max,
            .jitter = retry.jitter,
            .delays = retry.delays,
            .exact_delays = retry.wait == config::RetryWait::broker};
}

consumer::CopyRules copy_rules(const ConsumerConfig& config) {
    consumer::CopyRules rules{.kafka = config.kafka.has_value(),
                              .delays = config.retry.delays,
                              .targets = {},
                              .in_hand_max = config.retry.max};
    const auto topics = config.kafka ? config.kafka->topics : std::vector{config.rabbitmq->queue};
    for (const std::string& topic : topics) {
        const std::vector<std::string> targets = config::copy_targets(config, topic);
        rules.targets[topic] = targets;
        if (!config.kafka) continue;
        for (const std::string& target : targets) rules.targets[target] = targets;
    }
    return rules;
}

std::string host_name() {
    std::array<char, 256> name{};
    if (::gethostname(name.data(), name.size() - 1) != 0) return "?";
    return name.data();
}

/// Puts the parts of one consumer together.
class Assembly {
  public:
    Assembly(const ConsumersAround& around, const ConsumerConfig& config, milliseconds retention,
             consumer::ConsumerCounters& counters)
        : around_(around), config_(config), retention_(retention), counters_(counters) {}

    base::Result<void> make(ConsumerParts& parts);
    /// mode: observe.
    base::Result<void> observe(ConsumerParts& parts, consumer::ObserverCounters& counters);

  private:
    [[nodiscard]] consumer::IdentityRules identity() const;
    /// Where strategy store keeps its records, and any strategy what waits beside them.
    [[nodiscard]] RecordStore record_store() const {
        if (const RecordStore* const own = around_.own_stores->of(config_)) return *own;
        return {.store = &around_.store,
                .secret = &around_.secret,
                .vault = &around_.vault,
                .id = around_.store_id};
    }
    base::Result<void> make_strategy(ConsumerParts& parts);
    /// Makes parts.results; the records are there.
    void make_results(ConsumerParts& parts, milliseconds retention) const;

    const ConsumersAround& around_;
    const ConsumerConfig& config_;
    milliseconds retention_;  ///< Of a message that is done.
    consumer::ConsumerCounters& counters_;
};

void Assembly::make_results(ConsumerParts& parts, milliseconds retention) const {
    const config::ResultsConfig& config = config_.handler.results;
    if (!config.any()) return;
    brokers::Publisher* const publisher = parts.publisher.get();
    brokers::Outgoing form;
    if (config_.kafka) {
        form.topic = config.topic;
    } else {
        form.topic = config.exchange.empty() ? config.queue : config_.rabbitmq->queue;
        form.properties.exchange = config.exchange;
    }
    const bool kafka = config_.kafka.has_value();
    auto publish = [publisher, form, kafka](std::string id, consumer::HandlerAnswerPtr answer,
                                            std::function<void(base::Result<void>)> done) {
        brokers::Outgoing message = form;
        message.value = answer->body;
        const std::string type =
            answer->content_type.empty() ? "application/octet-stream" : answer->content_type;
        if (kafka) {
            message.key = id;
            message.headers.push_back({"message-id", std::move(id)});
            message.headers.push_back({"content-type", type});
        } else {
            message.properties.message_id = std::move(id);
            message.properties.content_type = type;
        }
        for (const auto& [name, value] : answer->headers) {
            if (name != "message-id" && name != "content-type")
                message.headers.push_back({name, value});
        }
        publisher->publish(std::move(message),
                           [done = std::move(done)](base::Result<brokers::PublishedAt> at) {
                               if (at) {
                                   done({});
                               } else {
                                   done(at.error());
                               }
                           });
    };
    parts.results = std::make_unique<consumer::Results>(
        parts.thread.loop,
        consumer::ResultsOptions{.republish = config.on_duplicate == config::OnDuplicate::republish,
                                 .owner = {.id = around_.owner, .peer = {}},
                                 .lease = around_.config.engine.lease,
                                 .retention = retention},
        parts.records.get(), counters_, std::move(publish));
}

base::Result<void> Assembly::make_strategy(ConsumerParts& parts) {
    runtime::Loop& loop = parts.thread.loop;
    const core::Owner owner{.id = around_.owner, .peer = {}};
    const consumer::RetryRules retry = rules_of(config_.retry);
    const bool mismatch_is_duplicate = config_.id.on_mismatch == config::OnMismatch::duplicate;
    inbox::Place place;
    inbox::Connect connect;
    std::string table;
    if (config_.database) {
        place.schema = config_.database->schema;
        connect = around_.leaves.consumers.connect(*config_.database);
        table = "table message_dedup of " + config_.database->shown_url;
    }
    if (config_.strategy == ConsumerStrategy::store && config_.handler.kind == HandlerKind::ai) {
        parts.records = consumer::records_on_store(loop, around_.store, around_.secret,
                                                   store_in_words(around_.config.store));
        make_results(parts, around_.config.engine.retention_completed);
        parts.strategy = consumer::make_ai(loop,
                                           {.config = config_.handler.ai,
                                            .concurrency = config_.concurrency,
                                            .retry = retry,
                                            .hold_unknown = config_.hold_unknown,
                                            .mismatch_is_duplicate = mismatch_is_duplicate},
                                           around_.ask, parts.results.get(), counters_);
        return {};
    }
    if (config_.strategy == ConsumerStrategy::transaction) {
        consumer::TransactionOptions options;
        options.owner = "semel " + host_name() + " " + around_.owner;
        options.inbox.scope = config_.scope;
        options.inbox.place = place;
        options.inbox.retention = retention_;
        options.partitions = config_.kafka.has_value();
        options.log = consumer::log_of(*parts.source);
        options.in_order = config_.ordering == config::Ordering::partition;
        options.connections = config_.database->connections;
        options.retry = retry;
        options.mismatch_is_duplicate = mismatch_is_duplicate;
        options.retention_dead = config_.retention_dead;
        options.dialect = config_.database->kind == config::DatabaseKind::postgres
                              ? sql::Dialect::postgres
                              : sql::Dialect::mysql;
        std::variant<consumer::SqlEffects, consumer::TransactionCallback> effect{
            consumer::SqlEffects{config_.handler.sql}};
        if (config_.handler.kind == HandlerKind::callback)
            effect = around_.callbacks.transactions.at(config_.name);
        auto made = consumer::make_transaction(loop, std::move(options), connect, std::move(effect),
                                               counters_);
        if (!made) return made.error();
        parts.strategy = std::move(*made);
        return {};
    }
    if (config_.strategy == ConsumerStrategy::store) {
        const RecordStore records = record_store();
        std::optional<consumer::AnswersOf> answers;
        if (config_.handler.results.any())
            answers.emplace(*records.vault, tenant_of_consumer(config_, *records.secret));
        parts.records = consumer::records_on_store(
            loop, *records.store, *records.secret,
            store_in_words(config::store_of(config_, around_.config)), answers);
    } else {
        inbox::DedupOptions options;
        options.scope = config_.scope;
        options.place = place;
        parts.records = consumer::records_on_table(loop, std::move(options), connect,
                                                   config_.database->connections, table);
    }
    if (config_.strategy == ConsumerStrategy::state) {
        auto made = consumer::make_state(loop,
                                         {.config = config_.state,
                                          .connections = config_.database->connections,
                                          .retry = retry,
                                          .retention_dead = config_.retention_dead,
                                          .name = config_.name,
                                          .owner = owner},
                                         connect, *parts.records, counters_);
        if (!made) return made.error();
        parts.strategy = std::move(*made);
        return {};
    }
    if (config_.handler.kind == HandlerKind::callback) {
        parts.handler = consumer::make_callback_handler(
            around_.callbacks.functions.at(config_.name), config_.concurrency);
    } else {
        parts.client = http::make_client(loop, config_.handler.http.ca_file);
        auto handler =
            consumer::make_http_handler(loop, *parts.client, config_.handler.http,
                                        {.answers = config_.handler.results.any(),
                                         .repeats_on_new_connection = !config_.hold_unknown});
        if (!handler) return handler.error();
        parts.handler = std::move(*handler);
    }
    make_results(parts, retention_);
    consumer::RecordedOptions options;
    options.name = config_.name;
    options.owner = owner;
    options.lease = around_.config.engine.lease;
    options.patience = std::min(options.patience, options.lease / 2);  // a grant must arrive alive
    options.concurrency = config_.concurrency;
    options.slot_until_recorded = true;
    options.retry = retry;
    options.hold_unknown = config_.hold_unknown;
    options.mismatch_is_duplicate = mismatch_is_duplicate;
    options.retention = retention_;
    options.retention_dead = config_.retention_dead;
    options.store_promise = config_.strategy == ConsumerStrategy::store
                                ? record_store().store->durability().summary
                                : "the records are rows of " + table;
    parts.strategy = consumer::make_recorded(loop, std::move(options), *parts.records,
                                             *parts.handler, counters_, parts.results.get());
    return {};
}

consumer::IdentityRules Assembly::identity() const {
    consumer::IdentityRules rules{.scope = config_.scope,
                                  .id = config_.id,
                                  .business_key = config_.business_key,
                                  .payload = config_.payload,
                                  .ordering = config_.ordering,
                                  .copy_topics = {}};
    if (config_.kafka) {
        for (std::string& topic : config::all_copy_targets(config_))
            rules.copy_topics.insert(std::move(topic));
    }
    return rules;
}

base::Result<void> Assembly::observe(ConsumerParts& parts, consumer::ObserverCounters& counters) {
    auto source = around_.leaves.consumers.make_source(
        config_, {.client_id = "semel-" + config_.name + "-observer", .commit_metadata = {}});
    if (!source) return source.error();
    parts.source = std::move(*source);
    parts.consumer = std::make_unique<consumer::Observer>(
        consumer::ObserverOptions{
            .name = config_.name, .group = config_.group(), .identity = identity()},
        *parts.source, counters);
    return {};
}

base::Result<void> Assembly::make(ConsumerParts& parts) {
    const bool of_one = needs_group_of_one(config_, around_.config);
    SourceNames names{
        .client_id = "semel-" + config_.name, .commit_metadata = "semel", .exclusive = of_one};
    if (keeps_records_in_store(config_) && !config::store_of(config_, around_.config).shared()) {
        const std::string mark = consumer::store_mark(record_store().id);
        names.client_id += "-" + mark;
        names.commit_metadata = mark;
    }
    auto source = around_.leaves.consumers.make_source(config_, names);
    if (!source) return source.error();
    parts.source = std::move(*source);
    const bool copies = !config::all_copy_targets(config_).empty();
    if (!config_.dead_letter.stop || config_.handler.results.any() || copies) {
        auto publisher = around_.leaves.consumers.make_publisher(config_);
        if (!publisher) return publisher.error();
        parts.publisher = std::move(*publisher);
    }
    if (!config_.dead_letter.stop) {
        const config::DeadLetterConfig& letters = config_.dead_letter;
        deadletter::Target target;
        if (config_.kafka) {
            target.topic = letters.topic;
        } else if (letters.exchange.empty()) {
            target.topic = letters.queue;
        } else {
            target.exchange = letters.exchange;
            target.topic = config_.rabbitmq->queue;  // the routing key
        }
        parts.outlet = std::make_unique<deadletter::Outlet>(
            *parts.publisher, std::move(target),
            deadletter::Form{.body = letters.body,
                             .headers = letters.headers,
                             .kafka = config_.kafka.has_value()});
    }
    if (copies)
        parts.copies =
            std::make_unique<consumer::CopyOutlet>(*parts.publisher, copy_rules(config_));
    if (config_.retry.wait == config::RetryWait::store) {
        const RecordStore where = record_store();
        parts.parking =
            std::make_unique<consumer::Parking>(*where.store, *where.secret, config_.scope);
    }
    if (auto made = make_strategy(parts); !made) return made;

    consumer::ConsumerOptions options;
    options.copies = parts.copies.get();
    options.parking = parts.parking.get();
    options.name = config_.name;
    options.group = config_.group();
    options.identity = identity();
    options.breaker.dead_share = config_.breaker_dead_share;
    options.park_limit = config_.park_limit;
    options.letters_stop = config_.dead_letter.stop;
    if (of_one && config_.kafka) {
        options.check_group = [id = record_store().id,
                               group = config_.group()](brokers::Source& asked) {
            return consumer::check_unshared_group(asked, id, group, group_patience);
        };
    }
    auto consumer =
        std::make_unique<consumer::Consumer>(parts.thread.loop, std::move(options), *parts.source,
                                             *parts.strategy, parts.outlet.get(), counters_);
    if (parts.publisher) {
        // What else it could tell, the source tells of the same broker.
        parts.publisher->on_problem([told = consumer.get()](const brokers::Problem& what) {
            if (what.kind == brokers::ProblemKind::blocked ||
                what.kind == brokers::ProblemKind::unblocked)
                told->problem(what);
        });
    }
    parts.consumer = std::move(consumer);
    return {};
}

}  // namespace

base::Result<std::unique_ptr<ConsumerParts>> make_parts(const ConsumersAround& around,
                                                        const ConsumerConfig& config,
                                                        milliseconds retention,
                                                        CountersOfOne& counters) {
    auto parts = std::make_unique<ConsumerParts>();
    Assembly assembly(around, config, retention, counters.consumer);
    auto made =
        config.observe ? assembly.observe(*parts, counters.observer) : assembly.make(*parts);
    if (!made) return made.error();
    return parts;
}

}  // namespace semel::cli
