// The writer: takes what was submitted, decides in memory, writes one batch, syncs once, answers all.
#include "stores/rocksdb/rocksdb_store.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <rocksdb/write_batch.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <thread>
#include <type_traits>
#include <unordered_set>
#include <utility>

#include "base/fault_point.hpp"
#include "core/record_codec.hpp"
#include "core/transition.hpp"
#include "stores/rocksdb/claim_groups.hpp"
#include "stores/rocksdb/database.hpp"
#include "stores/rocksdb/hot_answers.hpp"
#include "stores/rocksdb/key_table.hpp"
#include "stores/rocksdb/layout.hpp"
#include "stores/rocksdb/store_clock.hpp"

namespace semel::stores {
namespace {

using namespace core;
using base::Applied;
using base::Error;
using base::ErrorCode;
using base::Result;
using rocksdb::ReadOptions;
using rocksdb::Slice;
using std::chrono::seconds;

// ---- limits
/// A write batch is closed at either of these; the next one takes what is left.
constexpr std::size_t write_batch_max_items = 1024;
constexpr std::size_t write_batch_max_bytes = 4U << 20;
/// Left free on the disk, so that RocksDB never fails in the middle of a write of its own. Below it claims are refused.
constexpr std::uint64_t disk_floor_bytes = 1U << 20;
/// Expired records, conversations or chunk groups removed in one step of the writer.
constexpr std::size_t purge_step_items = 256;
/// What one purge looks at to find idle conversations and orphaned chunks; the next goes on behind it.
constexpr std::size_t purge_look_max = 10'000;

/// With so many acquires at hand their claims are written together, as one entry of `claims`.
constexpr std::size_t claims_together_min = 8;
/// A larger record (a turn's, say) is written to the index.
constexpr std::size_t claim_max_bytes = 512;
/// Of entries that still hold an open claim, and how many; then the oldest one's open claims are written to the index.
constexpr std::size_t claims_max_bytes = 8U << 20;
constexpr std::size_t claims_max_groups = 1024;
/// The record of a decided message of up to this size lies in the index, a larger one among the answers.
constexpr std::size_t index_record_max_bytes = 256;

// ---- times
/// Persisted ahead of the time in use, so that not every grant must write the clock: what a crash may cost in time.
constexpr seconds clock_reserve{10};
/// An idle store writes its clock this often: else a long idle time would look like a jump of the wall clock.
constexpr seconds clock_idle_write{30};
constexpr seconds writer_tick{1};
/// With more than this left the free space is not asked for at each write, but at this interval.
constexpr std::uint64_t disk_plenty_bytes = 256U << 20;
constexpr seconds free_asked_every{1};
/// What a caller writes itself (see write_here), at most.
constexpr std::size_t quick_batch_max_items = 128;
constexpr std::size_t quick_body_max_bytes = 32 * 1024;
/// Chunks outlive their record by this, for readers that began before it expired.
constexpr std::chrono::hours chunk_grace{1};
constexpr std::chrono::milliseconds recovery_first_pause{100};
constexpr std::chrono::milliseconds recovery_last_pause{2000};

Slice slice(std::string_view bytes) { return {bytes.data(), bytes.size()}; }
std::string_view view(const Slice& bytes) { return {bytes.data(), bytes.size()}; }

bool expired(const Record& record, StoreTime at) { return record.expires.us != 0 && record.expires <= at; }

/// Undecided records live in the index and in memory; without an expiry there is no place for them among the answers.
bool resident(const Record& record) { return undecided(record) || record.expires.us == 0; }

bool matches(const ScanFilter& filter, const Record& record, StoreTime at) {
    if (expired(record, at)) return false;
    if (filter.undecided_only && !undecided(record)) return false;
    if (filter.dead_leases_only && (record.status != Status::processing || record.lease_end > at)) return false;
    return filter.status == 0 || filter.status == static_cast<std::uint8_t>(record.status);
}

RecordPtr without_body(const RecordPtr& record) {
    if (!record->answer || !record->answer->body) return record;
    auto copy = std::make_shared<Record>(*record);
    copy->answer->body = nullptr;
    return copy;
}

/// The conversation that the step may append to; null: none.
const StoredKey* appends_to(const Complete& operation, const RecordPtr&) {
    return operation.append ? &operation.append->conversation : nullptr;
}
const StoredKey* appends_to(const Resolve& operation, const RecordPtr& found) {
    return operation.answer_content && found && found->turn ? &found->turn->conversation : nullptr;
}
template <class Op>
const StoredKey* appends_to(const Op&, const RecordPtr&) {
    return nullptr;
}

Error stopping() { return {.code = ErrorCode::stopping, .detail = "rocksdb: the store is stopped; nothing was done"}; }

std::string boot_id() {
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::string id;
    std::getline(file, id);
    return id;
}

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
    Result<void> open(bool accept_clock, RocksDbReport& report) {
        auto opened = open_database(database_options_, false);
        if (!opened) return opened.error();
        database_ = std::move(*opened);
        if (auto read = start_clock(accept_clock, report); !read) return read;
        if (auto loaded = load(&report); !loaded) return loaded;
        report.log_bytes_dropped = database_->log_bytes_dropped;
        if (report.log_bytes_dropped != 0) {
            report.notices.push_back("the end of the log was torn: " + std::to_string(report.log_bytes_dropped) +
                                     " bytes behind the last consistent point were dropped (" +
                                     database_->log_dropped + ")");
        }
        rocksdb::WriteBatch opening;
        put_clock(opening, clock_->now());
        opening.Delete(database_->meta, slice(layout::closed_key));
        opening.Put(database_->meta, slice(layout::boot_key), boot_id());
        const rocksdb::Status status = database_->db->Write(synced(), &opening);
        if (!status.ok()) return to_error(status, path_, "cannot write to the store");
        begin_group();
        writer_ = std::thread([this] { run(); });
        return {};
    }

    void submit(std::vector<Item> items, BatchDone done) override {
        Job job{.items = std::move(items), .done = std::move(done), .run = {}, .results = {}};
        if (!sync_ && quick(job.items) && write_here(job)) return;
        enqueue(std::move(job));
    }

    Result<ScanPage> scan(const ScanFilter& filter, const std::string& cursor, std::size_t limit) override {
        if (!cursor.empty() && !layout::stored_key(cursor)) {
            return Error{.code = ErrorCode::invalid_argument,
                         .detail = "rocksdb: scan cursor is not one of this store's; start again without a cursor"};
        }
        limit = std::max<std::size_t>(limit, 1);
        const auto status = static_cast<Status>(filter.status);
        const bool undecided_by_status =
            filter.status != 0 && (status == Status::processing || status == Status::unknown);
        if (filter.undecided_only || filter.dead_leases_only || undecided_by_status) {
            return scan_resident(filter, cursor, limit);
        }
        return scan_all(filter, cursor, limit);
    }

    Result<std::size_t> purge(std::size_t limit) override {
        const std::lock_guard one_purge(purge_mutex_);
        std::size_t gone = 0;
        if (auto step = purge_records(limit, gone); !step) return step.error();
        if (auto step = purge_expiries(limit, gone); !step) return step.error();
        if (auto step = purge_conversations(limit, gone); !step) return step.error();
        if (auto step = purge_chunks(); !step) return step.error();
        return gone;
    }

    [[nodiscard]] StoreTime now() const override { return clock_->now(); }

    [[nodiscard]] Durability durability() const override {
        return {.survives_process_crash = true,
                .survives_power_cut = sync_,
                .survives_failover = true,
                .summary = sync_ ? "Every acknowledged record is on the disk (synced) before it is acknowledged."
                                 : "Acknowledged records survive a crash of the process; a power cut loses the last "
                                   "seconds of them and leaves a consistent state."};
    }

    Result<void> health() override {
        {
            const std::lock_guard lock(mutex_);
            if (stopping_) return stopping();
        }
        {
            const std::lock_guard lock(failure_mutex_);
            if (failure_) return *failure_;
        }
        if (free_bytes(path_) < disk_floor_bytes) return full();
        return {};
    }

