#include "cli/consumer_outlook.hpp"

#include <algorithm>

#include "consumer/observer.hpp"
#include "consumer/strategies/sql_template.hpp"
#include "inbox/schema.hpp"

namespace semel::cli {

namespace {

using config::ConsumerConfig;
using config::ConsumerStrategy;
using config::HandlerKind;
using std::chrono::hours;
using std::chrono::milliseconds;

/// A done id is known at least so long, and so much longer than the broker keeps its message.
constexpr milliseconds retention_least{hours{24 * 7}};
constexpr milliseconds retention_margin{hours{24}};

sql::Dialect dialect_of(const config::DatabaseConfig& database) {
    return database.kind == config::DatabaseKind::postgres ? sql::Dialect::postgres
                                                           : sql::Dialect::mysql;
}

milliseconds delays_of(const ConsumerConfig& consumer) {
    milliseconds sum{0};
    for (const milliseconds delay : consumer.retry.delays) sum += delay;
    return sum;
}

base::Result<void> check_statements(const ConsumerConfig& consumer) {
    const config::SqlHandlerConfig& handler = consumer.handler.sql;
    std::vector<std::string> names;
    for (const auto& [name, value] : handler.params) names.push_back(name);
    std::vector<bool> used(names.size());
    std::size_t number = 0;
    for (const config::SqlStatementConfig& statement : handler.statements) {
        const auto parsed = consumer::SqlTemplate::parse(
            dialect_of(*consumer.database), statement.sql, names,
            "handler.sql.statements[" + std::to_string(number++) + "]");
        if (!parsed) return parsed.error();
        for (std::size_t i = 0; i < names.size(); ++i) used[i] = used[i] || parsed->uses(i);
    }
    for (std::size_t i = 0; i < names.size(); ++i) {
        if (!used[i])
            return base::Error{.code = base::ErrorCode::invalid_argument,
                               .detail = "handler.sql.params." + names[i] +
                                         " is used by no statement; write :" + names[i] +
                                         " where it belongs, or remove it"};
    }
    return {};
}

base::Result<void> check_columns(const ConsumerConfig& consumer) {
    const config::StateConfig& state = consumer.state;
    std::vector<std::pair<std::string, std::string>> columns{{"state.key.column", state.key_column},
                                                             {"state.status", state.status_column}};
    if (!state.version_column.empty()) columns.emplace_back("state.version", state.version_column);
    if (!state.message_id_column.empty())
        columns.emplace_back("state.message_id_column", state.message_id_column);
    for (const auto& [column, value] : state.set) columns.emplace_back("state.set", column);
    const sql::Dialect dialect = dialect_of(*consumer.database);
    if (const auto table = consumer::quoted_name(dialect, state.table, true, "state.table"); !table)
        return table.error();
    for (const auto& [key, column] : columns) {
        if (const auto name = consumer::quoted_name(dialect, column, false, key); !name)
            return name.error();
    }
    return {};
}

void look_at_broker(const ConsumerConfig& consumer, const Leaves& leaves, bool make,
                    Outlook& outlook) {
    const auto found = leaves.consumers.look(consumer, make);
    if (!found) {
        auto& list =
            found.error().code == base::ErrorCode::invalid_argument ? outlook.wrong : outlook.away;
        list.push_back(found.error().detail);
        return;
    }
    for (const std::string& missing : found->missing)
        outlook.notes.push_back(missing + " does not exist; the consumer waits for it");
    if (found->missing.empty())
        outlook.good.push_back(source_in_words(consumer) + " can be reached and exists");
    if (!found->letters_missing.empty())
        outlook.wrong.push_back("dead_letter: " + found->letters_missing +
                                " does not exist, so dead letters would have nowhere to go: make "
                                "it, or set create: true, or dead_letter: stop");
    if (!found->results_missing.empty())
        outlook.wrong.push_back("results: " + found->results_missing +
                                " does not exist: make it, or name another");

    for (const std::string& missing : found->copies_missing)
        outlook.wrong.push_back("retry.wait: " + missing +
                                " does not exist, so failed messages would have nowhere to wait: "
                                "make it, or set retry.create: true, or wait: in_hand");
    for (const std::string& wrong : found->copies_wrong)
        outlook.wrong.push_back("retry.wait: " + wrong);
    for (const std::string& left : found->copies_left)
        outlook.notes.push_back(
            "the topic " + left +
            " is of no delay in retry.delays (or wait is in_hand): copies that "
            "wait in it are not read; name its delay again until they are done, "
            "or delete it");

    milliseconds needed = std::max(retention_least, delays_of(consumer) + retention_margin);
    if (found->retention)
        needed = std::max(needed, *found->retention + delays_of(consumer) + retention_margin);
    outlook.retention = consumer.retention.value_or(needed);
    if (consumer.strategy == ConsumerStrategy::state || consumer.handler.kind == HandlerKind::ai)
        return;
    const std::string kept = config::duration_word(outlook.retention);
    if (found->retention && outlook.retention < needed) {
        const std::string late =
            "dedup.retention: " + kept + " is shorter than " + config::duration_word(needed) +
            ", which is how long the broker keeps messages (" +
            config::duration_word(*found->retention) +
            ") and all delays and a day: what is read again after that has its "
            "effect twice";
        if (consumer.accepts(config::Accept::short_dedup)) {
            outlook.notes.push_back(late + " (accepted: short_dedup)");
        } else {
            outlook.wrong.push_back(late + "; lengthen it, write auto, or accept: [short_dedup]");
        }
    }
    if (!found->retention)
        outlook.notes.push_back("a message that is done stays known for " + kept +
                                ", and the broker sets no limit to how late it may come again (" +
                                found->about_retention +
                                "): later than that, its effect happens again");
}

/// Of one that only looks: what it reads is to be there, and nothing is made.
Outlook look_at_observed(const ConsumerConfig& consumer, const Leaves& leaves) {
    ConsumerConfig source_alone = consumer;
    source_alone.handler = {};
    source_alone.retry = {};
    source_alone.dead_letter = {};
    source_alone.dead_letter.stop = true;
    Outlook outlook;
    const auto found = leaves.consumers.look(source_alone, false);
    if (!found) {
        auto& list =
            found.error().code == base::ErrorCode::invalid_argument ? outlook.wrong : outlook.away;
        list.push_back(found.error().detail);
        return outlook;
    }
    for (const std::string& missing : found->missing)
        outlook.notes.push_back(missing + " does not exist; the observer waits for it");
    if (found->missing.empty())
        outlook.good.push_back(source_in_words(consumer) + " can be reached and exists");
    return outlook;
}

void look_at_database(const ConsumerConfig& consumer, const std::string& file, const Leaves& leaves,
                      bool make, Outlook& outlook) {
    if (!consumer.database) return;
    const std::string& name = consumer.database->shown_url;
    auto connected = leaves.consumers.connect(*consumer.database)();
    if (auto* problem = std::get_if<sql::Problem>(&connected)) {
        // A standby and refused credentials are for somebody to put right, while everything else
        // runs.
        outlook.away.push_back("database: " + problem->error.detail);
        return;
    }
    sql::Executor& executor = *std::get<0>(connected);
    const inbox::Place place{.schema = consumer.database->schema};
    const auto plan = inbox::plan_schema(executor, place);
    const auto take = [&outlook](const base::Error& error) {
        const bool away =
            error.code == base::ErrorCode::store_unavailable || error.code == base::ErrorCode::io;
        (away ? outlook.away : outlook.wrong).push_back("database: " + error.detail);
    };
    if (!plan) return take(plan.error());
    if (plan->empty()) {
        outlook.good.push_back(name + " can be used, with the tables of the inbox");
        return;
    }
    const std::string command =
        "`semel store migrate --config " + file + " --inbox --consumer " + consumer.name + "`";
    if (!consumer.database->migrate) {
        outlook.wrong.push_back(name +
                                " lacks the tables of the inbox, or they are old, and "
                                "database.migrate is false: run " +
                                command);
        return;
    }
    if (!make) {
        outlook.notes.push_back(name +
                                " can be reached; `serve` will make the tables of the inbox, "
                                "which " +
                                command + " shows first");
        return;
    }
    if (const auto made = inbox::apply_schema(executor, place); !made) return take(made.error());
    outlook.good.push_back(name + " can be used; the tables of the inbox were made");
}

}  // namespace

bool keeps_records_in_store(const ConsumerConfig& consumer) {
    return !consumer.observe && consumer.strategy == ConsumerStrategy::store;
}

bool needs_group_of_one(const ConsumerConfig& consumer, const config::Config& config) {
    return keeps_records_in_store(consumer) && !config::store_of(consumer, config).shared() &&
           !consumer.accepts(config::Accept::unshared_store);
}

base::Result<void> check_consumers(const config::Config& config, const std::string& file,
                                   const Leaves& leaves) {
    for (const ConsumerConfig& consumer : config.consumers) {
        auto checked = leaves.consumers.check(consumer);
        if (checked && consumer.handler.kind == HandlerKind::sql)
            checked = check_statements(consumer);
        if (checked && consumer.strategy == ConsumerStrategy::state)
            checked = check_columns(consumer);
        if (!checked)
            return base::Error{.code = base::ErrorCode::invalid_argument,
                               .detail = file + ":" + std::to_string(consumer.line) +
                                         ": consumer " + consumer.name + ": " +
                                         checked.error().detail};
    }
    return {};
}

base::Result<void> check_callbacks(const config::Config& config, const std::string& file,
                                   const Callbacks& callbacks) {
    const auto refuse = [](std::string sentence) {
        return base::Error{.code = base::ErrorCode::invalid_argument,
                           .detail = std::move(sentence)};
    };
    const auto wants = [&config](const std::string& name, bool transaction) {
        return std::any_of(
            config.consumers.begin(), config.consumers.end(), [&](const ConsumerConfig& consumer) {
                return consumer.name == name && consumer.handler.kind == HandlerKind::callback &&
                       (consumer.strategy == ConsumerStrategy::transaction) == transaction;
            });
    };
    for (const ConsumerConfig& consumer : config.consumers) {
        if (consumer.handler.kind != HandlerKind::callback || consumer.observe) continue;
        const bool transaction = consumer.strategy == ConsumerStrategy::transaction;
        if (transaction ? callbacks.transactions.contains(consumer.name)
                        : callbacks.functions.contains(consumer.name))
            continue;
        return refuse(file + ":" + std::to_string(consumer.line) + ": consumer " + consumer.name +
                      ": handler: callback needs a program that brings its function" +
                      (transaction ? " (one inside the transaction)" : "") +
                      ": see docs/guides/cpp-consumer.md");
    }
    const auto unknown = [&](const std::string& name, bool transaction) {
        return refuse(file + ": no consumer " + name + " has handler: callback under " +
                      (transaction ? "strategy: transaction" : "strategy: store or table") +
                      ", but this program brings a function for it");
    };
    for (const auto& [name, function] : callbacks.functions)
        if (!wants(name, false)) return unknown(name, false);
    for (const auto& [name, function] : callbacks.transactions)
        if (!wants(name, true)) return unknown(name, true);
    return {};
}

std::string source_in_words(const ConsumerConfig& consumer) {
    if (consumer.rabbitmq)
        return "queue " + consumer.rabbitmq->queue + " at " + consumer.rabbitmq->shown_url;
    std::string topics;
    for (const std::string& topic : consumer.kafka->topics)
        topics += (topics.empty() ? "" : ", ") + topic;
    return "kafka " + topics + " (group " + consumer.kafka->group + ") at " +
           consumer.kafka->brokers;
}

std::string strategy_in_words(const ConsumerConfig& consumer) {
    if (consumer.observe) return "observe";
    switch (consumer.strategy) {
        case ConsumerStrategy::store:
            return consumer.handler.kind == HandlerKind::ai ? "ai" : "store";
        case ConsumerStrategy::table:
            return "table";
        case ConsumerStrategy::transaction:
            return "transaction";
        case ConsumerStrategy::state:
            return "state";
    }
    return {};
}

std::string runs_in_words(const config::RetryConfig& retry) {
    std::string out = std::to_string(retry.attempts + retry.delays.size()) + " run(s)";
    if (retry.delays.empty()) return out;
    out += ", the last ones after ";
    for (std::size_t i = 0; i < retry.delays.size(); ++i)
        out += (i == 0 ? "" : ", ") + config::duration_word(retry.delays[i]);
    if (retry.wait == config::RetryWait::broker) out += ", which pass at the broker";
    if (retry.wait == config::RetryWait::store) out += ", which pass beside the records";
    return out;
}

std::string promise_in_words(const ConsumerConfig& consumer, const config::Config& config) {
    if (consumer.observe) return consumer::Observer::promise();
    switch (consumer.strategy) {
        case ConsumerStrategy::transaction:
            return "effects happen exactly once, also when the process is killed: the record of "
                   "the "
                   "message commits with them";
        case ConsumerStrategy::state:
            return "each transition happens exactly once, as long as no other leads back to its "
                   "first state";
        case ConsumerStrategy::store:
        case ConsumerStrategy::table:
            break;
    }
    std::string out =
        "no message is lost; an effect happens twice only where a process died in the middle of "
        "it, "
        "and then it is ";
    out += consumer.hold_unknown ? "held as a dead letter of class unknown, not run again"
                                 : "run again under the same Idempotency-Key, and counted";
    if (consumer.handler.results.any())
        out +=
            "; what the handler answers is published at least once, each copy with the same "
            "bytes and id";
    if (needs_group_of_one(consumer, config))
        out += "; the store is not shared, so this process must be the only member of its group";
    return out;
}

Outlook look_at_consumer(const ConsumerConfig& consumer, const std::string& file,
                         const Leaves& leaves, bool make) {
    if (consumer.observe) return look_at_observed(consumer, leaves);
    Outlook outlook;
    outlook.retention = consumer.retention.value_or(
        std::max(retention_least, delays_of(consumer) + retention_margin));
    look_at_broker(consumer, leaves, make, outlook);
    look_at_database(consumer, file, leaves, make, outlook);
    return outlook;
}

}  // namespace semel::cli
