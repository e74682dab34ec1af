// Drives the Redis store as engines do, and prints one JSON object.
//
//     bench_redis URL MODE [--batch N] [--ahead M] [--threads T] [--operations K]
//     bench_redis script
//
// `acquire`: new keys. `pairs`: acquire, then complete with 1 KiB; counted as one. `get`, `replay`: Get, and Acquire with the
// same request, of records that are completed. Each of T threads keeps M batches of N items on the way, until K items are done
// together. `script`: the batch script with one acquire's arguments in front of it, for redis-benchmark, which sends no binary ones.
//
// Beside the rate it prints what INFO says of the measured stretch: the server's processor time, and the commands it executed.
#include <hiredis/hiredis.h>

#include <atomic>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fail.hpp"
#include "intents.hpp"
#include "core/store.hpp"
#include "stores/redis/client.hpp"
#include "stores/redis/operations.hpp"
#include "stores/redis/redis_store.hpp"
#include "stores/redis/scripts.hpp"

namespace {

using namespace semel;
using namespace semel::core;
using namespace bench;
using Steady = std::chrono::steady_clock;

constexpr std::size_t completed_records = 20'000;

struct Settings {
    std::string url, mode;
    std::size_t batch = 1, ahead = 1, threads = 1;
    std::int64_t operations = 10'000;
};

BatchResults ask(Store& store, std::vector<Item> items) {
    std::promise<BatchResults> promise;
    auto future = promise.get_future();
    store.submit(std::move(items), [&](BatchResults results) { promise.set_value(std::move(results)); });
    return future.get();
}

// ---------------------------------------------------------------- what the server says

/// INFO, on a connection of its own.
class Server {
  public:
    explicit Server(const std::string& url) {
        auto target = stores::redis::parse_url(url);
        if (!target) fail(target.error().detail);
        context_.reset(target->path.empty() ? redisConnect(target->addresses.front().host.c_str(), target->addresses.front().port)
                                            : redisConnectUnix(target->path.c_str()));
        if (context_ == nullptr || context_->err != 0) fail("no connection to " + url);
    }

    struct Counted {
        double cpu_us = 0;
        std::map<std::string, std::int64_t> commands;
    };
    Counted counted() {
        Counted out;
        for (const auto& [name, value] : info("cpu")) {
            if (name == "used_cpu_user" || name == "used_cpu_sys") out.cpu_us += std::atof(value.c_str()) * 1e6;
        }
        for (const auto& [name, value] : info("commandstats"))
            out.commands[name.substr(name.find('_') + 1)] = std::atoll(value.c_str() + value.find('=') + 1);
        return out;
    }

  private:
    std::map<std::string, std::string> info(const char* section) {
        auto* const reply = static_cast<redisReply*>(redisCommand(context_.get(), "INFO %s", section));
        if (reply == nullptr || reply->type != REDIS_REPLY_STRING) fail("INFO was not answered");
        const std::string text(reply->str, reply->len);
        freeReplyObject(reply);
        std::map<std::string, std::string> out;
        for (std::size_t at = 0; at < text.size();) {
            const std::size_t end = text.find("\r\n", at);
            const std::string line = text.substr(at, end - at);
            if (const auto colon = line.find(':'); colon != std::string::npos) out[line.substr(0, colon)] = line.substr(colon + 1);
            at = end == std::string::npos ? text.size() : end + 2;
        }
        return out;
    }
    struct Free {
        void operator()(redisContext* context) const { redisFree(context); }
    };
    std::unique_ptr<redisContext, Free> context_;
};

// ---------------------------------------------------------------- callers

/// Gives out numbers of intents until enough are given.
class Work {
  public:
    Work(std::uint64_t first, std::int64_t operations) : next_(first), left_(operations) {}
    /// The first of `count` numbers; nothing is left: false.
    bool take(std::size_t count, std::uint64_t& first) {
        if (left_.fetch_sub(static_cast<std::int64_t>(count)) <= 0) return false;
        first = next_.fetch_add(count);
        return true;
    }

  private:
    std::atomic<std::uint64_t> next_;
    std::atomic<std::int64_t> left_;
};

/// One thread with some batches on the way. What is answered is looked at, and the next batch sent.
class Caller {
  public:
    Caller(Store& store, const Settings& settings, Work& work) : store_(store), settings_(settings), work_(work) {}

