// What a consumer's start asks about topics. By the library's admin requests, but only those that
// any broker answers: see group.hpp about the others.
#include <array>
#include <charconv>

#include "brokers/kafka/group.hpp"
#include "brokers/kafka/handles.hpp"

namespace semel::brokers::kafka {

using std::chrono::milliseconds;

namespace {

using ConfigResource = Owned<rd_kafka_ConfigResource_t, rd_kafka_ConfigResource_destroy>;
using NewTopic = Owned<rd_kafka_NewTopic_t, rd_kafka_NewTopic_destroy>;
using AdminOptions = Owned<rd_kafka_AdminOptions_t, rd_kafka_AdminOptions_destroy>;
using Metadata = Owned<const struct rd_kafka_metadata, rd_kafka_metadata_destroy>;

#if RD_KAFKA_VERSION >= 0x02030000
using TopicNames = Owned<rd_kafka_TopicCollection_t, rd_kafka_TopicCollection_destroy>;
#endif

constexpr int kBrokersDefault = -1;

base::Result<Client> client_for(const Cluster& cluster) {
    Conf conf(rd_kafka_conf_new());
    for (const auto& [name, value] :
         {std::pair<const char*, std::string>{"bootstrap.servers", cluster.brokers},
          {"client.id", "semel"}}) {
        if (auto done = set(conf.get(), name, value); !done) return std::move(done.error());
    }
    if (auto done = set_all(conf.get(), Role::publisher, cluster.properties); !done)
        return std::move(done.error());
    rd_kafka_conf_set_error_cb(conf.get(), [](rd_kafka_t*, int, const char*, void*) {});
    rd_kafka_conf_set_log_cb(conf.get(), [](const rd_kafka_t*, int, const char*, const char*) {});
    std::array<char, 512> text{};
    Client client(rd_kafka_new(RD_KAFKA_PRODUCER, conf.get(), text.data(), text.size()));
    if (client == nullptr) return invalid(std::string("kafka: ") + text.data());
    static_cast<void>(conf.release());  // it is the client's now
    return client;
}

/// Sends one admin request by `ask` and waits for its event.
template <class Ask>
base::Result<Event> asked(rd_kafka_t* client, const std::string& doing, milliseconds within,
                          const Ask& ask) {
    const Queue queue(rd_kafka_queue_new(client));
    const AdminOptions options(rd_kafka_AdminOptions_new(client, RD_KAFKA_ADMIN_OP_ANY));
    std::array<char, 256> text{};
    rd_kafka_AdminOptions_set_request_timeout(options.get(), milliseconds_of(within), text.data(),
                                              text.size());
    ask(options.get(), queue.get());
    // A second more than the request itself may take: the answer is then its time-out.
    Event event(rd_kafka_queue_poll(queue.get(), milliseconds_of(within) + 1000));
    if (event == nullptr) return error_of(RD_KAFKA_RESP_ERR__TIMED_OUT, doing);
    if (const auto code = rd_kafka_event_error(event.get()); code != RD_KAFKA_RESP_ERR_NO_ERROR)
        return error_of(code, doing);
    return event;
}

void take_config(TopicFacts& topic, const rd_kafka_ConfigResource_t* said) {
    if (const auto code = rd_kafka_ConfigResource_error(said); code != RD_KAFKA_RESP_ERR_NO_ERROR) {
        topic.about_retention =
            std::string("the broker does not tell it: ") + rd_kafka_err2str(code);
        return;
    }
    std::size_t count = 0;
    const rd_kafka_ConfigEntry_t** entries = rd_kafka_ConfigResource_configs(said, &count);
    std::string retention;
    std::string policy;
    std::string bytes;
    for (std::size_t i = 0; i < count; ++i) {
        const std::string_view name = rd_kafka_ConfigEntry_name(entries[i]);
        const char* value = rd_kafka_ConfigEntry_value(entries[i]);
        if (value == nullptr) continue;
        if (name == "retention.ms") retention = value;
        if (name == "cleanup.policy") policy = value;
        if (name == "retention.bytes") bytes = value;
    }
    topic.may_lose =
        policy.find("compact") != std::string::npos || (!bytes.empty() && !bytes.starts_with('-'));
    if (policy.find("delete") == std::string::npos) {
        topic.about_retention = "cleanup.policy is " + policy;
        return;
    }
    std::int64_t kept = 0;
    const auto [end, error] =
        std::from_chars(retention.data(), retention.data() + retention.size(), kept);
    if (error != std::errc() || kept < 0) {
        topic.about_retention = "retention.ms is " + retention;
        return;
    }
    topic.retention = milliseconds(kept);
}

}  // namespace

base::Result<std::vector<TopicFacts>> look_at_topics(const Cluster& cluster,
                                                     const std::vector<std::string>& topics,
                                                     milliseconds within) {
    auto client = client_for(cluster);
    if (!client) return std::move(client.error());
    const struct rd_kafka_metadata* said = nullptr;
    // All topics: a question about one by name may make it.
    const auto code = rd_kafka_metadata(client->get(), 1, nullptr, &said, milliseconds_of(within));
    const Metadata metadata(said);
    if (code != RD_KAFKA_RESP_ERR_NO_ERROR)
        return error_of(code, "asking " + cluster.brokers + " for its topics");
    std::vector<TopicFacts> found;
    std::vector<ConfigResource> owned;
    std::vector<rd_kafka_ConfigResource_t*> wanted_configs;
    for (int t = 0; t < metadata->topic_cnt; ++t) {
        const rd_kafka_metadata_topic& topic = metadata->topics[t];
        if (topic.err != RD_KAFKA_RESP_ERR_NO_ERROR || !wanted(topics, topic.topic)) continue;
        found.push_back({.name = topic.topic,
                         .partitions = static_cast<std::size_t>(topic.partition_cnt),
                         .retention = {},
                         .about_retention = "the broker does not tell it"});
        owned.emplace_back(rd_kafka_ConfigResource_new(RD_KAFKA_RESOURCE_TOPIC, topic.topic));
        wanted_configs.push_back(owned.back().get());
    }
    if (found.empty()) return found;
    auto event = asked(client->get(), "asking for the settings of topics", within,
                       [&](const rd_kafka_AdminOptions_t* options, rd_kafka_queue_t* queue) {
                           rd_kafka_DescribeConfigs(client->get(), wanted_configs.data(),
                                                    wanted_configs.size(), options, queue);
                       });
    if (!event) {
        // Who may read a topic need not be allowed to see its settings.
        for (TopicFacts& topic : found)
            topic.about_retention = "the broker does not tell it: " + event.error().detail;
        return found;
    }
    std::size_t count = 0;
    const rd_kafka_ConfigResource_t** resources = rd_kafka_DescribeConfigs_result_resources(
        rd_kafka_event_DescribeConfigs_result(event->get()), &count);
    for (std::size_t i = 0; i < count; ++i) {
        for (TopicFacts& topic : found) {
            if (topic.name != rd_kafka_ConfigResource_name(resources[i])) continue;
            topic.about_retention.clear();
            take_config(topic, resources[i]);
        }
    }
    return found;
}

#if RD_KAFKA_VERSION >= 0x02030000
base::Result<std::string> topic_id_of(rd_kafka_t* client, const std::string& topic,
                                      milliseconds within) {
    const std::string doing = "asking for the id of the topic " + topic;
    const char* name = topic.c_str();
    const TopicNames names(rd_kafka_TopicCollection_of_topic_names(&name, 1));
    auto event = asked(client, doing, within,
                       [&](const rd_kafka_AdminOptions_t* options, rd_kafka_queue_t* queue) {
                           rd_kafka_DescribeTopics(client, names.get(), options, queue);
                       });
    if (!event) return std::move(event.error());
    std::size_t count = 0;
    const rd_kafka_TopicDescription_t** said = rd_kafka_DescribeTopics_result_topics(
        rd_kafka_event_DescribeTopics_result(event->get()), &count);
    if (count != 1) return error_of(RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART, doing);
    const rd_kafka_error_t* error = rd_kafka_TopicDescription_error(said[0]);
    if (const auto code = rd_kafka_error_code(error); code != RD_KAFKA_RESP_ERR_NO_ERROR)
        return error_of(code, doing);
    const rd_kafka_Uuid_t* id = rd_kafka_TopicDescription_topic_id(said[0]);
    // A broker before 2.8 has none: the library then says zero.
    if (id == nullptr || (rd_kafka_Uuid_most_significant_bits(id) == 0 &&
                          rd_kafka_Uuid_least_significant_bits(id) == 0))
        return std::string{};
    return std::string(rd_kafka_Uuid_base64str(id));
}
#else
base::Result<std::string> topic_id_of(rd_kafka_t*, const std::string&, milliseconds) {
    return std::string{};
}
#endif

base::Result<void> ensure_topic(const Cluster& cluster, const std::string& topic,
                                milliseconds within, const TopicShape& shape) {
    auto client = client_for(cluster);
    if (!client) return std::move(client.error());
    std::array<char, 256> text{};
    const NewTopic fresh(rd_kafka_NewTopic_new(topic.c_str(),
                                               shape.partitions.value_or(kBrokersDefault),
                                               kBrokersDefault, text.data(), text.size()));
    if (fresh == nullptr) return invalid("kafka: the topic " + topic + ": " + text.data());
    for (const auto& [name, value] : shape.settings)
        rd_kafka_NewTopic_set_config(fresh.get(), name.c_str(), value.c_str());
    const std::string doing = "making the topic " + topic;
    auto event = asked(client->get(), doing, within,
                       [&](const rd_kafka_AdminOptions_t* options, rd_kafka_queue_t* queue) {
                           rd_kafka_NewTopic_t* one = fresh.get();
                           rd_kafka_CreateTopics(client->get(), &one, 1, options, queue);
                       });
    if (!event) return std::move(event.error());
    std::size_t count = 0;
    const rd_kafka_topic_result_t** results = rd_kafka_CreateTopics_result_topics(
        rd_kafka_event_CreateTopics_result(event->get()), &count);
    for (std::size_t i = 0; i < count; ++i) {
        const auto code = rd_kafka_topic_result_error(results[i]);
        if (code != RD_KAFKA_RESP_ERR_NO_ERROR && code != RD_KAFKA_RESP_ERR_TOPIC_ALREADY_EXISTS)
            return error_of(code, doing);
    }
    return {};
}

}  // namespace semel::brokers::kafka
