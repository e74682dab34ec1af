// For the consumer's tests: a MemoryBroker behind a lock, a strategy that does what a script says,
// and a consumer between them on a simulated loop.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "brokers/memory/memory_broker.hpp"
#include "consumer/consumer.hpp"
#include "support/manual_clock.hpp"

namespace semel::consumer::testing_world {

using namespace std::chrono_literals;
using brokers::AssignmentPtr;
using brokers::Partition;
using brokers::memory::MemoryBroker;

/// MemoryBroker and what it makes are for one thread: here all of it takes one lock.
class LockedSource final : public brokers::Source {
  public:
    LockedSource(std::unique_ptr<brokers::Source> inner, std::recursive_mutex& mutex)
        : inner_(std::move(inner)), mutex_(mutex) {}
    base::Result<void> start(brokers::Listener& listener) override {
        const std::lock_guard lock(mutex_);
        return inner_->start(listener);
    }
    void begin(const AssignmentPtr& assignment, std::optional<std::int64_t> from) override {
        const std::lock_guard lock(mutex_);
        inner_->begin(assignment, from);
    }
    std::size_t settle(std::span<const brokers::Receipt> receipts) override {
        const std::lock_guard lock(mutex_);
        ++settles;
        const std::size_t out = inner_->settle(receipts);
        settled += out;
        return out;
    }
    void drained(const AssignmentPtr& assignment) override {
        const std::lock_guard lock(mutex_);
        drained_parts.insert(assignment->partition());
        inner_->drained(assignment);
    }
    void pause(const AssignmentPtr& assignment) override {
        const std::lock_guard lock(mutex_);
        inner_->pause(assignment);
    }
    void resume(const AssignmentPtr& assignment) override {
        const std::lock_guard lock(mutex_);
        inner_->resume(assignment);
    }
    void window(std::size_t unsettled_max) override {
        const std::lock_guard lock(mutex_);
        inner_->window(unsettled_max);
    }
    base::Result<void> seek(const AssignmentPtr& assignment, std::int64_t position,
                            std::chrono::milliseconds within) override {
        const std::lock_guard lock(mutex_);
        return inner_->seek(assignment, position, within);
    }
    base::Result<void> commit(std::chrono::milliseconds within) override {
        const std::lock_guard lock(mutex_);
        return inner_->commit(within);
    }
    [[nodiscard]] std::vector<brokers::AssignmentState> state() const override {
        const std::lock_guard lock(mutex_);
        return inner_->state();
    }
    base::Result<std::vector<brokers::PartitionLag>> lag(
        std::chrono::milliseconds within) override {
        const std::lock_guard lock(mutex_);
        return inner_->lag(within);
    }
    base::Result<brokers::GroupDescription> describe(std::chrono::milliseconds within) override {
        const std::lock_guard lock(mutex_);
        return inner_->describe(within);
    }
    base::Result<std::vector<brokers::CommittedPosition>> committed(
        std::chrono::milliseconds within) override {
        const std::lock_guard lock(mutex_);
        return inner_->committed(within);
    }
    [[nodiscard]] brokers::SourceTraits traits() const override { return inner_->traits(); }
    [[nodiscard]] base::SteadyTime last_poll() const override { return inner_->last_poll(); }
    void stop(std::chrono::milliseconds drain) override {
        const std::lock_guard lock(mutex_);
        stopped = true;
        inner_->stop(drain);
    }
    [[nodiscard]] brokers::Source& inner() { return *inner_; }

    std::size_t settles = 0, settled = 0;
    std::set<Partition> drained_parts;
    std::atomic<bool> stopped{false};

  private:
    std::unique_ptr<brokers::Source> inner_;
    std::recursive_mutex& mutex_;
};

class LockedPublisher final : public brokers::Publisher {
  public:
    LockedPublisher(std::unique_ptr<brokers::Publisher> inner, std::recursive_mutex& mutex)
        : inner_(std::move(inner)), mutex_(mutex) {}
    void publish(brokers::Outgoing message, brokers::PublishDone done) override {
        const std::lock_guard lock(mutex_);
        if (hold)
            held.emplace_back(std::move(message), std::move(done));
        else
            inner_->publish(std::move(message), std::move(done));
    }
    void let_go() {
        hold = false;
        for (auto& [message, done] : std::exchange(held, {}))
            publish(std::move(message), std::move(done));
    }
    bool flush(std::chrono::milliseconds) override { return true; }
    void stop(std::chrono::milliseconds) override {}
    bool hold = false;
    std::vector<std::pair<brokers::Outgoing, brokers::PublishDone>> held;

