// Fault helper: works on an embedded store until it is killed, and prints what was acknowledged.
//
//     rocksdb_torture DIRECTORY sync|async FIRST BATCH
//
// Prints `open`, then `done FIRST LAST` after each batch of BATCH intents whose completion was acknowledged, in order.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "integration/store_work.hpp"
#include "stores/rocksdb/rocksdb_store.hpp"

using namespace semel;

int main(int argc, char** argv) {
    if (argc != 5) {
        std::fprintf(stderr, "rocksdb_torture: DIRECTORY sync|async FIRST BATCH\n");
        return 2;
    }
    auto opened = stores::open_rocksdb_store({.path = argv[1], .sync = std::string(argv[2]) == "sync"});
    if (!opened) {
        std::printf("error %d %s\n", static_cast<int>(opened.error().code), opened.error().detail.c_str());
        return 1;
    }
    std::printf("open\n");
    std::fflush(stdout);
    const std::uint64_t batch = std::strtoull(argv[4], nullptr, 10);
    for (std::uint64_t first = std::strtoull(argv[3], nullptr, 10);; first += batch) {
        std::vector<core::Item> acquires, completes;
        for (std::uint64_t n = first; n < first + batch; ++n) {
            acquires.push_back({integration::key_of(n), integration::acquire_of(n)});
        }
        std::uint64_t n = first;
        for (const auto& result : integration::ask(**opened, std::move(acquires))) {
            if (!result || !std::holds_alternative<core::Granted>(result->outcome)) return 3;
            const core::FencingToken token = std::get<core::Granted>(result->outcome).token;
            completes.push_back({integration::key_of(n), integration::complete_of(n, token, 300)});
            ++n;
        }
        for (const auto& result : integration::ask(**opened, std::move(completes))) {
            if (!result) return 4;
        }
        std::printf("done %llu %llu\n", static_cast<unsigned long long>(first),
                    static_cast<unsigned long long>(first + batch - 1));
        std::fflush(stdout);
    }
}
