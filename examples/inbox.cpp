// A consumer's transaction of its own, made safe against redelivery: docs/guides/inbox.md. On
// PostgreSQL.
//
//     inbox_example "postgresql://user@127.0.0.1/shop"     (run it twice: the second run finds
//     everything done)
#include <libpq-fe.h>

#include <cstdio>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "inbox/inbox.hpp"
#include "inbox/schema.hpp"
#include "stores/postgres/executor.hpp"

using namespace semel;

namespace {

/// A connection and the executor on it, as one thing that can be handed on.
struct Database {
    explicit Database(const char* url)
        : connection(PQconnectdb(url)), executor(stores::postgres::executor_on(connection)) {}
    ~Database() {
        executor.reset();
        PQfinish(connection);
    }
    Database(const Database&) = delete;
    Database& operator=(const Database&) = delete;

    PGconn* connection;
    std::unique_ptr<sql::Executor> executor;
};

std::shared_ptr<sql::Executor> connect(const char* url) {
    auto database = std::make_shared<Database>(url);
    return {database, database->executor.get()};
}

int fail(const std::string& why) {
    std::fprintf(stderr, "%s\n", why.c_str());
    return 1;
}

}  // namespace

int main(int count, char** words) {
    if (count != 2) return fail("wants the database's URL");
    const char* url = words[1];
    std::shared_ptr<sql::Executor> database = connect(url);
    if (auto made = inbox::apply_schema(*database, {}); !made) return fail(made.error().detail);
    const sql::Statement table{
        .text = "CREATE TABLE IF NOT EXISTS stock (sku text PRIMARY KEY, qty int NOT NULL)",
        .parameters = {}};
    if (!std::holds_alternative<sql::ResultRows>(database->run(table))) return fail("no table");

    const inbox::TransactionalInbox inbox({.scope = "shop/stock"});

    // 1. Take the partition over. Whoever had it before can commit nothing from here on.
    auto taken = inbox.assign(*database, {.topic = "orders", .number = 0}, "worker-1", 0,
                              std::chrono::seconds{10});
    const auto* outcome = std::get_if<inbox::AssignOutcome>(&taken);
    if (outcome == nullptr) return fail(std::get<inbox::Problem>(taken).error.detail);
    if (std::holds_alternative<inbox::StillBusy>(*outcome))
        return fail("the former owner's transaction is still open");
    const inbox::Assigned assigned = std::get<inbox::Assigned>(*outcome);
    const inbox::Fence fence{{.topic = "orders", .number = 0}, assigned.epoch};

    // 2. A batch: each message with the statements that are its effect.
    inbox::Batch batch;
    batch.fence = fence;
    std::vector<std::vector<inbox::Effect>> effects;
    for (const char* sku : {"apples", "pears"}) {
        inbox::Message message;
        message.source = "orders";
        message.id = std::string("delivery-of-") + sku;
        batch.messages.push_back(message);
        const sql::Statement statement{.text =
                                           "INSERT INTO stock VALUES ($1::text, 10) ON CONFLICT "
                                           "(sku) DO UPDATE SET qty = stock.qty + 10",
                                       .parameters = {std::string(sku)}};
        effects.push_back({{.statement = statement, .rows = inbox::Rows::one}});
    }
    const inbox::Connect again = [&]() -> inbox::Tried<std::shared_ptr<sql::Executor>> {
        return connect(url);
    };
    const inbox::RunReport report = inbox.run(database, batch, effects, again);
    for (std::size_t i = 0; i < batch.messages.size(); ++i) {
        const inbox::MessageResult& result = report.results[i];
        std::printf("%s: %s %s\n", batch.messages[i].id.c_str(), inbox::name_of(result.outcome),
                    result.reason.c_str());
    }

    // 3. What is before this offset is done: the next owner starts here.
    auto moved = inbox.advance_now(*database, fence, 2);
    return std::holds_alternative<inbox::AdvanceOutcome>(moved)
               ? 0
               : fail(std::get<inbox::Problem>(moved).error.detail);
}