  private:
    std::unique_ptr<brokers::Publisher> inner_;
    std::recursive_mutex& mutex_;
};

/// Holds a lane's messages one behind the other as strategy.hpp says, and fails the test where the
/// consumer does not keep its side.
class ScriptedStrategy final : public Strategy {
  public:
    /// What becomes of a message; nullopt: it runs until end() is called. Default: Applied.
    std::function<std::optional<Verdict>(Message&, bool alone)> script;
    std::function<AssignAnswer(const AssignmentPtr&)> on_assigned;  ///< On a control thread.
    std::function<base::Result<void>(const Message&)> on_letter;
    std::function<void(const AssignmentPtr&)> on_leaving;
    std::size_t capacity_max = 64;
    bool hangs = false;  ///< stop() never ends.
    bool ends_on_stop = true;

    std::vector<std::string> log;  ///< Ids in the order in which they ran.
    std::map<std::string, int> runs, letters;
    std::vector<std::string> alone_log;
    std::set<Partition> left;
    std::map<Partition, std::int64_t> marks;
    std::size_t most_at_once = 0, batches = 0, largest_batch = 0;
    bool stopped = false;

    [[nodiscard]] std::size_t capacity() const override {
        return out_ < capacity_max ? capacity_max - out_ : 0;
    }
    void run(std::vector<Message*> messages, bool alone, const Answer& answer) override {
        ASSERT_FALSE(stopped);
        ASSERT_FALSE(messages.empty());
        ASSERT_LE(messages.size(), capacity());
        ASSERT_FALSE(alone && (messages.size() != 1 || out_ != 0)) << "a suspect runs alone";
        ASSERT_FALSE(alone_out_) << "nothing beside a suspect";
        alone_out_ = alone;
        out_ += messages.size();
        most_at_once = std::max(most_at_once, out_);
        largest_batch = std::max(largest_batch, messages.size());
        ++batches;
        std::vector<std::shared_ptr<Chain>> chains;
        for (Message* one : messages) {
            if (one->lane == 0 || chains.empty() || chains.back()->lane != one->lane) {
                if (one->lane != 0) {
                    ASSERT_TRUE(lanes_.insert(one->lane).second) << "a lane runs twice";
                }
                chains.push_back(std::make_shared<Chain>());
                chains.back()->lane = one->lane;
                chains.back()->alone = alone;
                chains.back()->answer = answer;
            }
            chains.back()->messages.push_back(one);
        }
        for (const auto& chain : chains) advance(chain);
    }
    [[nodiscard]] std::vector<std::string> running() const {
        std::vector<std::string> out;
        for (const auto& [id, chain] : pending_) out.push_back(id);
        return out;
    }
    void end(const std::string& id, Verdict verdict) {
        const auto at = pending_.find(id);
        ASSERT_NE(at, pending_.end()) << id << " does not run";
        const auto chain = at->second;
        pending_.erase(at);
        if (tell(chain, std::move(verdict))) advance(chain);
        if (on_capacity) on_capacity();
    }
    AssignAnswer assigned(const AssignmentPtr& assignment) override {
        return on_assigned ? on_assigned(assignment) : AssignAnswer(BeginAt{});
    }
    void leaving(const AssignmentPtr& assignment) override {
        left.insert(assignment->partition());
        if (on_leaving) on_leaving(assignment);
    }
    void watermark(const AssignmentPtr& assignment, std::int64_t next) override {
        EXPECT_FALSE(stopped);
        marks[assignment->partition()] = next;
    }
    void letter_published(const Message& message, const Dead&,
                          std::function<void(base::Result<void>)> done) override {
        ++letters[message.id];
        done(on_letter ? on_letter(message) : base::Result<void>());
    }
    void stop(milliseconds, std::function<void()> done) override {
        stopped = true;
        if (hangs) return;
        done();
    }
    [[nodiscard]] std::string promise() const override { return "a script"; }

  private:
    struct Chain {
        std::vector<Message*> messages;
        std::size_t next = 0;
        std::uint64_t lane = 0;
        bool alone = false;
        Answer answer;
    };
    using ChainPtr = std::shared_ptr<Chain>;
    void advance(const ChainPtr& chain) {
        while (chain->next < chain->messages.size()) {
            Message& one = *chain->messages[chain->next];
            log.push_back(one.id);
            if (chain->alone) alone_log.push_back(one.id);
            ++runs[one.id];
            std::optional<Verdict> verdict =
                script ? script(one, chain->alone) : std::optional<Verdict>(Applied{});
            if (!verdict) {
                pending_[one.id] = chain;
                return;
            }
            if (!tell(chain, std::move(*verdict))) return;
        }
    }
    // False: the chain is over.
    bool tell(const ChainPtr& chain, Verdict verdict) {
        const bool goes_on =
            std::holds_alternative<Applied>(verdict) || std::holds_alternative<Duplicate>(verdict);
        if (!goes_on || chain->next + 1 == chain->messages.size()) lanes_.erase(chain->lane);
        if (chain->alone) alone_out_ = false;
        --out_;
        const Answer answer = chain->answer;
        answer(*chain->messages[chain->next++], std::move(verdict));
        if (goes_on) return chain->next < chain->messages.size();
        while (chain->next < chain->messages.size()) {
            --out_;
            answer(*chain->messages[chain->next++], Held{});
        }
        return false;
    }

