// What the strategy `transaction` with a callback remembers of processes that died: a death is what
// a Flights object has named and never ended.
#include <gtest/gtest.h>

#include "consumer/strategies/transaction.hpp"
#include "inbox/flights.hpp"
#include "inbox/schema.hpp"
#include "integration/consumer_sql_harness.hpp"
#include "integration/watched_trips.hpp"

namespace semel::consumer {
namespace {

using namespace test;

class ConsumerDeaths : public testing::TestWithParam<Dialect> {
  protected:
    ConsumerDeaths() : database_(GetParam()) {
        auto made = inbox::apply_schema(*database_.connect(), {});
        if (!made) throw std::runtime_error(made.error().detail);
        database_.query("CREATE TABLE effects (message_id VARCHAR(300) NOT NULL)");
    }
    [[nodiscard]] TransactionOptions options() const {
        TransactionOptions options;
        options.owner = "test";
        options.inbox.scope = scope;
        options.dialect = GetParam();
        options.connections = 2;
        options.retry = {.attempts = 3, .crashes = 2, .initial = 30ms, .jitter = 0};
        return options;
    }
    [[nodiscard]] inbox::Connect connect() const {
        return [address = database_.address()]() -> sql::Tried<std::shared_ptr<sql::Executor>> {
            return support::connect(address);
        };
    }
    /// One whose id begins with "bad" fails.
    static inbox::EffectOutcome leave(sql::Executor& executor, const Message& message) {
        const bool postgres = executor.dialect() == Dialect::postgres;
        auto answer =
            executor.run({.text = postgres ? "INSERT INTO effects (message_id) VALUES ($1)"
                                           : "INSERT INTO effects (message_id) VALUES (?)",
                          .parameters = {message.id}});
        if (auto* problem = std::get_if<sql::Problem>(&answer)) return std::move(*problem);
        if (message.id.starts_with("bad")) return inbox::Failed{.reason = "bad"};
        return inbox::Did{};
    }
    std::unique_ptr<Running> start(TransactionOptions options,
                                   std::variant<SqlEffects, TransactionCallback> effect) {
        auto running = std::make_unique<Running>();
        running->take(make_transaction(running->loop(), std::move(options), connect(),
                                       std::move(effect), running->counters()));
        if (options.partitions)
            EXPECT_TRUE(std::holds_alternative<BeginAt>(running->strategy().assigned(of_)));
        return running;
    }
    std::unique_ptr<Running> start() {
        return start(options(), TransactionCallback{.effect = leave});
    }

    std::int64_t epoch() {
        return database_.number("SELECT COALESCE(MAX(epoch), 0) FROM semel_assignments");
    }
    /// A process that was the partition's owner (or a queue's) and died while it ran these.
    void die(const std::vector<std::string>& ids, bool alone = false, bool partitions = true) {
        std::vector<base::Digest> keys;
        for (const std::string& id : ids) keys.push_back(inbox::key_hash({scope, "orders", id}));
        std::optional<inbox::Fence> fence;
        if (partitions) fence = inbox::Fence{{.topic = "orders", .number = 0}, epoch()};
        auto begun =
            inbox::Flights(options().inbox).begin(*database_.connect(), 0, fence, keys, alone);
        ASSERT_TRUE(std::holds_alternative<sql::Done>(begun));
    }
    std::int64_t effects() { return database_.number("SELECT COUNT(*) FROM effects"); }
    std::int64_t named() { return database_.number("SELECT COUNT(*) FROM semel_flights"); }
    std::int64_t counted() { return database_.number("SELECT COUNT(*) FROM semel_crashes"); }
    std::string status(const std::string& id) {
        return database_.one("SELECT status FROM message_dedup WHERE message_id = '" + id + "'");
    }

