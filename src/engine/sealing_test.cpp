// Sealed pieces, records and turns; the vault that holds the keys.
#include "engine/sealing.hpp"

#include <gtest/gtest.h>

#include <set>
#include <thread>

#include "engine/vault.hpp"

namespace semel::engine {
namespace {

using namespace std::chrono_literals;
using base::SteadyTime;
using core::StoredKey;

StoredKey key_of(const std::string& name) { return base::sha256(name); }
core::TenantTag tenant_of(std::uint8_t n) { return {{n}}; }
DataKeyPtr data_key(std::uint8_t n = 1, std::uint64_t id = 7) {
    return std::make_shared<const DataKey>(
        tenant_of(n), id, std::string(DataKey::secret_bytes, static_cast<char>(n)));
}

constexpr std::string_view text = "the answer that nobody else may read";

TEST(Sealing, a_piece_opens_only_under_its_key_and_in_its_place) {
    const auto key = data_key();
    const StoredKey a = key_of("a");
    const StoredKey b = key_of("b");
    const Place chunk{.kind = Place::Kind::chunk, .of = a, .n = 3};
    const std::string sealed = key->seal(chunk, text);
    EXPECT_EQ(sealed.find(text.substr(0, 8)), std::string::npos);
    EXPECT_EQ(sealed.size(), text.size() + SealedPiece::overhead_bytes);
    EXPECT_EQ(key->open(chunk, sealed), text);

    EXPECT_EQ(key->open({.kind = Place::Kind::chunk, .of = b, .n = 3}, sealed), std::nullopt)
        << "another record's";
    EXPECT_EQ(key->open({.kind = Place::Kind::chunk, .of = a, .n = 4}, sealed), std::nullopt)
        << "another chunk's";
    EXPECT_EQ(key->open({.kind = Place::Kind::body, .of = a, .n = 3}, sealed), std::nullopt)
        << "another kind's";
    EXPECT_EQ(key->open({.kind = Place::Kind::chunk, .of = a, .n = 3, .request_id = "x"}, sealed),
              std::nullopt);
    EXPECT_EQ(data_key(2, 7)->open(chunk, sealed), std::nullopt)
        << "another tenant's key of the same id";
    EXPECT_EQ(data_key(1, 8)->open(chunk, sealed), std::nullopt) << "another key of the tenant";
}

TEST(Sealing, a_piece_that_was_changed_cut_or_is_of_another_version_does_not_open) {
    const auto key = data_key();
    const StoredKey a = key_of("a");
    const Place place{.kind = Place::Kind::body, .of = a};
    const std::string sealed = key->seal(place, text);
    for (std::size_t at = 0; at < sealed.size(); ++at) {
        std::string changed = sealed;
        changed[at] = static_cast<char>(changed[at] ^ 1);
        EXPECT_EQ(key->open(place, changed), std::nullopt) << "bit 0 of byte " << at;
        EXPECT_EQ(key->open(place, sealed.substr(0, at)), std::nullopt)
            << "the first " << at << " bytes";
    }
    EXPECT_EQ(key->open(place, sealed + "x"), std::nullopt);
    EXPECT_FALSE(read_sealed(std::string(SealedPiece::overhead_bytes, '\2')).has_value())
        << "version 2";
    const std::string empty = key->seal(place, {});
    EXPECT_EQ(key->open(place, empty), "");
}

TEST(Sealing, what_another_process_sealed_under_the_same_key_opens) {
    const StoredKey a = key_of("a");
    const Place place{.kind = Place::Kind::body, .of = a};
    const auto here = data_key();
    std::vector<std::string> sealed;
    for (int i = 0; i < 200; ++i)
        sealed.push_back(data_key()->seal(place, text));  // each object is a process
    for (const std::string& piece : sealed) EXPECT_EQ(here->open(place, piece), text);
    EXPECT_EQ(here->open(place, sealed.front()), text) << "also when its subkey was forgotten";
}

TEST(Sealing, no_two_pieces_share_a_nonce_whichever_threads_and_processes_seal) {
    const StoredKey a = key_of("a");
    const auto one = data_key();
    const auto other = data_key();
    std::vector<std::vector<std::string>> made(4);
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < made.size(); ++t) {
        threads.emplace_back([&, t] {
            for (int i = 0; i < 500; ++i)
                made[t].push_back(
                    (t % 2 == 0 ? one : other)->seal({.kind = Place::Kind::body, .of = a}, text));
        });
    }
    for (std::thread& thread : threads) thread.join();
    std::set<std::pair<std::string, std::uint64_t>> nonces;
    std::set<std::string> salts;
    for (const auto& pieces : made) {
        for (const std::string& piece : pieces) {
            const auto parts = read_sealed(piece);
            ASSERT_TRUE(parts);
            nonces.emplace(parts->salt, parts->counter);
            salts.emplace(parts->salt);
        }
    }
    EXPECT_EQ(nonces.size(), 2000u);
    EXPECT_EQ(salts.size(), 2u) << "a subkey per process";
}

core::RecordPtr sealed_record(const StoredKey& key, const DataKey& data_key) {
    auto record = std::make_shared<core::Record>();
    record->status = core::Status::completed;
    record->tenant = data_key.tenant();
    record->fingerprint.raw = key_of("raw");
    record->fingerprint.fields = {{5, 50}, {6, 60}};
    data_key.hide(key, record->fingerprint);
    record->answer.emplace();
    record->answer->body = std::make_shared<const std::string>(text);
    record->answer->body_bytes = text.size();
    record->answer->body_digest = base::sha256(text);
    data_key.seal(key, *record->answer);
    core::Append turn{
        .conversation = key_of("talk"), .request_id = "click-1", .user_content = "who am I?"};
    data_key.seal(turn, "stored id");
    record->turn = std::make_shared<const core::Append>(std::move(turn));
    return record;
}

TEST(Sealing, a_record_is_as_it_was_with_its_key_and_not_kept_without) {
    const StoredKey key = key_of("a");
    const auto data = data_key();
    const core::RecordPtr sealed = sealed_record(key, *data);
    EXPECT_TRUE(is_sealed(*sealed));
    EXPECT_EQ(sealed->answer->body->find(text), std::string::npos);
    EXPECT_NE(sealed->answer->body_digest, base::sha256(text));
    EXPECT_EQ(sealed->turn->user_content.find("who"), std::string::npos);
    EXPECT_EQ(sealed->turn->request_id, "stored id");
    for (const core::FieldMark& mark : sealed->fingerprint.fields)
        EXPECT_TRUE(mark.value != 50 && mark.value != 60);

    const core::RecordPtr open = opened(key, sealed, data.get());
    EXPECT_EQ(*open->answer->body, text);
    EXPECT_EQ(open->answer->sealed_under, 0u);
    EXPECT_EQ(open->answer->body_digest, base::sha256(text));
    EXPECT_EQ(open->fingerprint.fields, (std::vector<core::FieldMark>{{5, 50}, {6, 60}}));
    EXPECT_EQ(open->turn->user_content, "who am I?");
    EXPECT_EQ(open->turn->request_id, "click-1");
    EXPECT_EQ(opened(key, open, data.get()), open) << "nothing is left to open";

    const auto fresh = data_key(1, 8);
    for (const DataKey* without : {static_cast<const DataKey*>(nullptr), fresh.get()}) {
        const core::RecordPtr gone = opened(key, sealed, without);
        EXPECT_EQ(gone->status, core::Status::completed);
        EXPECT_EQ(gone->answer->body_kind, core::BodyKind::not_kept);
        EXPECT_EQ(gone->answer->body, nullptr);
        EXPECT_EQ(gone->answer->sealed_under, 7u) << "says that it is not just too large";
        EXPECT_TRUE(gone->answer->body_digest.empty());
        EXPECT_TRUE(gone->fingerprint.fields.empty());
        EXPECT_TRUE(gone->fingerprint.matches(sealed->fingerprint))
            << "the duplicate is still recognised";
        EXPECT_EQ(gone->turn->user_content, "");
        EXPECT_EQ(gone->turn->request_id, "");
    }
    EXPECT_EQ(opened(key_of("b"), sealed, data.get())->answer->body_kind, core::BodyKind::not_kept)
        << "moved under another record";
}

TEST(Sealing, a_plain_record_stays_the_same_object) {
    auto record = std::make_shared<core::Record>();
    record->answer.emplace();
    record->answer->body = std::make_shared<const std::string>(text);
    record->fingerprint.fields = {{5, 50}};
    EXPECT_EQ(opened(key_of("a"), record, nullptr), record);
    EXPECT_EQ(opened(key_of("a"), record, data_key().get()), record);
}

TEST(Sealing, a_mismatch_names_fields_under_one_key_and_none_under_two) {
    const StoredKey key = key_of("a");
    core::Fingerprint first{
        .raw = key_of("1"), .canonical = {}, .fields = {{5, 50}, {6, 60}, {7, 70}}};
    core::Fingerprint second{
        .raw = key_of("2"), .canonical = {}, .fields = {{5, 50}, {6, 66}, {8, 80}}};
    core::Fingerprint later = second;
    data_key()->hide(key, first);
    data_key()->hide(key, second);
    core::Mismatch same_key{core::differing_fields(first, second), core::Status::completed};
    unname_hidden(same_key);
    EXPECT_EQ(same_key.fields, (std::vector<std::uint64_t>{6, 7, 8}));
    data_key(1, 8)->hide(key, later);
    core::Mismatch erased_since{core::differing_fields(first, later), core::Status::completed};
    unname_hidden(erased_since);
    EXPECT_TRUE(erased_since.fields.empty());
    core::Fingerprint elsewhere{.raw = key_of("1"), .canonical = {}, .fields = {{5, 50}}};
    data_key()->hide(key_of("b"), elsewhere);
    EXPECT_NE(elsewhere.fields[1].value, first.fields[1].value)
        << "equal values of two records look different";
}

TEST(Sealing, more_fields_than_one_step_are_hidden_and_shown) {
    const StoredKey key = key_of("a");
    auto record = std::make_shared<core::Record>();
    for (std::uint64_t i = 0; i < core::fingerprint_fields_max; ++i)
        record->fingerprint.fields.push_back({i + 1, i});
    const auto before = record->fingerprint.fields;
    data_key()->hide(key, record->fingerprint);
    EXPECT_EQ(record->fingerprint.fields.size(), before.size() + 1);
    EXPECT_EQ(opened(key, record, data_key().get())->fingerprint.fields, before);
}

TEST(Sealing, a_turn_opens_in_its_conversation_and_is_erased_without_its_key) {
    const auto key = data_key();
    core::Append said{.conversation = key_of("talk"),
                      .request_id = "click-1",
                      .user_content = "hello",
                      .answer_content = "hi"};
    key->seal(said, "stored id");
    const core::Turn stored{.number = 4,
                            .request_id = "stored id",
                            .user_content = said.user_content,
                            .answer_content = said.answer_content};
    core::Turn turn = stored;
    open_turn(key_of("talk"), turn, key.get());
    EXPECT_EQ(turn.request_id, "click-1");
    EXPECT_EQ(turn.user_content, "hello");
    EXPECT_EQ(turn.answer_content, "hi");
    EXPECT_FALSE(erased(turn));

    core::Turn swapped = stored;
    std::swap(swapped.user_content, swapped.answer_content);
    core::Turn renamed = stored;
    renamed.request_id = "another id";
    core::Turn without = stored;
    core::Turn moved = stored;
    open_turn(key_of("talk"), swapped, key.get());
    open_turn(key_of("talk"), renamed, key.get());
    open_turn(key_of("talk"), without, data_key(1, 8).get());
    open_turn(key_of("another talk"), moved, key.get());
    for (const core::Turn& gone : {swapped, renamed, without, moved}) {
        EXPECT_TRUE(erased(gone));
        EXPECT_EQ(gone.request_id + gone.user_content + gone.answer_content, "");
        EXPECT_EQ(gone.number, 4u);
    }
    core::Turn plain{.number = 1,
                     .request_id = "old",
                     .user_content = "before sealing",
                     .answer_content = "yes"};
    open_turn(key_of("talk"), plain, key.get());
    EXPECT_EQ(plain.user_content, "before sealing");
}

// -------------------------------------------------------------------- Vault

constexpr SteadyTime start{100s};

DataKeyPtr taken(Vault& vault, const core::TenantTag& tenant, const std::string& wrapped) {
    auto key = vault.take_key(tenant, wrapped, vault.key_wanted(tenant).generation, start);
    EXPECT_TRUE(key) << key.error().detail;
    return key ? *key : nullptr;
}

TEST(Vault, a_wrapped_key_is_read_by_who_has_the_secret_and_for_its_tenant_only) {
    Vault vault("secret", nullptr);
    const core::TenantTag tenant = tenant_of(1);
    const Vault::KeyWanted wanted = vault.key_wanted(tenant);
    EXPECT_NE(wanted.operation.value_if_absent, vault.key_wanted(tenant).operation.value_if_absent);
    const DataKeyPtr key = taken(vault, tenant, wanted.operation.value_if_absent);
    ASSERT_NE(key, nullptr);
    EXPECT_EQ(vault.key_wanted(tenant).operation.value_if_absent, wanted.operation.value_if_absent)
        << "a store that has lost it gets it back";
    EXPECT_FALSE(vault.begin_reading_again(tenant, start + Vault::read_again_after));
    EXPECT_TRUE(vault.begin_reading_again(tenant, start + Vault::read_again_after + 1ms));
    EXPECT_FALSE(vault.begin_reading_again(tenant, start + Vault::read_again_after + 2ms))
        << "somebody reads it";
    EXPECT_EQ(vault.find(tenant), key);
    EXPECT_TRUE(vault.is_current(tenant, key->id()));
    EXPECT_EQ(vault.find(tenant_of(2)), nullptr);

    Vault same("secret", nullptr);
    EXPECT_EQ(taken(same, tenant, wanted.operation.value_if_absent)->id(), key->id());
    Vault other("another secret", nullptr);
    EXPECT_EQ(other.take_key(tenant, wanted.operation.value_if_absent, 0, start).error().code,
              base::ErrorCode::store_corrupt);
    EXPECT_EQ(vault.take_key(tenant_of(2), wanted.operation.value_if_absent, 0, start).error().code,
              base::ErrorCode::store_corrupt);
    std::string changed = wanted.operation.value_if_absent;
    changed.back() = static_cast<char>(changed.back() ^ 1);
    EXPECT_EQ(vault.take_key(tenant, changed, 0, start).error().code,
              base::ErrorCode::store_corrupt);
    EXPECT_EQ(vault.take_key(tenant, "", 0, start).error().code, base::ErrorCode::store_corrupt);
}

TEST(Vault, another_mark_makes_it_forget_keys_and_opened_records) {
    HotRecords hot(1 << 20);
    Vault vault("secret", &hot);
    const core::TenantTag tenant = tenant_of(1);
    EXPECT_FALSE(vault.fresh(start));
    vault.take_mark("none", start);
    const Vault::KeyWanted wanted = vault.key_wanted(tenant);
    const DataKeyPtr old = taken(vault, tenant, wanted.operation.value_if_absent);
    hot.put(key_of("a"), opened(key_of("a"), sealed_record(key_of("a"), *old), old.get()));
    EXPECT_GT(hot.bytes(), 0u);
    vault.take_mark("none", start + 1s);
    EXPECT_EQ(vault.find(tenant), old) << "nothing was erased";

    const Vault::KeyWanted on_its_way = vault.key_wanted(tenant);
    vault.take_mark(Vault::fresh_mark().value, start + 2s);
    EXPECT_EQ(vault.find(tenant), nullptr);
    EXPECT_EQ(hot.bytes(), 0u);
    auto late =
        vault.take_key(tenant, wanted.operation.value_if_absent, on_its_way.generation, start);
    ASSERT_TRUE(late);
    EXPECT_EQ(*late, nullptr) << "read before the erasure was noticed, it may be the old key";
    EXPECT_NE(taken(vault, tenant, vault.fresh_key(tenant).value)->id(), old->id());
    vault.take_mark("none", start + 1s);
    EXPECT_NE(vault.find(tenant), nullptr) << "an answer that was overtaken says nothing";
}

TEST(Vault, it_is_looked_at_in_time_and_by_one_at_a_time) {
    Vault vault("secret", nullptr);
    EXPECT_TRUE(vault.begin_look(start));
    EXPECT_FALSE(vault.begin_look(start + 1ms)) << "somebody looks";
    vault.take_mark("none", start);
    EXPECT_TRUE(vault.fresh(start + Vault::usable_for));
    EXPECT_FALSE(vault.begin_look(start + Vault::look_after));
    EXPECT_TRUE(vault.begin_look(start + Vault::look_after + 1ms));
    const SteadyTime late = start + Vault::usable_for + 1ms;
    EXPECT_FALSE(vault.fresh(late));
    EXPECT_FALSE(vault.may_replay(late));
    vault.no_mark();
    EXPECT_TRUE(vault.may_replay(late)) << "memory serves while the store cannot be asked";
    EXPECT_FALSE(vault.fresh(late)) << "but nothing is sealed";
    vault.take_mark("none", late);
    EXPECT_FALSE(vault.may_replay(late + Vault::usable_for + 1ms));
}

TEST(Vault, many_tenants_stay_within_bounds_and_are_read_again) {
    Vault vault("secret", nullptr);
    vault.take_mark("none", start);
    core::TenantTag tenant;
    for (unsigned i = 0; i < 20'000; ++i) {
        tenant.bytes = {static_cast<std::uint8_t>(i), static_cast<std::uint8_t>(i >> 8),
                        static_cast<std::uint8_t>(i >> 16), 1};
        ASSERT_NE(taken(vault, tenant, vault.key_wanted(tenant).operation.value_if_absent),
                  nullptr);
    }
    EXPECT_NE(vault.find(tenant), nullptr);
    EXPECT_EQ(vault.find({{0, 0, 0, 1}}), nullptr) << "the first were given up";
}

}  // namespace
}  // namespace semel::engine
