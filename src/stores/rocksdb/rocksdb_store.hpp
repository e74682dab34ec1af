// The embedded store: one directory, one process, one writer thread over RocksDB.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "base/time.hpp"
#include "core/store.hpp"

namespace semel::stores {

/// What the store did since it was opened, for metrics and measuring. Thread-safe.
struct RocksDbCounters {
    std::atomic<std::uint64_t> items{0};          ///< Operations applied.
    std::atomic<std::uint64_t> writes{0};         ///< Write batches handed to RocksDB.
    std::atomic<std::uint64_t> syncs{0};          ///< Those that waited for the disk.
    std::atomic<std::uint64_t> disk_lookups{0};   ///< Records asked for that were not in memory.
    std::atomic<std::uint64_t> refused_full{0};   ///< Write batches refused or failed: no space or a failing disk.
    std::atomic<std::uint64_t> recoveries{0};     ///< Times the database was opened again after a failed write.
};

struct RocksDbOptions {
    std::string path;  ///< Made if missing (its parent must exist or be makeable). Holds nothing but this store.
    /// true: an answer means the disk has it. false: it survives the process, not the machine.
    bool sync = true;
    /// Blocks, filters, table readers and memtables together.
    std::size_t block_cache_bytes = 32U << 20;
    /// Decided records kept in memory, with their bodies, least recently used out first. Undecided ones always are.
    std::size_t hot_bytes = 8U << 20;
    /// Moves the store's clock to the wall clock once, however far, in either direction.
    bool accept_clock = false;
    base::Clock* clock = nullptr;         ///< Null: the machine's. Must outlive the store.
    RocksDbCounters* counters = nullptr;  ///< Null: not wanted. Must outlive the store.
};

/// What opening found; for the log and `doctor`.
struct RocksDbReport {
    bool created = false;         ///< The directory was empty.
    bool closed_cleanly = true;   ///< The last process stopped the store; else it was killed or the machine stopped.
    bool machine_restarted = false;      ///< Not closed cleanly, and the machine was started since.
    std::uint64_t leases_killed = 0;     ///< PROCESSING records found: their leases are over.
    std::uint64_t undecided = 0;         ///< Records loaded into memory.
    std::uint64_t log_bytes_dropped = 0; ///< Of the log, behind the last consistent point.
    /// The wall clock against the store's persisted one, in microseconds; > 0: the wall clock is ahead.
    std::int64_t wall_ahead_us = 0;
    bool clock_kept = false;   ///< The wall clock was not believed: the store goes on with its own time.
    bool clock_moved = false;  ///< accept_clock moved it.
    std::vector<std::string> notices;  ///< The above in sentences, only what somebody should read.
};

/// Opens or creates the store. `report` (may be null) is filled if it succeeds.
/// Errors: store_locked (another process has the directory), store_version (written by a newer version), store_corrupt
/// (names the file), store_full, io (the directory cannot be made, read or written). An error leaves the directory as it was,
/// apart from files that RocksDB recovered.
base::Result<std::unique_ptr<core::Store>> open_rocksdb_store(const RocksDbOptions& options,
                                                              RocksDbReport* report = nullptr);

/// The layout this version writes and the newest it reads. An older directory is read as it is, and is of this layout from its
/// first opening on: older versions refuse it then.
inline constexpr unsigned rocksdb_layout_version = 3;

}  // namespace semel::stores
