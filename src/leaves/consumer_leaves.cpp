#include "leaves/consumer_leaves.hpp"

#include <algorithm>
#include <utility>

#include "brokers/kafka/kafka.hpp"
#include "brokers/rabbitmq/rabbitmq.hpp"
#include "stores/mysql/checks.hpp"
#include "stores/mysql/connection.hpp"
#include "stores/mysql/executor.hpp"
#include "stores/mysql/url.hpp"
#include "stores/postgres/plain_connection.hpp"

namespace semel {

namespace {

namespace kafka = brokers::kafka;
namespace mysql = stores::mysql;
namespace rabbitmq = brokers::rabbitmq;

using std::chrono::milliseconds;

/// Beside a position that was reset: it is one of ours, and no store's.
constexpr const char* reset_metadata = "semel";
constexpr milliseconds connect_timeout{5000};
constexpr milliseconds ask_timeout{5000};
/// A topic of copies keeps them so much longer than their delay: what is made at least the one,
/// what is found at least the other.
constexpr milliseconds copies_kept{std::chrono::hours{24 * 7}};
constexpr milliseconds copies_margin{std::chrono::hours{24}};
/// Of one statement of a consumer, whose transactions are short.
constexpr milliseconds statement_deadline{60'000};

sql::Tried<std::shared_ptr<sql::Executor>> connect_mysql(const std::string& url) {
    struct Own {
        std::unique_ptr<mysql::Connection> connection;
        std::unique_ptr<sql::Executor> executor;
    };
    const auto refused = [](base::Error error) {
        return sql::Problem{.trouble = sql::Trouble::refused, .error = std::move(error)};
    };
    const auto target = mysql::parse_url(url);
    if (!target) return refused(target.error());
    const std::string name = mysql::describe(*target);
    auto made = mysql::Connection::open(*target, connect_timeout);
    if (auto* problem = std::get_if<sql::Problem>(&made)) return std::move(*problem);
    auto own = std::make_shared<Own>();
    own->connection = std::move(std::get<0>(made));
    if (auto checked = mysql::check_version(own->connection->server(), name); !checked)
        return refused(checked.error());
    const auto deadline = std::chrono::steady_clock::now() + connect_timeout;
    if (auto problem = mysql::check_writable(*own->connection, name, deadline))
        return std::move(*problem);
    own->executor = mysql::executor_on(own->connection->native());
    return std::shared_ptr<sql::Executor>(own, own->executor.get());
}

kafka::Properties properties_of_publisher(const config::KafkaSourceConfig& source) {
    return source.properties;  // those of a consumer alone mean nothing to a publisher
}

kafka::Cluster cluster_of(const config::KafkaSourceConfig& source) {
    return {.brokers = source.brokers, .properties = properties_of_publisher(source)};
}

base::Result<void> check(const config::ConsumerConfig& consumer) {
    if (consumer.rabbitmq) {
        const auto endpoint = rabbitmq::parse_url(consumer.rabbitmq->url);
        if (!endpoint) return endpoint.error();
        return {};
    }
    for (const kafka::Role role : {kafka::Role::source, kafka::Role::publisher}) {
        if (auto done = kafka::check_properties(role, consumer.kafka->properties); !done)
            return done;
    }
    return {};
}

kafka::Start start_of(config::Start start) {
    switch (start) {
        case config::Start::latest:
            return kafka::Start::latest;
        case config::Start::fail:
            return kafka::Start::fail;
        case config::Start::earliest:
            break;
    }
    return kafka::Start::earliest;
}

base::Result<std::unique_ptr<brokers::Source>> make_source(const config::ConsumerConfig& consumer,
                                                           const cli::SourceNames& names) {
    if (const auto& from = consumer.kafka) {
        kafka::SourceConfig source;
        source.brokers = from->brokers;
        source.topics = from->topics;
        source.delayed = config::all_copy_targets(consumer);
        source.group = from->group;
        source.client_id = names.client_id;
        source.observe = consumer.observe;
        source.instance_id = from->instance_id;
        source.start = start_of(from->start);
        source.properties = from->properties;
        source.drain = from->drain;
        source.commit_metadata = names.commit_metadata;
        return kafka::make_source(std::move(source));
    }
    const auto& from = *consumer.rabbitmq;
    rabbitmq::SourceConfig source;
    source.url = from.url;
    source.queue = from.queue;
    source.prefetch = from.prefetch;
    source.exclusive = names.exclusive;
    if (from.declare)
        source.declare =
            rabbitmq::QueueDeclaration{.quorum = from.quorum,
                                       .single_active_consumer = from.single_active_consumer,
                                       .dead_letter_exchange = from.dead_letter_exchange,
                                       .delivery_limit = from.delivery_limit};
    source.consumer_timeout = from.consumer_timeout;
    source.name = names.client_id;
    source.ca_file = from.ca_file;
    return rabbitmq::make_source(std::move(source));
}

base::Result<std::unique_ptr<brokers::Publisher>> make_publisher(
    const config::ConsumerConfig& consumer) {
    const std::string name = "semel-" + consumer.name;
    if (const auto& from = consumer.kafka) {
        kafka::PublisherConfig publisher;
        publisher.brokers = from->brokers;
        publisher.client_id = name;
        publisher.properties = properties_of_publisher(*from);
        return kafka::make_publisher(std::move(publisher));
    }
    rabbitmq::PublisherConfig publisher;
    publisher.url = consumer.rabbitmq->url;
    publisher.name = name;
    publisher.ca_file = consumer.rabbitmq->ca_file;
    return rabbitmq::make_publisher(std::move(publisher));
}

/// Topics of copies of this consumer, of whichever delay.
std::vector<std::string> like_copies(const config::ConsumerConfig& consumer) {
    std::vector<std::string> patterns;
    for (const std::string& topic : consumer.kafka->topics) {
        if (topic.starts_with('^')) continue;
        std::string pattern = "^";
        for (const char c : topic + "." + consumer.kafka->group + ".retry.") {
            if (c == '.') pattern += '\\';
            pattern += c;
        }
        patterns.push_back(std::move(pattern));
    }
    return patterns;
}

/// What lies ready for copies, and what is made of it. `found`: what there is of the consumer's
/// topics, and of those like copies.
base::Result<void> look_at_copies(const config::ConsumerConfig& consumer,
                                  const kafka::Cluster& cluster,
                                  const std::vector<kafka::TopicFacts>& found, bool make,
                                  cli::BrokerFindings& out) {
    const auto facts_of = [&found](const std::string& topic) {
        return std::find_if(found.begin(), found.end(),
                            [&topic](const kafka::TopicFacts& one) { return one.name == topic; });
    };
    const std::vector<std::string> targets = config::all_copy_targets(consumer);
    for (const kafka::TopicFacts& one : found) {
        const auto patterns = like_copies(consumer);
        const bool like = std::any_of(
            patterns.begin(), patterns.end(),
            [&one](const std::string& pattern) { return config::takes_in(pattern, one.name); });
        if (like && std::find(targets.begin(), targets.end(), one.name) == targets.end())
            out.copies_left.push_back(one.name);
    }
    if (targets.empty()) return {};
    for (const std::string& source : consumer.kafka->topics) {
        const auto facts = facts_of(source);
        const std::vector<std::string> names = config::copy_targets(consumer, source);
        for (std::size_t i = 0; i < names.size(); ++i) {
            const milliseconds delay = consumer.retry.delays[i];
            if (const auto there = facts_of(names[i]); there != found.end()) {
                if (there->may_lose)
                    out.copies_wrong.push_back(
                        "the topic " + names[i] +
                        " is compacted, or kept up to a size (retention.bytes), so that copies may "
                        "vanish before they are due: set cleanup.policy=delete and "
                        "retention.bytes=-1");
                if (there->retention && *there->retention < delay + copies_margin)
                    out.copies_wrong.push_back(
                        "the topic " + names[i] + " keeps its messages for " +
                        config::duration_word(*there->retention) +
                        ", so that copies may vanish before they were run: set retention.ms to " +
                        "the delay and a day more at least");
                if (there->retention)
                    out.retention =
                        std::max(out.retention.value_or(*there->retention), *there->retention);
                continue;
            }
            if (!consumer.retry.create) {
                out.copies_missing.push_back("the topic " + names[i]);
                continue;
            }
            // As long as the original would have been kept, from when it is due.
            milliseconds kept = copies_kept;
            kafka::TopicShape shape;
            shape.settings = {{"cleanup.policy", "delete"}, {"retention.bytes", "-1"}};
            if (facts != found.end()) {
                shape.partitions = static_cast<int>(facts->partitions);
                if (facts->retention) kept = std::max(kept, *facts->retention);
            }
            kept += delay;
            shape.settings["retention.ms"] = std::to_string(kept.count());
            out.retention = std::max(out.retention.value_or(kept), kept);
            if (!make) continue;
            if (auto made = kafka::ensure_topic(cluster, names[i], ask_timeout, shape); !made)
                return made.error();
        }
    }
    return {};
}

base::Result<cli::BrokerFindings> look_at_kafka(const config::ConsumerConfig& consumer, bool make) {
    const config::KafkaSourceConfig& source = *consumer.kafka;
    const kafka::Cluster cluster = cluster_of(source);
    const std::string& letters = consumer.dead_letter.topic;
    const std::string& results = consumer.handler.results.topic;
    std::vector<std::string> wanted = source.topics;
    for (const std::string& target : {letters, results}) {
        if (!target.empty()) wanted.push_back(target);
    }
    for (const auto& more : {config::all_copy_targets(consumer), like_copies(consumer)})
        wanted.insert(wanted.end(), more.begin(), more.end());
    const auto found = kafka::look_at_topics(cluster, wanted, ask_timeout);
    if (!found) return found.error();
    const auto exists = [&found](const std::string& topic) {
        return std::any_of(found->begin(), found->end(), [&topic](const kafka::TopicFacts& one) {
            return config::takes_in(topic, one.name);
        });
    };
    cli::BrokerFindings out;
    for (const std::string& topic : source.topics) {
        if (!exists(topic))
            out.missing.push_back((topic.starts_with('^') ? "a topic like " : "the topic ") +
                                  topic);
    }
    bool endless = out.missing.size() == source.topics.size();
    out.about_retention = "its topics do not exist yet";
    for (const kafka::TopicFacts& one : *found) {
        const bool read = std::any_of(
            source.topics.begin(), source.topics.end(),
            [&one](const std::string& topic) { return config::takes_in(topic, one.name); });
        if (!read) continue;
        if (one.retention) {
            out.retention = std::max(out.retention.value_or(*one.retention), *one.retention);
        } else if (!endless) {
            endless = true;
            out.about_retention = "topic " + one.name + ": " + one.about_retention;
        }
    }
    if (auto looked = look_at_copies(consumer, cluster, *found, make, out); !looked)
        return looked.error();
    if (endless) out.retention.reset();
    if (!consumer.dead_letter.stop && !exists(letters)) {
        if (!consumer.dead_letter.create) {
            out.letters_missing = "the topic " + letters;
        } else if (make) {
            if (auto made = kafka::ensure_topic(cluster, letters, ask_timeout); !made)
                return made.error();
        }
    }
    if (!results.empty() && !exists(results)) out.results_missing = "the topic " + results;
    return out;
}

base::Result<cli::BrokerFindings> look_at_rabbitmq(const config::ConsumerConfig& consumer,
                                                   bool make) {
    const config::RabbitmqSourceConfig& source = *consumer.rabbitmq;
    const rabbitmq::Access access{.url = source.url, .ca_file = source.ca_file};
    cli::BrokerFindings out;
    out.about_retention = "queues have no such limit";
    if (!source.declare) {
        const auto exists = rabbitmq::target_exists(access, source.queue, {});
        if (!exists) return exists.error();
        if (!*exists) out.missing.push_back("the queue " + source.queue);
    }
    const std::vector<std::string> delays = config::all_copy_targets(consumer);
    for (std::size_t i = 0; i < consumer.retry.delays.size() && !delays.empty(); ++i) {
        const std::string name = config::copy_targets(consumer, source.queue)[i];
        const auto there = rabbitmq::delay_queue(
            access, {.name = name, .target = source.queue, .delay = consumer.retry.delays[i]},
            make && consumer.retry.create);
        if (!there && there.error().code == base::ErrorCode::invalid_argument) {
            out.copies_wrong.push_back(there.error().detail);
        } else if (!there) {
            return there.error();
        } else if (!*there && !consumer.retry.create) {
            out.copies_missing.push_back("the queue " + name);
        }
    }
    const config::DeadLetterConfig& letters = consumer.dead_letter;
    if (!letters.stop && letters.create && make) {
        if (auto made = rabbitmq::ensure_queue(access, letters.queue); !made) return made.error();
    } else if (!letters.stop && !letters.create) {
        const auto exists = rabbitmq::target_exists(access, letters.queue, letters.exchange);
        if (!exists) return exists.error();
        if (!*exists)
            out.letters_missing = letters.exchange.empty() ? "the queue " + letters.queue
                                                           : "the exchange " + letters.exchange;
    }
    if (const config::ResultsConfig& results = consumer.handler.results; results.any()) {
        const auto exists = rabbitmq::target_exists(access, results.queue, results.exchange);
        if (!exists) return exists.error();
        if (!*exists)
            out.results_missing = results.exchange.empty() ? "the queue " + results.queue
                                                           : "the exchange " + results.exchange;
    }
    return out;
}

base::Result<std::vector<cli::PositionToSet>> plan_reset(const config::ConsumerConfig& consumer,
                                                         const cli::ConsumerResetOptions& options) {
    using Kind = cli::ResetTarget::Kind;
    kafka::ResetTo to = kafka::ResetTo::earliest;
    if (options.target.kind == Kind::latest) to = kafka::ResetTo::latest;
    if (options.target.kind == Kind::offset) to = kafka::ResetTo::offset;
    if (options.target.kind == Kind::time) to = kafka::ResetTo::time;
    const config::KafkaSourceConfig& source = *consumer.kafka;
    const std::vector<std::string> topics =
        options.topic.empty() ? source.topics : std::vector{options.topic};
    auto moves = kafka::plan_reset({.brokers = source.brokers, .properties = source.properties},
                                   source.group, topics, options.partition, to, options.target.at,
                                   ask_timeout);
    if (!moves) return moves.error();
    std::vector<cli::PositionToSet> out;
    for (const kafka::PositionMove& move : *moves)
        out.push_back({.topic = move.partition.topic,
                       .partition = move.partition.number,
                       .committed = move.committed,
                       .to = move.to,
                       .end = move.end});
    return out;
}

base::Result<void> commit_reset(const config::ConsumerConfig& consumer,
                                const std::vector<cli::PositionToSet>& positions) {
    const config::KafkaSourceConfig& source = *consumer.kafka;
    std::vector<kafka::PositionMove> moves;
    for (const cli::PositionToSet& one : positions) {
        kafka::PositionMove& move = moves.emplace_back();
        move.partition = {one.topic, one.partition};
        move.to = one.to;
    }
    return kafka::commit_reset({.brokers = source.brokers, .properties = source.properties},
                               source.group, moves, reset_metadata);
}

}  // namespace

sql::Tried<std::shared_ptr<sql::Executor>> connect_to(const config::DatabaseConfig& database,
                                                      milliseconds deadline) {
    if (database.kind == config::DatabaseKind::mysql) return connect_mysql(database.url);
    auto connected = stores::postgres::connect_plain(database.url, connect_timeout, deadline);
    if (!connected) return sql::Problem{.trouble = sql::Trouble::lost, .error = connected.error()};
    return std::move(*connected);
}

cli::ConsumerLeaves consumer_leaves() {
    return {.check = check,
            .make_source = make_source,
            .make_publisher = make_publisher,
            .look =
                [](const config::ConsumerConfig& consumer, bool make) {
                    return consumer.kafka ? look_at_kafka(consumer, make)
                                          : look_at_rabbitmq(consumer, make);
                },
            .plan_reset = plan_reset,
            .commit_reset = commit_reset,
            .connect = [](const config::DatabaseConfig& database) -> inbox::Connect {
                return [database] { return connect_to(database, statement_deadline); };
            }};
}

}  // namespace semel
