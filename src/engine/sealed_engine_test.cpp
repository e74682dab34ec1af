// Engines with vaults on one store: what goes into it is sealed, what comes out is opened, and an
// erasure is noticed everywhere.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "engine/engine.hpp"
#include "stores/memory/memory_store.hpp"
#include "support/faulty_store.hpp"
#include "support/virtual_time.hpp"

namespace semel::engine {
namespace {

using namespace std::chrono_literals;
namespace fs = std::filesystem;
using core::StoredKey;
using support::FaultyStore;

constexpr std::string_view plain = "PLAINTEXT that must not be at rest";

StoredKey key_of(const std::string& name) { return base::sha256(name); }
core::TenantTag tenant_of(std::uint8_t n) { return {{n}}; }

core::Answer answer_of(std::string_view body) {
    core::Answer answer;
    answer.http_status = 200;
    answer.body = std::make_shared<const std::string>(body);
    answer.body_bytes = body.size();
    return answer;
}

struct SealedEngineTest : testing::Test, support::VirtualTime {
    /// A folder of its own for spools, gone with the test.
    struct Folder {
        Folder() {
            std::string name = (fs::temp_directory_path() / "semel-sealed-XXXXXX").string();
            if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make " + name);
            path = name;
        }
        ~Folder() {
            std::error_code ignored;
            fs::remove_all(path, ignored);
        }
        Folder(const Folder&) = delete;
        Folder& operator=(const Folder&) = delete;
        fs::path path;
    };
    /// Whatever server is the master now.
    struct Network final : core::Store {
        explicit Network(core::Store* master) : inner(master) {}
        core::Store* inner;
        void submit(std::vector<core::Item> items, core::BatchDone done) override {
            inner->submit(std::move(items), std::move(done));
        }
        base::Result<core::ScanPage> scan(const core::ScanFilter& f, const std::string& c,
                                          std::size_t n) override {
            return inner->scan(f, c, n);
        }
        base::Result<std::size_t> purge(std::size_t limit) override { return inner->purge(limit); }
        [[nodiscard]] core::StoreTime now() const override { return inner->now(); }
        [[nodiscard]] core::Durability durability() const override { return inner->durability(); }
        base::Result<void> health() override { return inner->health(); }
        void stop() override {}
    };
    /// One process.
    struct Node {
        Node(SealedEngineTest& t, const std::string& id)
            : network(t.truth.get()),
              store(
                  network, [&t](auto d, auto fn) { t.later(d, std::move(fn)); },
                  [](std::uint64_t) { return std::uint64_t{0}; }),
              spool(std::move(*Spool::open((t.folder.path / id).string()))),
              engine(t.loop, store, {.owner = {id, {}}, .lease = 9s}, hot, *spool, counters,
                     &vault) {}
        Network network;
        FaultyStore store;
        HotRecords hot{1 << 20};
        Vault vault{"secret", &hot};
        std::unique_ptr<Spool> spool;
        EngineCounters counters;
        Engine engine;
    };

    Folder folder;
    std::unique_ptr<core::Store> truth = stores::make_memory_store(clock);
    std::unique_ptr<Node> a = std::make_unique<Node>(*this, "a");
    std::unique_ptr<Node> b = std::make_unique<Node>(*this, "b");

