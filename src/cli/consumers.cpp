#include "cli/consumers.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <thread>

#include "cli/consumer_outlook.hpp"
#include "cli/guarantees.hpp"
#include "cli/loop_thread.hpp"
#include "consumer/consumer.hpp"
#include "consumer/handlers/http.hpp"
#include "consumer/strategies/recorded.hpp"
#include "consumer/strategies/state.hpp"
#include "consumer/strategies/transaction.hpp"
#include "inbox/dedup_table.hpp"
#include "telemetry/log.hpp"

namespace semel::cli {

namespace {

using config::ConsumerConfig;
using config::ConsumerStrategy;
using config::HandlerKind;
using namespace std::chrono_literals;
using std::chrono::milliseconds;

/// Between two looks at a broker or database that is away.
constexpr milliseconds look_again{3000};
/// Between two rounds of what is done for a running consumer beside its messages: lag, clean-up.
constexpr milliseconds upkeep_every{15'000};
constexpr milliseconds upkeep_first{2000};
constexpr milliseconds ask_within{5000};
/// How long a group of one is asked about before its member gives up.
constexpr milliseconds group_patience{30'000};
constexpr milliseconds publisher_stop_within{2000};
/// Rows of message_dedup removed by one statement, and statements of one round.
constexpr std::size_t purge_step = 512;
constexpr int purge_steps_max = 64;

consumer::RetryRules rules_of(const config::RetryConfig& retry) {
    return {.attempts = retry.attempts,
            .crashes = retry.crashes,
            .initial = retry.initial,
            .factor = retry.factor,
            .max = retry.max,
            .jitter = retry.jitter,
            .delays = retry.delays};
}

std::string host_name() {
    std::array<char, 256> name{};
    if (::gethostname(name.data(), name.size() - 1) != 0) return "?";
    return name.data();
}

const char* name_of(admin::ConsumerCommand command) {
    switch (command) {
        case admin::ConsumerCommand::pause:
            return "pause";
        case admin::ConsumerCommand::resume:
            return "resume";
        case admin::ConsumerCommand::drain:
            return "drain";
    }
    return "";
}

}  // namespace

/// One consumer with everything that is its own. Its thread looks until broker and database are
/// there, makes it, starts it, and then keeps up what is beside its messages.
class Consumers::One {
  public:
    One(const ConsumersAround& around, const ConsumerConfig& config)
        : around_(around), config_(config) {
        watch();
    }
    ~One();
    One(const One&) = delete;
    One& operator=(const One&) = delete;

    /// Begins to look.
    void prepare() {
        thread_ = std::thread([this] { run(); });
    }
    /// Blocks until it was looked at once. An Error: it can never run.
    base::Result<void> looked_at() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return looked_; });
        if (condition_ == "refused")
            return base::Error{.code = base::ErrorCode::invalid_argument,
                               .detail = "consumer " + config_.name + ": " + reason_};
        return {};
    }
    void start() {
        const std::lock_guard lock(mutex_);
        may_start_ = true;
        changed_.notify_all();
    }
    /// Blocks.
    void stop();

    [[nodiscard]] std::optional<std::string> not_alive() const;
    [[nodiscard]] admin::ConsumerView view() const;
    base::Result<admin::ConsumerLags> lag();
    base::Result<void> tell(admin::ConsumerCommand command, const std::string& reason);
    [[nodiscard]] const std::string& name() const { return config_.name; }

  private:
    /// In the order in which they use each other: the last one first to go.
    struct Parts {
        LoopThread thread;
        std::unique_ptr<http::Client> client;
        std::unique_ptr<consumer::Records> records;
        std::unique_ptr<consumer::Handler> handler;
        std::unique_ptr<brokers::Publisher> publisher;
        std::unique_ptr<deadletter::Outlet> outlet;
        std::unique_ptr<consumer::Strategy> strategy;
        std::unique_ptr<brokers::Source> source;
        std::unique_ptr<consumer::Consumer> consumer;
    };

    void run();
    /// Until it is ready; false: it never will be, or the process ends.
    bool look();
    base::Result<void> make(Parts& parts);
    base::Result<void> make_strategy(Parts& parts);
    consumer::PublishResult results(Parts& parts) const;
    void upkeep(std::shared_ptr<sql::Executor>& connection);
    void purge(std::shared_ptr<sql::Executor>& connection);
    void watch();
    void stand(std::string condition, std::string reason);
    /// False: the process ends.
    bool wait_for(milliseconds time);
    [[nodiscard]] consumer::Consumer* running() const {
        const std::lock_guard lock(mutex_);
        return started_ ? parts_->consumer.get() : nullptr;
    }

