// Random records for tests of what turns them into bytes, and a comparison of every field.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>

#include "core/record.hpp"

namespace semel::support {

using namespace core;  // NOLINT: for tests

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
        if (maybe()) bytes(record.tenant.bytes);
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
        if (maybe()) out.sealed_under = any();
        return out;
    }

    std::mt19937_64 random_;
};

/// Every field. Without `with_body` b's inline body is missing.
inline void expect_equal(const Record& a, const Record& b, bool with_body) {
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
    EXPECT_EQ(a.tenant, b.tenant);
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
    EXPECT_EQ(a.answer->sealed_under, b.answer->sealed_under);
    ASSERT_EQ(with_body && a.answer->body, b.answer->body != nullptr);
    if (b.answer->body) {
        EXPECT_EQ(*a.answer->body, *b.answer->body);
    }
}

}  // namespace semel::support
