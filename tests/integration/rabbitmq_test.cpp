// The RabbitMQ leaf against a real broker: what is acknowledged, what comes again, and what a
// publisher knows of its messages.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <set>

#include "brokers/rabbitmq/rabbitmq.hpp"
#include "support/rabbitmq_server.hpp"
#include "support/recording_listener.hpp"

namespace semel::brokers::rabbitmq {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using support::Got;
using support::RabbitServer;
using support::RecordingListener;
using support::ServerProcess;

constexpr milliseconds kWithin{10'000};

RabbitServer& server() {
    static RabbitServer one({.tls = true});
    return one;
}

std::unique_ptr<Source> source_of(SourceConfig config) {
    auto made = make_source(std::move(config));
    EXPECT_TRUE(made) << made.error().detail;
    return std::move(*made);
}

SourceConfig config_for(const std::string& queue, std::uint16_t prefetch = 100) {
    return {.url = server().url(), .queue = queue, .prefetch = prefetch};
}

class Pen {
  public:
    explicit Pen(milliseconds timeout = seconds{30})
        : publisher_(std::move(*make_publisher(
              {.url = server().url(), .timeout = timeout, .problem = [this](const Problem& one) {
                   const std::lock_guard lock(mutex_);
                   problems_.push_back(one.kind);
               }}))) {}
    ~Pen() { publisher_.reset(); }
    base::Result<PublishedAt> write(Outgoing message) {
        std::promise<base::Result<PublishedAt>> told;
        publisher_->publish(std::move(message), [&told](base::Result<PublishedAt> at) {
            told.set_value(std::move(at));
        });
        return told.get_future().get();
    }
    void write(const std::string& queue, const std::vector<std::string>& values) {
        std::atomic<std::size_t> confirmed{0};
        for (const std::string& value : values) {
            publisher_->publish({.topic = queue, .value = value},
                                [&](const auto& at) { confirmed += at.has_value() ? 1 : 0; });
        }
        ASSERT_TRUE(publisher_->flush(seconds{20}));
        ASSERT_EQ(confirmed, values.size());
    }
    bool wait_problem(ProblemKind kind) {
        return ServerProcess::eventually([&] {
            const std::lock_guard lock(mutex_);
            return std::find(problems_.begin(), problems_.end(), kind) != problems_.end();
        });
    }
    Publisher& publisher() { return *publisher_; }

  private:
    std::mutex mutex_;
    std::vector<ProblemKind> problems_;
    std::unique_ptr<Publisher> publisher_;
};

std::vector<std::string> numbered(int count) {
    std::vector<std::string> out;
    for (int i = 0; i < count; ++i) out.push_back("m" + std::to_string(i));
    return out;
}

bool ready_becomes(const std::string& queue, std::size_t count) {
    return ServerProcess::eventually([&] { return server().ready(queue) == count; });
}

// ---------------------------------------------------------------- messages

TEST(Rabbitmq, headers_and_properties_arrive_as_they_were_published) {
    const std::string queue = server().new_queue();
    Pen pen;
    ASSERT_TRUE(pen.write({.topic = queue,
                           .value = std::string("a\0b", 3),
                           .headers = {{"x", "1"}, {"n", std::nullopt}, {"e", ""}},
                           .timestamp_ms = 1'700'000'000'000,
                           .properties = {.message_id = "id-1",
                                          .content_type = "application/json",
                                          .correlation_id = "c",
                                          .type = "order",
                                          .priority = 3}}));
    ASSERT_TRUE(pen.write({.topic = queue, .value = ""}));
    auto source = source_of(config_for(queue));
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_count(2)) << listener.all_problems();
    const std::vector<Got> got = listener.got();
    EXPECT_EQ(got[0].value, std::string("a\0b", 3));
    EXPECT_EQ(got[0].key, std::nullopt);
    using HeaderList = decltype(got[0].headers);
    EXPECT_EQ(got[0].headers, (HeaderList{{"x", "1"}, {"n", std::nullopt}, {"e", ""}}));
    EXPECT_EQ(got[0].timestamp_ms, 1'700'000'000'000);
    EXPECT_EQ(got[0].properties.message_id, "id-1");
    EXPECT_EQ(got[0].properties.content_type, "application/json");
    EXPECT_EQ(got[0].properties.type, "order");
    EXPECT_EQ(got[0].properties.priority, 3);
    EXPECT_EQ(got[0].properties.routing_key, queue);
    EXPECT_FALSE(got[0].redelivered);
    EXPECT_EQ(got[1].value, "");
    EXPECT_EQ(got[1].headers.size(), 0u);
    EXPECT_EQ(got[1].properties.message_id, "");
}

TEST(Rabbitmq, bodies_of_many_frames_arrive_whole_while_the_queues_length_is_asked_for) {
    constexpr std::size_t of_a_frame = 131'072 - 8;
    const std::string queue = server().new_queue();
    std::vector<std::string> values;
    for (const std::size_t size : {std::size_t{0}, of_a_frame - 1, of_a_frame, of_a_frame + 1,
                                   2 * of_a_frame, 3 * of_a_frame + 7, std::size_t{2'000'000}}) {
        for (std::size_t n = 0; n < 3; ++n) {
            std::string& value = values.emplace_back(size, static_cast<char>('a' + n));
            for (std::size_t at = 0; at < size; at += 1000)
                value[at] = static_cast<char>(at / 1000);
            values.push_back("small " + std::to_string(values.size()));
        }
    }
    Pen pen;
    pen.write(queue, values);
    auto source = source_of(config_for(queue));
    RecordingListener listener(*source, {.settle = true});
    ASSERT_TRUE(source->start(listener));
    // An answer is awaited among the frames of messages.
    const auto all_came = [&] {
        const auto lag = source->lag(kWithin);
        return lag.has_value() && listener.count() == values.size();
    };
    ASSERT_TRUE(ServerProcess::eventually(all_came)) << listener.all_problems();
    EXPECT_TRUE(listener.values() == values);
    ASSERT_TRUE(source->commit(kWithin));
    EXPECT_EQ(server().unacknowledged(queue), 0u);
    EXPECT_EQ(listener.told("lost").size(), 0u) << listener.all_problems();
}

TEST(Rabbitmq, a_full_queue_is_read_in_order_and_none_of_it_stays_unacknowledged) {
    constexpr int count = 20'000;
    const std::string queue = server().new_queue();
    Pen pen;
    pen.write(queue, numbered(count));
    auto source = source_of(config_for(queue, 2000));
    RecordingListener listener(*source, {.settle = true});
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_count(count)) << listener.all_problems();
    EXPECT_TRUE(listener.values() == numbered(count)) << "in the queue's order, once each";
    // Nobody asks for it: they are acknowledged by themselves.
    EXPECT_TRUE(ServerProcess::eventually([&] { return server().unacknowledged(queue) == 0; }));
    EXPECT_EQ(server().ready(queue), 0u);
    EXPECT_EQ(listener.told("lost").size(), 0u) << listener.all_problems();
}

