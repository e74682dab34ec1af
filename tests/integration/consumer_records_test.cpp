// The strategy `table` on real databases: the same promises as on a store, in rows that people can
// read.
#include "consumer/records.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>

#include "consumer/handlers/callback.hpp"
#include "consumer/strategies/recorded.hpp"
#include "inbox/names.hpp"
#include "inbox/schema.hpp"
#include "integration/inbox_databases.hpp"

namespace semel::consumer {
namespace {

using namespace std::chrono_literals;
using sql::Dialect;
using support::InboxDatabase;

constexpr const char* scope = "group/orders";

class TableTest : public testing::TestWithParam<Dialect> {
  protected:
    TableTest() : database(GetParam()) {
        auto executor = database.connect();
        auto made = inbox::apply_schema(*executor, {});
        if (!made) throw std::runtime_error(made.error().detail);
    }

    /// One process. Its callback runs on threads, its strategy on the loop of this test's thread.
    struct Node {
        Node(TableTest& t, const std::string& id, CallbackFunction callback)
            : records(records_on_table(
                  t.loop, {.scope = scope, .place = {}},
                  [&t]() -> sql::Tried<std::shared_ptr<sql::Executor>> {
                      if (t.away)
                          return sql::Problem{sql::Trouble::lost,
                                              {.code = base::ErrorCode::store_unavailable,
                                               .detail = "the database does not answer"}};
                      ++t.connections;
                      return t.database.connect();
                  },
                  2, "table message_dedup")),
              handler(make_callback_handler(std::move(callback), 4)) {
            RecordedOptions own = t.options;
            own.owner = {id, {}};
            strategy = make_recorded(t.loop, own, *records, *handler, counters);
        }
        ConsumerCounters counters;
        std::unique_ptr<Records> records;
        std::unique_ptr<Handler> handler;
        std::unique_ptr<Strategy> strategy;
        std::map<std::string, Verdict> told;

        void run(std::vector<Message*> batch) {
            for (Message* one : batch) {
                ++one->runs;
                told.erase(one->id);
            }
            strategy->run(std::move(batch), false, [this](Message& one, Verdict verdict) {
                told[one.id] = std::move(verdict);
            });
        }
        template <class T>
        [[nodiscard]] bool last(const std::string& id) const {
            const auto found = told.find(id);
            return found != told.end() && std::holds_alternative<T>(found->second);
        }
    };
    std::unique_ptr<Node> node(const std::string& id, CallbackFunction callback) {
        return std::make_unique<Node>(*this, id, std::move(callback));
    }

    Message& message(const std::string& id, const std::string& body = "body") {
        Message& made = messages.emplace_back();
        made.source = "orders";
        made.id = id;
        made.business_key = "order " + id;
        made.key = inbox::key_hash({scope, made.source, made.id});
        made.fingerprint.raw = base::sha256(body);
        return made;
    }
    /// Lets the loop run until the condition holds.
    template <class Condition>
    void eventually(Condition condition) {
        const auto until = std::chrono::steady_clock::now() + 20s;
        while (!condition()) {
            if (std::chrono::steady_clock::now() > until) {
                ADD_FAILURE() << "did not happen within 20 s";
                return;
            }
            loop.io().restart();
            loop.io().run_one_for(10ms);
        }
    }
    /// Runs and waits until all are told.
    void run(Node& node, const std::vector<Message*>& batch) {
        node.run(batch);
        eventually([&] {
            return std::all_of(batch.begin(), batch.end(),
                               [&](Message* one) { return node.told.contains(one->id); });
        });
    }
    std::string status(const std::string& id) {
        return database.one("SELECT status FROM message_dedup WHERE message_id = '" + id + "'");
    }

