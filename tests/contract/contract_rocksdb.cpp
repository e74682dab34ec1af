// The contract suite on the embedded store, with both durabilities.
#include <cstdlib>
#include <filesystem>
#include <stdexcept>

#include "contract/store_contract.hpp"
#include "stores/rocksdb/rocksdb_store.hpp"

namespace semel::contract {
namespace {

class RocksDbPlace final : public StorePlace {
  public:
    explicit RocksDbPlace(bool sync) : sync_(sync) {
        std::string name = (std::filesystem::temp_directory_path() / "semel-contract-XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make a directory like " + name);
        directory_ = name;
    }
    ~RocksDbPlace() override {
        std::error_code ignored;
        std::filesystem::remove_all(directory_, ignored);
    }
    RocksDbPlace(const RocksDbPlace&) = delete;
    RocksDbPlace& operator=(const RocksDbPlace&) = delete;

    std::unique_ptr<core::Store> open(base::Clock& clock) override {
        auto store = stores::open_rocksdb_store({.path = directory_.string(), .sync = sync_, .clock = &clock});
        if (!store) throw std::runtime_error(store.error().detail);
        return std::move(*store);
    }

  private:
    std::filesystem::path directory_;
    bool sync_;
};

StoreFactory factory(const char* name, bool sync) {
    return {name, [sync] { return std::make_unique<RocksDbPlace>(sync); }, true, true};
}

INSTANTIATE_TEST_SUITE_P(RocksDb, StoreContract,
                         testing::Values(factory("RocksDbSync", true), factory("RocksDbAsync", false)), test_name);

}  // namespace
}  // namespace semel::contract
