// The embedded store with batches of messages: their claims lie together in one entry, their ends
// in another until many go to the index. Whatever is killed, purged or listed in between, the store
// says of each record what the transition table says.
#include <gtest/gtest.h>
#include <rocksdb/db.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>

#include "core/record_codec.hpp"
#include "core/transition.hpp"
#include "integration/store_work.hpp"
#include "stores/rocksdb/ends.hpp"
#include "stores/rocksdb/layout.hpp"
#include "stores/rocksdb/rocksdb_store.hpp"
#include "support/manual_clock.hpp"

using namespace semel;
using namespace semel::core;
using namespace semel::integration;
using namespace std::chrono_literals;
namespace fs = std::filesystem;
using stores::RocksDbReport;

namespace {

/// Above what a kill may move the store's clock by (10 s).
constexpr std::chrono::milliseconds kept{60'000};

struct RocksDbClaims : testing::Test {
    RocksDbClaims() {
        std::string name = (fs::temp_directory_path() / "semel-claims-XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr)
            throw std::runtime_error("cannot make a directory like " + name);
        place = name;
    }
    ~RocksDbClaims() override {
        store.reset();
        std::error_code ignored;
        fs::remove_all(place, ignored);
    }

    void open(const fs::path& path, RocksDbReport* report = nullptr) {
        auto opened = stores::open_rocksdb_store(
            {.path = path.string(), .sync = false, .clock = &clock}, report);
        if (!opened) throw std::runtime_error(opened.error().detail);
        store = std::move(*opened);
    }
    /// Goes on with the files as they are now, as after SIGKILL.
    RocksDbReport kill() {
        const fs::path image = place / ("image" + std::to_string(++images));
        // RocksDB may be putting its files in order: all are to be of one moment.
        for (std::map<fs::path, std::uintmax_t> before; before.empty() || before != sizes();) {
            fs::remove_all(image);
            before = sizes();
            std::error_code gone;
            fs::copy(current, image, fs::copy_options::recursive, gone);
            if (gone) before.clear();
        }
        store.reset();
        fs::remove_all(current);
        current = image;
        RocksDbReport report;
        open(current, &report);
        return report;
    }

    /// Of the files as they are now.
    [[nodiscard]] std::map<fs::path, std::uintmax_t> sizes() const {
        std::map<fs::path, std::uintmax_t> out;
        for (const auto& entry : fs::directory_iterator(current)) {
            std::error_code gone;
            const std::uintmax_t size = entry.file_size(gone);
            if (!gone) out[entry.path()] = size;
        }
        return out;
    }

    static Policy message_policy() {
        Policy policy;
        policy.kind = IntentKind::message;
        policy.retention_completed = policy.retention_failed = policy.retention_dead = kept;
        return policy;
    }
    /// Claims [first, last) in one batch.
    std::map<std::uint64_t, FencingToken> claim(std::uint64_t first, std::uint64_t last) {
        std::vector<Item> items;
        for (std::uint64_t n = first; n < last; ++n)
            items.push_back({key_of(n), acquire_of(n, message_policy())});
        const BatchResults results = ask(*store, std::move(items));
        std::map<std::uint64_t, FencingToken> tokens;
        for (std::uint64_t n = first; n < last; ++n)
            tokens[n] = std::get<Granted>(results[n - first]->outcome).token;
        return tokens;
    }
    static Complete end_of(std::uint64_t n, FencingToken token) {
        Complete op;
        op.token = token;
        op.nonce = nonce_of(n);
        op.answer.http_status = 200;
        return op;
    }
    /// Completes [first, last) in one batch.
    void complete(const std::map<std::uint64_t, FencingToken>& tokens, std::uint64_t first,
                  std::uint64_t last) {
        std::vector<Item> items;
        for (std::uint64_t n = first; n < last; ++n)
            items.push_back({key_of(n), end_of(n, tokens.at(n))});
        for (const auto& result : ask(*store, std::move(items)))
            ASSERT_TRUE(std::holds_alternative<Applied>(result->outcome));
    }
    RecordPtr get(std::uint64_t n) {
        auto result = ask(*store, key_of(n), Get{});
        if (!result) throw std::runtime_error(result.error().detail);
        return std::get<Found>(result->outcome).record;
    }
    /// All keys that pages of `limit` list, in their order.
    std::vector<StoredKey> listed(const ScanFilter& filter, std::size_t limit) {
        std::vector<StoredKey> keys;
        std::string cursor;
        do {
            auto page = store->scan(filter, cursor, limit);
            if (!page) throw std::runtime_error(page.error().detail);
            EXPECT_LE(page->records.size(), limit);
            for (const auto& [key, record] : page->records) keys.push_back(key);
            cursor = page->next;
        } while (!cursor.empty());
        return keys;
    }

    support::ManualClock clock;
    fs::path place;
    fs::path current;
    int images = 0;
    std::unique_ptr<Store> store;
};

TEST_F(RocksDbClaims,
       after_a_kill_the_claims_of_a_batch_are_open_and_what_was_decided_stays_decided) {
    open(current = place / "data");
    const auto tokens = claim(0, 100);
    complete(tokens, 0, 60);
    RocksDbReport report = kill();
    EXPECT_EQ(report.undecided, 40U);
    EXPECT_EQ(report.leases_killed, 40U);
    for (std::uint64_t n = 0; n < 100; ++n)
        EXPECT_EQ(get(n)->status, n < 60 ? Status::completed : Status::processing) << n;
    Acquire next = acquire_of(70, message_policy());
    next.nonce.bytes[15] = 1;
    auto result = ask(*store, key_of(70), next);
    const auto* granted = std::get_if<Granted>(&result->outcome);
    ASSERT_NE(granted, nullptr);
    EXPECT_EQ(granted->kind, Granted::Kind::takeover);
    EXPECT_EQ(granted->attempt, 2U);
    report = kill();
    EXPECT_EQ(report.undecided, 40U);
    EXPECT_EQ(get(70)->attempt, 2U);
}

TEST_F(RocksDbClaims, a_purged_message_does_not_come_back_with_the_claim_it_shared_an_entry_with) {
    open(current = place / "data");
    const auto tokens = claim(0, 16);
    complete(tokens, 0, 15);
    clock.advance(kept + 1s);
    EXPECT_EQ(store->purge(1000).value(), 15U);
    const RocksDbReport report = kill();
    EXPECT_EQ(report.undecided, 1U);
    for (std::uint64_t n = 0; n < 15; ++n) EXPECT_EQ(get(n), nullptr) << n;
    EXPECT_EQ(get(15)->status, Status::processing);
}

TEST_F(RocksDbClaims, a_purge_takes_no_more_than_it_may_of_messages_that_expire_together) {
    open(current = place / "data");
    complete(claim(0, 20), 0, 20);
    EXPECT_EQ(store->purge(100).value(), 0U);
    clock.advance(kept + 1s);
    EXPECT_EQ(store->purge(7).value(), 7U);
    EXPECT_EQ(store->purge(7).value(), 7U);
    EXPECT_EQ(store->purge(100).value(), 6U);
    EXPECT_TRUE(listed({}, 100).empty());
}

TEST_F(RocksDbClaims, claims_that_lie_together_are_listed_in_order_and_once) {
    open(current = place / "data");
    const auto tokens = claim(0, 40);
    complete(tokens, 10, 30);
    std::set<StoredKey> all, undecided;
    for (std::uint64_t n = 0; n < 40; ++n) {
        all.insert(key_of(n));
        if (n < 10 || n >= 30) undecided.insert(key_of(n));
    }
    for (const std::size_t limit : {1U, 3U, 40U, 100U}) {
        EXPECT_EQ(listed({}, limit), std::vector<StoredKey>(all.begin(), all.end())) << limit;
        EXPECT_EQ(listed({.undecided_only = true}, limit),
                  std::vector<StoredKey>(undecided.begin(), undecided.end()));
    }
    EXPECT_EQ(listed({.status = static_cast<std::uint8_t>(Status::completed)}, 7).size(), 20U);
}

TEST_F(RocksDbClaims,
       claims_that_stay_open_for_long_are_not_forgotten_when_there_are_too_many_entries) {
    open(current = place / "data");
    constexpr std::uint64_t batches = 1100, size = 8;
    for (std::uint64_t batch = 0; batch < batches; ++batch) {
        const std::uint64_t first = batch * size;
        complete(claim(first, first + size), first + 1, first + size);
    }
    const RocksDbReport report = kill();
    EXPECT_EQ(report.undecided, batches);
    for (std::uint64_t batch = 0; batch < batches; ++batch) {
        EXPECT_EQ(get(batch * size)->status, Status::processing);
        EXPECT_EQ(get(batch * size + 1)->status, Status::completed);
    }
}

TEST_F(RocksDbClaims,
       a_directory_of_the_first_layout_is_read_and_is_of_the_present_one_afterwards) {
    namespace layout = stores::layout;
    current = place / "data";
    fs::create_directories(current);
    std::ofstream(current / layout::version_file) << "1\n";
    const StoreTime at{clock.wall_us()};
    // As the version before wrote them: a claim, and an answered intent.
    Transition claimed = decide(nullptr, Operation(acquire_of(1, message_policy())), at);
    Transition answered = decide(nullptr, Operation(acquire_of(2)), at);
    answered = decide(answered.record, Operation(complete_of(2, answered.record->token, 300)), at);
    {
        rocksdb::DBOptions options;
        options.create_if_missing = options.create_missing_column_families = true;
        std::vector<rocksdb::ColumnFamilyDescriptor> families;
        for (const char* name : {layout::meta_family, layout::index_family, layout::answers_family,
                                 layout::chunks_family, layout::conversations_family})
            families.emplace_back(name, rocksdb::ColumnFamilyOptions{});
        std::vector<rocksdb::ColumnFamilyHandle*> handles;
        rocksdb::DB* raw = nullptr;
        ASSERT_TRUE(rocksdb::DB::Open(options, current.string(), families, &handles, &raw).ok());
        const std::unique_ptr<rocksdb::DB> db(raw);
        const auto put = [&](std::size_t family, std::string_view key, const std::string& value) {
            ASSERT_TRUE(
                db->Put({}, handles[family], rocksdb::Slice(key.data(), key.size()), value).ok());
        };
        std::string time;
        layout::put_u64(time, static_cast<std::uint64_t>(at.us));
        put(0, layout::clock_key, time);
        std::string value(1, layout::index_holds_record);
        encode_record(*claimed.record, true, value);
        put(1, key_of(1).view(), value);
        const std::string where = layout::encode(layout::AnswerKey{answered.record->expires, 7});
        put(1, key_of(2).view(), layout::index_points + where);
        value = key_of(2).view();
        encode_record(*answered.record, true, value);
        put(2, where, value);
        for (rocksdb::ColumnFamilyHandle* handle : handles)
            ASSERT_TRUE(db->DestroyColumnFamilyHandle(handle).ok());
    }
    RocksDbReport report;
    open(current, &report);
    EXPECT_EQ(report.undecided, 1U);
    EXPECT_EQ(get(1)->status, Status::processing);
    EXPECT_EQ(*get(2)->answer->body, body_of(2, 300));
    std::string version;
    std::ifstream(current / layout::version_file) >> version;
    EXPECT_EQ(version, std::to_string(stores::rocksdb_layout_version));
    complete(claim(10, 30), 10, 30);
    EXPECT_EQ(listed({}, 100).size(), 22U);
}

TEST_F(RocksDbClaims, more_ends_than_one_lot_are_found_on_their_way_to_the_index_and_after_it) {
    open(current = place / "data");
    // One lot is taken over as a file, another has begun.
    constexpr std::uint64_t count = stores::Ends::lot_max + 5000, size = 512;
    const auto check = [&](std::uint64_t until, const char* when) {
        for (std::uint64_t n = 0; n < until; n += 97) {
            const RecordPtr record = get(n);
            ASSERT_NE(record, nullptr) << n << when;
            ASSERT_EQ(record->status, Status::completed) << n << when;
        }
    };
    for (std::uint64_t n = 0; n < count; n += size) {
        const std::uint64_t to = std::min(n + size, count);
        complete(claim(n, to), n, to);
        if (n % (64 * size) == 0) check(to, "");
    }
    check(count, " in the end");
    EXPECT_EQ(listed({}, 50'000).size(), count);
    EXPECT_EQ(kill().undecided, 0U);
    check(count, " after a kill");
    EXPECT_EQ(listed({}, 50'000).size(), count);
    store.reset();
    open(current);
    check(count, " after a stop");
    clock.advance(kept + 1s);
    EXPECT_EQ(store->purge(2 * count).value(), count);
    EXPECT_TRUE(listed({}, 100).empty());
    kill();
    EXPECT_TRUE(listed({}, 100).empty());
    EXPECT_EQ(get(0), nullptr);
}

TEST_F(RocksDbClaims, what_expired_and_ran_again_is_not_overwritten_by_its_end_on_the_way) {
    open(current = place / "data");
    constexpr std::uint64_t count = stores::Ends::lot_max, size = 512;
    for (std::uint64_t n = 0; n < count; n += size) complete(claim(n, n + size), n, n + size);
    // The lot sets out with the next turn of the writer, if it has not yet.
    const std::uint64_t first = get(7)->token.value;
    clock.advance(kept + 1s);
    const auto again = claim(0, 100);
    complete(again, 0, 50);
    const auto check = [&](const char* when) {
        for (std::uint64_t n = 0; n < 100; ++n) {
            const RecordPtr record = get(n);
            ASSERT_NE(record, nullptr) << n << when;
            ASSERT_EQ(record->token, again.at(n)) << n << when;
            ASSERT_EQ(record->status, n < 50 ? Status::completed : Status::processing) << n << when;
        }
    };
    ASSERT_LT(first, again.at(7).value);
    check("");
    // What comes next and what is purged changes nothing of it.
    for (std::uint64_t n = count; n < count + 4 * size; n += size)
        complete(claim(n, n + size), n, n + size);
    EXPECT_EQ(store->purge(2 * count).value(), count - 100);
    check(" after a purge");
    EXPECT_EQ(kill().undecided, 50U);
    check(" after a kill");
}

TEST_F(RocksDbClaims, ends_that_cannot_be_taken_over_as_a_file_are_put_into_the_index) {
    open(current = place / "data");
    // Nobody can write a file of that name.
    fs::create_directories(current / stores::layout::sorted_file / "in the way");
    constexpr std::uint64_t count = stores::Ends::lot_max + 2048, size = 512;
    for (std::uint64_t n = 0; n < count; n += size) complete(claim(n, n + size), n, n + size);
    EXPECT_EQ(listed({}, 50'000).size(), count);
    kill();
    EXPECT_EQ(listed({}, 50'000).size(), count);
    for (std::uint64_t n = 0; n < count; n += 97) ASSERT_EQ(get(n)->status, Status::completed) << n;
}

TEST_F(RocksDbClaims, a_file_of_ends_that_a_kill_left_is_gone_after_the_next_opening) {
    open(current = place / "data");
    complete(claim(0, 20), 0, 20);
    std::ofstream(current / stores::layout::sorted_file) << "half of it";
    kill();
    EXPECT_FALSE(fs::exists(current / stores::layout::sorted_file));
    EXPECT_EQ(listed({}, 100).size(), 20U);
}

/// What the store is held against: the transition table on a map.
struct Table {
    std::map<std::uint64_t, RecordPtr> records;

    /// When a dead lease ended depends on renewals, which a kill forgets.
    static std::string bytes(const RecordPtr& record, StoreTime at) {
        std::string out;
        if (!record) return out;
        Record copy = *record;
        if (copy.status == Status::processing && copy.lease_end <= at) copy.lease_end = {};
        encode_record(copy, true, out);
        return out;
    }
    RecordPtr live(std::uint64_t n, StoreTime at) const {
        const auto it = records.find(n);
        if (it == records.end()) return nullptr;
        return it->second->expires.us != 0 && it->second->expires <= at ? nullptr : it->second;
    }
    void apply(std::uint64_t n, Operation operation, StoreTime at) {
        const auto it = records.find(n);
        Transition step =
            decide(it == records.end() ? nullptr : it->second, std::move(operation), at);
        if (step.write != Transition::Write::none) records[n] = step.record;
    }
};

TEST_F(RocksDbClaims,
       whatever_comes_in_batches_with_kills_and_purges_between_is_what_the_table_says) {
    open(current = place / "data");
    std::mt19937_64 random(20261130);
    const auto below = [&](std::uint64_t bound) { return random() % bound; };
    constexpr std::uint64_t keys = 60;
    Table table;
    for (int round = 0; round < 600; ++round) {
        const std::uint64_t size = 1 + below(40);
        std::vector<Item> items;
        std::vector<std::pair<std::uint64_t, Operation>> asked;
        for (std::uint64_t i = 0; i < size; ++i) {
            const std::uint64_t n = below(keys);
            const auto it = table.records.find(n);
            const FencingToken token =
                it == table.records.end() ? FencingToken{1} : it->second->token;
            const Nonce nonce = it == table.records.end() ? nonce_of(n) : it->second->nonce;
            Operation op = Get{};
            switch (below(8)) {
                case 0:
                case 1:
                case 2: {
                    Acquire claim = acquire_of(n, message_policy());
                    claim.nonce.bytes[15] = static_cast<std::uint8_t>(1 + below(3));
                    claim.lease = 5s;
                    if (below(10) == 0) claim.policy.max_attempts = 1;
                    op = claim;
                    break;
                }
                case 3:
                case 4: {
                    Complete end = end_of(n, token);
                    end.nonce = nonce;
                    // Sometimes too large for the index.
                    if (below(6) == 0) {
                        end.answer.body = std::make_shared<const std::string>(body_of(n, 400));
                        end.answer.body_bytes = 400;
                    }
                    op = end;
                    break;
                }
                case 5: {
                    Fail end;
                    end.token = token;
                    end.nonce = nonce;
                    end.certainty = below(2) == 0 ? Certainty::unknown : Certainty::not_processed;
                    end.failure = {"failed", "by the test", 0};
                    end.delay = std::chrono::milliseconds(below(3000));
                    op = end;
                    break;
                }
                case 6:
                    op = Release{token, nonce};
                    break;
                case 7:
                    if (below(2) == 0) {
                        op = Settle{token};
                    } else {
                        op = LetterPublished{token};
                    }
                    break;
            }
            asked.emplace_back(n, op);
            items.push_back(
                {key_of(n), std::visit([](auto& one) -> StoreOperation { return one; }, op)});
        }
        const BatchResults results = ask(*store, std::move(items));
        for (std::uint64_t i = 0; i < size; ++i) {
            ASSERT_TRUE(results[i].has_value()) << results[i].error().detail;
            table.apply(asked[i].first, asked[i].second, results[i]->at);
        }
        clock.advance(std::chrono::milliseconds(below(2000)));
        if (below(12) == 0) {
            const std::size_t limit = 1 + below(50);
            ASSERT_LE(store->purge(limit).value(), limit);
        }
        if (below(40) == 0) {
            kill();
            const StoreTime at = store->now();
            for (auto& [n, record] : table.records) {
                if (record->status != Status::processing) continue;
                Record dead = *record;
                dead.lease_end = std::min(dead.lease_end, at);
                record = std::make_shared<const Record>(std::move(dead));
            }
        }
        if (below(20) != 0) continue;
        std::set<StoredKey> present;
        for (std::uint64_t n = 0; n < keys; ++n) {
            auto result = ask(*store, key_of(n), Get{});
            ASSERT_TRUE(result.has_value());
            const RecordPtr expected = table.live(n, result->at);
            const RecordPtr found = std::get<Found>(result->outcome).record;
            ASSERT_EQ(Table::bytes(found, result->at), Table::bytes(expected, result->at))
                << "record " << n << " in round " << round;
            if (found) present.insert(key_of(n));
        }
        ASSERT_EQ(listed({}, 1 + below(70)), std::vector<StoredKey>(present.begin(), present.end()))
            << round;
    }
}

}  // namespace