TEST(Rabbitmq, a_stuck_message_does_not_stop_the_queue_and_is_the_only_one_left) {
    const std::string queue = server().new_queue();
    Pen pen;
    pen.write(queue, numbered(500));
    auto source = source_of(config_for(queue, 10));
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    std::size_t settled = 1;  // the first is stuck
    while (settled < 500 && !HasFailure()) {
        ASSERT_TRUE(listener.wait_count(settled + 1)) << listener.all_problems();
        const std::vector<Got> got = listener.got();
        ASSERT_LE(got.size(), settled + 9) << "more than the prefetch is out";
        // In another order than they came.
        for (std::size_t i = got.size(); i > settled; --i)
            EXPECT_EQ(source->settle(got[i - 1].receipt), 1u);
        settled = got.size();
    }
    EXPECT_EQ(source->settle(listener.got()[7].receipt), 0u) << "settled before";
    ASSERT_TRUE(source->commit(kWithin));
    EXPECT_EQ(server().unacknowledged(queue), 1u);
    EXPECT_EQ(listener.values(), numbered(500)) << "in the queue's order, once each";
    EXPECT_EQ(listener.told("lost").size(), 0u) << listener.all_problems();
    source->stop(milliseconds{0});
    EXPECT_EQ(listener.told("released").size(), 1u);
    EXPECT_TRUE(ready_becomes(queue, 1));
}

