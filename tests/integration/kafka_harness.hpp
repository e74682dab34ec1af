// What the tests of the Kafka leaf share: one broker of the program, and short ways to its topics.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <numeric>

#include "brokers/kafka/kafka.hpp"
#include "support/kafka_server.hpp"
#include "support/recording_listener.hpp"

namespace semel::brokers::kafka {

using std::chrono::milliseconds;
using std::chrono::seconds;
using support::Got;
using support::KafkaServer;
using support::RecordingListener;
using support::ServerProcess;

inline constexpr milliseconds kWithin{10'000};

inline KafkaServer& server() {
    static KafkaServer one({.users = {{"semel", "s3cret"}}});
    return one;
}

inline std::string new_group() {
    static std::atomic<int> count{0};
    return "group-" + std::to_string(++count);
}

inline SourceConfig config_for(const std::string& topic, const std::string& group) {
    return {.brokers = server().address(),
            .topics = {topic},
            .group = group,
            .properties = {{"session.timeout.ms", "6000"},
                           {"heartbeat.interval.ms", "300"},
                           {"reconnect.backoff.max.ms", "500"}},
            .commit_interval = milliseconds{50},
            .drain = seconds{5}};
}

inline std::unique_ptr<Source> source_of(SourceConfig config) {
    auto made = make_source(std::move(config));
    EXPECT_TRUE(made) << made.error().detail;
    return std::move(*made);
}

// Publishes and waits for the confirmations; where they lie, in order.
class Pen {
  public:
    explicit Pen(std::chrono::seconds timeout = std::chrono::seconds{30})
        : publisher_(std::move(*make_publisher({.brokers = server().address(),
                                                .properties = {{"reconnect.backoff.max.ms", "500"}},
                                                .timeout = timeout}))) {}
    base::Result<PublishedAt> write(Outgoing message) {
        std::promise<base::Result<PublishedAt>> told;
        publisher_->publish(std::move(message), [&told](base::Result<PublishedAt> at) {
            told.set_value(std::move(at));
        });
        return told.get_future().get();
    }
    void write(const std::string& topic, const std::vector<std::string>& values,
               std::int32_t partition = 0) {
        std::atomic<std::size_t> confirmed{0};
        for (const std::string& value : values) {
            publisher_->publish({.topic = topic, .partition = partition, .value = value},
                                [&](const auto& at) { confirmed += at.has_value() ? 1 : 0; });
        }
        ASSERT_TRUE(publisher_->flush(seconds{20}));
        ASSERT_EQ(confirmed, values.size());
    }
    Publisher& publisher() { return *publisher_; }

  private:
    std::unique_ptr<Publisher> publisher_;
};

inline Pen& pen() {
    static Pen one;
    return one;
}

inline std::vector<std::string> numbered(const std::string& prefix, int count, int first = 0) {
    std::vector<std::string> out;
    for (int i = first; i < first + count; ++i) out.push_back(prefix + std::to_string(i));
    return out;
}

inline std::vector<std::int64_t> sequence(std::int64_t first, std::int64_t count) {
    std::vector<std::int64_t> out(static_cast<std::size_t>(count));
    std::iota(out.begin(), out.end(), first);
    return out;
}

inline bool committed_becomes(const std::string& group, const std::string& topic,
                              std::int64_t offset, std::int32_t partition = 0) {
    return ServerProcess::eventually(
        [&] { return server().committed(group, topic, partition) == offset; });
}

// A member in a process of its own (kafka_member.cpp), to be killed and frozen.
class Child {
  public:
    Child(const std::string& topic, const std::string& group, const std::string& assignor = "range")
        : process_("member") {
        process_.start({SEMEL_KAFKA_MEMBER, server().address(), topic, group, assignor});
    }
    ServerProcess& process() { return process_; }
    [[nodiscard]] bool wait_line(const std::string& line) const {
        return ServerProcess::eventually(
            [&] { return process_.log().find(line) != std::string::npos; }, seconds{20});
    }

  private:
    ServerProcess process_;
};

}  // namespace semel::brokers::kafka
