#include "config/consumers.hpp"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <utility>

#include "config/consumer_reader.hpp"
#include "config/stores.hpp"
#include "config/urls.hpp"

namespace semel::config {

namespace {

using std::chrono::hours;

constexpr std::size_t topics_max = 1000;
constexpr milliseconds revoke_drain_max{std::chrono::minutes{5}};  // a group waits no longer
constexpr unsigned concurrency_max = 10'000;
constexpr std::uint32_t runs_max = 1000;
constexpr std::size_t delays_max = 32;
constexpr std::size_t statements_max = 64;
constexpr std::size_t park_limit_max = 10'000'000;
constexpr milliseconds one_ms{1};
/// RabbitMQ's own user of a fresh server, which it takes from this machine only.
constexpr std::string_view rabbitmq_default_user = "guest:guest@";

/// The properties of AMQP that a message may be known by.
constexpr std::array<std::string_view, 11> amqp_properties{
    "message-id", "correlation-id", "content-type", "content-encoding", "reply-to",   "type",
    "app-id",     "user-id",        "expiration",   "exchange",         "routing-key"};

bool is_json_pointer(std::string_view text) {
    if (!text.empty() && text.front() != '/') return false;
    for (std::size_t i = 0; i < text.size(); ++i) {
        if (text[i] != '~') continue;
        if (i + 1 == text.size() || (text[i + 1] != '0' && text[i + 1] != '1')) return false;
    }
    return true;
}

std::string no_pointer(std::string_view text) {
    return ": " + quoted(text) +
           " is no JSON pointer: begin it with '/', such as /order/id (within a name '~' is "
           "written "
           "~0 and '/' ~1)";
}

/// What the values of a message depend on.
struct Messages {
    bool kafka = true;
    Payload payload = Payload::json;
};

/// The text of a key that must not be empty.
std::string required_text(const Map& map, std::string_view key, const char* what) {
    std::string text;
    map.read(key, text);
    if (text.empty()) map.refuse(key, std::string(" must be ") + what);
    return text;
}

/// A key that only says yes.
void read_true(const Map& map, std::string_view key) {
    bool yes = false;
    map.read(key, yes);
    if (!yes) map.refuse(key, ": write true, or remove it");
}

/// A JSON pointer of this consumer's messages.
void check_pointer(const Map& map, std::string_view key, const std::string& pointer,
                   const Messages& messages) {
    if (!is_json_pointer(pointer)) map.refuse(key, no_pointer(pointer));
    if (messages.payload == Payload::bytes)
        map.refuse(key,
                   ": under payload: bytes a payload is never read as JSON; take a header, or "
                   "remove payload");
}

/// Where a value of a message comes from: the one of `words` that the map has.
ValueSpec value_in(const Map& map, const Messages& messages,
                   std::initializer_list<std::pair<std::string_view, ValueFrom>> words) {
    std::optional<std::pair<std::string_view, ValueFrom>> found;
    std::string known;
    for (const auto& word : words) {
        known.append(known.empty() ? "" : ", ").append(word.first);
        if (map.find(word.first) == nullptr) continue;
        if (found)
            map.refuse(word.first, " stands beside " + std::string(found->first) +
                                       ": a value comes from one place; remove one");
        found = word;
    }
    if (!found)
        map.document().refuse(map.node(), map.own_path() +
                                              " must say where the value comes from: one of " +
                                              known + ", such as { json: /orderNo }");
    const auto [key, from] = *found;
    ValueSpec spec{.from = from, .name = {}};
    switch (from) {
        case ValueFrom::json:
            map.read(key, spec.name);
            check_pointer(map, key, spec.name, messages);
            break;
        case ValueFrom::header:
            spec.name = required_text(map, key, "the name of a header");
            break;
        case ValueFrom::property: {
            if (messages.kafka)
                map.refuse(key,
                           " is for RabbitMQ: messages of Kafka have headers instead; write "
                           "header: NAME");
            spec.name = required_text(map, key, "the name of a property, such as message-id");
            const auto* const at =
                std::find(amqp_properties.begin(), amqp_properties.end(), spec.name);
            if (at == amqp_properties.end())
                map.refuse(key,
                           ": " + quoted(spec.name) + " is no property of AMQP" +
                               advice(spec.name, {amqp_properties.begin(), amqp_properties.end()}));
            break;
        }
        case ValueFrom::key:
            read_true(map, key);
            if (!messages.kafka)
                map.refuse(key,
                           " is for Kafka: messages of RabbitMQ have no key; take a property "
                           "or a header");
            break;
        case ValueFrom::offset:
            read_true(map, key);
            if (!messages.kafka)
                map.refuse(key,
                           " is for Kafka: RabbitMQ's delivery tags name no message; take "
                           "property: message-id or a header");
            break;
        case ValueFrom::cloudevents:
            read_true(map, key);
            break;
        case ValueFrom::constant:
            map.read(key, spec.name);
            break;
    }
    return spec;
}

/// The value at `key`, which is there.
ValueSpec read_value(const Map& parent, std::string_view key, const Messages& messages) {
    const Map map(parent.document(), *parent.find(key), parent.path(key),
                  {"json", "header", "property", "key", "constant"});
    return value_in(map, messages,
                    {{"json", ValueFrom::json},
                     {"header", ValueFrom::header},
                     {"property", ValueFrom::property},
                     {"key", ValueFrom::key},
                     {"constant", ValueFrom::constant}});
}

std::map<std::string, ValueSpec> read_values(const Map& parent, std::string_view key,
                                             const Messages& messages) {
    std::map<std::string, ValueSpec> values;
    const YAML::Node* node = parent.find(key);
    if (node == nullptr) return values;
    if (!node->IsMap())
        parent.refuse(key,
                      " must be a map of names, each with where its value comes from, such as "
                      "{ sku: { json: /sku } }");
    std::vector<std::string> names;
    for (const auto& entry : *node) {
        if (entry.first.IsScalar()) names.push_back(entry.first.Scalar());
    }
    const Map map(parent.document(), *node, parent.path(key), {names.begin(), names.end()});
    for (const std::string& name : names) values.emplace(name, read_value(map, name, messages));
    return values;
}

// ---------------------------------------------------------------- source

KafkaSourceConfig read_kafka(const Map& map) {
    KafkaSourceConfig kafka;
    kafka.brokers = required_text(map, "brokers", "the brokers to begin with, HOST:PORT,HOST:PORT");
    for (const YAML::Node& item : map.items("topics", true)) {
        std::string topic = map.document().text(item, map.path("topics"));
        if (topic.empty() || topic.size() > name_max_bytes)
            map.document().refuse(item, map.path("topics") + ": a topic has 1 to 255 characters");
        if (std::find(kafka.topics.begin(), kafka.topics.end(), topic) != kafka.topics.end())
            map.document().refuse(
                item, map.path("topics") + ": " + quoted(topic) + " is given twice; remove one");
        kafka.topics.push_back(std::move(topic));
    }
    if (kafka.topics.empty() || kafka.topics.size() > topics_max)
        map.refuse("topics",
                   " must name at least one topic (and at most 1000), such as [orders], or "
                   "a pattern that begins with '^'");
    kafka.group = map.required_name("group");
    map.read("instance_id", kafka.instance_id);
    map.read("start", kafka.start,
             {{"earliest", Start::earliest}, {"latest", Start::latest}, {"fail", Start::fail}});
    if (const YAML::Node* at = map.find("properties")) {
        if (!at->IsMap() && !at->IsNull())
            map.refuse("properties",
                       " must be a map of librdkafka's properties, such as "
                       "{ security.protocol: SSL }");
        for (const auto& entry : *at) {
            const std::string name = map.document().text(entry.first, map.path("properties"));
            const std::string path = map.path("properties") + "." + name;
            if (kafka.properties.contains(name))
                map.document().refuse(entry.first, path + " is given twice; remove one");
            kafka.properties[name] = map.document().text(entry.second, path);
        }
    }
    map.read("drain", kafka.drain, milliseconds{0}, revoke_drain_max);
    return kafka;
}

RabbitmqSourceConfig read_rabbitmq(const Map& map, std::vector<std::string>& warnings) {
    RabbitmqSourceConfig rabbitmq;
    map.read("url", rabbitmq.url);
    const bool tls = rabbitmq.url.starts_with("amqps://");
    if (!tls && !rabbitmq.url.starts_with("amqp://")) {
        // Not quoted: what is wrong about it may be that a password stands where the scheme should.
        map.refuse("url",
                   " must be a URL that begins with amqp:// or amqps:// (TLS), such as "
                   "amqp://semel:${PASSWORD}@127.0.0.1:5672/");
    }
    rabbitmq.shown_url = without_credentials(rabbitmq.url);
    const std::string& written = map.find("url")->Scalar();
    const std::size_t end = written.rfind('@');
    const std::string_view credentials = std::string_view(written).substr(
        written.find("://") + 3, end == std::string::npos ? 0 : end + 1 - written.find("://") - 3);
    if (credentials.find(':') != std::string_view::npos &&
        credentials.find("${") == std::string_view::npos && credentials != rabbitmq_default_user)
        warnings.push_back(map.path("url") +
                           ": a password stands in the file; put it into an environment variable "
                           "and write ${NAME} here");
    rabbitmq.queue = map.required_name("queue");
    map.read_count<std::uint16_t>("prefetch", rabbitmq.prefetch,
                                  std::numeric_limits<std::uint16_t>::max());
    if (rabbitmq.prefetch == 0)
        map.refuse("prefetch", ": 0 would mean without bound; write 1 to 65535");
    map.read("consumer_timeout", rabbitmq.consumer_timeout, milliseconds{0});
    map.read("ca_file", rabbitmq.ca_file);
    if (!rabbitmq.ca_file.empty() && !tls)
        map.refuse("ca_file", " is for TLS: begin the url with amqps://, or remove it");
    if (const YAML::Node* at = map.find("declare")) {
        const Map declare(
            map.document(), *at, map.path("declare"),
            {"type", "single_active_consumer", "dead_letter_exchange", "delivery_limit"});
        rabbitmq.declare = true;
        declare.read("type", rabbitmq.quorum, {{"quorum", true}, {"classic", false}});
        declare.read("single_active_consumer", rabbitmq.single_active_consumer);
        declare.read("dead_letter_exchange", rabbitmq.dead_letter_exchange);
        if (declare.find("delivery_limit") != nullptr) {
            std::uint32_t limit = 0;
            declare.read_count<std::uint32_t>("delivery_limit", limit, 1'000'000);
            if (!rabbitmq.quorum)
                declare.refuse("delivery_limit", " is for quorum queues; remove it");
            rabbitmq.delivery_limit = limit;
        }
        if (rabbitmq.quorum && rabbitmq.dead_letter_exchange.empty())
            warnings.push_back(map.path("declare") + ": the quorum queue " + rabbitmq.queue +
                               " drops a message that was handed back too often (delivery_limit; "
                               "20 by default since RabbitMQ 4), for which processes must die as "
                               "often; name a dead_letter_exchange with a queue, and it is kept");
    }
    return rabbitmq;
}

void read_source(const Map& map, ConsumerConfig& consumer, std::vector<std::string>& warnings) {
    static constexpr const char* one =
        " must name exactly one of kafka, rabbitmq, such as kafka: { brokers: \"127.0.0.1:9092\", "
        "topics: [orders], group: shop }";
    const YAML::Node* node = map.find("source");
    if (node == nullptr) map.refuse("source", one);
    const Map source(map.document(), *node, map.path("source"), {"kafka", "rabbitmq"});
    if (source.entries().size() != 1) map.refuse("source", one);
    if (const YAML::Node* at = source.find("kafka")) {
        consumer.kafka = read_kafka(
            Map(map.document(), *at, source.path("kafka"),
                {"brokers", "topics", "group", "instance_id", "start", "properties", "drain"}));
    } else {
        consumer.rabbitmq = read_rabbitmq(
            Map(map.document(), *source.find("rabbitmq"), source.path("rabbitmq"),
                {"url", "queue", "prefetch", "declare", "consumer_timeout", "ca_file"}),
            warnings);
    }
}

// ---------------------------------------------------------------- identity

void read_id(const Map& map, ConsumerConfig& consumer, const Messages& messages) {
    IdConfig& id = consumer.id;
    map.read("on_missing_id", id.on_missing,
             {{"dead_letter", OnMissingId::dead_letter},
              {"offset", OnMissingId::offset},
              {"skip", OnMissingId::skip}});
    if (id.on_missing == OnMissingId::offset && !messages.kafka)
        map.refuse("on_missing_id", ": RabbitMQ has no offsets; use dead_letter or skip");
    map.read("on_tombstone", id.on_tombstone,
             {{"deliver", OnTombstone::deliver},
              {"skip", OnTombstone::skip},
              {"dead_letter", OnTombstone::dead_letter}});
    map.read("on_mismatch", id.on_mismatch,
             {{"dead_letter", OnMismatch::dead_letter}, {"duplicate", OnMismatch::duplicate}});
    const YAML::Node* node = map.find("id");
    if (node == nullptr) return;
    const Map from(
        map.document(), *node, map.path("id"),
        {"json", "header", "property", "key", "cloudevents", "offset", "source", "fingerprint"});
    const bool only_more = std::all_of(
        from.entries().begin(), from.entries().end(),
        [](const auto& entry) { return entry.first == "source" || entry.first == "fingerprint"; });
    if (!only_more || from.entries().empty()) {
        id.from = value_in(from, messages,
                           {{"json", ValueFrom::json},
                            {"header", ValueFrom::header},
                            {"property", ValueFrom::property},
                            {"key", ValueFrom::key},
                            {"cloudevents", ValueFrom::cloudevents},
                            {"offset", ValueFrom::offset}});
    }
    if (from.find("source") != nullptr) id.source = from.required_name("source");
    if (const YAML::Node* at = from.find("fingerprint"); at != nullptr && at->IsScalar()) {
        const std::string text = map.document().text(*at, from.path("fingerprint"));
        if (text != "none")
            from.refuse("fingerprint", ": " + quoted(text) +
                                           " is neither none nor a list of JSON pointers, such as "
                                           "[/orderNo, /amount]");
        id.fingerprint = false;
    } else if (at != nullptr) {
        for (const YAML::Node& item : from.items("fingerprint")) {
            std::string pointer = map.document().text(item, from.path("fingerprint"));
            check_pointer(from, "fingerprint", pointer, messages);
            id.fingerprint_members.push_back(std::move(pointer));
        }
        if (id.fingerprint_members.empty())
            from.refuse("fingerprint", " is empty: name what is compared, or write none");
    }
}

// ---------------------------------------------------------------- strategy and handler

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

/// The consumer's own database, or that of the store; nullopt: neither is one.
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

AiHandlerConfig read_ai(const Map& map, const Messages& messages) {
    AiHandlerConfig ai;
    ai.tenant = map.required_name("tenant");
    if (map.find("user") != nullptr) ai.user = read_value(map, "user", messages);
    if (map.find("session") != nullptr) ai.session = read_value(map, "session", messages);
    if (map.find("prompt") == nullptr)
        map.refuse("prompt", " must say where the prompt is, such as { json: /prompt }");
    ai.prompt = read_value(map, "prompt", messages);
    map.read("model", ai.model);
    if (const YAML::Node* at = map.find("result")) {
        const char* target = messages.kafka ? "topic" : "queue";
        const Map result(map.document(), *at, map.path("result"), {target});
        ai.result_topic = required_text(result, target, "where results are published");
    }
    map.read("on_duplicate", ai.on_duplicate,
             {{"silent", OnDuplicate::silent}, {"republish", OnDuplicate::republish}});
    if (ai.on_duplicate == OnDuplicate::republish && ai.result_topic.empty())
        map.refuse("on_duplicate",
                   ": nothing is published without `result`; name one, or remove it");
    return ai;
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
                    messages);
    }
    return handler;
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

// ---------------------------------------------------------------- the rest

RetryConfig read_retry(const Map& map) {
    RetryConfig retry;
    map.read_count<std::uint32_t>("attempts", retry.attempts, runs_max);
    if (retry.attempts == 0) map.refuse("attempts", ": the first run counts; write 1 or more");
    map.read_count<std::uint32_t>("crashes", retry.crashes, runs_max);
    if (retry.crashes == 0) map.refuse("crashes", ": write 1 or more");
    if (const YAML::Node* at = map.find("backoff")) {
        const Map backoff(map.document(), *at, map.path("backoff"),
                          {"initial", "factor", "max", "jitter"});
        backoff.read("initial", retry.initial, one_ms);
        backoff.read_number("factor", retry.factor, 1, 100);
        if (backoff.find("max") == nullptr) retry.max = std::max(retry.max, retry.initial);
        backoff.read("max", retry.max, one_ms);
        if (retry.max < retry.initial)
            backoff.refuse("max", " is shorter than backoff.initial; lengthen it");
        backoff.read_number("jitter", retry.jitter, 0, 1);
    }
    for (const YAML::Node& item : map.items("delays"))
        retry.delays.push_back(map.duration_of(item, map.path("delays"), one_ms, duration_max));
    if (retry.delays.size() > delays_max) map.refuse("delays", " has more than 32 entries");
    return retry;
}

DeadLetterConfig read_dead_letter(const Map& map, const ConsumerConfig& consumer) {
    DeadLetterConfig letters;
    const YAML::Node* node = map.find("dead_letter");
    if (node != nullptr && node->IsScalar()) {
        const std::string word = map.document().text(*node, map.path("dead_letter"));
        if (word != "stop")
            map.refuse("dead_letter", ": " + quoted(word) + " is neither stop nor a map with " +
                                          (consumer.kafka ? "topic" : "queue or exchange"));
        letters.stop = true;
        return letters;
    }
    if (node != nullptr) {
        static constexpr std::initializer_list<std::string_view> keys{"topic",  "queue", "exchange",
                                                                      "create", "body",  "headers"};
        const Map target(map.document(), *node, map.path("dead_letter"), keys);
        target.read("topic", letters.topic);
        target.read("queue", letters.queue);
        target.read("exchange", letters.exchange);
        for (const char* key : {"queue", "exchange"}) {
            if (consumer.kafka && target.find(key) != nullptr)
                target.refuse(key,
                              " is for RabbitMQ: letters go to where the messages come from; "
                              "name a topic");
        }
        if (consumer.rabbitmq && target.find("topic") != nullptr)
            target.refuse("topic",
                          " is for Kafka: letters go to where the messages come from; "
                          "name a queue or an exchange");
        if (!letters.queue.empty() && !letters.exchange.empty())
            target.refuse("exchange",
                          " stands beside queue: letters go to one of them; remove one");
        target.read("create", letters.create);
        if (letters.create && !letters.exchange.empty())
            target.refuse("create",
                          ": an exchange is made by whoever binds queues to it; make it, or "
                          "name a queue");
        target.read("body", letters.body,
                    {{"raw", LetterBody::raw}, {"envelope", LetterBody::envelope}});
        target.read("headers", letters.headers,
                    {{"spring", LetterHeaders::spring}, {"none", LetterHeaders::none}});
    }
    if (consumer.rabbitmq) {
        if (letters.queue.empty() && letters.exchange.empty())
            letters.queue = consumer.rabbitmq->queue + ".dlq";
        return letters;
    }
    if (letters.topic.empty()) {
        const auto& topics = consumer.kafka->topics;
        if (topics.size() > 1 || topics.front().starts_with('^'))
            map.refuse("dead_letter",
                       ".topic must be named where there are several topics or a "
                       "pattern: the default <topic>.<group>.dlq is for one topic");
        letters.topic = topics.front() + "." + consumer.kafka->group + ".dlq";
    }
    return letters;
}

void read_share(const Map& map, std::string_view key, double& into) {
    const YAML::Node* at = map.find(key);
    if (at == nullptr) return;
    const std::string text = map.document().text(*at, map.path(key));
    unsigned percent = 0;
    const bool sign = text.size() > 1 && text.back() == '%';
    const std::string_view digits = std::string_view(text).substr(0, text.size() - (sign ? 1 : 0));
    const auto [after, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), percent);
    if (!sign || error != std::errc() || after != digits.data() + digits.size() || percent > 100)
        map.refuse(key, ": " + quoted(text) + " is no share: write 1% to 100%, or 0% for never");
    into = percent / 100.0;
}

