#include "inbox/guarded.hpp"

#include <string>

#include "inbox/steps.hpp"
#include "inbox/words.hpp"

namespace semel::inbox {
namespace {

using sql::ResultRows;
using sql::Statement;

Statement savepoint(std::string_view words) {
    return {.text = std::string(words).append(savepoint_name), .parameters = {}};
}

}  // namespace

void Guarded::next() {
    wanted_ = savepoints_;
    problem_.reset();
}

std::vector<Statement> Guarded::undo() {
    if (wanted_ || !set_) return {};
    set_ = false;
    return {savepoint("ROLLBACK TO SAVEPOINT "), savepoint("RELEASE SAVEPOINT ")};
}

Tried<std::vector<ResultRows>> Guarded::run(std::span<const Statement> statements,
                                            std::size_t* failed) {
    std::size_t ignored = 0;
    std::size_t& at = failed != nullptr ? *failed : ignored;
    at = 0;
    // MySQL has rolled it all back after a deadlock: what came now would stand alone.
    if (!inner_.in_transaction())
        return refused("inbox: the transaction is over, roll back and do it all again");
    for (std::size_t i = 0; i < statements.size(); ++i) {
        if (!controls_transaction(statements[i].text, inner_.dialect())) continue;
        at = i;
        return refused(
            "inbox: an effect must not begin or end a transaction, nor use savepoints named "
            "semel: " +
            first_word(statements[i].text));
    }
    if (!wanted_) return noted(inner_.run(statements, &at));
    std::vector<Statement> trip;
    trip.reserve(statements.size() + 2);
    if (set_) trip.push_back(savepoint("RELEASE SAVEPOINT "));
    trip.push_back(savepoint("SAVEPOINT "));
    const std::size_t own = trip.size();
    trip.insert(trip.end(), statements.begin(), statements.end());
    auto answer = noted(inner_.run(trip, &at));
    auto* results = std::get_if<0>(&answer);
    if (results != nullptr || at >= own) {
        set_ = true;
        wanted_ = false;
    }
    if (results != nullptr)
        results->erase(results->begin(), results->begin() + static_cast<std::ptrdiff_t>(own));
    else
        at = at >= own ? at - own : 0;
    return answer;
}

Tried<std::vector<ResultRows>> Guarded::noted(Tried<std::vector<ResultRows>> answer) {
    if (const auto* problem = std::get_if<Problem>(&answer)) problem_ = *problem;
    return answer;
}

}  // namespace semel::inbox
