// Message: a delivery that is known by its id, while this process has it in hand.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/hash.hpp"
#include "base/time.hpp"
#include "brokers/delayed.hpp"
#include "brokers/delivery.hpp"
#include "core/fingerprint.hpp"

namespace semel::consumer {

struct HeldPartition;
struct Lane;
struct Message;

/// Where a message's id was found.
enum class IdFrom : std::uint8_t {
    configured,       ///< Where `id` says.
    cloudevents,      ///< The usual places, in their order.
    idempotency_key,  ///< The header Idempotency-Key.
    id_header,        ///< The header id (Debezium's outbox).
    message_id,       ///< The property message-id of AMQP.
    offset,           ///< Its position stands in: `id` says offset, or on_missing_id does.
};
inline constexpr std::size_t id_places = 6;
[[nodiscard]] const char* name_of(IdFrom place);

/// Where a message stands in this process. Kept by Lanes and the Consumer, of no meaning to others.
struct InHand {
    enum class State : std::uint8_t { none, ready, running, aside, waiting };
    /// Beside the records (parking.hpp), while it waits.
    enum class Parked : std::uint8_t {
        no,
        wanted,   ///< With the next put.
        writing,  ///< The store has been told.
        stored,   ///< It is there, and settled at the broker: to be taken out when it is finished.
    };
    State state = State::none;
    Parked parked = Parked::no;
    bool unreadable = false;        ///< Never given to a strategy: it gets a letter.
    std::uint32_t lone_deaths = 0;  ///< Of a suspect.
    std::uint32_t held = 0;         ///< Given back unstarted so often without a break.
    std::uint64_t arrival = 0;
    base::SteadyTime due{};  ///< Of one that waits.
    Lane* lane = nullptr;    ///< Null: it has none.
    HeldPartition* partition = nullptr;
    Message* before = nullptr;  ///< In its lane.
    Message* after = nullptr;
    Message* older = nullptr;  ///< Of all in hand.
    Message* newer = nullptr;
};

/// Owned by the Consumer from its delivery until it is settled or void; strategies and handlers
/// hold plain pointers to it only between their call and their answer. On the consumer's loop, but
/// for what a handler on another thread reads (delivery and names, which do not change).
struct Message {
    brokers::Delivery delivery;
    std::string source;  ///< Whose ids these are.
    std::string id;
    IdFrom id_from = IdFrom::configured;
    std::string business_key;  ///< For people; may be empty.
    base::Digest
        key;  ///< inbox::key_hash(scope, source, id): names the message in every store and letter.
    /// Of what makes it the same message. id.fingerprint: none: the key once more, so that any two
    /// of one id match. Never empty.
    core::Fingerprint fingerprint;
    std::uint64_t lane =
        0;  ///< Messages of one lane run one after the other, in their order. 0: no lane.
    /// Of a delayed copy: where the original lay.
    std::optional<brokers::Position> copy_of;
    std::uint32_t runs = 0;  ///< Given to the strategy so often by this process.
    base::SteadyTime received;
    InHand in_hand;
};

}  // namespace semel::consumer
