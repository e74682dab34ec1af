#include "consumer/strategies/transaction_work.hpp"

#include <algorithm>
#include <utility>

#include "base/fault_point.hpp"
#include "consumer/strategies/past.hpp"

namespace semel::consumer {
namespace {

using inbox::Outcome;
using sql::Trouble;

constexpr milliseconds ask_again{20};

std::optional<base::Digest> digest_of(const core::Fingerprint& fingerprint) {
    if (!fingerprint.canonical.empty()) return fingerprint.canonical;
    if (!fingerprint.raw.empty()) return fingerprint.raw;
    return {};
}

inbox::Rows rows_of(config::SqlRows rows) {
    switch (rows) {
        case config::SqlRows::one:
            return inbox::Rows::one;
        case config::SqlRows::any:
            return inbox::Rows::any;
        case config::SqlRows::at_least_one:
            return inbox::Rows::at_least_one;
    }
    SEMEL_ASSERT(false, "rows is one of three");
}

}  // namespace

base::Result<SqlEffectSet> SqlEffectSet::parse(sql::Dialect dialect,
                                               const config::SqlHandlerConfig& config) {
    SqlEffectSet out;
    for (const auto& [name, spec] : config.params) {
        out.names_.push_back(name);
        out.specs_.push_back(spec);
    }
    if (config.statements.empty()) {
        return base::Error{.code = base::ErrorCode::invalid_argument,
                           .detail = "handler.sql has no statements: there is no effect"};
    }
    for (std::size_t i = 0; i < config.statements.size(); ++i) {
        auto parsed = SqlTemplate::parse(dialect, config.statements[i].sql, out.names_,
                                         "handler.sql statement " + std::to_string(i + 1));
        if (!parsed) return parsed.error();
        out.statements_.emplace_back(std::move(*parsed), rows_of(config.statements[i].rows));
    }
    for (std::size_t i = 0; i < out.names_.size(); ++i) {
        const bool used = std::any_of(out.statements_.begin(), out.statements_.end(),
                                      [&](const auto& one) { return one.first.uses(i); });
        if (!used) {
            return base::Error{.code = base::ErrorCode::invalid_argument,
                               .detail = "handler.sql params: " + out.names_[i] +
                                         " is used by no statement: write :" + out.names_[i] +
                                         " there, or remove it"};
        }
    }
    return out;
}

std::variant<std::vector<inbox::Effect>, ExtractError> SqlEffectSet::of(
    const Message& message) const {
    std::vector<Extracted> values;
    values.reserve(specs_.size());
    for (std::size_t i = 0; i < specs_.size(); ++i) {
        auto value = extract(message.delivery, specs_[i]);
        if (auto* error = std::get_if<ExtractError>(&value))
            return ExtractError{":" + names_[i] + ": " + error->reason};
        values.push_back(std::move(std::get<Extracted>(value)));
    }
    std::vector<inbox::Effect> effects;
    effects.reserve(statements_.size());
    for (const auto& [statement, rows] : statements_)
        effects.push_back({.statement = statement.bind(values), .rows = rows});
    return effects;
}

base::Result<std::unique_ptr<TransactionWork>> TransactionWork::make(
    TransactionOptions options, std::variant<SqlEffects, TransactionCallback> effect,
    ConsumerCounters& counters) {
    std::unique_ptr<TransactionWork> work(
        new TransactionWork(std::move(options), std::move(effect), counters));
    if (const auto& problem = work->inbox_.problem()) return problem->error;
    const bool none = !work->statements_.empty() &&
                      std::none_of(work->statements_.begin(), work->statements_.end(),
                                   [](const auto& one) { return one.second.has_value(); });
    if (none) return work->statements_.begin()->second.error();
    return work;
}

TransactionWork::TransactionWork(TransactionOptions options,
                                 std::variant<SqlEffects, TransactionCallback> effect,
                                 ConsumerCounters& counters)
    : options_(std::move(options)),
      effect_(std::move(effect)),
      counters_(counters),
      inbox_(options_.inbox),
      table_({.scope = options_.inbox.scope,
              .place = options_.inbox.place,
              .lock_wait = options_.inbox.lock_wait,
              .patience = options_.inbox.patience,
              .time = {}}),
      rules_({.retry = options_.retry,
              .owner = {.id = options_.owner, .peer = {}},
              .label = {},
              .retention = options_.inbox.retention,
              .retention_dead = options_.retention_dead,
              .mismatch_is_duplicate = options_.mismatch_is_duplicate}) {
    options_.batch_max = std::clamp<std::size_t>(options_.batch_max, 1, inbox::messages_max);
    if (std::holds_alternative<TransactionCallback>(effect_)) flights_.emplace(options_.inbox);
    if (const auto* sql = std::get_if<SqlEffects>(&effect_)) {
        for (const sql::Dialect dialect : {sql::Dialect::postgres, sql::Dialect::mysql}) {
            if (options_.dialect && *options_.dialect != dialect) continue;
            statements_.emplace(dialect, SqlEffectSet::parse(dialect, sql->config));
        }
    }
}

/// One inbox run over at most batch_max messages.
class TransactionWork::Slice {
  public:
    Slice(const TransactionWork& work, Link& link, TakenPartition* partition,
          std::span<Message* const> messages, bool alone,
          std::unordered_set<std::uint64_t>& blocked)
        : work_(work),
          link_(link),
          partition_(partition),
          messages_(messages),
          alone_(alone),
          blocked_(blocked),
          verdicts_(messages.size(), Held{}) {}

