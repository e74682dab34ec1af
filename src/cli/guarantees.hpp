// What a configuration promises, in plain words; printed by `doctor`.
#pragma once

#include <string>
#include <vector>

#include "config/config.hpp"

namespace semel::cli {

/// The store in a word for messages: its directory, or its URL without user and password.
std::string store_in_words(const config::StoreConfig& store);
/// What happens to recorded answers when the process or the machine dies, as far as the configuration alone says it.
std::string durability_in_words(const config::StoreConfig& store);
/// What "paid once" depends on for one route.
std::string paid_once_in_words(const std::string& route, const config::RouteConfig& rules);
/// Where an answer waits that could not be recorded.
std::string spool_in_words(const config::Config& config);

}  // namespace semel::cli
