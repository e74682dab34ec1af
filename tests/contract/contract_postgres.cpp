// The contract suite on a PostgreSQL server, directly and through a pooler.
#include "contract/postgres_factory.hpp"

namespace semel::contract {
namespace {

INSTANTIATE_TEST_SUITE_P(Postgres, StoreContract, testing::Values(postgres_factory("Postgres")),
                         test_name);
INSTANTIATE_TEST_SUITE_P(PgBouncer, StoreContract,
                         testing::Values(pooled_postgres_factory("PgBouncer")), test_name);

}  // namespace
}  // namespace semel::contract
