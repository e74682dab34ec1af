// The contract suite on the embedded store, with both durabilities.
#include "contract/rocksdb_factory.hpp"

namespace semel::contract {
namespace {

INSTANTIATE_TEST_SUITE_P(RocksDb, StoreContract,
                         testing::Values(rocksdb_factory("RocksDbSync", true), rocksdb_factory("RocksDbAsync", false),
                                         rocksdb_factory("RocksDbCold", false, 0)),
                         test_name);

}  // namespace
}  // namespace semel::contract