    void stop() override {
        const std::lock_guard once(stop_mutex_);
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_one();
        if (writer_.joinable()) writer_.join();
        const std::unique_lock lock(database_mutex_);
        database_.reset();
    }

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
    /// A record as the group leaves it.
    struct Changed {
        RecordPtr record;
        bool claimed = false;  ///< Written among the group's claims, and nothing since.
        bool indexed = false;  ///< The index holds all of it.
    };
    /// Where a record was written.
    enum class Place : std::uint8_t { index, claims, answers };
    struct ItemAt {
        std::size_t job;
        std::size_t item;
    };

    // ------------------------------------------------------------ callers' side

    /// Batches that read nothing from the disk but an index entry, and write little.
    static bool quick(const std::vector<Item>& items) {
        if (items.size() > quick_batch_max_items) return false;
        return std::all_of(items.begin(), items.end(), [](const Item& item) {
            if (const auto* complete = std::get_if<core::Complete>(&item.operation)) {
                return complete->answer.body_bytes <= quick_body_max_bytes;
            }
            return std::holds_alternative<core::Acquire>(item.operation) ||
                   std::holds_alternative<core::Start>(item.operation) ||
                   std::holds_alternative<core::Renew>(item.operation) ||
                   std::holds_alternative<core::Release>(item.operation) ||
                   std::holds_alternative<core::Fail>(item.operation);
        });
    }

    /// Without a sync a write costs less than to wake the writer and be woken by it: a caller that finds nobody writing and
    /// nothing waiting is the writer for its own batch. False: `job` is untouched and must be queued.
    bool write_here(Job& job) {
        // A `done` that submits again runs inside the writer's work.
        if (writing_thread_.load(std::memory_order_relaxed) == std::this_thread::get_id()) return false;
        std::unique_lock writing(writing_mutex_, std::defer_lock);
        {
            const std::lock_guard lock(mutex_);
            if (stopping_ || !queue_.empty() || !writing.try_lock()) return false;
        }
        std::uint64_t stopped = 0;
        const bool known = !broken_ && database_ &&
                           database_->db->GetIntProperty(rocksdb::DB::Properties::kIsWriteStopped, &stopped);
        if (!known || stopped != 0) return false;  // a write would wait: not on the caller's thread
        writing_thread_.store(std::this_thread::get_id(), std::memory_order_relaxed);
        begin_group();
        own_job_.push_back(std::move(job));
        apply_all(own_job_);
        own_job_.clear();
        writing_thread_.store({}, std::memory_order_relaxed);
        return true;
    }

    /// False: stopped; `done` was called.
    bool enqueue(Job job) {
        bool sleeping = false;
        {
            const std::lock_guard lock(mutex_);
            if (!stopping_) {
                queue_.push_back(std::move(job));
                sleeping = std::exchange(writer_sleeps_, false);
                // Only the one that ends the sleep pays for waking.
                if (!sleeping) return true;
            }
        }
        if (sleeping) {
            wake_.notify_one();
            return true;
        }
        if (job.done) {
            BatchResults refused;
            refused.reserve(job.items.size());
            for (std::size_t i = 0; i < job.items.size(); ++i) refused.emplace_back(stopping());
            job.done(std::move(refused));
        }
        return false;
    }

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
    std::vector<std::pair<StoredKey, RecordPtr>> first_resident(const std::string& cursor, std::size_t limit, Take take) {
        std::vector<std::pair<StoredKey, RecordPtr>> found;
        const std::optional<StoredKey> behind = layout::stored_key(cursor);
        resident_.each([&](const StoredKey& key, const Resident& entry) {
            if ((!behind || key > *behind) && take(entry)) found.emplace_back(key, entry.record);
        });
        const auto kept = found.begin() + static_cast<std::ptrdiff_t>(std::min(limit, found.size()));
        std::partial_sort(found.begin(), kept, found.end(),
                          [](const auto& a, const auto& b) { return a.first < b.first; });
        found.erase(kept, found.end());
        return found;
    }

    Result<ScanPage> scan_resident(const ScanFilter& filter, const std::string& cursor, std::size_t limit) {
        return on_writer<ScanPage>([&]() -> Result<ScanPage> {
            ScanPage page{.records = {}, .next = {}, .at = at_};
            page.records = first_resident(cursor, limit + 1,
                                          [&](const Resident& one) { return matches(filter, *one.record, page.at); });
            if (page.records.size() > limit) {
                page.records.pop_back();
                page.next = std::string(page.records.back().first.view());
            }
            for (auto& entry : page.records) entry.second = without_body(entry.second);
            return page;
        });
    }

    Result<ScanPage> scan_all(const ScanFilter& filter, const std::string& cursor, std::size_t limit) {
        ScanPage page{.records = {}, .next = {}, .at = now()};
        std::vector<std::size_t> live;  // positions of undecided records: memory knows them better than the disk
        // Before the index is looked at: what leaves `claims` meanwhile is found in both, not in neither.
        using Claims = std::vector<std::pair<StoredKey, RecordPtr>>;
        auto claims = on_writer<Claims>([&]() -> Result<Claims> {
            return first_resident(cursor, limit + 1, [&](const Resident& one) {
                return one.claims != 0 && matches(filter, *one.record, page.at);
            });
        });
        if (!claims) return claims.error();
        auto claim = claims->begin();
        /// False: the page is full, and there is more.
        const auto add = [&](const StoredKey& key, RecordPtr record) {
            if (page.records.size() == limit) {
                page.next = std::string(page.records.back().first.view());
                return false;
            }
            if (resident(*record)) live.push_back(page.records.size());
            page.records.emplace_back(key, without_body(record));
            return true;
        };
        {
            const std::shared_lock lock(database_mutex_);
            if (!database_) return unreadable();
            const Snapshot snapshot(*database_->db);
            ReadOptions options;
            options.snapshot = snapshot.get();
            options.fill_cache = false;
            const std::unique_ptr<rocksdb::Iterator> it(database_->db->NewIterator(options, database_->index));
            it->Seek(cursor);
            if (!cursor.empty() && it->Valid() && view(it->key()) == cursor) it->Next();
            bool room = true;
            for (; room && it->Valid(); it->Next()) {
                const std::optional<StoredKey> key = layout::stored_key(view(it->key()));
                if (!key) return corrupt("a key of the index has the wrong length");
                auto record = read_indexed(options, *key, view(it->value()));
                if (!record) return record.error();
                while (room && claim != claims->end() && claim->first < *key) {
                    room = add(claim->first, claim->second);
                    ++claim;
                }
                if (!room) break;
                if (claim != claims->end() && claim->first == *key) {
                    // The index may hold what was before the claim.
                    if (claim->second->token > (*record)->token) *record = claim->second;
                    ++claim;
                }
                if (matches(filter, **record, page.at)) room = add(*key, *record);
            }
            for (; room && claim != claims->end(); ++claim) room = add(claim->first, claim->second);
            if (!it->status().ok()) return to_error(it->status(), path_, "cannot list records");
        }
        if (live.empty()) return page;
        auto refreshed = on_writer<bool>([&]() -> Result<bool> {
            for (const std::size_t i : live) {
                if (const Resident* one = resident_.find(page.records[i].first)) {
                    page.records[i].second = without_body(one->record);
                }
            }
            return true;
        });
        if (!refreshed) return refreshed.error();
        std::erase_if(page.records, [&](const auto& entry) { return !matches(filter, *entry.second, page.at); });
        return page;
    }

    struct Candidate {
        std::string answer_key;
        StoredKey key;
    };

