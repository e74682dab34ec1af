// SqlDatabase: what sql/session.hpp promises, in memory: rows, locks of others, a full disk, a
// standby, connections that break before and after the commit. For tests of what stands on
// sessions.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "core/transition.hpp"
#include "sql/session.hpp"

namespace semel::support {

using namespace core;  // NOLINT: for tests

/// Thread-safe. Outlives its sessions.
class SqlDatabase {
  public:
    enum class Call {
        connect,
        insert,
        complete,
        read,
        replace,
        park,
        unpark,
        other,
        list,
        purge,
        time
    };
    /// A statement as it arrives.
    struct Asked {
        Call call;
        std::vector<StoredKey> keys;
        sql::Ask ask;
        std::size_t number = 0;  ///< Of this kind of call, from 1.
    };
    struct Fault {
        sql::Problem problem;
        bool after_commit = false;  ///< It does its work, and only then its answer is lost.
    };

    /// Decides what becomes of a statement; no fault: it works. Called without the lock, may use
    /// the database.
    void set_script(std::function<std::optional<Fault>(const Asked&)> script) {
        const std::lock_guard lock(mutex_);
        script_ = std::move(script);
    }
    /// Another transaction holds these rows: who touches one of them in a write is contended.
    void lock(const StoredKey& key) {
        const std::lock_guard lock(mutex_);
        locked_.insert(key);
    }
    void unlock(const StoredKey& key) {
        const std::lock_guard lock(mutex_);
        locked_.erase(key);
    }
    /// A write of this row is refused, with all others of its statement.
    void refuse(const StoredKey& key) {
        const std::lock_guard lock(mutex_);
        refused_.insert(key);
    }
    void set_full(bool full) {
        const std::lock_guard lock(mutex_);
        full_ = full;
    }
    void set_standby(bool standby) {
        const std::lock_guard lock(mutex_);
        standby_ = standby;
    }
    /// No connection can be made, and those that there are are broken.
    void set_down(bool down) {
        const std::lock_guard lock(mutex_);
        down_ = down;
        if (down) ++breaks_;
    }
    /// Its clock is ahead of this machine's.
    void set_clock_ahead(std::chrono::microseconds ahead) {
        const std::lock_guard lock(mutex_);
        ahead_ = ahead;
    }
    /// Statements wait where they arrive until open_gate() is called; connections and questions for
    /// the time do not.
    void close_gate() {
        const std::lock_guard lock(mutex_);
        gate_open_ = false;
    }
    void open_gate() {
        {
            const std::lock_guard lock(mutex_);
            gate_open_ = true;
        }
        changed_.notify_all();
    }
    /// Until so many statements of the kind have arrived.
    void await_calls(Call call, std::size_t count) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return count_[call] >= count; });
    }
    [[nodiscard]] std::size_t calls(Call call) {
        const std::lock_guard lock(mutex_);
        return count_[call];
    }
    /// Everything that arrived, in order.
    [[nodiscard]] std::vector<Asked> log() {
        const std::lock_guard lock(mutex_);
        return log_;
    }

    /// Somebody else writes, or damages, a row (empty: removes it).
    void put(const StoredKey& key, std::optional<sql::Row> row) {
        const std::lock_guard lock(mutex_);
        if (row) {
            rows_[key] = std::move(*row);
        } else {
            rows_.erase(key);
        }
    }
    [[nodiscard]] std::optional<sql::Row> row(const StoredKey& key) {
        const std::lock_guard lock(mutex_);
        const auto it = rows_.find(key);
        return it == rows_.end() ? std::nullopt : std::optional(it->second);
    }
    [[nodiscard]] std::size_t turns() {
        const std::lock_guard lock(mutex_);
        std::size_t all = 0;
        for (const auto& [key, thread] : conversations_) all += thread.turns.size();
        return all;
    }

    sql::Connect connect() {
        return [this]() -> sql::Tried<std::unique_ptr<sql::Session>> {
            const auto fault = arrived({Call::connect, {}, {}, 0});
            const std::lock_guard lock(mutex_);
            if (fault) return fault->problem;
            if (down_) return sql::Problem{sql::Trouble::lost, unavailable("connection refused")};
            if (standby_)
                return sql::Problem{sql::Trouble::not_writable, unavailable("it is a standby")};
            return std::unique_ptr<sql::Session>(std::make_unique<Session>(*this, breaks_));
        };
    }

    static base::Error unavailable(const std::string& why,
                                   base::Applied applied = base::Applied::no) {
        return {.code = base::ErrorCode::store_unavailable, .applied = applied, .detail = why};
    }

  private:
    struct Thread {
        Conversation head;
        std::vector<Turn> turns;
        std::unordered_set<std::string> request_ids;
    };
    struct Parking {
        std::optional<Nonce> fence;
        std::map<std::uint64_t, std::string> messages;  // by place
    };
    using ChunkId = std::pair<FencingToken, std::uint32_t>;

    class Session final : public sql::Session {
      public:
        Session(SqlDatabase& database, std::size_t breaks) : database_(database), breaks_(breaks) {}

        sql::Tried<std::vector<sql::InsertOutcome>> insert(std::span<const sql::Fresh> rows,
                                                           const sql::Ask& ask) override {
            return run<std::vector<sql::InsertOutcome>>(
                Call::insert, keys_of(rows), ask, true, [&](StoreTime at) {
                    std::vector<sql::InsertOutcome> out;
                    for (const sql::Fresh& row : rows) out.push_back(database_.insert(row, at));
                    return out;
                });
        }
        sql::Tried<std::vector<sql::CompletionOutcome>> complete(
            std::span<const sql::Completion> rows, const sql::Ask& ask) override {
            return run<std::vector<sql::CompletionOutcome>>(
                Call::complete, keys_of(rows), ask, true, [&](StoreTime at) {
                    std::vector<sql::CompletionOutcome> out;
                    for (const sql::Completion& row : rows)
                        out.push_back(database_.complete(row, at));
                    return out;
                });
        }
        sql::Tried<sql::ReadRows> read(std::span<const StoredKey> keys, bool with_bodies,
                                       const sql::Ask& ask) override {
            return run<sql::ReadRows>(
                Call::read, {keys.begin(), keys.end()}, ask, false, [&](StoreTime at) {
                    sql::ReadRows out{.rows = {}, .at = at};
                    for (const StoredKey& key : keys) {
                        const auto it = database_.rows_.find(key);
                        out.rows.push_back(it == database_.rows_.end() ? std::nullopt
                                                                       : std::optional(it->second));
                        if (out.rows.back() && !with_bodies) out.rows.back()->body.reset();
                    }
                    return out;
                });
        }
        sql::Tried<std::vector<bool>> replace(std::span<const sql::Change> changes,
                                              const sql::Ask& ask) override {
            std::vector<StoredKey> keys;
            for (const sql::Change& change : changes) keys.push_back(change.row.key);
            return run<std::vector<bool>>(Call::replace, std::move(keys), ask, true,
                                          [&](StoreTime at) {
                                              std::vector<bool> out;
                                              for (const sql::Change& change : changes)
                                                  out.push_back(database_.replace(change, at));
                                              return out;
                                          });
        }
        sql::Tried<Decided> other(const StoredKey& key, const StoreOperation& operation,
                                  const sql::Ask& ask) override {
            const bool writes = std::holds_alternative<PutChunk>(operation) ||
                                std::holds_alternative<ClaimValue>(operation) ||
                                std::holds_alternative<ReplaceValue>(operation) ||
                                std::holds_alternative<OpenParking>(operation) ||
                                std::holds_alternative<DeleteConversation>(operation);
            return run<Decided>(Call::other, {key}, ask, writes, [&](StoreTime at) {
                return Decided{
                    std::visit([&](const auto& op) { return database_.other(key, op); }, operation),
                    at};
            });
        }
        sql::Tried<sql::ParkOutcome> park(std::span<const sql::Parking> messages,
                                          const sql::Ask& ask) override {
            return run<sql::ParkOutcome>(Call::park, lists_of(messages), ask, true,
                                         [&](StoreTime at) {
                                             sql::ParkOutcome out{.parked = {}, .at = at};
                                             for (const sql::Parking& message : messages)
                                                 out.parked.push_back(database_.park(message));
                                             return out;
                                         });
        }
        sql::Tried<StoreTime> unpark(std::span<const sql::Place> places,
                                     const sql::Ask& ask) override {
            return run<StoreTime>(Call::unpark, lists_of(places), ask, true, [&](StoreTime at) {
                for (const sql::Place& one : places)
                    database_.parkings_[one.list].messages.erase(one.place);
                return at;
            });
        }
        sql::Tried<std::vector<sql::Row>> list(const ScanFilter& filter, const std::string& cursor,
                                               std::size_t limit, const sql::Ask& ask) override {
            return run<std::vector<sql::Row>>(Call::list, {}, ask, false, [&](StoreTime at) {
                return database_.list(filter, cursor, limit, at);
            });
        }
        sql::Tried<sql::PurgeCounts> purge(std::size_t limit, const sql::Ask& ask) override {
            return run<sql::PurgeCounts>(Call::purge, {}, ask, true,
                                         [&](StoreTime at) { return database_.purge(limit, at); });
        }
        sql::Tried<StoreTime> time(const sql::Ask& ask) override {
            return run<StoreTime>(Call::time, {}, ask, false, [](StoreTime at) { return at; });
        }

      private:
        template <class Rows>
        static std::vector<StoredKey> keys_of(const Rows& rows) {
            std::vector<StoredKey> keys;
            for (const auto& row : rows) keys.push_back(row.key);
            return keys;
        }

        template <class Places>
        static std::vector<StoredKey> lists_of(const Places& places) {
            std::set<std::pair<StoredKey, std::uint64_t>> all;
            std::set<StoredKey> lists;
            for (const auto& one : places) {
                EXPECT_TRUE(all.insert({one.list, one.place}).second)
                    << "a place twice in one statement";
                lists.insert(one.list);
            }
            return {lists.begin(), lists.end()};
        }

        /// All or nothing, as one transaction.
        template <class T, class Fn>
        sql::Tried<T> run(Call call, std::vector<StoredKey> keys, const sql::Ask& ask, bool writes,
                          Fn&& fn) {
            EXPECT_FALSE(dead_) << "a session is used after it was lost";
            EXPECT_EQ(std::set<StoredKey>(keys.begin(), keys.end()).size(), keys.size())
                << "a key twice in one statement";
            const auto fault = database_.arrived({call, keys, ask, 0});
            const std::lock_guard lock(database_.mutex_);
            const auto fail = [&](sql::Trouble trouble, base::Error error) {
                dead_ = trouble == sql::Trouble::lost || trouble == sql::Trouble::not_writable;
                return sql::Problem{trouble, std::move(error)};
            };
            if (fault && !fault->after_commit)
                return fail(fault->problem.trouble, fault->problem.error);
            if (database_.down_ || breaks_ != database_.breaks_)
                return fail(sql::Trouble::lost, unavailable("the connection was closed"));
            if (writes && database_.standby_)
                return fail(sql::Trouble::not_writable, unavailable("it became a standby"));
            const auto any = [&](const std::set<StoredKey>& of) {
                return std::any_of(keys.begin(), keys.end(),
                                   [&](const StoredKey& key) { return of.contains(key); });
            };
            if (writes && any(database_.locked_))
                return fail(sql::Trouble::contended, unavailable("lock time-out"));
            if (writes && any(database_.refused_))
                return fail(sql::Trouble::refused,
                            {.code = base::ErrorCode::invalid_argument, .detail = "too large"});
            if (writes && database_.full_ && call != Call::purge)
                return fail(sql::Trouble::full, {.code = base::ErrorCode::store_full,
                                                 .detail = "no space left on the server's disk"});
            T result = fn(ask.time ? *ask.time : database_.clock());
            if (fault) return fail(fault->problem.trouble, fault->problem.error);
            return result;
        }

        SqlDatabase& database_;
        const std::size_t breaks_;
        bool dead_ = false;
    };

    StoreTime clock() const { return StoreTime{base::system_clocks().wall_us()} + ahead_; }

    std::optional<Fault> arrived(Asked asked) {
        std::function<std::optional<Fault>(const Asked&)> script;
        {
            std::unique_lock lock(mutex_);
            asked.number = ++count_[asked.call];
            log_.push_back(asked);
            changed_.notify_all();
            if (asked.call != Call::connect && asked.call != Call::time)
                changed_.wait(lock, [this] { return gate_open_; });
            script = script_;
        }
        return script ? script(asked) : std::nullopt;
    }

    sql::InsertOutcome insert(const sql::Fresh& fresh, StoreTime at) {
        if (const auto it = rows_.find(fresh.key); it != rows_.end())
            return sql::Present{it->second, at};
        if (at > fresh.not_after) return sql::Neither{};
        rows_[fresh.key] = sql::Row{.key = fresh.key,
                                    .version = at.us,
                                    .status = Status::processing,
                                    .token = {static_cast<std::uint64_t>(at.us)},
                                    .nonce = fresh.nonce,
                                    .created = at,
                                    .lease_end = at + fresh.lease,
                                    .completed = {},
                                    .expires = {},
                                    .keep_ms = fresh.keep_ms,
                                    .head = fresh.head,
                                    .done = {},
                                    .body = {}};
        return sql::Inserted{at};
    }

    sql::CompletionOutcome complete(const sql::Completion& completion, StoreTime at) {
        const auto it = rows_.find(completion.key);
        if (it == rows_.end() || it->second.status != Status::processing ||
            it->second.token != completion.token || it->second.nonce != completion.nonce)
            return std::nullopt;
        sql::Row& row = it->second;
        ++row.version;
        row.status = Status::completed;
        row.completed = at;
        row.expires = at + milliseconds{row.keep_ms};
        row.done = completion.done;
        row.body = completion.body;
        if (completion.append) append(*completion.append, at);
        sql::Row out = row;
        out.body.reset();
        return out;
    }

    bool replace(const sql::Change& change, StoreTime at) {
        const auto it = rows_.find(change.row.key);
        if (it == rows_.end() || it->second.version != change.version_seen || at > change.not_after)
            return false;
        EXPECT_EQ(change.row.version, change.version_seen + 1);
        it->second = change.row;
        if (change.append) append(*change.append, change.at);
        return true;
    }

    void append(const Append& turn, StoreTime at) {
        Thread& thread = conversations_[turn.conversation];
        if (!thread.request_ids.insert(turn.request_id).second) return;
        if (thread.turns.empty()) thread.head.created = at;
        thread.head.last_used = at;
        thread.head.turns = thread.turns.size() + 1;
        thread.turns.push_back({.number = thread.head.turns,
                                .request_id = turn.request_id,
                                .user_content = turn.user_content,
                                .answer_content = turn.answer_content,
                                .at = at,
                                .late = turn.late});
    }

    template <class Op>
    StoreOutcome other(const StoredKey&, const Op&) {
        ADD_FAILURE() << "an operation on a record is no `other`";
        return Late{};
    }
    StoreOutcome other(const StoredKey& key, const PutChunk& op) {
        chunks_[key].try_emplace({op.token, op.n}, op.bytes);
        return ChunkStored{};
    }
    StoreOutcome other(const StoredKey& key, const GetChunk& op) {
        const auto it = chunks_[key].find({op.token, op.n});
        if (it == chunks_[key].end()) return ChunkMissing{};
        return ChunkFound{it->second};
    }
    StoreOutcome other(const StoredKey& key, const GetConversation& op) {
        const auto it = conversations_.find(key);
        if (it == conversations_.end()) return ConversationMissing{};
        return ConversationFound{it->second.head, it->second.request_ids.contains(op.request_id)};
    }
    StoreOutcome other(const StoredKey& key, const GetTurns& op) {
        TurnsFound out;
        const auto it = conversations_.find(key);
        if (it == conversations_.end()) return out;
        const auto& turns = it->second.turns;
        std::size_t from = std::min<std::size_t>(op.after, turns.size());
        const std::size_t count = std::min<std::size_t>(op.limit, turns.size() - from);
        if (op.newest) from = turns.size() - count;
        out.turns.assign(turns.begin() + static_cast<std::ptrdiff_t>(from),
                         turns.begin() + static_cast<std::ptrdiff_t>(from + count));
        return out;
    }
    StoreOutcome other(const StoredKey& key, const DeleteConversation&) {
        return ConversationDeleted{conversations_.erase(key) != 0};
    }
    StoreOutcome other(const StoredKey&, const ClaimValue& op) {
        return Value{values_.try_emplace(op.name, op.value_if_absent).first->second};
    }
    StoreOutcome other(const StoredKey&, const ReplaceValue& op) {
        return Value{values_[op.name] = op.value};
    }

    StoreOutcome other(const StoredKey& key, const OpenParking& op) {
        parkings_[key].fence = op.fence;
        return ParkingOpened{};
    }
    StoreOutcome other(const StoredKey& key, const GetParked& op) {
        ParkedFound found;
        const auto& messages = parkings_[key].messages;
        for (auto at = messages.lower_bound(op.from);
             at != messages.end() && found.messages.size() < op.limit; ++at)
            found.messages.push_back({.place = at->first, .bytes = at->second});
        return found;
    }

    bool park(const sql::Parking& message) {
        Parking& list = parkings_[message.list];
        if (list.fence != message.fence) return false;
        list.messages[message.place] = message.bytes;
        return true;
    }

    static bool expired(const sql::Row& row, StoreTime at) {
        return row.expires.us != 0 && row.expires <= at;
    }

    std::vector<sql::Row> list(const ScanFilter& filter, const std::string& cursor,
                               std::size_t limit, StoreTime at) {
        std::vector<sql::Row> out;
        for (const auto& [key, row] : rows_) {
            if (out.size() == limit) break;
            if (!cursor.empty() && key.view() <= cursor) continue;
            if (expired(row, at)) continue;
            if (filter.undecided_only && row.expires.us != 0) continue;
            if (filter.dead_leases_only && (row.status != Status::processing || row.lease_end > at))
                continue;
            if (filter.status != 0 && filter.status != static_cast<std::uint8_t>(row.status))
                continue;
            out.push_back(row);
            out.back().body.reset();
        }
        return out;
    }

    sql::PurgeCounts purge(std::size_t limit, StoreTime at) {
        sql::PurgeCounts gone;
        for (auto it = rows_.begin(); it != rows_.end() && gone.records < limit;) {
            if (expired(it->second, at)) {
                chunks_.erase(it->first);
                it = rows_.erase(it);
                ++gone.records;
            } else {
                ++it;
            }
        }
        for (auto it = conversations_.begin();
             it != conversations_.end() && gone.records + gone.conversations < limit;) {
            if (it->second.head.last_used + conversation_idle_retention <= at) {
                it = conversations_.erase(it);
                ++gone.conversations;
            } else {
                ++it;
            }
        }
        return gone;
    }

    std::mutex mutex_;  // guards all below
    std::condition_variable changed_;
    std::function<std::optional<Fault>(const Asked&)> script_;
    std::set<StoredKey> locked_;
    std::set<StoredKey> refused_;
    bool full_ = false;
    bool standby_ = false;
    bool down_ = false;
    bool gate_open_ = true;
    std::chrono::microseconds ahead_{0};
    std::size_t breaks_ = 0;  ///< Sessions made before the last one are dead.
    std::map<Call, std::size_t> count_;
    std::vector<Asked> log_;
    std::map<StoredKey, sql::Row> rows_;
    std::map<StoredKey, std::map<ChunkId, std::string>> chunks_;
    std::map<StoredKey, Thread> conversations_;
    std::map<StoredKey, Parking> parkings_;
    std::map<std::string, std::string> values_;
};

}  // namespace semel::support
