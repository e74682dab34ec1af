// Session: one connection to a database that holds the tables of a store, and the statements that the store needs. A dialect
// (postgres, mysql) implements it; sql_store.hpp makes a core::Store of it.
//
// No operation holds a lock between two round trips: a decision is read, made by core::decide and written back under the guard
// that the row is still the same. What is so frequent that it must not take two round trips (a first grant, a completion) is a
// statement of its own that says the same as core::decide; the small-worlds test holds it to that.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "sql/row.hpp"

namespace semel::sql {

using std::chrono::milliseconds;

/// What kept a statement from doing its work. In all cases but `lost` it did nothing at all: its transaction was rolled back.
enum class Trouble : std::uint8_t {
    contended,     ///< A lock time-out, a deadlock, a serialization failure: normal; ask again, item by item.
    refused,       ///< The server refused the statement or one of its rows (too large, a value, a permission): alone the others pass.
    full,          ///< No room on the server's disk. Reads still work.
    not_writable,  ///< This server is a standby or read-only (any more): the session is of no use, connect anew.
    lost,          ///< The connection broke or the answer did not come in time: error.applied says whether it may have been done.
};
struct Problem {
    Trouble trouble = Trouble::lost;
    base::Error error;  ///< Says what happened and what to do; no password, no key, no value.
};
/// A value or what kept it from coming.
template <class T>
using Tried = std::variant<T, Problem>;
struct Done {};

/// How an operation is asked.
struct Ask {
    /// Told to the statements instead of the database's clock: for tests that must move time. Empty: the database's clock.
    std::optional<StoreTime> time;
    milliseconds lock_wait{100};   ///< Longest wait for another transaction's lock, as closely as the database can.
    milliseconds deadline{2000};   ///< For the whole operation; then the connection is given up.
};

/// A first grant, if the key is free.
struct Fresh {
    StoredKey key;
    Nonce nonce;
    milliseconds lease;
    std::int64_t keep_ms = 0;
    StoreTime not_after;     ///< Not inserted if the database's clock is past it.
    std::string head;        ///< Of the record as granted; its times and token are replaced by the columns'.
};
/// Inserted with status processing, version = token = created = the database's time in us, lease_end = created + lease. A row that
/// is purged and made anew so never has a version that somebody saw before: else who read the old one could overwrite the new one.
struct Inserted { StoreTime created; };
/// The row that was there before (expired or not); `at` is the database's time when it was read.
struct Present { Row row; StoreTime at; };
/// Neither inserted nor seen: it came too late (not_after), the key changed hands meanwhile, or the dialect does not look at what
/// keeps a row alone from being inserted, because that costs a first grant more than a duplicate gains. Read it.
struct Neither {};
using InsertOutcome = std::variant<Inserted, Present, Neither>;

/// Completes a PROCESSING row under its own token and nonce: status, completed = the database's time, expires = completed +
/// keep_ms, done, body, version + 1; and in the same transaction, if it did, appends the turn (see Change::append).
struct Completion {
    StoredKey key;
    FencingToken token;
    Nonce nonce;
    std::string done;
    std::optional<std::string> body;
    std::optional<core::Append> append;
};
/// The row as it is now (its body left out), or empty if token, nonce or status were others: nothing was changed then.
using CompletionOutcome = std::optional<Row>;

/// Replaces a row that is still at `version_seen`, if the database's clock is not past `not_after`: a decision must not take
/// effect long after the time it was made for.
struct Change {
    std::int64_t version_seen = 0;
    Row row;  ///< version = version_seen + 1.
    StoreTime not_after;
    /// Appended in the same transaction if the row was replaced, unless the conversation holds a turn of this request_id.
    std::optional<core::Append> append;
    StoreTime at;  ///< The decision's time: that of the turn.
};

struct ReadRows {
    std::vector<std::optional<Row>> rows;  ///< In the order of the keys.
    StoreTime at;                          ///< Not after the moment the rows were read.
};

/// A message for its place in a list, if `fence` opened that last.
struct Parking {
    StoredKey list;
    Nonce fence;
    std::uint64_t place = 0;
    std::string_view bytes;  ///< Outlive the call.
};
/// One flag per message: false: another opened its list last, and it was not written.
struct ParkOutcome {
    std::vector<bool> parked;
    StoreTime at;
};
struct Place { StoredKey list; std::uint64_t place = 0; };
/// A place as a column holds it. Places are below 2^63.
inline std::int64_t place_number(std::uint64_t place) {
    constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    return static_cast<std::int64_t>(std::min(place, most));
}

struct PurgeCounts { std::size_t records = 0; std::size_t chunks = 0; std::size_t conversations = 0; };

/// Not thread-safe: one thread at a time. Every operation is one transaction (one round trip where the database allows), blocks
/// until its answer or `deadline`, and takes each key, and each conversation that is appended to, at most once.
class Session {
  public:
    Session() = default;
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
    virtual ~Session() = default;

    /// One outcome per row, in their order. Rows are locked in the keys' order.
    virtual Tried<std::vector<InsertOutcome>> insert(std::span<const Fresh> rows, const Ask& ask) = 0;
    virtual Tried<std::vector<CompletionOutcome>> complete(std::span<const Completion> rows, const Ask& ask) = 0;
    virtual Tried<ReadRows> read(std::span<const StoredKey> keys, bool with_bodies, const Ask& ask) = 0;
    /// Which of them were replaced.
    virtual Tried<std::vector<bool>> replace(std::span<const Change> changes, const Ask& ask) = 0;

    /// The operations on what is not a record (PutChunk, GetChunk, GetConversation, GetTurns, DeleteConversation, ClaimValue,
    /// ReplaceValue, OpenParking, GetParked), one. OpenParking takes the list from the owner that it saw, and from nobody else, so
    /// that a copy that is executed late fences off nobody: if another was faster it is Trouble::contended.
    virtual Tried<core::Decided> other(const StoredKey& key, const core::StoreOperation& operation, const Ask& ask) = 0;

    /// Parks messages: no place twice. Synced.
    virtual Tried<ParkOutcome> park(std::span<const Parking> messages, const Ask& ask) = 0;
    /// Takes out what lies at these places, none of them twice. Answers the database's time.
    virtual Tried<StoreTime> unpark(std::span<const Place> places, const Ask& ask) = 0;

    /// See core::Store. `cursor` is the last key of the former page. Bodies are left out.
    virtual Tried<std::vector<Row>> list(const core::ScanFilter& filter, const std::string& cursor, std::size_t limit,
                                         const Ask& ask) = 0;
    /// Removes at most `limit` expired rows with their chunks; chunks without a record; idle conversations. Skips what is locked.
    virtual Tried<PurgeCounts> purge(std::size_t limit, const Ask& ask) = 0;
    /// The database's clock.
    virtual Tried<StoreTime> time(const Ask& ask) = 0;
};

/// Opens a session that may write: connects, checks that the server is a primary and that the tables have the version this
/// binary knows. Any thread. A Problem's trouble is `lost` (unreachable, time-out, starting up), `not_writable` or `refused`
/// (credentials, permissions, schema).
using Connect = std::function<Tried<std::unique_ptr<Session>>()>;

}  // namespace semel::sql
