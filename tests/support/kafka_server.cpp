#include "support/kafka_server.hpp"

#include <librdkafka/rdkafka.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace semel::support {

namespace fs = std::filesystem;

namespace {

constexpr int kPortTries = 20;
constexpr std::chrono::seconds kStartWithin{60};
constexpr int kAskMs = 15'000;

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error("kafka: " + what); }

// Prints the folder with the jars; fetches them the first time.
fs::path cache() {
    static const fs::path found = [] {
        FILE* pipe = ::popen(SEMEL_FETCH_KAFKA, "r");
        if (pipe == nullptr) fail("cannot run " SEMEL_FETCH_KAFKA);
        std::array<char, 4096> line{};
        const bool got = std::fgets(line.data(), static_cast<int>(line.size()), pipe) != nullptr;
        if (::pclose(pipe) != 0 || !got) fail(SEMEL_FETCH_KAFKA " failed");
        std::string path(line.data());
        path.resize(path.find_last_not_of("\r\n") + 1);
        return fs::path(path);
    }();
    return found;
}

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
using Queue = Owned<rd_kafka_queue_t, rd_kafka_queue_destroy>;
using Event = Owned<rd_kafka_event_t, rd_kafka_event_destroy>;
using Partitions = Owned<rd_kafka_topic_partition_list_t, rd_kafka_topic_partition_list_destroy>;

Client client(const std::string& address, const std::map<std::string, std::string>& more = {},
              rd_kafka_type_t type = RD_KAFKA_PRODUCER) {
    std::array<char, 512> text{};
    rd_kafka_conf_t* conf = rd_kafka_conf_new();
    std::map<std::string, std::string> all{{"bootstrap.servers", address}, {"log_level", "0"}};
    all.insert(more.begin(), more.end());
    for (const auto& [name, value] : all) {
        if (rd_kafka_conf_set(conf, name.c_str(), value.c_str(), text.data(), text.size()) !=
            RD_KAFKA_CONF_OK)
            fail(text.data());
    }
    Client out(rd_kafka_new(type, conf, text.data(), text.size()));
    if (out == nullptr) fail(text.data());
    return out;
}

// Asks for offsets of a group and sets them without joining it. Not an admin client: in 2.0.2 the
// thread of one that asks a group's coordinator now and then dies of a null broker.
Client outsider(const std::string& address, const std::string& group) {
    return client(address, {{"group.id", group}, {"enable.auto.commit", "false"}},
                  RD_KAFKA_CONSUMER);
}

Event answer(rd_kafka_queue_t* queue, const std::string& doing) {
    Event event(rd_kafka_queue_poll(queue, kAskMs));
    if (event == nullptr) fail(doing + ": no answer");
    if (rd_kafka_event_error(event.get()) != RD_KAFKA_RESP_ERR_NO_ERROR)
        fail(doing + ": " + rd_kafka_event_error_string(event.get()));
    return event;
}

void check(rd_kafka_error_t* error, const std::string& doing) {
    if (error == nullptr) return;
    const std::string text = rd_kafka_error_string(error);
    rd_kafka_error_destroy(error);
    fail(doing + ": " + text);
}

std::string quoted(std::string text) { return "\"" + text + "\""; }

}  // namespace

KafkaServer::KafkaServer(KafkaServerOptions options)
    : options_(std::move(options)), jars_(cache()) {
    fs::copy(jars_ / "formatted", process_.folder() / "logs", fs::copy_options::recursive);
    if (!options_.users.empty())
        certificate_ = std::make_unique<ServerCertificate>(process_.folder());
    for (int tries = 0; tries < kPortTries; ++tries) {
        port_ = ServerProcess::free_port();
        controller_port_ = ServerProcess::free_port();
        secure_port_ = ServerProcess::free_port();
        if (launch()) return;
        if (process_.log().find("in use") == std::string::npos) break;
    }
    fail("the broker does not start: " + process_.log());
}

std::string KafkaServer::address() const { return "127.0.0.1:" + std::to_string(port_); }
std::string KafkaServer::secure_address() const {
    return "127.0.0.1:" + std::to_string(secure_port_);
}
std::string KafkaServer::ca_file() const { return certificate_->ca; }