TEST(Rabbitmq, pause_and_window_hold_messages_back_without_losing_any) {
    const std::string queue = server().new_queue();
    Pen pen;
    auto source = source_of(config_for(queue));
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_told("assigned", 1));
    source->pause(listener.told("assigned")[0]);
    pen.write(queue, numbered(5));
    EXPECT_FALSE(listener.wait_count(1, milliseconds{200}));
    source->window(2);
    source->resume(listener.told("assigned")[0]);
    ASSERT_TRUE(listener.wait_count(2));
    EXPECT_FALSE(listener.wait_count(3, milliseconds{200}));
    source->settle(listener.got()[0].receipt);
    ASSERT_TRUE(listener.wait_count(3)) << "one place is free";
    source->window(100);
    ASSERT_TRUE(listener.wait_count(5));
    EXPECT_EQ(listener.values(), numbered(5));
    EXPECT_FALSE(source->seek(listener.told("assigned")[0], 0, kWithin));
}

TEST(Rabbitmq, leaving_waits_for_what_runs_and_gives_the_rest_back) {
    const std::string queue = server().new_queue();
    Pen pen;
    pen.write(queue, numbered(6));
    auto source = source_of(config_for(queue));
    RecordingListener listener(*source, {.drain = false});
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_count(6));
    std::thread leaving([&] { source->stop(seconds{10}); });
    ASSERT_TRUE(listener.wait_told("revoked", 1));
    for (const std::size_t i : {1u, 4u})
        EXPECT_EQ(source->settle(listener.got()[i].receipt), 1u) << "still ours";
    source->drained(listener.told("revoked")[0]);
    leaving.join();
    EXPECT_EQ(listener.told("released").size(), 1u);
    EXPECT_TRUE(ready_becomes(queue, 4));
}

// ---------------------------------------------------------------- faults

TEST(Rabbitmq, a_closed_connection_voids_receipts_and_the_unsettled_come_again_marked) {
    const std::string queue = server().new_queue();
    Pen pen;
    pen.write(queue, numbered(4));
    auto source = source_of(config_for(queue));
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_count(4));
    const std::vector<Got> first = listener.got();
    source->settle(first[2].receipt);
    ASSERT_TRUE(source->commit(kWithin));
    server().close_connections();
    ASSERT_TRUE(listener.wait_told("lost", 1));
    EXPECT_EQ(source->settle(first[0].receipt), 0u) << "its tag means nothing any more";
    ASSERT_TRUE(listener.wait_count(7)) << listener.all_problems();
    const std::vector<Got> all = listener.got();
    std::vector<std::string> again;
    for (std::size_t i = 4; i < all.size(); ++i) {
        EXPECT_TRUE(all[i].redelivered);
        EXPECT_EQ(source->settle(all[i].receipt), 1u);
        again.push_back(*all[i].value);
    }
    EXPECT_EQ(again, (std::vector<std::string>{"m0", "m1", "m3"}));
    EXPECT_GT(all[4].receipt.assignment->epoch(), all[0].receipt.assignment->epoch());
    ASSERT_TRUE(source->commit(kWithin));
    EXPECT_TRUE(ready_becomes(queue, 0));
    EXPECT_TRUE(listener.wait_problem(ProblemKind::reachable));
}

TEST(Rabbitmq, a_handler_longer_than_the_brokers_patience_does_not_end_the_source) {
    const std::string queue = server().new_queue();
    server().control({"eval", "application:set_env(rabbit, consumer_timeout, 1000)."});
    Pen pen;
    pen.write(queue, {"slow"});
    auto source = source_of(config_for(queue));
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(listener.wait_count(1));
    const bool taken_back = listener.wait_told("lost", 1);
    server().control({"eval", "application:set_env(rabbit, consumer_timeout, 1800000)."});
    ASSERT_TRUE(taken_back);
    EXPECT_EQ(source->settle(listener.got()[0].receipt), 0u) << "too late, and harmless";
    ASSERT_TRUE(ServerProcess::eventually([&] {
        return listener.count() >= 2 && source->settle(listener.got().back().receipt) == 1;
    })) << listener.all_problems();
    EXPECT_TRUE(listener.got().back().redelivered);
    EXPECT_NE(listener.problem_of(ProblemKind::cancelled).find("timed out"), std::string::npos)
        << listener.all_problems();
    ASSERT_TRUE(source->commit(kWithin));
    EXPECT_EQ(server().ready(queue), 0u);
}

