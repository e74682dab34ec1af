// The contract's part on parked messages: lists that are kept in order, fenced, and never expire.
#include <limits>

#include "contract/outcomes.hpp"
#include "contract/store_contract.hpp"

using namespace semel;            // NOLINT: a test file
using namespace semel::core;      // NOLINT
using namespace semel::contract;  // NOLINT
using namespace std::chrono_literals;

TEST_P(StoreContract, parked_messages_are_listed_by_their_places_until_they_are_taken_out) {
    as<ParkingOpened>(ask(k, OpenParking{nonce(1)}));
    const std::string binary("\0\xff'\"\n", 5);
    // 255 and 256: bytes must sort like numbers. The last is the largest that a broker counts to.
    constexpr std::uint64_t last = std::numeric_limits<std::int64_t>::max();
    for (const std::uint64_t place :
         {std::uint64_t{256}, std::uint64_t{0}, last, std::uint64_t{255}})
        as<Parked>(ask(k, Park{nonce(1), place, binary + std::to_string(place)}));
    as<Parked>(ask(k, Park{nonce(1), 7, ""}));
    using Places = std::vector<std::uint64_t>;
    const auto places = [&](GetParked what) {
        Places out;
        for (const ParkedMessage& one : as<ParkedFound>(ask(k, what)).messages) {
            out.push_back(one.place);
            EXPECT_EQ(one.bytes, one.place == 7 ? "" : binary + std::to_string(one.place));
        }
        return out;
    };
    EXPECT_EQ(places({}), (Places{0, 7, 255, 256, last}));
    EXPECT_EQ(places({.from = 1, .limit = 2}), (Places{7, 255}));
    EXPECT_EQ(places({.from = 256, .limit = 9}), (Places{256, last}));
    as<Unparked>(ask(k, Unpark{255}));
    as<Unparked>(ask(k, Unpark{255}));
    as<Unparked>(ask(k, Unpark{1}));
    EXPECT_EQ(places({}), (Places{0, 7, 256, last}));
    EXPECT_TRUE(as<ParkedFound>(ask(key("another list"), GetParked{})).messages.empty());
    for (const std::uint64_t place : places({})) as<Unparked>(ask(k, Unpark{place}));
    EXPECT_TRUE(places({}).empty());
    as<Parked>(ask(k, Park{nonce(1), 3, binary + "3"}));
    EXPECT_EQ(places({}), Places{3});
}

TEST_P(StoreContract, a_message_parked_again_is_the_newer_one) {
    as<ParkingOpened>(ask(k, OpenParking{nonce(1)}));
    as<Parked>(ask(k, Park{nonce(1), 5, "one"}));
    as<Parked>(ask(k, Park{nonce(1), 5, "two"}));
    const auto found = as<ParkedFound>(ask(k, GetParked{})).messages;
    ASSERT_EQ(found.size(), 1U);
    EXPECT_EQ(found[0].bytes, "two");
}

TEST_P(StoreContract, only_who_opened_a_list_last_parks_in_it_and_anybody_takes_out) {
    as<ParkingLost>(ask(k, Park{nonce(1), 1, "nobody's"}));
    as<ParkingOpened>(ask(k, OpenParking{nonce(1)}));
    as<Parked>(ask(k, Park{nonce(1), 1, "one"}));
    as<ParkingOpened>(ask(k, OpenParking{nonce(2)}));
    as<ParkingLost>(ask(k, Park{nonce(1), 2, "of one who is fenced off"}));
    as<ParkingLost>(ask(k, Park{nonce(1), 1, "of one who is fenced off"}));
    as<Parked>(ask(k, Park{nonce(2), 3, "three"}));
    auto found = as<ParkedFound>(ask(k, GetParked{})).messages;
    ASSERT_EQ(found.size(), 2U);
    EXPECT_EQ(found[0].bytes, "one");
    EXPECT_EQ(found[1].place, 3U);
    as<Unparked>(ask(k, Unpark{1}));
    as<ParkingLost>(ask(key("another list"), Park{nonce(2), 1, "x"}));
    found = as<ParkedFound>(ask(k, GetParked{})).messages;
    ASSERT_EQ(found.size(), 1U);
    EXPECT_EQ(found[0].place, 3U);
}

TEST_P(StoreContract, batches_park_and_take_out_many) {
    std::vector<Item> batch;
    as<ParkingOpened>(ask(k, OpenParking{nonce(1)}));
    for (std::uint64_t place = 0; place < 300; ++place)
        batch.push_back({k, Park{nonce(1), place, std::string(1000, 'm')}});
    for (const auto& result : submit(std::move(batch))) as<Parked>(result);
    EXPECT_EQ(as<ParkedFound>(ask(k, GetParked{.from = 0, .limit = 1000})).messages.size(), 300U);
    batch.clear();
    for (std::uint64_t place = 0; place < 300; place += 2) batch.push_back({k, Unpark{place}});
    for (const auto& result : submit(std::move(batch))) as<Unparked>(result);
    const auto found = as<ParkedFound>(ask(k, GetParked{.from = 0, .limit = 1000})).messages;
    ASSERT_EQ(found.size(), 150U);
    EXPECT_EQ(found[0].place, 1U);
}

TEST_P(StoreContract, what_is_parked_outlives_years_purges_and_restarts) {
    as<ParkingOpened>(ask(k, OpenParking{nonce(1)}));
    as<Parked>(ask(k, Park{nonce(1), 1, "one"}));
    clock.advance(24h * 800);
    ASSERT_TRUE(store->purge(1000));
    EXPECT_EQ(as<ParkedFound>(ask(k, GetParked{})).messages.size(), 1U);
    as<Parked>(ask(k, Park{nonce(1), 2, "two"}));
    if (!GetParam().reopenable) return;
    reopen();
    EXPECT_EQ(as<ParkedFound>(ask(k, GetParked{})).messages.size(), 2U);
    as<Parked>(ask(k, Park{nonce(1), 3, "three"}));
    as<Unparked>(ask(k, Unpark{1}));
    reopen();
    EXPECT_EQ(as<ParkedFound>(ask(k, GetParked{})).messages.size(), 2U);
}