    std::vector<Verdict> run() {
        if (!link_.ready()) return all(Ill{link_.why()});
        if (ordered() && !partition_->position_known && !read_position()) return verdicts_;
        if (work_.flights_ && !read_deaths()) return verdicts_;
        if (!choose()) return verdicts_;
        const bool tried = !chosen_.empty() && transact();
        look();
        note();
        if (work_.flights_) end_flight(tried);
        for (std::size_t i = 0; i < verdicts_.size(); ++i) {
            const bool settled = std::holds_alternative<Applied>(verdicts_[i]) ||
                                 std::holds_alternative<Duplicate>(verdicts_[i]);
            if (!settled) blocked_.insert(lane(i));
        }
        blocked_.erase(0);
        return std::move(verdicts_);
    }

  private:
    [[nodiscard]] bool ordered() const { return partition_ != nullptr && work_.options_.in_order; }
    /// 0: none.
    [[nodiscard]] std::uint64_t lane(std::size_t i) const {
        return ordered() ? 1 : messages_[i]->lane;
    }
    std::vector<Verdict> all(const Verdict& verdict) { return {messages_.size(), verdict}; }

    /// After a COMMIT whose answer was lost. False: everything has its verdict.
    bool read_position() {
        auto answer = work_.inbox_.advance_now(*link_.connection(), partition_->fence, 0);
        if (auto* problem = std::get_if<inbox::Problem>(&answer)) {
            troubled(*problem);
            verdicts_ = all(Ill{problem->error.detail});
            return false;
        }
        const auto& outcome = std::get<inbox::AdvanceOutcome>(answer);
        if (std::holds_alternative<inbox::FencedOff>(outcome)) {
            verdicts_ = all(Fenced{});
            return false;
        }
        if (const auto* now = std::get_if<inbox::Advanced>(&outcome))
            partition_->position = now->next_offset;
        partition_->position_known = true;
        return true;
    }

    void troubled(const inbox::Problem& problem) {
        if (problem.trouble == Trouble::lost || problem.trouble == Trouble::not_writable)
            link_.drop();
    }

