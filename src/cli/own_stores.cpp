#include "cli/own_stores.hpp"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "cli/admin_address.hpp"
#include "cli/guarantees.hpp"
#include "cli/intent_of.hpp"
#include "cli/loop_thread.hpp"
#include "engine/engine.hpp"
#include "engine/sweeper.hpp"
#include "engine/vault.hpp"
#include "telemetry/log.hpp"

namespace semel::cli {

namespace {

using namespace std::chrono_literals;

/// The disk or the server may hang; every store survives an end without a clean stop.
constexpr auto upkeep_stop_patience = 5s;

}  // namespace

std::vector<config::Config> configs_of_own_stores(const config::Config& config) {
    std::vector<config::Config> out;
    for (const config::ConsumerConfig& consumer : config.consumers) {
        if (!consumer.store || consumer.observe || *consumer.store == config.store) continue;
        const bool known = std::any_of(
            out.begin(), out.end(),
            [&consumer](const config::Config& one) { return one.store == *consumer.store; });
        if (known) continue;
        out.push_back(config);
        out.back().store = *consumer.store;
    }
    return out;
}

/// One store, and its sweeper on a loop of its own.
class OwnStores::One {
  public:
    explicit One(config::Config config) : config_(std::move(config)) {}
    ~One() { stop(); }
    One(const One&) = delete;
    One& operator=(const One&) = delete;

    base::Result<void> open(const Leaves& leaves, const std::string& owner,
                            telemetry::Metrics& metrics, bool accept_clock);
    void stop();
    [[nodiscard]] const config::StoreConfig& config() const { return config_.store; }
    [[nodiscard]] const RecordStore& records() const { return records_; }
    [[nodiscard]] base::Result<void> health() const { return store_->health(); }

  private:
    const config::Config config_;
    std::unique_ptr<core::Store> store_;
    std::string secret_;
    std::unique_ptr<base::Hmac> keys_;
    RecordStore records_;
    LoopThread thread_;
    engine::EngineCounters counters_;
    engine::HotRecords hot_{0};
    std::unique_ptr<engine::Spool> spool_;  ///< Empty: answers are not recorded here.
    std::unique_ptr<engine::Vault> vault_;
    std::unique_ptr<engine::Engine> engine_;  ///< Of the sweeper.
    std::unique_ptr<engine::Sweeper> sweeper_;
    bool sweeps_ = false;
};

base::Result<void> OwnStores::One::open(const Leaves& leaves, const std::string& owner,
                                        telemetry::Metrics& metrics, bool accept_clock) {
    const std::string name = store_in_words(config_.store);
    auto opened = open_store(config_, leaves, accept_clock);
    if (!opened) return opened.error();
    store_ = std::move(opened->store);
    for (const auto* list : {&opened->wrong, &opened->notices}) {
        for (const std::string& notice : *list)
            log::warn("store.opened", {{"store", name}, {"notice", notice}});
    }
    auto secret = secret_of(config_, *store_);
    if (!secret) return secret.error();
    secret_ = std::move(*secret);
    keys_ = std::make_unique<base::Hmac>(secret_);
    vault_ = std::make_unique<engine::Vault>(secret_, &hot_);
    records_ = {.store = store_.get(), .secret = keys_.get(), .vault = vault_.get(), .id = {}};
    if (!config_.store.shared()) {
        auto id = store_id_of(*store_);
        if (!id) return id.error();
        records_.id = std::move(*id);
    }
    auto spool = engine::Spool::open({});
    if (!spool) return spool.error();
    spool_ = std::move(*spool);
    engine::EngineOptions options;
    options.owner.id = owner;
    options.set_lease(config_.engine.lease);
    options.delivers_left_over = false;
    engine_ = std::make_unique<engine::Engine>(thread_.loop, *store_, options, hot_, *spool_,
                                               counters_, vault_.get());
    sweeper_ = std::make_unique<engine::Sweeper>(*engine_, sweeping(config_.engine, metrics));
    const auto watch = [&metrics](std::string_view metric,
                                  const std::atomic<std::uint64_t>& value) {
        metrics.watch(metric, [&value] { return value.load(std::memory_order_relaxed); });
    };
    watch("semel_store_errors_total", counters_.store_errors);
    watch("semel_swept_total", counters_.swept);
    watch("semel_purged_total", counters_.purged);
    watch("semel_purge_behind", counters_.purge_behind);
    sweeps_ = true;
    thread_.loop.post([this] { sweeper_->start(); });
    thread_.start();
    log::info("store.opened", {{"store", name}, {"promise", store_->durability().summary}});
    return {};
}

void OwnStores::One::stop() {
    if (std::exchange(sweeps_, false)) {
        struct Stopped {
            std::mutex mutex;
            std::condition_variable changed;
            bool yes = false;
        };
        const auto stopped = std::make_shared<Stopped>();
        thread_.loop.post([this, stopped] {
            auto end = [](One* self, std::shared_ptr<Stopped> told) -> runtime::Task<> {
                co_await self->sweeper_->stop();
                co_await self->engine_->stop();
                const std::lock_guard lock(told->mutex);
                told->yes = true;
                told->changed.notify_one();
            };
            thread_.loop.spawn(end(this, stopped));
        });
        std::unique_lock lock(stopped->mutex);
        stopped->changed.wait_for(lock, upkeep_stop_patience, [&] { return stopped->yes; });
        lock.unlock();
        thread_.stop();
    }
    if (store_) store_->stop();
}

OwnStores::OwnStores(const config::Config& config, const Leaves& leaves, std::string owner,
                     telemetry::Metrics& metrics)
    : config_(config), leaves_(leaves), owner_(std::move(owner)), metrics_(metrics) {}

OwnStores::~OwnStores() = default;

base::Result<void> OwnStores::open(bool accept_clock) {
    for (config::Config& one : configs_of_own_stores(config_)) {
        auto made = std::make_unique<One>(std::move(one));
        if (auto opened = made->open(leaves_, owner_, metrics_, accept_clock); !opened)
            return opened;
        all_.push_back(std::move(made));
    }
    return {};
}

const RecordStore* OwnStores::of(const config::ConsumerConfig& consumer) const {
    if (!consumer.store) return nullptr;
    for (const auto& one : all_) {
        if (one->config() == *consumer.store) return &one->records();
    }
    return nullptr;  // it is the process's own
}

std::vector<std::string> OwnStores::not_ready() const {
    std::vector<std::string> out;
    for (const auto& one : all_) {
        if (const auto health = one->health(); !health)
            out.push_back("store " + store_in_words(one->config()) +
                          " of consumers: " + health.error().detail);
    }
    return out;
}

void OwnStores::stop() {
    for (const auto& one : all_) one->stop();
}

}  // namespace semel::cli
