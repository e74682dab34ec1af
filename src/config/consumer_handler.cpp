#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <utility>

#include "config/consumer_parts.hpp"
#include "config/stores.hpp"
#include "config/urls.hpp"

namespace semel::config {

namespace {

constexpr std::size_t statements_max = 64;
constexpr milliseconds one_ms{1};

DatabaseConfig of(PostgresConfig&& postgres) {
    return {.kind = DatabaseKind::postgres,
            .url = std::move(postgres.url),
            .shown_url = std::move(postgres.shown_url),
            .schema = std::move(postgres.schema),
            .connections = postgres.connections,
            .migrate = postgres.migrate};
}
DatabaseConfig of(MysqlConfig&& mysql) {
    return {.kind = DatabaseKind::mysql,
            .url = std::move(mysql.url),
            .shown_url = std::move(mysql.shown_url),
            .schema = {},
            .connections = mysql.connections,
            .migrate = mysql.migrate};
}

HttpHandlerConfig read_http(const Map& map) {
    HttpHandlerConfig http;
    map.read("url", http.url);
    const auto url = base_url_of(http.url);
    if (!url)
        map.refuse("url",
                   " must be http(s)://HOST[:PORT][/PATH] without user, query and fragment, "
                   "such as http://127.0.0.1:8080/orders");
    map.read("timeout", http.timeout, one_ms);
    map.read("ca_file", http.ca_file);
    return http;
}

SqlHandlerConfig read_sql(const Map& map, const Messages& messages) {
    SqlHandlerConfig sql;
    sql.params = read_values(map, "params", messages);
    for (const YAML::Node& item : map.items("statements", true)) {
        SqlStatementConfig statement;
        const std::string path =
            map.path("statements") + "[" + std::to_string(sql.statements.size()) + "]";
        if (item.IsScalar()) {
            statement.sql = map.document().text(item, path);
        } else {
            const Map one(map.document(), item, path, {"sql", "rows"});
            one.read("sql", statement.sql);
            one.read("rows", statement.rows,
                     {{"1", SqlRows::one}, {"any", SqlRows::any}, {">=1", SqlRows::at_least_one}});
        }
        if (statement.sql.find_first_not_of(" \t\r\n;") == std::string::npos)
            map.document().refuse(item, path + " is no SQL statement");
        sql.statements.push_back(std::move(statement));
    }
    if (sql.statements.empty() || sql.statements.size() > statements_max)
        map.refuse("statements", " must be a list of 1 to 64 SQL statements");
    return sql;
}

void read_on_duplicate(const Map& map, ResultsConfig& results) {
    map.read("on_duplicate", results.on_duplicate,
             {{"silent", OnDuplicate::silent}, {"republish", OnDuplicate::republish}});
}

/// `map` names the target.
ResultsConfig target_of_results(const Map& map, const Messages& messages) {
    ResultsConfig results;
    read_target(map, messages.kafka, "results", results.topic, results.queue, results.exchange);
    if (!results.any())
        map.refuse(messages.kafka ? "topic" : "queue", " must be where results are published");
    return results;
}

AiHandlerConfig read_ai(const Map& map, const Messages& messages, ResultsConfig& results) {
    AiHandlerConfig ai;
    ai.tenant = map.required_name("tenant");
    if (map.find("user") != nullptr) ai.user = read_value(map, "user", messages);
    if (map.find("session") != nullptr) ai.session = read_value(map, "session", messages);
    if (map.find("prompt") == nullptr)
        map.refuse("prompt", " must say where the prompt is, such as { json: /prompt }");
    ai.prompt = read_value(map, "prompt", messages);
    map.read("model", ai.model);
    if (const YAML::Node* at = map.find("result")) {
        results = target_of_results(
            Map(map.document(), *at, map.path("result"), {"topic", "queue", "exchange"}), messages);
    }
    read_on_duplicate(map, results);
    if (results.on_duplicate == OnDuplicate::republish && !results.any())
        map.refuse("on_duplicate",
                   ": nothing is published without `result`; name one, or remove it");
    return ai;
}

std::vector<std::string> read_names(const Map& map, std::string_view key) {
    std::vector<std::string> names;
    for (const YAML::Node& item : map.items(key, true)) {
        names.push_back(map.document().text(item, map.path(key)));
        if (std::count(names.begin(), names.end(), names.back()) > 1)
            map.refuse(key, ": " + quoted(names.back()) + " is given twice; remove one");
    }
    if (names.empty()) map.refuse(key, " must name at least one value of the status column");
    return names;
}

}  // namespace

std::optional<DatabaseConfig> read_database(const Map& map, const StoreConfig& store,
                                            std::vector<std::string>& warnings) {
    const YAML::Node* node = map.find("database");
    if (node == nullptr) {
        std::optional<DatabaseConfig> database;
        if (store.kind == StoreKind::postgres) database = of(PostgresConfig(store.postgres));
        if (store.kind == StoreKind::mysql) database = of(MysqlConfig(store.mysql));
        if (database) database->schema.clear();  // those tables stand beside the user's own
        return database;
    }
    const Map kinds(map.document(), *node, map.path("database"), {"postgres", "mysql"});
    if (kinds.entries().size() != 1)
        map.refuse("database", " must name exactly one of postgres, mysql");
    if (const YAML::Node* at = kinds.find("postgres"))
        return of(read_postgres(Map(map.document(), *at, kinds.path("postgres"), postgres_keys),
                                warnings));
    return of(read_mysql(Map(map.document(), *kinds.find("mysql"), kinds.path("mysql"), mysql_keys),
                         warnings));
}

HandlerConfig read_handler(const Map& map, const Messages& messages) {
    HandlerConfig handler;
    const YAML::Node* node = map.find("handler");
    if (node == nullptr) return handler;
    if (node->IsScalar()) {
        const std::string word = map.document().text(*node, map.path("handler"));
        if (word != "callback")
            map.refuse("handler",
                       ": " + quoted(word) +
                           " is neither callback (a function of a C++ program that links "
                           "the library) nor a map with one of http, sql, ai");
        handler.kind = HandlerKind::callback;
        return handler;
    }
    const Map kinds(map.document(), *node, map.path("handler"), {"http", "sql", "ai", "callback"});
    if (kinds.find("callback") != nullptr)
        kinds.refuse("callback", " takes no settings: write handler: callback");
    if (kinds.entries().size() != 1)
        map.refuse("handler", " must name exactly one of http, sql, ai, or be callback");
    if (const YAML::Node* at = kinds.find("http")) {
        handler.kind = HandlerKind::http;
        handler.http =
            read_http(Map(map.document(), *at, kinds.path("http"), {"url", "timeout", "ca_file"}));
    } else if (const YAML::Node* sql = kinds.find("sql")) {
        handler.kind = HandlerKind::sql;
        handler.sql = read_sql(
            Map(map.document(), *sql, kinds.path("sql"), {"params", "statements"}), messages);
    } else {
        handler.kind = HandlerKind::ai;
        handler.ai =
            read_ai(Map(map.document(), *kinds.find("ai"), kinds.path("ai"),
                        {"tenant", "user", "session", "prompt", "model", "result", "on_duplicate"}),
                    messages, handler.results);
    }
    return handler;
}

void read_target(const Map& map, bool kafka, const std::string& what, std::string& topic,
                 std::string& queue, std::string& exchange) {
    map.read("topic", topic);
    map.read("queue", queue);
    map.read("exchange", exchange);
    const std::string there = what + " go to where the messages come from; name a ";
    for (const char* key : {"queue", "exchange"}) {
        if (kafka && map.find(key) != nullptr)
            map.refuse(key, " is for RabbitMQ: " + there + "topic");
    }
    if (!kafka && map.find("topic") != nullptr)
        map.refuse("topic", " is for Kafka: " + there + "queue or an exchange");
    if (!queue.empty() && !exchange.empty())
        map.refuse("exchange", " stands beside queue: " + what + " go to one of them; remove one");
}

ResultsConfig read_results(const Map& map, const Messages& messages) {
    ResultsConfig results = target_of_results(map, messages);
    read_on_duplicate(map, results);
    return results;
}

StateConfig read_state(const Map& map, const Messages& messages) {
    StateConfig state;
    state.table = required_text(map, "table", "the table whose rows change state");
    const YAML::Node* key = map.find("key");
    if (key == nullptr)
        map.refuse("key",
                   " must say which row is meant: { column: order_no, value: { json: "
                   "/orderNo } }");
    const Map row(map.document(), *key, map.path("key"), {"column", "value"});
    state.key_column = required_text(row, "column", "the column that names a row");
    if (row.find("value") == nullptr)
        row.refuse("value",
                   " must say where the row's name comes from, such as { json: /orderNo }");
    state.key = read_value(row, "value", messages);
    state.status_column = required_text(map, "status", "the column with the state");
    map.read("version", state.version_column);
    map.read("message_id_column", state.message_id_column);
    state.from = read_names(map, "from");
    state.to = required_text(map, "to", "the state that the message leads to");
    state.terminal = read_names(map, "terminal");
    state.set = read_values(map, "set", messages);
    map.read("on_superseded", state.on_superseded,
             {{"dead_letter", OnSuperseded::dead_letter}, {"ack", OnSuperseded::ack}});
    if (std::find(state.terminal.begin(), state.terminal.end(), state.to) == state.terminal.end())
        map.refuse("terminal", " must contain the target state " + quoted(state.to) +
                                   ": a message that finds it reached is a duplicate");
    for (const std::string& from : state.from) {
        if (from == state.to)
            map.refuse("from", " contains the target state " + quoted(from) +
                                   ": a duplicate could not be told from a first delivery");
        if (std::find(state.terminal.begin(), state.terminal.end(), from) != state.terminal.end())
            map.refuse("terminal",
                       " contains " + quoted(from) +
                           ", which is also in `from`: a state "
                           "that a message leads away from is no end; remove it from one");
    }
    if (state.terminal.size() > 1 && map.find("on_superseded") == nullptr)
        map.refuse("on_superseded",
                   " must say what becomes of a message that finds its row in "
                   "another end than " +
                       quoted(state.to) + ": dead_letter, or ack (it is dropped)");
    return state;
}

}  // namespace semel::config
