#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "config/consumer_parts.hpp"
#include "config/stores.hpp"

namespace semel::config {

namespace {

constexpr std::size_t topics_max = 1000;
constexpr milliseconds revoke_drain_max{std::chrono::minutes{5}};  // a group waits no longer
/// RabbitMQ's own user of a fresh server, which it takes from this machine only.
constexpr std::string_view rabbitmq_default_user = "guest:guest@";

KafkaSourceConfig read_kafka(const Map& map) {
    KafkaSourceConfig kafka;
    kafka.brokers = required_text(map, "brokers", "the brokers to begin with, HOST:PORT,HOST:PORT");
    for (const YAML::Node& item : map.items("topics", true)) {
        std::string topic = map.document().text(item, map.path("topics"));
        if (topic.empty() || topic.size() > name_max_bytes)
            map.document().refuse(item, map.path("topics") + ": a topic has 1 to 255 characters");
        if (std::find(kafka.topics.begin(), kafka.topics.end(), topic) != kafka.topics.end())
            map.document().refuse(
                item, map.path("topics") + ": " + quoted(topic) + " is given twice; remove one");
        kafka.topics.push_back(std::move(topic));
    }
    if (kafka.topics.empty() || kafka.topics.size() > topics_max)
        map.refuse("topics",
                   " must name at least one topic (and at most 1000), such as [orders], or "
                   "a pattern that begins with '^'");
    kafka.group = map.required_name("group");
    map.read("instance_id", kafka.instance_id);
    map.read("start", kafka.start,
             {{"earliest", Start::earliest}, {"latest", Start::latest}, {"fail", Start::fail}});
    if (const YAML::Node* at = map.find("properties")) {
        if (!at->IsMap() && !at->IsNull())
            map.refuse("properties",
                       " must be a map of librdkafka's properties, such as "
                       "{ security.protocol: SSL }");
        for (const auto& entry : *at) {
            const std::string name = map.document().text(entry.first, map.path("properties"));
            const std::string path = map.path("properties") + "." + name;
            if (kafka.properties.contains(name))
                map.document().refuse(entry.first, path + " is given twice; remove one");
            kafka.properties[name] = map.document().text(entry.second, path);
        }
    }
    map.read("drain", kafka.drain, milliseconds{0}, revoke_drain_max);
    return kafka;
}

RabbitmqSourceConfig read_rabbitmq(const Map& map, std::vector<std::string>& warnings) {
    RabbitmqSourceConfig rabbitmq;
    map.read("url", rabbitmq.url);
    const bool tls = rabbitmq.url.starts_with("amqps://");
    if (!tls && !rabbitmq.url.starts_with("amqp://")) {
        // Not quoted: what is wrong about it may be that a password stands where the scheme should.
        map.refuse("url",
                   " must be a URL that begins with amqp:// or amqps:// (TLS), such as "
                   "amqp://semel:${PASSWORD}@127.0.0.1:5672/");
    }
    rabbitmq.shown_url = without_credentials(rabbitmq.url);
    const std::string& written = map.find("url")->Scalar();
    const std::size_t end = written.rfind('@');
    const std::string_view credentials = std::string_view(written).substr(
        written.find("://") + 3, end == std::string::npos ? 0 : end + 1 - written.find("://") - 3);
    if (credentials.find(':') != std::string_view::npos &&
        credentials.find("${") == std::string_view::npos && credentials != rabbitmq_default_user)
        warnings.push_back(map.path("url") +
                           ": a password stands in the file; put it into an environment variable "
                           "and write ${NAME} here");
    rabbitmq.queue = map.required_name("queue");
    map.read_count<std::uint16_t>("prefetch", rabbitmq.prefetch,
                                  std::numeric_limits<std::uint16_t>::max());
    if (rabbitmq.prefetch == 0 && map.find("prefetch") != nullptr)
        map.refuse("prefetch", ": 0 would mean without bound; write 1 to 65535");
    map.read("consumer_timeout", rabbitmq.consumer_timeout, milliseconds{0});
    map.read("ca_file", rabbitmq.ca_file);
    if (!rabbitmq.ca_file.empty() && !tls)
        map.refuse("ca_file", " is for TLS: begin the url with amqps://, or remove it");
    if (const YAML::Node* at = map.find("declare")) {
        const Map declare(
            map.document(), *at, map.path("declare"),
            {"type", "single_active_consumer", "dead_letter_exchange", "delivery_limit"});
        rabbitmq.declare = true;
        declare.read("type", rabbitmq.quorum, {{"quorum", true}, {"classic", false}});
        declare.read("single_active_consumer", rabbitmq.single_active_consumer);
        declare.read("dead_letter_exchange", rabbitmq.dead_letter_exchange);
        if (declare.find("delivery_limit") != nullptr) {
            std::uint32_t limit = 0;
            declare.read_count<std::uint32_t>("delivery_limit", limit, 1'000'000);
            if (!rabbitmq.quorum)
                declare.refuse("delivery_limit", " is for quorum queues; remove it");
            rabbitmq.delivery_limit = limit;
        }
        if (rabbitmq.quorum && rabbitmq.dead_letter_exchange.empty())
            warnings.push_back(map.path("declare") + ": the quorum queue " + rabbitmq.queue +
                               " drops a message that was handed back too often (delivery_limit; "
                               "20 by default since RabbitMQ 4), for which processes must die as "
                               "often; name a dead_letter_exchange with a queue, and it is kept");
    }
    return rabbitmq;
}

}  // namespace

void read_source(const Map& map, ConsumerConfig& consumer, std::vector<std::string>& warnings) {
    static constexpr const char* one =
        " must name exactly one of kafka, rabbitmq, such as kafka: { brokers: \"127.0.0.1:9092\", "
        "topics: [orders], group: shop }";
    const YAML::Node* node = map.find("source");
    if (node == nullptr) map.refuse("source", one);
    const Map source(map.document(), *node, map.path("source"), {"kafka", "rabbitmq"});
    if (source.entries().size() != 1) map.refuse("source", one);
    if (const YAML::Node* at = source.find("kafka")) {
        consumer.kafka = read_kafka(
            Map(map.document(), *at, source.path("kafka"),
                {"brokers", "topics", "group", "instance_id", "start", "properties", "drain"}));
    } else {
        consumer.rabbitmq = read_rabbitmq(
            Map(map.document(), *source.find("rabbitmq"), source.path("rabbitmq"),
                {"url", "queue", "prefetch", "declare", "consumer_timeout", "ca_file"}),
            warnings);
    }
}

}  // namespace semel::config
