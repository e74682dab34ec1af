#include "linearizability/lossy_store.hpp"

#include <mutex>
#include <optional>
#include <utility>

#include "sim/rng.hpp"

namespace semel::linearizability {
namespace {

using namespace core;

class LossyStore final : public Store {
  public:
    LossyStore(std::unique_ptr<Store> inner, std::uint64_t seed)
        : inner_(std::move(inner)), rng_(seed) {}

    void submit(std::vector<Item> items, BatchDone done) override {
        std::optional<std::vector<Item>> overdue;
        std::uint64_t fate = 0;
        {
            const std::lock_guard lock(mutex_);
            fate = rng_.below(36);
            if (!late_.empty() && rng_.one_in(8)) {
                overdue = std::move(late_.back());
                late_.pop_back();
            }
            if (fate == 0) late_.push_back(items);
        }
        const auto forget = [](const BatchResults&) {};
        if (overdue) inner_->submit(std::move(*overdue), forget);
        if (fate > 2) return inner_->submit(std::move(items), std::move(done));
        const std::size_t n = items.size();
        if (fate == 1) inner_->submit(std::move(items), forget);
        BatchResults results;
        for (std::size_t i = 0; i < n; ++i) {
            results.emplace_back(base::Error{.code = base::ErrorCode::store_unavailable,
                                             .applied = base::Applied::unknown,
                                             .detail = "lossy: the reply was lost on purpose"});
        }
        done(std::move(results));
    }
    base::Result<ScanPage> scan(const ScanFilter& filter, const std::string& cursor,
                                std::size_t limit) override {
        return inner_->scan(filter, cursor, limit);
    }
    base::Result<std::size_t> purge(std::size_t limit) override { return inner_->purge(limit); }
    [[nodiscard]] StoreTime now() const override { return inner_->now(); }
    [[nodiscard]] Durability durability() const override { return inner_->durability(); }
    base::Result<void> health() override { return inner_->health(); }
    void stop() override { inner_->stop(); }

  private:
    std::unique_ptr<Store> inner_;
    std::mutex mutex_;  // guards both below
    sim::Rng rng_;
    std::vector<std::vector<Item>> late_;
};

}  // namespace

std::unique_ptr<Store> make_lossy_store(std::unique_ptr<Store> inner, std::uint64_t seed) {
    return std::make_unique<LossyStore>(std::move(inner), seed);
}

}  // namespace semel::linearizability