std::set<Accept> read_accepted(const Map& map) {
    std::set<Accept> accepted;
    for (const YAML::Node& item : map.items("accept", true)) {
        const std::string word = map.document().text(item, map.path("accept"));
        if (word == "short_dedup") {
            accepted.insert(Accept::short_dedup);
        } else if (word == "unshared_store") {
            accepted.insert(Accept::unshared_store);
        } else {
            map.document().refuse(item, map.path("accept") + ": " + quoted(word) +
                                            " is not one of short_dedup, unshared_store");
        }
    }
    return accepted;
}

void read_dedup(const Map& map, ConsumerConfig& consumer) {
    std::string text = "auto";
    if (const YAML::Node* at = map.find("retention"); at != nullptr && at->IsScalar())
        text = map.document().text(*at, map.path("retention"));
    if (text != "auto") {
        milliseconds retention{0};
        map.read("retention", retention, one_ms);
        consumer.retention = retention;
    }
    map.read("dead", consumer.retention_dead, one_ms);
}

constexpr std::initializer_list<std::string_view> consumer_keys{
    "name",     "source",        "scope",        "id",         "business_key", "payload",
    "strategy", "database",      "handler",      "state",      "ordering",     "concurrency",
    "dedup",    "retry",         "on_unknown",   "breaker",    "dead_letter",  "park_limit",
    "accept",   "on_missing_id", "on_tombstone", "on_mismatch"};

