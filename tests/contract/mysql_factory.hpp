// The MySQL store as a StoreFactory: a database of its own per place, on a MariaDB server that
// lives as long as the test program.
#pragma once

#include <stdexcept>

#include "contract/store_contract.hpp"
#include "stores/mysql/mysql_store.hpp"
#include "support/mysql_server.hpp"

namespace semel::contract {

/// Tells the statements the test's time.
class MysqlPlace final : public StorePlace {
  public:
    explicit MysqlPlace(support::MysqlServer& server)
        : server_(server), database_(server.make_database()) {}
    ~MysqlPlace() override { server_.query("DROP DATABASE " + database_, ""); }

    std::unique_ptr<core::Store> open(base::Clock& clock) override {
        stores::MysqlOptions options{.url = server_.url(database_), .time = {}};
        options.time = [&clock] {
            const auto steady = std::chrono::duration_cast<std::chrono::microseconds>(
                clock.steady().time_since_epoch());
            return core::StoreTime{support::ManualClock::start_wall_us} + steady;
        };
        auto store = stores::open_mysql_store(options);
        if (!store) throw std::runtime_error(store.error().detail);
        return std::move(*store);
    }

  private:
    support::MysqlServer& server_;
    std::string database_;
};

inline support::MysqlServer& mysql_contract_server() {
    static support::MysqlServer server;
    return server;
}

inline StoreFactory mysql_factory(const char* name) {
    return {name, [] { return std::make_unique<MysqlPlace>(mysql_contract_server()); }, true,
            false};
}

}  // namespace semel::contract
