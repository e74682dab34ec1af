#include "core/record.hpp"

namespace semel::core {

bool undecided(const Record& record) {
    switch (record.status) {
        case Status::processing:
        case Status::unknown:
            return true;
        case Status::failed:
            return !record.final && record.policy.kind == IntentKind::message;
        case Status::dead:
            return record.policy.kind == IntentKind::message && !record.letter_published;
        case Status::completed:
            return false;
    }
    return true;
}

const char* contradiction(const Record& record) {
    constexpr std::uint64_t token_limit = std::uint64_t{1} << 53;
    if (record.token.value >= token_limit) return "the token is above 2^53";
    // Some centuries: what is added to a time must not leave its range.
    constexpr milliseconds retention_limit{std::int64_t{1} << 45};
    for (const milliseconds retention :
         {record.policy.retention_completed, record.policy.retention_failed,
          record.policy.retention_dead}) {
        if (retention < milliseconds{0} || retention > retention_limit)
            return "a retention is below zero or beyond a thousand years";
    }
    if (record.uncharged_attempts > record.attempt)
        return "more attempts are uncharged than there were";
    if (record.final && record.status != Status::failed) return "final, but not FAILED";
    if (record.turn && (record.final || record.status == Status::completed))
        return "decided, but its turn is still kept";
    if (undecided(record) && record.expires.us != 0) return "undecided, but it expires";
    return nullptr;
}

}  // namespace semel::core
