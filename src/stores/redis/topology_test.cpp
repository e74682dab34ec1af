// The client against real Clusters and Sentinel-watched masters.
#include <atomic>
#include <thread>

#include "stores/redis/client_test.hpp"

namespace semel::stores::redis {
namespace {

using base::Applied;
using base::ErrorCode;
using std::chrono::steady_clock;
using support::RedisCluster;
using support::RedisSentinels;

ClientOptions cluster_options(RedisServer& node) {
    ClientOptions options = options_of(node.url());
    options.cluster = true;
    options.patience = seconds{10};
    options.connect_timeout = milliseconds{1000};
    options.scripts = {&count_script()};
    return options;
}

// A key that the slot's tag leads to the i-th third of the slots.
std::string key_in(std::size_t third, std::size_t masters = 3) {
    for (int i = 0;; ++i) {
        std::string key = "{" + std::to_string(i) + "}";
        if (slot_of(key) * masters / 16'384 == third) return key;
    }
}

// Threads that count on some keys, each with one command under way, until told to end.
class Load {
  public:
    Load(Client& client, std::vector<std::string> keys, bool repeatable) {
        for (const std::string& key : keys) {
            threads_.emplace_back([this, &client, key, repeatable] {
                while (!ending_) {
                    const Answer answer = one(client, scripted(count_script(), key, repeatable));
                    if (applied_of(answer) == Applied::yes) {
                        ++done_;
                        continue;
                    }
                    ++failed_;
                    const std::lock_guard lock(mutex_);
                    last_ = text_of(answer);
                }
            });
        }
    }
    ~Load() { end(); }
    void end() {
        ending_ = true;
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
    }
    [[nodiscard]] long done() const { return done_; }
    [[nodiscard]] long failed() const { return failed_; }
    std::string last_failure() {
        const std::lock_guard lock(mutex_);
        return last_;
    }
    /// Waits for as many more as the threads make in a moment.
    void proceed(long more = 50) {
        const long wanted = done_ + more;
        EXPECT_TRUE(eventually([&] { return done_ >= wanted; }, seconds{20})) << last_failure();
    }

  private:
    std::atomic<bool> ending_{false};
    std::atomic<long> done_{0};
    std::atomic<long> failed_{0};
    std::mutex mutex_;
    std::string last_;
    std::vector<std::thread> threads_;
};

TEST(RedisCluster, keys_of_all_nodes_are_reached_and_the_masters_are_listed_in_order) {
    RedisCluster cluster;
    const auto client = connected(cluster_options(cluster.node(1)));
    const std::vector<Node> masters = client->masters();
    ASSERT_EQ(masters.size(), 3U);
    EXPECT_TRUE(masters[0].name < masters[1].name && masters[1].name < masters[2].name);
    EXPECT_EQ(client->counters().connections, 3U);
    std::vector<Command> commands;
    for (std::size_t third = 0; third < 3; ++third)
        commands.push_back(scripted(count_script(), key_in(third)));
    for (const Answer& answer : got(submitted(*client, std::move(commands))))
        EXPECT_EQ(text_of(answer), "1");
    for (std::size_t third = 0; third < 3; ++third) {
        EXPECT_EQ(cluster.node(third).command({"GET", key_in(third)}).text, "1");
        EXPECT_EQ(text_of(client->ask(cluster.node(third).name(), {"DBSIZE"})), "1");
    }
    EXPECT_EQ(client->counters().redirections, 0U);
    EXPECT_TRUE(client->health());
}

TEST(RedisCluster, slots_that_move_under_load_lose_no_command_and_fail_none) {
    RedisCluster cluster;
    const auto client = connected(cluster_options(cluster.node(0)));
    const std::string moving = key_in(0);
    const std::uint16_t slot = slot_of(moving);
    // Further keys in the slot, so that its move takes several steps.
    for (int i = 0; i < 30; ++i) cluster.node(0).command({"SET", moving + std::to_string(i), "x"});
    Load load(*client, {moving, moving + "0k", key_in(1), key_in(2)}, false);
    load.proceed();
    for (const auto& [from, to] : {std::pair<std::size_t, std::size_t>{0, 1}, {1, 2}, {2, 0}}) {
        ASSERT_TRUE(cluster.migrate(slot, from, to, [&] { load.proceed(20); }));
        load.proceed();
    }
    load.end();
    EXPECT_EQ(load.failed(), 0) << load.last_failure();
    long counted = 0;
    for (const auto& [node, key] : {std::pair<std::size_t, std::string>{0, moving},
                                    {0, moving + "0k"},
                                    {1, key_in(1)},
                                    {2, key_in(2)}})
        counted += std::stol(cluster.node(node).command({"GET", key}).text);
    EXPECT_EQ(counted, load.done());
    EXPECT_GE(client->counters().redirections, 3U);
}

TEST(RedisCluster, commands_on_several_keys_of_a_half_moved_slot_wait_until_it_is_whole) {
    RedisCluster cluster;
    const auto client = connected(cluster_options(cluster.node(0)));
    const std::string tag = key_in(0);
    const auto both = [&] { return plain({"MGET", tag + "a", tag + "b"}); };
    cluster.node(0).command({"MSET", tag + "a", "1", tag + "b", "2"});
    EXPECT_EQ(std::get<Reply>(one(*client, both())).elements.size(), 2U);
    std::future<Answers> future;
    int steps = 0;
    ASSERT_TRUE(cluster.migrate(slot_of(tag), 0, 1, [&] {
        if (++steps != 2) return;
        // The slot is marked at both nodes, and no key has moved: now one has.
        const Words move{"MIGRATE", "127.0.0.1", std::to_string(cluster.node(1).port()),
                         tag + "a", "0",         "1000"};
        EXPECT_EQ(cluster.node(0).command(move).text, "OK");
        std::vector<Command> commands;
        commands.push_back(both());
        future = submitted(*client, std::move(commands));
        EXPECT_EQ(future.wait_for(milliseconds{50}), std::future_status::timeout);
    }));
    ASSERT_GE(steps, 2);
    const Answers answers = got(std::move(future));
    ASSERT_EQ(applied_of(answers.at(0)), Applied::yes) << text_of(answers.at(0));
    EXPECT_EQ(std::get<Reply>(answers[0]).elements.at(0).text, "1");
    EXPECT_EQ(std::get<Reply>(answers[0]).elements.at(1).text, "2");
}

TEST(RedisCluster, a_killed_masters_replica_takes_over_and_repeatable_commands_go_on) {
    RedisCluster cluster(3, 1);
    const auto client = connected(cluster_options(cluster.node(0)));
    const SteadyTime before = client->answering_since();
    Load load(*client, {key_in(0), key_in(1), key_in(2)}, true);
    load.proceed();
    const std::string dead = cluster.node(1).name();
    cluster.node(1).kill();
    ASSERT_TRUE(eventually([&] { return !client->health(); }));
    EXPECT_HAS(client->health().error().detail, dead);
    ASSERT_TRUE(eventually([&] { return client->health().has_value(); }, seconds{20}));
    load.proceed(100);
    load.end();
    EXPECT_EQ(load.failed(), 0) << load.last_failure();
    EXPECT_GT(client->answering_since(), before);
    const std::vector<Node> masters = client->masters();
    ASSERT_EQ(masters.size(), 3U);
    for (const Node& one : masters) EXPECT_NE(one.name, dead);
    EXPECT_EQ(text_of(client->ask(dead, {"PING"})), "[no] there is no master " + dead + " now");
}

TEST(RedisCluster, a_frozen_masters_replica_takes_over_and_the_zombie_is_left) {
    RedisCluster cluster(3, 1);
    const auto client = connected(cluster_options(cluster.node(0)));
    EXPECT_EQ(text_of(one(*client, scripted(count_script(), key_in(2)))), "1");
    // Asynchronous replication: what the replica has not got is lost with its master.
    ASSERT_TRUE(eventually([&] {
        return cluster.node(5).info("master_repl_offset") ==
               cluster.node(2).info("master_repl_offset");
    }));
    cluster.node(2).freeze();
    const Answer answer = one(*client, scripted(count_script(), key_in(2), true));
    EXPECT_EQ(text_of(answer), "2");
    ASSERT_TRUE(eventually([&] { return client->health().has_value(); }));
    cluster.node(2).thaw();
    ASSERT_TRUE(eventually([&] { return cluster.node(2).info("role") == "slave"; }));
    EXPECT_EQ(text_of(one(*client, scripted(count_script(), key_in(2)))), "3");
}

TEST(RedisCluster, a_slot_that_nobody_serves_is_named) {
    RedisServerOptions partly;
    partly.arguments = {"--cluster-require-full-coverage", "no"};
    RedisCluster cluster(3, 0, partly);
    ClientOptions options = cluster_options(cluster.node(0));
    options.patience = milliseconds{700};
    const auto client = connected(options);
    const std::uint16_t slot = slot_of(key_in(0));
    for (std::size_t i = 0; i < 3; ++i)
        cluster.node(i).command({"CLUSTER", "DELSLOTS", std::to_string(slot)});
    const Answer answer = one(*client, scripted(count_script(), key_in(0)));
    EXPECT_EQ(applied_of(answer), Applied::no);
    EXPECT_HAS(text_of(answer), "CLUSTER INFO");
    EXPECT_EQ(text_of(one(*client, scripted(count_script(), key_in(1)))), "1");
}

TEST(RedisSentinel, the_client_goes_over_to_the_server_that_the_sentinels_promote) {
    RedisServerOptions with_password;
    with_password.password = "pw";
    RedisSentinels watched(1, 3, with_password);
    ClientOptions options = options_of(watched.url());
    options.patience = seconds{10};
    options.connect_timeout = milliseconds{1000};
    options.scripts = {&count_script()};
    const auto client = connected(options);
    EXPECT_EQ(client->masters().at(0).name, watched.server(0).name());
    const SteadyTime before = client->answering_since();
    Load load(*client, {"a", "b"}, true);
    load.proceed();
    ASSERT_TRUE(watched.failover());
    load.proceed();
    ASSERT_TRUE(eventually([&] {
        return client->masters().at(0).name == watched.server(1).name();
    })) << client->masters().at(0).name;
    ASSERT_TRUE(eventually([&] { return client->health().has_value(); }))
        << client->health().error().detail;
    EXPECT_GT(client->answering_since(), before);
    load.proceed();
    load.end();
    EXPECT_EQ(load.failed(), 0) << load.last_failure();
}

TEST(RedisSentinel, a_dead_masters_successor_is_found_and_repeatable_commands_go_on) {
    RedisSentinels watched(1, 3);
    ClientOptions options = options_of(watched.url());
    options.patience = seconds{10};
    options.connect_timeout = milliseconds{1000};
    const auto client = connected(options);
    Load load(*client, {"a", "b"}, true);
    load.proceed();
    watched.server(0).kill();
    ASSERT_TRUE(eventually([&] { return watched.master() == 1; }, seconds{20}));
    load.proceed();
    load.end();
    EXPECT_EQ(load.failed(), 0) << load.last_failure();
    EXPECT_EQ(client->masters().at(0).name, watched.server(1).name());
}

TEST(RedisSentinel, the_sentinels_are_asked_one_after_the_other_and_their_refusals_have_words) {
    RedisSentinels watched(1, 3);
    ClientOptions options = options_of(watched.url());
    options.connect_timeout = milliseconds{500};
    watched.sentinel(0).kill();
    {
        const auto client = connected(options);
        EXPECT_EQ(text_of(one(*client, plain({"SET", "k", "v"}))), "OK");
    }
    ClientOptions other = options;
    other.target.master_name = "nobody";
    EXPECT_EQ(refused(other).code, ErrorCode::invalid_argument);
    EXPECT_HAS(refused(other).detail, "watches no master named nobody");
    for (std::size_t i = 1; i < 3; ++i)
        watched.sentinel(i).command({"CONFIG", "SET", "requirepass", "x"});
    ClientOptions with_password = options;
    with_password.sentinel_password = "wr0ng";
    const base::Error error = refused(with_password);
    EXPECT_EQ(error.code, ErrorCode::invalid_argument);
    EXPECT_HAS(error.detail, "refuses user and password");
    EXPECT_EQ(error.detail.find("wr0ng"), std::string::npos);
    watched.sentinel(1).kill();
    watched.sentinel(2).kill();
    EXPECT_EQ(refused(options).code, ErrorCode::store_unavailable);
}

}  // namespace
}  // namespace semel::stores::redis
