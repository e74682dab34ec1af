// What every store promises. The table of transitions is walked row by row through the interface,
// so that a store that is a port of core::decide is held to the same answers as one that calls it.
#include "contract/store_contract.hpp"

#include <algorithm>
#include <atomic>
#include <future>
#include <mutex>
#include <set>
#include <thread>

#include "contract/outcomes.hpp"

using namespace semel;            // NOLINT: a test file
using namespace semel::core;      // NOLINT
using namespace semel::contract;  // NOLINT
using namespace std::chrono_literals;

namespace {

constexpr milliseconds lease = 10s;

Fingerprint body(const std::string& text) {
    Fingerprint fingerprint;
    fingerprint.raw = base::sha256(text);
    return fingerprint;
}

Answer answer(const std::string& text) {
    Answer out;
    out.http_status = 200;
    out.content_type = "application/json";
    out.headers = {{"X-Request-Id", "r-1"}};
    out.body = std::make_shared<const std::string>(text);
    out.body_bytes = text.size();
    out.body_digest = base::sha256(text);
    return out;
}

Failure failure(const std::string& code) { return {code, "for the test", 0}; }

/// Two states of a record, told apart in everything that a caller can see.
void expect_same(const RecordPtr& a, const RecordPtr& b) {
    ASSERT_TRUE(a && b);
    EXPECT_EQ(a->status, b->status);
    EXPECT_EQ(a->final, b->final);
    EXPECT_EQ(a->cancelled, b->cancelled);
    EXPECT_EQ(a->attempt, b->attempt);
    EXPECT_EQ(a->uncharged_attempts, b->uncharged_attempts);
    EXPECT_EQ(a->crashes_charged, b->crashes_charged);
    EXPECT_EQ(a->possible_second_payments, b->possible_second_payments);
    EXPECT_EQ(a->generation, b->generation);
    EXPECT_EQ(a->token, b->token);
    EXPECT_EQ(a->nonce, b->nonce);
    EXPECT_EQ(a->owner, b->owner);
    EXPECT_EQ(a->lease_end, b->lease_end);
    EXPECT_EQ(a->due, b->due);
    EXPECT_EQ(a->call_started, b->call_started);
    EXPECT_EQ(a->created, b->created);
    EXPECT_EQ(a->completed, b->completed);
    EXPECT_EQ(a->expires, b->expires);
    EXPECT_EQ(a->failure, b->failure);
    EXPECT_EQ(a->usage, b->usage);
    EXPECT_EQ(a->fingerprint.raw, b->fingerprint.raw);
    EXPECT_EQ(a->letter_published, b->letter_published);
    EXPECT_EQ(a->turn != nullptr, b->turn != nullptr);
    if (a->turn && b->turn) {
        EXPECT_EQ(*a->turn, *b->turn);
    }
    EXPECT_EQ(a->answer.has_value(), b->answer.has_value());
    if (a->answer && b->answer) {
        EXPECT_EQ(a->answer->http_status, b->answer->http_status);
        EXPECT_EQ(a->answer->content_type, b->answer->content_type);
        EXPECT_EQ(a->answer->headers, b->answer->headers);
        EXPECT_EQ(a->answer->body_digest, b->answer->body_digest);
        ASSERT_EQ(a->answer->body != nullptr, b->answer->body != nullptr);
        if (a->answer->body) {
            EXPECT_EQ(*a->answer->body, *b->answer->body);
        }
    }
}

}  // namespace

StoreContract::StoreContract()
    : place(GetParam().make_place()),
      store(place->open(clock)),
      k(key("story")),
      talk(key("conversation")) {}

StoreContract::~StoreContract() {
    if (store) store->stop();
    store.reset();
}

StoreContract::Asked StoreContract::ask(const StoredKey& key, StoreOperation operation) {
    std::vector<Item> items;
    items.push_back({key, std::move(operation)});
    BatchResults results = submit(std::move(items));
    SEMEL_ASSERT(results.size() == 1, "one result per item");
    return std::move(results.front());
}

BatchResults StoreContract::submit(std::vector<Item> items) {
    auto promise = std::make_shared<std::promise<BatchResults>>();
    std::future<BatchResults> future = promise->get_future();
    store->submit(std::move(items),
                  [promise](BatchResults results) { promise->set_value(std::move(results)); });
    return future.get();
}

void StoreContract::reopen() {
    store->stop();
    store.reset();
    store = place->open(clock);
}

Acquire StoreContract::claim(std::uint8_t owner, const std::string& text) const {
    Acquire op;
    op.fingerprint = body(text);
    op.owner = {"owner-" + std::to_string(owner), "10.0.0.1:7000"};
    op.nonce = nonce(owner);
    op.lease = lease;
    op.not_after = store->now() + 2s;
    op.policy = policy;
    op.starts_call = policy.on_unknown == OnUnknown::rerun;
    op.turn = said;
    return op;
}

Granted StoreContract::grant(std::uint8_t owner) { return as<Granted>(ask(k, claim(owner))); }

RecordPtr StoreContract::state() { return as<Found>(ask(k, Get{})).record; }

Status StoreContract::status() {
    const RecordPtr record = state();
    return record ? record->status : Status{};
}

StoreContract::Asked StoreContract::complete(const Granted& granted, std::uint8_t owner,
                                             const std::string& text) {
    return ask(k, Complete{granted.token, nonce(owner), answer(text), {}, {}});
}

StoreContract::Asked StoreContract::fail(const Granted& granted, std::uint8_t owner,
                                         Certainty certainty, const std::string& code) {
    return ask(k, Fail{.token = granted.token,
                       .nonce = nonce(owner),
                       .certainty = certainty,
                       .failure = failure(code)});
}

void StoreContract::expect_powerless(FencingToken token, const Nonce& with) {
    const RecordPtr before = state();
    as<Fenced>(ask(k, Start{token, with}));
    as<Fenced>(ask(k, Renew{token, with, lease}));
    as<Fenced>(ask(k, Release{token, with}));
    as<Fenced>(ask(k, Complete{token, with, answer("of a zombie"), {}, {}}));
    for (const Certainty certainty :
         {Certainty::not_processed, Certainty::unknown, Certainty::refused_for_good}) {
        as<Fenced>(ask(k, Fail{.token = token,
                               .nonce = with,
                               .certainty = certainty,
                               .failure = failure("zombie")}));
    }
    const Fenced last = as<Fenced>(ask(k, Cancel{token, with, {}}));
    if (before) {
        expect_same(before, state());
        expect_same(before, last.record);
    } else {
        EXPECT_EQ(state(), nullptr);
        EXPECT_EQ(last.record, nullptr);
    }
}

Append StoreContract::turn(const std::string& id, const std::string& says) const {
    return {.conversation = talk,
            .request_id = id,
            .user_content = says,
            .answer_content = "answer to " + says};
}

std::shared_ptr<const Append> StoreContract::pending_turn(const std::string& id,
                                                          const std::string& says) const {
    Append pending = turn(id, says);
    pending.answer_content.clear();
    return std::make_shared<const Append>(std::move(pending));
}

StoreContract::Asked StoreContract::take_turn(const std::string& id) {
    k = key("turn " + id);
    const Granted granted = grant(1);
    return ask(k, Complete{granted.token, nonce(1), answer("a"), {}, turn(id)});
}

void StoreContract::purge_all(std::size_t count) {
    constexpr int tries_max = 50;
    std::size_t gone = 0;
    for (int tries = 0; gone < count && tries < tries_max; ++tries) {
        const base::Result<std::size_t> step = store->purge(100);
        ASSERT_TRUE(step) << step.error().detail;
        gone += *step;
    }
    EXPECT_EQ(gone, count);
    EXPECT_EQ(store->purge(100).value(), 0U);
}

std::vector<Turn> StoreContract::turns(GetTurns what) {
    return as<TurnsFound>(ask(talk, what)).turns;
}

// ---------------------------------------------------------------- acquire, row by row

