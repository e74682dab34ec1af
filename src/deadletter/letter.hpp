// Letter: a message given up on, as it is published: the original bytes, with what is known of it
// in headers or in an envelope.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/hash.hpp"
#include "brokers/delivery.hpp"
#include "brokers/publisher.hpp"
#include "config/consumers.hpp"

namespace semel::deadletter {

/// What is known of a dead message beside its bytes.
struct Circumstances {
    std::string consumer;    ///< Its name.
    std::string group;       ///< Group, or queue.
    std::string message_id;  ///< Empty: it has none that could be read.
    base::Digest key;        ///< Of the message, or of its position.
    std::uint32_t generation = 1;
    std::string error_class;    ///< name_of(DeadClass).
    std::string error_message;  ///< For people; no payload.
    std::string stack_trace;    ///< Usually empty.
    std::uint32_t failed_runs = 0;
    std::int64_t died_ms = 0;           ///< Unix time.
    std::int64_t first_failure_ms = 0;  ///< 0: not known.
};

struct Form {
    config::LetterBody body = config::LetterBody::raw;
    config::LetterHeaders headers = config::LetterHeaders::spring;
    bool kafka = true;  ///< Else RabbitMQ: numbers as text; the letter's id is also the property
                        ///< message-id of one that had none.
};

/// All headers of a letter together, in bytes, at most (less than what RabbitMQ takes); the stack
/// trace is cut first, then the error's message down to 256 bytes, then original headers from the
/// last one on, each cut said in `semel-cut`.
inline constexpr std::size_t letter_headers_max_bytes = 48 * 1024;
/// Of these two each letter has at most so much, in headers and envelope alike.
inline constexpr std::size_t letter_stack_trace_max_bytes = 16 * 1024;
inline constexpr std::size_t letter_error_message_max_bytes = 4 * 1024;

/// Changes a letter before it leaves: removes what must not lie in a dead letter topic.
using Redaction = std::function<void(brokers::Outgoing&)>;

/// The letter. Topic, exchange and routing key are left empty. The same arguments give the same
/// letter, but for nothing: its id (semel-letter-id: key and generation) is the same whenever the
/// same death is told again. A delivery that is itself a letter or a redriven copy has its semel-*
/// and Spring headers replaced, not piled up; originals of the first death are kept.
brokers::Outgoing make_letter(const brokers::Delivery& delivery, const Circumstances& about,
                              const Form& form);

/// Adds where the message lies (semel-original-*), unless it says already where it first lay.
void add_origin(std::vector<brokers::OutgoingHeader>& headers, const brokers::Delivery& delivery,
                bool kafka);
/// What AMQP's properties become in a message that is published again: those that name it stay,
/// those that would steer the new one become headers. Exchange and routing key are left empty.
brokers::AmqpProperties kept_properties(const brokers::Delivery& delivery,
                                        std::vector<brokers::OutgoingHeader>& headers);
/// Whether the broker reads this header of AMQP as further queues to send to.
bool steers(std::string_view header);

/// "<class>:<hash of the normalized message>": the same for failures that differ in numbers, ids
/// and quoted values only.
std::string fingerprint_of(std::string_view error_class, std::string_view error_message);

}  // namespace semel::deadletter
