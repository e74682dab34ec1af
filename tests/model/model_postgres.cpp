// Small worlds on a PostgreSQL server: its two statements that decide, and what reads and writes
// back, against core::decide.
#include "contract/postgres_factory.hpp"
#include "model/replay.hpp"

namespace semel::model {
namespace {

INSTANTIATE_TEST_SUITE_P(Postgres, SmallWorldsOnStore,
                         testing::Values(Replay{contract::postgres_factory("Postgres"), 5}),
                         replay_name);

}  // namespace
}  // namespace semel::model