    InboxDatabase database;
    std::atomic<bool> away{false};
    std::atomic<int> connections{0};
    runtime::Loop loop{base::system_clocks()};
    RecordedOptions options{.name = "orders",
                            .owner = {},
                            .lease = 2s,
                            .patience = 1500ms,
                            .concurrency = 4,
                            .retry = {.attempts = 2, .initial = 300ms, .jitter = 0},
                            .store_promise = {}};
    std::deque<Message> messages;
};

TEST_P(TableTest, messages_are_run_once_and_people_can_read_so) {
    std::atomic<int> calls{0};
    const CallbackFunction count = [&](const Message&, const Attempt&) {
        ++calls;
        return Handled{};
    };
    auto a = node("a", count);
    std::vector<Message*> batch;
    for (int i = 0; i < 200; ++i) batch.push_back(&message("m" + std::to_string(i)));
    run(*a, batch);
    for (Message* one : batch) EXPECT_TRUE(a->last<Applied>(one->id)) << one->id;
    EXPECT_EQ(calls, 200);
    EXPECT_EQ(database.number("SELECT count(*) FROM message_dedup WHERE status = 1"), 200);
    EXPECT_EQ(database.one("SELECT business_key FROM message_dedup WHERE message_id = 'm7'"),
              "order m7");
    auto b = node("b", count);
    batch.push_back(&message("new"));
    run(*b, batch);
    EXPECT_TRUE(b->last<Applied>("new"));
    for (int i = 0; i < 200; ++i) EXPECT_TRUE(b->last<Duplicate>("m" + std::to_string(i)));
    EXPECT_EQ(calls, 201);
    run(*b, {&message("m1", "another body")});
    EXPECT_TRUE(b->last<Dead>("m1"));
}

TEST_P(TableTest, a_failure_waits_over_a_restart_is_counted_and_ends_in_a_letter) {
    const CallbackFunction fail = [](const Message&, const Attempt&) -> HandlerOutcome {
        throw std::runtime_error("no such account");
    };
    auto a = node("a", fail);
    Message& m = message("1");
    run(*a, {&m});
    ASSERT_TRUE(a->last<Retry>("1"));
    EXPECT_EQ(status("1"), "2");
    EXPECT_EQ(database.one("SELECT error_message FROM message_dedup WHERE message_id = '1'")
                      .find("no such account") == std::string::npos,
              false);
    a = node("a, restarted", fail);
    eventually([&] {
        run(*a, {&m});
        return a->last<Dead>("1");
    });
    const Dead dead = std::get<Dead>(a->told.at("1"));
    EXPECT_EQ(dead.why, DeadClass::attempts);
    EXPECT_EQ(dead.failed_runs, 2u);
    EXPECT_EQ(status("1"), "3");
    auto b = node("b", fail);
    run(*b, {&m});
    ASSERT_TRUE(b->last<Dead>("1"));
    EXPECT_FALSE(std::get<Dead>(b->told.at("1")).letter_known);
    bool marked = false;
    b->strategy->letter_published(m, dead, [&](base::Result<void> r) { marked = r.has_value(); });
    eventually([&] { return marked; });
    run(*b, {&m});
    EXPECT_TRUE(std::get<Dead>(b->told.at("1")).letter_known);
}

TEST_P(TableTest, a_running_message_is_kept_and_taken_over_only_when_its_owner_is_dead) {
    std::atomic<bool> go{false};
    auto a = node("a", [&](const Message&, const Attempt&) {
        go.wait(false);
        return Handled{};
    });
    std::atomic<int> calls{0};
    auto b = node("b", [&](const Message&, const Attempt& attempt) {
        calls += static_cast<int>(attempt.number);
        return Handled{};
    });
    a->run({&message("1")});
    eventually([&] { return status("1") == "0"; });
    const auto until = std::chrono::steady_clock::now() + options.lease + 500ms;
    Message& again = message("1");
    eventually([&] {
        run(*b, {&again});
        EXPECT_TRUE(b->last<Busy>("1"));  // it renews
        return std::chrono::steady_clock::now() > until;
    });
    a->strategy.reset();  // dies
    eventually([&] {
        run(*b, {&again});
        return b->last<Applied>("1");
    });
    EXPECT_EQ(calls, 2);
    EXPECT_EQ(b->counters.takeovers, 1u);
    go = true;
    go.notify_all();
}

TEST_P(TableTest, a_database_that_is_away_makes_messages_ill_and_comes_back) {
    away = true;
    auto a = node("a", [](const Message&, const Attempt&) { return Handled{}; });
    run(*a, {&message("1")});
    ASSERT_TRUE(a->last<Ill>("1"));
    EXPECT_NE(std::get<Ill>(a->told.at("1")).reason.find("does not answer"), std::string::npos);
    away = false;
    Message& m = message("1");
    eventually([&] {
        run(*a, {&m});
        return a->last<Applied>("1");
    });
    // Every connection is cut: what runs is found out and goes on.
    const int before = connections;
    database.query(database.postgres()
                       ? "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE "
                         "datname = current_database() AND pid <> pg_backend_pid()"
                       : "SET @nothing = 1");
    if (!database.postgres()) {
        for (const auto& row : database.query(
                 "SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> "
                 "CONNECTION_ID()"))
            database.query("KILL " + *row[0]);
    }
    Message& next = message("2");
    eventually([&] {
        run(*a, {&next});
        return a->last<Applied>("2");
    });
    EXPECT_GT(connections, before);
}

TEST_P(TableTest, held_unknown_outcomes_stay_unknown_in_the_table) {
    options.hold_unknown = true;
    auto a = node("a", [](const Message&, const Attempt&) { return HandledUnknown{"timed out"}; });
    Message& m = message("1");
    run(*a, {&m});
    ASSERT_TRUE(a->last<Dead>("1"));
    EXPECT_EQ(std::get<Dead>(a->told.at("1")).why, DeadClass::unknown);
    EXPECT_EQ(status("1"), "4");
    run(*a, {&m});
    ASSERT_TRUE(a->last<Dead>("1"));
}

INSTANTIATE_TEST_SUITE_P(Databases, TableTest, testing::Values(Dialect::postgres, Dialect::mysql),
                         [](const auto& info) {
                             return info.param == Dialect::postgres ? "postgres" : "mysql";
                         });

}  // namespace
}  // namespace semel::consumer
