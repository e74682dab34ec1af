#include "core/record_codec.hpp"

#include <gtest/gtest.h>

#include "core/transition.hpp"
#include "support/random_records.hpp"

namespace semel::core {
namespace {

using support::expect_equal;
using support::Records;

std::string encoded(const Record& record, bool with_body = true) {
    std::string out;
    encode_record(record, with_body, out);
    return out;
}

/// Whatever the bytes were: a Result, and a record that decide() can take.
void expect_harmless(const std::string& bytes) {
    const base::Result<Record> decoded = decode_record(bytes);
    if (!decoded) {
        EXPECT_TRUE(decoded.error().code == base::ErrorCode::store_corrupt ||
                    decoded.error().code == base::ErrorCode::store_version);
        return;
    }
    const auto record = std::make_shared<const Record>(*decoded);
    decide(record, Release{record->token, record->nonce}, StoreTime{1'000'000});
    decide(record, Acquire{.fingerprint = record->fingerprint, .not_after = {2'000'000}},
           StoreTime{1'000'000});
    // What was read is written the same way.
    EXPECT_EQ(encoded(*decoded).size(), encoded(*decode_record(encoded(*decoded))).size());
}

TEST(RecordCodec, random_records_come_back_as_they_were) {
    constexpr std::uint32_t seed = 4711;
    Records records(seed);
    for (int i = 0; i < 5'000; ++i) {
        SCOPED_TRACE(testing::Message() << "seed " << seed << ", record " << i);
        const Record record = records.next();
        for (const bool with_body : {true, false}) {
            const base::Result<Record> decoded = decode_record(encoded(record, with_body));
            ASSERT_TRUE(decoded) << decoded.error().detail;
            expect_equal(record, *decoded, with_body);
        }
        if (testing::Test::HasFailure()) return;
    }
}

TEST(RecordCodec, an_encoding_is_appended_to_what_is_there) {
    std::string out = "prefix";
    encode_record(Record{}, true, out);
    EXPECT_EQ(out.substr(0, 6), "prefix");
    EXPECT_TRUE(decode_record(std::string_view(out).substr(6)));
}

TEST(RecordCodec, a_bare_message_record_takes_at_most_100_bytes_in_every_status) {
    const StoreTime now{1'800'000'000'000'000};
    Acquire acquire;
    acquire.fingerprint.raw = base::sha256("a message");
    acquire.owner.id = "9f86d081884c7d65";
    acquire.nonce.bytes.fill(0xab);
    acquire.not_after = now;
    acquire.policy.kind = IntentKind::message;
    acquire.policy.retention_completed = std::chrono::hours{24 * 7};
    acquire.policy.max_attempts = 3;
    acquire.policy.max_crashes = 5;
    const RecordPtr claimed = decide(nullptr, acquire, now).record;
    EXPECT_LE(encoded(*claimed).size(), 100U);
    const StoreTime later = now + std::chrono::seconds{30};
    const RecordPtr done =
        decide(claimed, Complete{claimed->token, claimed->nonce, Answer{}, {}, {}}, later).record;
    EXPECT_EQ(done->status, Status::completed);
    EXPECT_LE(encoded(*done).size(), 100U);
    const RecordPtr waits = decide(claimed,
                                   Fail{.token = claimed->token,
                                        .nonce = claimed->nonce,
                                        .failure = {"timeout", "", 0},
                                        .delay = std::chrono::minutes{10}},
                                   later)
                                .record;
    EXPECT_EQ(waits->status, Status::failed);
    EXPECT_LE(encoded(*waits).size(), 110U);  // its failure has words
}

TEST(RecordCodec, every_truncation_is_corrupt_and_names_its_byte) {
    Records records(12);
    for (int i = 0; i < 40; ++i) {
        const std::string bytes = encoded(records.next());
        for (std::size_t size = 0; size < bytes.size(); ++size) {
            const base::Result<Record> decoded =
                decode_record(std::string_view(bytes).substr(0, size));
            ASSERT_FALSE(decoded) << "record " << i << " cut to " << size;
            EXPECT_EQ(decoded.error().code, base::ErrorCode::store_corrupt);
            EXPECT_NE(decoded.error().detail.find("at byte "), std::string::npos);
        }
        EXPECT_FALSE(decode_record(bytes + '\0'));
    }
}

TEST(RecordCodec, every_flip_of_one_byte_is_harmless) {
    Records records(13);
    for (int i = 0; i < 12; ++i) {
        SCOPED_TRACE(i);
        const std::string bytes = encoded(records.next());
        for (std::size_t at = 0; at < bytes.size(); ++at) {
            for (const unsigned flip : {0x01U, 0x80U, 0xffU, 0x7fU}) {
                std::string damaged = bytes;
                damaged[at] = static_cast<char>(static_cast<unsigned char>(damaged[at]) ^ flip);
                expect_harmless(damaged);
            }
        }
    }
}

TEST(RecordCodec, garbage_is_harmless) {
    std::mt19937 random(14);
    for (int i = 0; i < 20'000; ++i) {
        std::string bytes(random() % 200, '\0');
        for (char& c : bytes) c = static_cast<char>(random());
        if (!bytes.empty() && i % 2 == 0) bytes[0] = record_format_version;
        expect_harmless(bytes);
    }
}

TEST(RecordCodec, a_length_beyond_the_bytes_is_refused_before_anything_is_allocated) {
    Record record;
    record.owner.id = "owner";
    std::string bytes = encoded(record);
    // The owner's length becomes 2^63: allocating it would throw.
    const std::size_t at = bytes.find("\x05owner");
    ASSERT_NE(at, std::string::npos);
    bytes.replace(at, 1, std::string(9, '\x80') + '\x01');
    const base::Result<Record> decoded = decode_record(bytes);
    ASSERT_FALSE(decoded);
    EXPECT_EQ(decoded.error().code, base::ErrorCode::store_corrupt);
}

TEST(RecordCodec, a_newer_format_is_told_apart_from_damage) {
    std::string bytes = encoded(Record{});
    bytes[0] = record_format_version + 1;
    const base::Result<Record> decoded = decode_record(bytes);
    ASSERT_FALSE(decoded);
    EXPECT_EQ(decoded.error().code, base::ErrorCode::store_version);
    bytes[0] = 0;
    EXPECT_EQ(decode_record(bytes).error().code, base::ErrorCode::store_corrupt);
}

TEST(RecordCodec, a_record_that_contradicts_itself_is_damage) {
    Record record;
    record.token.value = 5;
    record.uncharged_attempts = 2;
    record.attempt = 1;
    EXPECT_FALSE(decode_record(encoded(record)));
    record = {};
    record.status = Status::completed;
    record.final = true;
    EXPECT_FALSE(decode_record(encoded(record)));
    record = {};
    record.status = Status::completed;
    record.turn = std::make_shared<const Append>();
    EXPECT_FALSE(decode_record(encoded(record)));
    record = {};
    record.expires.us = 7;
    EXPECT_FALSE(decode_record(encoded(record)));
    record = {};
    record.token.value = std::uint64_t{1} << 53;
    EXPECT_FALSE(decode_record(encoded(record)));
}

}  // namespace
}  // namespace semel::core