TEST(Rabbitmq, a_deleted_queue_is_told_and_taken_up_when_it_is_there_again) {
    const std::string queue = server().new_queue();
    auto source = source_of(config_for(queue));
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    ASSERT_TRUE(ServerProcess::eventually([&] {
        const auto seen = source->describe(kWithin);
        return seen && seen->member_count == 1;
    }));
    server().delete_queue(queue);
    ASSERT_TRUE(listener.wait_problem(ProblemKind::cancelled));
    ASSERT_TRUE(listener.wait_told("lost", 1));
    server().create_queue(queue);
    ASSERT_TRUE(listener.wait_told("assigned", 2)) << listener.all_problems();
    Pen pen;
    pen.write(queue, {"m"});
    EXPECT_TRUE(listener.wait_count(1));
}

TEST(Rabbitmq, an_exclusive_subscriber_is_alone) {
    const std::string queue = server().new_queue();
    SourceConfig config = config_for(queue);
    config.exclusive = true;
    auto first = source_of(config);
    EXPECT_TRUE(first->traits().exclusive);
    RecordingListener at_first(*first);
    ASSERT_TRUE(first->start(at_first));
    ASSERT_TRUE(ServerProcess::eventually([&] {
        const auto seen = first->describe(kWithin);
        return seen && seen->member_count == 1;
    }));
    auto second = source_of(config);
    RecordingListener at_second(*second);
    ASSERT_TRUE(second->start(at_second));
    ASSERT_TRUE(at_second.wait_problem(ProblemKind::cancelled));
    EXPECT_NE(at_second.problem_of(ProblemKind::cancelled).find("exclusive"), std::string::npos)
        << at_second.all_problems();
    Pen pen;
    pen.write(queue, {"m"});
    ASSERT_TRUE(at_first.wait_count(1));
    EXPECT_EQ(at_second.count(), 0u);
    first->stop(milliseconds{0});
    EXPECT_TRUE(at_second.wait_count(1)) << "the place is free";
}

TEST(Rabbitmq, one_of_two_is_active_where_the_declared_queue_says_so) {
    SourceConfig config = config_for("orders-one-by-one");
    config.declare = QueueDeclaration{.quorum = true, .single_active_consumer = true};
    auto first = source_of(config);
    EXPECT_TRUE(first->traits().one_consumer);
    RecordingListener at_first(*first);
    ASSERT_TRUE(first->start(at_first));
    Pen pen;
    ASSERT_TRUE(at_first.wait_told("assigned", 1)) << at_first.all_problems();
    pen.write(config.queue, numbered(3));
    ASSERT_TRUE(at_first.wait_count(3));
    auto second = source_of(config);
    RecordingListener at_second(*second);
    ASSERT_TRUE(second->start(at_second));
    ASSERT_TRUE(ServerProcess::eventually([&] {
        const std::string all = server().control({"--silent", "list_consumers", "queue_name"});
        const std::size_t one = all.find(config.queue);
        return one != all.npos && all.find(config.queue, one + 1) != all.npos;
    }));
    EXPECT_EQ(at_second.count(), 0u);
    first->settle(at_first.got()[0].receipt);
    first->stop(milliseconds{0});
    ASSERT_TRUE(at_second.wait_count(2)) << at_second.all_problems();
    EXPECT_EQ(at_second.values(), (std::vector<std::string>{"m1", "m2"}));
    const Got again = at_second.got()[0];
    EXPECT_TRUE(again.redelivered);
    EXPECT_TRUE(std::any_of(again.headers.begin(), again.headers.end(), [](const auto& header) {
        return header.first == "x-delivery-count" && header.second == "1";
    }));

    config.declare->single_active_consumer = false;
    auto other = source_of(config);
    RecordingListener refused(*other);
    ASSERT_TRUE(other->start(refused));
    ASSERT_TRUE(refused.wait_problem(ProblemKind::cancelled)) << "it is another queue than said";
    EXPECT_NE(refused.all_problems().find("x-single-active-consumer"), std::string::npos)
        << refused.all_problems();
}

