// The MySQL store on a real MariaDB server: its statements and plans, batches of which one item is
// at fault, deadlocks, what a server may be set to, its tables, and servers that stop answering.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <random>
#include <thread>

#include "integration/store_answers.hpp"
#include "stores/mysql/checks.hpp"
#include "stores/mysql/connection.hpp"
#include "stores/mysql/executor.hpp"
#include "stores/mysql/mysql_store.hpp"
#include "stores/mysql/session.hpp"
#include "stores/mysql/statements.hpp"
#include "support/mysql_server.hpp"

namespace semel::integration {
namespace {

using namespace core;
using namespace std::chrono_literals;
using std::chrono::steady_clock;
using stores::MysqlOptions;
using stores::MysqlReport;
using support::MysqlAnswer;
using support::MysqlServer;
using support::MysqlServerOptions;
using testing::HasSubstr;
using testing::Not;

MysqlServer& server() {
    static MysqlServer one;
    return one;
}

bool eventually(const std::function<bool()>& condition) {
    const auto deadline = steady_clock::now() + 10s;
    while (!condition()) {
        if (steady_clock::now() > deadline) return false;
        std::this_thread::yield();
    }
    return true;
}

std::unique_ptr<Store> open_store(const std::string& url, unsigned connections = 4,
                                  MysqlReport* report = nullptr) {
    MysqlOptions options{.url = url, .connections = connections, .time = {}};
    auto made = stores::open_mysql_store(options, report);
    if (!made) throw std::runtime_error(made.error().detail);
    return std::move(*made);
}

base::Error refusal(const std::string& url, bool migrate = true) {
    auto made = stores::open_mysql_store(
        {.url = url, .connect_timeout = 1000ms, .migrate = migrate, .time = {}});
    if (made) return {.detail = "it was opened"};
    EXPECT_THAT(made.error().detail, Not(HasSubstr(MysqlServer::password)));
    EXPECT_THAT(made.error().detail, Not(HasSubstr(MysqlServer::password_encoded)));
    return made.error();
}

FencingToken grant(Store& store, std::uint64_t n) {
    return as<Granted>(ask(store, key_of(n), acquire_of(n))).token;
}

/// How many statements wait for a row's lock now. (information_schema.innodb_trx is not made anew
/// for whoever asks too often.)
int waiting_for_locks(const MysqlServer& at) {
    const MysqlAnswer said = at.query(
        "SELECT VARIABLE_VALUE FROM information_schema.global_status WHERE "
        "VARIABLE_NAME='INNODB_ROW_LOCK_CURRENT_WAITS'",
        "");
    return said.value().empty() ? 0 : std::stoi(said.value());
}

std::string literal(const StoredKey& key) { return "X'" + base::hex(key.view()) + "'"; }

/// All that a store does, once.
void live_through(Store& store, std::uint64_t n) {
    const FencingToken token = grant(store, n);
    EXPECT_TRUE(is<InFlight>(ask(store, key_of(n), [&] {
        Acquire other = acquire_of(n);
        other.nonce = nonce_of(n + 1'000'000);
        return other;
    }())));
    Renew renew{.token = token, .nonce = nonce_of(n)};
    EXPECT_TRUE(is<Applied>(ask(store, key_of(n), renew)));
    EXPECT_TRUE(is<ChunkStored>(ask(store, key_of(n), PutChunk{token, 0, "chunk"})));
    Complete complete = complete_of(n, token, 1000);
    complete.append = Append{.conversation = key_of(n + 500'000),
                             .request_id = "id",
                             .user_content = "hello",
                             .answer_content = "you"};
    EXPECT_TRUE(is<Applied>(ask(store, key_of(n), complete)));
    const auto replay = as<Replay>(ask(store, key_of(n), acquire_of(n)));
    ASSERT_NE(replay.record, nullptr);
    ASSERT_NE(replay.record->answer->body, nullptr);
    EXPECT_EQ(*replay.record->answer->body, body_of(n, 1000));
    EXPECT_EQ(as<ChunkFound>(ask(store, key_of(n), GetChunk{token, 0})).bytes, "chunk");
    const auto turns = as<TurnsFound>(ask(store, key_of(n + 500'000), GetTurns{}));
    ASSERT_EQ(turns.turns.size(), 1U);
    EXPECT_EQ(turns.turns[0].at, replay.record->completed);
    const auto page = store.scan({}, "", 100);
    ASSERT_TRUE(page) << page.error().detail;
    EXPECT_FALSE(page->records.empty());
    const auto purged = store.purge(100);
    ASSERT_TRUE(purged) << purged.error().detail;
    EXPECT_EQ(*purged, 0U);
}

class MysqlStore : public testing::Test {
  protected:
    MysqlStore() : database(server().make_database()) {}
    ~MysqlStore() override {
        store.reset();
        server().query("DROP DATABASE " + database, "");
    }
    void open(unsigned connections = 4) { store = open_store(server().url(database), connections); }
    MysqlAnswer sql(const std::string& statement) const {
        const MysqlAnswer answer = server().query(statement, database);
        EXPECT_TRUE(answer.ok()) << answer.text;
        return answer;
    }

    const std::string database;
    std::unique_ptr<Store> store;
};

// ---------------------------------------------------------------- statements

/// At semicolons outside of strings.
std::vector<std::string> statements_of(const std::string& packet) {
    std::vector<std::string> out(1);
    bool quoted = false;
    for (std::size_t i = 0; i < packet.size(); ++i) {
        const char c = packet[i];
        if (c == ';' && !quoted) {
            out.emplace_back();
            continue;
        }
        out.back() += c;
        if (c == '\\' && quoted) out.back() += packet[++i];
        if (c == '\'') quoted = !quoted;
    }
    return out;
}

TEST_F(MysqlStore, every_statement_finds_its_rows_by_an_index) {
    using namespace stores::mysql;
    open(1);
    sql("INSERT INTO semel_records SELECT UNHEX(SHA2(seq,256)),seq,1+seq%2,seq,'nonce',seq,seq,seq,"
        "IF(seq%20=0,0,seq),1,'head',NULL,NULL FROM seq_1_to_20000");
    sql("INSERT INTO semel_chunks SELECT UNHEX(SHA2(seq,256)),seq,0,'x',seq FROM seq_1_to_5000");
    sql("INSERT INTO semel_conversations SELECT UNHEX(SHA2(seq,256)),seq,seq,1 FROM "
        "seq_1_to_5000");
    sql("INSERT INTO semel_turns SELECT UNHEX(SHA2(seq,256)),1,'x','x','x',seq,0 FROM "
        "seq_1_to_5000");
    sql("INSERT INTO semel_values SELECT seq,'x' FROM seq_1_to_5000");
    sql("INSERT INTO semel_parking SELECT UNHEX(SHA2(seq,256)),'fence' FROM seq_1_to_5000");
    sql("INSERT INTO semel_parked SELECT UNHEX(SHA2(seq%20,256)),seq,'x' FROM seq_1_to_20000");
    sql("ANALYZE TABLE semel_records,semel_chunks,semel_conversations,semel_turns,semel_values,"
        "semel_parking,semel_parked");

    const StoreTime at{100};
    std::vector<StoredKey> keys;
    for (std::uint64_t n = 0; n < 64; ++n) keys.push_back(key_of(n));
    const sql::Fresh fresh{.key = keys[0],
                           .nonce = nonce_of(1),
                           .lease = 1ms,
                           .keep_ms = 1,
                           .not_after = at,
                           .head = "x"};
    const sql::Completion completion{
        .key = keys[0], .token = {1}, .nonce = {}, .done = "x", .body = {}, .append = {}};
    std::vector<const sql::Completion*> completions(64, &completion);
    sql::Change change{.version_seen = 1, .row = {}, .not_after = at, .append = {}, .at = at};
    change.row.key = keys[0];
    const Append turn{
        .conversation = keys[0], .request_id = "id", .user_content = "?", .answer_content = ";'"};
    const StoredKey list = base::sha256("7");
    std::vector<sql::Place> places;
    for (std::uint64_t n = 0; n < 64; ++n) places.push_back({list, 20 * n + 7});
    const std::vector<std::string> packets{
        owned_sql({&fresh, 1}),
        complete_sql(completion, at),
        complete_many_sql(completions),
        replace_sql(change, {}),
        append_sql(0, turn),
        read_sql(keys, true, clock_sql({})),
        read_one_sql(keys.front(), true, clock_sql({})),
        list_sql({}, std::string(32, 'a'), 100, at),
        list_sql({.undecided_only = true}, std::string(32, 'a'), 100, at),
        list_sql({.dead_leases_only = true}, "", 100, {}),
        expired_sql(100, {}),
        idle_sql(100, {}),
        chunk_owners_sql(std::string(32, 'a'), 100),
        delete_expired_sql(keys, {}),
        delete_idle_sql(keys, {}),
        delete_chunks_sql(keys[0], 1),
        get_chunk_sql(keys[0], {.token = {1}, .n = 0}),
        get_conversation_sql(keys[0], "id"),
        get_turns_sql(keys[0], {}),
        delete_conversation_sql(keys[0]),
        claim_value_sql({.name = "7", .value_if_absent = "x"}),
        open_parking_sql(list, std::string(16, 'f'), nonce_of(1)),
        hold_fence_sql(list),
        park_sql({.list = list, .fence = nonce_of(1), .place = 5, .bytes = "x"}),
        unpark_sql(places),
        get_parked_sql(list, {.from = 700, .limit = 10})};
    auto target = parse_url(server().url(database));
    ASSERT_TRUE(target);
    auto made = Connection::open(*target, 2s);
    ASSERT_EQ(made.index(), 0U);
    Connection& connection = *std::get<0>(made);
    std::size_t explained = 0;
    for (const std::string& packet : packets) {
        for (const std::string& statement : statements_of(packet)) {
            if (statement.find(") VALUES(") != std::string::npos) continue;
            auto plan = connection.run("EXPLAIN " + statement, steady_clock::now() + 2s);
            ASSERT_EQ(plan.index(), 0U) << std::get<1>(plan).error.detail << statement;
            for (const auto& row : std::get<0>(plan)[0].rows) {
                // id, select_type, table, type, possible_keys, key, key_len, ref, rows, Extra
                const std::string table = row[2].value_or("");
                const std::string extra = row[9].value_or("");
                if (table.empty() || table[0] == '<') continue;
                ++explained;
                EXPECT_TRUE(row[5]) << statement << " reads " << table << " without an index";
                EXPECT_NE(row[3], "ALL") << statement;
                EXPECT_NE(row[3], "index") << statement;
                const std::string rows = row[8].value_or("0");
                EXPECT_LT(std::stol(rows), 20'000) << statement;
            }
        }
    }
    EXPECT_GE(explained, packets.size());
    // Dead leases and expired records lie in one index, of which the rest is not touched.
    const std::string dead = list_sql({.dead_leases_only = true}, "", 100, StoreTime{100});
    auto plan = connection.run("EXPLAIN " + dead, steady_clock::now() + 2s);
    EXPECT_EQ(std::get<0>(plan)[0].rows[0][5], "by_end");
    EXPECT_LT(std::stol(std::get<0>(plan)[0].rows[0][8].value_or("")), 50);
}

// ---------------------------------------------------------------- batches

TEST_F(MysqlStore, one_locked_record_among_64_holds_up_nobody_else) {
    open();
    std::vector<FencingToken> tokens;
    std::vector<Item> items;
    for (std::uint64_t n = 0; n < 64; ++n) {
        const FencingToken token = grant(*store, n);
        items.push_back({key_of(n), complete_of(n, token, 1000)});
    }
    const auto holder = server().connect(true, database);
    MysqlServer::run(holder.get(), "START TRANSACTION");
    ASSERT_TRUE(MysqlServer::run(holder.get(), "SELECT 1 FROM semel_records WHERE k=" +
                                                   literal(key_of(7)) + " FOR UPDATE")
                    .ok());
    const auto begin = steady_clock::now();
    auto answers = all_at_once(*store, std::move(items));
    for (std::size_t n = 0; n < 64; ++n) {
        if (n != 7) EXPECT_TRUE(is<Applied>(answers[n].get())) << n;
    }
    // 200 ms on a machine that does nothing else.
    const auto took = steady_clock::now() - begin;
    RecordProperty("others_ms", static_cast<int>(took / 1ms));
    EXPECT_LT(took, 1500ms);
    EXPECT_EQ(answers[7].wait_for(0s), std::future_status::timeout);
    MysqlServer::run(holder.get(), "ROLLBACK");
    EXPECT_TRUE(is<Applied>(answers[7].get()));
}

TEST(MysqlServers, one_answer_longer_than_max_allowed_packet_fails_alone) {
    MysqlServer small({.arguments = {"--max-allowed-packet=4M"}});
    MysqlReport report;
    const auto store = open_store(small.url(), 4, &report);
    EXPECT_THAT(report.notices, testing::Contains(HasSubstr("max_allowed_packet")));
    std::vector<Item> items;
    for (std::uint64_t n = 0; n < 64; ++n)
        items.push_back(
            {key_of(n), complete_of(n, grant(*store, n), n == 9 ? 5'000'000 : 200'000)});
    auto answers = all_at_once(*store, std::move(items));
    for (std::size_t n = 0; n < 64; ++n) {
        auto answer = answers[n].get();
        if (n != 9) {
            EXPECT_TRUE(is<Applied>(answer)) << n;
            continue;
        }
        ASSERT_FALSE(answer);
        EXPECT_EQ(answer.error().applied, base::Applied::no);
        EXPECT_THAT(answer.error().detail, HasSubstr("max_allowed_packet"));
    }
}

TEST_F(MysqlStore, equal_ids_in_batches_are_granted_once_at_any_share_of_duplicates) {
    open();
    std::uint64_t next = 0;
    for (const unsigned percent : {0U, 50U, 99U}) {
        std::mt19937 random{percent};
        std::vector<std::uint64_t> ids;
        for (int i = 0; i < 320; ++i) {
            if (!ids.empty() && random() % 100 < percent) {
                ids.push_back(ids[random() % ids.size()]);
            } else {
                ids.push_back(next++);
            }
        }
        std::vector<Item> items;
        std::uint64_t nonce = 10'000 * (percent + 1);
        for (const std::uint64_t id : ids) {
            items.push_back({key_of(id), acquire_of(id)});
            std::get<Acquire>(items.back().operation).nonce = nonce_of(++nonce);
        }
        std::map<std::uint64_t, int> grants;
        auto answers = ask(*store, std::move(items));
        for (std::size_t i = 0; i < answers.size(); ++i) {
            ASSERT_TRUE(answers[i]) << answers[i].error().detail;
            grants[ids[i]] += is<Granted>(answers[i]);
            EXPECT_TRUE(is<Granted>(answers[i]) || is<InFlight>(answers[i]));
        }
        for (const auto& [id, count] : grants) EXPECT_EQ(count, 1) << id;
    }
}

TEST_F(MysqlStore, four_gateways_that_claim_the_same_keys_in_opposite_orders_agree) {
    std::vector<std::unique_ptr<Store>> gateways;
    for (int i = 0; i < 4; ++i) gateways.push_back(open_store(server().url(database)));
    constexpr std::uint64_t kKeys = 200;
    std::vector<std::vector<std::future<base::Result<Decided>>>> answers(4);
    for (std::uint64_t g = 0; g < 4; ++g) {
        std::vector<Item> items;
        for (std::uint64_t n = 0; n < kKeys; ++n) {
            const std::uint64_t key = g % 2 == 0 ? n : kKeys - 1 - n;
            items.push_back({key_of(key), acquire_of(key)});
            std::get<Acquire>(items.back().operation).nonce = nonce_of(1000 * (g + 1) + key);
        }
        answers[g] = all_at_once(*gateways[g], std::move(items));
    }
    std::vector<int> grants(kKeys);
    for (std::uint64_t g = 0; g < 4; ++g) {
        for (std::uint64_t n = 0; n < kKeys; ++n) {
            auto answer = answers[g][n].get();
            ASSERT_TRUE(answer) << answer.error().detail;
            grants[g % 2 == 0 ? n : kKeys - 1 - n] += is<Granted>(answer);
        }
    }
    EXPECT_THAT(grants, testing::Each(1));
}

TEST_F(MysqlStore, when_a_holder_rolls_back_each_of_eight_waiters_gets_the_true_outcome) {
    std::vector<std::unique_ptr<Store>> gateways;
    for (int i = 0; i < 8; ++i) gateways.push_back(open_store(server().url(database), 1));
    int deadlocks = 0;
    for (std::uint64_t trial = 0; trial < 10; ++trial) {
        const auto holder = server().connect(true, database);
        MysqlServer::run(holder.get(), "START TRANSACTION");
        ASSERT_TRUE(MysqlServer::run(holder.get(), "INSERT INTO semel_records VALUES(" +
                                                       literal(key_of(trial)) +
                                                       ",1,1,1,'n',1,1,0,0,1,'h',NULL,NULL)")
                        .ok());
        std::vector<std::future<base::Result<Decided>>> answers;
        for (std::uint64_t g = 0; g < 8; ++g) {
            Acquire acquire = acquire_of(trial);
            acquire.nonce = nonce_of(100 * (trial + 1) + g);
            std::vector<Item> items;
            items.push_back({key_of(trial), acquire});
            answers.push_back(std::move(all_at_once(*gateways[g], std::move(items)).front()));
        }
        ASSERT_TRUE(eventually([] { return waiting_for_locks(server()) >= 2; }));
        MysqlServer::run(holder.get(), "ROLLBACK");
        int granted = 0;
        int in_flight = 0;
        for (auto& future : answers) {
            auto answer = future.get();
            ASSERT_TRUE(answer) << answer.error().detail;
            granted += is<Granted>(answer);
            in_flight += is<InFlight>(answer);
        }
        EXPECT_EQ(granted, 1);
        EXPECT_EQ(in_flight, 7);
    }
    deadlocks =
        std::stoi(server()
                      .query("SELECT variable_value FROM information_schema.global_status WHERE "
                             "variable_name='innodb_deadlocks'")
                      .value());
    EXPECT_GT(deadlocks, 0) << "the server made none: this test shows nothing";
}

// ---------------------------------------------------------------- parked messages

TEST_F(MysqlStore, parking_waits_for_a_take_over_and_then_sees_it) {
    open();
    const StoredKey list = key_of(1);
    EXPECT_TRUE(is<ParkingOpened>(ask(*store, list, OpenParking{nonce_of(1)})));
    EXPECT_TRUE(is<Parked>(ask(*store, list, Park{nonce_of(1), 1, "one"})));
    const auto other = server().connect(true, database);
    MysqlServer::run(other.get(), "START TRANSACTION");
    // Of nonce_of(2), by a program that has not committed yet.
    ASSERT_TRUE(MysqlServer::run(other.get(), "UPDATE semel_parking SET fence=X'" +
                                                  base::hex(view_of(nonce_of(2))) +
                                                  "' WHERE k=" + literal(list))
                    .ok());
    std::vector<Item> items;
    for (std::uint64_t place = 2; place < 20; ++place)
        items.push_back({list, Park{nonce_of(1), place, "late"}});
    items.push_back({key_of(2), OpenParking{nonce_of(3)}});
    auto answers = all_at_once(*store, std::move(items));
    EXPECT_TRUE(is<ParkingOpened>(answers.back().get()));
    EXPECT_EQ(answers.front().wait_for(0s), std::future_status::timeout);
    MysqlServer::run(other.get(), "COMMIT");
    answers.pop_back();
    for (auto& answer : answers) EXPECT_TRUE(is<ParkingLost>(answer.get()));
    EXPECT_EQ(as<ParkedFound>(ask(*store, list, GetParked{})).messages.size(), 1U);
    EXPECT_TRUE(is<Parked>(ask(*store, list, Park{nonce_of(2), 2, "mine"})));
}

TEST_F(MysqlStore, a_take_over_waits_until_what_is_being_parked_is_committed) {
    open();
    const StoredKey list = key_of(1);
    EXPECT_TRUE(is<ParkingOpened>(ask(*store, list, OpenParking{nonce_of(1)})));
    // Another program parks, and has not committed yet.
    const auto other = server().connect(true, database);
    MysqlServer::run(other.get(), "START TRANSACTION");
    const sql::Parking seven{.list = list, .fence = nonce_of(1), .place = 7, .bytes = "seven"};
    for (const std::string& one :
         {stores::mysql::hold_fence_sql(list), stores::mysql::park_sql(seven)})
        ASSERT_TRUE(MysqlServer::run(other.get(), one).ok());
    std::vector<Item> items;
    items.push_back({list, OpenParking{nonce_of(2)}});
    items.push_back({key_of(2), OpenParking{nonce_of(3)}});
    auto answers = all_at_once(*store, std::move(items));
    EXPECT_TRUE(is<ParkingOpened>(answers.back().get()));
    EXPECT_EQ(answers.front().wait_for(50ms), std::future_status::timeout);
    MysqlServer::run(other.get(), "COMMIT");
    EXPECT_TRUE(is<ParkingOpened>(answers.front().get()));
    const auto found = as<ParkedFound>(ask(*store, list, GetParked{})).messages;
    ASSERT_EQ(found.size(), 1U);
    EXPECT_EQ(found[0].bytes, "seven");
}

TEST_F(MysqlStore, a_take_over_from_an_owner_who_is_it_no_longer_fences_off_nobody) {
    open();
    const StoredKey list = key_of(1);
    EXPECT_TRUE(is<ParkingOpened>(ask(*store, list, OpenParking{nonce_of(1)})));
    EXPECT_TRUE(is<ParkingOpened>(ask(*store, list, OpenParking{nonce_of(2)})));
    // Statements of one who saw nobody, or the first owner, and that are executed only now.
    const std::string first(view_of(nonce_of(1)));
    for (const auto& seen : {std::optional<std::string>(), std::optional(first)}) {
        for (const std::string& one :
             statements_of(stores::mysql::open_parking_sql(list, seen, nonce_of(3))))
            sql(one);
    }
    EXPECT_TRUE(is<Parked>(ask(*store, list, Park{nonce_of(2), 1, "one"})));
    EXPECT_TRUE(is<ParkingLost>(ask(*store, list, Park{nonce_of(3), 2, "two"})));
}

TEST_F(MysqlStore, messages_of_a_megabyte_are_parked_beside_small_ones_in_several_lists) {
    open();
    expect_many_messages_to_be_parked(*store);
}

// ---------------------------------------------------------------- settings of the server

TEST(MysqlServers, whatever_the_server_is_set_to_the_store_works_the_same) {
    const std::vector<std::vector<std::string>> settings{
        {"--sql-mode=", "--transaction-isolation=SERIALIZABLE", "--completion-type=CHAIN",
         "--autocommit=0", "--lc-messages=de_DE", "--innodb-lock-wait-timeout=50"},
        {"--sql-mode=ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT,PAD_CHAR_TO_FULL_LENGTH",
         "--transaction-isolation=REPEATABLE-READ", "--sysdate-is-now", "--completion-type=RELEASE",
         "--lc-messages=ja_JP", "--default-time-zone=+05:30", "--transaction-read-only=1",
         "--character-set-server=latin1", "--max-statement-time=0.05", "--query-cache-type=1",
         "--default-storage-engine=MyISAM"}};
    std::uint64_t n = 0;
    for (const auto& arguments : settings) {
        MysqlServer set({.arguments = arguments});
        const MysqlAnswer more = set.query(
            "SET GLOBAL unique_checks=0, foreign_key_checks=0, sql_safe_updates=1, "
            "sql_select_limit=1");
        ASSERT_TRUE(more.ok()) << more.text;
        const auto store = open_store(set.url());
        live_through(*store, ++n);
        // A lock is a lock in any language.
        const FencingToken token = grant(*store, 77);
        const auto holder = set.connect();
        MysqlServer::run(holder.get(), "SET max_statement_time=0");
        MysqlServer::run(holder.get(), "SET SESSION TRANSACTION READ WRITE");
        MysqlServer::run(holder.get(), "START TRANSACTION");
        ASSERT_TRUE(MysqlServer::run(holder.get(), "SELECT 1 FROM semel_records WHERE k=" +
                                                       literal(key_of(77)) + " FOR UPDATE")
                        .ok());
        std::vector<Item> items;
        items.push_back({key_of(77), complete_of(77, token, 10)});
        auto answer = std::move(all_at_once(*store, std::move(items)).front());
        ASSERT_TRUE(eventually([&] { return waiting_for_locks(set) >= 1; }));
        MysqlServer::run(holder.get(), "ROLLBACK");
        EXPECT_TRUE(is<Applied>(answer.get()));
    }
}

TEST_F(MysqlStore, ids_are_bytes_of_which_none_is_folded_cut_or_padded) {
    open();
    std::vector<std::string> ids{"order-a",
                                 "Order-A",
                                 "order-\xc3\xa4",
                                 "order-a ",
                                 "order-a  ",
                                 std::string("order-a\0", 8),
                                 std::string("\0", 1),
                                 "'\"\\%_",
                                 "\xff\xfe",
                                 std::string(300, 'x'),
                                 std::string(300, 'x') + "y",
                                 std::string(300, 'x') + " "};
    const StoredKey talk = key_of(1);
    for (std::size_t i = 0; i < ids.size(); ++i) {
        const std::uint64_t n = 100 + i;
        Complete complete = complete_of(n, grant(*store, n), 10);
        complete.append = Append{.conversation = talk,
                                 .request_id = ids[i],
                                 .user_content = ids[i],
                                 .answer_content = ids[i]};
        EXPECT_TRUE(is<Applied>(ask(*store, key_of(n), complete)));
        EXPECT_EQ(
            as<Value>(ask(*store, talk, ClaimValue{ids[i].substr(0, 255), ids[i]})).value.size(),
            i == 10 || i == 11 ? 300U : ids[i].size());
    }
    const auto turns = as<TurnsFound>(ask(*store, talk, GetTurns{})).turns;
    ASSERT_EQ(turns.size(), ids.size());
    for (std::size_t i = 0; i < ids.size(); ++i) {
        EXPECT_EQ(turns[i].request_id, ids[i]);
        EXPECT_EQ(turns[i].answer_content, ids[i]);
        EXPECT_TRUE(as<ConversationFound>(ask(*store, talk, GetConversation{ids[i]})).holds_id);
    }
    EXPECT_FALSE(as<ConversationFound>(ask(*store, talk, GetConversation{"ORDER-A"})).holds_id);
}

TEST(MysqlServers, a_commit_that_waits_for_a_replica_longer_than_for_locks_is_no_error) {
    MysqlServer primary(
        {.arguments = {"--rpl-semi-sync-master-enabled=1", "--rpl-semi-sync-master-timeout=600"},
         .binlog = true});
    MysqlReport report;
    const auto store = open_store(primary.url(), 1, &report);
    EXPECT_THAT(report.wrong, testing::Contains(HasSubstr("semi-synchronous")));
    EXPECT_FALSE(store->durability().survives_failover);
    const auto wait_again = [&] {
        // After its time-out the server waits no more until told so again.
        primary.query("SET GLOBAL rpl_semi_sync_master_enabled=OFF");
        primary.query("SET GLOBAL rpl_semi_sync_master_enabled=ON");
    };
    wait_again();
    auto begin = steady_clock::now();
    const FencingToken token = grant(*store, 1);
    EXPECT_GE(steady_clock::now() - begin, 500ms);
    wait_again();
    begin = steady_clock::now();
    Complete complete = complete_of(1, token, 10);
    complete.append = Append{
        .conversation = key_of(2), .request_id = "id", .user_content = "", .answer_content = ""};
    EXPECT_TRUE(is<Applied>(ask(*store, key_of(1), complete)));
    EXPECT_GE(steady_clock::now() - begin, 500ms);
}

// ---------------------------------------------------------------- servers that stop answering

TEST(MysqlServers, a_frozen_server_is_lost_in_time_and_found_again) {
    MysqlServer frozen;
    const auto store = open_store(frozen.url());
    live_through(*store, 1);
    frozen.freeze();
    const auto begin = steady_clock::now();
    const auto answer = ask(*store, key_of(2), acquire_of(2));
    EXPECT_LT(steady_clock::now() - begin, 8s);
    ASSERT_FALSE(answer);
    EXPECT_EQ(answer.error().code, base::ErrorCode::store_unavailable);
    EXPECT_EQ(answer.error().applied, base::Applied::unknown);
    frozen.thaw();
    live_through(*store, 3);
}

TEST(MysqlServers, a_killed_server_is_found_again_and_has_what_it_acknowledged) {
    MysqlServer killed;
    const auto store = open_store(killed.url());
    live_through(*store, 1);
    killed.kill();
    const auto answer = ask(*store, key_of(2), acquire_of(2));
    ASSERT_FALSE(answer);
    EXPECT_EQ(answer.error().applied, base::Applied::no);
    EXPECT_THAT(answer.error().detail, HasSubstr("mysql: "));
    killed.restart();
    EXPECT_TRUE(is<Replay>(ask(*store, key_of(1), acquire_of(1))));
    live_through(*store, 3);
}

TEST_F(MysqlStore, a_connection_that_an_administrator_ends_is_replaced) {
    open(2);
    for (std::uint64_t n = 1; n <= 5; ++n) {
        const auto mine = server().query(
            "SELECT GROUP_CONCAT(id) FROM information_schema.processlist WHERE db='" + database +
                "'",
            "");
        std::istringstream ids(mine.value());
        for (std::string id; std::getline(ids, id, ',');) server().query("KILL " + id, "");
        live_through(*store, n);
    }
}

TEST(MysqlServers, a_server_that_becomes_read_only_refuses_writes_and_forgets_nothing) {
    MysqlServer one;
    const auto store = open_store(one.url());
    live_through(*store, 1);
    one.query("SET GLOBAL read_only=ON");
    const auto answer = ask(*store, key_of(2), acquire_of(2));
    ASSERT_FALSE(answer);
    EXPECT_EQ(answer.error().applied, base::Applied::no);
    EXPECT_THAT(answer.error().detail, HasSubstr("read-only"));
    one.query("SET GLOBAL read_only=OFF");
    live_through(*store, 2);
}

TEST(MysqlServers, a_replica_is_refused_and_has_what_the_primary_has) {
    MysqlServer primary({.binlog = true});
    MysqlReport report;
    const auto store = open_store(primary.url(), 4, &report);
    live_through(*store, 1);
    MysqlServer replica({.binlog = true, .replica_of = primary.port()});
    ASSERT_TRUE(replica.caught_up(primary));
    EXPECT_THAT(refusal(replica.url()).detail, HasSubstr("is read-only, as a replica is"));
    // Promoted, it is a store like any other.
    primary.kill();
    replica.query("STOP SLAVE", "");
    replica.query("SET GLOBAL read_only=OFF", "");
    const auto promoted = open_store(replica.url());
    EXPECT_TRUE(is<Replay>(ask(*promoted, key_of(1), acquire_of(1))));
}

// ---------------------------------------------------------------- opening

TEST_F(MysqlStore, what_is_wrong_with_a_url_is_said_in_one_sentence_without_the_password) {
    const std::string good = server().url(database);
    const auto with = [&](const std::string& from, const std::string& to) {
        std::string url = good;
        url.replace(url.find(from), from.size(), to);
        return url;
    };
    const std::string address = "127.0.0.1:" + std::to_string(server().port());
    const std::vector<std::tuple<std::string, base::ErrorCode, std::string>> cases{
        {with("mysql://", "mariadb://"), base::ErrorCode::invalid_argument,
         "must begin with mysql://"},
        {"mysql://127.0.0.1/x", base::ErrorCode::invalid_argument, "names no user"},
        {"mysql://me@127.0.0.1", base::ErrorCode::invalid_argument, "names no database"},
        {with(address, "127.0.0.1:port"), base::ErrorCode::invalid_argument, "port"},
        {good + "?tls=maybe", base::ErrorCode::invalid_argument, "neither required nor verify"},
        {good + "?timeout=1", base::ErrorCode::invalid_argument, "a setting other than"},
        {with("s3%2F", "%zz"), base::ErrorCode::invalid_argument, "hexadecimal"},
        {with("s3%2F", "wrong"), base::ErrorCode::invalid_argument, "does not accept the password"},
        {with(database, "semel_nowhere"), base::ErrorCode::invalid_argument, "no database"},
        {with(database, "mysql"), base::ErrorCode::invalid_argument, "may not use the database"},
        {with(address, "127.0.0.1:1"), base::ErrorCode::store_unavailable, "nothing answers"},
        {good + "?tls=required", base::ErrorCode::invalid_argument, "no TLS connection"},
        {with(address, "localhost") + "?socket=/nowhere", base::ErrorCode::store_unavailable,
         "nothing answers at /nowhere"},
    };
    for (const auto& [url, code, words] : cases) {
        const base::Error error = refusal(url);
        EXPECT_EQ(error.code, code) << error.detail;
        EXPECT_THAT(error.detail, HasSubstr(words));
    }
}

TEST_F(MysqlStore, a_user_who_may_not_do_something_is_told_what_to_grant) {
    const std::string user = "u_" + database;
    sql("CREATE USER '" + user + "'@'%' IDENTIFIED BY 'pw'");
    sql("GRANT SELECT ON " + database + ".* TO '" + user + "'@'%'");
    const std::string url =
        "mysql://" + user + ":pw@127.0.0.1:" + std::to_string(server().port()) + "/" + database;
    EXPECT_THAT(refusal(url).detail, HasSubstr("GRANT CREATE"));
    open();
    EXPECT_THAT(refusal(url).detail, HasSubstr("GRANT SELECT, INSERT, UPDATE, DELETE"));
    sql("GRANT INSERT, UPDATE, DELETE ON " + database + ".* TO '" + user + "'@'%'");
    // No right to make tables is needed where they are there.
    live_through(*open_store(url), 1);
    sql("DROP USER '" + user + "'@'%'");
}

TEST_F(MysqlStore, tables_of_a_newer_version_or_of_another_shape_are_refused) {
    open();
    store.reset();
    const std::string url = server().url(database);
    sql("INSERT INTO semel_schema VALUES(3, 1)");
    base::Error error = refusal(url);
    EXPECT_EQ(error.code, base::ErrorCode::store_version);
    EXPECT_THAT(error.detail, HasSubstr("version 3, made by a newer program"));
    sql("DELETE FROM semel_schema WHERE version=3");

    sql("ALTER TABLE semel_records MODIFY k VARCHAR(32) NOT NULL");
    error = refusal(url);
    EXPECT_EQ(error.code, base::ErrorCode::invalid_argument);
    EXPECT_THAT(error.detail, HasSubstr("another shape"));
    EXPECT_THAT(error.detail, HasSubstr("semel_records k binary 32"));
    sql("ALTER TABLE semel_records MODIFY k BINARY(32) NOT NULL");
    sql("ALTER TABLE semel_records DROP KEY by_end");
    EXPECT_THAT(refusal(url).detail, HasSubstr("by_end"));
    sql("ALTER TABLE semel_records ADD KEY by_end(expires,lease_end)");
    sql("ALTER TABLE semel_chunks ENGINE=Aria");
    EXPECT_THAT(refusal(url).detail, HasSubstr("not in the engine InnoDB"));
    sql("ALTER TABLE semel_chunks ENGINE=InnoDB");
    live_through(*open_store(url), 1);
}

TEST_F(MysqlStore, the_migration_can_be_planned_forbidden_and_taken_up_half_way) {
    const MysqlOptions options{.url = server().url(database), .time = {}};
    const auto plan = stores::plan_mysql_migration(options);
    ASSERT_TRUE(plan) << plan.error().detail;
    ASSERT_EQ(plan->size(), 10U);
    EXPECT_THAT(refusal(options.url, false).detail, HasSubstr("missing or of an older version"));
    // A program that died in the middle of it, or an administrator who did half.
    for (std::size_t i = 0; i < 3; ++i) sql((*plan)[i]);
    open();
    live_through(*store, 1);
    const auto after = stores::plan_mysql_migration(options);
    ASSERT_TRUE(after) << after.error().detail;
    EXPECT_TRUE(after->empty());
    EXPECT_EQ(refusal(options.url, false).detail, "it was opened");
}

TEST_F(MysqlStore, a_database_of_version_1_keeps_its_records_and_gets_lists_of_parked_messages) {
    open();
    live_through(*store, 1);
    const FencingToken running = grant(*store, 2);
    store.reset();
    // As 0001_tables.sql alone makes it.
    sql("DROP TABLE semel_parking, semel_parked");
    sql("DELETE FROM semel_schema WHERE version=2");
    const std::string url = server().url(database);
    EXPECT_THAT(refusal(url, false).detail, HasSubstr("missing or of an older version"));
    const auto plan = stores::plan_mysql_migration({.url = url, .time = {}});
    ASSERT_TRUE(plan) << plan.error().detail;
    EXPECT_EQ(plan->size(), 3U);
    open();
    EXPECT_EQ(sql("SELECT GROUP_CONCAT(version ORDER BY version) FROM semel_schema").value(),
              "1,2");
    const auto replay = as<Replay>(ask(*store, key_of(1), acquire_of(1)));
    ASSERT_NE(replay.record, nullptr);
    EXPECT_EQ(*replay.record->answer->body, body_of(1, 1000));
    EXPECT_TRUE(is<Applied>(ask(*store, key_of(2), complete_of(2, running, 10))));
    EXPECT_TRUE(is<ParkingOpened>(ask(*store, key_of(3), OpenParking{nonce_of(1)})));
    EXPECT_TRUE(is<Parked>(ask(*store, key_of(3), Park{nonce_of(1), 7, "message"})));
    store.reset();
    sql("ALTER TABLE semel_parked DROP PRIMARY KEY, ADD PRIMARY KEY (place, k)");
    EXPECT_THAT(refusal(url).detail, HasSubstr("semel_parked primary 0 1 k"));
}

TEST_F(MysqlStore, eight_programs_may_open_an_empty_database_at_once) {
    std::vector<std::future<std::unique_ptr<Store>>> opening;
    for (int i = 0; i < 8; ++i)
        opening.push_back(
            std::async(std::launch::async, [&] { return open_store(server().url(database), 1); }));
    std::uint64_t n = 0;
    for (auto& one : opening) live_through(*one.get(), ++n);
}

TEST(MysqlServers, tls_is_verified_and_demanded) {
    MysqlServer tls({.tls = true});
    live_through(*open_store(tls.url()), 1);
    live_through(*open_store(tls.url("semel", "tls=required")), 2);
    EXPECT_THAT(refusal(tls.url("semel", "tls=verify")).detail, HasSubstr("no TLS connection"));
    std::string plain = tls.url();
    plain.erase(plain.find('?'));
    EXPECT_THAT(refusal(plain).detail, HasSubstr("tls=verify"));
    // Frozen, with the handshake done and in the middle of it.
    const auto store = open_store(tls.url());
    tls.freeze();
    EXPECT_FALSE(ask(*store, key_of(9), acquire_of(9)));
    EXPECT_EQ(refusal(tls.url()).code, base::ErrorCode::store_unavailable);
    tls.thaw();
    live_through(*store, 10);
}

TEST(MysqlServers, a_server_that_could_lose_records_or_cannot_work_is_called_so) {
    using stores::mysql::Facts;
    using stores::mysql::judge;
    Facts good;
    good.server = {.mariadb = true,
                   .version = 101119,
                   .text = "10.11.19-MariaDB",
                   .max_packet = std::uint64_t{64} << 20};
    good.variables = {{"innodb_flush_log_at_trx_commit", "1"},
                      {"innodb_doublewrite", "ON"},
                      {"log_bin", "OFF"},
                      {"sync_binlog", "0"},
                      {"binlog_format", "MIXED"}};
    const auto fine = judge(good, "db:3306");
    ASSERT_TRUE(fine);
    EXPECT_TRUE(fine->wrong.empty());
    EXPECT_TRUE(fine->notices.empty());
    EXPECT_TRUE(fine->durability.survives_power_cut);
    EXPECT_TRUE(fine->durability.survives_failover);

    const auto wrong = [&](const std::string& name, const std::string& value) {
        Facts facts = good;
        facts.variables["log_bin"] =
            name == "sync_binlog" || name == "slaves_connected" ? "ON" : "OFF";
        facts.variables[name] = value;
        auto found = judge(facts, "db:3306");
        if (!found) throw std::runtime_error(found.error().detail);
        return std::move(*found);
    };
    auto found = wrong("innodb_flush_log_at_trx_commit", "0");
    EXPECT_FALSE(found.durability.survives_process_crash);
    EXPECT_THAT(found.wrong, testing::Contains(HasSubstr("innodb_flush_log_at_trx_commit = 0")));
    found = wrong("innodb_flush_log_at_trx_commit", "2");
    EXPECT_TRUE(found.durability.survives_process_crash);
    EXPECT_FALSE(found.durability.survives_power_cut);
    found = wrong("sync_binlog", "0");
    EXPECT_FALSE(found.durability.survives_power_cut);
    EXPECT_THAT(found.wrong, testing::Contains(HasSubstr("sync_binlog = 1")));
    found = wrong("slaves_connected", "2");
    EXPECT_FALSE(found.durability.survives_failover);
    EXPECT_THAT(found.wrong, testing::Contains(HasSubstr("has 2 replicas")));

    Facts statement = good;
    statement.variables["log_bin"] = "ON";
    statement.variables["binlog_format"] = "STATEMENT";
    EXPECT_FALSE(judge(statement, "db:3306"));
    Facts tiny = good;
    tiny.server.max_packet = 1 << 20;
    EXPECT_FALSE(judge(tiny, "db:3306"));
    stores::mysql::Server old = good.server;
    old.version = 100500;
    EXPECT_EQ(stores::mysql::check_version(old, "db:3306").error().code,
              base::ErrorCode::store_version);
}

// ---------------------------------------------------------------- the session without the store

TEST_F(MysqlStore, the_form_without_returning_says_the_same) {
    open(1);
    const StoredKey key = key_of(5);
    const sql::Fresh fresh{.key = key,
                           .nonce = nonce_of(5),
                           .lease = 10s,
                           .keep_ms = 1000,
                           .not_after = {std::int64_t{1} << 52},
                           .head = "head"};
    auto target = stores::mysql::parse_url(server().url(database));
    auto made = stores::mysql::Connection::open(*target, 2s);
    ASSERT_EQ(made.index(), 0U);
    for (int again = 0; again < 2; ++again) {
        auto answer = std::get<0>(made)->run(stores::mysql::owned_sql({&fresh, 1}) + ";" +
                                                 stores::mysql::insert_sql({&fresh, 1}, {}, false),
                                             steady_clock::now() + 2s);
        ASSERT_EQ(answer.index(), 0U) << std::get<1>(answer).error.detail;
        auto& results = std::get<0>(answer);
        ASSERT_EQ(results.size(), 3U);
        EXPECT_EQ(results[0].rows.size(), again == 0 ? 0U : 1U);
        ASSERT_EQ(results[2].rows.size(), 1U);
        const auto row = stores::mysql::row_of_values(std::move(results[2].rows[0]));
        ASSERT_TRUE(row);
        EXPECT_EQ(row->key, key);
        EXPECT_EQ(row->head, "head");
        EXPECT_EQ(row->lease_end - row->created, 10s);
        EXPECT_EQ(row->version, row->created.us);
    }
}

TEST_F(MysqlStore, an_executor_runs_several_statements_in_the_callers_transaction) {
    const auto connection = server().connect(true, database);
    const auto executor = stores::mysql::executor_on(connection.get());
    std::string bytes;
    for (int i = 0; i < 256; ++i) bytes += static_cast<char>(i);
    const std::vector<sql::Statement> statements{
        {"CREATE TABLE t(id BIGINT PRIMARY KEY, b VARBINARY(300), s VARCHAR(100)) CHARSET utf8mb4",
         {}},
        {"START TRANSACTION", {}},
        {"INSERT INTO t VALUES(?,?,?),(2,'?',\"?\") -- ?",
         {std::int64_t{-5}, sql::Bytes{bytes}, std::string("ünï'?")}},
        {"UPDATE t SET s=? WHERE id=? /* ? */", {std::string("ünï'?"), std::int64_t{-5}}},
        {"SELECT * FROM t ORDER BY id # ?", {}}};
    std::size_t failed = 99;
    auto answer = executor->run(statements, &failed);
    ASSERT_EQ(answer.index(), 0U) << std::get<1>(answer).error.detail;
    const auto& results = std::get<0>(answer);
    EXPECT_EQ(results[2].affected, 2);
    EXPECT_EQ(results[3].affected, 1) << "matched, although nothing changed";
    EXPECT_EQ(results[4].rows[0][1], bytes);
    EXPECT_EQ(results[4].rows[0][2], "ünï'?");
    EXPECT_TRUE(executor->in_transaction());
    const std::vector<sql::Statement> bad{{"INSERT INTO t VALUES(3,NULL,NULL)", {}},
                                          {"INSERT INTO t VALUES(3,NULL,NULL)", {}},
                                          {"INSERT INTO t VALUES(4,NULL,NULL)", {}}};
    auto refused = executor->run(bad, &failed);
    ASSERT_EQ(refused.index(), 1U);
    EXPECT_EQ(std::get<1>(refused).trouble, sql::Trouble::refused);
    EXPECT_EQ(failed, 1U);
    EXPECT_TRUE(executor->in_transaction());
    auto wrong_count = executor->run({"SELECT ?, '?'", {}});
    EXPECT_EQ(wrong_count.index(), 1U);
}

}  // namespace
}  // namespace semel::integration
