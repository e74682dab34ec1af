// Consumes a topic or queue that is already filled, as `semel serve` does but with a handler in
// this process, and prints one JSON object.
//
//     bench_consume kafka BROKERS TOPIC [OPTIONS]
//     bench_consume rabbitmq URL QUEUE [OPTIONS]
//
// --messages N       how many deliveries (copies included) are to be settled; then it ends
// --store WHERE      strategy `store`: the folder of an embedded store, or the URL of a Redis
// --database URL     strategy `transaction` on PostgreSQL: one INSERT into `effects` per message
// --handler H        of `transaction`: callback or batchable do that INSERT in this process;
//                    of `store`: count (counts, on the loop), work (takes 0 to 5 ms, by the
//                    message's id), stuck (counts, but for the first message, which never ends),
//                    answer (answers the message's own value to the topic of Kafka that --results
//                    names; --on-duplicate silent|republish)
// --concurrency C    --ordering key|partition|none     --prefetch P (rabbitmq)
// --retention MS     how long done ids are known (7 days)
// --clean-up 1       what has expired is removed meanwhile, in steps as large and with pauses as
//                    long as those of `semel serve` within a pass; one pass follows the other
//
// The clock runs from the first effect until all are settled, and for the second half from where
// half of them are; the processor time is all that this
// process has used since its start, threads of the libraries included. That nothing is left behind
// is checked with the broker (Kafka) before it is said.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "base/hash.hpp"
#include "brokers/kafka/kafka.hpp"
#include "brokers/rabbitmq/rabbitmq.hpp"
#include "consumer/consumer.hpp"
#include "consumer/strategies/recorded.hpp"
#include "consumer/strategies/transaction.hpp"
#include "fail.hpp"
#include "inbox/dedup_table.hpp"
#include "inbox/schema.hpp"
#include "runtime/loop.hpp"
#include "stores/postgres/plain_connection.hpp"
#include "stores/redis/redis_store.hpp"
#include "stores/rocksdb/rocksdb_store.hpp"
#include "telemetry/log.hpp"

namespace {

using bench::fail;
using namespace semel;
using namespace std::chrono_literals;
using Steady = std::chrono::steady_clock;

constexpr auto give_up_after = 180s;
constexpr std::int64_t work_us_max = 5000;

struct Settings {
    bool kafka = true;
    std::string where, from;
    std::uint64_t messages = 0;
    std::string store, database, handler = "count", ordering = "key", results;
    bool republish = false;
    unsigned concurrency = 16;
    std::uint16_t prefetch = 500;
    std::chrono::milliseconds retention = 24h * 7;
    bool clean_up = false;
};

Settings settings_of(int argc, char** argv) {
    if (argc < 4 || argc % 2 != 0) fail("see the top of bench/consumer/consume.cpp");
    const std::string kind = argv[1];
    if (kind != "kafka" && kind != "rabbitmq") fail("there is no broker " + kind);
    Settings out{.kafka = kind == "kafka", .where = argv[2], .from = argv[3]};
    const std::map<std::string, std::function<void(const char*)>> known{
        {"--messages", [&](const char* v) { out.messages = std::strtoull(v, nullptr, 10); }},
        {"--store", [&](const char* v) { out.store = v; }},
        {"--database", [&](const char* v) { out.database = v; }},
        {"--handler", [&](const char* v) { out.handler = v; }},
        {"--results", [&](const char* v) { out.results = v; }},
        {"--on-duplicate", [&](const char* v) { out.republish = v == std::string("republish"); }},
        {"--ordering", [&](const char* v) { out.ordering = v; }},
        {"--retention",
         [&](const char* v) { out.retention = std::chrono::milliseconds(std::atoll(v)); }},
        {"--clean-up", [&](const char* v) { out.clean_up = v == std::string("1"); }},
        {"--concurrency",
         [&](const char* v) { out.concurrency = static_cast<unsigned>(std::atoi(v)); }},
        {"--prefetch",
         [&](const char* v) { out.prefetch = static_cast<std::uint16_t>(std::atoi(v)); }},
    };
    for (int i = 4; i + 1 < argc; i += 2) {
        const auto option = known.find(argv[i]);
        if (option == known.end()) fail(std::string("unknown option ") + argv[i]);
        option->second(argv[i + 1]);
    }
    if (out.messages == 0 || out.concurrency == 0) fail("--messages and --concurrency");
    if (out.store.empty() == out.database.empty()) fail("either --store or --database");
    return out;
}

// ---------------------------------------------------------------- handlers

/// Runs on the loop's thread and ends there: what is measured is Semel, not a handler.
class LoopHandler : public consumer::Handler {
  public:
    explicit LoopHandler(runtime::Loop& loop) : loop_(loop) {}

