// Observer: looks at the messages of a source and counts what a consumer would find: ids, messages
// without one, duplicates, mismatches. It has no store, no handler and nowhere to publish, so that
// there is nothing it could change.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "brokers/source.hpp"
#include "consumer/identity.hpp"
#include "consumer/runner.hpp"
#include "consumer/seen_ids.hpp"

namespace semel::consumer {

/// What a message would be for a consumer that runs; each is exactly one of these.
enum class Observed : std::uint8_t {
    first,      ///< Its id was not seen before.
    duplicate,  ///< Its id was seen before, on the same message.
    mismatch,   ///< Its id was seen before, on another message.
    missing_id,
    undecodable,
    tombstone,  ///< on_tombstone: dead_letter.
    skipped,    ///< By on_missing_id: skip or on_tombstone: skip.
};
inline constexpr std::size_t observed_kinds = 7;
[[nodiscard]] const char* name_of(Observed what);

/// Read by telemetry. Thread-safe.
struct ObserverCounters {
    std::array<std::atomic<std::uint64_t>, observed_kinds> messages{};  ///< By Observed.
    std::array<std::atomic<std::uint64_t>, id_places> ids{};            ///< By IdFrom.
    /// Ids that had to make room for later ones: what comes again after that counts as first.
    std::atomic<std::uint64_t> forgotten{0};
};

struct ObserverOptions {
    std::string name;
    std::string group;
    IdentityRules identity;
    std::size_t ids_max = seen_ids_max;
};

/// One source that observes (it settles nothing at its broker). The source, which it starts and
/// stops, and the counters outlive it.
class Observer final : public Runner, public brokers::Listener {
  public:
    Observer(ObserverOptions options, brokers::Source& source, ObserverCounters& counters);
    ~Observer() override;

    base::Result<void> start() override;
    void pause(std::string reason) override;
    void resume() override;
    void drain() override;
    [[nodiscard]] ConsumerState state() const override;
    void stop() override;

    // Listener, on the source's poll thread, where the messages are looked at.
    void assigned(const std::vector<brokers::AssignmentPtr>& which) override;
    void delivered(std::vector<brokers::Delivery> messages) override;
    void revoked(const std::vector<brokers::AssignmentPtr>& which,
                 base::SteadyTime deadline) override;
    void released(const std::vector<brokers::AssignmentPtr>& which) override;
    void lost(const std::vector<brokers::AssignmentPtr>& which) override;
    void problem(const brokers::Problem& what) override;

    /// What it promises, for people.
    static std::string promise();

  private:
    void look_at(brokers::Delivery&& delivery);
    void count(Observed what) {
        counters_.messages.at(static_cast<std::size_t>(what))
            .fetch_add(1, std::memory_order_relaxed);
    }
    void show(std::string condition, std::string reason);
    /// Keeps the newest sentence about each thing.
    void tell(const std::string& about, std::string sentence);

    const ObserverOptions options_;
    brokers::Source& source_;
    ObserverCounters& counters_;
    const Identity identity_;
    SeenIds seen_;  ///< The poll thread's.
    std::atomic<bool> drained_{false};
    std::atomic<bool> stopped_{false};

    mutable std::mutex mutex_;  ///< Guards the members below.
    std::string condition_ = "stopped", reason_ = "not started";
    std::vector<std::pair<std::string, std::string>> told_;  ///< What about, and the sentence.
};

}  // namespace semel::consumer
