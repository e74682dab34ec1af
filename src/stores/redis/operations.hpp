// Store operations as commands for Redis, and the replies as outcomes.
#pragma once

#include <limits>
#include <optional>
#include <string_view>

#include "core/store.hpp"
#include "stores/redis/client.hpp"
#include "stores/redis/layout.hpp"

namespace semel::stores::redis {

/// The codes of operations on records in scripts/batch.lua.
enum class OperationCode : std::uint8_t {
    acquire = 1,
    start,
    renew,
    release,
    complete,
    fail,
    cancel,
    resolve,
    reopen,
    settle,
    letter_published
};

/// One run of the script that decides on records, while items are added to it.
class ScriptBatch {
  public:
    /// `argument_max_bytes`: what the server takes as one argument. A turn above it is left out of
    /// its conversation.
    ScriptBatch(const Names& names, std::uint16_t slot,
                std::uint64_t argument_max_bytes = std::numeric_limits<std::uint64_t>::max())
        : names_(names), slot_(slot), argument_max_bytes_(argument_max_bytes) {}
    /// `seen`: for Resolve, the record as it was read before (its turn names the conversation);
    /// null for all others.
    void add(const core::Item& item, const core::RecordPtr& seen);
    [[nodiscard]] std::size_t items() const { return items_; }
    [[nodiscard]] std::size_t bytes() const { return keys_.size() + arguments_.size(); }
    /// `time`: what the script shall take for the time, in decimal microseconds; empty: the
    /// server's. `repeatable`: no item is an Acquire or a Resolve.
    Command take(std::string_view time, bool repeatable);

  private:
    class Adding;
    const Names& names_;
    std::uint16_t slot_;
    std::uint64_t argument_max_bytes_;
    std::size_t items_ = 0;
    std::uint32_t key_count_ = 0;
    std::uint32_t argument_count_ = 0;
    std::string keys_;  ///< Encoded, as the arguments.
    std::string arguments_;
};

/// Reads a value of the whole deployment.
Command get_value(std::string_view name, const Names& names);

/// Whether an item is decided by that script; the others are plain commands.
bool decided_by_script(const core::StoreOperation& operation);

/// The plain command that asks for an item. Not for OpenParking.
Command command_of(const core::Item& item, const Names& names);

/// Adds a Park to the command for one in the same list under the same fence, or an Unpark to that
/// for one in the same list, about another place. All of them then have one reply.
void add_to_parking(Command& command, const core::StoreOperation& operation);

/// Reads who opened a list of parked messages last.
Command get_fence(const core::StoredKey& list, const Names& names);
/// The fence in a reply to get_fence(); empty: nobody.
base::Result<std::string> fence_of(const Reply& reply);
/// Takes the list over from `seen` (a fence, or empty), and from nobody else: sent twice, however
/// late, it fences off nobody who came after.
Command open_parking(const core::StoredKey& list, const core::OpenParking& operation,
                     std::string_view seen, const Names& names);
/// Whether it did. Else somebody else was faster.
base::Result<bool> parking_opened(const Reply& reply);

/// Reads a record by its plain name.
Command get_record(const core::StoredKey& key, const Names& names);

/// What an item's string in the script's reply means. Error store_corrupt: it, or the record in it,
/// cannot be read.
base::Result<core::Decided> decided(const core::Item& item, const Reply& reply);

/// What a reply to command_of(item) means; `read_at`: the server's time before it. Error
/// store_corrupt: it cannot be read.
base::Result<core::Decided> outcome_of(const core::Item& item, const Reply& reply,
                                       core::StoreTime read_at);

/// The server's time in a reply to TIME.
base::Result<core::StoreTime> time_in(const Reply& reply);

/// The record in a reply to get_record(); null if there is none. Expired ones included.
base::Result<core::RecordPtr> record_of(const Reply& reply);

}  // namespace semel::stores::redis
