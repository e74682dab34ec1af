// The client against real servers: one at a time. Cluster and Sentinel: topology_test.cpp.
#include "stores/redis/client_test.hpp"

#include <atomic>
#include <thread>

namespace semel::stores::redis {
namespace {

using base::Applied;
using base::ErrorCode;
using std::chrono::steady_clock;

// ---------------------------------------------------------------- pipelining

TEST(RedisClient, batches_of_several_threads_are_pipelined_and_answered_in_order) {
    RedisServer server;
    const auto client = connected(options_of(server.url()));
    constexpr int kThreads = 4;
    constexpr int kBatches = 100;
    constexpr int kEach = 25;
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
        threads.emplace_back([&, thread] {
            const std::string key = "counter" + std::to_string(thread);
            std::vector<std::future<Answers>> futures;
            for (int batch = 0; batch < kBatches; ++batch) {
                std::vector<Command> commands;
                for (int i = 0; i < kEach; ++i) commands.push_back(plain({"INCR", key}));
                futures.push_back(submitted(*client, std::move(commands)));
            }
            int expected = 0;
            for (auto& future : futures) {
                for (const Answer& answer : got(std::move(future)))
                    wrong += text_of(answer) != std::to_string(++expected);
            }
            wrong += expected != kBatches * kEach;
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(client->counters().connections, 1U);
}

TEST(RedisClient, every_kind_of_reply_and_a_big_value_come_back_whole) {
    RedisServer server;
    const auto client = connected(options_of(server.url()));
    const std::string big(20'000'000, 'x');
    EXPECT_EQ(text_of(one(*client, plain({"SET", "big", big}))), "OK");
    EXPECT_EQ(text_of(one(*client, plain({"GET", "big"}))), big);
    EXPECT_EQ(std::get<Reply>(one(*client, plain({"GET", "absent"}))).kind, Reply::Kind::nil);
    const Answer list = one(*client, plain({"COMMAND", "INFO", "get", "set"}));
    EXPECT_EQ(std::get<Reply>(list).elements.size(), 2U);
    EXPECT_TRUE(got(submitted(*client, {})).empty());
    const Answer asked = client->ask(server.name(), {"INFO", "server"});
    EXPECT_HAS(text_of(asked), "redis_version:7");
    EXPECT_HAS(text_of(client->ask("elsewhere:1", {"PING"})), "no master elsewhere:1");
}

TEST(RedisClient, an_error_reply_refuses_only_its_own_command) {
    RedisServer server;
    const auto client = connected(options_of(server.url()));
    std::vector<Command> commands;
    commands.push_back(plain({"SET", "text", "abc"}));
    commands.push_back(plain({"INCR", "text"}));
    commands.push_back(plain({"NOSUCHCOMMAND", "a-raw-key"}));
    commands.push_back(plain({"GET", "text"}));
    const Answers answers = got(submitted(*client, std::move(commands)));
    ASSERT_EQ(answers.size(), 4U);
    EXPECT_EQ(text_of(answers[0]), "OK");
    EXPECT_EQ(applied_of(answers[1]), Applied::no);
    EXPECT_HAS(text_of(answers[1]), "refused INCR (ERR value is not an integer");
    EXPECT_HAS(text_of(answers[2]), "unknown command");
    EXPECT_EQ(text_of(answers[2]).find("a-raw-key"), std::string::npos);
    EXPECT_EQ(text_of(answers[3]), "abc");
}

// ---------------------------------------------------------------- scripts

TEST(RedisClient, scripts_are_loaded_at_connect_and_sent_anew_after_a_flush) {
    RedisServer server;
    ClientOptions options = options_of(server.url());
    options.scripts = {&count_script()};
    const auto client = connected(std::move(options));
    EXPECT_EQ(text_of(one(*client, scripted(count_script(), "k"))), "1");
    EXPECT_EQ(client->counters().scripts_resent, 0U);
    server.command({"SCRIPT", "FLUSH"});
    std::vector<Command> commands;
    for (int i = 0; i < 3; ++i) commands.push_back(scripted(count_script(), "k"));
    const Answers answers = got(submitted(*client, std::move(commands)));
    EXPECT_EQ(server.command({"GET", "k"}).text, "4");
    EXPECT_EQ(applied_of(answers[2]), Applied::yes);
    EXPECT_GE(client->counters().scripts_resent, 1U);
    const auto resent = client->counters().scripts_resent;
    EXPECT_EQ(text_of(one(*client, scripted(count_script(), "k"))), "5");
    EXPECT_EQ(client->counters().scripts_resent, resent);  // EVAL has loaded it
}

TEST(RedisClient, a_script_that_fails_on_its_way_is_of_unknown_outcome) {
    static const Script broken =
        script_of("broken", "redis.call('SET', KEYS[1], '1') return nil + 1");
    RedisServer server;
    const auto client = connected(options_of(server.url()));
    const Answer answer = one(*client, scripted(broken, "half"));
    EXPECT_EQ(applied_of(answer), Applied::unknown);
    EXPECT_HAS(text_of(answer), "stopped the script broken on its way");
    EXPECT_EQ(server.command({"GET", "half"}).text, "1");
}

TEST(RedisClient, a_full_server_is_told_apart_and_reads_go_on) {
    RedisServer server;
    const auto client = connected(options_of(server.url()));
    EXPECT_EQ(text_of(one(*client, plain({"SET", "kept", "v"}))), "OK");
    server.command({"CONFIG", "SET", "maxmemory", "1"});
    for (const bool script : {false, true}) {
        const Answer answer =
            one(*client, script ? scripted(count_script(), "k") : plain({"SET", "k", "v"}));
        ASSERT_TRUE(std::holds_alternative<NoReply>(answer));
        EXPECT_TRUE(std::get<NoReply>(answer).full);
        EXPECT_EQ(applied_of(answer), Applied::no);
        EXPECT_HAS(text_of(answer), "maxmemory");
    }
    EXPECT_EQ(text_of(one(*client, plain({"GET", "kept"}))), "v");
}

// ---------------------------------------------------------------- ways in

TEST(RedisClient, user_database_and_socket_are_those_of_the_url) {
    RedisServer server;
    server.command({"ACL", "SETUSER", "gateway", "on", ">s3cret/word", "~*", "+@all"});
    {
        const auto client =
            connected(options_of("redis://gateway:s3cret%2Fword@" + server.name() + "/5"));
        EXPECT_EQ(text_of(one(*client, plain({"ACL", "WHOAMI"}))), "gateway");
        EXPECT_EQ(text_of(one(*client, plain({"SET", "in-five", "v"}))), "OK");
        EXPECT_EQ(client->masters().at(0).name, server.name());
    }
    const auto client =
        connected(options_of("unix://gateway:s3cret%2Fword@" + server.socket_path() + "?db=5"));
    EXPECT_EQ(text_of(one(*client, plain({"GET", "in-five"}))), "v");
    EXPECT_EQ(client->masters().at(0).name, server.socket_path());
    EXPECT_TRUE(client->health());
}

TEST(RedisClient, tls_is_spoken_with_servers_that_can_be_verified_only) {
    RedisServerOptions with_tls;
    with_tls.tls = true;
    with_tls.password = "pw";
    RedisServer server(with_tls);
    ClientOptions options = options_of(server.url());
    EXPECT_EQ(refused(options).code, ErrorCode::invalid_argument);
    EXPECT_HAS(refused(options).detail, "is not trusted");
    options.ca_file = server.tls().ca;
    {
        const auto client = connected(options);
        const std::string big(3'000'000, 'y');
        EXPECT_EQ(text_of(one(*client, plain({"SET", "k", big}))), "OK");
        EXPECT_EQ(text_of(one(*client, plain({"GET", "k"}))), big);
    }
    ClientOptions other_name = options;
    other_name.target.addresses[0].host =
        "127.0.0.2";  // not in the certificate, but not listened on either
    EXPECT_EQ(refused(other_name).code, ErrorCode::store_unavailable);
    options.ca_file = "/nonexistent/ca.pem";
    EXPECT_HAS(refused(options).detail, "the CA file /nonexistent/ca.pem cannot be used");
    // Plain text to a port that speaks TLS.
    EXPECT_HAS(refused(options_of("redis://:pw@" + server.name())).detail, "rediss://");
}

TEST(RedisClient, a_certificate_for_another_name_is_refused) {
    RedisServerOptions with_tls;
    with_tls.tls = true;
    with_tls.arguments = {"--bind", "127.0.0.1", "127.0.0.2"};
    RedisServer server(with_tls);
    ClientOptions options = options_of("rediss://127.0.0.2:" + std::to_string(server.port()));
    options.ca_file = server.tls().ca;
    const base::Error error = refused(options);
    EXPECT_EQ(error.code, ErrorCode::invalid_argument);
    EXPECT_HAS(error.detail, "IP address mismatch");
    options.target.addresses[0].host = "localhost";
    EXPECT_NE(connected(options), nullptr);
}

TEST(RedisClient, each_thing_that_is_wrong_at_connect_has_its_sentence) {
    RedisServerOptions with_password;
    with_password.password = "right";
    RedisServer server(with_password);
    RedisServer open;
    const std::string at = server.name();
    struct Case {
        std::string url;
        ErrorCode code;
        const char* text;
    };
    for (const Case& one : {
             Case{"redis://" + at, ErrorCode::invalid_argument, "wants a password"},
             Case{"redis://:wr0ng@" + at, ErrorCode::invalid_argument, "refuses user and password"},
             Case{"redis://nobody:wr0ng@" + at, ErrorCode::invalid_argument,
                  "refuses user and password"},
             Case{"redis://:wr0ng@" + open.name(), ErrorCode::invalid_argument,
                  "has no password, but the URL gives one"},
             Case{"redis://" + open.name() + "/9999", ErrorCode::invalid_argument,
                  "has no database 9999"},
             Case{"redis://127.0.0.1:1", ErrorCode::store_unavailable, "Connection refused"},
             Case{"redis://no-such-host.invalid", ErrorCode::store_unavailable,
                  "cannot be resolved"},
             Case{"unix:///nonexistent/redis.sock", ErrorCode::store_unavailable, "No such file"},
             Case{"redis-sentinel://" + open.name() + "#main", ErrorCode::invalid_argument,
                  "is a server, not a sentinel"},
         }) {
        const base::Error error = refused(options_of(one.url));
        EXPECT_EQ(error.code, one.code) << error.detail;
        EXPECT_HAS(error.detail, one.text);
        EXPECT_EQ(error.detail.find("wr0ng"), std::string::npos) << error.detail;
    }
    ClientOptions cluster = options_of(open.url());
    cluster.cluster = true;
    EXPECT_EQ(refused(cluster).code, ErrorCode::invalid_argument);
    EXPECT_HAS(refused(cluster).detail, "is not a node of a Redis Cluster");
    cluster.target.database = 1;
    EXPECT_HAS(refused(cluster).detail, "database 0 only");

    RedisServerOptions as_node;
    as_node.cluster = true;
    RedisServer node(as_node);
    EXPECT_HAS(refused(options_of(node.url())).detail, "set `cluster: true`");
    ClientOptions lonely = options_of(node.url());
    lonely.cluster = true;
    EXPECT_HAS(refused(lonely).detail, "not part of a formed Cluster");

    // TLS to a server without.
    ClientOptions plain_server = options_of("rediss://" + open.name());
    plain_server.connect_timeout = milliseconds{500};
    EXPECT_HAS(refused(plain_server).detail, "TLS");
    open.freeze();
    ClientOptions frozen = options_of(open.url());
    frozen.connect_timeout = milliseconds{200};
    EXPECT_HAS(refused(frozen).detail, "accepts connections, but does not answer within 200 ms");
}

TEST(RedisClient, a_user_without_permission_hears_which_command_it_lacks) {
    RedisServer server;
    server.command({"ACL", "SETUSER", "reader", "on", ">pw", "~*", "+@read", "+time", "+evalsha"});
    ClientOptions options = options_of("redis://reader:pw@" + server.name());
    options.scripts = {&count_script()};
    const auto client = connected(options);
    const Answer answer = one(*client, plain({"SET", "k", "v"}));
    EXPECT_EQ(applied_of(answer), Applied::no);
    EXPECT_HAS(text_of(answer), "does not permit SET to this user");
    server.command({"ACL", "SETUSER", "reader", "-time"});
    EXPECT_HAS(refused(options).detail, "+time");
}

// ---------------------------------------------------------------- losing the server

TEST(RedisClient, after_a_restart_repeatable_commands_succeed_and_others_are_unknown) {
    RedisServer server;
    const auto client = connected(options_of(server.url()));
    const SteadyTime before = client->answering_since();
    EXPECT_LT(before, steady_clock::now());
    std::vector<Command> commands;
    commands.push_back(plain({"BLPOP", "none", "0"}));
    commands.push_back(plain({"SET", "a", "1"}, true));
    auto future = submitted(*client, std::move(commands));
    ASSERT_TRUE(eventually([&] { return server.info("blocked_clients") == "1"; }));
    server.kill();
    ASSERT_TRUE(eventually([&] { return client->counters().lost_replies == 1; }));
    EXPECT_FALSE(client->health());
    server.restart();
    const Answers answers = got(std::move(future));
    EXPECT_EQ(applied_of(answers.at(0)), Applied::unknown);
    EXPECT_HAS(text_of(answers[0]),
               "BLPOP was sent to " + server.name() + " and may have been executed");
    EXPECT_EQ(text_of(answers.at(1)), "OK");
    EXPECT_EQ(server.command({"GET", "a"}).text, "1");
    EXPECT_EQ(client->counters().connections, 2U);
    EXPECT_GT(client->answering_since(), before);
    ASSERT_TRUE(eventually([&] { return client->health().has_value(); }));
}

TEST(RedisClient,
     without_a_server_commands_wait_and_are_refused_unexecuted_once_the_patience_is_over) {
    RedisServer server;
    ClientOptions options = options_of(server.url());
    options.patience = milliseconds{400};
    const auto client = connected(options);
    server.kill();
    ASSERT_TRUE(eventually([&] { return !client->health(); }));
    const auto begin = steady_clock::now();
    const Answer answer = one(*client, plain({"SET", "k", "v"}));
    const auto took = steady_clock::now() - begin;
    EXPECT_EQ(applied_of(answer), Applied::no);
    EXPECT_HAS(text_of(answer), "Connection refused");
    EXPECT_GE(took, milliseconds{400});
    EXPECT_LT(took, milliseconds{2000});
    EXPECT_GT(steady_clock::now() - client->answering_since(), milliseconds{-1});
}

TEST(RedisClient, a_frozen_server_is_given_up_after_the_patience_and_taken_back_when_it_thaws) {
    RedisServer server;
    ClientOptions options = options_of(server.url());
    options.patience = milliseconds{1500};
    options.connect_timeout = milliseconds{300};
    const auto client = connected(options);
    const SteadyTime before = client->answering_since();
    server.freeze();
    const auto begin = steady_clock::now();
    const Answer answer = one(*client, plain({"INCR", "k"}));
    EXPECT_EQ(applied_of(answer), Applied::unknown);
    EXPECT_HAS(text_of(answer), "has no answer after 1500 ms");
    EXPECT_GE(steady_clock::now() - begin, milliseconds{1500});
    ASSERT_TRUE(eventually([&] { return !client->health(); }));
    // While it is silent it does not count as answering.
    EXPECT_GE(client->answering_since() + milliseconds{100}, steady_clock::now());
    ASSERT_TRUE(eventually([&] {
        return client->health().error().detail.find("does not answer within") != std::string::npos;
    }));
    server.thaw();
    ASSERT_TRUE(eventually([&] { return client->health().has_value(); }));
    EXPECT_GT(client->answering_since(), before + milliseconds{1500});
    EXPECT_EQ(applied_of(one(*client, plain({"GET", "k"}))), Applied::yes);
}

TEST(RedisClient, a_short_silence_keeps_the_connection_but_moves_answering_since) {
    RedisServer server;
    const auto client = connected(options_of(server.url()));
    const SteadyTime before = client->answering_since();
    server.freeze();
    ASSERT_TRUE(eventually([&] { return !client->health(); }));  // after a second
    EXPECT_HAS(client->health().error().detail, "has not answered for");
    server.thaw();
    ASSERT_TRUE(eventually([&] { return client->health().has_value(); }));
    EXPECT_GE(client->answering_since() - before, milliseconds{1000});
    EXPECT_EQ(client->counters().connections, 1U);
}

TEST(RedisClient, a_late_reply_does_not_answer_somebody_else) {
    RedisServer server;
    ClientOptions options = options_of(server.url());
    options.patience = milliseconds{700};
    const auto client = connected(options);
    // The second one's reply comes after 900 ms, but the server is never silent for 700.
    std::vector<Command> slow;
    slow.push_back(plain({"BLPOP", "none", "0.4"}));
    slow.push_back(plain({"BLPOP", "none", "0.5"}));
    const Answers answers = got(submitted(*client, std::move(slow)));
    EXPECT_EQ(applied_of(answers.at(0)), Applied::yes);
    EXPECT_EQ(applied_of(answers.at(1)), Applied::unknown);
    EXPECT_EQ(text_of(one(*client, plain({"ECHO", "mine"}))), "mine");
    EXPECT_EQ(client->counters().connections, 1U);
}

TEST(RedisClient, a_loading_or_busy_server_is_waited_for) {
    RedisServer server;
    server.command({"CONFIG", "SET", "busy-reply-threshold", "1"});
    const auto client = connected(options_of(server.url()));
    std::thread script([&] { server.command({"EVAL", "while true do end", "0"}); });
    ASSERT_TRUE(eventually([&] { return server.command({"GET", "x"}).text.starts_with("BUSY"); }));
    auto future = submitted(*client, [] {
        std::vector<Command> commands;
        commands.push_back(plain({"SET", "k", "v"}));
        return commands;
    }());
    EXPECT_EQ(server.command({"SCRIPT", "KILL"}).text, "OK");
    EXPECT_EQ(text_of(got(std::move(future)).at(0)), "OK");
    script.join();
}

TEST(RedisClient, a_read_only_replica_refuses_in_words) {
    RedisServer master;
    RedisServerOptions as_replica;
    as_replica.arguments = {"--replicaof", "127.0.0.1 " + std::to_string(master.port())};
    RedisServer replica(as_replica);
    ASSERT_TRUE(eventually([&] { return replica.info("master_link_status") == "up"; }));
    ClientOptions options = options_of(replica.url());
    options.scripts = {&count_script()};
    const auto client = connected(options);
    for (const bool script : {false, true}) {
        const Answer answer =
            one(*client, script ? scripted(count_script(), "k") : plain({"SET", "k", "v"}));
        EXPECT_EQ(applied_of(answer), Applied::no);
        EXPECT_HAS(text_of(answer), "is a read-only replica");
    }
}

// ---------------------------------------------------------------- replicas

TEST(RedisClient, wait_replicas_confirms_writes_or_says_that_they_are_not_replicated) {
    RedisServer master;
    RedisServerOptions as_replica;
    as_replica.arguments = {"--replicaof", "127.0.0.1 " + std::to_string(master.port())};
    RedisServer replica(as_replica);
    ASSERT_TRUE(master.wait_online(1));
    ClientOptions options = options_of(master.url());
    options.wait_replicas = 1;
    options.wait_timeout = milliseconds{300};
    const auto client = connected(options);
    EXPECT_EQ(text_of(one(*client, scripted(count_script(), "k"))), "1");
    EXPECT_EQ(replica.command({"GET", "k"}).text, "1");

    replica.freeze();
    std::vector<Command> commands;
    commands.push_back(scripted(count_script(), "k"));
    commands.push_back(plain({"GET", "k"}));
    commands.back().writes = false;
    commands.push_back(plain({"LPUSH", "k", "v"}));
    const Answers answers = got(submitted(*client, std::move(commands)));
    EXPECT_EQ(applied_of(answers[0]), Applied::unknown);
    EXPECT_HAS(text_of(answers[0]), "only 0 of 1 replicas confirmed it");
    const auto* unconfirmed = std::get_if<NoReply>(&answers[0]);
    ASSERT_TRUE(unconfirmed != nullptr && unconfirmed->unconfirmed != nullptr);
    EXPECT_EQ(unconfirmed->unconfirmed->integer, 2);
    EXPECT_EQ(text_of(answers[1]), "2");
    EXPECT_EQ(applied_of(answers[2]), Applied::no);  // refused: there is nothing to confirm
    EXPECT_EQ(client->counters().not_replicated, 1U);
    replica.thaw();
    ASSERT_TRUE(eventually([&] { return replica.command({"GET", "k"}).text == "2"; }));
    EXPECT_EQ(text_of(one(*client, scripted(count_script(), "k"))), "3");
}

// ---------------------------------------------------------------- clock, end

TEST(RedisClient, the_servers_clock_is_known_and_followed) {
    RedisServer server;
    const auto client = connected(options_of(server.url()));
    const auto error = [&] {
        const Reply time = server.command({"TIME"});
        const std::int64_t wanted =
            std::stoll(time.elements[0].text) * 1'000'000 + std::stoll(time.elements[1].text);
        const auto now = std::chrono::duration_cast<std::chrono::microseconds>(
            steady_clock::now().time_since_epoch());
        return std::abs(now.count() + client->clock_offset_us() - wanted);
    };
    ASSERT_TRUE(eventually([&] { return error() < 20'000; }));
}

TEST(RedisClient, stop_answers_everything_and_later_commands_are_refused_at_once) {
    RedisServer server;
    const auto client = connected(options_of(server.url()));
    server.freeze();
    std::vector<std::future<Answers>> futures;
    for (int i = 0; i < 100; ++i) {
        std::vector<Command> commands;
        commands.push_back(plain({"INCR", "k"}, i % 2 == 0));
        futures.push_back(submitted(*client, std::move(commands)));
    }
    client->stop();
    client->stop();
    for (auto& future : futures) {
        ASSERT_EQ(future.wait_for(seconds{0}), std::future_status::ready);
        EXPECT_NE(applied_of(future.get().at(0)), Applied::yes);
    }
    const Answer late = one(*client, plain({"INCR", "k"}));
    EXPECT_EQ(applied_of(late), Applied::no);
    EXPECT_HAS(text_of(late), "shutting down");
    EXPECT_EQ(applied_of(client->ask(server.name(), {"PING"})), Applied::no);
    EXPECT_FALSE(client->health());
}

}  // namespace
}  // namespace semel::stores::redis
