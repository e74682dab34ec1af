// Clean-up on the databases themselves, of a hundred thousand records and beside those who claim:
// what is expired goes, in bounded steps; what is undecided stays for ever, whatever its age;
// nobody who claims notices.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/store.hpp"
#include "stores/mysql/mysql_store.hpp"
#include "stores/postgres/postgres_store.hpp"
#include "support/mysql_server.hpp"
#include "support/postgres_server.hpp"

namespace {

using namespace semel;
using namespace semel::core;
using namespace std::chrono_literals;

constexpr std::int64_t copies =
    390;  // of each of 256 records that are kept for a time: 100,000 in all
constexpr std::size_t kept_for_a_time = 256;
constexpr std::size_t step = 512;
constexpr const char* columns =
    "k, version, status, token, nonce, created, lease_end, completed, expires, keep_ms, head, "
    "done, body";

/// What the tests ask of a database beside the store.
class Database {
  public:
    virtual ~Database() = default;
    virtual std::unique_ptr<Store> open(std::function<StoreTime()> time) = 0;
    virtual void run(const std::string& sql) = 0;
    virtual std::int64_t count(const std::string& where) = 0;
    /// Copies each record that is kept for a time under `copies` keys of their own.
    virtual void multiply() = 0;
    /// Locks the record's row in a transaction of its own, until what it gives is called.
    virtual std::function<void()> hold(const StoredKey& key) = 0;
};

class Postgres final : public Database {
  public:
    std::unique_ptr<Store> open(std::function<StoreTime()> time) override {
        stores::PostgresOptions options;
        options.url = server_.url();
        options.time = std::move(time);
        auto store = stores::open_postgres_store(options);
        if (!store) throw std::runtime_error(store.error().detail);
        return std::move(*store);
    }
    void run(const std::string& sql) override { server_.ask(sql); }
    std::int64_t count(const std::string& where) override {
        return std::stoll(server_.ask("SELECT count(*) FROM semel.semel_records WHERE " + where));
    }
    void multiply() override {
        run(std::string("INSERT INTO semel.semel_records (") + columns +
            ") SELECT sha256(k || int8send(g)), version, status, token, nonce, created, lease_end, "
            "completed, expires, keep_ms, "
            "head, done, body FROM semel.semel_records, generate_series(1::bigint, " +
            std::to_string(copies) + ") g WHERE expires > 0");
    }
    std::function<void()> hold(const StoredKey& key) override {
        auto client = std::make_shared<support::PostgresClient>(server_.url());
        const auto answer =
            client->query("BEGIN; SELECT 1 FROM semel.semel_records WHERE k = '\\x" +
                          base::hex(key.view()) + "' FOR UPDATE");
        if (answer.one() != "1") throw std::runtime_error("no row to hold: " + answer.message);
        return [client] { (void)client->query("ROLLBACK"); };
    }

  private:
    support::PostgresServer server_;
};

class Mysql final : public Database {
  public:
    std::unique_ptr<Store> open(std::function<StoreTime()> time) override {
        stores::MysqlOptions options;
        options.url = server_.url();
        options.time = std::move(time);
        auto store = stores::open_mysql_store(options);
        if (!store) throw std::runtime_error(store.error().detail);
        return std::move(*store);
    }
    void run(const std::string& sql) override { ask(sql); }
    std::int64_t count(const std::string& where) override {
        return std::stoll(ask("SELECT count(*) FROM semel_records WHERE " + where).value());
    }
    void multiply() override {
        run("CREATE TABLE template AS SELECT * FROM semel_records WHERE expires > 0");
        constexpr std::int64_t many =
            30;  // of one statement, for which the fixture waits ten seconds
        for (std::int64_t first = 1; first <= copies; first += many) {
            const std::int64_t last = std::min(first + many - 1, copies);
            run(std::string("INSERT INTO semel_records (") + columns +
                ") SELECT UNHEX(SHA2(CONCAT(k, seq), 256)), version, status, token, nonce, "
                "created, lease_end, completed, expires, "
                "keep_ms, head, done, body FROM template JOIN seq_" +
                std::to_string(first) + "_to_" + std::to_string(last));
        }
    }
    std::function<void()> hold(const StoredKey& key) override {
        auto client = std::make_shared<support::MysqlConnection>(server_.connect());
        support::MysqlServer::run(client->get(), "BEGIN");
        const auto answer = support::MysqlServer::run(
            client->get(), "SELECT 1 FROM semel_records WHERE k = UNHEX('" + base::hex(key.view()) +
                               "') FOR UPDATE");
        if (answer.value() != "1") throw std::runtime_error("no row to hold: " + answer.text);
        return [client] { support::MysqlServer::run(client->get(), "ROLLBACK"); };
    }

