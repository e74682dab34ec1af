// Seeded random numbers whose sequence is the same on every machine.
#pragma once

#include <chrono>
#include <cstdint>

namespace semel::sim {

/// splitmix64.
class Rng {
  public:
    explicit Rng(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
    std::uint64_t next() {
        std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
    /// Uniform below `bound` (at least 1).
    std::uint64_t below(std::uint64_t bound) { return next() % bound; }
    /// True in `chance` of `of` cases.
    bool one_in(std::uint64_t of) { return below(of) == 0; }
    bool percent(unsigned chance) { return below(100) < chance; }
    std::chrono::microseconds between(std::chrono::microseconds low,
                                      std::chrono::microseconds high) {
        return low + std::chrono::microseconds(
                         below(static_cast<std::uint64_t>((high - low).count()) + 1));
    }

  private:
    std::uint64_t state_;
};

}  // namespace semel::sim
