// Records what concurrent clients ask a store and what it answers, one line of JSON per operation.
//
//     history_recorder --store memory|rocksdb|redis|postgres|mysql [--dir D] [--url U] [--stores N]
//                      --out FILE [--milliseconds T] [--seed N] [--clients N] [--keys N] [--lossy]
//                      [--wait --salt S --first-client N]
//     history_recorder --plant FAULT [--store postgres|mysql --url U] --out FILE [...]
//     history_recorder --list-plants [--store postgres|mysql]
//
// --stores: so many are opened on the same server and shared out among the clients, as if they were
// in different processes. Several recorders make one history of several processes: with the same
// --salt (of the keys), different numbers of clients, and one begin: with --wait each says `ready`
// when its stores are open and reads the begin (steady clock, ns) from its input. Exits 0 when the
// history is complete, 2 if the store could not be opened or the file not be written.
#include <charconv>
#include <cstdio>
#include <future>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "linearizability/client.hpp"
#include "linearizability/lossy_store.hpp"
#include "linearizability/planted.hpp"
#include "linearizability/planted_sql.hpp"
#include "stores/memory/memory_store.hpp"
#include "stores/redis/redis_store.hpp"
#include "stores/rocksdb/rocksdb_store.hpp"

using namespace semel;

namespace {

struct Options {
    std::string store = "memory";
    std::string directory;
    std::string url;
    std::string out;
    std::string plant;
    std::size_t stores = 1;
    bool lossy = false;
    bool list_plants = false;
    bool wait = false;
    linearizability::Work work;
};

[[noreturn]] void refuse(const std::string& sentence) {
    std::fprintf(stderr, "history_recorder: %s\n", sentence.c_str());
    std::exit(2);
}

std::uint64_t number(std::string_view option, std::string_view value) {
    std::uint64_t parsed = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), parsed);
    if (error != std::errc{} || end != value.data() + value.size())
        refuse(std::string(option) + " wants a number, not '" + std::string(value) + "'");
    return parsed;
}

bool is_sql(const Options& options) {
    return options.store == "postgres" || options.store == "mysql";
}

Options parse(int argc, char** argv) {
    Options options;
    for (int i = 1; i < argc; ++i) {
        const std::string_view option = argv[i];
        if (option == "--lossy") {
            options.lossy = true;
            continue;
        }
        if (option == "--wait") {
            options.wait = true;
            continue;
        }
        if (option == "--list-plants") {
            options.list_plants = true;
            continue;
        }
        if (i + 1 == argc) refuse(std::string(option) + " is no option, or its value is missing");
        const char* value = argv[++i];
        if (option == "--store")
            options.store = value;
        else if (option == "--dir")
            options.directory = value;
        else if (option == "--url")
            options.url = value;
        else if (option == "--out")
            options.out = value;
        else if (option == "--plant")
            options.plant = value;
        else if (option == "--seed")
            options.work.seed = number(option, value);
        else if (option == "--milliseconds")
            options.work.duration = std::chrono::milliseconds(number(option, value));
        else if (option == "--stores")
            options.stores = number(option, value);
        else if (option == "--salt")
            options.work.salt = value;
        else if (option == "--first-client")
            options.work.first_client = static_cast<unsigned>(number(option, value));
        else if (option == "--clients")
            options.work.clients = static_cast<unsigned>(number(option, value));
        else if (option == "--keys")
            options.work.keys = static_cast<unsigned>(number(option, value));
        else
            refuse("there is no option " + std::string(option));
    }
    const bool shared = options.store == "redis" || is_sql(options);
    if (options.stores == 0 || (options.stores > 1 && !shared))
        refuse("--stores wants a number from 1; several only of a store on a server");
    if (options.out.empty() && !options.list_plants) refuse("--out FILE is missing");
    return options;
}

std::unique_ptr<core::Store> opened(base::Result<std::unique_ptr<core::Store>> store) {
    if (!store) refuse(store.error().detail);
    return std::move(*store);
}

std::unique_ptr<core::Store> open(const Options& options, const std::string& prefix) {
    base::Clock& clock = base::system_clocks();
    if (is_sql(options)) {
        const linearizability::SqlTarget target{options.store, options.url};
        return opened(linearizability::open_sql_store(target, options.plant));
    }
    if (!options.plant.empty()) {
        auto store = linearizability::make_planted_store(options.plant, clock);
        if (!store) refuse("there is no fault '" + options.plant + "'; --list-plants names them");
        return store;
    }
    if (options.store == "memory") return stores::make_memory_store(clock);
    if (options.store == "rocksdb")
        return opened(stores::open_rocksdb_store({.path = options.directory, .sync = false}));
    if (options.store == "redis") {
        stores::RedisOptions redis;
        redis.url = options.url;
        redis.prefix = prefix;
        return opened(stores::open_redis_store(redis));
    }
    refuse("there is no store '" + options.store + "' in this build");
}

}  // namespace

int main(int argc, char** argv) {
    Options options = parse(argc, argv);
    if (options.list_plants) {
        const auto names = is_sql(options) ? linearizability::planted_sql_faults()
                                           : linearizability::planted_faults();
        for (const std::string& name : names) std::printf("%s\n", name.c_str());
        return 0;
    }
    // A history begins with nothing: what a former run left on the server is not its affair.
    const std::string prefix = options.work.salt.empty()
                                   ? "history" + std::to_string(base::system_clocks().wall_us())
                                   : options.work.salt;
    options.work.salt = prefix;
    std::vector<std::unique_ptr<core::Store>> stores;
    for (std::size_t n = 0; n < options.stores; ++n) {
        stores.push_back(open(options, prefix));
        if (options.lossy) {
            stores.back() =
                linearizability::make_lossy_store(std::move(stores.back()), options.work.seed + n);
        }
    }

    linearizability::Board board;
    base::SteadyTime begin = std::chrono::steady_clock::now();
    if (options.wait) {
        std::printf("ready\n");
        std::fflush(stdout);
        long long ns = 0;
        if (std::scanf("%lld", &ns) != 1) refuse("--wait wants the begin in its input");
        begin = base::SteadyTime{std::chrono::nanoseconds{ns}};
    }
    std::vector<std::future<linearizability::Recorded>> clients;
    for (unsigned n = 0; n < options.work.clients; ++n) {
        clients.push_back(std::async(std::launch::async, [&, n] {
            core::Store& store = *stores[n % stores.size()];
            return linearizability::run_client(store, board, options.work,
                                               options.work.first_client + n, begin);
        }));
    }
    std::FILE* file = std::fopen(options.out.c_str(), "w");
    if (file == nullptr) refuse("cannot write " + options.out);
    std::uint64_t operations = 0;
    std::map<std::string, std::uint64_t> errors;
    bool written = true;
    for (auto& client : clients) {
        const linearizability::Recorded recorded = client.get();
        written &= std::fwrite(recorded.lines.data(), 1, recorded.lines.size(), file) ==
                   recorded.lines.size();
        operations += recorded.operations;
        for (const auto& [detail, times] : recorded.errors) errors[detail] += times;
    }
    written &= std::fclose(file) == 0;
    for (auto& store : stores) store->stop();
    if (!written) refuse("cannot write all of " + options.out + "; is the disk full?");
    std::printf("seed %llu: %llu operations recorded\n",
                static_cast<unsigned long long>(options.work.seed),
                static_cast<unsigned long long>(operations));
    for (const auto& [detail, times] : errors)
        std::printf("  %llu times: %s\n", static_cast<unsigned long long>(times), detail.c_str());
    return 0;
}
