// Parked messages on a real Redis server: take-overs that come late, batches, a server that is
// full.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "integration/store_answers.hpp"
#include "stores/redis/client_test.hpp"
#include "stores/redis/operations.hpp"
#include "stores/redis/redis_store.hpp"

namespace semel::stores::redis {
namespace {

using namespace core;
using integration::as;
using testing::HasSubstr;

Nonce fence(std::uint8_t number) {
    Nonce out;
    out.bytes.fill(number);
    return out;
}

class RedisParking : public testing::Test {
  protected:
    explicit RedisParking(RedisServerOptions options = {}) : server(std::move(options)) {
        auto made = open_redis_store({.url = server.url()});
        if (!made) throw std::runtime_error(made.error().detail);
        store = std::move(*made);
    }
    BatchResults submit(std::vector<Item> items) const {
        return integration::ask(*store, std::move(items));
    }
    base::Result<Decided> ask(StoreOperation operation) const {
        return integration::ask(*store, list, std::move(operation));
    }
    [[nodiscard]] std::vector<std::uint64_t> places() const {
        std::vector<std::uint64_t> out;
        for (const auto& one : as<ParkedFound>(ask(GetParked{.limit = 1000})).messages)
            out.push_back(one.place);
        return out;
    }
    [[nodiscard]] std::size_t scripts_run() const {
        const std::string text = server.info("cmdstat_evalsha");
        const std::size_t at = text.find("calls=");
        return at == std::string::npos ? 0 : std::stoul(text.substr(at + 6));
    }

