// The ai strategy between a scripted /api/chat and a scripted publisher, in virtual time.
#include "consumer/strategies/ai.hpp"

#include <gtest/gtest.h>

#include <map>
#include <optional>

#include "stores/memory/memory_store.hpp"
#include "support/manual_clock.hpp"

namespace semel::consumer {
namespace {

using namespace std::chrono_literals;

const char* kind_of(const Verdict& verdict) {
    constexpr const char* names[] = {"applied", "duplicate", "retry",  "busy", "held",
                                     "suspect", "ill",       "fenced", "dead"};
    return names[verdict.index()];
}

std::string named(const Verdict& verdict) {
    std::string text = kind_of(verdict);
    if (const auto* dead = std::get_if<Dead>(&verdict))
        text += std::string(" ") + name_of(dead->why);
    return text;
}

ChatAnswer answer_of(const std::string& body, bool replayed = false) {
    return {.status = 200, .body = body, .replayed = replayed};
}
ChatAnswer problem_of(int status, std::string slug, int upstream_status = 0) {
    return {.status = status, .problem = std::move(slug), .upstream_status = upstream_status};
}

class AiStrategy : public testing::Test {
  protected:
    AiStrategy() {
        options_.config.tenant = "shop";
        options_.config.user = config::ValueSpec{config::ValueFrom::json, "/userId"};
        options_.config.session = config::ValueSpec{config::ValueFrom::json, "/sessionId"};
        options_.config.prompt = {config::ValueFrom::json, "/prompt"};
        options_.config.model = "small";
        options_.concurrency = 4;
        options_.retry = {.attempts = 3, .initial = 1s, .factor = 2, .max = 60s, .jitter = 0};
    }

    void make(bool publishes = true) {
        strategy_.reset();
        results_.reset();
        if (publishes) {
            results_.emplace(
                loop_, ResultsOptions{.republish = republish_, .owner = {"a", {}}}, records_.get(),
                counters_, [this](std::string id, const HandlerAnswerPtr& answer, auto done) {
                    EXPECT_EQ(answer->content_type, "application/json");
                    published_.push_back({std::move(id), answer->body, std::move(done)});
                });
        }
        strategy_ = make_ai(
            loop_, options_,
            [this](ChatTurn turn, auto done) {
                asked_.push_back({std::move(turn), std::move(done)});
            },
            results_ ? &*results_ : nullptr, counters_);
        strategy_->on_capacity = [this] { ++capacity_told_; };
    }

    Message& message(const std::string& id, std::uint64_t lane = 0, std::string payload = {}) {
        if (payload.empty())
            payload = R"({"userId": "ann", "sessionId": "s1", "prompt": "hello )" + id + "\"}";
        auto made = std::make_unique<Message>();
        made->id = id;
        made->key = base::sha256(id);
        made->lane = lane;
        made->delivery = brokers::make_delivery({assignment_, 1, 0}, std::nullopt, payload, {});
        messages_.push_back(std::move(made));
        return *messages_.back();
    }
    void run(std::vector<Message*> messages) {
        strategy_->run(std::move(messages), false, [this](Message& of, Verdict verdict) {
            verdicts_[of.id].push_back(std::move(verdict));
        });
        loop_.run_ready();
    }
    struct Asked {
        ChatTurn turn;
        std::function<void(ChatAnswer)> done;
    };
    void answer(std::size_t which, ChatAnswer answer) {
        asked_.at(which).done(std::move(answer));
        loop_.run_ready();
    }
    void confirm(std::size_t which, base::Result<void> result = {}) {
        published_.at(which).done(std::move(result));
        loop_.run_ready();
    }
    /// The last verdict on a message; a message without one is "running".
    std::string last(const std::string& id) {
        const auto found = verdicts_.find(id);
        return found == verdicts_.end() ? "running" : named(found->second.back());
    }
    /// Runs one message whose turn is answered so.
    Verdict verdict_on(const std::string& id, ChatAnswer said) {
        run({&message(id)});
        answer(asked_.size() - 1, std::move(said));
        return verdicts_[id].back();
    }