    Result<void> purge_records(std::size_t limit, std::size_t& gone) {
        while (gone < limit) {
            std::vector<Candidate> candidates;
            {
                const std::shared_lock lock(database_mutex_);
                if (!database_) return unreadable();
                ReadOptions options;
                options.fill_cache = false;
                const std::unique_ptr<rocksdb::Iterator> it(database_->db->NewIterator(options, database_->answers));
                const StoreTime at = now();
                // What was removed leaves marks that an iterator has to step over: begin behind them.
                for (it->Seek(purged_until_); it->Valid(); it->Next()) {
                    const auto position = layout::decode_answer_key(view(it->key()));
                    const auto key = layout::stored_key(view(it->value()).substr(0, sizeof(StoredKey::bytes)));
                    if (!position || !key) return corrupt("an entry of the answers cannot be read");
                    if (position->expires > at || candidates.size() == std::min(purge_step_items, limit - gone)) break;
                    candidates.push_back({it->key().ToString(), *key});
                }
                if (!it->status().ok()) return to_error(it->status(), path_, "cannot look for expired records");
            }
            if (candidates.empty()) return {};
            auto removed =
                on_writer<std::size_t>([&]() -> Result<std::size_t> { return remove_records(candidates); });
            if (!removed) return removed.error();
            gone += *removed;
            purged_until_ = candidates.back().answer_key;
        }
        return {};
    }

    /// An entry of `expiries`, or what a step takes of it.
    struct Expired {
        std::string name;
        StoreTime at;
        std::vector<StoredKey> keys;
        std::string rest;  ///< Keys that are left for a later step.
    };

    Result<void> purge_expiries(std::size_t limit, std::size_t& gone) {
        while (gone < limit) {
            std::vector<Expired> entries;
            {
                const std::shared_lock lock(database_mutex_);
                if (!database_) return unreadable();
                ReadOptions options;
                options.fill_cache = false;
                const std::unique_ptr<rocksdb::Iterator> it(database_->db->NewIterator(options, database_->expiries));
                const StoreTime at = now();
                std::size_t left = std::min(purge_step_items, limit - gone);
                for (it->Seek(expiries_purged_until_); it->Valid() && left > 0; it->Next()) {
                    const auto position = layout::decode_answer_key(view(it->key()));
                    std::string_view keys = view(it->value());
                    if (!position || keys.size() % sizeof(StoredKey::bytes) != 0) {
                        return corrupt("an entry of the expiries cannot be read");
                    }
                    if (position->expires > at) break;
                    Expired& entry =
                        entries.emplace_back(Expired{it->key().ToString(), position->expires, {}, {}});
                    for (; !keys.empty() && left > 0; --left) {
                        entry.keys.push_back(*layout::stored_key(keys.substr(0, sizeof(StoredKey::bytes))));
                        keys.remove_prefix(sizeof(StoredKey::bytes));
                    }
                    entry.rest = keys;
                }
                if (!it->status().ok()) return to_error(it->status(), path_, "cannot look for expired records");
            }
            if (entries.empty()) return {};
            auto removed = on_writer<std::size_t>([&]() -> Result<std::size_t> { return remove_expired(entries); });
            if (!removed) return removed.error();
            gone += *removed;
            expiries_purged_until_ = entries.back().name;
        }
        return {};
    }

    Result<void> purge_conversations(std::size_t limit, std::size_t& gone) {
        std::vector<StoredKey> idle;
        {
            const std::shared_lock lock(database_mutex_);
            if (!database_) return unreadable();
            ReadOptions options;
            options.fill_cache = false;
            const std::unique_ptr<rocksdb::Iterator> it(
                database_->db->NewIterator(options, database_->conversations));
            const StoreTime at = now();
            std::size_t looked_at = 0;
            const std::string first(1, layout::head_prefix);
            it->Seek(heads_seen_until_.empty() ? first : heads_seen_until_);
            for (; it->Valid() && view(it->key()).starts_with(layout::head_prefix); it->Next()) {
                if (++looked_at > purge_look_max || gone + idle.size() >= limit) break;
                const auto key = layout::stored_key(view(it->key()).substr(1));
                const auto head = layout::decode_conversation(view(it->value()));
                if (!key || !head) return corrupt("the head of a conversation cannot be read");
                if (head->last_used + conversation_idle_retention <= at) idle.push_back(*key);
            }
            const bool more = it->Valid() && view(it->key()).starts_with(layout::head_prefix);
            heads_seen_until_ = more ? it->key().ToString() : std::string{};
            if (!it->status().ok()) return to_error(it->status(), path_, "cannot look for idle conversations");
        }
        for (const StoredKey& key : idle) {
            auto removed = on_writer<bool>([&]() -> Result<bool> {
                auto head = read_head(key);
                if (!head) return head.error();
                if (!*head || (*head)->last_used + conversation_idle_retention > at_) return false;
                if (auto marked = delete_conversation(key); !marked) return marked.error();
                return write_own();
            });
            if (!removed) return removed.error();
            gone += *removed ? 1U : 0U;
        }
        return {};
    }

    struct ChunkGroup {
        StoredKey key;
        FencingToken token;
    };

    /// Chunks of tokens that can never be completed, and those whose record is gone for long enough.
    Result<void> purge_chunks() {
        if (!chunks_exist_) return {};
        std::vector<ChunkGroup> groups;
        {
            const std::shared_lock lock(database_mutex_);
            if (!database_) return unreadable();
            ReadOptions options;
            options.fill_cache = false;
            const std::unique_ptr<rocksdb::Iterator> it(database_->db->NewIterator(options, database_->chunks));
            for (it->Seek(chunks_seen_until_); it->Valid() && groups.size() < purge_step_items;) {
                const auto name = layout::decode_chunk_key(view(it->key()));
                if (!name) return corrupt("a key of the chunks has the wrong length");
                groups.push_back({name->key, name->token});
                it->Seek(layout::chunk_prefix(name->key, {name->token.value + 1}));
            }
            chunks_seen_until_ = it->Valid() ? it->key().ToString() : std::string{};
            if (!it->status().ok()) return to_error(it->status(), path_, "cannot look for orphaned chunks");
        }
        if (groups.empty()) return {};
        auto removed = on_writer<bool>([&]() -> Result<bool> {
            for (const ChunkGroup& group : groups) {
                auto orphaned = is_orphaned(group);
                if (!orphaned) return orphaned.error();
                if (!*orphaned) continue;
                if (auto marked = delete_range(database_->chunks, layout::chunk_prefix(group.key, group.token));
                    !marked) {
                    return marked.error();
                }
            }
            return write_own();
        });
        if (!removed) return removed.error();
        return {};
    }

    // ------------------------------------------------------------ the writer's loop

    void run() {
        ::pthread_setname_np(::pthread_self(), "semel-store");
        std::vector<Job> jobs;
        for (;;) {
            {
                std::unique_lock lock(mutex_);
                if (queue_.empty()) {
                    if (stopping_) break;
                    writer_sleeps_ = true;
                    wake_.wait_for(lock, writer_tick, [&] { return !queue_.empty() || stopping_; });
                    writer_sleeps_ = false;
                }
            }
            // Before the queue is taken: whoever finds it empty must not overtake what was in it.
            const std::lock_guard writing(writing_mutex_);
            {
                const std::lock_guard lock(mutex_);
                jobs.swap(queue_);
            }
            writing_thread_.store(std::this_thread::get_id(), std::memory_order_relaxed);
            tick();
            apply_all(jobs);
            jobs.clear();
            writing_thread_.store({}, std::memory_order_relaxed);
        }
        const std::lock_guard writing(writing_mutex_);
        close();
    }

    void tick() {
        clock_->follow_wall();
        if (broken_) try_recovery();
        begin_group();
        const bool silent = at_ - clock_written_ > clock_idle_write;
        if (!broken_ && silent && free_bytes(path_) >= disk_floor_bytes) {
            needs_sync_ = true;
            put_clock(batch_, at_);
            // A failure is noted; the next claim is told of it.
            write_own_logged();
        }
    }

    /// Leaves word that nothing is missing, and the exact time.
    void close() {
        if (broken_ || !database_ || free_bytes(path_) < disk_floor_bytes) return;
        rocksdb::WriteBatch closing;
        for (const std::uint64_t number : claim_groups_.over()) {
            closing.Delete(database_->claims, layout::claims_key(number));
        }
        std::string time;
        layout::put_u64(time, static_cast<std::uint64_t>(clock_->now().us));
        closing.Put(database_->meta, slice(layout::clock_key), time);
        closing.Put(database_->meta, slice(layout::closed_key), Slice("1"));
        // Without it the next opening only says that the store was not closed.
        database_->db->Write(synced(), &closing).PermitUncheckedError();
    }

