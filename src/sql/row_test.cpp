#include "sql/row.hpp"

#include <gtest/gtest.h>

#include "core/transition.hpp"
#include "sql/standing.hpp"
#include "support/random_records.hpp"

namespace semel::sql {
namespace {

using std::chrono::milliseconds;
using support::expect_equal;
using support::Records;

constexpr std::uint32_t seed = 20260;

StoredKey key_of(int i) { return base::sha256("row " + std::to_string(i)); }

core::Record granted(Records& records) {
    core::Record record = records.next();
    record.status = Status::processing;
    record.final = record.cancelled = false;
    record.completed = record.expires = {};
    record.token.value = std::max<std::uint64_t>(record.token.value, 1);
    record.nonce.bytes.fill(7);
    if (record.attempt == 0) record.attempt = 1;
    return record;
}

core::Answer answer(const std::string& text) {
    core::Answer out;
    out.http_status = 200;
    out.content_type = "application/json";
    out.headers = {{"X-Request-Id", "r-1"}, {"Empty", ""}};
    out.body = std::make_shared<const std::string>(text);
    out.body_bytes = text.size();
    out.body_digest = base::sha256(text);
    out.sealed_under = 42;
    return out;
}

/// What the statement of a first completion makes of a row.
Row complete(Row row, const core::Answer& with, const core::Usage& usage, StoreTime at) {
    ++row.version;
    row.status = Status::completed;
    row.completed = at;
    row.expires = at + milliseconds{row.keep_ms};
    row.done = encode_completion(with, usage);
    if (with.body) row.body = *with.body;
    return row;
}

TEST(SqlRow, a_record_comes_back_from_its_row_in_every_field) {
    Records records(seed);
    for (int i = 0; i < 5000; ++i) {
        const core::Record record = records.next();
        const Row row = row_of(key_of(i), record, i + 1);
        EXPECT_EQ(row.key, key_of(i));
        EXPECT_EQ(row.version, i + 1);
        EXPECT_EQ(row.expires.us == 0, record.expires.us == 0);
        const auto whole = record_of(row, true);
        ASSERT_TRUE(whole) << whole.error().detail;
        expect_equal(record, **whole, true);
        const auto listed = record_of(row, false);
        ASSERT_TRUE(listed) << listed.error().detail;
        expect_equal(record, **listed, false);
        if (testing::Test::HasFailure()) FAIL() << "record " << i << " of seed " << seed;
    }
}

TEST(SqlRow, the_head_of_a_grant_takes_its_times_and_its_token_from_the_columns) {
    Records records(seed + 1);
    for (int i = 0; i < 500; ++i) {
        core::Record record = granted(records);
        Row row = row_of(key_of(i), record, 1);
        row.token = {1'800'000'000'000'123};
        row.created = {1'800'000'000'000'123};
        row.lease_end = {1'800'000'010'000'123};
        record.token = row.token;
        record.created = row.created;
        record.lease_end = row.lease_end;
        const auto read = record_of(row, true);
        ASSERT_TRUE(read) << read.error().detail;
        expect_equal(record, **read, true);
    }
}

TEST(SqlRow, a_row_completed_by_the_statement_is_the_record_that_decide_makes) {
    Records records(seed + 2);
    for (int i = 0; i < 2000; ++i) {
        const core::Record record = granted(records);
        core::Usage usage;
        if (i % 3 == 0) usage = {.model = "m", .input_tokens = 12, .upstream_ids = {"u-1", "u-2"}};
        core::Answer with = answer(std::string(static_cast<std::size_t>(i), 'x'));
        if (i % 5 == 0) {
            with.body = nullptr;
            with.body_kind = core::BodyKind::chunks;
            with.chunk_count = 3;
        }
        const StoreTime at{1'800'000'000'000'000 + i};
        const Row row = complete(row_of(key_of(i), record, 1), with, usage, at);
        const core::Transition right =
            core::decide(std::make_shared<const core::Record>(record),
                         core::Complete{record.token, record.nonce, with, usage, {}}, at);
        ASSERT_EQ(right.write, core::Transition::Write::durable);
        const auto read = record_of(row, true);
        ASSERT_TRUE(read) << read.error().detail;
        expect_equal(*right.record, **read, true);
        const auto listed = record_of(row, false);
        ASSERT_TRUE(listed);
        expect_equal(*right.record, **listed, false);
    }
}

TEST(SqlRow, a_row_that_contradicts_itself_is_damage_and_never_a_record) {
    Records records(seed + 3);
    const core::Record record = granted(records);
    const StoreTime at{1'800'000'000'000'000};
    const Row whole = complete(row_of(key_of(0), record, 1), answer("a"), {}, at);
    ASSERT_TRUE(record_of(whole, true));
    const auto refused = [&](const char* what, const std::function<void(Row&)>& damage) {
        Row row = whole;
        damage(row);
        const auto read = record_of(std::move(row), true);
        ASSERT_FALSE(read) << what;
        EXPECT_EQ(read.error().code, base::ErrorCode::store_corrupt) << what;
        EXPECT_NE(read.error().detail.find("restore it"), std::string::npos) << what;
    };
    refused("no head", [](Row& row) { row.head.clear(); });
    refused("half a head", [](Row& row) { row.head.resize(row.head.size() / 2); });
    refused("another owner", [](Row& row) { row.nonce.bytes[0] ^= 1; });
    refused("nobody", [](Row& row) { row.nonce = {}; });
    refused("another retention", [](Row& row) { ++row.keep_ms; });
    refused("another expiry", [](Row& row) { row.expires.us += 1; });
    refused("no time of completion", [](Row& row) { row.completed = {}; });
    refused("a time of completion out of range", [](Row& row) { row.completed.us = INT64_MAX; });
    refused("no token", [](Row& row) { row.token = {}; });
    refused("a token out of range", [](Row& row) { row.token.value = std::uint64_t{1} << 53; });
    refused("a completion of what runs", [](Row& row) { row.status = Status::processing; });
    refused("completed without a completion", [](Row& row) { row.done.reset(); });
    refused("an empty completion", [](Row& row) { row.done = ""; });
    refused("a completion of format 0", [](Row& row) { (*row.done)[0] = 0; });
    refused("a completion that says it is longer", [](Row& row) { (*row.done)[4] = 1; });
    for (std::size_t size = 0; size < whole.done->size(); ++size)
        refused("a completion cut off", [&](Row& row) { row.done->resize(size); });
    Row newer = whole;
    (*newer.done)[0] = 2;
    const auto read = record_of(std::move(newer), true);
    ASSERT_FALSE(read);
    EXPECT_EQ(read.error().code, base::ErrorCode::store_version);
}

TEST(SqlRow, whatever_bytes_lie_in_a_row_it_is_read_or_refused) {
    Records records(seed + 4);
    std::mt19937_64 random(seed);
    const StoreTime at{1'800'000'000'000'000};
    for (int i = 0; i < 20'000; ++i) {
        Row row = complete(row_of(key_of(0), granted(records), 1), answer("a"), {}, at);
        for (int flips = 0; flips < 1 + i % 4; ++flips) {
            std::string& bytes = random() % 2 == 0 ? row.head : *row.done;
            bytes[random() % bytes.size()] ^= static_cast<char>(1U << (random() % 8));
        }
        const auto read = record_of(std::move(row), true);
        if (read) {
            EXPECT_EQ(core::contradiction(**read), nullptr);
        } else {
            EXPECT_FALSE(read.error().detail.empty());
        }
    }
}

TEST(SqlStanding, the_databases_clock_is_narrowed_down_by_each_answer_and_follows_when_it_is_set) {
    Standing standing;
    const SteadyTime now = std::chrono::steady_clock::now();
    const auto clock_at = [&](SteadyTime when, std::int64_t ahead_us) {
        return StoreTime{
            std::chrono::duration_cast<std::chrono::microseconds>(when.time_since_epoch()).count() +
            ahead_us};
    };
    const auto error_us = [&](std::int64_t ahead_us) {
        return (standing.now() - clock_at(std::chrono::steady_clock::now(), ahead_us)).count();
    };
    constexpr std::int64_t ahead = 3'600'000'000;
    // A slow answer, read near its end.
    standing.told(clock_at(now - milliseconds{1}, ahead), now - milliseconds{100}, now);
    EXPECT_LT(std::abs(error_us(ahead)), 51'000);
    // A quick one; the next slow one says nothing new.
    standing.told(clock_at(now, ahead), now - milliseconds{1}, now + milliseconds{1});
    EXPECT_LT(std::abs(error_us(ahead)), 2'000);
    standing.told(clock_at(now, ahead), now - milliseconds{400}, now + milliseconds{100});
    EXPECT_LT(std::abs(error_us(ahead)), 2'100);
    // Somebody set it back.
    standing.told(clock_at(now, -ahead), now - milliseconds{10}, now + milliseconds{10});
    EXPECT_LT(std::abs(error_us(-ahead)), 11'000);
}

TEST(SqlStanding, it_is_out_from_the_first_break_or_silence_until_the_next_answer) {
    Standing standing;
    EXPECT_FALSE(standing.problem().empty());
    standing.connected();
    const SteadyTime now = std::chrono::steady_clock::now();
    standing.answered(now, now);
    EXPECT_EQ(standing.problem(), "");
    const SteadyTime since = standing.answering_since();
    standing.unreachable("a further connection is refused");
    EXPECT_EQ(standing.problem(), "") << "there is one that works";
    EXPECT_EQ(standing.answering_since(), since);
    standing.look(now + Standing::silence_limit);
    EXPECT_NE(standing.problem().find("not answered"), std::string::npos);
    EXPECT_GE(standing.answering_since(), now) << "while it is out, it has just not answered";
    standing.answered(now + std::chrono::seconds{2}, now + std::chrono::seconds{2});
    EXPECT_EQ(standing.answering_since(), now + std::chrono::seconds{2});
    standing.answered(now + std::chrono::seconds{2}, now + std::chrono::seconds{3});
    EXPECT_EQ(standing.answering_since(), now + std::chrono::seconds{2});
    standing.answered(now + std::chrono::seconds{3}, now + std::chrono::seconds{6});
    EXPECT_EQ(standing.answering_since(), now + std::chrono::seconds{6})
        << "a long wait is an outage";
    standing.broke("connection reset");
    EXPECT_EQ(standing.problem(), "connection reset");
    standing.unreachable("connection refused");
    EXPECT_EQ(standing.problem(), "connection refused");
}

}  // namespace
}  // namespace semel::sql
