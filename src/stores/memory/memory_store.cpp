// Maps under one mutex; every decision is core::decide's.
#include "stores/memory/memory_store.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

#include "core/transition.hpp"

namespace semel::stores {
namespace {

using namespace core;

class MemoryStore final : public Store {
  public:
    explicit MemoryStore(base::Clock& clock)
        : clock_(clock), wall_at_start_us_(clock.wall_us()), steady_at_start_(clock.steady()) {}

    void submit(std::vector<Item> items, BatchDone done) override {
        BatchResults results;
        results.reserve(items.size());
        {
            const std::lock_guard lock(mutex_);
            for (Item& item : items) {
                if (stopped_) {
                    results.emplace_back(stopping());
                    continue;
                }
                const StoreTime at = now();
                StoreOutcome outcome = std::visit(
                    [&](auto& operation) { return apply(item.key, std::move(operation), at); },
                    item.operation);
                results.emplace_back(Decided{std::move(outcome), at});
            }
        }
        done(std::move(results));
    }

    base::Result<ScanPage> scan(const ScanFilter& filter, const std::string& cursor,
                                std::size_t limit) override {
        StoredKey after;
        if (!cursor.empty()) {
            if (cursor.size() != after.bytes.size()) {
                return base::Error{.code = base::ErrorCode::invalid_argument,
                                   .detail =
                                       "memory: scan cursor is not one of this store's; start "
                                       "again without a cursor"};
            }
            std::copy(cursor.begin(), cursor.end(), after.bytes.begin());
        }
        const std::lock_guard lock(mutex_);
        if (stopped_) return stopping();
        ScanPage page{.records = {}, .next = {}, .at = now()};
        auto it = cursor.empty() ? records_.begin() : records_.upper_bound(after);
        for (; it != records_.end(); ++it) {
            if (!matches(filter, *it->second, page.at)) continue;
            if (page.records.size() == std::max<std::size_t>(limit, 1)) {
                page.next = std::string(page.records.back().first.view());
                break;
            }
            page.records.emplace_back(it->first, without_body(it->second));
        }
        return page;
    }

    base::Result<std::size_t> purge(std::size_t limit) override {
        const std::lock_guard lock(mutex_);
        if (stopped_) return stopping();
        const StoreTime at = now();
        std::size_t gone = 0;
        for (auto it = records_.begin(); it != records_.end() && gone < limit;) {
            if (expired(*it->second, at)) {
                chunks_.erase(it->first);
                it = records_.erase(it);
                ++gone;
            } else {
                ++it;
            }
        }
        for (auto it = conversations_.begin(); it != conversations_.end() && gone < limit;) {
            if (it->second.head.last_used + conversation_idle_retention <= at) {
                it = conversations_.erase(it);
                ++gone;
            } else {
                ++it;
            }
        }
        drop_orphaned_chunks();
        return gone;
    }

    [[nodiscard]] StoreTime now() const override {
        const auto elapsed = std::chrono::duration_cast<std::chrono::microseconds>(
            clock_.steady() - steady_at_start_);
        return StoreTime{wall_at_start_us_} + elapsed;
    }

    [[nodiscard]] Durability durability() const override {
        return {.survives_process_crash = false,
                .survives_power_cut = false,
                .survives_failover = false,
                .summary = "Records live in this process's memory and are gone when it ends."};
    }

    base::Result<void> health() override {
        const std::lock_guard lock(mutex_);
        if (stopped_) return stopping();
        return {};
    }

    void stop() override {
        const std::lock_guard lock(mutex_);
        stopped_ = true;
    }

  private:
    struct Thread {
        Conversation head;
        std::vector<Turn> turns;
        std::unordered_set<std::string> request_ids;
    };
    using Chunks = std::map<std::uint32_t, std::string>;  // by number
    struct Parking {
        Nonce fence;
        std::map<std::uint64_t, std::string> messages;  // by place
    };

    static base::Error stopping() {
        return {.code = base::ErrorCode::stopping,
                .detail = "memory: the store is stopped; nothing was done"};
    }
    static bool expired(const Record& record, StoreTime at) {
        return record.expires.us != 0 && record.expires <= at;
    }
    static bool matches(const ScanFilter& filter, const Record& record, StoreTime at) {
        if (expired(record, at)) return false;
        if (filter.undecided_only && !undecided(record)) return false;
        if (filter.dead_leases_only &&
            (record.status != Status::processing || record.lease_end > at)) {
            return false;
        }
        return filter.status == 0 || filter.status == static_cast<std::uint8_t>(record.status);
    }
    static RecordPtr without_body(const RecordPtr& record) {
        if (!record->answer || !record->answer->body) return record;
        auto copy = std::make_shared<Record>(*record);
        copy->answer->body = nullptr;
        return copy;
    }

    /// Every operation on a record.
    template <class Op>
    StoreOutcome apply(const StoredKey& key, Op operation, StoreTime at) {
        const auto it = records_.find(key);
        const RecordPtr found = it == records_.end() ? nullptr : it->second;
        Transition transition = decide(found, std::move(operation), at);
        if (transition.write != Transition::Write::none) {
            records_[key] = std::move(transition.record);
            if (transition.append) append(std::move(*transition.append), at);
        }
        return std::visit([](auto& outcome) -> StoreOutcome { return std::move(outcome); },
                          transition.outcome);
    }

