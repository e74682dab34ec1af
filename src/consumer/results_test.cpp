// Answers of handlers: recorded, published, marked, settled; deaths and faults in between.
#include "consumer/results.hpp"

#include "consumer/strategies/recorded_test.hpp"

namespace semel::consumer {
namespace {

struct ResultsTest : RecordedTest {
    struct Published {
        std::string id, body, content_type;
        std::vector<std::pair<std::string, std::string>> headers;
        std::function<void(base::Result<void>)> done;
    };

    /// A process whose handler answers, with a broker that confirms when the test says.
    struct Answering : Node {
        Answering(ResultsTest& t, const std::string& name, bool republish) : Node(t, name) {
            handler.script = [answers = t.answers](const Message& m, const Attempt&) {
                return Handled{
                    std::make_shared<HandlerAnswer>("re: " + m.id + *answers, "text/plain")};
            };
            ResultsOptions own{.republish = republish,
                               .owner = {name, {}},
                               .lease = lease,
                               .retention = t.options.retention};
            results.emplace(t.loop, std::move(own), republish ? nullptr : records.get(), counters,
                            [this](std::string id, const HandlerAnswerPtr& answer, auto done) {
                                published.push_back({std::move(id), answer->body,
                                                     answer->content_type, answer->headers, done});
                                if (confirms) done({});
                            });
            RecordedOptions rules = t.options;
            rules.owner = {name, {}};
            strategy =
                make_recorded(t.loop, std::move(rules), *records, handler, counters, &*results);
        }
        ~Answering() { strategy.reset(); }
        std::vector<Published> published;
        bool confirms = true;  ///< At once.
        std::optional<Results> results;
    };
    std::unique_ptr<Answering> answering(const std::string& name, bool republish = false) {
        return std::make_unique<Answering>(*this, name, republish);
    }
    void die(std::unique_ptr<Answering>& node) {
        node.reset();
        run_for(lease + 1s);
    }
    [[nodiscard]] std::vector<core::RecordPtr> all_records() const {
        std::vector<core::RecordPtr> out;
        const auto page = truth->scan({}, {}, 100);
        for (const auto& [key, found] : page->records) out.push_back(found);
        return out;
    }
    static base::Error away() {
        return {.applied = base::Applied::unknown, .detail = "kafka: timed out"};
    }

    static std::size_t count_of(const Answering& node, const std::string& id) {
        return static_cast<std::size_t>(
            std::count_if(node.published.begin(), node.published.end(),
                          [&](const Published& one) { return one.id == id; }));
    }

