#include "stores/postgres/session.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>

#include "base/hash.hpp"

namespace semel::stores::postgres {

using namespace core;
using namespace sql;

namespace {

std::string_view view(const Nonce& nonce) {
    return {reinterpret_cast<const char*>(nonce.bytes.data()), nonce.bytes.size()};
}

template <std::size_t size>
void copy(std::string_view from, std::array<std::uint8_t, size>& to) {
    std::copy_n(from.begin(), std::min(from.size(), size), to.begin());
}

std::int64_t signed_of(FencingToken token) { return static_cast<std::int64_t>(token.value); }

Parameter time_of(const Ask& ask) {
    return number(ask.time ? std::optional(ask.time->us) : std::nullopt);
}

Parameter nothing() {
    Parameter out;
    out.null = true;
    return out;
}

/// Where each row is in the keys' order, in which they are locked.
template <class T>
std::vector<std::size_t> in_key_order(std::span<const T> rows) {
    std::vector<std::size_t> order(rows.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(),
              [&](std::size_t a, std::size_t b) { return rows[a].key < rows[b].key; });
    return order;
}

/// Finds the place of a key that an answer names. `order`: of in_key_order(). The number of rows:
/// there is none.
template <class T>
std::size_t place_of(std::string_view key, std::span<const T> rows,
                     const std::vector<std::size_t>& order) {
    const auto found = std::lower_bound(
        order.begin(), order.end(), key,
        [&](std::size_t i, std::string_view wanted) { return rows[i].key.view() < wanted; });
    return found != order.end() && rows[*found].key.view() == key ? *found : rows.size();
}

/// Columns from `at` on: version, status, token, nonce, created, lease_end, completed, expires,
/// keep_ms, head, done.
constexpr std::size_t row_columns = 11;
Row row_from(const Rows& rows, std::size_t i, std::size_t at, const StoredKey& key) {
    Row row;
    row.key = key;
    row.version = rows.number(i, at);
    row.status = static_cast<Status>(rows.number(i, at + 1));
    row.token.value = static_cast<std::uint64_t>(rows.number(i, at + 2));
    copy(rows.bytes(i, at + 3), row.nonce.bytes);
    row.created.us = rows.number(i, at + 4);
    row.lease_end.us = rows.number(i, at + 5);
    row.completed.us = rows.number(i, at + 6);
    row.expires.us = rows.number(i, at + 7);
    row.keep_ms = rows.number(i, at + 8);
    row.head = rows.bytes(i, at + 9);
    if (!rows.null(i, at + 10)) row.done = std::string(rows.bytes(i, at + 10));
    return row;
}

void add_body(const Rows& rows, std::size_t i, std::size_t at, Row& row) {
    if (!rows.null(i, at)) row.body = std::string(rows.bytes(i, at));
}

// ---------------------------------------------------------------- steps

Step step(const Text& text, std::vector<Parameter> parameters) {
    return {&text, std::move(parameters)};
}

Step insert_step(const Statements& statements, std::span<const Fresh> rows,
                 const std::vector<std::size_t>& order, Parameter time) {
    ByteStrings keys(rows.size()), nonces(rows.size()), heads(rows.size());
    Numbers leases(rows.size()), keeps(rows.size()), not_after(rows.size());
    for (const std::size_t i : order) {
        keys.add(rows[i].key.view());
        nonces.add(view(rows[i].nonce));
        leases.add(std::chrono::microseconds(rows[i].lease).count());
        keeps.add(rows[i].keep_ms);
        not_after.add(rows[i].not_after.us);
        heads.add(std::string_view(rows[i].head));
    }
    return step(statements[Id::insert],
                {std::move(time), std::move(keys).done(), std::move(nonces).done(),
                 std::move(leases).done(), std::move(keeps).done(), std::move(not_after).done(),
                 std::move(heads).done()});
}

Step insert_one_step(const Statements& statements, const Fresh& row, Parameter time) {
    return step(statements[Id::insert_one],
                {std::move(time), bytes(row.key.view()), bytes(view(row.nonce)),
                 number(std::chrono::microseconds(row.lease).count()), number(row.keep_ms),
                 number(row.not_after.us), bytes(row.head)});
}

Step complete_one_step(const Statements& statements, const Completion& row, Parameter time) {
    Parameter body = row.body ? bytes(*row.body) : nothing();
    return step(statements[Id::complete_one],
                {std::move(time), bytes(row.key.view()), number(signed_of(row.token)),
                 bytes(view(row.nonce)), bytes(row.done), std::move(body)});
}

Step complete_step(const Statements& statements, std::span<const Completion> rows,
                   const std::vector<std::size_t>& order, Parameter time) {
    ByteStrings keys(order.size()), nonces(order.size()), done(order.size()), bodies(order.size());
    Numbers tokens(order.size());
    for (const std::size_t i : order) {
        keys.add(rows[i].key.view());
        tokens.add(signed_of(rows[i].token));
        nonces.add(view(rows[i].nonce));
        done.add(std::string_view(rows[i].done));
        bodies.add(rows[i].body);
    }
    return step(statements[Id::complete],
                {std::move(time), std::move(keys).done(), std::move(tokens).done(),
                 std::move(nonces).done(), std::move(done).done(), std::move(bodies).done()});
}

Step replace_step(const Statements& statements, std::span<const Change> changes,
                  const std::vector<std::size_t>& order, Parameter time) {
    const std::size_t size = order.size();
    ByteStrings keys(size), nonces(size), heads(size), done(size), bodies(size);
    Numbers seen(size), not_after(size), status(size), tokens(size), created(size), lease_end(size),
        completed(size), expires(size), keep(size);
    for (const std::size_t i : order) {
        const Row& row = changes[i].row;
        keys.add(row.key.view());
        seen.add(changes[i].version_seen);
        not_after.add(changes[i].not_after.us);
        status.add(static_cast<std::int64_t>(row.status));
        tokens.add(signed_of(row.token));
        nonces.add(view(row.nonce));
        created.add(row.created.us);
        lease_end.add(row.lease_end.us);
        completed.add(row.completed.us);
        expires.add(row.expires.us);
        keep.add(row.keep_ms);
        heads.add(std::string_view(row.head));
        done.add(row.done);
        bodies.add(row.body);
    }
    return step(statements[Id::replace],
                {std::move(time), std::move(keys).done(), std::move(seen).done(),
                 std::move(not_after).done(), std::move(status).done(), std::move(tokens).done(),
                 std::move(nonces).done(), std::move(created).done(), std::move(lease_end).done(),
                 std::move(completed).done(), std::move(expires).done(), std::move(keep).done(),
                 std::move(heads).done(), std::move(done).done(), std::move(bodies).done()});
}

/// Holds the conversation, then appends, both only if this transaction has written the record.
void append_steps(const Statements& statements, const StoredKey& record, const Append& turn,
                  const Parameter& time, std::vector<Step>& to) {
    const Parameter conversation = bytes(turn.conversation.view());
    const Parameter of = bytes(record.view());
    to.push_back(step(statements[Id::append_lock], {time, conversation, of}));
    to.push_back(step(statements[Id::append_turn],
                      {time, conversation, of, bytes(turn.request_id), bytes(turn.user_content),
                       bytes(turn.answer_content), flag(turn.late)}));
}

struct Appended {
    const StoredKey* record;
    const Append* turn;
    Parameter time;
};
/// In the conversations' order, each one's turns in the order given.
void append_all(const Statements& statements, const std::vector<Appended>& turns,
                std::vector<Step>& to) {
    std::vector<std::size_t> order(turns.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return std::tie(turns[a].turn->conversation, a) < std::tie(turns[b].turn->conversation, b);
    });
    for (const std::size_t i : order)
        append_steps(statements, *turns[i].record, *turns[i].turn, turns[i].time, to);
}

/// Where each one is in the order of lists and places.
template <class T>
std::vector<std::size_t> in_place_order(std::span<const T> all) {
    std::vector<std::size_t> order(all.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return std::tie(all[a].list, all[a].place) < std::tie(all[b].list, all[b].place);
    });
    return order;
}

