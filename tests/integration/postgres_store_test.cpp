// The PostgreSQL store on a real server: its statements and plans, batches of which one item is at
// fault, isolation levels, languages, a pooler, and its tables.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <future>
#include <set>
#include <thread>

#include "integration/store_answers.hpp"
#include "stores/postgres/executor.hpp"
#include "stores/postgres/postgres_store.hpp"
#include "stores/postgres/session.hpp"
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
using testing::HasSubstr;
using testing::Not;

const PostgresServer& server() {
    static const PostgresServer one({.settings = {"deadlock_timeout = 50ms"}});
    return one;
}

std::string bytea(const StoredKey& key) { return "'\\x" + base::hex(key.view()) + "'::bytea"; }

class PostgresStore : public testing::Test {
  protected:
    PostgresStore() : schema(new_schema()) {}
    ~PostgresStore() override {
        store.reset();
        server().query("DROP SCHEMA " + schema + " CASCADE");
    }
    static std::string new_schema() {
        static int count = 0;
        return "s" + std::to_string(++count);
    }
    void open(unsigned connections = 4, const std::string& url = server().url()) {
        auto made = stores::open_postgres_store(
            {.url = url, .schema = schema, .connections = connections}, &report);
        if (!made) throw std::runtime_error(made.error().detail);
        store = std::move(*made);
    }
    [[nodiscard]] std::string table() const { return schema + ".semel_records"; }
    FencingToken grant(std::uint64_t n) {
        return as<Granted>(ask(*store, key_of(n), acquire_of(n))).token;
    }

    const std::string schema;
    PostgresReport report;
    std::unique_ptr<Store> store;
};

// ---------------------------------------------------------------- statements

TEST_F(PostgresStore, every_statement_finds_its_rows_by_an_index_and_locks_in_the_order_given) {
    open(1);
    for (const char* sql :
         {"INSERT INTO @.semel_records SELECT sha256(i::text::bytea), i, 1 + i % 2, i, '\\x01', i, "
          "i, "
          "i, CASE WHEN i % 20 = 0 THEN 0 ELSE i END, 1, '\\x', NULL, NULL FROM "
          "generate_series(1, 20000) AS i",
          "INSERT INTO @.semel_chunks SELECT sha256(i::text::bytea), i, 0, '\\x', i FROM "
          "generate_series(1, 5000) AS i",
          "INSERT INTO @.semel_conversations SELECT sha256(i::text::bytea), i, i, 1 FROM "
          "generate_series(1, 5000) AS i",
          "INSERT INTO @.semel_turns SELECT sha256(i::text::bytea), 1, '\\x', '\\x', '\\x', i, "
          "false FROM generate_series(1, 5000) AS i",
          "INSERT INTO @.semel_values SELECT i::text::bytea, '\\x' FROM generate_series(1, 5000) "
          "AS i",
          "INSERT INTO @.semel_parking SELECT sha256(i::text::bytea), '\\x' FROM "
          "generate_series(1, 5000) AS i",
          "INSERT INTO @.semel_parked SELECT sha256((i % 20)::text::bytea), i, '\\x' FROM "
          "generate_series(1, 20000) AS i"}) {
        std::string text = sql;
        text.replace(text.find('@'), 1, schema);
        const auto answer = server().query(text);
        ASSERT_TRUE(answer.ok) << answer.message;
    }
    server().ask("ANALYZE");
    const stores::postgres::Statements statements(schema);
    std::set<const stores::postgres::Text*> seen;
    // Also as a server would plan it that nobody has told to prefer indexes: rows suffice for that.
    for (const bool told : {true, false}) {
        PostgresClient client(server().url());
        client.query("SET plan_cache_mode = force_generic_plan");
        if (told) {
            client.query(
                "SET enable_seqscan = off; SET enable_hashjoin = off; "
                "SET enable_mergejoin = off; SET enable_bitmapscan = off");
        }
        for (const auto& step : stores::postgres::trial_of(statements)) {
            const std::string name = step.text->name;
            const auto prepared = client.query("PREPARE " + name + " AS " + step.text->sql);
            if (prepared.sqlstate == "42P05") continue;
            ASSERT_TRUE(prepared.ok) << name << ": " << prepared.message;
            seen.insert(step.text);
            std::string call = "EXPLAIN EXECUTE " + name;
            for (std::size_t i = 0; i < step.parameters.size(); ++i)
                call += i == 0 ? "(NULL" : ", NULL";
            if (!step.parameters.empty()) call += ")";
            const auto plan = client.query(call);
            ASSERT_TRUE(plan.ok) << name << ": " << plan.message;
            std::string text;
            for (const auto& row : plan.rows) text += row.front().value_or("") + "\n";
            EXPECT_THAT(text, Not(HasSubstr("Seq Scan on semel_records"))) << name << "\n" << text;
            if (!told) continue;
            EXPECT_THAT(text, Not(HasSubstr("Seq Scan on semel_"))) << name << "\n" << text;
            EXPECT_THAT(text, Not(HasSubstr("Hash Join"))) << name << "\n" << text;
            EXPECT_THAT(text, Not(HasSubstr("Merge Join"))) << name << "\n" << text;
        }
    }
    EXPECT_EQ(seen.size(), stores::postgres::statement_count);
}