    void handle(const consumer::Message& message, const consumer::Attempt&, Done done) final {
        if (effects++ == 0) first_effect_ = Steady::now();
        effect(message, std::move(done));
    }
    void cancel_all() override {}
    [[nodiscard]] std::string name() const override { return "the handler of bench_consume"; }

    /// Once all are settled.
    [[nodiscard]] Steady::time_point first_effect() const { return first_effect_; }
    std::atomic<std::uint64_t> effects{0};

  protected:
    virtual void effect(const consumer::Message& message, Done done) = 0;
    runtime::Loop& loop_;

  private:
    Steady::time_point first_effect_;
};

class Counts final : public LoopHandler {
    using LoopHandler::LoopHandler;
    void effect(const consumer::Message&, Done done) override { done(consumer::Handled{}); }
};

/// Answers each message with its own value.
class Answers final : public LoopHandler {
    using LoopHandler::LoopHandler;
    void effect(const consumer::Message& message, Done done) override {
        auto answer = std::make_shared<consumer::HandlerAnswer>();
        answer->body = std::string(message.delivery.value.value_or(std::string_view{}));
        answer->content_type = "application/json";
        done(consumer::Handled{std::move(answer)});
    }
};

/// Takes 0 to 5 ms, evenly spread.
class Works final : public LoopHandler {
  public:
    using LoopHandler::LoopHandler;
    /// Of all, and of the key that took longest, in microseconds. Once all are settled.
    [[nodiscard]] std::int64_t total_us() const { return total_us_; }
    [[nodiscard]] std::int64_t longest_key_us() const {
        std::int64_t out = 0;
        for (const auto& [key, us] : of_key_) out = std::max(out, us);
        return out;
    }

  private:
    void effect(const consumer::Message& message, Done done) override {
        const auto us = static_cast<std::int64_t>(std::hash<std::string>{}(message.id) %
                                                  static_cast<std::uint64_t>(work_us_max));
        total_us_ += us;
        of_key_[std::string(message.delivery.key.value_or(""))] += us;
        loop_.at(loop_.now() + std::chrono::microseconds(us),
                 [done = std::move(done)] { done(consumer::Handled{}); });
    }
    std::int64_t total_us_ = 0;
    std::map<std::string, std::int64_t> of_key_;
};

/// The first message never ends.
class Stuck final : public LoopHandler {
  public:
    using LoopHandler::LoopHandler;
    void cancel_all() override {
        if (auto done = std::exchange(stuck_, {})) done(consumer::HandledUnknown{"cancelled"});
    }

