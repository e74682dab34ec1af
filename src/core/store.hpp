// Store: the interface that a leaf (memory, rocksdb, ...) implements. Every operation comes in a batch.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/result.hpp"
#include "core/operation.hpp"

namespace semel::core {

// ---- what is not a record: chunks of big answers, conversations, parked messages, listings

/// Writes chunk `n` of a big answer, before complete. Its life hangs on the record: the chunks of a token that completes
/// live a little longer than the record, those of any other are removed with it.
struct PutChunk { FencingToken token; std::uint32_t n = 0; std::string bytes; };
struct GetChunk { FencingToken token; std::uint32_t n = 0; };

/// One turn of a conversation as it was appended.
struct Turn {
    std::uint64_t number = 0;  ///< From 1, without gaps.
    std::string request_id;
    std::string user_content;
    std::string answer_content;
    StoreTime at;
    bool late = false;
};
struct Conversation { StoreTime created; StoreTime last_used; std::uint64_t turns = 0; };

/// The head of a conversation (key = the operation's key) and whether it holds `request_id` (may be empty).
struct GetConversation { std::string request_id; };
/// Turns with number > after, at most `limit`, in order. `newest`: the last `limit` turns instead.
struct GetTurns { std::uint64_t after = 0; std::uint32_t limit = 100; bool newest = false; };
struct DeleteConversation {};
/// Reads a deployment-wide value, or stores `value_if_absent` first and returns that. Synced. The key is ignored.
struct ClaimValue { std::string name; std::string value_if_absent; };
/// Stores a deployment-wide value in place of what was there. Synced; where the store can, the old value is removed from its
/// files too. The key is ignored. Answered by Value with the new one.
struct ReplaceValue { std::string name; std::string value; };

// A list of parked messages (key = the list's; a consumer has one for each partition). It has one owner at a time, who is known
// by a fence, and lasts until its messages are taken out: it never expires.

/// Takes the list over: what an earlier owner parks from now on is refused. Synced.
struct OpenParking { Nonce fence; };
/// Puts a message at its place, in place of what was there. Synced. ParkingLost unless `fence` opened the list last.
struct Park { Nonce fence; std::uint64_t place = 0; std::string bytes; };
/// Messages with place >= from, at most `limit`, in the order of their places.
struct GetParked { std::uint64_t from = 0; std::uint32_t limit = 100; };
/// Takes a message out; one that is not there is no error. Whoever finished it may, fenced or not. Not synced by itself: after a
/// power cut it may be there again.
struct Unpark { std::uint64_t place = 0; };

using StoreOperation = std::variant<Acquire, Start, Renew, Release, Complete, Fail, Cancel, Resolve, Reopen, Settle,
                                    LetterPublished, Get, PutChunk, GetChunk, GetConversation, GetTurns,
                                    DeleteConversation, ClaimValue, ReplaceValue, OpenParking, Park, GetParked, Unpark>;

struct ChunkStored {};
struct ChunkFound { std::string bytes; };
struct ChunkMissing {};
struct ConversationFound { Conversation conversation; bool holds_id = false; };
struct ConversationMissing {};
struct TurnsFound { std::vector<Turn> turns; };
struct ConversationDeleted { bool existed = false; };
struct Value { std::string value; };
struct ParkingOpened {};
struct Parked {};
struct ParkingLost {};
struct ParkedMessage { std::uint64_t place = 0; std::string bytes; };
struct ParkedFound { std::vector<ParkedMessage> messages; };
struct Unparked {};

using StoreOutcome = std::variant<Granted, InFlight, NotDue, Replay, Mismatch, UnknownOutcome, Exhausted, Late, Applied,
                                  Fenced, Found, ChunkStored, ChunkFound, ChunkMissing, ConversationFound,
                                  ConversationMissing, TurnsFound, ConversationDeleted, Value, ParkingOpened, Parked,
                                  ParkingLost, ParkedFound, Unparked>;

struct Item {
    StoredKey key;
    StoreOperation operation;
};

/// An outcome and the store's time at which it was decided.
struct Decided {
    StoreOutcome outcome;
    StoreTime at;
};

/// One result per item, in the items' order. An Error with applied == unknown: the step may have taken effect; ask again
/// with the same token or nonce.
using BatchResults = std::vector<base::Result<Decided>>;
using BatchDone = std::function<void(BatchResults)>;

struct ScanFilter {
    bool undecided_only = false;
    bool dead_leases_only = false;  ///< PROCESSING whose lease is over by the store's clock.
    std::uint8_t status = 0;        ///< A Status, or 0 for all.
};
struct ScanPage {
    std::vector<std::pair<StoredKey, RecordPtr>> records;  ///< Bodies are left out (answer->body is null).
    std::string next;                                      ///< Cursor of the next page; empty at the end.
    StoreTime at;
};

/// What a store promises about a record it has acknowledged, for `doctor` and the docs.
struct Durability {
    bool survives_process_crash = false;
    bool survives_power_cut = false;
    bool survives_failover = true;
    std::string summary;  ///< One sentence.
};

class Store {
  public:
    Store() = default;
    Store(const Store&) = delete;
    Store& operator=(const Store&) = delete;
    virtual ~Store() = default;

    /// Applies the items as if one after the other (several may name one key), each atomically, and calls `done` once with
    /// one result per item. `done` may be called on any thread, also before submit returns; it must not block and must not
    /// throw. Batches submitted from one thread are applied in order by embedded stores. On a shared one a batch may overtake
    /// an item that waits for another on its key, or had to be sent again: who needs an order on one key waits for the answer.
    /// Thread-safe.
    virtual void submit(std::vector<Item> items, BatchDone done) = 0;

    /// Records in a stable order, at most `limit`, from `cursor` (empty: from the start). May block on a disk: not for a hot
    /// path. A record that changes while the pages are read may be seen old or new, never twice.
    virtual base::Result<ScanPage> scan(const ScanFilter& filter, const std::string& cursor, std::size_t limit) = 0;

    /// Removes at most `limit` expired records with their chunks, and conversations idle for 30 days; says how many are gone.
    /// Never removes an undecided record or a parked message. May block.
    virtual base::Result<std::size_t> purge(std::size_t limit) = 0;

    /// The store's clock, as well as this process knows it. Exact on embedded stores.
    [[nodiscard]] virtual StoreTime now() const = 0;
    /// Since when the store has been answering without a break, by the steady clock: owners that live may not have been able to
    /// renew before. Embedded stores are never out.
    [[nodiscard]] virtual base::SteadyTime answering_since() const { return base::SteadyTime::min(); }
    [[nodiscard]] virtual Durability durability() const = 0;
    /// OK, or why nothing can be claimed at the moment (readiness).
    virtual base::Result<void> health() = 0;
    /// Finishes what was submitted, refuses what comes later with `stopping`, closes. Blocks. Idempotent.
    virtual void stop() = 0;
};

/// How long a conversation that nobody uses is kept.
inline constexpr std::chrono::hours conversation_idle_retention{24 * 30};

}  // namespace semel::core
