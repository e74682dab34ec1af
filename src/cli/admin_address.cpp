#include "cli/admin_address.hpp"

#include <utility>

#include "cli/intent_of.hpp"

namespace semel::cli {

namespace {

/// Kept small: the admin address serves operators and scrapers.
constexpr std::size_t admin_connections_max = 256;

}  // namespace

engine::SweeperOptions sweeping(const config::EngineConfig& engine, telemetry::Metrics& metrics) {
    const auto third = engine.lease / 3;
    engine::SweeperOptions options{.every = third, .takeover_grace = third};
    options.purge_every = engine.cleanup.every.value_or(third);
    options.purge_step = engine.cleanup.step;
    options.purge_at = engine.cleanup.at;
    options.purge_window = engine.cleanup.window;
    options.on_purge_step = [&metrics](auto took) { metrics.purge_seconds.observe(took); };
    return options;
}

base::Result<void> AdminAddress::open(const AdminAround& around, engine::EngineOptions options,
                                      admin::Probes probes) {
    const config::Config& config = around.config;
    runtime::Loop& loop = thread_.loop;
    engine_ = std::make_unique<engine::Engine>(loop, around.store, std::move(options), around.hot,
                                               around.spool, around.engine_counters, &around.vault);
    sweeper_ = std::make_unique<engine::Sweeper>(*engine_, sweeping(config.engine, around.metrics));
    admin::Tenants tenants{.tag_of = tenant_of(config, around.secret), .vault = &around.vault};
    admin_ = std::make_unique<admin::Admin>(around.store, intent_of(config, around.secret),
                                            std::move(probes), config.admin.loopback(),
                                            std::move(tenants));
    auto server = http::Server::listen(loop, config.admin.host, config.admin.port, *admin_,
                                       {.connections_max = admin_connections_max},
                                       around.server_counters, false);
    if (!server) return server.error();
    server_ = std::move(*server);
    return {};
}

void AdminAddress::start() {
    thread_.loop.post([this] { sweeper_->start(); });
    thread_.start();
}

void AdminAddress::stop(std::function<void()> done) {
    thread_.loop.post([this, done = std::move(done)]() mutable {
        server_->close();
        auto end = [](AdminAddress* self, std::function<void()> then) -> runtime::Task<> {
            co_await self->sweeper_->stop();
            co_await self->engine_->stop();
            then();
        };
        thread_.loop.spawn(end(this, std::move(done)));
    });
}

}  // namespace semel::cli
