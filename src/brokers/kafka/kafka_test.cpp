// What is refused by name, and faults that a real broker does not show on demand: librdkafka's mock
// cluster.
#include "brokers/kafka/kafka.hpp"

#include <gtest/gtest.h>
#include <librdkafka/rdkafka.h>
#include <librdkafka/rdkafka_mock.h>

#include <array>
#include <atomic>

#include "support/recording_listener.hpp"

namespace semel::brokers::kafka {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using support::RecordingListener;
using support::ServerProcess;

constexpr int k2_0_2 = 0x020002ff;
constexpr int k2_12_1 = 0x020c01ff;
// Protocol numbers of the requests.
constexpr std::int16_t kOffsetCommit = 8, kOffsetFetch = 9, kHeartbeat = 12, kProduce = 0;

TEST(KafkaProperties, those_that_promises_rest_on_are_refused_with_the_reason) {
    for (const char* name :
         {"enable.auto.commit", "auto.commit.interval.ms", "enable.auto.offset.store",
          "auto.offset.reset", "isolation.level", "group.id", "client.id", "group.instance.id",
          "bootstrap.servers", "enable.partition.eof", "plugin.library.paths"})
        EXPECT_NE(refused_property(Role::source, name, "x", k2_12_1), "") << name;
    for (const char* name : {"enable.idempotence", "acks", "partitioner", "transactional.id"})
        EXPECT_NE(refused_property(Role::publisher, name, "x", k2_12_1), "") << name;
    for (const char* name : {"sasl.password", "ssl.ca.location", "session.timeout.ms",
                             "max.poll.interval.ms", "fetch.max.bytes"})
        EXPECT_EQ(refused_property(Role::source, name, "x", k2_0_2), "") << name;
    const auto said = make_source({.brokers = "b",
                                   .topics = {"t"},
                                   .group = "g",
                                   .properties = {{"enable.auto.commit", "true"}}});
    ASSERT_FALSE(said);
    EXPECT_EQ(said.error().code, base::ErrorCode::invalid_argument);
    EXPECT_NE(said.error().detail.find("enable.auto.commit"), std::string::npos);
    EXPECT_NE(said.error().detail.find("finished"), std::string::npos) << said.error().detail;
}

TEST(KafkaProperties, what_an_old_library_gets_wrong_is_refused_there_and_taken_by_a_newer_one) {
    const char* const strategy = "partition.assignment.strategy";
    EXPECT_NE(refused_property(Role::source, strategy, "cooperative-sticky", k2_0_2), "");
    EXPECT_EQ(refused_property(Role::source, strategy, "cooperative-sticky", k2_12_1), "");
    EXPECT_EQ(refused_property(Role::source, strategy, "roundrobin", k2_0_2), "");
    for (const int library : {k2_0_2, k2_12_1}) {
        EXPECT_NE(refused_property(Role::source, "group.protocol", "consumer", library), "");
        EXPECT_EQ(refused_property(Role::source, "group.protocol", "classic", library), "");
    }
    EXPECT_NE(refused_property(Role::source, "sasl.oauthbearer.method", "oidc", k2_0_2), "");
    EXPECT_EQ(refused_property(Role::source, "sasl.oauthbearer.method", "oidc", k2_12_1), "");
    EXPECT_NE(library_name().find("librdkafka "), std::string::npos);
}

TEST(KafkaProperties, bad_ones_are_named_without_secrets) {
    const auto with = [](Properties properties) {
        return make_source(
                   {.brokers = "b", .topics = {"t"}, .group = "g", .properties = properties})
            .error()
            .detail;
    };
    EXPECT_NE(with({{"no.such.property", "1"}}).find("no.such.property"), std::string::npos);
    EXPECT_NE(with({{"session.timeout.ms", "soon"}}).find("session.timeout.ms"), std::string::npos);
    EXPECT_EQ(with({{"sasl.oauthbearer.client.secret.x", "s3cret"}}).find("s3cret"),
              std::string::npos);
    EXPECT_NE(with({{"max.poll.interval.ms", "30000"}}).find("drain"), std::string::npos)
        << "a drain of 20 s does not fit";
    EXPECT_FALSE(make_source({.brokers = "b",
                              .topics = {"t"},
                              .group = "g",
                              .commit_metadata = std::string(metadata_max_bytes + 1, 'x')}));
    EXPECT_FALSE(make_source({.brokers = "b", .topics = {}, .group = "g"}));
}

// A cluster inside a client of its own.
class MockCluster {
  public:
    MockCluster() {
        rd_kafka_conf_t* conf = rd_kafka_conf_new();
        std::array<char, 256> text{};
        rd_kafka_conf_set(conf, "test.mock.num.brokers", "1", text.data(), text.size());
        rd_kafka_conf_set(conf, "log_level", "0", text.data(), text.size());
        owner_ = rd_kafka_new(RD_KAFKA_PRODUCER, conf, text.data(), text.size());
        cluster_ = rd_kafka_handle_mock_cluster(owner_);
    }
    ~MockCluster() { rd_kafka_destroy(owner_); }
    MockCluster(const MockCluster&) = delete;
    MockCluster& operator=(const MockCluster&) = delete;
    [[nodiscard]] std::string address() const { return rd_kafka_mock_cluster_bootstraps(cluster_); }
    void topic(const std::string& name, int partitions) const {
        rd_kafka_mock_topic_create(cluster_, name.c_str(), partitions, 1);
    }
    void fail(std::int16_t request, const std::vector<rd_kafka_resp_err_t>& errors) const {
        rd_kafka_mock_push_request_errors_array(cluster_, request, errors.size(), errors.data());
    }
    [[nodiscard]] SourceConfig source(const std::string& topic) const {
        return {.brokers = address(),
                .topics = {topic},
                .group = "g-" + topic,
                .properties = {{"heartbeat.interval.ms", "100"}},
                .commit_interval = milliseconds{20}};
    }

