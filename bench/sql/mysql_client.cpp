// The references on MariaDB and MySQL: the C client on a table of the usual shape.
//
//     bench_mysql_client SOCKET alone|pairs|select-first|insert-first|look-up THREADS BATCH PERCENT
//     SECONDS
//
// Each thread has a connection. `alone`: INSERT IGNORE, then UPDATE with 1 KiB, prepared on the
// server, each its own transaction. `look-up`: a prepared SELECT of a call that is recorded. The
// others work in batches of BATCH calls, PERCENT of which are recorded already. `insert-first`: one
// INSERT IGNORE of all, a SELECT that tells which were there (by their token), one INSERT ... ON
// DUPLICATE KEY UPDATE that completes the new ones. `select-first`: the SELECT before an INSERT of
// what is missing. `pairs` knows that all are new. Prints
// {"operations":calls,"per_second":calls a second}.
#include <mysql.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "fail.hpp"

namespace {

using bench::fail;
using Steady = std::chrono::steady_clock;
constexpr unsigned long answer_bytes = 1024;
constexpr unsigned recorded = 10'000;  // rows that mysql.sql makes

struct Settings {
    std::string socket, mode;
    std::size_t threads = 1, batch = 1, percent = 0;
    double seconds = 1;
};

struct Free {
    void operator()(MYSQL* connection) const { mysql_close(connection); }
    void operator()(MYSQL_STMT* statement) const { mysql_stmt_close(statement); }
    void operator()(MYSQL_RES* result) const { mysql_free_result(result); }
};
using Statement = std::unique_ptr<MYSQL_STMT, Free>;

class Worker {
  public:
    Worker(const Settings& settings, std::size_t number)
        : settings_(settings),
          connection_(mysql_init(nullptr)),
          random_(static_cast<std::uint64_t>(Steady::now().time_since_epoch().count()) * 31 +
                  number * 7919) {
        MYSQL* const m = connection_.get();
        if (mysql_real_connect(m, nullptr, "root", "", "reference", 0, settings.socket.c_str(),
                               0) == nullptr)
            fail(mysql_error(m));
        insert_ =
            prepare("insert ignore into idem values(?, 0, 'owner-1', 1, 1030000, null, 9000000)");
        update_ = prepare(
            "update idem set status = 1, result = ? where k = ? and token = 1 and status = 0");
        select_ = prepare("select status, token, lease_until, result from idem where k = ?");
    }

    void work() {
        if (settings_.mode == "alone") return pair_alone();
        if (settings_.mode == "look-up") return look_up();
        batch();
    }
    [[nodiscard]] std::size_t calls() const {
        return settings_.mode == "alone" || settings_.mode == "look-up" ? 1 : settings_.batch;
    }

  private:
    Statement prepare(const char* text) {
        Statement made(mysql_stmt_init(connection_.get()));
        if (mysql_stmt_prepare(made.get(), text, std::strlen(text)) != 0)
            fail(mysql_stmt_error(made.get()));
        return made;
    }

    static MYSQL_BIND bytes(const std::string& value) {
        MYSQL_BIND bind{};
        bind.buffer_type = MYSQL_TYPE_BLOB;
        bind.buffer = const_cast<char*>(value.data());  // the client's interface is not const
        bind.buffer_length = value.size();
        return bind;
    }

    static void execute(MYSQL_STMT* statement, MYSQL_BIND* binds) {
        if (mysql_stmt_bind_param(statement, binds) != 0 || mysql_stmt_execute(statement) != 0)
            fail(mysql_stmt_error(statement));
    }

    void pair_alone() {
        const std::string key = new_key();
        std::array<MYSQL_BIND, 1> of_key{bytes(key)};
        execute(insert_.get(), of_key.data());
        if (mysql_stmt_affected_rows(insert_.get()) != 1) fail("a new key was there");
        std::array<MYSQL_BIND, 2> both{bytes(answer_), bytes(key)};
        execute(update_.get(), both.data());
        if (mysql_stmt_affected_rows(update_.get()) != 1) fail("a call was not completed");
    }

    void look_up() {
        const std::string key = name_of(random() % recorded);
        std::array<MYSQL_BIND, 1> of_key{bytes(key)};
        execute(select_.get(), of_key.data());
        std::array<MYSQL_BIND, 4> out{};
        std::array<long long, 3> numbers{};
        std::array<char, answer_bytes + 1> body{};
        unsigned long size = 0;
        for (std::size_t i = 0; i < numbers.size(); ++i) {
            out[i].buffer_type = MYSQL_TYPE_LONGLONG;
            out[i].buffer = &numbers[i];
        }
        out[3].buffer_type = MYSQL_TYPE_BLOB;
        out[3].buffer = body.data();
        out[3].buffer_length = body.size();
        out[3].length = &size;
        if (mysql_stmt_bind_result(select_.get(), out.data()) != 0 ||
            mysql_stmt_store_result(select_.get()) != 0 || mysql_stmt_fetch(select_.get()) != 0 ||
            size != answer_bytes)
            fail("a recorded call was not found");
        mysql_stmt_free_result(select_.get());
    }

