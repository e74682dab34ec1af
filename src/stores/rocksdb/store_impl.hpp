// The inside of the embedded store, in seven files: rocksdb_store.cpp (its callers' side, and its directory), writer.cpp (takes what
// was submitted, decides in memory, writes one batch, syncs once, answers all), items.cpp (one operation of a batch), ends.cpp (ends of messages on their way to the index), listing.cpp,
// removal.cpp (what has expired) and loading.cpp (what an earlier process left).
#pragma once

#include <rocksdb/write_batch.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/transition.hpp"
#include "stores/rocksdb/claim_groups.hpp"
#include "stores/rocksdb/database.hpp"
#include "stores/rocksdb/ends.hpp"
#include "stores/rocksdb/hot_answers.hpp"
#include "stores/rocksdb/key_table.hpp"
#include "stores/rocksdb/layout.hpp"
#include "stores/rocksdb/rocksdb_store.hpp"
#include "stores/rocksdb/store_clock.hpp"

namespace semel::stores {

using namespace core;
using base::Applied;
using base::Error;
using base::ErrorCode;
using base::Result;
using rocksdb::ReadOptions;
using rocksdb::Slice;
using std::chrono::seconds;

/// Left free on the disk, so that RocksDB never fails in the middle of a write of its own. Below it claims are refused.
inline constexpr std::uint64_t disk_floor_bytes = 1U << 20;

inline Slice slice(std::string_view bytes) { return {bytes.data(), bytes.size()}; }
inline std::string_view view(const Slice& bytes) { return {bytes.data(), bytes.size()}; }

/// Undecided records live in the index and in memory; without an expiry there is no place for them among the answers.
inline bool resident(const Record& record) { return undecided(record) || record.expires.us == 0; }

inline Error stopping() { return {.code = ErrorCode::stopping, .detail = "rocksdb: the store is stopped; nothing was done"}; }

/// Another one after each start of the machine.
std::string boot_id();

class RocksDbStore final : public Store {
  public:
    RocksDbStore(const RocksDbOptions& options, DatabaseOptions database_options)
        : sync_(options.sync),
          path_(options.path),
          counters_(options.counters != nullptr ? *options.counters : own_counters_),
          wall_(options.clock != nullptr ? *options.clock : base::system_clocks()),
          database_options_(std::move(database_options)),
          hot_(options.hot_bytes) {}

    ~RocksDbStore() override { stop(); }

    /// Before anything else, once.
    Result<void> open(bool accept_clock, RocksDbReport& report);
    void submit(std::vector<Item> items, BatchDone done) override;
    Result<ScanPage> scan(const ScanFilter& filter, const std::string& cursor, std::size_t limit) override;
    Result<std::size_t> purge(std::size_t limit) override;
    [[nodiscard]] StoreTime now() const override { return clock_->now(); }

    [[nodiscard]] Durability durability() const override;
    Result<void> health() override;
    void stop() override;

  private:
    /// What a caller handed over: a batch, or (run set) something of the store's own to do between two write batches.
    struct Job {
        std::vector<Item> items;
        BatchDone done;
        std::function<void()> run;
        BatchResults results;
    };
    /// An undecided record.
    struct Resident {
        RecordPtr record;
        std::uint64_t claims = 0;  ///< The entry of `claims` that its claim lies in; 0: it is in the index.
    };
    /// Where a record was written last: all of it to the index, among the group's claims or ends, or to the answers.
    enum class Place : std::uint8_t { index, claims, ends, answers };
    /// A record as the group leaves it.
    struct Changed {
        RecordPtr record;
        Place place = Place::index;
        bool decided_before = false;  ///< A decided record was there.
        std::size_t end_at = 0;       ///< Where its end begins among the group's.
    };
    struct ItemAt {
        std::size_t job;
        std::size_t item;
    };

    // ------------------------------------------------------------ callers' side

    /// Batches that read nothing from the disk but an index entry, and write little.
    static bool quick(const std::vector<Item>& items);

