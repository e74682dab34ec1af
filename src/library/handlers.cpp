#include "library/handlers.hpp"

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "base/result.hpp"

namespace semel {

namespace {

template <class... Ts>
struct Overloaded : Ts... {
    using Ts::operator()...;
};

Message message_of(const consumer::Message& from) {
    Message out;
    out.id = from.id;
    out.source = from.source;
    out.topic = from.delivery.partition().topic;
    out.partition = from.delivery.partition().number;
    out.position = from.delivery.position();
    out.key = from.delivery.key;
    out.payload = from.delivery.value;
    out.headers.reserve(from.delivery.headers.size());
    for (const brokers::Header& header : from.delivery.headers)
        out.headers.emplace_back(header.name, header.value);
    return out;
}

/// Leaves the handler when a statement fails. What it was is in TransactionAccess.
class StatementFailed final : public std::exception {
  public:
    explicit StatementFailed(std::string what) : what_(std::move(what)) {}
    [[nodiscard]] const char* what() const noexcept override { return what_.c_str(); }

  private:
    std::string what_;
};

}  // namespace

/// What a Transaction stands on, while the handler runs.
class TransactionAccess {
  public:
    explicit TransactionAccess(sql::Executor& executor) : executor_(executor), transaction_(this) {}

    [[nodiscard]] Transaction& transaction() { return transaction_; }
    [[nodiscard]] std::optional<sql::Problem>& problem() { return problem_; }

    sql::ResultRows run(std::string_view text, std::initializer_list<Value> parameters) {
        if (problem_) throw StatementFailed(problem_->error.detail);  // the transaction is over
        sql::Statement statement{.text = std::string(text), .parameters = {}};
        for (const Value& one : parameters) {
            std::visit(
                Overloaded{[&](std::monostate) { statement.parameters.emplace_back(); },
                           [&](std::int64_t number) { statement.parameters.emplace_back(number); },
                           [&](std::string_view words) {
                               statement.parameters.emplace_back(std::string(words));
                           }},
                one);
        }
        auto answer = executor_.run(std::move(statement));
        if (auto* problem = std::get_if<sql::Problem>(&answer)) {
            problem_ = std::move(*problem);
            throw StatementFailed(problem_->error.detail);
        }
        return std::move(std::get<0>(answer));
    }
    static TransactionAccess& of(void* executor) {
        return *static_cast<TransactionAccess*>(executor);
    }

  private:
    sql::Executor& executor_;
    Transaction transaction_;
    std::optional<sql::Problem> problem_;  ///< The first; it decides, whatever the handler says.
};

std::int64_t Transaction::execute(std::string_view sql, std::initializer_list<Value> parameters) {
    return TransactionAccess::of(executor_).run(sql, parameters).affected;
}

std::vector<Row> Transaction::query(std::string_view sql, std::initializer_list<Value> parameters) {
    return TransactionAccess::of(executor_).run(sql, parameters).rows;
}

namespace library {

consumer::CallbackFunction callback_of(Handler handler) {
    return [handler = std::move(handler)](
               const consumer::Message& message,
               const consumer::Attempt& attempt) -> consumer::HandlerOutcome {
        Message out = message_of(message);
        out.attempt = attempt.number;
        out.fencing_token = attempt.token.value;
        return std::visit(
            Overloaded{[](Done&& said) -> consumer::HandlerOutcome {
                           if (!said.answer) return consumer::Handled{};
                           return consumer::Handled{std::make_shared<consumer::HandlerAnswer>(
                               std::move(said.answer->body), std::move(said.answer->content_type),
                               std::move(said.answer->headers))};
                       },
                       [](NotYet&& said) -> consumer::HandlerOutcome {
                           return consumer::HandledNotYet{std::move(said.reason), said.after};
                       },
                       [](Failed&& said) -> consumer::HandlerOutcome {
                           return consumer::HandledFailed{std::move(said.reason), said.after};
                       },
                       [](Fatal&& said) -> consumer::HandlerOutcome {
                           return consumer::HandledFatal{std::move(said.reason)};
                       },
                       [](Unknown&& said) -> consumer::HandlerOutcome {
                           return consumer::HandledUnknown{std::move(said.reason)};
                       }},
            handler(out));
    };
}

consumer::TransactionCallback callback_of(TransactionHandler handler, bool batchable) {
    const auto effect = [handler = std::move(handler)](
                            sql::Executor& executor,
                            const consumer::Message& message) -> inbox::EffectOutcome {
        TransactionAccess access(executor);
        Message out = message_of(message);
        out.attempt = std::max(1U, message.runs);
        inbox::EffectOutcome outcome;
        try {
            outcome = std::visit(
                Overloaded{[](const Done&) -> inbox::EffectOutcome { return inbox::Did{}; },
                           [](NotYet&& said) -> inbox::EffectOutcome {
                               return inbox::NotYet{std::move(said.reason)};
                           },
                           [](Failed&& said) -> inbox::EffectOutcome {
                               return inbox::Failed{std::move(said.reason), false};
                           },
                           [](Fatal&& said) -> inbox::EffectOutcome {
                               return inbox::Failed{std::move(said.reason), true};
                           },
                           [](Unknown&& said) -> inbox::EffectOutcome {
                               return inbox::Failed{std::move(said.reason), false};
                           }},
                handler(out, access.transaction()));
        } catch (const StatementFailed&) {
            SEMEL_ASSERT(access.problem().has_value(), "a statement fails with a problem");
        }
        if (access.problem()) return std::move(*access.problem());
        return outcome;
    };
    return {.effect = effect, .batchable = batchable};
}

}  // namespace library

}  // namespace semel
