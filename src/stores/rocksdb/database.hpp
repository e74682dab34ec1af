// RocksDB as this store uses it: opened with fixed options, its errors said in Semel's words. Private to the leaf.
#pragma once

#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/write_buffer_manager.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "stores/rocksdb/layout.hpp"

namespace semel::stores {

/// Collects what RocksDB warns of; RocksDB's own log file is not written. Thread-safe.
class WarningLog;

/// What all openings of one store share.
struct DatabaseOptions {
    std::string path;
    bool sync = true;
    std::shared_ptr<rocksdb::Cache> cache;
    std::shared_ptr<rocksdb::WriteBufferManager> memtables;
};

/// The budget of `block_cache_bytes` as one cache that memtables are charged to.
DatabaseOptions make_database_options(std::string path, bool sync, std::size_t block_cache_bytes);

/// An open database. Destroying it closes it; nothing may use it then.
struct Database {
    Database() = default;
    Database(const Database&) = delete;
    Database& operator=(const Database&) = delete;
    ~Database();
    [[nodiscard]] std::vector<rocksdb::ColumnFamilyHandle*> families() const {
        return {meta, index, answers, chunks, conversations, claims, expiries, ends};
    }

    std::unique_ptr<rocksdb::DB> db;
    rocksdb::ColumnFamilyHandle* meta = nullptr;
    rocksdb::ColumnFamilyHandle* index = nullptr;
    rocksdb::ColumnFamilyHandle* answers = nullptr;
    rocksdb::ColumnFamilyHandle* chunks = nullptr;
    rocksdb::ColumnFamilyHandle* conversations = nullptr;
    rocksdb::ColumnFamilyHandle* claims = nullptr;
    rocksdb::ColumnFamilyHandle* expiries = nullptr;
    rocksdb::ColumnFamilyHandle* ends = nullptr;
    /// A flush or compaction failed: no write will succeed until the database is opened again.
    std::shared_ptr<std::atomic<bool>> background_failed;
    std::uint64_t log_bytes_dropped = 0;  ///< By the recovery of this opening.
    std::string log_dropped;              ///< RocksDB's words about it.
    bool read_only = false;
};

/// Opens or creates. read_only: replays the log into memory and writes nothing, for a full disk. Errors as
/// open_rocksdb_store.
base::Result<std::unique_ptr<Database>> open_database(const DatabaseOptions& options, bool read_only);

/// Removes what was overwritten in `meta` from the database's files: from its tables, and from the log by writing out every
/// family. Takes as long as that; no snapshot may be held.
rocksdb::Status forget_old_values(Database& database);

/// Writes `entries`, whose keys ascend, as a file that take_over() can make part of the index, and syncs it. Any thread.
rocksdb::Status write_sorted(const DatabaseOptions& options, const std::string& file, const std::vector<layout::IndexEntry>& entries);
/// Makes the file part of the index, over everything that this holds of its keys. Durable when it returns; the file is gone then.
rocksdb::Status take_over(Database& database, const std::string& file);

/// Says what failed in Semel's words. `what` is the sentence's beginning.
base::Error to_error(const rocksdb::Status& status, const std::string& path, const std::string& what);

/// Free bytes for this process where `path` lies; the largest number if nobody can tell.
std::uint64_t free_bytes(const std::string& path);

}  // namespace semel::stores