Step park_step(const Statements& statements, std::span<const Parking> messages,
               const std::vector<std::size_t>& order) {
    ByteStrings lists(order.size()), fences(order.size()), bytes(order.size());
    Numbers places(order.size());
    for (const std::size_t i : order) {
        lists.add(messages[i].list.view());
        fences.add(view(messages[i].fence));
        places.add(place_number(messages[i].place));
        bytes.add(messages[i].bytes);
    }
    return step(statements[Id::park], {std::move(lists).done(), std::move(fences).done(),
                                       std::move(places).done(), std::move(bytes).done()});
}

Step unpark_step(const Statements& statements, std::span<const Place> all) {
    ByteStrings lists(all.size());
    Numbers places(all.size());
    for (const std::size_t i : in_place_order(all)) {
        lists.add(all[i].list.view());
        places.add(place_number(all[i].place));
    }
    return step(statements[Id::unpark], {std::move(lists).done(), std::move(places).done()});
}

Step read_step(const Statements& statements, std::span<const StoredKey> keys, bool with_bodies,
               Parameter time) {
    ByteStrings all(keys.size());
    for (const StoredKey& key : keys) all.add(key.view());
    return step(statements[Id::read], {std::move(time), std::move(all).done(), flag(with_bodies)});
}

Step list_step(const Statements& statements, const ScanFilter& filter, const std::string& cursor,
               std::size_t limit, Parameter time) {
    // These two are undecided always.
    const bool undecided = filter.undecided_only || filter.dead_leases_only ||
                           filter.status == static_cast<std::uint8_t>(Status::processing) ||
                           filter.status == static_cast<std::uint8_t>(Status::unknown);
    std::vector<Parameter> parameters{std::move(time), bytes(cursor),
                                      number(std::int64_t{filter.status}),
                                      number(static_cast<std::int64_t>(limit))};
    if (undecided) parameters.push_back(flag(filter.dead_leases_only));
    return step(statements[undecided ? Id::list_undecided : Id::list], std::move(parameters));
}

