// Measures the embedded store against bare RocksDB in one process, interleaved. Prints one JSON object a line.
//
//     bench_store [--dir DIR] [--rounds N] [--seconds S] [--only pairs|lone|lookup|memory]
//
// `pairs`:  durable acquire+complete, 64 in flight from one thread, against a loop that puts the same records in batches of
//           64 with one sync each. `lone`: one caller alone, in syncs a pair. `lookup`: a duplicate's acquire against DB::Get of
//           the same record. `memory`: growth of the resident set by 100,000 records of 1 KiB, and the time to open them.
#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <fstream>
#include <future>
#include <mutex>
#include <string>
#include <vector>

#include "fail.hpp"
#include "intents.hpp"
#include "core/record_codec.hpp"
#include "core/transition.hpp"
#include "stores/rocksdb/rocksdb_store.hpp"

namespace {

using namespace semel;
using namespace semel::core;
using namespace bench;
using Steady = std::chrono::steady_clock;

constexpr std::size_t in_flight = 64;
constexpr std::size_t lookup_records = 5000;
constexpr std::size_t memory_records = 100'000;

struct Settings {
    std::filesystem::path directory = std::filesystem::temp_directory_path() / "semel-bench-store";
    int rounds = 5;
    double seconds = 2;
    std::string only;
};

double seconds_since(Steady::time_point start) {
    return std::chrono::duration<double>(Steady::now() - start).count();
}

struct Spread {
    double median, least, most;
};
Spread spread_of(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return {values[values.size() / 2], values.front(), values.back()};
}

void print_ratio(const char* name, const std::vector<double>& mine, const std::vector<double>& reference,
                 const char* unit, double goal) {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < mine.size(); ++i) ratios.push_back(mine[i] / reference[i]);
    const Spread r = spread_of(ratios), a = spread_of(mine), b = spread_of(reference);
    std::printf(
        "{\"bench\":\"store\",\"name\":\"%s\",\"ratio\":%.3f,\"ratio_min\":%.3f,\"ratio_max\":%.3f,\"goal\":%.2f,"
        "\"ok\":%s,\"pairs\":%zu,\"unit\":\"%s\",\"semel\":%.0f,\"reference\":%.0f}\n",
        name, r.median, r.least, r.most, goal, r.median >= goal ? "true" : "false", ratios.size(), unit, a.median,
        b.median);
    std::fflush(stdout);
}

// ---------------------------------------------------------------- the reference

/// RocksDB as a careful user would set it up for these records.
class Bare {
  public:
    explicit Bare(const std::filesystem::path& directory) {
        rocksdb::Options options;
        options.create_if_missing = true;
        options.write_buffer_size = 16U << 20;
        options.max_write_buffer_number = 4;
        options.max_background_jobs = 2;
        options.compression = rocksdb::kNoCompression;
        rocksdb::BlockBasedTableOptions table;
        table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
        table.block_cache = rocksdb::NewLRUCache(32U << 20);
        options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
        rocksdb::DB* db = nullptr;
        const auto status = rocksdb::DB::Open(options, directory.string(), &db);
        if (!status.ok()) fail(status.ToString());
        db_.reset(db);
    }

