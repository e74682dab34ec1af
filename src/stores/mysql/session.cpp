#include "stores/mysql/session.hpp"

#include <mysqld_error.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <set>
#include <tuple>

#include "stores/mysql/statements.hpp"

namespace semel::stores::mysql {
namespace {

using namespace sql;
using core::Conversation;
using core::Decided;
using core::Turn;
using std::chrono::steady_clock;

// What a statement may take besides its wait for locks, by the bytes it carries: a slow disk must
// not look like a lock.
constexpr std::size_t kStepBytes = 1 << 20;
constexpr milliseconds kTimePerStep{100};
// MariaDB limits the whole statement and not only its wait: what gets no processor for a while must
// not fail for that.
constexpr milliseconds kStatementTimeMin{30};
// A reading statement of one row does not need more; a session's limit below it is lifted for it.
constexpr milliseconds kReadTimeMin{100};
// Rows of one transaction of a purge.
constexpr std::size_t kPurgeRows = 64;
// (key, token) pairs whose chunks one purge looks at.
constexpr std::size_t kPurgeChunkOwners = 512;
// A ROLLBACK, when the operation's own deadline may be over.
constexpr milliseconds kRollbackWithin{1000};

using Results = std::vector<ResultRows>;

Problem corrupt(base::Error error) { return {Trouble::refused, std::move(error)}; }

Problem unexpected() {
    return corrupt(
        {.code = base::ErrorCode::store_corrupt,
         .detail = "the server answered a statement in a shape that no table of the store has"});
}

template <class Number>
Number number(const std::optional<std::string>& text) {
    Number value{};
    if (text) std::from_chars(text->data(), text->data() + text->size(), value);
    return value;
}

std::string seconds(milliseconds time) {
    return std::to_string(static_cast<double>(time.count()) / 1000);
}

// Statements that are sent together.
class Packet {
  public:
    void add(std::string_view statement) {
        if (!text_.empty()) text_ += ';';
        text_ += statement;
    }
    [[nodiscard]] const std::string& text() const { return text_; }

  private:
    std::string text_;
};

class MysqlSession final : public Session {
  public:
    explicit MysqlSession(std::unique_ptr<Connection> connection)
        : connection_(std::move(connection)) {}

    Tried<std::vector<InsertOutcome>> insert(std::span<const Fresh> rows, const Ask& ask) override;
    Tried<std::vector<CompletionOutcome>> complete(std::span<const Completion> rows,
                                                   const Ask& ask) override;
    Tried<ReadRows> read(std::span<const StoredKey> keys, bool with_bodies,
                         const Ask& ask) override;
    Tried<std::vector<bool>> replace(std::span<const Change> changes, const Ask& ask) override;
    Tried<Decided> other(const StoredKey& key, const core::StoreOperation& operation,
                         const Ask& ask) override;
    Tried<ParkOutcome> park(std::span<const Parking> messages, const Ask& ask) override;
    Tried<StoreTime> unpark(std::span<const Place> places, const Ask& ask) override;
    Tried<std::vector<Row>> list(const core::ScanFilter& filter, const std::string& cursor,
                                 std::size_t limit, const Ask& ask) override;
    Tried<PurgeCounts> purge(std::size_t limit, const Ask& ask) override;
    Tried<StoreTime> time(const Ask& ask) override;

  private:
    [[nodiscard]] bool mariadb() const { return connection_->server().mariadb; }

    // Statements that lock: each waits for others no longer than ask.lock_wait. `transaction`: all
    // or nothing.
    Tried<Results> write(std::string_view statements, bool transaction, const Ask& ask,
                         Failure* failed = nullptr);
    // A statement that waits for nobody; `with_clock`: behind one that asks for the time.
    Tried<Results> look(const std::string& select, const Ask& ask, bool with_clock = false);
    Tried<ReadRows> read_one(const StoredKey& key, bool with_body, const Ask& ask);
    Tried<Decided> open_parking(const StoredKey& list, const Nonce& fence, const Ask& ask);
    // One table's deletion of a purge: how many of `keys` are gone.
    template <class Statement>
    Tried<std::size_t> remove(std::span<const StoredKey> keys, const Ask& ask, Statement statement);
    Tried<std::size_t> remove_chunks(const Ask& ask);

