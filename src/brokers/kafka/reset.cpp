// Moving the committed positions of a group that nobody is in.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>

#include "brokers/kafka/group.hpp"
#include "brokers/kafka/handles.hpp"

namespace semel::brokers::kafka {

using std::chrono::milliseconds;

namespace {

/// A client of the group that subscribes to nothing, and so never joins it.
base::Result<Client> client_for(const Cluster& cluster, const std::string& group) {
    Conf conf(rd_kafka_conf_new());
    for (const auto& [name, value] :
         {std::pair<const char*, std::string>{"bootstrap.servers", cluster.brokers},
          {"client.id", "semel-reset"},
          {"group.id", group},
          {"enable.auto.commit", "false"}}) {
        if (auto done = set(conf.get(), name, value); !done) return std::move(done.error());
    }
    if (auto done = set_all(conf.get(), Role::source, cluster.properties); !done)
        return std::move(done.error());
    rd_kafka_conf_set_error_cb(conf.get(), [](rd_kafka_t*, int, const char*, void*) {});
    rd_kafka_conf_set_log_cb(conf.get(), [](const rd_kafka_t*, int, const char*, const char*) {});
    std::array<char, 512> text{};
    Client client(rd_kafka_new(RD_KAFKA_CONSUMER, conf.get(), text.data(), text.size()));
    if (client == nullptr) return invalid(std::string("kafka: ") + text.data());
    static_cast<void>(conf.release());  // it is the client's now
    return client;
}

std::string name_of(const Partition& partition) {
    return partition.topic + "-" + std::to_string(partition.number);
}

/// Sets the offset of each partition to that of its first message from this time on (Unix, in
/// milliseconds); below 0 where there is none.
base::Result<void> offsets_at(rd_kafka_t* client, rd_kafka_topic_partition_list_t* partitions,
                              std::int64_t unix_ms, milliseconds within) {
    for (int i = 0; i < partitions->cnt; ++i) partitions->elems[i].offset = unix_ms;
    auto code = rd_kafka_offsets_for_times(client, partitions, milliseconds_of(within));
    for (int i = 0; i < partitions->cnt && code == RD_KAFKA_RESP_ERR_NO_ERROR; ++i)
        code = partitions->elems[i].err;
    if (code != RD_KAFKA_RESP_ERR_NO_ERROR)
        return error_of(code, "asking which messages are of that time");
    return {};
}

}  // namespace

base::Result<std::vector<PositionMove>> plan_reset(const Cluster& cluster, const std::string& group,
                                                   const std::vector<std::string>& topics,
                                                   std::optional<std::int32_t> partition,
                                                   ResetTo to, std::int64_t at,
                                                   milliseconds within) {
    auto client = client_for(cluster, group);
    if (!client) return std::move(client.error());
    const auto described = describe_group(client->get(), group, within);
    if (!described) return described.error();
    if (described->member_count > 0)
        return invalid("kafka: the group " + group + " has " +
                       std::to_string(described->member_count) +
                       " member(s): stop the consumers first (a killed one leaves when its session "
                       "is over)");
    const auto all = partitions_of(client->get(), topics, within);
    if (!all) return all.error();
    const TopicPartitions list(rd_kafka_topic_partition_list_new((*all)->cnt));
    for (int i = 0; i < (*all)->cnt; ++i) {
        const rd_kafka_topic_partition_t& one = (*all)->elems[i];
        if (!partition || *partition == one.partition)
            rd_kafka_topic_partition_list_add(list.get(), one.topic, one.partition);
    }
    if (list->cnt == 0) return invalid("kafka: there is no such topic or partition");
    const auto committed = committed_of(client->get(), topics, within);
    if (!committed) return committed.error();
    std::vector<PositionMove> moves;
    for (int i = 0; i < list->cnt; ++i) {
        PositionMove& move = moves.emplace_back();
        move.partition = {list->elems[i].topic, list->elems[i].partition};
        for (const CommittedPosition& one : *committed) {
            if (one.partition == move.partition) move.committed = one.offset;
        }
    }
    if (auto done = ends_of(client->get(), list.get(), End::first, within); !done)
        return done.error();
    for (std::size_t i = 0; i < moves.size(); ++i) moves[i].begin = list->elems[i].offset;
    if (auto done = ends_of(client->get(), list.get(), End::last_stable, within); !done)
        return done.error();
    for (std::size_t i = 0; i < moves.size(); ++i) {
        PositionMove& move = moves[i];
        move.end = list->elems[i].offset;
        switch (to) {
            case ResetTo::earliest:
                move.to = move.begin;
                break;
            case ResetTo::latest:
            case ResetTo::time:
                move.to = move.end;
                break;
            case ResetTo::offset:
                move.to = at;
                break;
        }
        if (move.to < move.begin || move.to > move.end)
            return invalid("kafka: " + name_of(move.partition) + " holds offsets from " +
                           std::to_string(move.begin) + " to " + std::to_string(move.end) +
                           ", and " + std::to_string(move.to) +
                           " is none of them; name a partition that has it");
    }
    if (to != ResetTo::time) return moves;
    if (auto done = offsets_at(client->get(), list.get(), at, within); !done) return done.error();
    for (std::size_t i = 0; i < moves.size(); ++i) {
        // Behind the last stable offset lie messages of transactions that are open.
        const std::int64_t found = list->elems[i].offset;
        if (found >= 0) moves[i].to = std::min(std::max(found, moves[i].begin), moves[i].end);
    }
    return moves;
}

base::Result<void> commit_reset(const Cluster& cluster, const std::string& group,
                                const std::vector<PositionMove>& moves,
                                const std::string& metadata) {
    auto client = client_for(cluster, group);
    if (!client) return std::move(client.error());
    const TopicPartitions list(rd_kafka_topic_partition_list_new(static_cast<int>(moves.size())));
    for (const PositionMove& move : moves) {
        rd_kafka_topic_partition_t* one = rd_kafka_topic_partition_list_add(
            list.get(), move.partition.topic.c_str(), move.partition.number);
        one->offset = move.to;
        one->metadata = ::strdup(metadata.c_str());  // the list's, which frees it
        one->metadata_size = metadata.size();
    }
    const auto code = rd_kafka_commit(client->get(), list.get(), 0);
    if (code != RD_KAFKA_RESP_ERR_NO_ERROR)
        return error_of(code, "committing for the group " + group, base::Applied::unknown);
    for (int i = 0; i < list->cnt; ++i) {
        if (list->elems[i].err != RD_KAFKA_RESP_ERR_NO_ERROR)
            return error_of(list->elems[i].err,
                            "committing " + moves[static_cast<std::size_t>(i)].partition.topic);
    }
    return {};
}

}  // namespace semel::brokers::kafka
