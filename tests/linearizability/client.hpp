// One client of a store: an owner that works, forgets, falls asleep and comes back as a zombie. And
// what all of them share.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core/store.hpp"
#include "sim/rng.hpp"

namespace semel::linearizability {

/// Names under which an owner may act, or by which a person decides.
struct Seen {
    core::FencingToken token;
    core::Nonce nonce;
    std::uint32_t generation = 1;
};

/// What was seen of each key by anybody, newest last. Thread-safe.
class Board {
  public:
    void add(const std::string& key, const Seen& seen);
    /// The newest half of the time, else one of the last few. Zeros if there is none.
    Seen pick(const std::string& key, sim::Rng& rng);

  private:
    static constexpr std::size_t kept = 8;
    std::mutex mutex_;  // guards seen_
    std::map<std::string, std::vector<Seen>> seen_;
};

struct Work {
    std::uint64_t seed = 1;
    std::string salt;           ///< Of the stored keys: those of other runs on the server differ.
    unsigned first_client = 0;  ///< Clients of one history need different numbers.
    unsigned clients = 6;
    unsigned keys = 3;  ///< In use at a time.
    std::chrono::milliseconds duration{1000};
    /// After so long come new keys; a key's operations are one history.
    std::chrono::milliseconds keys_change{150};
};

/// What became of a client's operations.
struct Recorded {
    std::string lines;  ///< The history, one line per operation.
    std::uint64_t operations = 0;
    std::map<std::string, std::uint64_t> errors;  ///< By their detail.
};

/// Asks the store random things from `begin` on until the time is over, and waits for its last
/// answers. Blocks.
Recorded run_client(core::Store& store, Board& board, const Work& work, unsigned client,
                    base::SteadyTime begin);

}  // namespace semel::linearizability
