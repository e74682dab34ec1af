#include "stores/rocksdb/database.hpp"

#include <rocksdb/convenience.h>
#include <rocksdb/env.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/listener.h>
#include <rocksdb/options.h>
#include <rocksdb/sst_file_writer.h>
#include <rocksdb/table.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <charconv>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <utility>

#include "stores/rocksdb/layout.hpp"
#include "stores/rocksdb/log_tail.hpp"

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
// Debian's RocksDB is not instrumented: what its threads do to each other under its own locks looks like races.
extern "C" const char* __tsan_default_suppressions() { return "called_from_lib:librocksdb.so\n"; }
#endif
#endif

namespace semel::stores {
namespace {

constexpr std::size_t index_memtable_bytes = 4U << 20;  // small: a large skip list costs more than its flushes
constexpr std::size_t answers_memtable_bytes = 8U << 20;
constexpr std::size_t other_memtable_bytes = 4U << 20;
constexpr std::size_t ends_memtable_bytes = 16U << 20;  // most of it is removed again before it is full
constexpr std::size_t meta_memtable_bytes = 256U << 10;
/// Also what bounds the time of a recovery. A family that is written rarely would else keep old logs alive.
constexpr std::uint64_t log_max_bytes = 48U << 20;
constexpr int open_files_max = 256;
/// Preallocating log files makes syncs cheaper; on a small disk it takes room that records need.
constexpr std::uint64_t preallocate_if_free_bytes = 1ULL << 30;
constexpr std::size_t warnings_kept = 16;

}  // namespace

class WarningLog final : public rocksdb::Logger {
  public:
    WarningLog() : Logger(rocksdb::InfoLogLevel::WARN_LEVEL) {}
    using Logger::Logv;
    void Logv(const char* format, va_list arguments) override {
        char line[1024];
        std::vsnprintf(line, sizeof line, format, arguments);
        const std::lock_guard lock(mutex_);
        if (lines_.size() < warnings_kept) lines_.emplace_back(line);
    }
    std::vector<std::string> take() {
        const std::lock_guard lock(mutex_);
        return std::exchange(lines_, {});
    }

  private:
    std::mutex mutex_;
    std::vector<std::string> lines_;
};

namespace {

/// Notes failures and keeps RocksDB from resuming by itself: after a failed log write its own resumption (7.8) reports success
/// and then fails every write, so the store opens the database again instead.
class FailureListener final : public rocksdb::EventListener {
  public:
    explicit FailureListener(std::shared_ptr<std::atomic<bool>> failed) : failed_(std::move(failed)) {}
    void OnBackgroundError(rocksdb::BackgroundErrorReason, rocksdb::Status* status) override {
        // A compaction without room is tried again by RocksDB and stops no writes.
        if (status->severity() >= rocksdb::Status::Severity::kHardError) *failed_ = true;
    }
    void OnErrorRecoveryBegin(rocksdb::BackgroundErrorReason, rocksdb::Status, bool* automatic) override {
        if (*failed_) *automatic = false;
    }

  private:
    std::shared_ptr<std::atomic<bool>> failed_;
};

rocksdb::DBOptions database_options(const DatabaseOptions& options, rocksdb::WALRecoveryMode recovery,
                                    bool preallocate) {
    rocksdb::DBOptions o;
    o.create_if_missing = true;
    o.create_missing_column_families = true;
    o.max_background_jobs = 2;
    o.max_open_files = open_files_max;
    o.write_buffer_manager = options.memtables;
    o.max_total_wal_size = log_max_bytes;
    o.manifest_preallocation_size = 64U << 10;
    o.allow_fallocate = preallocate;
    // One thread writes: what serves concurrent writers only costs.
    o.allow_concurrent_memtable_write = false;
    o.enable_write_thread_adaptive_yield = false;
    o.avoid_unnecessary_blocking_io = true;
    o.stats_dump_period_sec = 0;
    o.stats_persist_period_sec = 0;
    o.skip_stats_update_on_db_open = true;
    o.wal_recovery_mode = recovery;
    // Without it a log that lost its end, followed by a later log, would be a hole that nobody sees.
    o.track_and_verify_wals_in_manifest = true;
    return o;
}

rocksdb::BlockBasedTableOptions table_options(const DatabaseOptions& options) {
    rocksdb::BlockBasedTableOptions table;
    table.block_cache = options.cache;
    table.cache_index_and_filter_blocks = true;
    table.cache_index_and_filter_blocks_with_high_priority = true;
    table.pin_l0_filter_and_index_blocks_in_cache = false;
    table.format_version = 5;
    return table;
}

rocksdb::ColumnFamilyOptions family_options() {
    rocksdb::ColumnFamilyOptions base;
    base.compression = rocksdb::kNoCompression;
    base.max_write_buffer_number = 4;
    base.level_compaction_dynamic_level_bytes = false;
    return base;
}

rocksdb::ColumnFamilyOptions index_options(const DatabaseOptions& options) {
    rocksdb::ColumnFamilyOptions index = family_options();
    index.write_buffer_size = index_memtable_bytes;
    index.target_file_size_base = 8U << 20;
    index.max_bytes_for_level_base = 32U << 20;
    // An id that was never seen is the common case: filters answer it without a search or a read.
    index.memtable_whole_key_filtering = true;
    index.memtable_prefix_bloom_size_ratio = 0.1;
    rocksdb::BlockBasedTableOptions index_table = table_options(options);
    index_table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
    index_table.data_block_index_type = rocksdb::BlockBasedTableOptions::kDataBlockBinaryAndHash;
    index.table_factory.reset(rocksdb::NewBlockBasedTableFactory(index_table));
    return index;
}

std::vector<rocksdb::ColumnFamilyDescriptor> families(const DatabaseOptions& options) {
    const rocksdb::BlockBasedTableOptions table = table_options(options);
    const rocksdb::ColumnFamilyOptions base = family_options();

    rocksdb::ColumnFamilyOptions answers = base;
    answers.write_buffer_size = answers_memtable_bytes;
    answers.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));

