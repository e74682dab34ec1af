// FaultyStore: a store behind a bad network: lost, late and repeated requests and replies, outages.
// Deterministic.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/store.hpp"

namespace semel::support {

using std::chrono::microseconds;
using std::chrono::milliseconds;

/// What becomes of a batch.
enum class Fate {
    serve,         ///< Applied and answered.
    refuse,        ///< Not applied, and the caller knows it.
    drop,          ///< Not applied; the caller does not know.
    lose_reply,    ///< Applied; the caller does not know.
    execute_late,  ///< The caller is told that it is unknown; it is applied afterwards.
    delay_reply,   ///< Applied now, answered after `late_reply_min` to `late_max`.
    repeat,  ///< Applied twice. A batch with an acquire: back to back (its nonce makes that one
             ///< grant), else later.
};

/// Chances in 10,000 per batch, and delays.
struct StoreFaults {
    unsigned refuse = 0, drop = 0, lose_reply = 0, execute_late = 0, delay_reply = 0, repeat = 0;
    microseconds latency_min{100};
    microseconds latency_max{2000};
    milliseconds late_reply_min{
        2500};  ///< Above the engine's patience, so that a delayed reply counts as lost.
    milliseconds late_max{15000};
};

/// Single-threaded: everything happens in functions given to `later`.
class FaultyStore final : public core::Store {
  public:
    using Later = std::function<void(microseconds, std::function<void()>)>;
    using Random = std::function<std::uint64_t(std::uint64_t bound)>;  ///< Uniform below `bound`.

    FaultyStore(core::Store& inner, Later later, Random random)
        : inner_(inner), later_(std::move(later)), random_(std::move(random)) {}

    StoreFaults faults;
    bool down = false;  ///< Every batch is refused, scans fail.
    /// Decides the fate of a batch instead of chance; nullopt: chance decides.
    std::function<std::optional<Fate>(const std::vector<core::Item>&)> script;
    /// Told each batch's fate when it is submitted, and each item that was applied, with its
    /// result.
    std::function<void(const std::vector<core::Item>&, Fate)> on_submit;
    std::function<void(const core::Item&, const base::Result<core::Decided>&, Fate)> on_applied;
    /// What answering_since() says: when an outage ended.
    base::SteadyTime answering = base::SteadyTime::min();
    [[nodiscard]] base::SteadyTime answering_since() const override { return answering; }
    /// Added to what now() says: this process's idea of the store's clock.
    microseconds skew{0};

    void submit(std::vector<core::Item> items, core::BatchDone done) override {
        const Fate fate = choose(items);
        if (on_submit) on_submit(items, fate);
        const std::size_t n = items.size();
        const microseconds arrival = arrival_after();
        switch (fate) {
            case Fate::serve:
                later_(arrival,
                       [this, fate, items = std::move(items), done = std::move(done)]() mutable {
                           apply(std::move(items), fate,
                                 [this, done = std::move(done)](core::BatchResults results) {
                                     reply(latency(), done, std::move(results));
                                 });
                       });
                return;
            case Fate::refuse:
                reply(latency(), done, failed(n, base::Applied::no));
                return;
            case Fate::drop:
                reply(unanswered(), done, failed(n, base::Applied::unknown));
                return;
            case Fate::lose_reply:
                later_(arrival, [this, fate, items = std::move(items)]() mutable {
                    apply(std::move(items), fate, [](auto&&) {});
                });
                reply(arrival + unanswered(), done, failed(n, base::Applied::unknown));
                return;
            case Fate::execute_late:
                reply(latency(), done, failed(n, base::Applied::unknown));
                later_(microseconds(random_(
                           static_cast<std::uint64_t>(microseconds(faults.late_max).count()))),
                       [this, fate, items = std::move(items)]() mutable {
                           apply(std::move(items), fate, [](auto&&) {});
                       });
                return;
            case Fate::delay_reply:
                later_(arrival,
                       [this, fate, items = std::move(items), done = std::move(done)]() mutable {
                           apply(std::move(items), fate,
                                 [this, done = std::move(done)](core::BatchResults results) {
                                     reply(between(faults.late_reply_min, faults.late_max), done,
                                           std::move(results));
                                 });
                       });
                return;
            case Fate::repeat: {
                const bool acquires =
                    std::any_of(items.begin(), items.end(), [](const core::Item& item) {
                        return std::holds_alternative<core::Acquire>(item.operation);
                    });
                later_(arrival, [this, fate, acquires, items = std::move(items),
                                 done = std::move(done)]() mutable {
                    auto again = items;
                    apply(std::move(items), fate, [&](core::BatchResults results) {
                        if (!acquires) reply(latency(), done, std::move(results));
                    });
                    if (acquires) {
                        apply(std::move(again), fate, [&](core::BatchResults results) {
                            reply(latency(), done, std::move(results));
                        });
                        return;
                    }
                    later_(between(milliseconds{0}, faults.late_max),
                           [this, fate, again = std::move(again)]() mutable {
                               apply(std::move(again), fate, [](auto&&) {});
                           });
                });
                return;
            }
        }
    }

