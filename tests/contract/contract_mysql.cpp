// The contract suite on a MariaDB server.
#include "contract/mysql_factory.hpp"

namespace semel::contract {
namespace {

INSTANTIATE_TEST_SUITE_P(Mysql, StoreContract, testing::Values(mysql_factory("Mysql")), test_name);

}  // namespace
}  // namespace semel::contract