    std::map<std::string, ChainPtr> pending_;
    std::set<std::uint64_t> lanes_;
    std::size_t out_ = 0;
    bool alone_out_ = false;
};

/// The topic "t" with two partitions, the topic "dead", the group "g".
struct ConsumerWorld : testing::Test {
    support::ManualClock clock;
    runtime::Loop loop{clock, runtime::Loop::Mode::simulated};
    std::recursive_mutex mutex;
    MemoryBroker broker;
    std::unique_ptr<LockedSource> source;
    std::unique_ptr<LockedPublisher> publisher;
    std::unique_ptr<deadletter::Outlet> outlet;
    ScriptedStrategy strategy;
    ConsumerCounters counters;
    ConsumerOptions options;
    std::unique_ptr<Consumer> consumer;
    const Partition p0{"t", 0}, p1{"t", 1}, dead{"dead", 0};

    void SetUp() override {
        broker.create_topic("t", 2);
        broker.create_topic("dead", 1);
        source = std::make_unique<LockedSource>(broker.join("g", {"t"}), mutex);
        publisher = std::make_unique<LockedPublisher>(broker.publisher(), mutex);
        outlet = std::make_unique<deadletter::Outlet>(
            *publisher, deadletter::Target{.topic = "dead", .exchange = {}}, deadletter::Form{});
        options.name = "orders";
        options.group = "g";
        options.identity.scope = "g/orders";
        options.identity.id.from =
            config::ValueSpec{.from = config::ValueFrom::json, .name = "/id"};
    }
    void TearDown() override {
        if (consumer != nullptr) stop();
        consumer.reset();
        source.reset();
    }
    void append(const Partition& where, const std::string& id,
                std::optional<std::string> key = std::nullopt) {
        const std::lock_guard lock(mutex);
        broker.append(where, {.key = std::move(key), .value = R"({"id":")" + id + R"("})"});
    }
    void append_raw(const Partition& where, std::optional<std::string> value,
                    std::optional<std::string> key = std::nullopt) {
        const std::lock_guard lock(mutex);
        broker.append(where, {.key = std::move(key), .value = std::move(value)});
    }
    void start() {
        consumer =
            std::make_unique<Consumer>(loop, options, *source, strategy, outlet.get(), counters);
        ASSERT_TRUE(consumer->start());
        // Claims are made on other threads.
        until([&] {
            const auto held = source->state();
            return held.size() == 2 &&
                   std::ranges::all_of(held, [](const auto& one) { return one.begun; });
        });
    }
    /// Everything that happens without time passing.
    void round() {
        {
            const std::lock_guard lock(mutex);
            broker.pump(clock.steady());
        }
        loop.run_ready();
        loop.fire_due();
        loop.run_ready();
        const std::lock_guard lock(mutex);
        broker.pump(clock.steady());
        loop.run_ready();
    }
    void advance(std::chrono::milliseconds by) {
        round();
        for (auto left = by; left > 0ms; left -= 50ms) {
            clock.advance(std::min<std::chrono::milliseconds>(left, 50ms));
            round();
        }
    }
    /// Waits for other threads; time of the world stands still.
    void until(const std::function<bool()>& condition) {
        const auto give_up = std::chrono::steady_clock::now() + 20s;
        while (round(), !condition()) {
            ASSERT_LT(std::chrono::steady_clock::now(), give_up);
            std::this_thread::yield();
        }
    }
    /// Time passes while something runs that it waits for.
    void stop() {
        std::atomic<bool> done{false};
        std::thread blocked([&] {
            consumer->stop();
            done = true;
        });
        while (!done) {
            loop.run_ready();
            if (strategy.stopped ? strategy.hangs : !strategy.running().empty()) clock.advance(1ms);
            loop.fire_due();
            std::this_thread::yield();
        }
        blocked.join();
    }
    [[nodiscard]] std::int64_t committed(const Partition& which) {
        const std::lock_guard lock(mutex);
        return broker.committed("g", which);
    }
    [[nodiscard]] std::vector<std::string> letters() {
        const std::lock_guard lock(mutex);
        std::vector<std::string> out;
        for (const auto& [offset, entry] : broker.log(dead))
            out.push_back(entry.value.value_or(""));
        return out;
    }
    [[nodiscard]] bool alarmed(const std::string& words) const {
        return std::ranges::any_of(consumer->state().alarms, [&](const std::string& one) {
            return one.find(words) != std::string::npos;
        });
    }
    [[nodiscard]] std::string condition() const { return consumer->state().condition; }
};

}  // namespace semel::consumer::testing_world
