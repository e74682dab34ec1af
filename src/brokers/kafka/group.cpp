#include "brokers/kafka/group.hpp"

#include <regex>

namespace semel::brokers::kafka {

namespace {

// ListOffsets' own numbers in place of a time.
constexpr std::int64_t kTimestampFirst = -2;
constexpr std::int64_t kTimestampEnd = -1;

std::string text_of(const char* text) { return text == nullptr ? std::string{} : text; }

// A member's assignment as the protocol has it: version, then topics, each with its partitions.
class AssignmentReader {
  public:
    AssignmentReader(const void* bytes, int size)
        : at_(static_cast<const unsigned char*>(bytes)),
          end_(at_ + (bytes == nullptr ? 0 : size)) {}

    std::vector<Partition> partitions() {
        std::vector<Partition> out;
        number(2);
        for (std::int64_t topics = number(4); topics > 0 && !cut_; --topics) {
            const std::string topic = text(number(2));
            for (std::int64_t count = number(4); count > 0 && !cut_; --count)
                out.push_back({topic, static_cast<std::int32_t>(number(4))});
        }
        return cut_ ? std::vector<Partition>{} : out;
    }

  private:
    std::int64_t number(int bytes) {
        std::int64_t out = 0;
        for (int i = 0; i < bytes; ++i) {
            if (at_ == end_) cut_ = true;
            out = out * 256 + (cut_ ? 0 : *at_++);
        }
        return out;
    }
    std::string text(std::int64_t size) {
        if (size > end_ - at_) cut_ = true;
        if (cut_) return {};
        std::string out(reinterpret_cast<const char*>(at_), static_cast<std::size_t>(size));
        at_ += size;
        return out;
    }
    const unsigned char* at_;
    const unsigned char* end_;
    bool cut_ = false;
};

}  // namespace

bool wanted(const std::vector<std::string>& topics, const std::string& name) {
    for (const std::string& topic : topics) {
        if (topic == name) return true;
        if (!topic.starts_with('^')) continue;
        try {
            if (std::regex_search(name, std::regex(topic, std::regex::extended))) return true;
        } catch (
            const std::regex_error&) {  // the library's own syntax is wider: its topics are asked
            return true;
        }
    }
    return false;
}

base::Result<TopicPartitions> partitions_of(rd_kafka_t* client,
                                            const std::vector<std::string>& topics,
                                            std::chrono::milliseconds within) {
    const struct rd_kafka_metadata* metadata = nullptr;
    const auto code = rd_kafka_metadata(client, 1, nullptr, &metadata, milliseconds_of(within));
    const Owned<const struct rd_kafka_metadata, rd_kafka_metadata_destroy> owned(metadata);
    if (code != RD_KAFKA_RESP_ERR_NO_ERROR) return error_of(code, "asking for topics");
    TopicPartitions list(rd_kafka_topic_partition_list_new(16));
    for (int t = 0; t < metadata->topic_cnt; ++t) {
        const rd_kafka_metadata_topic& topic = metadata->topics[t];
        if (!wanted(topics, topic.topic)) continue;
        for (int p = 0; p < topic.partition_cnt; ++p)
            rd_kafka_topic_partition_list_add(list.get(), topic.topic, topic.partitions[p].id);
    }
    return list;
}

base::Result<GroupDescription> describe_group(rd_kafka_t* client, const std::string& group,
                                              std::chrono::milliseconds within) {
    const std::string doing = "describing the group " + group;
    const struct rd_kafka_group_list* list = nullptr;
    const auto code = rd_kafka_list_groups(client, group.c_str(), &list, milliseconds_of(within));
    const Owned<const struct rd_kafka_group_list, rd_kafka_group_list_destroy> owned(list);
    // Some of several brokers answered: the coordinator is perhaps among them.
    if (code != RD_KAFKA_RESP_ERR_NO_ERROR && code != RD_KAFKA_RESP_ERR__PARTIAL)
        return error_of(code, doing);
    if (list == nullptr || list->group_cnt != 1)
        return error_of(RD_KAFKA_RESP_ERR_COORDINATOR_NOT_AVAILABLE, doing);
    const rd_kafka_group_info& info = list->groups[0];
    if (info.err != RD_KAFKA_RESP_ERR_NO_ERROR) return error_of(info.err, doing);
    const std::unique_ptr<char, void (*)(char*)> self(
        rd_kafka_memberid(client), [](char* text) { rd_kafka_mem_free(nullptr, text); });
    GroupDescription out;
    out.state = text_of(info.state);
    out.member_count = static_cast<std::size_t>(info.member_cnt);
    for (int i = 0; i < info.member_cnt; ++i) {
        const rd_kafka_group_member_info& member = info.members[i];
        out.members.push_back(
            {.id = text_of(member.member_id),
             .client_id = text_of(member.client_id),
             .host = text_of(member.client_host),
             .self = self != nullptr && text_of(member.member_id) == self.get(),
             .partitions = AssignmentReader(member.member_assignment, member.member_assignment_size)
                               .partitions()});
    }
    return out;
}

base::Result<std::vector<CommittedPosition>> committed_of(rd_kafka_t* client,
                                                          const std::vector<std::string>& topics,
                                                          std::chrono::milliseconds within) {
    const std::string doing = "reading committed offsets";
    const auto asked = partitions_of(client, topics, within);
    if (!asked) return asked.error();
    const TopicPartitions& list = *asked;
    std::vector<CommittedPosition> out;
    if (list->cnt == 0) return out;
    const auto code = rd_kafka_committed(client, list.get(), milliseconds_of(within));
    if (code != RD_KAFKA_RESP_ERR_NO_ERROR) return error_of(code, doing);
    for (int i = 0; i < list->cnt; ++i) {
        const rd_kafka_topic_partition_t& one = list->elems[i];
        if (one.err != RD_KAFKA_RESP_ERR_NO_ERROR) return error_of(one.err, doing);
        if (one.offset < 0) continue;
        out.push_back({.partition = {one.topic, one.partition},
                       .offset = one.offset,
                       .metadata = one.metadata == nullptr
                                       ? std::string{}
                                       : std::string(static_cast<const char*>(one.metadata),
                                                     one.metadata_size)});
    }
    return out;
}

base::Result<void> ends_of(rd_kafka_t* client, rd_kafka_topic_partition_list_t* partitions, End end,
                           std::chrono::milliseconds within) {
    for (int i = 0; i < partitions->cnt; ++i)
        partitions->elems[i].offset = end == End::first ? kTimestampFirst : kTimestampEnd;
    auto code = rd_kafka_offsets_for_times(client, partitions, milliseconds_of(within));
    for (int i = 0; i < partitions->cnt && code == RD_KAFKA_RESP_ERR_NO_ERROR; ++i) {
        code = partitions->elems[i].err;
        if (code == RD_KAFKA_RESP_ERR_NO_ERROR && partitions->elems[i].offset < 0)
            code = RD_KAFKA_RESP_ERR__UNKNOWN_PARTITION;
    }
    if (code != RD_KAFKA_RESP_ERR_NO_ERROR)
        return error_of(code, "asking where the partitions begin and end");
    return {};
}

}  // namespace semel::brokers::kafka