    void apply_all(std::vector<Job>& jobs) {
        jobs_ = &jobs;
        claims_together_ = acquires_of(jobs) >= claims_together_min;
        for (std::size_t j = 0; j < jobs.size(); ++j) {
            Job& job = jobs[j];
            if (job.run) {
                commit();
                job.run();
                continue;
            }
            job.results.reserve(job.items.size());
            for (std::size_t i = 0; i < job.items.size(); ++i) {
                item_depends_ = false;
                job.results.push_back(apply(job.items[i]));
                if (item_depends_) tentative_.push_back({j, i});
                if (++group_items_ >= write_batch_max_items || group_bytes() >= write_batch_max_bytes) commit();
            }
            counters_.items.fetch_add(job.items.size(), std::memory_order_relaxed);
            applied_.push_back(j);
        }
        commit();
        jobs_ = nullptr;
    }

    static std::size_t acquires_of(const std::vector<Job>& jobs) {
        std::size_t count = 0;
        for (const Job& job : jobs) {
            count += static_cast<std::size_t>(std::count_if(job.items.begin(), job.items.end(), [](const Item& item) {
                return std::holds_alternative<core::Acquire>(item.operation);
            }));
        }
        return count;
    }
    [[nodiscard]] std::size_t group_bytes() const { return batch_.GetDataSize() + claims_.size(); }

    void begin_group() {
        batch_.Clear();
        changed_.clear();
        claims_.clear();
        claimed_.clear();
        expiring_.clear();
        folded_.clear();
        dirty_chunks_.clear();
        dirty_conversations_.clear();
        tentative_.clear();
        group_items_ = 0;
        needs_sync_ = false;
        at_ = clock_->now();
    }

    /// Ends the group: writes it, makes it the state in memory or drops it, answers the jobs that are through.
    bool commit() {
        bool written = true;
        if (batch_.Count() > 0 || !claims_.empty()) {
            base::fault_point("store.write.before");
            const std::uint64_t claims = claims_.empty() ? 0 : next_number_++;
            put_group(claims);
            const Result<void> result = write();
            written = result.has_value();
            if (written) {
                settle_group(claims);
            } else {
                for (const ItemAt& at : tentative_) (*jobs_)[at.job].results[at.item] = result.error();
            }
            base::fault_point("store.write.after");
        }
        begin_group();
        for (const std::size_t j : applied_) {
            Job& job = (*jobs_)[j];
            job.done(std::move(job.results));
        }
        applied_.clear();
        return written;
    }

    /// Completes batch_ by what the group's items share.
    void put_group(std::uint64_t claims) {
        if (claims != 0) batch_.Put(database_->claims, layout::claims_key(claims), claims_);
        for (const auto& [expires, keys] : expiring_) {
            batch_.Put(database_->expiries, layout::encode(layout::AnswerKey{expires, next_number_++}), keys);
        }
        if (claim_groups_.bytes() > claims_max_bytes || claim_groups_.count() > claims_max_groups) {
            fold(claim_groups_.all().begin()->first);
        }
    }

    /// What was written becomes the state in memory.
    void settle_group(std::uint64_t claims) {
        std::size_t open = 0;
        changed_.each([&](const StoredKey& key, Changed& changed) {
            Resident* known = resident_.find(key);
            if (known == nullptr) hot_.erase(key);
            if (known != nullptr && known->claims != 0) claim_groups_.closed(known->claims);
            if (!resident(*changed.record)) {
                if (known != nullptr) resident_.erase(key);
                // Few of those in the index are asked for again, and it is read as fast as they are remembered.
                if (!changed.indexed) hot_.put(key, std::move(changed.record));
                return;
            }
            if (known == nullptr) known = &resident_[key];
            known->claims = changed.claimed ? claims : 0;
            open += changed.claimed ? 1 : 0;
            known->record = std::move(changed.record);
        });
        if (claims != 0) {
            claim_groups_.add(claims, {.keys = std::move(claimed_), .bytes = claims_.size(), .open = open});
            claimed_ = {};
        }
    }

    /// Into batch_: the open claims of an entry of `claims` go to the index, and the entry goes.
    void fold(std::uint64_t number) {
        const auto group = claim_groups_.all().find(number);
        for (const StoredKey& key : group->second.keys) {
            const Resident* one = resident_.find(key);
            // What this group writes of it is newer.
            if (one == nullptr || one->claims != number || changed_.contains(key)) continue;
            put_in_index(key, *one->record);
        }
        batch_.Delete(database_->claims, layout::claims_key(number));
        folded_.push_back(number);
    }

    /// Whether `bytes` fit above the floor. Far from it the file system is asked once a second, near it each time.
    bool room_for(std::uint64_t bytes) {
        const auto now = std::chrono::steady_clock::now();
        if (free_left_ < disk_plenty_bytes + bytes || now - free_asked_at_ > free_asked_every) {
            free_left_ = free_bytes(path_);
            free_asked_at_ = now;
        }
        if (free_left_ < disk_floor_bytes + bytes) return false;
        free_left_ -= bytes;
        return true;
    }

    /// Hands batch_ to RocksDB.
    Result<void> write() {
        if (broken_) {
            counters_.refused_full.fetch_add(1, std::memory_order_relaxed);
            Error error = present_failure();
            error.applied = Applied::no;
            return error;
        }
        // A write that fails inside RocksDB costs an opening anew, one that is not begun costs nothing.
        if (!room_for(2 * batch_.GetDataSize())) {
            counters_.refused_full.fetch_add(1, std::memory_order_relaxed);
            return full();
        }
        if (*database_->background_failed) {
            fail_with({.code = ErrorCode::store_full,
                       .applied = Applied::no,
                       .detail = "rocksdb: " + path_ +
                                 ": a background write failed, probably a full disk; claims are refused until the "
                                 "database could be opened again, replays go on"});
            return present_failure();
        }
        if (at_ > clock_reserved_) {
            put_clock(batch_, at_);
            needs_sync_ = true;
        }
        for (const std::uint64_t number : claim_groups_.over()) {
            batch_.Delete(database_->claims, layout::claims_key(number));
        }
        rocksdb::WriteOptions options;
        options.sync = sync_ || needs_sync_;
        const rocksdb::Status status = database_->db->Write(options, &batch_);
        if (!status.ok()) {
            Error error = to_error(status, path_, "cannot write");
            // The log may hold the batch whole and only its sync failed: the next opening decides.
            error.applied = Applied::unknown;
            fail_with(error);
            return error;
        }
        claim_groups_.over_removed();
        for (const std::uint64_t number : folded_) {
            for (const StoredKey& key : claim_groups_.all().at(number).keys) {
                Resident* one = resident_.find(key);
                if (one != nullptr && one->claims == number) one->claims = 0;
            }
            claim_groups_.removed(number);
        }
        counters_.writes.fetch_add(1, std::memory_order_relaxed);
        if (options.sync) counters_.syncs.fetch_add(1, std::memory_order_relaxed);
        return {};
    }

    /// For steps between two groups: batch_ holds what they want written.
    Result<bool> write_own() {
        if (batch_.Count() == 0) return true;
        const Result<void> result = write();
        begin_group();
        if (!result) return result.error();
        return true;
    }
    void write_own_logged() {
        // Noted in failure_ where it matters.
        if (const Result<bool> written = write_own(); !written) clock_reserved_ = {};
    }

    static rocksdb::WriteOptions synced() {
        rocksdb::WriteOptions options;
        options.sync = true;
        return options;
    }

    /// Reserves the time from `at` on: after a crash the clock starts behind everything that was granted.
    void put_clock(rocksdb::WriteBatch& into, StoreTime at) {
        clock_reserved_ = at + clock_reserve;
        clock_written_ = at;
        std::string time;
        layout::put_u64(time, static_cast<std::uint64_t>(clock_reserved_.us));
        into.Put(database_->meta, slice(layout::clock_key), time);
    }