    std::unique_ptr<Connection> connection_;
    milliseconds statement_time_{0};  // max_statement_time of the session; 0: none.
    std::string chunk_cursor_;        // Where the next purge looks for chunks without a record.
};

Tried<Results> MysqlSession::write(std::string_view statements, bool transaction, const Ask& ask,
                                   Failure* failed) {
    const SteadyTime deadline = steady_clock::now() + ask.deadline;
    std::string packet;
    packet.reserve(statements.size() + 96);
    std::size_t before = 0;
    // On MySQL a lock is waited for a second (innodb_lock_wait_timeout): it has nothing finer for
    // writes.
    const milliseconds wanted = std::max(ask.lock_wait, kStatementTimeMin) +
                                kTimePerStep * static_cast<int>(statements.size() / kStepBytes);
    if (mariadb() && wanted != statement_time_) {
        packet += "SET max_statement_time=" + seconds(wanted) + ";";
        ++before;
    }
    if (transaction) {
        packet += "START TRANSACTION;";
        ++before;
    }
    packet += statements;
    if (transaction) packet += ";COMMIT";

    Failure failure;
    auto answer = connection_->run(packet, deadline, &failure);
    if (failed != nullptr) *failed = failure;
    if (auto* problem = std::get_if<Problem>(&answer)) {
        if (!connection_->usable()) return std::move(*problem);
        // The server may have run the SET or not.
        statement_time_ = milliseconds{-1};
        if (!transaction || failure.statement < before || failure.number == ER_NET_PACKET_TOO_LARGE)
            return std::move(*problem);
        // After a deadlock there is nothing to roll back, after a time-out there is. If this fails
        // the connection is gone, and the transaction with it.
        (void)connection_->run("ROLLBACK", steady_clock::now() + kRollbackWithin);
        return std::move(*problem);
    }
    if (mariadb()) statement_time_ = wanted;
    Results results = std::move(std::get<0>(answer));
    results.erase(results.begin(), results.begin() + static_cast<std::ptrdiff_t>(before));
    return results;
}

Tried<Results> MysqlSession::look(const std::string& select, const Ask& ask, bool with_clock) {
    std::string packet;
    if (with_clock) packet = "SELECT " + clock_sql(ask.time) + ";";
    // The session's limit is for waits; a long answer may take longer.
    if (mariadb()) packet += "SET STATEMENT max_statement_time=" + seconds(ask.deadline) + " FOR ";
    return connection_->run(packet + select, steady_clock::now() + ask.deadline);
}

Tried<ReadRows> MysqlSession::read_one(const StoredKey& key, bool with_body, const Ask& ask) {
    std::string select = read_one_sql(key, with_body, clock_sql(ask.time));
    const bool short_limit = statement_time_.count() != 0 && statement_time_ < kReadTimeMin;
    auto answer = short_limit ? look(select, ask)
                              : connection_->run(select, steady_clock::now() + ask.deadline);
    if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
    Results& all = std::get<0>(answer);
    if (all.size() != 1 || all[0].rows.size() != 1) return unexpected();
    Values& values = all[0].rows[0];
    ReadRows result{.rows = {std::nullopt}, .at = {number<std::int64_t>(values.back())}};
    if (!values.front()) return result;
    auto row = row_of_values(std::move(values));
    if (!row) return corrupt(row.error());
    result.rows.front() = std::move(*row);
    return result;
}

Tried<std::vector<InsertOutcome>> MysqlSession::insert(std::span<const Fresh> rows,
                                                       const Ask& ask) {
    std::vector<std::size_t> order(rows.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(),
              [&](std::size_t a, std::size_t b) { return rows[a].key < rows[b].key; });
    std::vector<Fresh> sorted;
    std::map<StoredKey, std::size_t> places;
    for (const std::size_t i : order) {
        sorted.push_back(rows[i]);
        places[rows[i].key] = i;
    }

    // A repeated acquire finds the row that it made before. MariaDB tells both apart by the time of
    // the insertion, in the statement itself; where the time is told, or is that of another
    // statement, it takes a look before.
    const bool by_time = mariadb() && !ask.time;
    std::string statements = insert_sql(sorted, ask.time, mariadb());
    if (!by_time) statements = owned_sql(sorted) + ";" + statements;
    Failure failure;
    auto answer = write(statements, false, ask, &failure);
    if (failure.number == ER_BAD_NULL_ERROR) {
        if (rows.size() == 1) return std::vector<InsertOutcome>{Neither{}};
        // One of them came too late, which is rare: each by itself.
        std::vector<InsertOutcome> outcomes;
        for (const Fresh& row : rows) {
            auto alone = insert({&row, 1}, ask);
            if (auto* problem = std::get_if<Problem>(&alone)) return std::move(*problem);
            outcomes.push_back(std::move(std::get<0>(alone)[0]));
        }
        return outcomes;
    }
    if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
    Results& all = std::get<0>(answer);
    std::set<std::string> owned_before;
    if (!by_time) {
        for (const Values& values : all[0].rows) owned_before.insert(values[0].value_or(""));
    }
    std::vector<InsertOutcome> outcomes(rows.size(), Neither{});
    for (Values& values : all.back().rows) {
        const StoreTime at{number<std::int64_t>(values.back())};
        const StoreTime inserted_at{number<std::int64_t>(values[record_columns_count])};
        auto row = row_of_values(std::move(values));
        if (!row) return corrupt(row.error());
        const auto place = places.find(row->key);
        if (place == places.end()) return unexpected();
        const bool ours = row->nonce == rows[place->second].nonce &&
                          row->status == Status::processing && row->version == row->created.us;
        const bool now = by_time ? row->created == inserted_at
                                 : !owned_before.contains(std::string(row->key.view()));
        if (ours && now) {
            outcomes[place->second] = Inserted{row->created};
        } else {
            outcomes[place->second] = Present{std::move(*row), at};
        }
    }
    return outcomes;
}

// Adds what appends the turns of those whose UPDATE, directly before its remember_sql(), did.
class Turns {
  public:
    // Behind the UPDATE. `at`: an SQL expression.
    void follow(Packet& packet, const core::Append& turn, const std::string& at) {
        packet.add(remember_sql(turns_.size(), at));
        turns_.push_back(&turn);
    }
    // Behind all UPDATEs, in the conversations' order: whoever locks several locks them alike.
    void add_to(Packet& packet) const {
        std::vector<std::size_t> order(turns_.size());
        for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
        std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
            return std::tie(turns_[a]->conversation, a) < std::tie(turns_[b]->conversation, b);
        });
        for (const std::size_t slot : order) packet.add(append_sql(slot, *turns_[slot]));
    }

