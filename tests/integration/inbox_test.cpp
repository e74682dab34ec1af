// TransactionalInbox on real servers: the steps inside somebody's transaction, and run() when all
// goes well, when a message is at fault, and when others are in the way. What dies in the middle:
// inbox_faults_test.cpp.
#include "inbox/inbox.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <map>
#include <random>
#include <stdexcept>
#include <thread>

#include "inbox/schema.hpp"
#include "integration/inbox_databases.hpp"
#include "integration/watched_trips.hpp"

namespace semel::inbox {
namespace {

using namespace std::chrono_literals;
using namespace std::string_literals;
using sql::Dialect;
using sql::Statement;
using sql::Trouble;
using support::InboxDatabase;

const Partition partition_0{.topic = "orders", .number = 0};

template <class T>
T must(Tried<T> answer) {
    if (auto* problem = std::get_if<Problem>(&answer))
        throw std::runtime_error(problem->error.detail);
    return std::move(std::get<T>(answer));
}

class Inbox : public testing::TestWithParam<Dialect> {
  protected:
    Inbox() : database_(GetParam()) {
        auto made = apply_schema(*database_.connect(), {});
        if (!made) throw std::runtime_error(made.error().detail);
        database_.query(
            "CREATE TABLE stock (sku VARCHAR(40) PRIMARY KEY, qty INT NOT NULL, CHECK (qty >= 0))");
        database_.query("CREATE TABLE effects (message_id VARCHAR(2000) NOT NULL)");
        database_.query("INSERT INTO stock VALUES ('a', 1000), ('b', 0)");
    }

    [[nodiscard]] TransactionalInbox inbox(std::string scope = "shop/stock",
                                           milliseconds lock_wait = 1000ms) const {
        return TransactionalInbox({.scope = std::move(scope), .lock_wait = lock_wait});
    }
    [[nodiscard]] std::shared_ptr<Executor> connect() const { return database_.connect(); }
    [[nodiscard]] bool postgres() const { return database_.postgres(); }

    static Message message(std::string id) {
        return {.source = "orders",
                .id = std::move(id),
                .business_key = {},
                .fingerprint = {},
                .lane = {},
                .next_offset = 0};
    }
    static std::vector<Message> messages(const std::string& prefix, std::size_t count) {
        std::vector<Message> out;
        for (std::size_t i = 0; i < count; ++i) out.push_back(message(prefix + std::to_string(i)));
        return out;
    }
    [[nodiscard]] Statement statement(const std::string& before, const std::string& value,
                                      const std::string& after = {}) const {
        return {.text = before + (postgres() ? "$1::text" : "?") + after, .parameters = {value}};
    }
    /// Leaves one row that names the message.
    [[nodiscard]] Effect leave(const std::string& id) const {
        return {statement("INSERT INTO effects (message_id) VALUES (", id, ")"), Rows::one};
    }
    [[nodiscard]] Effect take(const std::string& sku, int qty) const {
        return {
            statement("UPDATE stock SET qty = qty - " + std::to_string(qty) + " WHERE sku = ", sku),
            Rows::one};
    }
    [[nodiscard]] std::vector<std::vector<Effect>> leave_each(
        const std::vector<Message>& all) const {
        std::vector<std::vector<Effect>> effects;
        for (const Message& one : all) effects.push_back({leave(readable(one.id))});
        return effects;
    }
    RunReport run(const TransactionalInbox& inbox, const std::vector<Message>& all,
                  std::shared_ptr<Executor> connection = {}) {
        if (!connection) connection = connect();
        return inbox.run(connection, {.fence = {}, .messages = all, .expected_offset = {}},
                         leave_each(all));
    }
    static std::map<std::string, int> count(const RunReport& report) {
        std::map<std::string, int> counts;
        for (const MessageResult& one : report.results) ++counts[name_of(one.outcome)];
        return counts;
    }
    using Counts = std::map<std::string, int>;

    std::int64_t effects() { return database_.number("SELECT COUNT(*) FROM effects"); }
    std::int64_t different_effects() {
        return database_.number("SELECT COUNT(DISTINCT message_id) FROM effects");
    }
    std::int64_t claimed() {
        return database_.number("SELECT COUNT(*) FROM message_dedup WHERE status = 1");
    }

    Assigned assign(const TransactionalInbox& inbox, std::optional<std::int64_t> first = {}) {
        return std::get<Assigned>(
            must(inbox.assign(*connect(), partition_0, "member-1", first, 1000ms)));
    }
    static void execute(Executor& executor, const std::string& text) {
        must(executor.run(Statement{.text = text, .parameters = {}}));
    }

