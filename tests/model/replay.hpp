// Small worlds replayed on a store: all sequences of a length, each on its own key. A store
// instantiates it in its own file:
//
//     INSTANTIATE_TEST_SUITE_P(Memory, SmallWorldsOnStore, testing::Values(model::Replay{factory,
//     4}), model::replay_name);
#pragma once

#include <gtest/gtest.h>

#include "contract/store_contract.hpp"

namespace semel::model {

struct Replay {
    contract::StoreFactory factory;
    std::size_t length = 3;  ///< Steps of the longest sequences. One more is about 6 times as many.
};

inline std::string replay_name(const testing::TestParamInfo<Replay>& info) {
    return info.param.factory.name;
}
inline void PrintTo(const Replay& replay, std::ostream* out) { *out << replay.factory.name; }

}  // namespace semel::model

class SmallWorldsOnStore : public testing::TestWithParam<semel::model::Replay> {};