  private:
    rd_kafka_t* owner_ = nullptr;
    rd_kafka_mock_cluster_t* cluster_ = nullptr;
};

void publish(const MockCluster& cluster, const std::string& topic, int count) {
    auto made = make_publisher({.brokers = cluster.address()});
    ASSERT_TRUE(made) << made.error().detail;
    std::atomic<int> confirmed{0};
    for (int i = 0; i < count; ++i)
        (*made)->publish({.topic = topic, .partition = 0, .value = "m" + std::to_string(i)},
                         [&](const auto& at) { confirmed += at.has_value() ? 1 : 0; });
    ASSERT_TRUE((*made)->flush(seconds{20}));
    ASSERT_EQ(confirmed, count);
}

TEST(KafkaMock, a_refused_commit_is_tried_again_and_a_forbidden_one_is_an_alarm) {
    const MockCluster cluster;
    cluster.topic("commits", 1);
    publish(cluster, "commits", 3);
    auto made = make_source(cluster.source("commits"));
    ASSERT_TRUE(made);
    Source& source = **made;
    RecordingListener listener(source);
    ASSERT_TRUE(source.start(listener));
    ASSERT_TRUE(listener.wait_count(3)) << listener.all_problems();
    cluster.fail(kOffsetCommit, {RD_KAFKA_RESP_ERR_REBALANCE_IN_PROGRESS,
                                 RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS});
    for (const support::Got& one : listener.got()) source.settle(one.receipt);
    EXPECT_TRUE(ServerProcess::eventually(
        [&] { return source.state().size() == 1 && source.state()[0].committed == 3; }));
    EXPECT_EQ(listener.told("lost").size() + listener.told("revoked").size(), 0u);
    EXPECT_EQ(listener.problem_of(ProblemKind::commit), "");

    // Forbidden: an alarm, and nothing is believed.
    publish(cluster, "commits", 1);
    ASSERT_TRUE(listener.wait_count(4));
    cluster.fail(kOffsetCommit,
                 std::vector<rd_kafka_resp_err_t>(3, RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED));
    source.settle(listener.got()[3].receipt);
    EXPECT_TRUE(listener.wait_problem(ProblemKind::commit)) << listener.all_problems();
    EXPECT_TRUE(ServerProcess::eventually([&] { return source.state()[0].committed == 4; }))
        << "allowed again";
}

TEST(KafkaMock, an_unknown_member_has_lost_its_partitions) {
    const MockCluster cluster;
    cluster.topic("expelled", 1);
    publish(cluster, "expelled", 2);
    auto made = make_source(cluster.source("expelled"));
    ASSERT_TRUE(made);
    Source& source = **made;
    RecordingListener listener(source);
    ASSERT_TRUE(source.start(listener));
    ASSERT_TRUE(listener.wait_count(2)) << listener.all_problems();
    const auto before = listener.got();
    cluster.fail(kHeartbeat, {RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID});
    ASSERT_TRUE(listener.wait_told("lost", 1)) << listener.all_problems();
    EXPECT_EQ(source.settle(before[0].receipt), 0u);
    EXPECT_TRUE(source.state().empty());
    EXPECT_EQ(listener.told("released").size(), 0u);
}

TEST(KafkaMock, positions_that_cannot_be_read_delay_the_beginning_and_never_guess_it) {
    const MockCluster cluster;
    cluster.topic("delayed", 1);
    publish(cluster, "delayed", 2);
    cluster.fail(kOffsetFetch,
                 std::vector<rd_kafka_resp_err_t>(3, RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED));
    auto made = make_source(cluster.source("delayed"));
    ASSERT_TRUE(made);
    RecordingListener listener(**made);
    ASSERT_TRUE((*made)->start(listener));
    ASSERT_TRUE(listener.wait_count(2)) << listener.all_problems();
    EXPECT_NE(listener.all_problems().find("begin later"), std::string::npos)
        << listener.all_problems();
    EXPECT_EQ(listener.offsets(), (std::vector<std::int64_t>{0, 1}));
}

TEST(KafkaMock, a_fatal_producer_says_what_is_in_doubt_and_is_replaced) {
    const MockCluster cluster;
    cluster.topic("fatal", 1);
    auto made = make_publisher({.brokers = cluster.address()});
    ASSERT_TRUE(made);
    const auto write = [&](const std::string& value) {
        std::optional<base::Result<PublishedAt>> said;
        (*made)->publish({.topic = "fatal", .partition = 0, .value = value},
                         [&said](base::Result<PublishedAt> at) { said.emplace(std::move(at)); });
        EXPECT_TRUE((*made)->flush(seconds{20}));
        return std::move(*said);
    };
    ASSERT_TRUE(write("one"));
    // The broker has forgotten this producer in the middle of its sequence.
    cluster.fail(kProduce, {RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER});
    const auto lost = write("two");
    ASSERT_FALSE(lost);
    EXPECT_NE(lost.error().applied, base::Applied::yes);
    EXPECT_TRUE(ServerProcess::eventually([&] { return write("three").has_value(); }))
        << "a fresh producer takes its place";
}

}  // namespace
}  // namespace semel::brokers::kafka
