#include "cli/consumers.hpp"

#include <thread>

#include "cli/one_consumer.hpp"

namespace semel::cli {

Consumers::Consumers(ConsumersAround around)
    : around_(std::move(around)),
      own_stores_(std::make_unique<OwnStores>(around_.config, around_.leaves, around_.owner,
                                              around_.metrics)) {
    around_.own_stores = own_stores_.get();
    for (const config::ConsumerConfig& consumer : around_.config.consumers)
        all_.push_back(std::make_unique<OneConsumer>(around_, consumer));
}

Consumers::~Consumers() = default;

base::Result<void> Consumers::prepare() {
    if (auto opened = own_stores_->open(around_.accept_clock); !opened) return opened;
    for (const auto& one : all_) one->prepare();
    base::Result<void> first;
    for (const auto& one : all_) {
        auto looked = one->looked_at();
        if (first && !looked) first = looked;
    }
    return first;
}

void Consumers::start() {
    for (const auto& one : all_) one->start();
}

void Consumers::stop() {
    std::vector<std::thread> threads;
    threads.reserve(all_.size());
    for (const auto& one : all_) threads.emplace_back([&one] { one->stop(); });
    for (std::thread& thread : threads) thread.join();
    own_stores_->stop();
}

std::vector<std::string> Consumers::not_alive() const {
    std::vector<std::string> reasons;
    for (const auto& one : all_) {
        if (auto reason = one->not_alive()) reasons.push_back(std::move(*reason));
    }
    return reasons;
}

OneConsumer* Consumers::find(const std::string& name) {
    for (const auto& one : all_) {
        if (one->name() == name) return one.get();
    }
    return nullptr;
}

admin::ConsumerControls Consumers::controls() {
    admin::ConsumerControls out;
    out.list = [this] {
        std::vector<admin::ConsumerView> views;
        for (const auto& one : all_) views.push_back(one->view());
        return views;
    };
    out.lag = [this](const std::string& name) -> std::optional<base::Result<admin::ConsumerLags>> {
        OneConsumer* const one = find(name);
        if (one == nullptr) return std::nullopt;
        return one->lag();
    };
    out.tell = [this](const std::string& name, admin::ConsumerCommand command,
                      const std::string& reason) -> std::optional<base::Result<void>> {
        OneConsumer* const one = find(name);
        if (one == nullptr) return std::nullopt;
        return one->tell(command, reason);
    };
    return out;
}

}  // namespace semel::cli