    // ------------------------------------------------------------ failing and coming back

    [[nodiscard]] Error full() const {
        return {.code = ErrorCode::store_full,
                .applied = Applied::no,
                .retry_after = recovery_last_pause,
                .detail = "rocksdb: less than " + std::to_string(disk_floor_bytes) + " bytes are free in " + path_ +
                          "; free space, claims work again by themselves"};
    }
    [[nodiscard]] Error unreadable() const {
        return {.code = ErrorCode::store_unavailable,
                .detail = "rocksdb: " + path_ + " could not be opened again after a failed write; free space or repair "
                          "the disk, it is tried again by itself"};
    }
    [[nodiscard]] Error corrupt(const std::string& what) const {
        return {.code = ErrorCode::store_corrupt,
                .detail = "rocksdb: " + path_ + ": " + what + "; restore the directory from a copy"};
    }

    Error present_failure() {
        const std::lock_guard lock(failure_mutex_);
        return failure_.value_or(full());
    }
    void fail_with(Error error) {
        broken_ = true;
        if (error.code == ErrorCode::io) error.code = ErrorCode::store_unavailable;
        error.retry_after = recovery_last_pause;
        counters_.refused_full.fetch_add(1, std::memory_order_relaxed);
        recovery_pause_ = recovery_first_pause;
        recovery_at_ = std::chrono::steady_clock::now() + recovery_pause_;
        const std::lock_guard lock(failure_mutex_);
        failure_ = std::move(error);
    }

    /// Opens the database again. RocksDB 7.8 has DB::Resume, but after a failed write to the log it reports success and fails
    /// every later write; a new opening also settles whether the failed batch is in the log.
    void try_recovery() {
        if (std::chrono::steady_clock::now() < recovery_at_) return;
        recovery_pause_ = std::min(recovery_pause_ * 2, recovery_last_pause);
        recovery_at_ = std::chrono::steady_clock::now() + recovery_pause_;
        // Opening writes what the memtables held.
        if (free_bytes(path_) < 2 * disk_floor_bytes) return;
        {
            const std::unique_lock lock(database_mutex_);
            database_.reset();
            auto opened = open_database(database_options_, false);
            if (!opened) opened = open_database(database_options_, true);
            if (!opened) return;
            database_ = std::move(*opened);
            if (database_->read_only) return;
        }
        if (auto loaded = load(nullptr); !loaded) return;
        hot_.clear();
        broken_ = false;
        clock_reserved_ = {};
        counters_.recoveries.fetch_add(1, std::memory_order_relaxed);
        const std::lock_guard lock(failure_mutex_);
        failure_.reset();
    }

    // ------------------------------------------------------------ opening

