#include "core/record_codec.hpp"

#include <gtest/gtest.h>

#include <random>

#include "core/transition.hpp"

namespace semel::core {
namespace {

/// Random records that a store could hold, from a seed.
class Records {
  public:
    explicit Records(std::uint32_t seed) : random_(seed) {}

    Record next() {
        Record record;
        record.status = static_cast<Status>(1 + below(5));
        record.final = record.status == Status::failed && maybe();
        record.cancelled = record.final && maybe();
        record.call_started = maybe();
        record.scheduled_copy = maybe();
        record.follows_unknown = maybe();
        record.attempt = small();
        record.uncharged_attempts =
            record.attempt == 0 ? 0 : static_cast<std::uint32_t>(below(record.attempt));
        record.crashes_charged = maybe() ? small() : 0;
        record.possible_second_payments = maybe() ? small() : 0;
        record.generation = maybe() ? small() : 1;
        record.token.value = any() >> 11;
        record.created = time(record.token);
        record.lease_end = maybe() ? time(record.token) : StoreTime{};
        record.due = maybe() ? time(record.token) : StoreTime{};
        record.completed = maybe() ? time(record.token) : StoreTime{};
        bytes(record.fingerprint.raw.bytes);
        if (maybe()) bytes(record.fingerprint.canonical.bytes);
        if (maybe()) {
            for (std::size_t n = below(fingerprint_fields_max); n > 0; --n) {
                record.fingerprint.fields.push_back({any(), any()});
            }
        }
        if (maybe()) bytes(record.nonce.bytes);
        if (maybe()) record.owner = {text(), text()};
        if (maybe()) {
            record.policy = {
                .kind = maybe() ? IntentKind::message : IntentKind::http,
                .on_unknown = static_cast<OnUnknown>(1 + below(3)),
                .on_failed = static_cast<OnFailed>(1 + below(2)),
                .max_attempts = small(),
                .max_crashes = small(),
                .retention_completed = milliseconds{small()},
                .retention_failed = milliseconds{static_cast<std::int64_t>(any() >> 20)},
                .retention_dead = milliseconds{small()}};
        }
        if (maybe()) record.answer = answer();
        if (maybe()) record.failure = {text(), text(), static_cast<std::uint16_t>(any())};
        if (maybe()) {
            record.usage = {.model = text(),
                            .input_tokens = static_cast<std::int64_t>(any()),
                            .output_tokens = -1,
                            .cached_tokens = 0,
                            .reasoning_tokens = static_cast<std::int64_t>(small())};
            for (std::size_t n = below(5); n > 0; --n) record.usage.upstream_ids.push_back(text());
        }
        record.letter_published = maybe();
        if (maybe()) record.label = text();
        if (record.status != Status::completed && !record.final && maybe()) {
            Append turn{.request_id = text(), .user_content = text() + text()};
            bytes(turn.conversation.bytes);
            record.turn = std::make_shared<const Append>(std::move(turn));
        }
        if (!undecided(record)) record.expires = time(record.token);
        if (!undecided(record) && maybe()) {
            record.completed = {static_cast<std::int64_t>(record.token.value)};
            record.expires = record.completed + record.policy.retention_completed;
        }
        return record;
    }

  private:
    std::uint64_t any() { return random_(); }
    std::size_t below(std::size_t n) { return random_() % n; }
    bool maybe() { return (random_() & 1) != 0; }
    std::uint32_t small() { return static_cast<std::uint32_t>(random_() >> (32 + below(32))); }
    StoreTime time(FencingToken near) {
        // Mostly near the token, sometimes anything.
        if (below(8) != 0) return {static_cast<std::int64_t>(near.value + below(1'000'000'000))};
        return {static_cast<std::int64_t>(any())};
    }
    template <std::size_t n>
    void bytes(std::array<std::uint8_t, n>& out) {
        for (std::uint8_t& byte : out) byte = static_cast<std::uint8_t>(any());
    }
    std::string text() {
        std::string out(below(40), '\0');
        for (char& c : out) c = static_cast<char>(any());
        return out;
    }
    Answer answer() {
        Answer out;
        out.http_status = static_cast<std::uint16_t>(any());
        out.content_type = text();
        for (std::size_t n = below(4); n > 0; --n) out.headers.emplace_back(text(), text());
        out.stream = maybe();
        out.body_kind = static_cast<BodyKind>(1 + below(3));
        if (out.body_kind == BodyKind::inline_body && maybe()) {
            out.body = std::make_shared<const std::string>(text() + text());
            out.body_bytes = out.body->size();
        }
        if (out.body_kind == BodyKind::chunks) out.chunk_count = small();
        if (maybe()) out.body_bytes = any();
        if (maybe()) bytes(out.body_digest.bytes);
        return out;
    }

    std::mt19937_64 random_;
};

void expect_equal(const Record& a, const Record& b, bool with_body) {
    EXPECT_EQ(a.status, b.status);
    EXPECT_EQ(a.final, b.final);
    EXPECT_EQ(a.cancelled, b.cancelled);
    EXPECT_EQ(a.fingerprint.raw, b.fingerprint.raw);
    EXPECT_EQ(a.fingerprint.canonical, b.fingerprint.canonical);
    EXPECT_EQ(a.fingerprint.fields, b.fingerprint.fields);
    EXPECT_EQ(a.attempt, b.attempt);
    EXPECT_EQ(a.uncharged_attempts, b.uncharged_attempts);
    EXPECT_EQ(a.crashes_charged, b.crashes_charged);
    EXPECT_EQ(a.possible_second_payments, b.possible_second_payments);
    EXPECT_EQ(a.follows_unknown, b.follows_unknown);
    EXPECT_EQ(a.generation, b.generation);
    EXPECT_EQ(a.due, b.due);
    EXPECT_EQ(a.scheduled_copy, b.scheduled_copy);
    EXPECT_EQ(a.token, b.token);
    EXPECT_EQ(a.nonce, b.nonce);
    EXPECT_EQ(a.owner, b.owner);
    EXPECT_EQ(a.lease_end, b.lease_end);
    EXPECT_EQ(a.call_started, b.call_started);
    EXPECT_EQ(a.created, b.created);
    EXPECT_EQ(a.completed, b.completed);
    EXPECT_EQ(a.expires, b.expires);
    EXPECT_EQ(a.policy, b.policy);
    EXPECT_EQ(a.failure, b.failure);
    EXPECT_EQ(a.usage, b.usage);
    EXPECT_EQ(a.letter_published, b.letter_published);
    EXPECT_EQ(a.label, b.label);
    ASSERT_EQ(a.turn != nullptr, b.turn != nullptr);
    if (a.turn) {
        EXPECT_EQ(*a.turn, *b.turn);
    }
    ASSERT_EQ(a.answer.has_value(), b.answer.has_value());
    if (!a.answer) return;
    EXPECT_EQ(a.answer->http_status, b.answer->http_status);
    EXPECT_EQ(a.answer->content_type, b.answer->content_type);
    EXPECT_EQ(a.answer->headers, b.answer->headers);
    EXPECT_EQ(a.answer->stream, b.answer->stream);
    EXPECT_EQ(a.answer->body_kind, b.answer->body_kind);
    EXPECT_EQ(a.answer->chunk_count, b.answer->chunk_count);
    EXPECT_EQ(a.answer->body_bytes, b.answer->body_bytes);
    EXPECT_EQ(a.answer->body_digest, b.answer->body_digest);
    ASSERT_EQ(with_body && a.answer->body, b.answer->body != nullptr);
    if (b.answer->body) {
        EXPECT_EQ(*a.answer->body, *b.answer->body);
    }
}

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
