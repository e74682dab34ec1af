// What the tests of the store on a database in memory share.
#pragma once

#include "sql/sql_store.hpp"

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "support/sql_database.hpp"

namespace semel::sql {

using namespace core;  // NOLINT: a test file
using namespace std::chrono_literals;
using support::SqlDatabase;
using Call = SqlDatabase::Call;
using Fault = SqlDatabase::Fault;

inline Nonce nonce(std::uint8_t number) {
    Nonce out;
    out.bytes.fill(number);
    return out;
}

inline StoredKey key(const std::string& name) { return base::sha256("key " + name); }
inline StoredKey key(std::size_t number) { return key(std::to_string(number)); }

inline Acquire claim(std::uint8_t owner) {
    Acquire op;
    op.fingerprint.raw = base::sha256("body");
    op.owner = {"owner-" + std::to_string(owner), "10.0.0.1:7000"};
    op.nonce = nonce(owner);
    op.lease = 10s;
    op.not_after = {std::int64_t{1} << 52};
    op.starts_call = true;
    return op;
}

inline Complete completion(FencingToken token, std::uint8_t owner,
                           const std::string& text = "the answer") {
    Answer answer;
    answer.http_status = 200;
    answer.body = std::make_shared<const std::string>(text);
    answer.body_bytes = text.size();
    return {token, nonce(owner), std::move(answer), {}, {}};
}

inline Problem lost(base::Applied applied) {
    return {Trouble::lost, SqlDatabase::unavailable("the connection broke", applied)};
}
inline Problem contended() {
    return {Trouble::contended, SqlDatabase::unavailable("deadlock detected")};
}

using Asked = base::Result<Decided>;
using Answers = std::vector<std::future<BatchResults>>;

template <class T>
T as(const Asked& result) {
    if (!result) {
        ADD_FAILURE() << "error instead of an outcome: " << result.error().detail;
        return T{};
    }
    if (const T* outcome = std::get_if<T>(&result->outcome)) return *outcome;
    ADD_FAILURE() << "the outcome is alternative " << result->outcome.index();
    return T{};
}

template <class Condition>
void eventually(Condition condition) {
    const auto until = std::chrono::steady_clock::now() + 20s;
    while (!condition()) {
        if (std::chrono::steady_clock::now() > until) {
            ADD_FAILURE() << "did not happen within 20 s";
            return;
        }
        std::this_thread::yield();
    }
}

class SqlStore : public testing::Test {
  protected:
    SqlStore() { options.name = "sql"; }
    ~SqlStore() override {
        database.set_script({});
        database.open_gate();
        if (store) store->stop();
        store.reset();
    }

    Store& open() {
        auto first = std::move(std::get<0>(database.connect()()));
        store = make_sql_store(options, database.connect(), std::move(first));
        return *store;
    }
    std::future<BatchResults> submit(std::vector<Item> items) {
        auto promise = std::make_shared<std::promise<BatchResults>>();
        std::future<BatchResults> future = promise->get_future();
        store->submit(std::move(items),
                      [promise](BatchResults results) { promise->set_value(std::move(results)); });
        return future;
    }
    std::future<BatchResults> begin(const StoredKey& of, StoreOperation operation) {
        std::vector<Item> items;
        items.push_back({of, std::move(operation)});
        return submit(std::move(items));
    }
    Asked ask(const StoredKey& of, StoreOperation operation) {
        return begin(of, std::move(operation)).get().front();
    }
    Granted grant(const StoredKey& of, std::uint8_t owner = 1) {
        return as<Granted>(ask(of, claim(owner)));
    }
    /// Submits operations one by one so that they meet in one statement: the only worker is kept
    /// busy meanwhile.
    Answers together(std::vector<Item> items) {
        SEMEL_ASSERT(options.connections == 1, "else another worker takes them");
        const std::size_t busy = database.calls(Call::read);
        database.close_gate();
        auto other = begin(key("busy"), Get{});
        database.await_calls(Call::read, busy + 1);
        Answers answers;
        for (Item& item : items) answers.push_back(begin(item.key, std::move(item.operation)));
        database.open_gate();
        other.get();
        return answers;
    }
    Answers claim_together(std::size_t count) {
        std::vector<Item> items;
        for (std::size_t i = 0; i < count; ++i) items.push_back({key(i), claim(1)});
        return together(std::move(items));
    }
    /// How many keys each statement of the kind had.
    std::vector<std::size_t> sizes(Call call) {
        std::vector<std::size_t> out;
        for (const auto& asked : database.log()) {
            if (asked.call == call) out.push_back(asked.keys.size());
        }
        return out;
    }
    /// The n-th statement of the kind is met by the fault.
    void once(Call call, Problem problem, bool after_commit = false, std::size_t number = 1) {
        const std::size_t before = database.calls(call);
        database.set_script([=](const SqlDatabase::Asked& asked) -> std::optional<Fault> {
            if (asked.call != call || asked.number != before + number) return std::nullopt;
            return Fault{problem, after_commit};
        });
    }

    SqlDatabase database;
    SqlStoreOptions options{.name = {}, .connections = 1, .time = {}, .durability = {}};
    std::unique_ptr<Store> store;
    const StoredKey k = key("story");
};

}  // namespace semel::sql
