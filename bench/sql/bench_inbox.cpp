// Drives the transactional inbox, or the same statements by hand, and prints one JSON object.
//
//     bench_inbox postgres|mysql WHERE make|inbox|bare|bare-insert [THREADS BATCH SECONDS]
//
// WHERE: a libpq connection string, or the path of a server's unix socket (user root, database
// reference). `make`: its tables, and a business table of 10,000 rows. `inbox`: each of THREADS
// threads runs batches of BATCH new messages, each of which changes one business row: one
// transaction. `bare`: what the inbox sends then, sent by a client that knows the answers: it looks
// at nothing but errors. `bare-insert`: the same with an INSERT into a table `effects` in place of
// the UPDATE.
#include <libpq-fe.h>
#include <mysql.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/hash.hpp"
#include "fail.hpp"
#include "inbox/inbox.hpp"
#include "inbox/schema.hpp"
#include "stores/mysql/executor.hpp"
#include "stores/postgres/executor.hpp"

namespace {

using bench::fail;
using namespace semel;
using Steady = std::chrono::steady_clock;

constexpr unsigned business_rows = 10'000;

/// A connection of either kind, and the executor on it.
class Connection {
  public:
    Connection(bool postgres, const std::string& where) {
        if (postgres) {
            postgres_.reset(PQconnectdb(where.c_str()));
            if (PQstatus(postgres_.get()) != CONNECTION_OK) fail(PQerrorMessage(postgres_.get()));
            executor_ = stores::postgres::executor_on(postgres_.get());
            return;
        }
        mysql_.reset(mysql_init(nullptr));
        if (mysql_real_connect(mysql_.get(), nullptr, "root", "", "reference", 0, where.c_str(),
                               CLIENT_MULTI_STATEMENTS | CLIENT_FOUND_ROWS) == nullptr)
            fail(mysql_error(mysql_.get()));
        executor_ = stores::mysql::executor_on(mysql_.get());
    }

    [[nodiscard]] std::shared_ptr<sql::Executor> executor() const { return executor_; }

    /// Sends the statements together and waits for all their answers.
    void send(const std::vector<std::string>& statements) {
        if (postgres_ != nullptr) {
            send_postgres(statements);
        } else {
            send_mysql(statements);
        }
    }

  private:
    void send_postgres(const std::vector<std::string>& statements) {
        PGconn* const c = postgres_.get();
        if (PQenterPipelineMode(c) != 1) fail(PQerrorMessage(c));
        for (const std::string& text : statements) {
            if (PQsendQueryParams(c, text.c_str(), 0, nullptr, nullptr, nullptr, nullptr, 1) != 1)
                fail(PQerrorMessage(c));
        }
        if (PQpipelineSync(c) != 1) fail(PQerrorMessage(c));
        for (std::size_t i = 0; i < statements.size(); ++i) {
            while (PGresult* const result = PQgetResult(c)) {
                const auto status = PQresultStatus(result);
                if (status != PGRES_COMMAND_OK && status != PGRES_TUPLES_OK)
                    fail(PQresultErrorMessage(result));
                PQclear(result);
            }
        }
        PQclear(PQgetResult(c));  // of the sync
        if (PQexitPipelineMode(c) != 1) fail(PQerrorMessage(c));
    }

    void send_mysql(const std::vector<std::string>& statements) {
        MYSQL* const c = mysql_.get();
        std::string all;
        for (const std::string& text : statements) all += (all.empty() ? "" : ";") + text;
        if (mysql_real_query(c, all.data(), all.size()) != 0) fail(mysql_error(c));
        int more = 0;
        do {
            if (MYSQL_RES* const result = mysql_store_result(c)) mysql_free_result(result);
            more = mysql_next_result(c);
        } while (more == 0);
        if (more > 0) fail(mysql_error(c));
    }

