#include "cli/cli.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/hash.hpp"
#include "base/time.hpp"
#include "cli/guarantees.hpp"
#include "cli/intent_of.hpp"
#include "stores/memory/memory_store.hpp"

namespace semel::cli {
namespace {

using testing::HasSubstr;
using testing::Not;

/// The command line with a store that is always found empty, and no server on its admin address.
class CommandLine : public testing::Test {
  protected:
    CommandLine() {
        char name[] = "/tmp/semel-cli-XXXXXX";
        folder_ = mkdtemp(name);
        config_ = folder_ + "/semel.yaml";
        std::ofstream(config_) << "listen: 127.0.0.1:0\nadmin: 127.0.0.1:1\nstore: { rocksdb: { path: " << folder_
                               << "/data } }\nupstreams: [ { name: u, base_url: 'http://127.0.0.1:1' } ]\n";
    }
    ~CommandLine() override { std::filesystem::remove_all(folder_); }

    int run_with(std::vector<std::string> arguments) {
        arguments.insert(arguments.begin(), "semel");
        std::vector<char*> argv;
        for (std::string& argument : arguments) argv.push_back(argument.data());
        Leaves leaves;
        leaves.open_store = [this](const config::Config&, bool) -> base::Result<OpenedStore> {
            if (locked) return base::Error{.code = base::ErrorCode::store_locked, .detail = folder_ + "/data is in use"};
            OpenedStore opened;
            opened.store = stores::make_memory_store(base::system_clocks());
            return opened;
        };
        leaves.mock_upstream = [this](const std::vector<std::string>& rest) {
            mock_arguments = rest;
            return 0;
        };
        testing::internal::CaptureStdout();
        testing::internal::CaptureStderr();
        const int code = run(static_cast<int>(argv.size()), argv.data(), leaves);
        out = testing::internal::GetCapturedStdout();
        err = testing::internal::GetCapturedStderr();
        return code;
    }

    std::string folder_;
    std::string config_;
    bool locked = false;
    std::vector<std::string> mock_arguments;
    std::string out;
    std::string err;
};

TEST_F(CommandLine, an_intent_that_begins_with_a_dash_is_an_intent) {
    const std::string intent = "-" + std::string(41, 'Z') + "Q";
    base::Digest digest;
    ASSERT_TRUE(base::digest_from_base64url(intent, digest));
    EXPECT_EQ(run_with({"record", "get", intent, "--config", config_}), exit_not_found) << err;
    EXPECT_EQ(run_with({"record", "resolve", intent, "--as", "failed", "--config", config_}), exit_not_found) << err;
    EXPECT_EQ(run_with({"record", "get", "-nonsense", "--config", config_}), exit_usage);
}

TEST_F(CommandLine, a_locked_directory_without_a_server_says_where_it_looked) {
    locked = true;
    EXPECT_EQ(run_with({"record", "list", "--config", config_}), exit_failed);
    EXPECT_THAT(err, HasSubstr("127.0.0.1:1"));
    EXPECT_THAT(err, HasSubstr("/data is in use"));
    EXPECT_EQ(out, "");
}

TEST_F(CommandLine, a_credential_is_taken_from_the_environment_and_never_shown) {
    setenv("SEMEL_TEST_CREDENTIAL", "sk-private", 1);
    EXPECT_EQ(run_with({"record", "get", "--id", "click", "--credential-env", "SEMEL_TEST_CREDENTIAL", "--config", config_}),
              exit_not_found);
    EXPECT_THAT(out + err, Not(HasSubstr("sk-private")));
    EXPECT_EQ(run_with({"record", "get", "--id", "click", "--credential-env", "SEMEL_NOT_SET", "--config", config_}), exit_usage);
    EXPECT_THAT(err, HasSubstr("SEMEL_NOT_SET"));
}

TEST_F(CommandLine, a_listing_without_records_is_data_on_stdout) {
    EXPECT_EQ(run_with({"record", "list", "--config", config_, "--json"}), exit_ok);
    EXPECT_EQ(out, "{\"records\":[],\"next\":null}\n");
}

TEST_F(CommandLine, mock_upstream_gets_its_options_as_they_are) {
    EXPECT_EQ(run_with({"mock-upstream", "--port", "0", "--help"}), exit_ok);
    EXPECT_THAT(mock_arguments, testing::ElementsAre("--port", "0", "--help"));
}

TEST_F(CommandLine, unreadable_fault_points_are_refused_before_anything_runs) {
    setenv("SEMEL_FAULT_POINTS", "somewhere", 1);
    EXPECT_EQ(run_with({"record", "list", "--config", config_}), exit_usage);
    unsetenv("SEMEL_FAULT_POINTS");
    EXPECT_THAT(err, HasSubstr("SEMEL_FAULT_POINTS"));
}

TEST(Guarantees, what_may_be_paid_twice_is_said_for_each_policy) {
    config::RouteConfig rules;
    EXPECT_THAT(paid_once_in_words("/r", rules), HasSubstr("possible second payment"));
    EXPECT_THAT(paid_once_in_words("/r", rules), HasSubstr("only if no owner dies"));
    rules.on_unknown = config::OnUnknown::hold;
    EXPECT_THAT(paid_once_in_words("/r", rules), Not(HasSubstr("possible second payment")));
    EXPECT_THAT(paid_once_in_words("/r", rules), HasSubstr("semel record resolve"));
    rules.mode = config::Mode::off;
    EXPECT_THAT(paid_once_in_words("/r", rules), HasSubstr("nothing is protected"));
}

TEST(Guarantees, a_spool_on_the_stores_own_disk_is_named) {
    config::Config config;
    config.store.path = "/tmp/semel-none/data";
    EXPECT_THAT(spool_in_words(config), HasSubstr("in memory"));
    config.spool_path = "/tmp/semel-none/spool";
    EXPECT_THAT(spool_in_words(config), HasSubstr("own disk"));
    config.spool_path = "/dev/shm/semel-none";
    EXPECT_THAT(spool_in_words(config), Not(HasSubstr("own disk")));
}

TEST(IntentOf, tells_tenants_apart_and_wants_one_where_clients_are_named) {
    config::Config config;
    const auto open = intent_of(config, "secret");
    const auto anonymous = open({.operation = "chat", .id = "1"});
    const auto credential = open({.operation = "chat", .credential = "sk", .id = "1"});
    ASSERT_TRUE(anonymous && credential);
    EXPECT_NE(*anonymous, *credential);
    EXPECT_FALSE(open({.operation = "chat", .id = std::string(256, 'x')}));
    config.clients.push_back({.name = "web"});
    const auto closed = intent_of(config, "secret");
    EXPECT_FALSE(closed({.operation = "chat", .id = "1"}));
    EXPECT_TRUE(closed({.operation = "chat", .client = "web", .id = "1"}));
}

}  // namespace
}  // namespace semel::cli