    /// Without a sync a write costs less than to wake the writer and be woken by it: a caller that finds nobody writing and
    /// nothing waiting is the writer for its own batch. False: `job` is untouched and must be queued.
    bool write_here(Job& job);

    /// False: stopped; `done` was called.
    bool enqueue(Job job);

    /// Runs `step` on the writer's thread between two batches and waits for its answer.
    template <class T>
    Result<T> on_writer(std::function<Result<T>()> step) {
        std::promise<Result<T>> answer;
        std::future<Result<T>> future = answer.get_future();
        if (!enqueue(Job{.items = {}, .done = {}, .run = [&] { answer.set_value(step()); }, .results = {}})) {
            return stopping();
        }
        return future.get();
    }

    /// The first `limit` of the resident records that `take` wants and that are behind `cursor`, in order. On the writer.
    template <class Take>
    std::vector<std::pair<StoredKey, RecordPtr>> first_resident(const std::string& cursor, std::size_t limit, Take take);
    Result<ScanPage> scan_resident(const ScanFilter& filter, const std::string& cursor, std::size_t limit);
    Result<ScanPage> scan_all(const ScanFilter& filter, const std::string& cursor, std::size_t limit);

    struct Candidate {
        std::string answer_key;
        StoredKey key;
    };
    Result<void> purge_records(std::size_t limit, std::size_t& gone);

    /// An entry of `expiries`, or what a step takes of it.
    struct Expired {
        std::string name;
        StoreTime at;
        std::vector<StoredKey> keys;
        std::string rest;  ///< Keys that are left for a later step.
    };
    Result<void> purge_expiries(std::size_t limit, std::size_t& gone);
    Result<void> purge_conversations(std::size_t limit, std::size_t& gone);

    struct ChunkGroup {
        StoredKey key;
        FencingToken token;
    };

    /// Chunks of tokens that can never be completed, and those whose record is gone for long enough.
    Result<void> purge_chunks();

    // ------------------------------------------------------------ the writer's loop

    void run();
    void tick();

    /// Leaves word that nothing is missing, and the exact time.
    void close();
    void apply_all(std::vector<Job>& jobs);
    template <class Op>
    static std::size_t count_of(const std::vector<Job>& jobs);
    [[nodiscard]] std::size_t group_bytes() const { return batch_.GetDataSize() + claims_.size() + ended_.size(); }

    void begin_group();

    /// Ends the group: writes it, makes it the state in memory or drops it, answers the jobs that are through.
    bool commit();

    /// Completes batch_ by what the group's items share.
    void put_group(std::uint64_t claims, std::uint64_t ends);

    /// What was written becomes the state in memory.
    void settle_group(std::uint64_t claims, std::uint64_t ends);

    /// Into batch_: the open claims of an entry of `claims` go to the index, and the entry goes.
    void fold(std::uint64_t number);

    /// Whether `bytes` fit above the floor. Far from it the file system is asked once a second, near it each time.
    bool room_for(std::uint64_t bytes);

    /// Hands batch_ to RocksDB.
    Result<void> write();

    /// Entries of `claims` and `ends` that nothing depends on any more.
    void remove_over(rocksdb::WriteBatch& into) const;

    /// For steps between two groups: batch_ holds what they want written.
    Result<bool> write_own();
    void write_own_logged();
    static rocksdb::WriteOptions synced();

    /// Reserves the time from `at` on: after a crash the clock starts behind everything that was granted.
    void put_clock(rocksdb::WriteBatch& into, StoreTime at);

    // ------------------------------------------------------------ ends on their way to the index, between two groups

    /// Sends a lot on its way if there are many, and takes over one that is sorted.
    void move_ends();
    void sort_ends();
    /// Waits until the lot is sorted. If it cannot be taken over it is put into the index like anything else.
    void take_sorted();
    void put_ends();
    /// Nobody writes the sorted file any more, and it is gone.
    void drop_sorted();
    /// Afterwards the index holds everything.
    Result<void> all_ends_to_index();

    // ------------------------------------------------------------ failing and coming back

    [[nodiscard]] Error full() const;
    [[nodiscard]] Error unreadable() const;
    [[nodiscard]] Error corrupt(const std::string& what) const;
    Error present_failure();
    void fail_with(Error error);