  private:
    std::vector<const core::Append*> turns_;
};

Tried<std::vector<CompletionOutcome>> MysqlSession::complete(std::span<const Completion> rows,
                                                             const Ask& ask) {
    std::vector<const Completion*> sorted;
    for (const Completion& one : rows) sorted.push_back(&one);
    std::sort(sorted.begin(), sorted.end(),
              [](const Completion* a, const Completion* b) { return a->key < b->key; });
    std::vector<const Completion*> bare, with_turn;
    std::vector<StoredKey> keys;
    for (const Completion* one : sorted) {
        keys.push_back(one->key);
        (one->append ? with_turn : bare).push_back(one);
    }

    Packet packet;
    Turns turns;
    std::size_t results = 0;
    const bool many = bare.size() > 1;
    if (many) {
        packet.add(keep_clock_sql(ask.time));
        packet.add(complete_many_sql(bare));
        results = 2;
        bare.clear();
    }
    // Whose own UPDATE says whether it did: in which result.
    std::map<StoredKey, std::size_t> updates;
    bare.insert(bare.end(), with_turn.begin(), with_turn.end());
    for (const Completion* one : bare) {
        packet.add(complete_sql(*one, ask.time));
        updates[one->key] = results++;
        if (!one->append) continue;
        std::string at = "(SELECT completed FROM semel_records WHERE k=";
        append_key(at, one->key);
        turns.follow(packet, *one->append, at + ")");
        ++results;
    }
    packet.add(read_sql(keys, false, many ? "@semel_at" : "0"));
    const std::size_t rows_at = results;
    turns.add_to(packet);

    // One UPDATE commits by itself: what the SELECT then sees is the row as it is a moment later.
    const bool transaction = rows.size() > 1 || !with_turn.empty();
    auto answer = write(packet.text(), transaction, ask);
    if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
    Results& all = std::get<0>(answer);
    StoreTime completed_at;
    std::map<StoredKey, Row> found;
    for (Values& values : all[rows_at].rows) {
        completed_at.us = number<std::int64_t>(values.back());
        auto row = row_of_values(std::move(values));
        if (!row) return corrupt(row.error());
        found.emplace(row->key, std::move(*row));
    }
    std::vector<CompletionOutcome> outcomes(rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const Completion& one = rows[i];
        const auto it = found.find(one.key);
        const bool there = it != found.end() && it->second.status == Status::completed &&
                           it->second.token == one.token && it->second.nonce == one.nonce &&
                           it->second.done == one.done;
        const auto update = updates.find(one.key);
        if (update != updates.end()) {
            if (all[update->second].affected != 1) continue;
            // Removed or granted anew within that moment, which only a retention of nothing allows.
            if (!there)
                return Problem{
                    Trouble::lost,
                    {.code = base::ErrorCode::store_unavailable,
                     .applied = base::Applied::unknown,
                     .detail = "a record was completed, and was gone before it could be read"}};
        }
        // Not in this statement, but by its owner earlier: that is decided anew.
        if (update == updates.end() && (!there || it->second.completed != completed_at)) continue;
        outcomes[i] = std::move(it->second);
    }
    return outcomes;
}

