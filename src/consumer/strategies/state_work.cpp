#include "consumer/strategies/state_work.hpp"

#include <algorithm>
#include <deque>
#include <random>
#include <utility>

#include "base/fault_point.hpp"
#include "inbox/steps.hpp"

namespace semel::consumer {
namespace {

using Kind = StateResult::Kind;
using sql::Dialect;
using sql::Problem;
using sql::ResultRows;
using sql::Statement;
using sql::Trouble;
using SteadyTime = std::chrono::steady_clock::time_point;

constexpr milliseconds lock_wait{1000};
constexpr milliseconds idle_limit{60'000};
/// A part that locks keep from its end is tried again for so long.
constexpr milliseconds patience{10'000};
constexpr unsigned reconnects_max = 3;
constexpr unsigned group_tries_max = 2;

/// Text with its places, in the dialect's words.
class Builder {
  public:
    explicit Builder(Dialect dialect) : dialect_(dialect) {}
    Builder& text(std::string_view words) {
        statement_.text += words;
        return *this;
    }
    Builder& value(sql::Parameter parameter) {
        statement_.parameters.push_back(std::move(parameter));
        statement_.text += dialect_ == Dialect::postgres
                               ? "$" + std::to_string(statement_.parameters.size())
                               : std::string("?");
        return *this;
    }
    Builder& list(const std::vector<std::string>& values) {
        text("(");
        for (std::size_t i = 0; i < values.size(); ++i) {
            if (i > 0) text(", ");
            value(values[i]);
        }
        return text(")");
    }
    Statement finish() { return std::move(statement_); }

  private:
    Dialect dialect_;
    Statement statement_;
};

bool yes(const std::optional<std::string>& value) { return value && *value == "1"; }

/// PostgreSQL: only where the type's precision changes a value that is written. The lengths of text
/// types would cut one that could not have been written.
SetComparison postgres_comparison(const std::string& column, const std::string& type) {
    if (type == "json") return {column + "::jsonb", "CAST(", " AS jsonb)"};
    if (type == "xml") return {column + "::text", "", ""};
    const bool precise =
        type.find('(') != std::string::npos &&
        (type.starts_with("numeric") || type.starts_with("time") || type.starts_with("interval"));
    if (!precise) return {column, "", ""};
    return {column, "CAST(", " AS " + type + ")"};
}

/// MySQL compares a number with text as floating point, and text by the column's collation.
SetComparison mysql_comparison(const std::string& column, const sql::Values& of) {
    const std::string type = of[1].value_or("");
    const auto digits = [&](std::size_t i) { return of[i].value_or("0"); };
    if (type == "decimal")
        return {column, "CAST(", " AS DECIMAL(" + digits(2) + ", " + digits(3) + "))"};
    if (of[2] && type.ends_with("int")) return {column, "CAST(", " AS DECIMAL(65, 0))"};
    if (type == "float" || type == "double") {
        const std::string places = of[3] ? ", " + *of[3] + ")" : std::string();
        const std::string before = places.empty() ? "CAST(" : "ROUND(CAST(";
        return {column, before, " AS " + type + ")" + places};
    }
    if (type == "date") return {column, "CAST(", " AS DATE)"};
    if (type == "datetime" || type == "timestamp")
        return {column, "CAST(", " AS DATETIME(" + digits(4) + "))"};
    if (type == "time") return {column, "CAST(", " AS TIME(" + digits(4) + "))"};
    if (type == "json") return {column, "CAST(", " AS JSON)"};
    if (of[5]) return {"CONVERT(" + column + " USING utf8mb4) COLLATE utf8mb4_bin", "", ""};
    return {column, "", ""};
}

std::string lower(std::string text) {
    for (char& c : text)
        if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    return text;
}

}  // namespace

base::Result<StateStatements> StateStatements::make(Dialect dialect,
                                                    const config::StateConfig& config) {
    StateStatements out;
    out.dialect_ = dialect;
    out.config_ = config;
    if (config.from.empty() || config.to.empty()) {
        return base::Error{.code = base::ErrorCode::invalid_argument,
                           .detail = "state: from and to say which transition it is"};
    }
    auto table = quoted_name(dialect, config.table, true, "state.table");
    if (!table) return table.error();
    out.table_ = *table;
    const auto column = [&](std::string& to, const std::string& name, const char* what,
                            bool needed) -> std::optional<base::Error> {
        if (name.empty() && !needed) return {};
        auto quoted = quoted_name(dialect, name, false, std::string("state.") + what);
        if (!quoted) return quoted.error();
        to = *quoted;
        return {};
    };
    if (auto error = column(out.key_, config.key_column, "key_column", true)) return *error;
    if (auto error = column(out.status_, config.status_column, "status_column", true))
        return *error;
    if (auto error = column(out.version_, config.version_column, "version_column", false))
        return *error;
    if (auto error = column(out.message_id_, config.message_id_column, "message_id_column", false))
        return *error;
    for (const auto& [name, spec] : config.set) {
        std::string quoted;
        if (auto error = column(quoted, name, "set", true)) return *error;
        out.set_.emplace_back(std::move(quoted), spec);
    }
    return out;
}

std::variant<std::vector<Extracted>, ExtractError> StateStatements::values(
    const Message& message) const {
    std::vector<Extracted> out;
    const auto add = [&](const config::ValueSpec& spec,
                         const std::string& what) -> std::optional<ExtractError> {
        auto value = extract(message.delivery, spec);
        if (auto* error = std::get_if<ExtractError>(&value))
            return ExtractError{what + ": " + error->reason};
        out.push_back(std::move(std::get<Extracted>(value)));
        return {};
    };
    if (auto error = add(config_.key, "state.key")) return *error;
    if (!out[0].text) return ExtractError{"state.key: the message has none"};
    for (const auto& [name, spec] : config_.set) {
        if (auto error = add(spec, "state.set " + name)) return *error;
    }
    return out;
}

std::string StateStatements::exact_id() const {
    if (dialect_ == Dialect::postgres) return message_id_;
    return "CONVERT(" + message_id_ + " USING utf8mb4) COLLATE utf8mb4_bin";
}

Statement StateStatements::update(std::span<const Extracted> values, const Message& message) const {
    Builder sql(dialect_);
    sql.text("UPDATE " + table_ + " SET " + status_ + " = ").value(config_.to);
    if (!version_.empty()) sql.text(", " + version_ + " = " + version_ + " + 1");
    if (!message_id_.empty()) sql.text(", " + message_id_ + " = ").value(message.id);
    for (std::size_t i = 0; i < set_.size(); ++i)
        sql.text(", " + set_[i].first + " = ").value(parameter_of(dialect_, values[i + 1]));
    sql.text(" WHERE " + key_ + " = ").value(parameter_of(dialect_, values[0]));
    sql.text(" AND " + status_ + " IN ").list(config_.from);
    // The row may have come back to `from` since this very message changed it.
    if (!message_id_.empty())
        sql.text(" AND (" + message_id_ + " IS NULL OR " + exact_id() + " <> ")
            .value(message.id)
            .text(")");
    return sql.finish();
}

Statement StateStatements::columns() const {
    Builder sql(dialect_);
    if (dialect_ == Dialect::postgres) {
        // A domain's precision is that of what it is made of.
        sql.text(
               "WITH RECURSIVE columns (name, type, modifier) AS (SELECT attname, atttypid, "
               "atttypmod FROM pg_attribute WHERE attrelid = to_regclass(")
            .value(table_)
            .text(
                ") AND attnum > 0 AND NOT attisdropped UNION ALL SELECT c.name, t.typbasetype, "
                "CASE WHEN t.typtypmod = -1 THEN c.modifier ELSE t.typtypmod END FROM columns c "
                "JOIN pg_type t ON t.oid = c.type WHERE t.typtype = 'd') SELECT c.name::text, "
                "format_type(c.type, c.modifier) FROM columns c JOIN pg_type t ON t.oid = c.type "
                "WHERE t.typtype <> 'd'");
        return sql.finish();
    }
    const auto dot = config_.table.find('.');
    sql.text(
        "SELECT column_name, data_type, numeric_precision, numeric_scale, datetime_precision, "
        "collation_name FROM information_schema.columns WHERE table_schema = ");
    if (dot == std::string::npos)
        sql.text("DATABASE()");
    else
        sql.value(config_.table.substr(0, dot));
    sql.text(" AND table_name = ")
        .value(dot == std::string::npos ? config_.table : config_.table.substr(dot + 1));
    return sql.finish();
}

SetComparisons StateStatements::comparisons(const ResultRows& columns) const {
    const bool postgres = dialect_ == Dialect::postgres;
    SetComparisons all;
    std::size_t i = 0;
    for (const auto& [name, spec] : config_.set) {
        const std::string& column = set_[i++].first;
        SetComparison one{column, "", ""};
        for (const sql::Values& row : columns.rows) {
            const std::string found = row[0].value_or("");
            if (postgres ? found != name : lower(found) != lower(name)) continue;
            one = postgres ? postgres_comparison(column, row[1].value_or(""))
                           : mysql_comparison(column, row);
        }
        all.push_back(std::move(one));
    }
    return all;
}

Statement StateStatements::look(std::span<const Extracted> values, const Message& message,
                                const SetComparisons& comparisons) const {
    const bool postgres = dialect_ == Dialect::postgres;
    Builder sql(dialect_);
    const auto flag = [&](const auto& condition) {
        sql.text(", CASE WHEN ");
        condition();
        sql.text(" THEN 1 ELSE 0 END");
    };
    sql.text("SELECT " + status_);
    flag([&] { sql.text(status_ + " = ").value(config_.to); });
    flag([&] { sql.text(status_ + " IN ").list(config_.from); });
    flag([&] {
        if (config_.terminal.empty())
            sql.text("1 = 0");
        else
            sql.text(status_ + " IN ").list(config_.terminal);
    });
    flag([&] {
        sql.text("1 = 1");
        for (std::size_t i = 0; i < set_.size(); ++i) {
            const SetComparison& one = comparisons[i];
            sql.text(" AND " + one.column + (postgres ? " IS NOT DISTINCT FROM " : " <=> "));
            sql.text(one.before).value(parameter_of(dialect_, values[i + 1])).text(one.after);
        }
    });
    flag([&] {
        if (message_id_.empty())
            sql.text("1 = 0");
        else
            sql.text(exact_id() + " = ").value(message.id);
    });
    sql.text(" FROM " + table_ + " WHERE " + key_ + " = ")
        .value(parameter_of(dialect_, values[0]))
        .text(" LIMIT 2");
    return sql.finish();
}

base::Result<std::unique_ptr<StateWork>> StateWork::make(StateOptions options) {
    std::unique_ptr<StateWork> work(new StateWork(std::move(options)));
    work->options_.batch_max = std::max<std::size_t>(work->options_.batch_max, 1);
    for (const Dialect dialect : {Dialect::postgres, Dialect::mysql}) {
        auto made = StateStatements::make(dialect, work->options_.config);
        if (!made) return made.error();
        work->statements_.emplace(dialect, std::move(made));
    }
    return work;
}

sql::Tried<StateWork::ComparisonsPtr> StateWork::comparisons(sql::Executor& executor,
                                                             const StateStatements& statements,
                                                             bool again) const {
    {
        const std::lock_guard lock(mutex_);
        const auto known = comparisons_.find(executor.dialect());
        if (!again && known != comparisons_.end()) return known->second;
    }
    auto answer = executor.run(statements.columns());
    if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
    auto made = std::make_shared<const SetComparisons>(
        statements.comparisons(std::get<ResultRows>(answer)));
    const std::lock_guard lock(mutex_);
    return comparisons_[executor.dialect()] = std::move(made);
}

/// Transactions over ever smaller parts of a slice, until every message is decided.
class StateWork::Slice {
  public:
    Slice(const StateWork& work, Link& link, std::span<Message* const> messages,
          std::unordered_set<std::uint64_t>& blocked)
        : work_(work),
          link_(link),
          messages_(messages),
          blocked_(blocked),
          results_(messages.size()),
          decided_(messages.size()) {}

    std::vector<StateResult> run() {
        if (!link_.ready()) {
            give_up(link_.why());
            return std::move(results_);
        }
        statements_ = &*work_.statements_.at(link_.connection()->dialect());
        Part all;
        for (std::size_t i = 0; i < messages_.size(); ++i) {
            auto values = statements_->values(*messages_[i]);
            auto* error = std::get_if<ExtractError>(&values);
            values_.push_back(error != nullptr ? std::vector<Extracted>{}
                                               : std::move(std::get<0>(values)));
            unreadable_.push_back(error != nullptr ? std::move(error->reason) : std::string());
            all.messages.push_back(i);
        }
        parts_.push_back(std::move(all));
        while (!parts_.empty() && !over_) {
            Part part = std::move(parts_.front());
            parts_.pop_front();
            std::erase_if(part.messages, [&](std::size_t i) { return !runnable(i); });
            if (!part.messages.empty()) attempt(std::move(part));
        }
        return std::move(results_);
    }

  private:
    struct Part {
        std::vector<std::size_t> messages;  ///< Ascending.
        unsigned tries = 0;
        std::optional<SteadyTime> until = {};
    };

    void decide(std::size_t i, StateResult result) {
        const bool settled = result.kind == Kind::applied || result.kind == Kind::duplicate ||
                             result.kind == Kind::superseded;
        if (!settled && messages_[i]->lane != 0) blocked_.insert(messages_[i]->lane);
        results_[i] = std::move(result);
        decided_[i] = true;
    }
    bool runnable(std::size_t i) {
        if (decided_[i]) return false;
        if (messages_[i]->lane != 0 && blocked_.contains(messages_[i]->lane)) {
            decide(i, {});
        } else if (!unreadable_[i].empty()) {
            decide(i, {Kind::unreadable, unreadable_[i]});
        }
        return !decided_[i];
    }
    void give_up(const std::string& why) {
        for (std::size_t i = 0; i < messages_.size(); ++i)
            if (!decided_[i]) decide(i, {Kind::ill, why});
        over_ = true;
    }
    void split_at(const Part& part, std::size_t n) {
        const std::span<const std::size_t> all = part.messages;
        for (const auto& some : {all.subspan(n + 1), all.subspan(n, 1), all.first(n)}) {
            if (!some.empty()) parts_.push_front({.messages = {some.begin(), some.end()}});
        }
    }

    void attempt(Part part) {
        const SteadyTime begun = std::chrono::steady_clock::now();
        sql::Executor& executor = *link_.connection();
        std::vector<Statement> trip = inbox::beginning(executor.dialect(), lock_wait, idle_limit);
        const std::size_t first = trip.size();
        for (const std::size_t i : part.messages)
            trip.push_back(statements_->update(values_[i], *messages_[i]));
        base::fault_point("consumer.claim.after");
        base::fault_point("consumer.effect.before");
        std::size_t at = 0;
        auto answer = executor.run(trip, &at);
        if (auto* problem = std::get_if<Problem>(&answer))
            return troubled(std::move(part), std::move(*problem), begun,
                            at >= first ? std::optional(at - first) : std::nullopt);
        std::vector<std::int64_t> changed;
        for (std::size_t n = 0; n < part.messages.size(); ++n)
            changed.push_back(std::get<0>(answer)[first + n].affected);

        // Before any row is kept: a key that is none rolls everything back.
        for (std::size_t n = 0; n < changed.size(); ++n) {
            if (changed[n] <= 1) continue;
            inbox::roll_back(executor);
            if (part.messages.size() > 1) return split_at(part, n);
            return decide(part.messages[0], several(changed[n]));
        }
        std::vector<StateResult> results(part.messages.size(), {Kind::applied, {}});
        if (auto problem = look(part, changed, results))
            return troubled(std::move(part), std::move(*problem), begun, {});
        // What follows in the lane of one that is not done must not stay.
        std::unordered_set<std::uint64_t> stopped;
        for (std::size_t n = 0; n < results.size(); ++n) {
            const std::uint64_t lane = messages_[part.messages[n]]->lane;
            const bool settled = results[n].kind == Kind::applied ||
                                 results[n].kind == Kind::duplicate ||
                                 results[n].kind == Kind::superseded;
            if (stopped.contains(lane)) {
                inbox::roll_back(executor);
                const std::span<const std::size_t> all = part.messages;
                parts_.push_front(
                    {.messages = {all.begin() + static_cast<std::ptrdiff_t>(n), all.end()}});
                parts_.push_front(
                    {.messages = {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(n)}});
                return;
            }
            if (!settled && lane != 0) stopped.insert(lane);
        }
        auto ended = executor.run(inbox::committing(executor.dialect()));
        if (auto* problem = std::get_if<Problem>(&ended))
            return troubled(std::move(part), std::move(*problem), begun, {});
        base::fault_point("consumer.record.after");
        for (std::size_t n = 0; n < results.size(); ++n)
            decide(part.messages[n], std::move(results[n]));
    }

    /// Reads the rows that were not changed.
    std::optional<Problem> look(const Part& part, const std::vector<std::int64_t>& changed,
                                std::vector<StateResult>& results) {
        std::vector<std::size_t> which;
        for (std::size_t n = 0; n < part.messages.size(); ++n)
            if (changed[n] == 0) which.push_back(n);
        if (which.empty()) return {};
        sql::Executor& executor = *link_.connection();
        for (const bool again : {false, true}) {
            auto known = work_.comparisons(executor, *statements_, again);
            if (auto* problem = std::get_if<Problem>(&known)) return std::move(*problem);
            std::vector<Statement> trip;
            for (const std::size_t n : which) {
                const std::size_t i = part.messages[n];
                trip.push_back(statements_->look(values_[i], *messages_[i], *std::get<0>(known)));
            }
            auto answer = executor.run(trip);
            if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
            bool differs = false;
            for (std::size_t k = 0; k < which.size(); ++k) {
                const ResultRows& found = std::get<0>(answer)[k];
                results[which[k]] = judge(found);
                differs = differs || (found.rows.size() == 1 && yes(found.rows[0][1]) &&
                                      !yes(found.rows[0][4]));
            }
            // Before a message is given up over a value: the column may have another type by now.
            if (!differs) break;
        }
        return {};
    }

    [[nodiscard]] StateResult several(std::int64_t rows) const {
        return {Kind::fatal, std::to_string(rows) + " rows have the key: " +
                                 work_.options_.config.key_column + " does not tell rows apart"};
    }
    [[nodiscard]] StateResult judge(const ResultRows& found) const {
        const config::StateConfig& config = work_.options_.config;
        if (found.rows.empty())
            return {Kind::not_yet, "no row of " + config.table + " has the key"};
        if (found.rows.size() > 1) return several(2);
        const sql::Values& row = found.rows[0];
        const std::string status = row[0].value_or("NULL");
        const bool same = yes(row[4]), own = yes(row[5]);
        const bool named = !config.message_id_column.empty();
        if (yes(row[1])) {
            if (same && (own || !named)) return {Kind::duplicate, {}};
            return {Kind::conflict, config.status_column + " is " + status +
                                        " already, by another message or with other values"};
        }
        if (own) return {Kind::duplicate, {}};  // and others have changed the row since
        if (yes(row[2])) return {Kind::busy, "the row changed meanwhile"};
        const std::string words = config.status_column + " is " + status;
        if (yes(row[3])) {
            if (config.on_superseded == config::OnSuperseded::ack) return {Kind::superseded, words};
            return {Kind::conflict, words + ", an end that excludes " + config.to};
        }
        return {Kind::not_yet, words};
    }

    void troubled(Part part, Problem problem, SteadyTime begun, std::optional<std::size_t> n) {
        switch (problem.trouble) {
            case Trouble::contended:
                inbox::roll_back(*link_.connection());
                return contended(std::move(part), problem, begun);
            case Trouble::lost:
                // What a lost COMMIT did is seen in the rows: they are asked again.
                if (reconnects_++ >= reconnects_max || !reconnect()) {
                    link_.drop();
                    return give_up(problem.error.detail);
                }
                parts_.push_front(std::move(part));
                return;
            case Trouble::refused:
                inbox::roll_back(*link_.connection());
                if (statement_is_wrong(problem.error.detail))
                    return give_up("the transition's statement cannot run: " +
                                   problem.error.detail);
                if (part.messages.size() > 1)
                    return split_at(part, n.value_or(part.messages.size() / 2));
                return decide(part.messages[0], {Kind::failed, problem.error.detail});
            case Trouble::full:
            case Trouble::not_writable:
                inbox::roll_back(*link_.connection());
                link_.drop();
                return give_up(problem.error.detail);
        }
    }
    bool reconnect() {
        link_.drop();
        return link_.ready();
    }
    void contended(Part part, const Problem& problem, SteadyTime begun) {
        const SteadyTime now = std::chrono::steady_clock::now();
        if (!part.until) part.until = now + patience;
        ++part.tries;
        if (part.messages.size() > 1 &&
            (now - begun >= lock_wait || part.tries >= group_tries_max)) {
            for (std::size_t n = part.messages.size(); n-- > 0;)
                parts_.push_front({.messages = {part.messages[n]}});
            return;
        }
        if (now >= *part.until) return decide(part.messages[0], {Kind::busy, problem.error.detail});
        thread_local std::minstd_rand random{std::random_device{}()};
        std::this_thread::sleep_for(
            milliseconds{std::uniform_int_distribution<int>(0, 20)(random)});
        parts_.push_front(std::move(part));
    }

    const StateWork& work_;
    Link& link_;
    std::span<Message* const> messages_;
    std::unordered_set<std::uint64_t>& blocked_;  ///< Lanes behind one that is not done.
    const StateStatements* statements_ = nullptr;
    std::vector<std::vector<Extracted>> values_;
    std::vector<std::string> unreadable_;
    std::deque<Part> parts_;
    std::vector<StateResult> results_;
    std::vector<bool> decided_;
    unsigned reconnects_ = 0;
    bool over_ = false;
};

std::vector<StateResult> StateWork::run(Link& link, std::span<Message* const> messages) const {
    std::vector<StateResult> results;
    std::unordered_set<std::uint64_t> blocked;
    while (results.size() < messages.size()) {
        const std::size_t from = results.size();
        const std::size_t size = std::min(options_.batch_max, messages.size() - from);
        base::fault_point("consumer.claim.before");
        auto some = Slice(*this, link, messages.subspan(from, size), blocked).run();
        std::move(some.begin(), some.end(), std::back_inserter(results));
    }
    return results;
}

}  // namespace semel::consumer
