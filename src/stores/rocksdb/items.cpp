// One operation of a batch: what it finds, decides and leaves to be written.
#include <algorithm>

#include "core/record_codec.hpp"
#include "stores/rocksdb/store_impl.hpp"

namespace semel::stores {

namespace {

/// A larger record (a turn's, say) is written to the index.
constexpr std::size_t claim_max_bytes = 512;
/// The record of a decided message of up to this size lies in the index, a larger one among the answers.
constexpr std::size_t index_record_max_bytes = 256;

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

std::string bytes_of(const Nonce& fence) { return {fence.bytes.begin(), fence.bytes.end()}; }

}  // namespace

template <class Op>
Result<StoreOutcome> RocksDbStore::step_on_record(const StoredKey& key, Op& operation) {
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
                if (*found && !resident(**found)) changed.decided_before = true;
                changed.end_at = ended_.size();
                changed.place = put_record(key, *transition.record, granted);
                changed.record = std::move(transition.record);
            }
            item_depends_ = true;
            break;
    }
    return std::visit([](auto& outcome) -> StoreOutcome { return std::move(outcome); }, transition.outcome);
}

Result<StoreOutcome> RocksDbStore::step(const StoredKey& key, PutChunk operation) {
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

Result<StoreOutcome> RocksDbStore::step(const StoredKey& key, GetChunk operation) {
    if (dirty_chunks_.contains(key)) commit();
    auto bytes = read(database_ ? database_->chunks : nullptr,
                      layout::chunk_key(key, operation.token, operation.n));
    if (!bytes) return bytes.error();
    if (!*bytes) return StoreOutcome{ChunkMissing{}};
    return StoreOutcome{ChunkFound{std::move(**bytes)}};
}

Result<StoreOutcome> RocksDbStore::step(const StoredKey& key, GetConversation operation) {
    if (dirty_conversations_.contains(key)) commit();
    auto head = read_head(key);
    if (!head) return head.error();
    if (!*head) return StoreOutcome{ConversationMissing{}};
    auto holds = holds_id(key, operation.request_id);
    if (!holds) return holds.error();
    return StoreOutcome{ConversationFound{**head, !operation.request_id.empty() && *holds}};
}

Result<StoreOutcome> RocksDbStore::step(const StoredKey& key, GetTurns operation) {
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

Result<StoreOutcome> RocksDbStore::step(const StoredKey& key, DeleteConversation) {
    if (dirty_conversations_.contains(key)) commit();
    auto head = read_head(key);
    if (!head) return head.error();
    if (!*head) return StoreOutcome{ConversationDeleted{false}};
    if (auto marked = delete_conversation(key); !marked) return marked.error();
    dirty_conversations_.insert(key);
    item_depends_ = true;
    return StoreOutcome{ConversationDeleted{true}};
}

Result<StoreOutcome> RocksDbStore::step(const StoredKey&, ClaimValue operation) {
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

Result<StoreOutcome> RocksDbStore::step(const StoredKey&, ReplaceValue operation) {
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

Result<StoreOutcome> RocksDbStore::step(const StoredKey& key, OpenParking operation) {
    if (!database_) return unreadable();
    batch_.Put(database_->conversations, layout::fence_key(key), bytes_of(operation.fence));
    opened_.insert(key);
    needs_sync_ = true;
    item_depends_ = true;
    return StoreOutcome{ParkingOpened{}};
}

Result<StoreOutcome> RocksDbStore::step(const StoredKey& key, Park operation) {
    if (!database_) return unreadable();
    if (opened_.contains(key)) commit();
    auto fence = read(database_->conversations, layout::fence_key(key));
    if (!fence) return fence.error();
    if (!*fence || **fence != bytes_of(operation.fence)) return StoreOutcome{ParkingLost{}};
    batch_.Put(database_->conversations, layout::parked_key(key, operation.place), operation.bytes);
    parked_.insert(key);
    needs_sync_ = true;
    item_depends_ = true;
    return StoreOutcome{Parked{}};
}

Result<StoreOutcome> RocksDbStore::step(const StoredKey& key, GetParked operation) {
    if (!database_) return unreadable();
    if (parked_.contains(key)) commit();
    ParkedFound found;
    const std::unique_ptr<rocksdb::Iterator> it(database_->db->NewIterator({}, database_->conversations));
    const std::string prefix = layout::parked_prefix(key);
    for (it->Seek(layout::parked_key(key, operation.from));
         it->Valid() && view(it->key()).starts_with(prefix) && found.messages.size() < operation.limit; it->Next()) {
        const std::string_view place = view(it->key()).substr(prefix.size());
        if (place.size() != 8) return corrupt("the key of a parked message has the wrong length");
        found.messages.push_back({.place = layout::get_u64(place), .bytes = std::string(view(it->value()))});
    }
    if (!it->status().ok()) return to_error(it->status(), path_, "cannot read parked messages");
    return StoreOutcome{std::move(found)};
}

Result<StoreOutcome> RocksDbStore::step(const StoredKey& key, Unpark operation) {
    if (!database_) return unreadable();
    batch_.Delete(database_->conversations, layout::parked_key(key, operation.place));
    parked_.insert(key);
    item_depends_ = true;
    return StoreOutcome{Unparked{}};
}

Result<Decided> RocksDbStore::apply(Item& item) {
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

Result<RecordPtr> RocksDbStore::find(const StoredKey& key, bool& dirty) {
    if (const Changed* changed = changed_.find(key)) {
        dirty = true;
        return changed->record;
    }
    if (const Resident* one = resident_.find(key)) return one->record;
    if (RecordPtr hot = hot_.find(key)) return hot;
    if (!ends_.empty()) {
        if (const auto end = ends_.find(key)) return decoded(end->substr(1));
    }
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

Result<RecordPtr> RocksDbStore::read_indexed(const ReadOptions& options, const StoredKey& key, std::string_view value) const {
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

Result<RecordPtr> RocksDbStore::decoded(std::string_view bytes) {
    auto record = decode_record(bytes);
    if (!record) return record.error();
    return RecordPtr{std::make_shared<const Record>(std::move(*record))};
}

void RocksDbStore::put_in_index(const StoredKey& key, const Record& record) {
    value_.assign(1, layout::index_holds_record);
    encode_record(record, true, value_);
    batch_.Put(database_->index, slice(key.view()), value_);
}

RocksDbStore::Place RocksDbStore::put_record(const StoredKey& key, const Record& record, bool granted) {
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
            keys_expiring(record.expires) += key.view();
            if (ends_together_ && record.status == Status::completed) {
                layout::put_claim(ended_, key, value_);
                return Place::ends;
            }
            batch_.Put(database_->index, slice(key.view()), value_);
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

std::string& RocksDbStore::keys_expiring(StoreTime at) {
    for (auto& [expires, keys] : expiring_) {
        if (expires == at) return keys;
    }
    return expiring_.emplace_back(at, std::string{}).second;
}

Result<std::optional<Conversation>> RocksDbStore::read_head(const StoredKey& conversation) {
    auto bytes = read(database_ ? database_->conversations : nullptr, layout::head_key(conversation));
    if (!bytes) return bytes.error();
    if (!*bytes) return std::optional<Conversation>{};
    auto head = layout::decode_conversation(**bytes);
    if (!head) return corrupt("the head of a conversation cannot be read");
    return head;
}

Result<bool> RocksDbStore::holds_id(const StoredKey& conversation, const std::string& request_id) {
    auto found = read(database_ ? database_->conversations : nullptr, layout::id_key(conversation, request_id));
    if (!found) return found.error();
    return found->has_value();
}

Result<void> RocksDbStore::append_once(Append turn) {
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

Result<void> RocksDbStore::delete_conversation(const StoredKey& conversation) {
    rocksdb::ColumnFamilyHandle* family = database_->conversations;
    batch_.Delete(family, layout::head_key(conversation));
    if (auto marked = delete_range(family, layout::turn_prefix(conversation)); !marked) return marked;
    return delete_range(family, layout::id_prefix(conversation));
}

Result<void> RocksDbStore::delete_range(rocksdb::ColumnFamilyHandle* family, const std::string& prefix) {
    ReadOptions options;
    options.fill_cache = false;
    const std::unique_ptr<rocksdb::Iterator> it(database_->db->NewIterator(options, family));
    for (it->Seek(prefix); it->Valid() && view(it->key()).starts_with(prefix); it->Next()) {
        batch_.Delete(family, it->key());
    }
    if (!it->status().ok()) return to_error(it->status(), path_, "cannot read what is to be deleted");
    return {};
}

Result<std::optional<std::string>> RocksDbStore::read(rocksdb::ColumnFamilyHandle* family, std::string_view key) {
    if (family == nullptr) return unreadable();
    std::string value;
    const rocksdb::Status status = database_->db->Get({}, family, slice(key), &value);
    if (status.IsNotFound()) return std::optional<std::string>{};
    if (!status.ok()) return to_error(status, path_, "cannot read");
    return std::optional<std::string>(std::move(value));
}

}  // namespace semel::stores