TEST_F(PostgresStore, ids_and_texts_are_bytes_whatever_they_hold) {
    open();
    const std::string odd("a\0b'\"\\x41{},NULL\xff\xfe", 19);
    StoredKey zeros;
    StoredKey ones;
    ones.bytes.fill(0xff);
    std::uint64_t n = 0;
    for (const StoredKey& key : {zeros, ones}) {
        Acquire claim = acquire_of(++n);
        claim.label = odd;
        claim.owner.id = odd;
        const auto token = as<Granted>(ask(*store, key, claim)).token;
        Complete complete = complete_of(n, token, 0);
        complete.answer.body = std::make_shared<const std::string>(odd);
        complete.append = Append{.conversation = ones,
                                 .request_id = odd + std::to_string(n),
                                 .user_content = odd,
                                 .answer_content = odd};
        as<Applied>(ask(*store, key, complete));
        const auto replay = as<Replay>(ask(*store, key, acquire_of(n)));
        ASSERT_TRUE(replay.record);
        EXPECT_EQ(*replay.record->answer->body, odd);
        EXPECT_EQ(replay.record->label, odd);
    }
    const auto turns = as<TurnsFound>(ask(*store, ones, GetTurns{})).turns;
    ASSERT_EQ(turns.size(), 2U);
    EXPECT_EQ(turns[1].request_id, odd + "2");
    EXPECT_EQ(turns[1].user_content, odd);
    EXPECT_EQ(turns[1].answer_content, odd);
    EXPECT_TRUE(as<ConversationFound>(ask(*store, ones, GetConversation{odd + "1"})).holds_id);
    EXPECT_EQ(as<Value>(ask(*store, {}, ClaimValue{odd, odd})).value, odd);
    EXPECT_EQ(as<Value>(ask(*store, {}, ClaimValue{odd, "other"})).value, odd);
    const auto page = store->scan({}, "", 10);
    ASSERT_TRUE(page);
    ASSERT_EQ(page->records.size(), 2U);
    EXPECT_EQ(page->records[0].first, zeros);
    EXPECT_EQ(page->records[1].first, ones);
}

TEST_F(PostgresStore, a_purged_and_reborn_row_is_never_taken_for_the_one_that_was_seen) {
    open();
    const auto statements = std::make_shared<const stores::postgres::Statements>(schema);
    auto targets = stores::postgres::targets_of(server().url());
    auto opened = stores::postgres::Connection::open(targets->front(), steady_clock::now() + 5s);
    auto session = stores::postgres::make_session(
        std::move(std::get<std::unique_ptr<stores::postgres::Connection>>(opened)), statements);
    const sql::Fresh fresh{.key = key_of(1),
                           .nonce = nonce_of(1),
                           .lease = 10s,
                           .keep_ms = 1,
                           .not_after = {std::int64_t{1} << 52},
                           .head = "head"};
    const auto versions = [&](StoreTime time) {
        auto inserted = session->insert(std::span(&fresh, 1), {.time = time});
        EXPECT_TRUE(std::holds_alternative<sql::Inserted>(std::get<0>(inserted).front()));
        const sql::Completion done{.key = fresh.key,
                                   .token = {static_cast<std::uint64_t>(time.us)},
                                   .nonce = fresh.nonce,
                                   .done = "done",
                                   .body = std::nullopt,
                                   .append = std::nullopt};
        auto completed = session->complete(std::span(&done, 1), {.time = time});
        return std::get<0>(completed).front()->version;
    };
    const std::int64_t first = versions({1'000'000});
    auto gone = session->purge(10, {.time = StoreTime{2'000'000}});
    EXPECT_EQ(std::get<0>(gone).records, 1U);
    const std::int64_t second = versions({3'000'000});
    EXPECT_GT(second, first);
    const sql::Change late{.version_seen = first,
                           .row = {.key = fresh.key, .version = first + 1, .head = "zombie"},
                           .not_after = {std::int64_t{1} << 52},
                           .append = std::nullopt,
                           .at = {}};
    auto replaced = session->replace(std::span(&late, 1), {});
    EXPECT_FALSE(std::get<0>(replaced).front());
}

// ---------------------------------------------------------------- parked messages

