#include "consumer/parking.hpp"

#include <utility>

#include "base/assert.hpp"

namespace semel::consumer {
namespace {

/// First byte of what encode_parked makes.
constexpr char parked_format = 1;
constexpr std::uint8_t has_key = 1, has_value = 2, has_timestamp = 4;
constexpr std::uint32_t page = 500;

void put_number(std::string& out, std::uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

void put_text(std::string& out, std::string_view text) {
    put_number(out, text.size(), 4);
    out += text;
}

/// Reads within bounds; after the first mistake nothing but zeros.
class Reader {
  public:
    explicit Reader(std::string_view bytes) : rest_(bytes) {}
    [[nodiscard]] bool ok() const { return ok_; }
    [[nodiscard]] bool at_end() const { return rest_.empty(); }
    [[nodiscard]] std::size_t left() const { return rest_.size(); }
    std::uint64_t number(std::size_t bytes) {
        const std::string_view raw = take(bytes);
        std::uint64_t value = 0;
        for (std::size_t i = 0; i < raw.size(); ++i)
            value |= std::uint64_t{static_cast<std::uint8_t>(raw[i])} << (8 * i);
        return value;
    }
    std::string_view text() { return take(number(4)); }

  private:
    std::string_view take(std::size_t size) {
        if (size > rest_.size()) ok_ = false;
        if (!ok_) return {};
        const std::string_view out = rest_.substr(0, size);
        rest_.remove_prefix(size);
        return out;
    }

    std::string_view rest_;
    bool ok_ = true;
};

/// Of the one key that this deployment's secret gives.
constexpr std::uint64_t key_id = 1;

std::string place_bytes(std::uint64_t place) {
    std::string out;
    put_number(out, place, 8);
    return out;
}

std::string sealed(const engine::DataKey& key, const core::StoredKey& list, std::uint64_t place,
                   std::string_view plain) {
    return key.seal(
        {.kind = engine::Place::Kind::message, .of = list, .request_id = place_bytes(place)},
        plain);
}

std::string opened(const engine::DataKey& key, const core::StoredKey& list,
                   const core::ParkedMessage& message) {
    return key
        .open({.kind = engine::Place::Kind::message,
               .of = list,
               .request_id = place_bytes(message.place)},
              message.bytes)
        .value_or(std::string());
}

base::Error not_an_answer() {
    return {.code = base::ErrorCode::store_corrupt,
            .detail = "the store gave an answer of another kind than it was asked for"};
}

}  // namespace

std::string encode_parked(const brokers::Delivery& delivery) {
    std::string out(1, parked_format);
    const unsigned flags = (delivery.key ? has_key : 0u) | (delivery.value ? has_value : 0u) |
                           (delivery.timestamp_ms ? has_timestamp : 0u);
    out.push_back(static_cast<char>(flags));
    if (delivery.timestamp_ms)
        put_number(out, static_cast<std::uint64_t>(*delivery.timestamp_ms), 8);
    if (delivery.key) put_text(out, *delivery.key);
    if (delivery.value) put_text(out, *delivery.value);
    put_number(out, delivery.headers.size(), 4);
    for (const brokers::Header& header : delivery.headers) {
        put_text(out, header.name);
        out.push_back(header.value ? 1 : 0);
        if (header.value) put_text(out, *header.value);
    }
    return out;
}

std::optional<brokers::Delivery> decode_parked(brokers::AssignmentPtr assignment,
                                               std::int64_t place, std::string_view bytes) {
    Reader in(bytes);
    if (in.number(1) != parked_format) return std::nullopt;
    const std::uint64_t flags = in.number(1);
    std::optional<std::int64_t> timestamp;
    if ((flags & has_timestamp) != 0) timestamp = static_cast<std::int64_t>(in.number(8));
    std::optional<std::string_view> key, value;
    if ((flags & has_key) != 0) key = in.text();
    if ((flags & has_value) != 0) value = in.text();
    const std::uint64_t count = in.number(4);
    std::vector<brokers::Header> headers;
    // A header has five bytes at least: a count that cannot be true allocates nothing.
    if (count > in.left() / 5) return std::nullopt;
    headers.reserve(count);
    for (std::uint64_t i = 0; i < count && in.ok(); ++i) {
        brokers::Header& header = headers.emplace_back();
        header.name = in.text();
        if (in.number(1) != 0) header.value = in.text();
    }
    if (!in.ok() || !in.at_end()) return std::nullopt;
    brokers::Delivery out = brokers::make_delivery(
        {.assignment = std::move(assignment), .position = place}, key, value, headers);
    out.timestamp_ms = timestamp;
    return out;
}

// ---------------------------------------------------------------- lists

/// All of a list, page by page.
struct Parking::Listing {
    core::StoredKey list;
    engine::DataKeyPtr key;
    std::vector<core::ParkedMessage> found;
    Opened done;
};

Parking::Parking(core::Store& store, const base::Hmac& secret, std::string scope)
    : store_(store),
      secret_(secret),
      scope_(std::move(scope)),
      key_(std::make_shared<engine::DataKey>(core::TenantTag{}, key_id,
                                             secret("the key of parked messages").view())) {}

core::StoredKey Parking::list_of(const brokers::Partition& partition) const {
    std::string name = "parked messages";
    put_text(name, scope_);
    put_text(name, partition.topic);
    put_number(name, static_cast<std::uint64_t>(partition.number), 8);
    return secret_(name);
}

void Parking::open(const brokers::Partition& partition, const core::Nonce& fence, Opened done) {
    auto listing = std::make_shared<Listing>();
    listing->list = list_of(partition);
    listing->key = key_;
    listing->done = std::move(done);
    store_.submit({{listing->list, core::OpenParking{fence}}},
                  [&store = store_, listing](core::BatchResults results) {
                      if (!results.at(0)) return listing->done(results.at(0).error());
                      if (!std::holds_alternative<core::ParkingOpened>(results.at(0)->outcome))
                          return listing->done(not_an_answer());
                      read(store, listing);
                  });
}

void Parking::read(core::Store& store, std::shared_ptr<Listing> listing) {
    const std::uint64_t from = listing->found.empty() ? 0 : listing->found.back().place + 1;
    const core::StoredKey list = listing->list;
    store.submit({{list, core::GetParked{.from = from, .limit = page}}},
                 [&store, listing = std::move(listing)](core::BatchResults results) {
                     if (!results.at(0)) return listing->done(results.at(0).error());
                     auto* const got = std::get_if<core::ParkedFound>(&results.at(0)->outcome);
                     if (got == nullptr) return listing->done(not_an_answer());
                     const bool last = got->messages.size() < page;
                     for (core::ParkedMessage& one : got->messages) {
                         one.bytes = opened(*listing->key, listing->list, one);
                         listing->found.push_back(std::move(one));
                     }
                     if (last) return listing->done(std::move(listing->found));
                     read(store, listing);
                 });
}

void Parking::put(const brokers::Partition& partition, const core::Nonce& fence,
                  const std::vector<const brokers::Delivery*>& deliveries, PutDone done) {
    const core::StoredKey list = list_of(partition);
    std::vector<core::Item> items;
    items.reserve(deliveries.size());
    for (const brokers::Delivery* const one : deliveries) {
        const auto place = static_cast<std::uint64_t>(one->position());
        items.push_back(
            {list, core::Park{.fence = fence,
                              .place = place,
                              .bytes = sealed(*key_, list, place, encode_parked(*one))}});
    }
    store_.submit(std::move(items), [done = std::move(done)](const core::BatchResults& results) {
        std::vector<base::Result<Put>> out;
        out.reserve(results.size());
        for (const auto& result : results) {
            if (!result) {
                out.emplace_back(result.error());
            } else if (std::holds_alternative<core::Parked>(result->outcome)) {
                out.emplace_back(Put::stored);
            } else if (std::holds_alternative<core::ParkingLost>(result->outcome)) {
                out.emplace_back(Put::lost);
            } else {
                out.emplace_back(not_an_answer());
            }
        }
        done(std::move(out));
    });
}

void Parking::take_out(const brokers::Partition& partition, const std::vector<std::int64_t>& places,
                       TakenOut done) {
    const core::StoredKey list = list_of(partition);
    std::vector<core::Item> items;
    items.reserve(places.size());
    for (const std::int64_t place : places)
        items.push_back({list, core::Unpark{static_cast<std::uint64_t>(place)}});
    store_.submit(std::move(items), [done = std::move(done)](const core::BatchResults& results) {
        for (const auto& result : results) {
            if (!result) return done(result.error());
        }
        done({});
    });
}

}  // namespace semel::consumer
