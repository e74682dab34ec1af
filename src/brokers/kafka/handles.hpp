// What the sources of this folder share: owners of librdkafka's objects, and its errors as ours.
#pragma once

#include <librdkafka/rdkafka.h>

#include <chrono>
#include <memory>
#include <string>

#include "base/result.hpp"
#include "brokers/kafka/kafka.hpp"

namespace semel::brokers::kafka {

template <auto destroy>
struct Destroy {
    template <class T>
    void operator()(T* object) const {
        destroy(object);
    }
};
template <class T, auto destroy>
using Owned = std::unique_ptr<T, Destroy<destroy>>;

using Client = Owned<rd_kafka_t, rd_kafka_destroy>;
using Conf = Owned<rd_kafka_conf_t, rd_kafka_conf_destroy>;
using Queue = Owned<rd_kafka_queue_t, rd_kafka_queue_destroy>;
using Event = Owned<rd_kafka_event_t, rd_kafka_event_destroy>;
using TopicPartitions =
    Owned<rd_kafka_topic_partition_list_t, rd_kafka_topic_partition_list_destroy>;
using MessagePtr = Owned<rd_kafka_message_t, rd_kafka_message_destroy>;
using KafkaError = Owned<rd_kafka_error_t, rd_kafka_error_destroy>;

/// Sets one property; `value` is not repeated in the error if the name is a secret's.
base::Result<void> set(rd_kafka_conf_t* conf, const std::string& name, const std::string& value);
/// All of `properties`, each checked with refused_property().
base::Result<void> set_all(rd_kafka_conf_t* conf, Role role, const Properties& properties);
/// The numeric value of a property as it stands.
long long number_of(const rd_kafka_conf_t* conf, const char* name);

base::Error error_of(rd_kafka_resp_err_t code, const std::string& doing,
                     base::Applied applied = base::Applied::no);
base::Error invalid(std::string text);

inline int milliseconds_of(std::chrono::milliseconds d) { return static_cast<int>(d.count()); }

}  // namespace semel::brokers::kafka