    const ConsumersAround& around_;
    const ConsumerConfig& config_;
    consumer::ConsumerCounters counters_;
    std::atomic<std::uint64_t> lag_{0};
    std::atomic<std::uint64_t> purged_{0};
    std::atomic<std::int64_t> retention_ms_{0};
    milliseconds retention_{0};
    std::unique_ptr<Parts> parts_;  ///< Made by the thread before started_ is set.
    std::thread thread_;

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    // Guarded by mutex_.
    bool looked_ = false;
    bool may_start_ = false;
    bool started_ = false;
    bool stopping_ = false;
    std::string condition_ = "starting";
    std::string reason_;
};

Consumers::One::~One() {
    if (thread_.joinable()) thread_.join();
    if (!parts_) return;
    parts_->consumer->stop();  // if it began after all while it was stopped
    parts_->thread.stop();
    // Their threads end first: what still runs there has messages in hand.
    parts_->handler.reset();
    parts_->strategy.reset();
}

void Consumers::One::stand(std::string condition, std::string reason) {
    const std::lock_guard lock(mutex_);
    condition_ = std::move(condition);
    reason_ = std::move(reason);
    changed_.notify_all();
}

bool Consumers::One::wait_for(milliseconds time) {
    std::unique_lock lock(mutex_);
    return !changed_.wait_for(lock, time, [this] { return stopping_; });
}

bool Consumers::One::look() {
    std::string last;
    for (;;) {
        const Outlook outlook =
            look_at_consumer(config_, around_.config_file, around_.leaves, true);
        retention_ = outlook.retention;
        std::string reason;
        for (const auto* list : {&outlook.wrong, &outlook.away}) {
            if (reason.empty() && !list->empty()) reason = list->front();
        }
        if (!outlook.wrong.empty()) {
            log::error("consumer.refused", {{"consumer", config_.name}, {"reason", reason}});
            stand("refused", reason);
        } else if (!outlook.away.empty()) {
            if (reason != last)
                log::warn("consumer.waiting", {{"consumer", config_.name}, {"reason", reason}});
            last = reason;
            stand("waiting", reason + "; it is asked again every 3 s");
        } else {
            for (const std::string& note : outlook.notes)
                log::warn("consumer.notice", {{"consumer", config_.name}, {"notice", note}});
        }
        {
            const std::lock_guard lock(mutex_);
            looked_ = looked_ || !outlook.wrong.empty() || !outlook.away.empty();
            changed_.notify_all();
        }
        if (!outlook.wrong.empty()) return false;
        if (outlook.away.empty()) return true;
        if (!wait_for(look_again)) return false;
    }
}

consumer::PublishResult Consumers::One::results(Parts& parts) const {
    const std::string target = config_.handler.ai.result_topic;
    if (target.empty()) return {};
    brokers::Publisher* const publisher = parts.publisher.get();
    const bool kafka = config_.kafka.has_value();
    return [publisher, target, kafka](std::string id, std::string body,
                                      std::function<void(base::Result<void>)> done) {
        brokers::Outgoing message;
        message.topic = target;
        message.value = std::move(body);
        if (kafka) {
            message.key = id;
            message.headers.push_back({"message-id", id});
            message.headers.push_back({"content-type", "application/json"});
        } else {
            message.properties.message_id = id;
            message.properties.content_type = "application/json";
        }
        publisher->publish(std::move(message),
                           [done = std::move(done)](base::Result<brokers::PublishedAt> at) {
                               if (at) {
                                   done({});
                               } else {
                                   done(at.error());
                               }
                           });
    };
}