TEST(Rabbitmq, logins_and_certificates_are_checked) {
    const std::string queue = server().new_queue();
    std::string url = server().tls_url();
    url.replace(url.find("127.0.0.1"), 9, "localhost");
    SourceConfig config = config_for(queue);
    config.url = url;
    config.ca_file = server().ca_file();
    auto source = source_of(config);
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    EXPECT_TRUE(listener.wait_told("assigned", 1)) << listener.all_problems();
    config.ca_file.clear();
    auto stranger = source_of(config);
    RecordingListener distrusts(*stranger);
    ASSERT_TRUE(stranger->start(distrusts));
    EXPECT_TRUE(distrusts.wait_problem(ProblemKind::unreachable)) << "signed by nobody it knows";
    config = config_for(queue);
    config.url.replace(config.url.find(":guest@"), 7, ":s3cret@");
    auto wrong = source_of(config);
    RecordingListener refused(*wrong);
    ASSERT_TRUE(wrong->start(refused));
    ASSERT_TRUE(refused.wait_problem(ProblemKind::unreachable));
    EXPECT_NE(refused.all_problems().find("guest"), std::string::npos) << refused.all_problems();
    EXPECT_EQ(refused.all_problems().find("s3cret"), std::string::npos);
}

// ---------------------------------------------------------------- publishing

