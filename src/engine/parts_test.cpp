// The engine's parts one by one: batcher, hot records, spool.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>

#include "engine/batcher.hpp"
#include "engine/hot_records.hpp"
#include "engine/spool.hpp"
#include "support/manual_clock.hpp"

namespace semel::engine {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using base::StoreTime;
using core::StoredKey;

StoredKey key_of(const std::string& name) { return base::sha256(name); }

core::RecordPtr completed(const std::string& body, StoreTime expires = {1'000'000}) {
    auto record = std::make_shared<core::Record>();
    record->status = core::Status::completed;
    record->expires = expires;
    record->answer.emplace();
    record->answer->body = std::make_shared<const std::string>(body);
    return record;
}

// -------------------------------------------------------------------- Batcher

/// Keeps batches until the test answers them.
class SlowStore final : public core::Store {
  public:
    struct Batch {
        std::vector<core::Item> items;
        core::BatchDone done;
    };
    std::vector<Batch> batches;

    void submit(std::vector<core::Item> items, core::BatchDone done) override {
        batches.push_back({std::move(items), std::move(done)});
    }
    void answer(std::size_t batch) {
        core::BatchResults results;
        for (std::size_t i = 0; i < batches[batch].items.size(); ++i) {
            results.emplace_back(
                core::Decided{core::Found{}, StoreTime{static_cast<std::int64_t>(i) + 1}});
        }
        batches[batch].done(std::move(results));
    }
    base::Result<core::ScanPage> scan(const core::ScanFilter&, const std::string&,
                                      std::size_t) override {
        return core::ScanPage{};
    }
    base::Result<std::size_t> purge(std::size_t) override { return std::size_t{0}; }
    [[nodiscard]] StoreTime now() const override { return {}; }
    [[nodiscard]] core::Durability durability() const override { return {}; }
    base::Result<void> health() override { return {}; }
    void stop() override {}
};

struct BatcherTest : testing::Test {
    support::ManualClock clock;
    runtime::Loop loop{clock, runtime::Loop::Mode::simulated};
    SlowStore store;
    std::vector<std::string> log;
    std::unique_ptr<Batcher> batcher = std::make_unique<Batcher>(loop, store, nullptr);

    Task<> asks(std::string name, SteadyTime deadline, std::string then) {
        core::Item item{key_of(name), core::Get{}};
        const auto reply = co_await batcher->call(std::move(item), deadline);
        log.push_back(reply
                          ? name + "@" + std::to_string(reply->at.us)
                          : name + (reply.error().applied == base::Applied::unknown ? " unknown"
                                                                                    : " refused"));
        if (!then.empty()) co_await asks(then, deadline, {});
    }
    void ask(const std::string& name, SteadyTime deadline = SteadyTime::max(),
             const std::string& then = {}) {
        loop.spawn(asks(name, deadline, then));
    }
};

TEST_F(BatcherTest, what_one_turn_asks_for_goes_out_as_one_batch_in_order) {
    for (const char* name : {"a", "b", "c"}) ask(name);
    loop.run_ready();
    ASSERT_EQ(store.batches.size(), 1u);
    ASSERT_EQ(store.batches[0].items.size(), 3u);
    EXPECT_EQ(store.batches[0].items[1].key, key_of("b"));
    store.answer(0);
    EXPECT_TRUE(log.empty()) << "resumed on the loop only";
    loop.run_ready();
    EXPECT_EQ(log, (std::vector<std::string>{"a@1", "b@2", "c@3"}));
}

/// Is told the items of a turn together and answers each when the test says so.
class SinglyStore final : public core::Store, public core::AnswersSingly {
  public:
    std::vector<core::Item> items;
    core::ItemDone done;

