// The SQL stores' common part as a StoreFactory: a database in memory per place.
#pragma once

#include "contract/store_contract.hpp"
#include "sql/sql_store.hpp"
#include "support/sql_database.hpp"

namespace semel::contract {

class SqlFakePlace final : public StorePlace {
  public:
    SqlFakePlace(unsigned connections, std::size_t batch_max)
        : connections_(connections), batch_max_(batch_max) {}

    std::unique_ptr<core::Store> open(base::Clock& clock) override {
        sql::SqlStoreOptions options{.name = "sql",
                                     .connections = connections_,
                                     .batch_max = batch_max_,
                                     .time = {},
                                     .durability = {.survives_process_crash = true, .summary = {}}};
        options.time = [&clock] {
            const auto steady = std::chrono::duration_cast<std::chrono::microseconds>(
                clock.steady().time_since_epoch());
            return core::StoreTime{support::ManualClock::start_wall_us} + steady;
        };
        return sql::make_sql_store(std::move(options), database_.connect(), nullptr);
    }

  private:
    const unsigned connections_;
    const std::size_t batch_max_;
    support::SqlDatabase database_;
};

inline StoreFactory sql_fake_factory(const char* name, unsigned connections,
                                     std::size_t batch_max) {
    return {name, [=] { return std::make_unique<SqlFakePlace>(connections, batch_max); }, true,
            false};
}

}  // namespace semel::contract