TEST_P(StoreContract, an_absent_key_is_granted_with_a_token_not_below_the_stores_time) {
    EXPECT_EQ(state(), nullptr);
    const StoreTime before = store->now();
    const base::Result<Decided> result = ask(k, claim(1));
    const Granted g = as<Granted>(result);
    EXPECT_EQ(g.kind, Granted::Kind::fresh);
    EXPECT_EQ(g.attempt, 1U);
    EXPECT_EQ(g.generation, 1U);
    EXPECT_GE(g.token.value, static_cast<std::uint64_t>(before.us));
    EXPECT_LT(g.token.value, std::uint64_t{1} << 53);
    EXPECT_EQ(g.lease_end, result->at + lease);
    EXPECT_EQ(g.created, result->at);
    EXPECT_FALSE(g.possible_second_payment);
    const RecordPtr record = state();
    ASSERT_TRUE(record);
    EXPECT_EQ(record->status, Status::processing);
    EXPECT_EQ(record->owner, (Owner{"owner-1", "10.0.0.1:7000"}));
    EXPECT_EQ(record->nonce, nonce(1));
    EXPECT_EQ(record->policy, policy);
    EXPECT_EQ(record->expires, StoreTime{});
    EXPECT_TRUE(record->call_started);
}

TEST_P(StoreContract, a_live_lease_is_in_flight_and_says_whose_and_how_long) {
    const Granted g = grant(1);
    clock.advance(4s);
    const InFlight other = as<InFlight>(ask(k, claim(2)));
    EXPECT_EQ(other.owner.id, "owner-1");
    EXPECT_EQ(other.owner.peer, "10.0.0.1:7000");
    EXPECT_EQ(other.token, g.token);
    EXPECT_EQ(other.remaining, 6s);
    EXPECT_EQ(other.created, g.created);
    clock.advance(6s - 1us);
    EXPECT_EQ(as<InFlight>(ask(k, claim(2))).remaining, 1ms);
    clock.advance(1us);
    EXPECT_EQ(as<Granted>(ask(k, claim(2))).kind, Granted::Kind::takeover);
}

TEST_P(StoreContract,
       a_repeated_acquire_gets_the_same_grant_and_a_new_lease_even_if_the_lease_is_dead) {
    const Granted first = grant(1);
    for (const milliseconds passed : {milliseconds{3s}, milliseconds{lease * 3}}) {
        clock.advance(passed);
        const base::Result<Decided> result = ask(k, claim(1));
        const Granted again = as<Granted>(result);
        EXPECT_EQ(again.kind, Granted::Kind::repeated);
        EXPECT_EQ(again.token, first.token);
        EXPECT_EQ(again.attempt, 1U);
        EXPECT_EQ(again.created, first.created);
        EXPECT_EQ(again.lease_end, result->at + lease);
    }
    EXPECT_EQ(state()->attempt, 1U);
    EXPECT_EQ(state()->possible_second_payments, 0U);
    as<InFlight>(ask(k, claim(2)));
}

TEST_P(StoreContract, a_repeated_acquire_repeats_that_it_may_pay_a_second_time) {
    grant(1);
    clock.advance(lease);
    EXPECT_TRUE(grant(2).possible_second_payment);
    EXPECT_TRUE(grant(2).possible_second_payment);
    EXPECT_EQ(state()->possible_second_payments, 1U);
}

TEST_P(StoreContract,
       a_dead_lease_is_taken_over_and_a_started_call_counts_as_possible_second_payment) {
    const Granted first = grant(1);
    clock.advance(lease);
    const Granted second = grant(2);
    EXPECT_EQ(second.kind, Granted::Kind::takeover);
    EXPECT_GT(second.token, first.token);
    EXPECT_EQ(second.attempt, 2U);
    EXPECT_EQ(second.created, first.created);
    EXPECT_TRUE(second.possible_second_payment);
    EXPECT_EQ(state()->possible_second_payments, 1U);
    EXPECT_EQ(state()->uncharged_attempts, 0U);
}

TEST_P(StoreContract, a_dead_lease_whose_call_never_started_is_taken_over_for_free) {
    policy.on_unknown = OnUnknown::hold;
    grant(1);
    clock.advance(lease);
    const Granted second = grant(2);
    EXPECT_EQ(second.kind, Granted::Kind::takeover);
    EXPECT_FALSE(second.possible_second_payment);
    EXPECT_EQ(state()->possible_second_payments, 0U);
    EXPECT_EQ(state()->uncharged_attempts, 1U);
}

TEST_P(StoreContract, a_dead_lease_whose_call_started_under_hold_or_probe_becomes_unknown) {
    for (const OnUnknown on_unknown : {OnUnknown::hold, OnUnknown::probe}) {
        k = key("held " + std::to_string(static_cast<int>(on_unknown)));
        policy.on_unknown = on_unknown;
        const Granted first = grant(1);
        as<Applied>(ask(k, Start{first.token, nonce(1)}));
        clock.advance(lease);
        // The policy of the attempt decides, not the one of whoever comes.
        policy.on_unknown = OnUnknown::rerun;
        EXPECT_EQ(as<UnknownOutcome>(ask(k, claim(2))).record->status, Status::unknown);
        EXPECT_EQ(as<UnknownOutcome>(ask(k, claim(3))).record->token, first.token);
        EXPECT_EQ(state()->failure.code, "lease-lost");
        EXPECT_EQ(state()->attempt, 1U);
        clock.advance(24h * 400);
        EXPECT_EQ(status(), Status::unknown);
    }
}

TEST_P(StoreContract, another_fingerprint_is_a_mismatch_in_every_status_and_before_busy) {
    const auto expect_mismatch = [&](Status at) {
        const RecordPtr before = state();
        EXPECT_EQ(as<Mismatch>(ask(k, claim(9, "another body"))).status, at);
        expect_same(before, state());
    };
    policy.on_unknown = OnUnknown::hold;
    const Granted g = grant(1);
    expect_mismatch(Status::processing);
    as<Applied>(fail(g, 1, Certainty::unknown));
    expect_mismatch(Status::unknown);
    as<Applied>(fail(g, 1, Certainty::not_processed));
    expect_mismatch(Status::failed);
    as<Applied>(complete(g, 1));
    expect_mismatch(Status::completed);
}

TEST_P(StoreContract, a_mismatch_names_the_fields_that_differ) {
    Acquire first = claim(1);
    first.fingerprint.fields = {{1, 10}, {2, 20}, {3, 30}};
    as<Granted>(ask(k, first));
    Acquire other = claim(2, "another body");
    other.fingerprint.fields = {{1, 10}, {2, 21}, {4, 40}};
    EXPECT_EQ(as<Mismatch>(ask(k, other)).fields, (std::vector<std::uint64_t>{2, 3, 4}));
    // Spelled differently, but canonically the same request.
    k = key("canonical");
    first.fingerprint.canonical = other.fingerprint.canonical = base::sha256("canonical");
    as<Granted>(ask(k, first));
    as<InFlight>(ask(k, other));
}

TEST_P(StoreContract, an_acquire_past_its_not_after_is_late_and_changes_nothing) {
    const auto late = [&](std::uint8_t n) {
        Acquire op = claim(n);
        op.not_after = store->now();
        clock.advance(1us);
        return ask(k, op);
    };
    as<Late>(late(1));
    EXPECT_EQ(state(), nullptr);
    Acquire just = claim(1);
    just.not_after = store->now();
    const Granted g = as<Granted>(ask(k, just));
    const RecordPtr before = state();
    as<Late>(late(1));  // even for a repeated ask: who asks so late acts on no answer
    as<Late>(late(2));
    expect_same(before, state());
    as<Applied>(complete(g, 1));
    as<Late>(late(3));
}

