// The strategy `transaction` on PostgreSQL and MariaDB: effects are counted in the tables
// afterwards.
#include <gtest/gtest.h>

#include <atomic>
#include <map>

#include "inbox/dedup_table.hpp"
#include "integration/consumer_sql_transaction.hpp"

namespace semel::consumer {
namespace {

using namespace test;

TEST_P(ConsumerTransaction, a_message_is_applied_once_and_its_second_delivery_is_a_duplicate) {
    auto running = start();
    EXPECT_EQ(begins(*running, of_), std::nullopt);
    auto first = message(of_, 0, "m1", order("m1", "a", "3"));
    auto again = message(of_, 1, "m1", order("m1", "a", "3"));
    EXPECT_NE(as<Applied>(running->run(*first)), nullptr);
    EXPECT_NE(as<Duplicate>(running->run(*again)), nullptr);
    auto other = message(of_, 2, "m1", order("m1", "a", "4"));
    const Verdict verdict = running->run(*other);
    ASSERT_NE(as<Dead>(verdict), nullptr);
    EXPECT_EQ(as<Dead>(verdict)->why, DeadClass::mismatch);
    EXPECT_TRUE(running->letter_published(*other, *as<Dead>(verdict)).has_value());
    EXPECT_EQ(qty(), 997);
    EXPECT_EQ(effects(), 1);
    EXPECT_EQ(status("m1"), "1");

    auto lenient_options = options();
    lenient_options.mismatch_is_duplicate = true;
    auto lenient = start(lenient_options);
    begins(*lenient, of_);
    EXPECT_NE(as<Duplicate>(lenient->run(*other)), nullptr);
    EXPECT_EQ(lenient->counters().mismatches, 1U);
    EXPECT_EQ(effects(), 1);
}

TEST_P(ConsumerTransaction, numbers_of_the_payload_fit_integer_decimal_text_and_boolean_columns) {
    database_.query(
        "CREATE TABLE numbers (id INT PRIMARY KEY, i BIGINT, n NUMERIC(30, 4), t"
        " VARCHAR(50), b BOOLEAN, d DOUBLE PRECISION, x INT)");
    config::SqlHandlerConfig config{
        .params = {{"id", json("/id")},
                   {"i", json("/i")},
                   {"n", json("/n")},
                   {"t", json("/t")},
                   {"b", json("/b")},
                   {"d", json("/d")},
                   {"missing", json("/missing")}},
        .statements = {
            {.sql = "INSERT INTO numbers (id, i, n, t, b, d, x) VALUES"
                    " (:id, :i, :n, :t, :b, :d, :missing)"},
            {.sql = "UPDATE numbers SET i = i + :i, n = n - :n + :n + :n, d = d * :d"
                    " WHERE id = :id AND t = :t"},
            {.sql = "UPDATE numbers SET x = 1 WHERE t = :i", .rows = config::SqlRows::any}}};
    auto running = start(options(), SqlEffects{config}, connect());
    begins(*running, of_);
    auto one = message(of_, 0, "m1",
                       R"({"id":7,"i":3.0,"n":9007199254740993.0001,"t":42,"b":true,"d":1.5e0})");
    const Verdict verdict = running->run(*one);
    ASSERT_NE(as<Applied>(verdict), nullptr)
        << (as<Retry>(verdict) != nullptr ? as<Retry>(verdict)->reason : "");
    EXPECT_EQ(database_.one("SELECT i FROM numbers"), "6");
    EXPECT_EQ(database_.one("SELECT n FROM numbers"), "18014398509481986.0002");
    EXPECT_EQ(database_.one("SELECT t FROM numbers"), "42");
    EXPECT_EQ(database_.one("SELECT COUNT(*) FROM numbers WHERE b AND x IS NULL AND d = 2.25"),
              "1");
}

TEST_P(ConsumerTransaction,
       an_event_before_its_parent_is_tried_again_and_applied_once_that_is_there) {
    auto running = start();
    begins(*running, of_);
    auto early = message(of_, 0, "m1", order("m1", "z", "2"));
    const Verdict first = running->run(*early);
    ASSERT_NE(as<Retry>(first), nullptr);
    EXPECT_TRUE(as<Retry>(first)->charged);
    EXPECT_EQ(as<Retry>(first)->delay, 30ms);
    EXPECT_EQ(running->counters().not_yet, 1U);
    EXPECT_EQ(status("m1"), "2");
    database_.query("INSERT INTO stock (sku, qty) VALUES ('z', 5)");
    EXPECT_NE(as<Applied>(running->run_when_due(*early)), nullptr);
    EXPECT_EQ(qty("z"), 3);
    EXPECT_EQ(status("m1"), "1");
    EXPECT_EQ(effects(), 1);
    EXPECT_NE(as<Duplicate>(running->run(*early)), nullptr);
}

TEST_P(ConsumerTransaction, a_budget_used_up_ends_dead_and_the_mark_of_the_letter_lets_it_expire) {
    auto running = start();
    begins(*running, of_);
    auto poor = message(of_, 0, "m1", order("m1", "c", "1"));  // CHECK (qty >= 0)
    for (int run = 1; run <= 2; ++run) {
        const Verdict verdict = running->run_when_due(*poor);
        ASSERT_NE(as<Retry>(verdict), nullptr) << run;
        EXPECT_TRUE(as<Retry>(verdict)->charged);
    }
    const Verdict last = running->run_when_due(*poor);
    ASSERT_NE(as<Dead>(last), nullptr);
    const Dead dead = *as<Dead>(last);
    EXPECT_EQ(dead.why, DeadClass::attempts);
    EXPECT_EQ(dead.failed_runs, 3U);
    EXPECT_GT(dead.first_failure_ms, 0);
    EXPECT_FALSE(dead.letter_known);
    EXPECT_EQ(status("m1"), "3");
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM message_dedup WHERE expire_at IS NULL"), 1);

    // Died before the letter: the next owner is told to publish it.
    auto next = start();
    const auto of = assignment();
    begins(*next, of);
    auto again = message(of, 0, "m1", order("m1", "c", "1"));
    const Verdict pending = next->run(*again);
    ASSERT_NE(as<Dead>(pending), nullptr);
    EXPECT_FALSE(as<Dead>(pending)->letter_known);
    EXPECT_EQ(as<Dead>(pending)->failed_runs, 3U);
    EXPECT_TRUE(next->letter_published(*again, *as<Dead>(pending)).has_value());
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM message_dedup WHERE expire_at IS NULL"), 0);
    const Verdict known = next->run(*again);
    ASSERT_NE(as<Dead>(known), nullptr);
    EXPECT_TRUE(as<Dead>(known)->letter_known);
    EXPECT_EQ(effects(), 0);
}

TEST_P(ConsumerTransaction, a_restart_keeps_attempts_and_due_time) {
    auto slow_options = options();
    slow_options.retry = {.attempts = 2, .initial = 2000ms, .jitter = 0};
    auto poor = message(of_, 0, "m1", order("m1", "c", "1"));
    {
        auto running = start(slow_options);
        begins(*running, of_);
        ASSERT_NE(as<Retry>(running->run(*poor)), nullptr);
    }
    auto next = start(slow_options);
    begins(*next, of_);
    const Verdict early = next->run(*poor);
    ASSERT_NE(as<Retry>(early), nullptr);
    EXPECT_FALSE(as<Retry>(early)->charged);
    EXPECT_GT(as<Retry>(early)->delay, 0ms);
    EXPECT_LE(as<Retry>(early)->delay, 2000ms);
    const Verdict last = next->run_when_due(*poor);
    ASSERT_NE(as<Dead>(last), nullptr);
    EXPECT_EQ(as<Dead>(last)->failed_runs, 2U);
}

TEST_P(ConsumerTransaction, more_rows_than_one_is_fatal_and_rolled_back) {
    config::SqlHandlerConfig config{
        .params = {{"qty", json("/qty")}},
        .statements = {{.sql = "UPDATE stock SET qty = qty + :qty WHERE kind = 0"}}};
    auto running = start(options(), SqlEffects{config}, connect());
    begins(*running, of_);
    auto one = message(of_, 0, "m1", order("m1"));
    const Verdict verdict = running->run(*one);
    ASSERT_NE(as<Dead>(verdict), nullptr);
    EXPECT_EQ(as<Dead>(verdict)->why, DeadClass::fatal);
    EXPECT_EQ(qty(), 1000);
    EXPECT_EQ(status("m1"), "3");
    // The class is still known to whoever finds it.
    EXPECT_EQ(as<Dead>(running->run(*one))->why, DeadClass::fatal);
}

TEST_P(ConsumerTransaction, one_constraint_error_among_64_charges_that_one_alone) {
    auto running = start();
    begins(*running, of_);
    std::vector<std::unique_ptr<Message>> all;
    std::vector<Message*> pointers;
    for (int i = 0; i < 64; ++i) {
        const std::string id = "m" + std::to_string(i);
        all.push_back(
            message(of_, i, id, order(id, i == 40 ? "c" : "a"), static_cast<std::uint64_t>(i % 8)));
        pointers.push_back(all.back().get());
    }
    const auto verdicts = running->run(pointers);
    // Lane 0 has no order: nobody waits for number 40.
    EXPECT_EQ(count<Applied>(verdicts), 63U);
    ASSERT_NE(as<Retry>(verdicts[40]), nullptr);
    EXPECT_TRUE(as<Retry>(verdicts[40])->charged);
    EXPECT_EQ(qty(), 1000 - 63);
    EXPECT_EQ(effects(), 63);
    EXPECT_EQ(different_effects(), 63);
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM message_dedup WHERE status = 1"), 63);
}

TEST_P(ConsumerTransaction, behind_one_that_fails_its_lane_is_held_and_others_go_on) {
    auto running = start();
    begins(*running, of_);
    auto fails = message(of_, 0, "m0", order("m0", "c"), 5);
    auto behind = message(of_, 1, "m1", order("m1"), 5);
    auto other = message(of_, 2, "m2", order("m2"), 6);
    auto unreadable = message(of_, 3, "m3", "no json", 7);
    auto behind_that = message(of_, 4, "m4", order("m4"), 7);
    const auto verdicts =
        running->run({fails.get(), behind.get(), other.get(), unreadable.get(), behind_that.get()});
    EXPECT_NE(as<Retry>(verdicts[0]), nullptr);
    EXPECT_NE(as<Held>(verdicts[1]), nullptr);
    EXPECT_NE(as<Applied>(verdicts[2]), nullptr);
    ASSERT_NE(as<Dead>(verdicts[3]), nullptr);
    EXPECT_EQ(as<Dead>(verdicts[3])->why, DeadClass::decode);
    EXPECT_EQ(as<Dead>(verdicts[3])->token.value, 0U);
    EXPECT_NE(as<Held>(verdicts[4]), nullptr);
    EXPECT_EQ(effects(), 1);
}

TEST_P(ConsumerTransaction,
       a_run_larger_than_its_transactions_is_divided_and_every_lane_stays_in_order) {
    auto small = options();
    small.batch_max = 8;
    auto running = start(small);
    begins(*running, of_);
    std::vector<std::unique_ptr<Message>> all;
    std::vector<Message*> pointers;
    for (int i = 0; i < 100; ++i) {
        const std::string id = "m" + std::to_string(i);
        all.push_back(message(of_, i, id, order(id), static_cast<std::uint64_t>(i % 3)));
        pointers.push_back(all.back().get());
    }
    EXPECT_TRUE(all_are<Applied>(running->run(pointers)));
    EXPECT_EQ(effects(), 100);
    EXPECT_EQ(qty(), 900);
}

TEST_P(ConsumerTransaction, a_callback_that_fails_beside_others_is_charged_alone) {
    TransactionCallback callback{
        .effect = [](sql::Executor& executor, const Message& one) -> inbox::EffectOutcome {
            auto outcome = leave(executor, one);
            if (one.id == "m3") return inbox::Failed{.reason = "no"};
            if (one.id == "m4") return inbox::NotYet{.reason = "not now"};
            if (one.id == "m5") throw std::runtime_error("thrown");
            if (one.id == "m6") return inbox::Failed{.reason = "never", .fatal = true};
            return outcome;
        },
        .batchable = true};
    for (const bool batchable : {true, false}) {
        callback.batchable = batchable;
        database_.query("DELETE FROM effects");
        database_.query("DELETE FROM message_dedup");
        auto running = start(options(), callback, connect());
        begins(*running, of_);
        std::vector<std::unique_ptr<Message>> all;
        std::vector<Message*> pointers;
        for (int i = 0; i < 16; ++i) {
            all.push_back(message(of_, i, "m" + std::to_string(i), "{}"));
            pointers.push_back(all.back().get());
        }
        const auto verdicts = running->run(pointers);
        EXPECT_EQ(count<Applied>(verdicts), 12U);
        EXPECT_NE(as<Retry>(verdicts[3]), nullptr);
        EXPECT_NE(as<Retry>(verdicts[4]), nullptr);
        ASSERT_NE(as<Retry>(verdicts[5]), nullptr);
        EXPECT_EQ(as<Retry>(verdicts[5])->reason, "thrown");
        ASSERT_NE(as<Dead>(verdicts[6]), nullptr);
        EXPECT_EQ(as<Dead>(verdicts[6])->why, DeadClass::fatal);
        EXPECT_EQ(running->counters().not_yet, 1U);
        EXPECT_EQ(effects(), 12);
    }
}

TEST_P(ConsumerTransaction, beside_one_that_fails_a_callbacks_outside_effect_happens_once) {
    for (const bool batchable : {true, false}) {
        std::mutex mutex;
        std::map<std::string, int> mails;  // sent by the callback, and not undone by any rollback
        const TransactionCallback callback{
            .effect = [&](sql::Executor& executor, const Message& one) -> inbox::EffectOutcome {
                {
                    const std::lock_guard lock(mutex);
                    ++mails[one.id];
                }
                if (one.id == "m3") return inbox::Failed{.reason = "no"};
                return leave(executor, one);
            },
            .batchable = batchable};
        auto one_try = options();
        one_try.inbox.scope = batchable ? "shop/together" : "shop/singly";
        auto running = start(one_try, callback, connect());
        begins(*running, of_);
        std::vector<std::unique_ptr<Message>> all;
        std::vector<Message*> pointers;
        for (int i = 0; i < 8; ++i) {
            all.push_back(message(of_, i, "m" + std::to_string(i), "{}"));
            pointers.push_back(all.back().get());
        }
        const auto verdicts = running->run(pointers);
        EXPECT_EQ(count<Applied>(verdicts), 7U);
        EXPECT_NE(as<Retry>(verdicts[3]), nullptr);
        for (const auto& [id, sent] : mails) {
            if (id == "m3")
                EXPECT_EQ(sent, batchable ? 2 : 1) << "beside others, and alone";
            else
                EXPECT_EQ(sent, 1) << id;
        }
    }
}

TEST_P(ConsumerTransaction, a_connection_killed_in_the_transaction_costs_nobody_anything) {
    std::atomic<int> kills{1};
    TransactionCallback callback{
        .effect = [&](sql::Executor& executor, const Message& one) -> inbox::EffectOutcome {
            auto outcome = leave(executor, one);
            if (kills.fetch_sub(1) > 0) {
                const bool postgres = executor.dialect() == Dialect::postgres;
                auto gone =
                    executor.run({.text = postgres ? "SELECT pg_terminate_backend(pg_backend_pid())"
                                                   : "KILL CONNECTION_ID()",
                                  .parameters = {}});
                if (auto* problem = std::get_if<sql::Problem>(&gone)) return std::move(*problem);
                gone = executor.run({.text = "SELECT 1", .parameters = {}});
                if (auto* problem = std::get_if<sql::Problem>(&gone)) return std::move(*problem);
            }
            return outcome;
        }};
    auto running = start(options(), callback, connect());
    begins(*running, of_);
    auto one = message(of_, 0, "m0", "{}");
    EXPECT_NE(as<Applied>(running->run(*one)), nullptr);
    EXPECT_EQ(effects(), 1);
}

TEST_P(ConsumerTransaction, without_a_database_it_is_ill_and_goes_on_when_that_is_back) {
    std::atomic<bool> there{true};
    const auto real = connect();
    auto running = start(options(), SqlEffects{stock_effects()}, [&, real]() {
        if (!there) throw std::runtime_error("connection refused");
        return real();
    });
    begins(*running, of_);
    there = false;
    auto one = message(of_, 0, "m0", order("m0"));
    const Verdict verdict = running->run(*one);
    ASSERT_NE(as<Ill>(verdict), nullptr);
    EXPECT_NE(as<Ill>(verdict)->reason.find("connection refused"), std::string::npos);
    EXPECT_TRUE(std::holds_alternative<NotYetOurs>(assign(*running, assignment())));
    there = true;
    ASSERT_TRUE(eventually([&] { return as<Ill>(running->run(*one)) == nullptr; }));
    EXPECT_EQ(effects(), 1);
}

TEST_P(ConsumerTransaction, a_lost_answer_to_commit_is_found_out) {
    DroppingProxy proxy(database_.address().port);
    auto through = database_.address();
    through.port = proxy.port();
    for (const bool ordered : {false, true}) {
        for (const auto what : {DroppingProxy::Lose::the_answer, DroppingProxy::Lose::the_packet}) {
            database_.query("DELETE FROM effects");
            database_.query("DELETE FROM message_dedup");
            auto of_run = options();
            of_run.in_order = ordered;
            auto running = start(of_run, SqlEffects{stock_effects()},
                                 [through]() -> sql::Tried<std::shared_ptr<sql::Executor>> {
                                     return support::connect(through);
                                 });
            const auto of = assignment(position() < 0 ? 0 : position(), "semel");
            const std::int64_t at = *begins(*running, of);
            auto one = message(of, at, "m0", order("m0"));
            auto two = message(of, at + 1, "m1", order("m1"));
            proxy.lose(what, commit_on_wire(GetParam()));
            EXPECT_TRUE(all_are<Applied>(running->run({one.get(), two.get()})));
            EXPECT_EQ(effects(), 2);
            EXPECT_EQ(different_effects(), 2);
            EXPECT_TRUE(all_are<Duplicate>(running->run({one.get(), two.get()})));
            EXPECT_EQ(effects(), 2);
        }
    }
    EXPECT_GE(proxy.lost(), 2);
}

TEST_P(ConsumerTransaction, a_statement_that_cannot_run_is_nobodys_fault) {
    config::SqlHandlerConfig config{.params = {},
                                    .statements = {{.sql = "UPDATE no_such_table SET a = 1"}}};
    auto running = start(options(), SqlEffects{config}, connect());
    begins(*running, of_);
    auto one = message(of_, 0, "m0", order("m0"));
    const Verdict verdict = running->run(*one);
    ASSERT_NE(as<Ill>(verdict), nullptr);
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM message_dedup"), 0);
}

TEST_P(ConsumerTransaction, what_other_owners_have_left_is_waited_for_settled_or_given_up) {
    auto running = start();
    begins(*running, of_);
    const inbox::DedupTable table({.scope = scope, .place = {}, .time = {}});
    auto connection = database_.connect();
    const auto acquire = [&](const std::string& id, milliseconds lease,
                             core::OnUnknown on_unknown) {
        core::Acquire step;
        step.owner = {.id = "other", .peer = {}};
        step.nonce.bytes[0] = 7;
        step.lease = lease;
        step.not_after = {std::numeric_limits<std::int64_t>::max()};
        step.policy = {.kind = core::IntentKind::message, .on_unknown = on_unknown};
        step.starts_call = true;
        std::vector<inbox::DedupItem> items;
        items.push_back({.source = "orders", .id = id, .operation = step, .business_key = {}});
        auto answers = table.apply(*connection, std::move(items));
        ASSERT_TRUE(answers[0].has_value()) << answers[0].error().detail;
    };
    acquire("busy", 60s, core::OnUnknown::rerun);
    acquire("gone", 1ms, core::OnUnknown::rerun);
    acquire("held", 1ms, core::OnUnknown::hold);
    auto busy = message(of_, 0, "busy", order("busy"));
    const Verdict waits = running->run(*busy);
    ASSERT_NE(as<Busy>(waits), nullptr);
    EXPECT_GT(as<Busy>(waits)->remaining, 50s);
    auto gone = message(of_, 1, "gone", order("gone"));
    EXPECT_NE(as<Applied>(running->run_when_due(*gone)), nullptr);
    EXPECT_EQ(running->counters().takeovers, 1U);
    auto held = message(of_, 2, "held", order("held"));
    const Verdict unknown = running->run_when_due(*held);
    ASSERT_NE(as<Dead>(unknown), nullptr);
    EXPECT_EQ(as<Dead>(unknown)->why, DeadClass::unknown);
    EXPECT_TRUE(running->letter_published(*held, *as<Dead>(unknown)).has_value());
    EXPECT_EQ(effects(), 1);
}

TEST_P(ConsumerTransaction, stop_gives_back_what_has_not_begun_and_abandons_what_does_not_end) {
    Gate gate;
    const TransactionCallback blocking = leave_behind(gate);
    auto single = options();
    single.connections = 1;
    single.batch_max = 1;
    auto running = start(single, blocking, connect());
    begins(*running, of_);
    auto one = message(of_, 0, "m0", "{}");
    auto two = message(of_, 1, "m1", "{}");
    auto verdicts = running->begin({one.get(), two.get()});
    ASSERT_TRUE(gate.wait_for_visitor());
    running->on_loop([&] { EXPECT_EQ(running->strategy().capacity(), 0U); });
    std::promise<void> stopped;
    running->on_loop([&] { running->strategy().stop(1ms, [&] { stopped.set_value(); }); });
    // The loop has run past the deadline before the callback goes on.
    std::promise<void> later;
    running->on_loop(
        [&] { running->loop().at(running->loop().now() + 50ms, [&] { later.set_value(); }); });
    Running::await(later.get_future());
    gate.open();
    Running::await(stopped.get_future());
    const auto both = Running::await(std::move(verdicts));
    EXPECT_NE(as<Ill>(both[0]), nullptr);
    EXPECT_NE(as<Held>(both[1]), nullptr);
    EXPECT_EQ(effects(), 0);
}

TEST_P(ConsumerTransaction, wrong_statements_and_parameters_are_refused_at_the_start) {
    Running running;
    const auto refusal = [&](config::SqlHandlerConfig config, bool say_dialect) {
        auto of_it = options();
        if (!say_dialect) of_it.dialect.reset();
        auto made = make_transaction(running.loop(), of_it, connect(),
                                     SqlEffects{std::move(config)}, running.counters());
        return made ? std::string("(none)") : made.error().detail;
    };
    auto config = stock_effects();
    config.statements[1].sql = "INSERT INTO effects (message_id, n) VALUES (:id, :wrong)";
    for (const bool say_dialect : {true, false}) {
        EXPECT_EQ(
            refusal(config, say_dialect),
            "handler.sql statement 2 uses :wrong, which is not among its params: add it there");
    }
    config = stock_effects();
    config.params["spare"] = json("/spare");
    EXPECT_NE(refusal(config, true).find("spare is used by no statement"), std::string::npos);
    config = stock_effects();
    config.statements.clear();
    EXPECT_NE(refusal(config, true).find("no statements"), std::string::npos);
    auto nameless = options();
    nameless.inbox.scope.clear();
    EXPECT_FALSE(make_transaction(running.loop(), nameless, connect(), SqlEffects{stock_effects()},
                                  running.counters()));
}

INSTANTIATE_TEST_SUITE_P(On, ConsumerTransaction,
                         testing::Values(Dialect::postgres, Dialect::mysql), [](const auto& one) {
                             return one.param == Dialect::postgres ? "postgres" : "mysql";
                         });

}  // namespace
}  // namespace semel::consumer
