// The strategy `state` on PostgreSQL and MariaDB: the business table says what happened.
#include <gtest/gtest.h>

#include "consumer/records.hpp"
#include "consumer/strategies/state.hpp"
#include "inbox/schema.hpp"
#include "integration/consumer_sql_harness.hpp"

namespace semel::consumer {
namespace {

using namespace test;

std::string payment(const std::string& order, const std::string& transaction,
                    const std::string& amount = "9.90") {
    return R"({"order":")" + order + R"(","tx":")" + transaction + R"(","amount":)" + amount + "}";
}

class ConsumerState : public testing::TestWithParam<Dialect> {
  protected:
    ConsumerState() : database_(GetParam()) {
        // The failures' records; the tables of the inbox hold them as well as any.
        auto made = inbox::apply_schema(*database_.connect(), {});
        if (!made) throw std::runtime_error(made.error().detail);
        database_.query(
            "CREATE TABLE orders (id VARCHAR(50) NOT NULL, status VARCHAR(20) NOT NULL,"
            " version INT NOT NULL DEFAULT 1, tx VARCHAR(50), amount NUMERIC(20, 2),"
            " paid_by VARCHAR(100), CHECK (amount >= 0))");
        database_.query(
            "INSERT INTO orders (id, status) VALUES ('o1', 'NEW'), ('o2', 'NEW'),"
            " ('o3', 'PENDING'), ('gone', 'CLOSED'), ('draft', 'DRAFT'),"
            " ('twice', 'NEW'), ('twice', 'NEW')");
    }
    [[nodiscard]] static StateOptions options() {
        StateOptions options;
        options.config = {.table = "orders",
                          .key_column = "id",
                          .key = json("/order"),
                          .status_column = "status",
                          .version_column = "version",
                          .message_id_column = {},
                          .from = {"NEW", "PENDING"},
                          .to = "PAID",
                          .terminal = {"PAID", "CLOSED"},
                          .set = {{"tx", json("/tx")}, {"amount", json("/amount")}}};
        options.connections = 2;
        options.retry = {.attempts = 3, .initial = 30ms, .jitter = 0};
        options.name = "payments";
        options.owner = {.id = "test", .peer = {}};
        return options;
    }
    [[nodiscard]] inbox::Connect connect() const {
        return [address = database_.address()]() -> sql::Tried<std::shared_ptr<sql::Executor>> {
            return support::connect(address);
        };
    }
    /// A strategy with its records, which outlive it.
    struct Payments {
        Running running;
        std::unique_ptr<Records> records;
        ~Payments() {
            running.end();
            running.on_loop([this] { records.reset(); });
        }
        Running* operator->() { return &running; }
    };
    std::unique_ptr<Payments> start(StateOptions options, const inbox::Connect& connect_business) {
        auto one = std::make_unique<Payments>();
        one->records =
            records_on_table(one->running.loop(), {.scope = scope, .place = {}, .time = {}},
                             connect(), 1, "message_dedup");
        one->running.take(make_state(one->running.loop(), std::move(options), connect_business,
                                     *one->records, one->running.counters()));
        static_cast<void>(one->running.strategy().assigned(of_));
        return one;
    }
    std::unique_ptr<Payments> start(StateOptions options) {
        return start(std::move(options), connect());
    }
    std::unique_ptr<Payments> start() { return start(options()); }

    std::string of(const std::string& column, const std::string& order) {
        return database_.one("SELECT " + column + " FROM orders WHERE id = '" + order + "'");
    }
    std::string record(const std::string& id) {
        return database_.one("SELECT status FROM message_dedup WHERE message_id = '" + id + "'");
    }
    static DeadClass class_of(const Verdict& verdict) {
        if (as<Dead>(verdict) == nullptr) throw std::runtime_error("it is not dead");
        return as<Dead>(verdict)->why;
    }

