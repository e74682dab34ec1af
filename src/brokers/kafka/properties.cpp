// Which properties a user may pass to librdkafka, and how its errors are told.
#include <algorithm>
#include <array>
#include <string_view>

#include "brokers/kafka/handles.hpp"

namespace semel::brokers::kafka {

namespace {

struct Refused {
    std::string_view name;
    std::string_view why;
};

constexpr std::array kForBoth{
    Refused{"bootstrap.servers", "use `brokers`"},
    Refused{"metadata.broker.list", "use `brokers`"},
    Refused{"client.id", "it names the store, so that members find out who shares it"},
    Refused{"plugin.library.paths", "it would load foreign code into this process"},
    Refused{"log.queue", "the library's log is read by this process"},
    Refused{"api.version.request", "without it old messages carry no headers"},
};
constexpr std::array kForSources{
    Refused{"enable.auto.commit",
            "positions are committed when messages are finished, never before"},
    Refused{"auto.commit.enable",
            "positions are committed when messages are finished, never before"},
    Refused{"auto.commit.interval.ms", "nothing is committed automatically"},
    Refused{"enable.auto.offset.store",
            "positions are those of finished messages, not of fetched ones"},
    Refused{"offset.store.method", "positions are kept by the group"},
    Refused{"auto.offset.reset",
            "use `start`: a reset in the middle would skip or repeat silently"},
    Refused{"isolation.level", "messages of aborted transactions must not be handled"},
    Refused{"enable.partition.eof", "the ends of partitions are needed to commit behind markers"},
    Refused{"group.id", "use `group`"},
    Refused{"group.instance.id", "use `instance_id`"},
};
constexpr std::array kForPublishers{
    Refused{"enable.idempotence", "without it a retry can write a message twice"},
    Refused{"enable.gapless.guarantee", "it ends the producer at the first lost message"},
    Refused{"acks", "a confirmed message is in all in-sync replicas"},
    Refused{"request.required.acks", "a confirmed message is in all in-sync replicas"},
    Refused{"partitioner", "keys must find the partitions that other clients give them (murmur2)"},
    Refused{"transactional.id", "messages are published without Kafka's transactions"},
    Refused{"delivery.timeout.ms", "use `timeout`"},
    Refused{"message.timeout.ms", "use `timeout`"},
    Refused{"queue.buffering.max.messages", "use `queued`"},
};

// Cooperative rebalances lost assignments on a commit at the wrong moment until 2.10, and looped
// until 2.6.1.
constexpr int kCooperativeSince = 0x020c0000;

template <std::size_t n>
std::string_view why_of(const std::array<Refused, n>& list, std::string_view name) {
    const auto at = std::find_if(list.begin(), list.end(),
                                 [name](const Refused& one) { return one.name == name; });
    return at == list.end() ? std::string_view{} : at->why;
}

bool secret(std::string_view name) {
    constexpr std::array kParts{"password", "secret", "pem", "token", "oauthbearer.config", "jaas"};
    return std::any_of(kParts.begin(), kParts.end(),
                       [name](std::string_view part) { return name.find(part) != name.npos; });
}

}  // namespace

std::string refused_property(Role role, const std::string& name, const std::string& value,
                             int library) {
    std::string_view why = why_of(kForBoth, name);
    if (why.empty())
        why = role == Role::source ? why_of(kForSources, name) : why_of(kForPublishers, name);
    if (!why.empty()) return std::string(why);
    if (name == "partition.assignment.strategy" && value.find("cooperative") != value.npos &&
        library < kCooperativeSince)
        return "this librdkafka can lose its assignment when it commits during a cooperative "
               "rebalance (fixed in 2.10; 2.12 is known to be good): use range or roundrobin, or "
               "a build with SEMEL_KAFKA=bundled";
    // Its members are not shown by the question that finds out who else is in the group, and until
    // 2.15 the library goes on although its heartbeats fail.
    if ((name == "group.protocol" && value != "classic") || name == "group.remote.assignor")
        return "the new group protocol (KIP-848) is not supported: use classic, where "
               "cooperative-sticky moves single partitions as well";
    if (name == "sasl.oauthbearer.method" && value == "oidc" && library < kCooperativeSince)
        return "this librdkafka is built without OIDC (it needs curl): use SCRAM, PLAIN or mutual "
               "TLS, or a build with SEMEL_KAFKA=bundled";
    return {};
}

int library_version() { return rd_kafka_version(); }
std::string library_name() { return std::string("librdkafka ") + rd_kafka_version_str(); }

base::Error invalid(std::string text) {
    return {.code = base::ErrorCode::invalid_argument, .detail = std::move(text)};
}

base::Error error_of(rd_kafka_resp_err_t code, const std::string& doing, base::Applied applied) {
    return {.code = base::ErrorCode::io,
            .applied = applied,
            .detail = "kafka: " + doing + ": " + rd_kafka_err2str(code)};
}

base::Result<void> set(rd_kafka_conf_t* conf, const std::string& name, const std::string& value) {
    std::array<char, 512> text{};
    switch (rd_kafka_conf_set(conf, name.c_str(), value.c_str(), text.data(), text.size())) {
        case RD_KAFKA_CONF_OK:
            return {};
        case RD_KAFKA_CONF_UNKNOWN:
            return invalid("kafka: " + library_name() + " knows no property " + name +
                           ": see its CONFIGURATION.md for the names");
        default:
            return invalid("kafka: the property " + name + " has a value that " + library_name() +
                           " does not take" +
                           (secret(name) ? std::string{} : ": " + std::string(text.data())));
    }
}

base::Result<void> set_all(rd_kafka_conf_t* conf, Role role, const Properties& properties) {
    for (const auto& [name, value] : properties) {
        if (const std::string why = refused_property(role, name, value, library_version());
            !why.empty())
            return invalid("kafka: the property " + name + " cannot be set: " + why);
        if (auto done = set(conf, name, value); !done) return done;
    }
    return {};
}

base::Result<void> check_properties(Role role, const Properties& properties) {
    const Conf conf(rd_kafka_conf_new());
    return set_all(conf.get(), role, properties);
}

long long number_of(const rd_kafka_conf_t* conf, const char* name) {
    std::array<char, 64> text{};
    std::size_t size = text.size();
    if (rd_kafka_conf_get(conf, name, text.data(), &size) != RD_KAFKA_CONF_OK) return 0;
    return std::strtoll(text.data(), nullptr, 10);
}

}  // namespace semel::brokers::kafka
