// Records on a store: keys, batches, threads, and an end while answers are on their way.
#include "consumer/records.hpp"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <thread>

#include "stores/memory/memory_store.hpp"
#include "support/virtual_time.hpp"

namespace semel::consumer {
namespace {

using namespace std::chrono_literals;

/// Notes what it is given, and answers when the test says, from a thread of its own.
class SlowStore final : public core::Store {
  public:
    explicit SlowStore(core::Store& inner) : inner_(inner) {}
    std::vector<std::size_t> sizes;
    std::set<core::StoredKey> keys;

    void submit(std::vector<core::Item> items, core::BatchDone done) override {
        sizes.push_back(items.size());
        for (const core::Item& item : items) keys.insert(item.key);
        waiting_.push_back([this, items = std::move(items), done = std::move(done)] {
            inner_.submit(items, done);
        });
    }
    /// Last first: batches may overtake each other.
    void answer_all() {
        std::thread([this] {
            for (; !waiting_.empty(); waiting_.pop_back()) waiting_.back()();
        }).join();
    }
    base::Result<core::ScanPage> scan(const core::ScanFilter& f, const std::string& c,
                                      std::size_t n) override {
        return inner_.scan(f, c, n);
    }
    base::Result<std::size_t> purge(std::size_t n) override { return inner_.purge(n); }
    [[nodiscard]] core::StoreTime now() const override { return inner_.now(); }
    [[nodiscard]] core::Durability durability() const override { return {}; }
    base::Result<void> health() override { return {}; }
    void stop() override {}

  private:
    core::Store& inner_;
    std::vector<std::function<void()>> waiting_;
};

struct StoreRecordsTest : testing::Test, support::VirtualTime {
    std::unique_ptr<core::Store> truth = stores::make_memory_store(clock);
    SlowStore store{*truth};
    base::Hmac secret{"secret"};
    std::unique_ptr<Records> records = records_on_store(loop, store, secret, "memory");

    static RecordStep acquire(int n) {
        core::Acquire op;
        op.nonce.bytes[0] = 1;
        op.not_after = {std::int64_t{1} << 60};
        op.policy.kind = core::IntentKind::message;
        return {.key = base::sha256(std::to_string(n)),
                .source = {},
                .id = {},
                .business_key = {},
                .operation = op};
    }
};

TEST_F(StoreRecordsTest, steps_are_answered_on_the_loop_in_their_order_however_they_are_split) {
    RecordSteps steps;
    for (int i = 0; i < 1100; ++i) {
        steps.push_back(acquire(i));
        if (i % 100 == 0) steps.push_back(acquire(i));  // InFlight, or the same grant again
    }
    const std::size_t asked = steps.size();
    std::vector<base::Result<core::Decided>> answers;
    records->submit(std::move(steps), [&](auto results) { answers = std::move(results); });
    EXPECT_EQ(records->out(), 1u);
    EXPECT_EQ(store.sizes, (std::vector<std::size_t>{512, 512, asked - 1024}));
    store.answer_all();
    EXPECT_TRUE(answers.empty());  // not before the loop runs
    loop.run_ready();
    ASSERT_EQ(answers.size(), asked);
    EXPECT_EQ(records->out(), 0u);
    for (std::size_t i = 0; i < asked; ++i) {
        const auto& granted = std::get<core::Granted>(answers[i]->outcome);
        const bool second = i % 101 == 1;
        EXPECT_EQ(granted.kind == core::Granted::Kind::repeated, second) << i;
    }
}

TEST_F(StoreRecordsTest, records_lie_under_a_keyed_hash_of_the_messages_key) {
    records->submit({acquire(1), acquire(2), acquire(1)}, [](const auto&) {});
    const base::Digest key = base::sha256("1");
    EXPECT_TRUE(store.keys.contains(secret("message" + std::string(key.view()))));
    EXPECT_EQ(store.keys.size(), 2u);
    EXPECT_FALSE(store.keys.contains(key));
    EXPECT_EQ(records->name(), "memory");
}

TEST_F(StoreRecordsTest, answers_that_come_after_its_end_are_dropped) {
    int told = 0;
    records->submit({acquire(1)}, [&](const auto&) { ++told; });
    records->submit({acquire(2)}, [&](const auto&) { ++told; });
    records.reset();
    store.answer_all();
    loop.run_ready();
    EXPECT_EQ(told, 0);
    records = records_on_store(loop, store, secret, "memory");
    records->submit({acquire(3)}, [&](const auto&) { ++told; });
    store.answer_all();
    records.reset();  // the answer is posted already
    loop.run_ready();
    EXPECT_EQ(told, 0);
}

}  // namespace
}  // namespace semel::consumer