    /// The records that a store would write for intent `n`: after acquire and after complete.
    static void records(std::uint64_t n, std::string& acquired, std::string& completed) {
        const StoreTime now{1'800'000'000'000'000};
        const Transition first = decide(nullptr, acquire_of(n), now);
        const Transition second = decide(
            first.record, complete_of(first.record->token, first.record->nonce), now);
        acquired.clear();
        completed.clear();
        encode_record(*first.record, true, acquired);
        encode_record(*second.record, true, completed);
    }

    /// Pairs a second, each record put twice, 64 records a batch and sync. The bytes are made before the clock runs.
    double pairs(double seconds, std::uint64_t& next) {
        std::string acquired, completed;
        records(1, acquired, completed);
        rocksdb::WriteOptions options;
        options.sync = true;
        rocksdb::WriteBatch batch;
        std::uint64_t done = 0;
        const auto start = Steady::now();
        while (seconds_since(start) < seconds) {
            StoredKey keys[in_flight];
            for (StoredKey& key : keys) key = key_of(next++);
            for (const std::string* value : {&acquired, &completed}) {
                batch.Clear();
                for (const StoredKey& key : keys) {
                    batch.Put(rocksdb::Slice(key.view().data(), key.view().size()), *value);
                }
                if (const auto status = db_->Write(options, &batch); !status.ok()) fail(status.ToString());
            }
            done += in_flight;
        }
        return static_cast<double>(done) / seconds_since(start);
    }

    void fill(std::uint64_t first, std::uint64_t count) {
        std::string acquired, completed;
        rocksdb::WriteBatch batch;
        for (std::uint64_t n = first; n < first + count; ++n) {
            records(n, acquired, completed);
            const StoredKey key = key_of(n);
            batch.Put(rocksdb::Slice(key.view().data(), key.view().size()), completed);
        }
        if (const auto status = db_->Write({}, &batch); !status.ok()) fail(status.ToString());
    }

    double gets(double seconds, const std::vector<StoredKey>& keys) {
        std::uint64_t done = 0;
        rocksdb::PinnableSlice value;
        const auto start = Steady::now();
        while (seconds_since(start) < seconds) {
            for (std::size_t i = 0; i < in_flight; ++i) {
                const StoredKey& key = keys[done++ % keys.size()];
                value.Reset();
                const auto status = db_->Get({}, db_->DefaultColumnFamily(),
                                             rocksdb::Slice(key.view().data(), key.view().size()), &value);
                if (!status.ok()) fail(status.ToString());
            }
        }
        return static_cast<double>(done) / seconds_since(start);
    }

  private:
    std::unique_ptr<rocksdb::DB> db_;
};

// ---------------------------------------------------------------- the store

struct Opened {
    stores::RocksDbCounters counters;
    std::unique_ptr<Store> store;
};

std::unique_ptr<Opened> open_store(const std::filesystem::path& directory, std::size_t hot_bytes) {
    auto opened = std::make_unique<Opened>();
    auto store = stores::open_rocksdb_store(
        {.path = directory.string(), .sync = true, .hot_bytes = hot_bytes, .counters = &opened->counters});
    if (!store) fail(store.error().detail);
    opened->store = std::move(*store);
    return opened;
}

/// One thread that keeps `width` intents in flight: what is answered together is asked on together.
class Driver {
  public:
    Driver(Store& store, std::size_t width) : store_(store), nonces_(width) {
        slots_.reserve(width);
    }

    /// Pairs a second.
    double run(double seconds, std::uint64_t& next) {
        std::vector<Item> items;
        std::vector<std::size_t> slots;
        for (std::size_t slot = 0; slot < nonces_.size(); ++slot) begin(slot, next, items, slots);
        send(std::move(items), std::move(slots));
        std::uint64_t done = 0;
        const auto start = Steady::now();
        while (seconds_since(start) < seconds) done += turn(next, true);
        const double rate = static_cast<double>(done) / seconds_since(start);
        while (outstanding_ > 0) turn(next, false);
        return rate;
    }

  private:
    struct Ready {
        BatchResults results;
        std::vector<std::size_t> slots;
    };

    void begin(std::size_t slot, std::uint64_t& next, std::vector<Item>& items, std::vector<std::size_t>& slots) {
        const std::uint64_t n = next++;
        Acquire op = acquire_of(n);
        nonces_[slot] = {key_of(n), op.nonce};
        items.push_back({nonces_[slot].key, std::move(op)});
        slots.push_back(slot);
    }

    void send(std::vector<Item> items, std::vector<std::size_t> slots) {
        outstanding_ += items.size();
        store_.submit(std::move(items), [this, slots = std::move(slots)](BatchResults results) mutable {
            bool wake = false;
            {
                const std::lock_guard lock(mutex_);
                ready_.push_back({std::move(results), std::move(slots)});
                wake = std::exchange(waiting_, false);
            }
            if (wake) wake_.notify_one();
        });
    }

    /// Takes what is answered and asks on. Says how many intents were completed.
    std::uint64_t turn(std::uint64_t& next, bool go_on) {
        {
            std::unique_lock lock(mutex_);
            waiting_ = true;
            wake_.wait(lock, [&] { return !ready_.empty(); });
            waiting_ = false;
            taken_.swap(ready_);
        }
        std::vector<Item> items;
        std::vector<std::size_t> slots;
        std::uint64_t completed = 0;
        for (Ready& ready : taken_) {
            outstanding_ -= ready.results.size();
            for (std::size_t i = 0; i < ready.results.size(); ++i) {
                const std::size_t slot = ready.slots[i];
                auto& result = ready.results[i];
                if (!result) fail(result.error().detail);
                if (const auto* granted = std::get_if<Granted>(&result->outcome)) {
                    items.push_back({nonces_[slot].key, complete_of(granted->token, nonces_[slot].nonce)});
                    slots.push_back(slot);
                } else if (std::holds_alternative<core::Applied>(result->outcome)) {
                    ++completed;
                    if (go_on) begin(slot, next, items, slots);
                } else {
                    fail("an outcome that is neither a grant nor a completion");
                }
            }
        }
        taken_.clear();
        if (!items.empty()) send(std::move(items), std::move(slots));
        return completed;
    }