    StoreOutcome apply(const StoredKey& key, PutChunk operation, StoreTime) {
        // A chunk that is there stays: a repeated write brings the same bytes, a late one must not
        // change what is completed.
        chunks_[key][operation.token].try_emplace(operation.n, std::move(operation.bytes));
        return ChunkStored{};
    }

    StoreOutcome apply(const StoredKey& key, GetChunk operation, StoreTime) {
        const auto of_key = chunks_.find(key);
        if (of_key == chunks_.end()) return ChunkMissing{};
        const auto of_token = of_key->second.find(operation.token);
        if (of_token == of_key->second.end()) return ChunkMissing{};
        const auto chunk = of_token->second.find(operation.n);
        if (chunk == of_token->second.end()) return ChunkMissing{};
        return ChunkFound{chunk->second};
    }

    StoreOutcome apply(const StoredKey& key, GetConversation operation, StoreTime) {
        const auto it = conversations_.find(key);
        if (it == conversations_.end()) return ConversationMissing{};
        const bool holds =
            !operation.request_id.empty() && it->second.request_ids.contains(operation.request_id);
        return ConversationFound{it->second.head, holds};
    }

    StoreOutcome apply(const StoredKey& key, GetTurns operation, StoreTime) {
        const auto it = conversations_.find(key);
        if (it == conversations_.end()) return TurnsFound{};
        const std::vector<Turn>& turns = it->second.turns;
        // Numbers have no gaps, so the turn with number n lies at n - 1.
        auto from =
            static_cast<std::size_t>(std::min<std::uint64_t>(operation.after, turns.size()));
        const std::size_t count = std::min<std::size_t>(operation.limit, turns.size() - from);
        if (operation.newest) from = turns.size() - count;
        const auto begin = turns.begin() + static_cast<std::ptrdiff_t>(from);
        return TurnsFound{{begin, begin + static_cast<std::ptrdiff_t>(count)}};
    }

    StoreOutcome apply(const StoredKey& key, DeleteConversation, StoreTime) {
        return ConversationDeleted{conversations_.erase(key) != 0};
    }

    StoreOutcome apply(const StoredKey&, ClaimValue operation, StoreTime) {
        const auto [it, stored] =
            values_.try_emplace(std::move(operation.name), std::move(operation.value_if_absent));
        return Value{it->second};
    }

    StoreOutcome apply(const StoredKey&, ReplaceValue operation, StoreTime) {
        values_[std::move(operation.name)] = operation.value;
        return Value{std::move(operation.value)};
    }

    StoreOutcome apply(const StoredKey& key, OpenParking operation, StoreTime) {
        parkings_[key].fence = operation.fence;
        return ParkingOpened{};
    }

    StoreOutcome apply(const StoredKey& key, Park operation, StoreTime) {
        const auto it = parkings_.find(key);
        if (it == parkings_.end() || it->second.fence != operation.fence) return ParkingLost{};
        it->second.messages[operation.place] = std::move(operation.bytes);
        return Parked{};
    }

    StoreOutcome apply(const StoredKey& key, GetParked operation, StoreTime) {
        ParkedFound found;
        const auto it = parkings_.find(key);
        if (it == parkings_.end()) return found;
        const auto& messages = it->second.messages;
        for (auto at = messages.lower_bound(operation.from);
             at != messages.end() && found.messages.size() < operation.limit; ++at)
            found.messages.push_back({.place = at->first, .bytes = at->second});
        return found;
    }

    StoreOutcome apply(const StoredKey& key, Unpark operation, StoreTime) {
        if (const auto it = parkings_.find(key); it != parkings_.end())
            it->second.messages.erase(operation.place);
        return Unparked{};
    }

    void append(Append turn, StoreTime at) {
        Thread& thread = conversations_[turn.conversation];
        if (!thread.request_ids.insert(turn.request_id).second) return;
        if (thread.turns.empty()) thread.head.created = at;
        thread.head.last_used = at;
        thread.head.turns = thread.turns.size() + 1;
        thread.turns.push_back({.number = thread.head.turns,
                                .request_id = std::move(turn.request_id),
                                .user_content = std::move(turn.user_content),
                                .answer_content = std::move(turn.answer_content),
                                .at = at,
                                .late = turn.late});
    }

    /// Chunks of tokens that are no longer current can never be completed.
    void drop_orphaned_chunks() {
        for (auto it = chunks_.begin(); it != chunks_.end();) {
            const auto record = records_.find(it->first);
            if (record == records_.end()) {
                it = chunks_.erase(it);
                continue;
            }
            std::erase_if(it->second, [&](const auto& of_token) {
                return of_token.first != record->second->token;
            });
            it = it->second.empty() ? chunks_.erase(it) : std::next(it);
        }
    }

    base::Clock& clock_;
    const std::int64_t wall_at_start_us_;
    const base::SteadyTime steady_at_start_;

    std::mutex mutex_;  // guards all below
    bool stopped_ = false;
    std::map<StoredKey, RecordPtr> records_;  // ordered: scan pages go by key
    std::map<StoredKey, std::map<FencingToken, Chunks>> chunks_;
    std::map<StoredKey, Thread> conversations_;
    std::map<StoredKey, Parking> parkings_;
    std::map<std::string, std::string> values_;
};

}  // namespace

std::unique_ptr<Store> make_memory_store(base::Clock& clock) {
    return std::make_unique<MemoryStore>(clock);
}

}  // namespace semel::stores
