// Parking: messages that wait long, and those behind them in their lanes, lie beside the records
// while they wait, so that the position at the broker may pass them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/hash.hpp"
#include "base/result.hpp"
#include "brokers/delivery.hpp"
#include "core/store.hpp"
#include "engine/sealing.hpp"

namespace semel::consumer {

/// A delivery with its key, value, headers and timestamp, as bytes; its place is kept apart. Not
/// for RabbitMQ: properties are left out.
std::string encode_parked(const brokers::Delivery& delivery);
/// As if it were delivered from `place` of the assignment's partition; nullopt: not such bytes.
std::optional<brokers::Delivery> decode_parked(brokers::AssignmentPtr assignment,
                                               std::int64_t place, std::string_view bytes);

/// The lists of one consumer, one for each partition, in the order of their offsets. Stateless but
/// for its names: thread-safe. Every `done` is called once, on any thread, also before the call
/// returns.
class Parking {
  public:
    enum class Put : std::uint8_t {
        stored,
        lost,  ///< Another member has taken the partition's list over.
    };
    using Opened = std::function<void(base::Result<std::vector<core::ParkedMessage>>)>;
    using PutDone = std::function<void(std::vector<base::Result<Put>>)>;
    using TakenOut = std::function<void(base::Result<void>)>;

    /// Lists are named by HMAC(scope, partition) under the deployment's secret, and their messages
    /// are sealed under a key that is made from it. Both outlive it.
    Parking(core::Store& store, const base::Hmac& secret, std::string scope);

    /// Takes the partition's list over with `fence`, then reads all of it. A message that was
    /// sealed under another secret, or is damaged, has no bytes. An Error: ask again.
    void open(const brokers::Partition& partition, const core::Nonce& fence, Opened done);
    /// Puts them there, in their order; who waits for the answer keeps the order over calls too.
    /// One result for each. An Error: it may be there or not.
    void put(const brokers::Partition& partition, const core::Nonce& fence,
             const std::vector<const brokers::Delivery*>& deliveries, PutDone done);
    /// Takes them out; what is not there is no error.
    void take_out(const brokers::Partition& partition, const std::vector<std::int64_t>& places,
                  TakenOut done);

  private:
    struct Listing;
    [[nodiscard]] core::StoredKey list_of(const brokers::Partition& partition) const;
    // It may be read after the parking is gone.
    static void read(core::Store& store, std::shared_ptr<Listing> listing);

    core::Store& store_;
    const base::Hmac& secret_;
    const std::string scope_;
    const engine::DataKeyPtr key_;
};

}  // namespace semel::consumer
