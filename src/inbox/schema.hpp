// The tables semel_assignments, semel_offsets, semel_flights, semel_crashes and message_dedup, made
// and updated by versions.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "inbox/names.hpp"

namespace semel::inbox {

/// Version of the tables that this library knows; semel_inbox_schema holds that of the database.
inline constexpr int schema_version = 2;

/// What apply_schema would run, in order; empty: nothing is to do. Changes nothing.
/// Errors, a sentence with cause and cure: store_version (the tables are newer than this library),
/// invalid_argument (message_dedup is there with another shape: an older one is brought along by
/// old_table.hpp; the database is not UTF-8; the connection is inside a transaction), or what the
/// database says.
base::Result<std::vector<std::string>> plan_schema(sql::Executor& executor, const Place& place);

/// Makes what is missing. Several processes may do so at once. Same errors.
base::Result<void> apply_schema(sql::Executor& executor, const Place& place);

// ---- shared with old_table.cpp

/// Name and type of a table's columns as the database says them; empty: there is no such table.
/// `table` without its schema.
base::Result<std::map<std::string, std::string>> columns_of(sql::Executor& executor,
                                                            const Place& place,
                                                            const std::string& table);
/// The columns of message_dedup that are missing in `columns`; empty: it has the shape.
std::vector<std::string> missing_columns(const std::map<std::string, std::string>& columns);
/// The statements that make all tables, message_dedup under the name of `place`.
std::vector<std::string> creation(const Tables& tables, const Place& place);

}  // namespace semel::inbox
