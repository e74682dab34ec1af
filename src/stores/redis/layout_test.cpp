#include "stores/redis/layout.hpp"

#include <gtest/gtest.h>

#include "stores/redis/client.hpp"
#include "support/random_records.hpp"

namespace semel::stores::redis {
namespace {

std::string encoded(const core::Record& record) {
    std::string out;
    encode(record, out);
    return out;
}

TEST(RedisLayout, every_record_comes_back_as_it_was) {
    support::Records records(7);
    for (int i = 0; i < 2000; ++i) {
        const core::Record record = records.next();
        const auto back = decode(encoded(record));
        ASSERT_TRUE(back) << back.error().detail;
        support::expect_equal(record, *back, true);
    }
}

TEST(RedisLayout, a_record_begins_with_the_times_of_its_grant) {
    core::Record record;
    record.token.value = 11;
    record.lease_end.us = 22;
    record.created.us = 33;
    const std::string bytes = encoded(record);
    Cursor times(bytes);
    EXPECT_EQ(times.u64(), 11U);
    EXPECT_EQ(times.u64(), 22U);
    EXPECT_EQ(times.u64(), 33U);
    EXPECT_EQ(times.u8(), layout_version);
    const std::size_t header = 212;
    EXPECT_EQ(bytes.size(), header + 2);  // two empty names of the owner
}

TEST(RedisLayout, bytes_that_are_cut_or_too_long_are_refused) {
    support::Records records(8);
    const std::string bytes = encoded(records.next());
    for (std::size_t size = 0; size < bytes.size(); ++size) {
        const auto cut = decode(std::string_view(bytes).substr(0, size));
        ASSERT_FALSE(cut) << size;
        EXPECT_EQ(cut.error().code, base::ErrorCode::store_corrupt);
    }
    EXPECT_FALSE(decode(bytes + "x"));
}

TEST(RedisLayout, a_newer_layout_is_named_and_an_unknown_state_is_damage) {
    std::string bytes = encoded(core::Record{});
    bytes[24] = static_cast<char>(layout_version + 1);
    EXPECT_EQ(decode(bytes).error().code, base::ErrorCode::store_version);
    bytes[24] = static_cast<char>(layout_version);
    for (const std::size_t at : {25U, 32U, 33U, 34U}) {
        std::string damaged = bytes;
        damaged[at] = 9;
        EXPECT_EQ(decode(damaged).error().code, base::ErrorCode::store_corrupt) << at;
    }
    core::Record contradicts;
    contradicts.final = true;
    EXPECT_FALSE(decode(encoded(contradicts)));
}

TEST(RedisLayout, names_of_a_key_share_its_buckets_tag_and_are_read_back) {
    const Names names("my*prefix");
    core::StoredKey key = base::sha256("a key");
    const std::string tag = [&] {
        const std::string name = names.record(key);
        return name.substr(name.find('{'), name.find('}') - name.find('{') + 1);
    }();
    const core::FencingToken token{1'800'000'000'000'001};
    for (const std::string& name :
         {names.record(key), names.conversation(key), names.chunk(key, token, 7),
          names.undecided(core::bucket_of(key)), names.parking(key), names.places(key)}) {
        EXPECT_TRUE(name.starts_with("my*prefix:" + tag)) << name;
        EXPECT_EQ(slot_of(tag), names.slot(core::bucket_of(key)));
    }
    using Kind = Names::Parsed::Kind;
    EXPECT_EQ(names.parse(names.record(key)).kind, Kind::record);
    EXPECT_EQ(names.parse(names.record(key)).key, key);
    EXPECT_EQ(names.parse(names.conversation(key)).kind, Kind::conversation);
    const Names::Parsed chunk = names.parse(names.chunk(key, token, 7));
    EXPECT_EQ(chunk.kind, Kind::chunk);
    EXPECT_EQ(chunk.key, key);
    EXPECT_EQ(chunk.token, token);
    for (const char* other :
         {"", "my*prefix:{b0000}:r:", "my*prefix:{v}:secret", "else:{b0001}:r:AAAA"}) {
        EXPECT_EQ(names.parse(other).kind, Kind::other) << other;
    }
    EXPECT_EQ(names.parse(names.chunk(key, token, 7).substr(0, names.record(key).size() + 5)).kind,
              Kind::other);
    for (const std::string& parked : {names.parking(key), names.places(key)})
        EXPECT_EQ(names.parse(parked).kind, Kind::other) << parked;
    EXPECT_EQ(names.pattern(), "my\\*prefix:{b????}:[rcs]:*");
}

TEST(RedisLayout, places_are_sorted_by_their_bytes_as_by_their_numbers) {
    std::string former;
    for (const std::uint64_t place :
         std::initializer_list<std::uint64_t>{0, 1, 127, 128, 255, 256, 65535, 65536,
                                              (1ULL << 53) - 1, 1ULL << 53, (1ULL << 63) - 1}) {
        const std::string name = place_name(place);
        EXPECT_EQ(name.size(), 8U);
        EXPECT_LT(former, name);
        const auto back = place_in(name);
        ASSERT_TRUE(back);
        EXPECT_EQ(*back, place);
        former = name;
    }
    for (const char* other : {"", "f", "1234567", "123456789"})
        EXPECT_EQ(place_in(other).error().code, base::ErrorCode::store_corrupt);
}

TEST(RedisLayout, a_turn_is_read_back_behind_what_the_script_sets) {
    const core::Append said{
        .request_id = "r-1", .user_content = std::string("h\0i", 3), .answer_content = "yes"};
    std::string bytes;
    put64(bytes, 3);
    put64(bytes, 1'800'000'000'000'000);
    put8(bytes, 1);
    bytes += encode_turn(said);
    const auto turn = decode_turn(bytes);
    ASSERT_TRUE(turn);
    EXPECT_EQ(turn->number, 3U);
    EXPECT_EQ(turn->at.us, 1'800'000'000'000'000);
    EXPECT_TRUE(turn->late);
    EXPECT_EQ(turn->request_id, said.request_id);
    EXPECT_EQ(turn->user_content, said.user_content);
    EXPECT_EQ(turn->answer_content, said.answer_content);
    EXPECT_FALSE(decode_turn(bytes.substr(0, bytes.size() - 1)));
    EXPECT_FALSE(decode_turn(bytes + "x"));
}

}  // namespace
}  // namespace semel::stores::redis