    /// Appended to what handlers answer.
    std::shared_ptr<std::string> answers = std::make_shared<std::string>();
};

TEST_F(ResultsTest, an_answer_is_recorded_before_it_is_published_and_published_before_the_end) {
    auto a = answering("a");
    a->confirms = false;
    a->run({&message("1")});
    settle();
    ASSERT_EQ(a->published.size(), 1u);
    EXPECT_EQ(a->published[0].id, "1");
    EXPECT_EQ(a->published[0].body, "re: 1");
    EXPECT_EQ(a->published[0].content_type, "text/plain");
    ASSERT_EQ(record("1")->status, Status::completed);
    EXPECT_EQ(*record("1")->answer->body, "re: 1");
    EXPECT_FALSE(a->answered("1"));
    a->published[0].done({});
    settle();
    EXPECT_TRUE(a->last<Applied>("1"));
    EXPECT_EQ(all_records().size(), 2u) << "its own, and the mark";
}

TEST_F(ResultsTest, a_duplicate_of_a_marked_result_publishes_nothing_wherever_it_comes) {
    auto a = answering("a"), b = answering("b");
    a->run({&message("1")});
    settle();
    a->run({&message("1")});
    b->run({&message("1", 7), &message("1", 7)});
    settle();
    EXPECT_TRUE(a->last<Duplicate>("1") && b->last<Duplicate>("1"));
    EXPECT_EQ(b->told["1"].size(), 2u);
    EXPECT_EQ(a->published.size(), 1u);
    EXPECT_TRUE(b->published.empty());
    die(a);
    auto c = answering("c");
    c->run({&message("1")});
    settle();
    EXPECT_TRUE(c->last<Duplicate>("1") && c->published.empty() && c->handler.calls.empty());
}

TEST_F(ResultsTest, answers_that_are_recorded_together_have_one_mark) {
    auto b = answering("b");
    std::vector<Message*> batch;
    for (int i = 0; i < 20; ++i) batch.push_back(&message(std::to_string(i)));
    options.concurrency = 32;
    auto wide = answering("wide");
    wide->run(batch);
    settle();
    EXPECT_EQ(wide->published.size(), 20u);
    EXPECT_EQ(all_records().size(), 21u);
    EXPECT_EQ(wide->counters.results_published, 20u);
    for (Message* one : batch) {
        EXPECT_TRUE(wide->last<Applied>(one->id));
        b->run({one});
    }
    settle();
    for (Message* one : batch) EXPECT_TRUE(b->last<Duplicate>(one->id));
    EXPECT_TRUE(b->published.empty());
    EXPECT_EQ(b->counters.results_published, 0u);
}

TEST_F(ResultsTest,
       one_that_is_refused_or_never_confirmed_holds_up_no_other_and_none_is_forgotten) {
    auto a = answering("a");
    a->confirms = false;
    a->run({&message("1"), &message("2"), &message("3"), &message("4")});
    settle();
    ASSERT_EQ(a->published.size(), 4u);
    a->published[0].done({});
    settle();
    EXPECT_FALSE(a->answered("1")) << "its group may still be marked as a whole";
    a->published[1].done(away());
    settle();
    EXPECT_TRUE(a->last<Applied>("1") && a->last<Ill>("2"));
    a->published[2].done({});
    settle();
    EXPECT_TRUE(a->last<Applied>("3"));
    EXPECT_EQ(all_records().size(), 6u) << "four messages, two marks of their own";
    EXPECT_EQ(a->counters.results_failed, 1u);

    a->run({&message("5"), &message("6")});
    settle();
    a->published[4].done({});
    run_for(2s);
    EXPECT_TRUE(a->last<Applied>("5")) << "it does not wait for the other any more";
    EXPECT_FALSE(a->answered("6"));

    die(a);
    auto b = answering("b");
    for (const char* id : {"1", "2", "3", "4", "5", "6"}) b->run({&message(id)});
    settle();
    for (const char* id : {"2", "4", "6"}) EXPECT_EQ(count_of(*b, id), 1u) << id;
    EXPECT_EQ(b->published.size(), 3u);
    EXPECT_EQ(b->counters.results_again, 3u);
    for (const char* id : {"1", "2", "3", "4", "5", "6"}) EXPECT_TRUE(b->last<Duplicate>(id)) << id;
}

TEST_F(ResultsTest, a_group_is_not_marked_while_it_is_unknown_whether_one_of_it_is_recorded) {
    auto a = answering("a");
    a->confirms = false;
    Message &one = message("1"), &other = message("2");
    const auto answer = std::make_shared<HandlerAnswer>("the answer", "text/plain");
    const Results::Group group = a->results->join(one);
    ASSERT_EQ(a->results->join(other), group);
    int done = 0;
    const auto count = [&done](const std::optional<Verdict>& verdict) {
        done += verdict ? 100 : 1;
    };
    a->results->publish_recorded(one, answer, group, count);
    a->published[0].done({});
    settle();
    a->results->leave(other, group);
    settle();
    EXPECT_EQ(done, 1);
    // It was recorded after all.
    core::Record record;
    record.owner = {"a", {}};
    record.answer = recorded_answer(answer, a->results->name_of(group));
    a->results->publish_found(other, answer_of(record), record, {}, count);
    settle();
    EXPECT_EQ(count_of(*a, "2"), 1u);
}

TEST_F(ResultsTest, a_copy_waits_while_the_first_is_published_and_then_publishes_nothing) {
    auto a = answering("a"), b = answering("b");
    a->confirms = false;
    Message& copy = message("1");
    a->run({&message("1")});
    settle();
    for (Answering* node : {a.get(), b.get()}) {
        node->run({&copy});
        settle();
        EXPECT_TRUE(node->last<Busy>("1"));
        EXPECT_LT(node->get<Busy>("1").remaining, 1s);
    }
    a->published[0].done({});
    settle();
    for (Answering* node : {a.get(), b.get()}) {
        node->run({&copy});
        settle();
        EXPECT_TRUE(node->last<Duplicate>("1"));
    }
    EXPECT_EQ(a->published.size(), 1u);
    EXPECT_TRUE(b->published.empty());
}

TEST_F(ResultsTest, a_record_without_a_group_goes_by_the_mark_of_its_own) {
    // As versions before groups wrote both.
    auto a = answering("a");
    const auto answer = std::make_shared<HandlerAnswer>("re: 1", "text/plain");
    Message& m = message("1");
    core::Acquire claim;
    claim.fingerprint = m.fingerprint;
    claim.owner = {"old", {}};
    claim.nonce.bytes[0] = 1;
    claim.not_after = {clock.wall_us() + 1'000'000};
    claim.policy.kind = core::IntentKind::message;
    std::vector<std::optional<Verdict>> ends;
    const auto ended = [&](std::optional<Verdict> end) { ends.push_back(std::move(end)); };
    a->records->submit({step_on(m, claim)}, [&](auto granted) {
        const auto token = std::get<core::Granted>(granted.front()->outcome).token;
        a->records->submit(
            {step_on(m, core::Complete{token, claim.nonce, recorded_answer(answer), {}, {}})},
            [&](auto) { a->results->publish(m, answer, false, ended); });
    });
    settle();
    ASSERT_TRUE(ends.size() == 1 && !ends[0]);
    ASSERT_EQ(all_records().size(), 2u);
    a->run({&m});
    settle();
    EXPECT_TRUE(a->last<Duplicate>("1"));
    EXPECT_EQ(a->published.size(), 1u);
}

TEST_F(ResultsTest, the_name_of_the_group_is_not_published) {
    auto a = answering("a");
    const std::vector<std::pair<std::string, std::string>> own{{"x-shop", "7"}};
    a->handler.script = [&](const Message&, const Attempt&) {
        return Handled{std::make_shared<HandlerAnswer>("r", "text/plain", own)};
    };
    a->confirms = false;
    a->run({&message("1")});
    settle();
    ASSERT_EQ(record("1")->answer->headers.size(), 2u);
    a->published[0].done(away());
    a->run({&message("1")});
    settle();
    a->run({&message("1")});
    settle();
    ASSERT_EQ(a->published.size(), 2u);
    for (const Published& one : a->published) EXPECT_EQ(one.headers, own);
}

TEST_F(ResultsTest, who_takes_over_from_a_dead_publisher_publishes_the_same_bytes_and_id) {
    auto a = answering("a");
    a->confirms = false;  // dies between complete and confirm; nobody knows whether it is there
    a->run({&message("1")});
    settle();
    ASSERT_EQ(a->published.size(), 1u);
    auto b = answering("b");
    *answers = ", but otherwise";
    Message& again = message("1");
    b->run({&again});
    settle();
    EXPECT_TRUE(b->last<Busy>("1")) << "another publishes it";
    EXPECT_TRUE(b->published.empty());
    die(a);
    b->run({&again});
    settle();
    EXPECT_TRUE(b->last<Duplicate>("1"));
    ASSERT_EQ(b->published.size(), 1u);
    EXPECT_EQ(b->published[0].body, "re: 1");
    EXPECT_EQ(b->handler.calls.size(), 0u);
}

TEST_F(ResultsTest, a_death_between_confirm_and_mark_publishes_once_more) {
    auto a = answering("a");
    a->confirms = false;
    a->run({&message("1")});
    settle();
    a->store.script = [](const auto&) { return Fate::drop; };  // nothing of it arrives any more
    a->published[0].done({});
    settle();
    EXPECT_FALSE(a->answered("1")) << "not settled while it is not marked";
    die(a);
    auto b = answering("b");
    b->run({&message("1")});
    b->run({&message("1")});
    settle();
    ASSERT_EQ(b->published.size(), 1u);
    EXPECT_EQ(b->published[0].body, "re: 1");
    EXPECT_EQ(b->published[0].id, "1");
}

TEST_F(ResultsTest, a_mark_whose_answer_is_lost_is_written_again) {
    auto a = answering("a");
    a->confirms = false;
    a->run({&message("1")});
    settle();
    strike<core::Acquire>(*a, Fate::lose_reply, 3);
    a->published[0].done({});
    run_for(5s);
    EXPECT_TRUE(a->last<Applied>("1"));
    EXPECT_EQ(a->published.size(), 1u);
}

TEST_F(ResultsTest, republish_publishes_for_each_duplicate_and_needs_no_marks) {
    auto a = answering("a", true), b = answering("b", true);
    for (Answering* node : {a.get(), a.get(), b.get()}) {
        *answers += "!";
        node->run({&message("1")});
        settle();
    }
    EXPECT_TRUE(a->last<Duplicate>("1") && b->last<Duplicate>("1"));
    ASSERT_EQ(a->published.size(), 2u);
    ASSERT_EQ(b->published.size(), 1u);
    for (const Published& one : {a->published[0], a->published[1], b->published[0]}) {
        EXPECT_EQ(one.id, "1");
        EXPECT_EQ(one.body, "re: 1!");
        EXPECT_EQ(one.content_type, "text/plain");
    }
    EXPECT_EQ(all_records().size(), 1u);
}

TEST_F(ResultsTest, a_broker_that_is_away_charges_nobody_and_is_asked_again_at_once) {
    auto a = answering("a");
    a->confirms = false;
    Message& m = message("1");
    a->run({&m});
    settle();
    a->published[0].done(away());
    settle();
    EXPECT_NE(a->get<Ill>("1").reason.find("kafka: timed out"), std::string::npos);
    a->run({&m});
    settle();
    ASSERT_EQ(a->published.size(), 2u) << "the claim on it was given back";
    EXPECT_EQ(a->published[1].body, a->published[0].body);
    a->published[1].done({});
    settle();
    EXPECT_TRUE(a->last<Duplicate>("1"));
    EXPECT_EQ(a->handler.calls.size(), 1u);
}

TEST_F(ResultsTest, an_answer_that_can_never_be_published_is_a_dead_letter) {
    auto a = answering("a");
    a->confirms = false;
    a->run({&message("1")});
    settle();
    a->published[0].done(
        base::Error{.code = base::ErrorCode::invalid_argument, .detail = "kafka: too large"});
    settle();
    const auto refused = a->get<Dead>("1");
    EXPECT_EQ(refused.why, DeadClass::fatal);
    EXPECT_NE(refused.reason.find("kafka: too large"), std::string::npos);

    answers->assign(answer_max_bytes, 'x');
    a->run({&message("2", 5), &message("3", 5)});
    settle();
    const auto large = a->get<Dead>("2");
    EXPECT_EQ(large.why, DeadClass::fatal);
    EXPECT_NE(large.reason.find(std::to_string(answer_max_bytes)), std::string::npos);
    EXPECT_EQ(record("2")->status, Status::dead);
    EXPECT_TRUE(a->last<Held>("3"));
    EXPECT_EQ(a->published.size(), 1u);
}

TEST_F(ResultsTest, who_has_nothing_to_say_publishes_nothing) {
    auto a = answering("a");
    a->handler.script = [](const Message&, const Attempt&) { return Handled{}; };
    a->run({&message("1")});
    settle();
    a->run({&message("1")});
    settle();
    EXPECT_TRUE(a->last<Duplicate>("1") && a->published.empty());
    EXPECT_EQ(all_records().size(), 1u);
}

TEST_F(ResultsTest, an_empty_answer_is_published_also_for_its_duplicate) {
    auto a = answering("a", true);
    a->handler.script = [](const Message&, const Attempt&) {
        return Handled{std::make_shared<HandlerAnswer>()};
    };
    a->run({&message("1")});
    settle();
    a->run({&message("1")});
    settle();
    ASSERT_EQ(a->published.size(), 2u);
    EXPECT_EQ(a->published[1].body, "");
    EXPECT_EQ(a->published[1].content_type, "application/octet-stream");
}

TEST_F(ResultsTest, a_mark_lives_at_least_as_long_as_its_record_and_no_longer_than_its_answer) {
    options.retention = 1h;
    auto a = answering("a");
    a->confirms = false;
    a->run({&message("1")});
    run_for(3s);
    a->published[0].done({});
    settle();
    const core::StoreTime known_until = record("1")->expires;
    for (const core::RecordPtr& one : all_records()) EXPECT_GE(one->expires, known_until);
    a->confirms = true;
    run_for(std::chrono::microseconds{known_until.us - clock.wall_us()} + 1s);
    ASSERT_EQ(record("1"), nullptr);
    // The mark is still there, of an answer that nobody knows any more.
    *answers = ", later";
    a->run({&message("1")});
    settle();
    EXPECT_TRUE(a->last<Applied>("1"));
    ASSERT_EQ(a->published.size(), 2u);
    EXPECT_EQ(a->published[1].body, "re: 1, later");
}

TEST_F(ResultsTest, a_lane_goes_on_only_behind_a_published_answer) {
    auto a = answering("a");
    a->confirms = false;
    a->run({&message("1", 3), &message("2", 3), &message("1", 3)});
    settle();
    EXPECT_EQ(a->handler.calls, (std::vector<std::string>{"1"}));
    a->published[0].done({});
    settle();
    EXPECT_EQ(a->handler.calls, (std::vector<std::string>{"1", "2"}));
    a->published[1].done(away());
    settle();
    EXPECT_TRUE(a->last<Ill>("2"));
    ASSERT_EQ(a->told["1"].size(), 2u);
    EXPECT_TRUE(std::holds_alternative<Applied>(a->told["1"][0]));
    EXPECT_TRUE(std::holds_alternative<Held>(a->told["1"][1]));
}

TEST_F(ResultsTest, stop_waits_for_a_confirm_and_abandons_what_gets_none) {
    auto a = answering("a"), b = answering("b");
    a->confirms = b->confirms = false;
    a->run({&message("1")});
    b->run({&message("2")});
    settle();
    bool a_stopped = false, b_stopped = false;
    a->strategy->stop(5s, [&] { a_stopped = true; });
    b->strategy->stop(5s, [&] { b_stopped = true; });
    settle();
    EXPECT_FALSE(a_stopped || b_stopped);
    a->published[0].done({});
    settle();
    EXPECT_TRUE(a_stopped && a->last<Applied>("1"));
    run_for(7s);
    EXPECT_TRUE(b_stopped && b->last<Held>("2"));
    b->published[0].done({});  // too late to be told, and harmless
    settle();
    EXPECT_EQ(b->told["2"].size(), 1u);
}

TEST_F(ResultsTest, answers_survive_a_network_that_loses_and_repeats) {
    options.concurrency = 16;
    options.retry.attempts = 1000;
    std::uint64_t state = 7;
    const auto random = [&state](std::uint64_t bound) {
        state = state * 6364136223846793005U + 1442695040888963407U;
        return (state >> 33) % bound;
    };
    std::map<std::string, std::set<std::string>> seen;  // id -> bodies
    std::map<std::string, bool> done;
    constexpr int count = 40;
    for (int i = 0; i < count; ++i) done[std::to_string(i)] = false;
    for (int round = 0; round < 60; ++round) {
        auto node = answering("n" + std::to_string(round));
        *answers = " of " + std::to_string(round);
        node->network.random = random;
        node->store.faults = {.refuse = 300,
                              .drop = 300,
                              .lose_reply = 600,
                              .execute_late = 300,
                              .delay_reply = 300,
                              .repeat = 300};
        std::vector<Message*> batch;
        for (const auto& [id, finished] : done)
            if (!finished && batch.size() < 16) batch.push_back(&message(id));
        if (batch.empty()) break;
        node->run(batch);
        run_for(std::chrono::milliseconds{5 + random(3000)});
        for (const Published& one : node->published) seen[one.id].insert(one.body);
        for (const auto& [id, verdicts] : node->told) {
            const bool over = node->last<Applied>(id) || node->last<Duplicate>(id);
            done[id] = done[id] || over;
            EXPECT_TRUE(!over || !seen[id].empty()) << id << " is settled without its answer";
        }
        die(node);
    }
    for (const auto& [id, finished] : done) {
        EXPECT_TRUE(finished) << id;
        EXPECT_EQ(seen[id].size(), 1u) << "all copies of an answer have the same bytes: " << id;
    }
}

}  // namespace
}  // namespace semel::consumer