// ---------------------------------------------------------------- the session

class PostgresSession final : public Session {
  public:
    PostgresSession(std::unique_ptr<Connection> connection,
                    std::shared_ptr<const Statements> statements)
        : connection_(std::move(connection)), statements_(std::move(statements)) {}

    Tried<std::vector<InsertOutcome>> insert(std::span<const Fresh> rows, const Ask& ask) override {
        std::vector<InsertOutcome> out(rows.size(), Neither{});
        if (rows.empty()) return out;
        if (rows.size() == 1) return insert_one(rows.front(), ask);
        const auto order = in_key_order(rows);
        auto answer = run({insert_step(*statements_, rows, order, time_of(ask))}, ask);
        if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
        const Rows& found = std::get<0>(answer).front();
        for (std::size_t i = 0; i < found.size(); ++i) {
            const std::size_t place = place_of(found.bytes(i, 0), rows, order);
            if (place == rows.size()) continue;
            if (found.flag(i, 2)) {
                out[place] = Inserted{{found.number(i, 7)}};
                continue;
            }
            // A row that a purge removed under the insert is still in the statement's snapshot.
            if (std::holds_alternative<Inserted>(out[place])) continue;
            Present present{row_from(found, i, 3, rows[place].key), {found.number(i, 1)}};
            add_body(found, i, 3 + row_columns, present.row);
            out[place] = std::move(present);
        }
        return out;
    }

    Tried<std::vector<CompletionOutcome>> complete(std::span<const Completion> rows,
                                                   const Ask& ask) override {
        std::vector<CompletionOutcome> out(rows.size());
        auto order = in_key_order(rows);
        // Nobody owns a record under the empty nonce.
        std::erase_if(order, [&](std::size_t i) { return rows[i].nonce == Nonce{}; });
        if (order.empty()) return out;
        std::vector<Step> steps{
            order.size() == 1 ? complete_one_step(*statements_, rows[order.front()], time_of(ask))
                              : complete_step(*statements_, rows, order, time_of(ask))};
        std::vector<Appended> turns;
        for (const std::size_t i : order) {
            if (rows[i].append) turns.push_back({&rows[i].key, &*rows[i].append, time_of(ask)});
        }
        append_all(*statements_, turns, steps);
        auto answer = run(steps, ask);
        if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
        const Rows& found = std::get<0>(answer).front();
        for (std::size_t i = 0; i < found.size(); ++i) {
            const std::size_t place = place_of(found.bytes(i, 0), rows, order);
            if (place == rows.size()) continue;
            const Completion& asked = rows[place];
            out[place] = Row{.key = asked.key,
                             .version = found.number(i, 1),
                             .status = Status::completed,
                             .token = asked.token,
                             .nonce = asked.nonce,
                             .created = {found.number(i, 2)},
                             .lease_end = {found.number(i, 3)},
                             .completed = {found.number(i, 4)},
                             .expires = {found.number(i, 5)},
                             .keep_ms = found.number(i, 6),
                             .head = std::string(found.bytes(i, 7)),
                             .done = asked.done,
                             .body = {}};
        }
        return out;
    }

