// The contract suite on the memory store.
#include "contract/store_contract.hpp"
#include "stores/memory/memory_store.hpp"

namespace semel::contract {
namespace {

class MemoryPlace final : public StorePlace {
  public:
    std::unique_ptr<core::Store> open(base::Clock& clock) override {
        return stores::make_memory_store(clock);
    }
};

INSTANTIATE_TEST_SUITE_P(Memory, StoreContract,
                         testing::Values(StoreFactory{
                             "Memory", [] { return std::make_unique<MemoryPlace>(); }, false,
                             false}),
                         test_name);

}  // namespace
}  // namespace semel::contract
