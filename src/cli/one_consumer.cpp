#include "cli/one_consumer.hpp"

#include <algorithm>

#include "cli/consumer_outlook.hpp"
#include "inbox/dedup_table.hpp"
#include "telemetry/log.hpp"

namespace semel::cli {

namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;

/// Between two looks at a broker or database that is away.
constexpr milliseconds look_again{3000};
/// Between two rounds of what is done for a running consumer beside its messages: lag, clean-up.
constexpr milliseconds upkeep_every{15'000};
constexpr milliseconds upkeep_first{2000};
constexpr milliseconds ask_within{5000};
constexpr milliseconds publisher_stop_within{2000};
/// Rows of message_dedup removed by one statement, and statements of one round.
constexpr std::size_t purge_step = 512;
constexpr int purge_steps_max = 64;

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

OneConsumer::~OneConsumer() {
    if (thread_.joinable()) thread_.join();
    if (!parts_) return;
    parts_->consumer->stop();  // if it began after all while it was stopped
    parts_->thread.stop();
    // Their threads end first: what still runs there has messages in hand.
    parts_->handler.reset();
    parts_->strategy.reset();
}

void OneConsumer::stand(std::string condition, std::string reason) {
    const std::lock_guard lock(mutex_);
    condition_ = std::move(condition);
    reason_ = std::move(reason);
    changed_.notify_all();
}

bool OneConsumer::wait_for(milliseconds time) {
    std::unique_lock lock(mutex_);
    return !changed_.wait_for(lock, time, [this] { return stopping_; });
}

bool OneConsumer::look() {
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

void OneConsumer::run() {
    if (!look()) return;
    retention_ms_ = retention_.count();
    const auto refuse = [this](const base::Error& error) {
        log::error("consumer.refused", {{"consumer", config_.name}, {"reason", error.detail}});
        const std::lock_guard lock(mutex_);
        condition_ = "refused";
        reason_ = error.detail;
        looked_ = true;
        changed_.notify_all();
    };
    auto made = make_parts(around_, config_, retention_, counters_);
    if (!made) return refuse(made.error());
    std::unique_ptr<ConsumerParts> parts = std::move(*made);
    if (!config_.observe)
        log::info("consumer.ready",
                  {{"consumer", config_.name},
                   {"source", source_in_words(config_)},
                   {"promise", parts->strategy->promise()},
                   {"runs", runs_in_words(config_.retry)},
                   {"done_ids_known_for", config::duration_word(retention_)},
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

void OneConsumer::upkeep(std::shared_ptr<sql::Executor>& connection) {
    if (const auto lags = parts_->source->lag(ask_within)) {
        // Copies are not behind: they wait.
        const std::vector<std::string> copies = config::all_copy_targets(config_);
        std::int64_t sum = 0, waiting = 0;
        for (const brokers::PartitionLag& one : *lags) {
            const bool copy =
                std::find(copies.begin(), copies.end(), one.partition.topic) != copies.end();
            (copy ? waiting : sum) += one.lag;
        }
        lag_ = static_cast<std::uint64_t>(std::max<std::int64_t>(0, sum));
        copies_waiting_ = static_cast<std::uint64_t>(std::max<std::int64_t>(0, waiting));
    }
    if (config_.database && !config_.observe) purge(connection);
}

void OneConsumer::purge(std::shared_ptr<sql::Executor>& connection) {
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

void OneConsumer::stop() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        changed_.notify_all();
    }
    if (consumer::Runner* const consumer = running()) {
        consumer->stop();
        if (parts_->publisher) parts_->publisher->stop(publisher_stop_within);
    }
    stand("stopped", "the process ends");
}

std::optional<std::string> OneConsumer::not_alive() const {
    if (running() == nullptr) return std::nullopt;
    if (parts_->thread.silent())
        return "the loop of consumer " + config_.name + " has not run for 15 s";
    const std::string condition = parts_->consumer->state().condition;
    const bool polls = condition == "running" || condition == "paused" || condition == "ill";
    if (polls && base::system_clocks().steady() - parts_->source->last_poll() > silence_max)
        return "the poll loop of consumer " + config_.name + " has not gone round for 15 s";
    return std::nullopt;
}

base::Result<void> OneConsumer::tell(admin::ConsumerCommand command, const std::string& reason) {
    consumer::Runner* const consumer = running();
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

}  // namespace semel::cli
