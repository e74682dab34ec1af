// Planted defects: a store that gets one rule wrong, to see that the checks of a simulation notice.
#pragma once

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "core/store.hpp"

namespace semel::sim {

/// A store that gets one rule wrong. `spoil` may change the item, or answer in the store's place.
class PlantedStore final : public core::Store {
  public:
    using Spoil =
        std::function<std::optional<core::StoreOutcome>(core::Store& truth, core::Item& item)>;
    PlantedStore(core::Store& inner, Spoil spoil) : inner_(inner), spoil_(std::move(spoil)) {}

    void submit(std::vector<core::Item> items, core::BatchDone done) override {
        core::BatchResults results;
        for (core::Item& item : items) {
            if (auto answered = spoil_(inner_, item)) {
                results.emplace_back(core::Decided{std::move(*answered), inner_.now()});
                continue;
            }
            inner_.submit({std::move(item)}, [&](core::BatchResults one) {
                results.push_back(std::move(one.front()));
            });
        }
        done(std::move(results));
    }
    base::Result<core::ScanPage> scan(const core::ScanFilter& filter, const std::string& cursor,
                                      std::size_t limit) override {
        return inner_.scan(filter, cursor, limit);
    }
    base::Result<std::size_t> purge(std::size_t limit) override { return inner_.purge(limit); }
    [[nodiscard]] core::StoreTime now() const override { return inner_.now(); }
    [[nodiscard]] core::Durability durability() const override { return inner_.durability(); }
    base::Result<void> health() override { return inner_.health(); }
    void stop() override {}

  private:
    core::Store& inner_;
    Spoil spoil_;
};

inline core::RecordPtr look(core::Store& store, const core::StoredKey& key) {
    core::RecordPtr record;
    store.submit({core::Item{key, core::Get{}}}, [&](core::BatchResults results) {
        record = std::get<core::Found>(results.front()->outcome).record;
    });
    return record;
}

/// Gives a step the record's present token and nonce: what a store without fencing would do.
template <class Operation>
std::optional<core::StoreOutcome> unfence(core::Store& truth, core::Item& item) {
    if (auto* op = std::get_if<Operation>(&item.operation)) {
        if (const core::RecordPtr record = look(truth, item.key)) {
            op->token = record->token;
            op->nonce = record->nonce;
        }
    }
    return std::nullopt;
}

/// Swallows a step and says that it was done.
template <class Operation>
std::optional<core::StoreOutcome> pretend(core::Store& truth, core::Item& item) {
    if (!std::holds_alternative<Operation>(item.operation)) return std::nullopt;
    return core::Applied{look(truth, item.key)};
}

}  // namespace semel::sim