    Result<void> start_clock(bool accept, RocksDbReport& report) {
        std::optional<StoreTime> persisted;
        std::string value;
        rocksdb::Status status = database_->db->Get({}, database_->meta, slice(layout::clock_key), &value);
        if (status.ok()) {
            if (value.size() != 8) return corrupt("the persisted clock cannot be read");
            persisted = StoreTime{static_cast<std::int64_t>(layout::get_u64(value))};
        } else if (!status.IsNotFound()) {
            return to_error(status, path_, "cannot read the clock");
        }
        const ClockStart start = choose_start(persisted, wall_.wall_us(), accept);
        clock_.emplace(wall_, start.start);
        next_number_ = static_cast<std::uint64_t>(start.start.us);

        report.created = !persisted;
        report.wall_ahead_us = start.wall_ahead_us;
        report.clock_kept = start.kept;
        report.clock_moved = start.moved;
        const std::string hours = std::to_string(std::abs(start.wall_ahead_us) / 3'600'000'000) + " h " +
                                  (start.wall_ahead_us > 0 ? "ahead of" : "behind");
        if (start.kept) {
            report.notices.push_back("the wall clock is " + hours + " the store's: the store goes on with its own time; if "
                                     "the wall clock is right, start once with --accept-clock");
        } else if (start.moved) {
            report.notices.push_back("the wall clock is " + hours + " the store's and was accepted");
        }
        if (!persisted) return {};

        status = database_->db->Get({}, database_->meta, slice(layout::closed_key), &value);
        report.closed_cleanly = status.ok();
        if (report.closed_cleanly) return {};
        status = database_->db->Get({}, database_->meta, slice(layout::boot_key), &value);
        report.machine_restarted = status.ok() && value != boot_id();
        if (!sync_) {
            report.notices.push_back(
                std::string("the store was not closed") +
                (report.machine_restarted ? " and the machine was restarted since" : "") +
                "; with durability async, what was acknowledged shortly before a power cut may be missing");
        }
        return {};
    }

    /// Brings the undecided records into memory. Again after a recovery: then leases of records that are what memory knew
    /// go on, and those of others are over.
    Result<void> load(RocksDbReport* report) {
        ReadOptions options;
        options.fill_cache = false;
        options.readahead_size = 2U << 20;
        KeyTable<Resident> found;
        const StoreTime at = clock_->now();
        const auto take = [&](const StoredKey& key, Record record) {
            const Resident* known = resident_.find(key);
            const bool same = known != nullptr && known->record->token == record.token &&
                              known->record->nonce == record.nonce && known->record->status == record.status;
            if (same) {
                found[key].record = known->record;
                return;
            }
            // Leases live in memory only: who held this one may be gone, and cannot have renewed it here.
            if (record.status == Status::processing) record.lease_end = std::min(record.lease_end, at);
            found[key].record = std::make_shared<const Record>(std::move(record));
        };
        const std::unique_ptr<rocksdb::Iterator> it(database_->db->NewIterator(options, database_->index));
        for (it->SeekToFirst(); it->Valid(); it->Next()) {
            const std::string_view value = view(it->value());
            if (!value.empty() && value.front() != layout::index_holds_record) continue;
            const std::optional<StoredKey> key = layout::stored_key(view(it->key()));
            if (!key || value.empty()) return corrupt("an entry of the index cannot be read");
            auto decoded = decode_record(value.substr(1));
            if (!decoded) return decoded.error();
            take(*key, std::move(*decoded));
        }
        if (!it->status().ok()) return to_error(it->status(), path_, "cannot read the index");
        if (auto claims = load_claims(found, take); !claims) return claims;
        if (report != nullptr) {
            found.each([&](const StoredKey&, const Resident& one) {
                if (one.record->status == Status::processing) ++report->leases_killed;
            });
        }
        resident_ = std::move(found);
        claim_groups_.clear();

        const std::unique_ptr<rocksdb::Iterator> chunk(database_->db->NewIterator(options, database_->chunks));
        chunk->SeekToFirst();
        chunks_exist_ = chunk->Valid();
        if (report != nullptr) {
            report->undecided = resident_.size();
            if (report->leases_killed != 0) {
                report->notices.push_back(std::to_string(report->leases_killed) +
                                          " intents were in progress when the store was closed: their leases are over");
            }
        }
        return {};
    }

    /// Claims for which the index has nothing newer. They are written to it, so that no entry of `claims` is left.
    template <class Take>
    Result<void> load_claims(KeyTable<Resident>& found, Take take) {
        rocksdb::WriteBatch moved;
        KeyTable<bool> open;
        const std::unique_ptr<rocksdb::Iterator> it(database_->db->NewIterator({}, database_->claims));
        for (it->SeekToFirst(); it->Valid(); it->Next()) {
            moved.Delete(database_->claims, it->key());
            for (std::string_view bytes = view(it->value()); !bytes.empty();) {
                const auto claim = layout::take_claim(bytes);
                if (!claim) return corrupt("an entry of the claims cannot be read");
                auto record = decode_record(claim->record);
                if (!record) return record.error();
                RecordPtr newer;
                if (const Resident* one = found.find(claim->key)) {
                    newer = one->record;
                } else {
                    auto index = read(database_->index, claim->key.view());
                    if (!index) return index.error();
                    if (*index) {
                        auto indexed = read_indexed({}, claim->key, **index);
                        if (!indexed) return indexed.error();
                        newer = *indexed;
                    }
                }
                if (newer && newer->token >= record->token) continue;
                take(claim->key, std::move(*record));
                open[claim->key] = true;
            }
        }
        if (!it->status().ok()) return to_error(it->status(), path_, "cannot read the claims");
        if (moved.Count() == 0) return {};
        open.each([&](const StoredKey& key, bool) {
            value_.assign(1, layout::index_holds_record);
            encode_record(*found.find(key)->record, true, value_);
            moved.Put(database_->index, slice(key.view()), value_);
        });
        const rocksdb::Status status = database_->db->Write(synced(), &moved);
        if (!status.ok()) return to_error(status, path_, "cannot write to the store");
        return {};
    }

    // ------------------------------------------------------------ one item

    /// Every operation on a record.
    template <class Op>
    Result<StoreOutcome> step_on_record(const StoredKey& key, Op& operation) {
        bool dirty = false;
        auto found = find(key, dirty);
        if (!found) return found.error();
        const StoredKey* conversation = appends_to(operation, *found);
        if (conversation != nullptr && dirty_conversations_.contains(*conversation)) {
            // Its head is read from the disk. What was found may be lost with the group.
            commit();
            dirty = false;
            found = find(key, dirty);
            if (!found) return found.error();
        }
        Transition transition = decide(*found, std::move(operation), at_);
        item_depends_ = dirty;
        switch (transition.write) {
            case Transition::Write::none:
                break;
            case Transition::Write::volatile_:
                // On a record that this group wrote it is lost with the group; else it needs no write to be true.
                if (dirty) {
                    changed_[key].record = std::move(transition.record);
                } else {
                    resident_[key].record = std::move(transition.record);
                }
                break;
            case Transition::Write::durable:
                if (!database_) return unreadable();
                if (transition.append) {
                    if (auto appended = append_once(std::move(*transition.append)); !appended) return appended.error();
                }
                {
                    // Its token is new: nothing of it was written before.
                    const bool granted = transition.record->status == Status::processing &&
                                         (!*found || (*found)->token != transition.record->token);
                    Changed& changed = changed_[key];
                    const Place place = put_record(key, *transition.record, granted);
                    changed.claimed = place == Place::claims;
                    changed.indexed = place == Place::index;
                    changed.record = std::move(transition.record);
                }
                item_depends_ = true;
                break;
        }
        return std::visit([](auto& outcome) -> StoreOutcome { return std::move(outcome); }, transition.outcome);
    }

    Result<StoreOutcome> step(const StoredKey& key, PutChunk operation) {
        if (!database_) return unreadable();
        if (dirty_chunks_.contains(key)) commit();
        auto present = read(database_->chunks, layout::chunk_key(key, operation.token, operation.n));
        if (!present) return present.error();
        // A chunk that is there stays: a repeated write brings the same bytes, a late one must not change what is completed.
        if (*present) return StoreOutcome{ChunkStored{}};
        batch_.Put(database_->chunks, layout::chunk_key(key, operation.token, operation.n), operation.bytes);
        dirty_chunks_.insert(key);
        chunks_exist_ = true;
        item_depends_ = true;
        return StoreOutcome{ChunkStored{}};
    }

    Result<StoreOutcome> step(const StoredKey& key, GetChunk operation) {
        if (dirty_chunks_.contains(key)) commit();
        auto bytes = read(database_ ? database_->chunks : nullptr,
                          layout::chunk_key(key, operation.token, operation.n));
        if (!bytes) return bytes.error();
        if (!*bytes) return StoreOutcome{ChunkMissing{}};
        return StoreOutcome{ChunkFound{std::move(**bytes)}};
    }

    Result<StoreOutcome> step(const StoredKey& key, GetConversation operation) {
        if (dirty_conversations_.contains(key)) commit();
        auto head = read_head(key);
        if (!head) return head.error();
        if (!*head) return StoreOutcome{ConversationMissing{}};
        auto holds = holds_id(key, operation.request_id);
        if (!holds) return holds.error();
        return StoreOutcome{ConversationFound{**head, !operation.request_id.empty() && *holds}};
    }

    Result<StoreOutcome> step(const StoredKey& key, GetTurns operation) {
        if (dirty_conversations_.contains(key)) commit();
        auto head = read_head(key);
        if (!head) return head.error();
        TurnsFound answer;
        if (!*head) return StoreOutcome{std::move(answer)};
        // Numbers have no gaps.
        const std::uint64_t last = (*head)->turns;
        std::uint64_t after = std::min(operation.after, last);
        if (operation.newest && last - after > operation.limit) after = last - operation.limit;
        const std::unique_ptr<rocksdb::Iterator> it(database_->db->NewIterator({}, database_->conversations));
        const std::string prefix = layout::turn_prefix(key);
        for (it->Seek(layout::turn_key(key, after + 1));
             it->Valid() && view(it->key()).starts_with(prefix) && answer.turns.size() < operation.limit; it->Next()) {
            const std::string_view number = view(it->key()).substr(prefix.size());
            if (number.size() != 8) return corrupt("the key of a turn has the wrong length");
            auto turn = layout::decode_turn(layout::get_u64(number), view(it->value()));
            if (!turn) return corrupt("a turn of a conversation cannot be read");
            answer.turns.push_back(std::move(*turn));
        }
        if (!it->status().ok()) return to_error(it->status(), path_, "cannot read a conversation");
        return StoreOutcome{std::move(answer)};
    }

    Result<StoreOutcome> step(const StoredKey& key, DeleteConversation) {
        if (dirty_conversations_.contains(key)) commit();
        auto head = read_head(key);
        if (!head) return head.error();
        if (!*head) return StoreOutcome{ConversationDeleted{false}};
        if (auto marked = delete_conversation(key); !marked) return marked.error();
        dirty_conversations_.insert(key);
        item_depends_ = true;
        return StoreOutcome{ConversationDeleted{true}};
    }

    Result<StoreOutcome> step(const StoredKey&, ClaimValue operation) {
        const std::string name = layout::value_key(operation.name);
        if (const auto known = values_.find(name); known != values_.end()) return StoreOutcome{Value{known->second}};
        auto stored = read(database_ ? database_->meta : nullptr, name);
        if (!stored) return stored.error();
        if (!*stored) {
            commit();
            batch_.Put(database_->meta, name, operation.value_if_absent);
            needs_sync_ = true;
            if (auto written = write_own(); !written) return written.error();
            stored = std::optional<std::string>(std::move(operation.value_if_absent));
        }
        values_[name] = **stored;
        return StoreOutcome{Value{std::move(**stored)}};
    }

    Result<StoreOutcome> step(const StoredKey&, ReplaceValue operation) {
        if (!database_) return unreadable();
        const std::string name = layout::value_key(operation.name);
        commit();
        batch_.Put(database_->meta, name, operation.value);
        needs_sync_ = true;
        if (auto written = write_own(); !written) return written.error();
        values_[name] = operation.value;
        {
            // A listing's snapshot would keep the old value alive: wait for it.
            const std::unique_lock lock(database_mutex_);
            if (const rocksdb::Status status = forget_old_values(*database_); !status.ok()) {
                Error error = to_error(status, path_,
                                       "the value was replaced, but the old one could not be removed from the files");
                error.applied = Applied::unknown;
                return error;
            }
        }
        return StoreOutcome{Value{std::move(operation.value)}};
    }

    /// Stands behind the steps: clang 19 does not instantiate a member template that a generic lambda names before its body.
    Result<Decided> apply(Item& item) {
        auto outcome = std::visit(
            [&](auto& operation) -> Result<StoreOutcome> {
                using Op = std::remove_reference_t<decltype(operation)>;
                if constexpr (std::is_constructible_v<Operation, Op>) {
                    return step_on_record(item.key, operation);
                } else {
                    return step(item.key, std::move(operation));
                }
            },
            item.operation);
        if (!outcome) return outcome.error();
        return Decided{std::move(*outcome), at_};
    }

    // ------------------------------------------------------------ records on the disk

    /// The state of a record, as the group sees it. `dirty`: the group itself wrote it.
    Result<RecordPtr> find(const StoredKey& key, bool& dirty) {
        if (const Changed* changed = changed_.find(key)) {
            dirty = true;
            return changed->record;
        }
        if (const Resident* one = resident_.find(key)) return one->record;
        if (RecordPtr hot = hot_.find(key)) return hot;
        if (!database_) return unreadable();
        counters_.disk_lookups.fetch_add(1, std::memory_order_relaxed);
        rocksdb::PinnableSlice value;
        const rocksdb::Status status = database_->db->Get({}, database_->index, slice(key.view()), &value);
        if (status.IsNotFound()) return RecordPtr{};
        if (!status.ok()) return to_error(status, path_, "cannot read a record");
        auto record = read_indexed({}, key, view(value));
        if (record && !resident(**record)) hot_.put(key, *record);
        return record;
    }

    /// The record that a value of the index holds or points to. Any thread.
    Result<RecordPtr> read_indexed(const ReadOptions& options, const StoredKey& key, std::string_view value) const {
        if (value.empty()) return corrupt("a value of the index is empty");
        if (value.front() != layout::index_points) return decoded(value.substr(1));
        rocksdb::PinnableSlice answer;
        const rocksdb::Status status =
            database_->db->Get(options, database_->answers, slice(value.substr(1)), &answer);
        if (status.IsNotFound()) return corrupt("the index points to an answer that is not there");
        if (!status.ok()) return to_error(status, path_, "cannot read an answer");
        const std::string_view bytes = view(answer);
        if (!bytes.starts_with(key.view())) return corrupt("the index points to another record's answer");
        return decoded(bytes.substr(key.bytes.size()));
    }
    static Result<RecordPtr> decoded(std::string_view bytes) {
        auto record = decode_record(bytes);
        if (!record) return record.error();
        return RecordPtr{std::make_shared<const Record>(std::move(*record))};
    }

    void put_in_index(const StoredKey& key, const Record& record) {
        value_.assign(1, layout::index_holds_record);
        encode_record(record, true, value_);
        batch_.Put(database_->index, slice(key.view()), value_);
    }

    /// Into the group. `granted`: a grant, whose token is new.
    Place put_record(const StoredKey& key, const Record& record, bool granted) {
        if (resident(record)) {
            if (!granted || !claims_together_ || record.turn) {
                put_in_index(key, record);
                return Place::index;
            }
            value_.clear();
            encode_record(record, true, value_);
            if (value_.size() > claim_max_bytes) {
                put_in_index(key, record);
                return Place::index;
            }
            layout::put_claim(claims_, key, value_);
            claimed_.push_back(key);
            return Place::claims;
        }
        if (record.policy.kind == IntentKind::message) {
            value_.assign(1, layout::index_holds_decided);
            encode_record(record, true, value_);
            if (value_.size() <= index_record_max_bytes) {
                batch_.Put(database_->index, slice(key.view()), value_);
                keys_expiring(record.expires) += key.view();
                return Place::index;
            }
        }
        value_.clear();
        const std::string where = layout::encode(layout::AnswerKey{record.expires, next_number_++});
        value_ += key.view();
        encode_record(record, true, value_);
        batch_.Put(database_->answers, where, value_);
        value_.assign(1, layout::index_points);
        value_ += where;
        batch_.Put(database_->index, slice(key.view()), value_);
        return Place::answers;
    }

    /// Of the group. Most of it is decided at one time and kept for one time.
    std::string& keys_expiring(StoreTime at) {
        for (auto& [expires, keys] : expiring_) {
            if (expires == at) return keys;
        }
        return expiring_.emplace_back(at, std::string{}).second;
    }

    /// On the writer, between groups. An entry that the index no longer points to (the record was tried again since) is
    /// removed without being counted.
    Result<std::size_t> remove_records(const std::vector<Candidate>& candidates) {
        if (!database_) return unreadable();
        std::size_t gone = 0;
        std::vector<StoredKey> removed;
        for (const Candidate& candidate : candidates) {
            auto index = read(database_->index, candidate.key.view());
            if (!index) return index.error();
            const bool current = *index && (*index)->size() == 1 + candidate.answer_key.size() &&
                                 std::string_view(**index).substr(1) == candidate.answer_key;
            if (current) {
                if (chunks_exist_) {
                    if (auto marked = retire_chunks(candidate); !marked) return marked.error();
                }
                batch_.Delete(database_->index, slice(candidate.key.view()));
                removed.push_back(candidate.key);
                ++gone;
            }
            batch_.Delete(database_->answers, candidate.answer_key);
        }
        fold_claims_of(removed);
        if (auto written = write_own(); !written) return written.error();
        for (const StoredKey& key : removed) hot_.erase(key);
        return gone;
    }

    /// On the writer, between groups: what expired, unless the record is another by now.
    Result<std::size_t> remove_expired(const std::vector<Expired>& entries) {
        if (!database_) return unreadable();
        std::vector<StoredKey> removed;
        for (const Expired& entry : entries) {
            for (const StoredKey& key : entry.keys) {
                auto index = read(database_->index, key.view());
                if (!index) return index.error();
                if (!*index || (*index)->empty() || (*index)->front() != layout::index_holds_decided) continue;
                auto record = decoded(std::string_view(**index).substr(1));
                if (!record) return record.error();
                if ((*record)->expires != entry.at) continue;
                batch_.Delete(database_->index, slice(key.view()));
                removed.push_back(key);
            }
            if (entry.rest.empty()) {
                batch_.Delete(database_->expiries, entry.name);
            } else {
                batch_.Put(database_->expiries, entry.name, entry.rest);
            }
        }
        fold_claims_of(removed);
        if (auto written = write_own(); !written) return written.error();
        for (const StoredKey& key : removed) hot_.erase(key);
        return removed.size();
    }

    /// Into batch_: a claim is void as long as the index holds what came of it. Records that leave the index may leave none.
    void fold_claims_of(const std::vector<StoredKey>& leaving) {
        if (leaving.empty() || claim_groups_.empty()) return;
        KeyTable<bool> wanted;
        for (const StoredKey& key : leaving) wanted[key] = true;
        for (const auto& [number, group] : claim_groups_.all()) {
            const bool holds = std::any_of(group.keys.begin(), group.keys.end(),
                                           [&](const StoredKey& key) { return wanted.contains(key); });
            if (holds) fold(number);
        }
    }

    /// The chunks of a record that goes: the answer's own stay for a while, others' go with it.
    Result<void> retire_chunks(const Candidate& candidate) {
        const std::unique_ptr<rocksdb::Iterator> it(database_->db->NewIterator({}, database_->chunks));
        std::optional<FencingToken> answered;
        for (it->Seek(slice(candidate.key.view()));
             it->Valid() && view(it->key()).starts_with(candidate.key.view()); it->Next()) {
            const auto name = layout::decode_chunk_key(view(it->key()));
            if (!name) return corrupt("a key of the chunks has the wrong length");
            if (!answered) {
                auto bytes = read(database_->answers, candidate.answer_key);
                if (!bytes) return bytes.error();
                if (!*bytes) return corrupt("the index points to an answer that is not there");
                auto record = decoded(std::string_view(**bytes).substr(candidate.key.bytes.size()));
                if (!record) return record.error();
                answered = (*record)->token;
                std::string until;
                layout::put_u64(until, static_cast<std::uint64_t>(((*record)->expires + chunk_grace).us));
                batch_.Put(database_->chunks, layout::chunk_key(candidate.key, *answered, layout::chunk_keep_until),
                           until);
            }
            if (name->token != *answered) batch_.Delete(database_->chunks, it->key());
        }
        if (!it->status().ok()) return to_error(it->status(), path_, "cannot read chunks");
        return {};
    }

    Result<bool> is_orphaned(const ChunkGroup& group) {
        if (!database_) return unreadable();
        auto until = read(database_->chunks, layout::chunk_key(group.key, group.token, layout::chunk_keep_until));
        if (!until) return until.error();
        if (*until) {
            if ((*until)->size() != 8) return corrupt("the end of a chunk's life cannot be read");
            return static_cast<std::int64_t>(layout::get_u64(**until)) <= at_.us;
        }
        bool dirty = false;
        auto record = find(group.key, dirty);
        if (!record) return record.error();
        return !*record || (*record)->token != group.token;
    }

    // ------------------------------------------------------------ conversations

    Result<std::optional<Conversation>> read_head(const StoredKey& conversation) {
        auto bytes = read(database_ ? database_->conversations : nullptr, layout::head_key(conversation));
        if (!bytes) return bytes.error();
        if (!*bytes) return std::optional<Conversation>{};
        auto head = layout::decode_conversation(**bytes);
        if (!head) return corrupt("the head of a conversation cannot be read");
        return head;
    }

    Result<bool> holds_id(const StoredKey& conversation, const std::string& request_id) {
        auto found = read(database_ ? database_->conversations : nullptr, layout::id_key(conversation, request_id));
        if (!found) return found.error();
        return found->has_value();
    }

    /// Unless the conversation holds the id. An error leaves the group as it was.
    Result<void> append_once(Append turn) {
        auto holds = holds_id(turn.conversation, turn.request_id);
        if (!holds) return holds.error();
        if (*holds) return {};
        auto head = read_head(turn.conversation);
        if (!head) return head.error();
        Conversation next = head->value_or(Conversation{.created = at_, .last_used = at_, .turns = 0});
        next.last_used = at_;
        ++next.turns;
        const Turn written{.number = next.turns,
                           .request_id = std::move(turn.request_id),
                           .user_content = std::move(turn.user_content),
                           .answer_content = std::move(turn.answer_content),
                           .at = at_,
                           .late = turn.late};
        rocksdb::ColumnFamilyHandle* family = database_->conversations;
        batch_.Put(family, layout::head_key(turn.conversation), layout::encode(next));
        batch_.Put(family, layout::turn_key(turn.conversation, written.number), layout::encode(written));
        batch_.Put(family, layout::id_key(turn.conversation, written.request_id), Slice());
        dirty_conversations_.insert(turn.conversation);
        return {};
    }

    Result<void> delete_conversation(const StoredKey& conversation) {
        rocksdb::ColumnFamilyHandle* family = database_->conversations;
        batch_.Delete(family, layout::head_key(conversation));
        if (auto marked = delete_range(family, layout::turn_prefix(conversation)); !marked) return marked;
        return delete_range(family, layout::id_prefix(conversation));
    }

    // ------------------------------------------------------------ bytes

    /// Deletes one by one what begins with `prefix`: few, and no range marks that later reads pay for.
    Result<void> delete_range(rocksdb::ColumnFamilyHandle* family, const std::string& prefix) {
        ReadOptions options;
        options.fill_cache = false;
        const std::unique_ptr<rocksdb::Iterator> it(database_->db->NewIterator(options, family));
        for (it->Seek(prefix); it->Valid() && view(it->key()).starts_with(prefix); it->Next()) {
            batch_.Delete(family, it->key());
        }
        if (!it->status().ok()) return to_error(it->status(), path_, "cannot read what is to be deleted");
        return {};
    }

    /// Null family: the database could not be opened again.
    Result<std::optional<std::string>> read(rocksdb::ColumnFamilyHandle* family, std::string_view key) {
        if (family == nullptr) return unreadable();
        std::string value;
        const rocksdb::Status status = database_->db->Get({}, family, slice(key), &value);
        if (status.IsNotFound()) return std::optional<std::string>{};
        if (!status.ok()) return to_error(status, path_, "cannot read");
        return std::optional<std::string>(std::move(value));
    }

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
    std::string claims_;                                       ///< The value of the entry.
    std::vector<StoredKey> claimed_;                           ///< Its keys, in order.
    std::vector<std::pair<StoreTime, std::string>> expiring_;  ///< Decided messages' keys by expiry.
    std::vector<std::uint64_t> folded_;
    std::unordered_set<StoredKey, base::DigestHash> dirty_chunks_;
    std::unordered_set<StoredKey, base::DigestHash> dirty_conversations_;
    std::vector<ItemAt> tentative_;
    std::vector<std::size_t> applied_;
    std::size_t group_items_ = 0;
    bool item_depends_ = false;
    bool needs_sync_ = false;

    std::thread writer_;
};

// ---------------------------------------------------------------- the directory

Error io_error(const std::string& what) {
    return {.code = ErrorCode::io, .detail = "rocksdb: " + what + ": " + std::string(std::strerror(errno))};
}

/// Writes the layout's version so that it is on the disk before RocksDB makes its first file.
Result<void> write_version(const std::filesystem::path& directory) {
    const std::filesystem::path file = directory / layout::version_file;
    // Under another name first: the directory is never without a version.
    const std::filesystem::path fresh = directory / layout::new_version_file;
    const std::string text = std::to_string(rocksdb_layout_version) + "\n";
    const int fd = ::open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0) return io_error("cannot create " + fresh.string());
    const bool written = ::write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size()) && ::fsync(fd) == 0;
    Result<void> answer;
    if (!written) answer = io_error("cannot write " + fresh.string());
    ::close(fd);
    if (answer && ::rename(fresh.c_str(), file.c_str()) != 0) answer = io_error("cannot create " + file.string());
    const int folder = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder >= 0) {
        ::fsync(folder);
        ::close(folder);
    }
    return answer;
}

