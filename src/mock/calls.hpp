// Calls: what the pretended upstream was asked, counted per body, so that "paid once" can be
// proved.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/hash.hpp"
#include "http/message.hpp"

namespace semel::mock {

/// Bodies are remembered up to these; what comes beyond is counted in the total and as `not_kept`
/// only.
inline constexpr std::size_t kept_bytes_max = 64 * 1024 * 1024;
inline constexpr std::size_t kept_bodies_max = 50'000;
/// The part of one body that `contains` looks at.
inline constexpr std::size_t kept_body_max = 1024 * 1024;
/// Call numbers listed for one body; all are counted.
inline constexpr std::size_t kept_numbers_max = 1000;

/// Thread-safe.
class Calls {
  public:
    /// Counts one paid call and says its number, from 1. `body`: as much of it as was kept;
    /// `digest` is of all of it.
    std::uint64_t add(const http::RequestHead& head, std::string_view model, std::string_view body,
                      const base::Digest& digest);
    /// How often `model` was called, this call included. Used by fail-N-then-ok.
    std::uint64_t count_of_model(std::string_view model);
    /// Calls whose body contains `contains` and, if given, whose model is `model`. Both empty: all
    /// calls.
    [[nodiscard]] std::uint64_t count(std::string_view contains, std::string_view model) const;
    /// {"total": n, "not_kept": n, "by_body": [{"sha256", "count", "model", "path", "numbers":
    /// [...], "headers": {...}}]}
    [[nodiscard]] std::string json(std::string_view contains, std::string_view model) const;
    void reset();

  private:
    struct Entry {
        std::string path;
        std::string model;
        std::string body;
        base::Digest digest;
        std::string headers;  ///< Of the last call, as lines.
        std::uint64_t count = 0;
        std::vector<std::uint64_t> numbers;
    };
    [[nodiscard]] static bool matches(const Entry& entry, std::string_view contains,
                                      std::string_view model);

    mutable std::mutex mutex_;
    std::uint64_t total_ = 0;
    std::uint64_t not_kept_ = 0;
    std::size_t kept_bytes_ = 0;
    std::vector<Entry> entries_;
    std::unordered_map<std::string, std::size_t>
        by_body_;  ///< Digest and path to its place in entries_.
    std::map<std::string, std::uint64_t, std::less<>> by_model_;
};

}  // namespace semel::mock
