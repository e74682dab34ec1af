// The references on PostgreSQL: plain libpq on a table of the usual shape, batches of prepared
// statements with binary arrays.
//
//     bench_postgres_client CONNECTION pairs|select-first|insert-first THREADS BATCH PERCENT
//     SECONDS
//
// Each thread has a connection. A batch of BATCH calls, PERCENT of which are recorded already, is
// claimed and completed with 1 KiB. `insert-first`: one INSERT ... ON CONFLICT DO NOTHING RETURNING
// of all, a SELECT of those that were there, one UPDATE of the new ones. `select-first`: the SELECT
// before an INSERT of what is missing. `pairs` knows that all are new: INSERT and UPDATE. Prints
// {"operations":calls,"per_second":calls a second}.
#include <libpq-fe.h>

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
constexpr std::size_t answer_bytes = 1024;
constexpr unsigned recorded = 10'000;  // rows that postgres.sql makes

struct Settings {
    std::string server, mode;
    std::size_t threads = 1, batch = 1, percent = 0;
    double seconds = 1;
};

struct Free {
    void operator()(PGconn* connection) const { PQfinish(connection); }
    void operator()(PGresult* result) const { PQclear(result); }
};
using Connection = std::unique_ptr<PGconn, Free>;
using Answer = std::unique_ptr<PGresult, Free>;

void put(std::string& out, std::uint32_t v) {
    for (int shift = 24; shift >= 0; shift -= 8)
        out.push_back(static_cast<char>(v >> static_cast<unsigned>(shift)));
}

/// A one-dimensional array in the wire's binary format.
std::string array_of(std::uint32_t type, const std::vector<std::string>& values) {
    std::string out;
    for (const std::uint32_t v : {1U, 0U, type, static_cast<std::uint32_t>(values.size()), 1U})
        put(out, v);
    for (const std::string& value : values) {
        put(out, static_cast<std::uint32_t>(value.size()));
        out += value;
    }
    return out;
}

class Worker {
  public:
    Worker(const Settings& settings, std::size_t number)
        : settings_(settings),
          connection_(PQconnectdb(settings.server.c_str())),
          random_(static_cast<std::uint64_t>(Steady::now().time_since_epoch().count()) * 31 +
                  number * 7919) {
        if (PQstatus(connection_.get()) != CONNECTION_OK) fail(PQerrorMessage(connection_.get()));
        prepare("insert",
                "insert into idem select k, 0, 'owner-1', 1, now() + interval '30 s', null, now() "
                "+ interval '1 day' "
                "from unnest($1::text[]) k on conflict do nothing returning key");
        prepare(
            "select",
            "select key, status, token, lease_until, result from idem where key = any($1::text[])");
        prepare(
            "update",
            "update idem set status = 1, result = u.r from unnest($1::text[], $2::bytea[]) u(k, r) "
            "where key = u.k and token = 1 and status = 0");
    }

    void batch() {
        std::vector<std::string> keys;
        std::size_t known = 0;
        for (std::size_t i = 0; i < settings_.batch; ++i) {
            const bool again = random() % 100 < settings_.percent;
            known += again ? 1 : 0;
            keys.push_back(again ? name_of(random() % recorded) : new_key());
        }
        std::sort(keys.begin(), keys.end());  // unsorted ones deadlock
        const auto twice = std::unique(keys.begin(), keys.end());
        keys.erase(twice, keys.end());
        std::vector<std::string> fresh;
        if (settings_.mode == "select-first") {
            const auto there = names(run("select", {array_of(25, keys)}));
            for (const std::string& key : keys) {
                if (!there.contains(key)) fresh.push_back(key);
            }
            if (!fresh.empty() &&
                names(run("insert", {array_of(25, fresh)})).size() != fresh.size())
                fail("a new key was there");
        } else {
            const auto inserted = names(run("insert", {array_of(25, keys)}));
            std::vector<std::string> others;
            for (const std::string& key : keys)
                (inserted.contains(key) ? fresh : others).push_back(key);
            if (!others.empty() &&
                names(run("select", {array_of(25, others)})).size() != others.size())
                fail("a key that was there is gone");
        }
        if (fresh.empty()) return;
        const Answer updated = run(
            "update",
            {array_of(25, fresh), array_of(17, std::vector<std::string>(fresh.size(), answer_))});
        if (std::strtoul(PQcmdTuples(updated.get()), nullptr, 10) != fresh.size())
            fail("not all were completed");
        if (settings_.mode == "pairs" && known > 0) fail("pairs have no duplicates");
    }

  private:
    void prepare(const char* name, const char* text) {
        const Answer answer(PQprepare(connection_.get(), name, text, 0, nullptr));
        if (PQresultStatus(answer.get()) != PGRES_COMMAND_OK)
            fail(PQresultErrorMessage(answer.get()));
    }

    Answer run(const char* name, const std::vector<std::string>& arguments) {
        std::array<const char*, 2> values{};
        std::array<int, 2> lengths{};
        const std::array<int, 2> formats{1, 1};
        for (std::size_t i = 0; i < arguments.size(); ++i) {
            values[i] = arguments[i].data();
            lengths[i] = static_cast<int>(arguments[i].size());
        }
        Answer answer(PQexecPrepared(connection_.get(), name, static_cast<int>(arguments.size()),
                                     values.data(), lengths.data(), formats.data(), 1));
        const auto status = PQresultStatus(answer.get());
        if (status != PGRES_COMMAND_OK && status != PGRES_TUPLES_OK)
            fail(PQresultErrorMessage(answer.get()));
        return answer;
    }

    static std::set<std::string> names(const Answer& answer) {
        std::set<std::string> out;
        for (int row = 0; row < PQntuples(answer.get()); ++row)
            out.emplace(PQgetvalue(answer.get(), row, 0),
                        static_cast<std::size_t>(PQgetlength(answer.get(), row, 0)));
        return out;
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
    Connection connection_;
    std::uint64_t random_;
    std::string answer_ = std::string(answer_bytes, 'x');
};

}  // namespace

int main(int argc, char** argv) {
    if (argc != 7) fail("wants six arguments: see the top of postgres_client.cpp");
    const Settings settings{.server = argv[1],
                            .mode = argv[2],
                            .threads = std::strtoul(argv[3], nullptr, 10),
                            .batch = std::strtoul(argv[4], nullptr, 10),
                            .percent = std::strtoul(argv[5], nullptr, 10),
                            .seconds = std::atof(argv[6])};
    if (settings.mode != "pairs" && settings.mode != "select-first" &&
        settings.mode != "insert-first")
        fail("unknown mode " + settings.mode);
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
