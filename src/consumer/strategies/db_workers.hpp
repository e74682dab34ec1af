// Threads that each hold one connection to the user's database.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "consumer/message.hpp"
#include "inbox/inbox.hpp"
#include "runtime/loop.hpp"

namespace semel::consumer {

using std::chrono::milliseconds;

/// As `connect`; what it throws is a Problem.
inbox::Tried<std::shared_ptr<sql::Executor>> connect_safely(const inbox::Connect& connect);

/// Whether a refusal is the statement's and not a value's: no such table or column, a type that
/// cannot be, a permission. Then no message is to blame.
bool statement_is_wrong(const std::string& detail);

/// A connection that is made anew when it was lost. For one thread.
class Link {
  public:
    /// First wait after a failed connect; doubled up to the other.
    static constexpr milliseconds backoff_first{100};
    static constexpr milliseconds backoff_max{10'000};

    Link(inbox::Connect connect, const std::atomic<bool>& abandoned, unsigned number);

    /// Of its thread among those of its DbWorkers, from 0.
    [[nodiscard]] unsigned number() const { return number_; }

    /// Whether there is a connection outside of any transaction; makes one if it is time to try
    /// again. False: why() says what is wrong.
    bool ready();
    [[nodiscard]] const std::string& why() const { return why_; }
    [[nodiscard]] std::shared_ptr<sql::Executor>& connection() { return connection_; }
    /// For who has lost it in the middle.
    [[nodiscard]] const inbox::Connect& reconnect() const { return watched_; }
    /// After Trouble::lost or not_writable.
    void drop() { connection_.reset(); }
    /// Statements before which the fault points consumer.claim.after and consumer.effect.before
    /// lie.
    void effects(std::set<std::string> texts) { effects_ = std::move(texts); }

  private:
    class Watched;

    inbox::Connect watched_;
    const unsigned number_;
    std::set<std::string> effects_;
    std::shared_ptr<sql::Executor> connection_;
    std::string why_;
    milliseconds backoff_{0};
    std::chrono::steady_clock::time_point next_try_{};
};

class DbWorkers {
  public:
    /// Runs on one of the threads, with its connection.
    using Work = std::function<void(Link&)>;

    DbWorkers(const inbox::Connect& connect, unsigned connections);
    /// Waits for what runs; what has not begun is dropped.
    ~DbWorkers();
    DbWorkers(const DbWorkers&) = delete;
    DbWorkers& operator=(const DbWorkers&) = delete;

    /// Any thread.
    void start(Work work);
    [[nodiscard]] unsigned size() const { return static_cast<unsigned>(threads_.size()); }
    /// From now on every statement fails as on a lost connection, unsent: what is open is rolled
    /// back by the server. Any thread.
    void abandon() { abandoned_ = true; }

  private:
    void run(const inbox::Connect& connect, unsigned number);

    std::atomic<bool> abandoned_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<Work> queue_;
    bool over_ = false;
    std::vector<std::thread> threads_;
};

/// The same for a loop: work that ends there. For the loop's thread.
class LoopWorkers {
  public:
    /// On a connection's thread; what it gives back runs on the loop.
    using Work = std::function<std::function<void()>(Link&)>;

    LoopWorkers(runtime::Loop& loop, const inbox::Connect& connect, unsigned connections);
    /// Abandons what runs and waits for it; its ends are dropped.
    ~LoopWorkers();

    void start(Work work);
    /// Called on the loop whenever something has ended, after what it gave back.
    std::function<void()> on_end;
    [[nodiscard]] std::size_t running() const { return running_; }
    [[nodiscard]] std::size_t size() const { return workers_->size(); }
    void abandon() { workers_->abandon(); }

  private:
    runtime::Loop& loop_;
    std::size_t running_ = 0;
    std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
    std::unique_ptr<DbWorkers> workers_;
};

/// Into parts that may run side by side: a lane stays in one part, in its order; a part has at most
/// `most` messages unless one lane has more.
std::vector<std::vector<Message*>> split_by_lanes(std::vector<Message*> messages, std::size_t most);

}  // namespace semel::consumer
