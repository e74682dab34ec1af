// Small worlds on what both SQL stores have in common, over a database in memory.
#include "contract/sql_fake_factory.hpp"
#include "model/replay.hpp"

namespace semel::model {
namespace {

INSTANTIATE_TEST_SUITE_P(SqlFake, SmallWorldsOnStore,
                         testing::Values(Replay{contract::sql_fake_factory("SqlFake", 2, 64), 5}),
                         replay_name);

}  // namespace
}  // namespace semel::model