    /// Items done (pairs: completed).
    std::uint64_t run() {
        for (std::size_t i = 0; i < settings_.ahead; ++i) begin();
        std::uint64_t done = 0;
        while (outstanding_ > 0) done += turn();
        return done;
    }

  private:
    struct Ready {
        BatchResults results;
        std::uint64_t first = 0;
        bool completes = false;
    };

    void begin() {
        std::uint64_t first = 0;
        if (!work_.take(settings_.batch, first)) return;
        std::vector<Item> items;
        items.reserve(settings_.batch);
        for (std::size_t i = 0; i < settings_.batch; ++i) {
            const std::uint64_t n = numbered(first, i);
            if (settings_.mode == "get") {
                items.push_back({key_of(n), Get{}});
            } else {
                items.push_back({key_of(n), acquire_of(n)});
            }
        }
        send(std::move(items), first, false);
    }

    /// Look-ups go round the records that are there.
    [[nodiscard]] std::uint64_t numbered(std::uint64_t first, std::size_t i) const {
        const std::uint64_t n = first + i;
        return settings_.mode == "get" || settings_.mode == "replay" ? n % completed_records : n;
    }

    void send(std::vector<Item> items, std::uint64_t first, bool completes) {
        ++outstanding_;
        store_.submit(std::move(items), [this, first, completes](BatchResults results) {
            bool wake = false;
            {
                const std::lock_guard lock(mutex_);
                ready_.push_back({std::move(results), first, completes});
                wake = std::exchange(waiting_, false);
            }
            if (wake) wake_.notify_one();
        });
    }

    std::uint64_t turn() {
        {
            std::unique_lock lock(mutex_);
            waiting_ = true;
            wake_.wait(lock, [&] { return !ready_.empty(); });
            waiting_ = false;
            taken_.swap(ready_);
        }
        std::uint64_t done = 0;
        for (Ready& ready : taken_) {
            --outstanding_;
            std::vector<Item> items;
            for (std::size_t i = 0; i < ready.results.size(); ++i) {
                auto& result = ready.results[i];
                if (!result) fail(result.error().detail);
                const std::uint64_t n = numbered(ready.first, i);
                if (!expected(result->outcome, ready.completes)) fail("an outcome that " + settings_.mode + " must not have");
                if (settings_.mode == "pairs" && !ready.completes)
                    items.push_back({key_of(n), complete_of(std::get<Granted>(result->outcome).token, nonce_of(n))});
            }
            if (items.empty()) {
                done += ready.results.size();
                begin();
            } else {
                send(std::move(items), ready.first, true);
            }
        }
        taken_.clear();
        return done;
    }

    [[nodiscard]] bool expected(const StoreOutcome& outcome, bool completes) const {
        if (completes) return std::holds_alternative<core::Applied>(outcome);
        if (const auto* found = std::get_if<Found>(&outcome)) return settings_.mode == "get" && found->record != nullptr;
        if (std::holds_alternative<Replay>(outcome)) return settings_.mode == "replay";
        return std::holds_alternative<Granted>(outcome) && (settings_.mode == "acquire" || settings_.mode == "pairs");
    }