    /// Opens the database again. RocksDB 7.8 has DB::Resume, but after a failed write to the log it reports success and fails
    /// every later write; a new opening also settles whether the failed batch is in the log.
    void try_recovery();

    // ------------------------------------------------------------ opening

    Result<void> start_clock(bool accept, RocksDbReport& report);

    /// Brings the undecided records into memory. Again after a recovery: then leases of records that are what memory knew
    /// go on, and those of others are over.
    Result<void> load(RocksDbReport* report);

    /// Ends for which the index has nothing newer are written to it, so that no entry of `ends` is left.
    Result<void> load_ends();

    /// Claims for which the index has nothing newer. They are written to it, so that no entry of `claims` is left.
    template <class Take>
    Result<void> load_claims(KeyTable<Resident>& found, Take take);

    // ------------------------------------------------------------ one item

    /// Every operation on a record.
    template <class Op>
    Result<StoreOutcome> step_on_record(const StoredKey& key, Op& operation);
    Result<StoreOutcome> step(const StoredKey& key, PutChunk operation);
    Result<StoreOutcome> step(const StoredKey& key, GetChunk operation);
    Result<StoreOutcome> step(const StoredKey& key, GetConversation operation);
    Result<StoreOutcome> step(const StoredKey& key, GetTurns operation);
    Result<StoreOutcome> step(const StoredKey& key, DeleteConversation);
    Result<StoreOutcome> step(const StoredKey&, ClaimValue operation);
    Result<StoreOutcome> step(const StoredKey&, ReplaceValue operation);
    Result<StoreOutcome> step(const StoredKey& key, OpenParking operation);
    Result<StoreOutcome> step(const StoredKey& key, Park operation);
    Result<StoreOutcome> step(const StoredKey& key, GetParked operation);
    Result<StoreOutcome> step(const StoredKey& key, Unpark operation);

    /// Stands behind the steps: clang 19 does not instantiate a member template that a generic lambda names before its body.
    Result<Decided> apply(Item& item);

    // ------------------------------------------------------------ records on the disk

    /// The state of a record, as the group sees it. `dirty`: the group itself wrote it.
    Result<RecordPtr> find(const StoredKey& key, bool& dirty);

    /// The record that a value of the index holds or points to. Any thread.
    Result<RecordPtr> read_indexed(const ReadOptions& options, const StoredKey& key, std::string_view value) const;
    static Result<RecordPtr> decoded(std::string_view bytes);
    void put_in_index(const StoredKey& key, const Record& record);

    /// Into the group. `granted`: a grant, whose token is new.
    Place put_record(const StoredKey& key, const Record& record, bool granted);

    /// Of the group. Most of it is decided at one time and kept for one time.
    std::string& keys_expiring(StoreTime at);

    /// On the writer, between groups. An entry that the index no longer points to (the record was tried again since) is
    /// removed without being counted.
    Result<std::size_t> remove_records(const std::vector<Candidate>& candidates);

    /// On the writer, between groups: what expired, unless the record is another by now.
    Result<std::size_t> remove_expired(const std::vector<Expired>& entries);

    /// Into batch_: a claim is void as long as the index holds what came of it. Records that leave the index may leave none.
    void fold_claims_of(const std::vector<StoredKey>& leaving);

    /// The chunks of a record that goes: the answer's own stay for a while, others' go with it.
    Result<void> retire_chunks(const Candidate& candidate);
    Result<bool> is_orphaned(const ChunkGroup& group);

    // ------------------------------------------------------------ conversations

    Result<std::optional<Conversation>> read_head(const StoredKey& conversation);
    Result<bool> holds_id(const StoredKey& conversation, const std::string& request_id);

    /// Unless the conversation holds the id. An error leaves the group as it was.
    Result<void> append_once(Append turn);
    Result<void> delete_conversation(const StoredKey& conversation);

    // ------------------------------------------------------------ bytes

