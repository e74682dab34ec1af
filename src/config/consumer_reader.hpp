// The part of the configuration that says which messages are consumed, and how: `consumers`.
#pragma once

#include <vector>

#include "config/document.hpp"

namespace semel::config {

/// Reads `consumers` of the file; `config` holds what was read before: store, clients, upstreams,
/// routes. Throws Refused; appends to its warnings what is legal and probably not meant.
std::vector<ConsumerConfig> read_consumers(const Map& root, Config& config);

/// What no single key shows: whether strategy, handler, source and the rest go together. Throws
/// Refused. `map` is the consumer's own.
void check_consumer(const Map& map, const ConsumerConfig& consumer, const Config& config);
/// Whether `consumer` and one before it get into each other's way.
void check_beside(const Map& map, const ConsumerConfig& consumer, const ConsumerConfig& other);

}  // namespace semel::config
