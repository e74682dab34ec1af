#include "consumer/observer.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "brokers/memory/memory_broker.hpp"

namespace semel::consumer {
namespace {

using brokers::Partition;
using brokers::memory::Entry;
using brokers::memory::MemoryBroker;
using testing::Contains;
using testing::HasSubstr;

struct World {
    explicit World(IdentityRules rules = {}, std::size_t ids_max = seen_ids_max) {
        broker.create_topic("orders", 2);
        source = broker.join("shop", {"orders"});
        rules.scope = "shop/watched";
        observer = std::make_unique<Observer>(
            ObserverOptions{
                .name = "watched", .group = "shop", .identity = rules, .ids_max = ids_max},
            *source, counters);
        EXPECT_TRUE(observer->start());
    }
    void send(const std::string& value, std::vector<brokers::OutgoingHeader> headers = {},
              std::int32_t partition = 0) {
        broker.append(
            {"orders", partition},
            {.key = {}, .value = value, .headers = std::move(headers), .timestamp_ms = {}});
    }
    /// By name, those that are not 0.
    std::map<std::string, std::uint64_t> counts() {
        broker.pump();
        std::map<std::string, std::uint64_t> out;
        for (std::size_t i = 0; i < observed_kinds; ++i) {
            if (const auto count = counters.messages[i].load(); count > 0)
                out[name_of(static_cast<Observed>(i))] = count;
        }
        for (std::size_t i = 0; i < id_places; ++i) {
            if (const auto count = counters.ids[i].load(); count > 0)
                out[std::string("from ") + name_of(static_cast<IdFrom>(i))] = count;
        }
        return out;
    }

    MemoryBroker broker;
    std::unique_ptr<brokers::Source> source;
    ObserverCounters counters;
    std::unique_ptr<Observer> observer;
};

using Counts = std::map<std::string, std::uint64_t>;

IdentityRules by_json() {
    IdentityRules rules;
    rules.id.from = config::ValueSpec{.from = config::ValueFrom::json, .name = "/id"};
    return rules;
}

TEST(Observer, tells_first_messages_duplicates_and_mismatches_apart) {
    World world(by_json());
    world.send(R"({"id": "a", "n": 1})");
    world.send(R"({"id": "b", "n": 1})");
    world.send(R"({"n": 1, "id": "a"})", {}, 1);  // the same members in another order
    world.send(R"({"id": "b", "n": 2})");
    world.send(R"({"id": "b", "n": 1})");
    EXPECT_EQ(world.counts(),
              (Counts{{"first", 2}, {"duplicate", 2}, {"mismatch", 1}, {"from configured", 5}}));
    EXPECT_THAT(world.observer->state().alarms,
                Contains(HasSubstr("mismatch, lately orders-0 at 2: its id was on a message of "
                                   "partition 0 at 1, whose payload is another")));
}

TEST(Observer, counts_what_has_no_id_or_cannot_be_read_and_settles_it_without_a_letter) {
    World world(by_json());
    world.send("no json");
    world.send(R"({"n": 1})");
    world.send(R"({"id": ""})");
    world.broker.append({"orders", 1}, Entry{});
    world.send(R"({"id": "a"})");
    EXPECT_EQ(
        world.counts(),
        (Counts{{"undecodable", 1}, {"missing_id", 3}, {"first", 1}, {"from configured", 1}}));
    for (const brokers::AssignmentState& one : world.observer->state().partitions)
        EXPECT_EQ(one.in_flight, 0u);
}

TEST(Observer, follows_the_rules_for_tombstones_and_missing_ids) {
    IdentityRules rules = by_json();
    rules.id.on_tombstone = config::OnTombstone::dead_letter;
    rules.id.on_missing = config::OnMissingId::skip;
    World strict(rules);
    strict.broker.append({"orders", 0}, Entry{});
    strict.send(R"({"n": 1})");
    EXPECT_EQ(strict.counts(), (Counts{{"tombstone", 1}, {"skipped", 1}}));

    rules.id.on_missing = config::OnMissingId::offset;
    World lenient(rules);
    lenient.send(R"({"n": 1})");
    lenient.send(R"({"n": 1})");
    EXPECT_EQ(lenient.counts(), (Counts{{"first", 2}, {"from offset", 2}}));
}

TEST(Observer, says_in_which_of_the_usual_places_ids_were_found) {
    World world;
    world.send("1", {{"ce_id", "e1"}, {"ce_source", "/shop"}});
    world.send("2", {{"Idempotency-Key", "k1"}});
    world.send("3", {{"idempotency-key", "k2"}});
    world.send("4", {{"id", "i1"}});
    world.send("5");
    EXPECT_EQ(world.counts(), (Counts{{"first", 4},
                                      {"missing_id", 1},
                                      {"from cloudevents", 1},
                                      {"from idempotency_key", 2},
                                      {"from id_header", 1}}));
}

TEST(Observer, forgets_the_oldest_id_when_its_memory_is_full) {
    World world(by_json(), 3);
    for (const char* id : {"a", "b", "c", "d"}) world.send(R"({"id": ")" + std::string(id) + "\"}");
    world.send(R"({"id": "b"})");  // still known
    world.send(R"({"id": "a"})");  // made room for d
    EXPECT_EQ(world.counts(), (Counts{{"first", 5}, {"duplicate", 1}, {"from configured", 6}}));
    EXPECT_EQ(world.counters.forgotten, 2u);
}

TEST(Observer, keeps_what_it_knows_when_partitions_leave_and_come_again) {
    World world(by_json());
    world.send(R"({"id": "a"})");
    EXPECT_EQ(world.counts().at("first"), 1u);
    world.broker.rebalance("shop");
    world.send(R"({"id": "a"})", {}, 1);
    EXPECT_EQ(world.counts().at("duplicate"), 1u);
}

TEST(Observer, reads_nothing_while_it_is_paused_and_after_it_was_drained) {
    World world(by_json());
    world.observer->pause("a test");
    world.send(R"({"id": "a"})");
    EXPECT_EQ(world.counts(), Counts{});
    EXPECT_EQ(world.observer->state().condition, "paused");
    EXPECT_EQ(world.observer->state().reason, "a test");
    world.observer->resume();
    EXPECT_EQ(world.counts().at("first"), 1u);
    EXPECT_EQ(world.observer->state().condition, "running");
    world.observer->drain();
    world.observer->resume();
    world.send(R"({"id": "b"})");
    EXPECT_EQ(world.counts().at("first"), 1u);
    EXPECT_EQ(world.observer->state().condition, "stopped");
}

TEST(SeenIds, compares_canonical_forms_where_both_messages_have_one) {
    SeenIds seen(10);
    const auto print = [](const char* raw, const char* canonical) {
        core::Fingerprint out;
        out.raw = base::sha256(raw);
        if (canonical != nullptr) out.canonical = base::sha256(canonical);
        return out;
    };
    EXPECT_FALSE(seen.see(base::sha256("k"), print("1", nullptr), 3, 7));
    const auto other = seen.see(base::sha256("k"), print("2", nullptr), 0, 0);
    ASSERT_TRUE(other);
    EXPECT_FALSE(other->same) << "two without a canonical form are not alike for that";
    EXPECT_EQ(other->partition, 3);
    EXPECT_EQ(other->offset, 7);
    EXPECT_FALSE(seen.see(base::sha256("j"), print("1", "c"), 0, 1));
    EXPECT_TRUE(seen.see(base::sha256("j"), print("2", "c"), 0, 2)->same);
    EXPECT_EQ(seen.size(), 2u);
}

}  // namespace
}  // namespace semel::consumer
