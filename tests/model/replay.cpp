#include "model/replay.hpp"

#include <future>
#include <iostream>
#include <map>

#include "core/store.hpp"
#include "model/small_worlds.hpp"

using namespace semel;         // NOLINT: a test file
using namespace semel::core;   // NOLINT
using namespace semel::model;  // NOLINT

namespace {

constexpr std::size_t batch_max_items = 4096;

/// One sequence on its key: what the checker knows, and what decide() says that the store must
/// hold.
struct Played {
    StoredKey key;
    World world;
    RecordPtr expected;
    const std::vector<Step>* path;
};

BatchResults submit(Store& store, std::vector<Item> items) {
    auto promise = std::make_shared<std::promise<BatchResults>>();
    std::future<BatchResults> future = promise->get_future();
    store.submit(std::move(items),
                 [promise](BatchResults results) { promise->set_value(std::move(results)); });
    return future.get();
}

/// The outcome of an operation on a record, without what other operations may answer.
Outcome narrow(const StoreOutcome& outcome) {
    return std::visit(
        [](const auto& alternative) -> Outcome {
            if constexpr (std::is_constructible_v<Outcome, decltype(alternative)>)
                return alternative;
            else
                return Late{};
        },
        outcome);
}

RecordPtr live(const RecordPtr& record, StoreTime now) {
    return record && record->expires.us != 0 && record->expires <= now ? nullptr : record;
}

/// Plays step `number` of all of them: the operation and what Get shows afterwards, many keys to a
/// batch.
std::string play(Store& store, std::vector<Played>& all, std::size_t number) {
    for (std::size_t from = 0; from < all.size(); from += batch_max_items / 2) {
        const std::size_t to = std::min(all.size(), from + batch_max_items / 2);
        std::vector<Item> items;
        std::vector<Operation> asked;
        const bool time = passes_time((*all[from].path)[number]);
        for (std::size_t i = from; i < to; ++i) {
            const Played& played = all[i];
            if (!time) {
                asked.push_back(played.world.operation((*played.path)[number]));
                items.push_back(
                    {played.key, std::visit([](const auto& op) -> StoreOperation { return op; },
                                            asked.back())});
            }
            items.push_back({played.key, Get{}});
        }
        const BatchResults results = submit(store, std::move(items));
        std::size_t at = 0;
        for (std::size_t i = from; i < to; ++i) {
            Played& played = all[i];
            const Step& step = (*played.path)[number];
            const base::Result<Decided>* done = time ? nullptr : &results[at++];
            const base::Result<Decided>& shown = results[at++];
            std::string problem;
            if (!shown || (done != nullptr && !*done)) {
                problem = "error: " + (shown ? done->error().detail : shown.error().detail);
            } else {
                const RecordPtr seen = std::get<Found>(shown->outcome).record;
                if (done == nullptr) {
                    problem = played.world.observe_time(seen, shown->at);
                } else {
                    const Operation& operation = asked[i - from];
                    Transition right = decide(played.expected, operation, (*done)->at);
                    if (right.write != Transition::Write::none) played.expected = right.record;
                    problem = played.world.observe(step, operation, narrow((*done)->outcome), seen,
                                                   (*done)->at);
                    if (problem.empty() && right.outcome.index() != (*done)->outcome.index()) {
                        problem = "another outcome than decide's";
                    }
                }
                if (problem.empty() && !same_record(live(played.expected, shown->at), seen)) {
                    problem = "another record than decide's";
                }
            }
            if (!problem.empty())
                return problem + ": " + path_name(*played.path) + ", at step " +
                       std::to_string(number + 1);
        }
    }
    return "";
}

}  // namespace

TEST_P(SmallWorldsOnStore, every_sequence_keeps_the_invariants_and_answers_as_decide_does) {
    support::ManualClock clock;
    const std::unique_ptr<contract::StorePlace> place = GetParam().factory.make_place();
    const std::unique_ptr<Store> store = place->open(clock);
    for (const Rules& rules : all_rules()) {
        const std::vector<std::vector<Step>> paths = sequences(rules, GetParam().length);
        // The clock is one for all keys: those during whose sequences it moves alike are played
        // together.
        std::map<std::string, std::vector<const std::vector<Step>*>> by_time;
        for (const std::vector<Step>& path : paths) {
            std::string when;
            for (const Step& step : path) when += passes_time(step) ? name_of(step) : ".";
            by_time[when].push_back(&path);
        }
        for (const auto& [when, group] : by_time) {
            std::vector<Played> all;
            for (const std::vector<Step>* path : group) {
                const StoredKey key = base::sha256(rules.name + when + std::to_string(all.size()));
                all.push_back({key, World(rules, store->now()), nullptr, path});
            }
            for (std::size_t number = 0; number < group.front()->size(); ++number) {
                clock.advance(time_of((*group.front())[number]));
                ASSERT_EQ(play(*store, all, number), "") << rules.name;
            }
        }
        std::cout << rules.name << ": " << paths.size() << " sequences of up to "
                  << GetParam().length << " steps\n";
        // What is decided may go; the undecided must have stayed until now.
        clock.advance(std::chrono::hours{24 * 30});
        ASSERT_TRUE(store->purge(10'000'000));
    }
    store->stop();
}