TEST_P(StoreContract, a_completed_intent_is_replayed_with_every_byte) {
    const Granted g = grant(1);
    Usage usage;
    usage.model = "m";
    usage.input_tokens = 3;
    usage.output_tokens = 5;
    usage.upstream_ids = {"req-1", "req-2"};
    std::string text(70'000, 'x');
    text[7] = '\0';
    const base::Result<Decided> done = ask(k, Complete{g.token, nonce(1), answer(text), usage, {}});
    as<Applied>(done);
    clock.advance(1h);
    const Replay replay = as<Replay>(ask(k, claim(2)));
    ASSERT_TRUE(replay.record && replay.record->answer && replay.record->answer->body);
    EXPECT_EQ(*replay.record->answer->body, text);
    EXPECT_EQ(replay.record->answer->http_status, 200);
    EXPECT_EQ(replay.record->answer->headers, answer("").headers);
    EXPECT_EQ(replay.record->usage, usage);
    EXPECT_EQ(replay.record->completed, done->at);
    EXPECT_EQ(replay.record->expires, done->at + policy.retention_completed);
    EXPECT_EQ(replay.record->failure, Failure{});
    expect_same(as<Applied>(done).record, replay.record);
}

TEST_P(StoreContract, a_failed_http_intent_is_due_at_once_and_a_failed_message_at_its_time) {
    Granted g = grant(1);
    as<Applied>(ask(k, Fail{.token = g.token,
                            .nonce = nonce(1),
                            .certainty = Certainty::not_processed,
                            .failure = failure("upstream-status"),
                            .delay = 1h}));
    EXPECT_EQ(grant(2).kind, Granted::Kind::retry);

    k = key("message");
    policy.kind = IntentKind::message;
    g = grant(1);
    as<Applied>(ask(k, Fail{.token = g.token,
                            .nonce = nonce(1),
                            .certainty = Certainty::not_processed,
                            .failure = failure("upstream-status"),
                            .delay = 1h,
                            .scheduled_copy = true}));
    NotDue wait = as<NotDue>(ask(k, claim(2)));
    EXPECT_EQ(wait.remaining, 1h);
    EXPECT_TRUE(wait.scheduled_copy);
    clock.advance(1h - 1us);
    EXPECT_EQ(as<NotDue>(ask(k, claim(2))).remaining, 1ms);
    clock.advance(1us);
    const Granted again = grant(2);
    EXPECT_EQ(again.kind, Granted::Kind::retry);
    EXPECT_EQ(again.attempt, 2U);
    EXPECT_GT(again.token, g.token);
    EXPECT_FALSE(state()->scheduled_copy);
}

TEST_P(StoreContract,
       a_retry_after_an_unknown_outcome_is_counted_and_one_after_a_free_failure_is_not) {
    Granted g = grant(1);
    as<Applied>(fail(g, 1, Certainty::not_processed));
    g = grant(2);
    EXPECT_FALSE(g.possible_second_payment);
    as<Applied>(fail(g, 2, Certainty::unknown));
    EXPECT_EQ(status(), Status::failed);
    g = grant(3);
    EXPECT_TRUE(g.possible_second_payment);
    EXPECT_EQ(state()->possible_second_payments, 1U);
    EXPECT_EQ(state()->attempt, 3U);
    EXPECT_EQ(state()->uncharged_attempts, 1U);
}

TEST_P(StoreContract, charged_attempts_exhaust_the_budget_and_free_ones_do_not) {
    policy.max_attempts = 2;
    std::uint8_t n = 0;
    for (int i = 0; i < 20; ++i) {
        const Granted g = grant(++n);
        as<Applied>(fail(g, n, Certainty::not_processed, "upstream-429"));
    }
    for (int i = 0; i < 2; ++i) {
        const Granted g = grant(++n);
        as<Applied>(fail(g, n, Certainty::unknown));
    }
    const Exhausted end = as<Exhausted>(ask(k, claim(++n)));
    ASSERT_TRUE(end.record);
    EXPECT_EQ(end.record->status, Status::dead);
    EXPECT_EQ(end.record->attempt, 22U);
    EXPECT_EQ(end.record->expires, store->now() + policy.retention_dead);
    expect_same(end.record, as<Exhausted>(ask(k, claim(++n))).record);
}

TEST_P(StoreContract, takeovers_charged_as_crashes_exhaust_their_own_budget) {
    policy.kind = IntentKind::message;
    policy.max_crashes = 2;
    policy.on_unknown = OnUnknown::hold;  // nothing starts: the attempts themselves are free
    Acquire op = claim(1);
    as<Granted>(ask(k, op));
    for (std::uint8_t n = 2; n <= 3; ++n) {
        clock.advance(lease);
        op = claim(n);
        op.charge_crash = true;
        const base::Result<Decided> result = ask(k, op);
        if (n == 2) {
            EXPECT_EQ(as<Granted>(result).kind, Granted::Kind::takeover);
            EXPECT_EQ(state()->crashes_charged, 1U);
        } else {
            EXPECT_EQ(as<Exhausted>(result).record->crashes_charged, 2U);
            EXPECT_EQ(as<Exhausted>(result).record->attempt, 2U);
        }
    }
}

TEST_P(StoreContract, an_exhausted_takeover_leaves_the_former_owner_its_token) {
    policy.max_attempts = 1;
    const Granted g = grant(1);
    clock.advance(lease);
    EXPECT_EQ(as<Exhausted>(ask(k, claim(2))).record->token, g.token);
    as<Applied>(complete(g, 1));
    as<Replay>(ask(k, claim(3)));
}

// ---------------------------------------------------------------- what the owner does

TEST_P(StoreContract, start_renew_and_complete_repeat_without_a_change) {
    policy.on_unknown = OnUnknown::hold;
    const Granted g = grant(1);
    EXPECT_FALSE(state()->call_started);
    as<Applied>(ask(k, Start{g.token, nonce(1)}));
    const RecordPtr started = as<Applied>(ask(k, Start{g.token, nonce(1)})).record;
    EXPECT_TRUE(started->call_started);
    clock.advance(lease - 1s);
    const base::Result<Decided> renewed = ask(k, Renew{g.token, nonce(1), lease});
    EXPECT_EQ(as<Applied>(renewed).record->lease_end, renewed->at + lease);
    clock.advance(lease - 1s);
    as<InFlight>(ask(k, claim(2)));
    const RecordPtr completed = as<Applied>(complete(g, 1)).record;
    clock.advance(1h);
    expect_same(completed, as<Applied>(complete(g, 1, "another answer")).record);
    expect_same(completed, state());
}

TEST_P(StoreContract, an_owner_renews_after_its_leases_end_if_nobody_took_over) {
    const Granted g = grant(1);
    clock.advance(lease * 5);
    as<Applied>(ask(k, Renew{g.token, nonce(1), lease}));
    as<InFlight>(ask(k, claim(2)));
}

TEST_P(StoreContract, a_zombie_changes_nothing_after_takeover) {
    const Granted zombie = grant(1);
    clock.advance(lease);
    const Granted owner = grant(2);
    expect_powerless(zombie.token, nonce(1));
    expect_powerless(owner.token, nonce(1));   // the number alone does not count
    expect_powerless(zombie.token, nonce(2));  // nor the nonce alone
    as<Applied>(complete(owner, 2));
    expect_powerless(zombie.token, nonce(1));
    EXPECT_EQ(*as<Fenced>(complete(zombie, 1, "late")).record->answer->body, "the answer");
}

TEST_P(StoreContract, everybody_is_powerless_over_an_absent_key) {
    expect_powerless(FencingToken{7}, nonce(1));
    as<Fenced>(ask(k, Release{{}, nonce(1)}));
    as<Fenced>(ask(k, Resolve{.token_seen = {7}, .decision = Resolve::Decision::failed}));
    as<Fenced>(ask(k, Reopen{1, body("body")}));
    as<Fenced>(ask(k, LetterPublished{{7}}));
    EXPECT_EQ(as<Found>(ask(k, Settle{{7}})).record, nullptr);
    EXPECT_EQ(state(), nullptr);
}

TEST_P(StoreContract, a_failure_known_to_be_free_is_uncharged_and_repeats_without_a_change) {
    const Granted g = grant(1);
    const base::Result<Decided> failed = fail(g, 1, Certainty::not_processed);
    const RecordPtr record = as<Applied>(failed).record;
    EXPECT_EQ(record->status, Status::failed);
    EXPECT_FALSE(record->final);
    EXPECT_EQ(record->uncharged_attempts, 1U);
    EXPECT_EQ(record->expires, failed->at + policy.retention_failed);
    EXPECT_EQ(record->failure, failure("upstream-reset"));
    clock.advance(1min);
    expect_same(record, as<Applied>(fail(g, 1, Certainty::not_processed)).record);
    // Renewing is over, but the token is still one's own: carry on and complete.
    EXPECT_EQ(as<Fenced>(ask(k, Renew{g.token, nonce(1), lease})).record->token, g.token);
    as<Applied>(complete(g, 1));
}

TEST_P(StoreContract, an_unknown_outcome_under_hold_is_unknown_until_the_owner_brings_the_truth) {
    policy.on_unknown = OnUnknown::hold;
    const Granted g = grant(1);
    as<Applied>(ask(k, Start{g.token, nonce(1)}));
    const RecordPtr held = as<Applied>(fail(g, 1, Certainty::unknown)).record;
    EXPECT_EQ(held->status, Status::unknown);
    EXPECT_EQ(held->expires, StoreTime{});
    clock.advance(1h);
    expect_same(held, as<Applied>(fail(g, 1, Certainty::unknown)).record);
    as<UnknownOutcome>(ask(k, claim(2)));
    EXPECT_EQ(as<Fenced>(ask(k, Renew{g.token, nonce(1), lease})).record->status, Status::unknown);
    as<Fenced>(ask(k, Start{g.token, nonce(1)}));
    as<Fenced>(ask(k, Release{g.token, nonce(1)}));
    as<Applied>(complete(g, 1));
    as<Replay>(ask(k, claim(3)));
}

TEST_P(StoreContract, an_unknown_outcome_that_proves_free_may_run_again) {
    policy.on_unknown = OnUnknown::hold;
    const Granted g = grant(1);
    as<Applied>(ask(k, Start{g.token, nonce(1)}));
    as<Applied>(fail(g, 1, Certainty::unknown));
    const RecordPtr record = as<Applied>(fail(g, 1, Certainty::not_processed)).record;
    EXPECT_EQ(record->status, Status::failed);
    EXPECT_EQ(record->uncharged_attempts, 1U);
    EXPECT_FALSE(grant(2).possible_second_payment);
}

TEST_P(StoreContract, a_refusal_for_good_is_kept_and_replayed) {
    const Granted g = grant(1);
    Answer refusal = answer("no");
    refusal.http_status = 400;
    const base::Result<Decided> failed = ask(k, Fail{.token = g.token,
                                                     .nonce = nonce(1),
                                                     .certainty = Certainty::refused_for_good,
                                                     .failure = failure("upstream-status"),
                                                     .answer = refusal});
    const RecordPtr record = as<Applied>(failed).record;
    EXPECT_TRUE(record->final);
    EXPECT_EQ(record->expires, failed->at + policy.retention_completed);
    clock.advance(2h);  // longer than a failure that may be run again is kept
    const Replay replay = as<Replay>(ask(k, claim(2)));
    EXPECT_EQ(replay.record->answer->http_status, 400);
    EXPECT_EQ(*replay.record->answer->body, "no");
    as<Applied>(ask(k, Fail{.token = g.token,
                            .nonce = nonce(1),
                            .certainty = Certainty::refused_for_good,
                            .failure = failure("upstream-status"),
                            .answer = refusal}));
    as<Fenced>(complete(g, 1));
    as<Fenced>(fail(g, 1, Certainty::not_processed));
    as<Fenced>(ask(k, Release{{}, nonce(1)}));
    expect_same(record, state());
}

TEST_P(StoreContract, release_costs_no_attempt_keeps_the_token_and_may_be_repeated) {
    policy.max_attempts = 1;
    Granted g = grant(1);
    const RecordPtr record = as<Applied>(ask(k, Release{g.token, nonce(1)})).record;
    EXPECT_EQ(record->status, Status::failed);
    EXPECT_EQ(record->token, g.token);
    EXPECT_EQ(record->uncharged_attempts, 1U);
    clock.advance(1s);
    expect_same(record, as<Applied>(ask(k, Release{g.token, nonce(1)})).record);
    expect_same(record, as<Applied>(ask(k, Release{{}, nonce(1)})).record);
    const Granted next = grant(2);
    EXPECT_EQ(next.kind, Granted::Kind::retry);
    EXPECT_GT(next.token, g.token);
    EXPECT_FALSE(next.possible_second_payment);
    // The former owner's release, repeated, must not give away what is no longer its own.
    as<Fenced>(ask(k, Release{g.token, nonce(1)}));
    as<Fenced>(ask(k, Release{{}, nonce(1)}));
    EXPECT_EQ(status(), Status::processing);
    // By nonce alone, where the reply to acquire was lost.
    EXPECT_EQ(as<Applied>(ask(k, Release{{}, nonce(2)})).record->status, Status::failed);
    EXPECT_EQ(grant(3).attempt, 3U);
}

TEST_P(StoreContract, a_released_message_is_due_at_once) {
    policy.kind = IntentKind::message;
    const Granted g = grant(1);
    as<Applied>(ask(k, Release{g.token, nonce(1)}));
    EXPECT_EQ(state()->expires, StoreTime{});
    EXPECT_EQ(grant(2).kind, Granted::Kind::retry);
}

TEST_P(StoreContract, a_cancelled_intent_is_final_although_its_token_stays) {
    policy.on_unknown = OnUnknown::hold;
    for (const bool from_unknown : {false, true}) {
        k = key(from_unknown ? "cancel unknown" : "cancel processing");
        const Granted g = grant(1);
        if (from_unknown) as<Applied>(fail(g, 1, Certainty::unknown));
        Usage partial;
        partial.output_tokens = 12;
        const RecordPtr record = as<Applied>(ask(k, Cancel{g.token, nonce(1), partial})).record;
        EXPECT_TRUE(record->final && record->cancelled);
        EXPECT_EQ(record->token, g.token);
        EXPECT_EQ(record->usage, partial);
        expect_same(record, as<Applied>(ask(k, Cancel{g.token, nonce(1), {}})).record);
        as<Fenced>(complete(g, 1));
        as<Fenced>(fail(g, 1, Certainty::refused_for_good));
        as<Fenced>(fail(g, 1, Certainty::not_processed));
        as<Fenced>(ask(k, Release{g.token, nonce(1)}));
        EXPECT_TRUE(as<Replay>(ask(k, claim(2))).record->cancelled);
        expect_same(record, state());
    }
}

TEST_P(StoreContract, what_is_decided_cannot_be_cancelled) {
    const Granted g = grant(1);
    as<Applied>(fail(g, 1, Certainty::not_processed));
    as<Fenced>(ask(k, Cancel{g.token, nonce(1), {}}));
    as<Applied>(complete(g, 1));
    const RecordPtr record = state();
    as<Fenced>(ask(k, Cancel{g.token, nonce(1), {}}));
    as<Fenced>(fail(g, 1, Certainty::not_processed));
    as<Fenced>(fail(g, 1, Certainty::refused_for_good));
    as<Fenced>(ask(k, Release{g.token, nonce(1)}));
    expect_same(record, state());
}

// ---------------------------------------------------------------- sweeper, people, letters

TEST_P(StoreContract, settle_touches_only_a_dead_lease_of_that_token) {
    const Granted g = grant(1);
    as<Found>(ask(k, Settle{g.token}));
    clock.advance(lease);
    as<Found>(ask(k, Settle{{g.token.value + 1}}));
    EXPECT_EQ(status(), Status::processing);
    const RecordPtr record = as<Applied>(ask(k, Settle{g.token})).record;
    EXPECT_EQ(record->status, Status::failed);
    EXPECT_EQ(record->failure.code, "lease-lost");
    EXPECT_EQ(record->uncharged_attempts, 0U);
    EXPECT_EQ(record->token, g.token);
    EXPECT_EQ(as<Found>(ask(k, Settle{g.token})).record->status, Status::failed);
    const Granted next = grant(2);
    EXPECT_EQ(next.kind, Granted::Kind::retry);
    EXPECT_TRUE(next.possible_second_payment);
}

TEST_P(StoreContract, settle_is_free_before_the_call_and_holds_after_it_where_the_policy_says_so) {
    policy.on_unknown = OnUnknown::hold;
    Granted g = grant(1);
    clock.advance(lease);
    EXPECT_EQ(as<Applied>(ask(k, Settle{g.token})).record->uncharged_attempts, 1U);
    g = grant(2);
    EXPECT_FALSE(g.possible_second_payment);
    as<Applied>(ask(k, Start{g.token, nonce(2)}));
    clock.advance(lease);
    EXPECT_EQ(as<Applied>(ask(k, Settle{g.token})).record->status, Status::unknown);
}

TEST_P(StoreContract, a_late_truth_counts_after_the_sweeper_gave_the_owner_up) {
    Granted g = grant(1);
    clock.advance(lease);
    as<Applied>(ask(k, Settle{g.token}));
    as<Applied>(complete(g, 1));
    as<Replay>(ask(k, claim(2)));

    // Also the truth that it had cost nothing.
    k = key("late failure");
    g = grant(1);
    clock.advance(lease);
    as<Applied>(ask(k, Settle{g.token}));
    EXPECT_EQ(as<Applied>(fail(g, 1, Certainty::not_processed)).record->uncharged_attempts, 1U);
    EXPECT_EQ(as<Applied>(fail(g, 1, Certainty::not_processed)).record->uncharged_attempts, 1U);
    EXPECT_FALSE(grant(2).possible_second_payment);

    // But not once somebody else was granted it.
    k = key("too late");
    g = grant(1);
    clock.advance(lease);
    as<Applied>(ask(k, Settle{g.token}));
    grant(2);
    expect_powerless(g.token, nonce(1));
}

TEST_P(StoreContract, a_person_resolves_what_is_unknown_by_the_token_they_saw) {
    policy.on_unknown = OnUnknown::hold;
    const auto unknown = [&](const std::string& name) {
        k = key(name);
        const Granted g = grant(1);
        as<Applied>(ask(k, Start{g.token, nonce(1)}));
        as<Applied>(fail(g, 1, Certainty::unknown));
        return g;
    };
    Granted g = unknown("resolve completed");
    as<Fenced>(ask(k, Resolve{.token_seen = {g.token.value - 1},
                              .decision = Resolve::Decision::completed,
                              .answer = answer("a person's")}));
    EXPECT_EQ(status(), Status::unknown);
    RecordPtr record = as<Applied>(ask(k, Resolve{.token_seen = g.token,
                                                  .decision = Resolve::Decision::completed,
                                                  .answer = answer("a person's")}))
                           .record;
    EXPECT_GT(record->token, g.token);
    EXPECT_EQ(*as<Replay>(ask(k, claim(2))).record->answer->body, "a person's");
    expect_powerless(g.token, nonce(1));
    as<Fenced>(ask(k, Resolve{.token_seen = record->token, .decision = Resolve::Decision::rerun}));

    g = unknown("resolve completed without the answer");
    as<Applied>(ask(k, Resolve{.token_seen = g.token, .decision = Resolve::Decision::completed}));
    EXPECT_EQ(as<Replay>(ask(k, claim(2))).record->answer->body_kind, BodyKind::not_kept);

    g = unknown("resolve failed");
    record = as<Applied>(ask(k, Resolve{.token_seen = g.token,
                                        .decision = Resolve::Decision::failed,
                                        .reason = "seen in the bill"}))
                 .record;
    EXPECT_EQ(record->status, Status::failed);
    EXPECT_FALSE(record->final);
    EXPECT_EQ(record->failure.message, "seen in the bill");
    expect_powerless(g.token, nonce(1));
    const Granted after_failure = grant(2);
    EXPECT_EQ(after_failure.kind, Granted::Kind::retry);
    EXPECT_TRUE(after_failure.possible_second_payment);

    g = unknown("resolve rerun");
    as<Applied>(ask(k, Resolve{.token_seen = g.token, .decision = Resolve::Decision::rerun}));
    expect_powerless(g.token, nonce(1));
    as<Fenced>(ask(k, Release{{}, nonce(1)}));
    const Granted again = grant(2);
    EXPECT_EQ(again.kind, Granted::Kind::retry);
    EXPECT_TRUE(again.possible_second_payment);
    EXPECT_EQ(again.attempt, 2U);
}

TEST_P(StoreContract, nobody_owns_what_a_person_decided_about_also_not_under_the_empty_nonce) {
    policy.on_unknown = OnUnknown::hold;
    const Granted g = grant(1);
    as<Applied>(fail(g, 1, Certainty::unknown));
    const RecordPtr rerun = as<Applied>(ask(k, Resolve{.token_seen = g.token,
                                                       .decision = Resolve::Decision::rerun,
                                                       .reason = "ask again"}))
                                .record;
    ASSERT_TRUE(rerun);
    expect_powerless(rerun->token, Nonce{});
    as<Fenced>(ask(k, Release{{}, Nonce{}}));
    EXPECT_EQ(status(), Status::failed);

    k = key("granted to nobody");
    Acquire unnamed = claim(1);
    unnamed.nonce = {};
    const Granted lost = as<Granted>(ask(k, unnamed));
    expect_powerless(lost.token, Nonce{});
}

TEST_P(StoreContract, only_unknown_and_dead_can_be_resolved_or_reopened) {
    const Granted g = grant(1);
    const auto expect_refused = [&] {
        const RecordPtr before = state();
        as<Fenced>(
            ask(k, Resolve{.token_seen = before->token, .decision = Resolve::Decision::rerun}));
        as<Fenced>(ask(k, Reopen{1, body("body")}));
        as<Fenced>(ask(k, LetterPublished{before->token}));
        expect_same(before, state());
    };
    expect_refused();
    as<Applied>(fail(g, 1, Certainty::unknown));
    expect_refused();
    as<Applied>(complete(g, 1));
    expect_refused();
}

TEST_P(StoreContract, a_dead_message_is_kept_until_its_letter_is_out_and_may_be_reopened) {
    policy.kind = IntentKind::message;
    policy.max_attempts = 1;
    const Granted g = grant(1);
    as<Applied>(fail(g, 1, Certainty::unknown));
    as<Exhausted>(ask(k, claim(2)));
    EXPECT_EQ(state()->expires, StoreTime{});
    clock.advance(24h * 365);
    EXPECT_EQ(store->purge(100).value(), 0U);
    EXPECT_EQ(status(), Status::dead);
    as<Fenced>(ask(k, LetterPublished{{g.token.value + 1}}));
    const base::Result<Decided> published = ask(k, LetterPublished{g.token});
    const RecordPtr record = as<Applied>(published).record;
    EXPECT_TRUE(record->letter_published);
    EXPECT_EQ(record->expires, published->at + policy.retention_dead);
    clock.advance(1h);
    expect_same(record, as<Applied>(ask(k, LetterPublished{g.token})).record);

    as<Fenced>(ask(k, Reopen{2, body("changed")}));
    const RecordPtr anew = as<Applied>(ask(k, Reopen{1, body("changed")})).record;
    EXPECT_EQ(anew->generation, 2U);
    EXPECT_GT(anew->token, g.token);
    EXPECT_EQ(anew->attempt, 1U);
    EXPECT_EQ(anew->expires, StoreTime{});
    EXPECT_FALSE(anew->letter_published);
    expect_same(anew, as<Applied>(ask(k, Reopen{1, body("changed")})).record);
    expect_powerless(g.token, nonce(1));
    as<Mismatch>(ask(k, claim(3)));
    const Granted again = as<Granted>(ask(k, claim(4, "changed")));
    EXPECT_EQ(again.generation, 2U);
    EXPECT_EQ(again.attempt, 2U);
}

TEST_P(StoreContract, a_failure_brought_to_a_dead_intent_is_kept_and_leaves_it_dead) {
    policy.kind = IntentKind::message;
    policy.max_attempts = 1;
    const Granted g = grant(1);
    clock.advance(lease);
    as<Exhausted>(ask(k, claim(2)));
    const RecordPtr record = as<Applied>(fail(g, 1, Certainty::unknown, "stream-cut")).record;
    EXPECT_EQ(record->status, Status::dead);
    EXPECT_EQ(record->failure.code, "stream-cut");
    as<Applied>(ask(k, LetterPublished{g.token}));
    const RecordPtr published = state();
    expect_same(published, as<Applied>(fail(g, 1, Certainty::unknown, "stream-cut")).record);
    EXPECT_EQ(as<Applied>(fail(g, 1, Certainty::not_processed)).record->expires,
              published->expires);
    as<Applied>(complete(g, 1));
    as<Replay>(ask(k, claim(3)));
}

TEST_P(StoreContract, a_resolved_rerun_of_a_dead_intent_has_its_budget_again) {
    policy.max_attempts = 1;
    Granted g = grant(1);
    as<Applied>(fail(g, 1, Certainty::unknown));
    as<Exhausted>(ask(k, claim(2)));
    as<Applied>(ask(k, Resolve{.token_seen = g.token, .decision = Resolve::Decision::rerun}));
    g = grant(3);
    EXPECT_EQ(g.attempt, 2U);
    as<Applied>(fail(g, 3, Certainty::unknown));
    as<Exhausted>(ask(k, claim(4)));
}

// ---------------------------------------------------------------- time, keys, batches

TEST_P(StoreContract, an_expired_record_counts_as_absent_and_its_token_goes_on) {
    const Granted g = grant(1);
    as<Applied>(complete(g, 1));
    clock.advance(policy.retention_completed - 1us);
    EXPECT_EQ(status(), Status::completed);
    clock.advance(1us);
    EXPECT_EQ(state(), nullptr);
    expect_powerless(g.token, nonce(1));
    const Granted anew = as<Granted>(ask(k, claim(2, "quite another body")));
    EXPECT_EQ(anew.kind, Granted::Kind::fresh);
    EXPECT_EQ(anew.attempt, 1U);
    EXPECT_GT(anew.token, g.token);
    expect_powerless(g.token, nonce(1));
    EXPECT_FALSE(state()->answer);
}

TEST_P(StoreContract, tokens_of_a_key_grow_also_within_one_microsecond) {
    FencingToken last;
    for (std::uint8_t n = 1; n < 30; ++n) {
        const Granted g = grant(n);
        EXPECT_GT(g.token, last);
        last = g.token;
        as<Applied>(ask(k, Release{g.token, nonce(n)}));
    }
}

TEST_P(StoreContract, every_result_carries_the_stores_time) {
    const StoreTime before = store->now();
    const base::Result<Decided> result = ask(k, Get{});
    ASSERT_TRUE(result);
    EXPECT_GE(result->at, before);
    EXPECT_LE(result->at, store->now());
    clock.advance(3s);
    EXPECT_EQ(ask(k, Get{})->at - result->at, 3s);
}

TEST_P(StoreContract, a_jump_of_the_wall_clock_neither_kills_nor_prolongs_a_lease) {
    const Granted g = grant(1);
    clock.jump_wall(24h * 365);
    as<InFlight>(ask(k, claim(2)));
    clock.jump_wall(-24h * 730);
    clock.advance(lease);
    EXPECT_EQ(grant(2).kind, Granted::Kind::takeover);
    EXPECT_GT(state()->token, g.token);
}

TEST_P(StoreContract, keys_are_compared_as_bytes) {
    StoredKey zero;
    StoredKey last_bit;
    last_bit.bytes[31] = 1;
    StoredKey upper;
    upper.bytes.fill('A');
    StoredKey lower;
    lower.bytes.fill('a');
    StoredKey high;
    high.bytes.fill(0xff);
    StoredKey space = upper;
    space.bytes[31] = ' ';
    std::uint8_t n = 0;
    const std::vector<StoredKey> keys{zero, last_bit, upper, lower, high, space};
    for (const StoredKey& each : keys) {
        Acquire op = claim(++n);
        EXPECT_EQ(as<Granted>(ask(each, op)).kind, Granted::Kind::fresh);
    }
    n = 0;
    for (const StoredKey& each : keys)
        EXPECT_EQ(as<Found>(ask(each, Get{})).record->nonce, nonce(++n));
}

TEST_P(StoreContract, a_batch_is_applied_in_order_also_on_one_key) {
    const StoredKey other = key("other");
    std::vector<Item> items;
    items.push_back({k, claim(1)});
    items.push_back({k, claim(2)});
    items.push_back({other, claim(3)});
    items.push_back({k, Release{{}, nonce(1)}});
    items.push_back({k, claim(2)});
    items.push_back({k, Release{{}, nonce(1)}});
    items.push_back({other, Release{{}, nonce(3)}});
    items.push_back({k, Get{}});
    const BatchResults results = submit(std::move(items));
    ASSERT_EQ(results.size(), 8U);
    EXPECT_EQ(as<Granted>(results[0]).kind, Granted::Kind::fresh);
    EXPECT_EQ(as<InFlight>(results[1]).owner.id, "owner-1");
    EXPECT_EQ(as<Granted>(results[2]).kind, Granted::Kind::fresh);
    EXPECT_EQ(as<Applied>(results[3]).record->status, Status::failed);
    EXPECT_EQ(as<Granted>(results[4]).kind, Granted::Kind::retry);
    as<Fenced>(results[5]);
    as<Applied>(results[6]);
    EXPECT_EQ(as<Found>(results[7]).record->nonce, nonce(2));
    EXPECT_EQ(as<Found>(results[7]).record->attempt, 2U);
    EXPECT_TRUE(submit({}).empty());
}

TEST_P(StoreContract, of_64_threads_that_acquire_one_key_exactly_one_is_granted) {
    std::atomic<int> granted{0};
    std::atomic<int> in_flight{0};
    std::atomic<bool> go{false};
    std::vector<std::thread> threads;
    for (int i = 0; i < 64; ++i) {
        threads.emplace_back([&, i] {
            Acquire op = claim(static_cast<std::uint8_t>(i + 1));
            go.wait(false);
            const base::Result<Decided> result = ask(k, op);
            if (!result) return;
            if (std::holds_alternative<Granted>(result->outcome)) ++granted;
            if (std::holds_alternative<InFlight>(result->outcome)) ++in_flight;
        });
    }
    go = true;
    go.notify_all();
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(granted, 1);
    EXPECT_EQ(in_flight, 63);
}

TEST_P(StoreContract, threads_that_pass_a_key_on_count_every_attempt_once) {
    constexpr int threads_count = 8;
    constexpr int grants_each = 25;
    std::mutex mutex;
    std::set<std::uint64_t> tokens;
    std::vector<std::thread> threads;
    for (int i = 0; i < threads_count; ++i) {
        threads.emplace_back([&, i] {
            for (int done = 0; done < grants_each;) {
                const auto n = static_cast<std::uint8_t>(i + 1);
                const base::Result<Decided> result = ask(k, claim(n));
                if (!result) return;
                const Granted* g = std::get_if<Granted>(&result->outcome);
                if (g == nullptr) {
                    std::this_thread::yield();
                    continue;
                }
                ++done;
                {
                    const std::lock_guard lock(mutex);
                    tokens.insert(g->token.value);
                }
                if (!ask(k, Release{g->token, nonce(n)})) return;
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(tokens.size(), std::size_t{threads_count} * grants_each);
    EXPECT_EQ(state()->attempt, static_cast<std::uint32_t>(threads_count * grants_each));
    EXPECT_EQ(state()->token.value, *tokens.rbegin());
}

// ---------------------------------------------------------------- conversations

TEST_P(StoreContract, a_turn_is_written_in_the_step_of_complete_once_per_intent) {
    as<ConversationMissing>(ask(talk, GetConversation{}));
    EXPECT_TRUE(turns({}).empty());
    const base::Result<Decided> done = take_turn("a");
    as<Applied>(done);
    const RecordPtr record = as<Applied>(done).record;
    as<Applied>(ask(k, Complete{record->token, nonce(1), answer("a"), {}, turn("a")}));
    const ConversationFound found = as<ConversationFound>(ask(talk, GetConversation{"a"}));
    EXPECT_TRUE(found.holds_id);
    EXPECT_EQ(found.conversation.turns, 1U);
    EXPECT_EQ(found.conversation.created, done->at);
    EXPECT_EQ(found.conversation.last_used, done->at);
    EXPECT_FALSE(as<ConversationFound>(ask(talk, GetConversation{"b"})).holds_id);
    EXPECT_FALSE(as<ConversationFound>(ask(talk, GetConversation{})).holds_id);
    const std::vector<Turn> all = turns({});
    ASSERT_EQ(all.size(), 1U);
    EXPECT_EQ(all[0].number, 1U);
    EXPECT_EQ(all[0].request_id, "a");
    EXPECT_EQ(all[0].user_content, "hello");
    EXPECT_EQ(all[0].answer_content, "answer to hello");
    EXPECT_EQ(all[0].at, done->at);
    EXPECT_FALSE(all[0].late);
}

TEST_P(StoreContract, a_request_id_is_appended_once_even_by_a_later_record) {
    as<Applied>(take_turn("a"));
    clock.advance(policy.retention_completed);
    as<Applied>(take_turn("a"));
    EXPECT_EQ(turns({}).size(), 1U);
}

TEST_P(StoreContract, a_fenced_or_failed_turn_leaves_nothing) {
    const Granted zombie = grant(1);
    clock.advance(lease);
    const Granted owner = grant(2);
    as<Fenced>(ask(k, Complete{zombie.token, nonce(1), answer("a"), {}, turn("a")}));
    as<Applied>(fail(owner, 2, Certainty::unknown));
    as<Fenced>(ask(k, Complete{zombie.token, nonce(1), answer("a"), {}, turn("a")}));
    as<ConversationMissing>(ask(talk, GetConversation{"a"}));
}

TEST_P(StoreContract, a_turn_resolved_by_a_person_is_appended_at_the_end_and_marked) {
    policy.on_unknown = OnUnknown::hold;
    const StoredKey held = k = key("held");
    said = pending_turn("held", "what was unknown");
    const Granted g = grant(1);
    said = nullptr;
    as<Applied>(fail(g, 1, Certainty::unknown));
    if (GetParam().reopenable) reopen();
    as<Applied>(take_turn("later"));
    Resolve decision{.token_seen = g.token,
                     .decision = Resolve::Decision::completed,
                     .answer = answer("x"),
                     .answer_content = "found in a log"};
    // In one batch with a turn of its own: the conversation it appends to was just written.
    const StoredKey same_batch = key("same batch");
    k = same_batch;
    const Granted with = grant(2);
    const BatchResults both =
        submit({{same_batch, Complete{with.token, nonce(2), answer("a"), {}, turn("third")}},
                {held, decision},
                {held, decision}});
    as<Applied>(both[0]);
    EXPECT_EQ(as<Applied>(both[1]).record->turn, nullptr);
    as<Fenced>(both[2]);
    const std::vector<Turn> all = turns({});
    ASSERT_EQ(all.size(), 3U);
    EXPECT_EQ(all[1].request_id, "third");
    EXPECT_FALSE(all[1].late);
    EXPECT_EQ(all[2].request_id, "held");
    EXPECT_EQ(all[2].number, 3U);
    EXPECT_EQ(all[2].user_content, "what was unknown");
    EXPECT_EQ(all[2].answer_content, "found in a log");
    EXPECT_TRUE(all[2].late);
}

TEST_P(StoreContract, what_the_user_said_is_kept_until_it_is_decided_and_by_the_last_grant) {
    policy.on_unknown = OnUnknown::hold;
    const auto held = [&] { return state()->turn; };
    said = pending_turn("a", "first wording");
    const Granted first = grant(1);
    ASSERT_NE(held(), nullptr);
    EXPECT_EQ(*held(), *said);
    as<Applied>(fail(first, 1, Certainty::not_processed));
    ASSERT_NE(held(), nullptr);  // its owner may still say that the outcome is unknown
    said = pending_turn("a", "second wording");
    const Granted second = grant(2);
    EXPECT_EQ(*held(), *said);
    as<Applied>(ask(k, Complete{second.token, nonce(2), answer("a"), {}, turn("a")}));
    EXPECT_EQ(held(), nullptr);

    k = key("cancelled");
    const Granted third = grant(3);
    as<Applied>(ask(k, Cancel{third.token, nonce(3), {}}));
    EXPECT_EQ(held(), nullptr);

    k = key("refused");
    const Granted fourth = grant(4);
    as<Applied>(fail(fourth, 4, Certainty::refused_for_good));
    EXPECT_EQ(held(), nullptr);
    EXPECT_EQ(turns({}).size(), 1U);
}

TEST_P(StoreContract, a_decision_appends_nothing_without_an_answer_without_a_turn_or_twice) {
    policy.on_unknown = OnUnknown::hold;
    const auto decide_unknown = [&](const std::string& name, Resolve decision) {
        k = key(name);
        const Granted g = grant(1);
        as<Applied>(fail(g, 1, Certainty::unknown));
        decision.token_seen = g.token;
        as<Applied>(ask(k, decision));
    };
    using enum Resolve::Decision;
    said = pending_turn("a", "hello");
    decide_unknown("no content", {.decision = completed, .answer = answer("x")});
    decide_unknown("failed", {.decision = failed, .answer_content = "x"});
    decide_unknown("rerun", {.decision = rerun, .answer_content = "x"});
    said = nullptr;
    decide_unknown("no turn",
                   {.decision = completed, .answer = answer("x"), .answer_content = "x"});
    as<ConversationMissing>(ask(talk, GetConversation{}));
    as<Applied>(take_turn("a"));
    said = pending_turn("a", "hello again");
    decide_unknown("twice", {.decision = completed, .answer = answer("x"), .answer_content = "x"});
    EXPECT_EQ(turns({}).size(), 1U);
}

TEST_P(StoreContract, turns_are_read_in_order_by_page_or_from_the_end) {
    for (int i = 1; i <= 12; ++i) as<Applied>(take_turn(std::to_string(i)));
    const auto numbers = [&](GetTurns what) {
        std::vector<std::uint64_t> out;
        for (const Turn& each : turns(what)) out.push_back(each.number);
        return out;
    };
    using Numbers = std::vector<std::uint64_t>;
    EXPECT_EQ(numbers({.after = 0, .limit = 3}), (Numbers{1, 2, 3}));
    EXPECT_EQ(numbers({.after = 3, .limit = 3}), (Numbers{4, 5, 6}));
    EXPECT_EQ(numbers({.after = 10, .limit = 5}), (Numbers{11, 12}));
    EXPECT_EQ(numbers({.after = 12, .limit = 5}), Numbers{});
    EXPECT_EQ(numbers({.after = 99, .limit = 5}), Numbers{});
    EXPECT_EQ(numbers({.after = 0, .limit = 3, .newest = true}), (Numbers{10, 11, 12}));
    EXPECT_EQ(numbers({.after = 0, .limit = 100, .newest = true}).size(), 12U);
    EXPECT_EQ(turns({.after = 9, .limit = 1})[0].request_id, "10");
}

TEST_P(StoreContract, a_deleted_conversation_is_gone_and_may_begin_again) {
    as<Applied>(take_turn("a"));
    as<Applied>(take_turn("b"));
    EXPECT_TRUE(as<ConversationDeleted>(ask(talk, DeleteConversation{})).existed);
    EXPECT_FALSE(as<ConversationDeleted>(ask(talk, DeleteConversation{})).existed);
    as<ConversationMissing>(ask(talk, GetConversation{"a"}));
    EXPECT_TRUE(turns({}).empty());
    as<Applied>(take_turn("c"));
    EXPECT_EQ(turns({})[0].number, 1U);
    EXPECT_FALSE(as<ConversationFound>(ask(talk, GetConversation{"a"})).holds_id);
}

TEST_P(StoreContract, a_conversation_idle_for_thirty_days_is_purged_and_not_a_moment_earlier) {
    as<Applied>(take_turn("a"));
    clock.advance(24h * 29);
    as<Applied>(take_turn("b"));
    clock.advance(24h * 30 - 1s);
    ASSERT_TRUE(store->purge(1000));
    EXPECT_EQ(turns({}).size(), 2U);
    clock.advance(1s);
    ASSERT_TRUE(store->purge(1000));
    as<ConversationMissing>(ask(talk, GetConversation{"a"}));
    EXPECT_TRUE(turns({}).empty());
}

TEST_P(StoreContract, two_conversations_do_not_meet) {
    as<Applied>(take_turn("a"));
    const StoredKey first = std::exchange(talk, key("another conversation"));
    as<Applied>(take_turn("b"));
    EXPECT_EQ(turns({}).size(), 1U);
    EXPECT_EQ(turns({})[0].request_id, "b");
    as<ConversationDeleted>(ask(talk, DeleteConversation{}));
    talk = first;
    EXPECT_EQ(turns({})[0].request_id, "a");
}

// ---------------------------------------------------------------- chunks, values, listings, end

TEST_P(StoreContract, chunks_of_a_completed_answer_live_until_the_record_is_purged) {
    const Granted g = grant(1);
    const std::string part(1000, 'p');
    for (std::uint32_t n = 0; n < 3; ++n)
        as<ChunkStored>(ask(k, PutChunk{g.token, n, part + std::to_string(n)}));
    as<ChunkStored>(ask(k, PutChunk{g.token, 1, part + "1"}));
    Answer big;
    big.http_status = 200;
    big.body_kind = BodyKind::chunks;
    big.chunk_count = 3;
    big.body_bytes = 3003;
    as<Applied>(ask(k, Complete{g.token, nonce(1), big, {}, {}}));
    clock.advance(policy.retention_completed - 1s);
    ASSERT_TRUE(store->purge(100));
    for (std::uint32_t n = 0; n < 3; ++n) {
        EXPECT_EQ(as<ChunkFound>(ask(k, GetChunk{g.token, n})).bytes, part + std::to_string(n));
    }
    as<ChunkMissing>(ask(k, GetChunk{g.token, 3}));
    as<ChunkMissing>(ask(k, GetChunk{{g.token.value + 1}, 0}));
    as<ChunkMissing>(ask(key("other"), GetChunk{g.token, 0}));
    const RecordPtr record = as<Replay>(ask(k, claim(2))).record;
    EXPECT_EQ(record->answer->body_kind, BodyKind::chunks);
    EXPECT_EQ(record->answer->chunk_count, 3U);
}

TEST_P(StoreContract, a_zombies_chunks_neither_reach_the_answer_nor_survive_it) {
    const Granted zombie = grant(1);
    clock.advance(lease);
    const Granted owner = grant(2);
    as<ChunkStored>(ask(k, PutChunk{owner.token, 0, "of the owner"}));
    as<ChunkStored>(ask(k, PutChunk{zombie.token, 0, "of the zombie"}));
    Answer big;
    big.body_kind = BodyKind::chunks;
    big.chunk_count = 1;
    as<Applied>(ask(k, Complete{owner.token, nonce(2), big, {}, {}}));
    EXPECT_EQ(as<ChunkFound>(ask(k, GetChunk{owner.token, 0})).bytes, "of the owner");
    clock.advance(policy.retention_completed + 24h);
    purge_all(1);
    as<ChunkMissing>(ask(k, GetChunk{zombie.token, 0}));
}

TEST_P(StoreContract, a_claimed_value_is_the_first_ones_for_ever) {
    EXPECT_EQ(as<Value>(ask({}, ClaimValue{"secret", "one"})).value, "one");
    EXPECT_EQ(as<Value>(ask(k, ClaimValue{"secret", "two"})).value, "one");
    EXPECT_EQ(as<Value>(ask({}, ClaimValue{"other", std::string("\0x", 2)})).value,
              std::string("\0x", 2));
}

TEST_P(StoreContract, a_replaced_value_is_the_one_from_then_on) {
    EXPECT_EQ(as<Value>(ask({}, ReplaceValue{"key", "one"})).value, "one");
    EXPECT_EQ(as<Value>(ask({}, ClaimValue{"key", "two"})).value, "one");
    EXPECT_EQ(as<Value>(ask({}, ReplaceValue{"key", "three"})).value, "three");
    EXPECT_EQ(as<Value>(ask({}, ClaimValue{"key", "two"})).value, "three");
}

TEST_P(StoreContract, the_tenant_of_a_record_is_that_of_its_first_grant) {
    Acquire first = claim(1);
    first.tenant.bytes[3] = 7;
    as<Granted>(ask(k, first));
    clock.advance(lease);
    as<Granted>(ask(k, claim(2)));
    EXPECT_EQ(state()->tenant, first.tenant);
}

TEST_P(StoreContract, a_scan_pages_over_every_record_once_and_filters) {
    std::set<StoredKey> all;
    for (int i = 0; i < 25; ++i) {
        k = spread_key("scan " + std::to_string(i));
        all.insert(k);
        const Granted g = grant(1);
        if (i % 5 == 0) as<Applied>(complete(g, 1));
        if (i % 5 == 1) as<Applied>(fail(g, 1, Certainty::not_processed));
    }
    clock.advance(lease);
    k = spread_key("scan live");
    all.insert(k);
    grant(1);

    const auto collect = [&](const ScanFilter& filter, std::size_t limit) {
        std::set<StoredKey> seen;
        std::string cursor;
        do {
            const base::Result<ScanPage> page = store->scan(filter, cursor, limit);
            if (!page) {
                ADD_FAILURE() << page.error().detail;
                break;
            }
            EXPECT_LE(page->records.size(), limit);
            EXPECT_FALSE(!page->next.empty() && page->records.empty());
            for (const auto& [each, record] : page->records) {
                EXPECT_TRUE(seen.insert(each).second || GetParam().records_move) << "seen twice";
                EXPECT_TRUE(record);
                if (record && record->answer) {
                    EXPECT_EQ(record->answer->body, nullptr);
                }
            }
            cursor = page->next;
        } while (!cursor.empty());
        return seen;
    };
    // One that moved meanwhile is found by one of the next listings.
    const auto listed = [&](const ScanFilter& filter, std::size_t limit, std::size_t wanted) {
        std::set<StoredKey> seen = collect(filter, limit);
        for (int more = 0; more < 50 && GetParam().records_move && seen.size() != wanted; ++more)
            seen = collect(filter, limit);
        EXPECT_EQ(seen.size(), wanted);
        return seen;
    };
    EXPECT_EQ(listed({}, 7, all.size()), all);
    EXPECT_EQ(listed({}, 1000, all.size()), all);
    EXPECT_EQ(listed({}, 1, all.size()), all);
    listed({.undecided_only = true}, 4, 16);
    listed({.dead_leases_only = true}, 4, 15);
    listed({.status = static_cast<std::uint8_t>(Status::completed)}, 4, 5);
    listed({.status = static_cast<std::uint8_t>(Status::dead)}, 4, 0);
    clock.advance(policy.retention_completed);
    listed({}, 100, 16);  // what has expired is absent, purged or not
}

TEST_P(StoreContract, purge_removes_what_expired_within_its_limit_and_never_the_undecided) {
    policy.kind = IntentKind::message;
    policy.on_unknown = OnUnknown::hold;
    k = key("running");
    grant(1);
    k = key("unknown");
    as<Applied>(fail(grant(1), 1, Certainty::unknown));
    k = key("retry to come");
    as<Applied>(fail(grant(1), 1, Certainty::not_processed));
    for (int i = 0; i < 10; ++i) {
        k = key("done " + std::to_string(i));
        as<Applied>(complete(grant(1), 1));
    }
    EXPECT_EQ(store->purge(100).value(), 0U);
    clock.advance(24h * 3650);
    const std::size_t first = store->purge(4).value();
    EXPECT_LE(first, 4U);
    purge_all(10 - first);
    for (const char* name : {"running", "unknown", "retry to come"}) {
        k = key(name);
        EXPECT_TRUE(state()) << name;
    }
}

TEST_P(StoreContract, a_purged_key_begins_anew_with_a_higher_token) {
    const Granted g = grant(1);
    as<Applied>(complete(g, 1));
    clock.advance(policy.retention_completed);
    purge_all(1);
    const Granted anew = grant(2);
    EXPECT_EQ(anew.kind, Granted::Kind::fresh);
    EXPECT_GT(anew.token, g.token);
}

TEST_P(StoreContract, a_replayed_record_outlives_its_purge_in_the_readers_hands) {
    const Granted g = grant(1);
    as<Applied>(complete(g, 1, std::string(100'000, 'z')));
    const RecordPtr reading = as<Replay>(ask(k, claim(2))).record;
    clock.advance(policy.retention_completed);
    purge_all(1);
    EXPECT_EQ(state(), nullptr);
    EXPECT_EQ(*reading->answer->body, std::string(100'000, 'z'));
}

TEST_P(StoreContract, a_stopped_store_refuses_everything_and_says_so) {
    const Granted g = grant(1);
    EXPECT_TRUE(store->health());
    store->stop();
    store->stop();
    const base::Result<Decided> refused = complete(g, 1);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, base::ErrorCode::stopping);
    EXPECT_EQ(refused.error().applied, base::Applied::no);
    EXPECT_FALSE(refused.error().detail.empty());
    std::vector<Item> items;
    items.push_back({k, Get{}});
    items.push_back({k, claim(2)});
    EXPECT_EQ(submit(std::move(items)).size(), 2U);
    EXPECT_FALSE(store->health());
    EXPECT_FALSE(store->scan({}, {}, 10));
    EXPECT_FALSE(store->purge(10));
}

TEST_P(StoreContract, what_was_acknowledged_is_there_after_a_reopen_if_the_store_says_so) {
    const Granted done = grant(1);
    as<Applied>(complete(done, 1, "kept"));
    const RecordPtr before = state();
    const StoredKey completed = std::exchange(k, key("running over the reopen"));
    const Granted running = grant(2);
    as<Value>(ask({}, ClaimValue{"secret", "one"}));
    if (!GetParam().reopenable) {
        EXPECT_FALSE(store->durability().survives_process_crash);
        return;
    }
    reopen();
    EXPECT_EQ(as<Value>(ask({}, ClaimValue{"secret", "two"})).value, "one");
    const StoredKey was_running = std::exchange(k, completed);
    expect_same(before, state());
    k = was_running;
    EXPECT_EQ(status(), Status::processing);
    if (GetParam().reopen_kills_leases) {
        const Granted next = grant(3);
        EXPECT_EQ(next.kind, Granted::Kind::takeover);
        EXPECT_GT(next.token, running.token);
    } else {
        as<Applied>(complete(running, 2));
    }
}
