// What the tests of the strategies on a real database share: a loop with its thread, messages, and
// a strategy that is run as the consumer would.
#pragma once

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "config/consumers.hpp"
#include "consumer/consumer.hpp"
#include "consumer/strategy.hpp"
#include "inbox/names.hpp"
#include "integration/inbox_databases.hpp"
#include "runtime/loop.hpp"

namespace semel::consumer::test {

using namespace std::chrono_literals;
using sql::Dialect;
using support::DroppingProxy;
using support::InboxDatabase;

inline config::ValueSpec json(const char* pointer) {
    return {.from = config::ValueFrom::json, .name = pointer};
}

inline constexpr const char* scope = "shop/stock";
inline constexpr std::chrono::seconds patience{60};

class FakeAssignment final : public brokers::Assignment {
  public:
    FakeAssignment(std::string topic, std::int32_t number,
                   std::optional<std::int64_t> committed = {}, std::string metadata = {})
        : Assignment({std::move(topic), number}, 1) {
        committed_ = committed;
        committed_metadata_ = std::move(metadata);
    }
};
inline brokers::AssignmentPtr assignment(std::optional<std::int64_t> committed = {},
                                         std::string metadata = {}) {
    return std::make_shared<FakeAssignment>("orders", 0, committed, std::move(metadata));
}

/// A message with a JSON payload; offsets and ids are the caller's.
inline std::unique_ptr<Message> message(const brokers::AssignmentPtr& of, std::int64_t offset,
                                        std::string id, const std::string& json,
                                        std::uint64_t lane = 0) {
    auto one = std::make_unique<Message>();
    one->delivery = brokers::make_delivery({of, offset, 0}, {}, std::string_view(json), {});
    one->source = "orders";
    one->id = std::move(id);
    one->key = inbox::key_hash({scope, one->source, one->id});
    one->fingerprint.raw = base::sha256(json);
    one->lane = lane;
    return one;
}

/// A loop on a thread of its own, and a strategy on it.
class Running {
  public:
    Running() : guard_(boost::asio::make_work_guard(loop_.io())) {
        thread_ = std::thread([this] { loop_.io().run(); });
    }
    ~Running() {
        end();
        loop_.io().stop();  // a timer that was cancelled may still be armed
        thread_.join();
    }
    /// Before what the strategy uses is gone.
    void end() {
        if (strategy_ != nullptr) stop(20s);
        on_loop([this] { strategy_.reset(); });
    }
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;

    [[nodiscard]] runtime::Loop& loop() { return loop_; }
    [[nodiscard]] ConsumerCounters& counters() { return counters_; }
    [[nodiscard]] Strategy& strategy() { return *strategy_; }
    void take(base::Result<std::unique_ptr<Strategy>> made) {
        if (!made) throw std::runtime_error(made.error().detail);
        strategy_ = std::move(*made);
    }

    template <class Fn>
    void on_loop(Fn&& fn) {
        std::promise<void> done;
        loop_.post([&] {
            fn();
            done.set_value();
        });
        await(done.get_future());
    }
    template <class T>
    static T await(std::future<T> future) {
        if (future.wait_for(patience) != std::future_status::ready)
            throw std::runtime_error("no answer in time");
        return future.get();
    }

    /// The verdicts, in the messages' order.
    std::vector<Verdict> run(const std::vector<Message*>& messages) {
        return await(begin(messages));
    }
    Verdict run(Message& one) { return run(std::vector<Message*>{&one}).front(); }
    /// As the consumer runs a suspect.
    Verdict run_alone(Message& one) { return await(begin({&one}, true)).front(); }
    std::future<std::vector<Verdict>> begin(const std::vector<Message*>& messages,
                                            bool alone = false) {
        struct Out {
            std::vector<Message*> messages;
            std::vector<std::optional<Verdict>> verdicts;
            std::size_t missing = 0;
            std::promise<std::vector<Verdict>> promise;
        };
        auto out = std::make_shared<Out>();
        out->messages = messages;
        out->verdicts.resize(messages.size());
        out->missing = messages.size();
        auto future = out->promise.get_future();
        loop_.post([this, out, alone] {
            strategy_->run(out->messages, alone, [out](Message& one, Verdict verdict) {
                const auto at = std::find(out->messages.begin(), out->messages.end(), &one);
                auto& place = out->verdicts[static_cast<std::size_t>(at - out->messages.begin())];
                if (place) throw std::logic_error("a message was answered twice");
                place = std::move(verdict);
                if (--out->missing > 0) return;
                std::vector<Verdict> all;
                for (auto& verdict_of_one : out->verdicts)
                    all.push_back(std::move(*verdict_of_one));
                out->promise.set_value(std::move(all));
            });
        });
        return future;
    }
    /// Asks again while the message is busy or not due.
    Verdict run_when_due(Message& one) {
        const auto until = std::chrono::steady_clock::now() + patience;
        while (std::chrono::steady_clock::now() < until) {
            Verdict verdict = run(one);
            const auto* retry = std::get_if<Retry>(&verdict);
            const bool early =
                (retry != nullptr && !retry->charged) || std::holds_alternative<Busy>(verdict);
            if (!early) return verdict;
        }
        throw std::runtime_error("it is never due");
    }
    base::Result<void> letter_published(const Message& one, const Dead& dead) {
        std::promise<base::Result<void>> done;
        loop_.post([&] {
            strategy_->letter_published(
                one, dead, [&](base::Result<void> result) { done.set_value(std::move(result)); });
        });
        return await(done.get_future());
    }
    void watermark(const brokers::AssignmentPtr& of, std::int64_t next) {
        on_loop([&] { strategy_->watermark(of, next); });
    }
    void stop(std::chrono::milliseconds within) {
        std::promise<void> done;
        loop_.post([&] { strategy_->stop(within, [&] { done.set_value(); }); });
        await(done.get_future());
    }

  private:
    runtime::Loop loop_{base::system_clocks()};
    boost::asio::executor_work_guard<boost::asio::io_context::executor_type> guard_;
    std::thread thread_;
    ConsumerCounters counters_;
    std::unique_ptr<Strategy> strategy_;
};

template <class T>
const T* as(const Verdict& verdict) {
    return std::get_if<T>(&verdict);
}
template <class T>
bool all_are(const std::vector<Verdict>& verdicts) {
    return std::all_of(verdicts.begin(), verdicts.end(),
                       [](const Verdict& one) { return std::holds_alternative<T>(one); });
}
template <class T>
std::size_t count(const std::vector<Verdict>& verdicts) {
    return static_cast<std::size_t>(
        std::count_if(verdicts.begin(), verdicts.end(),
                      [](const Verdict& one) { return std::holds_alternative<T>(one); }));
}

/// COMMIT as it goes over the wire, and not READ COMMITTED.
inline std::string commit_on_wire(sql::Dialect dialect) {
    return dialect == sql::Dialect::postgres ? std::string("COMMIT\0", 7) : "\n;COMMIT";
}

/// Polls, for what another thread or the server brings about.
template <class Fn>
bool eventually(Fn&& condition) {
    const auto until = std::chrono::steady_clock::now() + patience;
    while (std::chrono::steady_clock::now() < until)
        if (condition()) return true;
    return false;
}

}  // namespace semel::consumer::test
