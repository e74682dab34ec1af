#include "cli/cli.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/hash.hpp"
#include "base/time.hpp"
#include "cli/consumer_outlook.hpp"
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
        std::ofstream(config_)
            << "listen: 127.0.0.1:0\nadmin: 127.0.0.1:1\nstore: { rocksdb: { path: " << folder_
            << "/data } }\nupstreams: [ { name: u, base_url: 'http://127.0.0.1:1' } ]\n";
    }
    ~CommandLine() override { std::filesystem::remove_all(folder_); }

    int run_with(std::vector<std::string> arguments) {
        arguments.insert(arguments.begin(), "semel");
        std::vector<char*> argv;
        for (std::string& argument : arguments) argv.push_back(argument.data());
        Leaves leaves;
        leaves.open_store = [this](const config::Config& opened_config,
                                   bool) -> base::Result<OpenedStore> {
            const bool migrates =
                opened_config.store.postgres.migrate && opened_config.store.mysql.migrate;
            if (opened_config.store.has_tables() && !plan.empty() && !migrates) {
                return base::Error{.code = base::ErrorCode::invalid_argument,
                                   .detail = "the tables are missing"};
            }
            if (opened_config.store.has_tables() && !apply_error.empty())
                return base::Error{.code = base::ErrorCode::invalid_argument,
                                   .detail = apply_error};
            ++opened_times;
            if (locked)
                return base::Error{.code = base::ErrorCode::store_locked,
                                   .detail = folder_ + "/data is in use"};
            OpenedStore opened;
            opened.store = stores::make_memory_store(base::system_clocks());
            opened.server = "PostgreSQL 15.3";
            opened.pooled = true;
            opened.notices = {"something to know"};
            opened.wrong = wrong;
            return opened;
        };
        leaves.plan_store =
            [this](const config::Config& planned) -> base::Result<std::vector<std::string>> {
            EXPECT_TRUE(planned.store.has_tables());
            if (!plan_error.empty())
                return base::Error{.code = base::ErrorCode::store_unavailable,
                                   .detail = plan_error};
            return plan;
        };
        leaves.inbox = {
            .plan =
                [this](const config::Config&, const inbox::Place& asked) {
                    place = asked;
                    return base::Result<std::vector<std::string>>(plan);
                },
            .apply = [this](const config::Config&,
                            const inbox::Place& asked) -> base::Result<void> {
                EXPECT_EQ(asked.dedup_table, place.dedup_table);
                ++applied_times;
                if (!apply_error.empty())
                    return base::Error{.code = base::ErrorCode::invalid_argument,
                                       .detail = apply_error};
                return {};
            },
            .plan_old_table =
                [this](const config::Config&, const inbox::Place& asked,
                       const inbox::OldTable& table) -> base::Result<inbox::OldTablePlan> {
                place = asked;
                old = table;
                if (!plan_error.empty())
                    return base::Error{.code = base::ErrorCode::invalid_argument,
                                       .detail = plan_error};
                return old_plan;
            },
            .migrate_old_table =
                [this](const config::Config&, const inbox::Place&, const inbox::OldTable& table,
                       const inbox::Progress& progress) -> base::Result<std::int64_t> {
                EXPECT_EQ(table.table, old.table);
                ++applied_times;
                EXPECT_TRUE(progress(5, 7));
                EXPECT_TRUE(progress(7, 7));
                if (!apply_error.empty())
                    return base::Error{.code = base::ErrorCode::invalid_argument,
                                       .detail = apply_error};
                return 7;
            }};
        leaves.consumers.check = [this](const config::ConsumerConfig&) -> base::Result<void> {
            if (!source_error.empty())
                return base::Error{.code = base::ErrorCode::invalid_argument,
                                   .detail = source_error};
            return {};
        };
        leaves.consumers.look = [this](const config::ConsumerConfig&,
                                       bool make) -> base::Result<BrokerFindings> {
            EXPECT_FALSE(make) << "nothing of this test may change anything";
            if (!broker_error.empty())
                return base::Error{.code = base::ErrorCode::io, .detail = broker_error};
            return broker;
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
    /// Writes a configuration whose store is a database.
    std::string with_database(const std::string& more = "") {
        const std::string file = folder_ + "/database.yaml";
        std::ofstream(file) << "listen: 127.0.0.1:0\nadmin: 127.0.0.1:1\nstore: { postgres: { url: "
                               "'postgresql://semel:pw-hidden@db.internal/shop'"
                            << more << " } }\n";
        return file;
    }

    std::string source_error;  ///< Of consumers.check.
    std::string broker_error;
    BrokerFindings broker;
    bool locked = false;
    std::vector<std::string> plan;
    std::string plan_error;
    std::string apply_error;
    inbox::Place place;
    inbox::OldTable old;
    inbox::OldTablePlan old_plan;
    int applied_times = 0;
    std::vector<std::string> wrong;
    int opened_times = 0;
    std::vector<std::string> mock_arguments;
    std::string out;
    std::string err;
};

TEST_F(CommandLine, an_intent_that_begins_with_a_dash_is_an_intent) {
    const std::string intent = "-" + std::string(41, 'Z') + "Q";
    base::Digest digest;
    ASSERT_TRUE(base::digest_from_base64url(intent, digest));
    EXPECT_EQ(run_with({"record", "get", intent, "--config", config_}), exit_not_found) << err;
    EXPECT_EQ(run_with({"record", "resolve", intent, "--as", "failed", "--config", config_}),
              exit_not_found)
        << err;
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
    EXPECT_EQ(run_with({"record", "get", "--id", "click", "--credential-env",
                        "SEMEL_TEST_CREDENTIAL", "--config", config_}),
              exit_not_found);
    EXPECT_THAT(out + err, Not(HasSubstr("sk-private")));
    EXPECT_EQ(run_with({"record", "get", "--id", "click", "--credential-env", "SEMEL_NOT_SET",
                        "--config", config_}),
              exit_usage);
    EXPECT_THAT(err, HasSubstr("SEMEL_NOT_SET"));
}

TEST_F(CommandLine, a_listing_without_records_is_data_on_stdout) {
    EXPECT_EQ(run_with({"record", "list", "--config", config_, "--json"}), exit_ok);
    EXPECT_EQ(out, "{\"records\":[],\"next\":null}\n");
}

TEST_F(CommandLine, migrating_shows_each_statement_and_then_runs_them) {
    plan = {"CREATE SCHEMA semel", "CREATE TABLE semel.semel_records (k bytea)"};
    const std::string file = with_database(", migrate: false");
    EXPECT_EQ(run_with({"store", "migrate", "--config", file, "--dry-run"}), exit_ok) << err;
    EXPECT_EQ(out, "CREATE SCHEMA semel;\nCREATE TABLE semel.semel_records (k bytea);\n");
    EXPECT_THAT(
        err,
        HasSubstr("2 statements to run on postgresql://db.internal/shop; nothing was changed"));
    EXPECT_EQ(opened_times, 0);
    const std::string shown = out;
    EXPECT_EQ(run_with({"store", "migrate", "--config", file}), exit_ok) << err;
    EXPECT_EQ(out, shown);
    EXPECT_THAT(err, HasSubstr("done; the tables of postgresql://db.internal/shop"));
    EXPECT_EQ(opened_times, 1) << "although the file says migrate: false";
    EXPECT_THAT(err, Not(HasSubstr("pw-hidden")));

    apply_error = "postgres: semel may not create tables";
    EXPECT_EQ(run_with({"store", "migrate", "--config", file}), exit_failed);
    EXPECT_THAT(err, HasSubstr("semel store migrate: postgres: semel may not create tables"));
    EXPECT_THAT(err, Not(HasSubstr("done")));

    plan = {};
    EXPECT_EQ(run_with({"store", "migrate", "--config", file}), exit_ok) << err;
    EXPECT_EQ(out, "");
    EXPECT_THAT(err, HasSubstr("there is nothing to do"));
    EXPECT_EQ(run_with({"store", "migrate", "--config", file, "--json"}), exit_ok) << err;
    EXPECT_EQ(
        out, "{\"store\":\"postgresql://db.internal/shop\",\"dry_run\":false,\"statements\":[]}\n");
    EXPECT_EQ(opened_times, 1);

    plan_error = "postgres: db.internal cannot be reached";
    EXPECT_EQ(run_with({"store", "migrate", "--config", file, "--dry-run"}), exit_failed);
    EXPECT_THAT(err, HasSubstr("db.internal cannot be reached"));
    EXPECT_EQ(run_with({"store", "migrate", "--config", folder_ + "/none.yaml"}), exit_usage);
    EXPECT_EQ(run_with({"store"}), exit_usage);
}

TEST_F(CommandLine, where_no_tables_are_kept_there_is_nothing_to_migrate) {
    for (const std::string kind :
         {"rocksdb: { path: /tmp/semel-none }", "memory: {}", "redis: { url: 'redis://h' }"}) {
        const std::string file = folder_ + "/other.yaml";
        std::ofstream(file) << "store: { " << kind << " }\n";
        EXPECT_EQ(run_with({"store", "migrate", "--config", file}), exit_ok) << err;
        EXPECT_THAT(err, HasSubstr("keeps no tables, so there is nothing to migrate"));
        EXPECT_EQ(out, "");
    }
    EXPECT_EQ(opened_times, 0);
}

TEST_F(CommandLine, the_inboxs_tables_are_shown_and_made_without_the_stores_own) {
    plan = {"CREATE TABLE IF NOT EXISTS semel_offsets (a int)"};
    const std::string file = with_database();
    EXPECT_EQ(run_with({"store", "migrate", "--config", file, "--inbox", "--dry-run"}), exit_ok)
        << err;
    EXPECT_EQ(out, "CREATE TABLE IF NOT EXISTS semel_offsets (a int);\n");
    EXPECT_THAT(err, HasSubstr("1 statement to run on postgresql://db.internal/shop; nothing was "
                               "changed (--dry-run)"));
    EXPECT_EQ(applied_times, 0);
    EXPECT_EQ(place.dedup_table, "message_dedup");
    EXPECT_EQ(place.schema, "");
    EXPECT_EQ(run_with({"store", "migrate", "--config", file, "--inbox", "--schema", "shop",
                        "--dedup-table", "orders_done"}),
              exit_ok)
        << err;
    EXPECT_EQ(applied_times, 1);
    EXPECT_EQ(place.dedup_table, "orders_done");
    EXPECT_EQ(place.schema, "shop");
    EXPECT_THAT(err, HasSubstr("done; the inbox's tables in postgresql://db.internal/shop"));
    apply_error = "inbox: permission denied";
    EXPECT_EQ(run_with({"store", "migrate", "--config", file, "--inbox"}), exit_failed);
    EXPECT_THAT(err, HasSubstr("semel store migrate: inbox: permission denied"));
    plan = {};
    EXPECT_EQ(run_with({"store", "migrate", "--config", file, "--inbox", "--json"}), exit_ok);
    EXPECT_EQ(
        out, "{\"store\":\"postgresql://db.internal/shop\",\"dry_run\":false,\"statements\":[]}\n");
    EXPECT_THAT(err, HasSubstr("there is nothing to do"));
    EXPECT_EQ(applied_times, 2);
    EXPECT_EQ(opened_times, 0) << "the store's own tables are another matter";
    EXPECT_THAT(out + err, Not(HasSubstr("pw-hidden")));

    EXPECT_EQ(run_with({"store", "migrate", "--config", config_, "--inbox"}), exit_usage);
    EXPECT_THAT(err, HasSubstr("in the database of store.postgres or store.mysql"));
    EXPECT_EQ(run_with({"store", "migrate", "--config", file, "--dedup-table", "orders_done"}),
              exit_usage);
    EXPECT_THAT(err, HasSubstr("say --inbox or --old-dedup-table too"));
}

TEST_F(CommandLine, an_old_table_is_migrated_with_words_for_what_its_rows_become) {
    old_plan = {.statements = {"DROP TABLE IF EXISTS x", "COMMIT"},
                .rows = 7,
                .done = 4,
                .failed = 2,
                .undecided = 1,
                .notices = {"they are held until somebody decides"}};
    const std::string file = with_database();
    const std::vector<std::string> line{"store",   "migrate",    "--config",          file,
                                        "--scope", "shop/stock", "--old-dedup-table", "processed"};
    const auto with = [&](const std::vector<std::string>& more) {
        std::vector<std::string> all = line;
        all.insert(all.end(), more.begin(), more.end());
        return run_with(all);
    };
    EXPECT_EQ(with({"--dry-run"}), exit_ok) << err;
    EXPECT_EQ(out, "DROP TABLE IF EXISTS x;\nCOMMIT;\n");
    EXPECT_THAT(err, HasSubstr("7 rows of processed go to message_dedup, scope 'shop/stock', "
                               "source '': 4 of status 1 become done, 2 of status 2 failed and due "
                               "again, 1 of status 0 unknown"));
    EXPECT_THAT(err, HasSubstr("they are held until somebody decides"));
    EXPECT_THAT(err, HasSubstr("2 statements to run on postgresql://db.internal/shop; nothing was "
                               "changed (--dry-run)"));
    EXPECT_EQ(applied_times, 0);
    const inbox::OldTable standard;
    EXPECT_EQ(old.table, "processed");
    EXPECT_EQ(old.scope, "shop/stock");
    EXPECT_EQ(old.retention, standard.retention);
    EXPECT_EQ(old.watch, standard.watch);
    EXPECT_FALSE(old.accept_writer);

    EXPECT_EQ(with({"--source", "orders", "--retention", "30d", "--utc-offset", "-300", "--watch",
                    "500ms", "--accept-writer", "--dedup-table", "orders_done"}),
              exit_ok)
        << err;
    EXPECT_EQ(old.source, "orders");
    EXPECT_EQ(old.retention, std::chrono::hours(30 * 24));
    EXPECT_EQ(old.utc_offset, std::chrono::minutes(-300));
    EXPECT_EQ(old.watch, std::chrono::milliseconds(500));
    EXPECT_TRUE(old.accept_writer);
    EXPECT_EQ(applied_times, 1);
    EXPECT_THAT(err, HasSubstr("copied 5 of 7 rows"));
    EXPECT_THAT(err, HasSubstr("done, 7 rows copied; orders_done has the new shape, and the old "
                               "table is called processed_before_semel"));

    EXPECT_EQ(with({"--json", "--dry-run"}), exit_ok) << err;
    EXPECT_EQ(
        out,
        "{\"store\":\"postgresql://db.internal/shop\",\"dry_run\":true,\"statements\":[\"DROP "
        "TABLE IF EXISTS x\",\"COMMIT\"],\"rows\":7,\"done\":4,\"failed\":2,\"undecided\":1,"
        "\"notices\":[\"they are held until somebody decides\"]}\n");

    apply_error = "inbox: somebody writes to processed";
    EXPECT_EQ(with({}), exit_failed);
    EXPECT_THAT(err, HasSubstr("semel store migrate: inbox: somebody writes to processed"));
    EXPECT_THAT(err, Not(HasSubstr("rows copied")));
    plan_error = "inbox: there is no table processed";
    EXPECT_EQ(with({}), exit_failed);
    EXPECT_EQ(out, "");
    EXPECT_THAT(err, HasSubstr("there is no table processed"));
    EXPECT_EQ(applied_times, 2);
    EXPECT_EQ(opened_times, 0);
}

TEST_F(CommandLine, an_old_table_wants_a_scope_and_its_options_want_an_old_table) {
    const std::string file = with_database();
    const std::vector<std::vector<std::string>> wrong_lines{
        {"--old-dedup-table", "processed"},
        {"--scope", "shop"},
        {"--accept-writer"},
        {"--retention", "7d"},
        {"--old-dedup-table", "processed", "--scope", "shop", "--inbox"},
        {"--old-dedup-table", "processed", "--scope", "shop", "--retention", "7"},
        {"--old-dedup-table", "processed", "--scope", "shop", "--retention", "0s"},
        {"--old-dedup-table", "processed", "--scope", "shop", "--retention", "9999999d"},
        {"--old-dedup-table", "processed", "--scope", "shop", "--utc-offset", "1441"}};
    for (std::vector<std::string> arguments : wrong_lines) {
        const std::string shown = testing::PrintToString(arguments);
        arguments.insert(arguments.begin(), {"store", "migrate", "--config", file});
        EXPECT_EQ(run_with(arguments), exit_usage) << shown;
        EXPECT_NE(err, "") << shown;
    }
    EXPECT_EQ(run_with({"store", "migrate", "--config", config_, "--old-dedup-table", "processed",
                        "--scope", "shop"}),
              exit_usage);
    EXPECT_THAT(err, HasSubstr("in the database of store.postgres or store.mysql"));
    EXPECT_EQ(old.table, inbox::OldTable{}.table) << "nothing was asked";
    EXPECT_EQ(applied_times, 0);
}

TEST_F(CommandLine, doctor_says_what_a_database_promises_and_makes_no_tables) {
    const std::string file = with_database();
    plan = {"CREATE TABLE semel_records"};
    run_with({"doctor", "--config", file});
    EXPECT_THAT(out, HasSubstr("note   store       postgresql://db.internal/shop can be reached, "
                               "but its tables are missing or old"));
    EXPECT_THAT(out, HasSubstr("`semel store migrate --config " + file + "`"));
    EXPECT_EQ(opened_times, 0);
    run_with({"doctor", "--config", with_database(", migrate: false")});
    EXPECT_THAT(out, HasSubstr("wrong  store "));
    EXPECT_THAT(out, HasSubstr("`serve` refuses to start"));
    plan = {};
    wrong = {"fsync is off"};
    EXPECT_EQ(run_with({"doctor", "--config", file}), exit_failed);
    EXPECT_THAT(out, HasSubstr("can be used: PostgreSQL 15.3, through a pooler"));
    EXPECT_THAT(out, HasSubstr("wrong  store       fsync is off"));
    EXPECT_THAT(out, HasSubstr("note   store       something to know"));
    plan_error = "postgres: no password was accepted";
    EXPECT_EQ(run_with({"doctor", "--config", file}), exit_failed);
    EXPECT_THAT(out, HasSubstr("wrong  store       postgres: no password was accepted"));
    EXPECT_THAT(out + err, Not(HasSubstr("pw-hidden")));
}

TEST_F(CommandLine, looking_at_records_changes_no_tables) {
    plan = {"ALTER TABLE semel_records"};
    EXPECT_EQ(run_with({"record", "list", "--config", with_database()}), exit_failed);
    EXPECT_THAT(err, HasSubstr("the tables of postgresql://db.internal/shop are missing"));
    EXPECT_THAT(err, HasSubstr("semel store migrate --config FILE"));
    plan = {};
    EXPECT_EQ(run_with({"record", "list", "--config", with_database()}), exit_ok) << err;
    EXPECT_THAT(err, HasSubstr("reading postgresql://db.internal/shop itself"));
}

constexpr const char* a_consumer =
    "consumers:\n"
    "  - name: orders\n"
    "    source: { kafka: { brokers: b, topics: [orders], group: shop } }\n"
    "    handler: { http: { url: \"http://127.0.0.1:1\" } }\n"
    "    retry: { delays: [1h] }\n";

TEST_F(CommandLine, consumers_are_checked_without_asking_anybody) {
    std::ofstream(config_, std::ios::app) << a_consumer;
    EXPECT_EQ(run_with({"serve", "--check", "--config", config_}), exit_ok) << err;
    source_error = "kafka: the property enable.auto.commit cannot be set: never before";
    EXPECT_EQ(run_with({"serve", "--check", "--config", config_}), exit_usage);
    EXPECT_THAT(err, HasSubstr(config_ + ":6: consumer orders: kafka: the property "
                                         "enable.auto.commit cannot be set"));
    EXPECT_EQ(run_with({"doctor", "--config", config_}), exit_usage);
    source_error.clear();
    const std::string file = folder_ + "/sql.yaml";
    const auto with = [&](const std::string& handler) {
        std::ofstream(file) << "consumers:\n"
                               "  - name: stock\n"
                               "    source: { kafka: { brokers: b, topics: [t], group: g } }\n"
                               "    database: { postgres: { url: \"postgresql://db/shop\" } }\n"
                            << handler;
        return run_with({"serve", "--check", "--config", file});
    };
    const std::string sql =
        "    strategy: transaction\n    handler: { sql: { params: { a: { json: "
        "/a } }, statements: [\"UPDATE t SET a = ";
    EXPECT_EQ(with(sql + ":a\"] } }\n"), exit_ok) << err;
    EXPECT_EQ(with(sql + ":b\"] } }\n"), exit_usage);
    EXPECT_THAT(err, HasSubstr("handler.sql.statements[0]"));
    EXPECT_EQ(with(sql + "1\"] } }\n"), exit_usage);
    EXPECT_THAT(err, HasSubstr("handler.sql.params.a is used by no statement"));
    const std::string state =
        "    strategy: state\n    state: { key: { column: no, value: { json: "
        "/no } }, status: s, from: [A], to: B, terminal: [B], table: ";
    EXPECT_EQ(with(state + "shop.orders }\n"), exit_ok) << err;
    EXPECT_EQ(with(state + "\"orders; DROP TABLE x\" }\n"), exit_usage);
    EXPECT_THAT(err, HasSubstr("state.table"));
}

TEST_F(CommandLine, doctor_says_what_consumers_promise_and_what_is_missing) {
    std::ofstream(config_, std::ios::app) << a_consumer;
    broker.retention = std::chrono::hours{24 * 30};
    run_with({"doctor", "--config", config_});
    EXPECT_THAT(out, HasSubstr("ok     consumer    orders: strategy store: no message is lost; an "
                               "effect happens twice only where a process died"));
    EXPECT_THAT(out, HasSubstr("must be the only member of its group"));
    EXPECT_THAT(out,
                HasSubstr("4 run(s), the last ones after 1h; done ids stay known for 745h, dead "
                          "ones for 30d"));
    broker.letters_missing = "the topic orders.shop.dlq";
    broker.missing = {"the topic orders"};
    broker.retention.reset();
    broker.about_retention = "retention.ms is -1";
    EXPECT_EQ(run_with({"doctor", "--config", config_}), exit_failed);
    EXPECT_THAT(out, HasSubstr("wrong  consumer    orders: dead_letter: the topic orders.shop.dlq "
                               "does not exist"));
    EXPECT_THAT(out, HasSubstr("note   consumer    orders: the topic orders does not exist; the "
                               "consumer waits for it"));
    EXPECT_THAT(out,
                HasSubstr("stays known for 7d, and the broker sets no limit to how late it may "
                          "come again (retention.ms is -1)"));
    broker_error = "kafka: no broker answers";
    EXPECT_EQ(run_with({"doctor", "--config", config_}), exit_failed);
    EXPECT_THAT(out, HasSubstr("wrong  consumer    orders: kafka: no broker answers"));
}

TEST_F(CommandLine, consumer_commands_want_a_server_and_say_where_they_looked) {
    for (const std::vector<std::string>& line :
         std::vector<std::vector<std::string>>{{"consumer", "list"},
                                               {"consumer", "lag", "orders"},
                                               {"consumer", "pause", "orders"}}) {
        std::vector<std::string> arguments = line;
        arguments.insert(arguments.end(), {"--config", config_});
        EXPECT_EQ(run_with(arguments), exit_failed);
        EXPECT_THAT(err, HasSubstr("no server answers on 127.0.0.1:1 "));
        EXPECT_EQ(out, "");
    }
    EXPECT_EQ(run_with({"consumer", "list", "--config", folder_ + "/none.yaml"}), exit_usage);
    EXPECT_EQ(run_with({"consumer", "pause", "--config", config_}), exit_usage) << "no name";
    EXPECT_EQ(run_with({"consumer"}), exit_usage);
}

TEST_F(CommandLine, the_inboxs_tables_of_a_consumer_are_made_in_its_own_database) {
    plan = {"CREATE TABLE message_dedup"};
    std::ofstream(config_, std::ios::app)
        << "consumers:\n"
           "  - name: stock\n"
           "    source: { kafka: { brokers: b, topics: [t], group: g } }\n"
           "    database: { mysql: { url: \"mysql://u:pw-hidden@db.internal/shop\" } }\n"
           "    strategy: table\n"
           "    handler: { http: { url: \"http://127.0.0.1:1\" } }\n";
    EXPECT_EQ(run_with({"store", "migrate", "--config", config_, "--inbox", "--consumer", "stock",
                        "--dry-run"}),
              exit_ok)
        << err;
    EXPECT_EQ(out, "CREATE TABLE message_dedup;\n");
    EXPECT_THAT(err, HasSubstr("mysql://db.internal/shop; nothing was changed"));
    EXPECT_THAT(out + err, Not(HasSubstr("pw-hidden")));
    EXPECT_EQ(run_with({"store", "migrate", "--config", config_, "--inbox", "--consumer", "other"}),
              exit_usage);
    EXPECT_THAT(err, HasSubstr("there is no consumer other"));
    EXPECT_EQ(run_with({"store", "migrate", "--config", config_, "--consumer", "stock"}),
              exit_usage)
        << "it has no store of its own";
    EXPECT_THAT(err, HasSubstr("there is no consumer stock with a store of its own"));
}

TEST_F(CommandLine, the_tables_of_a_consumers_own_store_are_made_there) {
    plan = {"CREATE TABLE semel_records"};
    std::ofstream(config_, std::ios::app)
        << "consumers:\n"
           "  - name: stock\n"
           "    source: { kafka: { brokers: b, topics: [t], group: g } }\n"
           "    store: { postgres: { url: \"postgresql://u:pw-hidden@db.internal/shop\" } }\n"
           "    handler: { http: { url: \"http://127.0.0.1:1\" } }\n";
    EXPECT_EQ(
        run_with({"store", "migrate", "--config", config_, "--consumer", "stock", "--dry-run"}),
        exit_ok)
        << err;
    EXPECT_EQ(out, "CREATE TABLE semel_records;\n");
    EXPECT_THAT(err, HasSubstr("postgresql://db.internal/shop; nothing was changed"));
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

class ConsumerOutlook : public testing::Test {
  protected:
    ConsumerOutlook() {
        consumer_.name = "orders";
        consumer_.kafka.emplace();
        consumer_.kafka->topics = {"orders"};
        leaves_.consumers.look = [this](const config::ConsumerConfig&,
                                        bool make) -> base::Result<BrokerFindings> {
            made_ = make;
            if (error_) return *error_;
            return broker_;
        };
        leaves_.consumers.connect = [this](const config::DatabaseConfig&) -> inbox::Connect {
            return [this]() -> sql::Tried<std::shared_ptr<sql::Executor>> {
                ++connected_;
                return sql::Problem{.trouble = sql::Trouble::lost,
                                    .error = {.detail = "the database is away"}};
            };
        };
    }
    Outlook look(bool make = true) {
        return look_at_consumer(consumer_, "semel.yaml", leaves_, make);
    }
    static constexpr std::chrono::hours day{24};
    config::ConsumerConfig consumer_;
    BrokerFindings broker_{.missing = {},
                           .letters_missing = {},
                           .results_missing = {},
                           .copies_missing = {},
                           .copies_wrong = {},
                           .copies_left = {},
                           .retention = day * 3,
                           .about_retention = {}};
    std::optional<base::Error> error_;
    bool made_ = false;
    int connected_ = 0;
    Leaves leaves_;
};

TEST_F(ConsumerOutlook,
       auto_is_the_brokers_retention_with_all_delays_and_a_day_but_a_week_at_least) {
    EXPECT_EQ(look().retention, day * 7) << "3 d + 1 d is less";
    broker_.retention = day * 7;
    EXPECT_EQ(look().retention, day * 8);
    consumer_.retry.delays = {day, day * 2};
    EXPECT_EQ(look().retention, day * 11);
    EXPECT_TRUE(look().wrong.empty());
    broker_.retention.reset();
    EXPECT_EQ(look().retention, day * 7);
    consumer_.retry.delays = {day * 9};
    EXPECT_EQ(look().retention, day * 10);
    EXPECT_EQ(look().notes.size(), 1u) << "no limit: said";
}

TEST_F(ConsumerOutlook, a_memory_shorter_than_the_brokers_is_refused_unless_accepted) {
    broker_.retention = day * 30;
    consumer_.retention = day * 8;
    const Outlook refused = look();
    ASSERT_EQ(refused.wrong.size(), 1u);
    EXPECT_THAT(refused.wrong.front(), HasSubstr("8d is shorter than 31d"));
    consumer_.accept.insert(config::Accept::short_dedup);
    const Outlook accepted = look();
    EXPECT_TRUE(accepted.wrong.empty());
    EXPECT_EQ(accepted.retention, day * 8);
    EXPECT_EQ(accepted.notes.size(), 1u);
    consumer_.strategy = config::ConsumerStrategy::state;
    consumer_.accept.clear();
    EXPECT_TRUE(look().wrong.empty()) << "the business table knows for ever";
}

TEST_F(ConsumerOutlook, what_is_away_is_asked_again_and_what_is_wrong_is_not) {
    error_ = base::Error{.code = base::ErrorCode::io, .detail = "no broker"};
    EXPECT_EQ(look().away, std::vector<std::string>{"no broker"});
    EXPECT_TRUE(look().wrong.empty());
    error_->code = base::ErrorCode::invalid_argument;
    EXPECT_EQ(look().wrong, std::vector<std::string>{"no broker"});
    EXPECT_TRUE(look().away.empty());
    error_.reset();
    consumer_.database.emplace();
    EXPECT_EQ(look().away, std::vector<std::string>{"database: the database is away"});
    EXPECT_EQ(connected_, 1);
    consumer_.database.reset();
    EXPECT_TRUE(made_);
    look(false);
    EXPECT_FALSE(made_) << "a look of doctor's makes nothing";
    broker_.results_missing = "the topic results";
    EXPECT_THAT(look().wrong.at(0), HasSubstr("results: the topic results does not exist"));
}

TEST_F(ConsumerOutlook, where_copies_wait_must_be_there_and_keep_them) {
    broker_.copies_missing = {"the topic orders.shop.retry.1h"};
    EXPECT_THAT(look().wrong.at(0), HasSubstr("orders.shop.retry.1h does not exist"));
    EXPECT_THAT(look().wrong.at(0), HasSubstr("retry.create: true"));
    broker_.copies_missing.clear();
    broker_.copies_wrong = {"the topic orders.shop.retry.1h is compacted"};
    EXPECT_THAT(look().wrong.at(0), HasSubstr("is compacted"));
    broker_.copies_wrong.clear();
    broker_.copies_left = {"orders.shop.retry.5m"};
    EXPECT_TRUE(look().wrong.empty());
    EXPECT_THAT(look().notes.at(0), HasSubstr("orders.shop.retry.5m is of no delay"));
    EXPECT_THAT(
        runs_in_words({.delays = {std::chrono::hours{1}}, .wait = config::RetryWait::broker}),
        HasSubstr("which pass at the broker"));
    EXPECT_THAT(
        runs_in_words({.delays = {std::chrono::hours{1}}, .wait = config::RetryWait::store}),
        HasSubstr("which pass beside the records"));
}

TEST_F(ConsumerOutlook, promises_say_what_each_strategy_can_keep) {
    config::Config config;
    EXPECT_THAT(promise_in_words(consumer_, config), HasSubstr("only member of its group"));
    consumer_.accept.insert(config::Accept::unshared_store);
    EXPECT_THAT(promise_in_words(consumer_, config), Not(HasSubstr("only member")));
    EXPECT_THAT(promise_in_words(consumer_, config), HasSubstr("run again"));
    consumer_.hold_unknown = true;
    EXPECT_THAT(promise_in_words(consumer_, config), HasSubstr("class unknown"));
    consumer_.strategy = config::ConsumerStrategy::transaction;
    EXPECT_THAT(promise_in_words(consumer_, config), HasSubstr("exactly once"));
    EXPECT_EQ(runs_in_words({.delays = {std::chrono::minutes{1}, std::chrono::hours{1}}}),
              "5 run(s), the last ones after 1m, 1h");
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
