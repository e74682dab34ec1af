// Kafka, on librdkafka: a member of a consumer group, and an idempotent producer.
#pragma once

#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "brokers/publisher.hpp"
#include "brokers/source.hpp"

namespace semel::brokers::kafka {

/// Where a partition begins for which the group has committed nothing. The position is resolved at
/// the assign and committed at once, so that a crash before the first message does not skip any.
enum class Start : std::uint8_t { earliest, latest, fail };

using Properties = std::map<std::string, std::string>;

struct SourceConfig {
    std::string brokers;              ///< "host:port,host:port"
    std::vector<std::string> topics;  ///< Names, or patterns that begin with "^".
    /// Topics of delayed copies (brokers/delayed.hpp), read as well. Nothing of a partition is
    /// delivered before its next message is due; until then it takes no part of the window. They
    /// begin at the earliest message, whatever `start` says.
    std::vector<std::string> delayed;
    std::string group;
    std::string client_id = "semel";
    /// Reads every partition from the group's positions, without being a member of the group and
    /// without committing: what the group has and does stays as it is. `delayed`, `instance_id` and
    /// the commits' settings mean nothing then; new partitions are looked for now and then.
    bool observe = false;
    std::string instance_id;  ///< Static membership; empty: none.
    Start start = Start::earliest;
    Properties properties;  ///< librdkafka's, but for those that refused_property() names.
    std::chrono::milliseconds commit_interval{200};  ///< Between two commits of watermarks.
    std::chrono::milliseconds drain{
        20'000};                  ///< For revoked partitions; below max.poll.interval.ms.
    std::size_t window = 10'000;  ///< Unsettled messages at most.
    std::size_t window_bytes =
        64 * 1024 * 1024;  ///< Unsettled bytes at most (one message may exceed it).
    /// Fetched ahead by the library at most, about (one answer of a broker more). At the
    /// limit 2.0.2 fetches nothing for some 50 ms, so that a small one costs speed.
    std::size_t fetched_bytes = 64 * 1024 * 1024;
    std::string
        commit_metadata;  ///< Text committed beside every position; at most metadata_max_bytes.
};

/// The broker's own limit (offset.metadata.max.bytes).
inline constexpr std::size_t metadata_max_bytes = 4096;
/// Messages handed to the listener at once.
inline constexpr std::size_t delivered_batch_max = 500;

struct PublisherConfig {
    std::string brokers;
    std::string client_id = "semel";
    Properties properties;
    std::chrono::milliseconds timeout{30'000};  ///< Until an unconfirmed message is given up.
    std::size_t queued = 100'000;               ///< Messages not yet confirmed, at most.
};

/// Checks the configuration and makes the client; start() connects. invalid_argument names the
/// property and the reason.
base::Result<std::unique_ptr<Source>> make_source(SourceConfig config);
base::Result<std::unique_ptr<Publisher>> make_publisher(PublisherConfig config);

enum class Role : std::uint8_t { source, publisher };
/// Why `properties` may not set this one; empty if it may. Promises rest on the refused ones, or
/// they have a key of their own. `library` is library_version().
std::string refused_property(Role role, const std::string& name, const std::string& value,
                             int library);

/// Whether these properties may be set and the library takes their values. Contacts nothing.
/// invalid_argument names the property and the reason.
base::Result<void> check_properties(Role role, const Properties& properties);

/// How a cluster is reached for a question, without being a member of a group.
struct Cluster {
    std::string brokers;
    Properties properties;  ///< Those of a publisher.
};

struct TopicFacts {
    std::string name;
    std::size_t partitions = 0;
    /// How long messages are kept; nullopt: without end, or as long as no newer one has the key, or
    /// it is not known: see `about_retention`.
    std::optional<std::chrono::milliseconds> retention;
    /// Why there is no retention, for people: "retention.ms is -1"; empty where there is one.
    std::string about_retention;
    /// A message may vanish because a newer one has its key, or because the log has grown.
    bool may_lose = false;
};

/// What the brokers know of these topics, names or patterns that begin with "^"; those that do not
/// exist are left out, and none is made. Blocks up to `within`. An error: they cannot be asked.
base::Result<std::vector<TopicFacts>> look_at_topics(const Cluster& cluster,
                                                     const std::vector<std::string>& topics,
                                                     std::chrono::milliseconds within);
/// What a topic is made with; else the broker's own defaults.
struct TopicShape {
    std::optional<int> partitions;
    std::map<std::string, std::string> settings;
};
/// Makes the topic unless it exists. Blocks up to `within`.
base::Result<void> ensure_topic(const Cluster& cluster, const std::string& topic,
                                std::chrono::milliseconds within, const TopicShape& shape = {});

/// One partition of a group's reset.
struct PositionMove {
    Partition partition;
    std::int64_t begin = 0, end = 0;  ///< The first offset that is kept, and the last stable one.
    std::int64_t committed = -1;      ///< -1: nothing.
    std::int64_t to = 0;
};
enum class ResetTo : std::uint8_t {
    earliest,
    latest,
    offset,
    time,  ///< To the first message of that time or later; to the end where there is none.
};

/// Where a group's partitions would be moved to. `cluster.properties` are those of a source.
/// `at`: the offset, or the time (Unix, in milliseconds). `partition`: of all topics only this
/// number. Errors: invalid_argument (somebody is in the group,
/// no such partition, an offset outside of the log); else the brokers cannot be asked. Blocks up to
/// `within` for each question.
base::Result<std::vector<PositionMove>> plan_reset(const Cluster& cluster, const std::string& group,
                                                   const std::vector<std::string>& topics,
                                                   std::optional<std::int32_t> partition,
                                                   ResetTo to, std::int64_t at,
                                                   std::chrono::milliseconds within);
/// Commits them, with `metadata` beside each position. The group must be empty.
base::Result<void> commit_reset(const Cluster& cluster, const std::string& group,
                                const std::vector<PositionMove>& moves,
                                const std::string& metadata);

/// rd_kafka_version(): 0x020002ff is 2.0.2.
int library_version();
std::string library_name();  ///< "librdkafka 2.0.2"

}  // namespace semel::brokers::kafka