    static Engine::AcquireRequest request(const std::string& name, std::uint8_t tenant = 1,
                                          std::string_view body = "body") {
        Engine::AcquireRequest r;
        r.key = key_of(name);
        r.fingerprint.raw = base::sha256(body);
        r.fingerprint.fields = {{5, 50}, {6, body.size()}};
        r.starts_call = true;
        r.tenant = tenant_of(tenant);
        return r;
    }
    std::unique_ptr<LeaseGuard> granted(Node& node, Engine::AcquireRequest r) {
        auto acquired = wait(node.engine.acquire(std::move(r)));
        EXPECT_TRUE(acquired && acquired->lease)
            << (acquired ? "not granted" : acquired.error().detail);
        return acquired ? std::move(acquired->lease) : nullptr;
    }
    void completed(Node& node, const std::string& name, std::uint8_t tenant = 1) {
        auto lease = granted(node, request(name, tenant));
        const Completion done =
            wait(node.engine.complete(*lease, answer_of(plain), {}, std::nullopt));
        EXPECT_EQ(done.kind, Completion::Kind::recorded);
        EXPECT_EQ(*done.record->answer->body, plain) << "whoever completed has it as it was";
    }
    /// What a duplicate is answered: the answer's body, or how it is kept.
    std::string duplicate(Node& node, const std::string& name, std::uint8_t tenant = 1) {
        auto acquired = wait(node.engine.acquire(request(name, tenant)));
        if (!acquired) return acquired.error().detail;
        if (acquired->lease) return "granted: it would be paid again";
        const auto* replay = std::get_if<core::Replay>(&*acquired->refused);
        if (replay == nullptr) return "no replay";
        const core::Answer& answer = *replay->record->answer;
        return answer.body_kind == core::BodyKind::inline_body ? *answer.body : "not kept";
    }
    core::StoreOutcome in_store(const StoredKey& key, core::StoreOperation operation) {
        core::StoreOutcome found;
        truth->submit({core::Item{key, std::move(operation)}}, [&](core::BatchResults results) {
            found = std::move(results.front()->outcome);
        });
        return found;
    }
    core::RecordPtr record(const std::string& name) {
        return std::get<core::Found>(in_store(key_of(name), core::Get{})).record;
    }
    /// As an administrator does it, not seen by any process yet.
    void erase(std::uint8_t tenant) {
        in_store({}, a->vault.fresh_key(tenant_of(tenant)));
        in_store({}, Vault::fresh_mark());
    }
    std::string spooled(const std::string& id) const {
        std::ostringstream all;
        for (const auto& file : fs::directory_iterator(folder.path / id)) {
            std::ifstream in(file.path(), std::ios::binary);
            all << in.rdbuf();
        }
        return all.str();
    }
};

TEST_F(SealedEngineTest, an_answer_lies_sealed_and_is_replayed_opened_everywhere) {
    completed(*a, "x");
    const core::RecordPtr at_rest = record("x");
    EXPECT_EQ(at_rest->tenant, tenant_of(1));
    EXPECT_NE(at_rest->answer->sealed_under, 0u);
    EXPECT_EQ(at_rest->answer->body->find("PLAINTEXT"), std::string::npos);
    ASSERT_NE(a->engine.find_hot(key_of("x")), nullptr);
    EXPECT_EQ(*a->engine.find_hot(key_of("x"))->answer->body, plain);
    EXPECT_EQ(b->engine.find_hot(key_of("x")), nullptr);
    EXPECT_EQ(duplicate(*b, "x"), plain);
    ASSERT_NE(b->engine.find_hot(key_of("x")), nullptr) << "opened, it is kept for the next one";
    EXPECT_EQ(*b->engine.find_hot(key_of("x"))->answer->body, plain);
    const auto got = wait(a->engine.get(key_of("x")));
    EXPECT_EQ(*(*got)->answer->body, plain);
    EXPECT_EQ((*got)->fingerprint.fields, request("x").fingerprint.fields);
}

TEST_F(SealedEngineTest, a_mismatch_still_names_its_fields_until_the_tenant_is_erased) {
    completed(*a, "x");
    const auto other = [this](Node& node) {
        auto acquired = wait(node.engine.acquire(request("x", 1, "another body")));
        return std::get<core::Mismatch>(*acquired->refused).fields;
    };
    EXPECT_EQ(other(*b), (std::vector<std::uint64_t>{6}));
    erase(1);
    run_for(Vault::usable_for + 1s);
    EXPECT_TRUE(other(*b).empty());
}

TEST_F(SealedEngineTest,
       after_an_erasure_the_duplicate_is_not_kept_and_never_granted_in_every_process) {
    completed(*a, "x");
    completed(*a, "other", 2);
    EXPECT_EQ(duplicate(*b, "x"), plain);
    erase(1);
    run_for(Vault::usable_for + 1s);
    for (Node* node : {a.get(), b.get()}) {
        EXPECT_EQ(node->engine.find_hot(key_of("x")), nullptr) << "not even from memory";
        EXPECT_EQ(duplicate(*node, "x"), "not kept");
        EXPECT_EQ(node->engine.find_hot(key_of("x")), nullptr);
        EXPECT_EQ(duplicate(*node, "other", 2), plain) << "another tenant's answers stay";
    }
    completed(*b, "y");
    EXPECT_EQ(duplicate(*a, "y"), plain) << "the tenant goes on under its new key";
    a = std::make_unique<Node>(*this, "a2");
    EXPECT_EQ(duplicate(*a, "x"), "not kept") << "also after a start anew";
}

TEST_F(SealedEngineTest, a_busy_process_notices_an_erasure_in_time_without_anybody_waiting) {
    completed(*a, "x");
    erase(1);
    int served_from_memory = 0;
    for (auto passed = 0ms; passed <= Vault::usable_for; passed += 50ms) {
        if (a->engine.find_hot(key_of("x"))) ++served_from_memory;
        run_for(50ms);
    }
    EXPECT_LT(served_from_memory * 50, (Vault::look_after + 500ms).count());
    EXPECT_EQ(duplicate(*a, "x"), "not kept");
}

TEST_F(SealedEngineTest, a_call_that_runs_while_its_tenant_is_erased_is_recorded_and_not_kept) {
    auto lease = granted(*a, request("x"));
    erase(1);
    run_for(Vault::usable_for + 1s);
    EXPECT_EQ(duplicate(*a, "z"), "granted: it would be paid again") << "the erasure is noticed";
    const Completion done = wait(a->engine.complete(*lease, answer_of(plain), {}, std::nullopt));
    EXPECT_EQ(done.kind, Completion::Kind::recorded);
    EXPECT_EQ(a->engine.find_hot(key_of("x")), nullptr);
    EXPECT_EQ(duplicate(*a, "x"), "not kept");
    EXPECT_EQ(duplicate(*b, "x"), "not kept");
}

TEST_F(SealedEngineTest, memory_serves_while_the_store_is_out_and_nothing_is_sealed_unasked) {
    completed(*a, "x");
    run_for(10s);
    a->store.down = true;
    EXPECT_EQ(duplicate(*a, "x"), plain);
    ASSERT_NE(a->engine.find_hot(key_of("x")), nullptr);
    auto refused = wait(a->engine.acquire(request("y")));
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().applied, base::Applied::no);
    a->store.down = false;
    erase(1);
    run_for(1s);
    EXPECT_NE(a->engine.find_hot(key_of("x")), nullptr) << "it asks in the background";
    run_for(1s);
    EXPECT_EQ(duplicate(*a, "x"), "not kept") << "the store answers again, and so does the mark";
}

TEST_F(SealedEngineTest, chunks_lie_sealed_and_are_opened_for_their_tenant_only) {
    auto lease = granted(*a, request("big"));
    ASSERT_TRUE(wait(a->engine.put_chunk(*lease, 0, std::string(plain))));
    ASSERT_TRUE(wait(a->engine.put_chunk(*lease, 1, "the rest")));
    core::Answer answer{.http_status = 200, .body_kind = core::BodyKind::chunks, .chunk_count = 2};
    answer.body_digest = base::sha256(std::string(plain) + "the rest");
    wait(a->engine.complete(*lease, answer, {}, std::nullopt));
    const core::GetChunk first{lease->token(), 0};
    const std::string at_rest = std::get<core::ChunkFound>(in_store(key_of("big"), first)).bytes;
    EXPECT_EQ(at_rest.find("PLAINTEXT"), std::string::npos);
    EXPECT_NE(record("big")->answer->body_digest, answer.body_digest)
        << "a digest would let guesses be tried out";
    auto read = wait(b->engine.ask({key_of("big"), first}, tenant_of(1)));
    EXPECT_EQ(std::get<core::ChunkFound>(read->outcome).bytes, plain);
    EXPECT_EQ((*wait(b->engine.get(key_of("big"))))->answer->body_digest, answer.body_digest);
    read = wait(b->engine.ask({key_of("big"), first}, tenant_of(2)));
    EXPECT_TRUE(std::holds_alternative<core::ChunkMissing>(read->outcome));
    erase(1);
    run_for(Vault::usable_for + 1s);
    read = wait(b->engine.ask({key_of("big"), first}, tenant_of(1)));
    EXPECT_TRUE(std::holds_alternative<core::ChunkMissing>(read->outcome));
    EXPECT_EQ((*wait(b->engine.get(key_of("big"))))->answer->body_kind, core::BodyKind::not_kept);
}

TEST_F(SealedEngineTest, a_turn_lies_sealed_from_the_grant_on_and_its_id_is_a_hash) {
    const StoredKey talk = key_of("talk");
    auto asked = request("x");
    asked.turn = std::make_shared<const core::Append>(core::Append{
        .conversation = talk, .request_id = "click-PLAINTEXT", .user_content = std::string(plain)});
    auto lease = granted(*a, asked);
    const core::RecordPtr running = record("x");
    EXPECT_EQ(running->turn->user_content.find("PLAINTEXT"), std::string::npos);
    EXPECT_EQ(running->turn->request_id.find("PLAINTEXT"), std::string::npos);
    core::Append turn = *asked.turn;
    turn.answer_content = "said PLAINTEXT";
    wait(a->engine.complete(*lease, answer_of(plain), {}, turn));
    const auto at_rest = std::get<core::TurnsFound>(in_store(talk, core::GetTurns{})).turns;
    ASSERT_EQ(at_rest.size(), 1u);
    for (const core::Turn& said : at_rest) {
        EXPECT_EQ((said.request_id + said.user_content + said.answer_content).find("PLAINTEXT"),
                  std::string::npos);
    }
    const auto turns = [&] {
        auto read = wait(b->engine.ask({talk, core::GetTurns{}}, tenant_of(1)));
        return std::get<core::TurnsFound>(read->outcome).turns;
    };
    ASSERT_EQ(turns().size(), 1u);
    EXPECT_EQ(turns()[0].request_id, "click-PLAINTEXT");
    EXPECT_EQ(turns()[0].user_content, plain);
    EXPECT_EQ(turns()[0].answer_content, "said PLAINTEXT");
    const auto holds = [&](const std::string& id) {
        auto read = wait(b->engine.ask({talk, core::GetConversation{id}}));
        return std::get<core::ConversationFound>(read->outcome).holds_id;
    };
    EXPECT_TRUE(holds("click-PLAINTEXT"));
    EXPECT_FALSE(holds("click-2"));
    erase(1);
    run_for(Vault::usable_for + 1s);
    ASSERT_EQ(turns().size(), 1u) << "numbers have no gaps";
    EXPECT_TRUE(erased(turns()[0]));
    EXPECT_TRUE(holds("click-PLAINTEXT")) << "the turn is not said a second time";
}

TEST_F(SealedEngineTest, the_spool_holds_sealed_bytes_and_a_later_process_delivers_them) {
    auto lease = granted(*a, request("x"));
    a->store.down = true;
    const Completion done = wait(a->engine.complete(*lease, answer_of(plain), {}, std::nullopt));
    EXPECT_EQ(done.kind, Completion::Kind::pending);
    EXPECT_GT(spooled("a").size(), plain.size());
    EXPECT_EQ(spooled("a").find("PLAINTEXT"), std::string::npos);
    wait(a->engine.stop());
    a.reset();
    a = std::make_unique<Node>(*this, "a");  // the same folder, without the keys
    run_for(5s);
    EXPECT_EQ(a->spool->size(), 0u);
    EXPECT_EQ(duplicate(*b, "x"), plain);
    EXPECT_EQ(duplicate(*a, "x"), plain);
}

TEST_F(SealedEngineTest, a_big_answer_waits_in_the_spool_with_its_chunks_and_is_delivered_whole) {
    auto lease = granted(*a, request("big"));
    const std::vector<std::string> chunks{"first PLAINTEXT chunk", "second PLAINTEXT chunk"};
    core::Answer answer;
    answer.http_status = 200;
    answer.body_kind = core::BodyKind::chunks;
    answer.chunk_count = 2;
    answer.body_bytes = chunks[0].size() + chunks[1].size();
    answer.body_digest = base::sha256(chunks[0] + chunks[1]);
    a->store.down = true;
    const Completion done = wait(a->engine.complete(*lease, answer, {}, std::nullopt, chunks));
    EXPECT_EQ(done.kind, Completion::Kind::pending);
    EXPECT_GT(spooled("a").size(), answer.body_bytes);
    EXPECT_EQ(spooled("a").find("PLAINTEXT"), std::string::npos);
    wait(a->engine.stop());
    a.reset();
    a = std::make_unique<Node>(*this, "a");
    run_for(5s);
    EXPECT_EQ(a->spool->size(), 0u);
    const core::RecordPtr record = *wait(b->engine.get(key_of("big")));
    ASSERT_TRUE(record && record->answer);
    EXPECT_EQ(record->answer->body_kind, core::BodyKind::chunks);
    EXPECT_EQ(record->answer->body_digest, answer.body_digest);
    for (std::uint32_t n = 0; n < 2; ++n) {
        const auto read =
            wait(b->engine.ask({key_of("big"), core::GetChunk{record->token, n}}, tenant_of(1)));
        ASSERT_TRUE(read);
        EXPECT_EQ(std::get<core::ChunkFound>(read->outcome).bytes, chunks[n]);
    }
}

TEST_F(SealedEngineTest, a_spooled_answer_of_an_erased_tenant_is_recorded_and_not_kept) {
    auto lease = granted(*a, request("x"));
    a->store.down = true;
    wait(a->engine.complete(*lease, answer_of(plain), {}, std::nullopt));
    erase(1);
    a->store.down = false;
    run_for(10s);
    EXPECT_EQ(a->spool->size(), 0u);
    EXPECT_EQ(duplicate(*a, "x"), "not kept");
    EXPECT_EQ(a->engine.find_hot(key_of("x")), nullptr);
}

TEST_F(SealedEngineTest, a_refusal_that_is_replayed_lies_sealed) {
    auto asked = request("x");
    asked.policy.on_failed = core::OnFailed::replay;
    auto lease = granted(*a, asked);
    core::Fail refusal{.certainty = core::Certainty::refused_for_good,
                       .failure = {.code = "upstream-status"}};
    refusal.answer = answer_of(plain);
    const auto after = wait(a->engine.fail(*lease, refusal));
    EXPECT_EQ(*after->answer->body, plain);
    EXPECT_EQ(record("x")->answer->body->find("PLAINTEXT"), std::string::npos);
    EXPECT_EQ(duplicate(*b, "x"), plain);
}

TEST_F(SealedEngineTest, what_was_kept_before_sealing_stays_readable) {
    auto before = request("x");
    before.tenant = {};
    auto lease = granted(*a, before);
    wait(a->engine.complete(*lease, answer_of(plain), {}, std::nullopt));
    EXPECT_EQ(*record("x")->answer->body, plain);
    EXPECT_EQ(duplicate(*b, "x"), plain);
    auto other = wait(b->engine.acquire(request("x", 1, "another body")));
    EXPECT_TRUE(std::get<core::Mismatch>(*other->refused).fields.empty());
}

TEST_F(SealedEngineTest, a_key_that_a_failover_lost_with_the_claim_is_put_back_with_the_answer) {
    auto lease = granted(*a, request("x"));
    truth = stores::make_memory_store(clock);  // knows nothing
    for (Node* node : {a.get(), b.get()}) node->network.inner = truth.get();
    const Completion done = wait(a->engine.complete(*lease, answer_of(plain), {}, std::nullopt));
    EXPECT_EQ(done.kind, Completion::Kind::recorded);
    EXPECT_EQ(a->counters.claim_lost, 1u);
    EXPECT_EQ(duplicate(*b, "x"), plain) << "another process reads it";
}

TEST_F(SealedEngineTest,
       an_answer_whose_claim_and_key_were_lost_is_sealed_under_the_key_that_came_instead) {
    auto asked = request("x");
    asked.turn = std::make_shared<const core::Append>(core::Append{
        .conversation = key_of("talk"), .request_id = "click", .user_content = "question"});
    auto lease = granted(*a, asked);
    truth = stores::make_memory_store(clock);
    for (Node* node : {a.get(), b.get()}) node->network.inner = truth.get();
    completed(*b, "y");  // the tenant has another key now
    core::Append turn = *asked.turn;
    turn.answer_content = "reply";
    wait(a->engine.complete(*lease, answer_of(plain), {}, turn));
    EXPECT_EQ(a->counters.claim_lost, 1u);
    EXPECT_EQ(record("x")->answer->sealed_under, record("y")->answer->sealed_under);
    EXPECT_EQ(duplicate(*b, "x"), plain);
    auto read = wait(b->engine.ask({key_of("talk"), core::GetTurns{}}, tenant_of(1)));
    EXPECT_EQ(std::get<core::TurnsFound>(read->outcome).turns.at(0).answer_content, "reply");
}

TEST_F(SealedEngineTest, a_key_that_a_failover_lost_is_put_back_by_who_knows_it) {
    completed(*a, "x");
    const std::string name = a->vault.key_wanted(tenant_of(1)).operation.name;
    const auto kept = in_store({}, core::ClaimValue{.name = name, .value_if_absent = "absent"});
    const auto mark = std::get<core::Value>(in_store({}, Vault::mark_wanted())).value;
    truth = stores::make_memory_store(clock);
    in_store({}, core::ReplaceValue{.name = Vault::mark_wanted().name,
                                    .value = mark});  // only the key is lost
    for (Node* node : {a.get(), b.get()}) node->network.inner = truth.get();
    run_for(Vault::read_again_after + 1s);
    completed(*a, "y");
    completed(*a, "z");
    run_for(1s);
    const auto again = in_store({}, core::ClaimValue{.name = name, .value_if_absent = "absent"});
    EXPECT_EQ(std::get<core::Value>(again).value, std::get<core::Value>(kept).value);
    EXPECT_EQ(duplicate(*b, "y"), plain);
}

TEST_F(SealedEngineTest, a_tenants_key_that_cannot_be_had_grants_nothing) {
    in_store({}, core::ReplaceValue{.name = a->vault.key_wanted(tenant_of(1)).operation.name,
                                    .value = "damaged"});
    auto acquired = wait(a->engine.acquire(request("x")));
    ASSERT_FALSE(acquired);
    EXPECT_EQ(acquired.error().code, base::ErrorCode::store_corrupt);
    EXPECT_EQ(record("x"), nullptr);
}

}  // namespace
}  // namespace semel::engine