    Store& store_;
    const Settings& settings_;
    Work& work_;
    std::size_t outstanding_ = 0;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<Ready> ready_;
    std::vector<Ready> taken_;
    bool waiting_ = false;
};

/// Records 0 to completed_records, unless they are there; the store knows them to be completed afterwards.
void fill(Store& store) {
    constexpr std::size_t step = 500;
    for (std::uint64_t first = 0; first < completed_records; first += step) {
        std::vector<Item> acquires, completes;
        for (std::uint64_t n = first; n < first + step; ++n) acquires.push_back({key_of(n), acquire_of(n)});
        const BatchResults results = ask(store, std::move(acquires));
        for (std::size_t i = 0; i < results.size(); ++i) {
            if (!results[i]) fail(results[i].error().detail);
            const std::uint64_t n = first + i;
            if (const auto* granted = std::get_if<Granted>(&results[i]->outcome))
                completes.push_back({key_of(n), complete_of(granted->token, nonce_of(n))});
        }
        if (completes.empty()) continue;
        for (const auto& result : ask(store, std::move(completes))) {
            if (!result) fail(result.error().detail);
        }
    }
}

void measure(const Settings& settings) {
    auto opened = stores::open_redis_store({.url = settings.url});
    if (!opened) fail(opened.error().detail);
    Store& store = **opened;
    if (settings.mode == "get" || settings.mode == "replay") fill(store);
    Server server(settings.url);
    // New keys of every run: nobody had those of this microsecond.
    Work work(static_cast<std::uint64_t>(Steady::now().time_since_epoch().count()), settings.operations);
    const Server::Counted before = server.counted();
    const auto start = Steady::now();
    std::vector<std::future<std::uint64_t>> callers;
    for (std::size_t i = 0; i < settings.threads; ++i)
        callers.push_back(std::async(std::launch::async, [&] { return Caller(store, settings, work).run(); }));
    std::uint64_t done = 0;
    for (auto& caller : callers) done += caller.get();
    const double seconds = std::chrono::duration<double>(Steady::now() - start).count();
    const Server::Counted after = server.counted();
    std::printf("{\"operations\":%llu,\"per_second\":%.1f,\"server_us\":%.3f,\"commands\":{", static_cast<unsigned long long>(done),
                static_cast<double>(done) / seconds, (after.cpu_us - before.cpu_us) / static_cast<double>(done));
    const char* comma = "";
    for (const auto& [name, calls] : after.commands) {
        const auto earlier = before.commands.find(name);
        const std::int64_t more = calls - (earlier == before.commands.end() ? 0 : earlier->second);
        if (more == 0 || name == "info") continue;
        std::printf("%s\"%s\":%lld", comma, name.c_str(), static_cast<long long>(more));
        comma = ",";
    }
    std::printf("}}\n");
    store.stop();
}

// ---------------------------------------------------------------- the script for redis-benchmark

/// The arguments of a command, which keeps them encoded.
std::vector<std::string> arguments_in(std::string_view wire) {
    std::vector<std::string> out;
    while (!wire.empty()) {
        std::size_t size = 0;
        const char* const digits_end = std::from_chars(wire.data() + 1, wire.data() + wire.size(), size).ptr;
        const auto head = static_cast<std::size_t>(digits_end - wire.data()) + 2;
        out.emplace_back(wire.substr(head, size));
        wire.remove_prefix(head + size + 2);
    }
    return out;
}

std::string lua_literal(std::string_view bytes) {
    std::string out = "'";
    for (const char c : bytes) {
        char text[8];
        std::snprintf(text, sizeof text, "\\%03u", static_cast<unsigned>(static_cast<unsigned char>(c)));
        out += text;
    }
    return out + "'";
}

void print_script() {
    const stores::redis::Names names("semel");
    stores::redis::ScriptBatch batch(names, 0);
    batch.add({key_of(1), acquire_of(1)}, nullptr);
    const std::vector<std::string> arguments = arguments_in(batch.take({}, false).wire);
    std::printf("local ARGV = {");
    // The number of keys, the keys; the arguments follow.
    for (std::size_t i = 1 + static_cast<std::size_t>(std::atoi(arguments[0].c_str())); i < arguments.size(); ++i)
        std::printf("%s, ", lua_literal(arguments[i]).c_str());
    std::printf("}\n");
    const std::string_view source = stores::redis::scripts().batch.source;
    std::fwrite(source.data(), 1, source.size(), stdout);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc == 2 && std::string_view(argv[1]) == "script") {
        print_script();
        return 0;
    }
    if (argc < 3 || argc % 2 == 0) fail("wants a URL, a mode and options: see the top of bench_redis.cpp");
    Settings settings{.url = argv[1], .mode = argv[2]};
    for (int i = 3; i + 1 < argc; i += 2) {
        const std::string_view option = argv[i];
        const std::int64_t value = std::atoll(argv[i + 1]);
        if (value <= 0) fail(std::string(option) + " must be a positive number");
        if (option == "--batch") {
            settings.batch = static_cast<std::size_t>(value);
        } else if (option == "--ahead") {
            settings.ahead = static_cast<std::size_t>(value);
        } else if (option == "--threads") {
            settings.threads = static_cast<std::size_t>(value);
        } else if (option == "--operations") {
            settings.operations = value;
        } else {
            fail("unknown option " + std::string(option));
        }
    }
    if (settings.mode != "acquire" && settings.mode != "pairs" && settings.mode != "get" && settings.mode != "replay")
        fail("unknown mode " + settings.mode);
    measure(settings);
}