Tried<ReadRows> MysqlSession::read(std::span<const StoredKey> keys, bool with_bodies,
                                   const Ask& ask) {
    if (keys.size() == 1) return read_one(keys.front(), with_bodies, ask);
    // The clock comes along even if there is no row.
    auto answer = look(read_sql(keys, with_bodies, clock_sql(ask.time)), ask, true);
    if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
    Results& all = std::get<0>(answer);
    if (all.size() != 2 || all[0].rows.size() != 1) return unexpected();
    ReadRows result{.rows = {}, .at = {number<std::int64_t>(all[0].rows[0][0])}};
    std::map<StoredKey, Row> found;
    for (Values& values : all[1].rows) {
        auto row = row_of_values(std::move(values));
        if (!row) return corrupt(row.error());
        found.emplace(row->key, std::move(*row));
    }
    for (const StoredKey& key : keys) {
        const auto it = found.find(key);
        result.rows.emplace_back();
        if (it != found.end()) result.rows.back() = std::move(it->second);
    }
    return result;
}

Tried<std::vector<bool>> MysqlSession::replace(std::span<const Change> changes, const Ask& ask) {
    std::vector<std::size_t> order(changes.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return changes[a].row.key < changes[b].row.key;
    });
    Packet packet;
    Turns turns;
    std::vector<std::size_t> updates;
    std::size_t results = 0;
    for (const std::size_t i : order) {
        packet.add(replace_sql(changes[i], ask.time));
        updates.push_back(results++);
        if (!changes[i].append) continue;
        turns.follow(packet, *changes[i].append, std::to_string(changes[i].at.us));
        ++results;
    }
    turns.add_to(packet);
    // One statement commits by itself.
    auto answer = write(packet.text(), changes.size() > 1 || changes[0].append, ask);
    if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
    std::vector<bool> replaced(changes.size());
    for (std::size_t n = 0; n < order.size(); ++n)
        replaced[order[n]] = std::get<0>(answer)[updates[n]].affected == 1;
    return replaced;
}

