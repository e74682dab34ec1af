#include "gateway/journal.hpp"

#include <gtest/gtest.h>

#include <filesystem>

#include "gateway/flight.hpp"

namespace semel::gateway {
namespace {

std::string all_of(const Journal& journal, std::size_t step) {
    std::string all;
    std::string part;
    for (;;) {
        journal.read(all.size(), step, part);
        if (part.empty()) return all;
        all += part;
    }
}

TEST(Journal, what_outgrows_memory_is_read_back_the_same_and_leaves_no_file) {
    const auto folder = std::filesystem::path(testing::TempDir()) / "semel-journal-test";
    std::filesystem::create_directories(folder);
    Journal journal(folder.string());
    std::string expected;
    for (int i = 0; i < 40; ++i) {
        const std::string piece(99'991, static_cast<char>('a' + i % 26));
        expected += piece;
        ASSERT_TRUE(journal.append(piece));
    }
    ASSERT_GT(expected.size(), journal_memory_max_bytes);
    journal.finish(Journal::End::whole, "end");
    expected += "end";
    EXPECT_EQ(all_of(journal, 65'536), expected);
    EXPECT_EQ(all_of(journal, 7'777'777), expected);
    EXPECT_EQ(journal.view().last_at, expected.size() - 3);
    EXPECT_EQ(journal.body(), nullptr);
    EXPECT_TRUE(std::filesystem::is_empty(folder));
}

TEST(Journal, a_spill_file_that_cannot_be_made_cuts_the_answer) {
    Journal journal("/nonexistent/folder");
    EXPECT_TRUE(journal.append(std::string(journal_memory_max_bytes, 'x')));
    EXPECT_FALSE(journal.append("y"));
    EXPECT_EQ(journal.view().end, Journal::End::cut);
    journal.finish(Journal::End::whole, "z");
    EXPECT_EQ(journal.view().end, Journal::End::cut);
}

TEST(Journal, what_is_held_is_seen_with_the_end_only_and_counts_as_its_last_bytes) {
    Journal journal("/tmp");
    journal.set_head({.status = 200}, true);
    journal.append("ab");
    ASSERT_TRUE(journal.append_held("cd"));
    ASSERT_TRUE(journal.append_held(std::string(journal_memory_max_bytes, 'e')));  // spills
    EXPECT_EQ(journal.view().bytes, 2u);
    EXPECT_EQ(journal.stored(), 4 + journal_memory_max_bytes);
    EXPECT_EQ(all_of(journal, 7), "ab");
    journal.finish(Journal::End::whole, "f");
    EXPECT_EQ(journal.view().last_at, 2u);
    EXPECT_EQ(all_of(journal, 65'536),
              "abcd" + std::string(journal_memory_max_bytes, 'e') + "f");

    Journal overtaken("/tmp");
    overtaken.append("ab");
    overtaken.append_held("cd");
    overtaken.drop_held();
    overtaken.finish(Journal::End::cut, {});
    EXPECT_EQ(all_of(overtaken, 7), "ab");
}

TEST(Journal, nothing_comes_after_its_end) {
    Journal journal("/tmp");
    journal.set_head({.status = 200}, true);
    journal.append("a");
    journal.finish(Journal::End::whole, "b");
    EXPECT_FALSE(journal.append("c"));
    journal.finish(Journal::End::cut, "d");
    EXPECT_EQ(journal.view().end, Journal::End::whole);
    EXPECT_EQ(*journal.body(), "ab");
}

TEST(Flights, the_first_to_enter_leads_and_only_its_own_flight_is_left) {
    Flights flights;
    core::StoredKey key;
    key.bytes[0] = 1;
    const auto first = flights.enter(key, {}, "/tmp", {});
    const auto second = flights.enter(key, {}, "/tmp", {});
    EXPECT_TRUE(first.leads);
    EXPECT_FALSE(second.leads);
    EXPECT_EQ(first.flight, second.flight);
    flights.leave(key, first.flight);
    const auto third = flights.enter(key, {}, "/tmp", {});
    EXPECT_TRUE(third.leads);
    flights.leave(key, first.flight);  // late: must not forget the third's
    EXPECT_EQ(flights.find(key), third.flight);
    EXPECT_EQ(flights.size(), 1u);
}

TEST(Flight, followers_are_limited) {
    Flight flight({}, "/tmp", {});
    for (std::uint32_t i = 0; i < followers_max; ++i) ASSERT_TRUE(flight.attach());
    EXPECT_FALSE(flight.attach());
    flight.detach({});
    EXPECT_TRUE(flight.attach());
}

}  // namespace
}  // namespace semel::gateway