    Tried<ReadRows> read(std::span<const StoredKey> keys, bool with_bodies,
                         const Ask& ask) override {
        ReadRows out;
        out.rows.resize(keys.size());
        if (keys.empty()) {
            auto at = time(ask);
            if (auto* problem = std::get_if<Problem>(&at)) return std::move(*problem);
            out.at = std::get<StoreTime>(at);
            return out;
        }
        auto answer = run({read_step(*statements_, keys, with_bodies, time_of(ask))}, ask);
        if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
        const Rows& found = std::get<0>(answer).front();
        for (std::size_t i = 0; i < found.size(); ++i) {
            out.at.us = found.number(i, 1);
            const auto place = static_cast<std::size_t>(found.number(i, 0) - 1);
            if (place >= keys.size() || found.null(i, 2)) continue;
            Row row = row_from(found, i, 2, keys[place]);
            add_body(found, i, 2 + row_columns, row);
            out.rows[place] = std::move(row);
        }
        return out;
    }

    Tried<std::vector<bool>> replace(std::span<const Change> changes, const Ask& ask) override {
        std::vector<bool> out(changes.size());
        if (changes.empty()) return out;
        std::vector<std::size_t> order(changes.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
            return changes[a].row.key < changes[b].row.key;
        });
        std::vector<Step> steps{replace_step(*statements_, changes, order, time_of(ask))};
        std::vector<Appended> turns;
        for (const std::size_t i : order) {
            if (changes[i].append)
                turns.push_back(
                    {&changes[i].row.key, &*changes[i].append, number(changes[i].at.us)});
        }
        append_all(*statements_, turns, steps);
        auto answer = run(steps, ask);
        if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
        const Rows& found = std::get<0>(answer).front();
        for (std::size_t i = 0; i < found.size(); ++i) {
            const std::string_view key = found.bytes(i, 0);
            const auto place = std::lower_bound(order.begin(), order.end(), key,
                                                [&](std::size_t at, std::string_view wanted) {
                                                    return changes[at].row.key.view() < wanted;
                                                });
            if (place != order.end() && changes[*place].row.key.view() == key) out[*place] = true;
        }
        return out;
    }

    Tried<Decided> other(const StoredKey& key, const StoreOperation& operation,
                         const Ask& ask) override {
        return std::visit([&](const auto& one) { return other_one(key, one, ask); }, operation);
    }

    Tried<ParkOutcome> park(std::span<const Parking> messages, const Ask& ask) override {
        const auto order = in_place_order(messages);
        auto answer = run(
            {step((*statements_)[Id::value_synced], {}), park_step(*statements_, messages, order),
             step((*statements_)[Id::time], {time_of(ask)})},
            ask);
        if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
        const auto& all = std::get<0>(answer);
        ParkOutcome out{.parked = std::vector<bool>(messages.size()), .at = {all[2].number(0, 0)}};
        for (std::size_t i = 0; i < all[1].size(); ++i) {
            const auto told = std::pair(all[1].bytes(i, 0), all[1].number(i, 1));
            const auto found = std::lower_bound(
                order.begin(), order.end(), told, [&](std::size_t at, const auto& wanted) {
                    return std::pair(messages[at].list.view(), place_number(messages[at].place)) <
                           wanted;
                });
            if (found != order.end() && messages[*found].list.view() == told.first &&
                place_number(messages[*found].place) == told.second)
                out.parked[*found] = true;
        }
        return out;
    }

    Tried<StoreTime> unpark(std::span<const Place> places, const Ask& ask) override {
        auto answer =
            run({unpark_step(*statements_, places), step((*statements_)[Id::time], {time_of(ask)})},
                ask);
        if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
        return StoreTime{std::get<0>(answer)[1].number(0, 0)};
    }

    Tried<std::vector<Row>> list(const ScanFilter& filter, const std::string& cursor,
                                 std::size_t limit, const Ask& ask) override {
        auto answer = run({list_step(*statements_, filter, cursor, limit, time_of(ask))}, ask);
        if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
        const Rows& found = std::get<0>(answer).front();
        std::vector<Row> out;
        out.reserve(found.size());
        for (std::size_t i = 0; i < found.size(); ++i) {
            StoredKey key;
            copy(found.bytes(i, 0), key.bytes);
            out.push_back(row_from(found, i, 1, key));
        }
        return out;
    }

    Tried<PurgeCounts> purge(std::size_t limit, const Ask& ask) override {
        const auto many = static_cast<std::int64_t>(limit);
        constexpr std::int64_t idle_us =
            std::chrono::microseconds(conversation_idle_retention).count();
        auto answer =
            run({step((*statements_)[Id::purge_records], {time_of(ask), number(many)}),
                 step((*statements_)[Id::purge_chunks],
                      {bytes(chunk_.key), number(chunk_.token), number(chunk_.n), number(many)}),
                 step((*statements_)[Id::purge_conversations],
                      {time_of(ask), number(many), number(idle_us)})},
                ask);
        if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
        const auto& found = std::get<0>(answer);
        const auto count = [&](std::size_t which, std::size_t column) {
            return static_cast<std::size_t>(found[which].number(0, column));
        };
        // All chunks are looked at over time, a few with each purge; at the end it begins anew.
        chunk_ = count(1, 1) < limit ? ChunkPlace{}
                                     : ChunkPlace{std::string(found[1].bytes(0, 2)),
                                                  found[1].number(0, 3), found[1].number(0, 4)};
        return PurgeCounts{.records = count(0, 0),
                           .chunks = count(0, 1) + count(1, 0),
                           .conversations = count(2, 0)};
    }

    Tried<StoreTime> time(const Ask& ask) override {
        auto answer = run({step((*statements_)[Id::time], {time_of(ask)})}, ask);
        if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
        return StoreTime{std::get<0>(answer).front().number(0, 0)};
    }

  private:
    Tried<std::vector<Rows>> run(std::span<const Step> steps, const Ask& ask) {
        auto answer = connection_->run(steps, ask);
        if (auto* failed = std::get_if<Failed>(&answer)) return std::move(failed->problem);
        return std::move(std::get<0>(answer));
    }
    Tried<std::vector<Rows>> run(std::initializer_list<Step> steps, const Ask& ask) {
        return run(std::span<const Step>(steps.begin(), steps.size()), ask);
    }

    Tried<std::vector<InsertOutcome>> insert_one(const Fresh& row, const Ask& ask) {
        // What kept it from being inserted is left to a read: a lone caller is rarely a duplicate, and
        // looking costs as much as the insert.
        auto answer = run({insert_one_step(*statements_, row, time_of(ask))}, ask);
        if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
        const Rows& inserted = std::get<0>(answer)[0];
        std::vector<InsertOutcome> out(1, Neither{});
        if (inserted.size() == 1) out.front() = Inserted{{inserted.number(0, 0)}};
        return out;
    }

    /// Runs the steps and the clock behind them, and makes an outcome of their rows.
    template <class MakeOutcome>
    Tried<Decided> decided(std::vector<Step> steps, const Ask& ask, MakeOutcome make) {
        steps.push_back(step((*statements_)[Id::time], {time_of(ask)}));
        auto answer = run(steps, ask);
        if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
        const auto& rows = std::get<0>(answer);
        return Decided{StoreOutcome(make(rows)), StoreTime{rows.back().number(0, 0)}};
    }

    Tried<Decided> other_one(const StoredKey& key, const PutChunk& chunk, const Ask& ask) {
        return decided({step((*statements_)[Id::chunk_put],
                             {time_of(ask), bytes(key.view()), number(signed_of(chunk.token)),
                              number(std::int64_t{chunk.n}), bytes(chunk.bytes)})},
                       ask, [](const auto&) { return ChunkStored{}; });
    }
    Tried<Decided> other_one(const StoredKey& key, const GetChunk& chunk, const Ask& ask) {
        return decided(
            {step((*statements_)[Id::chunk_get], {bytes(key.view()), number(signed_of(chunk.token)),
                                                  number(std::int64_t{chunk.n})})},
            ask, [](const auto& rows) -> StoreOutcome {
                if (rows[0].size() == 0) return ChunkMissing{};
                return ChunkFound{std::string(rows[0].bytes(0, 0))};
            });
    }
    Tried<Decided> other_one(const StoredKey& key, const GetConversation& asked, const Ask& ask) {
        return decided({step((*statements_)[Id::conversation_get],
                             {bytes(key.view()), bytes(asked.request_id)})},
                       ask, [](const auto& rows) -> StoreOutcome {
                           if (rows[0].size() == 0) return ConversationMissing{};
                           return ConversationFound{
                               {.created = {rows[0].number(0, 0)},
                                .last_used = {rows[0].number(0, 1)},
                                .turns = static_cast<std::uint64_t>(rows[0].number(0, 2))},
                               rows[0].flag(0, 3)};
                       });
    }
    Tried<Decided> other_one(const StoredKey& key, const GetTurns& asked, const Ask& ask) {
        constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
        const auto after = static_cast<std::int64_t>(std::min(asked.after, most));
        return decided(
            {step((*statements_)[asked.newest ? Id::turns_newest : Id::turns_get],
                  {bytes(key.view()), number(after), number(std::int64_t{asked.limit})})},
            ask, [&](const auto& rows) {
                TurnsFound found;
                for (std::size_t i = 0; i < rows[0].size(); ++i) {
                    found.turns.push_back(
                        {.number = static_cast<std::uint64_t>(rows[0].number(i, 0)),
                         .request_id = std::string(rows[0].bytes(i, 1)),
                         .user_content = std::string(rows[0].bytes(i, 2)),
                         .answer_content = std::string(rows[0].bytes(i, 3)),
                         .at = {rows[0].number(i, 4)},
                         .late = rows[0].flag(i, 5)});
                }
                if (asked.newest) std::reverse(found.turns.begin(), found.turns.end());
                return found;
            });
    }
    Tried<Decided> other_one(const StoredKey& key, const DeleteConversation&, const Ask& ask) {
        return decided(
            {step((*statements_)[Id::conversation_delete], {bytes(key.view())}),
             step((*statements_)[Id::turns_delete], {bytes(key.view())})},
            ask, [](const auto& rows) { return ConversationDeleted{rows[0].affected() != 0}; });
    }
    Tried<Decided> other_one(const StoredKey&, const ClaimValue& asked, const Ask& ask) {
        return decided({step((*statements_)[Id::value_synced], {}),
                        step((*statements_)[Id::value_claim],
                             {bytes(asked.name), bytes(asked.value_if_absent)}),
                        step((*statements_)[Id::value_get], {bytes(asked.name)})},
                       ask,
                       [](const auto& rows) { return Value{std::string(rows[2].bytes(0, 0))}; });
    }
    Tried<Decided> other_one(const StoredKey&, const ReplaceValue& asked, const Ask& ask) {
        return decided(
            {step((*statements_)[Id::value_synced], {}),
             step((*statements_)[Id::value_replace], {bytes(asked.name), bytes(asked.value)})},
            ask, [&](const auto&) { return Value{asked.value}; });
    }
    Tried<Decided> other_one(const StoredKey& key, const OpenParking& asked, const Ask& ask) {
        auto seen = run({step((*statements_)[Id::parking_fence], {bytes(key.view())})}, ask);
        if (auto* problem = std::get_if<Problem>(&seen)) return std::move(*problem);
        const Rows& owner = std::get<0>(seen).front();
        Parameter fence = owner.size() == 0 ? nothing() : bytes(owner.bytes(0, 0));
        auto answer = run({step((*statements_)[Id::value_synced], {}),
                           step((*statements_)[Id::parking_open],
                                {bytes(key.view()), std::move(fence), bytes(view(asked.fence))}),
                           step((*statements_)[Id::time], {time_of(ask)})},
                          ask);
        if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
        const auto& rows = std::get<0>(answer);
        if (rows[1].size() == 0)
            return Problem{Trouble::contended,
                           {.code = base::ErrorCode::store_unavailable,
                            .detail = "another took the list of parked messages over meanwhile"}};
        return Decided{ParkingOpened{}, StoreTime{rows[2].number(0, 0)}};
    }
    Tried<Decided> other_one(const StoredKey& key, const GetParked& asked, const Ask& ask) {
        return decided({step((*statements_)[Id::parked_get],
                             {bytes(key.view()), number(place_number(asked.from)),
                              number(std::int64_t{asked.limit})})},
                       ask, [](const auto& rows) {
                           ParkedFound found;
                           found.messages.reserve(rows[0].size());
                           for (std::size_t i = 0; i < rows[0].size(); ++i)
                               found.messages.push_back(
                                   {.place = static_cast<std::uint64_t>(rows[0].number(i, 0)),
                                    .bytes = std::string(rows[0].bytes(i, 1))});
                           return found;
                       });
    }
    /// An operation on a record, or one that has a statement for many.
    template <class Operation>
    Tried<Decided> other_one(const StoredKey&, const Operation&, const Ask&) {
        return Problem{Trouble::refused,
                       {.code = base::ErrorCode::invalid_argument,
                        .detail = "this operation is not asked one by one"}};
    }

    struct ChunkPlace {
        std::string key;
        std::int64_t token = 0;
        std::int64_t n = 0;
    };

    std::unique_ptr<Connection> connection_;
    std::shared_ptr<const Statements> statements_;
    ChunkPlace chunk_;  ///< The last one that purge() looked at.
};

}  // namespace