base::Result<void> Consumers::One::make_strategy(Parts& parts) {
    runtime::Loop& loop = parts.thread.loop;
    const core::Owner owner{.id = around_.owner, .peer = {}};
    const consumer::RetryRules retry = rules_of(config_.retry);
    const bool mismatch_is_duplicate = config_.id.on_mismatch == config::OnMismatch::duplicate;
    inbox::Place place;
    inbox::Connect connect;
    std::string table;
    if (config_.database) {
        place.schema = config_.database->schema;
        connect = around_.leaves.consumers.connect(*config_.database);
        table = "table message_dedup of " + config_.database->shown_url;
    }
    if (config_.strategy == ConsumerStrategy::store && config_.handler.kind == HandlerKind::ai) {
        parts.strategy = consumer::make_ai(loop,
                                           {.config = config_.handler.ai,
                                            .concurrency = config_.concurrency,
                                            .retry = retry,
                                            .hold_unknown = config_.hold_unknown,
                                            .mismatch_is_duplicate = mismatch_is_duplicate},
                                           around_.ask, results(parts), counters_);
        return {};
    }
    if (config_.strategy == ConsumerStrategy::transaction) {
        consumer::TransactionOptions options;
        options.owner = "semel " + host_name() + " " + around_.owner;
        options.inbox.scope = config_.scope;
        options.inbox.place = place;
        options.inbox.retention = retention_;
        options.partitions = config_.kafka.has_value();
        options.in_order = config_.ordering == config::Ordering::partition;
        options.connections = config_.database->connections;
        options.retry = retry;
        options.mismatch_is_duplicate = mismatch_is_duplicate;
        options.retention_dead = config_.retention_dead;
        options.dialect = config_.database->kind == config::DatabaseKind::postgres
                              ? sql::Dialect::postgres
                              : sql::Dialect::mysql;
        std::variant<consumer::SqlEffects, consumer::TransactionCallback> effect{
            consumer::SqlEffects{config_.handler.sql}};
        if (config_.handler.kind == HandlerKind::callback)
            effect = around_.callbacks.transactions.at(config_.name);
        auto made = consumer::make_transaction(loop, std::move(options), connect, std::move(effect),
                                               counters_);
        if (!made) return made.error();
        parts.strategy = std::move(*made);
        return {};
    }
    if (config_.strategy == ConsumerStrategy::store) {
        parts.records = consumer::records_on_store(loop, around_.store, around_.secret,
                                                   store_in_words(around_.config.store));
    } else {
        inbox::DedupOptions options;
        options.scope = config_.scope;
        options.place = place;
        parts.records = consumer::records_on_table(loop, std::move(options), connect,
                                                   config_.database->connections, table);
    }
    if (config_.strategy == ConsumerStrategy::state) {
        auto made = consumer::make_state(loop,
                                         {.config = config_.state,
                                          .connections = config_.database->connections,
                                          .retry = retry,
                                          .retention_dead = config_.retention_dead,
                                          .name = config_.name,
                                          .owner = owner},
                                         connect, *parts.records, counters_);
        if (!made) return made.error();
        parts.strategy = std::move(*made);
        return {};
    }
    if (config_.handler.kind == HandlerKind::callback) {
        parts.handler = consumer::make_callback_handler(
            around_.callbacks.functions.at(config_.name), config_.concurrency);
    } else {
        parts.client = http::make_client(loop, config_.handler.http.ca_file);
        auto handler = consumer::make_http_handler(loop, *parts.client, config_.handler.http);
        if (!handler) return handler.error();
        parts.handler = std::move(*handler);
    }
    consumer::RecordedOptions options;
    options.name = config_.name;
    options.owner = owner;
    options.lease = around_.config.engine.lease;
    options.patience = std::min(options.patience, options.lease / 2);  // a grant must arrive alive
    options.concurrency = config_.concurrency;
    options.slot_until_recorded = true;
    options.retry = retry;
    options.hold_unknown = config_.hold_unknown;
    options.mismatch_is_duplicate = mismatch_is_duplicate;
    options.retention = retention_;
    options.retention_dead = config_.retention_dead;
    options.store_promise = config_.strategy == ConsumerStrategy::store
                                ? around_.store.durability().summary
                                : "the records are rows of " + table;
    parts.strategy = consumer::make_recorded(loop, std::move(options), *parts.records,
                                             *parts.handler, counters_);
    return {};
}

