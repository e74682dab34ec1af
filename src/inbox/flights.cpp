#include "inbox/flights.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "inbox/steps.hpp"

namespace semel::inbox {
namespace {

using sql::Dialect;
using sql::ResultRows;
using sql::Statement;

constexpr std::size_t process_bytes = 8;
constexpr std::size_t key_bytes = sizeof(base::Digest::bytes);
const Partition no_partition{};

std::vector<base::Digest> keys_of(std::string_view members) {
    std::vector<base::Digest> keys(members.size() / key_bytes);
    for (std::size_t i = 0; i < keys.size(); ++i)
        std::memcpy(keys[i].bytes.data(), members.data() + i * key_bytes, key_bytes);
    return keys;
}

std::string members_of(std::span<const base::Digest> keys) {
    std::string members;
    members.reserve(keys.size() * key_bytes);
    for (const base::Digest& key : keys) members += key.view();
    return members;
}

void add_keys(StatementBuilder& sql, std::span<const base::Digest> keys) {
    sql.text(" AND key_hash IN (");
    for (std::size_t i = 0; i < keys.size(); ++i)
        sql.text(i == 0 ? "" : ", ").bytes(keys[i].view());
    sql.text(")");
}

void add_partition(StatementBuilder& sql, Dialect dialect, const Partition& partition) {
    sql.text(" AND topic = ").label(partition.topic).text(" AND ");
    sql.text(partition_column(dialect)).text(" = ").number(partition.number);
}

/// A row of semel_flights that somebody else has left.
struct Left {
    std::string process;
    std::int64_t connection = 0;
    bool alone = false;
    std::vector<base::Digest> members;
};

/// One transaction that counts what was left.
class TakeOver {
  public:
    TakeOver(Executor& executor, const InboxOptions& options, const std::string& process)
        : executor_(executor),
          options_(options),
          process_(process),
          tables_(executor.dialect(), options.place) {}

    /// With a fence: all of its partition. Else: these messages alone.
    Tried<DeathsOf> run(const Fence* fence, std::span<const base::Digest> messages) {
        if (executor_.in_transaction())
            return refused("inbox: flights need a transaction of their own");
        auto answer = counted(fence, messages);
        if (auto* problem = std::get_if<Problem>(&answer)) {
            if (problem->trouble != sql::Trouble::lost) roll_back(executor_);
            return answer;
        }
        auto ended = executor_.run(committing(tables_.dialect));
        if (auto* problem = std::get_if<Problem>(&ended)) return std::move(*problem);
        return answer;
    }

  private:
    Tried<DeathsOf> counted(const Fence* fence, std::span<const base::Digest> messages) {
        std::vector<Statement> trip =
            beginning(tables_.dialect, options_.lock_wait, options_.idle_limit);
        trip.push_back(reading_left(fence));
        auto answer = executor_.run(trip);
        if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
        std::vector<Left> left;
        for (const sql::Values& row : std::get<0>(answer).back().rows) {
            left.push_back({.process = row[0].value_or(""),
                            .connection = number_of(row[1]),
                            .alone = number_of(row[2]) != 0,
                            .members = keys_of(row[3].value_or(""))});
        }
        trip.clear();
        DeathsOf died;
        for (Left& one : left) {
            if (fence == nullptr && !take(one, messages, died)) continue;
            if (fence != nullptr) {
                for (const base::Digest& key : one.members) add(died, key, one.alone);
                one.members.clear();
            }
            trip.push_back(writing_left(one));
        }
        if (!died.empty()) {
            if (auto problem = forget_ended(died)) return std::move(*problem);
            for (const auto& [key, deaths] : died)
                trip.push_back(
                    counting(fence != nullptr ? fence->partition : no_partition, key, deaths));
        }
        trip.push_back(reading_counted(fence, messages));
        answer = executor_.run(trip);
        if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
        DeathsOf all;
        for (const sql::Values& row : std::get<0>(answer).back().rows) {
            const auto keys = keys_of(row[0].value_or(""));
            if (keys.size() != 1) continue;
            all[keys[0]] = {static_cast<std::uint32_t>(number_of(row[1])),
                            static_cast<std::uint32_t>(number_of(row[2]))};
        }
        return all;
    }