TEST_F(PostgresStore, parking_waits_for_a_take_over_and_then_sees_it) {
    open();
    const StoredKey list = key_of(1);
    as<ParkingOpened>(ask(*store, list, OpenParking{nonce_of(1)}));
    as<Parked>(ask(*store, list, Park{nonce_of(1), 1, "one"}));
    PostgresClient other(server().url());
    other.query("BEGIN");
    // Of nonce_of(2), by a program that has not committed yet.
    ASSERT_TRUE(other
                    .query("UPDATE " + schema + ".semel_parking SET fence = '\\x" +
                           base::hex(view_of(nonce_of(2))) + "'")
                    .ok);
    std::vector<Item> items;
    for (std::uint64_t place = 2; place < 20; ++place)
        items.push_back({list, Park{nonce_of(1), place, "late"}});
    items.push_back({key_of(2), OpenParking{nonce_of(3)}});
    auto answers = all_at_once(*store, std::move(items));
    EXPECT_TRUE(is<ParkingOpened>(answers.back().get()));
    EXPECT_EQ(answers.front().wait_for(0s), std::future_status::timeout);
    other.query("COMMIT");
    answers.pop_back();
    for (auto& answer : answers) EXPECT_TRUE(is<ParkingLost>(answer.get()));
    EXPECT_EQ(as<ParkedFound>(ask(*store, list, GetParked{})).messages.size(), 1U);
    as<Parked>(ask(*store, list, Park{nonce_of(2), 2, "mine"}));
}

TEST_F(PostgresStore, a_take_over_waits_until_what_is_being_parked_is_committed) {
    open();
    const StoredKey list = key_of(1);
    as<ParkingOpened>(ask(*store, list, OpenParking{nonce_of(1)}));
    // Another program's statement that parks, as park.sql makes it, and that has not committed yet.
    const stores::postgres::Statements statements(schema);
    PostgresClient other(server().url());
    other.query("BEGIN");
    ASSERT_TRUE(other.query("PREPARE park AS " + statements[stores::postgres::Id::park].sql).ok);
    const auto array = [](std::string_view bytes) {
        return "ARRAY['\\x" + base::hex(bytes) + "'::bytea]";
    };
    const auto parked =
        other.query("EXECUTE park(" + array(list.view()) + ", " + array(view_of(nonce_of(1))) +
                    ", ARRAY[7], " + array("seven") + ")");
    ASSERT_TRUE(parked.ok) << parked.message;
    ASSERT_EQ(parked.rows.size(), 1U);
    std::vector<Item> items;
    items.push_back({list, OpenParking{nonce_of(2)}});
    items.push_back({key_of(2), OpenParking{nonce_of(3)}});
    auto answers = all_at_once(*store, std::move(items));
    EXPECT_TRUE(is<ParkingOpened>(answers.back().get()));
    EXPECT_EQ(answers.front().wait_for(50ms), std::future_status::timeout);
    other.query("COMMIT");
    EXPECT_TRUE(is<ParkingOpened>(answers.front().get()));
    const auto found = as<ParkedFound>(ask(*store, list, GetParked{})).messages;
    ASSERT_EQ(found.size(), 1U);
    EXPECT_EQ(found[0].bytes, "seven");
}

TEST_F(PostgresStore, a_take_over_from_an_owner_who_is_it_no_longer_fences_off_nobody) {
    open();
    const StoredKey list = key_of(1);
    as<ParkingOpened>(ask(*store, list, OpenParking{nonce_of(1)}));
    as<ParkingOpened>(ask(*store, list, OpenParking{nonce_of(2)}));
    // Statements of one who saw nobody, or the first owner, and that are executed only now.
    const stores::postgres::Statements statements(schema);
    PostgresClient other(server().url());
    ASSERT_TRUE(
        other.query("PREPARE take AS " + statements[stores::postgres::Id::parking_open].sql).ok);
    const auto literal = [](const Nonce& nonce) {
        return "'\\x" + base::hex(view_of(nonce)) + "'";
    };
    for (const std::string& seen : {std::string("NULL"), literal(nonce_of(1))}) {
        const auto late = other.query("EXECUTE take(" + bytea(list) + ", " + seen + ", " +
                                      literal(nonce_of(3)) + ")");
        ASSERT_TRUE(late.ok) << late.message;
        EXPECT_TRUE(late.rows.empty());
    }
    as<Parked>(ask(*store, list, Park{nonce_of(2), 1, "one"}));
    as<ParkingLost>(ask(*store, list, Park{nonce_of(3), 2, "two"}));
}

TEST_F(PostgresStore, messages_of_a_megabyte_are_parked_beside_small_ones_in_several_lists) {
    open();
    expect_many_messages_to_be_parked(*store);
}

// ---------------------------------------------------------------- one item at fault

/// How long 64 grants take one after the other that nobody disturbs, and what 63 of them take
/// beside one at fault: the statement they share is rolled back, and then they are asked one by
/// one.
class OneAtFault : public PostgresStore {
  protected:
    std::vector<Item> grants(std::uint64_t from) const {
        std::vector<Item> items;
        for (std::uint64_t i = 0; i < 64; ++i)
            items.push_back({key_of(from + i), acquire_of(from + i)});
        return items;
    }
    /// All but the one at fault must be there within 200 ms more than that; the machine may be
    /// busy.
    template <class T>
    void expect_others_in_time(std::vector<std::future<base::Result<Decided>>>& answers,
                               std::size_t at_fault, steady_clock::time_point sent,
                               steady_clock::duration undisturbed) {
        for (std::size_t i = 0; i < answers.size(); ++i) {
            if (i == at_fault) continue;
            ASSERT_EQ(answers[i].wait_until(sent + 2 * undisturbed + 200ms),
                      std::future_status::ready)
                << "item " << i;
            EXPECT_TRUE(is<T>(answers[i].get())) << i;
        }
    }
    steady_clock::duration undisturbed() {
        auto one_by_one = stores::open_postgres_store(
            {.url = server().url(), .schema = schema, .connections = 1, .batch_max = 1});
        if (!one_by_one) throw std::runtime_error(one_by_one.error().detail);
        const auto begin = steady_clock::now();
        for (auto& answer : all_at_once(**one_by_one, grants(1000)))
            EXPECT_TRUE(is<Granted>(answer.get()));
        return steady_clock::now() - begin;
    }
};