    void batch() {
        std::vector<std::string> keys;
        for (std::size_t i = 0; i < settings_.batch; ++i)
            keys.push_back(random() % 100 < settings_.percent ? name_of(random() % recorded)
                                                              : new_key());
        std::sort(keys.begin(), keys.end());  // unsorted ones deadlock
        const auto twice = std::unique(keys.begin(), keys.end());
        keys.erase(twice, keys.end());
        std::vector<std::string> fresh;
        if (settings_.mode == "select-first") {
            const auto there = selected(keys);
            for (const std::string& key : keys) {
                if (!there.contains(key)) fresh.push_back(key);
            }
            if (insert(fresh) != fresh.size()) fail("a new key was there");
        } else if (const auto inserted = insert(keys); inserted == keys.size()) {
            fresh = keys;
        } else {
            const auto there = selected(keys);
            for (const std::string& key : keys) {
                if (!there.contains(key)) fresh.push_back(key);
            }
        }
        complete(fresh);
    }

    void query(const std::string& text) {
        if (mysql_real_query(connection_.get(), text.data(), text.size()) != 0)
            fail(mysql_error(connection_.get()));
    }

    std::uint64_t insert(const std::vector<std::string>& keys) {
        if (keys.empty()) return 0;
        std::string text = "insert ignore into idem values";
        for (const std::string& key : keys) {
            text += &key == &keys.front() ? "('" : ",('";
            text += key + "',0,'owner-1',1,1030000,null,9000000)";
        }
        query(text);
        return mysql_affected_rows(connection_.get());
    }

    /// Those that are completed.
    std::set<std::string> selected(const std::vector<std::string>& keys) {
        std::string text = "select k, status, token, lease_until, result from idem where k in (";
        for (const std::string& key : keys) {
            text += &key == &keys.front() ? "'" : ",'";
            text += key + "'";
        }
        query(text + ")");
        const std::unique_ptr<MYSQL_RES, Free> result(mysql_store_result(connection_.get()));
        if (result == nullptr) fail(mysql_error(connection_.get()));
        std::set<std::string> out;
        while (MYSQL_ROW row = mysql_fetch_row(result.get())) {
            if (row[1][0] == '1') out.emplace(row[0]);
        }
        return out;
    }

    void complete(const std::vector<std::string>& keys) {
        if (keys.empty()) return;
        std::string text =
            "insert into idem(k, status, owner, token, lease_until, result, expires_at) values";
        for (const std::string& key : keys) {
            text += &key == &keys.front() ? "('" : ",('";
            text += key + "',1,'',1,0,'" + answer_ + "',0)";
        }
        text +=
            " on duplicate key update result = if(token = values(token) and status = 0, "
            "values(result), result),"
            " status = if(token = values(token), 1, status)";
        query(text);
    }

    std::uint64_t random() {
        random_ += 0x9E3779B97F4A7C15U;
        std::uint64_t z = random_;
        z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
        z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
        return z ^ (z >> 31U);
    }

    std::string new_key() {
        char text[40];
        std::snprintf(text, sizeof text, "%016llx-%016llx-ab",
                      static_cast<unsigned long long>(random()),
                      static_cast<unsigned long long>(random()));
        return text;
    }

    static std::string name_of(std::uint64_t n) {
        char text[40];
        std::snprintf(text, sizeof text, "dup-%032llu", static_cast<unsigned long long>(n));
        return text;
    }

    const Settings& settings_;
    std::unique_ptr<MYSQL, Free> connection_;
    Statement insert_, update_, select_;
    std::uint64_t random_;
    std::string answer_ = std::string(answer_bytes, 'x');
};

}  // namespace

int main(int argc, char** argv) {
    if (argc != 7) fail("wants six arguments: see the top of mysql_client.cpp");
    const Settings settings{.socket = argv[1],
                            .mode = argv[2],
                            .threads = std::strtoul(argv[3], nullptr, 10),
                            .batch = std::strtoul(argv[4], nullptr, 10),
                            .percent = std::strtoul(argv[5], nullptr, 10),
                            .seconds = std::atof(argv[6])};
    const std::set<std::string> modes{"alone", "pairs", "select-first", "insert-first", "look-up"};
    if (!modes.contains(settings.mode)) fail("unknown mode " + settings.mode);
    std::vector<std::unique_ptr<Worker>> workers;
    for (std::size_t i = 0; i < settings.threads; ++i)
        workers.push_back(std::make_unique<Worker>(settings, i));
    std::atomic<std::uint64_t> done{0};
    const auto start = Steady::now();
    const auto end = start + std::chrono::duration_cast<Steady::duration>(
                                 std::chrono::duration<double>(settings.seconds));
    std::vector<std::thread> threads;
    for (auto& worker : workers) {
        threads.emplace_back([&] {
            while (Steady::now() < end) {
                worker->work();
                done += worker->calls();
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    const double seconds = std::chrono::duration<double>(Steady::now() - start).count();
    std::printf("{\"operations\":%llu,\"per_second\":%.1f}\n",
                static_cast<unsigned long long>(done.load()),
                static_cast<double>(done.load()) / seconds);
}