    static void add(DeathsOf& died, const base::Digest& key, bool alone) {
        Deaths& deaths = died[key];
        ++(alone ? deaths.alone : deaths.beside_others);
    }
    /// Takes those of `messages` out of a row. False: there are none.
    static bool take(Left& left, std::span<const base::Digest> messages, DeathsOf& died) {
        const auto before = left.members.size();
        std::erase_if(left.members, [&](const base::Digest& key) {
            const bool ours = std::find(messages.begin(), messages.end(), key) != messages.end();
            if (ours) add(died, key, left.alone);
            return ours;
        });
        return left.members.size() != before;
    }

    [[nodiscard]] Statement reading_left(const Fence* fence) const {
        StatementBuilder sql(tables_.dialect);
        sql.text("SELECT process, connection, alone, members FROM " + tables_.flights);
        sql.text(" WHERE scope = ").label(options_.scope);
        if (fence != nullptr) {
            add_partition(sql, tables_.dialect, fence->partition);
            sql.text(" AND epoch < ").number(fence->epoch);
        } else {
            sql.text(" AND process <> ").bytes(process_);
        }
        // Everybody locks in one order.
        sql.text(" ORDER BY process, connection FOR UPDATE");
        return sql.finish();
    }
    [[nodiscard]] Statement writing_left(const Left& left) const {
        StatementBuilder sql(tables_.dialect);
        if (left.members.empty())
            sql.text("DELETE FROM " + tables_.flights);
        else
            sql.text("UPDATE " + tables_.flights + " SET members = ")
                .bytes(members_of(left.members));
        sql.text(" WHERE scope = ").label(options_.scope);
        sql.text(" AND process = ").bytes(left.process);
        sql.text(" AND connection = ").number(left.connection);
        return sql.finish();
    }
    /// What is done, or was given up, has ended before the death.
    std::optional<Problem> forget_ended(DeathsOf& died) {
        std::vector<base::Digest> keys;
        for (const auto& one : died) keys.push_back(one.first);
        StatementBuilder sql(tables_.dialect);
        sql.text("SELECT key_hash FROM " + tables_.dedup + " WHERE status IN (1, 3, 4)");
        add_keys(sql, keys);
        auto answer = executor_.run(sql.finish());
        if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
        for (const sql::Values& row : std::get<ResultRows>(answer).rows) {
            for (const base::Digest& key : keys_of(row[0].value_or(""))) died.erase(key);
        }
        return {};
    }
    [[nodiscard]] Statement counting(const Partition& partition, const base::Digest& key,
                                     Deaths deaths) const {
        const bool postgres = tables_.dialect == Dialect::postgres;
        const std::string clock = clock_of(tables_.dialect);
        StatementBuilder sql(tables_.dialect);
        sql.text("INSERT INTO " + tables_.crashes + (postgres ? " AS c" : "") +
                 " (scope, key_hash, topic, " + partition_column(tables_.dialect) +
                 ", deaths, lone_deaths, updated_at) VALUES (");
        sql.label(options_.scope).text(", ").bytes(key.view()).text(", ");
        sql.label(partition.topic).text(", ").number(partition.number).text(", ");
        sql.number(deaths.beside_others).text(", ").number(deaths.alone).text(", " + clock + ")");
        sql.text(postgres
                     ? " ON CONFLICT (scope, key_hash) DO UPDATE SET deaths = c.deaths +"
                       " EXCLUDED.deaths, lone_deaths = c.lone_deaths + EXCLUDED.lone_deaths,"
                       " topic = EXCLUDED.topic, partition = EXCLUDED.partition,"
                       " updated_at = EXCLUDED.updated_at"
                     : " ON DUPLICATE KEY UPDATE deaths = deaths + VALUES(deaths),"
                       " lone_deaths = lone_deaths + VALUES(lone_deaths), topic = VALUES(topic),"
                       " `partition` = VALUES(`partition`), updated_at = VALUES(updated_at)");
        return sql.finish();
    }
    [[nodiscard]] Statement reading_counted(const Fence* fence,
                                            std::span<const base::Digest> messages) const {
        StatementBuilder sql(tables_.dialect);
        sql.text("SELECT key_hash, deaths, lone_deaths FROM " + tables_.crashes);
        sql.text(" WHERE scope = ").label(options_.scope);
        if (fence != nullptr)
            add_partition(sql, tables_.dialect, fence->partition);
        else
            add_keys(sql, messages);
        return sql.finish();
    }

