// Answers in the records of a store: sealed there, opened for duplicates, and gone with their key.
#include <gtest/gtest.h>

#include "consumer/results.hpp"
#include "consumer/strategies/recorded_test.hpp"
#include "core/record_codec.hpp"

namespace semel::consumer {
namespace {

constexpr std::string_view plain = "PLAINTEXT that must not be at rest";

struct SealedAnswersTest : RecordedTest {
    /// A process whose handler answers and whose results go to a broker that confirms at once.
    struct Process {
        Process(SealedAnswersTest& t, const std::string& id, bool seals, bool republish)
            : network(t.networks.emplace_back(t)),
              records(records_on_store(
                  t.loop, network.store, t.secret, "the store",
                  seals ? std::optional<AnswersOf>({vault, t.tenant}) : std::nullopt)) {
            handler.script = [](const Message& message, const Attempt&) {
                return Handled{std::make_shared<HandlerAnswer>(
                    std::string(plain) + " of " + message.id, "text/plain")};
            };
            results.emplace(t.loop,
                            ResultsOptions{.republish = republish,
                                           .owner = {id, {}},
                                           .lease = lease,
                                           .retention = t.options.retention},
                            republish ? nullptr : records.get(), counters,
                            [this](const std::string&, const HandlerAnswerPtr& answer, auto done) {
                                published.push_back(answer->body);
                                if (confirms) done({});
                            });
            RecordedOptions own = t.options;
            own.owner = {id, {}};
            strategy =
                make_recorded(t.loop, std::move(own), *records, handler, counters, &*results);
        }
        Network& network;
        engine::Vault vault{"the deployment's secret", nullptr};
        std::unique_ptr<Records> records;
        ScriptedHandler handler;
        ConsumerCounters counters;
        std::vector<std::string> published;
        bool confirms = true;
        std::optional<Results> results;
        std::map<std::string, Verdict> told;
        std::unique_ptr<Strategy> strategy;

        template <class T>
        [[nodiscard]] bool was_told(const std::string& id) const {
            const auto found = told.find(id);
            return found != told.end() && std::holds_alternative<T>(found->second);
        }
    };
    const core::TenantTag tenant{{7}};

