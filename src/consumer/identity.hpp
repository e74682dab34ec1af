// Identity: which message a delivery is: its id and whose ids these are, by the rules of the
// configuration. Pure.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <variant>

#include "config/consumers.hpp"
#include "consumer/message.hpp"
#include "consumer/verdict.hpp"

namespace semel::consumer {

/// Header that our own redrive and retry copies carry: the topic or queue that the message was
/// first delivered from.
inline constexpr std::string_view original_source_header = "semel-original-source";

struct IdentityRules {
    std::string scope;
    config::IdConfig id;
    std::optional<config::ValueSpec> business_key;
    config::Payload payload = config::Payload::json;
    config::Ordering ordering = config::Ordering::key;
    /// Kafka: topics of this consumer's own delayed copies, whose headers say where the original
    /// lay.
    std::set<std::string> copy_topics;
};

/// The message cannot be run; nothing is claimed for it.
struct Unreadable {
    DeadClass why = DeadClass::decode;  ///< decode, missing_id, tombstone.
    std::string
        reason;  ///< For people; no payload. A Confluent-framed payload is recognised and named.
};
/// A named rule says that it is to be settled without being run.
struct Skipped {
    std::string rule;  ///< "on_tombstone: skip", "on_missing_id: skip"
};
using Identified = std::variant<std::unique_ptr<Message>, Unreadable, Skipped>;

/// Always takes the delivery: into the message, or into `rest` where there is none. Thread-safe
/// (immutable).
class Identity {
  public:
    explicit Identity(IdentityRules rules);
    Identified identify(brokers::Delivery&& delivery, brokers::Delivery& rest) const;
    /// How an unreadable delivery is named in its letter and in logs: the digest of
    /// topic-partition-offset. On RabbitMQ, where a position does not last, of its content: the
    /// same when it is delivered again, and for an exact copy of it.
    static base::Digest key_of_position(const brokers::Delivery& delivery);

  private:
    IdentityRules rules_;
};

/// A value out of a message. What an Extracted says: text as the handler's parameter sees it; null:
/// there is none (a JSON null, a missing header or member). An error says why it cannot be read
/// (payload no JSON, an object where one value is wanted).
struct ExtractError {
    std::string reason;
};
struct Extracted {
    std::optional<std::string> text;
    bool number = false;   ///< A JSON number: `text` as it is spelled.
    bool boolean = false;  ///< "true" or "false".
};
std::variant<Extracted, ExtractError> extract(const brokers::Delivery& delivery,
                                              const config::ValueSpec& spec);

/// The raw JSON text at an RFC 6901 pointer ("" is the whole); nullopt: there is none, or `json` is
/// not valid.
std::optional<std::string_view> at_pointer(std::string_view json, std::string_view pointer);
/// Whether `pointer` is one: empty, or begins with "/" and has "~" only as ~0 and ~1.
bool is_pointer(std::string_view pointer);

}  // namespace semel::consumer
