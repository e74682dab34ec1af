#include "library/process.hpp"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

#include "cli/consumer_outlook.hpp"
#include "cli/guarantees.hpp"
#include "cli/http_call.hpp"
#include "cli/intent_of.hpp"
#include "cli/readers.hpp"
#include "cli/sockets.hpp"
#include "telemetry/log.hpp"

namespace semel::library {

namespace {

using namespace std::chrono_literals;

/// The disk may hang; every store survives an end without a clean stop.
constexpr auto upkeep_stop_patience = 5s;

base::Error wrong(std::string sentence) {
    return {.code = base::ErrorCode::invalid_argument, .detail = std::move(sentence)};
}

}  // namespace

base::Result<void> check(const config::Config& config, const std::string& file,
                         const cli::Leaves& leaves, const cli::Callbacks& callbacks) {
    if (config.consumers.empty())
        return wrong(file + ": names no consumers, so there is nothing to run");
    for (const config::ConsumerConfig& consumer : config.consumers) {
        if (consumer.handler.kind == config::HandlerKind::ai)
            return wrong(file + ":" + std::to_string(consumer.line) + ": consumer " +
                         consumer.name +
                         ": handler: ai asks the gateway, which `semel serve` runs and this "
                         "program does not: give it a configuration of its own there");
    }
    if (auto checked = cli::check_consumers(config, file, leaves); !checked) return checked;
    return cli::check_callbacks(config, file, callbacks);
}

Process::Process(const config::Config& config, std::string config_file, const cli::Leaves& leaves)
    : config_(config), config_file_(std::move(config_file)), leaves_(leaves) {}

base::Result<void> Process::open(cli::Callbacks callbacks) {
    if (auto done = open_store(); !done) return done;
    if (auto done = open_consumers(std::move(callbacks)); !done) return done;
    return listen();
}

base::Result<void> Process::open_store() {
    auto opened = cli::open_store(config_, leaves_, false);
    if (!opened) return opened.error();
    store_ = std::move(opened->store);
    for (const auto* list : {&opened->wrong, &opened->notices}) {
        for (const std::string& notice : *list) log::warn("store.opened", {{"notice", notice}});
    }
    auto secret = cli::secret_of(config_, *store_);
    if (!secret) return secret.error();
    secret_ = std::move(*secret);
    auto spool =
        engine::Spool::open({});  // nothing is delivered from here: answers are a gateway's
    if (!spool) return spool.error();
    spool_ = std::move(*spool);
    hot_ = std::make_unique<engine::HotRecords>(0);
    vault_ = std::make_unique<engine::Vault>(secret_, hot_.get());
    cli::add_readers(metrics_, {.engine = engine_counters_,
                                .api = api_counters_,
                                .admin = admin_counters_,
                                .hot = *hot_,
                                .spool = *spool_});
    return {};
}

base::Result<void> Process::open_consumers(cli::Callbacks callbacks) {
    std::string store_id;
    if (!config_.store.shared()) {
        auto claimed = cli::store_id_of(*store_);
        if (!claimed) return claimed.error();
        store_id = std::move(*claimed);
    }
    message_keys_ = std::make_unique<base::Hmac>(secret_);
    consumers_ =
        std::make_unique<cli::Consumers>(cli::ConsumersAround{.config = config_,
                                                              .config_file = config_file_,
                                                              .leaves = leaves_,
                                                              .store = *store_,
                                                              .secret = *message_keys_,
                                                              .vault = *vault_,
                                                              .owner = owner_,
                                                              .store_id = std::move(store_id),
                                                              .metrics = metrics_,
                                                              .ask = {},
                                                              .callbacks = std::move(callbacks)});
    return consumers_->prepare();
}

base::Result<void> Process::listen() {
    if (auto free = cli::can_listen(config_.admin); !free) return free;
    engine::EngineOptions options;
    options.owner.id = owner_;
    options.set_lease(config_.engine.lease);
    options.delivers_left_over = false;
    return admin_.open({.config = config_,
                        .secret = secret_,
                        .store = *store_,
                        .hot = *hot_,
                        .spool = *spool_,
                        .vault = *vault_,
                        .engine_counters = engine_counters_,
                        .server_counters = admin_counters_,
                        .metrics = metrics_},
                       options, probes());
}

admin::Probes Process::probes() {
    admin::Probes probes;
    probes.not_alive = [this] { return consumers_->not_alive(); };
    probes.not_ready = [this] {
        std::vector<std::string> reasons;
        if (!ready_) reasons.emplace_back("starting or ending");
        if (const auto health = store_->health(); !health)
            reasons.push_back("store: " + health.error().detail);
        for (std::string& reason : consumers_->not_ready()) reasons.push_back(std::move(reason));
        return reasons;
    };
    probes.metrics = [this] { return metrics_.render(); };
    probes.consumers = consumers_->controls();
    return probes;
}

std::string Process::describe() const {
    config::Address admin = config_.admin;
    admin.port = admin_.port();
    return "admin http://" + cli::authority(admin) + ", " + cli::store_in_words(config_.store) +
           ", " + std::to_string(consumers_->size()) + " consumer(s)";
}

void Process::start() {
    started_ = true;
    admin_.start();
    consumers_->start();
    ready_ = true;
}

void Process::stop() {
    ready_ = false;
    if (consumers_) consumers_->stop();
    if (started_) {
        struct Stopped {
            std::mutex mutex;
            std::condition_variable changed;
            bool yes = false;
        };
        const auto stopped = std::make_shared<Stopped>();
        const auto tell = [stopped] {
            const std::lock_guard lock(stopped->mutex);
            stopped->yes = true;
            stopped->changed.notify_one();
        };
        admin_.stop(tell);
        std::unique_lock lock(stopped->mutex);
        stopped->changed.wait_for(lock, upkeep_stop_patience, [&] { return stopped->yes; });
        lock.unlock();
        admin_.join();
    }
    consumers_.reset();  // its records are on the store
    if (store_) store_->stop();
}

}  // namespace semel::library