bool KafkaServer::launch() {
    const fs::path file = process_.folder() / "server.properties";
    const std::string secure =
        options_.users.empty() ? std::string{} : ",SECURE://" + secure_address();
    std::ofstream out(file);
    out << "process.roles=broker,controller\nnode.id=1\n"
        << "controller.quorum.voters=1@127.0.0.1:" << controller_port_ << "\n"
        << "listeners=PLAINTEXT://" << address() << ",CONTROLLER://127.0.0.1:" << controller_port_
        << secure << "\nadvertised.listeners=PLAINTEXT://" << address() << secure
        << "\ncontroller.listener.names=CONTROLLER\ninter.broker.listener.name=PLAINTEXT\n"
        << "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,"
           "SECURE:SASL_SSL\n"
        << "log.dirs=" << (process_.folder() / "logs").string() << "\n"
        << "num.partitions=1\nauto.create.topics.enable=false\n"
           "offsets.topic.replication.factor=1\noffsets.topic.num.partitions=4\n"
           "transaction.state.log.replication.factor=1\ntransaction.state.log.min.isr=1\n"
           "transaction.state.log.num.partitions=4\n"
           "share.coordinator.state.topic.replication.factor=1\n"
           "share.coordinator.state.topic.min.isr=1\n"
           "group.initial.rebalance.delay.ms=0\ngroup.min.session.timeout.ms=1000\n"
           "broker.session.timeout.ms=2000\nbroker.heartbeat.interval.ms=250\n"
           "log.cleaner.backoff.ms=100\nnum.io.threads=4\nnum.network.threads=2\n"
           "log.cleaner.dedupe.buffer.size=4194304\n";
    if (!options_.users.empty()) {
        out << "sasl.enabled.mechanisms=PLAIN\n"
            << "listener.name.secure.ssl.keystore.type=PEM\n"
            << "listener.name.secure.ssl.keystore.location=" << certificate_->both << "\n"
            << "listener.name.secure.plain.sasl.jaas.config="
               "org.apache.kafka.common.security.plain.PlainLoginModule required";
        for (const auto& [user, password] : options_.users)
            out << " user_" << user << "=" << quoted(password);
        out << ";\n";
    }
    for (const std::string& line : options_.settings) out << line << "\n";
    out.close();
    std::string classpath;
    std::getline(std::ifstream(jars_ / "classpath"), classpath);
    return process_.start_until(
        {"java", "-Xms128m", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
         "-XX:SharedArchiveFile=" + (jars_ / "classes.jsa").string(),
         "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", classpath, "kafka.Kafka",
         file.string()},
        {}, [this] { return ServerProcess::answers(port_); }, kStartWithin);
}

void KafkaServer::restart() {
    process_.kill();
    if (!ServerProcess::eventually([this] { return launch(); }, kStartWithin))
        fail("the broker does not come back: " + process_.log());
}

std::string KafkaServer::new_topic(std::int32_t partitions,
                                   const std::map<std::string, std::string>& settings) const {
    static std::atomic<int> count{0};
    std::string name = "topic-" + std::to_string(++count);
    create_topic(name, partitions, settings);
    return name;
}

void KafkaServer::create_topic(const std::string& name, std::int32_t partitions,
                               const std::map<std::string, std::string>& settings) const {
    const Client admin = client(address());
    std::array<char, 512> text{};
    const Owned<rd_kafka_NewTopic_t, rd_kafka_NewTopic_destroy> topic(
        rd_kafka_NewTopic_new(name.c_str(), partitions, 1, text.data(), text.size()));
    for (const auto& [key, value] : settings)
        rd_kafka_NewTopic_set_config(topic.get(), key.c_str(), value.c_str());
    {
        const Queue queue(rd_kafka_queue_new(admin.get()));
        rd_kafka_NewTopic_t* one = topic.get();
        rd_kafka_CreateTopics(admin.get(), &one, 1, nullptr, queue.get());
        const Event event = answer(queue.get(), "creating " + name);
        std::size_t count = 0;
        const auto results = rd_kafka_CreateTopics_result_topics(
            rd_kafka_event_CreateTopics_result(event.get()), &count);
        const auto code = rd_kafka_topic_result_error(results[0]);
        if (code != RD_KAFKA_RESP_ERR_NO_ERROR && code != RD_KAFKA_RESP_ERR_TOPIC_ALREADY_EXISTS)
            fail("creating " + name + ": " + rd_kafka_err2str(code));
    }
    // A new topic may show no partitions for some milliseconds.
    const bool there = ServerProcess::eventually([&] {
        const struct rd_kafka_metadata* metadata = nullptr;
        const Owned<rd_kafka_topic_t, rd_kafka_topic_destroy> handle(
            rd_kafka_topic_new(admin.get(), name.c_str(), nullptr));
        if (rd_kafka_metadata(admin.get(), 0, handle.get(), &metadata, kAskMs) !=
            RD_KAFKA_RESP_ERR_NO_ERROR)
            return false;
        bool led = metadata->topic_cnt == 1 && metadata->topics[0].partition_cnt == partitions;
        for (int p = 0; led && p < partitions; ++p)
            led = metadata->topics[0].partitions[p].leader >= 0;
        rd_kafka_metadata_destroy(metadata);
        return led;
    });
    if (!there) fail("the topic " + name + " has no partitions");
}