    /// Fills batch_ with what can be tried. False: nothing can, everything has its verdict.
    bool choose() {
        const SqlEffectSet* statements = nullptr;
        if (std::holds_alternative<SqlEffects>(work_.effect_)) {
            const auto found = work_.statements_.find(link_.connection()->dialect());
            if (found == work_.statements_.end() || !found->second) {
                verdicts_ = all(Ill{found == work_.statements_.end()
                                        ? "the database is of another kind than configured"
                                        : found->second.error().detail});
                return false;
            }
            statements = &*found->second;
        }
        for (std::size_t i = 0; i < messages_.size(); ++i) {
            const Message& message = *messages_[i];
            if (lane(i) != 0 && blocked_.contains(lane(i))) continue;  // Held
            const auto unreadable = [&](std::string reason) {
                verdicts_[i] =
                    Dead{.why = DeadClass::decode, .reason = std::move(reason), .token = {}};
                if (lane(i) != 0) blocked_.insert(lane(i));
            };
            const auto named = inbox::check(
                inbox::MessageName{work_.options_.inbox.scope, message.source, message.id});
            if (!named) {
                unreadable(named.error().detail);
                continue;
            }
            if (const auto died = deaths_.find(message.key); died != deaths_.end()) {
                if (auto verdict = after_deaths(i, died->second)) {
                    verdicts_[i] = std::move(*verdict);
                    if (lane(i) != 0) blocked_.insert(lane(i));
                    continue;
                }
            }
            if (statements != nullptr) {
                auto effects = statements->of(message);
                if (auto* error = std::get_if<ExtractError>(&effects)) {
                    unreadable(std::move(error->reason));
                    continue;
                }
                effects_.push_back(std::move(std::get<0>(effects)));
            }
            chosen_.push_back(i);
            batch_.messages.push_back(
                {.source = message.source,
                 .id = message.id,
                 .business_key = message.business_key,
                 .fingerprint = digest_of(message.fingerprint),
                 .lane = lane(i) == 0 ? std::string() : std::to_string(lane(i)),
                 .next_offset = message.delivery.position() + 1});
        }
        if (partition_ != nullptr) batch_.fence = partition_->fence;
        if (ordered() && !chosen_.empty())
            batch_.expected_offset =
                partition_->position.value_or(batch_.messages.front().next_offset - 1);
        return true;
    }

    // ---- deaths of the process in a callback

    /// What is counted against these messages. False: it cannot be known now, everything has its
    /// verdict.
    bool read_deaths() {
        if (partition_ != nullptr) {
            const std::lock_guard lock(partition_->deaths_mutex);
            for (const Message* one : messages_) {
                const auto found = partition_->deaths.find(one->key);
                if (found != partition_->deaths.end()) deaths_.insert(*found);
            }
            return true;
        }
        std::vector<base::Digest> redelivered;
        for (const Message* one : messages_)
            if (one->delivery.redelivered) redelivered.push_back(one->key);
        auto answer = work_.flights_->take_over(*link_.connection(), redelivered);
        if (auto* problem = std::get_if<inbox::Problem>(&answer)) {
            troubled(*problem);
            verdicts_ = problem->trouble == Trouble::contended ? all(Busy{ask_again})
                                                               : all(Ill{problem->error.detail});
            return false;
        }
        deaths_ = std::move(std::get<inbox::DeathsOf>(answer));
        return true;
    }
    /// Empty: it may run.
    std::optional<Verdict> after_deaths(std::size_t i, inbox::Deaths deaths) {
        if (deaths.alone >= std::max(work_.options_.retry.crashes, 1U)) {
            notes_.emplace_back(
                i, FailureNote(work_.rules_, *messages_[i],
                               {.dead = DeadClass::crashes,
                                .for_good = true,
                                .code = {},
                                .reason = "the process died " + std::to_string(deaths.alone) +
                                          " times while it ran alone"}));
            return Busy{busy_again};  // until that is written down
        }
        if (alone_ || (deaths.alone == 0 && deaths.beside_others < crowd_crashes_max)) return {};
        return Suspect{deaths.alone};
    }
    /// Whether what is chosen is named; else it has its verdict.
    bool begin_flight() {
        std::vector<base::Digest> named;
        for (const std::size_t i : chosen_) named.push_back(messages_[i]->key);
        auto begun =
            work_.flights_->begin(*link_.connection(), link_.number(), batch_.fence, named, alone_);
        auto* problem = std::get_if<inbox::Problem>(&begun);
        if (problem == nullptr) return true;
        troubled(*problem);
        for (const std::size_t i : chosen_) {
            verdicts_[i] = problem->trouble == Trouble::contended
                               ? Verdict(Busy{ask_again})
                               : Verdict(Ill{problem->error.detail});
        }
        return false;
    }
    /// What is done needs no word: it never runs again, and so the next naming is soon enough.
    void end_flight(bool tried) {
        bool clear = tried && alone_;
        std::vector<base::Digest> ended;
        for (std::size_t i = 0; i < verdicts_.size(); ++i) {
            const bool done = std::holds_alternative<Applied>(verdicts_[i]) ||
                              std::holds_alternative<Duplicate>(verdicts_[i]);
            const bool came_to_an_end = done || std::holds_alternative<Retry>(verdicts_[i]) ||
                                        std::holds_alternative<Dead>(verdicts_[i]);
            clear = clear || (tried && !done);
            if (came_to_an_end && deaths_.contains(messages_[i]->key))
                ended.push_back(messages_[i]->key);
        }
        if (!clear && ended.empty()) return;
        // Without a connection: until the next naming they look as if they ran.
        if (!link_.ready()) return;
        auto answer = work_.flights_->end(*link_.connection(), link_.number(), ended);
        if (auto* problem = std::get_if<inbox::Problem>(&answer)) return troubled(*problem);
        if (partition_ == nullptr) return;
        const std::lock_guard lock(partition_->deaths_mutex);
        for (const base::Digest& key : ended) partition_->deaths.erase(key);
    }

