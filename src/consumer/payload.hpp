// What identity and extract share: a payload that is read at most once, and headers and properties
// by name.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/json_scan.hpp"
#include "brokers/delivery.hpp"
#include "consumer/identity.hpp"

namespace semel::consumer {

/// A JSON text, read when it is first asked for something. Views in answers point into the text.
class Payload {
  public:
    explicit Payload(std::string_view text) : text_(text) {}
    bool valid();
    /// As at_pointer.
    std::optional<std::string_view> find(std::string_view pointer);

  private:
    std::string_view text_;
    bool read_ = false;
    bool valid_ = false;
    std::vector<base::JsonMember> members_;  ///< Of an outermost object.
};

/// Why it is none, for people; recognises the frame of Confluent's serializers.
std::string not_json(std::string_view value);
/// A raw value where one value is wanted; an object or array is an error that names `pointer`.
std::variant<Extracted, ExtractError> scalar_of(std::string_view raw, std::string_view pointer);

struct HeaderFound {
    bool present = false;
    bool ambiguous = false;  ///< Several, not all the same.
    std::optional<std::string_view> value;
};
HeaderFound find_header(const brokers::Delivery& delivery, std::string_view name);
/// The sentence for it.
std::string ambiguous_header(std::string_view name);
/// By its name in AMQP ("message-id"); nullopt: not set, not AMQP, or no such property.
std::optional<std::string_view> find_property(const brokers::Delivery& delivery,
                                              std::string_view name);

}  // namespace semel::consumer
