#include "inbox/inbox.hpp"

#include <cstring>
#include <iterator>
#include <utility>

#include "inbox/claims.hpp"
#include "inbox/steps.hpp"

namespace semel::inbox {
namespace {

using sql::Dialect;
using sql::ResultRows;
using sql::Statement;
using sql::Trouble;

std::optional<Problem> problem_of(const base::Result<void>& checked) {
    if (checked) return {};
    return Problem{.trouble = Trouble::refused, .error = checked.error()};
}

std::optional<Problem> problem_of(const InboxOptions& options) {
    if (auto problem = problem_of(check_label(options.scope, "scope"))) return problem;
    if (auto problem = problem_of(check(options.place))) return problem;
    const bool sane = options.retention.count() > 0 && options.lock_wait.count() > 0 &&
                      options.idle_limit.count() >= 0 && options.patience.count() >= 0;
    if (!sane)
        return refused(
            "inbox: retention and lock_wait must be above 0, idle_limit and patience not below");
    return {};
}

void append(std::vector<Statement>& to, std::vector<Statement> from) {
    std::move(from.begin(), from.end(), std::back_inserter(to));
}

}  // namespace

ClaimId new_claim_id() {
    ClaimId id;
    do {
        const std::string random = base::random_bytes(sizeof id.value);
        std::memcpy(&id.value, random.data(), sizeof id.value);
    } while (id.value == 0);
    return id;
}

const char* name_of(Outcome outcome) {
    switch (outcome) {
        case Outcome::applied:
            return "applied";
        case Outcome::duplicate:
            return "duplicate";
        case Outcome::mismatch:
            return "mismatch";
        case Outcome::not_yet:
            return "not_yet";
        case Outcome::failed:
            return "failed";
        case Outcome::undecided:
            return "undecided";
        case Outcome::held:
            return "held";
        case Outcome::fenced:
            return "fenced";
        case Outcome::unknown:
            return "unknown";
    }
    SEMEL_ASSERT(false, "an outcome is one of nine");
}

TransactionalInbox::TransactionalInbox(InboxOptions options)
    : options_(std::move(options)), problem_(problem_of(options_)) {}

std::optional<Problem> TransactionalInbox::refusal(const Partition& partition) const {
    if (problem_) return problem_;
    if (partition.number < 0) return refused("inbox: a partition's number is not below 0");
    return problem_of(check_label(partition.topic, "topic"));
}

std::optional<Problem> TransactionalInbox::refusal(std::span<const Message> messages) const {
    if (problem_) return problem_;
    if (messages.size() > messages_max) {
        return refused("inbox: " + std::to_string(messages.size()) + " messages at once: at most " +
                       std::to_string(messages_max) + " are allowed");
    }
    for (const Message& message : messages) {
        if (auto problem =
                problem_of(check(MessageName{options_.scope, message.source, message.id})))
            return problem;
    }
    return {};
}

Tried<AssignOutcome> TransactionalInbox::assign(Executor& executor, const Partition& partition,
                                                const std::string& owner,
                                                std::optional<std::int64_t> first_offset,
                                                milliseconds wait) const {
    if (auto problem = refusal(partition)) return std::move(*problem);
    if (auto problem = problem_of(check_label(owner, "owner"))) return std::move(*problem);
    if (executor.in_transaction())
        return refused(
            "inbox: assign needs a transaction of its own, and the connection is inside one");
    const Tables tables(executor.dialect(), options_.place);
    const bool postgres = tables.dialect == Dialect::postgres;
    const std::string clock = clock_of(tables.dialect);
    const std::string columns =
        " (scope, topic, " + std::string(partition_column(tables.dialect)) + ", ";
    const auto add_key = [&](StatementBuilder& sql) {
        sql.label(options_.scope)
            .text(", ")
            .label(partition.topic)
            .text(", ")
            .number(partition.number);
    };
    StatementBuilder raise(tables.dialect);
    raise.text("INSERT INTO " + tables.assignments + (postgres ? " AS a" : "") + columns +
               "epoch, owner, assigned_at) VALUES (");
    add_key(raise);
    raise.text(", 1, ").label(owner).text(", " + clock + ")");
    raise.text(postgres
                   ? " ON CONFLICT (scope, topic, partition) DO UPDATE SET epoch = a.epoch + 1,"
                     " owner = EXCLUDED.owner, assigned_at = EXCLUDED.assigned_at"
                   : " ON DUPLICATE KEY UPDATE epoch = epoch + 1, owner = VALUES(owner),"
                     " assigned_at = VALUES(assigned_at)");
    StatementBuilder take(tables.dialect);
    take.text("INSERT INTO " + tables.offsets + (postgres ? " AS o" : "") + columns +
              "next_offset, updated_at) VALUES (");
    add_key(take);
    take.text(", ");
    if (first_offset)
        take.number(*first_offset);
    else
        take.null();
    take.text(", " + clock + ")");
    take.text(
        postgres
            ? " ON CONFLICT (scope, topic, partition) DO UPDATE SET next_offset ="
              " COALESCE(o.next_offset, EXCLUDED.next_offset)"
            : " ON DUPLICATE KEY UPDATE next_offset = COALESCE(next_offset, VALUES(next_offset))");
    StatementBuilder position(tables.dialect);
    position.text("SELECT next_offset FROM " + tables.offsets + " WHERE scope = ")
        .label(options_.scope);
    position.text(" AND topic = ").label(partition.topic);
    position.text(std::string(" AND ") + partition_column(tables.dialect) + " = ")
        .number(partition.number);

    std::vector<Statement> statements = beginning(tables.dialect, wait, options_.idle_limit);
    const std::size_t at = statements.size();
    statements.push_back(raise.finish());
    statements.push_back(fencing(tables, options_.scope, partition));
    statements.push_back(take.finish());
    statements.push_back(position.finish());
    append(statements, committing(tables.dialect));

    auto answer = executor.run(statements);
    if (auto* problem = std::get_if<Problem>(&answer)) {
        if (problem->trouble == Trouble::lost) return std::move(*problem);
        roll_back(executor);
        if (problem->trouble == Trouble::contended) return StillBusy{};
        return std::move(*problem);
    }
    const auto& results = std::get<0>(answer);
    Assigned assigned{.epoch = epoch_of(results[at + 1]), .next_offset = {}};
    const auto& row = results[at + 3].rows.at(0);
    if (row[0]) assigned.next_offset = number_of(row[0]);
    return assigned;
}

Tried<FenceOutcome> TransactionalInbox::fence(Executor& executor, const Fence& fence) const {
    if (auto problem = refusal(fence.partition)) return std::move(*problem);
    const Tables tables(executor.dialect(), options_.place);
    auto answer = executor.run(fencing(tables, options_.scope, fence.partition));
    if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
    const std::int64_t epoch = epoch_of(std::get<0>(answer));
    if (epoch != fence.epoch) return FencedOff{epoch};
    return Held{};
}

Tried<std::vector<Claim>> TransactionalInbox::claim(Executor& executor,
                                                    std::span<const Message> messages,
                                                    ClaimId id) const {
    if (auto problem = refusal(messages)) return std::move(*problem);
    const Tables tables(executor.dialect(), options_.place);
    std::vector<const Message*> pointers;
    for (const Message& message : messages) pointers.push_back(&message);
    Claims claims(tables, options_, pointers, id);
    for (auto statements = claims.next(); !statements.empty(); statements = claims.next()) {
        auto answer = executor.run(statements);
        if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
        claims.absorb(std::get<0>(answer));
    }
    return claims.result();
}

Tried<sql::Done> TransactionalInbox::unclaim(Executor& executor, std::span<const Message> messages,
                                             ClaimId id) const {
    if (auto problem = refusal(messages)) return std::move(*problem);
    if (messages.empty()) return sql::Done{};
    const Tables tables(executor.dialect(), options_.place);
    std::vector<base::Digest> keys;
    for (const Message& message : messages)
        keys.push_back(key_hash({options_.scope, message.source, message.id}));
    auto answer = executor.run(unclaiming(tables, keys, id));
    if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
    return sql::Done{};
}

Tried<AdvanceOutcome> TransactionalInbox::advance(Executor& executor, const Fence& fence,
                                                  std::int64_t next_offset,
                                                  std::optional<std::int64_t> expected) const {
    if (auto problem = refusal(fence.partition)) return std::move(*problem);
    const Tables tables(executor.dialect(), options_.place);
    std::vector<Statement> statements;
    statements.push_back(fencing(tables, options_.scope, fence.partition));
    append(statements, advancing(tables, options_.scope, fence, next_offset, expected));
    auto answer = executor.run(statements);
    if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
    const std::span<const ResultRows> results = std::get<0>(answer);
    return advance_outcome(results.subspan(1), fence, epoch_of(results[0]), next_offset, expected);
}

Tried<AdvanceOutcome> TransactionalInbox::advance_now(Executor& executor, const Fence& fence,
                                                      std::int64_t next_offset) const {
    if (auto problem = refusal(fence.partition)) return std::move(*problem);
    if (executor.in_transaction())
        return refused(
            "inbox: advance_now needs a transaction of its own, and the connection is inside one");
    const Tables tables(executor.dialect(), options_.place);
    std::vector<Statement> statements =
        beginning(tables.dialect, options_.lock_wait, options_.idle_limit);
    const std::size_t at = statements.size();
    statements.push_back(fencing(tables, options_.scope, fence.partition));
    append(statements, advancing(tables, options_.scope, fence, next_offset, {}));
    // Guarded in itself: it can be committed unseen.
    append(statements, committing(tables.dialect));
    auto answer = executor.run(statements);
    if (auto* problem = std::get_if<Problem>(&answer)) {
        if (problem->trouble != Trouble::lost) roll_back(executor);
        return std::move(*problem);
    }
    const std::span<const ResultRows> results = std::get<0>(answer);
    return advance_outcome(results.subspan(at + 1, 2), fence, epoch_of(results[at]), next_offset,
                           {});
}

Tried<std::vector<bool>> TransactionalInbox::committed(Executor& executor,
                                                       std::span<const Message> messages,
                                                       ClaimId id) const {
    if (auto problem = refusal(messages)) return std::move(*problem);
    if (messages.empty()) return std::vector<bool>{};
    const Tables tables(executor.dialect(), options_.place);
    std::vector<base::Digest> keys;
    for (const Message& message : messages)
        keys.push_back(key_hash({options_.scope, message.source, message.id}));
    auto answer = executor.run(reading_claimed(tables, keys, id));
    if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
    std::vector<bool> done(messages.size());
    for (const sql::Values& row : std::get<0>(answer).rows) {
        for (std::size_t i = 0; i < keys.size(); ++i)
            if (row[0] && *row[0] == keys[i].view()) done[i] = true;
    }
    return done;
}

}  // namespace semel::inbox