    struct Close {
        void operator()(PGconn* connection) const { PQfinish(connection); }
        void operator()(MYSQL* connection) const { mysql_close(connection); }
    };
    std::unique_ptr<PGconn, Close> postgres_;
    std::unique_ptr<MYSQL, Close> mysql_;
    std::shared_ptr<sql::Executor> executor_;
};

std::string id_of(std::uint64_t run, std::size_t thread, std::uint64_t n) {
    return std::to_string(run) + "-" + std::to_string(thread) + "-" + std::to_string(n);
}

/// Rows of its own for each thread, as partitions have: threads do not wait for each other.
std::int64_t business_row(std::size_t thread, std::size_t threads, std::uint64_t n) {
    const std::uint64_t share = business_rows / threads;
    return static_cast<std::int64_t>(thread * share + n * 7919 % share + 1);
}

void make(bool postgres, Connection& connection) {
    const auto applied = inbox::apply_schema(*connection.executor(), {});
    if (!applied) fail(applied.error().detail);
    if (postgres) {
        connection.send({"drop table if exists business"});
        connection.send(
            {"create table business (id bigint primary key, n bigint not null) with (fillfactor = "
             "50)"});
        connection.send({"insert into business select g, 0 from generate_series(1, 10000) g"});
    } else {
        connection.send({"drop table if exists business",
                         "create table business (id bigint primary key, n bigint not null)",
                         "insert into business select seq, 0 from seq_1_to_10000"});
    }
}

struct Settings {
    bool postgres = true;
    std::string where;
    bool insert = false;
    std::size_t threads = 4, batch = 64;
    double seconds = 1;
};

/// Messages of one thread, through the inbox.
class Inbox {
  public:
    Inbox(const Settings& settings, std::uint64_t run, std::size_t thread)
        : settings_(settings),
          run_(run),
          thread_(thread),
          connection_(settings.postgres, settings.where),
          executor_(connection_.executor()) {
        inbox::InboxOptions options;
        options.scope = "bench";
        inbox_ = std::make_unique<inbox::TransactionalInbox>(options);
    }

    void batch() {
        inbox::Batch batch;
        std::vector<std::vector<inbox::Effect>> effects;
        for (std::size_t i = 0; i < settings_.batch; ++i, ++next_) {
            inbox::Message message;
            message.source = "topic";
            message.id = id_of(run_, thread_, next_);
            batch.messages.push_back(std::move(message));
            inbox::Effect effect;
            effect.statement.text = settings_.postgres
                                        ? "update business set n = n + 1 where id = $1"
                                        : "update business set n = n + 1 where id = ?";
            effect.statement.parameters = {business_row(thread_, settings_.threads, next_)};
            effects.push_back({std::move(effect)});
        }
        const auto report = inbox_->run(executor_, batch, effects);
        if (report.problem) fail(report.problem->error.detail);
        for (const auto& result : report.results) {
            if (result.outcome != inbox::Outcome::applied)
                fail("a message was not applied: " + result.reason);
        }
        if (report.transactions != 1) fail("a batch was not one transaction");
    }

  private:
    const Settings& settings_;
    const std::uint64_t run_;
    const std::size_t thread_;
    Connection connection_;
    std::shared_ptr<sql::Executor> executor_;
    std::unique_ptr<inbox::TransactionalInbox> inbox_;
    std::uint64_t next_ = 0;
};

/// The same by hand.
class Bare {
  public:
    Bare(const Settings& settings, std::uint64_t run, std::size_t thread)
        : settings_(settings),
          run_(run),
          thread_(thread),
          connection_(settings.postgres, settings.where) {}

    void batch() {
        std::vector<std::string> keys;
        std::vector<std::string> updates;
        for (std::size_t i = 0; i < settings_.batch; ++i, ++next_) {
            const std::string id = id_of(run_, thread_, next_);
            keys.push_back(base::hex(base::sha256("bare/" + id).view()) + "|" + id);
            updates.push_back(
                settings_.insert
                    ? "INSERT INTO effects (message_id, order_no) VALUES ('" + id + "', '" + id +
                          "')"
                    : "update business set n = n + 1 where id = " +
                          std::to_string(business_row(thread_, settings_.threads, next_)));
        }
        std::sort(keys.begin(), keys.end());
        if (settings_.postgres) {
            postgres(keys, updates);
        } else {
            mysql(keys, updates);
        }
    }

  private:
    static constexpr std::size_t hex_size = 64;
    static constexpr const char* columns =
        " (key_hash, scope, source, message_id, business_key, status, retry_count, created_at, "
        "updated_at, expire_at, token, nonce, "
        "fingerprint, version) ";
    static constexpr const char* nonce = "00112233445566778899aabbccddeeff";