Tried<Decided> MysqlSession::other(const StoredKey& key, const core::StoreOperation& operation,
                                   const Ask& ask) {
    const std::string clock = "SELECT " + clock_sql(ask.time);
    // The results of the statements, behind that of the clock.
    const auto asked = [&](const std::string& select) { return look(select, ask, true); };
    const auto done = [&](const std::string& statements, bool transaction) {
        return write(clock + ";" + statements, transaction, ask);
    };
    const auto decided = [](Tried<Results>&& answer, auto outcome_of) -> Tried<Decided> {
        if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
        Results& all = std::get<0>(answer);
        if (all.size() < 2 || all[0].rows.size() != 1) return unexpected();
        const StoreTime at{number<std::int64_t>(all[0].rows[0][0])};
        return Decided{outcome_of(all), at};
    };
    using core::StoreOutcome;

    if (const auto* put = std::get_if<core::PutChunk>(&operation)) {
        return decided(done(put_chunk_sql(key, *put, ask.time), false),
                       [](Results&) -> StoreOutcome { return core::ChunkStored{}; });
    }
    if (const auto* get = std::get_if<core::GetChunk>(&operation)) {
        return decided(asked(get_chunk_sql(key, *get)), [](Results& all) -> StoreOutcome {
            if (all[1].rows.empty()) return core::ChunkMissing{};
            return core::ChunkFound{std::move(all[1].rows[0][0]).value_or("")};
        });
    }
    if (const auto* get = std::get_if<core::GetConversation>(&operation)) {
        return decided(
            asked(get_conversation_sql(key, get->request_id)), [&](Results& all) -> StoreOutcome {
                if (all[1].rows.empty()) return core::ConversationMissing{};
                const Values& head = all[1].rows[0];
                return core::ConversationFound{{.created = {number<std::int64_t>(head[0])},
                                                .last_used = {number<std::int64_t>(head[1])},
                                                .turns = number<std::uint64_t>(head[2])},
                                               !get->request_id.empty() && head[3] == "1"};
            });
    }
    if (const auto* get = std::get_if<core::GetTurns>(&operation)) {
        return decided(asked(get_turns_sql(key, *get)), [&](Results& all) -> StoreOutcome {
            core::TurnsFound found;
            for (Values& values : all[1].rows) {
                found.turns.push_back({.number = number<std::uint64_t>(values[0]),
                                       .request_id = std::move(values[1]).value_or(""),
                                       .user_content = std::move(values[2]).value_or(""),
                                       .answer_content = std::move(values[3]).value_or(""),
                                       .at = {number<std::int64_t>(values[4])},
                                       .late = values[5] == "1"});
            }
            if (get->newest) std::reverse(found.turns.begin(), found.turns.end());
            return found;
        });
    }
    if (std::holds_alternative<core::DeleteConversation>(operation)) {
        return decided(done(delete_conversation_sql(key), true), [](Results& all) -> StoreOutcome {
            return core::ConversationDeleted{all[1].affected != 0};
        });
    }
    if (const auto* open = std::get_if<core::OpenParking>(&operation))
        return open_parking(key, open->fence, ask);
    if (const auto* get = std::get_if<core::GetParked>(&operation)) {
        return decided(asked(get_parked_sql(key, *get)), [](Results& all) -> StoreOutcome {
            core::ParkedFound found;
            found.messages.reserve(all[1].rows.size());
            for (Values& values : all[1].rows)
                found.messages.push_back({.place = number<std::uint64_t>(values[0]),
                                          .bytes = std::move(values[1]).value_or("")});
            return found;
        });
    }
    if (const auto* claim = std::get_if<core::ClaimValue>(&operation)) {
        return decided(done(claim_value_sql(*claim), false), [](Results& all) -> StoreOutcome {
            return core::Value{all[2].rows.empty() ? std::string{}
                                                   : std::move(all[2].rows[0][0]).value_or("")};
        });
    }
    const auto* replaced = std::get_if<core::ReplaceValue>(&operation);
    SEMEL_ASSERT(replaced != nullptr, "operations on records have statements of their own");
    return decided(done(replace_value_sql(*replaced), false),
                   [&](Results&) -> StoreOutcome { return core::Value{replaced->value}; });
}

Tried<Decided> MysqlSession::open_parking(const StoredKey& list, const Nonce& fence,
                                          const Ask& ask) {
    auto looked = look(fence_sql(list), ask);
    if (auto* problem = std::get_if<Problem>(&looked)) return std::move(*problem);
    const auto& owner = std::get<0>(looked).back().rows;
    const std::optional<std::string> seen = owner.empty() ? std::nullopt : owner[0][0];
    auto answer = write("SELECT " + clock_sql(ask.time) + ";" + open_parking_sql(list, seen, fence),
                        true, ask);
    if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
    const Results& all = std::get<0>(answer);
    if (all.size() < 3 || all[0].rows.size() != 1 || all[2].rows.size() != 1) return unexpected();
    if (all[2].rows[0][0] != bytes_of(fence))
        return Problem{Trouble::contended,
                       {.code = base::ErrorCode::store_unavailable,
                        .detail = "another took the list of parked messages over meanwhile"}};
    return Decided{core::ParkingOpened{}, {number<std::int64_t>(all[0].rows[0][0])}};
}

