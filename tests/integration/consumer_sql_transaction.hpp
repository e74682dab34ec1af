// What the tests of the strategy `transaction` share: tables for its effects, and the strategy on
// them.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>

#include "consumer/strategies/transaction.hpp"
#include "inbox/schema.hpp"
#include "integration/consumer_sql_harness.hpp"

namespace semel::consumer::test {

inline config::SqlHandlerConfig stock_effects() {
    return {.params = {{"id", json("/id")}, {"sku", json("/sku")}, {"qty", json("/qty")}},
            .statements = {{.sql = "UPDATE stock SET qty = qty - :qty WHERE sku = :sku"},
                           {.sql = "INSERT INTO effects (message_id, n) VALUES (:id, :qty)"}}};
}
inline std::string order(const std::string& id, const std::string& sku = "a",
                         const std::string& qty = "1") {
    return R"({"id":")" + id + R"(","sku":")" + sku + R"(","qty":)" + qty + "}";
}

/// Closed until it is opened.
class Gate {
  public:
    void open() {
        const std::lock_guard lock(mutex_);
        open_ = true;
        changed_.notify_all();
    }
    void pass() {
        std::unique_lock lock(mutex_);
        ++waiting_;
        changed_.notify_all();
        changed_.wait(lock, [&] { return open_; });
    }
    bool wait_for_visitor() {
        std::unique_lock lock(mutex_);
        return changed_.wait_for(lock, patience, [&] { return waiting_ > 0; });
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool open_ = false;
    int waiting_ = 0;
};

class ConsumerTransaction : public testing::TestWithParam<Dialect> {
  protected:
    ConsumerTransaction() : database_(GetParam()) {
        auto made = inbox::apply_schema(*database_.connect(), {});
        if (!made) throw std::runtime_error(made.error().detail);
        database_.query(
            "CREATE TABLE stock (sku VARCHAR(50) PRIMARY KEY, qty INT NOT NULL, kind INT"
            " NOT NULL DEFAULT 0, CHECK (qty >= 0))");
        database_.query("INSERT INTO stock (sku, qty) VALUES ('a', 1000), ('b', 1000), ('c', 0)");
        database_.query("CREATE TABLE effects (message_id VARCHAR(300) NOT NULL, n INT NOT NULL)");
    }
    [[nodiscard]] TransactionOptions options() const {
        TransactionOptions options;
        options.owner = "test";
        options.inbox.scope = scope;
        options.dialect = GetParam();
        options.connections = 2;
        options.retry = {.attempts = 3, .initial = 30ms, .jitter = 0};
        return options;
    }
    [[nodiscard]] inbox::Connect connect() const {
        return [address = database_.address()]() -> sql::Tried<std::shared_ptr<sql::Executor>> {
            return support::connect(address);
        };
    }
    std::unique_ptr<Running> start(TransactionOptions options,
                                   std::variant<SqlEffects, TransactionCallback> effect,
                                   const inbox::Connect& connect) {
        auto running = std::make_unique<Running>();
        running->take(make_transaction(running->loop(), std::move(options), connect,
                                       std::move(effect), running->counters()));
        return running;
    }
    std::unique_ptr<Running> start(TransactionOptions options) {
        return start(std::move(options), SqlEffects{stock_effects()}, connect());
    }
    std::unique_ptr<Running> start() { return start(options()); }
    /// Inserts what SqlEffects would, by a callback that may do more first.
    static inbox::EffectOutcome leave(sql::Executor& executor, const Message& message) {
        const bool postgres = executor.dialect() == Dialect::postgres;
        auto answer =
            executor.run({.text = postgres ? "INSERT INTO effects (message_id, n) VALUES ($1, 1)"
                                           : "INSERT INTO effects (message_id, n) VALUES (?, 1)",
                          .parameters = {message.id}});
        if (auto* problem = std::get_if<sql::Problem>(&answer)) return std::move(*problem);
        return inbox::Did{};
    }
    /// Its transaction stays open until the gate is.
    static TransactionCallback leave_behind(Gate& gate) {
        return {
            .effect = [&gate](sql::Executor& executor, const Message& one) -> inbox::EffectOutcome {
                auto outcome = leave(executor, one);
                gate.pass();
                return outcome;
            }};
    }

    std::int64_t qty(const char* sku = "a") {
        return database_.number(std::string("SELECT qty FROM stock WHERE sku = '") + sku + "'");
    }
    std::int64_t effects() { return database_.number("SELECT COUNT(*) FROM effects"); }
    std::int64_t different_effects() {
        return database_.number("SELECT COUNT(DISTINCT message_id) FROM effects");
    }
    std::string status(const std::string& id) {
        return database_.one("SELECT status FROM message_dedup WHERE message_id = '" + id + "'");
    }
    static AssignAnswer assign(Running& running, const brokers::AssignmentPtr& of) {
        return running.strategy().assigned(of);
    }
    static std::optional<std::int64_t> begins(Running& running, const brokers::AssignmentPtr& of) {
        const AssignAnswer answer = assign(running, of);
        if (const auto* no = std::get_if<NotYetOurs>(&answer)) throw std::runtime_error(no->reason);
        if (const auto* no = std::get_if<Refused>(&answer)) throw std::runtime_error(no->reason);
        return std::get<BeginAt>(answer).offset;
    }
    std::int64_t position() {
        return database_.number("SELECT COALESCE(MAX(next_offset), -1) FROM semel_offsets");
    }

    InboxDatabase database_;
    brokers::AssignmentPtr of_ = assignment();
};

}  // namespace semel::consumer::test