    InboxDatabase database_;
    brokers::AssignmentPtr of_ = assignment();
};

TEST_P(ConsumerDeaths, one_death_changes_nothing_and_two_in_a_row_make_suspects_that_run_alone) {
    start();
    die({"m0", "m1", "m2"});
    auto one = message(of_, 0, "m0", "{}");
    auto two = message(of_, 1, "m1", "{}");
    auto beside = message(of_, 2, "m9", "{}");
    {
        auto running = start();
        EXPECT_EQ(counted(), 3);
        EXPECT_NE(as<Applied>(running->run(*one)), nullptr) << "after one death it runs as before";
        EXPECT_EQ(counted(), 2) << "what has ended leaves";
    }
    EXPECT_EQ(named(), 0) << "a process that ends takes its names along";
    die({"m1"});
    auto running = start();
    auto verdicts = running->run({two.get(), beside.get()});
    ASSERT_NE(as<Suspect>(verdicts[0]), nullptr);
    EXPECT_EQ(as<Suspect>(verdicts[0])->lone_deaths, 0U);
    EXPECT_NE(as<Applied>(verdicts[1]), nullptr);
    EXPECT_EQ(effects(), 2);
    EXPECT_NE(as<Applied>(running->run_alone(*two)), nullptr);
    EXPECT_EQ(effects(), 3);
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM semel_flights WHERE alone = 1"), 0);
    EXPECT_EQ(database_.number("SELECT deaths FROM semel_crashes"), 1) << "of m2, which waits";
}

TEST_P(ConsumerDeaths, deaths_alone_are_charged_and_the_last_one_gives_the_message_up) {
    auto poison = message(of_, 0, "poison", "{}");
    start();
    die({"poison", "mate"});
    start();
    die({"poison", "mate"});
    {
        auto running = start();
        EXPECT_NE(as<Suspect>(running->run(*poison)), nullptr);
    }
    die({"poison"}, true);
    {
        auto running = start();
        const Verdict verdict = running->run(*poison);
        ASSERT_NE(as<Suspect>(verdict), nullptr);
        EXPECT_EQ(as<Suspect>(verdict)->lone_deaths, 1U);
    }
    die({"poison"}, true);
    auto running = start();
    auto mate = message(of_, 1, "mate", "{}");
    EXPECT_NE(as<Applied>(running->run_alone(*mate)), nullptr);
    const Verdict verdict = running->run(*poison);
    ASSERT_NE(as<Dead>(verdict), nullptr);
    EXPECT_EQ(as<Dead>(verdict)->why, DeadClass::crashes);
    EXPECT_EQ(status("poison"), "3");
    EXPECT_EQ(effects(), 1);
    EXPECT_EQ(counted(), 0);
    ASSERT_TRUE(running->letter_published(*poison, *as<Dead>(verdict)).has_value());
    const Verdict again = running->run(*poison);
    ASSERT_NE(as<Dead>(again), nullptr);
    EXPECT_EQ(as<Dead>(again)->why, DeadClass::crashes);
    EXPECT_TRUE(as<Dead>(again)->letter_known);
}

TEST_P(ConsumerDeaths, an_answer_ends_the_row_of_deaths_and_what_was_done_counts_none) {
    start();
    die({"bad", "done"});
    {
        auto running = start();
        auto bad = message(of_, 0, "bad", "{}");
        auto done = message(of_, 1, "done", "{}");
        EXPECT_NE(as<Retry>(running->run(*bad)), nullptr);
        EXPECT_NE(as<Applied>(running->run(*done)), nullptr);
        EXPECT_EQ(counted(), 0) << "both came to an end";
        EXPECT_EQ(named(), 0) << "and were un-named with that";
    }
    die({"bad", "done"});
    auto running = start();
    EXPECT_EQ(counted(), 1) << "done before the death, and so not its victim";
    auto bad = message(of_, 0, "bad", "{}");
    const Verdict second = running->run_when_due(*bad);
    ASSERT_NE(as<Retry>(second), nullptr) << "the two deaths were not in a row";
    EXPECT_TRUE(as<Retry>(second)->charged);
}

TEST_P(ConsumerDeaths, a_statement_of_the_configuration_names_nothing) {
    const config::SqlHandlerConfig config{
        .params = {{"id", json("/id")}},
        .statements = {{.sql = "INSERT INTO effects (message_id) VALUES (:id)"}}};
    auto running = start(options(), SqlEffects{config});
    auto one = message(of_, 0, "m0", R"({"id":"m0"})");
    EXPECT_NE(as<Applied>(running->run(*one)), nullptr);
    EXPECT_EQ(named(), 0);
}

TEST_P(ConsumerDeaths, a_batch_is_named_by_one_write_and_each_message_is_one_transaction) {
    support::Trips trips;
    auto running = std::make_unique<Running>();
    running->take(make_transaction(
        running->loop(), options(),
        [&]() -> sql::Tried<std::shared_ptr<sql::Executor>> {
            return std::shared_ptr<sql::Executor>(
                std::make_shared<support::WatchedTrips>(database_.connect(), trips));
        },
        TransactionCallback{.effect = leave}, running->counters()));
    ASSERT_TRUE(std::holds_alternative<BeginAt>(running->strategy().assigned(of_)));
    trips.clear();
    std::vector<std::unique_ptr<Message>> messages;
    std::vector<Message*> all;
    for (int i = 0; i < 20; ++i) {
        messages.push_back(message(of_, i, "m" + std::to_string(i), "{}"));
        all.push_back(messages.back().get());
    }
    for (const Verdict& one : running->run(all)) EXPECT_NE(as<Applied>(one), nullptr);
    const inbox::Tables tables(GetParam(), {});
    EXPECT_EQ(trips.statements("INSERT INTO " + tables.flights), 1U);
    EXPECT_EQ(trips.statements("DELETE FROM " + tables.flights), 0U) << "the next one replaces it";
    EXPECT_EQ(trips.statements("COMMIT"), 20U);
    EXPECT_EQ(trips.size(), 1U + 1U + 2U * 20U);
}

TEST_P(ConsumerDeaths, of_a_queue_what_is_delivered_again_is_looked_for) {
    auto queue = options();
    queue.partitions = false;
    const TransactionCallback callback{.effect = leave};
    die({"m0", "m1"}, false, false);
    die({"m0"}, false, false);
    auto running = start(queue, callback);
    auto one = message(of_, 0, "m0", "{}");
    auto two = message(of_, 1, "m1", "{}");
    one->delivery.redelivered = two->delivery.redelivered = true;
    auto verdicts = running->run({one.get(), two.get()});
    EXPECT_NE(as<Suspect>(verdicts[0]), nullptr);
    EXPECT_NE(as<Applied>(verdicts[1]), nullptr);
    EXPECT_NE(as<Suspect>(running->run(*one)), nullptr) << "counted once, and remembered";
    die({"m0"}, true, false);
    die({"m0"}, true, false);
    const Verdict verdict = running->run(*one);
    ASSERT_NE(as<Dead>(verdict), nullptr);
    EXPECT_EQ(as<Dead>(verdict)->why, DeadClass::crashes);
    EXPECT_EQ(counted(), 0);
}

TEST_P(ConsumerDeaths, tables_of_the_first_version_are_brought_along) {
    database_.query("DROP TABLE semel_flights");
    database_.query("DROP TABLE semel_crashes");
    database_.query("ALTER TABLE semel_offsets DROP COLUMN topic_id");
    database_.query("DELETE FROM semel_inbox_schema");
    database_.query(
        "INSERT INTO semel_inbox_schema (version, applied_at) VALUES (1, CURRENT_TIMESTAMP)");
    database_.query("INSERT INTO semel_offsets (scope, topic, " +
                    std::string(inbox::partition_column(GetParam())) +
                    ", next_offset, updated_at) VALUES ('s', 't', 0, 7, CURRENT_TIMESTAMP)");
    auto connection = database_.connect();
    auto plan = inbox::plan_schema(*connection, {});
    ASSERT_TRUE(plan.has_value());
    EXPECT_NE(plan->front().find("topic_id"), std::string::npos);
    ASSERT_TRUE(inbox::apply_schema(*connection, {}).has_value());
    EXPECT_TRUE(inbox::plan_schema(*connection, {})->empty());
    EXPECT_EQ(database_.number("SELECT next_offset FROM semel_offsets WHERE topic_id IS NULL"), 7);
    EXPECT_EQ(named() + counted(), 0);
}

INSTANTIATE_TEST_SUITE_P(On, ConsumerDeaths, testing::Values(Dialect::postgres, Dialect::mysql),
                         [](const auto& one) {
                             return one.param == Dialect::postgres ? "postgres" : "mysql";
                         });

}  // namespace
}  // namespace semel::consumer
