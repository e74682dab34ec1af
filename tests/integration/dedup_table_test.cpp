// DedupTable on real servers: held to core::decide by long random histories, and what only a
// database can do to it.
#include "inbox/dedup_table.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <map>
#include <random>
#include <stdexcept>
#include <thread>

#include "core/record_codec.hpp"
#include "core/transition.hpp"
#include "inbox/inbox.hpp"
#include "inbox/row.hpp"
#include "inbox/row_codes.hpp"
#include "inbox/schema.hpp"
#include "integration/inbox_databases.hpp"

namespace semel::inbox {
namespace {

using namespace std::chrono_literals;
using namespace core;  // NOLINT: for tests
using sql::Dialect;
using sql::Statement;
using support::InboxDatabase;

constexpr std::int64_t start_us = 1'790'000'000'000'000;

std::string bytes_of(const RecordPtr& record) {
    std::string out;
    if (record) encode_record(*record, true, out);
    return out;
}

/// All that an outcome says, to be compared.
struct Teller {
    std::string operator()(const Granted& one) const {
        return "granted " + std::to_string(static_cast<int>(one.kind)) + " " +
               std::to_string(one.token.value) + " " + std::to_string(one.attempt) + " " +
               std::to_string(one.generation) + " " + std::to_string(one.lease_end.us) + " " +
               std::to_string(one.possible_second_payment) + " " + std::to_string(one.created.us);
    }
    std::string operator()(const InFlight& one) const {
        return "in flight " + one.owner.id + " " + std::to_string(one.token.value) + " " +
               std::to_string(one.remaining.count());
    }
    std::string operator()(const NotDue& one) const {
        return "not due " + std::to_string(one.remaining.count()) +
               std::to_string(one.scheduled_copy);
    }
    std::string operator()(const Replay& one) const { return "replay " + bytes_of(one.record); }
    std::string operator()(const Mismatch& one) const {
        return "mismatch " + std::to_string(static_cast<int>(one.status));
    }
    std::string operator()(const UnknownOutcome& one) const {
        return "unknown " + bytes_of(one.record);
    }
    std::string operator()(const Exhausted& one) const {
        return "exhausted " + bytes_of(one.record);
    }
    std::string operator()(const Late&) const { return "late"; }
    std::string operator()(const Applied& one) const { return "applied " + bytes_of(one.record); }
    std::string operator()(const Fenced& one) const { return "fenced " + bytes_of(one.record); }
    std::string operator()(const Found& one) const { return "found " + bytes_of(one.record); }
    std::string operator()(const auto&) const { return "no outcome of a record"; }
};
std::string told(const StoreOutcome& outcome) { return std::visit(Teller{}, outcome); }

Fingerprint print(std::string_view body) {
    return {.raw = base::sha256(body), .canonical = {}, .fields = {}};
}

Nonce nonce(std::uint8_t n) {
    Nonce out;
    out.bytes.fill(n);
    return out;
}

Acquire acquire(std::uint8_t owner, std::string_view body = "body") {
    Acquire op;
    op.fingerprint = print(body);
    op.owner = {"owner-" + std::to_string(owner), ""};
    op.nonce = nonce(owner);
    op.not_after = {std::numeric_limits<std::int64_t>::max()};
    op.policy.kind = IntentKind::message;
    op.policy.retention_completed = 7h;
    op.policy.retention_dead = 20h;
    return op;
}

class Dedup : public testing::TestWithParam<Dialect> {
  protected:
    Dedup() : database_(GetParam()), connection_(database_.connect()) {
        auto made = apply_schema(*connection_, {});
        if (!made) throw std::runtime_error(made.error().detail);
    }
    [[nodiscard]] DedupTable table() const {
        return DedupTable(
            {.scope = "group/orders", .place = {}, .time = [this] { return StoreTime{now_}; }});
    }
    static StoreOutcome one(const DedupTable& table, Executor& executor, const std::string& id,
                            Operation operation) {
        auto results = table.apply(executor, {{.source = "orders",
                                               .id = id,
                                               .operation = std::move(operation),
                                               .business_key = "order 7"}});
        if (!results[0]) throw std::runtime_error(results[0].error().detail);
        return std::move(results[0]->outcome);
    }
    [[nodiscard]] bool postgres() const { return database_.postgres(); }
    /// Locks one row. By its key: MySQL locks all that it looks at.
    [[nodiscard]] std::string locking(const std::string& id) const {
        const std::string hex = base::hex(key_hash({"group/orders", "orders", id}).view());
        return "UPDATE message_dedup SET business_key = 'held' WHERE key_hash = " +
               (postgres() ? "'\\x" + hex + "'" : "X'" + hex + "'");
    }
    DedupRow row(const std::string& id) {
        auto rows = database_.query("SELECT " + row_columns(GetParam()) +
                                    " FROM message_dedup WHERE message_id = '" + id + "'");
        return rows.empty() ? DedupRow{} : row_of_values(rows[0]);
    }