    void submit(std::vector<core::Item>, core::BatchDone) override { std::abort(); }
    void submit_singly(std::vector<core::Item> asked, core::ItemDone told) override {
        items = std::move(asked);
        done = std::move(told);
    }
    void answer(std::size_t index) {
        done(index, core::Decided{core::Found{}, StoreTime{static_cast<std::int64_t>(index) + 1}});
    }
    base::Result<core::ScanPage> scan(const core::ScanFilter&, const std::string&,
                                      std::size_t) override {
        return core::ScanPage{};
    }
    base::Result<std::size_t> purge(std::size_t) override { return std::size_t{0}; }
    [[nodiscard]] StoreTime now() const override { return {}; }
    [[nodiscard]] core::Durability durability() const override { return {}; }
    base::Result<void> health() override { return {}; }
    void stop() override {}
};

TEST_F(BatcherTest, of_a_store_that_answers_singly_no_waiter_waits_for_another) {
    SinglyStore singly;
    batcher = std::make_unique<Batcher>(loop, singly, nullptr);
    for (const char* name : {"a", "b", "c"}) ask(name);
    loop.run_ready();
    ASSERT_EQ(singly.items.size(), 3u);
    singly.answer(2);
    singly.answer(0);
    EXPECT_TRUE(log.empty()) << "resumed on the loop only";
    loop.run_ready();
    EXPECT_EQ(log, (std::vector<std::string>{"c@3", "a@1"}));
    EXPECT_EQ(batcher->waiting(), 1u);
    singly.answer(1);
    batcher.reset();  // its answer is under way
    loop.run_ready();
    EXPECT_EQ(log.size(), 2u);
}

TEST_F(BatcherTest, what_resumed_coroutines_ask_for_is_the_next_batch) {
    ask("a", SteadyTime::max(), "a2");
    ask("b", SteadyTime::max(), "b2");
    loop.run_ready();
    store.answer(0);
    loop.run_ready();
    ASSERT_EQ(store.batches.size(), 2u);
    EXPECT_EQ(store.batches[1].items.size(), 2u);
}

TEST_F(BatcherTest, a_turn_with_more_than_a_batch_holds_is_split) {
    const std::size_t n = Batcher::batch_items_max + 1;
    for (std::size_t i = 0; i < n; ++i) ask(std::to_string(i));
    loop.run_ready();
    ASSERT_EQ(store.batches.size(), 2u);
    EXPECT_EQ(store.batches[0].items.size(), Batcher::batch_items_max);
    store.answer(1);
    store.answer(0);
    loop.run_ready();
    EXPECT_EQ(log.size(), n);
    EXPECT_EQ(batcher->waiting(), 0u);
}

TEST_F(BatcherTest, an_answer_past_its_deadline_is_unknown_and_the_late_one_is_dropped) {
    ask("late", clock.steady() + 1s);
    ask("patient");
    loop.run_ready();
    clock.advance(1s + Batcher::deadline_step);
    for (int i = 0; i < 40 && log.empty(); ++i) {
        loop.fire_due();
        loop.run_ready();
        clock.advance(Batcher::deadline_step);
    }
    EXPECT_EQ(log, (std::vector<std::string>{"late unknown"}));
    store.answer(0);
    loop.run_ready();
    EXPECT_EQ(log, (std::vector<std::string>{"late unknown", "patient@2"}));
}

TEST_F(BatcherTest, above_its_limit_of_waiting_items_it_refuses_at_once) {
    for (std::size_t i = 0; i < Batcher::waiting_items_max; ++i) ask("x");
    loop.run_ready();
    ask("one too many");
    loop.run_ready();
    ASSERT_EQ(log.size(), 1u);
    EXPECT_EQ(log[0], "one too many refused");
}

TEST_F(BatcherTest, an_answer_after_the_batcher_is_gone_is_dropped) {
    ask("a");
    loop.run_ready();
    batcher.reset();
    store.answer(0);
    loop.run_ready();
    EXPECT_TRUE(log.empty());
}

// -------------------------------------------------------------------- HotRecords

TEST(HotRecords, gives_what_was_put_until_it_expires) {
    HotRecords hot(1 << 20);
    hot.put(key_of("a"), completed("answer", {500}));
    ASSERT_NE(hot.find(key_of("a"), {499}), nullptr);
    EXPECT_EQ(*hot.find(key_of("a"), {499})->answer->body, "answer");
    EXPECT_EQ(hot.find(key_of("a"), {500}), nullptr);
    EXPECT_EQ(hot.bytes(), 0u) << "an expired one is dropped when it is met";
    EXPECT_EQ(hot.find(key_of("b"), {0}), nullptr);
}

TEST(HotRecords, stays_within_its_bytes_and_drops_the_least_recently_used) {
    constexpr std::size_t limit = 64 * 12'000;  // room for eight in a stripe
    HotRecords hot(limit);
    const std::string body(200, 'x');
    // Keys of one stripe.
    std::vector<StoredKey> keys;
    for (int i = 0; keys.size() < 9; ++i) {
        const StoredKey key = key_of(std::to_string(i));
        if (key.bytes.back() % 64 == 0) keys.push_back(key);
    }
    for (std::size_t i = 0; i < 8; ++i) hot.put(keys[i], completed(body));
    ASSERT_NE(hot.find(keys[0], {0}), nullptr) << "used again: the second is now the oldest";
    hot.put(keys[8], completed(body));
    EXPECT_NE(hot.find(keys[0], {0}), nullptr);
    EXPECT_EQ(hot.find(keys[1], {0}), nullptr);
    EXPECT_NE(hot.find(keys[8], {0}), nullptr);
    for (int i = 0; i < 10'000; ++i) hot.put(key_of("many" + std::to_string(i)), completed(body));
    EXPECT_LE(hot.bytes(), limit);
}

TEST(HotRecords,
     ignores_what_is_not_a_completed_inline_answer_or_too_large_and_replaces_and_erases) {
    HotRecords hot(64 * 16'000);
    auto failed = std::make_shared<core::Record>(*completed("x"));
    failed->status = core::Status::failed;
    hot.put(key_of("failed"), failed);
    auto chunked = std::make_shared<core::Record>(*completed("x"));
    chunked->answer->body = nullptr;
    hot.put(key_of("chunked"), chunked);
    hot.put(key_of("large"), completed(std::string(2001, 'x')));
    EXPECT_EQ(hot.bytes(), 0u);
    hot.put(key_of("a"), completed("first"));
    const auto once = hot.bytes();
    hot.put(key_of("a"), completed("again"));
    EXPECT_EQ(hot.bytes(), once);
    EXPECT_EQ(*hot.find(key_of("a"), {0})->answer->body, "again");
    hot.erase(key_of("a"));
    EXPECT_EQ(hot.find(key_of("a"), {0}), nullptr);
    HotRecords none(0);
    none.put(key_of("a"), completed(""));
    EXPECT_EQ(none.find(key_of("a"), {0}), nullptr);
}

// -------------------------------------------------------------------- Spool

SpoolEntry entry_of(const std::string& name, std::uint64_t token, const std::string& body) {
    SpoolEntry entry;
    entry.key = key_of(name);
    entry.fingerprint.raw = base::sha256("request " + name);
    entry.policy.on_unknown = core::OnUnknown::hold;
    entry.complete.token = {token};
    entry.complete.nonce.bytes[3] = 9;
    entry.complete.answer.http_status = 200;
    entry.complete.answer.content_type = "text/event-stream";
    entry.complete.answer.headers = {{"X-Request-Id", "r1"}};
    entry.complete.answer.stream = true;
    entry.complete.answer.body = std::make_shared<const std::string>(body);
    entry.complete.answer.body_bytes = body.size();
    entry.complete.usage.model = "m";
    entry.complete.usage.output_tokens = 7;
    core::Append append;
    append.conversation = key_of("conversation");
    append.request_id = "id-1";
    append.user_content = "hello";
    append.answer_content = std::string("w\0rld", 5);
    entry.complete.append = append;
    entry.chunks = {"chunk 0", "chunk 1"};
    return entry;
}

struct SpoolFiles : testing::Test {
    SpoolFiles() {
        std::string pattern = (fs::temp_directory_path() / "semel-spool-XXXXXX").string();
        folder = ::mkdtemp(pattern.data());
    }
    ~SpoolFiles() override { fs::remove_all(folder); }
    [[nodiscard]] std::vector<fs::path> files(const std::string& extension) const {
        std::vector<fs::path> found;
        for (const auto& file : fs::directory_iterator(folder)) {
            if (file.path().extension() == extension) found.push_back(file.path());
        }
        return found;
    }
    fs::path folder;
};

TEST_F(SpoolFiles, processes_with_one_folder_keep_apart_and_the_next_takes_over_what_they_left) {
    auto first = Spool::open(folder.string());
    auto second = Spool::open(folder.string());
    ASSERT_TRUE(first && second);
    ASSERT_TRUE((*first)->put(entry_of("a", 5, "of the first")));
    ASSERT_TRUE((*second)->put(entry_of("b", 6, "of the second")));
    {
        auto third = Spool::open(folder.string());
        ASSERT_TRUE(third);
        EXPECT_EQ((*third)->size(), 0u) << "what running processes keep is theirs to deliver";
    }
    second->reset();
    first->reset();
    auto next = Spool::open(folder.string());
    ASSERT_TRUE(next);
    EXPECT_EQ((*next)->size(), 2u);
    EXPECT_TRUE((*next)->holds(entry_of("a", 5, "").key, {5}));
    EXPECT_TRUE((*next)->holds(entry_of("b", 6, "").key, {6}));
    EXPECT_FALSE(fs::exists(folder / "2"));
}

TEST_F(SpoolFiles, an_answer_comes_back_whole_in_the_next_process) {
    {
        auto spool = Spool::open(folder.string());
        ASSERT_TRUE(spool);
        ASSERT_TRUE((*spool)->put(entry_of("a", 5, "data: x\n\n")));
        ASSERT_TRUE((*spool)->put(entry_of("a", 6, "newer")));
        ASSERT_TRUE((*spool)->put(entry_of("b", 5, "other")));
        (*spool)->remove(key_of("b"), {5});
    }
    auto spool = Spool::open(folder.string());
    ASSERT_TRUE(spool);
    EXPECT_EQ((*spool)->size(), 2u);
    EXPECT_EQ((*spool)->keys(), std::vector<StoredKey>{key_of("a")});
    EXPECT_TRUE((*spool)->holds(key_of("a"), {5}));
    EXPECT_EQ((*spool)->find(key_of("a"))->complete.token.value, 6u)
        << "the highest token of a key";
    (*spool)->remove(key_of("a"), {6});
    const auto found = (*spool)->find(key_of("a"));
    ASSERT_TRUE(found);
    const SpoolEntry wanted = entry_of("a", 5, "data: x\n\n");
    EXPECT_EQ(found->complete.nonce, wanted.complete.nonce);
    EXPECT_EQ(*found->complete.answer.body, *wanted.complete.answer.body);
    EXPECT_EQ(found->complete.answer.headers, wanted.complete.answer.headers);
    EXPECT_EQ(found->complete.answer.content_type, wanted.complete.answer.content_type);
    EXPECT_TRUE(found->complete.answer.stream);
    EXPECT_EQ(found->complete.usage, wanted.complete.usage);
    EXPECT_TRUE(found->fingerprint.matches(wanted.fingerprint));
    EXPECT_EQ(found->policy, wanted.policy);
    ASSERT_TRUE(found->complete.append);
    EXPECT_EQ(found->complete.append->conversation, wanted.complete.append->conversation);
    EXPECT_EQ(found->complete.append->answer_content, wanted.complete.append->answer_content);
    EXPECT_EQ(found->chunks, wanted.chunks);
    EXPECT_EQ((fs::status(files(".answer")[0]).permissions() &
               (fs::perms::group_all | fs::perms::others_all)),
              fs::perms::none);
}

TEST_F(SpoolFiles, a_broken_file_is_moved_aside_and_reported_and_the_others_are_delivered) {
    {
        auto spool = Spool::open(folder.string());
        ASSERT_TRUE((*spool)->put(entry_of("cut", 1, "aaaa")));
        ASSERT_TRUE((*spool)->put(entry_of("flipped", 2, "bbbb")));
        ASSERT_TRUE((*spool)->put(entry_of("whole", 3, "cccc")));
    }
    const auto path_of = [&](const std::string& name) {
        for (const auto& file : files(".answer")) {
            if (file.filename().string().starts_with(base::hex(key_of(name).view()))) return file;
        }
        return fs::path{};
    };
    fs::resize_file(path_of("cut"), fs::file_size(path_of("cut")) - 1);
    {
        std::fstream file(path_of("flipped"), std::ios::in | std::ios::out | std::ios::binary);
        file.seekp(60);
        file.put('\xff');
    }
    std::ofstream(folder / "notes.answer") << "not one of ours";
    std::ofstream(folder / "half.answer.tmp") << "died while writing";
    auto spool = Spool::open(folder.string());
    ASSERT_TRUE(spool);
    EXPECT_EQ((*spool)->keys(), std::vector<StoredKey>{key_of("whole")});
    EXPECT_EQ((*spool)->problems().size(), 3u);
    EXPECT_EQ(files(".broken").size(), 3u);
    EXPECT_TRUE(files(".tmp").empty());
    auto again = Spool::open(folder.string());
    EXPECT_TRUE((*again)->problems().empty()) << "told once";
}

TEST_F(SpoolFiles, a_folder_that_cannot_be_used_is_an_error_that_names_it) {
    const fs::path file = folder / "file";
    std::ofstream(file) << "x";
    const auto spool = Spool::open((file / "below").string());
    ASSERT_FALSE(spool);
    EXPECT_EQ(spool.error().code, base::ErrorCode::io);
    EXPECT_NE(spool.error().detail.find(file.string()), std::string::npos);
}

TEST_F(SpoolFiles, an_answer_that_cannot_be_written_stays_in_memory) {
    auto spool = Spool::open((folder / "spool").string());
    ASSERT_TRUE(spool);
    fs::remove_all(folder / "spool");
    EXPECT_FALSE((*spool)->put(entry_of("a", 1, "x")));
    EXPECT_TRUE((*spool)->find(key_of("a")).has_value());
}

TEST(Spool, without_a_path_it_lives_in_memory) {
    auto spool = Spool::open("");
    ASSERT_TRUE(spool);
    ASSERT_TRUE((*spool)->put(entry_of("a", 1, "x")));
    EXPECT_EQ((*spool)->size(), 1u);
    (*spool)->remove(key_of("a"), {1});
    EXPECT_EQ((*spool)->size(), 0u);
    EXPECT_FALSE((*spool)->find(key_of("a")).has_value());
}

}  // namespace
}  // namespace semel::engine
