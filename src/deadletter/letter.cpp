#include "deadletter/letter.hpp"

#include <algorithm>
#include <array>
#include <ctime>
#include <limits>
#include <utility>

#include "base/json_scan.hpp"
#include "brokers/delayed.hpp"
#include "deadletter/cause.hpp"
#include "deadletter/envelope.hpp"

namespace semel::deadletter {
namespace {

using brokers::OutgoingHeader;
using Headers = std::vector<OutgoingHeader>;

/// A header costs its name, its value and this much beside them.
constexpr std::size_t header_overhead = 6;
/// Of an error's message so much stays, whatever else is cut.
constexpr std::size_t error_message_kept_bytes = 256;
/// A record's key longer than this is not repeated in a header: the letter has it as its own key.
constexpr std::size_t key_header_max_bytes = 1024;

// Ours: replaced by each letter. The originals are kept where the message brings them along.
constexpr std::array<std::string_view, 20> told_anew{brokers::due_header,
                                                     brokers::copy_of_header,
                                                     "semel-letter-id",
                                                     "semel-consumer",
                                                     "semel-group",
                                                     "semel-message-id",
                                                     "semel-message-id-encoding",
                                                     "semel-generation",
                                                     "semel-error-class",
                                                     "semel-error-message",
                                                     "semel-error-fingerprint",
                                                     "semel-stack-trace",
                                                     "semel-failed-runs",
                                                     "semel-died-at",
                                                     "semel-body",
                                                     "semel-cut",
                                                     "kafka_dlt-exception-fqcn",
                                                     "kafka_dlt-exception-message",
                                                     "kafka_dlt-exception-stacktrace",
                                                     "kafka_dlt-exception-cause-fqcn"};
// Made by RabbitMQ's quorum queues for one delivery.
constexpr std::array<std::string_view, 2> of_one_delivery{"x-delivery-count", "x-acquired-count"};

std::size_t size_of(const OutgoingHeader& header) {
    return header.name.size() + header_overhead + (header.value ? header.value->size() : 0);
}

bool has(const Headers& headers, std::string_view name) {
    return std::any_of(headers.begin(), headers.end(),
                       [&](const OutgoingHeader& one) { return one.name == name; });
}

template <class Integer>
std::string big_endian(Integer number) {
    std::string out(sizeof(Integer), '\0');
    for (std::size_t i = 0; i < sizeof(Integer); ++i)
        out[sizeof(Integer) - 1 - i] =
            static_cast<char>(static_cast<std::uint64_t>(number) >> (8 * i) & 0xff);
    return out;
}

/// Adds the headers of one letter. What the message has already of the first death stays as it is.
class Writer {
  public:
    Writer(Headers& headers, bool kafka) : headers_(headers), kafka_(kafka) {}

    void text(std::string_view name, std::string_view value) {
        headers_.push_back({std::string(name), std::string(value)});
    }
    void text_unless_empty(std::string_view name, std::string_view value) {
        if (!value.empty()) text(name, value);
    }
    /// Bytes that are no UTF-8 as base64, which `<name>-encoding` says.
    void bytes(std::string_view name, std::string_view value) {
        if (is_utf8(value)) return text(name, value);
        text(name, base64(value));
        text(std::string(name) + "-encoding", "base64");
    }
    /// As Spring writes numbers: binary on Kafka, text elsewhere.
    template <class Integer>
    void spring(std::string_view name, Integer number) {
        text(name, kafka_ ? big_endian(number) : std::to_string(number));
    }

