// Queue: what was submitted and not yet answered, in batches of like operations for whoever asks next.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <variant>
#include <vector>

#include "core/answers_singly.hpp"
#include "core/store.hpp"
#include "sql/session.hpp"

namespace semel::sql {

using base::SteadyTime;

/// What a task asks the database next. Like ones share a statement.
enum class Kind : std::uint8_t {
    insert,    ///< An acquire: a first grant, or the row that was there.
    complete,  ///< The statement that completes.
    read,      ///< Reads the row and expects to write nothing; if it must, the task becomes a `change`.
    change,    ///< Reads the row, decides, replaces it.
    park,      ///< Puts messages into lists.
    unpark,    ///< Takes messages out of lists.
    other,     ///< What is not a record. Never more than one to a statement.
};
inline constexpr std::size_t kinds = 7;
/// A statement that parks so many bytes takes no more messages.
inline constexpr std::size_t parked_bytes_max = 1U << 20;

/// Who is told the answers: once for all of them, or of each.
using Listener = std::variant<core::BatchDone, core::ItemDone>;

/// One submitted batch until its last item is answered.
struct Submission;

/// One item of a submission.
struct Task {
    /// Why an acquire is read. `error` is its answer unless the row knows a better one.
    enum class Look : std::uint8_t {
        no,
        known,     ///< The key is known to be completed: a replay writes nothing.
        full,      ///< A write was refused for want of room: perhaps there is nothing to write.
        own_grant  ///< The answer to a write was lost: the row tells by the nonce whether it was granted.
    };

    std::shared_ptr<Submission> submission;
    std::size_t index = 0;
    StoredKey key;
    StoredKey touches;                      ///< See core::touched_by: never twice in a statement.
    std::optional<StoredKey> conversation;  ///< That a completion appends to.
    core::StoreOperation operation;
    Kind kind = Kind::other;
    Look look = Look::no;
    bool alone = false;    ///< Kept a statement from working, or may have: shares none any more.
    bool in_company = false;  ///< Others of its submission are told their answers only with its own.
    bool read_again = false;  ///< A read whose answer was lost was asked again once.
    std::uint8_t lost = 0;    ///< Connections that broke under it.
    std::uint8_t locked = 0;  ///< Times that its row was locked.
    SteadyTime since;         ///< What its patience counts from.
    SteadyTime locked_since;  ///< If `locked`.
    SteadyTime ready;         ///< Not asked before. Of several the earliest is next.
    std::optional<base::Error> error;  ///< What it was kept from last, or see `look`.
    // Of the submission: those that are queued once this one is answered, and how many this one waits for.
    std::vector<std::size_t> followers;
    std::size_t waits_for = 0;
};
using TaskPtr = std::unique_ptr<Task>;
using Tasks = std::vector<TaskPtr>;

/// The kind that an operation begins with. `known`: its key is known to be completed.
Kind first_kind(const core::StoreOperation& operation, bool known);

/// Thread-safe. Calls nobody while it holds its lock.
class Queue {
  public:
    explicit Queue(std::size_t batch_max) : batch_max_(batch_max) {}

    /// Splits the items into tasks and queues those that need not wait for another of them: items that touch one key, one
    /// conversation, or one place of a list, are asked one after the other. False: closed; `items` and `done` are as they were.
    bool submit(std::vector<core::Item>& items, Listener& done, const std::function<bool(const StoredKey&)>& known);
    /// Puts a task back that must be asked again, at its place by `ready`.
    void again(TaskPtr task);
    /// Gives the task its answer, and tells it on this thread: at once, or with the last of its submission. Queues the task that
    /// waited for it.
    void answer(TaskPtr task, base::Result<core::Decided> result);

    /// The next batch: one kind, no key, no conversation and no place of a list twice, no more than batch_max; blocks until there is one. Empty after
    /// `idle_after` without anything to do, or once ended() (look there).
    Tasks take(std::chrono::milliseconds idle_after);
    /// Takes out what has been waiting since before `limit_of(task)`.
    Tasks expired(SteadyTime now, const std::function<SteadyTime(const Task&)>& limit_of);

    /// From now on nothing is submitted. Blocks until everything is answered, then ends take() and pause().
    void close();
    [[nodiscard]] bool closed() const;
    [[nodiscard]] bool ended() const;
    /// Waits for `duration`, less if it ends meanwhile: true then.
    bool pause(std::chrono::milliseconds duration);
    /// Whether somebody waits for a connection.
    [[nodiscard]] bool waiting() const;

  private:
    void put(TaskPtr task);
    std::deque<TaskPtr>* earliest(SteadyTime now);

    const std::size_t batch_max_;
    mutable std::mutex mutex_;  // guards all below
    std::condition_variable work_;
    std::condition_variable end_;
    std::array<std::deque<TaskPtr>, kinds> queued_;
    std::multimap<SteadyTime, TaskPtr> alone_;  ///< By `ready`.
    std::size_t unanswered_ = 0;
    bool closed_ = false;
    bool ended_ = false;
};

}  // namespace semel::sql