    struct Published {
        std::string id, body;
        std::function<void(base::Result<void>)> done;
    };
    support::ManualClock clock_;
    runtime::Loop loop_{clock_, runtime::Loop::Mode::simulated};
    std::unique_ptr<core::Store> store_ = stores::make_memory_store(clock_);
    base::Hmac secret_{"secret"};
    std::unique_ptr<Records> records_ = records_on_store(loop_, *store_, secret_, "the store");
    bool republish_ = false;
    std::optional<Results> results_;
    AiOptions options_;
    ConsumerCounters counters_;
    brokers::AssignmentPtr assignment_ =
        std::make_shared<brokers::Assignment>(brokers::Partition{"tasks", 0}, 1);
    std::vector<std::unique_ptr<Message>> messages_;
    std::vector<Asked> asked_;
    std::vector<Published> published_;
    std::map<std::string, std::vector<Verdict>> verdicts_;
    int capacity_told_ = 0;
    std::unique_ptr<Strategy> strategy_;
};

TEST_F(AiStrategy, a_message_becomes_the_turn_that_http_would_have_asked_for) {
    options_.hold_unknown = true;
    make();
    run({&message("m1")});
    ASSERT_EQ(asked_.size(), 1u);
    const ChatTurn& turn = asked_[0].turn;
    EXPECT_EQ(turn.tenant, "shop");
    EXPECT_EQ(turn.user, "ann");
    EXPECT_EQ(turn.session, "s1");
    EXPECT_EQ(turn.request_id, "m1");
    EXPECT_EQ(turn.prompt, "hello m1");
    EXPECT_EQ(turn.model, "small");
    EXPECT_TRUE(turn.hold_unknown);

    options_.config.user.reset();
    options_.config.session.reset();
    options_.config.model.clear();
    options_.hold_unknown = false;
    make();
    run({&message("m2")});
    ASSERT_EQ(asked_.size(), 2u);
    EXPECT_EQ(asked_[1].turn.user, "") << "the empty user, as without X-User-Id";
    EXPECT_EQ(asked_[1].turn.session, "m2") << "a conversation of its own";
    EXPECT_EQ(asked_[1].turn.model, "") << "not given: the route's default";
    EXPECT_FALSE(asked_[1].turn.hold_unknown);
}

TEST_F(AiStrategy, a_message_without_what_a_turn_needs_is_dead_and_nobody_is_asked) {
    make();
    run({&message("no prompt", 0, R"({"userId": "ann", "sessionId": "s1"})")});
    run({&message("null user", 0, R"({"userId": null, "sessionId": "s1", "prompt": "x"})")});
    run({&message("no session", 0, R"({"userId": "ann", "prompt": "x"})")});
    run({&message("no json", 0, "secret words")});
    for (const char* id : {"no prompt", "null user", "no session", "no json"}) {
        EXPECT_EQ(last(id), "dead decode") << id;
        const auto& reason = std::get<Dead>(verdicts_[id].back()).reason;
        EXPECT_EQ(reason.find("secret"), std::string::npos) << reason;
    }
    EXPECT_NE(std::get<Dead>(verdicts_["no prompt"].back()).reason.find("prompt"),
              std::string::npos);
    EXPECT_TRUE(asked_.empty());
}

TEST_F(AiStrategy, a_paid_turn_is_applied_once_its_result_is_confirmed) {
    make();
    run({&message("m1")});
    answer(0, answer_of("the answer"));
    ASSERT_EQ(published_.size(), 1u);
    EXPECT_EQ(published_[0].id, "m1");
    EXPECT_EQ(published_[0].body, "the answer");
    EXPECT_EQ(last("m1"), "running") << "nothing is settled before the result is safe";
    confirm(0);
    EXPECT_EQ(last("m1"), "applied");
}

TEST_F(AiStrategy, without_a_result_topic_the_record_is_enough) {
    make(false);
    EXPECT_EQ(named(verdict_on("m1", answer_of("a"))), "applied");
    EXPECT_EQ(named(verdict_on("m1", answer_of("a", true))), "duplicate");
}

TEST_F(AiStrategy, a_result_is_published_again_only_where_it_is_not_known_to_be_there) {
    make();
    run({&message("m1")});
    answer(0, answer_of("the answer", true));
    ASSERT_EQ(published_.size(), 1u) << "paid for by somebody else, who may not have published it";
    confirm(0);
    EXPECT_EQ(last("m1"), "duplicate");
    EXPECT_EQ(named(verdict_on("m1", answer_of("the answer", true))), "duplicate");
    EXPECT_EQ(published_.size(), 1u) << "silent: it is marked";

    make();  // as after a restart
    EXPECT_EQ(named(verdict_on("m1", answer_of("the answer", true))), "duplicate");
    EXPECT_EQ(published_.size(), 1u);

    run({&message("m2")});
    answer(asked_.size() - 1, answer_of("another"));
    ASSERT_EQ(published_.size(), 2u);
    make();  // it dies before the confirm; its claim on the publication runs out
    EXPECT_EQ(named(verdict_on("m2", answer_of("another", true))), "busy");
    clock_.advance(10s);
    run({&message("m2")});
    answer(asked_.size() - 1, answer_of("another", true));
    ASSERT_EQ(published_.size(), 3u);
    EXPECT_EQ(published_[2].id, published_[1].id);
    EXPECT_EQ(published_[2].body, published_[1].body);
}

TEST_F(AiStrategy, republish_answers_every_duplicate) {
    republish_ = true;
    make();
    for (std::size_t i = 0; i < 3; ++i) {
        run({&message("m1")});
        answer(i, answer_of("the answer", i > 0));
        ASSERT_EQ(published_.size(), i + 1);
        confirm(i);
        EXPECT_EQ(last("m1"), i == 0 ? "applied" : "duplicate");
    }
}

TEST_F(AiStrategy, a_result_that_cannot_be_published_now_stops_the_consumer_and_charges_nobody) {
    make();
    run({&message("m1")});
    answer(0, answer_of("the answer"));
    confirm(0, base::Error{.applied = base::Applied::unknown, .detail = "kafka: timed out"});
    EXPECT_EQ(last("m1"), "ill");
    run({messages_[0].get()});
    answer(1, answer_of("the answer", true));
    ASSERT_EQ(published_.size(), 2u);
    EXPECT_EQ(published_[1].body, "the answer");
    confirm(1);
    EXPECT_EQ(last("m1"), "applied") << "this process paid for it, though not in this run";

    run({&message("m2")});
    answer(2, answer_of("too large"));
    confirm(2,
            base::Error{.code = base::ErrorCode::invalid_argument, .detail = "kafka: too large"});
    EXPECT_EQ(last("m2"), "dead fatal") << "no later try will be taken either";
}

TEST_F(AiStrategy, each_answer_has_its_verdict) {
    options_.retry.attempts = 1;
    make();
    ChatAnswer recorded = problem_of(400, "upstream-failed", 400);
    recorded.final = true;
    ChatAnswer recorded_404 = problem_of(502, "upstream-failed", 404);
    recorded_404.final = true;
    const std::vector<std::pair<ChatAnswer, std::string>> table{
        {problem_of(202, ""), "busy"},
        {problem_of(409, "in-flight"), "busy"},
        {problem_of(503, "busy"), "busy"},
        {problem_of(429, "too-many-waiters"), "busy"},
        {problem_of(422, "key-reused"), "dead mismatch"},
        {problem_of(409, "outcome-unknown"), "dead unknown"},
        {problem_of(409, "attempts-used-up"), "dead attempts"},
        {problem_of(409, "cancelled"), "dead fatal"},
        {problem_of(409, "answer-not-kept"), "dead fatal"},
        {problem_of(410, "expired"), "dead fatal"},
        {problem_of(409, "expired"), "dead fatal"},
        {problem_of(400, "key-malformed"), "dead fatal"},
        {problem_of(400, "request-malformed"), "dead fatal"},
        {problem_of(413, "body-too-large"), "dead fatal"},
        {problem_of(503, "store-unavailable"), "ill"},
        {problem_of(503, "draining"), "ill"},
        {problem_of(404, "model-not-found"), "ill"},
        {problem_of(502, "upstream-unreachable"), "ill"},
        {problem_of(502, "upstream-failed", 401), "ill"},
        {problem_of(502, "upstream-failed", 402), "ill"},
        {problem_of(502, "upstream-failed", 403), "ill"},
        {problem_of(502, "upstream-failed", 404), "ill"},
        {recorded, "dead fatal"},
        {recorded_404, "dead fatal"},
        {problem_of(400, "upstream-failed", 400), "dead fatal"},
        {problem_of(400, "upstream-failed"), "dead fatal"},
        {problem_of(422, "upstream-failed", 422), "dead fatal"},
        {problem_of(502, "upstream-failed", 415), "dead fatal"},
        {problem_of(429, "upstream-failed", 429), "dead attempts"},
        {problem_of(502, "upstream-failed", 500), "dead attempts"},
        {problem_of(503, "upstream-failed", 503), "dead attempts"},
        {problem_of(502, "upstream-failed"), "dead attempts"},
        {problem_of(504, "upstream-timeout"), "dead attempts"},
        {problem_of(502, "upstream-cut"), "dead attempts"},
        {problem_of(502, "answer-not-usable"), "dead attempts"},
        {problem_of(502, "call-cancelled"), "dead attempts"},
    };
    for (std::size_t i = 0; i < table.size(); ++i) {
        const auto& [said, expected] = table[i];
        EXPECT_EQ(named(verdict_on("m" + std::to_string(i), said)), expected)
            << said.status << " " << said.problem << " " << said.upstream_status;
    }
    EXPECT_EQ(counters_.mismatches, 1u);
    EXPECT_EQ(counters_.unknown_outcomes, 6u) << "one held, five that nobody can know";
    EXPECT_TRUE(published_.empty());
    ChatAnswer soon = problem_of(409, "in-flight");
    soon.retry_after = 8s;
    EXPECT_EQ(std::get<Busy>(verdict_on("b1", soon)).remaining, 2s);
    soon.retry_after = 0s;
    EXPECT_EQ(std::get<Busy>(verdict_on("b2", soon)).remaining, 1s);
}

TEST_F(AiStrategy, what_happened_counts_where_no_result_is_wanted_and_a_mismatch_where_it_may) {
    options_.mismatch_is_duplicate = true;
    make(false);
    EXPECT_EQ(named(verdict_on("m1", problem_of(409, "answer-not-kept"))), "duplicate");
    EXPECT_EQ(named(verdict_on("m2", problem_of(409, "expired"))), "duplicate");
    EXPECT_EQ(named(verdict_on("m3", problem_of(422, "key-reused"))), "duplicate");
    EXPECT_EQ(counters_.mismatches, 1u);
}

TEST_F(AiStrategy, failures_wait_as_the_rules_say_and_end) {
    make(false);
    const ChatAnswer failure = problem_of(502, "upstream-failed", 500);
    const std::int64_t began_ms = clock_.wall_us() / 1000;
    EXPECT_EQ(std::get<Retry>(verdict_on("m1", failure)).delay, 1s);
    clock_.advance(5s);
    EXPECT_EQ(std::get<Retry>(verdict_on("m1", failure)).delay, 2s);
    EXPECT_EQ(std::get<Busy>(verdict_on("m1", problem_of(409, "in-flight"))).remaining, 1s)
        << "which is no failure";
    const Verdict third = verdict_on("m1", failure);
    ASSERT_EQ(named(third), "dead attempts");
    EXPECT_EQ(std::get<Dead>(third).failed_runs, 3u);
    EXPECT_EQ(std::get<Dead>(third).first_failure_ms, began_ms);
    EXPECT_NE(std::get<Dead>(third).reason.find("502 upstream-failed"), std::string::npos);
    EXPECT_NE(std::get<Dead>(third).reason.find("500"), std::string::npos);
    EXPECT_EQ(std::get<Retry>(verdict_on("m1", failure)).delay, 1s) << "redriven, it begins anew";

    ChatAnswer limited = problem_of(429, "upstream-failed", 429);
    limited.retry_after = 30s;
    EXPECT_EQ(std::get<Retry>(verdict_on("m2", limited)).delay, 30s);
    EXPECT_EQ(named(verdict_on("m2", answer_of("a"))), "applied");
    EXPECT_EQ(std::get<Retry>(verdict_on("m2", failure)).delay, 1s);
}

TEST_F(AiStrategy, a_lane_is_run_in_order_and_behind_a_failure_it_is_held) {
    make(false);
    EXPECT_EQ(strategy_->capacity(), 4u);
    run({&message("a1", 7), &message("b1", 8), &message("a2", 7), &message("a3", 7)});
    EXPECT_EQ(strategy_->capacity(), 0u);
    ASSERT_EQ(asked_.size(), 2u) << "one of each lane";
    EXPECT_EQ(asked_[0].turn.request_id, "a1");
    EXPECT_EQ(asked_[1].turn.request_id, "b1");
    answer(0, answer_of("x"));
    EXPECT_EQ(last("a1"), "applied");
    ASSERT_EQ(asked_.size(), 3u);
    EXPECT_EQ(asked_[2].turn.request_id, "a2");
    EXPECT_EQ(capacity_told_, 1);
    answer(2, problem_of(502, "upstream-failed", 500));
    EXPECT_EQ(last("a2"), "retry");
    EXPECT_EQ(last("a3"), "held");
    EXPECT_EQ(asked_.size(), 3u);
    answer(1, answer_of("y", true));
    EXPECT_EQ(last("b1"), "duplicate");
    EXPECT_EQ(strategy_->capacity(), 4u);
    for (const auto& [id, verdicts] : verdicts_) EXPECT_EQ(verdicts.size(), 1u) << id;
}

TEST_F(AiStrategy, an_unreadable_message_holds_its_lane) {
    make(false);
    run({&message("a1", 7, "{}"), &message("a2", 7)});
    EXPECT_EQ(last("a1"), "dead decode");
    EXPECT_EQ(last("a2"), "held") << "its letter comes first";
    EXPECT_EQ(strategy_->capacity(), 4u);
}

TEST_F(AiStrategy, a_partition_that_leaves_gives_back_what_has_not_begun) {
    make(false);
    run({&message("a1", 7), &message("a2", 7)});
    assignment_ = std::make_shared<brokers::Assignment>(brokers::Partition{"tasks", 1}, 2);
    run({&message("b1", 9), &message("b2", 9)});
    strategy_->leaving(assignment_);
    EXPECT_EQ(last("b2"), "held");
    EXPECT_EQ(last("b1"), "running");
    EXPECT_EQ(last("a2"), "running");
    answer(1, answer_of("x"));
    EXPECT_EQ(last("b1"), "applied") << "what has begun ends as ever";
    answer(0, answer_of("x"));
    EXPECT_EQ(asked_.size(), 3u) << "the other partition goes on";
}

TEST_F(AiStrategy, stopping_waits_for_what_runs_and_no_longer_than_it_may) {
    make();
    run({&message("a1", 7), &message("a2", 7), &message("b1", 8)});
    bool stopped = false;
    strategy_->stop(20s, [&] { stopped = true; });
    EXPECT_EQ(last("a2"), "held");
    EXPECT_EQ(strategy_->capacity(), 0u);
    answer(0, answer_of("x"));
    EXPECT_FALSE(stopped);
    confirm(0);
    EXPECT_EQ(last("a1"), "applied");
    EXPECT_FALSE(stopped);
    clock_.advance(20s);
    loop_.fire_due();
    EXPECT_TRUE(stopped);
    EXPECT_EQ(last("b1"), "held") << "as if the process had died: not settled";
    answer(1, answer_of("late"));
    EXPECT_EQ(published_.size(), 1u);
    EXPECT_EQ(verdicts_["b1"].size(), 1u);

    make();
    run({&message("c1")});
    strategy_->stop(20s, [&] { stopped = false; });
    answer(asked_.size() - 1, problem_of(503, "store-unavailable"));
    EXPECT_FALSE(stopped) << "at once when nothing runs any more";
    strategy_.reset();
    clock_.advance(20s);
    loop_.fire_due();
}

TEST_F(AiStrategy, a_process_that_stops_asks_no_more) {
    make(false);
    EXPECT_EQ(named(verdict_on("m1", {})), "held");
    EXPECT_EQ(strategy_->capacity(), 0u) << "it would only be held again";
}

TEST_F(AiStrategy, an_answer_after_the_end_is_nobodys) {
    make();
    run({&message("m1")});
    strategy_.reset();
    messages_.clear();
    answer(0, answer_of("late"));
    EXPECT_EQ(last("m1"), "running");
}

TEST_F(AiStrategy, whose_failures_are_forgotten_begins_anew) {
    make(false);
    const ChatAnswer failure = problem_of(502, "upstream-failed", 500);
    EXPECT_EQ(std::get<Retry>(verdict_on("first", failure)).delay, 1s);
    for (std::size_t i = 0; i < ai_known_max; ++i) {
        verdict_on("m" + std::to_string(i), failure);
        messages_.clear();
    }
    EXPECT_EQ(std::get<Retry>(verdict_on("first", failure)).delay, 1s);
}

TEST_F(AiStrategy, letters_and_partitions_need_nothing_of_it) {
    make();
    const auto begin = strategy_->assigned(assignment_);
    ASSERT_TRUE(std::holds_alternative<BeginAt>(begin));
    EXPECT_FALSE(std::get<BeginAt>(begin).offset);
    bool recorded = false;
    strategy_->letter_published(message("m1"), Dead{},
                                [&](base::Result<void> done) { recorded = done.has_value(); });
    EXPECT_TRUE(recorded);
    EXPECT_NE(strategy_->promise().find("a duplicate publishes nothing"), std::string::npos);
}

}  // namespace
}  // namespace semel::consumer
