#include "stores/redis/checks.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "base/time.hpp"
#include "stores/redis/refusal.hpp"
#include "support/redis_server.hpp"

namespace semel::stores::redis {
namespace {

using support::RedisCluster;
using support::RedisServer;
using support::RedisServerOptions;
using support::Words;
using namespace std::string_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const Words keeps_all{"--appendonly", "yes", "--appendfsync", "always"};

Words also(Words words, const Words& more) {
    words.insert(words.end(), more.begin(), more.end());
    return words;
}

struct How {
    bool accept_eviction = false;
    unsigned wait_replicas = 0;
    bool cluster = false;
    std::string user;  ///< "name:password".
    std::string prefix = "semel";
};

base::Result<Findings> check(const RedisServer& server, const How& how = {}) {
    std::string url = server.url();
    if (!how.user.empty()) url = "redis://" + how.user + "@" + server.name();
    auto target = parse_url(url);
    if (!target) return target.error();
    ClientOptions options;
    options.target = *target;
    options.cluster = how.cluster;
    options.wait_replicas = how.wait_replicas;
    options.patience = milliseconds{2000};  // of writes that some servers here never take
    auto client = Client::connect(options);
    if (!client) return client.error();
    auto findings = check_servers(**client, how.prefix, how.accept_eviction, how.wait_replicas);
    (*client)->stop();
    return findings;
}

Findings accepted(const RedisServer& server, const How& how = {}) {
    auto findings = check(server, how);
    if (!findings) {
        ADD_FAILURE() << findings.error().detail;
        return {};
    }
    return *findings;
}

base::Error refused(const RedisServer& server, const How& how = {}) {
    auto findings = check(server, how);
    if (findings) {
        ADD_FAILURE() << "was accepted";
        return {};
    }
    EXPECT_THAT(findings.error().detail, HasSubstr(server.name()));
    return findings.error();
}

// ---------------------------------------------------------------- what a restart forgets

TEST(RedisChecks, a_server_that_syncs_each_write_promises_everything_and_nothing_is_left_in_it) {
    const RedisServer server({.arguments = keeps_all});
    const Findings found = accepted(server);
    EXPECT_THAT(found.notices, IsEmpty());
    EXPECT_THAT(found.wrong, IsEmpty());
    EXPECT_EQ(found.version, server.info("redis_version"));
    EXPECT_TRUE(found.durability.survives_process_crash);
    EXPECT_TRUE(found.durability.survives_power_cut);
    EXPECT_TRUE(found.durability.survives_failover);
    EXPECT_THAT(found.durability.summary,
                HasSubstr("a kill of redis-server and a power cut take none"));
    EXPECT_EQ(server.command({"DBSIZE"}).integer, 0);
}

TEST(RedisChecks, weaker_syncing_is_noted_and_says_what_it_may_forget) {
    const RedisServer every_second(
        {.arguments = {"--appendonly", "yes", "--appendfsync", "everysec"}});
    Findings found = accepted(every_second);
    EXPECT_THAT(found.wrong, IsEmpty());
    EXPECT_THAT(found.notices,
                ElementsAre(AllOf(HasSubstr(every_second.name()), HasSubstr("the last second"))));
    EXPECT_TRUE(found.durability.survives_process_crash);
    EXPECT_FALSE(found.durability.survives_power_cut);
    EXPECT_THAT(found.durability.summary, HasSubstr("about the last second"));

    const RedisServer left_to_the_system(
        {.arguments = {"--appendonly", "yes", "--appendfsync", "no"}});
    found = accepted(left_to_the_system);
    EXPECT_THAT(found.wrong, IsEmpty());
    EXPECT_THAT(found.notices, ElementsAre(HasSubstr("appendfsync no")));
    EXPECT_FALSE(found.durability.survives_power_cut);

    const RedisServer not_in_rewrites(
        {.arguments = also(keeps_all, {"--no-appendfsync-on-rewrite", "yes"})});
    found = accepted(not_in_rewrites);
    EXPECT_THAT(found.notices, ElementsAre(HasSubstr("no-appendfsync-on-rewrite")));
    EXPECT_FALSE(found.durability.survives_power_cut);
}

TEST(RedisChecks, without_an_append_only_file_a_restart_forgets_and_that_is_wrong) {
    const RedisServer nothing;
    Findings found = accepted(nothing);
    EXPECT_THAT(found.wrong,
                ElementsAre(AllOf(HasSubstr("forgets every record"), HasSubstr("appendonly yes"))));
    EXPECT_FALSE(found.durability.survives_process_crash);
    EXPECT_FALSE(found.durability.survives_power_cut);
    EXPECT_THAT(found.durability.summary,
                HasSubstr("any restart of redis-server takes all of them"));

    const RedisServer snapshots({.arguments = {"--save", "3600 1"}});
    found = accepted(snapshots);
    EXPECT_THAT(found.wrong, ElementsAre(AllOf(HasSubstr("snapshots only (save 3600 1)"),
                                               HasSubstr("appendonly yes"))));
    EXPECT_FALSE(found.durability.survives_process_crash);
}

// ---------------------------------------------------------------- eviction and memory

TEST(RedisChecks, a_server_that_evicts_is_refused_unless_that_is_accepted_by_name) {
    for (const auto& [policy, what] :
         {std::pair("allkeys-lru", "any record"), std::pair("volatile-ttl", "recorded answers")}) {
        const RedisServer server(
            {.arguments = also(keeps_all, {"--maxmemory", "100mb", "--maxmemory-policy", policy})});
        const base::Error error = refused(server);
        EXPECT_EQ(error.code, base::ErrorCode::invalid_argument);
        EXPECT_THAT(error.detail, AllOf(HasSubstr(policy), HasSubstr(what),
                                        HasSubstr("maxmemory-policy noeviction"),
                                        HasSubstr("accept_eviction: true")));
        const Findings found = accepted(server, {.accept_eviction = true});
        EXPECT_THAT(found.wrong, ElementsAre(AllOf(HasSubstr(policy), HasSubstr("paid, again"))));
        EXPECT_THAT(found.durability.summary, HasSubstr("evicts"));
    }
}

TEST(RedisChecks, an_evicting_policy_without_a_limit_of_memory_is_only_noted) {
    const RedisServer server(
        {.arguments = also(keeps_all, {"--maxmemory", "0", "--maxmemory-policy", "allkeys-lfu"})});
    const Findings found = accepted(server);
    EXPECT_THAT(found.wrong, IsEmpty());
    EXPECT_THAT(found.notices,
                ElementsAre(AllOf(HasSubstr("allkeys-lfu"), HasSubstr("maxmemory is 0"))));
    const RedisServer limited({.arguments = also(keeps_all, {"--maxmemory", "100mb"})});
    EXPECT_THAT(accepted(limited).notices, IsEmpty());
}

TEST(RedisChecks, a_full_server_is_opened_because_it_still_replays) {
    const RedisServer server({.arguments = keeps_all});
    ASSERT_EQ(server.command({"CONFIG", "SET", "maxmemory", "1"}).text, "OK");
    const Findings found = accepted(server);
    EXPECT_THAT(found.wrong, ElementsAre(AllOf(HasSubstr("is full"), HasSubstr("still replayed"))));
    EXPECT_THAT(found.notices, IsEmpty());
}

// ---------------------------------------------------------------- replicas

TEST(RedisChecks, a_replica_is_refused_and_names_its_master) {
    const RedisServer master;
    const RedisServer replica(
        {.arguments = {"--replicaof", "127.0.0.1 " + std::to_string(master.port())}});
    ASSERT_TRUE(support::eventually([&] { return replica.info("master_link_status") == "up"; }))
        << replica.log();
    const base::Error error = refused(replica);
    EXPECT_EQ(error.code, base::ErrorCode::invalid_argument);
    EXPECT_THAT(error.detail,
                AllOf(HasSubstr("read-only replica of 127.0.0.1:" + std::to_string(master.port())),
                      HasSubstr("redis-sentinel://")));
}

TEST(RedisChecks, replicas_that_nobody_waits_for_make_a_failover_forget) {
    const RedisServer master({.arguments = keeps_all});
    const Words follow{"--replicaof", "127.0.0.1 " + std::to_string(master.port())};
    const RedisServer first({.arguments = follow});
    const auto connected = [&](const char* count) {
        return support::eventually([&] { return master.info("connected_slaves") == count; });
    };
    ASSERT_TRUE(connected("1")) << first.log();

    Findings found = accepted(master);
    EXPECT_THAT(found.wrong, ElementsAre(AllOf(HasSubstr("1 replica and"),
                                               HasSubstr("a failover may forget claims"),
                                               HasSubstr("wait_replicas: 1"))));
    EXPECT_FALSE(found.durability.survives_failover);
    EXPECT_TRUE(found.durability.survives_power_cut);

    ASSERT_TRUE(support::eventually([&] { return first.info("master_link_status") == "up"; }))
        << first.log();
    found = accepted(master, {.wait_replicas = 1});
    EXPECT_THAT(found.wrong, IsEmpty());
    EXPECT_THAT(found.notices, IsEmpty());
    EXPECT_TRUE(found.durability.survives_failover);
    EXPECT_THAT(found.durability.summary,
                HasSubstr("1 of 1 replica has it before it is acknowledged"));

    const RedisServer second({.arguments = follow});
    ASSERT_TRUE(connected("2")) << second.log();
    ASSERT_TRUE(support::eventually([&] { return second.info("master_link_status") == "up"; }))
        << second.log();
    found = accepted(master, {.wait_replicas = 1});
    EXPECT_THAT(found.wrong, IsEmpty());
    EXPECT_THAT(found.notices,
                ElementsAre(AllOf(HasSubstr("2 replicas"), HasSubstr("waits for fewer"))));
    EXPECT_FALSE(found.durability.survives_failover);
}

TEST(RedisChecks, waiting_for_replicas_that_are_not_there_is_said_before_the_first_claim_fails) {
    const RedisServer server({.arguments = keeps_all});
    const Findings found = accepted(server, {.wait_replicas = 1});
    ASSERT_FALSE(found.wrong.empty());
    EXPECT_THAT(found.wrong.front(),
                AllOf(HasSubstr("has 0 replicas in touch"), HasSubstr("nothing can be claimed")));

    const RedisServer wants_replicas(
        {.arguments = also(keeps_all, {"--min-replicas-to-write", "1"})});
    EXPECT_THAT(
        accepted(wants_replicas).wrong,
        ElementsAre(AllOf(HasSubstr("takes no writes"), HasSubstr("min-replicas-to-write"))));
}

// ---------------------------------------------------------------- permissions

/// A server with one user, who has these rules besides a password.
class Restricted {
  public:
    explicit Restricted(const Words& rules) : server({.arguments = keeps_all}) {
        const Reply made = server.command(also({"ACL", "SETUSER", "gate", "on", ">pw"}, rules));
        EXPECT_EQ(made.text, "OK");
    }
    RedisServer server;
    How as_user{.user = "gate:pw"};
};

TEST(RedisChecks, a_command_that_the_user_may_not_run_is_named_with_the_rule_that_allows_it) {
    const Restricted one({"~*", "+@all", "-evalsha"});
    base::Error error = refused(one.server, one.as_user);
    EXPECT_EQ(error.code, base::ErrorCode::invalid_argument);
    EXPECT_THAT(error.detail,
                AllOf(HasSubstr("run EVALSHA,"), HasSubstr("ACL SETUSER … +evalsha`")));

    const Restricted several({"~*", "+@all", "-eval", "-zadd", "-scan", "-pexpire"});
    error = refused(several.server, several.as_user);
    for (const char* rule : {"+eval", "+zadd", "+scan", "+pexpire"})
        EXPECT_THAT(error.detail, HasSubstr(rule));
    EXPECT_THAT(error.detail, Not(HasSubstr("+get")));
    EXPECT_THAT(error.detail, Not(HasSubstr("pw")));
}

TEST(RedisChecks, keys_that_the_user_may_not_touch_are_named_by_their_prefix) {
    const Restricted elsewhere({"~other:*", "+@all"});
    const base::Error error = refused(elsewhere.server, elsewhere.as_user);
    EXPECT_EQ(error.code, base::ErrorCode::invalid_argument);
    EXPECT_THAT(error.detail, AllOf(HasSubstr("'semel:'"), HasSubstr("~semel:*")));
    How right = elsewhere.as_user;
    right.prefix = "other";
    EXPECT_THAT(accepted(elsewhere.server, right).wrong, IsEmpty());
}

TEST(RedisChecks, what_the_user_may_not_ask_is_a_notice_and_promises_less) {
    const Restricted no_config({"~*", "+@all", "-config"});
    Findings found = accepted(no_config.server, no_config.as_user);
    EXPECT_THAT(found.wrong, IsEmpty());
    EXPECT_THAT(found.notices,
                ElementsAre(AllOf(HasSubstr("CONFIG GET"), HasSubstr("+config|get"))));
    EXPECT_TRUE(found.durability.survives_process_crash)
        << "INFO tells that there is an append-only file";
    EXPECT_FALSE(found.durability.survives_power_cut);

    const Restricted neither({"~*", "+@all", "-config", "-info"});
    found = accepted(neither.server, neither.as_user);
    EXPECT_EQ(found.version, "");
    EXPECT_EQ(found.notices.size(), 2u);
    EXPECT_FALSE(found.durability.survives_process_crash);
    EXPECT_THAT(found.durability.summary, HasSubstr("could not be seen"));
}

TEST(RedisChecks, a_server_whose_config_command_was_taken_away_is_opened) {
    const RedisServer server(
        {.arguments = {"--appendonly", "yes", "--rename-command", "CONFIG", "nobody-knows-it"}});
    const Findings found = accepted(server);
    EXPECT_THAT(found.wrong, IsEmpty());
    EXPECT_THAT(found.notices, ElementsAre(HasSubstr("CONFIG GET")));
}

TEST(RedisChecks, a_command_that_the_store_needs_and_the_operator_renamed_is_named) {
    const RedisServer server(
        {.arguments = also(keeps_all, {"--rename-command", "EVALSHA", "nobody-knows-it"})});
    EXPECT_THAT(refused(server).detail,
                AllOf(HasSubstr("EVALSHA"), HasSubstr("renamed or disabled")));
}

/// The rules that the guide tells an operator to set.
Words rules_of_the_guide() {
    std::ifstream file(SEMEL_REDIS_GUIDE);
    const std::string page((std::istreambuf_iterator<char>(file)), {});
    std::smatch rules;
    if (!std::regex_search(page, rules,
                           std::regex("ACL SETUSER semel on >PASSWORD ([^`]*)\n```"))) {
        ADD_FAILURE() << SEMEL_REDIS_GUIDE << " has no ACL rules";
        return {};
    }
    Words words;
    std::istringstream text(std::regex_replace(rules[1].str(), std::regex("\\\\\n"), " "));
    for (std::string word; text >> word;) words.push_back(word);
    return words;
}

TEST(RedisChecks, the_acl_rules_of_the_guide_are_enough) {
    const Restricted user(rules_of_the_guide());
    const Findings found = accepted(user.server, user.as_user);
    EXPECT_THAT(found.notices, IsEmpty());
    EXPECT_THAT(found.wrong, IsEmpty());
}

TEST(RedisChecks, each_acl_rule_of_the_guide_is_named_if_it_is_missing) {
    // Of Clusters, Sentinel, WAIT and other databases; a script that may not be loaded is sent
    // whole.
    const std::set<std::string> elsewhere{"+select", "+role",          "+wait",
                                          "+asking", "+cluster|slots", "+script|load"};
    const Words rules = rules_of_the_guide();
    const Restricted user(rules);
    std::size_t tried = 0;
    for (const std::string& rule : rules) {
        if (!rule.starts_with('+') || elsewhere.contains(rule)) continue;
        ++tried;
        const std::string without = "-" + rule.substr(1);
        ASSERT_EQ(user.server.command({"ACL", "SETUSER", "gate", without}).text, "OK");
        const auto found = check(user.server, user.as_user);
        std::string said = found ? "" : found.error().detail;
        if (found) {
            for (const std::string& notice : found->notices) said += notice;
        }
        EXPECT_THAT(said, HasSubstr(rule)) << without;
        ASSERT_EQ(user.server.command({"ACL", "SETUSER", "gate", rule}).text, "OK");
    }
    EXPECT_GT(tried, 15u);
}

TEST(RedisChecks, wait_is_needed_where_replicas_are_waited_for) {
    const Restricted user({"~*", "+@all", "-wait"});
    EXPECT_THAT(accepted(user.server, user.as_user).wrong, IsEmpty());
    How waiting = user.as_user;
    waiting.wait_replicas = 1;
    EXPECT_THAT(refused(user.server, waiting).detail, HasSubstr("+wait"));
}

// ---------------------------------------------------------------- several servers

TEST(RedisChecks, each_server_of_a_cluster_is_asked_and_what_they_share_is_said_once) {
    RedisCluster cluster(3, 0, {.arguments = {"--appendonly", "yes", "--appendfsync", "everysec"}});
    Findings found = accepted(cluster.node(0), {.cluster = true});
    EXPECT_THAT(found.wrong, IsEmpty());
    ASSERT_EQ(found.notices.size(), 1u);
    for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_THAT(found.notices[0], HasSubstr(cluster.node(i).name()));
        EXPECT_EQ(cluster.node(i).command({"DBSIZE"}).integer, 0) << i;
    }
    // the weakest counts
    ASSERT_EQ(cluster.node(2).command({"CONFIG", "SET", "appendonly", "no"}).text, "OK");
    found = accepted(cluster.node(0), {.cluster = true});
    EXPECT_THAT(found.wrong, ElementsAre(AllOf(HasSubstr(cluster.node(2).name()),
                                               Not(HasSubstr(cluster.node(1).name())))));
    EXPECT_FALSE(found.durability.survives_process_crash);
    // and one that forbids is enough
    ASSERT_EQ(cluster.node(1).command({"ACL", "SETUSER", "default", "-zadd"}).text, "OK");
    const auto forbidden = check(cluster.node(0), {.cluster = true});
    ASSERT_FALSE(forbidden);
    EXPECT_THAT(forbidden.error().detail, HasSubstr("+zadd"));
}

// ---------------------------------------------------------------- what no server here does

/// Answers what a test says, by the command's first word, and OK to everything else.
class ScriptedClient final : public Client {
  public:
    ScriptedClient() {
        say("INFO",
            "redis_version:7.2.4\r\nredis_mode:standalone\r\nrole:master\r\naof_enabled:"
            "1\r\nmaxmemory:0\r\n");
        time_ahead(0);
        answers["CONFIG"] = list({"appendfsync", "always", "appendonly", "yes", "save", ""});
    }
    void say(const std::string& command, const std::string& text) {
        answers[command] = Reply{.kind = Reply::Kind::string, .text = text, .elements = {}};
    }
    void fail(const std::string& command, const std::string& detail) {
        answers[command] = NoReply{.detail = detail};
    }
    /// Fails as the real client says it of the server's error reply.
    void refuse(const std::string& command, const std::string& error) {
        fail(command, judge(error, "fake:6379", command).sentence);
    }
    void time_ahead(std::int64_t seconds) {
        answers["TIME"] =
            list({std::to_string(base::system_clocks().wall_us() / 1'000'000 + seconds), "0"});
    }
    static Reply list(const Words& words) {
        Reply reply{.kind = Reply::Kind::array, .text = {}, .elements = {}};
        for (const std::string& word : words)
            reply.elements.push_back({.kind = Reply::Kind::string, .text = word, .elements = {}});
        return reply;
    }