Result<unsigned> written_version(const std::filesystem::path& directory) {
    if (auto written = write_version(directory); !written) return written.error();
    return rocksdb_layout_version;
}

/// The version of the directory, which is made if it is missing.
Result<unsigned> check_directory(const std::string& path) {
    const std::filesystem::path directory(path);
    std::error_code failed;
    std::filesystem::create_directories(directory, failed);
    if (failed || !std::filesystem::is_directory(directory, failed)) {
        return Error{.code = ErrorCode::io,
                     .detail = "rocksdb: cannot make the directory " + path + ": " +
                               (failed ? failed.message() : std::string("it is a file")) +
                               "; name another in store.rocksdb.path"};
    }
    const std::filesystem::path file = directory / layout::version_file;
    if (std::ifstream in(file); in) {
        unsigned version = 0;
        // Cut short by a crash while the directory was made: nothing else is in it yet.
        const bool unfinished = in.peek() == std::ifstream::traits_type::eof();
        if (unfinished && !std::filesystem::exists(directory / "CURRENT")) return written_version(directory);
        if (!(in >> version) || version == 0) {
            return Error{.code = ErrorCode::store_corrupt,
                         .detail = "rocksdb: " + file.string() + " does not hold a version; restore the directory from a copy"};
        }
        if (version > rocksdb_layout_version) {
            return Error{.code = ErrorCode::store_version,
                         .detail = "rocksdb: " + path + " was written by a newer version (layout " +
                                   std::to_string(version) + ", this one knows " +
                                   std::to_string(rocksdb_layout_version) + "); use that version or another directory"};
        }
        return version;
    }
    if (std::filesystem::exists(directory / "CURRENT")) {
        return Error{.code = ErrorCode::store_corrupt,
                     .detail = "rocksdb: " + path + " holds a RocksDB database but not " + layout::version_file +
                               ": it is not a Semel store; name another directory in store.rocksdb.path"};
    }
    return written_version(directory);
}

}  // namespace

Result<std::unique_ptr<Store>> open_rocksdb_store(const RocksDbOptions& options, RocksDbReport* report) {
    const auto version = check_directory(options.path);
    if (!version) return version.error();
    auto store = std::make_unique<RocksDbStore>(
        options, make_database_options(options.path, options.sync, options.block_cache_bytes));
    RocksDbReport found;
    if (auto opened = store->open(options.accept_clock, found); !opened) return opened.error();
    if (report != nullptr) *report = std::move(found);
    // Its new families are there now; nothing was asked of it yet.
    if (*version < rocksdb_layout_version) {
        if (auto written = write_version(options.path); !written) return written.error();
    }
    return std::unique_ptr<Store>(std::move(store));
}

}  // namespace semel::stores