    RedisServer server;
    std::unique_ptr<Store> store;
    const StoredKey list = base::sha256("a list");
    const Names names{"semel"};
};

TEST_F(RedisParking, a_take_over_that_is_executed_late_fences_off_nobody_who_came_after) {
    as<ParkingOpened>(ask(OpenParking{fence(1)}));
    as<ParkingOpened>(ask(OpenParking{fence(2)}));
    const auto client = connected(options_of(server.url()));
    const auto execute = [&](const Command& command) {
        std::promise<Answers> promise;
        client->submit({command}, [&](Answers answers) { promise.set_value(std::move(answers)); });
        const auto opened = parking_opened(std::get<Reply>(promise.get_future().get().front()));
        return opened.value();
    };
    const std::string first(16, '\1');
    const std::string second(16, '\2');
    EXPECT_FALSE(execute(open_parking(list, {fence(3)}, "", names)));
    EXPECT_FALSE(execute(open_parking(list, {fence(3)}, first, names)));
    as<Parked>(ask(Park{fence(2), 1, "one"}));
    as<ParkingLost>(ask(Park{fence(3), 2, "two"}));
    // In time, and once more because its reply was lost.
    const Command command = open_parking(list, {fence(3)}, second, names);
    EXPECT_TRUE(command.repeatable);
    EXPECT_TRUE(execute(command));
    EXPECT_TRUE(execute(command));
    as<Parked>(ask(Park{fence(3), 2, "two"}));
    client->stop();
}

TEST_F(RedisParking, hundreds_of_messages_are_a_few_scripts_and_the_order_on_a_place_is_kept) {
    as<ParkingOpened>(ask(OpenParking{fence(1)}));
    std::vector<Item> items;
    for (std::uint64_t place = 0; place < 500; ++place)
        items.push_back({list, Park{fence(1), place, std::string(1000, 'm')}});
    const std::size_t before = scripts_run();
    for (const auto& result : submit(std::move(items))) as<Parked>(result);
    EXPECT_EQ(scripts_run() - before, 2U);
    EXPECT_EQ(places().size(), 500U);

    items.clear();
    for (std::uint64_t place = 5; place < 500; ++place) items.push_back({list, Unpark{place}});
    items.push_back({list, Park{fence(1), 9, "again"}});        // behind its Unpark
    items.push_back({list, Park{fence(2), 10, "a zombie's"}});  // lost
    items.push_back({list, GetParked{}});
    items.push_back({list, Unpark{1}});
    items.push_back({list, OpenParking{fence(2)}});
    items.push_back({list, Park{fence(2), 10, "the next owner's"}});
    items.push_back({list, Park{fence(1), 11, "a zombie's"}});
    const BatchResults results = submit(std::move(items));
    ASSERT_EQ(results.size(), 502U);
    as<Parked>(results[495]);
    as<ParkingLost>(results[496]);
    const auto found = as<ParkedFound>(results[497]).messages;
    ASSERT_EQ(found.size(), 6U);
    EXPECT_EQ(found[5].bytes, "again");
    as<Unparked>(results[498]);
    as<ParkingOpened>(results[499]);
    as<Parked>(results[500]);
    as<ParkingLost>(results[501]);
    EXPECT_EQ(places(), (std::vector<std::uint64_t>{0, 2, 3, 4, 9, 10}));
}

TEST_F(RedisParking, what_is_parked_has_no_ttl_and_an_empty_list_keeps_its_owner) {
    as<ParkingOpened>(ask(OpenParking{fence(1)}));
    as<Parked>(ask(Park{fence(1), 1, "one"}));
    for (const std::string& name : {names.parking(list), names.places(list)})
        EXPECT_EQ(server.command({"PTTL", name}).integer, -1) << name;
    as<Unparked>(ask(Unpark{1}));
    EXPECT_EQ(server.command({"EXISTS", names.places(list)}).integer, 0);
    as<ParkingLost>(ask(Park{fence(2), 1, "one"}));
    as<Parked>(ask(Park{fence(1), 1, "one"}));
}

class FullRedisParking : public RedisParking {
  protected:
    FullRedisParking()
        : RedisParking({.arguments = {"--proto-max-bulk-len", "2mb", "--maxmemory", "0"}}) {}
};

TEST_F(FullRedisParking, a_full_server_parks_nothing_and_still_lets_messages_be_taken_out) {
    as<ParkingOpened>(ask(OpenParking{fence(1)}));
    as<Parked>(ask(Park{fence(1), 1, "one"}));
    as<Parked>(ask(Park{fence(1), 2, "two"}));
    ASSERT_EQ(server.command({"CONFIG", "SET", "maxmemory", "1"}).text, "OK");
    std::vector<Item> items;
    items.push_back({list, Park{fence(1), 3, "three"}});
    items.push_back({list, Unpark{1}});
    const BatchResults results = submit(std::move(items));
    ASSERT_FALSE(results[0]);
    EXPECT_EQ(results[0].error().code, base::ErrorCode::store_full);
    EXPECT_EQ(results[0].error().applied, base::Applied::no);
    as<Unparked>(results[1]);
    EXPECT_EQ(places(), std::vector<std::uint64_t>{2});
    ASSERT_EQ(server.command({"CONFIG", "SET", "maxmemory", "0"}).text, "OK");
    as<Parked>(ask(Park{fence(1), 3, "three"}));
}

TEST_F(FullRedisParking, a_message_longer_than_the_server_takes_is_refused_and_the_others_pass) {
    as<ParkingOpened>(ask(OpenParking{fence(1)}));
    std::vector<Item> items;
    items.push_back({list, Park{fence(1), 1, std::string(1 << 20, 'x')}});
    items.push_back({list, Park{fence(1), 2, std::string(3 << 20, 'x')}});
    items.push_back({list, Park{fence(1), 3, "three"}});
    const BatchResults results = submit(std::move(items));
    as<Parked>(results[0]);
    ASSERT_FALSE(results[1]);
    EXPECT_EQ(results[1].error().applied, base::Applied::no);
    EXPECT_THAT(results[1].error().detail, HasSubstr("proto-max-bulk-len"));
    as<Parked>(results[2]);
    EXPECT_EQ(places(), (std::vector<std::uint64_t>{1, 3}));
}

}  // namespace
}  // namespace semel::stores::redis