    Executor& executor_;
    const InboxOptions& options_;
    const std::string& process_;
    const Tables tables_;
};

Tried<sql::Done> done(Tried<std::vector<ResultRows>> answer) {
    if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
    return sql::Done{};
}

}  // namespace

Flights::Flights(InboxOptions options)
    : options_(std::move(options)), process_(base::random_bytes(process_bytes)) {}

Tried<DeathsOf> Flights::take_over(Executor& executor, const Fence& fence) const {
    return TakeOver(executor, options_, process_).run(&fence, {});
}

Tried<DeathsOf> Flights::take_over(Executor& executor,
                                   std::span<const base::Digest> messages) const {
    if (messages.empty()) return DeathsOf{};
    return TakeOver(executor, options_, process_).run(nullptr, messages);
}

Tried<sql::Done> Flights::begin(Executor& executor, unsigned connection,
                                const std::optional<Fence>& fence,
                                std::span<const base::Digest> messages, bool alone) const {
    const Tables tables(executor.dialect(), options_.place);
    const bool postgres = tables.dialect == Dialect::postgres;
    const Partition& partition = fence ? fence->partition : no_partition;
    StatementBuilder sql(tables.dialect);
    sql.text("INSERT INTO " + tables.flights + " (scope, process, connection, topic, " +
             partition_column(tables.dialect) + ", epoch, alone, members, updated_at) VALUES (");
    sql.label(options_.scope).text(", ").bytes(process_).text(", ").number(connection);
    sql.text(", ").label(partition.topic).text(", ").number(partition.number);
    sql.text(", ").number(fence ? fence->epoch : 0).text(", ").number(alone ? 1 : 0);
    sql.text(", ").bytes(members_of(messages));
    sql.text(std::string(", ") + clock_of(tables.dialect) + ")");
    sql.text(postgres
                 ? " ON CONFLICT (scope, process, connection) DO UPDATE SET topic ="
                   " EXCLUDED.topic, partition = EXCLUDED.partition, epoch = EXCLUDED.epoch, alone"
                   " = EXCLUDED.alone, members = EXCLUDED.members, updated_at = EXCLUDED.updated_at"
                 : " ON DUPLICATE KEY UPDATE topic = VALUES(topic), `partition` ="
                   " VALUES(`partition`), epoch = VALUES(epoch), alone = VALUES(alone), members ="
                   " VALUES(members), updated_at = VALUES(updated_at)");
    const Statement statement = sql.finish();
    return done(executor.run({&statement, 1}));
}

Tried<sql::Done> Flights::end(Executor& executor, unsigned connection,
                              std::span<const base::Digest> ended) const {
    const Tables tables(executor.dialect(), options_.place);
    std::vector<Statement> trip;
    StatementBuilder flight(tables.dialect);
    flight.text("DELETE FROM " + tables.flights + " WHERE scope = ").label(options_.scope);
    flight.text(" AND process = ").bytes(process_);
    flight.text(" AND connection = ").number(connection);
    trip.push_back(flight.finish());
    if (!ended.empty()) {
        StatementBuilder crashes(tables.dialect);
        crashes.text("DELETE FROM " + tables.crashes + " WHERE scope = ").label(options_.scope);
        add_keys(crashes, ended);
        trip.push_back(crashes.finish());
    }
    return done(executor.run(trip));
}

Tried<sql::Done> Flights::leave(Executor& executor) const {
    const Tables tables(executor.dialect(), options_.place);
    const bool postgres = tables.dialect == Dialect::postgres;
    const std::int64_t keep = std::chrono::microseconds(options_.retention).count();
    std::vector<Statement> trip;
    StatementBuilder own(tables.dialect);
    own.text("DELETE FROM " + tables.flights + " WHERE scope = ").label(options_.scope);
    own.text(" AND process = ").bytes(process_);
    trip.push_back(own.finish());
    for (const std::string& table : {tables.flights, tables.crashes}) {
        StatementBuilder old(tables.dialect);
        old.text("DELETE FROM " + table + " WHERE scope = ").label(options_.scope);
        old.text(" AND updated_at < ");
        if (postgres)
            old.text("clock_timestamp() - ").number(keep).text(" * interval '1 microsecond'");
        else
            old.text("DATE_SUB(UTC_TIMESTAMP(6), INTERVAL ").number(keep).text(" MICROSECOND)");
        trip.push_back(old.finish());
    }
    return done(executor.run(trip));
}

}  // namespace semel::inbox