    InboxDatabase database_;
    std::shared_ptr<Executor> connection_;
    std::atomic<std::int64_t> now_{start_us};
};

/// A world of a few messages, whose next step is drawn.
class World {
  public:
    explicit World(std::uint32_t seed) : random_(seed) {}
    std::size_t below(std::size_t n) {
        return std::uniform_int_distribution<std::size_t>(0, n - 1)(random_);
    }
    bool maybe(int percent) { return below(100) < static_cast<std::size_t>(percent); }

    Operation next(const RecordPtr& record) {
        // Mostly the current owner's words, now and then somebody else's.
        FencingToken token = record ? record->token : FencingToken{7};
        Nonce mine = record ? record->nonce : nonce(9);
        if (maybe(15)) --token.value;
        if (maybe(10)) mine = nonce(8);
        const auto owner = static_cast<std::uint8_t>(1 + below(3));
        // What ends a message for hours is rarer than what goes on.
        std::size_t step = below(18);
        if ((step == 3 || step == 6 || step == 7) && maybe(70)) step = 5;
        switch (step) {
            case 0:
                return Start{token, mine};
            case 1:
                return Renew{token, mine, 10s};
            case 2:
                return Release{token, mine};
            case 3:
                return Complete{token,
                                mine,
                                Answer{.http_status = 200,
                                       .body = std::make_shared<const std::string>("ok\0\xff", 4),
                                       .body_bytes = 4},
                                {},
                                {}};
            case 4:
                return Fail{.token = token,
                            .nonce = mine,
                            .certainty = Certainty::not_processed,
                            .failure = {"refused", "not\nnow \xff", 503},
                            .answer = {},
                            .usage = {},
                            .delay = milliseconds{below(3) * 20000}};
            case 5:
                return Fail{.token = token,
                            .nonce = mine,
                            .certainty = Certainty::unknown,
                            .failure = {"reset", std::string(2000, 'x'), 0},
                            .answer = {},
                            .usage = {},
                            .delay = 5s,
                            .scheduled_copy = true};
            case 6:
                return Fail{.token = token,
                            .nonce = mine,
                            .certainty = Certainty::refused_for_good,
                            .failure = {"bad", "", 400},
                            .answer = Answer{.http_status = 400},
                            .usage = {}};
            case 7:
                return maybe(50) ? Operation(Cancel{token, mine, {}})
                                 : Operation(Resolve{
                                       token, Resolve::Decision::completed, {}, {}, "seen"});
            case 8:
                return Resolve{token,
                               maybe(50) ? Resolve::Decision::rerun : Resolve::Decision::failed,
                               {},
                               {},
                               "again"};
            case 9:
                return maybe(50)
                           ? Operation(Reopen{record ? record->generation : 1, print("other")})
                           : Operation(LetterPublished{token});
            case 10:
                return maybe(50) ? Operation(Settle{token}) : Operation(Get{});
            default: {
                Acquire op = acquire(owner, maybe(8) ? "another body" : "body");
                op.policy.on_unknown = maybe(50) ? OnUnknown::rerun : OnUnknown::hold;
                op.policy.max_attempts = maybe(50) ? 2 : 0;
                op.policy.max_crashes = maybe(50) ? 1 : 0;
                op.starts_call = maybe(50);
                op.charge_crash = maybe(50);
                if (maybe(5)) op.not_after = {0};
                return op;
            }
        }
    }