TEST_F(OneAtFault, a_row_that_another_transaction_holds_keeps_only_its_own_item_waiting) {
    open();
    const auto usual = undisturbed();
    PostgresClient holder(server().url());
    holder.query("BEGIN");
    // Neither committed nor rolled back yet: an insert of this key must wait for that.
    ASSERT_TRUE(holder
                    .query("INSERT INTO " + table() + " VALUES (" + bytea(key_of(2000 + 31)) +
                           ", 1, 1, 1, '\\x01', 1, 1, 0, 0, 1, '\\x', NULL, NULL)")
                    .ok);
    const auto sent = steady_clock::now();
    auto answers = all_at_once(*store, grants(2000));
    expect_others_in_time<Granted>(answers, 31, sent, usual);
    EXPECT_EQ(answers[31].wait_for(0s), std::future_status::timeout);
    holder.query("ROLLBACK");
    EXPECT_TRUE(is<Granted>(answers[31].get()));
}

TEST_F(OneAtFault, a_row_that_the_server_refuses_fails_alone) {
    open();
    const auto usual = undisturbed();
    std::vector<FencingToken> tokens;
    for (std::uint64_t i = 0; i < 64; ++i) tokens.push_back(grant(3000 + i));
    std::vector<Item> items;
    for (std::uint64_t i = 0; i < 64; ++i) {
        Complete complete = complete_of(3000 + i, tokens[i], 500);
        // Beyond what an index of PostgreSQL takes.
        if (i == 17)
            complete.append = Append{.conversation = key_of(1), .request_id = body_of(1, 100'000)};
        items.push_back({key_of(3000 + i), std::move(complete)});
    }
    const auto sent = steady_clock::now();
    auto answers = all_at_once(*store, std::move(items));
    expect_others_in_time<Applied>(answers, 17, sent, usual);
    const auto refused = answers[17].get();
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().applied, base::Applied::no);
    EXPECT_THAT(refused.error().detail, HasSubstr("54000"));
    const auto record = as<Found>(ask(*store, key_of(3017), Get{})).record;
    EXPECT_EQ(record->status, Status::processing);
    EXPECT_TRUE(is<ConversationMissing>(ask(*store, key_of(1), GetConversation{})));
}

TEST_F(OneAtFault, a_deadlock_with_another_program_costs_neither_items_nor_answers) {
    open(1);
    std::vector<Item> items;
    std::vector<StoredKey> keys;
    for (std::uint64_t i = 0; i < 64; ++i) {
        const std::uint64_t n = 4000 + i;
        items.push_back({key_of(n), complete_of(n, grant(n), 500)});
        keys.push_back(key_of(n));
    }
    std::sort(keys.begin(), keys.end());
    PostgresClient other(server().url());
    other.query("SET deadlock_timeout = '10s'; BEGIN");
    const auto hold = [&](const StoredKey& key) {
        return other.query("SELECT 1 FROM " + table() + " WHERE k = " + bytea(key) + " FOR UPDATE");
    };
    ASSERT_TRUE(hold(keys[63]).ok);
    auto answers = all_at_once(*store, std::move(items));
    ASSERT_TRUE(PostgresServer::eventually(
        [] { return server().ask("SELECT count(*) FROM pg_locks WHERE NOT granted") != "0"; }));
    // It has the first row and waits for the last.
    const auto second = hold(keys[0]);
    EXPECT_TRUE(second.ok || second.sqlstate == "40P01") << second.message;
    other.query("ROLLBACK");
    for (auto& answer : answers) EXPECT_TRUE(is<Applied>(answer.get()));
}

// ---------------------------------------------------------------- duplicates and crowds

TEST_F(PostgresStore, of_many_duplicates_exactly_one_is_granted_per_key) {
    open();
    std::uint64_t base_n = 10'000;
    for (const std::uint64_t percent : {0, 50, 99}) {
        const std::uint64_t distinct = std::max<std::uint64_t>(400 * (100 - percent) / 100, 1);
        std::vector<Item> items;
        for (std::uint64_t i = 0; i < 400; ++i) {
            Acquire claim = acquire_of(base_n + i % distinct);
            claim.nonce = nonce_of(1'000'000 + base_n + i);
            items.push_back({key_of(base_n + i % distinct), claim});
        }
        std::uint64_t granted = 0, in_flight = 0;
        for (auto& answer : all_at_once(*store, std::move(items))) {
            const auto result = answer.get();
            granted += is<Granted>(result) ? 1U : 0U;
            in_flight += is<InFlight>(result) ? 1U : 0U;
        }
        EXPECT_EQ(granted, distinct) << percent;
        EXPECT_EQ(in_flight, 400 - distinct) << percent;
        base_n += 1000;
    }
    // Two equal ids of one submission.
    std::vector<Item> twins;
    for (std::uint64_t i = 0; i < 2; ++i) {
        Acquire claim = acquire_of(1);
        claim.nonce = nonce_of(100 + i);
        twins.push_back({key_of(1), claim});
    }
    const auto results = ask(*store, std::move(twins));
    EXPECT_TRUE(is<Granted>(results[0]));
    EXPECT_TRUE(is<InFlight>(results[1]));
    // Nothing of that was an error to the server.
    EXPECT_THAT(server().whole_log(), Not(HasSubstr("duplicate key")));
}

TEST_F(PostgresStore, of_eight_that_wait_for_a_holder_who_rolls_back_exactly_one_is_granted) {
    open(8);
    PostgresClient holder(server().url());
    holder.query("BEGIN");
    ASSERT_TRUE(holder
                    .query("INSERT INTO " + table() + " VALUES (" + bytea(key_of(1)) +
                           ", 1, 1, 1, '\\x01', 1, 1, 0, 0, 1, '\\x', NULL, NULL)")
                    .ok);
    std::vector<std::unique_ptr<Store>> others;
    std::vector<std::future<base::Result<Decided>>> answers;
    for (std::uint64_t i = 0; i < 8; ++i) {
        auto made = stores::open_postgres_store(
            {.url = server().url(), .schema = schema, .connections = 1});
        ASSERT_TRUE(made) << made.error().detail;
        others.push_back(std::move(*made));
        Acquire claim = acquire_of(1);
        claim.nonce = nonce_of(50 + i);
        std::vector<Item> one;
        one.push_back({key_of(1), claim});
        answers.push_back(std::move(all_at_once(*others.back(), std::move(one)).front()));
    }
    ASSERT_TRUE(PostgresServer::eventually([] {
        return std::stoi(server().ask("SELECT count(*) FROM pg_locks WHERE NOT granted")) >= 4;
    }));
    holder.query("ROLLBACK");
    int granted = 0, in_flight = 0;
    for (auto& answer : answers) {
        const auto result = answer.get();
        EXPECT_TRUE(result) << result.error().detail;
        granted += is<Granted>(result) ? 1 : 0;
        in_flight += is<InFlight>(result) ? 1 : 0;
    }
    EXPECT_EQ(granted, 1);
    EXPECT_EQ(in_flight, 7);
}

/// Four clients grant, renew and complete the same keys in opposite orders.
void opposite_orders(const std::string& url, const std::string& schema, std::uint64_t from) {
    constexpr std::uint64_t keys = 64;
    constexpr std::uint64_t clients = 4;
    std::vector<std::unique_ptr<Store>> all;
    for (std::uint64_t i = 0; i < clients; ++i) {
        auto made = stores::open_postgres_store({.url = url, .schema = schema, .connections = 2});
        ASSERT_TRUE(made) << made.error().detail;
        all.push_back(std::move(*made));
    }
    std::atomic<std::uint64_t> granted{0}, applied{0}, errors{0};
    std::vector<std::thread> threads;
    for (std::uint64_t c = 0; c < clients; ++c) {
        threads.emplace_back([&, c] {
            std::vector<Item> items;
            for (std::uint64_t i = 0; i < keys; ++i) {
                const std::uint64_t n = from + (c % 2 == 0 ? i : keys - 1 - i);
                Acquire claim = acquire_of(n);
                claim.nonce = nonce_of(from + 1000 * (c + 1) + n);
                items.push_back({key_of(n), claim});
            }
            const auto claims = ask(*all[c], std::move(items));
            std::vector<Item> completions;
            for (std::uint64_t i = 0; i < keys; ++i) {
                const std::uint64_t n = from + (c % 2 == 0 ? i : keys - 1 - i);
                if (!claims[i]) ++errors;
                if (!is<Granted>(claims[i])) continue;
                ++granted;
                Complete complete =
                    complete_of(n, std::get<Granted>(claims[i]->outcome).token, 100);
                complete.nonce = nonce_of(from + 1000 * (c + 1) + n);
                completions.push_back({key_of(n), std::move(complete)});
            }
            if (completions.empty()) return;
            for (const auto& result : ask(*all[c], std::move(completions))) {
                if (!result) ++errors;
                applied += is<Applied>(result) ? 1U : 0U;
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(errors.load(), 0U);
    EXPECT_EQ(granted.load(), keys);
    EXPECT_EQ(applied.load(), keys);
}

TEST_F(PostgresStore, opposite_key_orders_of_four_clients_never_deadlock) {
    open();
    const std::string deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = 'semel'";
    server().ask("SELECT pg_stat_force_next_flush()");
    const std::string before = server().ask(deadlocks);
    for (std::uint64_t round = 0; round < 5; ++round)
        opposite_orders(server().url(), schema, 20'000 + 100 * round);
    EXPECT_EQ(server().ask(deadlocks), before);
}

TEST_F(PostgresStore, a_stricter_default_isolation_level_changes_nothing) {
    open();
    const PgBouncer pooler(server());
    std::uint64_t from = 30'000;
    for (const char* level : {"serializable", "repeatable read"}) {
        server().ask("ALTER DATABASE semel SET default_transaction_isolation = '" +
                     std::string(level) + "'");
        EXPECT_EQ(PostgresClient(server().url()).query("SHOW transaction_isolation").one(), level);
        opposite_orders(server().url(), schema, from);
        opposite_orders(pooler.url(), schema, from + 500);
        from += 1000;
    }
    server().ask("ALTER DATABASE semel RESET default_transaction_isolation");
    EXPECT_THAT(server().whole_log(), Not(HasSubstr("could not serialize")));
}

// ---------------------------------------------------------------- poolers, languages

TEST_F(PostgresStore, a_transaction_mode_pooler_is_seen_and_only_transactions_are_relied_on) {
    const PgBouncer pooler(server(), {"default_pool_size = 2", "server_reset_query ="});
    open(4, pooler.url());
    EXPECT_TRUE(report.pooled);
    for (int round = 0; round < 20; ++round) {
        std::vector<Item> items;
        for (std::uint64_t i = 0; i < 20; ++i) {
            const std::uint64_t n = 40'000 + 100 * static_cast<std::uint64_t>(round) + i;
            items.push_back({key_of(n), acquire_of(n)});
        }
        for (auto& answer : all_at_once(*store, std::move(items)))
            EXPECT_TRUE(is<Granted>(answer.get()));
    }
    // What a session of the pool would keep from us.
    PostgresClient another(pooler.url());
    EXPECT_EQ(another.query("SELECT count(*) FROM pg_prepared_statements").one(), "0");
    EXPECT_EQ(another.query("SHOW lock_timeout").one(), "0");
    EXPECT_EQ(another.query("SHOW enable_seqscan").one(), "on");
    EXPECT_EQ(server().ask("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"), "0");
}

TEST_F(PostgresStore, who_loses_the_prepared_statements_goes_on_without) {
    auto targets = stores::postgres::targets_of(server().url());
    auto opened = stores::postgres::Connection::open(targets->front(), steady_clock::now() + 5s);
    auto& connection = *std::get<std::unique_ptr<stores::postgres::Connection>>(opened);
    EXPECT_FALSE(connection.pooled());
    const stores::postgres::Text text{.index = 0, .name = "one", .sql = "SELECT 1::bigint"};
    const stores::postgres::Step step{&text, {}};
    const auto one = [&] {
        auto answer = connection.run(std::span(&step, 1), {});
        return std::holds_alternative<stores::postgres::Failed>(answer)
                   ? std::get<stores::postgres::Failed>(answer).problem.error.detail
                   : std::to_string(std::get<0>(answer).front().number(0, 0));
    };
    EXPECT_EQ(one(), "1");
    const std::string forget = "DEALLOCATE ALL";
    connection.plain(std::span(&forget, 1), steady_clock::now() + 5s);
    EXPECT_EQ(one(), "1");
    EXPECT_TRUE(connection.pooled());
    EXPECT_EQ(one(), "1");
}

TEST(PostgresLanguage, what_the_server_says_is_understood_by_its_code_in_any_language) {
    const auto folder =
        std::filesystem::temp_directory_path() / ("semel-locale-" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder);
    const std::string make =
        "localedef -i de_DE -f UTF-8 '" + (folder / "de_DE.UTF-8").string() + "' >/dev/null 2>&1";
    ASSERT_EQ(std::system(make.c_str()), 0) << "needs the packages locales and libc-bin";
    const PostgresServer german({.settings = {"lc_messages = 'de_DE.UTF-8'"},
                                 .environment = {"LOCPATH=" + folder.string()}});
    const auto wrong = german.query("SELECT 1/0");
    EXPECT_EQ(wrong.sqlstate, "22012");
    EXPECT_THAT(wrong.message, HasSubstr("durch Null"));  // it does speak German
    auto made = stores::open_postgres_store({.url = german.url(), .connections = 2});
    ASSERT_TRUE(made) << made.error().detail;
    PostgresClient holder(german.url());
    holder.query("BEGIN");
    ASSERT_TRUE(holder
                    .query("INSERT INTO semel.semel_records VALUES (" + bytea(key_of(1)) +
                           ", 1, 1, 1, '\\x01', 1, 1, 0, 0, 1, '\\x', NULL, NULL)")
                    .ok);
    std::vector<Item> items;
    items.push_back({key_of(1), acquire_of(1)});
    auto waiting = std::move(all_at_once(**made, std::move(items)).front());
    ASSERT_TRUE(PostgresServer::eventually([&] {
        return german.whole_log().find("55P03") != std::string::npos ||
               german.whole_log().find("Sperre") != std::string::npos;
    })) << german.log();
    holder.query("ROLLBACK");
    EXPECT_TRUE(is<Granted>(waiting.get()));
    for (const std::string& user : {std::string("nobody"), std::string("semel")}) {
        auto refused = stores::open_postgres_store(
            {.url = german.url(user, user == "nobody" ? "semel" : "nowhere")});
        ASSERT_FALSE(refused);
        EXPECT_EQ(refused.error().code, base::ErrorCode::invalid_argument)
            << refused.error().detail;
    }
    std::filesystem::remove_all(folder);
}

// ---------------------------------------------------------------- the user's own transaction

TEST_F(PostgresStore, a_unique_violation_poisons_the_callers_transaction_only_up_to_a_savepoint) {
    PostgresClient client(server().url());
    server().ask("CREATE SCHEMA " + schema);
    const auto executor = stores::postgres::executor_on(client.connection());
    const std::string things = schema + ".things";
    ASSERT_EQ(
        executor->run(sql::Statement{"CREATE TABLE " + things + " (i bigint PRIMARY KEY)", {}})
            .index(),
        0U);
    const sql::Statement insert{"INSERT INTO " + things + " VALUES ($1)", {std::int64_t{1}}};
    std::vector<sql::Statement> work{
        {"BEGIN", {}}, insert, {"SAVEPOINT a", {}}, insert, {"COMMIT", {}}};
    std::size_t failed = 99;
    auto answer = executor->run(work, &failed);
    ASSERT_EQ(answer.index(), 1U);
    EXPECT_EQ(failed, 3U);
    EXPECT_EQ(std::get<1>(answer).trouble, sql::Trouble::refused);
    EXPECT_TRUE(executor->in_transaction());
    work = {{"ROLLBACK TO SAVEPOINT a", {}},
            {"INSERT INTO " + things + " VALUES ($1) ON CONFLICT DO NOTHING", {std::int64_t{1}}},
            {"INSERT INTO " + things + " VALUES ($1)", {std::int64_t{2}}},
            {"COMMIT", {}}};
    auto rest = executor->run(work, &failed);
    ASSERT_EQ(rest.index(), 0U) << std::get<1>(rest).error.detail;
    EXPECT_EQ(std::get<0>(rest)[1].affected, 0);
    EXPECT_EQ(std::get<0>(rest)[2].affected, 1);
    EXPECT_FALSE(executor->in_transaction());
    EXPECT_EQ(server().ask("SELECT count(*) FROM " + things), "2");
    // Outside a transaction each is its own: what ran before the failure stays.
    work = {{"INSERT INTO " + things + " VALUES (3)", {}},
            insert,
            {"INSERT INTO " + things + " VALUES (4)", {}}};
    auto apart = executor->run(work, &failed);
    EXPECT_EQ(apart.index(), 1U);
    EXPECT_EQ(failed, 1U);
    EXPECT_EQ(server().ask("SELECT string_agg(i::text, ' ' ORDER BY i) FROM " + things), "1 2 3");
    // NUL bytes are refused as text and kept as bytes; NULL is NULL.
    const sql::Statement echo{
        "SELECT $1::text, $2::bytea, $3::integer",
        {std::monostate{}, sql::Bytes{std::string("\0\\x", 3)}, std::int64_t{-7}}};
    auto echoed = executor->run(echo);
    ASSERT_EQ(echoed.index(), 0U);
    const auto& row = std::get<0>(echoed).rows.front();
    EXPECT_FALSE(row[0]);
    EXPECT_EQ(row[1], std::string("\0\\x", 3));
    EXPECT_EQ(row[2], "-7");
    EXPECT_EQ(executor->run(sql::Statement{"SELECT $1::text", {std::string("a\0b", 3)}}).index(),
              1U);
    EXPECT_EQ(client.query("SELECT 5").one(), "5");  // the connection is the caller's as before
}

TEST_F(PostgresStore, statements_that_come_again_are_prepared_and_prepared_anew_when_they_must_be) {
    PostgresClient client(server().url());
    server().ask("CREATE SCHEMA " + schema);
    const auto executor =
        stores::postgres::executor_on(client.connection(), stores::postgres::executor_deadline,
                                      stores::postgres::Prepare::repeated);
    const auto run = [&](const std::string& text, std::vector<sql::Parameter> parameters = {}) {
        return executor->run(sql::Statement{text, std::move(parameters)});
    };
    const auto prepared = [&] {
        return std::stoi(client.query("SELECT count(*) FROM pg_prepared_statements").one());
    };
    const std::string things = schema + ".things";
    ASSERT_EQ(run("CREATE TABLE " + things + " (i bigint PRIMARY KEY, b bytea)").index(), 0U);
    const std::string insert = "INSERT INTO " + things + " VALUES ($1, $2)";
    ASSERT_EQ(run(insert, {std::int64_t{1}, std::monostate{}}).index(), 0U);
    EXPECT_EQ(prepared(), 0) << "what comes once is not";
    ASSERT_EQ(run(insert, {std::int64_t{2}, std::monostate{}}).index(), 0U);
    ASSERT_EQ(run(insert, {std::int64_t{3}, std::monostate{}}).index(), 0U);
    EXPECT_EQ(prepared(), 1);
    for (const std::int64_t i : {4, 5, 6})
        ASSERT_EQ(run(insert, {i, sql::Bytes{std::string("\0\1", 2)}}).index(), 0U);
    EXPECT_EQ(prepared(), 2) << "with other types it is another one";
    // Several of one text in one trip; the second fails, and the transaction with it.
    const std::string once = "INSERT INTO " + things + " (i) VALUES ($1)";
    std::size_t failed = 99;
    std::vector<sql::Statement> work{{"BEGIN", {}},
                                     {once, {std::int64_t{7}}},
                                     {once, {std::int64_t{1}}},
                                     {once, {std::int64_t{8}}},
                                     {"COMMIT", {}}};
    ASSERT_EQ(executor->run(work, &failed).index(), 1U);
    EXPECT_EQ(failed, 2U);
    EXPECT_TRUE(executor->aborted());
    ASSERT_EQ(run("ROLLBACK").index(), 0U);
    EXPECT_FALSE(executor->aborted());
    work[2].parameters[0] = std::int64_t{9};
    ASSERT_EQ(executor->run(work, &failed).index(), 0U);
    ASSERT_EQ(executor->run({.text = once, .parameters = {std::int64_t{10}}}).index(), 0U);
    EXPECT_EQ(server().ask("SELECT count(*) FROM " + things), "10");
    // They are gone, and its table is another: once more, and it passes.
    client.query("DEALLOCATE ALL");
    auto gone = run(insert, {std::int64_t{11}, std::monostate{}});
    ASSERT_EQ(gone.index(), 1U);
    EXPECT_EQ(std::get<1>(gone).trouble, sql::Trouble::contended);
    for (const std::int64_t i : {11, 12, 13})
        EXPECT_EQ(run(insert, {i, std::monostate{}}).index(), 0U);
    const std::string all = "SELECT * FROM " + things + " WHERE i = 1";
    for (int i = 0; i < 2; ++i) ASSERT_EQ(run(all).index(), 0U);
    server().ask("ALTER TABLE " + things + " ADD COLUMN more text");
    auto altered = run(all);
    ASSERT_EQ(altered.index(), 1U);
    EXPECT_EQ(std::get<1>(altered).trouble, sql::Trouble::contended);
    for (int i = 0; i < 3; ++i) {
        auto found = run(all);
        ASSERT_EQ(found.index(), 0U);
        EXPECT_EQ(std::get<0>(found).rows[0].size(), 3U);
    }
    // There is an end of names.
    for (int i = 0; i < 300; ++i) {
        for (int twice = 0; twice < 2; ++twice)
            ASSERT_EQ(run("SELECT " + std::to_string(i)).index(), 0U);
    }
    EXPECT_GE(prepared(), 100);
    EXPECT_LE(prepared(), 160) << "what a reset has left included";
}

TEST_F(PostgresStore, a_transaction_may_begin_in_the_trip_that_ends_another) {
    PostgresClient client(server().url());
    server().ask("CREATE SCHEMA " + schema);
    const auto executor = stores::postgres::executor_on(client.connection());
    const std::string things = schema + ".things";
    const auto insert = [&](int i) {
        return sql::Statement{"INSERT INTO " + things + " VALUES (" + std::to_string(i) + ")", {}};
    };
    ASSERT_EQ(
        executor
            ->run(sql::Statement{
                "CREATE TABLE " + things + " (i bigint UNIQUE DEFERRABLE INITIALLY DEFERRED)", {}})
            .index(),
        0U);
    std::vector<sql::Statement> work{
        {"BEGIN", {}}, insert(1), {"COMMIT", {}}, {"BEGIN", {}}, insert(2)};
    std::size_t failed = 99;
    ASSERT_EQ(executor->run(work, &failed).index(), 0U);
    EXPECT_TRUE(executor->in_transaction());
    EXPECT_EQ(server().ask("SELECT count(*) FROM " + things), "1");
    // What is wrong behind the COMMIT undoes nothing before it.
    work = {{"COMMIT", {}}, {"BEGIN", {}}, {"SELECT 1/0", {}}};
    ASSERT_EQ(executor->run(work, &failed).index(), 1U);
    EXPECT_EQ(failed, 2U);
    EXPECT_TRUE(executor->aborted());
    EXPECT_EQ(server().ask("SELECT count(*) FROM " + things), "2");
    // A COMMIT that fails keeps the next from beginning.
    work = {{"ROLLBACK", {}}, {"BEGIN", {}}, insert(2), {"COMMIT", {}}, {"BEGIN", {}}, insert(3)};
    ASSERT_EQ(executor->run(work, &failed).index(), 1U);
    EXPECT_EQ(failed, 3U);
    EXPECT_FALSE(executor->in_transaction());
    // A statement outside of any stays one of its own.
    work = {insert(4), {"BEGIN", {}}, {"ROLLBACK", {}}};
    ASSERT_EQ(executor->run(work, &failed).index(), 0U);
    EXPECT_EQ(server().ask("SELECT string_agg(i::text, ' ' ORDER BY i) FROM " + things), "1 2 4");
}

}  // namespace
}  // namespace semel::integration