  private:
    support::MysqlAnswer ask(const std::string& sql) {
        support::MysqlAnswer answer = server_.query(sql);
        if (!answer.ok()) throw std::runtime_error(answer.text + ": " + sql);
        return answer;
    }
    support::MysqlServer server_;
};

StoredKey key_of(const std::string& name) {
    StoredKey key;
    const auto digest = base::sha256(name);
    std::memcpy(key.bytes.data(), digest.bytes.data(), key.bytes.size());
    return key;
}

Nonce nonce_of(std::uint8_t n) {
    Nonce nonce;
    nonce.bytes.fill(n);
    return nonce;
}

Answer answer_of(const std::string& text) {
    Answer answer;
    answer.http_status = 200;
    answer.content_type = "text/plain";
    answer.body = std::make_shared<const std::string>(text);
    answer.body_bytes = text.size();
    answer.body_digest = base::sha256(text);
    return answer;
}

class SqlCleanup : public testing::TestWithParam<const char*> {
  protected:
    SqlCleanup() {
        if (std::string(GetParam()) == "Postgres") {
            database_ = std::make_unique<Postgres>();
        } else {
            database_ = std::make_unique<Mysql>();
        }
        store_ = database_->open([this] { return StoreTime{now_us_.load()}; });
    }
    ~SqlCleanup() override { store_->stop(); }

    base::Result<Decided> ask(const StoredKey& key, StoreOperation operation) {
        std::promise<BatchResults> promise;
        auto future = promise.get_future();
        std::vector<Item> one;
        one.push_back({key, std::move(operation)});
        store_->submit(std::move(one),
                       [&](BatchResults results) { promise.set_value(std::move(results)); });
        return std::move(future.get().front());
    }

    void advance(std::chrono::microseconds by) { now_us_ += by.count(); }

    Acquire claim(IntentKind kind, OnUnknown on_unknown, bool starts_call) {
        Acquire op;
        op.fingerprint.raw = base::sha256("request");
        op.owner = {"owner", "127.0.0.1:1"};
        op.nonce = nonce_of(1);
        op.lease = 10s;
        op.not_after = StoreTime{now_us_.load()} + 60s;
        op.policy.kind = kind;
        op.policy.on_unknown = on_unknown;
        op.policy.max_attempts = kind == IntentKind::message ? 1 : 0;
        op.starts_call = starts_call;
        return op;
    }

    /// Grants the key and does `then` under the grant.
    template <class Then>
    void granted(const std::string& name, Acquire op, Then then) {
        const StoredKey key = key_of(name);
        auto result = ask(key, op);
        ASSERT_TRUE(result) << result.error().detail;
        const auto* grant = std::get_if<Granted>(&result->outcome);
        ASSERT_NE(grant, nullptr) << name;
        then(key, grant->token);
    }

    void applied(const StoredKey& key, StoreOperation operation) {
        auto result = ask(key, std::move(operation));
        ASSERT_TRUE(result) << result.error().detail;
        ASSERT_TRUE(std::holds_alternative<Applied>(result->outcome));
    }

    RecordPtr state(const std::string& name) {
        auto result = ask(key_of(name), Get{});
        if (!result) throw std::runtime_error(result.error().detail);
        return std::get<Found>(result->outcome).record;
    }

    void complete(const StoredKey& key, FencingToken token) {
        applied(key, Complete{token, nonce_of(1), answer_of("the answer"), {}, std::nullopt});
    }

    /// One record of each kind that nothing has decided yet. Names, and what they must still be
    /// afterwards.
    std::vector<std::pair<std::string, Status>> make_undecided() {
        granted("running", claim(IntentKind::http, OnUnknown::rerun, true), [](auto&, auto) {});
        granted("not started", claim(IntentKind::http, OnUnknown::hold, false), [](auto&, auto) {});
        granted("held", claim(IntentKind::http, OnUnknown::hold, true),
                [&](const StoredKey& key, FencingToken token) {
                    applied(key, Fail{.token = token,
                                      .nonce = nonce_of(1),
                                      .certainty = Certainty::unknown});
                });
        Acquire patient = claim(IntentKind::message, OnUnknown::rerun, true);
        patient.policy.max_attempts = 9;
        granted("scheduled", patient, [&](const StoredKey& key, FencingToken token) {
            applied(key, Fail{.token = token,
                              .nonce = nonce_of(1),
                              .certainty = Certainty::unknown,
                              .delay = 1000ms});
        });
        granted("dead", claim(IntentKind::message, OnUnknown::rerun, true),
                [&](const StoredKey& key, FencingToken token) {
                    applied(key, Fail{.token = token,
                                      .nonce = nonce_of(1),
                                      .certainty = Certainty::unknown});
                });
        advance(2s);
        const auto exhausted =
            ask(key_of("dead"), claim(IntentKind::message, OnUnknown::rerun, true));
        EXPECT_TRUE(exhausted && std::holds_alternative<Exhausted>(exhausted->outcome));
        return {{"running", Status::processing},
                {"not started", Status::processing},
                {"held", Status::unknown},
                {"scheduled", Status::failed},
                {"dead", Status::dead}};
    }

    /// Completed and failed ones, all of which expire within an hour.
    void make_expiring() {
        for (std::size_t i = 0; i < kept_for_a_time; ++i) {
            Acquire op = claim(IntentKind::http, OnUnknown::rerun, true);
            op.policy.retention_completed = op.policy.retention_failed =
                10min + milliseconds(i * 1000);
            granted("kept " + std::to_string(i), op, [&](const StoredKey& key, FencingToken token) {
                if (i % 4 == 0) {
                    applied(key, Fail{.token = token,
                                      .nonce = nonce_of(1),
                                      .certainty = Certainty::not_processed});
                } else {
                    complete(key, token);
                }
            });
        }
    }

