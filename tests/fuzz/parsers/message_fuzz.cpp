// Any bytes as a message under any rule for its id: identified, skipped or refused with a reason,
// the same when it comes again, and never without its delivery.
#include <string>
#include <vector>

#include "base/assert.hpp"
#include "consumer/identity.hpp"
#include "inbox/names.hpp"

using namespace semel;
using config::ValueFrom;

namespace {

class Held final : public brokers::Assignment {
  public:
    using Assignment::Assignment;
};

/// Takes the input apart: a byte, or a piece of a length that a byte says.
class Input {
  public:
    Input(const std::uint8_t* data, std::size_t size)
        : rest_(reinterpret_cast<const char*>(data), size) {}
    std::uint8_t byte() {
        if (rest_.empty()) return 0;
        const auto first = static_cast<std::uint8_t>(rest_[0]);
        rest_.remove_prefix(1);
        return first;
    }
    std::string_view piece() {
        const std::string_view out = rest_.substr(0, byte());
        rest_.remove_prefix(out.size());
        return out;
    }
    [[nodiscard]] std::string_view rest() const { return rest_; }

  private:
    std::string_view rest_;
};

brokers::Delivery copy(const brokers::AssignmentPtr& from, const brokers::Delivery& one) {
    brokers::Delivery out = brokers::make_delivery({.assignment = from, .position = one.position()},
                                                   one.key, one.value, one.headers);
    if (one.properties) out.properties = std::make_unique<brokers::AmqpProperties>(*one.properties);
    return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const brokers::AssignmentPtr orders =
        std::make_shared<Held>(brokers::Partition{"orders", 0}, 1);
    static constexpr std::string_view names[] = {"id",
                                                 "ce_id",
                                                 "ce_source",
                                                 "Idempotency-Key",
                                                 "idempotency-key",
                                                 "content-type",
                                                 "cloudEvents:id",
                                                 "cloudEvents_source",
                                                 "semel-original-source"};
    Input input(data, size);
    consumer::IdentityRules rules;
    rules.scope = "fuzz";
    const unsigned how = input.byte(), more = input.byte();
    if ((how & 7) < 7)
        rules.id.from =
            config::ValueSpec{static_cast<ValueFrom>(how & 7), std::string(input.piece())};
    rules.id.on_missing = static_cast<config::OnMissingId>((how >> 3) % 3);
    rules.id.on_tombstone = static_cast<config::OnTombstone>((how >> 5) % 3);
    rules.id.fingerprint = (more & 1) == 0;
    if ((more & 2) != 0) rules.id.fingerprint_members = {"/a", std::string(input.piece())};
    if ((more & 4) != 0)
        rules.business_key = config::ValueSpec{ValueFrom::json, std::string(input.piece())};
    if ((more & 8) != 0) rules.payload = config::Payload::bytes;

    std::vector<brokers::Header> headers;
    for (unsigned n = more >> 6; n > 0; --n) {
        const unsigned name = input.byte();
        headers.push_back(
            {.name = name < std::size(names) ? names[name] : input.piece(), .value = {}});
        if (name < 128) headers.back().value = input.piece();
    }
    std::optional<std::string_view> key, value;
    if ((more & 16) != 0) key = input.piece();
    const bool amqp = (more & 32) != 0;
    std::string_view property = amqp ? input.piece() : std::string_view();
    const std::string_view bytes = input.rest();
    if (bytes != "null") value = bytes;
    brokers::Delivery one =
        brokers::make_delivery({.assignment = orders, .position = 7}, key, value, headers);
    if (amqp) {
        one.properties = std::make_unique<brokers::AmqpProperties>();
        one.properties->message_id = property;
    }

    const consumer::Identity identity(rules);
    brokers::Delivery rest, rest_again;
    brokers::Delivery again = copy(orders, one);
    const consumer::Identified first = identity.identify(std::move(one), rest);
    const consumer::Identified second = identity.identify(std::move(again), rest_again);
    SEMEL_ASSERT(first.index() == second.index(), "the same message is treated the same");
    const auto* message = std::get_if<std::unique_ptr<consumer::Message>>(&first);
    const brokers::Delivery& where = message != nullptr ? (*message)->delivery : rest;
    SEMEL_ASSERT(where.receipt.assignment != nullptr && where.value == value && where.key == key &&
                     where.headers.size() == headers.size(),
                 "the delivery is whole, wherever it is");
    if (message != nullptr) {
        const consumer::Message& m = **message;
        const consumer::Message& n = *std::get<std::unique_ptr<consumer::Message>>(second);
        const inbox::MessageName name{.scope = rules.scope, .source = m.source, .id = m.id};
        SEMEL_ASSERT(inbox::check(name), "a name is within its limits");
        SEMEL_ASSERT(m.key == inbox::key_hash(name) && m.key == n.key, "the key is of the name");
        SEMEL_ASSERT(m.fingerprint.matches(n.fingerprint) && !m.fingerprint.raw.empty(),
                     "and so is the fingerprint");
    } else if (const auto* refused = std::get_if<consumer::Unreadable>(&first)) {
        SEMEL_ASSERT(!refused->reason.empty(), "a refusal says why");
        SEMEL_ASSERT(consumer::Identity::key_of_position(rest) ==
                         consumer::Identity::key_of_position(rest_again),
                     "and has a name");
    }
    return 0;
}