  private:
    Headers& headers_;
    bool kafka_;
};

void add_originals(Headers& headers, const brokers::Delivery& delivery, bool kafka) {
    const brokers::Partition& where = delivery.partition();
    Writer out(headers, kafka);
    if (!has(headers, "semel-original-source")) out.text("semel-original-source", where.topic);
    // All or nothing: half of one death and half of another would name no message at all.
    if (has(headers, "semel-original-topic")) return;
    out.text("semel-original-topic", where.topic);
    if (delivery.timestamp_ms)
        out.text("semel-original-timestamp", std::to_string(*delivery.timestamp_ms));
    if (kafka) {
        out.text("semel-original-partition", std::to_string(where.number));
        out.text("semel-original-offset", std::to_string(delivery.position()));
        if (delivery.key && delivery.key->size() <= key_header_max_bytes)
            out.bytes("semel-original-key", *delivery.key);
    } else if (delivery.properties) {
        out.text("semel-original-exchange", delivery.properties->exchange);
        out.text("semel-original-routing-key", delivery.properties->routing_key);
    }
}

void add_spring_originals(Headers& headers, const brokers::Delivery& delivery,
                          const Circumstances& about, const Form& form) {
    if (form.headers != config::LetterHeaders::spring) return;
    if (has(headers, "kafka_dlt-original-topic")) return;
    const Origin origin = origin_of(delivery);
    Writer out(headers, form.kafka);
    out.text("kafka_dlt-original-topic", origin.partition.topic);
    if (form.kafka) {
        out.spring("kafka_dlt-original-partition", origin.partition.number);
        out.spring("kafka_dlt-original-offset", origin.offset);
    }
    if (origin.timestamp_ms) out.spring("kafka_dlt-original-timestamp", *origin.timestamp_ms);
    out.text("kafka_dlt-original-consumer-group", about.group);
}

void put_aside(Headers& headers, std::string& property, const char* header) {
    if (!property.empty() && !has(headers, header)) headers.push_back({header, property});
    property.clear();
}

/// Of AMQP: what names the message stays, what would steer the letter becomes a header.
void add_properties(brokers::Outgoing& letter, const brokers::Delivery& delivery,
                    const std::string& letter_id, const Form& form) {
    if (delivery.properties) {
        letter.properties = kept_properties(delivery, letter.headers);
        if (form.body == config::LetterBody::envelope) {
            put_aside(letter.headers, letter.properties.content_type,
                      "semel-original-content-type");
            put_aside(letter.headers, letter.properties.content_encoding,
                      "semel-original-content-encoding");
            letter.properties.content_type = "application/json";
        }
    }
    if (letter.properties.message_id.empty()) letter.properties.message_id = letter_id;
    letter.timestamp_ms = delivery.timestamp_ms;
}

/// Written by an earlier letter: where the message came from is never cut.
bool says_origin(std::string_view name) {
    return name.starts_with("semel-original-") || name.starts_with("kafka_dlt-original-");
}

/// What can be shortened, and what is.
struct Told {
    std::string stack_trace, error_message;
    std::vector<std::string> cut;
};

/// Brings `headers` and `told` (in `copies` headers each) below the limit.
class Trimmer {
  public:
    Trimmer(Headers& originals, Told& told, std::size_t copies, std::size_t fixed)
        : originals_(originals), told_(told), copies_(copies), fixed_(fixed) {}

    void trim() {
        cut(told_.stack_trace, 0, "stack-trace");
        cut(told_.error_message, error_message_kept_bytes, "error-message");
        std::size_t dropped = 0;
        std::size_t too_much = excess();
        for (std::size_t at = originals_.size(); at > 0 && too_much > 0; --at) {
            if (says_origin(originals_[at - 1].name)) continue;
            too_much -= std::min(too_much, size_of(originals_[at - 1]));
            originals_.erase(originals_.begin() + static_cast<std::ptrdiff_t>(at - 1));
            ++dropped;
        }
        if (dropped > 0) told_.cut.push_back("headers=" + std::to_string(dropped));
    }

  private:
    [[nodiscard]] std::size_t excess() const {
        std::size_t size =
            fixed_ + copies_ * (told_.stack_trace.size() + told_.error_message.size());
        for (const OutgoingHeader& one : originals_) size += size_of(one);
        return size > letter_headers_max_bytes ? size - letter_headers_max_bytes : 0;
    }
    void cut(std::string& text, std::size_t least, const char* name) {
        const std::size_t too_much = (excess() + copies_ - 1) / copies_;
        if (too_much == 0) return;
        const std::size_t left = text.size() > too_much ? text.size() - too_much : 0;
        if (!shorten(text, std::max(left, least))) return;
        if (std::find(told_.cut.begin(), told_.cut.end(), name) == told_.cut.end())
            told_.cut.emplace_back(name);
    }

