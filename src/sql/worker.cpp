#include "sql/worker.hpp"

#include <algorithm>
#include <set>
#include <type_traits>
#include <utility>

#include "core/transition.hpp"

namespace semel::sql {
namespace {

using base::Applied;
using core::Acquire;
using core::Decided;
using core::Operation;
using core::Record;
using core::RecordPtr;
using core::StoreOperation;
using core::StoreOutcome;
using core::Transition;
using std::chrono::steady_clock;
using Look = Task::Look;

/// A copy: decide() consumes it, and it may have to be asked again.
Operation operation_on_record(const StoreOperation& operation) {
    return std::visit(
        [](const auto& op) -> Operation {
            if constexpr (std::is_constructible_v<Operation, decltype(op)>) {
                return op;
            } else {
                SEMEL_ASSERT(false, "what is not a record's operation is of the kind `other`");
            }
        },
        operation);
}

StoreOutcome store_outcome(core::Outcome outcome) {
    return std::visit([](auto& each) -> StoreOutcome { return std::move(each); }, outcome);
}

bool only_reads(const StoreOperation& operation) {
    return std::holds_alternative<core::GetChunk>(operation) ||
           std::holds_alternative<core::GetConversation>(operation) ||
           std::holds_alternative<core::GetTurns>(operation) ||
           std::holds_alternative<core::GetParked>(operation);
}

/// The head says all of a first grant but its time.
Fresh fresh_of(const StoredKey& key, const Acquire& acquire) {
    const StoreTime whenever = std::min(StoreTime{}, acquire.not_after);
    const Transition grant = core::decide(nullptr, Acquire{acquire}, whenever);
    Fresh fresh{.key = key,
                .nonce = acquire.nonce,
                .lease = acquire.lease,
                .keep_ms = acquire.policy.retention_completed.count(),
                .not_after = acquire.not_after,
                .head = {}};
    fresh.head = row_of(key, *grant.record, 1).head;
    return fresh;
}

Completion completion_of(const StoredKey& key, const core::Complete& complete) {
    Completion out{.key = key,
                   .token = complete.token,
                   .nonce = complete.nonce,
                   .done = encode_completion(complete.answer, complete.usage),
                   .body = {},
                   .append = complete.append};
    if (complete.answer.body_kind == core::BodyKind::inline_body && complete.answer.body)
        out.body = *complete.answer.body;
    return out;
}

core::Granted repeated(const Record& record) {
    return {.kind = core::Granted::Kind::repeated,
            .token = record.token,
            .attempt = record.attempt,
            .generation = record.generation,
            .lease_end = record.lease_end,
            .possible_second_payment = record.follows_unknown,
            .created = record.created};
}

}  // namespace

// ---------------------------------------------------------------- what is shared

Ask Shared::ask(milliseconds lock_wait) const {
    Ask out{.time = {}, .lock_wait = lock_wait, .deadline = options.deadline};
    if (options.time) out.time = options.time();
    return out;
}

SteadyTime Shared::limit_of(const Task& task) const {
    const SteadyTime limit = task.since + options.patience;
    const bool others_wait = task.locked > 0 && task.in_company;
    return others_wait ? std::min(limit, task.locked_since + siblings_patience) : limit;
}

base::Error Shared::error_of(base::Error error, Applied applied) const {
    error.applied = applied;
    const bool passes = error.code == base::ErrorCode::store_unavailable ||
                        error.code == base::ErrorCode::store_full;
    if (passes && error.retry_after.count() == 0) error.retry_after = std::chrono::seconds{1};
    if (!error.detail.starts_with(options.name + ": ")) error.detail.insert(0, options.name + ": ");
    return error;
}

base::Error Shared::unavailable(const std::string& why) const {
    return error_of({.code = base::ErrorCode::store_unavailable, .detail = why}, Applied::no);
}

void Shared::give_up(TaskPtr task) {
    const std::string waited =
        std::to_string(
            std::chrono::duration_cast<milliseconds>(steady_clock::now() - task->since).count()) +
        " ms";
    base::Error error;
    if (task->look == Look::own_grant || task->look == Look::full) {
        error = std::move(*task->error);
    } else if (task->locked > 0) {
        error = unavailable("the record stays locked by another transaction (waited " + waited +
                            "); nothing was done; find out who holds it, then ask again");
    } else if (const std::string problem = standing.problem(); !problem.empty()) {
        error = unavailable("no connection for " + waited + ": " + problem + "; nothing was done");
    } else if (task->error) {
        error = error_of(std::move(*task->error), Applied::no);
    } else {
        error = unavailable("not decided within " + waited +
                            ": all connections are busy, or the record changes all the time; "
                            "nothing was done");
    }
    queue.answer(std::move(task), std::move(error));
}

// ---------------------------------------------------------------- a worker

Worker::Worker(Shared& shared, std::unique_ptr<Session> session)
    : shared_(shared), session_(std::move(session)) {
    if (session_) shared_.standing.connected();
}

void Worker::run() {
    for (;;) {
        if (!session_ && !connect()) return;
        Tasks tasks = shared_.queue.take(Standing::probe_every);
        if (!tasks.empty()) {
            work(std::move(tasks));
        } else if (shared_.queue.ended()) {
            return;
        } else {
            probe();
        }
    }
}

bool Worker::connect() {
    while (!shared_.queue.ended()) {
        if (pause_.count() != 0 && shared_.queue.pause(pause_)) break;
        pause_ = std::clamp(2 * pause_, session_again_first, session_again_max);
        const SteadyTime sent = steady_clock::now();
        auto tried = shared_.connect();
        if (auto* session = std::get_if<std::unique_ptr<Session>>(&tried)) {
            shared_.standing.connected();
            shared_.standing.answered(sent, steady_clock::now());
            session_ = std::move(*session);
            return true;
        }
        shared_.standing.unreachable(std::get<Problem>(tried).error.detail);
    }
    return false;
}

template <class Fn>
auto Worker::asked(const Tasks& tasks, Fn&& fn) {
    // Who was locked out before has a place in the queue, and others are waiting there.
    const std::uint8_t locked = tasks.empty() ? std::uint8_t{0} : tasks.front()->locked;
    milliseconds wait = shared_.options.lock_wait;
    if (locked > 0) {
        wait = std::min(long_lock_wait, quick_lock_wait * (1 << std::min<int>(locked, 8)));
    } else if (singly_) {
        wait = std::min(quick_lock_wait, wait);
    }
    const Ask ask = shared_.ask(wait);
    sent_ = steady_clock::now();
    auto tried = fn(ask);
    received_ = steady_clock::now();
    const auto* problem = std::get_if<Problem>(&tried);
    const bool broken = problem != nullptr && (problem->trouble == Trouble::lost ||
                                               problem->trouble == Trouble::not_writable);
    if (broken) {
        shared_.standing.broke(problem->error.detail);
        session_.reset();
    } else {
        shared_.standing.answered(sent_, received_);
        pause_ = milliseconds{0};
    }
    return tried;
}

void Worker::probe() {
    if (!shared_.standing.probe_due(steady_clock::now()) &&
        steady_clock::now() - received_ < Standing::silence_limit)
        return;
    const auto tried = asked({}, [&](const Ask& ask) { return session_->time(ask); });
    if (const auto* at = std::get_if<StoreTime>(&tried)) told(*at);
}

void Worker::work(Tasks tasks) {
    switch (tasks.front()->kind) {
        case Kind::insert:
            return insert(std::move(tasks));
        case Kind::complete:
            return complete(std::move(tasks));
        case Kind::read:
        case Kind::change:
            return look(std::move(tasks));
        case Kind::park:
            return park(std::move(tasks));
        case Kind::unpark:
            return unpark(std::move(tasks));
        case Kind::other:
            return other(std::move(tasks.front()));
    }
}

void Worker::insert(Tasks tasks) {
    std::vector<Fresh> rows;
    rows.reserve(tasks.size());
    for (const TaskPtr& task : tasks)
        rows.push_back(fresh_of(task->key, std::get<Acquire>(task->operation)));
    auto tried = asked(tasks, [&](const Ask& ask) { return session_->insert(rows, ask); });
    if (auto* problem = std::get_if<Problem>(&tried))
        return kept(std::move(tasks), std::move(*problem), Step::write);
    auto& outcomes = std::get<0>(tried);
    SEMEL_ASSERT(outcomes.size() == tasks.size(), "a session gives one outcome per row");
    std::vector<Pending> pending;
    for (std::size_t i = 0; i < tasks.size(); ++i) {
        TaskPtr& task = tasks[i];
        if (const auto* inserted = std::get_if<Inserted>(&outcomes[i])) {
            told(inserted->created);
            const StoreTime at = inserted->created;
            core::Granted granted{.kind = core::Granted::Kind::fresh,
                                  .token = {static_cast<std::uint64_t>(at.us)},
                                  .attempt = 1,
                                  .generation = 1,
                                  .lease_end = at + rows[i].lease,
                                  .possible_second_payment = false,
                                  .created = at};
            answer(std::move(task), Decided{granted, at});
        } else if (auto* present = std::get_if<Present>(&outcomes[i])) {
            told(present->at);
            decide(std::move(task), std::move(present->row), present->at, pending);
        } else {
            again(std::move(task), Kind::read);
        }
    }
    write(std::move(pending));
}

void Worker::complete(Tasks tasks) {
    std::vector<Completion> rows;
    rows.reserve(tasks.size());
    for (const TaskPtr& task : tasks)
        rows.push_back(completion_of(task->key, std::get<core::Complete>(task->operation)));
    auto tried = asked(tasks, [&](const Ask& ask) { return session_->complete(rows, ask); });
    if (auto* problem = std::get_if<Problem>(&tried))
        return kept(std::move(tasks), std::move(*problem), Step::write);
    auto& outcomes = std::get<0>(tried);
    SEMEL_ASSERT(outcomes.size() == tasks.size(), "a session gives one outcome per row");
    for (std::size_t i = 0; i < tasks.size(); ++i) {
        if (!outcomes[i]) {
            // Repeated, late or fenced: what it is says decide().
            again(std::move(tasks[i]), Kind::change);
            continue;
        }
        const StoreTime at = outcomes[i]->completed;
        told(at);
        outcomes[i]->body = std::move(rows[i].body);
        auto record = record_of(std::move(*outcomes[i]), true);
        if (record) {
            answer(std::move(tasks[i]), Decided{core::Applied{std::move(*record)}, at});
        } else {
            answer(std::move(tasks[i]), shared_.error_of(record.error(), Applied::yes));
        }
    }
}

void Worker::look(Tasks tasks) {
    std::vector<StoredKey> keys;
    keys.reserve(tasks.size());
    for (const TaskPtr& task : tasks) keys.push_back(task->key);
    auto tried = asked(tasks, [&](const Ask& ask) { return session_->read(keys, true, ask); });
    if (auto* problem = std::get_if<Problem>(&tried))
        return kept(std::move(tasks), std::move(*problem), Step::read);
    auto& read = std::get<ReadRows>(tried);
    SEMEL_ASSERT(read.rows.size() == tasks.size(), "a session gives one row, or none, per key");
    told(read.at);
    std::vector<Pending> pending;
    for (std::size_t i = 0; i < tasks.size(); ++i)
        decide(std::move(tasks[i]), std::move(read.rows[i]), read.at, pending);
    write(std::move(pending));
}

void Worker::park(Tasks tasks) {
    std::vector<Parking> messages;
    messages.reserve(tasks.size());
    for (const TaskPtr& task : tasks) {
        const auto& park = std::get<core::Park>(task->operation);
        messages.push_back({task->key, park.fence, park.place, park.bytes});
    }
    auto tried = asked(tasks, [&](const Ask& ask) { return session_->park(messages, ask); });
    if (auto* problem = std::get_if<Problem>(&tried))
        return kept(std::move(tasks), std::move(*problem), Step::write);
    const auto& outcome = std::get<ParkOutcome>(tried);
    SEMEL_ASSERT(outcome.parked.size() == tasks.size(),
                 "a session says of each message whether it was parked");
    told(outcome.at);
    for (std::size_t i = 0; i < tasks.size(); ++i) {
        const StoreOutcome of_one =
            outcome.parked[i] ? StoreOutcome{core::Parked{}} : StoreOutcome{core::ParkingLost{}};
        answer(std::move(tasks[i]), Decided{of_one, outcome.at});
    }
}

void Worker::unpark(Tasks tasks) {
    std::vector<Place> places;
    places.reserve(tasks.size());
    for (const TaskPtr& task : tasks)
        places.push_back({task->key, std::get<core::Unpark>(task->operation).place});
    auto tried = asked(tasks, [&](const Ask& ask) { return session_->unpark(places, ask); });
    if (auto* problem = std::get_if<Problem>(&tried))
        return kept(std::move(tasks), std::move(*problem), Step::write);
    const StoreTime at = std::get<StoreTime>(tried);
    told(at);
    for (TaskPtr& task : tasks) answer(std::move(task), Decided{core::Unparked{}, at});
}

void Worker::other(TaskPtr task) {
    Tasks one;
    one.push_back(std::move(task));
    const Task& only = *one.front();
    auto tried =
        asked(one, [&](const Ask& ask) { return session_->other(only.key, only.operation, ask); });
    if (auto* problem = std::get_if<Problem>(&tried)) {
        const Step step = only_reads(only.operation) ? Step::read : Step::write;
        return kept(std::move(one), std::move(*problem), step);
    }
    auto& decided = std::get<Decided>(tried);
    told(decided.at);
    answer(std::move(one.front()), std::move(decided));
}

void Worker::decide(TaskPtr task, std::optional<Row> row, StoreTime at,
                    std::vector<Pending>& pending) {
    RecordPtr record;
    const std::int64_t version = row ? row->version : 0;
    if (row) {
        auto found = record_of(std::move(*row), true);
        if (!found) {
            base::Error error = shared_.error_of(found.error(), Applied::no);
            error.detail += " (intent " + base::base64url(task->key.view()) + ")";
            return refuse(std::move(task), std::move(error));
        }
        record = std::move(*found);
    }
    if (task->look == Look::own_grant) {
        const bool granted = record && record->status == Status::processing &&
                             record->nonce == std::get<Acquire>(task->operation).nonce;
        if (granted) return answer(std::move(task), Decided{repeated(*record), at});
        return refuse(std::move(task), {});
    }
    if (task->look == Look::known && !(record && record->status == Status::completed))
        shared_.known_completed.forget(task->key);

    Transition transition = core::decide(record, operation_on_record(task->operation), at);
    if (transition.write == Transition::Write::none)
        return answer(std::move(task), Decided{store_outcome(std::move(transition.outcome)), at});
    if (task->look == Look::full) return refuse(std::move(task), {});
    task->look = Look::no;
    if (!record) {
        SEMEL_ASSERT(std::holds_alternative<Acquire>(task->operation),
                     "only an acquire makes a record where there is none");
        return again(std::move(task), Kind::insert);
    }
    Change change{.version_seen = version,
                  .row = row_of(task->key, *transition.record, version + 1),
                  .not_after = at + decision_age_limit,
                  .append = std::move(transition.append),
                  .at = at};
    if (const auto* acquire = std::get_if<Acquire>(&task->operation))
        change.not_after = std::min(change.not_after, acquire->not_after);
    task->kind = Kind::change;
    pending.push_back({std::move(task), std::move(change),
                       Decided{store_outcome(std::move(transition.outcome)), at}});
}

void Worker::write(std::vector<Pending> pending) {
    if (pending.empty()) return;
    Tasks tasks;
    std::vector<Change> changes;
    std::vector<Decided> decided;
    std::set<StoredKey> conversations;
    for (Pending& each : pending) {
        if (each.change.append && !conversations.insert(each.change.append->conversation).second) {
            again(std::move(each.task), Kind::change);  // no conversation twice in one statement
            continue;
        }
        tasks.push_back(std::move(each.task));
        changes.push_back(std::move(each.change));
        decided.push_back(std::move(each.decided));
    }
    auto tried = asked(tasks, [&](const Ask& ask) { return session_->replace(changes, ask); });
    if (auto* problem = std::get_if<Problem>(&tried))
        return kept(std::move(tasks), std::move(*problem), Step::write);
    const auto& replaced = std::get<0>(tried);
    SEMEL_ASSERT(replaced.size() == tasks.size(),
                 "a session says of each row whether it was replaced");
    for (std::size_t i = 0; i < tasks.size(); ++i) {
        if (replaced[i]) {
            answer(std::move(tasks[i]), std::move(decided[i]));
        } else {
            again(std::move(tasks[i]), Kind::change);  // another was faster, or it came too late
        }
    }
}

// ---------------------------------------------------------------- what goes wrong

void Worker::kept(Tasks tasks, Problem problem, Step step) {
    switch (problem.trouble) {
        case Trouble::contended:
            if (tasks.size() > 1) return one_by_one(std::move(tasks));
            return locked(std::move(tasks.front()));
        case Trouble::refused:
            if (tasks.size() > 1) return one_by_one(std::move(tasks));
            return refuse(std::move(tasks.front()), shared_.error_of(problem.error, Applied::no));
        case Trouble::full:
            shared_.standing.full();
            for (TaskPtr& task : tasks) no_room(std::move(task), problem);
            return;
        case Trouble::not_writable:
            for (TaskPtr& task : tasks) {
                const Kind kind = task->kind;
                again(std::move(task), kind);
            }
            return;
        case Trouble::lost:
            for (TaskPtr& task : tasks) lost(std::move(task), problem, step);
            return;
    }
}

void Worker::one_by_one(Tasks tasks) {
    singly_ = true;
    for (TaskPtr& task : tasks) {
        const Kind kind = task->kind;
        if (!session_) {
            again(std::move(task), kind);
            continue;
        }
        Tasks one;
        one.push_back(std::move(task));
        work(std::move(one));
    }
    singly_ = false;
}

void Worker::locked(TaskPtr task) {
    const milliseconds pause =
        std::min(locked_again_max, locked_again_first * (1 << std::min<int>(task->locked, 8)));
    if (task->locked == 0) task->locked_since = steady_clock::now();
    if (task->locked < UINT8_MAX) ++task->locked;
    task->alone = true;
    task->ready = steady_clock::now() + pause;
    const Kind kind = task->kind;
    again(std::move(task), kind);
}

void Worker::no_room(TaskPtr task, const Problem& problem) {
    base::Error error = problem.error;
    error.code = base::ErrorCode::store_full;
    error = shared_.error_of(std::move(error), Applied::no);
    // What the record says may need no write.
    if (task->kind != Kind::insert) return refuse(std::move(task), std::move(error));
    task->look = Look::full;
    task->error = std::move(error);
    again(std::move(task), Kind::read);
}

void Worker::lost(TaskPtr task, const Problem& problem, Step step) {
    // Should it be this one that breaks connections, it breaks no more of the others'.
    if (++task->lost > 1) {
        task->alone = true;
        task->ready = steady_clock::now();
    }
    const Kind kind = task->kind;
    if (problem.error.applied == Applied::no || (step == Step::read && !task->read_again)) {
        if (problem.error.applied != Applied::no) task->read_again = true;
        const bool graver = task->look == Look::own_grant || task->look == Look::full;
        if (!graver) task->error = problem.error;
        return again(std::move(task), kind);
    }
    if (step == Step::read)
        return refuse(std::move(task), shared_.error_of(problem.error, Applied::no));
    base::Error error = shared_.error_of(problem.error, Applied::unknown);
    if (!std::holds_alternative<Acquire>(task->operation))
        return answer(std::move(task), std::move(error));
    // Asked again it could be granted twice, the second time to nobody.
    task->look = Look::own_grant;
    task->error = std::move(error);
    task->since = task->ready = steady_clock::now();
    again(std::move(task), Kind::read);
}

void Worker::again(TaskPtr task, Kind kind) {
    task->kind = kind;
    if (shared_.limit_of(*task) <= steady_clock::now()) return shared_.give_up(std::move(task));
    shared_.queue.again(std::move(task));
}

void Worker::refuse(TaskPtr task, base::Error error) {
    if (task->look == Look::own_grant || task->look == Look::full) error = std::move(*task->error);
    shared_.queue.answer(std::move(task), std::move(error));
}

void Worker::answer(TaskPtr task, base::Result<Decided> result) {
    if (result) {
        const RecordPtr* record = nullptr;
        if (const auto* applied = std::get_if<core::Applied>(&result->outcome))
            record = &applied->record;
        if (const auto* replay = std::get_if<core::Replay>(&result->outcome))
            record = &replay->record;
        if (record != nullptr && *record && (*record)->status == Status::completed)
            shared_.known_completed.remember(task->key);
    }
    shared_.queue.answer(std::move(task), std::move(result));
}

}  // namespace semel::sql