TEST(RabbitmqPublisher, a_message_that_no_queue_takes_is_told_from_those_around_it) {
    const std::string queue = server().new_queue();
    Pen pen;
    std::atomic<int> there{0}, returned{0}, other{0};
    for (int i = 0; i < 300; ++i) {
        const bool lost = i % 3 == 0;
        pen.publisher().publish(
            {.topic = lost ? "no-such-queue" : queue,
             .value = "m" + std::to_string(i / 6),
             .headers = {{"h", "v"}}},
            [&, lost](const base::Result<PublishedAt>& at) {
                if (at && !lost)
                    ++there;
                else if (!at && lost && at.error().applied == base::Applied::no &&
                         at.error().detail.find("NO_ROUTE") != std::string::npos)
                    ++returned;
                else
                    ++other;
            });
    }
    ASSERT_TRUE(pen.publisher().flush(kWithin));
    EXPECT_EQ(there, 200);
    EXPECT_EQ(returned, 100);
    EXPECT_EQ(other, 0);
    EXPECT_EQ(server().ready(queue), 200u);
    const auto large =
        pen.write({.topic = queue, .value = "x", .headers = {{"h", std::string(70'000, 'x')}}});
    ASSERT_FALSE(large);
    EXPECT_EQ(large.error().code, base::ErrorCode::invalid_argument);
    EXPECT_TRUE(pen.write({.topic = queue, .value = std::string(1'000'000, 'x')}))
        << "a body of many frames";
    const auto nowhere =
        pen.write({.topic = "k", .value = "x", .properties = {.exchange = "no-such-exchange"}});
    ASSERT_FALSE(nowhere);
    EXPECT_NE(nowhere.error().detail.find("no-such-exchange"), std::string::npos);
    EXPECT_TRUE(pen.write({.topic = queue, .value = "after"})) << "the channel is open again";
}

TEST(RabbitmqPublisher, waits_while_the_broker_is_blocked_and_consumers_go_on) {
    const std::string queue = server().new_queue();
    Pen pen;
    pen.write(queue, {"before"});
    server().block_publishers();
    std::atomic<int> confirmed{0};
    const auto count = [&](const auto& at) { confirmed += at.has_value() ? 1 : 0; };
    pen.publisher().publish({.topic = queue, .value = "one"}, count);
    ASSERT_TRUE(pen.wait_problem(ProblemKind::blocked));
    pen.publisher().publish({.topic = queue, .value = "two"}, count);
    auto source = source_of(config_for(queue));
    RecordingListener listener(*source, {.settle = true});
    ASSERT_TRUE(source->start(listener));
    EXPECT_TRUE(listener.wait_count(1)) << "another connection";
    EXPECT_FALSE(pen.publisher().flush(milliseconds{200}));
    Pen impatient(milliseconds{700});
    const auto late = impatient.write({.topic = queue, .value = "late"});
    EXPECT_FALSE(late);
    server().unblock_publishers();
    EXPECT_TRUE(pen.publisher().flush(kWithin));
    EXPECT_EQ(confirmed, 2);
    EXPECT_TRUE(pen.wait_problem(ProblemKind::unblocked));
    EXPECT_TRUE(listener.wait_count(3));
}

TEST(RabbitmqBroker, killed_and_back_again_confirmed_messages_are_there_and_the_rest_is_in_doubt) {
    const std::string queue = server().new_queue();
    server().sync_queues();
    Pen pen;
    auto source = source_of(config_for(queue));
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    std::mutex mutex;
    std::set<std::string> confirmed, doubtful;
    int refused = 0;
    const auto write = [&](const std::string& value) {
        pen.publisher().publish({.topic = queue, .value = value}, [&, value](const auto& at) {
            const std::lock_guard lock(mutex);
            if (at)
                confirmed.insert(value);
            else if (at.error().applied == base::Applied::unknown)
                doubtful.insert(value);
            else
                ++refused;
        });
    };
    for (int i = 0; i < 3000; ++i) write("a" + std::to_string(i));
    ASSERT_TRUE(ServerProcess::eventually([&] {
        const std::lock_guard lock(mutex);
        return confirmed.size() > 300;
    }));
    server().kill();
    ASSERT_TRUE(listener.wait_told("lost", 1));
    for (int i = 0; i < 100; ++i) write("b" + std::to_string(i));
    server().restart();
    ASSERT_TRUE(pen.publisher().flush(seconds{40}));
    EXPECT_EQ(refused, 0);
    EXPECT_EQ(confirmed.size() + doubtful.size(), 3100u);
    for (int i = 0; i < 100; ++i) EXPECT_TRUE(confirmed.contains("b" + std::to_string(i)));
    EXPECT_TRUE(ServerProcess::eventually(
        [&] {
            for (const Got& one : listener.got()) source->settle(one.receipt);
            const std::vector<std::string> values = listener.values();
            const std::set<std::string> seen(values.begin(), values.end());
            const std::lock_guard lock(mutex);
            return std::includes(seen.begin(), seen.end(), confirmed.begin(), confirmed.end());
        },
        seconds{20}))
        << "a confirmed message is lost\n"
        << listener.all_problems();
}

TEST(RabbitmqLag, counts_what_is_ready_and_what_is_here_and_unsettled) {
    const std::string queue = server().new_queue();
    Pen pen;
    pen.write(queue, {"a", "b", "c", "d", "e"});
    auto source = source_of(config_for(queue, 2));
    RecordingListener listener(*source);
    ASSERT_TRUE(source->start(listener));
    std::size_t settled = 0;
    const auto settle = [&] {
        const std::vector<Got> all = listener.got();
        for (; settled < all.size(); ++settled) source->settle(all[settled].receipt);
    };
    const auto behind = [&] {
        const auto lags = source->lag(kWithin);
        return lags && lags->size() == 1 ? lags->front().lag : -1;
    };
    ASSERT_TRUE(listener.wait_count(2)) << "the prefetch";
    EXPECT_EQ(behind(), 5);
    source->pause(source->state().at(0).assignment);
    settle();
    EXPECT_TRUE(ServerProcess::eventually([&] { return behind() == 3; }))
        << "two wait here, paused: " << behind();
    source->resume(source->state().at(0).assignment);
    ASSERT_TRUE(listener.wait_count(4));
    settle();
    ASSERT_TRUE(listener.wait_count(5));
    settle();
    EXPECT_TRUE(ServerProcess::eventually([&] { return behind() == 0; })) << behind();
    source->stop(milliseconds{0});
}

TEST(RabbitmqTargets, queues_and_exchanges_are_found_and_queues_made_where_they_are_missing) {
    const Access access{.url = server().url(), .ca_file = {}};
    const std::string queue = server().new_queue();
    const auto exists = [&access](const std::string& name, const std::string& exchange) {
        const auto found = target_exists(access, name, exchange);
        EXPECT_TRUE(found) << found.error().detail;
        return found && *found;
    };
    EXPECT_TRUE(exists(queue, ""));
    EXPECT_TRUE(exists("", "amq.topic"));
    EXPECT_FALSE(exists("", "no-such-exchange"));
    EXPECT_FALSE(exists(queue + ".dlq", ""));
    ASSERT_TRUE(ensure_queue(access, queue + ".dlq"));
    EXPECT_TRUE(exists(queue + ".dlq", ""));
    EXPECT_TRUE(ensure_queue(access, queue + ".dlq"));
    EXPECT_TRUE(ensure_queue(access, queue)) << "a classic one serves as well";
    const auto away = target_exists({.url = "amqp://127.0.0.1:1/", .ca_file = {}}, queue, "");
    ASSERT_FALSE(away);
    EXPECT_EQ(away.error().code, base::ErrorCode::io) << away.error().detail;
}

}  // namespace
}  // namespace semel::brokers::rabbitmq