  private:
    void effect(const consumer::Message&, Done done) override {
        if (effects == 1) {
            stuck_ = std::move(done);
        } else {
            done(consumer::Handled{});
        }
    }
    Done stuck_;
};

std::unique_ptr<LoopHandler> handler_of(runtime::Loop& loop, const Settings& settings) {
    if (settings.handler == "answer") return std::make_unique<Answers>(loop);
    if (settings.handler == "count") return std::make_unique<Counts>(loop);
    if (settings.handler == "work") return std::make_unique<Works>(loop);
    if (settings.handler == "stuck") return std::make_unique<Stuck>(loop);
    fail("there is no handler " + settings.handler);
}

// ---------------------------------------------------------------- the consumer

std::unique_ptr<core::Store> store_of(const Settings& settings, stores::RocksDbCounters& counters) {
    const bool redis = settings.store.find("://") != std::string::npos;
    auto store = redis
                     ? stores::open_redis_store({.url = settings.store})
                     : stores::open_rocksdb_store({.path = settings.store, .counters = &counters});
    if (!store) fail(store.error().detail);
    return std::move(*store);
}

std::unique_ptr<brokers::Source> source_of(const Settings& settings, const std::string& group) {
    base::Result<std::unique_ptr<brokers::Source>> source =
        settings.kafka
            ? brokers::kafka::make_source({.brokers = settings.where,
                                           .topics = {settings.from},
                                           .group = group,
                                           .client_id = consumer::store_mark("bench"),
                                           .commit_metadata = consumer::store_mark("bench")})
            : brokers::rabbitmq::make_source({.url = settings.where,
                                              .queue = settings.from,
                                              .prefetch = settings.prefetch,
                                              .exclusive = true});
    if (!source) fail(source.error().detail);
    return std::move(*source);
}

config::ValueSpec member(const char* pointer) {
    return {.from = config::ValueFrom::json, .name = pointer};
}

inbox::Connect connect_to(const std::string& url) {
    return [url]() -> sql::Tried<std::shared_ptr<sql::Executor>> {
        auto made = stores::postgres::connect_plain(url, 5s, 60s);
        if (!made) return sql::Problem{.trouble = sql::Trouble::lost, .error = made.error()};
        return std::move(*made);
    };
}

std::unique_ptr<consumer::Strategy> transaction_of(runtime::Loop& loop, const Settings& settings,
                                                   consumer::ConsumerCounters& counters) {
    consumer::TransactionOptions options;
    options.owner = "bench";
    options.inbox.scope = "bench";
    options.inbox.retention = settings.retention;
    options.partitions = settings.kafka;
    options.dialect = sql::Dialect::postgres;
    std::variant<consumer::SqlEffects, consumer::TransactionCallback> effect;
    if (settings.handler == "callback" || settings.handler == "batchable") {
        effect = consumer::TransactionCallback{
            .effect = [](sql::Executor& executor,
                         const consumer::Message& message) -> inbox::EffectOutcome {
                auto answer = executor.run(
                    {.text = "INSERT INTO effects (message_id, order_no) VALUES ($1, $2)",
                     .parameters = {message.id, message.id}});
                if (auto* problem = std::get_if<sql::Problem>(&answer)) return std::move(*problem);
                return inbox::Did{};
            },
            .batchable = settings.handler == "batchable"};
    } else {
        effect = consumer::SqlEffects{
            {.params = {{"id", member("/messageId")}, {"order", member("/orderNo")}},
             .statements = {
                 {.sql = "INSERT INTO effects (message_id, order_no) VALUES (:id, :order)"}}}};
    }
    auto made = consumer::make_transaction(loop, std::move(options), connect_to(settings.database),
                                           std::move(effect), counters);
    if (!made) fail(made.error().detail);
    return std::move(*made);
}

std::unique_ptr<brokers::Publisher> publisher_of(const Settings& settings) {
    if (!settings.kafka || settings.results.empty()) fail("answers go to --results, of Kafka");
    auto made = brokers::kafka::make_publisher({.brokers = settings.where, .client_id = "bench"});
    if (!made) fail(made.error().detail);
    return std::move(*made);
}

/// As `semel serve` does.
std::unique_ptr<consumer::Results> results_of(runtime::Loop& loop, const Settings& settings,
                                              consumer::Records& records,
                                              consumer::ConsumerCounters& counters,
                                              brokers::Publisher& publisher) {
    auto publish = [&publisher, topic = settings.results](
                       std::string id, const consumer::HandlerAnswerPtr& answer,
                       std::function<void(base::Result<void>)> done) {
        brokers::Outgoing message;
        message.topic = topic;
        message.value = answer->body;
        message.key = id;
        message.headers.push_back({"message-id", std::move(id)});
        message.headers.push_back({"content-type", answer->content_type});
        publisher.publish(std::move(message),
                          [done = std::move(done)](base::Result<brokers::PublishedAt> at) {
                              done(at ? base::Result<void>() : at.error());
                          });
    };
    return std::make_unique<consumer::Results>(
        loop,
        consumer::ResultsOptions{.republish = settings.republish,
                                 .owner = {.id = "bench", .peer = {}}},
        &records, counters, std::move(publish));
}

consumer::ConsumerOptions options_of(const Settings& settings, const std::string& group) {
    consumer::ConsumerOptions out;
    out.name = "bench";
    out.group = group;
    out.identity.scope = "bench";
    out.identity.id.from = member("/messageId");
    out.identity.ordering = settings.ordering == "key"         ? config::Ordering::key
                            : settings.ordering == "partition" ? config::Ordering::partition
                                                               : config::Ordering::none;
    out.letters_stop = true;
    out.stop_drain = 1s;
    if (settings.kafka && !settings.store.empty()) {
        out.check_group = [group](brokers::Source& asked) {
            return consumer::check_unshared_group(asked, "bench", group, 30s);
        };
    }
    return out;
}

// ---------------------------------------------------------------- clean-up

constexpr std::size_t purge_step = 512;
/// Between two steps on a table. On a store: as long as the last step took.
constexpr auto purge_pause = 10ms;

/// Removes what has expired, on a thread, until nothing is left or it is to end.
class CleanUp {
  public:
    using Step = std::function<base::Result<std::size_t>(std::size_t limit)>;

