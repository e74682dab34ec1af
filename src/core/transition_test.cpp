#include "core/transition.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <map>

namespace semel::core {
namespace {

using namespace std::chrono_literals;

// What the contract suite cannot see from outside: which writes a decision asks for, that it is
// pure, and that every guard compares both names of an owner in every status. The rows themselves
// are in tests/contract.

constexpr StoreTime now{1'800'000'000'000'000};

Nonce nonce(std::uint8_t number) {
    Nonce out;
    out.bytes.fill(number);
    return out;
}

Acquire claim(std::uint8_t number, OnUnknown on_unknown = OnUnknown::hold) {
    Acquire op;
    op.fingerprint.raw = base::sha256("body");
    op.owner.id = "owner";
    op.nonce = nonce(number);
    op.not_after = {INT64_MAX};
    op.policy.on_unknown = on_unknown;
    return op;
}

Fail failed(FencingToken token, const Nonce& with, Certainty certainty) {
    return {.token = token, .nonce = with, .certainty = certainty, .failure = {"code", "words", 0}};
}

/// One record in each state that an operation can meet, all under the token and nonce of the first
/// grant.
std::map<std::string, RecordPtr> states() {
    std::map<std::string, RecordPtr> out;
    Acquire limited = claim(1);
    limited.policy.max_attempts = 1;
    const RecordPtr claimed = decide(nullptr, limited, now).record;
    const FencingToken token = claimed->token;
    const RecordPtr started = decide(claimed, Start{token, nonce(1)}, now).record;
    out["processing"] = claimed;
    out["started"] = started;
    out["completed"] =
        decide(started, Complete{token, nonce(1), Answer{.http_status = 200}, {}, {}}, now).record;
    out["failed"] = decide(started, failed(token, nonce(1), Certainty::not_processed), now).record;
    out["released"] = decide(claimed, Release{token, nonce(1)}, now).record;
    out["swept"] = decide(claimed, Settle{token}, now + 1h).record;
    out["unknown"] = decide(started, failed(token, nonce(1), Certainty::unknown), now).record;
    out["refused"] =
        decide(started, failed(token, nonce(1), Certainty::refused_for_good), now).record;
    out["cancelled"] = decide(started, Cancel{token, nonce(1), {}}, now).record;
    Acquire rerun = limited;
    rerun.policy.on_unknown = OnUnknown::rerun;
    rerun.starts_call = true;
    const RecordPtr running = decide(nullptr, rerun, now).record;
    rerun.nonce = nonce(2);
    out["dead"] = decide(running, rerun, now + 1h).record;
    return out;
}

/// Everything that an owner can ask for, as functions of its two names.
const std::map<std::string, std::function<Operation(FencingToken, Nonce)>> owner_operations{
    {"start", [](FencingToken t, Nonce n) { return Operation{Start{t, n}}; }},
    {"renew", [](FencingToken t, Nonce n) { return Operation{Renew{t, n, 10s}}; }},
    {"release", [](FencingToken t, Nonce n) { return Operation{Release{t, n}}; }},
    {"complete",
     [](FencingToken t, Nonce n) {
         return Operation{Complete{t, n, Answer{.http_status = 201}, {}, {}}};
     }},
    {"fail free",
     [](FencingToken t, Nonce n) { return Operation{failed(t, n, Certainty::not_processed)}; }},
    {"fail unknown",
     [](FencingToken t, Nonce n) { return Operation{failed(t, n, Certainty::unknown)}; }},
    {"refuse",
     [](FencingToken t, Nonce n) { return Operation{failed(t, n, Certainty::refused_for_good)}; }},
    {"cancel", [](FencingToken t, Nonce n) { return Operation{Cancel{t, n, {}}}; }},
};

/// none, applied (no write), volatile, durable; F for Fenced.
char verdict(const Transition& transition) {
    if (std::holds_alternative<Fenced>(transition.outcome)) return 'F';
    switch (transition.write) {
        case Transition::Write::none:
            return '=';
        case Transition::Write::volatile_:
            return 'v';
        case Transition::Write::durable:
            return 'W';
    }
    return '?';
}

TEST(Transition, the_owner_may_do_exactly_what_the_table_says) {
    // Columns as in owner_operations (sorted): cancel, complete, fail free, fail unknown, refuse,
    // release, renew, start.
    const std::map<std::string, std::string> table{
        {"processing", "WWWWWWvW"}, {"started", "WWWWWWv="},  {"completed", "F=FFFFFF"},
        {"failed", "FW=WW=FF"},     {"released", "FWWWW=FF"}, {"swept", "FWWWW=FF"},
        {"unknown", "WWW=WFFF"},    {"refused", "FFFF=FFF"},  {"cancelled", "=FFFFFFF"},
        {"dead", "FWWWWFFF"},
    };
    for (const auto& [name, record] : states()) {
        std::string row;
        for (const auto& [op_name, make] : owner_operations) {
            row += verdict(decide(record, make(record->token, record->nonce), now));
        }
        EXPECT_EQ(row, table.at(name)) << name;
    }
}

TEST(Transition, either_name_of_the_owner_alone_is_fenced_in_every_status) {
    for (const auto& [name, record] : states()) {
        for (const auto& [op_name, make] : owner_operations) {
            for (const Operation& op : {make({record->token.value + 1}, record->nonce),
                                        make({record->token.value - 1}, record->nonce),
                                        make(record->token, nonce(77)), make({}, nonce(77))}) {
                const Transition transition = decide(record, op, now);
                EXPECT_EQ(verdict(transition), 'F') << op_name << " on " << name;
                EXPECT_EQ(transition.write, Transition::Write::none);
                EXPECT_EQ(transition.record, record);
            }
        }
    }
}

TEST(Transition, what_was_applied_once_is_applied_again_without_a_write) {
    for (const auto& [name, record] : states()) {
        for (const auto& [op_name, make] : owner_operations) {
            if (op_name == "renew") continue;  // each renewal is a new one
            const Operation op = make(record->token, record->nonce);
            const Transition first = decide(record, op, now);
            if (verdict(first) != 'W') continue;
            const Transition second = decide(first.record, op, now + 1s);
            EXPECT_EQ(verdict(second), '=') << op_name << " on " << name;
            EXPECT_EQ(second.record, first.record);
        }
    }
}

TEST(Transition, deciding_leaves_the_found_record_alone) {
    for (const auto& [name, record] : states()) {
        const Record before = *record;
        for (const auto& [op_name, make] : owner_operations) {
            decide(record, make(record->token, record->nonce), now + 5s);
        }
        EXPECT_EQ(record->status, before.status) << name;
        EXPECT_EQ(record->lease_end, before.lease_end) << name;
        EXPECT_EQ(record->call_started, before.call_started) << name;
        EXPECT_EQ(record->uncharged_attempts, before.uncharged_attempts) << name;
    }
}

TEST(Transition, only_a_renewal_and_a_repeated_acquire_are_volatile) {
    const RecordPtr claimed = decide(nullptr, claim(1), now).record;
    const Transition repeated = decide(claimed, claim(1), now + 3s);
    EXPECT_EQ(repeated.write, Transition::Write::volatile_);
    EXPECT_EQ(repeated.record->lease_end, now + 13s);
    const Transition renewed = decide(claimed, Renew{claimed->token, nonce(1), 10s}, now + 4s);
    EXPECT_EQ(renewed.write, Transition::Write::volatile_);
    EXPECT_EQ(renewed.record->lease_end, now + 14s);
    EXPECT_EQ(decide(claimed, claim(2), now + 1h).write, Transition::Write::durable);
}

TEST(Transition, an_expired_record_is_absent_for_everybody_but_bounds_the_next_token) {
    Record old;
    old.status = Status::completed;
    old.token.value =
        static_cast<std::uint64_t>(now.us) + 5'000'000;  // the store's clock fell back since
    old.nonce = nonce(1);
    old.attempt = 4;
    old.expires = now;
    const auto found = std::make_shared<const Record>(old);
    EXPECT_EQ(std::get<Found>(decide(found, Get{}, now).outcome).record, nullptr);
    EXPECT_EQ(
        std::get<Fenced>(decide(found, Complete{old.token, old.nonce, {}, {}, {}}, now).outcome)
            .record,
        nullptr);
    EXPECT_EQ(std::get<Fenced>(decide(found, Resolve{.token_seen = old.token}, now).outcome).record,
              nullptr);
    const Transition anew = decide(found, claim(1), now);
    const Granted granted = std::get<Granted>(anew.outcome);
    EXPECT_EQ(granted.kind, Granted::Kind::fresh);
    EXPECT_EQ(granted.token.value, old.token.value + 1);
    EXPECT_EQ(granted.attempt, 1U);
    EXPECT_EQ(std::get<Found>(decide(found, Get{}, now - 1us).outcome).record, found);
}

TEST(Transition, a_token_is_above_the_former_one_and_not_below_the_stores_time) {
    EXPECT_EQ(next_token({}, {5}).value, 5U);
    EXPECT_EQ(next_token({9}, {5}).value, 10U);
    EXPECT_EQ(next_token({4}, {5}).value, 5U);
    EXPECT_EQ(next_token({5}, {5}).value, 6U);
    EXPECT_EQ(next_token({}, {-7}).value, 1U);
}

TEST(Transition, an_answers_body_is_moved_and_shared_never_copied) {
    const RecordPtr claimed = decide(nullptr, claim(1), now).record;
    Answer answer;
    answer.body = std::make_shared<const std::string>(1000, 'b');
    const std::string* bytes = answer.body.get();
    const RecordPtr done =
        decide(claimed, Complete{claimed->token, nonce(1), answer, {}, {}}, now).record;
    EXPECT_EQ(done->answer->body.get(), bytes);
    EXPECT_EQ(std::get<Replay>(decide(done, claim(2), now).outcome).record->answer->body.get(),
              bytes);
}

TEST(Transition, a_charge_follows_the_last_word_about_the_attempt) {
    Acquire op = claim(1, OnUnknown::rerun);
    op.starts_call = true;
    RecordPtr record = decide(nullptr, op, now).record;
    const FencingToken token = record->token;
    record = decide(record, Settle{token}, now + 1h).record;
    EXPECT_EQ(record->uncharged_attempts, 0U);
    record = decide(record, failed(token, nonce(1), Certainty::not_processed), now + 1h).record;
    EXPECT_EQ(record->uncharged_attempts, 1U);
    record = decide(record, failed(token, nonce(1), Certainty::unknown), now + 1h).record;
    EXPECT_EQ(record->uncharged_attempts, 0U);
    EXPECT_TRUE(record->call_started);
    record = decide(record, failed(token, nonce(1), Certainty::not_processed), now + 1h).record;
    EXPECT_EQ(record->uncharged_attempts, 1U);
    record = decide(record, Complete{token, nonce(1), {}, {}, {}}, now + 1h).record;
    EXPECT_EQ(record->uncharged_attempts, 0U);
    EXPECT_EQ(record->attempt, 1U);
}

TEST(Transition, a_limit_of_zero_is_no_limit) {
    Acquire op = claim(1, OnUnknown::rerun);
    op.charge_crash = true;
    op.starts_call = true;
    RecordPtr record;
    StoreTime at = now;
    for (std::uint8_t n = 1; n < 100; ++n) {
        op.nonce = nonce(n);
        const Transition transition = decide(record, op, at);
        ASSERT_TRUE(std::holds_alternative<Granted>(transition.outcome));
        record = transition.record;
        at = at + 1h;
    }
    EXPECT_EQ(record->attempt, 99U);
    EXPECT_EQ(record->crashes_charged, 98U);
    EXPECT_EQ(record->possible_second_payments, 98U);
}

}  // namespace
}  // namespace semel::core
