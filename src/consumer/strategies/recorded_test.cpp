// The strategy `recorded`: what is claimed, run, recorded and told, and what other processes see of
// it.
#include "consumer/strategies/recorded_test.hpp"

#include "stores/memory/memory_store.hpp"

namespace semel::consumer {

std::unique_ptr<core::Store> memory_store(base::Clock& clock) {
    return stores::make_memory_store(clock);
}

namespace {

TEST_F(RecordedTest, a_message_is_run_once_and_its_redelivery_is_a_duplicate) {
    auto a = node("a");
    a->handler.script = [&](const Message& m, const Attempt& attempt) {
        // The attempt is durable before the handler is asked.
        const core::RecordPtr now = record(m.id);
        EXPECT_TRUE(now && now->status == Status::processing && now->attempt == 1u);
        EXPECT_EQ(now->token, attempt.token);
        return Handled{};
    };
    a->run({&message("1"), &message("2")});
    settle();
    EXPECT_TRUE(a->last<Applied>("1") && a->last<Applied>("2"));
    ASSERT_TRUE(record("1"));
    EXPECT_EQ(record("1")->status, Status::completed);
    EXPECT_EQ(record("1")->expires - record("1")->completed, options.retention);
    auto b = node("b");
    b->run({&message("1"), &message("2")});
    settle();
    EXPECT_TRUE(b->last<Duplicate>("1") && b->last<Duplicate>("2"));
    EXPECT_TRUE(b->handler.calls.empty());
}

TEST_F(RecordedTest,
       a_duplicate_of_a_running_message_is_not_settled_and_runs_after_the_owners_death) {
    auto a = node("a");
    a->handler.script = [](const Message&, const Attempt&) { return std::nullopt; };
    a->run({&message("1")});
    settle();
    auto b = node("b");
    Message& again = message("1");
    b->run({&again});
    settle();
    const auto busy = b->get<Busy>("1");
    EXPECT_GE(busy.remaining, 50ms);
    EXPECT_LE(busy.remaining, lease);
    EXPECT_TRUE(b->handler.calls.empty());
    die(a);
    b->run({&again});
    settle();
    EXPECT_TRUE(b->last<Applied>("1"));
    EXPECT_EQ(b->handler.count("1"), 1u);
    EXPECT_EQ(b->handler.attempts.front().number, 2u);
    EXPECT_EQ(b->counters.takeovers, 1u);
    EXPECT_EQ(b->counters.unknown_outcomes, 1u);
}

TEST_F(RecordedTest, a_late_first_worker_neither_overwrites_nor_settles_as_its_own) {
    auto a = node("a"), b = node("b");
    a->handler.script = [](const Message&, const Attempt&) { return std::nullopt; };
    a->run({&message("1")});
    settle();
    a->store.down = true;  // cut off: it cannot renew
    run_for(lease + 1s);
    b->run({&message("1")});
    settle();
    EXPECT_TRUE(b->last<Applied>("1"));
    const core::FencingToken token = record("1")->token;
    a->store.down = false;
    a->handler.end("1");
    run_for(3s);
    EXPECT_TRUE(a->last<Duplicate>("1"));
    EXPECT_EQ(record("1")->token, token);
}

TEST_F(RecordedTest, a_worker_overtaken_by_one_that_still_runs_is_looked_at_again) {
    auto a = node("a"), b = node("b");
    a->handler.script =
        b->handler.script = [](const Message&, const Attempt&) { return std::nullopt; };
    a->run({&message("1")});
    settle();
    a->store.down = true;
    run_for(lease + 1s);
    b->run({&message("1")});
    settle();
    a->store.down = false;
    a->handler.end("1");
    run_for(3s);
    EXPECT_TRUE(a->last<Held>("1"));
    EXPECT_EQ(a->counters.unknown_outcomes, 1u);
    b->handler.end("1");
    settle();
    EXPECT_TRUE(b->last<Applied>("1"));
}

TEST_F(RecordedTest, a_failed_message_runs_again_when_due_and_its_attempts_survive_restarts) {
    options.retry = {.attempts = 3, .initial = 4s, .factor = 2.0, .max = 60s, .jitter = 0};
    auto a = node("a");
    a->handler.script = [](const Message&, const Attempt&) {
        return HandledFailed{"no disk", 0ms};
    };
    Message& m = message("1");
    a->run({&m});
    settle();
    EXPECT_EQ(a->get<Retry>("1").delay, 4s);
    EXPECT_TRUE(a->get<Retry>("1").charged);
    a = node("a, restarted");
    a->run({&m});
    settle();
    const auto wait = a->get<Retry>("1");
    EXPECT_FALSE(wait.charged);
    EXPECT_GT(wait.delay, 3s);
    EXPECT_TRUE(a->handler.calls.empty());
    run_for(wait.delay);
    a->handler.script = [](const Message&, const Attempt& attempt) {
        EXPECT_EQ(attempt.number, 2u);
        return HandledNotYet{"no order yet", 0ms};
    };
    a->run({&m});
    settle();
    EXPECT_EQ(a->get<Retry>("1").delay, 8s);
    EXPECT_EQ(a->counters.not_yet, 1u);
    run_for(8s);
    a = node("a, restarted again");
    a->handler.script = [](const Message&, const Attempt& attempt) {
        EXPECT_EQ(attempt.number, 3u);
        return HandledUnknown{"it did not say"};
    };
    a->run({&m});
    settle();
    const auto dead = a->get<Dead>("1");
    EXPECT_EQ(dead.why, DeadClass::attempts);
    EXPECT_EQ(dead.failed_runs, 3u);
    EXPECT_EQ(dead.reason, "it did not say");
    EXPECT_FALSE(dead.letter_known);
    EXPECT_EQ(record("1")->status, Status::dead);
    EXPECT_EQ(dead.first_failure_ms, record("1")->created.us / 1000);
}

TEST_F(RecordedTest, a_failed_message_that_succeeds_later_is_applied) {
    auto a = node("a");
    a->handler.script = [](const Message&, const Attempt& attempt) -> HandlerOutcome {
        if (attempt.number == 1) return HandledFailed{"busy", 5s};
        return Handled{};
    };
    Message& m = message("1");
    a->run({&m});
    settle();
    EXPECT_EQ(a->get<Retry>("1").delay, 5s);  // the handler asked for more than the back-off
    run_for(5s);
    a->run({&m});
    settle();
    EXPECT_TRUE(a->last<Applied>("1"));
}

TEST_F(RecordedTest, of_two_retries_at_once_one_is_run) {
    auto a = node("a"), b = node("b");
    a->handler.script = [](const Message&, const Attempt&) { return HandledFailed{"x", 0ms}; };
    a->run({&message("1")});
    settle();
    run_for(2s);
    a->handler.script =
        b->handler.script = [](const Message&, const Attempt&) { return std::nullopt; };
    a->handler.calls.clear();
    a->run({&message("1")});
    b->run({&message("1")});
    settle();
    EXPECT_EQ(a->handler.calls.size() + b->handler.calls.size(), 1u);
    EXPECT_TRUE(a->last<Busy>("1") || b->last<Busy>("1"));
}

TEST_F(RecordedTest, a_fatal_message_is_dead_at_once_and_stays_dead_until_its_letter_is_known) {
    auto a = node("a");
    a->handler.script = [](const Message&, const Attempt&) {
        return HandledFatal{"no such account"};
    };
    Message& m = message("1");
    a->run({&m});
    settle();
    auto dead = a->get<Dead>("1");
    EXPECT_EQ(dead.why, DeadClass::fatal);
    EXPECT_EQ(dead.failed_runs, 1u);
    ASSERT_EQ(record("1")->status, Status::dead);
    EXPECT_TRUE(core::undecided(*record("1")));
    auto b = node("b");
    b->run({&m});
    settle();
    dead = b->get<Dead>("1");
    EXPECT_EQ(dead.why, DeadClass::fatal);
    EXPECT_EQ(dead.reason, "no such account");
    EXPECT_FALSE(dead.letter_known);
    int marked = 0;
    b->strategy->letter_published(m, dead, [&](base::Result<void> result) {
        EXPECT_TRUE(result);
        ++marked;
    });
    settle();
    EXPECT_EQ(marked, 1);
    EXPECT_TRUE(record("1")->letter_published);
    b->run({&m});
    settle();
    EXPECT_TRUE(b->get<Dead>("1").letter_known);
    EXPECT_TRUE(b->handler.calls.empty());
}

TEST_F(RecordedTest, a_letter_whose_mark_was_not_recorded_is_told_so) {
    auto a = node("a");
    a->handler.script = [](const Message&, const Attempt&) { return HandledFatal{"x"}; };
    Message& m = message("1");
    a->run({&m});
    settle();
    strike<core::LetterPublished>(*a, Fate::lose_reply);
    std::vector<bool> results;
    const auto note = [&](base::Result<void> result) { results.push_back(result.has_value()); };
    a->strategy->letter_published(m, a->get<Dead>("1"), note);
    settle();
    a->strategy->letter_published(m, a->get<Dead>("1"), note);
    // Nothing is to be recorded of a message that has no record of its own.
    a->strategy->letter_published(message("other"), Dead{.why = DeadClass::mismatch}, note);
    settle();
    EXPECT_EQ(results, (std::vector<bool>{false, true, true}));
}

TEST_F(RecordedTest, a_giving_up_that_was_cut_short_is_finished_without_another_run) {
    auto a = node("a");
    a->handler.script = [](const Message&, const Attempt&) { return HandledFatal{"bad"}; };
    // It dies after the failure was written and before the message is DEAD.
    a->store.script = [](const std::vector<core::Item>& items) -> std::optional<Fate> {
        for (const core::Item& item : items) {
            const auto* acquire = std::get_if<core::Acquire>(&item.operation);
            if (acquire != nullptr && acquire->policy.max_attempts == 1) return Fate::drop;
        }
        return std::nullopt;
    };
    a->run({&message("1")});
    settle();
    EXPECT_FALSE(a->answered("1"));
    a.reset();
    ASSERT_EQ(record("1")->status, Status::failed);
    auto b = node("b");
    b->run({&message("1")});
    settle();
    const auto dead = b->get<Dead>("1");
    EXPECT_EQ(dead.why, DeadClass::fatal);
    EXPECT_EQ(dead.reason, "bad");
    EXPECT_EQ(dead.failed_runs, 1u);
    EXPECT_TRUE(b->handler.calls.empty());
    EXPECT_EQ(record("1")->status, Status::dead);
}

TEST_F(RecordedTest, a_reopened_message_runs_with_fresh_budgets) {
    auto a = node("a");
    a->handler.script = [](const Message&, const Attempt&) { return HandledFatal{"bad"}; };
    Message& m = message("1");
    a->run({&m});
    settle();
    const base::Digest stored = secret("message" + std::string(m.key.view()));
    truth->submit({core::Item{stored, core::Reopen{1, m.fingerprint}}}, [](const auto&) {});
    a->handler.script = [](const Message&, const Attempt&) { return HandledFailed{"again", 0ms}; };
    a->run({&m});
    settle();
    EXPECT_EQ(a->get<Retry>("1").delay, 1s);  // the first wait, not the last
    run_for(2s);
    a->handler.script = {};
    a->run({&m});
    settle();
    EXPECT_TRUE(a->last<Applied>("1"));
    EXPECT_EQ(record("1")->generation, 2u);
}

TEST_F(RecordedTest, an_id_used_for_another_message_is_dead_or_a_duplicate_as_configured) {
    auto a = node("a");
    a->run({&message("1", 0, "pay 5")});
    settle();
    a->run({&message("1", 0, "pay 6")});
    settle();
    const auto dead = a->get<Dead>("1");
    EXPECT_EQ(dead.why, DeadClass::mismatch);
    EXPECT_EQ(dead.token.value, 0u);
    options.mismatch_is_duplicate = true;
    auto b = node("b");
    b->run({&message("1", 0, "pay 6")});
    settle();
    EXPECT_TRUE(b->last<Duplicate>("1"));
    // Who does not compare is no mismatch.
    options.mismatch_is_duplicate = false;
    auto c = node("c");
    Message& plain = message("1");
    plain.fingerprint = {};
    c->run({&plain});
    settle();
    EXPECT_TRUE(c->last<Duplicate>("1"));
    EXPECT_EQ(a->handler.calls.size() + b->handler.calls.size() + c->handler.calls.size(), 1u);
}

TEST_F(RecordedTest, an_ill_handler_charges_nobody) {
    options.retry.attempts = 1;
    auto a = node("a");
    Message& m = message("1");
    a->handler.script = [](const Message&, const Attempt&) {
        return HandlerIll{"401 from /orders"};
    };
    for (int i = 0; i < 5; ++i) {
        a->run({&m});
        settle();
        EXPECT_EQ(a->get<Ill>("1").reason, "401 from /orders");
    }
    a->handler.script = {};
    a->run({&m});
    settle();
    EXPECT_TRUE(a->last<Applied>("1"));
}

// -------------------------------------------------------------------- lanes and claims

TEST_F(RecordedTest, a_lane_runs_in_order_and_a_failure_gives_the_rest_back) {
    auto a = node("a");
    a->handler.script = [](const Message& m, const Attempt&) -> HandlerOutcome {
        if (m.id == "2") return HandledFailed{"no", 0ms};
        return Handled{};
    };
    std::vector<Message*> lane;
    for (const char* id : {"1", "2", "3", "4"}) lane.push_back(&message(id, 7));
    lane.push_back(&message("x", 8));
    a->run(lane);
    settle();
    EXPECT_TRUE(a->last<Applied>("1") && a->last<Retry>("2") && a->last<Applied>("x"));
    EXPECT_TRUE(a->last<Held>("3") && a->last<Held>("4"));
    EXPECT_EQ(a->handler.count("3") + a->handler.count("4"), 0u);
    // Their claims are free at once, and were not charged.
    auto b = node("b");
    b->run({&message("3"), &message("4")});
    settle();
    EXPECT_TRUE(b->last<Applied>("3") && b->last<Applied>("4"));
}

TEST_F(RecordedTest, messages_of_a_lane_never_overlap_and_a_second_delivery_in_it_is_a_duplicate) {
    auto a = node("a");
    a->handler.script = [](const Message&, const Attempt&) { return std::nullopt; };
    a->run({&message("1", 7), &message("1", 7), &message("2", 7)});
    settle();
    EXPECT_EQ(a->handler.calls, (std::vector<std::string>{"1"}));
    a->handler.end("1");
    settle();
    EXPECT_EQ(a->handler.calls, (std::vector<std::string>{"1", "2"}));
    ASSERT_EQ(a->told["1"].size(), 2u);
    EXPECT_TRUE(std::holds_alternative<Applied>(a->told["1"][0]));
    EXPECT_TRUE(std::holds_alternative<Duplicate>(a->told["1"][1]));
    a->handler.end("2");
    settle();
    EXPECT_TRUE(a->last<Applied>("2"));
}

TEST_F(RecordedTest, a_lane_that_waits_for_another_owner_holds_no_claims) {
    auto a = node("a"), b = node("b");
    b->handler.script = [](const Message&, const Attempt&) { return std::nullopt; };
    b->run({&message("1")});
    settle();
    a->run({&message("1", 7), &message("2", 7), &message("3", 7)});
    settle();
    EXPECT_TRUE(a->last<Busy>("1") && a->last<Held>("2") && a->last<Held>("3"));
    for (const char* id : {"2", "3"}) {
        const core::RecordPtr now = record(id);
        EXPECT_TRUE(!now || (now->status == Status::failed && now->uncharged_attempts == 1));
    }
}

TEST_F(RecordedTest, no_more_handlers_run_at_once_than_configured) {
    options.concurrency = 3;
    auto a = node("a");
    a->handler.script = [](const Message&, const Attempt&) { return std::nullopt; };
    std::vector<Message*> all;
    for (int i = 0; i < 6; ++i) all.push_back(&message(std::to_string(i)));
    a->run(all);
    settle();
    EXPECT_EQ(a->handler.open(), 3u);
    a->handler.end("0");
    settle();
    EXPECT_EQ(a->handler.open(), 3u);
    EXPECT_EQ(a->handler.most_at_once, 3u);
}

TEST_F(RecordedTest, an_unstarted_claim_is_not_renewed_and_not_used_when_it_is_old) {
    options.concurrency = 1;
    auto a = node("a"), b = node("b");
    a->handler.script = [](const Message&, const Attempt&) { return std::nullopt; };
    a->run({&message("slow"), &message("behind")});
    run_for(lease + 1s);
    EXPECT_TRUE(a->handler.running("slow"));
    b->run({&message("behind"), &message("slow")});
    settle();
    EXPECT_TRUE(b->last<Applied>("behind"));  // its claim ran out
    EXPECT_TRUE(b->last<Busy>("slow"));       // renewed while it runs
    a->handler.end("slow");
    settle();
    EXPECT_TRUE(a->last<Applied>("slow"));
    EXPECT_TRUE(a->last<Held>("behind"));
    EXPECT_EQ(a->handler.count("behind"), 0u);
}

TEST_F(RecordedTest, a_running_message_is_renewed_for_as_long_as_it_takes) {
    auto a = node("a"), b = node("b");
    a->handler.script = [](const Message&, const Attempt&) { return std::nullopt; };
    a->run({&message("1"), &message("2")});
    settle();
    Message& again = message("1");
    for (int i = 0; i < 50; ++i) {
        b->run({&again});
        run_for(1s);
        ASSERT_TRUE(b->last<Busy>("1"));
    }
    a->handler.end("1");
    a->handler.end("2");
    settle();
    EXPECT_TRUE(a->last<Applied>("1") && a->last<Applied>("2"));
    EXPECT_EQ(record("1")->attempt, 1u);
}

TEST_F(RecordedTest, capacity_grows_for_fast_handlers_and_shrinks_for_slow_ones) {
    auto a = node("a");
    const std::size_t first = a->strategy->capacity();
    EXPECT_GE(first, 4u);
    EXPECT_LE(first, 8u);
    std::size_t told = 0;
    a->strategy->on_capacity = [&] { ++told; };
    a->run({&message("1"), &message("2")});
    settle();
    EXPECT_GE(a->strategy->capacity(), 512u);
    EXPECT_GE(told, 1u);
    // Handlers of 20 s: longer than a tenth of the lease, so nothing is claimed that cannot start.
    a->handler.script = [](const Message&, const Attempt&) { return std::nullopt; };
    for (int round = 0; round < 4; ++round) {
        a->handler.calls.clear();
        std::vector<Message*> batch;
        const std::string name = "slow" + std::to_string(round);
        batch.push_back(&message(name));
        a->run(batch);
        run_for(20s);
        a->handler.end(name);
        settle();
    }
    EXPECT_EQ(a->strategy->capacity(), 4u);
    told = 0;
    std::vector<Message*> full;
    for (int i = 0; i < 4; ++i) full.push_back(&message("full" + std::to_string(i)));
    a->run(full);
    settle();
    EXPECT_EQ(a->strategy->capacity(), 0u);
    EXPECT_EQ(told, 0u);
    a->handler.end("full2");
    settle();
    EXPECT_EQ(told, 1u);
    EXPECT_EQ(a->strategy->capacity(), 1u);
}

// -------------------------------------------------------------------- on_unknown: hold

TEST_F(RecordedTest, held_unknown_outcomes_are_dead_and_never_run_again) {
    options.hold_unknown = true;
    auto a = node("a");
    a->handler.script = [](const Message&, const Attempt&) { return HandledUnknown{"timed out"}; };
    Message& m = message("1");
    a->run({&m});
    settle();
    EXPECT_EQ(a->get<Dead>("1").why, DeadClass::unknown);
    EXPECT_EQ(a->get<Dead>("1").reason, "timed out");
    EXPECT_EQ(record("1")->status, Status::unknown);
    a->run({&m});
    settle();
    EXPECT_EQ(a->get<Dead>("1").why, DeadClass::unknown);
    EXPECT_EQ(a->handler.count("1"), 1u);
}

TEST_F(RecordedTest, under_hold_only_a_started_message_of_a_dead_owner_is_unknown) {
    options.hold_unknown = true;
    options.concurrency = 1;
    auto a = node("a"), b = node("b");
    a->handler.script = [](const Message&, const Attempt&) { return std::nullopt; };
    a->run({&message("started"), &message("claimed")});
    settle();
    EXPECT_EQ(record("claimed")->status, Status::processing);
    die(a);
    b->run({&message("started"), &message("claimed")});
    settle();
    EXPECT_EQ(b->get<Dead>("started").why, DeadClass::unknown);
    EXPECT_TRUE(b->last<Applied>("claimed"));
    EXPECT_EQ(b->handler.calls, (std::vector<std::string>{"claimed"}));
}

TEST_F(RecordedTest, under_hold_failed_runs_are_counted_over_restarts_and_given_up) {
    options.hold_unknown = true;
    options.retry = {.attempts = 3, .initial = 1s, .jitter = 0};
    Message& m = message("1");
    for (std::uint32_t n = 1; n <= 2; ++n) {
        auto a = node("a");
        a->handler.script = [&](const Message&, const Attempt& attempt) {
            EXPECT_EQ(attempt.number, n);
            return HandledFailed{"still no", 0ms};
        };
        a->run({&m});
        settle();
        EXPECT_EQ(a->get<Retry>("1").delay, n * 1s);
        run_for(2s);
        // Given back in between: the count stays.
        a->handler.script = [](const Message&, const Attempt&) { return HandlerIll{"down"}; };
        a->run({&m});
        settle();
        EXPECT_TRUE(a->last<Ill>("1"));
    }
    auto a = node("a");
    a->handler.script = [](const Message&, const Attempt&) { return HandledFailed{"never", 0ms}; };
    a->run({&m});
    settle();
    const auto dead = a->get<Dead>("1");
    EXPECT_EQ(dead.why, DeadClass::attempts);
    EXPECT_EQ(dead.failed_runs, 3u);
    EXPECT_EQ(dead.reason, "never");
    EXPECT_EQ(record("1")->status, Status::dead);
    a->run({&m});
    settle();
    EXPECT_EQ(a->get<Dead>("1").why, DeadClass::attempts);
    EXPECT_EQ(a->get<Dead>("1").failed_runs, 3u);
    bool marked = false;
    a->strategy->letter_published(m, dead, [&](base::Result<void> r) { marked = r.has_value(); });
    settle();
    EXPECT_TRUE(marked && record("1")->letter_published);
}

// -------------------------------------------------------------------- leaving and stopping

TEST_F(RecordedTest, what_has_not_started_of_a_leaving_partition_is_given_back) {
    options.concurrency = 1;
    auto a = node("a");
    auto other = std::make_shared<brokers::Assignment>(brokers::Partition{"orders", 1}, 2);
    a->handler.script = [](const Message&, const Attempt&) { return std::nullopt; };
    Message& stays = message("stays");
    stays.delivery.receipt.assignment = other;
    a->run(
        {&message("runs"), &message("waits"), &stays, &message("lane", 3), &message("lane2", 3)});
    settle();
    a->strategy->leaving(partition);
    settle();
    EXPECT_TRUE(a->last<Held>("waits") && a->last<Held>("lane") && a->last<Held>("lane2"));
    EXPECT_FALSE(a->answered("runs") || a->answered("stays"));
    auto b = node("b");
    b->run({&message("waits"), &message("lane")});
    settle();
    EXPECT_TRUE(b->last<Applied>("waits") && b->last<Applied>("lane"));
    a->handler.end("runs");
    settle();
    EXPECT_TRUE(a->last<Applied>("runs"));
    EXPECT_TRUE(a->handler.running("stays"));
    a->handler.end("stays");
    settle();
    EXPECT_TRUE(a->last<Applied>("stays"));
}

TEST_F(RecordedTest, stop_waits_for_what_runs_and_gives_the_rest_back) {
    options.concurrency = 1;
    auto a = node("a");
    a->handler.script = [](const Message&, const Attempt&) { return std::nullopt; };
    a->run({&message("runs"), &message("waits")});
    settle();
    bool stopped = false;
    a->strategy->stop(20s, [&] { stopped = true; });
    settle();
    EXPECT_EQ(a->strategy->capacity(), 0u);
    EXPECT_TRUE(a->last<Held>("waits"));
    EXPECT_FALSE(stopped);
    a->run({&message("late")});
    EXPECT_TRUE(a->last<Held>("late"));
    a->handler.end("runs");
    settle();
    EXPECT_TRUE(stopped && a->last<Applied>("runs"));
    EXPECT_FALSE(a->handler.cancelled);
    EXPECT_EQ(record("waits")->status, Status::failed);
}

TEST_F(RecordedTest, stop_cancels_what_does_not_end_and_abandons_what_cannot_be_cancelled) {
    auto a = node("a"), b = node("b");
    a->handler.script =
        b->handler.script = [](const Message&, const Attempt&) { return std::nullopt; };
    b->handler.cancel_ends = false;
    a->run({&message("1")});
    b->run({&message("2")});
    settle();
    bool a_stopped = false, b_stopped = false;
    a->strategy->stop(5s, [&] { a_stopped = true; });
    b->strategy->stop(5s, [&] { b_stopped = true; });
    run_for(4s);
    EXPECT_FALSE(a->handler.cancelled || a_stopped || b_stopped);
    run_for(1500ms);
    EXPECT_TRUE(a_stopped && a->last<Retry>("1"));
    run_for(1s);
    EXPECT_TRUE(b_stopped);
    EXPECT_FALSE(b->answered("2"));  // its handler still reads it
    run_for(lease);
    auto c = node("c");
    c->run({&message("2")});
    settle();
    EXPECT_TRUE(c->last<Applied>("2"));
    b->handler.end("2");
    settle();
    EXPECT_TRUE(b->last<Held>("2"));
}

TEST_F(RecordedTest, the_promise_says_what_is_never_lost_and_when_it_is_doubled) {
    options.store_promise = "Records are gone when the process ends.";
    auto a = node("a");
    EXPECT_NE(a->strategy->promise().find("Never lost"), std::string::npos);
    EXPECT_NE(a->strategy->promise().find("doubled only where a process died"), std::string::npos);
    EXPECT_NE(a->strategy->promise().find(options.store_promise), std::string::npos);
    options.hold_unknown = true;
    EXPECT_NE(node("b")->strategy->promise().find("letter of class unknown"), std::string::npos);
}

TEST(RetryRules, waits_grow_up_to_the_longest_and_then_come_the_delays) {
    const RetryRules rules{.attempts = 4,
                           .initial = 1s,
                           .factor = 3.0,
                           .max = 5s,
                           .jitter = 0.2,
                           .delays = {60s, 600s}};
    EXPECT_EQ(rules.runs(), 6u);
    EXPECT_EQ(rules.wait_after(1, 0ms, 0.5), 1s);
    EXPECT_EQ(rules.wait_after(2, 0ms, 0.5), 3s);
    EXPECT_EQ(rules.wait_after(3, 0ms, 0.5), 5s);
    EXPECT_EQ(rules.wait_after(4, 0ms, 0.5), 60s);
    EXPECT_EQ(rules.wait_after(5, 0ms, 0.5), 600s);
    EXPECT_EQ(rules.wait_after(6, 0ms, 0.5), std::nullopt);
    EXPECT_EQ(rules.wait_after(1, 0ms, 0.0), 800ms);
    EXPECT_EQ(rules.wait_after(1, 4s, 0.5), 4s);    // asked for more
    EXPECT_EQ(rules.wait_after(1, 1h, 0.5), 5s);    // but not beyond max
    EXPECT_EQ(rules.wait_after(2, 10ms, 0.5), 3s);  // nor less
    EXPECT_EQ(rules.longest(), 5s + 5s + 6s + 72s + 720s);
    EXPECT_EQ((RetryRules{.attempts = 1}.wait_after(1, 0ms, 0.5)), std::nullopt);
    RetryRules exact{.attempts = 2, .initial = 1s, .jitter = 0.5, .delays = {10s, 60s}};
    exact.exact_delays = true;
    EXPECT_EQ(exact.wait_after(1, 0ms, 0.0), 500ms) << "in place";
    EXPECT_EQ(exact.wait_after(2, 0ms, 0.0), 10s);
    EXPECT_EQ(exact.wait_after(3, 0ms, 0.9), 60s);
    EXPECT_EQ(exact.delay_after(1), std::nullopt);
    EXPECT_EQ(exact.delay_after(2), 0u);
    EXPECT_EQ(exact.delay_after(3), 1u);
    EXPECT_EQ(exact.delay_after(4), std::nullopt);
}

}  // namespace
}  // namespace semel::consumer