// In the order of lists and places.
template <class T>
std::vector<const T*> in_place_order(std::span<const T> all) {
    std::vector<const T*> sorted;
    sorted.reserve(all.size());
    for (const T& one : all) sorted.push_back(&one);
    std::sort(sorted.begin(), sorted.end(), [](const T* a, const T* b) {
        return std::tie(a->list, a->place) < std::tie(b->list, b->place);
    });
    return sorted;
}

Tried<ParkOutcome> MysqlSession::park(std::span<const Parking> messages, const Ask& ask) {
    const auto sorted = in_place_order(messages);
    Packet packet;
    packet.add("SELECT " + clock_sql(ask.time));
    // Held until the commit, so that they cannot be taken over between two of the messages. In
    // which result.
    std::map<StoredKey, std::size_t> lists;
    for (const Parking* one : sorted) {
        if (!lists.try_emplace(one->list, lists.size() + 1).second) continue;
        packet.add(hold_fence_sql(one->list));
    }
    for (const Parking* one : sorted) packet.add(park_sql(*one));
    auto answer = write(packet.text(), true, ask);
    if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
    const Results& all = std::get<0>(answer);
    if (all.size() <= lists.size() || all[0].rows.size() != 1) return unexpected();
    ParkOutcome outcome{.parked = {}, .at = {number<std::int64_t>(all[0].rows[0][0])}};
    for (const Parking& one : messages) {
        const auto& owner = all[lists[one.list]].rows;
        outcome.parked.push_back(!owner.empty() && owner[0][0] == bytes_of(one.fence));
    }
    return outcome;
}

Tried<StoreTime> MysqlSession::unpark(std::span<const Place> places, const Ask& ask) {
    std::vector<Place> sorted;
    for (const Place* one : in_place_order(places)) sorted.push_back(*one);
    Packet packet;
    packet.add("SELECT " + clock_sql(ask.time));
    std::size_t lists = 0;
    for (std::span<const Place> rest(sorted); !rest.empty(); ++lists) {
        const auto end = std::find_if(rest.begin(), rest.end(), [&](const Place& one) {
            return one.list != rest.front().list;
        });
        const auto of_list = static_cast<std::size_t>(end - rest.begin());
        packet.add(unpark_sql(rest.first(of_list)));
        rest = rest.subspan(of_list);
    }
    // One statement commits by itself.
    auto answer = write(packet.text(), lists > 1, ask);
    if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
    const Results& all = std::get<0>(answer);
    if (all.empty() || all[0].rows.size() != 1) return unexpected();
    return StoreTime{number<std::int64_t>(all[0].rows[0][0])};
}

Tried<std::vector<Row>> MysqlSession::list(const core::ScanFilter& filter,
                                           const std::string& cursor, std::size_t limit,
                                           const Ask& ask) {
    auto answer = look(list_sql(filter, cursor, limit, ask.time), ask);
    if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
    std::vector<Row> rows;
    for (Values& values : std::get<0>(answer).back().rows) {
        auto row = row_of_values(std::move(values));
        if (!row) return corrupt(row.error());
        rows.push_back(std::move(*row));
    }
    return rows;
}

Tried<StoreTime> MysqlSession::time(const Ask& ask) {
    auto answer = look("SELECT " + clock_sql(ask.time), ask);
    if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
    const ResultRows& result = std::get<0>(answer).back();
    if (result.rows.size() != 1) return unexpected();
    return StoreTime{number<std::int64_t>(result.rows[0][0])};
}

