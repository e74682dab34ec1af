// What the tests of the strategy `recorded` share: processes (nodes) on one store in memory, behind
// a network whose faults the test chooses, in virtual time, with handlers that do what the test
// says.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "consumer/strategies/recorded.hpp"
#include "support/faulty_store.hpp"
#include "support/virtual_time.hpp"

namespace semel::consumer {

using namespace std::chrono_literals;
using core::Status;
using support::Fate;

/// A store in memory; recorded_test.cpp knows which.
std::unique_ptr<core::Store> memory_store(base::Clock& clock);

/// Answers as told; else Handled at once.
class ScriptedHandler final : public Handler {
  public:
    using Script = std::function<std::optional<HandlerOutcome>(const Message&, const Attempt&)>;
    /// Nullopt: the call stays open until end() or the process's death.
    Script script;
    std::vector<std::string> calls;  ///< Ids, in the order of their starts.
    std::vector<Attempt> attempts;   ///< Beside them.
    std::size_t most_at_once = 0;
    bool cancelled = false;
    bool cancel_ends = true;  ///< cancel_all ends what is open.

    void handle(const Message& message, const Attempt& attempt, Done done) override {
        calls.push_back(message.id);
        attempts.push_back(attempt);
        std::optional<HandlerOutcome> outcome = Handled{};
        if (script) outcome = script(message, attempt);
        open_.emplace(message.id, std::move(done));
        most_at_once = std::max(most_at_once, open_.size());
        if (outcome) end(message.id, std::move(*outcome));
    }
    void cancel_all() override {
        cancelled = true;
        while (cancel_ends && !open_.empty())
            end(open_.begin()->first, HandledUnknown{"cancelled"});
    }
    [[nodiscard]] std::string name() const override { return "the script"; }

    void end(const std::string& id, HandlerOutcome outcome = Handled{}) {
        auto call = open_.extract(id);
        ASSERT_FALSE(call.empty()) << id << " is not running";
        call.mapped()(std::move(outcome));
    }
    [[nodiscard]] bool running(const std::string& id) const { return open_.contains(id); }
    [[nodiscard]] std::size_t open() const { return open_.size(); }
    [[nodiscard]] std::size_t count(const std::string& id) const {
        return static_cast<std::size_t>(std::count(calls.begin(), calls.end(), id));
    }

  private:
    std::multimap<std::string, Done> open_;
};

struct RecordedTest : testing::Test, support::VirtualTime {
    static constexpr milliseconds lease = 10s;

    RecordedTest() { options.retry.jitter = 0; }

    /// What a process has sent is on its way when it dies: its network outlives it.
    struct Network {
        explicit Network(RecordedTest& t)
            : store(
                  *t.truth, [&t](auto d, auto fn) { t.later(d, std::move(fn)); },
                  [this](std::uint64_t bound) { return random ? random(bound) : 0; }) {}
        std::function<std::uint64_t(std::uint64_t)> random;  ///< Empty: always 0.
        support::FaultyStore store;
    };
    std::deque<Network> networks;

    /// One process: dies without a word when it is destroyed.
    struct Node {
        Node(RecordedTest& t, const std::string& id)
            : network(t.networks.emplace_back(t)),
              store(network.store),
              records(records_on_store(t.loop, store, t.secret, "the store")) {
            RecordedOptions own = t.options;
            own.owner = {id, {}};
            strategy = make_recorded(t.loop, std::move(own), *records, handler, counters);
        }
        Network& network;
        support::FaultyStore& store;
        std::unique_ptr<Records> records;
        ScriptedHandler handler;
        ConsumerCounters counters;
        std::map<std::string, std::vector<Verdict>> told;  ///< By id.
        std::unique_ptr<Strategy> strategy;

        void run(std::vector<Message*> batch, bool alone = false) {
            for (Message* one : batch) ++one->runs;
            strategy->run(std::move(batch), alone, [this](Message& one, Verdict verdict) {
                told[one.id].push_back(std::move(verdict));
            });
        }
        template <class T>
        [[nodiscard]] bool last(const std::string& id) const {
            const auto found = told.find(id);
            return found != told.end() && std::holds_alternative<T>(found->second.back());
        }
        template <class T>
        T get(const std::string& id) const {
            if (last<T>(id)) return std::get<T>(told.at(id).back());
            ADD_FAILURE() << id << " was told "
                          << (told.contains(id) ? std::to_string(told.at(id).back().index())
                                                : "nothing");
            return T{};
        }
        [[nodiscard]] bool answered(const std::string& id) const { return told.contains(id); }
    };

    std::unique_ptr<core::Store> truth = memory_store(clock);
    base::Hmac secret{"the deployment's secret"};
    RecordedOptions options{.name = "orders",
                            .owner = {},
                            .lease = lease,
                            .patience = 3s,
                            .concurrency = 4,
                            .retry = {},
                            .store_promise = {}};
    brokers::AssignmentPtr partition =
        std::make_shared<brokers::Assignment>(brokers::Partition{"orders", 0}, 1);
    std::deque<Message> messages;

    std::unique_ptr<Node> node(const std::string& id) { return std::make_unique<Node>(*this, id); }

    /// Another delivery of the message `id`.
    Message& message(const std::string& id, std::uint64_t lane = 0,
                     const std::string& body = "body") {
        Message& made = messages.emplace_back();
        made.source = "orders";
        made.id = id;
        made.key = base::sha256("orders/" + id);
        made.fingerprint.raw = base::sha256(body);
        made.lane = lane;
        made.delivery.receipt.assignment = partition;
        return made;
    }
    core::RecordPtr record(const std::string& id) {
        core::RecordPtr found;
        const base::Digest key = base::sha256("orders/" + id);
        const base::Digest stored = secret("message" + std::string(key.view()));
        truth->submit({core::Item{stored, core::Get{}}}, [&](core::BatchResults results) {
            found = std::get<core::Found>(results.front()->outcome).record;
        });
        return found;
    }
    /// Batches with such an operation have this fate, `times` times.
    template <class Operation>
    static void strike(Node& node, Fate fate, int times = 1) {
        node.store.script =
            [fate, times](const std::vector<core::Item>& items) mutable -> std::optional<Fate> {
            const bool meant = std::any_of(items.begin(), items.end(), [](const core::Item& item) {
                return std::holds_alternative<Operation>(item.operation);
            });
            if (!meant || times == 0) return std::nullopt;
            --times;
            return fate;
        };
    }
    void settle() { run_for(100ms); }
    /// Lets the owner's leases run out.
    void die(std::unique_ptr<Node>& node) {
        node.reset();
        run_for(lease + 1s);
    }
};

}  // namespace semel::consumer