    InboxDatabase database_;
    brokers::AssignmentPtr of_ = assignment();
};

TEST_P(ConsumerState, a_transition_is_made_once_and_raises_the_version_by_one) {
    auto payments = start();
    auto one = message(of_, 0, "p1", payment("o1", "t1"));
    EXPECT_NE(as<Applied>((*payments)->run(*one)), nullptr);
    EXPECT_EQ(of("status", "o1"), "PAID");
    EXPECT_EQ(of("version", "o1"), "2");
    EXPECT_EQ(of("tx", "o1"), "t1");
    EXPECT_EQ(of("amount", "o1"), "9.90");
    EXPECT_NE(as<Duplicate>((*payments)->run(*one)), nullptr);
    EXPECT_EQ(of("version", "o1"), "2");
    // No record is made for what succeeds.
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM message_dedup"), 0);
    // Values are compared as the database holds them.
    auto same = message(of_, 1, "p1b", payment("o1", "t1", "9.9"));
    EXPECT_NE(as<Duplicate>((*payments)->run(*same)), nullptr);
}

TEST_P(ConsumerState, a_second_payment_with_another_transaction_is_a_conflict) {
    auto payments = start();
    auto one = message(of_, 0, "p1", payment("o1", "t1"));
    auto two = message(of_, 1, "p2", payment("o1", "t2"));
    EXPECT_NE(as<Applied>((*payments)->run(*one)), nullptr);
    const Verdict verdict = (*payments)->run(*two);
    EXPECT_EQ(class_of(verdict), DeadClass::conflict);
    EXPECT_NE(as<Dead>(verdict)->reason.find("PAID"), std::string::npos);
    EXPECT_EQ(of("tx", "o1"), "t1");
    EXPECT_EQ(of("version", "o1"), "2");
    EXPECT_EQ(record("p2"), "3");
    EXPECT_TRUE((*payments)->letter_published(*two, *as<Dead>(verdict)).has_value());
    const Verdict again = (*payments)->run(*two);
    EXPECT_EQ(class_of(again), DeadClass::conflict);
    EXPECT_TRUE(as<Dead>(again)->letter_known);
}

TEST_P(ConsumerState, both_payments_in_one_run_are_one_transition) {
    auto payments = start();
    auto one = message(of_, 0, "p1", payment("o1", "t1"), 9);
    auto same = message(of_, 1, "p1", payment("o1", "t1"), 9);
    auto other = message(of_, 2, "p2", payment("o1", "t2"), 9);
    auto behind = message(of_, 3, "p3", payment("o2", "t3"), 9);
    auto beside = message(of_, 4, "p4", payment("o3", "t4"), 8);
    const auto verdicts =
        (*payments)->run({one.get(), same.get(), other.get(), behind.get(), beside.get()});
    EXPECT_NE(as<Applied>(verdicts[0]), nullptr);
    EXPECT_NE(as<Duplicate>(verdicts[1]), nullptr);
    EXPECT_EQ(class_of(verdicts[2]), DeadClass::conflict);
    EXPECT_NE(as<Held>(verdicts[3]), nullptr);
    EXPECT_NE(as<Applied>(verdicts[4]), nullptr);
    EXPECT_EQ(of("status", "o2"), "NEW");  // was changed, and rolled back
    EXPECT_EQ(of("version", "o1"), "2");
    EXPECT_EQ(of("version", "o3"), "2");
}

TEST_P(ConsumerState, a_payment_for_what_is_closed_is_dead_or_settled_as_configured) {
    auto strict = start();
    auto one = message(of_, 0, "p1", payment("gone", "t1"));
    EXPECT_EQ(class_of((*strict)->run(*one)), DeadClass::conflict);
    auto lenient_options = options();
    lenient_options.config.on_superseded = config::OnSuperseded::ack;
    auto lenient = start(lenient_options);
    auto two = message(of_, 1, "p2", payment("gone", "t2"));
    EXPECT_NE(as<Duplicate>((*lenient)->run(*two)), nullptr);
    EXPECT_EQ((*lenient)->counters().skipped, 1U);
    EXPECT_EQ(of("status", "gone"), "CLOSED");
    EXPECT_EQ(of("version", "gone"), "1");
    EXPECT_EQ(record("p2"), "");
}

TEST_P(ConsumerState, an_event_before_its_parent_waits_and_is_applied_and_its_record_is_closed) {
    auto payments = start();
    auto early = message(of_, 0, "p1", payment("later", "t1"));
    const Verdict first = (*payments)->run(*early);
    ASSERT_NE(as<Retry>(first), nullptr);
    EXPECT_TRUE(as<Retry>(first)->charged);
    EXPECT_EQ((*payments)->counters().not_yet, 1U);
    EXPECT_EQ(record("p1"), "2");
    database_.query("INSERT INTO orders (id, status) VALUES ('later', 'NEW')");
    EXPECT_NE(as<Applied>((*payments)->run_when_due(*early)), nullptr);
    EXPECT_EQ(of("version", "later"), "2");
    // An undecided record would be kept for ever.
    EXPECT_TRUE(eventually([&] { return record("p1") == "1"; }));
}

TEST_P(ConsumerState, what_never_finds_its_row_is_given_up_and_a_restart_keeps_count_and_due_time) {
    auto slow = options();
    slow.retry = {.attempts = 2, .initial = 2000ms, .jitter = 0};
    auto poor = message(of_, 0, "p1", payment("draft", "t1"));
    {
        auto payments = start(slow);
        const Verdict first = (*payments)->run(*poor);
        ASSERT_NE(as<Retry>(first), nullptr);
        EXPECT_NE(as<Retry>(first)->reason.find("DRAFT"), std::string::npos);
    }
    auto payments = start(slow);
    const Verdict early = (*payments)->run(*poor);
    ASSERT_NE(as<Retry>(early), nullptr);
    EXPECT_FALSE(as<Retry>(early)->charged);
    EXPECT_GT(as<Retry>(early)->delay, 0ms);
    const Verdict last = (*payments)->run_when_due(*poor);
    EXPECT_EQ(class_of(last), DeadClass::attempts);
    EXPECT_EQ(as<Dead>(last)->failed_runs, 2U);
    EXPECT_FALSE(as<Dead>(last)->letter_known);
    EXPECT_TRUE((*payments)->letter_published(*poor, *as<Dead>(last)).has_value());
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM message_dedup WHERE expire_at IS NOT NULL"),
              1);
}

TEST_P(ConsumerState,
       a_former_process_left_a_failure_and_the_message_succeeds_at_once_its_record_is_closed) {
    auto poor = message(of_, 0, "p1", payment("later", "t1"));
    {
        ASSERT_NE(as<Retry>((*start())->run(*poor)), nullptr);
    }
    database_.query("INSERT INTO orders (id, status) VALUES ('later', 'NEW')");
    auto payments = start();
    EXPECT_NE(as<Applied>((*payments)->run(*poor)), nullptr);
    EXPECT_TRUE(eventually([&] { return record("p1") == "1"; }));
}

TEST_P(ConsumerState, a_key_that_two_rows_have_is_fatal_and_changes_neither) {
    auto payments = start();
    auto two = message(of_, 0, "p1", payment("twice", "t1"));
    auto good = message(of_, 1, "p2", payment("o1", "t2"));
    const auto verdicts = (*payments)->run({two.get(), good.get()});
    EXPECT_EQ(class_of(verdicts[0]), DeadClass::fatal);
    EXPECT_NE(as<Applied>(verdicts[1]), nullptr);
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM orders WHERE id = 'twice' AND status = 'NEW'"),
              2);
}

