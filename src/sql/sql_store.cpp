#include "sql/sql_store.hpp"

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>
#include <vector>

#include "sql/worker.hpp"

namespace semel::sql {
namespace {

using core::Item;
using std::chrono::steady_clock;

/// How exactly patience is kept.
constexpr milliseconds patience_step{50};
/// Rows that one statement of a purge removes at most, so that it holds no lock for long.
constexpr std::size_t purge_statement_rows = 256;
/// A listing or a purge that met a lock, or a connection that had died meanwhile, is asked again.
constexpr int listing_tries = 3;

/// Scans and purges, one statement at a time on a session of their own. Thread-safe.
class Listing {
  public:
    explicit Listing(Shared& shared) : shared_(shared) {}

    base::Result<core::ScanPage> scan(const core::ScanFilter& filter, const std::string& cursor,
                                      std::size_t limit) {
        if (!cursor.empty() && cursor.size() != StoredKey{}.bytes.size()) {
            return shared_.error_of({.code = base::ErrorCode::invalid_argument,
                                     .detail = "scan cursor is not one of this store's; start "
                                               "again without a cursor"},
                                    base::Applied::no);
        }
        limit = std::clamp<std::size_t>(limit, 1, SIZE_MAX - 1);
        core::ScanPage page;
        // The time before the rows: what had expired by then had expired.
        auto at =
            call<StoreTime>([](Session& session, const Ask& ask) { return session.time(ask); });
        if (!at) return at.error();
        page.at = *at;
        // One more than wanted says whether there is another page.
        auto rows = call<std::vector<Row>>([&](Session& session, const Ask& ask) {
            return session.list(filter, cursor, limit + 1, ask);
        });
        if (!rows) return rows.error();
        if (rows->size() > limit) {
            rows->resize(limit);
            page.next = std::string(rows->back().key.view());
        }
        page.records.reserve(rows->size());
        for (Row& row : *rows) {
            const StoredKey key = row.key;
            auto record = record_of(std::move(row), false);
            if (!record) {
                base::Error error = shared_.error_of(record.error(), base::Applied::no);
                error.detail += " (intent " + base::base64url(key.view()) + ")";
                return error;
            }
            page.records.emplace_back(key, std::move(*record));
        }
        return page;
    }

    base::Result<std::size_t> purge(std::size_t limit) {
        std::size_t gone = 0;
        while (gone < limit) {
            const std::size_t rows = std::min(limit - gone, purge_statement_rows);
            auto step = call<PurgeCounts>(
                [&](Session& session, const Ask& ask) { return session.purge(rows, ask); });
            if (!step) return step.error();
            gone += step->records + step->conversations;
            if (step->records + step->conversations + step->chunks < rows) break;
        }
        return gone;
    }

    /// Nothing is asked from now on.
    void stop() {
        const std::lock_guard lock(mutex_);
        stopped_ = true;
        session_.reset();
    }

  private:
    template <class T, class Fn>
    base::Result<T> call(Fn&& fn) {
        const std::lock_guard lock(mutex_);
        for (int tries = 1;; ++tries) {
            if (stopped_) {
                return shared_.error_of({.code = base::ErrorCode::stopping,
                                         .detail = "the store is stopped; nothing was done"},
                                        base::Applied::no);
            }
            if (!session_) {
                auto tried = shared_.connect();
                if (auto* problem = std::get_if<Problem>(&tried))
                    return shared_.error_of(std::move(problem->error), base::Applied::no);
                session_ = std::move(std::get<0>(tried));
            }
            auto tried = fn(*session_, shared_.ask(shared_.options.lock_wait));
            if (auto* value = std::get_if<0>(&tried)) return std::move(*value);
            Problem& problem = std::get<Problem>(tried);
            const bool broken =
                problem.trouble == Trouble::lost || problem.trouble == Trouble::not_writable;
            if (broken) session_.reset();
            if (tries == listing_tries || !(broken || problem.trouble == Trouble::contended))
                return shared_.error_of(problem.error, problem.error.applied);
        }
    }

