#include "sim/world.hpp"

#include <algorithm>
#include <cstdio>

#include "stores/memory/memory_store.hpp"

namespace semel::sim {

namespace {
/// Of the deployment: its processes open each other's records.
constexpr std::string_view secret = "simulated secret";
}  // namespace

World::World(std::uint64_t seed, WorldOptions options)
    : rng(seed), options_(std::move(options)), store_(stores::make_memory_store(clock)) {
    if (options_.wrap_store) wrapped_ = options_.wrap_store(*store_);
    for (int i = 0; i < options_.processes; ++i) make_process(i);
}

World::~World() {
    for (auto& process : processes_) {
        if (process->alive) destroy(*process);
    }
}

void World::make_process(int number) {
    auto process = std::make_unique<Process>();
    process->world = this;
    process->number = number;
    if (options_.make_spool) {
        process->spool = options_.make_spool();
    } else {
        auto spool = engine::Spool::open("");
        process->spool = std::move(*spool);
    }
    Process* raw = process.get();
    process->store = std::make_unique<FaultyStore>(
        wrapped_ ? *wrapped_ : *store_,
        [this, raw](microseconds d, std::function<void()> happen) {
            after(d, std::move(happen), raw);
        },
        [this](std::uint64_t bound) { return rng.below(bound); });
    processes_.push_back(std::move(process));
}

void World::start(Process& process) {
    SEMEL_ASSERT(!process.alive, "a process is started when it does not run");
    process.alive = true;
    process.paused_until = SteadyTime::min();
    ++process.incarnation;
    process.hot = std::make_unique<engine::HotRecords>(1 << 20);
    process.vault = std::make_unique<engine::Vault>(secret, process.hot.get());
    process.counters = std::make_unique<engine::EngineCounters>();
    process.loop = std::make_unique<runtime::Loop>(clock, runtime::Loop::Mode::simulated);
    engine::EngineOptions options = options_.engine;
    options.owner.id =
        "p" + std::to_string(process.number) + "." + std::to_string(process.incarnation);
    // A name that only the simulated network knows: who follows nobody has no use for it.
    options.owner.peer =
        "p" + std::to_string(process.number) + ":" + std::to_string(process.incarnation);
    process.engine = std::make_unique<engine::Engine>(
        *process.loop, *process.store, options, *process.hot, *process.spool, *process.counters,
        process.vault.get());
    if (options_.sweep) {
        const milliseconds third = options_.engine.lease / 3;
        process.sweeper = std::make_unique<engine::Sweeper>(
            *process.engine, engine::SweeperOptions{.every = third, .takeover_grace = third},
            [](const std::function<void()>& work) { work(); });
        process.sweeper->start();
    }
    if (options_.make_app) process.app = options_.make_app(process);
    trace("start " + options.owner.id);
    run_ready(&process);
}

void World::destroy(Process& process) {
    process.alive = false;
    process.sweeper.reset();
    process.engine.reset();
    process.loop.reset();  // destroys the suspended coroutines
    process.app.reset();
    process.vault.reset();
    process.hot.reset();
    process.counters.reset();
}

void World::crash(Process& process) {
    trace("crash p" + std::to_string(process.number));
    process.last_disturbed = now();
    destroy(process);
}

void World::pause(Process& process, milliseconds d) {
    trace("pause p" + std::to_string(process.number) + " for " + std::to_string(d.count()) + " ms");
    process.paused_until = now() + d;
    process.last_disturbed = process.paused_until;
    const int incarnation = process.incarnation;
    after(
        d,
        [this, p = &process, incarnation] {
            if (!p->alive || p->incarnation != incarnation || paused(*p)) return;
            trace("resume p" + std::to_string(p->number));
        },
        &process);
}

void World::heal() {
    trace("faults end");
    for (auto& process : processes_) {
        process->store->faults = StoreFaults{};
        process->store->down = false;
        if (!process->alive) start(*process);
    }
}

Process* World::any_alive() {
    std::vector<Process*> alive;
    for (auto& process : processes_) {
        if (process->alive) alive.push_back(process.get());
    }
    return alive.empty() ? nullptr : alive[rng.below(alive.size())];
}

void World::after(microseconds d, std::function<void()> happen, Process* process) {
    events_.push(
        Event{now() + std::max(d, microseconds{0}), ++last_sequence_, std::move(happen), process});
}

void World::run_ready(Process* process) {
    for (auto& p : processes_) {
        if ((process != nullptr && process != p.get()) || !p->alive || paused(*p)) continue;
        p->loop->fire_due();
        p->loop->run_ready();
    }
}

std::optional<SteadyTime> World::next_moment() const {
    std::optional<SteadyTime> next;
    if (!events_.empty()) next = events_.top().when;
    for (const auto& p : processes_) {
        if (!p->alive) continue;
        auto timer = p->loop->next_timer();
        if (timer && paused(*p)) timer = std::max(*timer, p->paused_until);
        if (timer && (!next || *timer < *next)) next = timer;
    }
    return next;
}

bool World::run_until(const std::function<bool()>& done, SteadyTime limit) {
    run_ready(nullptr);
    while (!done()) {
        if (!violation.empty()) return false;
        const auto next = next_moment();
        if (!next || *next > limit) {
            clock.advance(std::chrono::ceil<microseconds>(limit - now()));
            return done();
        }
        if (*next > now()) clock.advance(std::chrono::ceil<microseconds>(*next - now()));
        if (!events_.empty() && events_.top().when <= now()) {
            Event event = events_.top();
            events_.pop();
            event.happen();
            run_ready(event.process);
            continue;
        }
        // Timers due at the same moment in different processes: in an order of chance.
        const std::size_t first = rng.below(processes_.size());
        for (std::size_t i = 0; i < processes_.size(); ++i) {
            Process& p = *processes_[(first + i) % processes_.size()];
            if (!p.alive || paused(p)) continue;
            const auto timer = p.loop->next_timer();
            if (timer && *timer <= now()) run_ready(&p);
        }
    }
    return true;
}

core::RecordPtr World::record(const core::StoredKey& key) {
    core::RecordPtr record;
    store_->submit({core::Item{key, core::Get{}}}, [&](core::BatchResults results) {
        record = std::get<core::Found>(results.at(0)->outcome).record;
    });
    return record;
}

core::RecordPtr World::record_opened(const core::StoredKey& key) {
    core::RecordPtr sealed = record(key);
    if (!sealed || !engine::is_sealed(*sealed)) return sealed;
    const engine::DataKeyPtr data_key = data_key_of(sealed->tenant);
    return engine::opened(key, std::move(sealed), data_key.get());
}

engine::DataKeyPtr World::data_key_of(const core::TenantTag& tenant) {
    engine::Vault vault(secret, nullptr);
    const engine::Vault::KeyWanted wanted = vault.key_wanted(tenant);
    engine::DataKeyPtr data_key;
    store_->submit({core::Item{{}, wanted.operation}}, [&](core::BatchResults results) {
        const auto& wrapped = std::get<core::Value>(results.at(0)->outcome).value;
        data_key = vault.take_key(tenant, wrapped, wanted.generation, now()).value();
    });
    return data_key;
}

void World::trace(const std::string& line) const {
    if (!tracing) return;
    const auto us =
        std::chrono::duration_cast<microseconds>(now().time_since_epoch()).count() - 1'000'000'000;
    std::printf("%12.6f  %s\n", static_cast<double>(us) / 1e6, line.c_str());
}

void World::violate(const std::string& what) {
    trace("VIOLATION " + what);
    if (violation.empty()) violation = what;
}

core::StoredKey key_of(const std::string& name) { return base::sha256(name); }

core::Fingerprint fingerprint_of(const std::string& body) {
    core::Fingerprint fingerprint;
    fingerprint.raw = base::sha256(body);
    return fingerprint;
}

}  // namespace semel::sim
