#include "engine/hot_records.hpp"

#include <atomic>
#include <list>
#include <mutex>
#include <unordered_map>

namespace semel::engine {
namespace {

/// Map node, list node, record and its strings besides the body, as the resident set grows by them.
constexpr std::size_t bookkeeping_bytes = 1280;
/// A body above this part of a stripe would push out too many others.
constexpr std::size_t body_part_max = 8;

std::size_t size_of(const core::Record& record) {
    return bookkeeping_bytes + record.answer->body->size();
}

}  // namespace

struct HotRecords::Stripe {
    struct Entry {
        core::StoredKey key;
        core::RecordPtr record;
        std::size_t bytes = 0;
    };
    using Order = std::list<Entry>;

    void drop(Order::iterator where) {
        bytes -= where->bytes;
        by_key.erase(where->key);
        order.erase(where);
    }

    mutable std::mutex mutex;
    Order order;  ///< Most recently used first.
    std::unordered_map<core::StoredKey, Order::iterator, base::DigestHash> by_key;
    std::size_t bytes = 0;
};

HotRecords::HotRecords(std::size_t max_bytes)
    : stripes_(std::make_unique<Stripe[]>(stripe_count)),
      stripe_max_bytes_(max_bytes / stripe_count) {}
HotRecords::~HotRecords() = default;

namespace {
/// Not the bytes that the hash tables take.
std::size_t stripe_of(const core::StoredKey& key, std::size_t count) {
    return key.bytes.back() % count;
}
}  // namespace

void HotRecords::put(const core::StoredKey& key, core::RecordPtr record) {
    const bool keeps = record && record->status == core::Status::completed && record->answer &&
                       record->answer->body;
    if (!keeps || record->answer->body->size() > stripe_max_bytes_ / body_part_max) return;
    const std::size_t size = size_of(*record);
    if (size > stripe_max_bytes_) return;
    Stripe& stripe = stripes_[stripe_of(key, stripe_count)];
    const std::lock_guard lock(stripe.mutex);
    if (const auto found = stripe.by_key.find(key); found != stripe.by_key.end())
        stripe.drop(found->second);
    stripe.order.push_front({key, std::move(record), size});
    stripe.by_key.emplace(key, stripe.order.begin());
    stripe.bytes += size;
    while (stripe.bytes > stripe_max_bytes_) stripe.drop(std::prev(stripe.order.end()));
}

core::RecordPtr HotRecords::find(const core::StoredKey& key, core::StoreTime now) {
    Stripe& stripe = stripes_[stripe_of(key, stripe_count)];
    const std::lock_guard lock(stripe.mutex);
    const auto found = stripe.by_key.find(key);
    if (found == stripe.by_key.end()) return nullptr;
    if (found->second->record->expires <= now) {
        stripe.drop(found->second);
        return nullptr;
    }
    stripe.order.splice(stripe.order.begin(), stripe.order, found->second);
    return found->second->record;
}

void HotRecords::erase(const core::StoredKey& key) {
    Stripe& stripe = stripes_[stripe_of(key, stripe_count)];
    const std::lock_guard lock(stripe.mutex);
    if (const auto found = stripe.by_key.find(key); found != stripe.by_key.end())
        stripe.drop(found->second);
}

void HotRecords::clear() {
    for (std::size_t i = 0; i < stripe_count; ++i) {
        const std::lock_guard lock(stripes_[i].mutex);
        stripes_[i].order.clear();
        stripes_[i].by_key.clear();
        stripes_[i].bytes = 0;
    }
}

std::size_t HotRecords::bytes() const {
    std::size_t sum = 0;
    for (std::size_t i = 0; i < stripe_count; ++i) {
        const std::lock_guard lock(stripes_[i].mutex);
        sum += stripes_[i].bytes;
    }
    return sum;
}

}  // namespace semel::engine