    Shared& shared_;
    std::mutex mutex_;  // guards all below, and is held while a statement runs
    bool stopped_ = false;
    std::unique_ptr<Session> session_;
};

class SqlStore final : public core::Store, public core::AnswersSingly {
  public:
    SqlStore(SqlStoreOptions options, Connect connect, std::unique_ptr<Session> first)
        : shared_(std::move(options), std::move(connect)), listing_(shared_) {
        const unsigned count = std::max(shared_.options.connections, 1U);
        if (first) look_at_clock(*first);
        for (unsigned i = 0; i < count; ++i)
            workers_.push_back(std::make_unique<Worker>(shared_, std::move(first)));
        for (const auto& worker : workers_)
            threads_.emplace_back([&each = *worker] { each.run(); });
        threads_.emplace_back([this] { watch(); });
    }
    ~SqlStore() override { stop(); }

    void submit(std::vector<Item> items, core::BatchDone done) override {
        if (items.empty()) return done({});
        Listener told(std::move(done));
        if (queued(items, told)) return;
        core::BatchResults refused;
        refused.reserve(items.size());
        for (std::size_t i = 0; i < items.size(); ++i) refused.emplace_back(stopping());
        std::get<core::BatchDone>(told)(std::move(refused));
    }
    void submit_singly(std::vector<Item> items, core::ItemDone done) override {
        if (items.empty()) return;
        Listener told(std::move(done));
        if (queued(items, told)) return;
        for (std::size_t i = 0; i < items.size(); ++i) std::get<core::ItemDone>(told)(i, stopping());
    }

    base::Result<core::ScanPage> scan(const core::ScanFilter& filter, const std::string& cursor,
                                      std::size_t limit) override {
        if (shared_.queue.closed()) return stopping();
        return listing_.scan(filter, cursor, limit);
    }
    base::Result<std::size_t> purge(std::size_t limit) override {
        if (shared_.queue.closed()) return stopping();
        return listing_.purge(limit);
    }
    [[nodiscard]] StoreTime now() const override {
        return shared_.options.time ? shared_.options.time() : shared_.standing.now();
    }
    [[nodiscard]] base::SteadyTime answering_since() const override {
        return shared_.standing.answering_since();
    }
    [[nodiscard]] core::Durability durability() const override {
        return shared_.options.durability;
    }
    base::Result<void> health() override {
        if (shared_.queue.closed()) return stopping();
        if (const std::string problem = shared_.standing.problem(); !problem.empty())
            return shared_.unavailable(problem);
        return {};
    }

    void stop() override {
        const std::lock_guard lock(stop_mutex_);
        shared_.queue.close();
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
        workers_.clear();
        listing_.stop();
    }

  private:
    [[nodiscard]] base::Error stopping() const {
        return shared_.error_of(
            {.code = base::ErrorCode::stopping, .detail = "the store is stopped; nothing was done"},
            base::Applied::no);
    }

    /// False: the store is stopped, and `done` was told nothing.
    bool queued(std::vector<Item>& items, Listener& done) {
        return shared_.queue.submit(
            items, done, [this](const StoredKey& key) { return shared_.known_completed.holds(key); });
    }

    /// So that now() is right from the start. What else is wrong with the session its worker will
    /// see.
    void look_at_clock(Session& session) {
        const SteadyTime sent = steady_clock::now();
        const auto tried = session.time(shared_.ask(shared_.options.lock_wait));
        const auto* at = std::get_if<StoreTime>(&tried);
        if (at == nullptr) return;
        const SteadyTime received = steady_clock::now();
        shared_.standing.answered(sent, received);
        shared_.standing.told(*at, sent, received);
    }

    void watch() {
        while (!shared_.queue.pause(patience_step)) {
            const SteadyTime now = steady_clock::now();
            shared_.standing.look(now);
            const auto limit = [this](const Task& task) { return shared_.limit_of(task); };
            for (TaskPtr& task : shared_.queue.expired(now, limit))
                shared_.give_up(std::move(task));
        }
    }

    Shared shared_;
    Listing listing_;
    std::vector<std::unique_ptr<Worker>> workers_;
    std::mutex stop_mutex_;             // guards the threads
    std::vector<std::thread> threads_;  // the workers' and the watch's
};

}  // namespace

std::unique_ptr<core::Store> make_sql_store(SqlStoreOptions options, Connect connect,
                                            std::unique_ptr<Session> first) {
    return std::make_unique<SqlStore>(std::move(options), std::move(connect), std::move(first));
}

}  // namespace semel::sql