    CleanUp(Step step, std::optional<std::chrono::milliseconds> pause)
        : step_(std::move(step)), pause_(pause), thread_([this] { run(); }) {}
    ~CleanUp() { end(); }
    CleanUp(const CleanUp&) = delete;
    CleanUp& operator=(const CleanUp&) = delete;

    void end() {
        {
            const std::lock_guard lock(mutex_);
            ending_ = true;
        }
        ended_.notify_all();
        if (thread_.joinable()) thread_.join();
    }
    /// After end().
    [[nodiscard]] std::size_t removed() const { return removed_; }
    [[nodiscard]] double seconds() const { return seconds_; }

  private:
    void run() {
        const auto start = Steady::now();
        for (bool more = true; more;) {
            const auto before = Steady::now();
            const auto gone = step_(purge_step);
            if (!gone) fail(gone.error().detail);
            const auto now = Steady::now();
            removed_ += *gone;
            seconds_ = std::chrono::duration<double>(now - start).count();
            std::unique_lock lock(mutex_);
            const auto pause = pause_ ? Steady::duration(*pause_) : now - before;
            more = *gone == purge_step && !ended_.wait_for(lock, pause, [this] { return ending_; });
        }
    }

    Step step_;
    std::optional<std::chrono::milliseconds> pause_;
    std::mutex mutex_;
    std::condition_variable ended_;
    bool ending_ = false;
    std::size_t removed_ = 0;
    double seconds_ = 0;  ///< From the begin to the end of the last step.
    std::thread thread_;  ///< Last: it uses what is above.
};

std::unique_ptr<CleanUp> clean_up_of(const Settings& settings, core::Store* store) {
    if (store != nullptr) {
        return std::make_unique<CleanUp>([store](std::size_t limit) { return store->purge(limit); },
                                         std::nullopt);
    }
    auto made = connect_to(settings.database)();
    if (auto* problem = std::get_if<sql::Problem>(&made)) fail(problem->error.detail);
    return std::make_unique<CleanUp>(
        [connection = std::move(std::get<0>(made)), table = inbox::DedupTable({.scope = "bench"})](
            std::size_t limit) { return table.purge(*connection, limit); },
        purge_pause);
}

// ---------------------------------------------------------------- measuring

double cpu_us() {
    rusage used{};
    ::getrusage(RUSAGE_SELF, &used);
    const auto us = [](const timeval& t) {
        return static_cast<double>(t.tv_sec) * 1e6 + static_cast<double>(t.tv_usec);
    };
    return us(used.ru_utime) + us(used.ru_stime);
}

/// KiB; "VmRSS" or "VmHWM".
long memory(std::string_view name) {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
        if (line.starts_with(name)) return std::atol(line.c_str() + name.size() + 1);
    }
    return 0;
}

/// Blocks until all that is wanted has been decided. What a person would have to look at ends it.
void wait_for(const consumer::Consumer& consumer, const consumer::ConsumerCounters& counters,
              std::uint64_t wanted) {
    const auto end = Steady::now() + give_up_after;
    for (int round = 0;; ++round) {
        const std::uint64_t done = counters.applied + counters.duplicates;
        if (done >= wanted) return;
        if (round % 500 == 499) {
            const consumer::ConsumerState state = consumer.state();
            if (!state.alarms.empty()) fail(state.alarms.back());
        }
        if (Steady::now() > end) fail(std::to_string(done) + " messages were settled, no more");
        std::this_thread::sleep_for(2ms);
    }
}

/// What was decided last is settled a moment after it is counted.
void nothing_left(brokers::Source& source) {
    const auto end = Steady::now() + 10s;
    for (std::int64_t left = 1; left != 0; std::this_thread::sleep_for(2ms)) {
        if (const auto committed = source.commit(10s); !committed) fail(committed.error().detail);
        const auto lags = source.lag(10s);
        if (!lags) fail(lags.error().detail);
        left = 0;
        for (const brokers::PartitionLag& one : *lags) left += one.lag;
        if (left != 0 && Steady::now() > end)
            fail(std::to_string(left) + " messages are not committed");
    }
}

}  // namespace