base::Result<void> Consumers::One::make(Parts& parts) {
    const bool of_one = needs_group_of_one(config_, around_.config);
    SourceNames names{
        .client_id = "semel-" + config_.name, .commit_metadata = "semel", .exclusive = of_one};
    if (keeps_records_in_store(config_) && !around_.config.store.shared()) {
        const std::string mark = consumer::store_mark(around_.store_id);
        names.client_id += "-" + mark;
        names.commit_metadata = mark;
    }
    auto source = around_.leaves.consumers.make_source(config_, names);
    if (!source) return source.error();
    parts.source = std::move(*source);
    if (!config_.dead_letter.stop || !config_.handler.ai.result_topic.empty()) {
        auto publisher = around_.leaves.consumers.make_publisher(config_);
        if (!publisher) return publisher.error();
        parts.publisher = std::move(*publisher);
    }
    if (!config_.dead_letter.stop) {
        const config::DeadLetterConfig& letters = config_.dead_letter;
        deadletter::Target target;
        if (config_.kafka) {
            target.topic = letters.topic;
        } else if (letters.exchange.empty()) {
            target.topic = letters.queue;
        } else {
            target.exchange = letters.exchange;
            target.topic = config_.rabbitmq->queue;  // the routing key
        }
        parts.outlet = std::make_unique<deadletter::Outlet>(
            *parts.publisher, std::move(target),
            deadletter::Form{.body = letters.body,
                             .headers = letters.headers,
                             .kafka = config_.kafka.has_value()});
    }
    if (auto made = make_strategy(parts); !made) return made;

    consumer::ConsumerOptions options;
    options.name = config_.name;
    options.group = config_.group();
    options.identity = {.scope = config_.scope,
                        .id = config_.id,
                        .business_key = config_.business_key,
                        .payload = config_.payload,
                        .ordering = config_.ordering};
    options.breaker.dead_share = config_.breaker_dead_share;
    options.park_limit = config_.park_limit;
    options.letters_stop = config_.dead_letter.stop;
    if (of_one && config_.kafka) {
        options.check_group = [id = around_.store_id,
                               group = config_.group()](brokers::Source& asked) {
            return consumer::check_unshared_group(asked, id, group, group_patience);
        };
    }
    parts.consumer =
        std::make_unique<consumer::Consumer>(parts.thread.loop, std::move(options), *parts.source,
                                             *parts.strategy, parts.outlet.get(), counters_);
    return {};
}

void Consumers::One::run() {
    if (!look()) return;
    retention_ms_ = retention_.count();
    auto parts = std::make_unique<Parts>();
    const auto refuse = [this](const base::Error& error) {
        log::error("consumer.refused", {{"consumer", config_.name}, {"reason", error.detail}});
        const std::lock_guard lock(mutex_);
        condition_ = "refused";
        reason_ = error.detail;
        looked_ = true;
        changed_.notify_all();
    };
    if (const auto made = make(*parts); !made) return refuse(made.error());
    log::info("consumer.ready", {{"consumer", config_.name},
                                 {"source", source_in_words(config_)},
                                 {"promise", parts->strategy->promise()},
                                 {"runs", runs_in_words(config_.retry)},
                                 {"done_ids_known_for", duration_in_words(retention_)},
                                 {"dead_letters", parts->outlet ? parts->outlet->target().name()
                                                                : std::string("none: it stops")}});
    {
        std::unique_lock lock(mutex_);
        parts_ = std::move(parts);
        looked_ = true;
        condition_ = "starting";
        reason_.clear();
        changed_.notify_all();
        changed_.wait(lock, [this] { return may_start_ || stopping_; });
        if (stopping_) return;
    }
    parts_->thread.start();
    if (const auto begun = parts_->consumer->start(); !begun) return refuse(begun.error());
    {
        const std::lock_guard lock(mutex_);
        started_ = true;
        condition_ = "running";
    }
    std::shared_ptr<sql::Executor> connection;
    bool goes_on = wait_for(upkeep_first);
    while (goes_on) {
        upkeep(connection);
        goes_on = wait_for(upkeep_every);
    }
}

void Consumers::One::upkeep(std::shared_ptr<sql::Executor>& connection) {
    if (const auto lags = parts_->source->lag(ask_within)) {
        std::int64_t sum = 0;
        for (const brokers::PartitionLag& one : *lags) sum += one.lag;
        lag_ = static_cast<std::uint64_t>(std::max<std::int64_t>(0, sum));
    }
    if (config_.database) purge(connection);
}

void Consumers::One::purge(std::shared_ptr<sql::Executor>& connection) {
    if (!connection) {
        auto made = around_.leaves.consumers.connect(*config_.database)();
        if (std::holds_alternative<sql::Problem>(made)) return;
        connection = std::move(std::get<0>(made));
    }
    inbox::DedupOptions options;
    options.scope = config_.scope;
    options.place.schema = config_.database->schema;
    const inbox::DedupTable table(std::move(options));
    for (int step = 0; step < purge_steps_max; ++step) {
        const auto gone = table.purge(*connection, purge_step);
        if (!gone) {
            connection.reset();
            return;
        }
        purged_ += *gone;
        if (*gone < purge_step || !wait_for(10ms)) return;
    }
}

