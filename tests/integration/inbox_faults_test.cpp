// The inbox when processes die, freeze, and lose answers. Everything is counted in the tables
// afterwards.
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "inbox/inbox.hpp"
#include "inbox/schema.hpp"
#include "integration/inbox_databases.hpp"

extern char** environ;

namespace semel::inbox {
namespace {

using namespace std::chrono_literals;
using sql::Dialect;
using sql::Statement;
using support::DroppingProxy;
using support::InboxDatabase;

constexpr int worker_messages = 64;
constexpr int exit_fenced = 3;

template <class T>
T must(Tried<T> answer) {
    if (auto* problem = std::get_if<Problem>(&answer))
        throw std::runtime_error(problem->error.detail);
    return std::move(std::get<T>(answer));
}

/// inbox_worker, in a process of its own.
class Worker {
  public:
    Worker(const InboxDatabase& database, const std::string& mode, const std::string& faults,
           std::int64_t epoch = 0, milliseconds idle = 60s) {
        std::vector<std::string> words{SEMEL_INBOX_WORKER,
                                       database.postgres() ? "postgres" : "mysql",
                                       std::to_string(database.address().port),
                                       database.address().database,
                                       mode,
                                       std::to_string(worker_messages),
                                       std::to_string(epoch),
                                       std::to_string(idle.count())};
        const std::string setting = "SEMEL_FAULT_POINTS=" + faults;
        std::vector<char*> arguments, environment;
        for (std::string& word : words) arguments.push_back(word.data());
        arguments.push_back(nullptr);
        if (!faults.empty()) environment.push_back(const_cast<char*>(setting.c_str()));
        for (char** one = environ; *one != nullptr; ++one) environment.push_back(*one);
        environment.push_back(nullptr);
        if (posix_spawn(&pid_, SEMEL_INBOX_WORKER, nullptr, nullptr, arguments.data(),
                        environment.data()) != 0)
            throw std::runtime_error("the worker cannot be started");
    }
    ~Worker() {
        if (pid_ < 0) return;
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
    }
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

    void signal(int number) const { ::kill(pid_, number); }
    /// Its exit code, or minus the signal that killed it.
    int wait() {
        int status = 0;
        ::waitpid(pid_, &status, 0);
        pid_ = -1;
        return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
    }
    [[nodiscard]] bool wait_until_stopped() const {
        int status = 0;
        return ::waitpid(pid_, &status, WUNTRACED) == pid_ && WIFSTOPPED(status);
    }

  private:
    pid_t pid_ = -1;
};

class InboxFaults : public testing::TestWithParam<Dialect> {
  protected:
    InboxFaults() : database_(GetParam()) {
        auto made = apply_schema(*database_.connect(), {});
        if (!made) throw std::runtime_error(made.error().detail);
        database_.query("CREATE TABLE totals (id INT PRIMARY KEY, n INT NOT NULL)");
        database_.query("INSERT INTO totals VALUES (0, 0), (1, 0), (2, 0), (3, 0)");
        database_.query("CREATE TABLE effects (message_id VARCHAR(300) NOT NULL)");
    }
    void clear() {
        for (const char* table : {"effects", "message_dedup", "semel_offsets", "semel_assignments"})
            database_.query(std::string("DELETE FROM ") + table);
        database_.query("UPDATE totals SET n = 0");
    }
    /// Nothing lost, nothing doubled.
    void expect_each_once(int messages, const std::string& where) {
        EXPECT_EQ(database_.number("SELECT COUNT(*) FROM effects"), messages) << where;
        EXPECT_EQ(database_.number("SELECT COUNT(DISTINCT message_id) FROM effects"), messages)
            << where;
        EXPECT_EQ(database_.number("SELECT SUM(n) FROM totals"), messages) << where;
        EXPECT_EQ(database_.number("SELECT COUNT(*) FROM message_dedup WHERE status = 1"), messages)
            << where;
    }
    [[nodiscard]] std::vector<std::vector<Effect>> effects_of(
        const std::vector<Message>& all) const {
        std::vector<std::vector<Effect>> effects;
        for (const Message& one : all) {
            effects.push_back(
                {{{.text = "UPDATE totals SET n = n + 1 WHERE id = 0", .parameters = {}},
                  Rows::one},
                 {{.text = "INSERT INTO effects (message_id) VALUES ('" + one.id + "')",
                   .parameters = {}},
                  Rows::one}});
        }
        return effects;
    }
    static std::vector<Message> messages(int count) {
        std::vector<Message> out;
        for (int i = 0; i < count; ++i)
            out.push_back({.source = "t",
                           .id = "m" + std::to_string(i),
                           .business_key = {},
                           .fingerprint = {},
                           .lane = {},
                           .next_offset = i + 1});
        return out;
    }
    static std::map<std::string, int> count(const RunReport& report) {
        std::map<std::string, int> counts;
        for (const MessageResult& one : report.results) ++counts[name_of(one.outcome)];
        return counts;
    }
    /// COMMIT as it goes over the wire, and not READ COMMITTED.
    [[nodiscard]] std::string commit() const {
        return database_.postgres() ? std::string("COMMIT\0", 7) : "\n;COMMIT";
    }
    using Counts = std::map<std::string, int>;

