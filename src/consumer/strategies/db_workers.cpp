#include "consumer/strategies/db_workers.hpp"

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/fault_point.hpp"

namespace semel::consumer {

using sql::Executor;
using sql::Problem;
using sql::ResultRows;
using sql::Statement;
using sql::Tried;
using sql::Trouble;

Tried<std::shared_ptr<Executor>> connect_safely(const inbox::Connect& connect) {
    const auto lost = [](std::string detail) {
        return Problem{
            .trouble = Trouble::lost,
            .error = {.code = base::ErrorCode::store_unavailable, .detail = std::move(detail)}};
    };
    try {
        return connect();
    } catch (const std::exception& error) {
        return lost(std::string("no connection to the database: ") + error.what());
    } catch (...) {
        return lost("no connection to the database");
    }
}

bool statement_is_wrong(const std::string& detail) {
    if (detail.find("SQLSTATE 42") != std::string::npos) return true;
    // No permission (database, table, column, routine); no such database, column, table, routine; a
    // syntax error.
    constexpr std::array<std::string_view, 9> numbers{"1044", "1142", "1143", "1370", "1049",
                                                      "1054", "1146", "1305", "1064"};
    constexpr std::string_view words = "answered with error ";
    const std::size_t at = detail.find(words);
    if (at == std::string::npos) return false;
    std::string_view number = std::string_view(detail).substr(at + words.size());
    number = number.substr(0, number.find_first_not_of("0123456789"));
    return std::find(numbers.begin(), numbers.end(), number) != numbers.end();
}

/// The connection as the strategies use it: can be abandoned, and knows the fault points.
class Link::Watched final : public Executor {
  public:
    Watched(std::shared_ptr<Executor> inner, const std::atomic<bool>& abandoned,
            const std::set<std::string>& effects)
        : inner_(std::move(inner)), abandoned_(abandoned), effects_(effects) {}

    [[nodiscard]] sql::Dialect dialect() const override { return inner_->dialect(); }
    [[nodiscard]] bool in_transaction() const override { return inner_->in_transaction(); }
    [[nodiscard]] bool aborted() const override { return inner_->aborted(); }
    using Executor::run;
    Tried<std::vector<ResultRows>> run(std::span<const Statement> statements,
                                       std::size_t* failed) override {
        if (abandoned_) {
            if (failed != nullptr) *failed = 0;
            return Problem{
                .trouble = Trouble::lost,
                .error = {.code = base::ErrorCode::stopping, .detail = "the consumer is stopping"}};
        }
        if (base::fault_points_armed) pass(statements);
        return inner_->run(statements, failed);
    }

  private:
    void pass(std::span<const Statement> statements) const {
        if (!statements.empty() && effects_.contains(statements.front().text)) {
            base::fault_point("consumer.claim.after");
            base::fault_point("consumer.effect.before");
        }
        const bool commits = std::any_of(statements.begin(), statements.end(),
                                         [](const Statement& one) { return one.text == "COMMIT"; });
        // Of a transaction that began in an earlier trip: else nothing has happened yet.
        if (commits && inner_->in_transaction()) base::fault_point("consumer.effect.after");
    }

    std::shared_ptr<Executor> inner_;
    const std::atomic<bool>& abandoned_;
    const std::set<std::string>& effects_;
};

Link::Link(inbox::Connect connect, const std::atomic<bool>& abandoned, unsigned number)
    : watched_(
          [this, connect = std::move(connect), &abandoned]() -> Tried<std::shared_ptr<Executor>> {
              auto answer = connect_safely(connect);
              if (std::holds_alternative<Problem>(answer)) return answer;
              return std::shared_ptr<Executor>(
                  std::make_shared<Watched>(std::move(std::get<0>(answer)), abandoned, effects_));
          }),
      number_(number) {}

bool Link::ready() {
    // An open transaction is somebody's leftover: the server rolls it back.
    if (connection_ != nullptr && connection_->in_transaction()) drop();
    if (connection_ != nullptr) return true;
    const auto now = std::chrono::steady_clock::now();
    if (now < next_try_) return false;
    auto answer = watched_();
    if (auto* problem = std::get_if<Problem>(&answer)) {
        backoff_ = std::clamp(backoff_ * 2, backoff_first, backoff_max);
        next_try_ = std::chrono::steady_clock::now() + backoff_;
        why_ = std::move(problem->error.detail);
        return false;
    }
    backoff_ = milliseconds{0};
    next_try_ = {};
    connection_ = std::move(std::get<0>(answer));
    return true;
}

DbWorkers::DbWorkers(const inbox::Connect& connect, unsigned connections) {
    for (unsigned i = 0; i < std::max(connections, 1U); ++i)
        threads_.emplace_back([this, connect, i] { run(connect, i); });
}

DbWorkers::~DbWorkers() {
    {
        const std::lock_guard lock(mutex_);
        over_ = true;
        queue_.clear();
    }
    wake_.notify_all();
    for (std::thread& one : threads_) one.join();
}

void DbWorkers::start(Work work) {
    {
        const std::lock_guard lock(mutex_);
        queue_.push_back(std::move(work));
    }
    wake_.notify_one();
}

void DbWorkers::run(const inbox::Connect& connect, unsigned number) {
    Link link(connect, abandoned_, number);
    while (true) {
        Work work;
        {
            std::unique_lock lock(mutex_);
            wake_.wait(lock, [&] { return over_ || !queue_.empty(); });
            if (over_) return;
            work = std::move(queue_.front());
            queue_.pop_front();
        }
        work(link);
    }
}

LoopWorkers::LoopWorkers(runtime::Loop& loop, const inbox::Connect& connect, unsigned connections)
    : loop_(loop), workers_(std::make_unique<DbWorkers>(connect, connections)) {}

LoopWorkers::~LoopWorkers() {
    alive_.reset();
    workers_->abandon();
}

void LoopWorkers::start(Work work) {
    ++running_;
    // shared: the queue wants what can be copied
    auto shared = std::make_shared<Work>(std::move(work));
    workers_->start([this, alive = std::weak_ptr<bool>(alive_), shared](Link& link) {
        loop_.post([this, alive, then = (*shared)(link)] {
            if (alive.expired()) return;
            --running_;
            then();
            // What the answers bring about comes first: a breaker that opens holds back what waits
            // for this connection.
            loop_.post([this, alive] {
                if (!alive.expired() && on_end) on_end();
            });
        });
    });
}

std::vector<std::vector<Message*>> split_by_lanes(std::vector<Message*> messages,
                                                  std::size_t most) {
    std::vector<std::vector<Message*>> parts;
    if (messages.size() <= most) {
        parts.push_back(std::move(messages));
        return parts;
    }
    std::unordered_map<std::uint64_t, std::size_t> sizes, where;
    for (const Message* one : messages) ++sizes[one->lane];
    std::vector<std::size_t> filled;
    const auto place = [&](std::size_t size) {
        std::size_t part = 0;
        while (part < filled.size() && filled[part] + size > most) ++part;
        if (part == filled.size()) {
            filled.push_back(0);
            parts.emplace_back();
        }
        filled[part] += size;
        return part;
    };
    for (Message* one : messages) {
        if (one->lane == 0) {
            parts[place(1)].push_back(one);
            continue;
        }
        const auto found = where.find(one->lane);
        const std::size_t part =
            found != where.end() ? found->second : where[one->lane] = place(sizes[one->lane]);
        parts[part].push_back(one);
    }
    return parts;
}

}  // namespace semel::consumer
