// Small worlds on a MariaDB server: the statements against core::decide.
#include "contract/mysql_factory.hpp"
#include "model/replay.hpp"

namespace semel::model {
namespace {

INSTANTIATE_TEST_SUITE_P(Mysql, SmallWorldsOnStore,
                         testing::Values(Replay{contract::mysql_factory("Mysql"), 5}), replay_name);

}  // namespace
}  // namespace semel::model
