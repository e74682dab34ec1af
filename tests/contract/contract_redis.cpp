// The contract suite on a Redis server.
#include "contract/redis_factory.hpp"

namespace semel::contract {
namespace {

INSTANTIATE_TEST_SUITE_P(Redis, StoreContract, testing::Values(redis_factory("Redis")), test_name);

}  // namespace
}  // namespace semel::contract