    Headers& originals_;
    Told& told_;
    std::size_t copies_;
    std::size_t fixed_;
};

/// The message's own headers, in their order, as far as a letter keeps them.
Headers kept(const brokers::Delivery& delivery, const Form& form) {
    const bool spring = form.headers == config::LetterHeaders::spring;
    const bool letter =
        std::any_of(delivery.headers.begin(), delivery.headers.end(),
                    [](const brokers::Header& h) { return h.name == "semel-letter-id"; });
    Headers out;
    out.reserve(delivery.headers.size());
    for (const brokers::Header& header : delivery.headers) {
        const bool anew =
            std::find(told_anew.begin(), told_anew.end(), header.name) != told_anew.end();
        // Without the family, Spring's headers are the message's own, unless a letter of ours wrote
        // them.
        if (anew && (header.name.starts_with("semel-") || spring || letter)) continue;
        if (!form.kafka && std::find(of_one_delivery.begin(), of_one_delivery.end(), header.name) !=
                               of_one_delivery.end())
            continue;
        OutgoingHeader copy{std::string(header.name), std::nullopt};
        if (header.value) copy.value = std::string(*header.value);
        if (!form.kafka && steers(header.name)) copy.name = "semel-original-" + copy.name;
        out.push_back(std::move(copy));
    }
    return out;
}

}  // namespace

// As text, as which they arrive, the broker refuses them.
bool steers(std::string_view header) { return header == "CC" || header == "BCC"; }

void add_origin(Headers& headers, const brokers::Delivery& delivery, bool kafka) {
    add_originals(headers, delivery, kafka);
}

brokers::AmqpProperties kept_properties(const brokers::Delivery& delivery, Headers& headers) {
    brokers::AmqpProperties out = *delivery.properties;
    out.exchange.clear();
    out.routing_key.clear();
    // It does not expire with its message, and only the connection's own user may be named.
    put_aside(headers, out.expiration, "semel-original-expiration");
    put_aside(headers, out.user_id, "semel-original-user-id");
    return out;
}

brokers::Outgoing make_letter(const brokers::Delivery& delivery, const Circumstances& about,
                              const Form& form) {
    const bool spring = form.headers == config::LetterHeaders::spring;
    const std::string letter_id =
        base::base64url(about.key.view()) + "." + std::to_string(about.generation);
    Told told{.stack_trace = about.stack_trace, .error_message = about.error_message, .cut = {}};
    if (shorten(told.stack_trace, letter_stack_trace_max_bytes))
        told.cut.emplace_back("stack-trace");
    if (shorten(told.error_message, letter_error_message_max_bytes))
        told.cut.emplace_back("error-message");

    brokers::Outgoing letter;
    if (form.kafka && delivery.key) letter.key = std::string(*delivery.key);
    if (form.body == config::LetterBody::envelope) {
        letter.value = make_envelope(delivery, about, told.error_message, told.stack_trace);
    } else if (delivery.value) {
        letter.value = std::string(*delivery.value);
    }

    // First what is said of the message, so that it is known how much room its own headers have.
    Headers originals = kept(delivery, form);
    const std::size_t own = originals.size();
    letter.headers = std::move(originals);
    add_originals(letter.headers, delivery, form.kafka);
    add_spring_originals(letter.headers, delivery, about, form);
    if (!form.kafka) add_properties(letter, delivery, letter_id, form);
    Writer out(letter.headers, form.kafka);
    out.text("semel-letter-id", letter_id);
    out.text("semel-consumer", about.consumer);
    out.text("semel-group", about.group);
    if (!about.message_id.empty()) out.bytes("semel-message-id", about.message_id);
    out.text("semel-generation", std::to_string(about.generation));
    out.text("semel-error-class", about.error_class);
    out.text("semel-error-fingerprint", fingerprint_of(about.error_class, about.error_message));
    out.text("semel-failed-runs", std::to_string(about.failed_runs));
    if (about.first_failure_ms != 0 && !has(letter.headers, "semel-first-failure-time"))
        out.text("semel-first-failure-time", rfc3339(about.first_failure_ms));
    out.text("semel-died-at", rfc3339(about.died_ms));
    if (form.body == config::LetterBody::envelope) out.text("semel-body", "envelope");
    if (spring) out.text("kafka_dlt-exception-fqcn", "semel." + about.error_class);

    // The message's own headers lie in front; they are the last to be cut.
    originals.assign(
        std::make_move_iterator(letter.headers.begin()),
        std::make_move_iterator(letter.headers.begin() + static_cast<std::ptrdiff_t>(own)));
    Headers said(std::make_move_iterator(letter.headers.begin() + static_cast<std::ptrdiff_t>(own)),
                 std::make_move_iterator(letter.headers.end()));
    constexpr std::size_t told_names =
        256;  // of error message, stack trace and semel-cut, with their overhead
    std::size_t fixed = told_names;
    for (const OutgoingHeader& one : said) fixed += size_of(one);
    Trimmer(originals, told, spring ? 2 : 1, fixed).trim();

    letter.headers = std::move(originals);
    letter.headers.insert(letter.headers.end(), std::make_move_iterator(said.begin()),
                          std::make_move_iterator(said.end()));
    out.text("semel-error-message", told.error_message);
    if (spring) out.text("kafka_dlt-exception-message", told.error_message);
    out.text_unless_empty("semel-stack-trace", told.stack_trace);
    if (spring) out.text_unless_empty("kafka_dlt-exception-stacktrace", told.stack_trace);
    if (!told.cut.empty()) {
        std::string list;
        for (const std::string& one : told.cut) list.append(list.empty() ? "" : ", ").append(one);
        out.text("semel-cut", list);
    }
    return letter;
}

}  // namespace semel::deadletter
