// A consumer in a process of its own that dies or stops at named points: what a broker would
// deliver, it gets anew at each start.
//
//     inbox_worker postgres|mysql PORT DATABASE statements|callback|ordered MESSAGES EPOCH IDLE_MS
//
// Messages 0 .. MESSAGES-1 come in batches of 16, message n adds to totals[n % 4] and leaves a row
// in effects. EPOCH 0: takes the partition over first. Ends with 0 if all are done, 3 if it was
// fenced off, 1 on anything else. SEMEL_FAULT_POINTS as everywhere.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "base/fault_point.hpp"
#include "integration/inbox_databases.hpp"

using namespace semel;
using namespace semel::inbox;

namespace {

constexpr std::int64_t batch_size = 16;

sql::Statement adding(const Executor& executor, std::int64_t n) {
    const bool postgres = executor.dialect() == sql::Dialect::postgres;
    return {.text = postgres ? "UPDATE totals SET n = n + 1 WHERE id = $1::bigint"
                             : "UPDATE totals SET n = n + 1 WHERE id = ?",
            .parameters = {n % 4}};
}
sql::Statement leaving(const Executor& executor, const std::string& id) {
    const bool postgres = executor.dialect() == sql::Dialect::postgres;
    return {.text = postgres ? "INSERT INTO effects (message_id) VALUES ($1::text)"
                             : "INSERT INTO effects (message_id) VALUES (?)",
            .parameters = {id}};
}

int fail(const std::string& why) {
    std::fprintf(stderr, "inbox_worker: %s\n", why.c_str());
    return 1;
}

}  // namespace

int main(int count, char** words) {
    if (count != 8) return fail("wrong arguments");
    std::string problem;
    const char* faults = std::getenv("SEMEL_FAULT_POINTS");
    if (faults != nullptr && !base::arm_fault_points(faults, problem)) return fail(problem);
    const support::Address address{.dialect = std::string(words[1]) == "postgres"
                                                  ? sql::Dialect::postgres
                                                  : sql::Dialect::mysql,
                                   .port = static_cast<std::uint16_t>(std::stoi(words[2])),
                                   .database = words[3]};
    const std::string mode = words[4];
    const std::int64_t messages = std::stoll(words[5]);
    std::int64_t epoch = std::stoll(words[6]);
    const TransactionalInbox inbox(
        {.scope = "group/worker", .idle_limit = milliseconds{std::stoll(words[7])}});
    const Partition partition{.topic = "t", .number = 0};
    const bool ordered = mode == "ordered";
    const Connect reconnect = [&]() -> Tried<std::shared_ptr<Executor>> {
        return support::connect(address);
    };

    auto connection = support::connect(address);
    std::int64_t position = 0;
    if (epoch == 0) {
        auto answer = inbox.assign(*connection, partition, "worker", 0, milliseconds{20000});
        auto* outcome = std::get_if<AssignOutcome>(&answer);
        if (outcome == nullptr || !std::holds_alternative<Assigned>(*outcome))
            return fail("not assigned");
        epoch = std::get<Assigned>(*outcome).epoch;
        if (ordered) position = std::get<Assigned>(*outcome).next_offset.value_or(0);
    }
    while (position < messages) {
        Batch batch{.fence = Fence{partition, epoch}, .messages = {}, .expected_offset = {}};
        if (ordered) batch.expected_offset = position;
        std::vector<std::vector<Effect>> effects;
        for (std::int64_t n = position; n < std::min(messages, position + batch_size); ++n) {
            batch.messages.push_back({.source = "t",
                                      .id = "m" + std::to_string(n),
                                      .business_key = {},
                                      .fingerprint = {},
                                      .lane = {},
                                      .next_offset = n + 1});
            effects.push_back({Effect{adding(*connection, n), Rows::one},
                               Effect{leaving(*connection, batch.messages.back().id), Rows::one}});
        }
        const Callback callback = [&](Executor& executor, const Message& message) -> EffectOutcome {
            auto first = executor.run(adding(executor, message.next_offset - 1));
            if (auto* trouble = std::get_if<Problem>(&first)) return std::move(*trouble);
            base::fault_point("worker.effect");
            auto second = executor.run(leaving(executor, message.id));
            if (auto* trouble = std::get_if<Problem>(&second)) return std::move(*trouble);
            return Did{};
        };
        const RunReport report = mode == "callback"
                                     ? inbox.run(connection, batch, callback, reconnect)
                                     : inbox.run(connection, batch, effects, reconnect);
        for (const MessageResult& result : report.results) {
            if (result.outcome == Outcome::fenced) return 3;
            if (result.outcome != Outcome::applied && result.outcome != Outcome::duplicate)
                return fail(name_of(result.outcome) + std::string(": ") + result.reason);
        }
        position += static_cast<std::int64_t>(batch.messages.size());
    }
    return 0;
}
