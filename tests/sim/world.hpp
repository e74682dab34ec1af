// World: a deterministic simulation: one thread, a virtual clock, seeded chance, processes that
// crash and stall, one store.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <queue>
#include <string>
#include <vector>

#include "core/store.hpp"
#include "engine/engine.hpp"
#include "engine/sweeper.hpp"
#include "runtime/loop.hpp"
#include "sim/rng.hpp"
#include "support/faulty_store.hpp"
#include "support/manual_clock.hpp"

namespace semel::sim {

using base::SteadyTime;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using support::FaultyStore;
using support::StoreFaults;

class World;

/// What runs in a process on top of the engine (a workload, a gateway). Made anew at each start.
class App {
  public:
    App() = default;
    App(const App&) = delete;
    App& operator=(const App&) = delete;
    virtual ~App() = default;
};

/// A slot in which processes start, crash and start again. Hot records die with the process, the
/// spool is its disk.
struct Process {
    World* world = nullptr;
    int number = 0;
    int incarnation = 0;  ///< Starts so far.
    bool alive = false;
    SteadyTime paused_until = SteadyTime::min();    ///< A zombie: its loop stands still until then.
    SteadyTime last_disturbed = SteadyTime::min();  ///< Last crash, pause or outage (or its end).
    std::unique_ptr<engine::Spool> spool;
    std::unique_ptr<FaultyStore>
        store;  ///< Its connection; survives, for what was sent before a crash arrives after it.
    std::unique_ptr<engine::HotRecords> hot;
    std::unique_ptr<engine::Vault> vault;  ///< What has a tenant is sealed, as in a real process.
    std::unique_ptr<engine::EngineCounters> counters;
    std::unique_ptr<runtime::Loop> loop;
    std::unique_ptr<engine::Engine> engine;
    std::unique_ptr<engine::Sweeper> sweeper;
    std::unique_ptr<App> app;
};

struct WorldOptions {
    int processes = 2;
    engine::EngineOptions engine{.owner = {}};
    bool sweep = true;
    /// Puts something between the network and the store (a planted defect). The store given
    /// outlives the one made.
    std::function<std::unique_ptr<core::Store>(core::Store&)> wrap_store;
    /// Makes a process's spool; by default one in memory.
    std::function<std::unique_ptr<engine::Spool>()> make_spool;
    std::function<std::unique_ptr<App>(Process&)> make_app;
};

class World {
  public:
    World(std::uint64_t seed, WorldOptions options);
    ~World();
    World(const World&) = delete;
    World& operator=(const World&) = delete;

    Rng rng;
    support::ManualClock clock;
    /// The memory store itself, for checkers: no faults.
    [[nodiscard]] core::Store& truth() { return *store_; }
    [[nodiscard]] SteadyTime now() const { return clock.steady(); }
    [[nodiscard]] std::vector<std::unique_ptr<Process>>& processes() { return processes_; }
    [[nodiscard]] const WorldOptions& options() const { return options_; }

    /// Runs `happen` after `d`. `process`: the only one it concerns (null: any).
    void after(microseconds d, std::function<void()> happen, Process* process = nullptr);

    void crash(Process& process);
    void start(Process& process);
    void pause(Process& process, milliseconds d);
    [[nodiscard]] bool paused(const Process& process) const { return now() < process.paused_until; }
    /// Ends all faults: stores answer again, and every process that is down is started. A pause
    /// ends by itself.
    void heal();
    /// A process that is alive, by chance; null if there is none.
    Process* any_alive();

    /// Runs until `done` or until `limit` of virtual time passed; true: done.
    bool run_until(const std::function<bool()>& done, SteadyTime limit);
    void run_for(microseconds d) {
        run_until([] { return false; }, now() + d);
    }

    /// The present record by the truth, as it lies there; null if absent.
    core::RecordPtr record(const core::StoredKey& key);
    /// The same, opened by somebody who has the secret.
    core::RecordPtr record_opened(const core::StoredKey& key);
    engine::DataKeyPtr data_key_of(const core::TenantTag& tenant);

    /// A line of the trace, printed only while one seed is replayed.
    void trace(const std::string& line) const;
    bool tracing = false;

    /// The first violation found; empty: none. Later ones are consequences.
    std::string violation;
    void violate(const std::string& what);

  private:
    struct Event {
        SteadyTime when;
        std::uint64_t sequence = 0;
        std::function<void()> happen;
        Process* process = nullptr;
    };
    struct Later {
        bool operator()(const Event& a, const Event& b) const {
            return a.when != b.when ? a.when > b.when : a.sequence > b.sequence;
        }
    };
    void make_process(int number);
    void destroy(Process& process);
    void run_ready(Process* process);
    [[nodiscard]] std::optional<SteadyTime> next_moment() const;

    WorldOptions options_;
    std::unique_ptr<core::Store> store_;
    std::unique_ptr<core::Store> wrapped_;
    std::priority_queue<Event, std::vector<Event>, Later> events_;
    std::uint64_t last_sequence_ = 0;
    std::vector<std::unique_ptr<Process>> processes_;
};

/// A key for tests: digest of a name.
core::StoredKey key_of(const std::string& name);
core::Fingerprint fingerprint_of(const std::string& body);

}  // namespace semel::sim
