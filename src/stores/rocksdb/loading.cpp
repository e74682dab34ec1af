// What the embedded store finds at its opening: the clock, undecided records, claims.
#include "core/record_codec.hpp"
#include "stores/rocksdb/store_impl.hpp"

namespace semel::stores {

Result<void> RocksDbStore::start_clock(bool accept, RocksDbReport& report) {
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

Result<void> RocksDbStore::load(RocksDbReport* report) {
    ReadOptions options;
    options.fill_cache = false;
    options.readahead_size = 2U << 20;
    if (auto ends = load_ends(); !ends) return ends;
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
    ends_.clear();

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

Result<void> RocksDbStore::load_ends() {
    constexpr std::size_t write_max_bytes = 4U << 20;
    rocksdb::WriteBatch moved;
    const auto write = [&]() -> Result<void> {
        if (moved.Count() == 0) return {};
        const rocksdb::Status status = database_->db->Write(synced(), &moved);
        moved.Clear();
        if (!status.ok()) return to_error(status, path_, "cannot write to the store");
        return {};
    };
    const std::unique_ptr<rocksdb::Iterator> it(database_->db->NewIterator({}, database_->ends));
    for (it->SeekToFirst(); it->Valid(); it->Next()) {
        for (std::string_view bytes = view(it->value()); !bytes.empty();) {
            const auto end = layout::take_claim(bytes);
            if (!end || end->record.empty()) return corrupt("an entry of the ends cannot be read");
            auto record = decode_record(end->record.substr(1));
            if (!record) return record.error();
            auto index = read(database_->index, end->key.view());
            if (!index) return index.error();
            if (*index) {
                auto newer = read_indexed({}, end->key, **index);
                if (!newer) return newer.error();
                // What lies under the token of an end is the end, or what was before it.
                if ((*newer)->token > record->token) continue;
                if ((*newer)->token == record->token && !resident(**newer)) continue;
            }
            moved.Put(database_->index, slice(end->key.view()), slice(end->record));
        }
        moved.Delete(database_->ends, it->key());
        if (moved.GetDataSize() < write_max_bytes) continue;
        if (auto written = write(); !written) return written;
    }
    if (!it->status().ok()) return to_error(it->status(), path_, "cannot read the ends");
    return write();
}

template <class Take>
Result<void> RocksDbStore::load_claims(KeyTable<Resident>& found, Take take) {
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

}  // namespace semel::stores
