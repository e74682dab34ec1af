// An executor that notes what goes over its connection, and can lose an answer.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sql/executor.hpp"

namespace semel::support {

/// What was sent by any of the executors that share it: the texts of each round trip.
class Trips {
  public:
    void add(std::span<const sql::Statement> statements) {
        std::vector<std::string> texts;
        for (const sql::Statement& one : statements) texts.push_back(one.text);
        const std::lock_guard lock(mutex_);
        trips_.push_back(std::move(texts));
    }
    void clear() {
        const std::lock_guard lock(mutex_);
        trips_.clear();
    }
    [[nodiscard]] std::size_t size() const {
        const std::lock_guard lock(mutex_);
        return trips_.size();
    }
    /// Statements that begin so.
    [[nodiscard]] std::size_t statements(std::string_view begin) const {
        const std::lock_guard lock(mutex_);
        std::size_t found = 0;
        for (const auto& trip : trips_)
            found += static_cast<std::size_t>(std::count_if(
                trip.begin(), trip.end(), [&](const auto& one) { return one.starts_with(begin); }));
        return found;
    }

  private:
    mutable std::mutex mutex_;
    std::vector<std::vector<std::string>> trips_;
};

class WatchedTrips final : public sql::Executor {
  public:
    WatchedTrips(std::shared_ptr<sql::Executor> inner, Trips& trips)
        : inner_(std::move(inner)), trips_(trips) {}

    /// The answer to the next COMMIT that has others behind it in its trip never comes.
    void lose_next_commit_on_the_way() { lose_ = true; }

    [[nodiscard]] sql::Dialect dialect() const override { return inner_->dialect(); }
    [[nodiscard]] bool in_transaction() const override {
        return inner_ != nullptr && inner_->in_transaction();
    }
    [[nodiscard]] bool aborted() const override { return inner_ != nullptr && inner_->aborted(); }
    using Executor::run;
    sql::Tried<std::vector<sql::ResultRows>> run(std::span<const sql::Statement> statements,
                                                 std::size_t* failed) override {
        trips_.add(statements);
        auto answer = inner_->run(statements, failed);
        const bool commits = !statements.empty() &&
                             std::any_of(statements.begin(), statements.end() - 1,
                                         [](const auto& one) { return one.text == "COMMIT"; });
        if (!lose_ || !commits) return answer;
        lose_ = false;
        inner_.reset();
        if (failed != nullptr) *failed = 0;
        return sql::Problem{.trouble = sql::Trouble::lost,
                            .error = {.code = base::ErrorCode::store_unavailable,
                                      .applied = base::Applied::unknown,
                                      .detail = "the answer was lost"}};
    }

  private:
    std::shared_ptr<sql::Executor> inner_;
    Trips& trips_;
    bool lose_ = false;
};

}  // namespace semel::support