    /// Deletes one by one what begins with `prefix`: few, and no range marks that later reads pay for.
    Result<void> delete_range(rocksdb::ColumnFamilyHandle* family, const std::string& prefix);

    /// Null family: the database could not be opened again.
    Result<std::optional<std::string>> read(rocksdb::ColumnFamilyHandle* family, std::string_view key);

    class Snapshot {
      public:
        explicit Snapshot(rocksdb::DB& db) : db_(db), snapshot_(db.GetSnapshot()) {}
        ~Snapshot() { db_.ReleaseSnapshot(snapshot_); }
        Snapshot(const Snapshot&) = delete;
        Snapshot& operator=(const Snapshot&) = delete;
        [[nodiscard]] const rocksdb::Snapshot* get() const { return snapshot_; }

      private:
        rocksdb::DB& db_;
        const rocksdb::Snapshot* snapshot_;
    };

    const bool sync_;
    const std::string path_;
    RocksDbCounters own_counters_;
    RocksDbCounters& counters_;
    base::Clock& wall_;
    const DatabaseOptions database_options_;
    std::optional<StoreClock> clock_;

    /// Held exclusively only to replace the database; the writer, who alone does that, reads without it.
    std::shared_mutex database_mutex_;
    std::unique_ptr<Database> database_;

    std::mutex stop_mutex_;
    std::mutex mutex_;  // guards the next four
    std::condition_variable wake_;
    std::vector<Job> queue_;
    bool writer_sleeps_ = false;
    bool stopping_ = false;

    std::mutex failure_mutex_;  // guards the next
    std::optional<Error> failure_;

    std::mutex purge_mutex_;  // guards the next four
    std::string purged_until_;
    std::string expiries_purged_until_;
    std::string heads_seen_until_;
    std::string chunks_seen_until_;

    std::atomic<bool> chunks_exist_{false};

    // ---- the writer's own: the thread's, or a caller's in write_here(); guarded by writing_mutex_
    std::mutex writing_mutex_;
    std::atomic<std::thread::id> writing_thread_;  ///< Who holds it; read to find out whether it is oneself.
    std::vector<Job> own_job_;
    KeyTable<Resident> resident_;  ///< All undecided records.
    ClaimGroups claim_groups_;
    Ends ends_;
    std::future<rocksdb::Status> sorting_;  ///< Valid: the moving lot is being sorted into a file.
    std::chrono::steady_clock::time_point ends_again_at_;
    HotAnswers hot_;
    std::map<std::string, std::string> values_;
    std::uint64_t next_number_ = 0;
    StoreTime clock_reserved_;
    StoreTime clock_written_;
    bool broken_ = false;
    std::uint64_t free_left_ = 0;
    std::chrono::steady_clock::time_point free_asked_at_;
    std::chrono::steady_clock::time_point recovery_at_;
    std::chrono::milliseconds recovery_pause_{0};
    // of the group being made
    std::vector<Job>* jobs_ = nullptr;
    StoreTime at_;
    rocksdb::WriteBatch batch_;
    std::string value_;
    KeyTable<Changed> changed_;
    bool claims_together_ = false;
    bool ends_together_ = false;
    std::string claims_;                                       ///< The value of the entry.
    std::vector<StoredKey> claimed_;                           ///< Its keys, in order.
    std::string ended_;                                        ///< Ends, the value of an entry too.
    std::vector<std::pair<StoreTime, std::string>> expiring_;  ///< Decided messages' keys by expiry.
    std::vector<std::uint64_t> folded_;
    std::unordered_set<StoredKey, base::DigestHash> dirty_chunks_;
    std::unordered_set<StoredKey, base::DigestHash> dirty_conversations_;
    std::unordered_set<StoredKey, base::DigestHash> opened_;  ///< Lists of parked messages: their fences,
    std::unordered_set<StoredKey, base::DigestHash> parked_;  ///< and what lies in them.
    std::vector<ItemAt> tentative_;
    std::vector<std::size_t> applied_;
    std::size_t group_items_ = 0;
    bool item_depends_ = false;
    bool needs_sync_ = false;

    std::thread writer_;
};

}  // namespace semel::stores
