// semel serve: wires a process together, runs it, and ends it in order.
#include <sched.h>
#include <sys/mman.h>
#include <algorithm>
#include <boost/json.hpp>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <thread>

#include "cli/admin_address.hpp"
#include "cli/cli.hpp"
#include "cli/consumer_outlook.hpp"
#include "cli/consumers.hpp"
#include "cli/guarantees.hpp"
#include "cli/http_call.hpp"
#include "cli/intent_of.hpp"
#include "cli/readers.hpp"
#include "cli/sockets.hpp"
#include "engine/engine.hpp"
#include "gateway/chat_door.hpp"
#include "gateway/gateway.hpp"
#include "gateway/peer_server.hpp"
#include "http/client.hpp"
#include "http/server.hpp"
#include "http/tls.hpp"
#include "telemetry/log.hpp"
#include "telemetry/metrics.hpp"

namespace semel::cli {

namespace {

using namespace std::chrono_literals;

/// How often the end of running calls is looked for while draining.
constexpr auto drain_look_every = 10ms;
/// The disk may hang; then the process ends without a clean stop, which every store survives.
constexpr auto engines_stop_patience = 5s;
/// Of other gateways: a question is one short line, and who takes nothing asks the store instead.
constexpr std::size_t peer_head_max_bytes = 8 * 1024;
constexpr auto peer_write_idle = 30s;

unsigned cores_allowed() {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    const int count = CPU_COUNT(&set);
    return count > 0 ? static_cast<unsigned>(count) : 1;
}

/// Suspended coroutines may be left on the loops, and their frames name objects of each other:
/// nothing is unwound.
[[noreturn]] void end(int code) {
    std::fflush(nullptr);
    std::_Exit(code);
}

/// Everything that one API loop owns.
struct Worker {
    LoopThread thread;
    std::unique_ptr<engine::Engine> engine;
    std::unique_ptr<http::Client> client;
    std::unique_ptr<gateway::Gateway> gateway;
    std::unique_ptr<http::Server> server;
    std::atomic<std::size_t> running{0};  ///< Exchanges, as last seen by the loop itself.
    std::atomic<std::size_t> leases{0};   ///< The same of its engine's leases.
};

/// Whether each ca_file can be trusted as a whole; says which cannot.
base::Result<void> check_authorities(const config::Config& config) {
    for (const auto& upstream : config.upstreams) {
        std::string problem;
        if (!upstream.ca_file.empty() &&
            http::TlsContext::make(upstream.ca_file, problem) == nullptr) {
            return base::Error{.detail = "ca_file of upstream " + upstream.name + ": " + problem +
                                         "; it must be a PEM file with at least one certificate"};
        }
    }
    for (const auto& consumer : config.consumers) {
        const std::string& file = consumer.handler.http.ca_file;
        std::string problem;
        if (!file.empty() && http::TlsContext::make(file, problem) == nullptr) {
            return base::Error{.detail = "handler.http.ca_file of consumer " + consumer.name +
                                         ": " + problem +
                                         "; it must be a PEM file with at least one certificate"};
        }
    }
    return {};
}

/// Names one file of all extra authorities, because a client takes one; empty if there are none. It
/// lies in memory, is open as long as the process lives, and is read by each loop at its first call
/// over TLS.
base::Result<std::string> authorities_file(const config::Config& config) {
    std::set<std::string> files;
    for (const auto& upstream : config.upstreams) {
        if (!upstream.ca_file.empty()) files.insert(upstream.ca_file);
    }
    if (files.empty()) return std::string{};
    const int together = ::memfd_create("semel-authorities", MFD_CLOEXEC);
    if (together < 0) return base::Error{.detail = "no memory for the authorities of ca_file"};
    const std::string name = "/proc/self/fd/" + std::to_string(together);
    std::ofstream out(name, std::ios::binary);
    for (const std::string& file : files) {
        std::ifstream in(file, std::ios::binary);
        if (!in) return base::Error{.detail = "ca_file " + file + " cannot be read"};
        out << in.rdbuf() << '\n';
    }
    if (!out.flush()) return base::Error{.detail = name + " cannot be written; is /proc mounted?"};
    return name;
}

class Serving {
  public:
    Serving(const config::Config& config, std::string config_file, const Leaves& leaves)
        : config_(config), config_file_(std::move(config_file)), leaves_(leaves) {}

