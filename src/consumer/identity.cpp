#include "consumer/identity.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <span>
#include <utility>

#include "consumer/payload.hpp"
#include "inbox/names.hpp"

namespace semel::consumer {
namespace {

/// What the fingerprint of a message without a value is: no payload has it.
constexpr base::Digest tombstone_digest = [] {
    base::Digest all;
    for (auto& byte : all.bytes) byte = 0xff;
    return all;
}();

struct Id {
    std::string id;
    std::string event_source;  ///< CloudEvents' own; else empty.
    bool position = false;
    IdFrom from = IdFrom::configured;  ///< Of the usual places.
};
/// There is none in this place.
struct None {};
/// There should be one and it cannot be used: `on_missing` says what happens.
struct Missing {
    std::string reason;
};
struct Undecodable {
    std::string reason;
};
using Look = std::variant<None, Id, Missing, Undecodable>;

std::string quoted(std::string_view name) { return "`" + std::string(name) + "`"; }

/// Where it lay when it was first delivered.
brokers::Position origin_of(const brokers::Delivery& delivery, const IdentityRules& rules) {
    if (rules.copy_topics.contains(delivery.partition().topic)) {
        if (auto copied = brokers::copied_from(delivery)) return std::move(*copied);
    }
    return {.partition = delivery.partition(), .offset = delivery.position()};
}

std::string position_of(const brokers::Delivery& delivery) {
    const brokers::Partition& where = delivery.partition();
    return where.topic + "-" + std::to_string(where.number) + "-" +
           std::to_string(delivery.position());
}

/// A structured-field string (RFC 8941) means what stands between its quotes, so that an id is the
/// same whichever way it comes; anything else is taken as it is.
Look idempotency_key(std::string_view name, std::string_view value) {
    if (!value.starts_with('"')) return Id{.id = std::string(value)};
    Id found;
    bool closed = false;
    for (std::size_t i = 1; i < value.size() && !closed; ++i) {
        if (value[i] == '"') {
            closed = i + 1 == value.size();
            if (!closed) break;
        } else if (value[i] != '\\') {
            found.id += value[i];
        } else if (i + 1 < value.size() && (value[i + 1] == '"' || value[i + 1] == '\\')) {
            found.id += value[++i];
        } else {
            break;
        }
    }
    if (!closed || found.id.empty())
        return Missing{"the header " + quoted(name) + " is no valid quoted string"};
    return found;
}

bool is_idempotency_key(std::string_view name) {
    return name == "Idempotency-Key" || name == "idempotency-key";
}

Look in_header(const brokers::Delivery& delivery, std::string_view name) {
    const HeaderFound found = find_header(delivery, name);
    if (!found.present) return None{};
    if (found.ambiguous) return Missing{ambiguous_header(name)};
    if (!found.value || found.value->empty())
        return Missing{"the header " + quoted(name) + " is empty"};
    if (is_idempotency_key(name)) return idempotency_key(name, *found.value);
    return Id{.id = std::string(*found.value)};
}

/// A string that is not empty, of a top-level member of a structured event.
std::optional<std::string> attribute(Payload& payload, std::string_view pointer) {
    const auto raw = payload.find(pointer);
    auto text = raw ? base::json_string(*raw) : std::nullopt;
    return text && !text->empty() ? std::move(text) : std::nullopt;
}

enum class Structured { no, json, other };

/// Whether the content type says that the payload is one whole event. Media types know no case.
Structured structured(const brokers::Delivery& delivery) {
    constexpr std::string_view cloudevents = "application/cloudevents";
    std::optional<std::string_view> type = find_property(delivery, "content-type");
    for (const std::string_view name : {"content-type", "Content-Type"}) {
        if (!type) type = find_header(delivery, name).value;
    }
    if (!type || type->size() < cloudevents.size()) return Structured::no;
    std::string media(type->substr(0, std::min(type->find(';'), type->size())));
    while (media.ends_with(' ') || media.ends_with('\t')) media.pop_back();
    std::transform(media.begin(), media.end(), media.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    if (!media.starts_with(cloudevents)) return Structured::no;
    return media == cloudevents || media == std::string(cloudevents) + "+json" ? Structured::json
                                                                               : Structured::other;
}

Look in_cloudevents(const brokers::Delivery& delivery, Payload& payload) {
    struct Names {
        std::string_view id, source;
    };
    constexpr std::array<Names, 1> kafka{{{"ce_id", "ce_source"}}};
    constexpr std::array<Names, 2> amqp{
        {{"cloudEvents:id", "cloudEvents:source"}, {"cloudEvents_id", "cloudEvents_source"}}};
    const bool is_amqp = delivery.properties != nullptr;
    for (const Names& names : is_amqp ? std::span<const Names>(amqp) : kafka) {
        const HeaderFound id = find_header(delivery, names.id);
        if (!id.present) continue;
        const HeaderFound source = find_header(delivery, names.source);
        if (id.ambiguous) return Missing{ambiguous_header(names.id)};
        if (source.ambiguous) return Missing{ambiguous_header(names.source)};
        const auto given = [](const HeaderFound& one) { return one.value && !one.value->empty(); };
        if (!given(id) || !given(source)) {
            return Missing{"a CloudEvent has an id and a source: the header " +
                           quoted(given(id) ? names.source : names.id) + " is missing or empty"};
        }
        return Id{.id = std::string(*id.value), .event_source = std::string(*source.value)};
    }
    switch (structured(delivery)) {
        case Structured::no:
            return None{};
        case Structured::other:
            return Missing{
                "its content type is of CloudEvents in a batch or in a format other than JSON: "
                "the id of one event is wanted"};
        case Structured::json:
            break;
    }
    if (!delivery.value) return Missing{"a structured CloudEvent without a payload has no id"};
    if (!payload.valid()) return Undecodable{not_json(*delivery.value)};
    auto id = attribute(payload, "/id");
    auto source = attribute(payload, "/source");
    if (!id || !source) {
        return Missing{std::string("a structured CloudEvent without ") +
                       (id ? "`source`" : "`id`") + " (a string that is not empty)"};
    }
    return Id{.id = std::move(*id), .event_source = std::move(*source)};
}

Look in_usual_places(const brokers::Delivery& delivery, Payload& payload) {
    const auto found_in = [](Look look, IdFrom place) {
        if (Id* const id = std::get_if<Id>(&look)) id->from = place;
        return look;
    };
    Look found = in_cloudevents(delivery, payload);
    if (!std::holds_alternative<None>(found))
        return found_in(std::move(found), IdFrom::cloudevents);
    // Two spellings are one header: where both are there they must agree.
    for (const std::string_view name : {"Idempotency-Key", "idempotency-key"}) {
        Look one = in_header(delivery, name);
        if (std::holds_alternative<None>(one)) continue;
        if (std::holds_alternative<Missing>(one)) return one;
        const Id* before = std::get_if<Id>(&found);
        if (before != nullptr && before->id != std::get<Id>(one).id)
            return Missing{ambiguous_header(name)};
        found = std::move(one);
    }
    if (!std::holds_alternative<None>(found))
        return found_in(std::move(found), IdFrom::idempotency_key);
    found = in_header(delivery, "id");
    if (!std::holds_alternative<None>(found)) return found_in(std::move(found), IdFrom::id_header);
    if (const auto property = find_property(delivery, "message-id"))
        return Id{.id = std::string(*property), .from = IdFrom::message_id};
    return Missing{std::string("it has no id: no CloudEvent, no header `Idempotency-Key` or `id`") +
                   (delivery.properties ? ", no property `message-id`" : "") +
                   "; say under `id:` where it is"};
}

Look in_json(const brokers::Delivery& delivery, std::string_view pointer, Payload& payload) {
    if (!delivery.value)
        return Missing{"its id would be in the payload, and it has none (a tombstone)"};
    if (!payload.valid()) return Undecodable{not_json(*delivery.value)};
    const std::string at = "the JSON value at " + quoted(pointer);
    const auto raw = payload.find(pointer);
    if (!raw) return Missing{"the payload has nothing at " + quoted(pointer)};
    if (raw->starts_with('"')) {
        auto text = base::json_string(*raw);
        if (!text || text->empty()) return Missing{at + " is empty"};
        return Id{.id = std::move(*text)};
    }
    const bool number = *raw != "true" && *raw != "false" && *raw != "null" &&
                        raw->front() != '{' && raw->front() != '[';
    if (!number || raw->find_first_of(".eE") != std::string_view::npos)
        return Missing{at + " is neither a string nor an integer"};
    return Id{.id = std::string(*raw)};
}

Look at_position(const brokers::Delivery& delivery, const IdentityRules& rules) {
    if (delivery.properties)
        return Missing{
            "a queue has no offsets: a message without an id cannot be told from others"};
    return Id{.id = brokers::in_words(origin_of(delivery, rules)), .position = true};
}

Look look(const brokers::Delivery& delivery, const IdentityRules& rules, Payload& payload) {
    if (!rules.id.from) return in_usual_places(delivery, payload);
    const config::ValueSpec& spec = *rules.id.from;
    const auto present = [](std::optional<std::string_view> value,
                            const std::string& what) -> Look {
        if (!value) return Missing{"it has no " + what};
        if (value->empty()) return Missing{"its " + what + " is empty"};
        return Id{.id = std::string(*value)};
    };
    switch (spec.from) {
        case config::ValueFrom::json:
            return in_json(delivery, spec.name, payload);
        case config::ValueFrom::header: {
            Look found = in_header(delivery, spec.name);
            if (std::holds_alternative<None>(found))
                return Missing{"it has no header " + quoted(spec.name)};
            return found;
        }
        case config::ValueFrom::property:
            return present(find_property(delivery, spec.name), "property " + quoted(spec.name));
        case config::ValueFrom::key:
            return present(delivery.key, "key");
        case config::ValueFrom::offset:
            return at_position(delivery, rules);
        case config::ValueFrom::cloudevents: {
            Look found = in_cloudevents(delivery, payload);
            if (std::holds_alternative<None>(found)) return Missing{"it is no CloudEvent"};
            return found;
        }
        case config::ValueFrom::constant:
            break;
    }
    return Missing{"a constant is no id: it names all messages alike"};
}

/// Whose id it is. Missing: the header that says so contradicts itself.
std::variant<std::string, Missing> source_of(const brokers::Delivery& delivery, const Id& id,
                                             const IdentityRules& rules) {
    if (!id.event_source.empty()) return id.event_source;
    if (id.position) return origin_of(delivery, rules).partition.topic;
    if (!rules.id.source.empty()) return rules.id.source;
    const HeaderFound original = find_header(delivery, original_source_header);
    if (original.ambiguous) return Missing{ambiguous_header(original_source_header)};
    if (original.value && !original.value->empty()) return std::string(*original.value);
    return delivery.partition().topic;
}

/// Over the members that count: each is there with its canonical value, or absent.
base::Digest digest_of_members(Payload& payload, const std::vector<std::string>& pointers) {
    std::string sequence("members");
    for (const std::string& pointer : pointers) {
        const auto raw = payload.find(pointer);
        sequence += raw ? '+' : '-';
        if (!raw) continue;
        const auto canonical = base::canonical(*raw);
        sequence += canonical ? 'c' : 'r';
        sequence += (canonical ? canonical->digest : base::sha256(*raw)).view();
    }
    return base::sha256(sequence);
}

core::Fingerprint fingerprint_of(const Message& message, const IdentityRules& rules,
                                 Payload& payload) {
    core::Fingerprint out;
    if (!rules.id.fingerprint) {
        out.raw = message.key;
    } else if (!message.delivery.value) {
        out.raw = tombstone_digest;
    } else if (!rules.id.fingerprint_members.empty()) {
        out.raw = digest_of_members(payload, rules.id.fingerprint_members);
    } else {
        out.raw = base::sha256(*message.delivery.value);
        if (rules.payload == config::Payload::json) {
            if (const auto canonical = base::canonical(*message.delivery.value))
                out.canonical = canonical->digest;
        }
    }
    return out;
}

std::string business_key_of(const brokers::Delivery& delivery, const config::ValueSpec& spec,
                            Payload& payload) {
    auto found = [&]() -> std::variant<Extracted, ExtractError> {
        if (spec.from != config::ValueFrom::json) return extract(delivery, spec);
        const auto raw = delivery.value ? payload.find(spec.name) : std::nullopt;
        return raw ? scalar_of(*raw, spec.name) : Extracted{};
    }();
    // For people only: a message is not refused because there is none.
    Extracted* value = std::get_if<Extracted>(&found);
    return value != nullptr && value->text ? std::move(*value->text) : std::string();
}

bool reads_payload(const IdentityRules& rules) {
    return (rules.id.fingerprint && !rules.id.fingerprint_members.empty()) ||
           (rules.business_key && rules.business_key->from == config::ValueFrom::json &&
            rules.payload == config::Payload::json);
}

Identified missing(const IdentityRules& rules, std::string reason) {
    if (rules.id.on_missing == config::OnMissingId::skip) return Skipped{"on_missing_id: skip"};
    return Unreadable{.why = DeadClass::missing_id, .reason = std::move(reason)};
}

Identified identified(brokers::Delivery& delivery, const IdentityRules& rules) {
    if (!delivery.value) {
        switch (rules.id.on_tombstone) {
            case config::OnTombstone::deliver:
                break;
            case config::OnTombstone::skip:
                return Skipped{"on_tombstone: skip"};
            case config::OnTombstone::dead_letter:
                return Unreadable{.why = DeadClass::tombstone,
                                  .reason =
                                      "it has no payload (a tombstone), and `on_tombstone` "
                                      "says dead_letter"};
        }
    }
    Payload payload(delivery.value.value_or(std::string_view()));
    Look found = look(delivery, rules, payload);
    std::string source;
    for (;;) {
        if (const auto* wrong = std::get_if<Undecodable>(&found))
            return Unreadable{.why = DeadClass::decode, .reason = wrong->reason};
        std::string reason;
        if (const auto* wrong = std::get_if<Missing>(&found)) reason = wrong->reason;
        bool position = false;
        if (const auto* id = std::get_if<Id>(&found)) {
            position = id->position;
            auto whose = source_of(delivery, *id, rules);
            if (const auto* wrong = std::get_if<Missing>(&whose)) {
                reason = wrong->reason;
            } else {
                source = std::move(std::get<std::string>(whose));
                const auto checked =
                    inbox::check({.scope = rules.scope, .source = source, .id = id->id});
                if (checked) break;
                reason = checked.error().detail;
                constexpr std::string_view who = "inbox: ";  // not the one who refuses it here
                if (reason.starts_with(who)) reason.erase(0, who.size());
            }
        }
        // The position stands in once; if it cannot either, that was the reason.
        if (rules.id.on_missing != config::OnMissingId::offset || position || delivery.properties)
            return missing(rules, std::move(reason));
        found = at_position(delivery, rules);
    }
    if (delivery.value && reads_payload(rules) && !payload.valid())
        return Unreadable{.why = DeadClass::decode, .reason = not_json(*delivery.value)};

    auto message = std::make_unique<Message>();
    message->source = std::move(source);
    Id& id = std::get<Id>(found);
    message->id_from = id.position ? IdFrom::offset : id.from;
    message->id = std::move(id.id);
    message->key =
        inbox::key_hash({.scope = rules.scope, .source = message->source, .id = message->id});
    if (rules.business_key)
        message->business_key = business_key_of(delivery, *rules.business_key, payload);
    if (rules.copy_topics.contains(delivery.partition().topic))
        message->copy_of = brokers::copied_from(delivery);
    message->delivery = std::move(delivery);
    message->fingerprint = fingerprint_of(*message, rules, payload);
    return message;
}

}  // namespace

const char* name_of(IdFrom place) {
    switch (place) {
        case IdFrom::configured:
            return "configured";
        case IdFrom::cloudevents:
            return "cloudevents";
        case IdFrom::idempotency_key:
            return "idempotency_key";
        case IdFrom::id_header:
            return "id_header";
        case IdFrom::message_id:
            return "message_id";
        case IdFrom::offset:
            return "offset";
    }
    return "";
}

Identity::Identity(IdentityRules rules) : rules_(std::move(rules)) {}

Identified Identity::identify(brokers::Delivery&& delivery, brokers::Delivery& rest) const {
    Identified out = identified(delivery, rules_);
    if (!std::holds_alternative<std::unique_ptr<Message>>(out)) rest = std::move(delivery);
    return out;
}

base::Digest Identity::key_of_position(const brokers::Delivery& delivery) {
    const std::string& topic = delivery.partition().topic;
    if (!delivery.properties) {
        return inbox::key_hash(
            {.scope = "semel position", .source = topic, .id = position_of(delivery)});
    }
    // A queue's tags begin anew with each subscription: its messages are named by what they hold.
    std::string held;
    const auto add = [&held](std::string_view part) {
        held += std::to_string(part.size());
        held += ':';
        held += part;
    };
    const brokers::AmqpProperties& properties = *delivery.properties;
    for (const std::string* part : {&properties.exchange, &properties.routing_key,
                                    &properties.message_id, &properties.correlation_id})
        add(*part);
    add(std::to_string(delivery.timestamp_ms.value_or(0)));
    add(delivery.value.value_or(std::string_view()));
    const base::Digest digest = base::sha256(held);
    return inbox::key_hash({.scope = "semel content", .source = topic, .id = digest.view()});
}

}  // namespace semel::consumer
