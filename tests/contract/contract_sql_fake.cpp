// The contract suite on what both SQL stores have in common, over a database in memory.
#include "contract/sql_fake_factory.hpp"

namespace semel::contract {
namespace {

INSTANTIATE_TEST_SUITE_P(Sql, StoreContract,
                         testing::Values(sql_fake_factory("SqlFake", 4, 64),
                                         sql_fake_factory("SqlFakeSingly", 1, 1)),
                         test_name);

}  // namespace
}  // namespace semel::contract