void Consumers::One::stop() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        changed_.notify_all();
    }
    if (consumer::Consumer* const consumer = running()) {
        consumer->stop();
        if (parts_->publisher) parts_->publisher->stop(publisher_stop_within);
    }
    stand("stopped", "the process ends");
}

std::optional<std::string> Consumers::One::not_alive() const {
    if (running() == nullptr) return std::nullopt;
    if (parts_->thread.silent())
        return "the loop of consumer " + config_.name + " has not run for 15 s";
    const std::string condition = parts_->consumer->state().condition;
    const bool polls = condition == "running" || condition == "paused" || condition == "ill";
    if (polls && base::system_clocks().steady() - parts_->source->last_poll() > silence_max)
        return "the poll loop of consumer " + config_.name + " has not gone round for 15 s";
    return std::nullopt;
}

admin::ConsumerView Consumers::One::view() const {
    admin::ConsumerView out;
    out.name = config_.name;
    out.group = config_.group();
    out.source = source_in_words(config_);
    out.strategy = strategy_in_words(config_);
    out.promise = promise_in_words(config_, around_.config);
    const auto count = [&out](const char* name, const std::atomic<std::uint64_t>& value) {
        out.counts.emplace_back(name, value.load());
    };
    count("received", counters_.received);
    count("applied", counters_.applied);
    count("duplicates", counters_.duplicates);
    count("skipped", counters_.skipped);
    count("mismatches", counters_.mismatches);
    count("retries", counters_.retries);
    count("unknown_outcomes", counters_.unknown_outcomes);
    count("takeovers", counters_.takeovers);
    std::uint64_t dead = 0;
    for (const auto& of_class : counters_.dead) dead += of_class.load();
    out.counts.emplace_back("dead_letters", dead);
    consumer::Consumer* const consumer = running();
    if (consumer == nullptr) {
        const std::lock_guard lock(mutex_);
        out.condition = condition_;
        out.reason = reason_;
        return out;
    }
    consumer::ConsumerState state = consumer->state();
    out.promise = std::move(state.promise);
    out.condition = std::move(state.condition);
    out.reason = std::move(state.reason);
    out.in_hand = state.in_hand;
    out.running = state.running;
    out.waiting = state.waiting;
    out.parked = state.parked;
    out.alarms = std::move(state.alarms);
    for (const brokers::AssignmentState& one : state.partitions) {
        out.partitions.push_back({.topic = one.assignment->topic(),
                                  .number = one.assignment->partition().number,
                                  .position = one.position,
                                  .committable = one.committable,
                                  .committed = one.committed,
                                  .in_flight = one.in_flight,
                                  .paused = one.paused,
                                  .held = one.held});
    }
    return out;
}

base::Result<admin::ConsumerLags> Consumers::One::lag() {
    if (running() == nullptr)
        return base::Error{.detail = "consumer " + config_.name +
                                     " does not run; GET "
                                     "/admin/consumers/" +
                                     config_.name + " says why"};
    const auto lags = parts_->source->lag(ask_within);
    if (!lags) return lags.error();
    admin::ConsumerLags out;
    for (const brokers::PartitionLag& one : *lags) {
        out.partitions.push_back({.topic = one.partition.topic,
                                  .number = one.partition.number,
                                  .begin = one.begin,
                                  .end = one.end,
                                  .committed = one.committed,
                                  .lag = one.lag});
    }
    out.behind_ms = counters_.watermark_age_ms.load();
    return out;
}

base::Result<void> Consumers::One::tell(admin::ConsumerCommand command, const std::string& reason) {
    consumer::Consumer* const consumer = running();
    if (consumer == nullptr)
        return base::Error{.detail = "consumer " + config_.name +
                                     " does not run yet; its state says "
                                     "why"};
    log::info("consumer.told",
              {{"consumer", config_.name}, {"command", name_of(command)}, {"reason", reason}});
    switch (command) {
        case admin::ConsumerCommand::pause:
            consumer->pause(reason.empty() ? "by the admin API" : reason);
            break;
        case admin::ConsumerCommand::resume:
            consumer->resume();
            break;
        case admin::ConsumerCommand::drain:
            consumer->drain();
            break;
    }
    return {};
}