    struct Slot {
        StoredKey key;
        Nonce nonce;
    };

    Store& store_;
    std::vector<Slot> nonces_;
    std::vector<std::size_t> slots_;
    std::size_t outstanding_ = 0;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<Ready> ready_;
    std::vector<Ready> taken_;
    bool waiting_ = false;
};

BatchResults ask(Store& store, std::vector<Item> items) {
    std::promise<BatchResults> promise;
    auto future = promise.get_future();
    store.submit(std::move(items), [&](BatchResults results) { promise.set_value(std::move(results)); });
    return future.get();
}

double lookups(Store& store, double seconds, const std::vector<StoredKey>& keys, bool acquire) {
    std::uint64_t done = 0;
    // Built once: the engine makes an operation per request whatever the store does.
    std::vector<std::vector<Item>> batches;
    for (std::size_t first = 0; first + in_flight <= keys.size(); first += in_flight) {
        std::vector<Item> items;
        for (std::size_t i = first; i < first + in_flight; ++i) {
            if (acquire) {
                items.push_back({keys[i], acquire_of(i)});
            } else {
                items.push_back({keys[i], Get{}});
            }
        }
        batches.push_back(std::move(items));
    }
    // Some batches on the way, as from engines whose loops go on while the store works.
    constexpr std::size_t ahead = 8;
    std::mutex mutex;
    std::condition_variable wake;
    std::size_t answered = 0;
    std::size_t sent = 0;
    const auto start = Steady::now();
    while (seconds_since(start) < seconds) {
        {
            std::unique_lock lock(mutex);
            wake.wait(lock, [&] { return sent - answered < ahead; });
        }
        store.submit(batches[sent++ % batches.size()], [&](BatchResults results) {
            for (const auto& result : results) {
                if (!result || (!std::holds_alternative<Replay>(result->outcome) &&
                                !std::holds_alternative<Found>(result->outcome))) {
                    fail("a duplicate's look-up found no record");
                }
            }
            const std::lock_guard lock(mutex);
            answered += 1;
            wake.notify_one();
        });
        done += in_flight;
    }
    std::unique_lock lock(mutex);
    wake.wait(lock, [&] { return sent == answered; });
    return static_cast<double>(done) / seconds_since(start);
}

std::size_t resident_bytes() {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
        if (line.starts_with("VmRSS:")) return static_cast<std::size_t>(std::atoll(line.c_str() + 6)) * 1024;
    }
    fail("/proc/self/status says no VmRSS");
}

// ---------------------------------------------------------------- what is measured

void measure_pairs(const Settings& settings) {
    Bare bare(settings.directory / "bare");
    auto opened = open_store(settings.directory / "semel", 8U << 20);
    Driver driver(*opened->store, in_flight);
    std::uint64_t bare_next = 0, next = 0;
    bare.pairs(settings.seconds / 4, bare_next);
    driver.run(settings.seconds / 4, next);
    std::vector<double> mine, reference;
    for (int round = 0; round < settings.rounds; ++round) {
        reference.push_back(bare.pairs(settings.seconds, bare_next));
        mine.push_back(driver.run(settings.seconds, next));
    }
    print_ratio("durable_pairs_64", mine, reference, "pairs/s", 0.80);
}

void measure_lone(const Settings& settings) {
    auto opened = open_store(settings.directory / "lone", 8U << 20);
    std::uint64_t next = 0;
    Driver driver(*opened->store, 1);
    driver.run(0.1, next);
    const std::uint64_t syncs_before = opened->counters.syncs, first = next;
    const double rate = driver.run(settings.seconds, next);
    const double syncs = static_cast<double>(opened->counters.syncs - syncs_before) / static_cast<double>(next - first);
    std::printf("{\"bench\":\"store\",\"name\":\"lone_caller_syncs\",\"value\":%.3f,\"limit\":2.0,\"ok\":%s,\"unit\":\"syncs/pair\","
                "\"pairs_per_s\":%.0f}\n",
                syncs, syncs <= 2.001 ? "true" : "false", rate);
    std::fflush(stdout);
}

