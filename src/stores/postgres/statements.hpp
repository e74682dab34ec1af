// The store's statements, from sql/*.sql, and the steps that make its tables, from
// migrations/*.sql, for one schema.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "stores/postgres/connection.hpp"

namespace semel::stores::postgres {

/// The highest schema version that this binary knows, and makes.
inline constexpr int schema_version = 2;

/// A file each.
enum class Id : std::uint8_t {
    insert,
    insert_one,
    complete,
    complete_one,
    replace,
    read,
    append_lock,
    append_turn,
    chunk_put,
    chunk_get,
    conversation_get,
    turns_get,
    turns_newest,
    conversation_delete,
    turns_delete,
    value_synced,
    value_claim,
    value_get,
    value_replace,
    parking_fence,
    parking_open,
    park,
    unpark,
    parked_get,
    list,
    list_undecided,
    purge_records,
    purge_chunks,
    purge_conversations,
    time,
};
inline constexpr std::size_t statement_count = static_cast<std::size_t>(Id::time) + 1;

/// Immutable; outlives every connection that it is used on.
class Statements {
  public:
    explicit Statements(std::string schema);
    [[nodiscard]] const Text& operator[](Id id) const { return all_[static_cast<std::size_t>(id)]; }
    [[nodiscard]] const std::string& schema() const { return schema_; }
    /// Asks for the version of the tables.
    [[nodiscard]] const Text& version() const { return version_; }
    /// The statements that lead from `version - 1` to `version`, the setting of the version among
    /// them. From 1.
    [[nodiscard]] std::vector<std::string> migration(int version) const;

  private:
    [[nodiscard]] std::string filled(std::string text) const;
    std::string schema_;
    std::array<Text, statement_count> all_;
    Text version_;
};

}  // namespace semel::stores::postgres