    /// Until a signal ends it, and the process with it.
    [[noreturn]] void run(bool accept_clock);

  private:
    base::Result<void> open(bool accept_clock);
    base::Result<void> open_consumers(bool accept_clock);
    base::Result<void> listen();
    base::Result<void> listen_to_peers(engine::EngineOptions& options);
    void start();
    void stop_consumers();
    void drain();
    void stop_engines();
    admin::Probes probes();
    [[nodiscard]] std::string describe() const;

    const config::Config& config_;
    const std::string config_file_;
    const Leaves& leaves_;
    const std::string owner_ =
        base::hex(base::random_bytes(8));  ///< Of this process, in its leases.
    telemetry::Metrics metrics_;
    engine::EngineCounters engine_counters_;
    http::ServerCounters api_counters_;
    http::ServerCounters admin_counters_;
    http::ServerCounters peer_counters_;
    std::unique_ptr<core::Store> store_;
    std::unique_ptr<engine::HotRecords> hot_;
    std::unique_ptr<engine::Vault> vault_;
    std::unique_ptr<engine::Spool> spool_;
    std::string secret_;
    std::string scratch_;  ///< Folder of spill files.
    std::unique_ptr<gateway::Process> process_;
    std::vector<std::unique_ptr<Worker>> workers_;
    AdminAddress admin_;
    // Other gateways, on a shared store, have a loop as well: their streams do not wait for our
    // clients, nor ours for them. Null otherwise.
    std::unique_ptr<LoopThread> peer_thread_;
    std::unique_ptr<gateway::PeerServer> peers_;
    std::unique_ptr<http::Server> peer_server_;
    std::string peer_address_;                   ///< As other gateways are told.
    std::atomic<std::size_t> peers_running_{0};  ///< As last seen by the loop itself.
    // Consumers, and the turns of /api/chat that those of handler ai ask for on the API loops. Null
    // without consumers.
    std::unique_ptr<base::Hmac> message_keys_;
    std::unique_ptr<gateway::ChatDoor> chat_door_;
    std::unique_ptr<Consumers> consumers_;
    std::atomic<bool> consumers_stopped_{false};
    std::atomic<bool> listening_{false};
    std::atomic<bool> draining_{false};
};

base::Result<void> Serving::open(bool accept_clock) {
    auto opened = open_store(config_, leaves_, accept_clock);
    if (!opened) return opened.error();
    store_ = std::move(opened->store);
    for (const auto* list : {&opened->wrong, &opened->notices}) {
        for (const std::string& notice : *list) log::warn("store.opened", {{"notice", notice}});
    }
    auto secret = secret_of(config_, *store_);
    if (!secret) return secret.error();
    secret_ = std::move(*secret);
    auto spool = engine::Spool::open(config_.spool_path);
    if (!spool) return spool.error();
    spool_ = std::move(*spool);
    for (const std::string& problem : spool_->problems())
        log::warn("spool.opened", {{"notice", problem}});
    if (spool_->size() > 0) {
        log::info("spool.opened", {{"answers_to_deliver", spool_->size()}});
    }
    hot_ = std::make_unique<engine::HotRecords>(config_.memory_hot_records);
    vault_ = std::make_unique<engine::Vault>(secret_, hot_.get());
    std::error_code failed;
    scratch_ = config_.spool_path.empty() ? std::filesystem::temp_directory_path(failed).string()
                                          : config_.spool_path;
    if (failed)
        return base::Error{
            .detail =
                "no folder for temporary files: set TMPDIR, or spool.path in the configuration"};
    std::string peer_secret;
    if (config_.store.shared()) {
        auto claimed = peer_secret_of(*store_);
        if (!claimed) return claimed.error();
        peer_secret = std::move(*claimed);
    }
    process_ = std::make_unique<gateway::Process>(config_, secret_, *hot_, metrics_, scratch_,
                                                  peer_secret);
    add_readers(metrics_, {.engine = engine_counters_,
                           .api = api_counters_,
                           .admin = admin_counters_,
                           .hot = *hot_,
                           .spool = *spool_});
    return {};
}

base::Result<void> Serving::open_consumers(bool accept_clock) {
    if (config_.consumers.empty()) return {};
    std::string store_id;
    if (!config_.store.shared()) {
        auto claimed = store_id_of(*store_);
        if (!claimed) return claimed.error();
        store_id = std::move(*claimed);
    }
    message_keys_ = std::make_unique<base::Hmac>(secret_);
    const auto ask = [this](consumer::ChatTurn turn,
                            const std::function<void(consumer::ChatAnswer)>& done) {
        chat_door_->ask({.tenant = std::move(turn.tenant),
                         .user = std::move(turn.user),
                         .session = std::move(turn.session),
                         .request_id = std::move(turn.request_id),
                         .prompt = std::move(turn.prompt),
                         .model = std::move(turn.model),
                         .hold_unknown = turn.hold_unknown},
                        [done](gateway::InnerAnswer answer) {
                            done({.status = answer.status,
                                  .body = std::move(answer.body),
                                  .problem = std::move(answer.problem),
                                  .retry_after = answer.retry_after,
                                  .replayed = answer.replayed,
                                  .upstream_status = answer.upstream_status,
                                  .final = answer.final});
                        });
    };
    consumers_ = std::make_unique<Consumers>(ConsumersAround{.config = config_,
                                                             .config_file = config_file_,
                                                             .leaves = leaves_,
                                                             .store = *store_,
                                                             .secret = *message_keys_,
                                                             .vault = *vault_,
                                                             .owner = owner_,
                                                             .store_id = std::move(store_id),
                                                             .metrics = metrics_,
                                                             .ask = ask,
                                                             .accept_clock = accept_clock});
    return consumers_->prepare();
}

/// Where the store is shared: the address that goes into every lease of this process.
base::Result<void> Serving::listen_to_peers(engine::EngineOptions& options) {
    if (!config_.store.shared()) return {};
    if (const auto free = can_listen(config_.peer.listen); !free)
        return base::Error{.detail = "peer.listen " + free.error().detail};
    peer_thread_ = std::make_unique<LoopThread>();
    runtime::Loop& loop = peer_thread_->loop;
    peers_ = std::make_unique<gateway::PeerServer>(*process_, loop, config_.engine.lease);
    auto server = http::Server::listen(
        loop, config_.peer.listen.host, config_.peer.listen.port, *peers_,
        {.head_max_bytes = peer_head_max_bytes, .write_idle_timeout = peer_write_idle},
        peer_counters_, false);
    if (!server) return server.error();
    peer_server_ = std::move(*server);
    const auto address = advertised(config_.peer, peer_server_->port());
    if (!address) return address.error();
    peer_address_ = options.owner.peer = authority(*address);
    return {};
}

base::Result<void> Serving::listen() {
    for (const config::Address* address : {&config_.listen, &config_.admin}) {
        if (const auto free = can_listen(*address); !free) return free.error();
    }
    const auto authorities = authorities_file(config_);
    if (!authorities) return authorities.error();
    engine::EngineOptions options;
    options.owner.id = owner_;
    options.set_lease(config_.engine.lease);
    options.delivers_left_over = false;  // the admin loop's engine does

    if (auto heard = listen_to_peers(options); !heard) return heard.error();
    const unsigned count = config_.threads != 0 ? config_.threads : cores_allowed();
    std::uint16_t port = config_.listen.port;
    for (unsigned i = 0; i < count; ++i) {
        auto worker = std::make_unique<Worker>();
        runtime::Loop& loop = worker->thread.loop;
        worker->engine = std::make_unique<engine::Engine>(loop, *store_, options, *hot_, *spool_,
                                                          engine_counters_, vault_.get());
        worker->client = http::make_client(loop, *authorities);
        worker->gateway =
            std::make_unique<gateway::Gateway>(*process_, *worker->engine, *worker->client);
        auto server = http::Server::listen(loop, config_.listen.host, port, *worker->gateway, {},
                                           api_counters_, count > 1);
        if (!server) return server.error();
        worker->server = std::move(*server);
        port = worker->server->port();
        Worker* const one = worker.get();
        one->thread.on_beat = [one] { one->leases = one->engine->leases(); };
        metrics_.watch("semel_leases", [one] { return std::uint64_t{one->leases}; });
        workers_.push_back(std::move(worker));
    }

    if (consumers_) {
        std::vector<gateway::ChatDoor::Place> places;
        for (const auto& worker : workers_)
            places.push_back({.engine = *worker->engine, .client = *worker->client});
        chat_door_ = std::make_unique<gateway::ChatDoor>(*process_, std::move(places));
    }

    options.delivers_left_over = true;
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

admin::Probes Serving::probes() {
    admin::Probes probes;
    probes.not_alive = [this] {
        std::vector<std::string> reasons;
        for (std::size_t i = 0; i < workers_.size(); ++i) {
            if (workers_[i]->thread.silent())
                reasons.push_back("event loop " + std::to_string(i) + " has not run for 15 s");
        }
        if (peer_thread_ && peer_thread_->silent())
            reasons.emplace_back("the loop of the peer address has not run for 15 s");
        if (consumers_) {
            for (std::string& reason : consumers_->not_alive())
                reasons.push_back(std::move(reason));
        }
        return reasons;
    };
    probes.not_ready = [this] {
        std::vector<std::string> reasons;
        if (!listening_) reasons.emplace_back("starting");
        if (draining_) reasons.emplace_back("draining: running calls end, nothing new is taken");
        if (const auto health = store_->health(); !health)
            reasons.push_back("store: " + health.error().detail);
        if (consumers_) {
            for (std::string& reason : consumers_->not_ready())
                reasons.push_back(std::move(reason));
        }
        return reasons;
    };
    probes.metrics = [this] { return metrics_.render(); };
    if (consumers_) probes.consumers = consumers_->controls();
    return probes;
}

std::string Serving::describe() const {
    config::Address api = config_.listen;
    config::Address admin = config_.admin;
    api.port = workers_.front()->server->port();
    admin.port = admin_.port();
    return "API http://" + authority(api) + ", admin http://" + authority(admin) + ", " +
           store_in_words(config_.store) +
           (peer_address_.empty() ? "" : ", peers http://" + peer_address_) + ", " +
           std::to_string(workers_.size()) + " loop(s)" +
           (consumers_ ? ", " + std::to_string(consumers_->size()) + " consumer(s)" : "");
}

void Serving::start() {
    admin_.start();
    if (peer_thread_) peer_thread_->start();
    for (auto& worker : workers_) worker->thread.start();
    if (consumers_) consumers_->start();
    listening_ = true;
}

/// On a thread of its own: a second signal must not wait for it.
void Serving::stop_consumers() {
    consumers_stopped_ = true;
    if (!consumers_) return;
    consumers_stopped_ = false;
    std::thread([this] {
        consumers_->stop();
        consumers_stopped_ = true;
    }).detach();
}

void Serving::drain() {
    draining_ = true;
    process_->drain();
    if (peer_thread_) peers_running_ = 1;
    for (auto& worker : workers_) {
        worker->running = 1;  // until the loop has looked itself
        Worker* const one = worker.get();
        one->thread.loop.post([one] {
            one->server->drain();
            one->running = one->server->running();
        });
    }
}

void Serving::stop_engines() {
    struct Stopped {
        std::mutex mutex;
        std::condition_variable changed;
        std::size_t count = 0;
    };
    const auto stopped = std::make_shared<Stopped>();
    const auto tell = [stopped] {
        const std::lock_guard lock(stopped->mutex);
        ++stopped->count;
        stopped->changed.notify_one();
    };
    for (auto& worker : workers_) {
        Worker* const one = worker.get();
        one->thread.loop.post([one, tell] {
            one->server->close();
            auto stop = [](Worker* w, std::function<void()> done) -> runtime::Task<> {
                co_await w->engine->stop();
                done();
            };
            one->thread.loop.spawn(stop(one, tell));
        });
    }
    admin_.stop(tell);
    std::unique_lock lock(stopped->mutex);
    stopped->changed.wait_for(lock, engines_stop_patience,
                              [&] { return stopped->count == workers_.size() + 1; });
}

void Serving::run(bool accept_clock) {
    // Taken by this thread alone, with sigtimedwait; blocked before any other thread exists.
    sigset_t ending;
    sigemptyset(&ending);
    sigaddset(&ending, SIGTERM);
    sigaddset(&ending, SIGINT);
    pthread_sigmask(SIG_BLOCK, &ending, nullptr);
    const auto signal_within = [&ending](std::chrono::milliseconds patience) {
        const timespec time{.tv_sec = patience.count() / 1000,
                            .tv_nsec = patience.count() % 1000 * 1'000'000};
        return sigtimedwait(&ending, nullptr, &time);
    };

    auto ready = open(accept_clock);
    if (ready) ready = open_consumers(accept_clock);
    if (ready) ready = listen();
    if (!ready) {
        std::fprintf(stderr, "semel serve: %s\n", ready.error().detail.c_str());
        if (store_) store_->stop();
        end(exit_failed);
    }
    raise_open_files_limit();
    start();
    std::fprintf(stderr, "semel: ready: %s\n", describe().c_str());

    int signal = -1;
    while (signal < 0) signal = signal_within(1h);
    std::fprintf(stderr, "semel: draining: %zu call(s) run; a second signal ends at once\n",
                 process_->running());
    draining_ = true;
    const auto ended_at_once = [](int again) {
        std::fprintf(stderr, "semel: ended at once; what ran is taken over after the next start\n");
        end(128 + again);
    };
    // First: their handlers may ask for turns of /api/chat.
    stop_consumers();
    while (!consumers_stopped_) {
        if (const int again = signal_within(drain_look_every); again > 0) ended_at_once(again);
    }
    drain();
    const auto deadline = base::system_clocks().steady() + config_.drain_timeout;
    bool busy = true;
    while (busy && base::system_clocks().steady() < deadline) {
        if (const int again = signal_within(drain_look_every); again > 0) ended_at_once(again);
        busy = process_->running() > 0 || peers_running_ > 0;
        for (auto& worker : workers_) {
            busy = busy || worker->running > 0;
            Worker* const one = worker.get();
            one->thread.loop.post([one] { one->running = one->server->running(); });
        }
        // Who joins a call from elsewhere may do so until it has ended.
        if (peer_thread_) {
            peer_thread_->loop.post([this] { peers_running_ = peer_server_->running(); });
        }
    }
    if (busy)
        std::fprintf(stderr,
                     "semel: drain_timeout is over; calls that still run are taken over after the "
                     "next start\n");
    if (peer_thread_) peer_thread_->loop.post([this] { peer_server_->close(); });
    stop_engines();
    store_->stop();
    std::fprintf(stderr, "semel: stopped\n");
    end(exit_ok);
}

}  // namespace

int serve(const ServeOptions& options, const Leaves& leaves) {
    const auto refuse = [&options](const base::Error& error) {
        std::fprintf(stderr, "semel serve: %s\n", error.detail.c_str());
        if (options.json) {
            std::printf("%s\n", boost::json::serialize(
                                    boost::json::object{{"ok", false}, {"error", error.detail}})
                                    .c_str());
        }
        return exit_usage;
    };
    const auto config = config::load(options.config);
    if (!config) return refuse(config.error());
    if (const auto trusted = check_authorities(*config); !trusted) return refuse(trusted.error());
    if (const auto checked = check_consumers(*config, options.config, leaves); !checked)
        return refuse(checked.error());
    for (const std::string& warning : config->warnings)
        std::fprintf(stderr, "semel serve: %s\n", warning.c_str());
    if (options.check) {
        if (options.json) {
            boost::json::array warnings;
            for (const std::string& warning : config->warnings) warnings.emplace_back(warning);
            std::printf("%s\n", boost::json::serialize(
                                    boost::json::object{{"ok", true}, {"warnings", warnings}})
                                    .c_str());
        } else {
            std::printf("%s is valid\n", options.config.c_str());
        }
        return exit_ok;
    }
    if (const auto there = check_callbacks(*config, options.config, {}); !there)
        return refuse(there.error());
    Serving serving(*config, options.config, leaves);
    serving.run(options.accept_clock);
}

}  // namespace semel::cli
