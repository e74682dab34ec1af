// What is asked of the brokers about a group and its partitions. Each function blocks up to
// `within`, on any thread. Not by the library's admin requests: those to a coordinator that goes
// away in the middle abort the process in 2.0.2 ("rd_kafka_enq_once_del_source_return").
#pragma once

#include <string>
#include <vector>

#include "brokers/kafka/handles.hpp"

namespace semel::brokers::kafka {

base::Result<GroupDescription> describe_group(rd_kafka_t* client, const std::string& group,
                                              std::chrono::milliseconds within);
/// Of all partitions of these topics (names, or patterns that begin with "^"), by the client's
/// group.
base::Result<std::vector<CommittedPosition>> committed_of(rd_kafka_t* client,
                                                          const std::vector<std::string>& topics,
                                                          std::chrono::milliseconds within);
/// All partitions of these topics that exist.
base::Result<TopicPartitions> partitions_of(rd_kafka_t* client,
                                            const std::vector<std::string>& topics,
                                            std::chrono::milliseconds within);
/// Whether `name` is one of `topics`, names or patterns that begin with "^".
bool wanted(const std::vector<std::string>& topics, const std::string& name);
/// The broker's id of the topic; empty where the library cannot ask for it. Asked of any broker, so
/// that no coordinator is concerned.
base::Result<std::string> topic_id_of(rd_kafka_t* client, const std::string& topic,
                                      std::chrono::milliseconds within);
enum class End : std::uint8_t { first, last_stable };
/// Sets the offset of each to the partition's first or last stable one. By the client's isolation
/// level.
base::Result<void> ends_of(rd_kafka_t* client, rd_kafka_topic_partition_list_t* partitions, End end,
                           std::chrono::milliseconds within);

}  // namespace semel::brokers::kafka