ConsumerConfig read_consumer(const Map& map, Config& config) {
    ConsumerConfig consumer;
    consumer.line = map.node().Mark().line + 1;
    consumer.name = map.required_name("name");
    read_source(map, consumer, config.warnings);
    map.read("payload", consumer.payload, {{"json", Payload::json}, {"bytes", Payload::bytes}});
    const Messages messages{.kafka = consumer.kafka.has_value(), .payload = consumer.payload};
    consumer.scope = consumer.group() + "/" + consumer.name;
    if (map.find("scope") != nullptr) {
        consumer.scope = map.required_name("scope");
    } else if (consumer.scope.size() > name_max_bytes) {
        map.refuse("scope", " must be given: <group>/<name> has more than 255 characters");
    }
    read_id(map, consumer, messages);
    if (map.find("business_key") != nullptr)
        consumer.business_key = read_value(map, "business_key", messages);
    map.read("strategy", consumer.strategy,
             {{"store", ConsumerStrategy::store},
              {"redis", ConsumerStrategy::store},
              {"table", ConsumerStrategy::table},
              {"transaction", ConsumerStrategy::transaction},
              {"state", ConsumerStrategy::state}});
    if (const YAML::Node* at = map.find("strategy");
        at != nullptr && at->Scalar() == "redis" && config.store.kind != StoreKind::redis)
        map.refuse("strategy",
                   ": redis is another word for store where the store is Redis, and here "
                   "it is not: write store, or configure store.redis");
    if (consumer.strategy != ConsumerStrategy::store || map.find("database") != nullptr)
        consumer.database = read_database(map, config.store, config.warnings);
    consumer.handler = read_handler(map, messages);
    if (const YAML::Node* at = map.find("state")) {
        consumer.state = read_state(Map(map.document(), *at, map.path("state"),
                                        {"table", "key", "status", "version", "message_id_column",
                                         "from", "to", "terminal", "set", "on_superseded"}),
                                    messages);
    }
    consumer.ordering = messages.kafka ? Ordering::key : Ordering::none;
    map.read(
        "ordering", consumer.ordering,
        {{"partition", Ordering::partition}, {"key", Ordering::key}, {"none", Ordering::none}});
    map.read_count<unsigned>("concurrency", consumer.concurrency, concurrency_max);
    if (consumer.concurrency == 0) map.refuse("concurrency", ": write 1 or more");
    if (const YAML::Node* at = map.find("dedup"))
        read_dedup(Map(map.document(), *at, map.path("dedup"), {"retention", "dead"}), consumer);
    if (const YAML::Node* at = map.find("retry"))
        consumer.retry = read_retry(Map(map.document(), *at, map.path("retry"),
                                        {"attempts", "crashes", "backoff", "delays"}));
    map.read("on_unknown", consumer.hold_unknown, {{"rerun", false}, {"hold", true}}, {"probe"});
    if (const YAML::Node* at = map.find("breaker"))
        read_share(Map(map.document(), *at, map.path("breaker"), {"dead_share"}), "dead_share",
                   consumer.breaker_dead_share);
    consumer.dead_letter = read_dead_letter(map, consumer);
    map.read_count<std::size_t>("park_limit", consumer.park_limit, park_limit_max);
    if (consumer.park_limit == 0) map.refuse("park_limit", ": write 1 or more");
    consumer.accept = read_accepted(map);
    check_consumer(map, consumer, config);
    return consumer;
}

}  // namespace

std::vector<ConsumerConfig> read_consumers(const Map& root, Config& config) {
    std::vector<ConsumerConfig> consumers;
    for (const YAML::Node& item : root.items("consumers")) {
        const Map map(root.document(), item, "consumers[" + std::to_string(consumers.size()) + "]",
                      consumer_keys, {"mode", "store"});
        ConsumerConfig consumer = read_consumer(map, config);
        for (const ConsumerConfig& other : consumers) check_beside(map, consumer, other);
        consumers.push_back(std::move(consumer));
    }
    return consumers;
}

}  // namespace semel::config