int main(int argc, char** argv) {
    const auto started = Steady::now();
    const Settings settings = settings_of(argc, argv);
    log::set_level(log::Level::warn);
    const std::string group = "bench-" + std::to_string(::getpid()) + "-" + settings.from;

    runtime::Loop loop(base::system_clocks());
    const base::Hmac secret("the secret of a measurement");
    stores::RocksDbCounters written;
    consumer::ConsumerCounters counters;
    std::unique_ptr<core::Store> store;
    std::unique_ptr<consumer::Records> records;
    std::unique_ptr<LoopHandler> handler;
    std::unique_ptr<brokers::Publisher> publisher;
    std::unique_ptr<consumer::Results> results;
    std::unique_ptr<consumer::Strategy> strategy;
    if (settings.database.empty()) {
        store = store_of(settings, written);
        records = consumer::records_on_store(loop, *store, secret, "the store");
        handler = handler_of(loop, settings);
        if (settings.handler == "answer") {
            publisher = publisher_of(settings);
            results = results_of(loop, settings, *records, counters, *publisher);
        }
        strategy = consumer::make_recorded(loop,
                                           {.name = "bench",
                                            .owner = {.id = "bench", .peer = {}},
                                            .concurrency = settings.concurrency,
                                            .retry = {},
                                            .retention = settings.retention,
                                            .store_promise = {}},
                                           *records, *handler, counters, results.get());
    } else {
        strategy = transaction_of(loop, settings, counters);
    }
    const std::unique_ptr<brokers::Source> source = source_of(settings, group);
    std::thread thread([&loop] {
        const auto executor = loop.executor();
        const runtime::asio::executor_work_guard<runtime::Executor> guard(executor);
        loop.io().run();
    });

    std::uint64_t wanted = settings.messages;
    Steady::time_point first, half, end;
    double cpu = 0;
    {
        consumer::Consumer consumer(loop, options_of(settings, group), *source, *strategy, nullptr,
                                    counters);
        const long resting = memory("VmRSS");
        if (const auto begun = consumer.start(); !begun) fail(begun.error().detail);
        const std::unique_ptr<CleanUp> clean_up =
            settings.clean_up ? clean_up_of(settings, store.get()) : nullptr;
        const bool stuck = settings.handler == "stuck";
        if (stuck) --wanted;
        if (!handler) {
            wait_for(consumer, counters, 1);
            first = Steady::now();
        }
        wait_for(consumer, counters, wanted / 2);
        const std::uint64_t at_half = counters.applied + counters.duplicates;
        half = Steady::now();
        wait_for(consumer, counters, wanted);
        end = Steady::now();
        if (clean_up) clean_up->end();
        const double second_half = static_cast<double>(wanted - std::min(wanted, at_half)) /
                                   std::chrono::duration<double>(end - half).count();
        cpu = cpu_us();
        if (handler) first = handler->first_effect();
        const long peak = memory("VmHWM");
        if (settings.kafka && !stuck) nothing_left(*source);
        const double seconds = std::chrono::duration<double>(end - first).count();
        const auto done = static_cast<double>(wanted);
        std::printf(
            "{\"messages\":%llu,\"applied\":%llu,\"duplicates\":%llu,\"seconds\":%.4f,"
            "\"per_second\":%.1f,\"second_half_per_second\":%.1f,\"cpu_us\":%.3f,\"first_message_"
            "seconds\":%.4f,"
            "\"resting_kib\":%ld,\"peak_kib\":%ld,\"syncs\":%llu",
            static_cast<unsigned long long>(wanted),
            static_cast<unsigned long long>(counters.applied.load()),
            static_cast<unsigned long long>(counters.duplicates.load()), seconds, done / seconds,
            second_half, cpu / done, std::chrono::duration<double>(first - started).count(),
            resting, peak, static_cast<unsigned long long>(written.syncs.load()));
        if (clean_up) {
            std::printf(",\"removed\":%zu,\"removing_seconds\":%.4f", clean_up->removed(),
                        clean_up->seconds());
        }
        if (const auto* works = dynamic_cast<const Works*>(handler.get())) {
            std::printf(",\"work_us\":%lld,\"longest_key_us\":%lld",
                        static_cast<long long>(works->total_us()),
                        static_cast<long long>(works->longest_key_us()));
        }
        std::printf("}\n");
        consumer.stop();
    }
    strategy.reset();
    results.reset();
    publisher.reset();
    records.reset();
    loop.io().stop();
    thread.join();
    if (store) store->stop();
    return 0;
}