TEST_P(ConsumerState, one_constraint_error_among_64_charges_that_one_alone) {
    database_.query("DELETE FROM orders");
    auto payments = start();
    std::vector<std::unique_ptr<Message>> all;
    std::vector<Message*> pointers;
    for (int i = 0; i < 64; ++i) {
        const std::string id = "n" + std::to_string(i);
        database_.query("INSERT INTO orders (id, status) VALUES ('" + id + "', 'NEW')");
        all.push_back(message(of_, i, "p" + id, payment(id, "t", i == 40 ? "-1" : "1"),
                              static_cast<std::uint64_t>(i % 8)));
        pointers.push_back(all.back().get());
    }
    const auto verdicts = (*payments)->run(pointers);
    EXPECT_EQ(count<Applied>(verdicts), 63U);
    ASSERT_NE(as<Retry>(verdicts[40]), nullptr);
    EXPECT_TRUE(as<Retry>(verdicts[40])->charged);
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM orders WHERE status = 'PAID' AND version = 2"),
              63);
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM message_dedup"), 1);
}

TEST_P(ConsumerState, a_lost_answer_to_commit_is_settled_by_the_row) {
    DroppingProxy proxy(database_.address().port);
    auto through = database_.address();
    through.port = proxy.port();
    auto payments = start(options(), [through]() -> sql::Tried<std::shared_ptr<sql::Executor>> {
        return support::connect(through);
    });
    auto one = message(of_, 0, "p1", payment("o1", "t1"));
    proxy.lose(DroppingProxy::Lose::the_answer, commit_on_wire(GetParam()));
    EXPECT_NE(as<Duplicate>((*payments)->run(*one)), nullptr);
    auto two = message(of_, 1, "p2", payment("o2", "t2"));
    proxy.lose(DroppingProxy::Lose::the_packet, commit_on_wire(GetParam()));
    EXPECT_NE(as<Applied>((*payments)->run(*two)), nullptr);
    EXPECT_EQ(proxy.lost(), 2);
    EXPECT_EQ(of("version", "o1"), "2");
    EXPECT_EQ(of("version", "o2"), "2");
}

