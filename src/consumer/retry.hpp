// When a failed message is due again, and when it is given up.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace semel::consumer {

using std::chrono::milliseconds;

struct RetryRules {
    std::uint32_t attempts = 3;  ///< Runs in place, the first included.
    std::uint32_t crashes = 5;
    milliseconds initial{1000};
    double factor = 2.0;
    milliseconds max{60'000};
    double jitter = 0.2;  ///< Each wait is shortened or lengthened by at most this share.
    std::vector<milliseconds> delays;
    bool exact_delays = false;  ///< No jitter in `delays`: what waits for one stays in its order.

    /// Runs before the message is given up.
    [[nodiscard]] std::uint32_t runs() const {
        return attempts + static_cast<std::uint32_t>(delays.size());
    }
    /// The wait after the `failed`-th failed run (from 1); nullopt: given up. `asked`: what the
    /// handler asked for (0: nothing), which may lengthen a wait up to `max` but not shorten it
    /// below nothing. `random`: from [0, 1).
    [[nodiscard]] std::optional<milliseconds> wait_after(std::uint32_t failed, milliseconds asked,
                                                         double random) const;
    /// Which of `delays` the wait after the `failed`-th failed run is, from 0; nullopt: none.
    [[nodiscard]] std::optional<std::size_t> delay_after(std::uint32_t failed) const;
    /// The longest that all runs of one message can be apart, together.
    [[nodiscard]] milliseconds longest() const;
};

}  // namespace semel::consumer