    void submit(std::vector<Command> commands, Done done) override {
        std::vector<Answer> all;
        for (const Command& command : commands) {
            const std::size_t from = command.wire.find("\r\n") + 2;
            all.push_back(
                answer(command.script != nullptr
                           ? "EVALSHA"
                           : command.wire.substr(from, command.wire.find("\r\n", from) - from)));
        }
        done(std::move(all));
    }
    [[nodiscard]] std::vector<Node> masters() const override { return nodes; }
    Answer ask(const std::string&, const std::vector<std::string>& arguments) override {
        return answer(arguments.front());
    }
    [[nodiscard]] SteadyTime answering_since() const override { return {}; }
    [[nodiscard]] std::int64_t clock_offset_us() const override { return 0; }
    [[nodiscard]] base::Result<void> health() const override { return {}; }
    [[nodiscard]] Counters counters() const override { return {}; }
    void stop() override {}

    std::map<std::string, Answer> answers;
    std::set<std::string> asked;
    std::vector<Node> nodes{{.name = "fake:6379"}};

  private:
    Answer answer(const std::string& word) {
        asked.insert(word);
        const auto found = answers.find(word);
        return found == answers.end()
                   ? Answer(Reply{.kind = Reply::Kind::status, .text = "OK", .elements = {}})
                   : found->second;
    }
};

TEST(RedisChecks, a_version_that_is_too_old_is_named) {
    for (const char* version : {"6.2.14", "2.8.4", "5.0", "?"}) {
        ScriptedClient client;
        client.say("INFO", "redis_version:"s + version + "\r\nrole:master\r\n");
        const auto found = check_servers(client, "semel", false, 0);
        ASSERT_FALSE(found) << version;
        EXPECT_EQ(found.error().code, base::ErrorCode::store_version);
        EXPECT_THAT(found.error().detail,
                    AllOf(HasSubstr("fake:6379"), HasSubstr(version), HasSubstr("7.0 or newer")));
    }
    for (const char* version : {"7.0.0", "8.2.1", "10.0.0"}) {
        ScriptedClient client;
        client.say("INFO", "redis_version:"s + version + "\r\nrole:master\r\n");
        EXPECT_TRUE(check_servers(client, "semel", false, 0)) << version;
    }
}

TEST(RedisChecks, a_server_that_is_nearly_full_is_noted_before_it_stops_claims) {
    for (const auto& [used, notices] : {std::pair("95000000", 1u), std::pair("80000000", 0u)}) {
        ScriptedClient client;
        client.say("INFO",
                   "redis_version:7.0.15\r\nrole:master\r\naof_enabled:1\r\nmaxmemory:"
                   "100000000\r\nmaxmemory_human:95.37M\r\n"
                   "maxmemory_policy:noeviction\r\nused_memory_human:90.60M\r\nused_memory:"s +
                       used + "\r\n");
        const auto found = check_servers(client, "semel", false, 0);
        ASSERT_TRUE(found);
        EXPECT_EQ(found->notices.size(), notices);
        if (notices > 0)
            EXPECT_THAT(found->notices.front(),
                        AllOf(HasSubstr("90.60M of 95.37M"), HasSubstr("nothing can be claimed")));
    }
}

TEST(RedisChecks, a_sentinel_is_no_data_server) {
    ScriptedClient client;
    client.say("INFO", "redis_version:7.0.15\r\nredis_mode:sentinel\r\n");
    const auto found = check_servers(client, "semel", false, 0);
    ASSERT_FALSE(found);
    EXPECT_THAT(found.error().detail,
                AllOf(HasSubstr("is a Sentinel"), HasSubstr("redis-sentinel://")));
}

TEST(RedisChecks, a_clock_that_differs_is_noted_because_logs_will_not_match) {
    for (const auto& [ahead, words] :
         {std::pair(3600, "3600 s ahead of"), std::pair(-90, "s behind")}) {
        ScriptedClient client;
        client.time_ahead(ahead);
        const auto found = check_servers(client, "semel", false, 0);
        ASSERT_TRUE(found);
        if (ahead < 0) EXPECT_THAT(found->notices, ElementsAre(HasSubstr(words)));
        EXPECT_EQ(found->notices.size(), 1u);
        EXPECT_THAT(found->wrong, IsEmpty());
    }
    ScriptedClient client;
    client.time_ahead(2);
    EXPECT_THAT(check_servers(client, "semel", false, 0)->notices, IsEmpty());
}

TEST(RedisChecks, a_server_that_cannot_write_its_disk_is_opened_and_said_to_take_no_claims) {
    ScriptedClient client;
    client.refuse(
        "SET",
        "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist");
    const auto found = check_servers(client, "semel", false, 0);
    ASSERT_TRUE(found);
    EXPECT_THAT(found->wrong, ElementsAre(AllOf(HasSubstr("cannot save to its disk"),
                                                HasSubstr("nothing can be claimed"))));
}

TEST(RedisChecks, a_replica_that_hides_its_role_is_found_out_by_writing) {
    ScriptedClient client;
    client.refuse("INFO", "NOPERM this user has no permissions to run the 'info' command");
    client.refuse("SET", "READONLY You can't write against a read only replica.");
    const auto found = check_servers(client, "semel", false, 0);
    ASSERT_FALSE(found);
    EXPECT_EQ(found.error().code, base::ErrorCode::invalid_argument);
    EXPECT_THAT(found.error().detail, HasSubstr("read-only replica"));
}

TEST(RedisChecks, a_server_that_does_not_answer_is_not_taken_for_one_that_forbids) {
    for (const char* command : {"INFO", "CONFIG", "TIME", "SCAN"}) {
        ScriptedClient client;
        client.fail(command, "fake:6379 gave no reply within 5 s");
        const auto found = check_servers(client, "semel", false, 0);
        ASSERT_FALSE(found) << command;
        EXPECT_EQ(found.error().code, base::ErrorCode::store_unavailable);
        EXPECT_THAT(found.error().detail, HasSubstr("gave no reply"));
    }
    ScriptedClient nobody;
    nobody.nodes.clear();
    EXPECT_FALSE(check_servers(nobody, "semel", false, 0));
}

TEST(RedisChecks, every_command_of_a_script_is_tried) {
    ScriptedClient client;
    ASSERT_TRUE(check_servers(client, "semel", false, 0));
    std::size_t calls = 0;
    for (const auto& entry : std::filesystem::directory_iterator(SEMEL_REDIS_SCRIPTS)) {
        std::ifstream file(entry.path());
        const std::string script((std::istreambuf_iterator<char>(file)), {});
        const std::regex call("redis\\.p?call\\(['\"](\\w+)['\"]");
        for (std::sregex_iterator it(script.begin(), script.end(), call), end; it != end;
             ++it, ++calls) {
            EXPECT_TRUE(client.asked.contains((*it)[1].str()))
                << (*it)[1] << " of " << entry.path();
        }
    }
    EXPECT_GT(calls, 10u);
}

}  // namespace
}  // namespace semel::stores::redis