    inbox::RunReport execute() {
        if (const auto* callback = std::get_if<TransactionCallback>(&work_.effect_)) {
            const inbox::Callback effect = [&](sql::Executor& executor, const inbox::Message& one) {
                const auto index = static_cast<std::size_t>(&one - batch_.messages.data());
                base::fault_point("consumer.claim.after");
                base::fault_point("consumer.effect.before");
                return callback->effect(executor, *messages_[chosen_[index]]);
            };
            return work_.inbox_.run(link_.connection(), batch_, effect, link_.reconnect(),
                                    callback->batchable);
        }
        if (base::fault_points_armed) {
            std::set<std::string> texts;
            for (const auto& of_one : effects_)
                for (const inbox::Effect& effect : of_one) texts.insert(effect.statement.text);
            link_.effects(std::move(texts));
        }
        return work_.inbox_.run(link_.connection(), batch_, effects_, link_.reconnect());
    }

    /// False: nothing was begun.
    bool transact() {
        base::fault_point("consumer.claim.before");
        if (work_.flights_ && !begin_flight()) return false;
        const inbox::RunReport report = execute();
        const auto applied = [](const inbox::MessageResult& one) {
            return one.outcome == Outcome::applied;
        };
        if (std::any_of(report.results.begin(), report.results.end(), applied))
            base::fault_point("consumer.record.after");
        if (ordered()) {
            partition_->position = report.next_offset;
            partition_->position_known =
                std::none_of(report.results.begin(), report.results.end(),
                             [](const auto& one) { return one.outcome == Outcome::unknown; });
        }
        for (std::size_t n = 0; n < chosen_.size(); ++n) {
            const std::size_t i = chosen_[n];
            if (auto verdict = verdict_of_result(report, report.results[n], i))
                verdicts_[i] = std::move(*verdict);
        }
        if (report.problem) troubled(*report.problem);
        return true;
    }

