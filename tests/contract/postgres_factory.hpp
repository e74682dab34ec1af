// The PostgreSQL store as a StoreFactory: a schema of its own per place, on a server that lives as
// long as the test program.
#pragma once

#include <stdexcept>

#include "contract/store_contract.hpp"
#include "stores/postgres/postgres_store.hpp"
#include "support/postgres_server.hpp"

namespace semel::contract {

/// Tells statements the test's time.
class PostgresPlace final : public StorePlace {
  public:
    /// `cleaner`: drops the schema in the end.
    PostgresPlace(std::string url, const support::PostgresServer& cleaner)
        : url_(std::move(url)), cleaner_(cleaner) {
        static int places = 0;
        schema_ = "place" + std::to_string(++places);
    }
    ~PostgresPlace() override { cleaner_.query("DROP SCHEMA " + schema_ + " CASCADE"); }
    std::unique_ptr<core::Store> open(base::Clock& clock) override {
        stores::PostgresOptions options{.url = url_, .schema = schema_};
        options.time = [&clock] {
            const auto steady = std::chrono::duration_cast<std::chrono::microseconds>(
                clock.steady().time_since_epoch());
            return core::StoreTime{support::ManualClock::start_wall_us} + steady;
        };
        auto store = stores::open_postgres_store(options);
        if (!store) throw std::runtime_error(store.error().detail);
        return std::move(*store);
    }

  private:
    std::string url_;
    const support::PostgresServer& cleaner_;
    std::string schema_;
};

inline const support::PostgresServer& contract_server() {
    // No power cut in these tests.
    static const support::PostgresServer server({.settings = {"fsync = off"}});
    return server;
}

inline StoreFactory postgres_factory(const char* name) {
    return {
        name,
        [] { return std::make_unique<PostgresPlace>(contract_server().url(), contract_server()); },
        true, false};
}

/// The same through a pooler that hands connections out per transaction.
inline StoreFactory pooled_postgres_factory(const char* name) {
    return {name,
            [] {
                static const support::PgBouncer pooler(contract_server());
                return std::make_unique<PostgresPlace>(pooler.url(), contract_server());
            },
            true, false};
}

}  // namespace semel::contract
