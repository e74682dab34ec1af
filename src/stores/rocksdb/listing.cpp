// What the embedded store lists: from memory what is undecided, else from the disk.
#include <algorithm>

#include "core/record_codec.hpp"
#include "stores/rocksdb/store_impl.hpp"

namespace semel::stores {

namespace {

bool expired(const Record& record, StoreTime at) { return record.expires.us != 0 && record.expires <= at; }

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

}  // namespace

Result<ScanPage> RocksDbStore::scan(const ScanFilter& filter, const std::string& cursor, std::size_t limit) {
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

template <class Take>
std::vector<std::pair<StoredKey, RecordPtr>> RocksDbStore::first_resident(const std::string& cursor, std::size_t limit, Take take) {
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

Result<ScanPage> RocksDbStore::scan_resident(const ScanFilter& filter, const std::string& cursor, std::size_t limit) {
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

Result<ScanPage> RocksDbStore::scan_all(const ScanFilter& filter, const std::string& cursor, std::size_t limit) {
    ScanPage page{.records = {}, .next = {}, .at = now()};
    std::vector<std::size_t> live;  // positions of undecided records: memory knows them better than the disk
    // Before the index is looked at: what leaves `claims` or `ends` meanwhile is found in both, not in neither.
    using Outside = std::vector<std::pair<StoredKey, RecordPtr>>;
    auto outside = on_writer<Outside>([&]() -> Result<Outside> {
        Outside found = first_resident(cursor, limit + 1, [&](const Resident& one) {
            return one.claims != 0 && matches(filter, *one.record, page.at);
        });
        const std::size_t claims = found.size();
        for (const layout::IndexEntry& end : ends_.behind(cursor)) {
            auto record = decoded(end.value.substr(1));
            if (!record) return record.error();
            if (!matches(filter, **record, page.at)) continue;
            found.emplace_back(*layout::stored_key(end.key), std::move(*record));
            if (found.size() > claims + limit) break;
        }
        std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
        return found;
    });
    if (!outside) return outside.error();
    auto other = outside->begin();
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
            while (room && other != outside->end() && other->first < *key) {
                room = add(other->first, other->second);
                ++other;
            }
            if (!room) break;
            if (other != outside->end() && other->first == *key) {
                // The index may hold what was before the claim or the end; what has the token of a claim came of it.
                const bool newer = other->second->token > (*record)->token ||
                                   (!resident(*other->second) && other->second->token == (*record)->token);
                if (newer) *record = other->second;
                ++other;
            }
            if (matches(filter, **record, page.at)) room = add(*key, *record);
        }
        for (; room && other != outside->end(); ++other) room = add(other->first, other->second);
        if (!it->status().ok()) return to_error(it->status(), path_, "cannot list records");
    }
    if (live.empty()) return page;
    auto refreshed = on_writer<bool>([&]() -> Result<bool> {
        for (const std::size_t i : live) {
            if (const Resident* one = resident_.find(page.records[i].first)) {
                page.records[i].second = without_body(one->record);
            } else if (const auto end = ends_.find(page.records[i].first)) {
                auto record = decoded(end->substr(1));
                if (!record) return record.error();
                page.records[i].second = std::move(*record);
            }
        }
        return true;
    });
    if (!refreshed) return refreshed.error();
    std::erase_if(page.records, [&](const auto& entry) { return !matches(filter, *entry.second, page.at); });
    return page;
}

}  // namespace semel::stores
