// Worker: one thread with one session, which takes batches from the queue and sees each task through or back into the queue.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "core/known_completed.hpp"
#include "sql/queue.hpp"
#include "sql/sql_store.hpp"
#include "sql/standing.hpp"

namespace semel::sql {

/// A contended row is waited for so long by the first statement of its own: others want the connection. Doubled each time, up to
/// the second: where the time-out is one of the whole statement (MariaDB), a slow disk must not look like a lock for ever.
inline constexpr milliseconds quick_lock_wait{10};
inline constexpr milliseconds long_lock_wait{500};
/// Between two tries for a locked row; doubled each time.
inline constexpr milliseconds locked_again_first{5};
inline constexpr milliseconds locked_again_max{50};
/// For a locked row while other items of its submission, which are answered together with it, wait for the answer.
inline constexpr milliseconds siblings_patience{500};
/// A decision that could not be written for so long is not written any more: it was made for another moment.
inline constexpr milliseconds decision_age_limit{2000};
/// Between two tries to connect; doubled each time.
inline constexpr milliseconds session_again_first{20};
inline constexpr milliseconds session_again_max{1000};

/// What the workers of one store share.
class Shared {
  public:
    Shared(SqlStoreOptions options_given, Connect connect_given)
        : options(std::move(options_given)),
          connect(std::move(connect_given)),
          queue(std::max<std::size_t>(options.batch_max, 1)) {}

    const SqlStoreOptions options;
    const Connect connect;
    Queue queue;
    Standing standing;
    core::KnownCompleted known_completed;

    [[nodiscard]] Ask ask(milliseconds lock_wait) const;
    /// When the task is given up.
    [[nodiscard]] SteadyTime limit_of(const Task& task) const;
    /// Answers it with what it was kept from.
    void give_up(TaskPtr task);
    /// The error as the store tells it.
    [[nodiscard]] base::Error error_of(base::Error error, base::Applied applied) const;
    [[nodiscard]] base::Error unavailable(const std::string& why) const;
};

class Worker {
  public:
    Worker(Shared& shared, std::unique_ptr<Session> session);

    /// Until the queue ends.
    void run();

  private:
    /// Whether a statement that failed could have changed anything.
    enum class Step : std::uint8_t { read, write };
    /// A decision that is to be written.
    struct Pending {
        TaskPtr task;
        Change change;
        core::Decided decided;
    };

    bool connect();
    void probe();

    void work(Tasks tasks);
    void insert(Tasks tasks);
    void complete(Tasks tasks);
    void look(Tasks tasks);
    void park(Tasks tasks);
    void unpark(Tasks tasks);
    void other(TaskPtr task);

    /// Decides on a row that was read (empty: there is none). What is to be written is added to `pending`, the rest is answered.
    void decide(TaskPtr task, std::optional<Row> row, StoreTime at, std::vector<Pending>& pending);
    void write(std::vector<Pending> pending);

    /// A statement for these tasks did not do its work.
    void kept(Tasks tasks, Problem problem, Step step);
    void one_by_one(Tasks tasks);
    void locked(TaskPtr task);
    void no_room(TaskPtr task, const Problem& problem);
    void lost(TaskPtr task, const Problem& problem, Step step);
    /// Asks it again as `kind`, or gives it up.
    void again(TaskPtr task, Kind kind);
    void answer(TaskPtr task, base::Result<core::Decided> result);
    /// Answers it with the error, unless it had a graver one before.
    void refuse(TaskPtr task, base::Error error);

    /// Calls the session and keeps when it was asked and when it answered.
    template <class Fn>
    auto asked(const Tasks& tasks, Fn&& fn);
    void told(StoreTime at) { shared_.standing.told(at, sent_, received_); }

    Shared& shared_;
    std::unique_ptr<Session> session_;
    bool singly_ = false;  ///< A batch that failed is being repeated item by item.
    milliseconds pause_{0};  ///< Before the next connection; 0 once a statement was answered.
    SteadyTime sent_;
    SteadyTime received_;
};

}  // namespace semel::sql
