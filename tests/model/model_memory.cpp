// Small worlds on the memory store.
#include "model/replay.hpp"
#include "stores/memory/memory_store.hpp"

namespace semel::model {
namespace {

class MemoryPlace final : public contract::StorePlace {
  public:
    std::unique_ptr<core::Store> open(base::Clock& clock) override {
        return stores::make_memory_store(clock);
    }
};

INSTANTIATE_TEST_SUITE_P(
    Memory, SmallWorldsOnStore,
    testing::Values(Replay{{"Memory", [] { return std::make_unique<MemoryPlace>(); }, false, false},
                           5}),
    replay_name);

}  // namespace
}  // namespace semel::model