template <class Statement>
Tried<std::size_t> MysqlSession::remove(std::span<const StoredKey> keys, const Ask& ask,
                                        Statement statement) {
    std::size_t gone = 0;
    for (std::size_t first = 0; first < keys.size(); first += kPurgeRows) {
        const auto step = keys.subspan(first, std::min(kPurgeRows, keys.size() - first));
        auto answer = write(statement(step), true, ask);
        if (const auto* problem = std::get_if<Problem>(&answer)) {
            if (problem->trouble != Trouble::contended)
                return std::move(*std::get_if<Problem>(&answer));
            // Somebody holds one of them: the others one by one.
            if (step.size() == 1) continue;
            for (const StoredKey& key : step) {
                auto alone = remove(std::span(&key, 1), ask, statement);
                if (alone.index() != 0) return alone;
                gone += std::get<0>(alone);
            }
            continue;
        }
        gone += static_cast<std::size_t>(std::get<0>(answer)[0].affected);
    }
    return gone;
}

Tried<std::size_t> MysqlSession::remove_chunks(const Ask& ask) {
    auto answer = look(chunk_owners_sql(chunk_cursor_, kPurgeChunkOwners), ask);
    if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
    std::vector<Values>& owners = std::get<0>(answer).back().rows;
    // The last key of a full page may have more tokens on the next one.
    std::string next =
        owners.size() < kPurgeChunkOwners ? std::string{} : owners.back()[0].value_or("");
    std::size_t gone = 0;
    for (const Values& owner : owners) {
        StoredKey key;
        if (!owner[0] || owner[0]->size() != key.bytes.size()) return unexpected();
        // A chunk is written under the record's own token: once that is another, nobody will ever
        // complete it.
        if (owner[2] == owner[1]) continue;
        std::copy(owner[0]->begin(), owner[0]->end(), reinterpret_cast<char*>(key.bytes.data()));
        auto deleted = write(delete_chunks_sql(key, number<std::int64_t>(owner[1])), false, ask);
        if (auto* problem = std::get_if<Problem>(&deleted)) {
            if (problem->trouble != Trouble::contended) return std::move(*problem);
            continue;
        }
        gone += static_cast<std::size_t>(std::get<0>(deleted)[0].affected);
    }
    chunk_cursor_ = std::move(next);
    return gone;
}

Tried<PurgeCounts> MysqlSession::purge(std::size_t limit, const Ask& asked) {
    Ask ask = asked;
    // A row that somebody holds is left to the next purge.
    ask.lock_wait = std::min(ask.lock_wait, kStatementTimeMin);
    PurgeCounts counts;
    const auto keys_of = [&](const std::string& select) -> Tried<std::vector<StoredKey>> {
        auto answer = look(select, ask);
        if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
        std::vector<StoredKey> keys;
        for (const Values& values : std::get<0>(answer).back().rows) {
            StoredKey& key = keys.emplace_back();
            if (!values[0] || values[0]->size() != key.bytes.size()) return unexpected();
            std::copy(values[0]->begin(), values[0]->end(),
                      reinterpret_cast<char*>(key.bytes.data()));
        }
        // Locked in the keys' order, as everywhere.
        std::sort(keys.begin(), keys.end());
        return keys;
    };
    const auto step = [&](const std::string& select, auto statement,
                          std::size_t& count) -> std::optional<Problem> {
        auto keys = keys_of(select);
        if (auto* problem = std::get_if<Problem>(&keys)) return std::move(*problem);
        auto gone = remove(std::get<0>(keys), ask, statement);
        if (auto* problem = std::get_if<Problem>(&gone)) return std::move(*problem);
        count = std::get<0>(gone);
        return {};
    };
    const auto expired = [&](std::span<const StoredKey> keys) {
        return delete_expired_sql(keys, ask.time);
    };
    const auto idle = [&](std::span<const StoredKey> keys) {
        return delete_idle_sql(keys, ask.time);
    };
    if (auto problem = step(expired_sql(limit, ask.time), expired, counts.records))
        return std::move(*problem);
    if (counts.records < limit) {
        if (auto problem =
                step(idle_sql(limit - counts.records, ask.time), idle, counts.conversations))
            return std::move(*problem);
    }
    auto chunks = remove_chunks(ask);
    if (auto* problem = std::get_if<Problem>(&chunks)) return std::move(*problem);
    counts.chunks = std::get<0>(chunks);
    return counts;
}

}  // namespace

std::unique_ptr<sql::Session> make_session(std::unique_ptr<Connection> connection) {
    return std::make_unique<MysqlSession>(std::move(connection));
}

}  // namespace semel::stores::mysql