    std::atomic<std::int64_t> now_us_{1'800'000'000'000'000};
    std::unique_ptr<Database> database_;
    std::unique_ptr<Store> store_;
};

TEST_P(SqlCleanup, a_hundred_thousand_expired_records_go_beside_claims_and_no_undecided_one) {
    const auto undecided = make_undecided();
    make_expiring();
    database_->multiply();
    const auto many = static_cast<std::int64_t>(kept_for_a_time) * (copies + 1);
    ASSERT_EQ(database_->count("expires > 0"), many);
    // What is still kept when all the others have expired.
    Acquire lasting = claim(IntentKind::http, OnUnknown::rerun, true);
    lasting.policy.retention_completed = 24h * 400;
    granted("lasting", lasting,
            [&](const StoredKey& key, FencingToken token) { complete(key, token); });

    // Before its time nothing goes.
    const auto early = store_->purge(step);
    ASSERT_TRUE(early) << early.error().detail;
    ASSERT_EQ(*early, 0U);

    advance(24h * 365);
    std::atomic<bool> over{false};
    auto claims = std::async(std::launch::async, [&] {
        std::size_t done = 0;
        for (; !over || done < 50; ++done) {
            const std::string name = "beside " + std::to_string(done);
            granted(name, claim(IntentKind::http, OnUnknown::rerun, true),
                    [&](const StoredKey& key, FencingToken token) { complete(key, token); });
            if (HasFatalFailure()) break;
        }
        return done;
    });
    // Expired, but some of them are asked for again while they are removed.
    auto again = std::async(std::launch::async, [&] {
        std::string otherwise;
        for (std::size_t i = 0; i < kept_for_a_time; ++i) {
            const auto result = ask(key_of("kept " + std::to_string(i)),
                                    claim(IntentKind::http, OnUnknown::rerun, true));
            const auto* grant = result ? std::get_if<Granted>(&result->outcome) : nullptr;
            if (!result) {
                otherwise += std::to_string(i) + ": " + result.error().detail + "; ";
            } else if (grant == nullptr || grant->attempt != 1) {
                // One whose answer was lost, and that was asked again, is a repeated first one.
                otherwise += std::to_string(i) + ": outcome " +
                             std::to_string(result->outcome.index()) + "; ";
            }
        }
        return otherwise;
    });
    std::int64_t removed = 0;
    bool empty = false;
    while (!empty) {
        const auto gone = store_->purge(step);
        ASSERT_TRUE(gone) << gone.error().detail;
        ASSERT_LE(*gone, step);
        removed += static_cast<std::int64_t>(*gone);
        // Rows that were locked are skipped: they go the next time.
        empty = *gone == 0 && database_->count("expires > 0 AND expires <= " +
                                               std::to_string(now_us_.load())) == 0;
    }
    over = true;
    const std::size_t beside = claims.get();
    EXPECT_EQ(again.get(), "") << "a new request under an expired key is a first one";

    EXPECT_GE(beside, 50U);
    // A row that was granted anew was replaced or removed before: either way it is expired no more.
    EXPECT_GE(removed, many - static_cast<std::int64_t>(kept_for_a_time));
    EXPECT_LE(removed, many);
    for (const auto& [name, status] : undecided) {
        const RecordPtr record = state(name);
        ASSERT_NE(record, nullptr) << name << " is undecided and gone";
        EXPECT_EQ(record->status, status) << name;
    }
    EXPECT_EQ(database_->count("expires = 0"),
              static_cast<std::int64_t>(undecided.size() + kept_for_a_time));
    EXPECT_EQ(database_->count("expires > 0"), static_cast<std::int64_t>(beside + 1));
    const RecordPtr record = state("lasting");
    ASSERT_NE(record, nullptr);
    EXPECT_EQ(record->status, Status::completed);
}

TEST_P(SqlCleanup, a_row_that_somebody_holds_keeps_no_purge_waiting) {
    make_expiring();
    advance(24h);
    // A user's own transaction, or another gateway's statement, has one of them locked.
    const StoredKey held = key_of("kept 7");
    const auto release = database_->hold(held);
    const auto began = std::chrono::steady_clock::now();
    std::size_t removed = 0;
    for (std::size_t i = 0; i < 4; ++i) {
        const auto gone = store_->purge(step);
        ASSERT_TRUE(gone) << gone.error().detail;
        removed += *gone;
    }
    EXPECT_EQ(removed, kept_for_a_time - 1);
    EXPECT_LT(std::chrono::steady_clock::now() - began, 10s);
    release();
    const auto gone = store_->purge(step);
    ASSERT_TRUE(gone) << gone.error().detail;
    EXPECT_EQ(*gone, 1U);
}

INSTANTIATE_TEST_SUITE_P(Database, SqlCleanup, testing::Values("Postgres", "Mysql"),
                         [](const auto& name) { return std::string(name.param); });

}  // namespace
