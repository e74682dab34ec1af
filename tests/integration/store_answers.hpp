// What tests of stores on real servers expect of answers.
#pragma once

#include <gtest/gtest.h>

#include "integration/store_work.hpp"

namespace semel::integration {

/// One item per submission, all in flight at once; answers in the items' order.
inline std::vector<std::future<base::Result<core::Decided>>> all_at_once(
    core::Store& store, std::vector<core::Item> items) {
    std::vector<std::future<base::Result<core::Decided>>> out;
    for (core::Item& item : items) {
        auto promise = std::make_shared<std::promise<base::Result<core::Decided>>>();
        out.push_back(promise->get_future());
        std::vector<core::Item> one;
        one.push_back(std::move(item));
        store.submit(std::move(one), [promise](core::BatchResults results) {
            promise->set_value(std::move(results.front()));
        });
    }
    return out;
}

template <class T>
bool is(const base::Result<core::Decided>& result) {
    return result && std::holds_alternative<T>(result->outcome);
}

/// The outcome that the test expects; a failure of the test and an empty one if it is another.
template <class T>
T as(base::Result<core::Decided> result) {
    if (!result) {
        ADD_FAILURE() << result.error().detail;
        return {};
    }
    if (T* found = std::get_if<T>(&result->outcome)) return std::move(*found);
    ADD_FAILURE() << "another outcome, number " << result->outcome.index();
    return {};
}

/// Of 120 messages in three lists, some of a megabyte, a seventh is not its list's owner's to park,
/// and half are taken out again.
inline void expect_many_messages_to_be_parked(core::Store& store) {
    std::vector<core::Item> items;
    const auto message = [](std::uint64_t place) {
        return body_of(place, place % 10 == 3 ? 1'000'000 : 700);
    };
    for (std::uint64_t list = 1; list <= 3; ++list)
        as<core::ParkingOpened>(ask(store, key_of(list), core::OpenParking{nonce_of(list)}));
    for (std::uint64_t place = 0; place < 120; ++place) {
        const std::uint64_t list = 1 + place % 3;
        const core::Nonce owner = nonce_of(place % 7 == 0 ? 99 : list);
        items.push_back({key_of(list), core::Park{owner, place, message(place)}});
    }
    const auto answers = ask(store, std::move(items));
    std::vector<core::Item> out;
    for (std::uint64_t place = 0; place < 120; ++place) {
        EXPECT_EQ(is<core::ParkingLost>(answers[place]), place % 7 == 0) << place;
        EXPECT_EQ(is<core::Parked>(answers[place]), place % 7 != 0) << place;
        if (place % 2 == 0) out.push_back({key_of(1 + place % 3), core::Unpark{place}});
    }
    for (const auto& answer : ask(store, std::move(out))) EXPECT_TRUE(is<core::Unparked>(answer));
    std::size_t left = 0;
    for (std::uint64_t list = 1; list <= 3; ++list) {
        const auto found = as<core::ParkedFound>(ask(store, key_of(list), core::GetParked{}));
        for (const auto& one : found.messages) {
            EXPECT_EQ(1 + one.place % 3, list);
            EXPECT_EQ(one.place % 2, 1U);
            EXPECT_EQ(one.bytes, message(one.place));
            ++left;
        }
    }
    EXPECT_EQ(left, 51U);
}

}  // namespace semel::integration