    rocksdb::ColumnFamilyOptions others = base;
    others.write_buffer_size = other_memtable_bytes;
    others.compression = rocksdb::kLZ4Compression;
    others.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));

    rocksdb::ColumnFamilyOptions meta = base;
    meta.write_buffer_size = meta_memtable_bytes;
    meta.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));

    // What is written here goes again soon: most of it before it reaches a table.
    rocksdb::ColumnFamilyOptions claims = base;
    claims.write_buffer_size = other_memtable_bytes;
    claims.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));

    rocksdb::ColumnFamilyOptions expiries = base;
    expiries.write_buffer_size = other_memtable_bytes;
    expiries.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));

    rocksdb::ColumnFamilyOptions ends = base;
    ends.write_buffer_size = ends_memtable_bytes;
    ends.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));

    return {{layout::meta_family, meta},
            {layout::index_family, index_options(options)},
            {layout::answers_family, answers},
            {layout::chunks_family, others},
            {layout::conversations_family, others},
            {layout::claims_family, claims},
            {layout::expiries_family, expiries},
            {layout::ends_family, ends}};
}

/// RocksDB says what a recovery left out only in its log: `<file>: dropping 123 bytes; <why>`.
void read_drops(const std::vector<std::string>& warnings, Database& into) {
    for (const std::string& line : warnings) {
        constexpr std::string_view dropping = "dropping ";
        const std::size_t at = line.find(dropping);
        if (at == std::string::npos) continue;
        const char* const end = line.data() + line.size();
        std::uint64_t bytes = 0;
        const auto number = std::from_chars(line.data() + at + dropping.size(), end, bytes);
        if (number.ec != std::errc{} || !std::string_view(number.ptr, end).starts_with(" bytes")) continue;
        into.log_bytes_dropped += bytes;
        if (into.log_dropped.empty()) into.log_dropped = line;
    }
}

}  // namespace

DatabaseOptions make_database_options(std::string path, bool sync, std::size_t block_cache_bytes) {
    DatabaseOptions options{.path = std::move(path), .sync = sync, .cache = nullptr, .memtables = nullptr};
    options.cache = rocksdb::NewLRUCache(block_cache_bytes, 4, false, 0.5);
    options.memtables = std::make_shared<rocksdb::WriteBufferManager>(block_cache_bytes / 2, options.cache);
    return options;
}

Database::~Database() {
    if (!db) return;
    rocksdb::CancelAllBackgroundWork(db.get(), true);
    for (rocksdb::ColumnFamilyHandle* handle : families()) {
        if (handle != nullptr) db->DestroyColumnFamilyHandle(handle).PermitUncheckedError();
    }
    db->Close().PermitUncheckedError();
}

