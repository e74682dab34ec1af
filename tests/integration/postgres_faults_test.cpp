// What PostgreSQL servers do to the store: frozen, killed, restarted, failed over, badly set up,
// badly addressed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <future>
#include <thread>

#include "integration/store_answers.hpp"
#include "stores/postgres/checks.hpp"
#include "stores/postgres/postgres_store.hpp"
#include "stores/postgres/wire.hpp"
#include "support/postgres_server.hpp"

namespace semel::integration {
namespace {

using namespace core;
using namespace std::chrono_literals;
using std::chrono::steady_clock;
using stores::PostgresOptions;
using stores::PostgresReport;
using support::PgBouncer;
using support::PostgresClient;
using support::PostgresServer;
using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

PostgresServer& server() {
    static PostgresServer one;
    return one;
}

std::unique_ptr<Store> open(const PostgresOptions& options, PostgresReport* report = nullptr) {
    auto made = stores::open_postgres_store(options, report);
    if (!made) throw std::runtime_error(made.error().detail);
    return std::move(*made);
}

/// The same intent, asked by another owner.
Acquire another(std::uint64_t n) {
    Acquire claim = acquire_of(n);
    claim.nonce = nonce_of(1'000'000 + n);
    return claim;
}

/// Asks until the store answers again; what it answers then.
base::Result<Decided> ask_until_answered(Store& store, const StoredKey& key,
                                         const StoreOperation& operation) {
    base::Result<Decided> answer = ask(store, key, operation);
    EXPECT_TRUE(PostgresServer::eventually(
        [&] {
            if (!answer) answer = ask(store, key, operation);
            return answer.has_value();
        },
        30s))
        << answer.error().detail;
    return answer;
}

// ---------------------------------------------------------------- a server that is in trouble

TEST(PostgresFaults, a_frozen_server_is_given_up_in_time_and_taken_up_when_it_thaws) {
    PostgresServer own;
    auto store = open({.url = own.url()});
    ASSERT_TRUE(is<Granted>(ask(*store, key_of(1), acquire_of(1))));
    own.freeze();
    const auto begin = steady_clock::now();
    const auto answer = ask(*store, key_of(2), acquire_of(2));
    const auto took = steady_clock::now() - begin;
    ASSERT_FALSE(answer);
    EXPECT_EQ(answer.error().code, base::ErrorCode::store_unavailable);
    EXPECT_LT(took, 6s);
    EXPECT_FALSE(store->health());
    own.thaw();
    // What was asked of the frozen server may have been done.
    const auto again = ask_until_answered(*store, key_of(2), acquire_of(2));
    EXPECT_TRUE(is<Granted>(again));
    EXPECT_TRUE(is<InFlight>(ask(*store, key_of(1), another(1))));
    EXPECT_TRUE(PostgresServer::eventually([&] { return store->health().has_value(); }));
}

TEST(PostgresFaults, a_frozen_server_cannot_keep_the_program_from_starting_or_ending) {
    PostgresServer own;
    auto store = open({.url = own.url()});
    own.freeze();
    auto begin = steady_clock::now();
    auto refused = stores::open_postgres_store({.url = own.url(), .connect_timeout = 300ms});
    ASSERT_FALSE(refused);
    EXPECT_THAT(refused.error().detail, HasSubstr("did not answer in time"));
    EXPECT_LT(steady_clock::now() - begin, 2s);
    begin = steady_clock::now();
    store->stop();
    EXPECT_LT(steady_clock::now() - begin, 10s);
}

TEST(PostgresFaults, a_killed_and_restarted_server_has_what_was_acknowledged) {
    PostgresServer own;
    auto store = open({.url = own.url()});
    const auto token = std::get<Granted>(ask(*store, key_of(1), acquire_of(1))->outcome).token;
    ASSERT_TRUE(is<Applied>(ask(*store, key_of(1), complete_of(1, token, 1000))));
    ASSERT_TRUE(is<Granted>(ask(*store, key_of(2), acquire_of(2))));
    own.kill();
    const auto answer = ask(*store, key_of(3), acquire_of(3));
    ASSERT_FALSE(answer);
    EXPECT_EQ(answer.error().applied, base::Applied::no) << "no connection could carry it";
    EXPECT_FALSE(store->health());
    own.restart();
    EXPECT_TRUE(is<Granted>(ask_until_answered(*store, key_of(3), acquire_of(3))));
    const auto replay = ask(*store, key_of(1), another(1));
    ASSERT_TRUE(is<Replay>(replay));
    EXPECT_EQ(*std::get<Replay>(replay->outcome).record->answer->body, body_of(1, 1000));
    EXPECT_TRUE(is<InFlight>(ask(*store, key_of(2), another(2))));
}

TEST(PostgresFaults,
     connections_that_an_administrator_ends_are_made_anew_and_nothing_is_told_as_done) {
    auto store = open({.url = server().url(), .schema = "ended"});
    for (std::uint64_t round = 0; round < 10; ++round) {
        server().ask(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE "
            "application_name = 'semel'");
        const std::uint64_t n = 100 + round;
        EXPECT_TRUE(is<Granted>(ask_until_answered(*store, key_of(n), acquire_of(n))));
    }
    // Ended while idle: it is seen before anything is sent, so nobody has to wonder.
    EXPECT_EQ(server().ask("SELECT count(*) FROM ended.semel_records"), "10");
}

// ---------------------------------------------------------------- failover

TEST(PostgresFailover, an_asynchronous_standby_may_forget_and_it_is_said_before) {
    PostgresServer primary;
    const PostgresServer standby(primary, "standby1");
    const std::string both =
        "postgresql://semel@" + primary.name() + "," + standby.name() + "/semel";
    PostgresReport report;
    auto store = open({.url = both, .connect_timeout = 500ms}, &report);
    EXPECT_THAT(report.wrong,
                Contains(AllOf(HasSubstr("1 standby"), HasSubstr("a failover may forget"),
                               HasSubstr("synchronous_standby_names"))));
    EXPECT_FALSE(store->durability().survives_failover);
    EXPECT_TRUE(store->durability().survives_power_cut);
    // Seen by everybody, if not which of them are synchronous.
    primary.ask(
        "CREATE ROLE app LOGIN; GRANT USAGE ON SCHEMA semel TO app; "
        "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA semel TO app");
    open({.url = primary.url("app")}, &report);
    EXPECT_THAT(report.wrong, Contains(HasSubstr("1 standby")));
    ASSERT_TRUE(is<Granted>(ask(*store, key_of(1), acquire_of(1))));
    ASSERT_TRUE(PostgresServer::eventually(
        [&] { return standby.query("SELECT count(*) FROM semel.semel_records").one() == "1"; }));
    standby.cut_from_primary();
    ASSERT_TRUE(is<Granted>(ask(*store, key_of(2), acquire_of(2))));
    primary.kill();
    standby.promote();
    // What the new primary never had is new to it; what it had is not.
    EXPECT_TRUE(is<Granted>(ask_until_answered(*store, key_of(2), another(2))));
    EXPECT_TRUE(is<InFlight>(ask(*store, key_of(1), another(1))));
}

TEST(PostgresFailover, with_a_synchronous_standby_nothing_acknowledged_is_forgotten) {
    PostgresServer primary;
    const PostgresServer standby(primary, "standby1");
    primary.ask("ALTER SYSTEM SET synchronous_standby_names = 'standby1'");
    primary.ask("SELECT pg_reload_conf()");
    ASSERT_TRUE(PostgresServer::eventually(
        [&] { return primary.ask("SELECT sync_state FROM pg_stat_replication") == "sync"; }));
    const std::string both =
        "postgresql://semel@" + primary.name() + "," + standby.name() + "/semel";
    PostgresReport report;
    auto store = open({.url = both, .connect_timeout = 500ms}, &report);
    EXPECT_THAT(report.wrong, IsEmpty());
    EXPECT_TRUE(store->durability().survives_failover);
    for (std::uint64_t n = 0; n < 50; ++n)
        ASSERT_TRUE(is<Granted>(ask(*store, key_of(n), acquire_of(n))));
    primary.kill();
    standby.promote();
    EXPECT_TRUE(is<InFlight>(ask_until_answered(*store, key_of(0), another(0))));
    EXPECT_EQ(standby.ask("SELECT count(*) FROM semel.semel_records"), "50");
}

TEST(PostgresFailover, a_demoted_primary_is_left_for_the_server_that_may_be_written_to) {
    PostgresServer first;
    PostgresServer second;
    auto store =
        open({.url = "postgresql://semel@" + first.name() + "," + second.name() + "/semel"});
    {
        auto made = open({.url = second.url()});
    }
    ASSERT_TRUE(is<Granted>(ask(*store, key_of(1), acquire_of(1))));
    // Its standing connections meet a server that is read-only now.
    std::ofstream(first.folder() / "data" / "standby.signal").flush();
    first.restart();
    ASSERT_TRUE(is<Granted>(ask_until_answered(*store, key_of(2), acquire_of(2))));
    EXPECT_EQ(second.ask("SELECT count(*) FROM semel.semel_records"), "1");
}

// ---------------------------------------------------------------- settings in words

TEST(PostgresChecks, settings_that_would_lose_records_are_called_by_their_name) {
    const auto found = [](const stores::postgres::Facts& facts) {
        return stores::postgres::judge(facts, "db:5432");
    };
    stores::postgres::Facts good{.version = "15.18 (Debian)", .synchronous_commit = "on"};
    auto findings = found(good);
    EXPECT_EQ(findings.version, "15.18");
    EXPECT_THAT(findings.wrong, IsEmpty());
    EXPECT_THAT(findings.notices, IsEmpty());
    EXPECT_TRUE(findings.durability.survives_process_crash);
    EXPECT_TRUE(findings.durability.survives_power_cut);
    EXPECT_TRUE(findings.durability.survives_failover);
    EXPECT_THAT(findings.durability.summary, HasSubstr("no standby to fail over to"));

    auto facts = good;
    facts.fsync = false;
    findings = found(facts);
    EXPECT_THAT(findings.wrong, Contains(AllOf(HasSubstr("db:5432"), HasSubstr("fsync = off"))));
    EXPECT_TRUE(findings.durability.survives_process_crash);
    EXPECT_FALSE(findings.durability.survives_power_cut);

    facts = good;
    facts.synchronous_commit = "off";
    findings = found(facts);
    EXPECT_THAT(findings.wrong, Contains(HasSubstr("synchronous_commit = off")));
    EXPECT_FALSE(findings.durability.survives_process_crash);
    EXPECT_FALSE(findings.durability.survives_power_cut);

    facts = good;
    facts.full_page_writes = false;
    findings = found(facts);
    EXPECT_THAT(findings.notices, Contains(HasSubstr("full_page_writes = off")));
    EXPECT_FALSE(findings.durability.survives_power_cut);

    facts = good;
    facts.synchronous_standby_names = "s1";
    findings = found(facts);
    EXPECT_THAT(findings.wrong, Contains(AllOf(HasSubstr("is not there"), HasSubstr("s1"))));
    facts.standbys = facts.synchronous_standbys = 1;
    EXPECT_THAT(found(facts).wrong, IsEmpty());
    EXPECT_TRUE(found(facts).durability.survives_failover);
    facts.standbys = 3;
    EXPECT_THAT(found(facts).notices, Contains(HasSubstr("1 of its 3 standbys")));
    facts.synchronous_commit = "local";
    findings = found(facts);
    EXPECT_THAT(findings.wrong, Contains(HasSubstr("synchronous_commit = local")));
    EXPECT_FALSE(findings.durability.survives_failover);

    facts = good;
    facts.clock_ahead_us = -60'000'000;
    EXPECT_THAT(found(facts).notices, Contains(HasSubstr("60 s behind")));
}

TEST(PostgresChecks, a_real_server_says_what_its_settings_are) {
    const PostgresServer weak({.settings = {"fsync = off", "synchronous_commit = off"}});
    PostgresReport report;
    auto store = open({.url = weak.url()}, &report);
    EXPECT_THAT(report.wrong, Contains(HasSubstr("fsync = off")));
    EXPECT_THAT(report.wrong, Contains(HasSubstr("synchronous_commit = off")));
    EXPECT_FALSE(report.pooled);
    EXPECT_EQ(report.version,
              weak.ask("SELECT split_part(current_setting('server_version'), ' ', 1)"));
    EXPECT_FALSE(store->durability().survives_power_cut);
    open({.url = server().url(), .schema = "good"}, &report);
    EXPECT_THAT(report.wrong, IsEmpty());
    EXPECT_THAT(report.notices, IsEmpty());
}

TEST(PostgresChecks, each_sqlstate_means_one_thing_to_the_store) {
    using sql::Trouble;
    const auto trouble = [](const char* state) {
        return stores::postgres::problem_of(state, "words").trouble;
    };
    for (const char* state : {"40001", "40P01", "55P03", "57014"})
        EXPECT_EQ(trouble(state), Trouble::contended) << state;
    for (const char* state : {"08006", "08P01", "57P01", "57P02", "57P03", "53300", "25P03"})
        EXPECT_EQ(trouble(state), Trouble::lost) << state;
    for (const char* state : {"22001", "23514", "42501", "42P01", "53200", "54000", "XX000"})
        EXPECT_EQ(trouble(state), Trouble::refused) << state;
    EXPECT_EQ(trouble("53100"), Trouble::full);
    EXPECT_EQ(trouble("25006"), Trouble::not_writable);
    EXPECT_EQ(stores::postgres::problem_of("53100", "").error.code, base::ErrorCode::store_full);
    // What is wrong with data may quote it.
    EXPECT_THAT(stores::postgres::problem_of("22P02", "the prompt").error.detail,
                Not(HasSubstr("the prompt")));
}

// ---------------------------------------------------------------- addresses, credentials,
// permissions

TEST(PostgresSentences, every_bad_input_is_one_sentence_with_cause_and_cure_and_no_password) {
    const PostgresServer strict({.host_rules = {"host all trusted 127.0.0.1/32 trust",
                                                "host all all 127.0.0.1/32 scram-sha-256"}});
    strict.ask(
        "CREATE ROLE app LOGIN PASSWORD 'right'; CREATE ROLE trusted LOGIN; "
        "CREATE ROLE reader LOGIN PASSWORD 'right'; "
        "ALTER ROLE reader SET default_transaction_read_only = on; "
        "REVOKE CONNECT ON DATABASE postgres FROM PUBLIC");
    const std::string at = "@" + strict.name();
    struct Case {
        std::string url;
        base::ErrorCode code;
        std::vector<const char*> words;
        std::string schema = {};
        bool migrate = true;
    };
    using base::ErrorCode;
    for (const Case& one : std::initializer_list<Case>{
             {"", ErrorCode::invalid_argument, {"is empty", "postgresql://"}},
             {"postgresql://app:s3cret@h:1:2/%zz",
              ErrorCode::invalid_argument,
              {"cannot be read", "percent-encoded"}},
             {"postgresql://app:s3cret@/d?host=h1,h2,h3&port=1,2",
              ErrorCode::invalid_argument,
              {"number of hosts"}},
             {"postgresql://app:s3cret@127.0.0.1:1/semel",
              ErrorCode::store_unavailable,
              {"127.0.0.1:1", "refused", "start it"}},
             {"postgresql://app:s3cret@nowhere.invalid/semel",
              ErrorCode::store_unavailable,
              {"nowhere.invalid"}},
             {"postgresql://app:s3cret" + at + "/semel",
              ErrorCode::invalid_argument,
              {"the password of the user app", "correct it"}},
             {"postgresql://app" + at + "/semel",
              ErrorCode::invalid_argument,
              {"wants a password", "app"}},
             {"postgresql://stranger:s3cret" + at + "/semel",
              ErrorCode::invalid_argument,
              {"stranger"}},
             {"postgresql://app:right" + at + "/elsewhere",
              ErrorCode::invalid_argument,
              {"no database elsewhere", "CREATE DATABASE"}},
             {"postgresql://app:right" + at + "/postgres",
              ErrorCode::invalid_argument,
              {"GRANT CONNECT ON DATABASE postgres TO app"}},
             {"postgresql://app:right" + at + "/semel",
              ErrorCode::invalid_argument,
              {"may not make", "CREATE SCHEMA semel AUTHORIZATION app"}},
             {"postgresql://app:right" + at + "/semel?sslmode=require",
              ErrorCode::store_unavailable,
              {"SSL", "sslmode"}},
             {"postgresql://trusted" + at + "/semel",
              ErrorCode::invalid_argument,
              {"missing", "migrate"},
              "",
              false},
             {"postgresql://trusted" + at + "/semel",
              ErrorCode::invalid_argument,
              {"a-z"},
              "Bad-Name"}}) {
        const auto made = stores::open_postgres_store(
            {.url = one.url, .schema = one.schema, .migrate = one.migrate});
        ASSERT_FALSE(made) << one.url;
        const std::string& detail = made.error().detail;
        EXPECT_EQ(made.error().code, one.code) << detail;
        for (const char* word : one.words) EXPECT_THAT(detail, HasSubstr(word)) << one.url;
        EXPECT_THAT(detail,
                    AllOf(Not(HasSubstr("s3cret")), Not(HasSubstr("right")), Not(HasSubstr("\n"))));
    }
    // Tables are there, and the user may not use them, or not write at all.
    {
        auto made = open({.url = strict.socket_url()});
    }
    auto made = stores::open_postgres_store({.url = "postgresql://app:right" + at + "/semel"});
    ASSERT_FALSE(made);
    EXPECT_THAT(made.error().detail, HasSubstr("app"));
    strict.ask(
        "GRANT USAGE ON SCHEMA semel TO app; GRANT SELECT ON ALL TABLES IN SCHEMA semel TO app");
    made = stores::open_postgres_store({.url = "postgresql://app:right" + at + "/semel"});
    ASSERT_FALSE(made);
    EXPECT_EQ(made.error().code, ErrorCode::invalid_argument);
    EXPECT_THAT(
        made.error().detail,
        HasSubstr("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA semel TO app"));
    // What the guide lists is enough, and all of it.
    strict.ask("GRANT INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA semel TO app");
    auto store = open({.url = "postgresql://app:right" + at + "/semel"});
    EXPECT_TRUE(is<Granted>(ask(*store, key_of(1), acquire_of(1))));
    EXPECT_TRUE(store->purge(10));
    strict.ask(
        "GRANT USAGE ON SCHEMA semel TO reader; GRANT SELECT, INSERT, UPDATE, DELETE ON ALL "
        "TABLES IN SCHEMA semel TO reader");
    made = stores::open_postgres_store({.url = "postgresql://reader:right" + at + "/semel"});
    ASSERT_FALSE(made);
    EXPECT_THAT(made.error().detail, HasSubstr("default_transaction_read_only"));
}

TEST(PostgresSentences, a_standby_alone_is_refused_by_name) {
    const PostgresServer standby(server(), "alone");
    const auto made = stores::open_postgres_store({.url = standby.url()});
    ASSERT_FALSE(made);
    EXPECT_EQ(made.error().code, base::ErrorCode::store_unavailable);
    EXPECT_THAT(made.error().detail, AllOf(HasSubstr(standby.name()),
                                           HasSubstr("read-only standby"), HasSubstr("primary")));
}

TEST(PostgresTls, the_servers_name_and_certificate_are_verified) {
    const PostgresServer sealed({.tls = true});
    auto store = open({.url = sealed.url()});
    EXPECT_TRUE(is<Granted>(ask(*store, key_of(1), acquire_of(1))));
    EXPECT_EQ(sealed.ask("SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE "
                         "application_name = 'semel' AND NOT ssl"),
              "0");
    const PostgresServer other({.tls = true});
    const std::string plain = "postgresql://semel@" + sealed.name() + "/semel";
    const auto wrong = stores::open_postgres_store(
        {.url = plain + "?sslmode=verify-full&sslrootcert=" + other.ca_file()});
    ASSERT_FALSE(wrong);
    EXPECT_THAT(wrong.error().detail, HasSubstr("certificate verify failed"));
    const auto clear = stores::open_postgres_store({.url = plain + "?sslmode=disable"});
    ASSERT_FALSE(clear);
    EXPECT_THAT(clear.error().detail, HasSubstr("pg_hba.conf"));
}

// ---------------------------------------------------------------- tables

TEST(PostgresMigration, four_that_open_at_once_make_the_tables_once) {
    std::vector<std::future<std::string>> all;
    for (int i = 0; i < 4; ++i) {
        all.push_back(std::async(std::launch::async, [] {
            auto made = stores::open_postgres_store({.url = server().url(), .schema = "crowd"});
            return made ? std::string() : made.error().detail;
        }));
    }
    for (auto& one : all) EXPECT_EQ(one.get(), "");
    EXPECT_EQ(server().ask("SELECT version FROM crowd.semel_schema"), "2");
}

TEST(PostgresMigration, a_plan_changes_nothing_and_says_what_opening_then_does) {
    const PostgresOptions options{.url = server().url(), .schema = "planned"};
    const auto plan = stores::plan_postgres_migration(options);
    ASSERT_TRUE(plan) << plan.error().detail;
    EXPECT_THAT(*plan, Contains(HasSubstr("CREATE SCHEMA \"planned\"")));
    EXPECT_THAT(*plan, Contains(HasSubstr("CREATE TABLE \"planned\".semel_records")));
    EXPECT_EQ(server().ask("SELECT count(*) FROM pg_namespace WHERE nspname = 'planned'"), "0");
    // As a person may run it.
    PostgresClient person(server().url());
    for (const std::string& statement : *plan) {
        const auto answer = person.query(statement);
        EXPECT_TRUE(answer.ok) << statement << ": " << answer.message;
    }
    const auto rest = stores::plan_postgres_migration(options);
    ASSERT_TRUE(rest);
    EXPECT_THAT(*rest, IsEmpty());
    auto store = open({.url = server().url(), .schema = "planned", .migrate = false});
    EXPECT_TRUE(is<Granted>(ask(*store, key_of(1), acquire_of(1))));
}

TEST(PostgresMigration, tables_of_version_1_keep_their_records_and_get_lists_of_parked_messages) {
    const PostgresOptions options{.url = server().url(), .schema = "older"};
    auto store = open(options);
    const auto token = [&](std::uint64_t n) {
        const auto granted = ask(*store, key_of(n), acquire_of(n));
        EXPECT_TRUE(is<Granted>(granted));
        return std::get<Granted>(granted->outcome).token;
    };
    EXPECT_TRUE(is<Applied>(ask(*store, key_of(1), complete_of(1, token(1), 1000))));
    const FencingToken running = token(2);
    store.reset();
    // As 0001_records.sql alone makes them.
    server().ask("DROP TABLE older.semel_parking, older.semel_parked");
    server().ask("UPDATE older.semel_schema SET version = 1");
    const auto forbidden =
        stores::open_postgres_store({.url = options.url, .schema = "older", .migrate = false});
    ASSERT_FALSE(forbidden);
    EXPECT_THAT(forbidden.error().detail, HasSubstr("store migrate"));
    const auto plan = stores::plan_postgres_migration(options);
    ASSERT_TRUE(plan) << plan.error().detail;
    EXPECT_EQ(plan->size(), 3U);
    store = open(options);
    EXPECT_EQ(server().ask("SELECT version FROM older.semel_schema"), "2");
    const auto replay = ask(*store, key_of(1), acquire_of(1));
    ASSERT_TRUE(is<Replay>(replay));
    EXPECT_EQ(*std::get<Replay>(replay->outcome).record->answer->body, body_of(1, 1000));
    EXPECT_TRUE(is<Applied>(ask(*store, key_of(2), complete_of(2, running, 10))));
    EXPECT_TRUE(is<ParkingOpened>(ask(*store, key_of(3), OpenParking{nonce_of(1)})));
    EXPECT_TRUE(is<Parked>(ask(*store, key_of(3), Park{nonce_of(1), 7, "message"})));
}

TEST(PostgresMigration, newer_and_foreign_tables_are_refused_also_while_running) {
    auto store = open({.url = server().url(), .schema = "later"});
    server().ask("UPDATE later.semel_schema SET version = 3");
    auto made = stores::open_postgres_store({.url = server().url(), .schema = "later"});
    ASSERT_FALSE(made);
    EXPECT_EQ(made.error().code, base::ErrorCode::store_version);
    EXPECT_THAT(made.error().detail, AllOf(HasSubstr("version 3"), HasSubstr("later")));
    const auto plan = stores::plan_postgres_migration({.url = server().url(), .schema = "later"});
    ASSERT_FALSE(plan);
    EXPECT_EQ(plan.error().code, base::ErrorCode::store_version);
    // A gateway of the old version that loses its connections does not write into newer tables.
    server().ask(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE "
        "application_name = 'semel'");
    const auto refused = ask(*store, key_of(1), acquire_of(1));
    ASSERT_FALSE(refused);
    EXPECT_EQ(server().ask("SELECT count(*) FROM later.semel_records"), "0");

    server().ask("CREATE SCHEMA foreign1; CREATE TABLE foreign1.semel_records (id int)");
    made = stores::open_postgres_store({.url = server().url(), .schema = "foreign1"});
    ASSERT_FALSE(made);
    EXPECT_EQ(made.error().code, base::ErrorCode::invalid_argument);
    EXPECT_THAT(made.error().detail, HasSubstr("semel_records that this program did not make"));

    open({.url = server().url(), .schema = "altered"});
    for (const char* change :
         {"ALTER TABLE altered.semel_turns DROP COLUMN late",
          "ALTER TABLE altered.semel_turns ADD COLUMN late boolean NOT NULL DEFAULT false; "
          "ALTER TABLE altered.semel_records DROP CONSTRAINT semel_records_pkey"}) {
        server().ask(change);
        made = stores::open_postgres_store({.url = server().url(), .schema = "altered"});
        ASSERT_FALSE(made) << change;
        EXPECT_EQ(made.error().code, base::ErrorCode::invalid_argument);
        EXPECT_THAT(made.error().detail, HasSubstr("another shape")) << change;
    }
}

}  // namespace
}  // namespace semel::integration
