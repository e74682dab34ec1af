#include "stores/rocksdb/ends.hpp"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>

namespace semel::stores {
namespace {

core::StoredKey key_of(std::uint64_t n) {
    std::mt19937_64 random(n);
    core::StoredKey key;
    for (auto& byte : key.bytes) byte = static_cast<std::uint8_t>(random());
    return key;
}

void add(Ends& ends, std::uint64_t number, std::uint64_t from, std::uint64_t to,
         const std::string& value) {
    std::string bytes;
    std::vector<std::size_t> at;
    for (std::uint64_t n = from; n < to; ++n) {
        at.push_back(bytes.size());
        layout::put_claim(bytes, key_of(n), value + std::to_string(n));
    }
    const char* const begin = ends.add_entry(number, std::move(bytes));
    for (const std::size_t one : at) ends.add(begin + one);
}

TEST(Ends, each_is_found_in_either_lot_and_the_younger_one_counts) {
    Ends ends;
    EXPECT_TRUE(ends.empty());
    add(ends, 1, 0, 3000, "a");
    ends.set_out();
    add(ends, 2, 2000, 4000, "b");
    EXPECT_EQ(ends.find(key_of(0)), "a0");
    EXPECT_EQ(ends.find(key_of(2500)), "b2500");
    EXPECT_EQ(ends.find(key_of(3999)), "b3999");
    EXPECT_EQ(ends.find(key_of(4000)), std::nullopt);
    ends.moved();
    EXPECT_EQ(ends.over(), std::vector<std::uint64_t>{1});
    EXPECT_EQ(ends.find(key_of(0)), std::nullopt);
    EXPECT_EQ(ends.find(key_of(2500)), "b2500");
    EXPECT_FALSE(ends.empty());
}

TEST(Ends, a_lot_sets_out_with_its_keys_in_order) {
    Ends ends;
    add(ends, 1, 0, 5000, "v");
    ends.set_out();
    const auto sorted = Ends::sorted(ends.moving_places());
    ASSERT_EQ(sorted.size(), 5000U);
    for (std::size_t i = 1; i < sorted.size(); ++i) ASSERT_LT(sorted[i - 1].key, sorted[i].key);
    const auto behind = ends.behind(sorted[9].key);
    ASSERT_EQ(behind.size(), 4990U);
    EXPECT_EQ(behind.front().key, sorted[10].key);
    EXPECT_EQ(behind.front().value, sorted[10].value);
}

TEST(Ends, an_erased_end_is_told_of_its_lot) {
    Ends ends;
    add(ends, 1, 0, 100, "v");
    EXPECT_FALSE(ends.superseded());
    ends.set_out();
    ends.erase(key_of(200));
    EXPECT_FALSE(ends.moving_superseded());
    ends.erase(key_of(5));
    EXPECT_TRUE(ends.moving_superseded());
    EXPECT_TRUE(ends.superseded());
    EXPECT_EQ(ends.find(key_of(5)), std::nullopt);
    EXPECT_EQ(ends.moving_places().size(), 99U);
    ends.moved();
    EXPECT_FALSE(ends.superseded());
    EXPECT_TRUE(ends.empty());
}

TEST(Ends, it_finds_what_a_map_finds_while_ends_come_and_go) {
    Ends ends;
    std::map<std::uint64_t, std::string> model;
    std::mt19937_64 random(7);
    std::uint64_t number = 0;
    for (int step = 0; step < 20'000; ++step) {
        const std::uint64_t n = random() % 3000;
        if (random() % 3 != 0) {
            const std::string value = std::to_string(++number) + ":";
            add(ends, number, n, n + 1, value);
            model[n] = value + std::to_string(n);
        } else {
            ends.erase(key_of(n));
            model.erase(n);
        }
    }
    for (std::uint64_t n = 0; n < 3000; ++n) {
        const auto known = model.find(n);
        const auto found = ends.find(key_of(n));
        ASSERT_EQ(found.has_value(), known != model.end()) << n;
        if (found) {
            ASSERT_EQ(*found, known->second);
        }
    }
    EXPECT_EQ(ends.behind({}).size(), model.size());
}

TEST(Ends, a_lot_is_full_by_number_or_by_bytes) {
    Ends ends;
    for (std::uint64_t i = 0; i < 7; ++i) add(ends, i, 0, 1, std::string(2U << 20, 'x'));
    EXPECT_FALSE(ends.full());
    add(ends, 7, 0, 1, std::string(2U << 20, 'x'));
    EXPECT_TRUE(ends.full());
}

}  // namespace
}  // namespace semel::stores