    /// Empty: the table is to be asked, or told.
    std::optional<Verdict> verdict_of_result(const inbox::RunReport& report,
                                             const inbox::MessageResult& result, std::size_t i) {
        switch (result.outcome) {
            case Outcome::applied:
                return Applied{};
            case Outcome::duplicate:
                return Duplicate{};
            case Outcome::mismatch:
                ++work_.counters_.mismatches;
                if (work_.options_.mismatch_is_duplicate) return Duplicate{};
                return Dead{.why = DeadClass::mismatch, .reason = result.reason, .token = {}};
            case Outcome::not_yet:
                ++work_.counters_.not_yet;
                notes_.emplace_back(i, FailureNote(work_.rules_, *messages_[i],
                                                   {.code = "not-yet", .reason = result.reason}));
                return {};
            case Outcome::failed:
                if (statement_is_wrong(result.reason))
                    return Ill{"the effect's statement cannot run: " + result.reason};
                notes_.emplace_back(
                    i, FailureNote(work_.rules_, *messages_[i],
                                   {.dead = result.fatal ? DeadClass::fatal : DeadClass::attempts,
                                    .for_good = result.fatal,
                                    .code = "failed",
                                    .reason = result.reason}));
                return {};
            case Outcome::undecided:
                if (report.problem) return Ill{report.problem->error.detail};
                looks_.push_back(i);
                return {};
            case Outcome::held:
                return Held{};
            case Outcome::fenced:
                return Fenced{};
            case Outcome::unknown:
                ++work_.counters_.unknown_outcomes;
                if (report.problem) return Ill{report.problem->error.detail};
                return Busy{ask_again};
        }
        SEMEL_ASSERT(false, "an outcome is one of nine");
    }

    // ---- message_dedup

    std::vector<base::Result<core::Decided>> apply(std::vector<inbox::DedupItem> items) {
        if (!link_.ready()) {
            return {items.size(),
                    base::Error{.code = base::ErrorCode::store_unavailable, .detail = link_.why()}};
        }
        return work_.table_.apply(*link_.connection(), std::move(items));
    }
    [[nodiscard]] inbox::DedupItem item(std::size_t i, core::Operation operation) const {
        const Message& message = *messages_[i];
        return {.source = message.source,
                .id = message.id,
                .operation = std::move(operation),
                .business_key = message.business_key};
    }

    /// Why nothing was done for the messages in looks_.
    void look() {
        if (looks_.empty()) return;
        std::vector<inbox::DedupItem> items;
        for (const std::size_t i : looks_) items.push_back(item(i, core::Get{}));
        const auto found = apply(std::move(items));
        std::vector<inbox::DedupItem> settling;
        for (std::size_t n = 0; n < looks_.size(); ++n) {
            const std::size_t i = looks_[n];
            verdicts_[i] = Busy{busy_again};
            if (!found[n]) continue;
            const auto* row = std::get_if<core::Found>(&found[n]->outcome);
            if (row == nullptr) continue;
            verdicts_[i] = verdict_of(row->record, found[n]->at);
            // Done meanwhile by somebody else; the inbox says so with the fence.
            if (std::holds_alternative<Duplicate>(verdicts_[i])) verdicts_[i] = Busy{ask_again};
            if (!abandoned(row->record, found[n]->at)) continue;
            ++work_.counters_.takeovers;
            settling.push_back(item(i, core::Settle{row->record->token}));
            verdicts_[i] = Busy{ask_again};
        }
        // A step that does not come about is asked for again with the message.
        if (!settling.empty()) static_cast<void>(apply(std::move(settling)));
    }

    /// Writes failed runs down; the transaction they were in is rolled back.
    void note() {
        std::vector<inbox::DedupItem> items;
        for (auto& [i, note] : notes_)
            for (core::Operation& step : note.claim()) items.push_back(item(i, std::move(step)));
        if (items.empty()) return;
        auto answers = apply(std::move(items));
        std::vector<std::pair<std::size_t, std::size_t>> second;  // note, its number of steps
        items.clear();
        for (std::size_t n = 0; n < notes_.size(); ++n) {
            auto& [i, note] = notes_[n];
            auto next = note.after_claim(FailureNote::Results(answers).subspan(2 * n, 2));
            if (auto* verdict = std::get_if<Verdict>(&next)) {
                verdicts_[i] = noted(std::move(*verdict));
                continue;
            }
            auto& steps = std::get<0>(next);
            second.emplace_back(n, steps.size());
            for (core::Operation& step : steps) items.push_back(item(i, std::move(step)));
        }
        if (items.empty()) return;
        answers = apply(std::move(items));
        std::size_t at = 0;
        for (const auto& [n, steps] : second) {
            auto& [i, note] = notes_[n];
            verdicts_[i] =
                noted(note.after_record(FailureNote::Results(answers).subspan(at, steps)));
            at += steps;
        }
    }
    /// A row that stays locked is no illness.
    Verdict noted(Verdict verdict) {
        const bool connected = link_.connection() != nullptr && link_.ready();
        if (std::holds_alternative<Ill>(verdict) && connected &&
            std::holds_alternative<sql::ResultRows>(
                link_.connection()->run({.text = "SELECT 1", .parameters = {}})))
            return Busy{busy_again};
        return verdict;
    }