    InboxDatabase database_;
};

// ---------------------------------------------------------------- the steps, in a transaction of
// the caller's

TEST_P(Inbox, a_duplicate_inside_a_callers_larger_transaction_poisons_nothing) {
    const TransactionalInbox inbox = this->inbox();
    EXPECT_EQ(count(run(inbox, {message("known")})), (Counts{{"applied", 1}}));

    auto connection = connect();
    execute(*connection, "BEGIN");
    execute(*connection, "INSERT INTO effects VALUES ('before')");
    const std::vector<Message> three{message("known"), message("new"), message("new")};
    const std::vector<Claim> claims = must(inbox.claim(*connection, three, new_claim_id()));
    EXPECT_EQ(claims[0].kind, Claim::Kind::done);
    EXPECT_EQ(claims[1].kind, Claim::Kind::fresh);
    EXPECT_EQ(claims[2].kind, Claim::Kind::done) << "the second of two equal ids";
    execute(*connection, "INSERT INTO effects VALUES ('after')");
    execute(*connection, "COMMIT");
    EXPECT_EQ(effects(), 3) << "known, before, after";
    EXPECT_EQ(count(run(inbox, {message("new")})), (Counts{{"duplicate", 1}}));
}

TEST_P(Inbox, what_is_rolled_back_was_never_claimed) {
    const TransactionalInbox inbox = this->inbox();
    auto connection = connect();
    execute(*connection, "BEGIN");
    EXPECT_EQ(must(inbox.claim(*connection, messages("m", 3), new_claim_id()))[2].kind,
              Claim::Kind::fresh);
    execute(*connection, "ROLLBACK");
    EXPECT_EQ(count(run(inbox, messages("m", 3))), (Counts{{"applied", 3}}));
}

TEST_P(Inbox, a_claim_is_taken_back_and_asked_again_under_its_id) {
    const TransactionalInbox inbox = this->inbox();
    auto connection = connect();
    const ClaimId id = new_claim_id();
    const std::vector<Message> two = messages("m", 2);
    execute(*connection, "BEGIN");
    must(inbox.claim(*connection, two, id));
    must(inbox.unclaim(*connection, std::span(two).first(1), id));
    EXPECT_EQ(must(inbox.claim(*connection, two, id))[1].kind, Claim::Kind::ours)
        << "claimed before, in this very transaction";
    must(inbox.unclaim(*connection, std::span(two).first(1), id));
    execute(*connection, "COMMIT");
    // As after a COMMIT whose answer was lost.
    EXPECT_EQ(must(inbox.committed(*connection, two, id)), (std::vector<bool>{false, true}));
    EXPECT_EQ(must(inbox.committed(*connection, two, new_claim_id())),
              (std::vector<bool>{false, false}));
    execute(*connection, "BEGIN");
    const std::vector<Claim> again = must(inbox.claim(*connection, two, id));
    EXPECT_EQ(again[0].kind, Claim::Kind::fresh);
    EXPECT_EQ(again[1].kind, Claim::Kind::ours);
    execute(*connection, "ROLLBACK");
}

TEST_P(Inbox, scopes_and_sources_do_not_see_each_other) {
    EXPECT_EQ(count(run(inbox("a"), {message("m")})), (Counts{{"applied", 1}}));
    EXPECT_EQ(count(run(inbox("b"), {message("m")})), (Counts{{"applied", 1}}));
    Message other = message("m");
    other.source = "invoices";
    EXPECT_EQ(count(run(inbox("a"), {other})), (Counts{{"applied", 1}}));
    EXPECT_EQ(count(run(inbox("a"), {message("m"), other})), (Counts{{"duplicate", 2}}));
}

TEST_P(Inbox, ids_are_compared_as_bytes_and_kept_readable) {
    const TransactionalInbox inbox = this->inbox();
    std::vector<Message> all;
    for (const std::string& id : {"Order-AB1"s, "order-ab1"s, "order-ab1 "s, " order-ab1"s,
                                  "order-ab1\0"s, "caf\xc3\xa9"s, "cafe"s, "cafe\xcc\x81"s,
                                  "stra\xc3\x9f"s
                                  "e",
                                  "strasse"s, "\xff\xfe"s, "a\\b"s, "'; DROP TABLE effects; --"s,
                                  "?$1"s, std::string(300, 'x'), std::string(301, 'x'),
                                  "\xf0\x9f\x98\x80"s, "\xe4\xb8\xad\xe6\x96\x87"s})
        all.push_back(message(id));
    EXPECT_EQ(count(run(inbox, all)), (Counts{{"applied", static_cast<int>(all.size())}}));
    EXPECT_EQ(count(run(inbox, all)), (Counts{{"duplicate", static_cast<int>(all.size())}}));
    for (const Message& one : all) EXPECT_EQ(count(run(inbox, {one})), (Counts{{"duplicate", 1}}));
    const std::string length = postgres() ? "octet_length(message_id)" : "length(message_id)";
    EXPECT_EQ(database_.one("SELECT message_id FROM message_dedup WHERE " + length + " = 300"),
              std::string(300, 'x'));
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM message_dedup WHERE message_id = 'Order-AB1'"),
              1);
    EXPECT_EQ(database_.number(
                  "SELECT COUNT(*) FROM message_dedup WHERE message_id LIKE 'order-ab1%x00'"),
              1)
        << "escaped";
    // The bytes are there as UTF-8 although the connection speaks Latin-1.
    const std::string bytes =
        postgres() ? "encode(convert_to(message_id, 'UTF8'), 'hex')" : "LOWER(HEX(message_id))";
    EXPECT_EQ(
        database_.number("SELECT COUNT(*) FROM message_dedup WHERE " + bytes + " = '636166c3a9'"),
        1);
}

TEST_P(Inbox, a_fingerprint_that_differs_is_a_mismatch_and_one_that_is_not_known_matches) {
    const TransactionalInbox inbox = this->inbox();
    Message one = message("m");
    one.fingerprint = base::sha256("ten");
    EXPECT_EQ(count(run(inbox, {one})), (Counts{{"applied", 1}}));
    EXPECT_EQ(count(run(inbox, {one})), (Counts{{"duplicate", 1}}));
    EXPECT_EQ(count(run(inbox, {message("m")})), (Counts{{"duplicate", 1}}));
    one.fingerprint = base::sha256("eleven");
    EXPECT_EQ(count(run(inbox, {message("n"), one, message("o")})),
              (Counts{{"applied", 2}, {"mismatch", 1}}));
}

TEST_P(Inbox,
       rows_that_others_left_undecided_are_not_touched_and_what_failed_and_is_due_runs_again) {
    const TransactionalInbox inbox = this->inbox();
    run(inbox, messages("m", 6));
    const std::string past =
        postgres() ? "clock_timestamp() - interval '1 hour'" : "UTC_TIMESTAMP(6) - INTERVAL 1 HOUR";
    const std::string future =
        postgres() ? "clock_timestamp() + interval '1 hour'" : "UTC_TIMESTAMP(6) + INTERVAL 1 HOUR";
    database_.query("UPDATE message_dedup SET status = 0, expire_at = NULL, lease_until = " + past +
                    " WHERE message_id = 'm0'");
    database_.query("UPDATE message_dedup SET status = 2, expire_at = NULL, lease_until = " + past +
                    " WHERE message_id = 'm1'");
    database_.query("UPDATE message_dedup SET status = 2, expire_at = NULL, lease_until = " +
                    future + " WHERE message_id = 'm2'");
    database_.query("UPDATE message_dedup SET status = 3 WHERE message_id = 'm3'");
    database_.query(
        "UPDATE message_dedup SET status = 4, expire_at = NULL WHERE message_id = 'm4'");
    database_.query("UPDATE message_dedup SET expire_at = " + past + " WHERE message_id = 'm5'");
    const RunReport report = run(inbox, messages("m", 6));
    EXPECT_EQ(count(report), (Counts{{"undecided", 4}, {"applied", 2}}));
    EXPECT_EQ(report.results[1].outcome, Outcome::applied) << "it had failed and was due";
    EXPECT_EQ(report.results[5].outcome, Outcome::applied) << "its record had expired";
    EXPECT_EQ(database_.one("SELECT retry_count FROM message_dedup WHERE message_id = 'm1'"), "1");
    EXPECT_EQ(count(run(inbox, messages("m", 6))), (Counts{{"undecided", 4}, {"duplicate", 2}}));
}

// ---------------------------------------------------------------- epochs and positions

TEST_P(Inbox, an_assign_raises_the_epoch_and_fences_off_whoever_had_it) {
    const TransactionalInbox inbox = this->inbox();
    const Assigned first = assign(inbox, 40);
    EXPECT_EQ(first.next_offset, 40);
    const Assigned second = assign(inbox, 99);
    EXPECT_EQ(second.epoch, first.epoch + 1);
    EXPECT_EQ(second.next_offset, 40) << "only the first start takes the offset over";
    auto connection = connect();
    const Batch old{.fence = Fence{partition_0, first.epoch},
                    .messages = messages("m", 3),
                    .expected_offset = {}};
    EXPECT_EQ(count(inbox.run(connection, old, leave_each(old.messages))), (Counts{{"fenced", 3}}));
    EXPECT_EQ(effects(), 0);
    EXPECT_EQ(claimed(), 0);
    Batch current = old;
    current.fence->epoch = second.epoch;
    EXPECT_EQ(count(inbox.run(connection, current, leave_each(current.messages))),
              (Counts{{"applied", 3}}));
    EXPECT_TRUE(std::holds_alternative<FencedOff>(
        must(inbox.fence(*connection, {{.topic = "none", .number = 1}, 1}))));
}

TEST_P(Inbox, an_assign_waits_for_the_former_owners_transaction_and_its_wait_has_a_bound) {
    const TransactionalInbox inbox = this->inbox();
    const Assigned first = assign(inbox);
    auto owner = connect();
    execute(*owner, "BEGIN");
    EXPECT_TRUE(
        std::holds_alternative<Held>(must(inbox.fence(*owner, {partition_0, first.epoch}))));
    const auto from = std::chrono::steady_clock::now();
    EXPECT_TRUE(std::holds_alternative<StillBusy>(
        must(inbox.assign(*connect(), partition_0, "member-2", {}, 300ms))));
    const auto waited = std::chrono::steady_clock::now() - from;
    EXPECT_GE(waited, 290ms);
    EXPECT_LT(waited, 3s) << "MySQL counts in seconds";
    auto next = std::async(std::launch::async, [&] {
        return must(inbox.assign(*connect(), partition_0, "member-2", {}, 20s));
    });
    EXPECT_EQ(next.wait_for(200ms), std::future_status::timeout);
    execute(*owner, "COMMIT");
    EXPECT_EQ(std::get<Assigned>(next.get()).epoch, first.epoch + 1);
}

TEST_P(Inbox, lanes_of_one_epoch_run_side_by_side) {
    const TransactionalInbox inbox = this->inbox();
    const Fence fence{partition_0, assign(inbox).epoch};
    auto slow = connect();
    execute(*slow, "BEGIN");
    EXPECT_TRUE(std::holds_alternative<Held>(must(inbox.fence(*slow, fence))));
    auto connection = connect();
    const Batch batch{.fence = fence, .messages = messages("m", 3), .expected_offset = {}};
    EXPECT_EQ(count(inbox.run(connection, batch, leave_each(batch.messages))),
              (Counts{{"applied", 3}}));
    execute(*slow, "ROLLBACK");
}

TEST_P(Inbox, a_transaction_that_looks_at_its_fence_last_rolls_back_too) {
    const TransactionalInbox inbox = this->inbox();
    const Fence old{partition_0, assign(inbox, 0).epoch};
    auto zombie = connect();
    execute(*zombie, "BEGIN");
    must(inbox.claim(*zombie, messages("m", 2), new_claim_id()));
    const Fence current{partition_0, assign(inbox).epoch};
    EXPECT_EQ(std::get<FencedOff>(must(inbox.advance(*zombie, old, 2))).epoch, current.epoch);
    execute(*zombie, "ROLLBACK");
    EXPECT_EQ(std::get<FencedOff>(must(inbox.advance_now(*zombie, old, 2))).epoch, current.epoch);
    EXPECT_EQ(assign(inbox).next_offset, 0);
}

TEST_P(Inbox, positions_move_forward_only) {
    const TransactionalInbox inbox = this->inbox();
    const Fence fence{partition_0, assign(inbox).epoch};
    auto connection = connect();
    EXPECT_EQ(std::get<Advanced>(must(inbox.advance_now(*connection, fence, 5))).next_offset, 5);
    EXPECT_EQ(std::get<Advanced>(must(inbox.advance_now(*connection, fence, 3))).next_offset, 5)
        << "a slower lane";
    EXPECT_EQ(std::get<Advanced>(must(inbox.advance_now(*connection, fence, 5))).next_offset, 5);
    execute(*connection, "BEGIN");
    EXPECT_EQ(std::get<Unexpected>(must(inbox.advance(*connection, fence, 8, 4))).next_offset, 5);
    EXPECT_EQ(std::get<Advanced>(must(inbox.advance(*connection, fence, 8, 5))).next_offset, 8);
    execute(*connection, "ROLLBACK");
    EXPECT_EQ(assign(inbox).next_offset, 5);
}

TEST_P(Inbox, ordered_by_partition_the_position_moves_with_the_effects_up_to_the_first_failure) {
    const TransactionalInbox inbox = this->inbox();
    const Fence fence{partition_0, assign(inbox, 10).epoch};
    auto connection = connect();
    Batch batch{.fence = fence, .messages = messages("m", 6), .expected_offset = 10};
    std::vector<std::vector<Effect>> effects;
    for (std::size_t i = 0; i < 6; ++i) {
        batch.messages[i].next_offset = 11 + static_cast<std::int64_t>(i);
        effects.push_back({leave(batch.messages[i].id)});
    }
    effects[3] = {take("b", 1)};  // the CHECK refuses it
    RunReport report = inbox.run(connection, batch, effects);
    EXPECT_EQ(count(report), (Counts{{"applied", 3}, {"failed", 1}, {"held", 2}}));
    EXPECT_EQ(report.next_offset, 13);
    EXPECT_EQ(database_.number("SELECT next_offset FROM semel_offsets"), 13);
    // The same by callbacks, from where it stands; the one at fault is settled by its dead letter.
    batch.messages.erase(batch.messages.begin(), batch.messages.begin() + 3);
    batch.expected_offset = 13;
    report =
        inbox.run(connection, batch, [&](Executor& executor, const Message& one) -> EffectOutcome {
            if (one.id == "m4") return NotYet{"its parent is missing"};
            must(executor.run(leave(one.id).statement));
            return Did{};
        });
    EXPECT_EQ(count(report), (Counts{{"applied", 1}, {"not_yet", 1}, {"held", 1}}));
    EXPECT_EQ(report.next_offset, 14);
    // Somebody else moved it: nothing is done.
    batch.expected_offset = 13;
    EXPECT_EQ(
        count(inbox.run(connection, batch, std::vector<std::vector<Effect>>(3, {leave("x")}))),
        (Counts{{"fenced", 3}}));
    EXPECT_EQ(this->effects(), 4);
}

// ---------------------------------------------------------------- a message at fault

TEST_P(Inbox,
       of_64_messages_the_one_with_a_constraint_error_fails_and_the_others_are_applied_once) {
    const TransactionalInbox inbox = this->inbox();
    const std::vector<Message> all = messages("m", 64);
    auto effects = leave_each(all);
    effects[37].push_back(take("b", 1));
    auto connection = connect();
    const RunReport report =
        inbox.run(connection, {.fence = {}, .messages = all, .expected_offset = {}}, effects);
    EXPECT_EQ(count(report), (Counts{{"applied", 63}, {"failed", 1}}));
    EXPECT_EQ(report.results[37].outcome, Outcome::failed);
    EXPECT_FALSE(report.results[37].reason.empty());
    EXPECT_LE(report.transactions, 4U) << "before it, it, behind it, after the first try";
    EXPECT_EQ(this->effects(), 63);
    EXPECT_EQ(different_effects(), 63);
    EXPECT_EQ(count(inbox.run(connection, {.fence = {}, .messages = all, .expected_offset = {}},
                              effects)),
              (Counts{{"duplicate", 63}, {"failed", 1}}));
}

TEST_P(Inbox, no_row_is_not_yet_and_too_many_are_fatal_and_both_roll_back) {
    const TransactionalInbox inbox = this->inbox();
    const std::vector<Message> all = messages("m", 8);
    auto effects = leave_each(all);
    effects[2].push_back(take("missing", 1));
    effects[5].push_back({{.text = "UPDATE stock SET qty = qty + 1", .parameters = {}}, Rows::one});
    effects[6].push_back(
        {{.text = "UPDATE stock SET qty = qty + 1", .parameters = {}}, Rows::at_least_one});
    effects[7].push_back({take("missing", 1).statement, Rows::any});
    auto connection = connect();
    const RunReport report =
        inbox.run(connection, {.fence = {}, .messages = all, .expected_offset = {}}, effects);
    EXPECT_EQ(count(report), (Counts{{"applied", 6}, {"not_yet", 1}, {"failed", 1}}));
    EXPECT_EQ(report.results[2].outcome, Outcome::not_yet);
    EXPECT_TRUE(report.results[5].fatal);
    EXPECT_EQ(this->effects(), 6);
    EXPECT_EQ(database_.number("SELECT SUM(qty) FROM stock"), 1002);
    // Its parent has come.
    database_.query("INSERT INTO stock VALUES ('missing', 5)");
    EXPECT_EQ(count(inbox.run(connection, {.fence = {}, .messages = all, .expected_offset = {}},
                              effects)),
              (Counts{{"duplicate", 6}, {"applied", 1}, {"failed", 1}}));
}

TEST_P(Inbox, behind_a_message_that_failed_its_lane_is_held_and_other_lanes_go_on) {
    const TransactionalInbox inbox = this->inbox();
    std::vector<Message> all = messages("m", 9);
    for (std::size_t i = 0; i < all.size(); ++i)
        all[i].lane = std::string(1, static_cast<char>('x' + i % 3));
    auto effects = leave_each(all);
    effects[1].push_back(take("b", 1));
    auto connection = connect();
    for (const bool by_callback : {false, true}) {
        const RunReport report =
            by_callback
                ? inbox.run(connection, {.fence = {}, .messages = all, .expected_offset = {}},
                            [&](Executor& executor, const Message& one) -> EffectOutcome {
                                if (one.id.ends_with('1')) throw std::runtime_error("no");
                                must(executor.run(leave(one.id).statement));
                                return Did{};
                            })
                : inbox.run(connection, {.fence = {}, .messages = all, .expected_offset = {}},
                            effects);
        EXPECT_EQ(count(report),
                  (Counts{{by_callback ? "duplicate" : "applied", 6}, {"failed", 1}, {"held", 2}}));
        EXPECT_EQ(report.results[1].outcome, Outcome::failed);
        EXPECT_EQ(report.results[4].outcome, Outcome::held);
        EXPECT_EQ(report.results[7].outcome, Outcome::held);
    }
    EXPECT_EQ(this->effects(), 6);
}

TEST_P(Inbox, a_failing_callback_is_undone_alone_and_tried_once_more_by_itself) {
    const TransactionalInbox inbox = this->inbox();
    auto connection = connect();
    std::map<std::string, int> calls;
    const auto all = messages("m", 8);
    const RunReport report = inbox.run(
        connection, {.fence = {}, .messages = all, .expected_offset = {}},
        [&](Executor& executor, const Message& one) -> EffectOutcome {
            ++calls[one.id];
            must(executor.run(leave(one.id).statement));
            if (one.id == "m2") throw std::runtime_error("no such customer");
            if (one.id == "m4") return Failed{"for ever", true};
            // Unnoticed: PostgreSQL's transaction is aborted from here on, and its COMMIT would be
            // a silent ROLLBACK.
            if (one.id == "m5")
                static_cast<void>(
                    executor.run(Statement{.text = "UPDATE stock SET qty = -1", .parameters = {}}));
            if (one.id == "m6") {
                auto refused = executor.run(Statement{.text = "COMMIT", .parameters = {}});
                EXPECT_EQ(std::get<Problem>(refused).trouble, Trouble::refused);
            }
            return Did{};
        });
    EXPECT_EQ(report.results[2].reason, "no such customer");
    EXPECT_TRUE(report.results[4].fatal);
    EXPECT_EQ(calls["m2"], 2) << "alone, too";
    EXPECT_EQ(calls["m3"], 1);
    const int unnoticed = postgres() ? 1 : 0;  // MySQL undoes the statement only
    EXPECT_EQ(count(report), (Counts{{"applied", 6 - unnoticed}, {"failed", 2 + unnoticed}}));
    EXPECT_EQ(effects(), 6 - unnoticed);
    EXPECT_EQ(claimed(), 6 - unnoticed);
}

TEST_P(Inbox, callbacks_that_share_a_transaction_take_a_trip_each_and_others_two) {
    const TransactionalInbox inbox = this->inbox();
    support::Trips trips;
    std::shared_ptr<Executor> connection =
        std::make_shared<support::WatchedTrips>(connect(), trips);
    const inbox::Callback callback = [&](Executor& executor, const Message& one) -> EffectOutcome {
        must(executor.run(leave(one.id).statement));
        return Did{};
    };
    const RunReport together = inbox.run(
        connection, {.fence = {}, .messages = messages("m", 10), .expected_offset = {}}, callback);
    EXPECT_EQ(count(together), (Counts{{"applied", 10}}));
    EXPECT_EQ(trips.size(), 12U) << "BEGIN with the claims, COMMIT, and each callback's own";
    EXPECT_EQ(trips.statements("COMMIT"), 1U);
    EXPECT_EQ(trips.statements("SAVEPOINT"), 10U);
    trips.clear();
    const RunReport singly =
        inbox.run(connection, {.fence = {}, .messages = messages("s", 10), .expected_offset = {}},
                  callback, {}, false);
    EXPECT_EQ(count(singly), (Counts{{"applied", 10}}));
    EXPECT_EQ(singly.transactions, 10U);
    EXPECT_EQ(trips.size(), 21U) << "a COMMIT takes the next message's BEGIN along";
    EXPECT_EQ(trips.statements("COMMIT"), 10U);
    EXPECT_EQ(trips.statements("SAVEPOINT"), 0U);
    EXPECT_EQ(effects(), 20);
    EXPECT_EQ(claimed(), 20);
}

TEST_P(Inbox, of_callbacks_in_transactions_of_their_own_only_the_one_that_fails_is_undone) {
    const TransactionalInbox inbox = this->inbox();
    if (postgres()) {
        database_.query("CREATE TABLE late (a int UNIQUE DEFERRABLE INITIALLY DEFERRED)");
        database_.query("INSERT INTO late VALUES (2)");
    }
    must(inbox.claim(*connect(), messages("m4", 1), new_claim_id()));  // "m40" is done already
    auto all = messages("m", 8);
    all[4].id = "m40";
    auto connection = connect();
    const RunReport report = inbox.run(
        connection, {.fence = {}, .messages = all, .expected_offset = {}},
        [&](Executor& executor, const Message& one) -> EffectOutcome {
            must(executor.run(leave(one.id).statement));
            // Speaks in the trip that carries the next one's BEGIN.
            if (one.id == "m2" && postgres()) execute(executor, "INSERT INTO late VALUES (2)");
            if (one.id == "m2" && !postgres()) return Failed{"no"};
            if (one.id == "m6") return NotYet{"no"};
            return Did{};
        },
        {}, false);
    EXPECT_EQ(count(report),
              (Counts{{"applied", 5}, {"duplicate", 1}, {"failed", 1}, {"not_yet", 1}}));
    EXPECT_EQ(report.results[2].outcome, Outcome::failed);
    EXPECT_EQ(report.results[4].outcome, Outcome::duplicate);
    EXPECT_EQ(report.results[6].outcome, Outcome::not_yet);
    EXPECT_EQ(effects(), 5);
    EXPECT_EQ(claimed(), 6);
}

TEST_P(Inbox, a_lost_answer_to_a_commit_and_the_next_begin_is_found_out) {
    const TransactionalInbox inbox = this->inbox();
    support::Trips trips;
    auto watched = std::make_shared<support::WatchedTrips>(connect(), trips);
    std::shared_ptr<Executor> connection = watched;
    int calls = 0;
    const RunReport report = inbox.run(
        connection, {.fence = {}, .messages = messages("m", 5), .expected_offset = {}},
        [&](Executor& executor, const Message& one) -> EffectOutcome {
            ++calls;
            must(executor.run(leave(one.id).statement));
            if (one.id == "m2") watched->lose_next_commit_on_the_way();
            return Did{};
        },
        [&]() -> Tried<std::shared_ptr<Executor>> { return connect(); }, false);
    EXPECT_EQ(count(report), (Counts{{"applied", 5}}));
    EXPECT_EQ(report.reconnects, 1U);
    EXPECT_EQ(calls, 5) << "m2 was committed, and m3 had not begun to run";
    EXPECT_EQ(effects(), 5);
    EXPECT_EQ(claimed(), 5);
}

TEST_P(Inbox, a_callback_that_ends_the_transaction_behind_the_inboxs_back_loses_no_other_message) {
    const TransactionalInbox inbox = this->inbox();
    support::Native native;
    std::shared_ptr<Executor> connection = support::connect(database_.address(), native);
    const std::shared_ptr<Executor> raw = connection;
    const auto all = messages("m", 4);
    const RunReport report =
        inbox.run(connection, {.fence = {}, .messages = all, .expected_offset = {}},
                  [&](Executor& executor, const Message& one) -> EffectOutcome {
                      must(executor.run(leave(one.id).statement));
                      if (one.id == "m1") execute(*raw, "COMMIT");
                      return Did{};
                  });
    EXPECT_EQ(count(report), (Counts{{"unknown", 2}, {"undecided", 2}}));
    const RunReport again = run(inbox, all);
    EXPECT_EQ(count(again), (Counts{{"duplicate", 2}, {"applied", 2}}))
        << "m2 and m3 were claimed by that COMMIT without having run";
    EXPECT_EQ(effects(), 4);
    EXPECT_EQ(different_effects(), 4);
}

TEST_P(Inbox, an_effect_that_would_commit_is_refused_before_it_runs) {
    const TransactionalInbox inbox = this->inbox();
    const auto all = messages("m", 3);
    auto effects = leave_each(all);
    effects[1] = {
        {{.text = postgres() ? "COMMIT" : "TRUNCATE stock", .parameters = {}}, Rows::any}};
    auto connection = connect();
    const RunReport report =
        inbox.run(connection, {.fence = {}, .messages = all, .expected_offset = {}}, effects);
    EXPECT_EQ(count(report), (Counts{{"applied", 2}, {"failed", 1}}));
    EXPECT_TRUE(report.results[1].fatal);
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM stock"), 2);
}

TEST_P(Inbox, a_constraint_that_speaks_at_commit_fails_its_message_alone) {
    if (!postgres()) {
        // MySQL has no such constraints: nothing it refuses comes as late as COMMIT.
        EXPECT_THROW(
            database_.query("CREATE TABLE c (a INT, UNIQUE (a) DEFERRABLE INITIALLY DEFERRED)"),
            std::runtime_error);
        return;
    }
    database_.query("CREATE TABLE late (a int UNIQUE DEFERRABLE INITIALLY DEFERRED)");
    database_.query("INSERT INTO late VALUES (5)");
    const TransactionalInbox inbox = this->inbox();
    const auto all = messages("m", 16);
    std::vector<std::vector<Effect>> effects;
    for (int i = 0; i < 16; ++i)
        effects.push_back(
            {{{.text = "INSERT INTO late VALUES (" + std::to_string(i) + ")", .parameters = {}},
              Rows::one}});
    auto connection = connect();
    const RunReport report =
        inbox.run(connection, {.fence = {}, .messages = all, .expected_offset = {}}, effects);
    EXPECT_EQ(count(report), (Counts{{"applied", 15}, {"failed", 1}}));
    EXPECT_EQ(report.results[5].outcome, Outcome::failed);
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM late"), 16);
}

TEST_P(Inbox, where_the_inbox_itself_cannot_work_no_message_is_blamed) {
    const TransactionalInbox inbox = this->inbox();
    database_.query("ALTER TABLE message_dedup RENAME TO elsewhere");
    const RunReport report = run(inbox, messages("m", 4));
    EXPECT_EQ(count(report), (Counts{{"undecided", 4}}));
    ASSERT_TRUE(report.problem);
    EXPECT_EQ(report.transactions, 1U);
    EXPECT_EQ(effects(), 0);
    auto connection = connect();
    execute(*connection, "BEGIN");
    EXPECT_EQ(count(run(inbox, messages("m", 1), connection)), (Counts{{"undecided", 1}}))
        << "not inside somebody's transaction";
    EXPECT_EQ(count(run(TransactionalInbox({.scope = "a\nb"}), messages("m", 1))),
              (Counts{{"undecided", 1}}));
    EXPECT_EQ(count(run(this->inbox(), {message("")})), (Counts{{"undecided", 1}}));
}

// ---------------------------------------------------------------- others in the way

TEST_P(Inbox, four_clients_in_opposite_orders_lose_nothing_and_no_deadlock_comes_out) {
    for (const std::string level : {"read committed", "repeatable read", "serializable"}) {
        database_.set_default_isolation(level);
        if (!postgres()) database_.set_sql_mode("");
        const std::vector<Message> all = messages(level, 96);
        std::vector<std::future<std::vector<RunReport>>> clients;
        for (unsigned client = 0; client < 4; ++client) {
            clients.push_back(std::async(std::launch::async, [&, client] {
                std::vector<Message> mine = all;
                std::mt19937 random(client);
                std::shuffle(mine.begin(), mine.end(), random);
                if (client % 2 == 1) std::reverse(mine.begin(), mine.end());
                const TransactionalInbox inbox = this->inbox();
                auto connection = connect();
                std::vector<RunReport> reports;
                for (std::size_t from = 0; from < mine.size(); from += 32)
                    reports.push_back(run(inbox,
                                          {mine.begin() + static_cast<std::ptrdiff_t>(from),
                                           mine.begin() + static_cast<std::ptrdiff_t>(from) + 32},
                                          connection));
                return reports;
            }));
        }
        int applied = 0, duplicate = 0;
        for (auto& client : clients) {
            for (const RunReport& report : client.get()) {
                EXPECT_FALSE(report.problem);
                Counts counts = count(report);
                applied += counts["applied"];
                duplicate += counts["duplicate"];
            }
        }
        EXPECT_EQ(applied, 96) << level;
        EXPECT_EQ(duplicate, 3 * 96) << level;
    }
    database_.set_default_isolation(postgres() ? "read committed" : "REPEATABLE READ");
    if (!postgres()) database_.set_sql_mode("STRICT_TRANS_TABLES");
    EXPECT_EQ(effects(), 3 * 96);
    EXPECT_EQ(different_effects(), 3 * 96);
}

TEST_P(Inbox, when_a_holder_rolls_back_one_of_eight_waiters_applies_and_the_others_know) {
    const TransactionalInbox inbox = this->inbox();
    auto holder = connect();
    execute(*holder, "BEGIN");
    must(inbox.claim(*holder, std::vector{message("m")}, new_claim_id()));
    std::vector<std::future<RunReport>> waiters;
    for (int i = 0; i < 8; ++i)
        waiters.push_back(
            std::async(std::launch::async, [&] { return run(inbox, {message("m")}); }));
    const auto until = std::chrono::steady_clock::now() + 10s;
    while (database_.waiting_for_locks() < 8 && std::chrono::steady_clock::now() < until)
        std::this_thread::yield();
    execute(*holder, "ROLLBACK");
    Counts counts;
    for (auto& waiter : waiters) {
        for (const auto& [name, n] : count(waiter.get())) counts[name] += n;
    }
    EXPECT_EQ(counts, (Counts{{"applied", 1}, {"duplicate", 7}}));
    EXPECT_EQ(effects(), 1);
}

TEST_P(Inbox, a_message_that_somebody_else_holds_is_undecided_and_the_others_do_not_wait_for_it) {
    const TransactionalInbox patient(
        {.scope = "shop/stock", .lock_wait = 200ms, .patience = 1500ms});
    auto holder = connect();
    execute(*holder, "BEGIN");
    must(patient.claim(*holder, std::vector{message("m13")}, new_claim_id()));
    auto connection = connect();
    const auto all = messages("m", 32);
    const RunReport report = patient.run(
        connection, {.fence = {}, .messages = all, .expected_offset = {}}, leave_each(all));
    EXPECT_EQ(count(report), (Counts{{"applied", 31}, {"undecided", 1}}));
    EXPECT_EQ(report.results[13].outcome, Outcome::undecided);
    EXPECT_FALSE(report.problem);
    execute(*holder, "COMMIT");
    EXPECT_EQ(count(run(patient, all)), (Counts{{"duplicate", 32}}));
}

TEST(InboxBehindPooler, transactions_of_several_clients_share_the_servers_connections) {
    InboxDatabase database(Dialect::postgres);
    ASSERT_TRUE(apply_schema(*database.connect(), {}));
    database.query("CREATE TABLE effects (message_id VARCHAR(300) NOT NULL)");
    const support::Address pooled = database.pooled();
    const TransactionalInbox inbox({.scope = "shop/stock"});
    const Fence fence{
        partition_0,
        std::get<Assigned>(must(inbox.assign(*support::connect(pooled), partition_0, "me", 0, 1s)))
            .epoch};
    std::vector<std::future<int>> clients;
    for (int client = 0; client < 8; ++client) {
        clients.push_back(std::async(std::launch::async, [&] {
            std::shared_ptr<Executor> connection = support::connect(pooled);
            int applied = 0;
            for (int batch = 0; batch < 10; ++batch) {
                std::vector<Message> messages;
                for (int i = 0; i < 8; ++i)
                    messages.push_back({.source = "orders",
                                        .id = std::to_string(batch * 8 + i),
                                        .business_key = {},
                                        .fingerprint = {},
                                        .lane = {},
                                        .next_offset = 0});
                const RunReport report = inbox.run(
                    connection, {.fence = fence, .messages = messages, .expected_offset = {}},
                    [](Executor& executor, const Message& message) -> EffectOutcome {
                        auto answer =
                            executor.run(Statement{.text = "INSERT INTO effects VALUES ($1::text)",
                                                   .parameters = {message.id}});
                        if (auto* problem = std::get_if<Problem>(&answer))
                            return std::move(*problem);
                        return Did{};
                    });
                for (const MessageResult& one : report.results) {
                    EXPECT_TRUE(one.outcome == Outcome::applied ||
                                one.outcome == Outcome::duplicate)
                        << one.reason;
                    applied += one.outcome == Outcome::applied ? 1 : 0;
                }
            }
            return applied;
        }));
    }
    int applied = 0;
    for (auto& client : clients) applied += client.get();
    EXPECT_EQ(applied, 80);
    EXPECT_EQ(database.number("SELECT COUNT(*) FROM effects"), 80);
    EXPECT_EQ(database.number("SELECT COUNT(DISTINCT message_id) FROM effects"), 80);
    EXPECT_EQ(std::get<Advanced>(must(inbox.advance_now(*support::connect(pooled), fence, 80)))
                  .next_offset,
              80);
}

TEST_P(Inbox, a_session_is_left_as_it_was_found) {
    auto connection = connect();
    const std::string settings = postgres()
                                     ? "SELECT current_setting('lock_timeout') || "
                                       "current_setting('idle_in_transaction_session_timeout') || "
                                       "current_setting('transaction_isolation')"
                                     : "SELECT CONCAT(@@SESSION.innodb_lock_wait_timeout, ' ', "
                                       "@@SESSION.idle_transaction_timeout, ' ', "
                                       "@@SESSION.tx_isolation, ' ', @@SESSION.autocommit)";
    const auto now = [&] {
        return must(connection->run(Statement{.text = settings, .parameters = {}})).rows[0][0];
    };
    const auto before = now();
    const TransactionalInbox inbox = this->inbox();
    auto all = messages("m", 3);
    auto effects = leave_each(all);
    effects[1].push_back(take("b", 1));
    inbox.run(connection, {.fence = {}, .messages = all, .expected_offset = {}}, effects);
    must(inbox.assign(*connection, partition_0, "me", {}, 100ms));
    must(inbox.advance_now(*connection, {partition_0, 1}, 5));
    EXPECT_EQ(now(), before);
    EXPECT_FALSE(connection->in_transaction());
}

TEST_P(Inbox, every_statement_uses_its_index) {
    // Enough rows that a scan would be chosen only if an index could not be used.
    const std::string number = postgres() ? "n" : "seq";
    const std::string hash = postgres() ? "sha256(int4send(n))" : "UNHEX(SHA2(seq, 256))";
    database_.query(
        "INSERT INTO message_dedup (key_hash, scope, source, message_id, status, retry_count, "
        "created_at, updated_at, expire_at,"
        " token, nonce, version) SELECT " +
        hash + ", 's', 't', " + number + ", 1, 0, '2026-01-01', '2026-01-01', '2100-01-01', 1, " +
        (postgres() ? "''::bytea, 1 FROM generate_series(1, 100000) n"
                    : "'', 1 FROM seq_1_to_100000"));
    database_.query(postgres() ? "ANALYZE message_dedup" : "ANALYZE TABLE message_dedup");
    std::string keys;
    for (int i = 0; i < 64; ++i) {
        const std::string hex =
            base::hex(key_hash({"shop/stock", "orders", "p1-" + std::to_string(i)}).view());
        keys += (i == 0 ? "" : ", ") + (postgres() ? "'\\x" + hex + "'::bytea" : "X'" + hex + "'");
    }
    const std::string force = postgres() ? "" : " FORCE INDEX (PRIMARY)";
    const std::string clock = postgres() ? "now()" : "UTC_TIMESTAMP(6)";
    for (const std::string& statement : {
             "SELECT key_hash FROM message_dedup" + force + " WHERE key_hash IN (" + keys + ")" +
                 (postgres() ? "" : " LOCK IN SHARE MODE"),
             "UPDATE message_dedup SET status = 1 WHERE key_hash = " +
                 keys.substr(0, keys.find(',')) + " AND version = 1",
             "SELECT key_hash FROM message_dedup WHERE expire_at < " + clock +
                 " AND status NOT IN (0, 4) ORDER BY expire_at LIMIT 100",
         }) {
        std::string plan;
        for (const sql::Values& row : database_.query("EXPLAIN " + statement)) {
            for (const auto& value : row) plan += value.value_or("NULL") + " ";
        }
        if (postgres()) {
            EXPECT_EQ(plan.find("Seq Scan"), std::string::npos) << plan;
        } else {
            EXPECT_EQ(plan.find(" ALL "), std::string::npos) << plan;
            EXPECT_NE(plan.find(statement.find("expire_at") != std::string::npos ? "expire_at"
                                                                                 : "PRIMARY"),
                      std::string::npos)
                << plan;
        }
    }
}

INSTANTIATE_TEST_SUITE_P(On, Inbox, testing::Values(Dialect::postgres, Dialect::mysql),
                         [](const auto& info) {
                             return info.param == Dialect::postgres ? "postgres" : "mysql";
                         });

}  // namespace
}  // namespace semel::inbox
