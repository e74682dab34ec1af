// The Redis store as a StoreFactory: a prefix of its own per place, on servers that live as long as
// the test program.
#pragma once

#include <stdexcept>

#include "contract/store_contract.hpp"
#include "stores/redis/redis_store.hpp"
#include "support/redis_server.hpp"

namespace semel::contract {

/// Tells scripts the test's time; TTLs run on the server's own clock, far behind it.
class RedisPlace final : public StorePlace {
  public:
    RedisPlace(std::string url, bool cluster) : url_(std::move(url)), cluster_(cluster) {
        static int places = 0;
        prefix_ = "place" + std::to_string(++places);
    }
    std::unique_ptr<core::Store> open(base::Clock& clock) override {
        stores::RedisOptions options{.url = url_, .cluster = cluster_, .prefix = prefix_};
        options.time = [&clock] {
            const auto steady = std::chrono::duration_cast<std::chrono::microseconds>(
                clock.steady().time_since_epoch());
            return core::StoreTime{support::ManualClock::start_wall_us} + steady;
        };
        auto store = stores::open_redis_store(options);
        if (!store) throw std::runtime_error(store.error().detail);
        return std::move(*store);
    }

  private:
    std::string url_;
    bool cluster_;
    std::string prefix_;
};

inline support::RedisServer& contract_server() {
    static support::RedisServer server;
    return server;
}

inline StoreFactory redis_factory(const char* name) {
    return {name, [] { return std::make_unique<RedisPlace>(contract_server().url(), false); }, true,
            false};
}

}  // namespace semel::contract
