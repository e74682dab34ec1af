// What the embedded store removes, in small steps: expired records, idle conversations, chunks that nobody can ask for.
#include <algorithm>

#include "core/record_codec.hpp"
#include "stores/rocksdb/store_impl.hpp"

namespace semel::stores {

namespace {

/// Expired records, conversations or chunk groups removed in one step of the writer.
constexpr std::size_t purge_step_items = 256;
/// What one purge looks at to find idle conversations and orphaned chunks; the next goes on behind it.
constexpr std::size_t purge_look_max = 10'000;
/// Chunks outlive their record by this, for readers that began before it expired.
constexpr std::chrono::hours chunk_grace{1};

}  // namespace

Result<std::size_t> RocksDbStore::purge(std::size_t limit) {
    const std::lock_guard one_purge(purge_mutex_);
    std::size_t gone = 0;
    if (auto step = purge_records(limit, gone); !step) return step.error();
    if (auto step = purge_expiries(limit, gone); !step) return step.error();
    if (auto step = purge_conversations(limit, gone); !step) return step.error();
    if (auto step = purge_chunks(); !step) return step.error();
    return gone;
}

Result<void> RocksDbStore::purge_records(std::size_t limit, std::size_t& gone) {
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

Result<void> RocksDbStore::purge_expiries(std::size_t limit, std::size_t& gone) {
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

Result<void> RocksDbStore::purge_conversations(std::size_t limit, std::size_t& gone) {
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

Result<void> RocksDbStore::purge_chunks() {
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

Result<std::size_t> RocksDbStore::remove_records(const std::vector<Candidate>& candidates) {
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

Result<std::size_t> RocksDbStore::remove_expired(const std::vector<Expired>& entries) {
    if (!database_) return unreadable();
    // Those of them that `ends` still holds would come back.
    const auto on_its_way = [&](const StoredKey& key) { return ends_.find(key).has_value(); };
    const bool some = std::any_of(entries.begin(), entries.end(), [&](const Expired& entry) {
        return std::any_of(entry.keys.begin(), entry.keys.end(), on_its_way);
    });
    if (some || ends_.superseded()) {
        if (auto moved = all_ends_to_index(); !moved) return moved.error();
    }
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

Result<void> RocksDbStore::retire_chunks(const Candidate& candidate) {
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

Result<bool> RocksDbStore::is_orphaned(const ChunkGroup& group) {
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

}  // namespace semel::stores