    const TransactionWork& work_;
    Link& link_;
    TakenPartition* partition_;
    std::span<Message* const> messages_;
    const bool alone_;
    std::unordered_set<std::uint64_t>& blocked_;  ///< Lanes behind one that was not applied.
    std::vector<Verdict> verdicts_;
    std::vector<std::size_t> chosen_;  ///< Of the batch's messages in messages_.
    inbox::Batch batch_;
    std::vector<std::vector<inbox::Effect>> effects_;
    std::vector<std::size_t> looks_;
    std::vector<std::pair<std::size_t, FailureNote>> notes_;
    inbox::DeathsOf deaths_;
};

std::vector<Verdict> TransactionWork::run(Link& link, TakenPartition* partition,
                                          std::span<Message* const> messages, bool alone) const {
    std::vector<Verdict> verdicts;
    std::unordered_set<std::uint64_t> blocked;
    while (verdicts.size() < messages.size()) {
        const std::size_t from = verdicts.size();
        const std::size_t size = std::min(options_.batch_max, messages.size() - from);
        std::vector<Verdict> some;
        if (partition != nullptr && partition->leaving)
            some.assign(size, Fenced{});
        else
            some =
                Slice(*this, link, partition, messages.subspan(from, size), alone, blocked).run();
        std::move(some.begin(), some.end(), std::back_inserter(verdicts));
    }
    return verdicts;
}

void TransactionWork::advance(Link& link, const TakenPartition& partition,
                              std::int64_t next) const {
    if (!link.ready()) return;  // the next watermark says it again
    auto answer = inbox_.advance_now(*link.connection(), partition.fence, next);
    if (auto* problem = std::get_if<inbox::Problem>(&answer)) {
        if (problem->trouble == Trouble::lost || problem->trouble == Trouble::not_writable)
            link.drop();
    } else if (std::holds_alternative<inbox::FencedOff>(std::get<inbox::AdvanceOutcome>(answer))) {
        ++counters_.fenced;
    }
}

std::optional<sql::Problem> TransactionWork::count_deaths(sql::Executor& executor,
                                                          TakenPartition& partition) const {
    if (!flights_) return {};
    auto answer = flights_->take_over(executor, partition.fence);
    if (auto* problem = std::get_if<sql::Problem>(&answer)) return std::move(*problem);
    const std::lock_guard lock(partition.deaths_mutex);
    partition.deaths = std::move(std::get<inbox::DeathsOf>(answer));
    return {};
}

void TransactionWork::leave(Link& link) const {
    if (!flights_ || !link.ready()) return;
    // What stays is done, and costs its room until the next owner comes.
    static_cast<void>(flights_->leave(*link.connection()));
}

base::Result<void> TransactionWork::letter_published(Link& link, const std::string& source,
                                                     const std::string& id,
                                                     core::FencingToken token) const {
    if (!link.ready()) {
        return base::Error{.code = base::ErrorCode::store_unavailable, .detail = link.why()};
    }
    std::vector<inbox::DedupItem> items;
    items.push_back({.source = source,
                     .id = id,
                     .operation = core::LetterPublished{token},
                     .business_key = {}});
    auto answers = table_.apply(*link.connection(), std::move(items));
    // A record that has moved on (begun anew, decided by a person) needs no mark.
    if (!answers[0]) return answers[0].error();
    return {};
}

}  // namespace semel::consumer
