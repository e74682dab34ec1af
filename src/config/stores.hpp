// The part of the configuration that says where records are kept: `store`.
#pragma once

#include <string>
#include <vector>

#include "config/document.hpp"

namespace semel::config {

/// Reads `store` of the file, or of one consumer. Throws Refused; appends to `warnings` what is
/// legal and probably not meant.
StoreConfig read_store(const Map& root, std::vector<std::string>& warnings);

/// The keys of a map that names a database, here or for a consumer alone.
inline constexpr std::initializer_list<std::string_view> postgres_keys{"url", "schema",
                                                                       "connections", "migrate"};
inline constexpr std::initializer_list<std::string_view> mysql_keys{"url", "connections",
                                                                    "migrate"};
/// The same as read_store does, of a map with these keys.
PostgresConfig read_postgres(const Map& map, std::vector<std::string>& warnings);
MysqlConfig read_mysql(const Map& map, std::vector<std::string>& warnings);

/// `url` without what stands before the last '@' of its authority: for messages.
std::string without_credentials(const std::string& url);

}  // namespace semel::config
