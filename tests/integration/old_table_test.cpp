// The tables made and migrated on real servers, also from an older shape that somebody still uses.
#include "inbox/old_table.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <map>
#include <stdexcept>
#include <thread>

#include "core/store.hpp"
#include "inbox/dedup_table.hpp"
#include "inbox/inbox.hpp"
#include "inbox/schema.hpp"
#include "integration/inbox_databases.hpp"

namespace semel::inbox {
namespace {

using namespace std::chrono_literals;
using sql::Dialect;
using sql::Statement;
using support::InboxDatabase;

class OldTables : public testing::TestWithParam<Dialect> {
  protected:
    OldTables() : database_(GetParam()), connection_(database_.connect()) {}
    [[nodiscard]] bool postgres() const { return database_.postgres(); }

    void make_old(int rows) {
        if (postgres()) {
            database_.query(
                "CREATE TABLE message_dedup (id bigserial PRIMARY KEY, message_id varchar(64) NOT "
                "NULL, business_key varchar(128), status smallint NOT NULL DEFAULT 0,"
                " retry_count int NOT NULL DEFAULT 0, error_message text, created_at timestamp NOT "
                "NULL DEFAULT now(), updated_at timestamp NOT NULL DEFAULT now(),"
                " expire_at timestamp NOT NULL, CONSTRAINT uk_message_id UNIQUE (message_id))");
        } else {
            database_.query(
                "CREATE TABLE message_dedup (id bigint NOT NULL AUTO_INCREMENT PRIMARY KEY, "
                "message_id varchar(64) NOT NULL, business_key varchar(128), status tinyint NOT "
                "NULL DEFAULT 0,"
                " retry_count int NOT NULL DEFAULT 0, error_message text, created_at datetime NOT "
                "NULL DEFAULT CURRENT_TIMESTAMP,"
                " updated_at datetime NOT NULL DEFAULT CURRENT_TIMESTAMP ON UPDATE "
                "CURRENT_TIMESTAMP, expire_at datetime NOT NULL, UNIQUE KEY uk_message_id "
                "(message_id),"
                " KEY idx_expire_at (expire_at)) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4");
        }
        // One of ten failed, one of ten was begun; 08:30 local time, two hours ahead of UTC.
        const std::string numbers =
            postgres() ? "generate_series(1, " + std::to_string(rows) + ") AS g(seq)"
                       : "seq_1_to_" + std::to_string(rows);
        const std::string id = postgres() ? "'Order-' || seq" : "CONCAT('Order-', seq)";
        database_.query(
            "INSERT INTO message_dedup (message_id, business_key, status, retry_count, "
            "error_message, created_at, updated_at, expire_at) SELECT " +
            id +
            ", 'key', CASE seq % 10 WHEN 3 THEN 2 WHEN 7 THEN 0 ELSE 1 END, seq % 4, CASE seq % 10 "
            "WHEN 3 THEN 'boom' END, '2026-11-20 08:30:00', '2026-11-20 08:30:00',"
            " '2026-11-21 08:30:00' FROM " +
            numbers);
        database_.query("UPDATE message_dedup SET message_id = 'a" +
                        std::string(postgres() ? "\\" : "\\\\") + "b caf" +
                        (postgres() ? "\xc3\xa9" : "e") +
                        "', updated_at = '2026-11-20 08:30:00' WHERE id = 1");
    }
    static OldTable old() {
        return {.scope = "group/orders",
                .source = "order-created",
                .utc_offset = std::chrono::minutes{120},
                .watch = 50ms,
                .step = 100};
    }
    Outcome asked(const std::string& id, const std::string& scope = "group/orders") {
        const TransactionalInbox inbox({.scope = scope});
        const std::vector<Message> one{{.source = "order-created",
                                        .id = id,
                                        .business_key = {},
                                        .fingerprint = {},
                                        .lane = {},
                                        .next_offset = 0}};
        return inbox
            .run(connection_, {.fence = {}, .messages = one, .expected_offset = {}},
                 std::vector<std::vector<Effect>>(1))
            .results[0]
            .outcome;
    }