TEST_P(ConsumerState, a_value_that_its_column_rounds_is_the_same_when_it_comes_again) {
    const bool postgres = GetParam() == Dialect::postgres;
    database_.query(
        std::string("CREATE TABLE prices (id VARCHAR(50) NOT NULL, status VARCHAR(20) NOT NULL,"
                    " n NUMERIC(10, 2), big NUMERIC(30, 2), f ") +
        (postgres ? "REAL" : "FLOAT") + ", at " + (postgres ? "TIMESTAMP(0)" : "DATETIME(0)") +
        ", day DATE, t VARCHAR(20))");
    if (postgres) {
        database_.query("CREATE DOMAIN money_of_us AS NUMERIC(10, 2)");
        database_.query("ALTER TABLE prices ALTER COLUMN n TYPE money_of_us");
    }
    database_.query("INSERT INTO prices (id, status) VALUES ('o1', 'NEW'), ('o2', 'NEW')");
    auto of_prices = options();
    of_prices.config.table = "prices";
    of_prices.config.version_column.clear();
    of_prices.config.set = {{"n", json("/n")},   {"big", json("/big")}, {"f", json("/f")},
                            {"at", json("/at")}, {"day", json("/day")}, {"t", json("/t")}};
    const auto price = [](const std::string& order, const std::string& n, const std::string& big,
                          const std::string& f, const std::string& at, const std::string& t) {
        return R"({"order":")" + order + R"(","n":)" + n + R"(,"big":)" + big + R"(,"f":)" + f +
               R"(,"at":")" + at + R"(","day":"2024-05-06 07:08:09","t":")" + t + R"("})";
    };
    DroppingProxy proxy(database_.address().port);
    auto through = database_.address();
    through.port = proxy.port();
    auto prices = start(of_prices, [through]() -> sql::Tried<std::shared_ptr<sql::Executor>> {
        return support::connect(through);
    });
    const std::string big = "1234567890123456789012345678.905", noon = "2024-05-06 12:00:00.4";
    auto one = message(of_, 0, "p1", price("o1", "9.999", big, "0.1", noon, "Tx1"));
    proxy.lose(DroppingProxy::Lose::the_answer, commit_on_wire(GetParam()));
    EXPECT_NE(as<Duplicate>((*prices)->run(*one)), nullptr);
    EXPECT_EQ(proxy.lost(), 1);
    EXPECT_EQ(database_.one("SELECT n FROM prices WHERE id = 'o1'"), "10.00");
    EXPECT_NE(as<Duplicate>((*prices)->run(*one)), nullptr);
    // What differs in one value alone is another payment, however little it differs.
    const std::string other_big = "1234567890123456789012345678.92";
    int number = 1;
    for (const std::string& payload :
         {price("o1", "9.99", big, "0.1", noon, "Tx1"),
          price("o1", "9.999", other_big, "0.1", noon, "Tx1"),
          price("o1", "9.999", big, "0.100001", noon, "Tx1"),
          price("o1", "9.999", big, "0.1", "2024-05-06 12:00:01.4", "Tx1"),
          price("o1", "9.999", big, "0.1", noon, "tx1"),
          price("o1", "null", big, "0.1", noon, "Tx1")}) {
        auto other = message(of_, number, "other" + std::to_string(number), payload);
        EXPECT_EQ(class_of((*prices)->run(*other)), DeadClass::conflict) << payload;
        ++number;
    }
    // A column that is made coarser while it runs.
    database_.query(postgres ? "ALTER TABLE prices ALTER COLUMN big TYPE NUMERIC(30, 1)"
                             : "ALTER TABLE prices MODIFY big NUMERIC(30, 1)");
    auto after = message(of_, 20, "p2", price("o2", "1", "7.26", "0.1", noon, "Tx1"));
    EXPECT_NE(as<Applied>((*prices)->run(*after)), nullptr);
    EXPECT_NE(as<Duplicate>((*prices)->run(*after)), nullptr);
}

