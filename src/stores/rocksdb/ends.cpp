// Ends of messages on their way to the index. One by one each would be an insert at the place of a
// random key of a large list; many of them are sorted and taken over as one file.
#include <pthread.h>

#include <filesystem>

#include "stores/rocksdb/store_impl.hpp"

namespace semel::stores {

namespace {

/// Fewer are put into the index like anything else: a file costs some syncs.
constexpr std::size_t file_min = 4096;
/// A lot that could be neither taken over nor put into the index is tried again after this.
constexpr seconds ends_again{1};

std::string sorted_file(const std::string& path) { return path + "/" + layout::sorted_file; }

}  // namespace

void RocksDbStore::move_ends() {
    if (broken_ || !database_) return;
    if (sorting_.valid()) {
        // A second lot does not grow without end.
        const bool ready =
            ends_.full() || sorting_.wait_for(seconds{0}) == std::future_status::ready;
        if (ready) take_sorted();
    } else if (ends_.moving() && std::chrono::steady_clock::now() >= ends_again_at_) {
        put_ends();
    }
    if (broken_ || ends_.moving() || !ends_.full()) return;
    ends_.set_out();
    sort_ends();
}

void RocksDbStore::sort_ends() {
    if (!room_for(2 * ends_.moving_bytes())) {
        ends_again_at_ = std::chrono::steady_clock::now() + ends_again;
        return;
    }
    sorting_ = std::async(std::launch::async,
                          [this, file = sorted_file(path_), places = ends_.moving_places()] {
                              ::pthread_setname_np(::pthread_self(), "semel-sort");
                              // The lot is only read until sorting_ was waited for.
                              return write_sorted(database_options_, file, Ends::sorted(places));
                          });
}

void RocksDbStore::take_sorted() {
    const bool sorted = sorting_.get().ok();
    if (sorted && !ends_.moving_superseded() && take_over(*database_, sorted_file(path_)).ok())
        return ends_.moved();
    drop_sorted();
    put_ends();
}

void RocksDbStore::put_ends() {
    for (const layout::IndexEntry& end : Ends::sorted(ends_.moving_places())) {
        batch_.Put(database_->index, slice(end.key), slice(end.value));
    }
    // Where it matters the failure is noted; the entries of `ends` stay.
    if (write_own()) return ends_.moved();
    ends_again_at_ = std::chrono::steady_clock::now() + ends_again;
}

void RocksDbStore::drop_sorted() {
    if (sorting_.valid()) static_cast<void>(sorting_.get());
    std::error_code none;
    std::filesystem::remove(sorted_file(path_), none);
}

Result<void> RocksDbStore::all_ends_to_index() {
    if (broken_) return present_failure();
    const auto finish = [this] {
        if (sorting_.valid()) {
            take_sorted();
        } else if (ends_.moving()) {
            put_ends();
        }
        return !ends_.moving();
    };
    if (!finish()) return present_failure();
    if (ends_.empty()) return {};
    ends_.set_out();
    if (ends_.moving_places().size() >= file_min) sort_ends();
    if (!finish()) return present_failure();
    return {};
}

}  // namespace semel::stores