    InboxDatabase database_;
    std::shared_ptr<Executor> connection_;
};

TEST_P(OldTables, new_databases_get_the_tables_and_nothing_is_done_twice) {
    const Place place{};
    auto plan = plan_schema(*connection_, place);
    ASSERT_TRUE(plan) << plan.error().detail;
    EXPECT_GE(plan->size(), 5U);
    EXPECT_EQ(plan_schema(*connection_, place)->size(), plan->size()) << "a plan changes nothing";
    std::vector<std::future<bool>> starters;
    for (int i = 0; i < 6; ++i) {
        starters.push_back(std::async(std::launch::async, [&] {
            auto connection = database_.connect();
            const auto made = apply_schema(*connection, place);
            if (!made) ADD_FAILURE() << made.error().detail;
            return made.has_value();
        }));
    }
    for (auto& starter : starters) EXPECT_TRUE(starter.get());
    EXPECT_TRUE(plan_schema(*connection_, place)->empty());
    EXPECT_EQ(database_.number("SELECT version FROM semel_inbox_schema"), schema_version);
    database_.query("UPDATE semel_inbox_schema SET version = 99");
    EXPECT_EQ(plan_schema(*connection_, place).error().code, base::ErrorCode::store_version);
}

TEST_P(OldTables, a_table_of_another_shape_is_not_touched) {
    make_old(10);
    EXPECT_NE(apply_schema(*connection_, {}).error().detail.find("older shape"), std::string::npos);
    database_.query("CREATE TABLE other (a INT)");
    EXPECT_NE(apply_schema(*connection_, {.schema = {}, .dedup_table = "other"})
                  .error()
                  .detail.find("no column key_hash"),
              std::string::npos);
    EXPECT_FALSE(plan_old_table(*connection_, {.schema = {}, .dedup_table = "other"}, old()));
    const std::string retype =
        postgres() ? "TYPE text USING encode(key_hash, 'hex')" : "VARBINARY(64) NOT NULL";
    ASSERT_TRUE(apply_schema(*connection_, {.schema = {}, .dedup_table = "retyped"}));
    if (postgres()) database_.query("ALTER TABLE retyped DROP CONSTRAINT retyped_key_hash_check");
    database_.query(postgres() ? "ALTER TABLE retyped ALTER COLUMN key_hash " + retype
                               : "ALTER TABLE retyped MODIFY key_hash " + retype);
    EXPECT_NE(plan_schema(*connection_, {.schema = {}, .dedup_table = "retyped"})
                  .error()
                  .detail.find("compared as bytes"),
              std::string::npos);
    OldTable unknown = old();
    unknown.table = "nowhere";
    EXPECT_NE(plan_old_table(*connection_, {}, unknown).error().detail.find("no table nowhere"),
              std::string::npos);
    database_.query("UPDATE message_dedup SET status = 5 WHERE id = 2");
    EXPECT_NE(plan_old_table(*connection_, {}, old()).error().detail.find("status 5"),
              std::string::npos);
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM message_dedup"), 10);
}

TEST_P(OldTables, an_old_table_is_migrated_in_steps_and_its_done_ids_stay_done) {
    make_old(1234);
    auto plan = plan_old_table(*connection_, {}, old());
    ASSERT_TRUE(plan) << plan.error().detail;
    EXPECT_EQ(plan->rows, 1234);
    EXPECT_EQ(plan->done + plan->failed + plan->undecided, 1234);
    EXPECT_EQ(plan->failed, 124);
    EXPECT_EQ(plan->undecided, 123);
    std::string all;
    for (const std::string& text : plan->statements) all += text + "\n";
    EXPECT_EQ(all.find('$'), std::string::npos) << all;
    EXPECT_NE(all.find("message_dedup_before_semel"), std::string::npos);
    std::vector<std::int64_t> steps;
    auto copied =
        migrate_old_table(*connection_, {}, old(), [&](std::int64_t done, std::int64_t total) {
            EXPECT_EQ(total, 1234);
            steps.push_back(done);
            return true;
        });
    ASSERT_TRUE(copied) << copied.error().detail;
    EXPECT_EQ(*copied, 1234);
    EXPECT_EQ(steps.size(), 13U);
    EXPECT_EQ(steps.front(), 100);
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM message_dedup"), 1234);
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM message_dedup_before_semel"), 1234);
    EXPECT_TRUE(plan_schema(*connection_, {})->empty());
    const std::string utc = postgres()
                                ? "to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI')"
                                : "DATE_FORMAT(created_at, '%Y-%m-%d %H:%i')";
    EXPECT_EQ(database_.one("SELECT " + utc + " FROM message_dedup WHERE message_id = 'Order-2'"),
              "2026-11-20 06:30");
    EXPECT_EQ(database_.one("SELECT error_message FROM message_dedup WHERE message_id = 'Order-3' "
                            "AND status = 2 AND retry_count = 3"),
              "boom");
    // What the database computed is what this program computes.
    EXPECT_EQ(asked("Order-2"), Outcome::duplicate);
    EXPECT_EQ(asked(postgres() ? "a\\b caf\xc3\xa9" : "a\\b cafe"), Outcome::duplicate);
    EXPECT_EQ(asked("order-2"), Outcome::applied) << "never seen";
    EXPECT_EQ(asked("Order-2", "another/scope"), Outcome::applied) << "never seen there";
    EXPECT_EQ(asked("Order-3"), Outcome::applied) << "failed, and due";
    EXPECT_EQ(asked("Order-7"), Outcome::undecided) << "unknown";
    EXPECT_GT(database_.number("SELECT id FROM message_dedup WHERE message_id = 'order-2'"), 1234)
        << "numbers go on behind the old ones";
    const DedupTable table({.scope = "group/orders", .place = {}});
    auto results = table.apply(*connection_, {{.source = "order-created",
                                               .id = "Order-17",
                                               .operation = core::Get{},
                                               .business_key = {}},
                                              {.source = "order-created",
                                               .id = "Order-13",
                                               .operation = core::Get{},
                                               .business_key = {}}});
    EXPECT_EQ(std::get<core::Found>(results[0]->outcome).record->status, core::Status::unknown);
    EXPECT_EQ(std::get<core::Found>(results[1]->outcome).record->status, core::Status::failed);
    EXPECT_NE(
        migrate_old_table(*connection_, {}, old(), {}).error().detail.find("new shape already"),
        std::string::npos);
}

TEST_P(OldTables, while_an_old_consumer_writes_it_is_refused_and_nothing_has_changed) {
    make_old(500);
    std::atomic<bool> over = false;
    auto consumer = std::async(std::launch::async, [&] {
        auto connection = database_.connect();
        int written = 0;
        for (int n = 0; !over; ++n) {
            const auto answer = connection->run(Statement{
                .text = "INSERT INTO message_dedup (message_id, status, expire_at) VALUES ('live-" +
                        std::to_string(n) + "', 1, '2026-12-01')",
                .parameters = {}});
            written += std::holds_alternative<sql::ResultRows>(answer) ? 1 : 0;
        }
        return written;
    });
    auto refused = migrate_old_table(*connection_, {}, old(), {});
    over = true;
    const int written = consumer.get();
    ASSERT_FALSE(refused);
    EXPECT_NE(refused.error().detail.find("somebody writes"), std::string::npos)
        << refused.error().detail;
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM message_dedup WHERE message_id LIKE 'live%'"),
              written);

