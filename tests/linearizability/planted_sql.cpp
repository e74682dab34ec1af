#include "linearizability/planted_sql.hpp"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <variant>

#include "sql/session.hpp"
#include "sql/sql_store.hpp"
#include "stores/mysql/connection.hpp"
#include "stores/mysql/mysql_store.hpp"
#include "stores/mysql/session.hpp"
#include "stores/mysql/url.hpp"
#include "stores/postgres/connection.hpp"
#include "stores/postgres/postgres_store.hpp"
#include "stores/postgres/session.hpp"

namespace semel::linearizability {
namespace {

using namespace sql;
using std::chrono::microseconds;

/// What "early" is here: leases are given in whole milliseconds.
constexpr microseconds tick{1000};
/// Flaws that show now and then do so once in this many statements.
constexpr std::uint64_t now_and_then = 5;

/// What a session does otherwise than its dialect.
enum class Flaw {
    none,
    unguarded_completion,  ///< Completes under whatever token and nonce the row has.
    present_ignored,       ///< A row that is there is replaced by the first grant.
    early_takeover,        ///< A lease that ends within the tick is over already.
    unguarded_write,       ///< A decision is written over whatever version the row has meanwhile.
    lost_commit,           ///< Some completions are acknowledged and not committed.
};

const std::map<std::string, Flaw>& faults() {
    static const std::map<std::string, Flaw> all{
        {"none", Flaw::none},
        {"sql-unguarded-completion", Flaw::unguarded_completion},
        {"sql-present-ignored", Flaw::present_ignored},
        {"sql-early-takeover", Flaw::early_takeover},
        {"sql-unguarded-write", Flaw::unguarded_write},
        {"sql-lost-commit", Flaw::lost_commit},
    };
    return all;
}

class PlantedSession final : public Session {
  public:
    PlantedSession(std::unique_ptr<Session> inner, Flaw flaw)
        : inner_(std::move(inner)), flaw_(flaw) {}

    Tried<std::vector<InsertOutcome>> insert(std::span<const Fresh> rows, const Ask& ask) override {
        auto answer = inner_->insert(rows, ask);
        auto* outcomes = std::get_if<0>(&answer);
        if (flaw_ != Flaw::present_ignored || outcomes == nullptr) return answer;
        for (std::size_t i = 0; i < rows.size(); ++i) {
            if (const auto* present = std::get_if<Present>(&(*outcomes)[i])) {
                if (auto put = put_over(rows[i], *present, ask)) (*outcomes)[i] = *put;
            }
        }
        return answer;
    }

    Tried<std::vector<CompletionOutcome>> complete(std::span<const Completion> rows,
                                                   const Ask& ask) override {
        std::vector<Completion> changed(rows.begin(), rows.end());
        if (flaw_ == Flaw::unguarded_completion) {
            const auto found = read_rows(rows, ask);
            for (std::size_t i = 0; i < found.size(); ++i) {
                if (!found[i]) continue;
                changed[i].token = found[i]->token;
                changed[i].nonce = found[i]->nonce;
            }
        }
        if (flaw_ == Flaw::lost_commit && ++statements_ % now_and_then == 0) {
            const auto found = read_rows(rows, ask);
            std::vector<CompletionOutcome> outcomes;
            for (std::size_t i = 0; i < found.size(); ++i)
                outcomes.push_back(as_completed(found[i], rows[i]));
            if (outcomes.size() == rows.size()) return outcomes;
        }
        return inner_->complete(changed, ask);
    }

    Tried<ReadRows> read(std::span<const StoredKey> keys, bool with_bodies,
                         const Ask& ask) override {
        auto answer = inner_->read(keys, with_bodies, ask);
        auto* found = std::get_if<0>(&answer);
        if (flaw_ != Flaw::early_takeover || found == nullptr) return answer;
        for (auto& row : found->rows) {
            if (row && row->status == Status::processing && row->lease_end - tick <= found->at)
                row->lease_end = std::min(row->lease_end, found->at);
        }
        return answer;
    }

    Tried<std::vector<bool>> replace(std::span<const Change> changes, const Ask& ask) override {
        std::vector<Change> changed(changes.begin(), changes.end());
        if (flaw_ == Flaw::unguarded_write) {
            std::vector<StoredKey> keys;
            for (const Change& change : changes) keys.push_back(change.row.key);
            const auto answer = inner_->read(keys, false, ask);
            const auto* found = std::get_if<0>(&answer);
            for (std::size_t i = 0; found != nullptr && i < changed.size(); ++i) {
                if (!found->rows[i]) continue;
                changed[i].version_seen = found->rows[i]->version;
                changed[i].row.version = found->rows[i]->version + 1;
            }
        }
        return inner_->replace(changed, ask);
    }

    Tried<core::Decided> other(const StoredKey& key, const core::StoreOperation& operation,
                               const Ask& ask) override {
        return inner_->other(key, operation, ask);
    }
    Tried<ParkOutcome> park(std::span<const Parking> messages, const Ask& ask) override {
        return inner_->park(messages, ask);
    }
    Tried<StoreTime> unpark(std::span<const Place> places, const Ask& ask) override {
        return inner_->unpark(places, ask);
    }
    Tried<std::vector<Row>> list(const core::ScanFilter& filter, const std::string& cursor,
                                 std::size_t limit, const Ask& ask) override {
        return inner_->list(filter, cursor, limit, ask);
    }
    Tried<PurgeCounts> purge(std::size_t limit, const Ask& ask) override {
        return inner_->purge(limit, ask);
    }
    Tried<StoreTime> time(const Ask& ask) override { return inner_->time(ask); }