  private:
    std::mt19937 random_;
};

TEST_P(Dedup, random_histories_end_as_decide_says_and_the_columns_agree_with_the_record) {
    const std::uint32_t seed = 20261130;
    SCOPED_TRACE("seed " + std::to_string(seed));
    World world(seed);
    std::map<std::string, RecordPtr> model;
    const DedupTable table = this->table();
    std::map<std::size_t, int> seen;
    for (int step = 0; step < 700; ++step) {
        if (world.maybe(20))
            now_ += std::chrono::microseconds(world.maybe(10)   ? 8h
                                              : world.maybe(50) ? 11s
                                                                : 1ms)
                        .count();
        const StoreTime at{now_};
        std::vector<DedupItem> items;
        std::vector<std::string> expected;
        for (std::size_t n = 1 + world.below(4); n > 0; --n) {
            const std::string id = "m" + std::to_string(world.below(5));
            Operation operation = world.next(model[id]);
            items.push_back(
                {.source = "orders", .id = id, .operation = operation, .business_key = "order 7"});
            Transition transition = decide(model[id], std::move(operation), at);
            if (transition.write != Transition::Write::none) model[id] = transition.record;
            expected.push_back(std::visit([](auto& outcome) { return told(StoreOutcome(outcome)); },
                                          transition.outcome));
        }
        auto results = table.apply(*connection_, items);
        for (std::size_t i = 0; i < items.size(); ++i) {
            ASSERT_TRUE(results[i]) << results[i].error().detail;
            ASSERT_EQ(told(results[i]->outcome), expected[i])
                << "step " << step << " operation " << items[i].operation.index();
            ++seen[results[i]->outcome.index()];
        }
    }
    for (std::size_t outcome = 0; outcome < 11; ++outcome)
        EXPECT_GT(seen[outcome], 0) << "no history led to outcome " << outcome;
    for (const auto& [id, record] : model) {
        const DedupRow found = row(id);
        ASSERT_TRUE(found.record) << id;
        EXPECT_EQ(*found.record, bytes_of(record));
        EXPECT_EQ(found.status, code_of(record->status));
        EXPECT_EQ(found.token, record->token.value);
        EXPECT_EQ(found.retry_count, record->attempt - 1);
        EXPECT_EQ(found.created, record->created);
        EXPECT_EQ(found.expire.value_or(StoreTime{}), record->expires);
        EXPECT_EQ(!found.expire, undecided(*record));
        EXPECT_EQ(found.lease_until.value_or(StoreTime{}),
                  record->status == Status::processing ? record->lease_end
                  : record->status == Status::failed   ? record->due
                                                       : StoreTime{});
        EXPECT_EQ(found.error_message.has_value(), !record->failure.code.empty());
    }
}

TEST_P(Dedup, the_articles_columns_can_be_read_by_people) {
    const DedupTable table = this->table();
    const auto granted = std::get<Granted>(one(table, *connection_, "m", acquire(1)));
    EXPECT_EQ(
        database_.one("SELECT status FROM message_dedup WHERE message_id = 'm' AND business_key = "
                      "'order 7' AND scope = 'group/orders' AND source = 'orders'"),
        "0");
    one(table, *connection_, "m",
        Fail{.token = granted.token,
             .nonce = nonce(1),
             .certainty = Certainty::unknown,
             .failure = {"upstream-reset", "connection reset", 0},
             .answer = {},
             .usage = {}});
    EXPECT_EQ(database_.one("SELECT error_message FROM message_dedup WHERE message_id = 'm' AND "
                            "status = 2 AND retry_count = 0 AND expire_at IS NULL"),
              "upstream-reset: connection reset");
    const auto retried = std::get<Granted>(one(table, *connection_, "m", acquire(2)));
    one(table, *connection_, "m",
        Complete{retried.token, nonce(2), Answer{.http_status = 200}, {}, {}});
    EXPECT_EQ(database_.one("SELECT retry_count FROM message_dedup WHERE message_id = 'm' AND "
                            "status = 1 AND error_message IS NULL AND expire_at > updated_at"),
              "1");
    const std::string utc =
        postgres() ? "to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US')"
                   : "created_at";
    EXPECT_EQ(database_.one("SELECT " + utc + " FROM message_dedup"), "2026-09-21 14:13:20.000000");
}

TEST_P(Dedup, rows_of_the_inbox_and_rows_changed_by_hand_are_judged_by_their_columns) {
    const TransactionalInbox inbox({.scope = "group/orders"});
    const std::vector<Message> done{{.source = "orders",
                                     .id = "done",
                                     .business_key = {},
                                     .fingerprint = {},
                                     .lane = {},
                                     .next_offset = 0}};
    auto connection = database_.connect();
    now_ = std::stoll(database_.one(
        postgres() ? "SELECT (extract(epoch from clock_timestamp()) * 1000000)::bigint"
                   : "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"));
    inbox.run(connection, {.fence = {}, .messages = done, .expected_offset = {}},
              std::vector<std::vector<Effect>>(1));
    const DedupTable table = this->table();
    EXPECT_TRUE(
        std::holds_alternative<Replay>(one(table, *connection_, "done", acquire(1, "any body"))));

    const auto granted = std::get<Granted>(one(table, *connection_, "m", acquire(1)));
    database_.query(
        "UPDATE message_dedup SET status = 4, lease_until = NULL WHERE message_id = 'm'");
    EXPECT_TRUE(std::holds_alternative<UnknownOutcome>(one(table, *connection_, "m", acquire(2))));
    database_.query("UPDATE message_dedup SET status = 2 WHERE message_id = 'm'");
    const auto retried = std::get<Granted>(one(table, *connection_, "m", acquire(2)));
    EXPECT_EQ(retried.kind, Granted::Kind::retry);
    EXPECT_GT(retried.token, granted.token);
    database_.query("UPDATE message_dedup SET status = 1 WHERE message_id = 'm'");
    EXPECT_TRUE(std::holds_alternative<Replay>(one(table, *connection_, "m", acquire(3))));
    database_.query(std::string("UPDATE message_dedup SET record = ") +
                    (postgres() ? "'\\x00ff'::bytea" : "X'00FF'") + " WHERE message_id = 'm'");
    auto results = table.apply(
        *connection_, {{.source = "orders", .id = "m", .operation = Get{}, .business_key = {}},
                       {.source = "orders", .id = "n", .operation = Get{}, .business_key = {}}});
    EXPECT_EQ(results[0].error().code, base::ErrorCode::store_corrupt);
    EXPECT_TRUE(results[1]) << "the others go on";
    // The inbox in turn leaves alone what is undecided here.
    one(table, *connection_, "mine", acquire(1));
    const std::vector<Message> mine{{.source = "orders",
                                     .id = "mine",
                                     .business_key = {},
                                     .fingerprint = {},
                                     .lane = {},
                                     .next_offset = 0}};
    EXPECT_EQ(inbox
                  .run(connection, {.fence = {}, .messages = mine, .expected_offset = {}},
                       std::vector<std::vector<Effect>>(1))
                  .results[0]
                  .outcome,
              Outcome::undecided);
}

TEST_P(Dedup, of_many_clients_one_is_granted_each_message) {
    std::vector<std::future<int>> clients;
    const DedupTable table({.scope = "group/orders", .place = {}});
    for (std::uint8_t client = 1; client <= 6; ++client) {
        clients.push_back(std::async(std::launch::async, [&, client] {
            auto connection = database_.connect();
            std::vector<DedupItem> items;
            for (int i = 0; i < 40; ++i) {
                const int n = client % 2 == 0 ? i : 39 - i;
                items.push_back({.source = "orders",
                                 .id = "m" + std::to_string(n),
                                 .operation = acquire(client),
                                 .business_key = {}});
            }
            int granted = 0;
            for (const auto& result : table.apply(*connection, items)) {
                if (!result) throw std::runtime_error(result.error().detail);
                granted += std::holds_alternative<Granted>(result->outcome) ? 1 : 0;
            }
            return granted;
        }));
    }
    int granted = 0;
    for (auto& client : clients) granted += client.get();
    EXPECT_EQ(granted, 40);
    // The database's clock gave these leases; nobody else may write.
    auto results = table.apply(
        *connection_,
        {{.source = "orders", .id = "m0", .operation = acquire(9), .business_key = {}}});
    EXPECT_TRUE(std::holds_alternative<InFlight>(results[0]->outcome));
}

TEST_P(Dedup, a_row_that_somebody_else_has_locked_delays_its_own_item_only) {
    const DedupTable table(
        {.scope = "group/orders", .place = {}, .lock_wait = 100ms, .patience = 600ms});
    for (const char* id : {"m0", "m1", "m2"}) one(table, *connection_, id, acquire(1));
    auto holder = database_.connect();
    for (const std::string& text : {std::string("BEGIN"), locking("m1")})
        ASSERT_TRUE(std::holds_alternative<sql::ResultRows>(
            holder->run(Statement{.text = text, .parameters = {}})));
    std::vector<DedupItem> items;
    for (const char* id : {"m0", "m1", "m2"}) {
        const DedupRow found = row(id);
        items.push_back({.source = "orders",
                         .id = id,
                         .operation = Complete{{found.token}, nonce(1), Answer{}, {}, {}},
                         .business_key = {}});
    }
    auto results = table.apply(*connection_, items);
    EXPECT_TRUE(results[0]);
    EXPECT_TRUE(results[2]);
    ASSERT_FALSE(results[1]);
    EXPECT_EQ(results[1].error().code, base::ErrorCode::store_unavailable);
    EXPECT_EQ(results[1].error().applied, base::Applied::no);
    ASSERT_TRUE(std::holds_alternative<sql::ResultRows>(
        holder->run(Statement{.text = "ROLLBACK", .parameters = {}})));
    EXPECT_TRUE(table.apply(*connection_, {items[1]})[0]);
    // Nor does a claim that is not committed yet hold more than itself.
    ASSERT_TRUE(std::holds_alternative<sql::ResultRows>(
        holder->run(Statement{.text = "BEGIN", .parameters = {}})));
    const TransactionalInbox inbox({.scope = "group/orders"});
    const std::vector<Message> claimed{{.source = "orders",
                                        .id = "n0",
                                        .business_key = {},
                                        .fingerprint = {},
                                        .lane = {},
                                        .next_offset = 0}};
    ASSERT_TRUE(
        std::holds_alternative<std::vector<Claim>>(inbox.claim(*holder, claimed, new_claim_id())));
    results = table.apply(
        *connection_,
        {{.source = "orders", .id = "n0", .operation = acquire(1), .business_key = {}},
         {.source = "orders", .id = "n1", .operation = acquire(1), .business_key = {}}});
    EXPECT_FALSE(results[0]);
    EXPECT_TRUE(results[1]);
    ASSERT_TRUE(std::holds_alternative<sql::ResultRows>(
        holder->run(Statement{.text = "COMMIT", .parameters = {}})));
    EXPECT_TRUE(std::holds_alternative<Replay>(one(table, *connection_, "n0", acquire(1))));
}

TEST_P(Dedup, purge_removes_in_small_steps_what_has_expired_and_never_what_is_undecided) {
    const DedupTable table = this->table();
    std::vector<DedupItem> grants, ends;
    for (int i = 0; i < 30; ++i)
        grants.push_back({.source = "orders",
                          .id = "m" + std::to_string(i),
                          .operation = acquire(1),
                          .business_key = {}});
    const auto granted = table.apply(*connection_, grants);
    for (std::size_t i = 0; i < 20; ++i) {
        const FencingToken token = std::get<Granted>(granted[i]->outcome).token;
        if (i < 15)
            ends.push_back({.source = "orders",
                            .id = grants[i].id,
                            .operation = Complete{token, nonce(1), Answer{}, {}, {}},
                            .business_key = {}});
        else
            ends.push_back({.source = "orders",
                            .id = grants[i].id,
                            .operation = Fail{.token = token,
                                              .nonce = nonce(1),
                                              .failure = {},
                                              .answer = {},
                                              .usage = {}},
                            .business_key = {}});
    }
    for (const auto& result : table.apply(*connection_, ends)) ASSERT_TRUE(result);
    const auto purge = [&](std::size_t limit) {
        auto purged = table.purge(*connection_, limit);
        if (!purged) throw std::runtime_error(purged.error().detail);
        return *purged;
    };
    EXPECT_EQ(purge(100), 0U);
    now_ += std::chrono::microseconds(24h * 365).count();
    auto holder = database_.connect();
    for (const std::string& text : {std::string("BEGIN"), locking("m3")})
        ASSERT_TRUE(std::holds_alternative<sql::ResultRows>(
            holder->run(Statement{.text = text, .parameters = {}})));
    EXPECT_EQ(purge(10), 10U);
    EXPECT_EQ(purge(10), 4U) << "one is locked";
    ASSERT_TRUE(std::holds_alternative<sql::ResultRows>(
        holder->run(Statement{.text = "ROLLBACK", .parameters = {}})));
    EXPECT_EQ(purge(10), 1U);
    EXPECT_EQ(purge(10), 0U);
    EXPECT_EQ(database_.number("SELECT COUNT(*) FROM message_dedup"), 15);
}

TEST_P(Dedup, wrong_use_is_refused_in_words) {
    const DedupTable table = this->table();
    auto results = table.apply(
        *connection_, {{.source = "orders", .id = "", .operation = Get{}, .business_key = {}},
                       {.source = "orders", .id = "m", .operation = Get{}, .business_key = {}}});
    EXPECT_EQ(results[0].error().code, base::ErrorCode::invalid_argument);
    EXPECT_TRUE(results[1]);
    ASSERT_TRUE(std::holds_alternative<sql::ResultRows>(
        connection_->run(Statement{.text = "BEGIN", .parameters = {}})));
    EXPECT_NE(table.purge(*connection_, 1).error().detail.find("inside one"), std::string::npos);
    EXPECT_EQ(table
                  .apply(*connection_,
                         {{.source = "s", .id = "m", .operation = Get{}, .business_key = {}}})[0]
                  .error()
                  .code,
              base::ErrorCode::invalid_argument);
}

TEST_P(Dedup, whatever_the_administrators_defaults_are) {
    database_.set_default_isolation("serializable");
    if (!postgres()) database_.set_sql_mode("");
    auto connection = database_.connect();
    if (!postgres())
        ASSERT_TRUE(std::holds_alternative<sql::ResultRows>(
            connection->run(Statement{.text = "SET autocommit = 0", .parameters = {}})));
    const DedupTable table = this->table();
    const auto granted =
        std::get<Granted>(one(table, *connection, std::string(300, 'x'), acquire(1)));
    EXPECT_FALSE(connection->in_transaction());
    EXPECT_TRUE(
        std::holds_alternative<Applied>(one(table, *connection, std::string(300, 'x'),
                                            Complete{granted.token, nonce(1), Answer{}, {}, {}})));
    EXPECT_TRUE(std::holds_alternative<Replay>(
        one(table, *connection_, std::string(300, 'x'), acquire(2))));
    database_.set_default_isolation(postgres() ? "read committed" : "REPEATABLE READ");
    if (!postgres()) database_.set_sql_mode("STRICT_TRANS_TABLES");
}

INSTANTIATE_TEST_SUITE_P(On, Dedup, testing::Values(Dialect::postgres, Dialect::mysql),
                         [](const auto& info) {
                             return info.param == Dialect::postgres ? "postgres" : "mysql";
                         });

}  // namespace
}  // namespace semel::inbox
