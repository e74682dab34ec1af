#include "core/watermark.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace semel::core {
namespace {

TEST(CommitWatermark, holes_are_no_reason_to_wait_and_no_reason_to_stop_short) {
    CommitWatermark mark(100);
    EXPECT_EQ(mark.committable(), 100);
    EXPECT_TRUE(mark.deliver(103));  // 100..102 were compacted away
    EXPECT_TRUE(mark.deliver(107));
    EXPECT_EQ(mark.committable(), 103) << "the lowest unfinished one";
    EXPECT_TRUE(mark.finish(103));
    EXPECT_EQ(mark.committable(), 107) << "104..106 do not exist";
    EXPECT_TRUE(mark.finish(107));
    EXPECT_EQ(mark.committable(), 108);
    mark.advance(111);  // markers of a transaction at the end
    EXPECT_EQ(mark.committable(), 111);
    mark.advance(105);
    EXPECT_EQ(mark.committable(), 111) << "never back";
}

TEST(CommitWatermark, the_end_of_the_partition_does_not_pass_an_unfinished_message) {
    CommitWatermark mark(0);
    mark.deliver(4);
    mark.advance(9);
    EXPECT_EQ(mark.committable(), 4);
    EXPECT_EQ(mark.position(), 9);
    EXPECT_FALSE(mark.deliver(8)) << "before the position: it was given, or is a marker";
    mark.finish(4);
    EXPECT_EQ(mark.committable(), 9);
}

TEST(CommitWatermark, repeated_and_unknown_finishes_are_told_apart_from_the_first) {
    CommitWatermark mark(0);
    for (std::int64_t offset = 0; offset < 4; ++offset) mark.deliver(offset);
    EXPECT_FALSE(mark.deliver(2)) << "delivered twice";
    EXPECT_TRUE(mark.finish(2));
    EXPECT_FALSE(mark.finish(2));
    EXPECT_FALSE(mark.finish(17));
    EXPECT_EQ(mark.committable(), 0);
    EXPECT_EQ(mark.in_flight(), 3u);
}

TEST(CommitWatermark, one_stuck_message_and_200000_finished_behind_it_take_no_memory) {
    constexpr std::int64_t count = 200'000;
    CommitWatermark mark(0);
    mark.deliver(0);
    std::size_t most = 0;
    for (std::int64_t offset = 1; offset <= count; ++offset) {
        mark.deliver(offset);
        ASSERT_TRUE(mark.finish(offset));
        most = std::max(most, mark.held());
    }
    EXPECT_EQ(mark.committable(), 0);
    EXPECT_LE(most, 2 + CommitWatermark::slack);
    mark.finish(0);
    EXPECT_EQ(mark.committable(), count + 1);
    EXPECT_EQ(mark.held(), 0u);
}

// The naive model keeps everything.
struct NaiveMark {
    std::int64_t position;
    std::map<std::int64_t, bool> finished;
    [[nodiscard]] std::int64_t committable() const {
        for (const auto& [offset, done] : finished) {
            if (!done) return offset;
        }
        return position;
    }
};

TEST(CommitWatermark, agrees_with_a_model_that_forgets_nothing) {
    for (unsigned seed = 0; seed < 60; ++seed) {
        std::mt19937 random(seed);
        const auto below = [&random](std::size_t n) {
            return std::uniform_int_distribution<std::size_t>(0, n - 1)(random);
        };
        const std::size_t width = std::size_t{1} << below(9);  // how far from the front it finishes
        CommitWatermark mark(static_cast<std::int64_t>(below(1000)));
        NaiveMark naive{.position = mark.position(), .finished = {}};
        std::vector<std::int64_t> open;
        std::int64_t before = mark.committable();
        for (int step = 0; step < 4000; ++step) {
            const std::size_t what = below(100);
            if (what < 48) {
                const std::int64_t offset =
                    naive.position + static_cast<std::int64_t>(below(4) == 0 ? below(50) : 0);
                ASSERT_TRUE(mark.deliver(offset));
                naive.finished[offset] = false;
                naive.position = offset + 1;
                open.push_back(offset);
            } else if (what < 94 && !open.empty()) {
                const auto at =
                    open.begin() + static_cast<std::ptrdiff_t>(below(std::min(width, open.size())));
                ASSERT_TRUE(mark.finish(*at));
                ASSERT_FALSE(mark.finish(*at));
                naive.finished[*at] = true;
                open.erase(at);
            } else if (what < 97) {
                naive.position += static_cast<std::int64_t>(below(5));
                mark.advance(naive.position);
            } else if (naive.position > 0) {
                ASSERT_FALSE(mark.deliver(naive.position - 1));
            }
            ASSERT_EQ(mark.committable(), naive.committable()) << "seed " << seed;
            ASSERT_EQ(mark.in_flight(), open.size()) << "seed " << seed;
            ASSERT_LE(mark.held(), 2 * open.size() + CommitWatermark::slack) << "seed " << seed;
            ASSERT_GE(mark.committable(), before) << "seed " << seed;
            before = mark.committable();
            if (step % 500 == 0) {  // the model is quadratic otherwise
                std::erase_if(naive.finished, [&](const auto& one) {
                    return one.second && one.first < naive.committable();
                });
            }
        }
    }
}

using Acks = std::vector<TagAcknowledgement>;

TEST(TagWatermark, acknowledges_all_up_to_the_lowest_unfinished_tag_at_once) {
    TagWatermark mark(10);
    for (std::uint64_t tag = 1; tag <= 5; ++tag) mark.deliver(tag);
    mark.finish(2);
    mark.finish(3);
    EXPECT_EQ(mark.take(), Acks{}) << "1 is unfinished";
    mark.finish(1);
    EXPECT_EQ(mark.take(), (Acks{{.tag = 3, .multiple = true}}));
    EXPECT_EQ(mark.take(), Acks{}) << "once";
    mark.finish(4);
    EXPECT_EQ(mark.take(), (Acks{{.tag = 4, .multiple = false}}));
    EXPECT_FALSE(mark.finish(4));
}

TEST(TagWatermark,
     what_waits_behind_a_stuck_message_is_acknowledged_alone_before_the_prefetch_is_used_up) {
    TagWatermark mark(3);
    for (std::uint64_t tag = 1; tag <= 6; ++tag) mark.deliver(tag);
    for (const std::uint64_t tag : {2u, 3u, 5u}) mark.finish(tag);
    EXPECT_EQ(mark.take(), Acks{});
    mark.finish(6);
    EXPECT_EQ(mark.take(), (Acks{{.tag = 2}, {.tag = 3}, {.tag = 5}, {.tag = 6}}));
    mark.finish(1);
    EXPECT_EQ(mark.take(), (Acks{{.tag = 1}})) << "2 and 3 are not named a second time";
    mark.finish(4);
    EXPECT_EQ(mark.take(), (Acks{{.tag = 4}}));
    EXPECT_EQ(mark.held(), 0u);
}

TEST(TagWatermark, a_broker_that_is_strict_about_tags_accepts_every_acknowledgement) {
    for (unsigned seed = 0; seed < 60; ++seed) {
        std::mt19937 random(seed);
        const auto below = [&random](std::size_t n) {
            return std::uniform_int_distribution<std::size_t>(0, n - 1)(random);
        };
        const std::size_t prefetch = 1 + below(200);
        const std::size_t singles = prefetch / 2;
        TagWatermark mark(singles);
        std::set<std::uint64_t> at_broker;  // delivered, not acknowledged
        std::vector<std::uint64_t> open;
        std::set<std::uint64_t> finished;
        std::uint64_t next = 1;
        for (int step = 0; step < 3000; ++step) {
            if (below(2) == 0 && at_broker.size() < prefetch) {
                mark.deliver(next);
                at_broker.insert(next);
                open.push_back(next++);
            } else if (!open.empty()) {
                const auto at = open.begin() + static_cast<std::ptrdiff_t>(below(open.size()));
                ASSERT_TRUE(mark.finish(*at));
                finished.insert(*at);
                open.erase(at);
            }
            if (below(4) != 0) continue;
            const bool all = below(20) == 0;
            for (const TagAcknowledgement& ack : mark.take(all)) {
                ASSERT_TRUE(at_broker.contains(ack.tag))
                    << "an unknown tag closes the channel; seed " << seed;
                std::vector<std::uint64_t> covered{ack.tag};
                if (ack.multiple)
                    covered.assign(at_broker.begin(), std::next(at_broker.find(ack.tag)));
                for (const std::uint64_t tag : covered) {
                    ASSERT_TRUE(finished.contains(tag))
                        << "unfinished and acknowledged; seed " << seed;
                    at_broker.erase(tag);
                }
            }
            ASSERT_LE(mark.waiting(), all ? 0 : singles) << "seed " << seed;
            ASSERT_LE(at_broker.size(), open.size() + singles) << "seed " << seed;
        }
    }
}

}  // namespace
}  // namespace semel::core
