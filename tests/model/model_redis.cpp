// Small worlds on a Redis server: its script against core::decide.
#include "contract/redis_factory.hpp"
#include "model/replay.hpp"

namespace semel::model {
namespace {

INSTANTIATE_TEST_SUITE_P(Redis, SmallWorldsOnStore,
                         testing::Values(Replay{contract::redis_factory("Redis"), 5}), replay_name);

}  // namespace
}  // namespace semel::model