void Consumers::One::watch() {
    telemetry::Metrics& metrics = around_.metrics;
    const auto watch = [&](std::string_view name, const std::atomic<std::uint64_t>& value) {
        metrics.watch_consumer(name, config_.name, [&value] {
            return static_cast<double>(value.load(std::memory_order_relaxed));
        });
    };
    consumer::ConsumerCounters& c = counters_;
    watch("semel_messages_received_total", c.received);
    watch("semel_effects_applied_total", c.applied);
    watch("semel_duplicates_suppressed_total", c.duplicates);
    watch("semel_messages_skipped_total", c.skipped);
    watch("semel_payload_mismatch_total", c.mismatches);
    watch("semel_message_retries_total", c.retries);
    watch("semel_message_not_yet_total", c.not_yet);
    watch("semel_message_busy_total", c.busy);
    watch("semel_message_fenced_total", c.fenced);
    watch("semel_message_unknown_outcomes_total", c.unknown_outcomes);
    watch("semel_message_takeovers_total", c.takeovers);
    watch("semel_message_suspects_total", c.suspects);
    watch("semel_dead_letters_failed_total", c.letters_failed);
    watch("semel_breaker_opened_total", c.breaker_opened);
    watch("semel_partitions_assigned_total", c.assigned);
    watch("semel_partitions_revoked_total", c.revoked);
    watch("semel_partitions_lost_total", c.lost);
    watch("semel_cleanup_deleted_total", purged_);
    watch("semel_incomplete_offsets", c.in_hand);
    watch("semel_inflight", c.running);
    watch("semel_messages_waiting", c.waiting);
    watch("semel_messages_parked", c.parked);
    watch("semel_partitions", c.partitions);
    watch("semel_partitions_paused", c.paused_partitions);
    watch("semel_consumer_paused", c.paused);
    watch("semel_consumer_lag", lag_);
    for (std::size_t i = 0; i < c.dead.size(); ++i) {
        metrics.watch_consumer(
            "semel_dead_letters_total", config_.name,
            [&value = c.dead[i]] { return static_cast<double>(value.load()); },
            consumer::name_of(static_cast<consumer::DeadClass>(i)));
    }
    metrics.watch_consumer("semel_commit_watermark_age_seconds", config_.name,
                           [&c] { return static_cast<double>(c.watermark_age_ms.load()) / 1000; });
    metrics.watch_consumer("semel_dedup_horizon_seconds", config_.name,
                           [this] { return static_cast<double>(retention_ms_.load()) / 1000; });
}

// ---------------------------------------------------------------- all of them

Consumers::Consumers(ConsumersAround around) : around_(std::move(around)) {
    for (const ConsumerConfig& consumer : around_.config.consumers)
        all_.push_back(std::make_unique<One>(around_, consumer));
}

Consumers::~Consumers() = default;

base::Result<void> Consumers::prepare() {
    for (const auto& one : all_) one->prepare();
    base::Result<void> first;
    for (const auto& one : all_) {
        auto looked = one->looked_at();
        if (first && !looked) first = looked;
    }
    return first;
}

void Consumers::start() {
    for (const auto& one : all_) one->start();
}

void Consumers::stop() {
    std::vector<std::thread> threads;
    threads.reserve(all_.size());
    for (const auto& one : all_) threads.emplace_back([&one] { one->stop(); });
    for (std::thread& thread : threads) thread.join();
}

std::vector<std::string> Consumers::not_alive() const {
    std::vector<std::string> reasons;
    for (const auto& one : all_) {
        if (auto reason = one->not_alive()) reasons.push_back(std::move(*reason));
    }
    return reasons;
}

Consumers::One* Consumers::find(const std::string& name) {
    for (const auto& one : all_) {
        if (one->name() == name) return one.get();
    }
    return nullptr;
}

admin::ConsumerControls Consumers::controls() {
    admin::ConsumerControls out;
    out.list = [this] {
        std::vector<admin::ConsumerView> views;
        for (const auto& one : all_) views.push_back(one->view());
        return views;
    };
    out.lag = [this](const std::string& name) -> std::optional<base::Result<admin::ConsumerLags>> {
        One* const one = find(name);
        if (one == nullptr) return std::nullopt;
        return one->lag();
    };
    out.tell = [this](const std::string& name, admin::ConsumerCommand command,
                      const std::string& reason) -> std::optional<base::Result<void>> {
        One* const one = find(name);
        if (one == nullptr) return std::nullopt;
        return one->tell(command, reason);
    };
    return out;
}

}  // namespace semel::cli
