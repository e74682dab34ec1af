// Consumer: takes messages from a source, has a strategy run them, and settles what is finished;
// retries, waits, gives up, pauses.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "brokers/source.hpp"
#include "consumer/breaker.hpp"
#include "consumer/copies.hpp"
#include "consumer/group_check.hpp"
#include "consumer/identity.hpp"
#include "consumer/parking.hpp"
#include "consumer/records.hpp"
#include "consumer/runner.hpp"
#include "consumer/strategy.hpp"
#include "deadletter/outlet.hpp"
#include "runtime/loop.hpp"

namespace semel::consumer {

/// Read by telemetry. Thread-safe. Counted by the strategy: mismatches, not_yet, unknown_outcomes,
/// takeovers, answers_gone, and as skipped what it passes over by a named rule. All else is counted
/// by the consumer, from what its strategy answers.
struct ConsumerCounters {
    std::atomic<std::uint64_t> received{0}, applied{0}, duplicates{0}, skipped{0}, mismatches{0};
    std::atomic<std::uint64_t> retries{0}, not_yet{0}, busy{0}, fenced{0}, unknown_outcomes{0},
        takeovers{0}, suspects{0};
    std::atomic<std::uint64_t> answers_gone{0};        ///< Duplicates whose answer was erased.
    std::array<std::atomic<std::uint64_t>, 9> dead{};  ///< By DeadClass: letters confirmed.
    std::atomic<std::uint64_t> letters_failed{
        0};  ///< Publications that were not confirmed (and are repeated).
    // Of answers.
    std::atomic<std::uint64_t> results_published{0};  ///< Confirmed.
    std::atomic<std::uint64_t> results_again{0};      ///< Of these, those of duplicates.
    std::atomic<std::uint64_t> results_failed{0};     ///< Publications that were not confirmed.
    std::atomic<std::uint64_t> copies{0};             ///< That wait at the broker: confirmed.
    std::atomic<std::uint64_t> copies_failed{0};
    std::atomic<std::uint64_t> stored{0};  ///< Put beside the records while they wait.
    std::atomic<std::uint64_t> stores_failed{0};
    std::atomic<std::uint64_t> breaker_opened{0}, assigned{0}, revoked{0}, lost{0};
    // Gauges.
    std::atomic<std::uint64_t> in_hand{0}, running{0}, waiting{0}, parked{0}, in_store{0},
        partitions{0}, paused_partitions{0};
    std::atomic<std::uint64_t> paused{0};           ///< 1: by a person. 2: the breaker is open.
    std::atomic<std::int64_t> watermark_age_ms{0};  ///< Of the oldest unfinished message in hand.
};

struct ConsumerOptions {
    std::string name;
    std::string group;
    IdentityRules identity;
    BreakerRules breaker;
    std::size_t park_limit = 5000;
    bool letters_stop = false;  ///< dead_letter: stop.
    /// Looks at the group where the records' store is not shared (group_check.hpp). Blocks; called
    /// on a thread of the consumer's after each assign, before its partitions begin. Who must not
    /// stay leaves the group: condition "refused", with the sentence; a sentence of one that stays
    /// is an alarm. Empty: nothing is checked.
    std::function<GroupFinding(brokers::Source&)> check_group;
    milliseconds letter_retry{1000};  ///< Between two tries to publish one letter, or one copy.
    /// Where messages wait for retry.delays; outlives the consumer. Null: in hand. With it there
    /// are no lanes (ordering: none).
    CopyOutlet* copies = nullptr;
    /// Where messages wait for longer than park_from, and those behind them; outlives the consumer.
    /// Only with a source that has positions. Null: in hand.
    Parking* parking = nullptr;
    milliseconds park_from{3000};
    milliseconds stop_drain{20'000};  ///< stop(): how long running handlers may take.
};

/// One source, one strategy. Lives on its own loop's thread; the functions below are thread-safe
/// unless they say otherwise. The loop, source, strategy, outlet and counters outlive it. One that
/// was started must be stopped before it ends.
class Consumer final : public Runner, public brokers::Listener {
  public:
    /// `outlet` may be null where letters_stop is set.
    Consumer(runtime::Loop& loop, ConsumerOptions options, brokers::Source& source,
             Strategy& strategy, deadletter::Outlet* outlet, ConsumerCounters& counters);
    ~Consumer() override;

    /// Joins the group. Once.
    base::Result<void> start() override;
    /// Takes nothing new and starts nothing; what runs ends. Membership stays.
    void pause(std::string reason) override;
    /// Ends a pause, closes the breaker, and runs again what stopped a lane (dead_letter: stop).
    void resume() override;
    /// As pause(), and leaves the group when nothing runs any more: for handing over on purpose.
    /// resume() does not undo it.
    void drain() override;
    [[nodiscard]] ConsumerState state() const override;
    [[nodiscard]] brokers::Source& source() { return source_; }

    /// Stops taking, lets running handlers and letters on their way end (stop_drain), settles,
    /// leaves. Blocks, for stop_drain and some seconds at most as far as the strategy's and the
    /// source's blocking calls keep their own limits; not on the loop, which must run. Idempotent.
    void stop() override;

    // Listener, on the source's poll thread.
    void assigned(const std::vector<brokers::AssignmentPtr>& which) override;
    void delivered(std::vector<brokers::Delivery> messages) override;
    void revoked(const std::vector<brokers::AssignmentPtr>& which,
                 base::SteadyTime deadline) override;
    void released(const std::vector<brokers::AssignmentPtr>& which) override;
    void lost(const std::vector<brokers::AssignmentPtr>& which) override;
    void problem(const brokers::Problem& what) override;

  private:
    class Impl;
    std::shared_ptr<Impl> impl_;  ///< Shared with what is posted to the loop.
    brokers::Source& source_;
};

}  // namespace semel::consumer