void fill(Store& store, std::uint64_t count) {
    for (std::uint64_t first = 0; first < count; first += 500) {
        std::vector<Item> acquires, completes;
        for (std::uint64_t n = first; n < std::min(first + 500, count); ++n) acquires.push_back({key_of(n), acquire_of(n)});
        const std::vector<Item> asked = acquires;
        const BatchResults granted = ask(store, std::move(acquires));
        for (std::size_t i = 0; i < granted.size(); ++i) {
            if (!granted[i]) fail(granted[i].error().detail);
            completes.push_back({asked[i].key, complete_of(std::get<Granted>(granted[i]->outcome).token,
                                                           std::get<Acquire>(asked[i].operation).nonce)});
        }
        for (const auto& result : ask(store, std::move(completes))) {
            if (!result) fail(result.error().detail);
        }
    }
}

void measure_lookup(const Settings& settings) {
    Bare bare(settings.directory / "bare-lookup");
    bare.fill(0, lookup_records);
    std::vector<StoredKey> keys;
    for (std::uint64_t n = 0; n < lookup_records; ++n) keys.push_back(key_of(n));
    auto hot = open_store(settings.directory / "lookup", 64U << 20);
    fill(*hot->store, lookup_records);
    auto cold = open_store(settings.directory / "lookup-cold", 0);
    fill(*cold->store, lookup_records);
    std::vector<double> reference, acquires, gets, from_disk;
    for (int round = 0; round < settings.rounds; ++round) {
        const double seconds = settings.seconds / 4;
        reference.push_back(bare.gets(seconds, keys));
        acquires.push_back(lookups(*hot->store, seconds, keys, true));
        gets.push_back(lookups(*hot->store, seconds, keys, false));
        from_disk.push_back(lookups(*cold->store, seconds, keys, true));
    }
    print_ratio("duplicate_acquire_vs_db_get", acquires, reference, "lookups/s", 0.90);
    print_ratio("get_vs_db_get", gets, reference, "lookups/s", 0.90);
    print_ratio("duplicate_acquire_not_hot_vs_db_get", from_disk, reference, "lookups/s", 0);
}

void measure_memory(const Settings& settings) {
    constexpr std::size_t cache = (32U + 8U) << 20;
    const std::size_t before = resident_bytes();
    auto opened = open_store(settings.directory / "memory", 8U << 20);
    const std::size_t empty = resident_bytes();
    fill(*opened->store, memory_records);
    const std::size_t filled = resident_bytes();
    std::printf("{\"bench\":\"store\",\"name\":\"memory_100k_1KiB\",\"value\":%.1f,\"limit\":%.1f,\"ok\":%s,\"unit\":\"MiB growth\","
                "\"open_costs_MiB\":%.1f}\n",
                static_cast<double>(filled - empty) / 1048576.0, static_cast<double>(cache) / 1048576.0,
                filled - empty <= cache ? "true" : "false", static_cast<double>(empty - before) / 1048576.0);
    opened->store->stop();
    const auto start = Steady::now();
    opened = open_store(settings.directory / "memory", 8U << 20);
    std::printf("{\"bench\":\"store\",\"name\":\"open_100k\",\"value\":%.0f,\"unit\":\"ms\"}\n", seconds_since(start) * 1e3);
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    Settings settings;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string option = argv[i];
        if (option == "--dir") {
            settings.directory = argv[i + 1];
        } else if (option == "--rounds") {
            settings.rounds = std::max(1, std::atoi(argv[i + 1]));
        } else if (option == "--seconds") {
            settings.seconds = std::atof(argv[i + 1]);
        } else if (option == "--only") {
            settings.only = argv[i + 1];
        } else {
            fail("unknown option " + option + "; see the top of bench_store.cpp");
        }
    }
    std::filesystem::remove_all(settings.directory);
    std::filesystem::create_directories(settings.directory);
    const auto wanted = [&](const char* name) { return settings.only.empty() || settings.only == name; };
    // First, while the process is small.
    if (wanted("memory")) measure_memory(settings);
    if (wanted("pairs")) measure_pairs(settings);
    if (wanted("lone")) measure_lone(settings);
    if (wanted("lookup")) measure_lookup(settings);
    std::filesystem::remove_all(settings.directory);
}
