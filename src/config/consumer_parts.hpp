// The parts of one consumer in the configuration, as consumers.cpp puts them together. Each throws
// Refused, and reads what is its own of `map`.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "config/consumer_reader.hpp"

namespace semel::config {

/// What the values of a message depend on.
struct Messages {
    bool kafka = true;
    Payload payload = Payload::json;
};

/// The text of a key that must not be empty.
std::string required_text(const Map& map, std::string_view key, const char* what);
/// The value at `key`, which is there.
ValueSpec read_value(const Map& parent, std::string_view key, const Messages& messages);
std::map<std::string, ValueSpec> read_values(const Map& parent, std::string_view key,
                                             const Messages& messages);
/// `id`, and the three dials beside it.
void read_id(const Map& map, ConsumerConfig& consumer, const Messages& messages);

void read_source(const Map& map, ConsumerConfig& consumer, std::vector<std::string>& warnings);

/// The consumer's own database, or that of the store; nullopt: neither is one.
std::optional<DatabaseConfig> read_database(const Map& map, const StoreConfig& store,
                                            std::vector<std::string>& warnings);
/// With its results, where they are named inside it.
HandlerConfig read_handler(const Map& map, const Messages& messages);
/// Where something (`what`, such as "letters") is published: at most one of the three is filled,
/// and fits the broker.
void read_target(const Map& map, bool kafka, const std::string& what, std::string& topic,
                 std::string& queue, std::string& exchange);
/// `map` is that of `results`.
ResultsConfig read_results(const Map& map, const Messages& messages);
/// Of strategy state; `map` is that of `state`.
StateConfig read_state(const Map& map, const Messages& messages);

}  // namespace semel::config