    std::unique_ptr<Process> process(const std::string& id, bool republish = true) {
        return std::make_unique<Process>(*this, id, true, republish);
    }
    std::unique_ptr<Process> old_process(const std::string& id) {
        return std::make_unique<Process>(*this, id, false, true);
    }
    void run(Process& process, const std::string& id) {
        process.strategy->run({&message(id)}, false, [&process](Message& one, Verdict verdict) {
            process.told[one.id] = std::move(verdict);
        });
        settle();
    }
    core::StoreOutcome ask(core::StoreOperation operation) {
        core::StoreOutcome out;
        std::vector<core::Item> items;
        items.push_back({core::StoredKey{}, std::move(operation)});
        truth->submit(std::move(items), [&](core::BatchResults results) {
            out = std::move(results.front()->outcome);
        });
        return out;
    }
    /// As `semel record erase` on a server that is none of the processes.
    void erase() {
        const engine::Vault vault{"the deployment's secret", nullptr};
        ask(vault.fresh_key(tenant));
        ask(engine::Vault::fresh_mark());
    }
    /// What the store keeps of the message, as it would write it.
    std::string at_rest(const std::string& id) {
        std::string out;
        core::encode_record(*record(id), true, out);
        return out;
    }
};

TEST_F(SealedAnswersTest, an_answer_is_not_in_the_store_and_is_published_as_it_was) {
    auto a = process("a");
    run(*a, "1");
    EXPECT_TRUE(a->was_told<Applied>("1"));
    EXPECT_EQ(a->published, std::vector{std::string(plain) + " of 1"});
    EXPECT_EQ(at_rest("1").find(plain), std::string::npos);
    const core::RecordPtr kept = record("1");
    EXPECT_EQ(kept->tenant, tenant) << "so that who looks at the record can open it";
    EXPECT_NE(kept->answer->sealed_under, 0u);
    EXPECT_NE(kept->answer->body_digest, base::sha256(a->published.front()));
    EXPECT_EQ(kept->answer->body_bytes, a->published.front().size());
}

TEST_F(SealedAnswersTest, a_duplicate_is_answered_with_the_same_bytes_also_after_a_restart) {
    auto a = process("a");
    run(*a, "1");
    run(*a, "1");
    EXPECT_EQ(a->published, std::vector(2, std::string(plain) + " of 1"));
    a.reset();
    auto b = process("b");
    run(*b, "1");
    EXPECT_TRUE(b->was_told<Duplicate>("1"));
    EXPECT_EQ(b->published, std::vector{std::string(plain) + " of 1"});
    EXPECT_TRUE(b->handler.calls.empty());
    EXPECT_EQ(b->counters.answers_gone, 0u);
}

TEST_F(SealedAnswersTest, who_takes_over_from_a_dead_publisher_opens_what_it_sealed) {
    auto a = process("a", false);
    a->confirms = false;
    run(*a, "1");
    a.reset();
    run_for(lease + 1s);
    auto b = process("b", false);
    run(*b, "1");
    EXPECT_TRUE(b->was_told<Duplicate>("1"));
    EXPECT_EQ(b->published, std::vector{std::string(plain) + " of 1"});
    run(*b, "1");
    EXPECT_EQ(b->published.size(), 1u) << "its mark is found: it is of the opened bytes";
}

TEST_F(SealedAnswersTest, an_answer_from_before_sealing_is_published_as_it_lies_there) {
    auto before = old_process("before");
    run(*before, "1");
    EXPECT_NE(at_rest("1").find(plain), std::string::npos);
    auto now = process("now");
    run(*now, "1");
    EXPECT_TRUE(now->was_told<Duplicate>("1"));
    EXPECT_EQ(now->published, std::vector{std::string(plain) + " of 1"});
}

TEST_F(SealedAnswersTest, what_was_claimed_before_sealing_is_completed_sealed) {
    auto before = old_process("before");
    before->handler.script = [](const Message&, const Attempt&) { return std::nullopt; };
    run(*before, "1");
    before.reset();
    run_for(lease + 1s);
    auto now = process("now");
    run(*now, "1");
    run(*now, "1");
    EXPECT_EQ(now->published, std::vector(2, std::string(plain) + " of 1"));
    EXPECT_EQ(at_rest("1").find(plain), std::string::npos);
}

TEST_F(SealedAnswersTest, a_duplicate_of_an_erased_answer_publishes_nothing_and_runs_nothing) {
    for (const bool republish : {true, false}) {
        const std::string id = republish ? "1" : "2";
        auto a = process("a", republish);
        a->confirms = republish;  // else it dies before its answer is marked as published
        run(*a, id);
        run_for(6s);
        erase();
        if (!republish) {
            a.reset();
            run_for(lease + 1s);
            a = process("another", false);
        }
        a->published.clear();
        a->handler.calls.clear();
        run(*a, id);
        EXPECT_TRUE(a->was_told<Duplicate>(id));
        EXPECT_TRUE(a->published.empty() && a->handler.calls.empty());
        EXPECT_EQ(a->counters.answers_gone, 1u);
        EXPECT_EQ(record(id)->status, Status::completed);
        // Who comes later has a fresh key.
        run(*a, id + " later");
        EXPECT_EQ(a->published, std::vector{std::string(plain) + " of " + id + " later"});
        a->confirms = true;
    }
}

TEST_F(SealedAnswersTest, an_answer_under_a_key_that_is_newer_than_the_known_one_is_opened) {
    auto a = process("a");
    run(*a, "1");  // it knows the key, and need not look for some seconds
    erase();
    auto b = process("b");
    run(*b, "2");
    run(*a, "2");
    EXPECT_TRUE(a->was_told<Duplicate>("2"));
    EXPECT_EQ(a->published.back(), std::string(plain) + " of 2");
    EXPECT_EQ(a->counters.answers_gone, 0u);
}

TEST_F(SealedAnswersTest, nothing_runs_while_its_answer_could_not_be_sealed) {
    auto a = process("a");
    a->network.store.script = [](const std::vector<core::Item>& items) -> std::optional<Fate> {
        const bool keys = std::any_of(items.begin(), items.end(), [](const core::Item& item) {
            return std::holds_alternative<core::ClaimValue>(item.operation);
        });
        return keys ? std::optional(Fate::refuse) : std::nullopt;
    };
    run(*a, "1");
    run_for(3s);
    EXPECT_TRUE(a->was_told<Ill>("1"));
    EXPECT_TRUE(a->handler.calls.empty());
    EXPECT_EQ(record("1"), nullptr) << "nothing is charged";
    a->network.store.script = {};
    run(*a, "1");
    EXPECT_TRUE(a->was_told<Applied>("1"));
}

TEST_F(SealedAnswersTest, a_key_of_another_deployment_stops_the_consumer_and_says_so) {
    const engine::Vault other{"another secret", nullptr};
    ask(core::ClaimValue{.name = other.fresh_key(tenant).name,
                         .value_if_absent = other.fresh_key(tenant).value});
    auto a = process("a");
    run(*a, "1");
    ASSERT_TRUE(a->was_told<Ill>("1"));
    EXPECT_NE(std::get<Ill>(a->told["1"]).reason.find("engine.secret_env"), std::string::npos);
    EXPECT_TRUE(a->handler.calls.empty());
}

TEST_F(SealedAnswersTest, what_ends_while_it_asks_for_its_key_leaves_nothing_behind) {
    for (int turns = 0; turns < 4; ++turns) {
        auto a = process("a" + std::to_string(turns));
        a->strategy->run({&message(std::to_string(turns))}, false, [](Message&, const Verdict&) {});
        if (turns > 0) run_for(std::chrono::milliseconds{turns - 1});
        a.reset();
        settle();
    }
    auto b = process("b");
    run(*b, "another");
    EXPECT_TRUE(b->was_told<Applied>("another"));
}

}  // namespace
}  // namespace semel::consumer