    base::Result<core::ScanPage> scan(const core::ScanFilter& filter, const std::string& cursor,
                                      std::size_t limit) override {
        if (down) return unavailable(base::Applied::no);
        return inner_.scan(filter, cursor, limit);
    }
    base::Result<std::size_t> purge(std::size_t limit) override {
        if (down) return unavailable(base::Applied::no);
        return inner_.purge(limit);
    }
    [[nodiscard]] core::StoreTime now() const override { return inner_.now() + skew; }
    [[nodiscard]] core::Durability durability() const override { return inner_.durability(); }
    base::Result<void> health() override {
        if (down) return unavailable(base::Applied::no);
        return inner_.health();
    }
    /// Others may use the inner store: it goes on.
    void stop() override {}

  private:
    static base::Error unavailable(base::Applied applied) {
        return {.code = base::ErrorCode::store_unavailable,
                .applied = applied,
                .detail = "injected fault"};
    }
    static core::BatchResults failed(std::size_t n, base::Applied applied) {
        core::BatchResults results;
        for (std::size_t i = 0; i < n; ++i) results.emplace_back(unavailable(applied));
        return results;
    }

    Fate choose(const std::vector<core::Item>& items) {
        if (script) {
            if (const auto fate = script(items)) return *fate;
        }
        if (down) return Fate::refuse;
        auto dice = static_cast<unsigned>(random_(10'000));
        const std::pair<Fate, unsigned> chances[] = {
            {Fate::refuse, faults.refuse},           {Fate::drop, faults.drop},
            {Fate::lose_reply, faults.lose_reply},   {Fate::execute_late, faults.execute_late},
            {Fate::delay_reply, faults.delay_reply}, {Fate::repeat, faults.repeat}};
        for (const auto& [fate, chance] : chances) {
            if (dice < chance) return fate;
            dice -= chance;
        }
        return Fate::serve;
    }

    microseconds between(microseconds low, microseconds high) {
        return low + microseconds(random_(static_cast<std::uint64_t>(
                         std::max<std::int64_t>((high - low).count(), 1))));
    }
    microseconds latency() { return between(faults.latency_min, faults.latency_max); }
    /// A caller learns soon (a reset), or only by its own time-out.
    microseconds unanswered() {
        return random_(2) == 0 ? latency() : microseconds(std::chrono::seconds{30});
    }
    /// Batches of one process arrive in order: their delays only grow within a moment. Late ones
    /// are the exception.
    microseconds arrival_after() {
        const microseconds drawn = latency();
        const core::StoreTime at = std::max(inner_.now() + drawn, last_arrival_);
        last_arrival_ = at;
        return at - inner_.now();
    }

    void apply(std::vector<core::Item> items, Fate fate,
               const std::function<void(core::BatchResults)>& then) {
        std::vector<core::Item> seen;
        if (on_applied) seen = items;
        inner_.submit(std::move(items), [&](core::BatchResults results) {
            for (std::size_t i = 0; i < seen.size(); ++i) on_applied(seen[i], results[i], fate);
            then(std::move(results));
        });
    }
    void reply(microseconds after, const core::BatchDone& done, core::BatchResults results) {
        // std::function wants copyable captures.
        auto shared = std::make_shared<core::BatchResults>(std::move(results));
        later_(after, [done, shared] { done(std::move(*shared)); });
    }

    core::Store& inner_;
    Later later_;
    Random random_;
    core::StoreTime last_arrival_;
};

}  // namespace semel::support