namespace {

base::Result<std::unique_ptr<Database>> open_once(const DatabaseOptions& options, bool read_only,
                                                  rocksdb::WALRecoveryMode recovery) {
    auto database = std::make_unique<Database>();
    auto warnings = std::make_shared<WarningLog>();
    database->background_failed = std::make_shared<std::atomic<bool>>(false);
    database->read_only = read_only;

    rocksdb::DBOptions o =
        database_options(options, recovery, free_bytes(options.path) >= preallocate_if_free_bytes);
    o.info_log = warnings;
    o.listeners.push_back(std::make_shared<FailureListener>(database->background_failed));
    // Compaction must not take the processor from requests, nor the disk from syncs.
    o.env->LowerThreadPoolCPUPriority(rocksdb::Env::LOW);
    o.env->LowerThreadPoolIOPriority(rocksdb::Env::LOW);

    std::vector<rocksdb::ColumnFamilyHandle*> handles;
    rocksdb::DB* db = nullptr;
    const rocksdb::Status status =
        read_only ? rocksdb::DB::OpenForReadOnly(o, options.path, families(options), &handles, &db)
                  : rocksdb::DB::Open(o, options.path, families(options), &handles, &db);
    const std::vector<std::string> said = warnings->take();
    if (!status.ok()) {
        base::Error error = to_error(status, options.path, "cannot open the store");
        for (const std::string& line : said) {
            if (line.find("dropping ") != std::string::npos) error.detail += "; " + line;
        }
        return error;
    }
    database->db.reset(db);
    database->meta = handles[0];
    database->index = handles[1];
    database->answers = handles[2];
    database->chunks = handles[3];
    database->conversations = handles[4];
    database->claims = handles[5];
    database->expiries = handles[6];
    database->ends = handles[7];
    read_drops(said, *database);
    return database;
}

/// The log with the highest number; empty if there is none.
std::filesystem::path newest_log(const std::string& path) {
    std::filesystem::path newest;
    std::error_code failed;
    for (const auto& entry : std::filesystem::directory_iterator(path, failed)) {
        // RocksDB pads the numbers to one width.
        if (entry.path().extension() == ".log" && entry.path().filename() > newest.filename()) newest = entry.path();
    }
    return newest;
}

bool torn_at_its_end(const base::Error& error, const std::string& path) {
    const std::filesystem::path log = newest_log(path);
    if (log.empty() || error.detail.find(log.filename().string()) == std::string::npos) return false;
    std::ifstream in(log, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
    return only_last_write_is_torn(bytes);
}

}  // namespace

base::Result<std::unique_ptr<Database>> open_database(const DatabaseOptions& options, bool read_only) {
    using Mode = rocksdb::WALRecoveryMode;
    if (!options.sync) return open_once(options, read_only, Mode::kPointInTimeRecovery);
    auto opened = open_once(options, read_only, Mode::kTolerateCorruptedTailRecords);
    // RocksDB tolerates a log that ends too early, but not one whose last write has holes, as a power cut also leaves it.
    if (!opened && opened.error().code == base::ErrorCode::store_corrupt &&
        torn_at_its_end(opened.error(), options.path)) {
        return open_once(options, read_only, Mode::kPointInTimeRecovery);
    }
    return opened;
}

rocksdb::Status forget_old_values(Database& database) {
    // The log holds all families: it can go when none of them needs it any more.
    rocksdb::Status status = database.db->Flush({}, database.families());
    if (!status.ok()) return status;
    rocksdb::CompactRangeOptions all;
    all.bottommost_level_compaction = rocksdb::BottommostLevelCompaction::kForce;
    status = database.db->CompactRange(all, database.meta, nullptr, nullptr);
    if (!status.ok()) return status;
    // RocksDB removes files at its leisure, but those that are not needed any more now when deletions are allowed again.
    status = database.db->DisableFileDeletions();
    return status.ok() ? database.db->EnableFileDeletions(true) : status;
}

rocksdb::Status write_sorted(const DatabaseOptions& options, const std::string& file, const std::vector<layout::IndexEntry>& entries) {
    rocksdb::SstFileWriter writer(rocksdb::EnvOptions(), rocksdb::Options(rocksdb::DBOptions(), index_options(options)));
    rocksdb::Status status = writer.Open(file);
    for (const layout::IndexEntry& entry : entries) {
        if (!status.ok()) return status;
        status = writer.Put({entry.key.data(), entry.key.size()}, {entry.value.data(), entry.value.size()});
    }
    return status.ok() ? writer.Finish() : status;
}

rocksdb::Status take_over(Database& database, const std::string& file) {
    rocksdb::IngestExternalFileOptions options;
    options.move_files = true;
    options.write_global_seqno = false;
    return database.db->IngestExternalFile(database.index, {file}, options);
}

base::Error to_error(const rocksdb::Status& status, const std::string& path, const std::string& what) {
    const std::string text = status.ToString();
    const std::string head = "rocksdb: " + what + " in " + path + ": ";
    base::Error error;
    if (text.find("LOCK:") != std::string::npos || text.find("lock hold by current process") != std::string::npos) {
        error.code = base::ErrorCode::store_locked;
        error.detail = head + "another process holds the directory; stop it, or ask it through its admin address (" +
                       text + ")";
    } else if (status.IsNoSpace() || text.find("No space left") != std::string::npos) {
        error.code = base::ErrorCode::store_full;
        error.detail = head + "the disk is full; free space (" + text + ")";
    } else if (status.IsCorruption()) {
        error.code = base::ErrorCode::store_corrupt;
        error.detail = head + "its files contradict themselves; restore the directory from a copy, or move it away (" +
                       text + ")";
    } else if (status.IsInvalidArgument()) {
        error.code = base::ErrorCode::store_corrupt;
        error.detail = head + "it is not a Semel store of this version (" + text + ")";
    } else {
        error.code = base::ErrorCode::io;
        error.detail = head + text;
    }
    return error;
}

std::uint64_t free_bytes(const std::string& path) {
    struct statvfs info {};
    if (::statvfs(path.c_str(), &info) != 0) return std::numeric_limits<std::uint64_t>::max();
    return static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize;
}

}  // namespace semel::stores