TEST_P(ConsumerState, with_a_message_id_column_the_way_back_to_from_does_not_double) {
    auto named = options();
    named.config.message_id_column = "paid_by";
    auto payments = start(named);
    auto one = message(of_, 0, "p1", payment("o1", "t1"));
    EXPECT_NE(as<Applied>((*payments)->run(*one)), nullptr);
    EXPECT_EQ(of("paid_by", "o1"), "p1");
    EXPECT_NE(as<Duplicate>((*payments)->run(*one)), nullptr);
    // The same values by another message are another payment.
    auto other = message(of_, 1, "p2", payment("o1", "t1"));
    EXPECT_EQ(class_of((*payments)->run(*other)), DeadClass::conflict);
    // Back to NEW, on to somewhere else: the first one is still known.
    for (const char* status : {"NEW", "SHIPPED", "CLOSED"}) {
        database_.query(std::string("UPDATE orders SET status = '") + status + "' WHERE id = 'o1'");
        EXPECT_NE(as<Duplicate>((*payments)->run(*one)), nullptr) << status;
        EXPECT_EQ(of("status", "o1"), status);
    }
    // An id that differs by case only is another message.
    database_.query("UPDATE orders SET status = 'NEW' WHERE id = 'o1'");
    auto upper = message(of_, 2, "P1", payment("o1", "t9"));
    EXPECT_NE(as<Applied>((*payments)->run(*upper)), nullptr);
    EXPECT_EQ(of("version", "o1"), "3");
}

TEST_P(ConsumerState, what_is_unreadable_or_cannot_run_blames_the_right_one) {
    auto payments = start();
    auto keyless = message(of_, 0, "p1", R"({"tx":"t1"})");
    EXPECT_EQ(class_of((*payments)->run(*keyless)), DeadClass::decode);
    auto broken = message(of_, 1, "p2", "no json");
    const Verdict verdict = (*payments)->run(*broken);
    EXPECT_EQ(class_of(verdict), DeadClass::decode);
    EXPECT_TRUE((*payments)->letter_published(*broken, *as<Dead>(verdict)).has_value());
    auto wrong = options();
    wrong.config.table = "no_such_table";
    auto ill = start(wrong);
    auto good = message(of_, 2, "p3", payment("o1", "t1"));
    EXPECT_NE(as<Ill>((*ill)->run(*good)), nullptr);
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM message_dedup"), 0);
    Running running;
    wrong.config.table = "orders; DROP TABLE orders";
    EXPECT_FALSE(
        make_state(running.loop(), wrong, connect(), *payments->records, running.counters()));
}

TEST_P(ConsumerState, two_members_that_have_the_same_message_make_one_transition) {
    auto one = start(), two = start();
    std::vector<std::unique_ptr<Message>> all;
    std::vector<Message*> first, second;
    for (int i = 0; i < 50; ++i) {
        const std::string id = "n" + std::to_string(i);
        database_.query("INSERT INTO orders (id, status) VALUES ('" + id + "', 'NEW')");
        for (auto* pointers : {&first, &second}) {
            all.push_back(message(of_, i, "p" + id, payment(id, "t")));
            pointers->push_back(all.back().get());
        }
    }
    std::reverse(second.begin(), second.end());  // as different as the order of locks can be
    auto a = (*one)->begin(first), b = (*two)->begin(second);
    auto verdicts = Running::await(std::move(a));
    for (Verdict& verdict : Running::await(std::move(b))) verdicts.push_back(std::move(verdict));
    EXPECT_EQ(count<Applied>(verdicts), 50U);
    EXPECT_EQ(count<Duplicate>(verdicts), 50U);
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM orders WHERE version = 2"), 50);
}

INSTANTIATE_TEST_SUITE_P(On, ConsumerState, testing::Values(Dialect::postgres, Dialect::mysql),
                         [](const auto& one) {
                             return one.param == Dialect::postgres ? "postgres" : "mysql";
                         });

}  // namespace
}  // namespace semel::consumer
