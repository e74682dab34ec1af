// The callers' side of the embedded store, and its directory.
#include "stores/rocksdb/rocksdb_store.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "stores/rocksdb/store_impl.hpp"

namespace semel::stores {

namespace {

/// What a caller writes itself (see write_here), at most.
constexpr std::size_t quick_batch_max_items = 128;
constexpr std::size_t quick_body_max_bytes = 32 * 1024;

}  // namespace

std::string boot_id() {
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::string id;
    std::getline(file, id);
    return id;
}

Result<void> RocksDbStore::open(bool accept_clock, RocksDbReport& report) {
    auto opened = open_database(database_options_, false);
    if (!opened) return opened.error();
    database_ = std::move(*opened);
    drop_sorted();
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

void RocksDbStore::submit(std::vector<Item> items, BatchDone done) {
    Job job{.items = std::move(items), .done = std::move(done), .run = {}, .results = {}};
    if (!sync_ && quick(job.items) && write_here(job)) return;
    enqueue(std::move(job));
}

Durability RocksDbStore::durability() const {
    return {.survives_process_crash = true,
            .survives_power_cut = sync_,
            .survives_failover = true,
            .summary = sync_ ? "Every acknowledged record is on the disk (synced) before it is acknowledged."
                             : "Acknowledged records survive a crash of the process; a power cut loses the last "
                               "seconds of them and leaves a consistent state."};
}

Result<void> RocksDbStore::health() {
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

void RocksDbStore::stop() {
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

bool RocksDbStore::quick(const std::vector<Item>& items) {
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

bool RocksDbStore::write_here(Job& job) {
    // A `done` that submits again runs inside the writer's work.
    if (writing_thread_.load(std::memory_order_relaxed) == std::this_thread::get_id()) return false;
    std::unique_lock writing(writing_mutex_, std::defer_lock);
    {
        const std::lock_guard lock(mutex_);
        if (stopping_ || !queue_.empty() || !writing.try_lock()) return false;
    }
    if (ends_.full()) return false;  // they are to be moved, which takes longer
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

bool RocksDbStore::enqueue(Job job) {
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

// ---------------------------------------------------------------- the directory

namespace {

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
