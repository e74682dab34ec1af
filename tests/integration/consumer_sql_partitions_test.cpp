// Whose partitions are, and where they stand: the strategy `transaction` on PostgreSQL and MariaDB.
#include <gtest/gtest.h>

#include "integration/consumer_sql_transaction.hpp"

namespace semel::consumer {
namespace {

using namespace test;

class ConsumerPartitions : public ConsumerTransaction {};

TEST_P(ConsumerPartitions, of_two_partitions_one_is_taken_away_and_the_others_work_stays) {
    Gate gate;
    const TransactionCallback blocking = leave_behind(gate);
    auto old = start(options(), blocking, connect());
    const brokers::AssignmentPtr leaves = std::make_shared<FakeAssignment>("orders", 0);
    const brokers::AssignmentPtr stays = std::make_shared<FakeAssignment>("orders", 1);
    begins(*old, leaves);
    begins(*old, stays);
    auto one = message(leaves, 0, "m0", "{}");
    auto two = message(stays, 0, "m1", "{}");
    auto verdicts = old->begin({one.get(), two.get()});
    ASSERT_TRUE(gate.wait_for_visitor());  // at least one is in its transaction
    old->on_loop([&] { old->strategy().leaving(leaves); });
    auto unbegun = message(leaves, 1, "m2", "{}");
    auto other = message(stays, 1, "m3", "{}");
    auto more = old->begin({unbegun.get(), other.get()});
    gate.open();
    const auto both = Running::await(std::move(verdicts));
    EXPECT_NE(as<Applied>(both[1]), nullptr);
    const auto later = Running::await(std::move(more));
    EXPECT_NE(as<Fenced>(later[0]), nullptr) << "nothing of what leaves is begun";
    EXPECT_NE(as<Applied>(later[1]), nullptr);
    old->watermark(stays, 2);

    // The new owner of the one, while the old owner goes on with the other.
    auto next = start(options(), TransactionCallback{.effect = leave}, connect());
    const brokers::AssignmentPtr came = std::make_shared<FakeAssignment>("orders", 0);
    begins(*next, came);
    auto same = message(came, 0, "m0", "{}");
    const Verdict again = next->run(*same);
    EXPECT_TRUE(as<Duplicate>(again) != nullptr || as<Applied>(again) != nullptr);
    auto third = message(stays, 2, "m4", "{}");
    EXPECT_NE(as<Applied>(old->run(*third)), nullptr);
    old->watermark(stays, 3);
    const char* const number = inbox::partition_column(GetParam());
    EXPECT_TRUE(eventually([&] {
        return database_.one(std::string("SELECT next_offset FROM semel_offsets WHERE ") + number +
                             " = 1") == "3";
    }));
    EXPECT_EQ(effects(), 4);
    EXPECT_EQ(different_effects(), 4);
}

TEST_P(ConsumerPartitions, who_lost_the_partition_is_fenced_and_moves_nothing) {
    auto old = start();
    begins(*old, of_);
    auto first = message(of_, 0, "m0", order("m0"));
    EXPECT_NE(as<Applied>(old->run(*first)), nullptr);
    old->watermark(of_, 1);
    ASSERT_TRUE(eventually([&] { return position() == 1; }));

    auto next = start();
    const auto of_next = assignment(1, "semel");
    EXPECT_EQ(begins(*next, of_next), 1);
    auto second = message(of_, 1, "m1", order("m1"));
    EXPECT_NE(as<Fenced>(old->run(*second)), nullptr);
    old->watermark(of_, 99);
    ASSERT_TRUE(eventually([&] { return old->counters().fenced == 1U; }));
    EXPECT_EQ(position(), 1);
    auto same = message(of_next, 1, "m1", order("m1"));
    EXPECT_NE(as<Applied>(next->run(*same)), nullptr);
    EXPECT_EQ(effects(), 2);

    // What is leaving is not begun.
    next->on_loop([&] { next->strategy().leaving(of_next); });
    auto late = message(of_next, 2, "m2", order("m2"));
    EXPECT_NE(as<Fenced>(next->run(*late)), nullptr);
    EXPECT_EQ(effects(), 2);
    // But what is finished may still be told.
    next->watermark(of_next, 2);
    EXPECT_TRUE(eventually([&] { return position() == 2; }));
}

TEST_P(ConsumerPartitions, an_owner_in_an_open_transaction_is_waited_for) {
    Gate gate;
    const TransactionCallback blocking = leave_behind(gate);
    auto quick = options();
    quick.assign_wait = 50ms;
    auto old = start(quick, blocking, connect());
    begins(*old, of_);
    auto one = message(of_, 0, "m0", "{}");
    auto verdicts = old->begin({one.get()});
    ASSERT_TRUE(gate.wait_for_visitor());
    auto next = start(quick, TransactionCallback{.effect = leave}, connect());
    const auto of_next = assignment();
    const AssignAnswer busy = assign(*next, of_next);
    ASSERT_TRUE(std::holds_alternative<NotYetOurs>(busy));
    gate.open();
    EXPECT_TRUE(all_are<Applied>(Running::await(std::move(verdicts))));
    begins(*next, of_next);
    auto same = message(of_next, 0, "m0", "{}");
    EXPECT_NE(as<Duplicate>(next->run(*same)), nullptr);
    EXPECT_EQ(effects(), 1);
}

TEST_P(ConsumerPartitions, a_zombie_that_slept_in_its_transaction_commits_nothing) {
    Gate gate;
    const TransactionCallback blocking = leave_behind(gate);
    auto short_idle = options();
    short_idle.inbox.idle_limit = 1000ms;
    auto old = start(short_idle, blocking, connect());
    begins(*old, of_);
    auto one = message(of_, 0, "m0", "{}");
    auto verdicts = old->begin({one.get()});
    ASSERT_TRUE(gate.wait_for_visitor());
    auto next = start(short_idle, TransactionCallback{.effect = leave}, connect());
    const auto of_next = assignment();
    begins(*next, of_next);  // waits until the server has ended the zombie's transaction
    auto same = message(of_next, 0, "m0", "{}");
    EXPECT_NE(as<Applied>(next->run(*same)), nullptr);
    gate.open();
    EXPECT_TRUE(all_are<Fenced>(Running::await(std::move(verdicts))));
    EXPECT_EQ(effects(), 1);
}

TEST_P(ConsumerPartitions,
       a_position_that_somebody_else_has_set_is_refused_and_a_lagging_copy_is_not) {
    auto running = start();
    // An older consumer's position is taken over.
    const auto first = assignment(5);
    EXPECT_EQ(begins(*running, first), 5);
    auto one = message(first, 5, "m5", order("m5"));
    EXPECT_NE(as<Applied>(running->run(*one)), nullptr);
    running->watermark(first, 6);
    ASSERT_TRUE(eventually([&] { return position() == 6; }));
    // Killed before the group heard of it, twice.
    EXPECT_EQ(begins(*running, assignment(5)), 6);
    EXPECT_EQ(begins(*running, assignment(5)), 6);
    // Our own commit, a little behind.
    EXPECT_EQ(begins(*running, assignment(5, "semel-store=x")), 6);
    EXPECT_EQ(begins(*running, assignment()), 6);
    // Now 5 is somebody's decision, and so are others; also if it is asked again.
    for (const std::int64_t reset : {5, 5, 0, 9}) {
        const AssignAnswer answer = assign(*running, assignment(reset));
        ASSERT_TRUE(std::holds_alternative<Refused>(answer)) << reset;
        EXPECT_NE(std::get<Refused>(answer).reason.find("semel consumer reset"), std::string::npos);
        EXPECT_NE(std::get<Refused>(answer).reason.find("orders-0"), std::string::npos);
    }
    EXPECT_EQ(begins(*running, assignment(6)), 6);
    EXPECT_EQ(position(), 6);
}

TEST_P(ConsumerPartitions, a_topic_that_was_made_again_is_refused_and_a_log_that_is_late_is_not) {
    LogFacts log{.topic_id = {}, .end = 10};
    auto looking = options();
    looking.log = [&](const brokers::Partition&) -> base::Result<LogFacts> { return log; };
    looking.log_patience = 50ms;
    auto running = start(looking);
    const auto first = assignment(5, "semel");
    EXPECT_EQ(begins(*running, first), 5);
    running->watermark(first, 8);
    ASSERT_TRUE(eventually([&] { return position() == 8; }));
    // The library has learnt to ask for ids: the topic that there is, is taken for the old one.
    log.topic_id = "first";
    EXPECT_EQ(begins(*running, assignment(8, "semel")), 8);
    EXPECT_EQ(database_.one("SELECT topic_id FROM semel_offsets"), "first");

    const auto refusal = [&] {
        AssignAnswer answer = NotYetOurs{};
        // Without a position of the group: its topic took that along.
        eventually([&] {
            answer = assign(*running, assignment());
            return !std::holds_alternative<NotYetOurs>(answer);
        });
        const auto* refused = std::get_if<Refused>(&answer);
        return refused == nullptr ? std::string("(none)") : refused->reason;
    };
    const std::int64_t epoch = database_.number("SELECT epoch FROM semel_assignments");
    log = {.topic_id = "second", .end = 100};
    EXPECT_NE(refusal().find("the topic orders is another one"), std::string::npos);
    EXPECT_NE(refusal().find("semel consumer reset"), std::string::npos);
    log = {.topic_id = {}, .end = 7};
    EXPECT_TRUE(std::holds_alternative<NotYetOurs>(assign(*running, assignment())));
    EXPECT_NE(refusal().find("ends at 7, and the effects stand at 8"), std::string::npos);
    EXPECT_NE(refusal().find("semel consumer reset"), std::string::npos);
    EXPECT_EQ(database_.number("SELECT epoch FROM semel_assignments"), epoch)
        << "nobody is fenced off by one who does not begin";
    // A leader that has just changed says too little for a moment.
    log.end = 8;
    EXPECT_EQ(begins(*running, assignment()), 8);
    log.end = 7;
    EXPECT_TRUE(std::holds_alternative<NotYetOurs>(assign(*running, assignment())));
    EXPECT_EQ(position(), 8);
}

TEST_P(ConsumerPartitions, with_ordering_by_partition_the_position_moves_with_the_effects) {
    auto ordered = options();
    ordered.in_order = true;
    ordered.batch_max = 4;
    auto running = start(ordered);
    const auto of = assignment(10, "semel");
    EXPECT_EQ(begins(*running, of), 10);
    std::vector<std::unique_ptr<Message>> all;
    std::vector<Message*> pointers;
    for (int i = 0; i < 12; ++i) {
        const std::string id = "m" + std::to_string(i);
        all.push_back(message(of, 10 + 2 * i, id, order(id, i == 6 ? "c" : "a"), 1));
        pointers.push_back(all.back().get());
    }
    auto verdicts = running->run(pointers);
    EXPECT_EQ(count<Applied>(verdicts), 6U);
    EXPECT_NE(as<Retry>(verdicts[6]), nullptr);
    EXPECT_EQ(count<Held>(verdicts), 5U);
    EXPECT_EQ(position(), 10 + 2 * 5 + 1);
    database_.query("UPDATE stock SET qty = 1 WHERE sku = 'c'");
    EXPECT_NE(as<Applied>(running->run_when_due(*all[6])), nullptr);
    EXPECT_TRUE(all_are<Applied>(running->run({pointers.begin() + 7, pointers.end()})));
    EXPECT_EQ(position(), 10 + 2 * 11 + 1);
    EXPECT_EQ(effects(), 12);
    // One that is given up, or was skipped, does not stand in the way.
    auto later = message(of, 90, "m90", order("m90"), 1);
    EXPECT_NE(as<Applied>(running->run(*later)), nullptr);
    EXPECT_EQ(position(), 91);
}

TEST_P(ConsumerPartitions, a_queue_without_partitions_needs_no_assign) {
    auto queue = options();
    queue.partitions = false;
    auto running = start(queue);
    EXPECT_EQ(begins(*running, of_), std::nullopt);
    auto one = message(of_, 17, "m0", order("m0"));
    EXPECT_NE(as<Applied>(running->run(*one)), nullptr);
    EXPECT_NE(as<Duplicate>(running->run(*one)), nullptr);
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM semel_assignments"), 0);
    EXPECT_EQ(effects(), 1);
}

INSTANTIATE_TEST_SUITE_P(On, ConsumerPartitions, testing::Values(Dialect::postgres, Dialect::mysql),
                         [](const auto& one) {
                             return one.param == Dialect::postgres ? "postgres" : "mysql";
                         });

}  // namespace
}  // namespace semel::consumer