std::unique_ptr<Session> make_session(std::unique_ptr<Connection> connection,
                                      std::shared_ptr<const Statements> statements) {
    return std::make_unique<PostgresSession>(std::move(connection), std::move(statements));
}

std::vector<Step> trial_of(const Statements& statements) {
    const std::string name = "trial " + base::random_bytes(16);
    const StoredKey key = base::sha256(name);
    Nonce nonce;
    nonce.bytes.fill(1);
    constexpr std::int64_t time = 1;
    const Parameter at = number(time);
    const std::vector<std::size_t> only{0};
    const Fresh fresh{
        .key = key, .nonce = nonce, .lease = milliseconds{1}, .not_after = {time}, .head = {}};
    const Completion completion{.key = key,
                                .token = {time},
                                .nonce = nonce,
                                .done = {},
                                .body = std::string(),
                                .append = {}};
    const Change change{
        .version_seen = 0, .row = {.key = key}, .not_after = {time}, .append = {}, .at = {time}};
    const Append turn{
        .conversation = key, .request_id = name, .user_content = {}, .answer_content = {}};
    std::vector<Step> out{insert_step(statements, std::span(&fresh, 1), only, at),
                          complete_step(statements, std::span(&completion, 1), only, at),
                          replace_step(statements, std::span(&change, 1), only, at),
                          read_step(statements, std::span(&key, 1), true, at)};
    append_steps(statements, key, turn, at, out);
    const Parameter k = bytes(key.view());
    const Parameter none = number(std::int64_t{0});
    const auto add = [&](Id id, std::vector<Parameter> parameters) {
        out.push_back(step(statements[id], std::move(parameters)));
    };
    out.push_back(insert_one_step(statements, fresh, at));
    out.push_back(complete_one_step(statements, completion, at));
    add(Id::chunk_put, {at, k, at, none, bytes("")});
    add(Id::chunk_get, {k, at, none});
    add(Id::conversation_get, {k, bytes(name)});
    add(Id::turns_get, {k, none, at});
    add(Id::turns_newest, {k, none, at});
    add(Id::value_synced, {});
    add(Id::value_claim, {bytes(name), bytes("")});
    add(Id::value_get, {bytes(name)});
    add(Id::value_replace, {bytes(name), bytes("")});
    const Parking parked{.list = key, .fence = nonce, .place = 0, .bytes = {}};
    const Place place{.list = key, .place = 0};
    add(Id::parking_fence, {k});
    add(Id::parking_open, {k, nothing(), bytes(view(nonce))});
    out.push_back(park_step(statements, std::span(&parked, 1), only));
    add(Id::parked_get, {k, none, at});
    out.push_back(unpark_step(statements, std::span(&place, 1)));
    out.push_back(list_step(statements, {.status = 255}, std::string(32, '\xff'), 1, at));
    out.push_back(list_step(statements, {.undecided_only = true, .status = 255},
                            std::string(32, '\xff'), 1, at));
    // Before the first of all times, or nothing: these take other's rows, if only until the trial
    // is rolled back.
    add(Id::purge_records, {none, at});
    add(Id::purge_chunks, {bytes(std::string(33, '\xff')), none, none, at});
    add(Id::purge_conversations, {none, at, at});
    add(Id::conversation_delete, {k});
    add(Id::turns_delete, {k});
    add(Id::time, {at});
    return out;
}

}  // namespace semel::stores::postgres
