// The writer: takes what was submitted, decides in memory, writes one batch, syncs once, answers all.
#include <pthread.h>

#include <algorithm>

#include "base/fault_point.hpp"
#include "stores/rocksdb/store_impl.hpp"

namespace semel::stores {

namespace {

/// A write batch is closed at either of these; the next one takes what is left.
constexpr std::size_t write_batch_max_items = 1024;
constexpr std::size_t write_batch_max_bytes = 4U << 20;
/// With so many acquires at hand their claims are written together, as one entry of `claims`; with so many messages' ends these
/// as one entry of `ends`.
constexpr std::size_t together_min = 8;
/// Of entries that still hold an open claim, and how many; then the oldest one's open claims are written to the index.
constexpr std::size_t claims_max_bytes = 8U << 20;
constexpr std::size_t claims_max_groups = 1024;
/// Persisted ahead of the time in use, so that not every grant must write the clock: what a crash may cost in time.
constexpr seconds clock_reserve{10};
/// An idle store writes its clock this often: else a long idle time would look like a jump of the wall clock.
constexpr seconds clock_idle_write{30};
constexpr seconds writer_tick{1};
/// With more than this left the free space is not asked for at each write, but at this interval.
constexpr std::uint64_t disk_plenty_bytes = 256U << 20;
constexpr seconds free_asked_every{1};
constexpr std::chrono::milliseconds recovery_first_pause{100};
constexpr std::chrono::milliseconds recovery_last_pause{2000};

}  // namespace

void RocksDbStore::run() {
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

void RocksDbStore::tick() {
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
    move_ends();
}

void RocksDbStore::close() {
    if (broken_ || !database_ || free_bytes(path_) < disk_floor_bytes) return drop_sorted();
    begin_group();
    // Else the next opening does it.
    static_cast<void>(all_ends_to_index());
    drop_sorted();
    if (broken_) return;
    rocksdb::WriteBatch closing;
    remove_over(closing);
    std::string time;
    layout::put_u64(time, static_cast<std::uint64_t>(clock_->now().us));
    closing.Put(database_->meta, slice(layout::clock_key), time);
    closing.Put(database_->meta, slice(layout::closed_key), Slice("1"));
    // Without it the next opening only says that the store was not closed.
    database_->db->Write(synced(), &closing).PermitUncheckedError();
}

void RocksDbStore::apply_all(std::vector<Job>& jobs) {
    jobs_ = &jobs;
    claims_together_ = count_of<core::Acquire>(jobs) >= together_min;
    ends_together_ = count_of<core::Complete>(jobs) >= together_min;
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

template <class Op>
std::size_t RocksDbStore::count_of(const std::vector<Job>& jobs) {
    std::size_t count = 0;
    for (const Job& job : jobs) {
        count += static_cast<std::size_t>(std::count_if(job.items.begin(), job.items.end(), [](const Item& item) {
            return std::holds_alternative<Op>(item.operation);
        }));
    }
    return count;
}

void RocksDbStore::begin_group() {
    batch_.Clear();
    changed_.clear();
    claims_.clear();
    claimed_.clear();
    ended_.clear();
    expiring_.clear();
    folded_.clear();
    dirty_chunks_.clear();
    dirty_conversations_.clear();
    opened_.clear();
    parked_.clear();
    tentative_.clear();
    group_items_ = 0;
    needs_sync_ = false;
    at_ = clock_->now();
}

bool RocksDbStore::commit() {
    bool written = true;
    if (batch_.Count() > 0 || !claims_.empty() || !ended_.empty()) {
        base::fault_point("store.write.before");
        const std::uint64_t claims = claims_.empty() ? 0 : next_number_++;
        const std::uint64_t ends = ended_.empty() ? 0 : next_number_++;
        put_group(claims, ends);
        const Result<void> result = write();
        written = result.has_value();
        if (written) {
            settle_group(claims, ends);
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

void RocksDbStore::put_group(std::uint64_t claims, std::uint64_t ends) {
    if (claims != 0) batch_.Put(database_->claims, layout::claims_key(claims), claims_);
    if (ends != 0) batch_.Put(database_->ends, layout::claims_key(ends), ended_);
    for (const auto& [expires, keys] : expiring_) {
        batch_.Put(database_->expiries, layout::encode(layout::AnswerKey{expires, next_number_++}), keys);
    }
    if (claim_groups_.bytes() > claims_max_bytes || claim_groups_.count() > claims_max_groups) {
        fold(claim_groups_.all().begin()->first);
    }
}

void RocksDbStore::settle_group(std::uint64_t claims, std::uint64_t ends) {
    std::size_t open = 0;
    const char* const ended = ends == 0 ? nullptr : ends_.add_entry(ends, std::move(ended_));
    changed_.each([&](const StoredKey& key, Changed& changed) {
        Resident* known = resident_.find(key);
        if (known == nullptr) hot_.erase(key);
        if (known != nullptr && known->claims != 0) claim_groups_.closed(known->claims);
        // What was undecided has no end there.
        if (changed.decided_before && !ends_.empty()) ends_.erase(key);
        if (changed.place == Place::ends) ends_.add(ended + changed.end_at);
        if (!resident(*changed.record)) {
            if (known != nullptr) resident_.erase(key);
            // Few of those in the index are asked for again, and it is read as fast as they are remembered.
            if (changed.place == Place::answers) hot_.put(key, std::move(changed.record));
            return;
        }
        if (known == nullptr) known = &resident_[key];
        const bool claimed = changed.place == Place::claims;
        known->claims = claimed ? claims : 0;
        open += claimed ? 1 : 0;
        known->record = std::move(changed.record);
    });
    if (claims != 0) {
        claim_groups_.add(claims, {.keys = std::move(claimed_), .bytes = claims_.size(), .open = open});
        claimed_ = {};
    }
    ended_ = {};
}

void RocksDbStore::fold(std::uint64_t number) {
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

bool RocksDbStore::room_for(std::uint64_t bytes) {
    const auto now = std::chrono::steady_clock::now();
    if (free_left_ < disk_plenty_bytes + bytes || now - free_asked_at_ > free_asked_every) {
        free_left_ = free_bytes(path_);
        free_asked_at_ = now;
    }
    if (free_left_ < disk_floor_bytes + bytes) return false;
    free_left_ -= bytes;
    return true;
}

Result<void> RocksDbStore::write() {
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
    remove_over(batch_);
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
    ends_.over_removed();
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

void RocksDbStore::remove_over(rocksdb::WriteBatch& into) const {
    for (const std::uint64_t number : claim_groups_.over()) into.Delete(database_->claims, layout::claims_key(number));
    for (const std::uint64_t number : ends_.over()) into.Delete(database_->ends, layout::claims_key(number));
}

Result<bool> RocksDbStore::write_own() {
    if (batch_.Count() == 0) return true;
    const Result<void> result = write();
    begin_group();
    if (!result) return result.error();
    return true;
}

void RocksDbStore::write_own_logged() {
    // Noted in failure_ where it matters.
    if (const Result<bool> written = write_own(); !written) clock_reserved_ = {};
}

rocksdb::WriteOptions RocksDbStore::synced() {
    rocksdb::WriteOptions options;
    options.sync = true;
    return options;
}

void RocksDbStore::put_clock(rocksdb::WriteBatch& into, StoreTime at) {
    clock_reserved_ = at + clock_reserve;
    clock_written_ = at;
    std::string time;
    layout::put_u64(time, static_cast<std::uint64_t>(clock_reserved_.us));
    into.Put(database_->meta, slice(layout::clock_key), time);
}

Error RocksDbStore::full() const {
    return {.code = ErrorCode::store_full,
            .applied = Applied::no,
            .retry_after = recovery_last_pause,
            .detail = "rocksdb: less than " + std::to_string(disk_floor_bytes) + " bytes are free in " + path_ +
                      "; free space, claims work again by themselves"};
}

Error RocksDbStore::unreadable() const {
    return {.code = ErrorCode::store_unavailable,
            .detail = "rocksdb: " + path_ + " could not be opened again after a failed write; free space or repair "
                      "the disk, it is tried again by itself"};
}

Error RocksDbStore::corrupt(const std::string& what) const {
    return {.code = ErrorCode::store_corrupt,
            .detail = "rocksdb: " + path_ + ": " + what + "; restore the directory from a copy"};
}

Error RocksDbStore::present_failure() {
    const std::lock_guard lock(failure_mutex_);
    return failure_.value_or(full());
}

void RocksDbStore::fail_with(Error error) {
    broken_ = true;
    if (error.code == ErrorCode::io) error.code = ErrorCode::store_unavailable;
    error.retry_after = recovery_last_pause;
    counters_.refused_full.fetch_add(1, std::memory_order_relaxed);
    recovery_pause_ = recovery_first_pause;
    recovery_at_ = std::chrono::steady_clock::now() + recovery_pause_;
    const std::lock_guard lock(failure_mutex_);
    failure_ = std::move(error);
}

void RocksDbStore::try_recovery() {
    if (std::chrono::steady_clock::now() < recovery_at_) return;
    recovery_pause_ = std::min(recovery_pause_ * 2, recovery_last_pause);
    recovery_at_ = std::chrono::steady_clock::now() + recovery_pause_;
    // Opening writes what the memtables held.
    if (free_bytes(path_) < 2 * disk_floor_bytes) return;
    {
        const std::unique_lock lock(database_mutex_);
        drop_sorted();
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

void RocksDbStore::fold_claims_of(const std::vector<StoredKey>& leaving) {
    if (leaving.empty() || claim_groups_.empty()) return;
    KeyTable<bool> wanted;
    for (const StoredKey& key : leaving) wanted[key] = true;
    for (const auto& [number, group] : claim_groups_.all()) {
        const bool holds = std::any_of(group.keys.begin(), group.keys.end(),
                                       [&](const StoredKey& key) { return wanted.contains(key); });
        if (holds) fold(number);
    }
}

}  // namespace semel::stores
