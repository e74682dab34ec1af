#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <utility>

#include "config/consumer_parts.hpp"

namespace semel::config {

namespace {

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

}  // namespace

std::string required_text(const Map& map, std::string_view key, const char* what) {
    std::string text;
    map.read(key, text);
    if (text.empty()) map.refuse(key, std::string(" must be ") + what);
    return text;
}

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

}  // namespace semel::config
