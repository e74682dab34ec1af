// The contract suite: one set of tests that every store passes unchanged. A store instantiates it
// in its own file:
//
//     INSTANTIATE_TEST_SUITE_P(Memory, StoreContract, testing::Values(memory_factory()),
//     contract::test_name);
//
// and links semel_store_contract (store_contract.cpp, parking_contract.cpp), which holds the tests.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>

#include "core/store.hpp"
#include "support/manual_clock.hpp"

namespace semel::contract {

/// Where one test's store keeps its data (a directory, a schema, nothing). Made fresh and empty for
/// each test; destroyed after the store, cleans up behind itself.
class StorePlace {
  public:
    virtual ~StorePlace() = default;
    /// Opens the store of this place on `clock`. Called again only after the former store was
    /// stopped and destroyed, and only if the factory says `reopenable`: then it must find what was
    /// there. Fails the test by throwing.
    virtual std::unique_ptr<core::Store> open(base::Clock& clock) = 0;
};

struct StoreFactory {
    std::string name;  ///< Letters and digits.
    std::function<std::unique_ptr<StorePlace>()> make_place;
    bool reopenable = false;  ///< Records survive stop and open.
    /// After a reopen every lease is dead (an embedded store, whose leases live in memory).
    bool reopen_kills_leases = false;
    /// Records move between servers while they are listed: one may be missed or seen twice.
    bool records_move = false;
};

/// For gtest's name generator.
inline std::string test_name(const testing::TestParamInfo<StoreFactory>& info) {
    return info.param.name;
}
/// Keeps gtest from printing the bytes of a factory.
inline void PrintTo(const StoreFactory& factory, std::ostream* out) { *out << factory.name; }

}  // namespace semel::contract

/// The fixture: one place, one clock, one open store, and the words in which the tests tell an
/// intent's story. The intent is `k`, claimed under `policy`; owners are told apart by a number,
/// which is their nonce and part of their name.
class StoreContract : public testing::TestWithParam<semel::contract::StoreFactory> {
  protected:
    using Asked = semel::base::Result<semel::core::Decided>;

    StoreContract();
    ~StoreContract() override;

    /// Submits one operation and waits for its result. Any thread.
    Asked ask(const semel::core::StoredKey& key, semel::core::StoreOperation operation);
    /// Submits a batch and waits for all results. Any thread.
    semel::core::BatchResults submit(std::vector<semel::core::Item> items);
    /// Stops, destroys and opens the store again. Only if the factory is reopenable.
    void reopen();

    [[nodiscard]] semel::core::Acquire claim(std::uint8_t owner,
                                             const std::string& text = "body") const;
    /// An acquire that must be granted.
    semel::core::Granted grant(std::uint8_t owner);
    semel::core::RecordPtr state();
    semel::core::Status status();
    Asked complete(const semel::core::Granted& granted, std::uint8_t owner,
                   const std::string& text = "the answer");
    Asked fail(const semel::core::Granted& granted, std::uint8_t owner,
               semel::core::Certainty certainty, const std::string& code = "upstream-reset");
    /// Tries everything that only an owner may do: each must be Fenced and change nothing.
    void expect_powerless(semel::core::FencingToken token, const semel::core::Nonce& nonce);

    /// A turn of the conversation `talk`.
    [[nodiscard]] semel::core::Append turn(const std::string& id,
                                           const std::string& says = "hello") const;
    /// The same before its answer is known, for `said`.
    [[nodiscard]] std::shared_ptr<const semel::core::Append> pending_turn(
        const std::string& id, const std::string& says) const;
    /// A whole turn under a key of its own: claimed, completed, appended.
    Asked take_turn(const std::string& id);
    std::vector<semel::core::Turn> turns(semel::core::GetTurns what);

    /// `count` records are purged, and then there is nothing to purge. Several calls: one may miss what moves between servers
    /// at that moment.
    void purge_all(std::size_t count);

    semel::support::ManualClock clock;
    std::unique_ptr<semel::contract::StorePlace> place;
    std::unique_ptr<semel::core::Store> store;
    semel::core::StoredKey k;
    semel::core::StoredKey talk;
    semel::core::Policy policy;
    std::shared_ptr<const semel::core::Append> said;  ///< What claims bring along.
};
