#include "consumer/retry.hpp"

#include <algorithm>
#include <cmath>

namespace semel::consumer {
namespace {

/// Before jitter. `failed` is at least 1 and below runs().
milliseconds planned(const RetryRules& rules, std::uint32_t failed) {
    if (failed >= rules.attempts) return rules.delays[failed - rules.attempts];
    const double grown = static_cast<double>(rules.initial.count()) *
                         std::pow(std::max(rules.factor, 1.0), static_cast<double>(failed - 1));
    // Compared as doubles: a large power does not fit the integer.
    if (grown >= static_cast<double>(rules.max.count())) return rules.max;
    return milliseconds{static_cast<std::int64_t>(grown)};
}

milliseconds scaled(milliseconds wait, double by) {
    return milliseconds{std::max<std::int64_t>(
        static_cast<std::int64_t>(static_cast<double>(wait.count()) * by), 0)};
}

}  // namespace

std::optional<milliseconds> RetryRules::wait_after(std::uint32_t failed, milliseconds asked,
                                                   double random) const {
    if (failed >= runs()) return std::nullopt;
    const double by =
        exact_delays && failed >= attempts ? 1.0 : 1.0 + jitter * (2.0 * random - 1.0);
    return std::max(scaled(planned(*this, std::max(failed, 1U)), by), std::min(asked, max));
}

std::optional<std::size_t> RetryRules::delay_after(std::uint32_t failed) const {
    if (failed < attempts || failed >= runs()) return std::nullopt;
    return failed - attempts;
}

milliseconds RetryRules::longest() const {
    milliseconds sum{0};
    for (std::uint32_t failed = 1; failed < runs(); ++failed) {
        // A handler may ask for `max` each time.
        sum += std::max(scaled(planned(*this, failed), 1.0 + jitter), max);
    }
    return sum;
}

}  // namespace semel::consumer
