#include "stores/rocksdb/layout.hpp"

#include <gtest/gtest.h>

#include "base/hash.hpp"

namespace semel::stores::layout {
namespace {

const core::StoredKey key = base::sha256("a");

TEST(Layout, answers_sort_by_expiry_and_then_by_number) {
    EXPECT_LT(encode(AnswerKey{{255}, 9}), encode(AnswerKey{{256}, 1}));
    EXPECT_LT(encode(AnswerKey{{256}, 255}), encode(AnswerKey{{256}, 256}));
}

TEST(Layout, an_answer_key_comes_back_and_another_length_is_refused) {
    const AnswerKey where{{1'800'000'000'000'000}, 77};
    EXPECT_EQ(decode_answer_key(encode(where)), where);
    EXPECT_FALSE(decode_answer_key(encode(where).substr(1)));
}

TEST(Layout, a_chunk_key_comes_back_and_sorts_by_number) {
    const auto name = decode_chunk_key(chunk_key(key, {1'800'000'000'000'000}, 300));
    ASSERT_TRUE(name);
    EXPECT_EQ(name->key, key);
    EXPECT_EQ(name->token.value, 1'800'000'000'000'000U);
    EXPECT_EQ(name->n, 300U);
    EXPECT_LT(chunk_key(key, {1}, 255), chunk_key(key, {1}, 256));
    EXPECT_LT(chunk_key(key, {1}, 256), chunk_key(key, {1}, chunk_keep_until));
    EXPECT_FALSE(decode_chunk_key("short"));
}

TEST(Layout, a_conversation_head_comes_back) {
    const core::Conversation head{.created = {1}, .last_used = {2}, .turns = 3};
    const auto back = decode_conversation(encode(head));
    ASSERT_TRUE(back);
    EXPECT_EQ(back->created, head.created);
    EXPECT_EQ(back->last_used, head.last_used);
    EXPECT_EQ(back->turns, head.turns);
    EXPECT_FALSE(decode_conversation("x"));
}

TEST(Layout, a_turn_comes_back_with_bytes_of_any_kind) {
    const core::Turn turn{.number = 5, .request_id = std::string("i\0d", 3), .user_content = "\xff\x00ü", .answer_content = "",
                          .at = {9}, .late = true};
    const auto back = decode_turn(5, encode(turn));
    ASSERT_TRUE(back);
    EXPECT_EQ(back->number, 5U);
    EXPECT_EQ(back->request_id, turn.request_id);
    EXPECT_EQ(back->user_content, turn.user_content);
    EXPECT_EQ(back->answer_content, turn.answer_content);
    EXPECT_EQ(back->at, turn.at);
    EXPECT_TRUE(back->late);
}

TEST(Layout, a_turn_whose_lengths_point_behind_its_end_is_refused) {
    std::string bytes = encode(core::Turn{.request_id = "id", .user_content = "question", .answer_content = "answer"});
    EXPECT_FALSE(decode_turn(1, std::string_view(bytes).substr(0, 10)));
    bytes[9] = '\x7f';
    EXPECT_FALSE(decode_turn(1, bytes));
}

TEST(Layout, claims_come_back_in_order_and_cut_ones_are_refused) {
    std::string bytes;
    put_claim(bytes, key, "first");
    put_claim(bytes, base::sha256("b"), "");
    std::string_view rest = bytes;
    const auto first = take_claim(rest);
    ASSERT_TRUE(first);
    EXPECT_EQ(first->key, key);
    EXPECT_EQ(first->record, "first");
    const auto second = take_claim(rest);
    ASSERT_TRUE(second);
    EXPECT_EQ(second->key, base::sha256("b"));
    EXPECT_EQ(second->record, "");
    EXPECT_TRUE(rest.empty());
    rest = std::string_view(bytes).substr(0, 36 + 4);  // of "first" only "firs"
    EXPECT_FALSE(take_claim(rest));
    rest = std::string_view(bytes).substr(0, 35);
    EXPECT_FALSE(take_claim(rest));
}

}  // namespace
}  // namespace semel::stores::layout
