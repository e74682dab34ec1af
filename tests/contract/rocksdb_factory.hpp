// The embedded store as a StoreFactory: a directory of its own per place.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <stdexcept>

#include "contract/store_contract.hpp"
#include "stores/rocksdb/rocksdb_store.hpp"

namespace semel::contract {

class RocksDbPlace final : public StorePlace {
  public:
    RocksDbPlace(bool sync, std::size_t hot_bytes) : sync_(sync), hot_bytes_(hot_bytes) {
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
        auto store = stores::open_rocksdb_store(
            {.path = directory_.string(), .sync = sync_, .hot_bytes = hot_bytes_, .clock = &clock});
        if (!store) throw std::runtime_error(store.error().detail);
        return std::move(*store);
    }

  private:
    std::filesystem::path directory_;
    bool sync_;
    std::size_t hot_bytes_;
};

/// hot_bytes 0: every decided record is read back from the disk.
inline StoreFactory rocksdb_factory(const char* name, bool sync, std::size_t hot_bytes = 1U << 20) {
    return {name, [=] { return std::make_unique<RocksDbPlace>(sync, hot_bytes); }, true, true};
}

}  // namespace semel::contract