void KafkaServer::delete_topic(const std::string& name) const {
    const Client admin = client(address());
    const Queue queue(rd_kafka_queue_new(admin.get()));
    const Owned<rd_kafka_DeleteTopic_t, rd_kafka_DeleteTopic_destroy> topic(
        rd_kafka_DeleteTopic_new(name.c_str()));
    rd_kafka_DeleteTopic_t* one = topic.get();
    rd_kafka_DeleteTopics(admin.get(), &one, 1, nullptr, queue.get());
    answer(queue.get(), "deleting " + name);
}

void KafkaServer::delete_records(const std::string& topic, std::int32_t partition,
                                 std::int64_t offset) const {
    const Client admin = client(address());
    const Queue queue(rd_kafka_queue_new(admin.get()));
    const Partitions before(rd_kafka_topic_partition_list_new(1));
    rd_kafka_topic_partition_list_add(before.get(), topic.c_str(), partition)->offset = offset;
    const Owned<rd_kafka_DeleteRecords_t, rd_kafka_DeleteRecords_destroy> request(
        rd_kafka_DeleteRecords_new(before.get()));
    rd_kafka_DeleteRecords_t* one = request.get();
    rd_kafka_DeleteRecords(admin.get(), &one, 1, nullptr, queue.get());
    answer(queue.get(), "deleting records of " + topic);
}

void KafkaServer::transaction(const std::vector<KafkaRecord>& records, bool commit) const {
    static std::atomic<int> count{0};
    const Client producer = client(
        address(), {{"transactional.id", "test-" + std::to_string(++count)}, {"linger.ms", "0"}});
    check(rd_kafka_init_transactions(producer.get(), kAskMs), "init_transactions");
    check(rd_kafka_begin_transaction(producer.get()), "begin_transaction");
    for (const KafkaRecord& record : records) {
        std::array<rd_kafka_vu_t, 5> fields{};
        fields[0].vtype = RD_KAFKA_VTYPE_TOPIC;
        fields[0].u.cstr = record.topic.c_str();
        fields[1].vtype = RD_KAFKA_VTYPE_PARTITION;
        fields[1].u.i32 = record.partition;
        fields[2].vtype = RD_KAFKA_VTYPE_MSGFLAGS;
        fields[2].u.i = RD_KAFKA_MSG_F_COPY;
        fields[3].vtype = RD_KAFKA_VTYPE_KEY;
        if (record.key)
            fields[3].u.mem = {const_cast<char*>(record.key->data()), record.key->size()};
        fields[4].vtype = RD_KAFKA_VTYPE_VALUE;
        if (record.value)
            fields[4].u.mem = {const_cast<char*>(record.value->data()), record.value->size()};
        check(rd_kafka_produceva(producer.get(), fields.data(), fields.size()), "produce");
    }
    // An abort purges what has not been sent; the records are wanted in the log.
    if (rd_kafka_flush(producer.get(), kAskMs) != RD_KAFKA_RESP_ERR_NO_ERROR) fail("flush");
    check(commit ? rd_kafka_commit_transaction(producer.get(), kAskMs)
                 : rd_kafka_abort_transaction(producer.get(), kAskMs),
          "ending a transaction");
}

std::int64_t KafkaServer::committed(const std::string& group, const std::string& topic,
                                    std::int32_t partition) const {
    const Client asks = outsider(address(), group);
    const Partitions list(rd_kafka_topic_partition_list_new(1));
    const auto* one = rd_kafka_topic_partition_list_add(list.get(), topic.c_str(), partition);
    const auto code = rd_kafka_committed(asks.get(), list.get(), kAskMs);
    if (code != RD_KAFKA_RESP_ERR_NO_ERROR)
        fail("offsets of " + group + ": " + rd_kafka_err2str(code));
    return one->offset < 0 ? -1 : one->offset;
}

void KafkaServer::set_committed(const std::string& group, const std::string& topic,
                                std::int32_t partition, std::int64_t offset) const {
    const Client sets = outsider(address(), group);
    const Partitions list(rd_kafka_topic_partition_list_new(1));
    rd_kafka_topic_partition_list_add(list.get(), topic.c_str(), partition)->offset = offset;
    // A fresh broker refuses while it loads the group.
    const bool done = ServerProcess::eventually([&] {
        return rd_kafka_commit(sets.get(), list.get(), 0) == RD_KAFKA_RESP_ERR_NO_ERROR &&
               committed(group, topic, partition) == offset;
    });
    if (!done) fail("the offsets of " + group + " cannot be set");
}

}  // namespace semel::support