    // One that writes only while the copy is made is noticed at the end.
    int step = 0;
    refused = migrate_old_table(*connection_, {}, old(), [&](std::int64_t, std::int64_t) {
        if (++step == 2)
            database_.query(
                "UPDATE message_dedup SET status = 2, retry_count = 1 WHERE message_id = "
                "'Order-2'");
        return true;
    });
    ASSERT_FALSE(refused);
    EXPECT_NE(refused.error().detail.find("somebody writes"), std::string::npos)
        << refused.error().detail;
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM message_dedup WHERE status = 2"), 51)
        << "the old table, as it was";
    EXPECT_FALSE(connection_->in_transaction());
    // A stop by the operator leaves it too.
    EXPECT_FALSE(migrate_old_table(*connection_, {}, old(),
                                   [](std::int64_t, std::int64_t) { return false; }));
    // Without the writer it works, on top of what the earlier ones left.
    auto copied = migrate_old_table(*connection_, {}, old(), {});
    ASSERT_TRUE(copied) << copied.error().detail;
    EXPECT_EQ(asked("live-0"), Outcome::duplicate);
    EXPECT_EQ(asked("Order-2"), Outcome::applied);
}

TEST_P(OldTables, a_live_table_can_be_taken_over_with_what_was_written_meanwhile) {
    make_old(500);
    OldTable accepted = old();
    accepted.accept_writer = true;
    int step = 0;
    auto copied = migrate_old_table(*connection_, {}, accepted, [&](std::int64_t, std::int64_t) {
        if (++step == 2) {
            database_.query(
                "INSERT INTO message_dedup (message_id, status, expire_at) VALUES ('late', 1, "
                "'2026-12-01')");
            database_.query("UPDATE message_dedup SET status = 1 WHERE message_id = 'Order-3'");
            database_.query("DELETE FROM message_dedup WHERE message_id = 'Order-4'");
        }
        return true;
    });
    ASSERT_TRUE(copied) << copied.error().detail;
    EXPECT_EQ(asked("late"), Outcome::duplicate);
    EXPECT_EQ(asked("Order-3"), Outcome::duplicate);
    EXPECT_EQ(asked("Order-4"), Outcome::duplicate) << "what the old table forgets stays known";
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM message_dedup"), 501);
    // The old consumer, still running: loudly, not silently.
    EXPECT_THROW(database_.query("INSERT INTO message_dedup (message_id, status, expire_at) VALUES "
                                 "('later', 0, '2026-12-01')"),
                 std::runtime_error);
}

TEST_P(OldTables,
       a_table_in_use_is_waited_for_within_a_bound_and_a_broken_off_renaming_is_finished) {
    make_old(200);
    auto user = database_.connect();
    ASSERT_TRUE(std::holds_alternative<sql::ResultRows>(
        user->run(Statement{.text = "BEGIN", .parameters = {}})));
    ASSERT_TRUE(std::holds_alternative<sql::ResultRows>(
        user->run(Statement{.text = "SELECT COUNT(*) FROM message_dedup", .parameters = {}})));
    auto migrated = std::async(std::launch::async, [&] {
        auto connection = database_.connect();
        return migrate_old_table(*connection, {}, old(), {}).has_value();
    });
    EXPECT_EQ(migrated.wait_for(500ms), std::future_status::timeout)
        << "somebody is inside the table";
    ASSERT_TRUE(std::holds_alternative<sql::ResultRows>(
        user->run(Statement{.text = "COMMIT", .parameters = {}})));
    EXPECT_TRUE(migrated.get());
    // As MySQL leaves it when the migration dies between its two renamings.
    database_.query("ALTER TABLE message_dedup RENAME TO message_dedup_semel_new");
    auto plan = plan_old_table(*connection_, {}, old());
    ASSERT_TRUE(plan) << plan.error().detail;
    EXPECT_EQ(plan->notices.size(), 1U);
    auto finished = migrate_old_table(*connection_, {}, old(), {});
    ASSERT_TRUE(finished) << finished.error().detail;
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM message_dedup"), 200);
    EXPECT_EQ(asked("Order-2"), Outcome::duplicate);
}

TEST_P(OldTables, ids_that_may_have_been_cut_are_named) {
    make_old(10);
    database_.query("UPDATE message_dedup SET message_id = '" + std::string(64, 'x') +
                    "' WHERE id = 2");
    auto plan = plan_old_table(*connection_, {}, old());
    ASSERT_TRUE(plan) << plan.error().detail;
    ASSERT_EQ(plan->notices.size(), 2U);
    EXPECT_NE(plan->notices[0].find("64 characters"), std::string::npos) << plan->notices[0];
}

INSTANTIATE_TEST_SUITE_P(On, OldTables, testing::Values(Dialect::postgres, Dialect::mysql),
                         [](const auto& info) {
                             return info.param == Dialect::postgres ? "postgres" : "mysql";
                         });

}  // namespace
}  // namespace semel::inbox