    void postgres(const std::vector<std::string>& keys, const std::vector<std::string>& updates) {
        std::string hashes, sources, ids, nulls;
        for (const std::string& key : keys) {
            const char* const comma = &key == &keys.front() ? "" : ",";
            hashes += comma + ("\"\\\\x" + key.substr(0, hex_size) + "\"");
            sources += comma + ("\"\\\\x" + base::hex(std::string_view("topic")) + "\"");
            ids +=
                comma + ("\"\\\\x" + base::hex(std::string_view(key).substr(hex_size + 1)) + "\"");
            nulls += comma + std::string("NULL");
        }
        connection_.send({"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE",
                          "SELECT set_config('lock_timeout', '1000ms', true), "
                          "set_config('idle_in_transaction_session_timeout', '60000ms', true)",
                          std::string("INSERT INTO message_dedup") + columns +
                              "SELECT m.k, 'bench', convert_from(m.s, 'UTF8'), convert_from(m.i, "
                              "'UTF8'), convert_from(m.b, 'UTF8'), 1, 0, c.t, "
                              "c.t, c.t + 604800000000 * interval '1 microsecond', (extract(epoch "
                              "from c.t) * 1000000)::bigint, '\\x" +
                              nonce + "'::bytea, m.f, 1 FROM unnest('{" + hashes +
                              "}'::bytea[], '{" + sources + "}'::bytea[], '{" + ids +
                              "}'::bytea[], '{" + nulls + "}'::bytea[], '{" + nulls +
                              "}'::bytea[]) AS m(k, s, i, b, f), (SELECT clock_timestamp() AS t) c "
                              "ON CONFLICT (key_hash) DO NOTHING "
                              "RETURNING key_hash"});
        connection_.send(updates);
        connection_.send({"COMMIT"});
    }

    void mysql(const std::vector<std::string>& keys, const std::vector<std::string>& updates) {
        std::string rows, list;
        for (const std::string& key : keys) {
            const std::string hash = "x'" + key.substr(0, hex_size) + "'";
            rows += (rows.empty() ? "(" : ", (") + hash + ", 'bench', 'topic', '" +
                    key.substr(hex_size + 1) +
                    "', NULL, 1, 0, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6), DATE_ADD(UTC_TIMESTAMP(6), "
                    "INTERVAL 604800000000 MICROSECOND), "
                    "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)), x'" +
                    nonce + "', NULL, 1)";
            list += (list.empty() ? "" : ", ") + hash;
        }
        connection_.send(
            {"SET @semel_lock_wait = @@SESSION.innodb_lock_wait_timeout, SESSION "
             "innodb_lock_wait_timeout = 1",
             "SET TRANSACTION ISOLATION LEVEL READ COMMITTED", "START TRANSACTION READ WRITE",
             std::string("INSERT INTO message_dedup") + columns + "VALUES " + rows +
                 " ON DUPLICATE KEY UPDATE key_hash = key_hash",
             "SELECT key_hash, status, nonce, fingerprint, version FROM message_dedup FORCE INDEX "
             "(PRIMARY) WHERE key_hash IN (" +
                 list + ") LOCK IN SHARE MODE"});
        connection_.send(updates);
        connection_.send({"SET SESSION innodb_lock_wait_timeout = @semel_lock_wait", "COMMIT"});
    }

    const Settings& settings_;
    const std::uint64_t run_;
    const std::size_t thread_;
    Connection connection_;
    std::uint64_t next_ = 0;
};

template <class Worker>
void measure(const Settings& settings) {
    const auto run =
        static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
    std::vector<std::unique_ptr<Worker>> workers;
    for (std::size_t i = 0; i < settings.threads; ++i)
        workers.push_back(std::make_unique<Worker>(settings, run, i));
    std::atomic<std::uint64_t> done{0};
    const auto start = Steady::now();
    const auto end = start + std::chrono::duration_cast<Steady::duration>(
                                 std::chrono::duration<double>(settings.seconds));
    std::vector<std::thread> threads;
    for (auto& worker : workers) {
        threads.emplace_back([&] {
            while (Steady::now() < end) {
                worker->batch();
                done += settings.batch;
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    const double seconds = std::chrono::duration<double>(Steady::now() - start).count();
    std::printf("{\"operations\":%llu,\"per_second\":%.1f}\n",
                static_cast<unsigned long long>(done.load()),
                static_cast<double>(done.load()) / seconds);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4 && argc != 7)
        fail("wants three or six arguments: see the top of bench_inbox.cpp");
    const std::string store = argv[1], mode = argv[3];
    if (store != "postgres" && store != "mysql") fail("there is no database " + store);
    Settings settings{.postgres = store == "postgres", .where = argv[2]};
    if (mode == "make") {
        Connection connection(settings.postgres, settings.where);
        make(settings.postgres, connection);
        return 0;
    }
    settings.insert = mode == "bare-insert";
    if (argc != 7 || (mode != "inbox" && mode != "bare" && !settings.insert))
        fail("unknown mode " + mode);
    settings.threads = std::strtoul(argv[4], nullptr, 10);
    settings.batch = std::strtoul(argv[5], nullptr, 10);
    settings.seconds = std::atof(argv[6]);
    if (settings.threads == 0 || settings.batch == 0 || settings.seconds <= 0)
        fail("the last three arguments must be positive");
    if (mode == "inbox") {
        measure<Inbox>(settings);
    } else {
        measure<Bare>(settings);
    }
}