    InboxDatabase database_;
};

TEST_P(InboxFaults, a_process_killed_at_any_step_loses_and_doubles_nothing) {
    for (const std::string mode : {"statements", "callback", "ordered"}) {
        clear();
        int killed = 0;
        for (const std::string point : {"inbox.claim.before", "inbox.claim.after", "worker.effect",
                                        "inbox.commit.before", "inbox.commit.after"}) {
            if (point == "worker.effect" && mode != "callback") continue;
            // At the first batch, and at one of those that follow.
            for (const std::string pass : {"1", point == "worker.effect" ? "21" : "2"}) {
                const int code = Worker(database_, mode, point + "=kill:" + pass).wait();
                killed += code == -SIGKILL ? 1 : 0;
                EXPECT_TRUE(code == -SIGKILL || code == 0) << mode << " " << point << " " << code;
            }
        }
        EXPECT_GE(killed, 6) << mode;
        EXPECT_EQ(Worker(database_, mode, "").wait(), 0) << mode;
        expect_each_once(worker_messages, mode);
    }
}

TEST_P(InboxFaults, processes_killed_at_random_moments_lose_and_double_nothing) {
    std::mt19937 random(20261130);
    for (int i = 0; i < 12; ++i) {
        Worker worker(database_, i % 2 == 0 ? "statements" : "callback", "");
        std::this_thread::yield();
        const auto until = std::chrono::steady_clock::now() +
                           milliseconds{std::uniform_int_distribution<int>(5, 60)(random)};
        while (std::chrono::steady_clock::now() < until) std::this_thread::yield();
        worker.signal(SIGKILL);
        worker.wait();
    }
    EXPECT_EQ(Worker(database_, "statements", "").wait(), 0);
    expect_each_once(worker_messages, "at the end");
}

TEST_P(InboxFaults, a_zombie_frozen_inside_its_transaction_rolls_back_after_the_epoch_moved) {
    const TransactionalInbox inbox({.scope = "group/worker"});
    const Partition partition{.topic = "t", .number = 0};
    auto connection = database_.connect();
    // Its transaction ends 2 s after it froze; until then its lock is respected.
    const std::int64_t first =
        std::get<Assigned>(must(inbox.assign(*connection, partition, "zombie", 0, 1s))).epoch;
    Worker zombie(database_, "statements", "inbox.commit.before=stop", first, 2s);
    ASSERT_TRUE(zombie.wait_until_stopped());
    const auto from = std::chrono::steady_clock::now();
    EXPECT_TRUE(std::holds_alternative<StillBusy>(
        must(inbox.assign(*connection, partition, "heir", {}, 200ms))));
    EXPECT_LT(std::chrono::steady_clock::now() - from, 5s) << "the wait has a bound";
    const Assigned heir =
        std::get<Assigned>(must(inbox.assign(*connection, partition, "heir", {}, 20s)));
    EXPECT_EQ(heir.epoch, first + 1);
    const Batch batch{
        .fence = Fence{partition, heir.epoch}, .messages = messages(16), .expected_offset = {}};
    EXPECT_EQ(count(inbox.run(connection, batch, effects_of(batch.messages))),
              (Counts{{"applied", 16}}));
    zombie.signal(SIGCONT);
    EXPECT_EQ(zombie.wait(), exit_fenced);
    expect_each_once(16, "one of the two");
}

TEST_P(InboxFaults, a_zombie_frozen_before_it_begins_is_fenced_off) {
    const TransactionalInbox inbox({.scope = "group/worker"});
    const Partition partition{.topic = "t", .number = 0};
    auto connection = database_.connect();
    const std::int64_t first =
        std::get<Assigned>(must(inbox.assign(*connection, partition, "zombie", 0, 1s))).epoch;
    Worker zombie(database_, "ordered", "inbox.claim.before=stop:2", first);
    ASSERT_TRUE(zombie.wait_until_stopped());
    const Assigned heir =
        std::get<Assigned>(must(inbox.assign(*connection, partition, "heir", {}, 10s)));
    EXPECT_EQ(heir.next_offset, 16) << "what the zombie had committed";
    zombie.signal(SIGCONT);
    EXPECT_EQ(zombie.wait(), exit_fenced);
    EXPECT_EQ(Worker(database_, "ordered", "").wait(), 0);
    expect_each_once(worker_messages, "both together");
}

TEST_P(InboxFaults, a_lost_answer_to_commit_is_found_out) {
    DroppingProxy proxy(database_.address().port);
    support::Address through = database_.address();
    through.port = proxy.port();
    const Connect reconnect = [&]() -> Tried<std::shared_ptr<Executor>> {
        return support::connect(through);
    };
    const TransactionalInbox inbox({.scope = "s"});
    const Partition partition{.topic = "t", .number = 0};
    const Fence fence{
        partition,
        std::get<Assigned>(must(inbox.assign(*database_.connect(), partition, "me", 0, 1s))).epoch};
    int expected = 0, position = 0;
    for (const DroppingProxy::Lose what :
         {DroppingProxy::Lose::the_answer, DroppingProxy::Lose::the_packet}) {
        for (const bool ordered : {false, true}) {
            for (const bool with_connect : {true, false}) {
                auto connection = support::connect(through);
                std::vector<Message> all = messages(8);
                for (Message& one : all) {
                    one.id += "-" + std::to_string(expected);
                    one.next_offset = ++position;
                }
                Batch batch{.fence = fence, .messages = all, .expected_offset = {}};
                if (ordered) batch.expected_offset = std::max(0, position - 8);
                proxy.lose(what, commit());
                const RunReport report = inbox.run(connection, batch, effects_of(all),
                                                   with_connect ? reconnect : Connect{});
                expected += 8;
                if (with_connect) {
                    EXPECT_EQ(count(report), (Counts{{"applied", 8}}));
                    EXPECT_EQ(report.reconnects, 1U);
                } else {
                    EXPECT_EQ(count(report), (Counts{{"unknown", 8}}));
                    EXPECT_TRUE(report.problem);
                    // Delivered again: by now it is known.
                    connection = support::connect(through);
                    const RunReport again = inbox.run(connection, batch, effects_of(all));
                    const bool applied = what == DroppingProxy::Lose::the_answer;
                    EXPECT_EQ(count(again), (Counts{{applied ? "duplicate" : "applied", 8}}));
                }
                if (!ordered) must(inbox.advance_now(*connection, fence, position));
            }
        }
    }
    EXPECT_EQ(proxy.lost(), 8);
    expect_each_once(expected, "at the end");
}

TEST_P(InboxFaults, a_lost_answer_of_a_fenced_off_owner_is_told_by_the_rows) {
    DroppingProxy proxy(database_.address().port);
    support::Address through = database_.address();
    through.port = proxy.port();
    const TransactionalInbox inbox({.scope = "s"});
    const Partition partition{.topic = "t", .number = 0};
    auto direct = database_.connect();
    for (const DroppingProxy::Lose what :
         {DroppingProxy::Lose::the_answer, DroppingProxy::Lose::the_packet}) {
        clear();
        const Fence fence{
            partition,
            std::get<Assigned>(must(inbox.assign(*direct, partition, "me", 0, 1s))).epoch};
        // Before the owner is back, somebody else has the partition.
        const Connect reconnect = [&]() -> Tried<std::shared_ptr<Executor>> {
            must(inbox.assign(*direct, partition, "other", {}, 10s));
            return support::connect(through);
        };
        auto connection = support::connect(through);
        const auto all = messages(4);
        proxy.lose(what, commit());
        const RunReport report =
            inbox.run(connection, {.fence = fence, .messages = all, .expected_offset = {}},
                      effects_of(all), reconnect);
        const bool applied = what == DroppingProxy::Lose::the_answer;
        EXPECT_EQ(count(report), (Counts{{applied ? "applied" : "fenced", 4}}));
        expect_each_once(applied ? 4 : 0, "by the rows");
    }
}

TEST_P(InboxFaults, a_connection_lost_elsewhere_is_replaced_and_the_batch_is_done_once) {
    DroppingProxy proxy(database_.address().port);
    support::Address through = database_.address();
    through.port = proxy.port();
    const Connect reconnect = [&]() -> Tried<std::shared_ptr<Executor>> {
        return support::connect(through);
    };
    const TransactionalInbox inbox({.scope = "s"});
    auto connection = support::connect(through);
    const auto all = messages(4);
    proxy.lose(DroppingProxy::Lose::the_answer, "INSERT INTO effects");
    RunReport report = inbox.run(connection, {.fence = {}, .messages = all, .expected_offset = {}},
                                 effects_of(all), reconnect);
    EXPECT_EQ(count(report), (Counts{{"applied", 4}}));
    expect_each_once(4, "after a lost effect");
    // And where there is none to be had: nothing was done, and that is known.
    proxy.lose(DroppingProxy::Lose::the_answer, "message_dedup");
    const std::vector<Message> more{{.source = "t",
                                     .id = "n",
                                     .business_key = {},
                                     .fingerprint = {},
                                     .lane = {},
                                     .next_offset = 0}};
    report = inbox.run(connection, {.fence = {}, .messages = more, .expected_offset = {}},
                       effects_of(more));
    EXPECT_EQ(count(report), (Counts{{"undecided", 1}}));
    ASSERT_TRUE(report.problem);
    EXPECT_EQ(report.problem->trouble, sql::Trouble::lost);
    expect_each_once(4, "after a lost claim");
}

TEST(InboxBehindPooler, the_guides_example_does_its_work_once) {
    InboxDatabase database(Dialect::postgres);
    const std::string command =
        std::string(SEMEL_INBOX_EXAMPLE) +
        " postgresql://semel@127.0.0.1:" + std::to_string(database.pooled().port) + "/" +
        database.address().database;
    for (int i = 0; i < 2; ++i) EXPECT_EQ(std::system(command.c_str()), 0);
    EXPECT_EQ(database.number("SELECT SUM(qty) FROM stock"), 20);
    EXPECT_EQ(database.number("SELECT next_offset FROM semel_offsets"), 2);
    EXPECT_EQ(database.number("SELECT epoch FROM semel_assignments"), 2);
}

INSTANTIATE_TEST_SUITE_P(On, InboxFaults, testing::Values(Dialect::postgres, Dialect::mysql),
                         [](const auto& info) {
                             return info.param == Dialect::postgres ? "postgres" : "mysql";
                         });

}  // namespace
}  // namespace semel::inbox