  private:
    std::vector<std::optional<Row>> read_rows(std::span<const Completion> rows, const Ask& ask) {
        std::vector<StoredKey> keys;
        for (const Completion& row : rows) keys.push_back(row.key);
        auto answer = inner_->read(keys, false, ask);
        auto* found = std::get_if<0>(&answer);
        return found == nullptr ? std::vector<std::optional<Row>>{} : std::move(found->rows);
    }

    /// What the completing statement would have made of the row, if its guard held.
    static CompletionOutcome as_completed(std::optional<Row> row, const Completion& completion) {
        if (!row || row->status != Status::processing || row->token != completion.token ||
            row->nonce != completion.nonce)
            return std::nullopt;
        row->status = Status::completed;
        row->completed = std::max(row->created, row->lease_end - tick);
        row->expires = row->completed + milliseconds{row->keep_ms};
        row->done = completion.done;
        ++row->version;
        return row;
    }

    /// The row as the insert would have made it, in place of the one that is there.
    std::optional<Inserted> put_over(const Fresh& fresh, const Present& present, const Ask& ask) {
        Row row = present.row;
        row.version += 1;
        row.status = Status::processing;
        row.created = present.at;
        row.token.value = present.at.us;
        row.nonce = fresh.nonce;
        row.lease_end = present.at + fresh.lease;
        row.completed = row.expires = {};
        row.keep_ms = fresh.keep_ms;
        row.head = fresh.head;
        row.done = row.body = std::nullopt;
        const Change change{.version_seen = present.row.version,
                            .row = std::move(row),
                            .not_after = fresh.not_after,
                            .append = std::nullopt,
                            .at = present.at};
        const auto answer = inner_->replace({&change, 1}, ask);
        const auto* replaced = std::get_if<0>(&answer);
        if (replaced == nullptr || !replaced->front()) return std::nullopt;
        return Inserted{present.at};
    }

    std::unique_ptr<Session> inner_;
    const Flaw flaw_;
    std::uint64_t statements_ = 0;
};

/// Opens sessions as the dialect's store does, once that store has made the tables.
base::Result<Connect> postgres_sessions(const std::string& url) {
    auto targets = stores::postgres::targets_of(url);
    if (!targets) return targets.error();
    const stores::postgres::Target target = targets->front();
    const auto statements = std::make_shared<const stores::postgres::Statements>("semel");
    return Connect{[target, statements]() -> Tried<std::unique_ptr<Session>> {
        auto made = stores::postgres::Connection::open(
            target, std::chrono::steady_clock::now() + std::chrono::seconds{2});
        if (auto* failed = std::get_if<stores::postgres::Failed>(&made))
            return std::move(failed->problem);
        return stores::postgres::make_session(std::move(std::get<0>(made)), statements);
    }};
}

base::Result<Connect> mysql_sessions(const std::string& url) {
    auto parsed = stores::mysql::parse_url(url);
    if (!parsed) return parsed.error();
    return Connect{[target = std::move(*parsed)]() -> Tried<std::unique_ptr<Session>> {
        auto made = stores::mysql::Connection::open(target, std::chrono::seconds{2});
        if (auto* problem = std::get_if<Problem>(&made)) return std::move(*problem);
        return stores::mysql::make_session(std::move(std::get<0>(made)));
    }};
}

}  // namespace

std::vector<std::string> planted_sql_faults() {
    std::vector<std::string> names;
    for (const auto& [name, flaw] : faults()) {
        if (name != "none") names.push_back(name);
    }
    return names;
}

base::Result<std::unique_ptr<core::Store>> open_sql_store(const SqlTarget& target,
                                                          const std::string& fault) {
    auto store = target.store == "postgres" ? stores::open_postgres_store({.url = target.url})
                                            : stores::open_mysql_store({.url = target.url});
    if (!store || fault.empty()) return store;
    const auto planted = faults().find(fault);
    if (planted == faults().end()) {
        return base::Error{.code = base::ErrorCode::invalid_argument,
                           .detail = "there is no fault '" + fault +
                                     "' of an SQL store; --list-plants names them"};
    }
    auto sessions =
        target.store == "postgres" ? postgres_sessions(target.url) : mysql_sessions(target.url);
    if (!sessions) return sessions.error();
    Connect connect = [inner = std::move(*sessions),
                       flaw = planted->second]() -> Tried<std::unique_ptr<Session>> {
        auto made = inner();
        if (auto* problem = std::get_if<Problem>(&made)) return std::move(*problem);
        return std::make_unique<PlantedSession>(std::move(std::get<0>(made)), flaw);
    };
    SqlStoreOptions options;
    options.name = target.store;
    return make_sql_store(std::move(options), std::move(connect), nullptr);
}

}  // namespace semel::linearizability
