// The reference for pairs: the usual hash and Lua scripts, driven as fast as a plain hiredis client can.
//
//     bench_hash_client SOCKET|HOST:PORT SHA_OF_ACQUIRE SHA_OF_COMPLETE THREADS WIDTH PAIRS
//
// Each thread has a connection and sends WIDTH acquires of new keys in one write, then WIDTH completes with 1 KiB. Together they
// make PAIRS pairs. Prints {"operations":pairs,"per_second":pairs a second}.
#include <hiredis/hiredis.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fail.hpp"

namespace {

using bench::fail;
using Steady = std::chrono::steady_clock;
constexpr std::size_t answer_bytes = 1024;

struct Settings {
    std::string server, acquire, complete;
    std::size_t threads = 1, width = 1;
    std::int64_t pairs = 0;
};

struct Free {
    void operator()(redisContext* context) const { redisFree(context); }
    void operator()(void* reply) const { freeReplyObject(reply); }
};
using Connection = std::unique_ptr<redisContext, Free>;

Connection connect(const std::string& server) {
    const std::size_t colon = server.rfind(':');
    Connection made(server.starts_with('/')
                        ? redisConnectUnix(server.c_str())
                        : redisConnect(server.substr(0, colon).c_str(), std::atoi(server.c_str() + colon + 1)));
    if (made == nullptr || made->err != 0) fail("no connection to " + server);
    return made;
}

void run(const Settings& settings, std::size_t thread, std::atomic<std::int64_t>& left) {
    const Connection connection = connect(settings.server);
    redisContext* const c = connection.get();
    const std::string answer(answer_bytes, 'x');
    const std::string run_name = std::to_string(Steady::now().time_since_epoch().count());
    std::uint64_t next = 0;
    std::vector<std::string> keys(settings.width);
    const auto take = [&](bool acquire) {
        void* raw = nullptr;
        if (redisGetReply(c, &raw) != REDIS_OK) fail(c->errstr);
        const std::unique_ptr<void, Free> owned(raw);
        const auto* reply = static_cast<const redisReply*>(raw);
        const bool good = acquire ? reply->type == REDIS_REPLY_ARRAY && reply->element[0]->integer == 0
                                  : reply->type == REDIS_REPLY_INTEGER && reply->integer == 1;
        if (!good) fail(reply->type == REDIS_REPLY_ERROR ? reply->str : "an answer that is none of a new key");
    };
    while (left.fetch_sub(static_cast<std::int64_t>(settings.width)) > 0) {
        for (std::string& key : keys) {
            key = "i:" + run_name + "-" + std::to_string(thread) + "-" + std::to_string(next++);
            redisAppendCommand(c, "EVALSHA %s 1 %s owner-1 1000000 30000 600000", settings.acquire.c_str(), key.c_str());
        }
        for (std::size_t i = 0; i < keys.size(); ++i) take(true);
        for (const std::string& key : keys)
            redisAppendCommand(c, "EVALSHA %s 1 %s 1 %b 600000", settings.complete.c_str(), key.c_str(), answer.data(),
                               answer.size());
        for (std::size_t i = 0; i < keys.size(); ++i) take(false);
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 7) fail("wants six arguments: see the top of hash_client.cpp");
    const Settings settings{.server = argv[1],
                            .acquire = argv[2],
                            .complete = argv[3],
                            .threads = static_cast<std::size_t>(std::atoi(argv[4])),
                            .width = static_cast<std::size_t>(std::atoi(argv[5])),
                            .pairs = std::atoll(argv[6])};
    if (settings.threads == 0 || settings.width == 0 || settings.pairs <= 0) fail("the last three arguments must be positive");
    std::atomic<std::int64_t> left{settings.pairs};
    const auto start = Steady::now();
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < settings.threads; ++i) threads.emplace_back(run, std::cref(settings), i, std::ref(left));
    for (std::thread& thread : threads) thread.join();
    const double seconds = std::chrono::duration<double>(Steady::now() - start).count();
    const auto per_round = static_cast<std::int64_t>(settings.width);
    const std::int64_t done = (settings.pairs + per_round - 1) / per_round * per_round;
    std::printf("{\"operations\":%lld,\"per_second\":%.1f}\n", static_cast<long long>(done), static_cast<double>(done) / seconds);
}
