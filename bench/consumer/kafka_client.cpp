// Bare librdkafka: fills topics and consumes them. The reference shares no code with what is
// measured.
//
//     bench_kafka_client create BROKERS TOPIC PARTITIONS
//     bench_kafka_client fill BROKERS TOPIC COUNT DUPLICATES KEYS
//     bench_kafka_client consume BROKERS TOPIC COUNT
//     bench_kafka_client transact BROKERS TOPIC COUNT RESULTS EACH
//
// `fill`: COUNT messages of 200 bytes of JSON; DUPLICATES percent of them are second copies, 1 to
// 200 messages behind their originals. KEYS: so many different keys; 0: each id its own. `consume`:
// in batches, commits at the end; prints one JSON object. `transact`: each message is answered to
// the topic RESULTS with its own value, EACH of them and their positions in one transaction of
// Kafka's; the same object.
#include <librdkafka/rdkafka.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fail.hpp"

namespace {

using bench::fail;
using Steady = std::chrono::steady_clock;

constexpr std::size_t message_bytes = 200;
constexpr std::size_t batch = 1000;
constexpr int furthest_copy = 200;

struct Destroy {
    void operator()(rd_kafka_t* client) const { rd_kafka_destroy(client); }
};
using Client = std::unique_ptr<rd_kafka_t, Destroy>;

Client client(rd_kafka_type_t type, const std::map<std::string, std::string>& settings) {
    std::array<char, 512> text{};
    rd_kafka_conf_t* conf = rd_kafka_conf_new();
    for (const auto& [name, value] : settings) {
        if (rd_kafka_conf_set(conf, name.c_str(), value.c_str(), text.data(), text.size()) !=
            RD_KAFKA_CONF_OK)
            fail(text.data());
    }
    Client out(rd_kafka_new(type, conf, text.data(), text.size()));
    if (!out) fail(text.data());
    return out;
}

void create(const std::string& brokers, const std::string& topic, int partitions) {
    const Client admin = client(RD_KAFKA_PRODUCER, {{"bootstrap.servers", brokers}});
    std::array<char, 512> text{};
    rd_kafka_NewTopic_t* wanted =
        rd_kafka_NewTopic_new(topic.c_str(), partitions, 1, text.data(), text.size());
    rd_kafka_queue_t* queue = rd_kafka_queue_new(admin.get());
    rd_kafka_CreateTopics(admin.get(), &wanted, 1, nullptr, queue);
    rd_kafka_event_t* event = rd_kafka_queue_poll(queue, 30'000);
    if (event == nullptr || rd_kafka_event_error(event) != RD_KAFKA_RESP_ERR_NO_ERROR)
        fail("creating " + topic + ": no answer");
    std::size_t count = 0;
    const auto* results =
        rd_kafka_CreateTopics_result_topics(rd_kafka_event_CreateTopics_result(event), &count);
    if (count != 1 || rd_kafka_topic_result_error(results[0]) != RD_KAFKA_RESP_ERR_NO_ERROR)
        fail("creating " + topic + " was refused");
    rd_kafka_event_destroy(event);
    rd_kafka_queue_destroy(queue);
    rd_kafka_NewTopic_destroy(wanted);
}

std::string payload(long n) {
    std::string out = "{\"messageId\":\"m-" + std::to_string(n) + "\",\"orderNo\":\"o-" +
                      std::to_string(n) + "\",\"productId\":1,\"quantity\":2,\"pad\":\"";
    out.append(message_bytes - std::min(message_bytes, out.size() + 2), 'x');
    return out + "\"}";
}

void fill(const std::string& brokers, const std::string& topic, long count, long percent,
          long keys) {
    static long refused = 0;
    rd_kafka_conf_t* conf = rd_kafka_conf_new();
    std::array<char, 512> text{};
    const std::map<std::string, std::string> settings{{"bootstrap.servers", brokers},
                                                      {"linger.ms", "5"},
                                                      {"queue.buffering.max.messages", "200000"},
                                                      {"enable.idempotence", "true"}};
    for (const auto& [name, value] : settings)
        rd_kafka_conf_set(conf, name.c_str(), value.c_str(), text.data(), text.size());
    rd_kafka_conf_set_dr_msg_cb(conf, [](rd_kafka_t*, const rd_kafka_message_t* message, void*) {
        refused += message->err == RD_KAFKA_RESP_ERR_NO_ERROR ? 0 : 1;
    });
    const Client producer(rd_kafka_new(RD_KAFKA_PRODUCER, conf, text.data(), text.size()));
    if (!producer) fail(text.data());
    rd_kafka_topic_t* handle = rd_kafka_topic_new(producer.get(), topic.c_str(), nullptr);
    const long copies = count * percent / 100;
    std::mt19937 random(42);
    std::vector<std::pair<double, long>> plan;
    for (long n = 0; n < count - copies; ++n) {
        plan.emplace_back(static_cast<double>(n), n);
        if (n < copies)
            plan.emplace_back(static_cast<double>(n) + 0.5 + random() % furthest_copy, n);
    }
    std::sort(plan.begin(), plan.end());
    for (const auto& [when, n] : plan) {
        std::string value = payload(n);
        const std::string key = "k-" + std::to_string(keys == 0 ? n : n % keys);
        for (;;) {
            if (rd_kafka_produce(handle, RD_KAFKA_PARTITION_UA, RD_KAFKA_MSG_F_COPY, value.data(),
                                 value.size(), key.data(), key.size(), nullptr) == 0)
                break;
            if (rd_kafka_last_error() != RD_KAFKA_RESP_ERR__QUEUE_FULL)
                fail(rd_kafka_err2str(rd_kafka_last_error()));
            rd_kafka_poll(producer.get(), 50);
        }
        if (n % 512 == 0) rd_kafka_poll(producer.get(), 0);
    }
    if (rd_kafka_flush(producer.get(), 120'000) != RD_KAFKA_RESP_ERR_NO_ERROR || refused != 0)
        fail("not all messages were taken");
    rd_kafka_topic_destroy(handle);
}

double cpu_us() {
    rusage used{};
    ::getrusage(RUSAGE_SELF, &used);
    const auto us = [](const timeval& t) {
        return static_cast<double>(t.tv_sec) * 1e6 + static_cast<double>(t.tv_usec);
    };
    return us(used.ru_utime) + us(used.ru_stime);
}

Client subscribed(const std::string& brokers, const std::string& topic) {
    Client consumer =
        client(RD_KAFKA_CONSUMER, {{"bootstrap.servers", brokers},
                                   {"group.id", "bare-" + std::to_string(::getpid()) + topic},
                                   {"auto.offset.reset", "earliest"},
                                   {"enable.auto.commit", "false"},
                                   {"fetch.wait.max.ms", "50"},
                                   {"queued.min.messages", "200000"}});
    rd_kafka_poll_set_consumer(consumer.get());
    rd_kafka_topic_partition_list_t* topics = rd_kafka_topic_partition_list_new(1);
    rd_kafka_topic_partition_list_add(topics, topic.c_str(), RD_KAFKA_PARTITION_UA);
    if (const auto error = rd_kafka_subscribe(consumer.get(), topics))
        fail(rd_kafka_err2str(error));
    rd_kafka_topic_partition_list_destroy(topics);
    return consumer;
}

void consume(const std::string& brokers, const std::string& topic, long count) {
    const auto started = Steady::now();
    const Client consumer = subscribed(brokers, topic);
    rd_kafka_queue_t* queue = rd_kafka_queue_get_consumer(consumer.get());
    std::vector<rd_kafka_message_t*> messages(batch);
    long got = 0;
    std::size_t bytes = 0;
    Steady::time_point first;
    while (got < count && Steady::now() < started + std::chrono::seconds(120)) {
        const ssize_t more = rd_kafka_consume_batch_queue(queue, 1000, messages.data(), batch);
        for (ssize_t i = 0; i < more; ++i) {
            rd_kafka_message_t* const one = messages[static_cast<std::size_t>(i)];
            if (one->err == RD_KAFKA_RESP_ERR_NO_ERROR) {
                if (got++ == 0) first = Steady::now();
                bytes += one->len;
            }
            rd_kafka_message_destroy(one);
        }
    }
    const double seconds = std::chrono::duration<double>(Steady::now() - first).count();
    const double cpu = cpu_us();
    rd_kafka_queue_destroy(queue);
    if (got < count) fail("only " + std::to_string(got) + " messages came");
    rd_kafka_commit(consumer.get(), nullptr, 0);
    rd_kafka_consumer_close(consumer.get());
    const auto done = static_cast<double>(got);
    std::printf(
        "{\"messages\":%ld,\"bytes\":%zu,\"per_second\":%.1f,\"cpu_us\":%.3f,"
        "\"first_message_seconds\":%.4f}\n",
        got, bytes, done / seconds, cpu / done,
        std::chrono::duration<double>(first - started).count());
}

void check(rd_kafka_error_t* error) {
    if (error != nullptr) fail(rd_kafka_error_string(error));
}

/// Any error ends it: that a transaction can be aborted and begun anew is not what is measured.
void transact(const std::string& brokers, const std::string& topic, long count,
              const std::string& results, long each) {
    const auto started = Steady::now();
    const Client producer = client(RD_KAFKA_PRODUCER, {{"bootstrap.servers", brokers},
                                                       {"transactional.id", "bare-" + results},
                                                       {"queue.buffering.max.messages", "200000"},
                                                       {"linger.ms", "5"}});
    check(rd_kafka_init_transactions(producer.get(), 30'000));
    rd_kafka_topic_t* handle = rd_kafka_topic_new(producer.get(), results.c_str(), nullptr);
    const Client consumer = subscribed(brokers, topic);
    rd_kafka_queue_t* queue = rd_kafka_queue_get_consumer(consumer.get());
    std::vector<rd_kafka_message_t*> messages(static_cast<std::size_t>(each));
    long got = 0;
    long transactions = 0;
    Steady::time_point first;
    while (got < count && Steady::now() < started + std::chrono::seconds(150)) {
        check(rd_kafka_begin_transaction(producer.get()));
        const long wanted = std::min(each, count - got);
        long in_this = 0;
        while (in_this < wanted && Steady::now() < started + std::chrono::seconds(150)) {
            const ssize_t more = rd_kafka_consume_batch_queue(
                queue, 1000, messages.data(), static_cast<std::size_t>(wanted - in_this));
            for (ssize_t i = 0; i < more; ++i) {
                rd_kafka_message_t* const one = messages[static_cast<std::size_t>(i)];
                if (one->err == RD_KAFKA_RESP_ERR_NO_ERROR) {
                    if (got + in_this++ == 0) first = Steady::now();
                    if (rd_kafka_produce(handle, RD_KAFKA_PARTITION_UA, RD_KAFKA_MSG_F_COPY,
                                         one->payload, one->len, one->key, one->key_len,
                                         nullptr) != 0)
                        fail(rd_kafka_err2str(rd_kafka_last_error()));
                }
                rd_kafka_message_destroy(one);
            }
            rd_kafka_poll(producer.get(), 0);
        }
        rd_kafka_topic_partition_list_t* positions = nullptr;
        rd_kafka_assignment(consumer.get(), &positions);
        rd_kafka_position(consumer.get(), positions);
        rd_kafka_consumer_group_metadata_t* group =
            rd_kafka_consumer_group_metadata(consumer.get());
        check(rd_kafka_send_offsets_to_transaction(producer.get(), positions, group, 30'000));
        check(rd_kafka_commit_transaction(producer.get(), 30'000));
        rd_kafka_consumer_group_metadata_destroy(group);
        rd_kafka_topic_partition_list_destroy(positions);
        got += in_this;
        ++transactions;
    }
    const double seconds = std::chrono::duration<double>(Steady::now() - first).count();
    const double cpu = cpu_us();
    rd_kafka_queue_destroy(queue);
    rd_kafka_topic_destroy(handle);
    if (got < count) fail("only " + std::to_string(got) + " messages came");
    rd_kafka_consumer_close(consumer.get());
    const auto done = static_cast<double>(got);
    std::printf(
        "{\"messages\":%ld,\"transactions\":%ld,\"per_second\":%.1f,\"cpu_us\":%.3f,"
        "\"first_message_seconds\":%.4f}\n",
        got, transactions, done / seconds, cpu / done,
        std::chrono::duration<double>(first - started).count());
}

}  // namespace

int main(int argc, char** argv) {
    const std::string mode = argc > 1 ? argv[1] : "";
    if (mode == "create" && argc == 5) {
        create(argv[2], argv[3], std::atoi(argv[4]));
    } else if (mode == "fill" && argc == 7) {
        fill(argv[2], argv[3], std::atol(argv[4]), std::atol(argv[5]), std::atol(argv[6]));
    } else if (mode == "consume" && argc == 5) {
        consume(argv[2], argv[3], std::atol(argv[4]));
    } else if (mode == "transact" && argc == 7) {
        transact(argv[2], argv[3], std::atol(argv[4]), argv[5], std::atol(argv[6]));
    } else {
        fail("see the top of bench/consumer/kafka_client.cpp");
    }
}
