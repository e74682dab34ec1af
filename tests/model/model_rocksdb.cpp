// The small worlds replayed on the embedded store.
#include "contract/rocksdb_factory.hpp"
#include "model/replay.hpp"

namespace semel::model {
namespace {

INSTANTIATE_TEST_SUITE_P(
    RocksDb, SmallWorldsOnStore,
    testing::Values(Replay{contract::rocksdb_factory("RocksDbAsync", false), 4},
                    Replay{contract::rocksdb_factory("RocksDbCold", false, 0), 4}),
    replay_name);

}  // namespace
}  // namespace semel::model
